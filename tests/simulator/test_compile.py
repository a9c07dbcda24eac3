"""gpukit.compile: what a kernel became, on a machine without a GPU. Each kernel here is compiled once, for a second."""

import builtins
import dataclasses
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import gpukit
from gpukit import hardware
from gpukit.simulator.compiler import assembly, layouts
from gpukit.simulator.compiler import compile as compile_module
from gpukit.simulator.compiler import worker as compile_worker
from gpukit.simulator.compiler.compile import Compiled, CompileError, compile
from gpukit.simulator.compiler.occupancy import occupancy

HALF = torch.float16


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own: every test sees fresh compilations, and the user's cache stays as it is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUKIT_CACHE", str(folder))
        patch.setattr(compile_module, "_recent", {})
        yield folder / "compile"


def empty(*shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta")


def line_of(kernel, text):
    source = Path(__file__).read_text().split("\n")
    start = next(i for i, line in enumerate(source) if line.startswith(f"def {kernel.__name__}("))
    return next(i for i in range(start, len(source)) if text in source[i]) + 1


# ---- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + offs, e / tl.sum(e, 0), mask=offs < n)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        offs_k = k + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m * K + offs_k[None, :])
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m * N + offs_n, acc.to(tl.float16))


SCALE: tl.constexpr = tl.constexpr(3.0)


@triton.jit
def scaled(x):
    return x * SCALE


@triton.autotune([triton.Config({"BLOCK": 256}, num_warps=8), triton.Config({"BLOCK": 512})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scale(x, y, n, ACC: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Its helper, its global and its decorators have to come along."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else offs < n
    tl.store(y + offs, scaled(tl.load(x + offs, mask=mask).to(ACC)), mask=mask)


@triton.jit
def copy_tile(x, y, BM: tl.constexpr):
    y.store([tl.program_id(0) * BM, 0], x.load([tl.program_id(0) * BM, 0]))


@triton.jit
def odd_range(x_ptr):
    offs = tl.arange(0, 3)
    tl.store(x_ptr + offs, offs)


@pytest.fixture(scope="module")
def row() -> Compiled:
    return gpukit_compile(softmax, empty(4096), empty(4096), 4096, BLOCK=4096, gpu="h100")


def gpukit_compile(*args, **kwargs) -> Compiled:
    return compile(*args, **kwargs)


# ---- what it says -------------------------------------------------------------------------------------------------


def test_a_row_softmax(row):
    assert (row.kernel, row.gpu.key, row.num_warps, row.threads, row.num_stages) == ("softmax", "h100-sxm", 4, 128, 3)
    assert 32 <= row.registers <= 80 and row.spills == row.stack_bytes == 0 and 0 < row.shared_bytes < 100
    # 4,096 halves for 128 threads are 32 each: four loads of 128 bits
    (load,), (store,) = row.loads, row.stores
    assert (load.line, load.bits, load.count, load.to) == (line_of(softmax, "tl.load"), 128, 4, "registers")
    assert (store.line, store.bits, store.count) == (line_of(softmax, "tl.store"), 128, 4)
    assert load.file == str(Path(__file__).resolve()) == row.file
    assert row.atomics == [] and row.tensor_core == []
    assert "tt.load" in row.ttir and "#blocked" in row.ttgir and "ld.global" in row.ptx and "LDG.E.128" in row.sass
    assert row.occupancy == occupancy(row.gpu, 4, row.registers, row.shared_bytes)


def test_the_report(row):
    report = row.report()
    assert report == str(row) and "4 x ld.global.v4.b32, 128 bits per thread" in report and "no spills" in report
    assert all(part in row._repr_html_() for part in ("<table>", "occupancy", "128 bits per thread"))
    assert len(repr(row)) < 1500 and os.sep not in repr(row)  # the five listings are left out, and the path


def test_source_lines_are_linked(row):
    def opcodes(text):
        return {i.base for i in row.lines[line_of(softmax, text)].sass}

    assert "LDG" in opcodes("tl.load") and "MUFU" in opcodes("tl.exp") and "STG" in opcodes("tl.store")
    linked = sum(len(line.sass) for line in row.lines.values())
    assert linked == len(row.instructions) > 100  # all of them, those from inside tl.max too
    assert row.source[row.line].startswith("def softmax(") and "tl.exp" in row.source[line_of(softmax, "tl.exp")]
    assert all(1 <= i.stall <= 15 for i in row.instructions if i.base == "FADD")


def test_layouts_say_which_lanes_store_together(row):
    access = row.layout(line_of(softmax, "tl.store"), "store")
    assert (access.shape, access.element_bytes, access.contiguous, access.layout.kind) == ((4096,), 2, 8, "blocked")
    assert access.layout.warps_per_cta == (4,) and access.layout.threads_per_warp == (32,)
    instructions = access.layout.instructions(access.shape, per_thread=8)
    assert instructions.shape == (16, 256) and sorted(instructions.reshape(-1)) == list(range(4096))
    assert (np.sort(instructions, axis=1) == np.sort(instructions, axis=1)[:, :1] + np.arange(256)).all()
    assert row.layout(1, "store") is None


def test_pointers_are_specialised_as_by_the_launcher():
    misaligned = compile(softmax, empty(4097)[1:], empty(4096), 4096, BLOCK=1024)
    assert [a.bits for a in misaligned.loads] == [16] and [a.bits for a in misaligned.stores] == [128]


@pytest.mark.parametrize(
    ("value", "alike"),
    (
        (1, 1),
        (0, 16),
        (4096, 16),
        (781, 3),
        (-32, 16),
        (2**31, 2**32 + 16),
        (2**40 + 1, 2**32 + 3),
        (2**63, 2**63 + 16),
    ),
)
def test_numbers_of_a_kind_share_a_compilation(value, alike):
    assert compile_module._alike(value) == compile_module._alike(np.int64(value) if value < 2**63 else value) == alike
    assert (
        compile_module._alike(True) is True and compile_module._alike(1e-6) == 0.5 and compile_module._alike("a") == "a"
    )
    assert compile_module._alike((32, None)) == (16, None)


def test_tensor_cores_of_two_generations():
    args = (empty(64, 64), empty(64, 64), empty(64, 64), 64, 64)
    blocks = {"BM": 64, "BN": 64, "BK": 32}
    hopper, ampere = (compile(matmul, *args, **blocks, gpu=gpu, num_stages=2) for gpu in ("h100", "a100"))
    (use,) = hopper.tensor_core
    assert (use.instruction, use.m, use.n, use.k, use.a, use.accumulator) == ("wgmma", 64, 64, 16, "f16", "f32")
    assert use.line == line_of(matmul, "tl.dot") and use.flops == 2 * 64 * 64 * 16
    (use,) = ampere.tensor_core
    assert (use.instruction, use.m, use.n, use.k, use.b) == ("mma", 16, 8, 16, "f16")
    assert {a.to for a in ampere.loads} == {"shared memory"} and {a.bits for a in ampere.loads} == {128}
    assert "line " in str(use) and "16x8x16" in ampere.report()
    # each element of c is stored once
    access = ampere.layout(line_of(matmul, "tl.store"), "store")
    held = access.layout.elements(access.shape, redundant=-1)
    assert sorted(held[held >= 0]) == list(range(64 * 64))


def test_decorators_helpers_globals_and_dtypes_come_along():
    first = compile(scale, empty(1000), empty(1000), 1000, ACC=tl.float32)
    assert first.num_warps == 8 and first.options["num_warps"] == 8  # the first config
    assert "3.000000e+00" in first.ttir  # SCALE
    chosen = compile(scale, empty(1024), empty(1024), 1024, ACC=tl.float32, BLOCK=1024, num_warps=1)
    assert chosen.num_warps == 1 and all("@%p" not in i.text for i in chosen.ptx_instructions if "global" in i.opcode)
    assert {file for file, _, _ in chosen.functions} == {str(Path(__file__).resolve())} and len(chosen.functions) == 2


def test_tensor_descriptors_go_through_the_tma_unit():
    x, y = (TensorDescriptor.from_tensor(torch.zeros(128, 64, dtype=HALF), [64, 64]) for _ in range(2))
    tile = compile(copy_tile, x, y, BM=64)
    assert [(a.to, a.bits) for a in tile.loads + tile.stores] == [("TMA", None), ("TMA", None)]
    assert {(a.kind, a.to, a.shape) for a in tile.layouts} == {("load", "TMA", (64, 64)), ("store", "TMA", (64, 64))}


def test_a_traced_launch_can_be_compiled():
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    x = torch.zeros(4, 781, dtype=HALF)
    with gpukit.trace() as t:
        softmax[(4,)](x, torch.empty_like(x), 781, BLOCK=1024, num_warps=2)
    compiled = compile(t.launches[0], gpu="h100")
    assert compiled.num_warps == 2
    assert {a.bits for a in compiled.loads + compiled.stores} == {16}  # 16 does not divide 781
    with pytest.raises(TypeError, match="pass nothing but gpu"):
        compile(t.launches[0], x)


CELL = """
import triton, triton.language as tl
OFFSET = tl.constexpr(7)
def plus(x):
    return x + OFFSET
plus = triton.jit(plus)

@triton.jit
def in_a_cell(x, y, BLOCK: tl.constexpr = 64):
    offs = tl.arange(0, BLOCK)
    tl.store(y + offs, plus(tl.load(x + offs)))
"""


def test_a_kernel_from_a_notebook_cell():
    name = "/tmp/ipykernel_1/2743291.py"  # what IPython calls a cell; there is no such file
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    cell = {"__name__": "__main__"}
    exec(__builtins__["compile"](CELL, name, "exec"), cell)
    made = compile(cell["in_a_cell"], empty(64, dtype=torch.int32), empty(64, dtype=torch.int32))
    assert [a.line for a in made.loads] == [11] and made.file == name and made.source[9].startswith("def in_a_cell")


def test_where_kernels_are_compiled_for_the_gpu_too():
    """Without TRITON_INTERPRET, a kernel is another kind of object, and compiles to the same thing."""
    script = (
        "import torch, triton, sys; sys.path.insert(0, 'tests/simulator'); sys.argv = ['']\n"
        "import test_compile as t\n"
        "assert isinstance(t.softmax, triton.JITFunction)\n"
        "c = t.compile(t.softmax, t.empty(4096), t.empty(4096), 4096, BLOCK=4096)\n"
        "assert t.compile_module._recent and c.loads[0].bits == 128\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=root)


@triton.jit
def says_torch(x_ptr: torch.Tensor, y_ptr, n: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr) + n)


@pytest.mark.parametrize(("kernel", "torch_is_there"), [(softmax, False), (says_torch, True)])
def test_the_compiler_does_without_torch_unless_the_kernel_names_it(kernel, torch_is_there):
    job = compile_module._job(kernel, (empty(64), empty(64), 64), {"BLOCK": 64} if kernel is softmax else {})
    script = (
        "import json, sys; from gpukit.simulator.compiler import worker; answer = worker._run(json.load(sys.stdin))\n"
        "print('torch.nn' in sys.modules, '.entry' in answer['ptx'])\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = json.dumps(job | {"capability": 90})
    done = subprocess.run([sys.executable, "-c", script], input=told, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [str(torch_is_there), "True"], done.stderr


# ---- the cache ----------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_compiled(row, cache, monkeypatch):
    monkeypatch.setattr(compile_module, "_ask_worker", lambda *_: pytest.fail("the compiler was started"))
    again = (softmax, empty(4096), empty(4096), 4096)
    assert compile(*again, BLOCK=4096, gpu=hardware.gpu("h100")) == row
    monkeypatch.setattr(compile_module, "_recent", {})  # as in another process
    assert compile(*again, BLOCK=4096).sass == row.sass
    assert compile(softmax, torch.zeros(8, dtype=HALF), empty(1), 1600, BLOCK=4096).ptx == row.ptx  # the same types


def test_a_notebook_that_starts_again_compiles_nothing_again(cache, monkeypatch):
    source = "@triton.jit\ndef cell_kernel(x_ptr):\n    tl.store(x_ptr, tl.load(x_ptr) + 1)\n"
    made = []
    for process in (1, os.getpid()):  # IPython calls the folder of a process's cells after it
        name = f"/tmp/ipykernel_{process}/1234.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = {"triton": triton, "tl": tl, "__name__": "__main__"}
        exec(builtins.compile(source, name, "exec"), scope)
        made.append(compile(scope["cell_kernel"], empty(8)))
        assert made[-1].loads[0].file == made[-1].file == name
        monkeypatch.setattr(compile_module, "_recent", {})
        monkeypatch.setattr(compile_module, "_ask_worker", lambda *_: pytest.fail("the compiler was started"))
    assert [str(load) for load in made[0].loads] == [str(load) for load in made[1].loads]


def test_a_damaged_cache_is_no_matter(row, cache, monkeypatch):
    monkeypatch.setattr(compile_module, "_recent", {})
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    asked = []
    monkeypatch.setattr(compile_module, "_ask_worker", lambda *args: asked.append(args) or {"error": ERROR})
    monkeypatch.setattr(compile_module, "_remember", lambda *_: None)
    with pytest.raises(CompileError, match="does not compile for H100 SXM:\nboom"):
        compile(softmax, empty(4096), empty(4096), 4096, BLOCK=4096)
    assert asked


ERROR = {"kind": "RuntimeError", "message": "boom", "at": None, "details": ""}


@triton.jit
def double(x, y, n, WIDE: tl.constexpr):
    if WIDE:
        tl.static_assert(x.dtype.element_ty != tl.float16, "no room")
    tl.store(y, 2 * tl.load(x))


@triton.jit
def product(x, y, n, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK):
        total = tl.dot(tl.load(x + row * n + k + column), tl.load(x + (k + row) * BLOCK + column), total)
    tl.store(y + row * BLOCK + column, total)


ACCEPTED = """
import json, sys
from triton.backends.nvidia.compiler import CUDABackend
from gpukit.simulator.compiler import worker
stages = []
for stage in ("make_ttgir", "make_llir", "make_ptx"):
    def noted(*args, make=getattr(CUDABackend, stage), stage=stage):
        stages.append(f"{stage} {args[-1]}")
        return make(*args)
    setattr(CUDABackend, stage, staticmethod(noted) if stage == "make_ttgir" else noted)
answer = worker.accepts(json.load(sys.stdin), ["a100-80gb", "h100-sxm"])
print(json.dumps([stages, answer.get("gpu", ""), answer.get("message", "")]))
"""


def accepted(jobs, folder):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", ACCEPTED]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


@pytest.mark.parametrize("wide", [False, True])
def test_of_two_dtypes_of_16_bits_one_is_compiled_to_the_end(wide, tmp_path):
    def job(dtype):
        pointer = empty(64, dtype=dtype)
        return compile_module._job(double, (pointer, pointer, 64), {"WIDE": wide})

    half, brain, single = map(job, (torch.float16, torch.bfloat16, torch.float32))
    assert compile_worker._of_each_width([half, brain, single]) == [brain, single]
    assert compile_worker._of_each_width([brain, half]) == [brain] and compile_worker._of_each_width([half]) == [half]
    stages, _, message = accepted([half, brain, single], tmp_path)
    if wide:  # the front end sees each of them
        assert message.endswith("no room") and stages == []
        return
    assert message == "" and stages == [
        "make_ttgir 80", "make_ttgir 80", "make_llir 80", "make_ptx 80", "make_ttgir 80", "make_llir 80",
        "make_ttgir 90", "make_llir 90", "make_ptx 90",
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_a_width_that_is_not_compiled_to_the_end_must_fit_all_the_same(first, tmp_path):
    """Six pairs of tiles of 64 x 64 floats: 192 KB, for which an H100 has room and an A100 has not."""
    tensors = [empty(64, 640, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    jobs = [compile_module._job(product, (x, x, 640), {"BLOCK": 64, "num_stages": 7}) for x in tensors]
    assert accepted(jobs[:1], tmp_path)[1:] == ["", ""]
    stages, gpu, message = accepted(jobs if first == 0 else jobs[::-1], tmp_path)
    assert gpu == "A100 80GB SXM" and message.startswith("out of resource: shared memory")
    assert stages[-1] == "make_llir 80"  # neither LLVM nor ptxas was asked


def test_one_process_compiles_for_many_and_another_takes_its_place(monkeypatch):
    worker = compile_module._Worker()
    job = compile_module._job(softmax, (empty(64), empty(64), 64), {"BLOCK": 64}) | {"capability": 90}
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    told = json.dumps({"job": job, "environment": environment, "path": sys.path, "folder": os.getcwd()})
    try:
        with futures.ThreadPoolExecutor(3) as pool:
            answers = [json.loads(said) for said, _ in pool.map(lambda _: worker.ask(told, 100), range(3))]
        assert len({answer["ptx"] for answer in answers}) == 1 and "ld.global" in answers[0]["ptx"]
        first = worker._process
        with pytest.raises(TimeoutError):
            worker.ask(told, 0)
        assert json.loads(worker.ask(told, 100)[0])["ptx"] == answers[0]["ptx"] and worker._process is first
        first.kill()  # as when it has been idle for long
        first.wait()
        assert json.loads(worker.ask(told, 100)[0])["ptx"] == answers[0]["ptx"] and worker._process is not first
        first = worker._process
        first.send_signal(signal.SIGSTOP)  # it is asked, and dies before it answers
        timer = threading.Timer(0.5, first.kill)
        timer.start()
        assert json.loads(worker.ask(told, 100)[0])["ptx"] == answers[0]["ptx"] and worker._process is not first
    finally:
        worker.end()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said, complaints = worker.ask(told, 100)
    assert said == complaints == "" and worker._process is None


def test_where_the_cache_lies(monkeypatch):
    monkeypatch.delenv("GPUKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_module._cache_folder() == Path("/somewhere/gpukit/compile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile_module._cache_folder() == Path.home() / ".cache/gpukit/compile"


# ---- bad input ----------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile():
    with pytest.raises(CompileError) as caught:
        compile(odd_range, empty(3, dtype=torch.int32))
    error = caught.value
    assert error.line == line_of(odd_range, "tl.arange") and Path(error.file).name == "test_compile.py"
    assert "power of 2" in error.message and "offs = tl.arange(0, 3)" in str(error)
    assert str(error).startswith(f"odd_range does not compile for H100 SXM, test_compile.py line {error.line}:")


WRONG_CELL = """
import triton, triton.language as tl
def grows(x_ptr, n):
    total = 0
    for i in range(0, n):
        total += 0.5
    tl.store(x_ptr, total)
grows = triton.jit(grows)
"""


def test_a_cell_that_does_not_compile():
    """The message that Triton wraps in a repr is unwrapped; the number that IPython calls a cell by says nothing."""
    name = "/tmp/ipykernel_1/88.py"
    linecache.cache[name] = (len(WRONG_CELL), None, WRONG_CELL.splitlines(keepends=True), name)
    cell = {"__name__": "__main__"}
    exec(__builtins__["compile"](WRONG_CELL, name, "exec"), cell)
    with pytest.raises(CompileError) as caught:
        compile(cell["grows"], empty(3), 7)
    first, line, message = str(caught.value).split("\n")[:3]
    assert first == "grows does not compile for H100 SXM, line 5:" and line == "    for i in range(0, n):"
    assert message.startswith("Loop-carried variable total has initial type int32 but is re-assigned to fp32 in loop!")


@triton.jit
def missing_helper(x_ptr):
    tl.store(x_ptr, no_such_function(1))  # noqa: F821


def test_a_kernel_that_uses_an_unknown_name():
    with pytest.raises(CompileError, match="no_such_function is not defined") as caught:
        compile(missing_helper, empty(3))
    assert caught.value.line == line_of(missing_helper, "no_such_function")


def test_arguments_that_do_not_fit():
    x = empty(4)
    with pytest.raises(TypeError, match=r"softmax: missing a required argument: 'n'; it takes \(x_ptr"):
        compile(softmax, x, x, BLOCK=4)
    with pytest.raises(TypeError, match=r"softmax: x_ptr must be a tensor, a tensor descriptor, .* got <object"):
        compile(softmax, object(), x, 4, BLOCK=4)
    with pytest.raises(TypeError, match="softmax: no parameter is called 'z_ptr'"):
        compile(softmax, x, x, 4, BLOCK=4, z_ptr=x)
    with pytest.raises(TypeError, match="softmax: Keyword argument wraps was specified but unrecognised"):
        compile(softmax, x, x, 4, BLOCK=4, wraps=4)
    with pytest.raises(TypeError, match=r"kernel must be a @triton.jit function or a traced launch, got <function"):
        compile(line_of, x)
    scope: dict = {"tl": tl}
    exec("def from_a_string(x):\n    tl.store(x, 1)", scope)
    with pytest.raises(TypeError, match="from_a_string: its source cannot be read"):
        compile(compile_worker_kernel(scope["from_a_string"]), x)


def compile_worker_kernel(fn):
    """A function wrapped as @triton.jit does, without asking for its source."""

    class Wrapped:
        pass

    wrapped = Wrapped()
    wrapped.fn, wrapped.kwargs = fn, {}
    return wrapped


def test_gpus_and_versions_that_do_not_fit(monkeypatch):
    with pytest.raises(ValueError, match="no GPU is called 'h1000'"):
        compile(softmax, empty(4), empty(4), 4, BLOCK=4, gpu="h1000")
    volta = dataclasses.replace(hardware.gpu("t4"), name="V100", compute_capability=(7, 0))
    with pytest.raises(ValueError, match=r"compute capability 7.5 \(Turing\) or later, V100 is older"):
        compile(softmax, empty(4), empty(4), 4, BLOCK=4, gpu=volta)
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(RuntimeError, match=r"needs Triton 3\.6 or later, got 3\.5\.1"):
        compile(softmax, empty(4), empty(4), 4, BLOCK=4)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="Linux wheels only"):
        compile(softmax, empty(4), empty(4), 4, BLOCK=4)


# ---- occupancy ----------------------------------------------------------------------------------------------------

# (gpu, warps, registers, shared bytes) -> programs, warps, limit; by NVIDIA's occupancy calculator
OCCUPANCY = {
    ("h100", 4, 32, 0): (16, 64, "registers"),  # registers, warps and threads all admit 16
    ("h100", 4, 64, 0): (8, 32, "registers"),
    ("h100", 4, 65, 0): (7, 28, "registers"),  # 72 are taken
    ("h100", 8, 255, 0): (1, 8, "registers"),
    ("h100", 1, 16, 0): (32, 32, "programs"),
    ("h100", 4, 32, 100 * 1024): (2, 8, "shared memory"),  # and 1 KiB of each for the system
    ("h100", 8, 32, 227 * 1024): (1, 8, "shared memory"),
    ("a100", 8, 32, 227 * 1024): (0, 0, "shared memory"),
    ("t4", 32, 32, 0): (1, 32, "warps"),
    ("rtx-4090", 8, 32, 0): (6, 48, "warps"),
}


@pytest.mark.parametrize("case", OCCUPANCY, ids=str)
def test_occupancy(case):
    gpu, *facts = case
    found = occupancy(hardware.gpu(gpu), *facts)
    assert (found.programs, found.warps, found.limit) == OCCUPANCY[case]
    assert found.fraction == found.warps / found.max_warps
    assert str(found).startswith(f"{found.programs}: one program asks" if not found.programs else str(found.programs))


# ---- reading the listings -----------------------------------------------------------------------------------------


def test_ptx_with_inlined_lines():
    text = """
	.loc	1 20 5                          // k.py:20:5
	mov.b32 	%r1, 0;
	.loc	2 196 12, function_name $L__info_string0, inlined_at 2 216 16
	max.f32 	%r2, %r1, %r1;
	.loc	2 216 16, function_name $L__info_string0, inlined_at 1 21 9
	.loc	2 196 12, function_name $L__info_string0, inlined_at 2 216 16
	max.f32 	%r2, %r1, %r1;
$L__BB0_1:
	@%p1 st.global.v2.b64 [ %rd5 + 0 ], { %rd1, %rd2 };
	@!%p2 bra 	$L__BB0_1;
	ret;
	.file	1 "/home/me/k.py"
	.file	2 "/site/triton/language/standard.py"
"""
    found = assembly.ptx(text)
    assert [i.opcode for i in found] == ["mov.b32", "max.f32", "max.f32", "st.global.v2.b64", "bra", "ret"]
    assert [i.line for i in found] == [20, 20, 21, 21, 21, 21]  # a call of unknown origin: the line before it
    assert found[2].frames == (
        ("/site/triton/language/standard.py", 196),
        ("/site/triton/language/standard.py", 216),
        ("/home/me/k.py", 21),
    )
    assert found[3].labels == ("$L__BB0_1",)
    (access,) = assembly.memory_accesses(found)
    assert (access.kind, access.bits, access.line) == ("store", 128, 21)


@pytest.mark.parametrize(
    ("opcode", "rest", "expected"),
    (
        ("ld.global.b16", "{ %rs1 }, [ %rd1 + 0 ];", ("load", 16, "registers")),
        ("ld.global.L1::evict_last.v4.b32", "{ %r1 }, [ %rd1 + 0 ];", ("load", 128, "registers")),
        ("cp.async.cg.shared.global", "[ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", ("load", 128, "shared memory")),
        ("atom.global.gpu.acq_rel.add.f32", "%r1, [ %rd1 + 0 ], %r2;", ("atomic", 32, "registers")),
        ("red.global.gpu.relaxed.add.noftz.f16x2", "[ %rd1 + 0 ], %r2;", ("atomic", 32, "registers")),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "[%rd1, {%r1, %r2}], [%r3];", ("store", None, "TMA")),
        ("cp.async.bulk.commit_group", ";", None),
        ("ld.shared.v4.b32", "{ %r1 }, [ %r2 ];", None),
    ),
)
def test_what_counts_as_an_access_to_global_memory(opcode, rest, expected):
    found = assembly.memory_accesses([assembly.Instruction(opcode, f"{opcode} {rest}", (), 1)])
    assert [(a.kind, a.bits, a.to) for a in found] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("opcode", "expected"),
    (
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", ("wgmma", 64, 256, 16, "bf16", "bf16", "f32")),
        ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2", ("wgmma", 64, 64, 32, "e4m3", "e5m2", "f32")),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", ("mma", 16, 8, 16, "f16", "f16", "f32")),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", ("mma", 16, 8, 8, "tf32", "tf32", "f32")),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", ("mma", 16, 8, 32, "s8", "s8", "s32")),
    ),
)
def test_tensor_core_instructions(opcode, expected):
    (use,) = assembly.tensor_core_uses([assembly.Instruction(opcode, opcode + " {%r1}, {%r2};", (), 1)])
    assert (use.instruction, use.m, use.n, use.k, use.a, use.b, use.accumulator) == expected


SASS = """
	//## File "/home/me/k.py", line 5
        /*0000*/                   MOV R1, c[0x0][0x28] ; /* stall 2 */
.L_x_1:
	//## File "/site/triton/language/standard.py", line 9 inlined at "/home/me/k.py", line 6
	//## File "/home/me/k.py", line 6
        /*0010*/              @!P0 LDG.E.128 R16, desc[UR6][R26.64] ; /* stall 4, sets 2, reads 0 */
.L_x_2:
        /*0020*/                   FADD R2, R2, R16 ; /* stall 5, waits 0 2 */
        /*0030*/               @P1 BRA `(.L_x_2) ; /* stall 5 */
        /*0040*/               @P2 BRA `(.L_x_1) ; /* stall 5 */
        /*0050*/                   EXIT ; /* stall 5 */
.L_x_3:
        /*0060*/                   BRA `(.L_x_3); /* stall 0 */
        /*0070*/                   NOP; /* stall 0 */
"""


def test_sass_and_its_loops():
    found = assembly.sass(SASS)
    assert [(i.opcode, i.line, i.stall) for i in found[:3]] == [("MOV", 5, 2), ("LDG.E.128", 6, 4), ("FADD", 6, 5)]
    assert [(i.sets, i.reads, i.waits) for i in found[:3]] == [(None, None, ()), (2, 0, ()), (None, None, (0, 2))]
    assert found[1].text.startswith("@!P0 LDG.E.128 R16") and found[1].base == "LDG" and found[-1].opcode == "BRA"
    loops = assembly.loops(found)
    assert [(loop.start, loop.end, loop.depth) for loop in loops] == [(1, 4, 1), (2, 3, 2)]
    assert assembly.innermost(loops, 2).depth == 2 and assembly.innermost(loops, 1).depth == 1
    assert assembly.innermost(loops, 5) is None


@pytest.mark.parametrize(
    ("lines", "step"),
    (
        (["UIADD3 UR4, UR4, -0x22, URZ", "ISETP.NE.U32.AND P0, PT, RZ, UR4, PT", "@P0 BRA `(.L_x_0)"], 34),
        (["IADD3 R5, P1, R5, 0x4, RZ", "UISETP.GE.AND UP0, UPT, UR2, UR3, UPT", "ISETP.GE.AND P0, PT, R5, R7, PT", "@!P0 BRA `(.L_x_0)"], 4),
        (["VIADD R0, R0, 0xfffffffc", "ISETP.GT.AND P1, PT, R0, 0x3, PT", "@P1 BRA `(.L_x_0)"], 4),
        (["add.s32 \t%r8, %r8, -1;", "setp.ne.b32 \t%p1, %r8, 0;", "@%p1 bra \t$L_x_0;"], 1),
        (["UIADD3 UR4, UR4, UR5, URZ", "ISETP.NE.U32.AND P0, PT, RZ, UR4, PT", "@P0 BRA `(.L_x_0)"], 0),
        (["FADD R1, R1, R2", "BRA `(.L_x_0)"], 0),
    ),
)  # fmt: skip
def test_by_how_much_a_loop_counts(lines, step):
    opcode = [line.split()[1 if line[0] == "@" else 0] for line in lines]
    label = "$L_x_0" if lines[0][0] == "a" else ".L_x_0"
    listing = [
        assembly.Instruction(o, line, (), 1, (label,) * (i == 0))
        for i, (o, line) in enumerate(zip(opcode, lines, strict=True))
    ]
    (loop,) = assembly.loops(listing)
    assert assembly.counter_step(listing, loop) == step


def test_what_ptxas_says():
    text = """ptxas info    : Function properties for k
    208 bytes stack frame, 200 bytes spill stores, 180 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers"""
    assert assembly.ptxas_log(text) == {
        "registers": 128,
        "stack_bytes": 208,
        "spill_stores": 200,
        "spill_loads": 180,
    }


# ---- layouts ------------------------------------------------------------------------------------------------------


def layout(text, **aliases):
    return layouts._layout(text, {f"#{name}": value for name, value in aliases.items()})


BLOCKED = "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [2, 1], order = [1, 0]}>"


def test_a_blocked_layout():
    held = layout(BLOCKED).elements((16, 16))
    assert held.shape == (2, 4, 32)
    assert held[0, :, 0].tolist() == [0, 1, 2, 3]  # a thread's registers run along the fast dimension
    assert held[0, 0, :5].tolist() == [0, 4, 8, 12, 16]  # four lanes make a row
    assert held[1, 0, 0] == 8 * 16  # the second warp
    larger = layout(BLOCKED).elements((32, 32))
    assert larger.shape == (2, 16, 32) and sorted(larger.reshape(-1)) == list(range(1024))


def test_a_block_smaller_than_the_threads_has_copies():
    held = layout(BLOCKED).elements((8, 8), redundant=-1)
    assert sorted(held[held >= 0]) == list(range(64)) and held[1].max() == -1
    assert (layout(BLOCKED).elements((8, 8)) >= 0).all()
    together = layout(BLOCKED).instructions((8, 8), per_thread=4)
    assert together.shape == (2, 128)


def test_slices_and_linear_layouts():
    rows = layout("#ttg.slice<{dim = 1, parent = #blocked}>", blocked=BLOCKED)
    assert (rows.kind, rows.sliced) == ("slice", (1,))
    held = rows.elements((16,), redundant=-1)
    assert sorted(held[held >= 0]) == list(range(16)) and held[0, 0, :8].tolist() == [0, -1, -1, -1, 1, -1, -1, -1]
    linear = layout(
        "#ttg.linear<{register = [[0, 1], [8, 0]], lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warp = [], block = []}>"
    )
    held = linear.elements((16, 8))
    assert held.shape == (1, 4, 32) and held[0, :, 0].tolist() == [0, 1, 64, 65]
    with pytest.raises(NotImplementedError, match="nvidia_mma"):
        layout("#ttg.nvidia_mma<{versionMajor = 2}>").elements((16, 8))


def test_a_layout_larger_than_its_block_holds_copies():
    """As the row of a bias has it that is loaded in the layout of the tile it is added to."""
    row = layouts.Layout("linear", "", linear=(((0, 1), (8, 0)), ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ((16, 0),)))
    held = row.elements((1, 8))
    assert held.shape == (2, 4, 32) and sorted(set(held.reshape(-1).tolist())) == list(range(8))
    once = row.elements((1, 8), redundant=-1)
    assert sorted(set(once.reshape(-1).tolist())) == list(range(-1, 8)) and (once[1] == -1).all()


def test_accesses_of_ttgir():
    text = f"""#blocked = {BLOCKED}
#loc = loc("/home/me/k.py":7:9)
#loc1 = loc("/site/triton/language/standard.py":3:9)
#loc2 = loc("x"(#loc))
#loc3 = loc(callsite(#loc1 at #loc2))
  %x = tt.load %p, %m : tensor<16x16x!tt.ptr<bf16>, #blocked> loc(#loc3)
  %y = tt.load %s : !tt.ptr<f32> loc(#loc2)
  tt.store %p, %x : tensor<16x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc2)
"""
    load, store = layouts.access_layouts(text)
    assert (load.kind, load.file, load.line, load.shape, load.element_bytes) == (
        "load",
        "/home/me/k.py",
        7,
        (16, 16),
        2,
    )
    assert (store.kind, store.shape, store.layout.kind, store.element) == ("store", (16,), "slice", "f32")


def test_accesses_of_ttgir_know_their_tensors():
    """By way of offsets, masks, choices, and what a loop begins with and hands on."""
    text = f"""#blocked = {BLOCKED}
#loc = loc("/home/me/k.py":7:9)
  tt.func public @k(%x_ptr: !tt.ptr<f32> loc("x_ptr"), %w_ptr: !tt.ptr<f32>, %n: i32) attributes {{}} {{
    %0 = tt.splat %x_ptr : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>, #blocked>
    %1 = tt.addptr %0, %offs : tensor<16x!tt.ptr<f32>, #blocked>, tensor<16xi32, #blocked>
    %2 = tt.splat %w_ptr : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>, #blocked>
    %3:2 = scf.for %i = %c0 to %n step %c1 iter_args(%s = %cst, %at = %1) -> (f32, tensor<16x!tt.ptr<f32>, #blocked>)  : i32 {{
      %4 = tt.load %at, %m : tensor<16x!tt.ptr<f32>, #blocked> loc(#loc)
    }}
    %5 = arith.select %m, %2, %2 : tensor<16xi1, #blocked>, tensor<16x!tt.ptr<f32>, #blocked>
    tt.store %3#1, %4 : tensor<16x!tt.ptr<f32>, #blocked> loc(#loc)
    %6 = tt.atomic_rmw fadd, relaxed, gpu, %5, %4 : (tensor<16x!tt.ptr<f32>, #blocked>) -> tensor<16xf32, #blocked> loc(#loc)
    %7 = tt.load %elsewhere : tensor<32x!tt.ptr<f32>, #blocked> loc(#loc)
"""
    found = [(access.kind, access.tensors) for access in layouts.access_layouts(text)]
    assert found == [("load", ("x_ptr",)), ("store", ("x_ptr",)), ("atomic", ("w_ptr",)), ("load", ())]


# ---- the worker, in this process ----------------------------------------------------------------------------------


def test_marks_inside_inline_assembly_are_removed():
    ptx = "\n".join(
        [".loc 1 7 9", "// begin inline asm", "mov.u32 %r1, 0x0;", "\t.loc 1 8 9", "ld.global.b32", "// end inline asm"]
    )
    stages = {"ptx": lambda source, metadata: ptx + "\n.loc 1 9 1"}
    compile_worker._true_lines(None, stages)
    kept = stages["ptx"](None, None)
    assert ".loc 1 8 9" not in kept and kept.startswith(".loc 1 7 9") and kept.endswith(".loc 1 9 1")
    assert len(compile_worker._true_lines()) == 2
