"""The judge against answers that are hostile, broken or unlucky. The checks' own wrong answers are in test_wrong.py."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpukit import course
from gpukit.grading import judge as judging
from gpukit.grading import wire
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.judge import judge
from gpukit.grading.prose import Label, Prose
from gpukit.grading.registry import UnknownExercise
from gpukit.grading.registry import exercise as find
from gpukit.grading.verdict import CheckFailed
from tests.waiting import until

judge_source = partial(judging.judge_source, seed=1)
LIMIT_S = 20.0  # of the exercises here; a busy machine must not turn into a wrong verdict
HINTS = ("one", "two", "three")


def add_cases(rng):
    pairs = [(1, 2), (3, -4), (rng.randrange(100), 5)]
    return [Case(f"add({a}, {b})", (a, b), frozenset({"negative"} if b < 0 else ())) for a, b in pairs]


ADD = FunctionExercise(
    id="demo.add",
    prose=Prose("demo.add", "Add", "00_start", Label(1, 1, "adding"), HINTS, {"sign": "Did the sign get lost?"}),
    function="add",
    cases=add_cases,
    expected=lambda a, b: a + b,
    timeout_s=LIMIT_S,
    misconceptions=(Misconception("sign", gives=lambda a, b: a + abs(b)),),
)


def double_cases(rng):
    import torch

    cases = []
    for n in (1, 64, 100, 1000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(rng.randrange(1 << 31)))
        cases.append(Case(f"x [{n}] float32", (x,), frozenset({"tail"} if n & (n - 1) else ())))
    return cases


DOUBLE = KernelExercise(
    id="demo.double",
    prose=Prose("demo.double", "Double", "00_start", Label(1, 1, "doubling"), HINTS),
    function="double",
    cases=double_cases,
    reference=lambda x: 2 * x,
    traffic=Traffic(reads=1, writes=1),
    timeout_s=20,
)
DOUBLE_SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(y_ptr + offs, 2 * x, mask=mask)


def double(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""


def add(body: str):
    return judge_source(ADD, f"def add(a, b):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n")


def double(*edits: tuple[str, str], exercise: KernelExercise = DOUBLE):
    source = DOUBLE_SOURCE
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return judge_source(exercise, source)


@pytest.fixture(scope="module", autouse=True)
def _close_servers():
    yield
    fresh_server()


def fresh_server() -> None:
    """The next check starts a server: in the environment and working directory of that moment."""
    if server := judging._servers.pop("cpu", None):
        server.close()


def processes_below(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(path.parent.name)
            found += [child, *processes_below(child)]
    return found


@pytest.mark.parametrize(
    ("body", "state", "diagnosis"),
    [
        ("return a + b", "pass", ""),
        ("return a + abs(b)", "fail", "sign"),
        ("pass", "fail", "type"),
        ("raise NotImplementedError('demo.add')", "todo", "todo"),
        ("return a.size", "error", "exception"),
        ("return add(a, b)", "error", "exception"),
        ("raise SystemExit", "error", "exception"),
        ("raise KeyboardInterrupt", "error", "exception"),
        ("class Bad(Exception):\n    def __str__(self):\n        raise self\nraise Bad", "error", "exception"),
        ("return [0] * 10**12", "error", "exception"),
        ("print('x' * 10_000_000)\nreturn a + b", "pass", ""),
        ("import warnings\nreturn a + b", "error", "forbidden"),
        ("import os\nos._exit(0)", "error", "forbidden"),
        ("return (a).__class__", "error", "forbidden"),
        ("import typing\nreturn typing.sys.exit()", "error", "forbidden"),
        ("return eval('a + b')", "error", "forbidden"),
        ("return float(a + b)", "fail", "values"),
        ("return str(a + b)", "fail", "type"),
        ("return True", "fail", "type"),
        ("return float('nan')", "fail", "values"),
    ],
)
def test_state_of(body, state, diagnosis):
    verdict = add(body)
    assert (verdict.state, verdict.diagnosis) == (state, diagnosis), str(verdict)
    assert add("return a + b").passed  # the next exercise is graded as if nothing had happened


@pytest.mark.parametrize("body", ["while True: pass", "import threading\n    while True: pass"])
def test_endless_loop_ends(body, monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    verdict = judge_source(replace(ADD, timeout_s=1), f"def add(a, b):\n    {body}\n")
    assert (verdict.state, verdict.diagnosis) == ("timeout", "timeout"), str(verdict)
    assert add("return a + b").passed


def test_a_file_that_never_loads_is_waited_for_once(monkeypatch):
    """The other exercises of the same text are told at once. Who asks again about the same exercise has it tried again, and
    another text is another file."""
    loads = []
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    plain = judging._Run._loaded
    monkeypatch.setattr(
        judging._Run, "_loaded", lambda run, *given: loads.append(run.exercise.id) or plain(run, *given)
    )
    endless = "while True: pass\n\n\ndef add(a, b):\n    return a + b\n"
    first, other = replace(ADD, timeout_s=1), replace(ADD, id="demo.other", timeout_s=1)
    longer = replace(ADD, id="demo.longer", timeout_s=2)
    verdicts = [judge_source(exercise, endless) for exercise in (first, other, first, longer)]
    assert all(verdict.diagnosis == "timeout" for verdict in verdicts), verdicts
    assert "no answer within 1 s, while the file was loading" in str(verdicts[1])
    assert loads == ["demo.add", "demo.add", "demo.longer"], loads
    assert add("return a + b").passed


@pytest.mark.parametrize(
    "loop",
    [
        "while pid >= 0:\n        x = tl.load(x_ptr + offs, mask=mask)",  # each turn goes through the interpreter
        "while True:\n        pass",
        "for i in range(2**62):\n        tl.atomic_cas(x_ptr, 1.0, 1.0)",
    ],
)
def test_a_kernel_that_never_ends(loop):
    source = DOUBLE_SOURCE.replace("mask = offs < n\n", f"mask = offs < n\n    pid = tl.program_id(0)\n    {loop}\n")
    verdict = judge_source(replace(DOUBLE, timeout_s=1), source)
    assert (verdict.state, verdict.diagnosis) == ("timeout", "timeout"), str(verdict)
    assert double().passed


def test_number_computed_with_torch_is_a_number():
    source = "import torch\n\n\ndef add(a, b):\n    return torch.tensor(a + b)\n"
    assert judge_source(ADD, source).passed


def test_a_plain_function_may_give_tensors():
    import torch

    def found(yours, rest=""):
        exercise = replace(ADD, expected=lambda a, b: [float(a + b), torch.tensor([a, b]).double()], tolerance=1e-6)
        body = f"    y = torch.tensor([a, b]).double()\n{rest}    return {yours}\n"
        verdict = judge_source(exercise, f"import torch\n\n\ndef add(a, b):\n{body}")
        return verdict.diagnosis, " ".join(str(verdict).split())

    assert found("[torch.tensor(float(a + b)), y]")[0] == found("[float(a + b), y + 1e-12]")[0] == ""
    label, text = found("[float(a + b), y]", "    y[1] += 1\n")
    assert label == "values" and "value 1: element [1] expected" in text and "(1 of 2 elements differ)" in text
    assert found("[float(a + b), y * float('nan')]")[0] == "values"
    label, text = found("[float(a + b), y[:1]]")
    assert label == "shape" and "value 1: shape [1], expected [2]" in text
    assert found("[float(a + b), y.float()]")[0] == "dtype"
    assert found("[float(a + b), a]")[0] == "type"


def test_the_largest_tensor_of_a_plain_function():
    def rule(case, largest_bytes):
        return ("too-large", f"{largest_bytes} bytes") if largest_bytes > 8 else None

    exercise = replace(ADD, memory_rule=lambda case, peak_bytes: None, largest_rule=rule)
    source = "import torch\n\n\ndef add(a, b):\n    parts = torch.tensor([{}])\n    return int(parts.sum())\n"
    assert judge_source(exercise, source.format("a + b")).passed
    verdict = judge_source(exercise, source.format("a, b"))
    assert verdict.diagnosis == "too-large" and "16 bytes" in str(verdict), str(verdict)


@pytest.mark.parametrize(
    ("statement", "how"),
    [
        ("import ctypes; ctypes.string_at(0)", "died of SIGSEGV"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "died of SIGKILL"),
        ("import os; os.close(3); os.close(4); os.close(5); os.close(6); os.close(7); os.close(8)", ""),
    ],
)
def test_crash_is_one_verdict(statement, how, monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)  # past the fence
    verdict = judge_source(ADD, f"def add(a, b):\n    {statement}\n    return 1\n")
    assert verdict.state in (("crashed",) if how else ("crashed", "error")), str(verdict)
    assert how in str(verdict)
    assert add("return a + b").passed


def test_object_that_equals_everything_is_its_type():
    source = "class Yes:\n    def __eq__(self, other):\n        return True\n\n\ndef add(a, b):\n    return Yes()\n"
    verdict = judge_source(ADD, source)
    assert verdict.diagnosis == "type"
    assert "returned a Yes" in str(verdict)


def test_forked_children_and_threads_end_with_the_check():
    for text in ("import os, time\n{}\ndef add(a, b):\n    return a + b\n",):
        fork = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judging.parts, "lint", lambda *_, **__: None)
            verdict = judge_source(ADD, text.format(fork))
    assert verdict.state in ("error", "pass", "crashed", "timeout")  # what the fence allows (test_fence.py)
    server = judging._servers["cpu"]._process.pid
    assert processes_below(server) == []


def test_syntax_error_shows_the_line():
    verdict = judge_source(ADD, "def add(a, b:\n    return a\n")
    assert verdict.state == "error"
    assert "exercises/demo.py, line 1" in str(verdict)
    assert "def add(a, b:" in str(verdict)


@pytest.mark.parametrize("source", ["\0", "def add(", "(" * 5000, "x = 1", "", "\ufeffdef add(a, b): return a + b"])
def test_files_that_are_not_programs(source):
    assert judge_source(ADD, source).state in ("error", "missing", "pass")


def test_a_nul_byte_has_its_line():
    assert "demo.py, line 2" in str(judge_source(ADD, "def add(a, b):\n    return a \0+ b\n"))


def test_exception_names_line_and_code():
    verdict = add("c = a + b\nreturn c.shape")
    assert "AttributeError in exercises/demo.py, line 3" in str(verdict)
    assert "return c.shape" in str(verdict)
    assert "gpukit/grading" not in str(verdict)


def test_an_exception_of_autograd_names_no_line():
    """Too few gradients are noticed in our call, of which the learner's file knows nothing."""
    source = (course.root(__file__) / "solutions" / "losses.py").read_text(encoding="utf-8")
    old = "return kl_bwd(t, dloss, ctx.BLOCK_V), None, None"
    assert source.count(old) == 1
    verdict = judge_source(find("losses.kl"), source.replace(old, old.removesuffix(", None, None")))
    assert verdict.diagnosis == "exception" and "incorrect number of gradients" in str(verdict)
    assert ", line " not in str(verdict)


def test_a_loop_counts_in_tensors():
    """As on a GPU, where a counter has a dtype and `.to`."""
    file = course.root(__file__) / "solutions" / "norms.py"
    source = file.read_text(encoding="utf-8")
    assert source.count("tl.cast(start, tl.int64)") == 1
    verdict = judge_source(find("norms.backward"), source.replace("tl.cast(start, tl.int64)", "start.to(tl.int64)"))
    assert verdict.passed, str(verdict)


def test_failure_has_at_most_eight_lines_and_ends_with_the_hint():
    verdict = add("return a + abs(b)")
    lines = str(verdict).splitlines()
    assert len(lines) <= 8
    assert lines[0] == "demo.add: values differ (2 of 3 cases pass)"
    assert "fails for add(3, -4); passes for add(1, 2)" in lines[1]  # one case shows no cause
    assert "expected -1, yours 7" in lines[2]
    assert lines[-1] == '  hint 1 of 3: gpukit.hint("demo.add")'


def test_check_failed_renders_without_a_traceback():
    failed = CheckFailed(add("return 0"))
    assert failed._render_traceback_() == str(failed.verdict).splitlines()


def test_seed_replays():
    first = judge_source(ADD, "def add(a, b):\n    return 0\n", seed=7)
    assert first.seed == 7
    assert first.lines == judge_source(ADD, "def add(a, b):\n    return 0\n", seed=7).lines


@pytest.mark.parametrize(
    ("edits", "state", "diagnosis"),
    [
        ([], "pass", ""),
        ([("2 * x", "3 * x")], "fail", "values"),
        ([("2 * x, mask=mask", "2 * x")], "fail", "out-of-bounds"),
        ([("x = tl.load(x_ptr + offs, mask=mask)", "x = tl.load(x_ptr + offs)")], "fail", "out-of-bounds"),
        ([("tl.store(y_ptr + offs, 2 * x, mask=mask)", "pass")], "fail", "nan"),
        ([("tl.store(y_ptr", "tl.store(x_ptr")], "fail", "input-changed"),
        ([("    return y", "    return 2 * x")], "fail", "not-your-kernel"),
        ([("    y = torch.empty_like(x)", "    return x + x\n    y = torch.empty_like(x)")], "fail", "not-your-kernel"),
        ([("    return y", "    y.copy_(x.mul(2))\n    return y")], "fail", "not-your-kernel"),
        ([("2 * x, mask", "tl.load(x_ptr + offs, mask=mask) + x, mask")], "fail", "traffic"),
        ([("    return y", "    return y.clone()")], "fail", "traffic"),
        ([("    return y", "    return y.double()")], "fail", "dtype"),
        ([("    return y", "    return y[None]")], "fail", "shape"),
        ([("torch.empty_like(x)", "x")], "fail", "input-changed"),
        ([("(triton.cdiv(x.numel(), 64),)", "(x.numel() // 64,)")], "fail", "nan"),
        ([("tl.program_id(0) * BLOCK", "0")], "fail", "nan"),
        (
            [("    mask = offs < n", "    mask = offs < n\n    raise NotImplementedError('demo.double')")],
            "todo",
            "todo",
        ),
        ([("2 * x, mask", "2 * undefined, mask")], "fail", "does-not-compile"),
        ([("2 * x, mask", "2 * abs(x), mask")], "fail", "does-not-compile"),
        ([("(triton.cdiv(x.numel(), 64),)", "(0.5,)")], "error", "exception"),
        ([("    return y", "    return y.numpy()")], "error", "forbidden"),
    ],
    ids=lambda value: None if isinstance(value, str) else (value[0][1].strip()[:30] if value else "right"),
)
def test_kernel_state_of(edits, state, diagnosis):
    verdict = double(*edits)
    assert (verdict.state, verdict.diagnosis) == (state, diagnosis), f"{verdict}\n{verdict.detail}"


@pytest.mark.parametrize(
    ("value", "diagnosis"), [("2 * x", ""), ("(x / 3).to(y_ptr.dtype.element_ty) * 6", "rounded-early")]
)
def test_a_case_whose_results_are_rounded_once(value, diagnosis):
    """What was rounded before the last step is within the tolerance, and is found."""
    import torch

    def cases(rng):
        x = torch.randn(500, generator=torch.Generator().manual_seed(rng.randrange(1 << 31)))
        return [Case(f"x {dtype}", (x.to(dtype),), frozenset({"once"})) for dtype in (torch.float32, torch.bfloat16)]

    source = DOUBLE_SOURCE.replace("mask=mask)\n    tl", "mask=mask).to(tl.float32)\n    tl").replace("2 * x", value)
    verdict = judge_source(replace(DOUBLE, cases=cases), source)
    assert verdict.diagnosis == diagnosis, str(verdict)
    assert not diagnosis or "rounded once, y[" in " ".join(str(verdict).split()), str(verdict)


def test_copies_alone_are_named_as_what_costs_too_much():
    assert "the kernels alone would keep the bound" in str(double(("    return y", "    return y.clone()")))
    again = str(double(("2 * x, mask", "tl.load(x_ptr + offs, mask=mask) + x, mask")))
    assert "x_ptr is loaded 2 times" in " ".join(again.split()) and "the kernels alone" not in again
    assert "2.0x the reads (bound 1.0x)" in again


def test_a_copy_is_named_where_the_bound_lets_the_kernels_load_twice():
    """As where two passes load the same tensor."""
    bound = replace(DOUBLE, traffic=replace(DOUBLE.traffic, reads=2))
    again = "tl.load(x_ptr + offs, mask=mask)"
    copied = str(
        double(("2 * x, mask", f"{again} + x, mask"), ("    y =", "    x = x.clone()\n    y ="), exercise=bound)
    )
    assert "the kernels alone would keep the bound" in copied and "is loaded" not in copied, copied
    thrice = double(("2 * x, mask", f"{again} + {again} + 0 * x, mask"), exercise=bound)
    assert "x_ptr is loaded 3 times" in str(thrice) and "the kernels alone" not in str(thrice)


def test_a_tensor_that_is_filled_for_nothing():
    filled = " ".join(str(double(("    return y", "    torch.zeros_like(y)\n    return y"))).split())
    assert "2.0x the writes (bound 1.0x)" in filled and "which line outside them fills a tensor" in filled


def test_a_multiple_has_the_digits_that_tell_it_from_the_bound():
    exercise = replace(DOUBLE, traffic=replace(DOUBLE.traffic, reads=0.97, slack=0.0))
    assert "1.03x the reads (bound 1.0x)" in str(double(exercise=exercise))


IN_PLACE_SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def grow_kernel(x_ptr, step_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(x_ptr + offs, x + tl.load(step_ptr + offs, mask=mask), mask=mask)


def grow(x, step):
    grow_kernel[(triton.cdiv(x.numel(), 64),)](x, step, x.numel(), BLOCK=64)
"""


@pytest.mark.parametrize(
    ("old", "new", "diagnosis"),
    [
        ("", "", ""),
        ("tl.store(x_ptr", "tl.store(step_ptr", "input-changed"),
        ("x + tl.load", "x - tl.load", "values"),
        ("x + tl.load(step_ptr + offs, mask=mask)", "x", "values"),
        ("    grow_kernel[", "    x += step\n    return\n    grow_kernel[", "not-your-kernel"),
        ("BLOCK=64)", "BLOCK=64)\n    return x", ""),
        ("BLOCK=64)", "BLOCK=64)\n    return step", "aliases-input"),
        ("    grow_kernel[", "    grow_kernel[(0,)](x, step, 0, BLOCK=64)\n    grow_kernel[", "launches"),
    ],
)
def test_argument_that_is_to_be_changed(old, new, diagnosis):
    """It is a result, and what the replay without kernels starts from is what it was before."""
    grow = replace(
        DOUBLE,
        id="demo.grow",
        function="grow",
        cases=lambda rng: [replace(case, args=(case.args[0], case.args[0] * 2)) for case in double_cases(rng)],
        reference=lambda x, step: x + step,
        in_place=(0,),
        traffic=Traffic(reads=2, writes=1),
    )
    verdict = judge_source(grow, IN_PLACE_SOURCE.replace(old, new) if old else IN_PLACE_SOURCE)
    assert verdict.diagnosis == diagnosis, f"{verdict}\n{verdict.detail}"


def test_a_result_is_not_kept_for_a_later_call():
    """Each case has other shapes than the others, so that only the call after them tells."""
    kept = """

KEPT = {}
_double = double


def double(x):
    if x.shape not in KEPT:
        KEPT[x.shape] = _double(x)
    return KEPT[x.shape]
"""
    verdict = judge_source(DOUBLE, DOUBLE_SOURCE + kept)
    assert verdict.diagnosis == "kept", f"{verdict}\n{verdict.detail}"
    assert verdict.checks_total == judge_source(DOUBLE, DOUBLE_SOURCE).checks_total, "it counts as no case"


def test_a_bound_on_sectors_names_the_access():
    exercise = replace(DOUBLE, traffic=Traffic(reads=1, writes=1, sectors=1.2))
    assert judge_source(exercise, DOUBLE_SOURCE).passed
    dealt = DOUBLE_SOURCE.replace(
        "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(0) + tl.arange(0, BLOCK) * tl.num_programs(0)"
    )
    assert judge_source(DOUBLE, dealt).passed  # the same bytes
    verdict = judge_source(exercise, dealt)
    assert (verdict.state, verdict.diagnosis) == ("fail", "sectors"), str(verdict)
    line = dealt.split("\n").index("    x = tl.load(x_ptr + offs, mask=mask)") + 1
    text = " ".join(str(verdict).split())
    assert "8.0x the sectors that its bytes fill (bound 1.2x)" in text
    assert f"the load of x_ptr in line {line} of" in text and "moves 4,000 bytes and touches 1,000 sectors" in text


def squares(rng):
    import torch

    return [Case(f"x {[n, n]}", (torch.randn(n, n, dtype=torch.float16),)) for n in (16, 32)]


SQUARE = KernelExercise(
    id="demo.square",
    prose=Prose("demo.square", "Square", "00_start", Label(1, 1, "a product"), HINTS),
    function="square",
    cases=squares,
    reference=lambda x: x @ x,
    traffic=Traffic(reads=1, writes=1, flops=lambda x: 2 * len(x) ** 3),
    timeout_s=20,
)
SQUARE_SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def square_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = N * tl.arange(0, N)[:, None] + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.dot(x, x))


def square(x):
    y = torch.empty_like(x)
    square_kernel[(1,)](x, y, len(x))
    return y
"""


def test_a_bound_on_flops():
    assert judge_source(SQUARE, SQUARE_SOURCE).passed
    verdict = judge_source(SQUARE, SQUARE_SOURCE.replace("tl.dot(x, x))", "0.5 * tl.dot(x, x) + 0.5 * tl.dot(x, x))"))
    assert (verdict.state, verdict.diagnosis) == ("fail", "flops"), str(verdict)
    text = " ".join(str(verdict).split())
    assert "2.0x the FLOPs" in text and "65,536 are enough; tl.dot does 131,072 of 131,072 in square_kernel" in text


def test_atomics_are_writes():
    source = DOUBLE_SOURCE.replace("2 * x, mask=mask)", "x, mask=mask)\n    tl.atomic_add(y_ptr + offs, x, mask=mask)")
    verdict = judge_source(DOUBLE, source)
    assert (verdict.state, verdict.diagnosis) == ("fail", "traffic"), str(verdict)
    assert "y_ptr is stored 2 times: lines 12, 13 of" in str(verdict)


def test_every_access_is_named_where_none_is_too_large_alone():
    through_memory = DOUBLE_SOURCE.replace("y = torch.empty_like(x)", "y, z = torch.empty_like(x), torch.empty_like(x)")
    launch = "double_kernel[(triton.cdiv(x.numel(), 64),)]"
    through_memory = through_memory.replace(
        f"{launch}(x, y,", f"half_kernel[(16,)](x, z, x.numel(), BLOCK=64)\n    {launch}(z, y,"
    ).replace(
        "def double(x)",
        DOUBLE_SOURCE[DOUBLE_SOURCE.index("@triton.jit") : DOUBLE_SOURCE.index("def double(x)")]
        .replace("double_kernel", "half_kernel")
        .replace("2 * x", "x")
        .replace("_ptr", "_at")
        + "def double(x)",
    )
    verdict = judge_source(replace(DOUBLE, traffic=Traffic(reads=1, writes=1, launches=2)), through_memory)
    assert verdict.diagnosis == "traffic", str(verdict)
    text = str(verdict)
    assert all(f"{name} is {verb} once" in text for name, verb in (("x_ptr", "loaded"), ("x_at", "loaded")))


def test_out_of_bounds_is_named_and_harmless():
    text = str(double(("2 * x, mask=mask", "2 * x")))
    assert "store outside y" in text
    assert "program" in text
    assert "nothing was damaged" in text


def test_worker_environment_does_not_tell_that_it_is_graded():
    probe = "import os\nprint(sorted(os.environ), os.getcwd())\n\n\ndef add(a, b):\n    return a + b\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUKIT_VERDICTS", "/nowhere")
        patch.setattr(judging.parts, "lint", lambda *_, **__: None)
        fresh_server()
        detail = judge_source(ADD, probe).detail
    assert "TRITON_INTERPRET" in detail
    assert not any(word in detail for word in ("PYTEST", "GPUKIT", "JPY"))


def test_unknown_exercise_suggests_the_nearest():
    with pytest.raises(UnknownExercise, match=r"did you mean 'softmax\.fused'"):
        find("softmax.fuse")


def test_missing_file_and_unreadable_file(tmp_path):
    for folder in ("exercises", "notebooks"):
        (tmp_path / folder).mkdir()
    assert judge("softmax.fused", root=tmp_path).state == "missing"
    (tmp_path / "exercises" / "softmax.py").write_bytes(b"\xff\xfe\x00bad")
    assert judge("softmax.fused", root=tmp_path).state in ("missing", "error")


def test_files_beside_the_exercise_cannot_shadow_the_judge(tmp_path, monkeypatch):
    folder = tmp_path / "a path with spaces"
    for name in ("exercises", "notebooks"):
        (folder / name).mkdir(parents=True)
        (folder / name / "torch.py").write_text("raise SystemExit('shadowed')")
        (folder / name / "random.py").write_text("raise SystemExit('shadowed')")
    source = find("start.bytes_moved")
    (folder / "exercises" / f"{source.concept}.py").write_text("import torch\n")
    monkeypatch.chdir(folder / "notebooks")
    fresh_server()
    verdict = judge(source.id)
    assert verdict.diagnosis == "missing-function", str(verdict)


def test_killed_judge_leaves_no_process():
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); sys.argv=['x']\n"
        "from tests.grading.test_judge import ADD, judging\n"
        "worker = judging._server('cpu').fork(60); print(judging._servers['cpu']._process.pid, flush=True); time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", script, root], stdout=subprocess.PIPE, text=True, cwd=root)
    server = int(process.stdout.readline())
    assert processes_below(server)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until(lambda: not os.path.exists(f"/proc/{server}"))


def test_wire_round_trip():
    import socket

    import torch

    a, b = socket.socketpair()
    strided = torch.arange(12.0).reshape(3, 4)[:, ::2]
    message = {
        "x": (1, -(10**30), 2.5, float("inf"), None, True, "é", [strided, torch.tensor(3, dtype=torch.bfloat16)])
    }
    wire.send(a, message)
    back = wire.receive(b)["x"]
    assert back[:-1] == message["x"][:-1]
    assert torch.equal(back[-1][0], strided)
    assert back[-1][0].stride() == strided.stride()
    wire.send(a, {"y": object(), "z": torch.nn.Parameter(torch.ones(1))})
    assert wire.receive(b)["z"] == wire.Foreign("Parameter", "Parameter containing:\ntensor([1.], requires_grad=True)")
    a.close()
    with pytest.raises(wire.Closed):
        wire.receive(b)
    b.close()


# ---------------------------------------------------------------------------------------------- what a GPU does not take
@pytest.mark.parametrize(
    ("line", "message"),
    (
        ("    for i in range(2):\n        if i == 0:\n            continue\n", "unsupported AST node type: Continue"),
        ("    widths = {'a': 1}\n", "unsupported AST node type: Dict"),
        ("    two = sum([1 for _ in range(2)])\n", "sum is not defined"),
        (
            "    wide = (offs % 8)[:, None].to(tl.float32) + tl.arange(0, 1024)[None, :]\n"
            "    x += tl.sum(tl.dot(wide, wide.trans())) * 0\n",
            "out of resource: shared memory, Required:",
        ),
    ),
)
def test_what_the_interpreter_runs_and_a_gpu_does_not_take(line, message):
    """The values are right; Triton's compiler says why no GPU runs it, and the line is the learner's."""
    store = "    tl.store(y_ptr"
    source = DOUBLE_SOURCE.replace(store, line + store)
    verdict = judge_source(DOUBLE, source, seed=1)
    assert (verdict.state, verdict.diagnosis) == ("fail", "does-not-compile"), str(verdict)
    assert "right values here, but Triton cannot compile the kernel for A100" in str(verdict)
    assert message in " ".join(str(verdict).split())
    assert verdict.checks_passed == verdict.checks_total - 1


def test_a_compiled_kernel_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(judging.compiler, "_recent", {})
    asked = []
    ask = judging._Run._ask_compiler
    monkeypatch.setattr(judging._Run, "_ask_compiler", lambda run, texts: asked.append(texts) or ask(run, texts))
    assert judge_source(DOUBLE, DOUBLE_SOURCE, seed=1).passed and judge_source(DOUBLE, DOUBLE_SOURCE, seed=2).passed
    assert len(asked) == 1
    assert judge_source(DOUBLE, DOUBLE_SOURCE.replace("2 * x", "x * 2"), seed=1).passed
    assert len(asked) == 2


# --------------------------------------------------------------------------- where the results of a plain function lie
def _noted_cases(rng):
    import torch

    return [Case("two numbers", (torch.ones(2), torch.zeros(3)), frozenset())]


def _noted(x, cache):
    import torch

    return x, torch.cat([x, cache[2:]])


NOTED = FunctionExercise(
    id="demo.noted",
    function="noted",
    prose=replace(DOUBLE.prose, id="demo.noted"),
    cases=_noted_cases,
    expected=_noted,
    in_place=(1,),
)


@pytest.mark.parametrize(
    "returned, said",
    (
        ("x.clone(), cache", ""),
        ("x + 0, cache[:]", ""),
        ("x.clone(), cache.clone()", "returns-a-copy"),
        ("x, cache", "aliases-input"),
        ("x[:], cache", "aliases-input"),
        ("None", "type"),
    ),
)
def test_what_a_plain_function_returns_lies_where_it_belongs(returned, said):
    """The last results are the caller's own tensors, and the others are in the memory of no argument."""
    verdict = judge_source(
        NOTED, f"import torch\n\n\ndef noted(x, cache):\n    cache[:2] = x\n    return {returned}\n", seed=1
    )
    assert verdict.diagnosis == said, str(verdict)


# ------------------------------------------------------------------------------------------------- beyond 2^31 elements
FAR = replace(
    DOUBLE,
    id="demo.far",
    prose=replace(DOUBLE.prose, id="demo.far"),
    huge=lambda: (wire.Imaginary((3 << 30,), "float16"),),
)
OFFSETS = "offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"


def test_offsets_of_32_bits_leave_a_tensor_of_3_billion_elements():
    assert OFFSETS in DOUBLE_SOURCE
    verdict = judge_source(FAR, DOUBLE_SOURCE, seed=1)
    assert (verdict.state, verdict.diagnosis) == ("fail", "out-of-bounds"), str(verdict)
    assert "[3221225472] float16, addresses only" in str(verdict) and "before the start of x" in str(verdict)
    assert judge_source(
        FAR, DOUBLE_SOURCE.replace("tl.program_id(0) *", "tl.program_id(0).to(tl.int64) *"), seed=1
    ).passed


@pytest.mark.parametrize(
    "offset, bound",
    (
        ("tl.program_id(0).to(tl.uint32) * BLOCK", "n"),
        ("tl.program_id(0).to(tl.int64) * BLOCK", "(n - 1).to(tl.uint32) + 1"),
    ),
)
def test_unsigned_offsets_and_bounds_lead_to_other_elements_of_5_billion(offset, bound):
    """They stay in the tensor, and no bound of it shows them."""
    beyond = replace(FAR, huge=lambda: (wire.Imaginary((5 << 30,), "float16"),))
    source = DOUBLE_SOURCE.replace("tl.program_id(0) * BLOCK", offset).replace("offs < n", f"offs < {bound}")
    verdict = judge_source(beyond, source, seed=1)
    assert (verdict.state, verdict.diagnosis) == ("fail", "out-of-bounds"), str(verdict)
    assert "load of other elements of x" in str(verdict) and "wraps around" in str(verdict)


def test_a_hash_may_wrap_around():
    beyond = replace(FAR, huge=lambda: (wire.Imaginary((5 << 30,), "float16"),))
    hashed = f"{OFFSETS.replace('id(0)', 'id(0).to(tl.int64)')} + (tl.program_id(0).to(tl.uint32) * 40503 >> 16 & 0)"
    verdict = judge_source(beyond, DOUBLE_SOURCE.replace(OFFSETS, hashed), seed=1)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("programs", ("triton.cdiv(x.numel(), 64)", "8"))
def test_a_loop_with_a_bound_of_64_bits_counts_in_64_bits(programs):
    """Few programs would walk for minutes: then the addresses prove nothing, and the answer passes."""
    source = DOUBLE_SOURCE.partition("    offs =")[0] + (
        "    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):\n"
        "        offs = start + tl.arange(0, BLOCK)\n"
        "        x = tl.load(x_ptr + offs, mask=offs < n)\n"
        "        tl.store(y_ptr + offs, 2 * x, mask=offs < n)\n\n\n"
        "def double(x):\n    y = torch.empty_like(x)\n"
        f"    double_kernel[({programs},)](x, y, x.numel(), BLOCK=64)\n    return y\n"
    )
    verdict = judge_source(FAR, source, seed=1)
    assert verdict.passed, str(verdict)
