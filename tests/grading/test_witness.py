"""A pass of a kernel exercise rests on nothing that ran in the learner's process. The fence is off in all that follows, so
that what holds holds without it."""

import ast
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpukit import integrity
from gpukit.grading import judge as judging
from gpukit.grading import kernel_text, registry, remote
from gpukit.grading.exercise import Case
from tests.grading.test_judge import DOUBLE, DOUBLE_SOURCE, fresh_server

judge_source = partial(judging.judge_source, seed=1)
# What a function finds whose kernel does nothing, so that somebody else must do the work.
IDLE = DOUBLE_SOURCE.replace(
    "tl.store(y_ptr + offs, 2 * x, mask=mask)", "tl.store(y_ptr + offs, x, mask=mask & (x > 9e9))"
)
assert IDLE != DOUBLE_SOURCE


@pytest.fixture(scope="module", autouse=True)
def _close_servers():
    yield
    fresh_server()


@pytest.fixture(autouse=True)
def _no_fence(monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)


def host(source: str, body: str, before: str = "") -> str:
    """`source` with `body` in place of what `double` does after its launch, and `before` at the head of the file."""
    assert source.count("    return y\n") == 1
    return before + source.replace("    return y\n", "".join(f"    {line}\n" for line in body.splitlines()))


WITH_CTYPES = """
import ctypes
count, size = x.numel(), x.element_size()
source = (ctypes.c_float * count).from_address(x.data_ptr())
target = (ctypes.c_float * count).from_address(y.data_ptr())
for i in range(count):
    target[i] = 2 * source[i]
return y
"""
WITHOUT_THE_MODE = """
from torch.utils._python_dispatch import _disable_current_modes
with _disable_current_modes():
    y.copy_(2 * x)
return y
"""
THE_JUDGES_TENSORS = """
import gc
for other in gc.get_objects():
    if type(other) is torch.Tensor and other.shape == y.shape and other is not x and other is not y and not other.isnan().any():
        if bool((other == 2 * x).all()):
            return other
y.copy_(2 * x)
return y
"""


@pytest.mark.parametrize(
    "source",
    [
        host(IDLE, "return 2 * x"),
        host(IDLE, "y.copy_(2 * x)\nreturn y"),
        host(IDLE, "import numpy\ny.numpy()[...] = 2 * x.numpy()\nreturn y"),
        host(IDLE, WITH_CTYPES),
        host(IDLE, WITHOUT_THE_MODE),
        host(IDLE, THE_JUDGES_TENSORS),
        host(IDLE, "y.set_((2 * x).untyped_storage())\nreturn y"),
        host(IDLE, "y.untyped_storage().copy_((x + x).untyped_storage())\nreturn y"),
        host(IDLE, "return torch.tensor([2 * v for v in x.tolist()])"),
        host(IDLE, "y = x.clone()\ny.apply_(lambda v: 2 * v)\nreturn y"),
        host(IDLE, "y.data = 2 * x\nreturn y"),
        host(IDLE, "from gpukit.kernels import swiglu\nreturn x + x"),
        host(IDLE, "class Y(torch.Tensor): pass\nreturn (2 * x).as_subclass(Y)"),
    ],
)
def test_what_the_host_computes_is_no_result(source):
    verdict = judge_source(DOUBLE, source)
    assert verdict.state in ("fail", "error"), str(verdict)


PATCHES = {
    "the interpreter": """
        from triton.runtime.interpreter import InterpretedFunction
        def run(self, x, y, n, grid=None, warmup=False, **kwargs):
            y.numpy()[:] = 2 * x.numpy()
        InterpretedFunction.run = run
    """,
    "the tracer": """
        from gpukit.simulator.trace import tracer
        from gpukit.simulator.trace.launch import Launch
        enter = tracer.Trace.__enter__
        def lie(self):
            made = enter(self)
            return made
        tracer.Trace.__enter__ = lie
        Launch.store_bytes = property(lambda self: 4000, lambda self, value: None)
        Launch.load_bytes = property(lambda self: 4000, lambda self, value: None)
    """,
    "NumPy": """
        import numpy
        from triton.runtime import interpreter
        load = interpreter._interpreter.load
        class Twice:
            def __getattr__(self, name):
                return getattr(load.__self__ if hasattr(load, "__self__") else interpreter._interpreter, name)
        numpy.where = lambda *args: 2 * args[1]
    """,
    "the comparison": """
        import gpukit.grading.worker as worker
        worker._identical = lambda a, b: False
        worker._shares = lambda a, b: False
        worker._host_watch = lambda path: __import__("contextlib").nullcontext(type("W", (), {"used": [], "allocated_bytes": 0})())
    """,
    "the recorder": """
        from gpukit.grading.host import Recorder
        Recorder.operation = lambda self, func, args, kwargs: func(*args, **(kwargs or {}))
    """,
    "what an operation is": """
        from gpukit.grading import host
        host.HOST_OPS = frozenset(["mul", "add", *host.HOST_OPS])
    """,
    "the modules": """
        import sys
        for name in [name for name in sys.modules if name.startswith("gpukit")]:
            sys.modules[name] = None
    """,
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_witness_is_believed_by_nobody(patch):
    import textwrap

    verdict = judge_source(DOUBLE, host(IDLE, "y.copy_(2 * x)\nreturn y", textwrap.dedent(PATCHES[patch])))
    assert not verdict.passed and verdict.state in ("fail", "error", "crashed"), str(verdict)


FORGED = """
from gpukit.grading import wire
tell = wire.send

def forge(sock, reply):
    if reply.get("tape") and "launch" in reply["tape"]:
        import json
        tape = json.loads(reply["tape"])
        commands, outputs = tape["commands"], tape["outputs"]
        {forgery}
        reply["tape"] = json.dumps(tape)
    tell(sock, reply)

wire.send = forge
"""


@pytest.mark.parametrize(
    ("forgery", "state"),
    [
        ("pass", "pass"),
        ("tape['commands'] = []", "fail"),
        ("tape['commands'] = commands * 1000", "fail"),
        ("outputs['y'] = ['a0.0', *outputs['y'][1:]]", "fail"),  # the input is no result
        ("outputs['y'] = ['a99.0', *outputs['y'][1:]]", "fail"),
        ("outputs['y'][2] = [1 << 40]", "fail"),
        ("outputs['y'][3] = [-1]", "fail"),
        ("outputs['y'][4] = 1 << 30", "fail"),
        ("outputs['y'][1] = 'nn'", "fail"),
        ("commands[-1] = ['copy', outputs['y'], ['a0.0', *outputs['y'][1:]]]", "fail"),
        ("commands[-1] = ['data', outputs['y'], [1.0] * outputs['y'][2][0]]", "fail"),
        ("commands[-1] = ['data', outputs['y'], ['x'] * outputs['y'][2][0]]", "fail"),
        ("commands[-1] = ['fill', outputs['y'], 'x']", "fail"),
        ("commands[-1] = ['exec', 'import os']", "fail"),
        ("commands.insert(0, ['new', 'big', 'float32', 1 << 45, 'cpu'])", "fail"),
        ("commands.insert(0, ['new', 'a0.0', 'float32', 4, 'cpu'])", "fail"),
        ("commands.insert(0, ['free', ['a0.0']])", "fail"),
        ("commands[-1][1]['grid'] = [1 << 62]", "fail"),
        ("commands[-1][1]['grid'] = ['x']", "fail"),
        ("commands[-1][1]['options'] = {'pre_hook': ['os.system']}", "fail"),
        ("commands[-1][1]['arguments']['n'] = ['import', 'os', 'system']", "fail"),
        ("commands[-1][1]['arguments']['n'] = ['import', 'builtins', 'eval']", "fail"),
        ("next(iter(commands[-1][1]['functions'].values()))['line'] = 1", "fail"),
        ("next(iter(commands[-1][1]['functions'].values()))['globals']['tl'] = ['import', 'os', '']", "error"),
        ("next(iter(commands[-1][1]['functions'].values()))['globals']['__builtins__'] = ['value', 1]", "fail"),
        ("tape.clear()", "fail"),
    ],
)
def test_a_forged_tape_is_no_result(forgery, state):
    """Whatever the host's process says, the device carries out what makes sense on the judge's data, and no more."""
    verdict = judge_source(DOUBLE, FORGED.format(forgery=forgery) + DOUBLE_SOURCE)
    assert verdict.state == state, str(verdict)


def softmax_that_keeps(what: str) -> str:
    source = integrity.solution("softmax")
    saving = "        ctx.save_for_backward(y)\n"
    assert source.count(saving) == 1
    return "KEPT = []\n" + source.replace(saving, f"{saving}        {what}\n")


@pytest.mark.parametrize(
    "what",
    ["ctx.x = x", "ctx.save_for_backward(x, y)", "ctx.x = lambda: x", "ctx.x = x.clone()"],
)
def test_whatever_lives_between_the_passes_is_kept(what):
    source = softmax_that_keeps(what)
    if "(x, y)" in what:
        source = source.replace("(y,) = ctx", "_, y = ctx")
    verdict = judge_source(registry.exercise("softmax.backward"), source)
    assert verdict.diagnosis in ("saved", "traffic" * ("clone" in what)), str(verdict)


@pytest.mark.parametrize(
    "what", ["KEPT.append(x)", "SoftmaxFunction.x = x", "KEPT[:] = [y]", "ctx.y = y"]
)  # autograd knows nothing of a y that its own node holds
def test_a_forward_pass_leaves_nothing_behind(what):
    verdict = judge_source(registry.exercise("softmax.backward"), softmax_that_keeps(what))
    assert verdict.diagnosis == "left-behind", str(verdict)


def test_what_an_earlier_call_made_once_is_not_left_by_each():
    source = softmax_that_keeps("KEPT or KEPT.append(torch.empty(4))")
    verdict = judge_source(registry.exercise("softmax.backward"), source)
    assert verdict.diagnosis == "saved", str(verdict)  # the bound is another rule


@pytest.mark.parametrize("saving", ["KEPT[:] = [y]", "SoftmaxFunction.x = y"])
def test_the_tensors_of_another_call_are_not_those_of_this_one(saving):
    """As a variable outside ctx has it where a model runs two layers forward before the first one backward."""
    source = softmax_that_keeps(saving).replace("        ctx.save_for_backward(y)\n", "")
    source = source.replace("(y,) = ctx.saved_tensors", "y = " + saving.split(" = ")[0].replace("[:]", "[0]"))
    verdict = judge_source(registry.exercise("softmax.backward"), source)
    assert verdict.diagnosis == "left-behind", str(verdict)


@pytest.mark.parametrize(
    "buffer",
    [
        ("BUFFER = torch.empty(1 << 20)", "BUFFER[: x.numel()].view(x.shape)"),
        ("BUFFERS = []", "(BUFFERS or BUFFERS.append(torch.empty(1 << 20)) or BUFFERS)[0][: x.numel()].view(x.shape)"),
        ("BUFFERS = {}", "BUFFERS.setdefault(x.shape, torch.empty_like(x))"),  # met again in the last call alone
    ],
)
def test_a_result_lies_in_memory_of_its_own_call(buffer):
    made, used = buffer
    source = DOUBLE_SOURCE.replace("torch.empty_like(x)", used).replace("\n\n@triton", f"\n{made}\n\n@triton", 1)
    verdict = judge_source(replace(DOUBLE, traffic=None), source)
    assert (verdict.state, verdict.diagnosis) == ("fail", "reused-memory"), f"{verdict}\n{verdict.detail}"
    scratch = source.replace("return y", "return y.clone()")  # memory for something in between is no result
    verdict = judge_source(replace(DOUBLE, traffic=None), scratch)
    assert verdict.passed, f"{verdict}\n{verdict.detail}"


@pytest.mark.parametrize(
    "forgery",
    [
        "turn[2].append('a%d.0' % case)",  # but the backward pass needs it
        "commands.remove(turn)",
        "commands.remove(turn); commands.insert(2, turn)",  # before anything is computed
        "turn[1] = ['a%d.0' % case, *turn[1][1:]]",
    ],
)
def test_a_host_cannot_hide_what_it_keeps(forgery):
    lie = f"""case = forge.case = getattr(forge, "case", -1) + 1
        turn = next(command for command in commands if command[0] == "backward")
        {forgery}"""
    source = softmax_that_keeps("ctx.x = x").replace(
        "softmax_backward(y, dy)", "softmax_backward(softmax_fused(ctx.x), dy)"
    )
    verdict = judge_source(registry.exercise("softmax.backward"), FORGED.replace("{forgery}", lie) + source)
    assert not verdict.passed and verdict.state == "fail", str(verdict)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "x_ptr.handle",
        "x_ptr.dtype.__init__",
        "tl.core.builtins",
        "tl.core.inspect.getsource(tl.load)",
        "tl.target_info",
        "tl.extra.cuda.utils",
        "'{0.__class__}'.format(x_ptr)",
        "f'{x_ptr.handle.data}'",
        "open('/etc/passwd')",
        "getattr(x_ptr, 'handle')",
        "eval('1')",
        "np.ones(3)",
        "inspect.stack()",
        "torch.ones(3)",
        "triton.runtime",
        "tl.load(x_ptr, _semantic=n)",
        "tl.load(**{})",
        "[v for v in (1, 2)]",
        "(lambda: 0)()",
        "{1: 2}",
        "(yield 1)",
    ],
)
def test_a_kernel_may_only_say_what_is_on_the_list(text):
    import triton
    import triton.language as tl

    def looked_at(expression: str) -> None:
        source = f"def kernel(x_ptr, n, BLOCK: tl.constexpr):\n    y = {expression}\n"
        kernel_text.function(ast.parse(source), "kernel", {"tl": tl, "triton": triton, "torch": torch})

    looked_at("tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)).to(tl.float32), axis=0) + tl.math.exp2(triton.cdiv(n, 2))")
    with pytest.raises(kernel_text.Refused):
        looked_at(text)


@pytest.mark.parametrize(
    "statement",
    [
        "import os",
        "global n",
        "with n:\n        pass",
        "try:\n        pass\n    except Exception:\n        pass",
        "def inner():\n        pass",
        "class Inner:\n        pass",
        "x_ptr.handle = n",
        "del n",
        "raise n",
        "n[0] = 1",
        "async def inner():\n        pass",
    ],
)
def test_a_kernel_may_only_do_what_is_on_the_list(statement):
    with pytest.raises(kernel_text.Refused):
        kernel_text.function(ast.parse(f"def kernel(x_ptr, n):\n    {statement}\n"), "kernel", {})


def test_a_field_has_a_name_that_nothing_else_has():
    point = kernel_text.named_tuple("Point", ["x", "y"])
    assert point(1, 2).y == 2
    for field in (
        "handle",
        "data",
        "fn",
        "co_code",
        "tofile",
        "ctypes",
        "rewriter",
        "load",
        "_x",
        "class",
        "format",
        3,
    ):
        with pytest.raises(ValueError):
            kernel_text.named_tuple("Point", ["x", field])


@pytest.mark.parametrize(
    "signature", ["x_ptr, f=eval", "x_ptr, f: eval", "x_ptr, *f: eval", "x_ptr, f=np", "x_ptr, *, f=eval"]
)
def test_a_default_is_no_name_of_the_functions_own(signature):
    """It is evaluated where the function is made: there, eval is Python's."""
    for text in (
        f"def kernel({signature}):\n    eval = np = 1\n",
        f"def kernel(f) -> eval:\n    eval = {len(signature)}\n",
    ):
        with pytest.raises(kernel_text.Refused):
            kernel_text.function(ast.parse(text), "kernel", {})


def test_what_is_looked_at_is_what_runs():
    """The interpreter reads a kernel's text again, from the last line that begins with def: which may be in a string."""
    hidden = '    """\ndef double_kernel(x_ptr, y_ptr, n, BLOCK):\n    print(open)\n    """\n'
    first = "    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    assert not judge_source(DOUBLE, DOUBLE_SOURCE.replace(first, hidden + first)).passed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # numbers that the host has found out
        ("2 * x, mask=mask)", "2 * v, mask=mask)"),
        ("2 * x, mask=mask)", "x * v / v * 2, mask=mask)"),
    ],
)
def test_numbers_of_the_data_reach_no_kernel_through_the_host(old, new):
    source = DOUBLE_SOURCE.replace(old, new).replace("y_ptr, n, BLOCK", "y_ptr, n, v, BLOCK")
    for value in ("x[0].item()", "x.tolist()[0]", "float(x.numpy()[0])", "float(x.untyped_storage().float()[0])"):
        told = source.replace("x.numel(), BLOCK", f"x.numel(), {value}, BLOCK")
        verdict = judge_source(replace(DOUBLE, cases=_one_number), told)
        assert verdict.state in ("fail", "error"), str(verdict)


def _one_number(rng):
    return [Case("x [1]", (torch.full((1,), rng.random() + 1),))]


def test_a_kernel_that_does_the_least_of_the_work():
    """PyTorch copies the result into place, which it may, and leaves one element to the kernel."""
    source = DOUBLE_SOURCE.replace("2 * x, mask=mask)", "x, mask=mask)")
    copy = replace(DOUBLE, reference=lambda x: x.clone(), cases=lambda rng: DOUBLE.cases(rng)[1:])
    assert judge_source(copy, source).passed
    lazy = source.replace("torch.empty_like(x)\n", "torch.empty_like(x)\n    y[1:].copy_(x[1:])\n")
    lazy = lazy.replace("(triton.cdiv(x.numel(), 64),)](x, y, x.numel()", "(1,)](x, y, 1")
    verdict = judge_source(copy, lazy)
    assert (verdict.state, verdict.diagnosis) == ("fail", "not-your-kernel"), str(verdict)
    assert "copied from the input" in str(verdict)


def test_neither_process_knows_the_checks():
    """Nor what is right: the file would not load, the function would raise."""
    body = """
import gc, sys
assert not [name for name in sys.modules if name.startswith("gpukit.checks") or name == "gpukit.grading.judge"]
assert not [thing for thing in gc.get_objects() if type(thing).__name__ in ("KernelExercise", "Case", "Misconception")]
return y
"""
    assert judge_source(DOUBLE, host(DOUBLE_SOURCE, body)).passed


RIGHT = {
    "a buffer that is kept": (
        "    y = torch.empty_like(x)\n",
        "    key = tuple(x.shape)\n    y = KEPT.setdefault(key, torch.empty_like(x)).clone()\n",
        "KEPT = {}\n",
    ),
    "a table made when the file is loaded": (
        "double_kernel[(triton",
        "assert TABLE.sum() == 6\n    double_kernel[(triton",
        "",
    ),
    "what a tensor looks like": (
        "    y = torch.empty_like(x)\n",
        "    assert x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.requires_grad and x.device.type == 'cpu'\n"
        "    y = x.new_empty(x.shape) if x.element_size() == 4 else None\n",
        "",
    ),
    "a view of what is stored": (
        "    return y\n",
        "    return y[None].squeeze(0).view(-1)\n",
        "",
    ),
    "autotune and heuristics": (
        "@triton.jit\n",
        "@triton.autotune([triton.Config({}, num_warps=w) for w in (1, 2)], key=['n'])\n"
        "@triton.heuristics({'EVEN': lambda args: args['n'] % 64 == 0})\n@triton.jit\n",
        "",
    ),
    "a grid that is a function": (
        "(triton.cdiv(x.numel(), 64),)",
        "lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)",
        "",
    ),
    "a constant of the file": ("2 * x, mask", "x * TWO, mask", "TWO = tl.constexpr(2)\n"),
    "a kernel made by a function": ("", "", ""),
    "a tuple of tensors": ("", "", ""),
    "a tuple with names": ("", "", ""),
    "a descriptor made by the host": ("", "", ""),
    "an address among the numbers": ("", "", ""),
}


def right(name: str) -> str:
    old, new, head = RIGHT[name]
    source = DOUBLE_SOURCE.replace("\n\n@triton.jit", f"\n{head}\n\n@triton.jit")
    match name:
        case "a table made when the file is loaded":
            return (
                source.replace("2 * x, mask", "tl.load(table_ptr + 2) * x, mask")
                .replace("y_ptr, n", "y_ptr, table_ptr, n")
                .replace("(x, y, x.numel()", "(x, y, TABLE, x.numel()")
                + "\n\nTABLE = torch.arange(4.0)\n"
            )
        case "autotune and heuristics":
            return source.replace(old, new).replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, EVEN: tl.constexpr")
        case "a kernel made by a function":
            kernel = source[source.index("@triton.jit") : source.index("def double(x)")].rstrip()
            body = "\n".join(f"    {line}" if line else "" for line in kernel.splitlines())
            made = f"def make():\n{body}\n\n    return double_kernel\n\n\ndouble_kernel = make()"
            return source.replace(kernel, made)
        case "a tuple of tensors":
            return (
                source.replace("x_ptr, y_ptr, n, BLOCK", "both, n, BLOCK")
                .replace("(x, y, x.numel()", "((x, y), x.numel()")
                .replace("x_ptr +", "both[0] +")
                .replace("y_ptr +", "both[1] +")
            )
        case "a tuple with names":
            named = right("a tuple of tensors").replace("((x, y),", "(Both(x, y),")
            named = named.replace("both[0]", "both.source").replace("both[1]", "both.target")
            return f'import collections\n{named}\n\nBoth = collections.namedtuple("Both", "source target")\n'
        case "a descriptor made by the host":
            return (
                source.replace("tl.load(x_ptr + offs, mask=mask)", "x_ptr.load([tl.program_id(0) * BLOCK])")
                .replace("(x, y, x.numel()", "(TensorDescriptor.from_tensor(x, [64]), y, x.numel()")
                .replace(
                    "import triton\n", "import triton\nfrom triton.tools.tensor_descriptor import TensorDescriptor\n", 1
                )
            )
        case "an address among the numbers":
            return source.replace(
                "tl.load(x_ptr + offs", "tl.load(x_ptr.to(tl.pointer_type(tl.float32)) + offs"
            ).replace("(x, y, x.numel()", "(x.data_ptr(), y, x.numel()")
    assert source.count(old) >= 1
    return source.replace(old, new)


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_right_answer_may_do(name):
    exercise = replace(DOUBLE, traffic=None)
    if name == "a descriptor made by the host":  # its rows fill 16 bytes
        exercise = replace(exercise, cases=lambda rng: DOUBLE.cases(rng)[1:])
    verdict = judge_source(exercise, right(name))
    assert verdict.passed, f"{verdict}\n{verdict.detail}"


def test_a_second_run_is_named_where_only_the_first_is_right():
    """The grid depends on the numbers."""
    source = DOUBLE_SOURCE.replace(
        "triton.cdiv(x.numel(), 64)", "triton.cdiv(x.numel(), 64) + int(bool(x[0] * 0 == 1))"
    )
    exercise = replace(DOUBLE, torch_ops=frozenset({"mul", "eq", "is_nonzero", "_local_scalar_dense"}), traffic=None)
    assert judge_source(exercise, source).passed
    source = source.replace("x.numel(), BLOCK", "x.numel() if x[0] == x[0] else 0, BLOCK")
    verdict = judge_source(exercise, source)
    assert (verdict.state, verdict.diagnosis) == ("fail", "not-your-kernel"), str(verdict)
    assert "your Python only shapes" in " ".join(str(verdict).split())


# -- the GPU that benchmarks measure lies with the judge -----------------------------------------------------------------
BENCHMARK = registry.exercise("benchmarking.benchmark")


def benchmark(body: str):
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return judge_source(BENCHMARK, f"def benchmark(device, run):\n{lines}")


@pytest.mark.parametrize(
    "body",
    [
        "import gc\nreturn [x for x in gc.get_objects() if hasattr(x, 'dram_gbps')][0].cold_us()",
        "from gpukit.simulator import queue_model\nreturn queue_model._gpu_of[device].cold_us()",
        "gpu = [c.cell_contents for c in run.__closure__ if hasattr(c.cell_contents, 'cold_us')][0]\nreturn gpu.cold_us()",
        "import sys\nframe = sys._getframe()\nwhile 'settings' not in frame.f_locals: frame = frame.f_back\nreturn 1.0",
        "return float('{0.__closure__[0].cell_contents.dram_gbps}'.format(run))",
    ],
)
def test_the_answer_to_a_benchmark_is_not_in_its_process(body):
    verdict = benchmark(body)
    assert verdict.diagnosis == "exception", str(verdict)


@pytest.mark.parametrize(
    "call",
    [
        "(0, 'cold_us')",
        "(0, '__class__')",
        "(0, '')",
        "(0, 'random', -1)",
        "(0, 'random', 'x')",
        "(0, 'random', 1, 2)",
        "(0, 'random', 1 << 70)",
        "(1, '__closure__')",
        "(1, '', 0)",
        "(99, 'clock')",
        "(-1, 'clock')",
        "(0.0, 'clock')",
        "(0,)",
        "'clock'",
        "[]",
        "None",
    ],
)
def test_what_is_no_call_of_the_device_ends_the_check(call):
    verdict = benchmark(f"device._line._calls.append({call})\nreturn device.clock()")
    assert (verdict.state, verdict.diagnosis, verdict.passed) == ("error", "malformed", 0), str(verdict)


def test_counts_are_the_judges():
    verdict = benchmark("import gpukit.grading.messages as m\nm.Reply.counts = {}\nreturn 1.0")
    assert verdict.state == "fail", str(verdict)


@pytest.mark.parametrize("body", ["while True: device.event()", "while True: device.clock()"])
def test_a_loop_of_calls_has_an_end(body, monkeypatch):
    monkeypatch.setattr(remote, "_MOST", 5_000)
    assert benchmark(body).state == "timeout"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("a = device.event()\nreturn a.elapsed_us(a)", "has not happened yet"),
        ("return device.event().elapsed_us(3)", "must be an event, got int"),
        ("device.random(-1)", "nbytes must be from 0"),
        ("device.random('much')", "ValueError"),
        ("run(3)", "TypeError"),
    ],
)
def test_a_wrong_call_is_told_with_its_line(body, said):
    verdict = benchmark(body)
    assert verdict.diagnosis == "exception" and said in str(verdict) and ".py, line" in str(verdict), str(verdict)


def test_arguments_lie_where_those_of_an_earlier_call_lay():
    """So that what is kept by an address is wrong in the next call. Each call has storages of its own, which a tape can name."""
    from gpukit.grading.host import Places

    places = Places()
    first, beside = places.copied((torch.arange(6.0).view(2, 3).t(), [torch.ones(6)]))
    assert first.stride() == (1, 3) and torch.equal(first, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(beside[0], torch.ones(6)) and beside[0].data_ptr() != first.data_ptr()
    again, number = places.copied((torch.zeros(6), 7))
    assert (again.data_ptr(), number) == (first.data_ptr(), 7)
    assert again.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert torch.equal(again, torch.zeros(6))
    (longer,) = places.copied((torch.zeros(7),))
    assert longer.data_ptr() != first.data_ptr()
