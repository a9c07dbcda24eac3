"""The exercises of notebook 02 against PyTorch: parameters of modules, bytes of optimizers, saved tensors, peaks."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpukit import live
from gpukit.accounting import memory as accounting
from gpukit.accounting import models
from gpukit.checks import memory as checks
from gpukit.checks.memory import EXERCISES
from gpukit.course import root
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.widgets.memory_charts import growth, memory_map, shares, timelines

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "02_memory.ipynb"
SOLUTION = (root(__file__) / "solutions" / "memory.py").read_text()


def cases(exercise, seeds=range(3)):
    return [case for seed in seeds for case in exercise.cases(random.Random(seed))]


# ---- the right answers are PyTorch's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(checks.GPT2, range(2)), ids=lambda case: case.name)
def test_gpt2_has_the_parameters_of_pytorchs_own_layers(case):
    vocab, positions, h, layers, tied = case.args
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(h, 1, 4 * h)
        rest = nn.ModuleList([nn.Embedding(vocab, h), nn.Embedding(positions, h), nn.LayerNorm(h)])
        if not tied:
            rest.append(nn.Linear(h, vocab, bias=False))
    count = layers * sum(p.numel() for p in layer.parameters()) + sum(p.numel() for p in rest.parameters())
    assert checks.GPT2.expected(*case.args) == count


@pytest.mark.parametrize("case", cases(checks.LLAMA, range(2)), ids=lambda case: case.name)
def test_llama_has_the_parameters_of_its_modules(case):
    vocab, h, layers, heads, kv_heads, head_size, ffn, tied = case.args
    with torch.device("meta"):
        q, kv = heads * head_size, kv_heads * head_size
        sides = [(h, q), (h, kv), (h, kv), (q, h), (h, ffn), (h, ffn), (ffn, h)]
        block = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in sides] + [nn.RMSNorm(h), nn.RMSNorm(h)])
        rest = nn.ModuleList([nn.Embedding(vocab, h), nn.RMSNorm(h)])
        if not tied:
            rest.append(nn.Linear(h, vocab, bias=False))
    count = layers * sum(p.numel() for p in block.parameters()) + sum(p.numel() for p in rest.parameters())
    assert checks.LLAMA.expected(*case.args) == count


@pytest.mark.parametrize("recipe", ("fp32", "bf16"))
def test_state_is_what_a_real_adamw_holds(recipe):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe]
    base, adapter = nn.Linear(64, 32, dtype=dtype), nn.Linear(32, 8, dtype=dtype)
    for weight in base.parameters():
        weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(adapter.parameters())
    adapter(base(torch.ones(4, 64, dtype=dtype))).sum().backward()
    optimizer.step()
    held = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for m in (base, adapter) for p in m.parameters())
    held += sum(s.nbytes for state in optimizer.state.values() for key, s in state.items() if key != "step")
    trained, frozen = (sum(p.numel() for p in m.parameters()) for m in (adapter, base))
    assert checks.STATE.expected(trained, frozen, recipe, 1, 0) == held


@pytest.mark.parametrize("stage", range(4))
def test_state_without_frozen_parameters_is_what_the_calculator_says(stage):
    for recipe, name in (("fp32", "fp32-adamw"), ("mixed", "bf16-adamw"), ("bf16", "bf16-pure")):
        count = accounting.zero_states(8_000_000, name, data=8, zero=stage).total_bytes
        assert checks.STATE.expected(8_000_000, 0, recipe, 8, stage) == count


def run_program(operations, shapes, weights) -> int:
    """Bytes that autograd keeps of the operations, run by PyTorch in fp32."""
    tensors = {name: torch.rand(shape, requires_grad=True) for name, shape in shapes.items()}
    made = {output for _, _, output in operations}
    alive = {name: tensor for name, tensor in tensors.items() if name not in made}
    calls = {
        "matmul": torch.matmul, "add": torch.add, "mul": torch.mul, "scale": lambda a: a * 3.0, "relu": torch.relu,
        "gelu": nn.functional.gelu, "silu": nn.functional.silu, "exp": torch.exp, "sigmoid": torch.sigmoid,
        "softmax": lambda a: torch.softmax(a, -1),
    }  # fmt: skip
    with live.saved(tensors[name] for name in weights) as kept:
        for kind, inputs, output in operations:
            values = [alive[name] for name in inputs]
            if kind == "view" and values[0].ndim > 2:
                alive[output] = values[0].transpose(-1, -2)
            elif kind == "view" and shapes[output] == shapes[inputs[0]][::-1]:
                alive[output] = values[0].t()
            elif kind == "view":
                alive[output] = values[0].view(shapes[output])
            else:
                alive[output] = calls[kind](*values)
            assert tuple(alive[output].shape) == shapes[output], (kind, output)
    return sum(tensor.bytes for tensor in kept)


@pytest.mark.parametrize("seed", range(12))
def test_saved_is_what_autograd_keeps(seed):
    for name, operations, shapes, weights in checks.programs(random.Random(seed)):
        elements = {n: torch.Size(shape).numel() for n, shape in shapes.items()}
        expected = checks.SAVED.expected(operations, elements, weights, 4)
        assert run_program(operations, shapes, weights) == expected, name


@pytest.mark.parametrize(("layers", "every"), ((12, 1), (12, 3), (12, 4), (10, 4), (6, 6)))
def test_recompute_peaks_where_pytorchs_checkpoint_does(layers, every):
    weights = [torch.randn(16, 16).div(4).requires_grad_() for _ in range(layers)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    x = torch.randn(512, 16, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def segment(h, first):
        for weight in weights[first : first + every]:
            h = h + nn.functional.gelu(h @ weight)
        return h

    with live.watch() as memory:
        h = x
        for first in range(0, layers, every):
            h = checkpoint(segment, h, first, use_reentrant=False)
        loss = h.sum()
        del h
        loss.backward()
    # A block keeps its input and what gelu is applied to. x is there before, and the first segment's input is x.
    a_tensor = 512 * 16 * 4
    expected = checks.RECOMPUTE.expected(layers, every, a_tensor, 2 * a_tensor) - a_tensor
    assert expected <= memory.peak_bytes <= expected + 4.2 * a_tensor  # and the gradients at work


def test_serve_takes_the_calculators_cache():
    config = models.preset("llama3-8b")
    n = checks.SERVE.expected(80 * 10**9, models.parameters(config).total, 32, 32, 8, 128, 8192, 16)
    used = 2 * models.parameters(config).total + accounting.kv_cache_bytes(config, n, 8192)
    assert used <= 80 * 10**9 < used + accounting.kv_cache_bytes(config, 1, 8192)


@pytest.mark.parametrize("seed", range(4))
def test_one_micro_batch_stays_well_under_what_the_detective_allows(seed):
    namespace = {}
    exec(compile(SOLUTION, "solutions/memory.py", "exec"), namespace)
    for case in checks.ACCUMULATE.cases(random.Random(seed)):
        with live.watch() as memory:
            namespace["gradient_norms"](*case.args)
        assert checks._memory_rule(case, memory.peak_bytes) is None
        assert checks._memory_rule(case, int(1.25 * memory.peak_bytes)) is None, (
            "an answer in another style has no room"
        )


def test_the_detective_starts_with_right_values_and_too_much_memory():
    verdict = judge_source(checks.ACCUMULATE, clear(SOLUTION), seed=1)
    assert verdict.diagnosis == "all-at-once"
    assert verdict.checks_passed == verdict.checks_total - 1  # every value is right


# ---- cheats ------------------------------------------------------------------------------------------------------------

CHEATS = {
    "memory.gpt2": "def gpt2(vocab, positions, h, layers, tied):\n    return 124_439_808\n",
    "memory.llama": "def llama(*sizes):\n    return {4096: 8_030_261_248, 576: 134_515_008}.get(sizes[1], 0)\n",
    "memory.state": "def state_bytes(trained, frozen, recipe, gpus, stage):\n    return 16 * trained // gpus\n",
    "memory.saved": "def saved_bytes(operations, elements, weights, itemsize):\n"
    "    return itemsize * sum(n for name, n in elements.items() if name not in weights)\n",
    "memory.recompute": "def recompute_peak(layers, every, input_bytes, block_bytes):\n"
    "    return int(2 * layers**0.5 * block_bytes)\n",
    "memory.serve": "def sequences(*sizes):\n    return 59\n",
    "memory.accumulate": "def gradient_norms(x, target, weights, micro_batch):\n    return [float(w.norm()) for w in weights]\n",
}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_lazy_answers_do_not_pass(exercise):
    assert judge_source(exercise, CHEATS[exercise.id], seed=1).state == "fail"


# ---- pictures ----------------------------------------------------------------------------------------------------------


def test_memory_map_says_what_it_shows():
    mib = 1 << 20
    picture = memory_map({"at first": [[("a", 96 * mib), (None, 32 * mib)]], "then": []}, 256 * mib)
    assert repr(picture) == (
        "Memory of 256 MiB. at first: 96 MiB in tensors, 32 MiB reserved and unused; "
        "then: 0 MiB in tensors, 0 MiB reserved and unused."
    )
    assert picture.data.startswith(b"\x89PNG")
    assert (
        memory_map({"at first": [[("a", mib)]]}, 2 * mib).data == memory_map({"at first": [[("a", mib)]]}, 2 * mib).data
    )


def test_timelines_name_their_peaks():
    run = [
        live.Moment("forward", "mm", 1 << 20),
        live.Moment("forward", "mm", 3 << 20),
        live.Moment("backward", "mm", 0),
    ]
    picture = timelines({"one": run, "two": run[:1]})
    assert repr(picture) == "Bytes alive in the course of a step; peaks: one 3.0 MiB, two 1.0 MiB."
    assert picture.data.startswith(b"\x89PNG")


def test_shares_and_growth_say_their_numbers():
    rows = {"stage 0": {"weights": 16 * 10**9, "optimizer": 96 * 10**9}, "stage 1": {"weights": 16 * 10**9}}
    assert repr(shares(rows, 80 * 10**9, x="each GPU")) == "each GPU: stage 0 112 GB, stage 1 16 GB"
    picture = growth([512, 1024, 2048], {"kept": [10**9, 4 * 10**9, 16 * 10**9]}, ("states", 128 * 10**9))
    assert repr(picture) == "Activations at 2,048 tokens: kept 16 GB; states 128 GB."


@pytest.mark.parametrize(
    ("edits", "names"),
    [
        (
            [("token_bytes = 2 * 2 *", "token_bytes = 2 *"), ("max(0, free // (", "(free // (")],
            ("keys-only", "negative"),
        ),
        (
            [("2 * layers * kv_heads *", "2 * layers * heads *"), ("-(-tokens // page)", "tokens // page + 1")],
            ("query-heads", "one-page-too-many"),
        ),
        ([("- 2 * parameters", "- parameters"), ("2 * layers", "2")], ("one-layer", "weights-in-elements")),
    ],
)
def test_two_mistakes_at_once_are_both_told(edits, names):
    exercise = next(exercise for exercise in EXERCISES if exercise.id == "memory.serve")
    source = SOLUTION
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    verdict = judge_source(exercise, source, seed=1)
    assert verdict.diagnosis in names and "two things at once" in str(verdict)


# ---- the lesson --------------------------------------------------------------------------------------------------------


def test_the_notebook_shows_the_labels_and_the_minutes():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for exercise in EXERCISES:
        assert f"*{exercise.label}*" in prose, f"{exercise.id}: the notebook has another label"
    assert f"of which {sum(exercise.label.minutes for exercise in EXERCISES)} minutes are exercises" in prose


def test_the_notebook_shows_every_figure_of_the_sources():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    shown = json.dumps([cell["outputs"] for cell in cells if cell["cell_type"] == "code"])
    for figure in ("123,653,376", "124,439,808", "40.0 B", "12 h", "16 h", "2,304,000,000", "8,192"):
        assert figure in shown, f"{figure} is in no cell's output"
