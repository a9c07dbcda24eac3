"""`gpukit trace`: inputs without memory, files of one's own, what is printed and drawn, and what is refused."""

import io
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import gpukit
from gpukit import benchmark, cli, hardware, trace_page, trace_report
from gpukit.simulator.prediction.predict import SAMPLE

H200 = hardware.gpu("h200")


def predicted(op, shape, dtype=torch.bfloat16, gpu=H200):
    return trace_report.predict_op(benchmark.operation(op), shape, dtype, gpu)


def test_what_is_printed():
    lines = trace_report.command("softmax", "4096x1024", "bf16", "h200").split("\n")
    assert lines[0].startswith("softmax 4096x1024 bfloat16 on H200 SXM, forward: traffic is counted")
    assert lines[1] == "least traffic     8,388,608 bytes read, 8,388,608 written; 3.5 µs at 4,800 GB/s"
    assert re.fullmatch(
        r"roofline          1.25 FLOPs per byte, memory side of the ridge at 206; \d\d% of the roof \(modelled\)",
        lines[2],
    )
    titles = (
        "TRAFFIC of softmax_fwd_kernel, 4,096 programs, 2 of them looked at",
        "MACHINE CODE of softmax_fwd_kernel",
    )
    assert [line for line in lines if line.isupper() or line.startswith(("TRAFFIC", "MACHINE"))] == [
        *titles, "PREDICTED TIME"
    ]  # fmt: skip
    facts = {line.split("  ")[0] for line in lines}
    assert facts >= {
        "registers",
        "shared memory",
        "occupancy",
        "loads",
        "stores",
        "tensor cores",
        "L2",
        "device memory",
    }
    assert "L2                262,144 sectors read, 262,144 written; 0% of the reads found there" in lines
    assert any("µs on H200 SXM, limited by" in line for line in lines)


@pytest.mark.parametrize(
    ("op", "shape"), [("softmax", (4096, 4096)), ("kl_div", (64, 32768)), ("cross_entropy", (64, 32000))]
)
def test_the_kernel_moves_what_it_must(op, shape):
    least = benchmark.operation(op).cost(shape, torch.bfloat16)
    launch = predicted(op, shape).steps
    launch = next(step.launch for step in launch if step.launch is not None)
    assert least.read_bytes <= launch.load_bytes <= 1.01 * least.read_bytes + 64 * 1024
    assert launch.grid and launch.sampled >= SAMPLE


@pytest.mark.parametrize("op", benchmark.operations())
def test_every_operation_can_be_traced(op, monkeypatch):
    """Without the machine code, which takes seconds."""

    def traced(call, gpu):
        with gpukit.trace(gpu=gpu, sample=1) as t:
            call()
        return t

    monkeypatch.setattr(trace_report, "predict", traced)
    shape = benchmark.operation(op).test_shapes[2]
    t = predicted(op, shape)
    least = benchmark.operation(op).cost(shape, torch.bfloat16)
    assert t.launches and t.read_bytes >= least.read_bytes and t.write_bytes >= least.write_bytes


def test_a_grid_of_a_fixed_size_is_the_gpus():
    steps = {gpu: predicted("softmax", (4096, 32768), gpu=hardware.gpu(gpu)).steps for gpu in ("h200", "t4")}
    assert steps["h200"][0].launch.grid == (132,) and steps["h200"][0].name == "softmax_fwd_persistent_kernel"
    assert steps["t4"][0].launch.grid == (4096,)  # two rows do not fit into its shared memory
    assert hardware.imagined_gpu() is None


def test_sizes_without_values():
    with trace_report.Sizes():
        x = torch.randn((1 << 17, 1 << 20), dtype=torch.float64)  # 1 TiB
        x[0] += 1
        y = x.mul_(3).to(torch.bfloat16).view(-1, 4)
        assert y.shape == (1 << 35, 4) and y.dtype == torch.bfloat16 and y.device.type == "cpu"
        assert torch.softmax(x, -1).shape == (x @ x.new_empty(1 << 20, 1 << 20)).shape == x.shape
        assert torch.zeros_like(x, dtype=torch.float32).dtype == torch.float32
        index = torch.randint(0, 9, (1000,), generator=torch.Generator().manual_seed(0))
        index[1] = -100
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4] and (index < 0).sum() == 1
        with pytest.raises(ValueError, match=r"aten.empty.* needs a tensor larger than this machine can promise"):
            torch.empty(1 << 55)
    assert set(index.tolist()) == {-100, *range(9)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sofmax", None, "bf16", "h200"), "op must be one of .*softmax.*, got 'sofmax'"),
        (("softmax", "4096,1024", "bf16", "h200"), "--shape must be positive numbers with x between them"),
        (("softmax", "4096x0", "bf16", "h200"), "--shape must be positive numbers"),
        (("softmax", "64x64", "int8", "h200"), "--dtype must be one of bf16, .*, got 'int8'"),
        (("softmax", "64x64", "bf16", "h3000"), "no GPU is called 'h3000'"),
        (("softmax", "1000000x1000000", "bf16", "t4"), "softmax moves at least 4,000 GB, and T4 has 16 GB"),
        (
            ("linear_cross_entropy", "64x64", "bf16", "h200"),
            "64x64 does not fit linear_cross_entropy .*: it takes 3 sizes, ",
        ),
    ],
)
def test_what_does_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        trace_report.command(*given)


@pytest.mark.parametrize(
    ("op", "shape", "gpu", "module"),
    [
        ("flash_attention", "1x2x128x64", "h200", "_flash_hopper"),
        ("matmul", "4096x4096x4096", "h200", "_matmul_hopper"),
        ("softmax", "4096x131072", "h200", "_rows_shared"),
        ("softmax", "64x256", "h200", None),
        ("flash_attention", "1x2x128x64", "a100", None),
    ],
)
def test_that_a_faster_kernel_for_one_gpu_is_not_the_one_shown(op, shape, gpu, module):
    report = trace_report.operation(op, shape, "bf16", gpu)
    said = [fact for fact in report.facts if fact.startswith("kernel")]
    if module is None:
        assert said == []
    else:
        assert re.search(f"the one for every GPU, .* one made for it, which is faster .*{module}", said[0])


def test_an_operation_without_a_kernel(monkeypatch):
    import gpukit.kernels

    monkeypatch.delattr(gpukit.kernels, "softmax")
    with pytest.raises(ValueError, match=r"softmax cannot be traced: gpukit\.kernels has no softmax"):
        predicted("softmax", (64, 64))


def test_the_command_line():
    refused = subprocess.run(
        [sys.executable, "-m", "gpukit", "trace", "softmax", "--gpu", "h3000"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr.startswith("gpukit: no GPU is called 'h3000'")


BESIDE_A_GPU = """
import torch, triton
from gpukit.simulator.compiler.worker import _Target
triton.runtime.driver.set_active(_Target(90))  # knows a target, and would fail at a launch
torch.cuda.is_available = lambda: True
from gpukit import benchmark, hardware, trace_report
for op, shape in (("softmax", (64, 256)), ("flash_attention_causal", (1, 2, 64, 64)), ("adamw", (1, 1000))):
    print(trace_report.predict_op(benchmark.operation(op), shape, torch.bfloat16, hardware.gpu("h200")).report())
"""


def test_a_prediction_beside_a_gpu_is_the_one_without():
    environments = [{**os.environ, "TRITON_INTERPRET": interpreted} for interpreted in ("0", "1")]
    runs = [
        subprocess.run([sys.executable, "-c", BESIDE_A_GPU], capture_output=True, text=True, env=env, timeout=120)
        for env in environments
    ]
    assert runs[0].stdout and runs[0].stdout == runs[1].stdout, runs[0].stderr


# ---- a file of one's own ------------------------------------------------------------------------------------------

MINE = """
import torch, triton, triton.language as tl

@triton.jit
def scale(x_ptr, y_ptr, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + offs * STRIDE,
        mask=offs < n,
    )
    tl.store(y_ptr + offs, 2 * x, mask=offs < n)

x, y = torch.ones(1 << 14, device=DEVICE), torch.empty(1 << 12, device=DEVICE)
scale[(4,)](x, y, 1 << 12, 4, BLOCK=1024)
for _ in range(3):
    scale[(4,)](x, y, 1 << 12, 1, BLOCK=1024)
"""


@pytest.fixture
def mine(tmp_path):
    """A function: the file, with this device and these lines at its end."""

    def write(device="meta", end="", text=MINE):
        path = tmp_path / "mine.py"
        path.write_text(text.replace("DEVICE", repr(device)) + textwrap.dedent(end))
        return path

    return write


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_file_of_ones_own(mine, device):
    said = []
    found = trace_report.file(mine(device), H200, said.append)
    assert [(step.launch.load_sectors, times) for step, times in found.steps()] == [(2048, 1), (512, 3)]
    assert len(found.prediction.steps) == 4 and not found.ended  # PyTorch's ones are none of them
    text = str(found)
    assert "TRAFFIC of scale, 4 programs, 2 of them looked at\n" in text and "; each of 3 launches\n" in text
    assert "load x_ptr, line 7" in text and "loads             line 7:" in text  # the call's own line, in both
    assert any(words.startswith("counting what scale moves, 4 programs") for words in said)
    assert sys.argv[0] != str(mine(device)) and str(mine(device).parent) not in sys.path


def test_a_file_that_compares_what_was_not_computed(mine):
    found = trace_report.file(mine("cpu", "assert (y == 2).all(), 'y is wrong'\n"), H200)
    assert len(found.steps()) == 2
    assert "line 17: AssertionError: y is wrong (a trace computes no values" in found.ended
    assert found.ended in trace_page.page(found).replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"text": "import torch\n"}, "mine.py launches no Triton kernel: .* call the kernel at its end"),
        ({"device": "cuda"}, 'mine.py could not be traced: line 13: .*[Cc][Uu][Dd][Aa].*else "meta"'),
        ({"text": "def f(:\n"}, "mine.py could not be traced: SyntaxError: .*line 1"),
        ({"text": "import sys\nsys.exit(3)\n"}, "mine.py could not be traced: line 2: it ended with status 3"),
        ({"end": "scale[(5,)](x, y, 1 << 13, 1, BLOCK=1024)\n"}, "store outside y_ptr: program 4, line 11"),
        ({"end": "scale[(4,)](x, y, BLOCK=1024)\n"}, "missing .*argument"),
    ],
)
def test_a_file_that_cannot_be_traced(mine, how, words):
    if how.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("here it can")
    with pytest.raises(ValueError, match=words):
        found = trace_report.file(mine(**how), H200)
        raise ValueError(found.ended)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["there_is_none.py"], "there is no file there_is_none.py"),
        (["mine.py", "--shape", "64x64"], "--shape goes with an operation"),
        (["mine.py", "--dtype", "fp16"], "--dtype goes with an operation"),
        (["softmax", "--html", "no_such_folder/page.html"], "there is no folder no_such_folder"),
        (["softmax", "--gpu", "x"], "all of them: a100-40gb, .*rtx-5090"),
        (["softmax", "--gpu", "mi300x"], "mi300x is a GPU of AMD's"),
        (["x"], "op must be one of adamw, .*softmax"),
        ([], "trace needs an operation, such as softmax, a file, such as mine.py, or --ncu FILE.py"),
    ],
)
def test_refusals_of_the_command(mine, monkeypatch, capsys, given, words):
    monkeypatch.chdir(mine().parent)
    assert cli.main(["trace", *given]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def test_the_line_to_wait_by(monkeypatch):
    """It is on a terminal alone, says what is being done, and goes away."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with cli._Waiting("loading") as waiting:
            waiting.say("counting")
            waiting.end()
        shown = stream.getvalue()
        assert shown == "" if not stream.isatty() else shown.endswith("\r\x1b[K")


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone(mine, tmp_path):
    found = trace_report.file(mine(), H200)
    path = trace_page.save(tmp_path / "page.html", found)
    text = path.read_text()
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", text)  # nothing from elsewhere
    assert "prefers-color-scheme: dark" in text and "load x_ptr, line 7" in text and "<strong>" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) == 4 and text.count("<figure>") == 2  # a load and a store of each; the first of each is shown
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "Step 1 of 2: program 2 loads 1,024 elements of x_ptr: 4,096 bytes, in 512 sectors of 32 = 16,384" in text


def test_a_prediction_is_a_page_too():
    of = predicted("softmax", (64, 256))
    assert "softmax_fwd_kernel on H200 SXM" in trace_page.page(of) and f"{of.time_us:,.1f} µs" in trace_page.page(of)


def test_a_picture_says_which_bytes_were_asked_for_and_which_came_along(mine):
    strided, whole = (step.launch for step, _ in trace_report.file(mine(), H200).steps())
    blue, orange = trace_page.style.READS, trace_page.style.WASTE

    def widths(launch, color):
        boxes = [s for s in trace_page.drawings(launch)[0].shapes if isinstance(s, trace_page.Box) and s.title]
        return sum(box.width for box in boxes if box.fill == color)

    rows = trace_page.MAX_LINES * trace_page._WIDE
    assert widths(strided, blue) == pytest.approx(rows / 4) and widths(strided, orange) == pytest.approx(3 * rows / 4)
    assert widths(whole, blue) == pytest.approx(rows) and widths(whole, orange) == 0
