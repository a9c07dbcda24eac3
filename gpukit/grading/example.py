"""What an answer moves, compiles to and takes on a GPU that need not be there: one call of it on an input of a size that real
work has, in a process of its own, since an answer may hang or crash.

    weigh("softmax.fused", path, "h200")          on the exercise's example
    weigh("softmax.fused", path, "h200", [("bfloat16", (4096, 1024)), ("bfloat16", (4096, 4096))])

Bytes and launches are counted in the interpreter, registers and shared memory are the compiler's, times are modelled. A plain
function that may hold few tensors at a time is called on the largest case of its check: its memory is counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit import course
from gpukit.grading import registry
from gpukit.grading.server import IMPORT_GPUKIT

if TYPE_CHECKING:
    from gpukit.grading.exercise import Exercise
    from gpukit.grading.verdict import Verdict

PROGRAMS = 8  # of each launch that the interpreter runs; what they move is scaled to the whole grid
TIMEOUT_S = 300


def weigh(
    exercise_id: str, path: Path, gpu: str, sizes: Sequence[tuple[str, Sequence[int]]] = (), measured: bool = False
) -> list[dict]:
    """What one call of the answer in the file `path` moves and takes, for each of `sizes` (dtype, sizes of the example's
    tensors); without them for the example as it stands. Each is {"arguments", "launches", "load_bytes", "store_bytes",
    "atomic_bytes", "registers", "shared_bytes", "spills", "time_us", "limit"}; a plain function's is {"arguments",
    "peak_bytes", "time_us"}.
    `measured`: nothing but {"time_us"}, by the clock of this machine's GPU.

    Raises CourseError with what went wrong in it.
    """
    with tempfile.TemporaryDirectory(prefix="gpukit-") as folder:
        answer, said = Path(folder) / "answer.json", Path(folder) / "said.txt"
        told = json.dumps([exercise_id, str(path), gpu, list(sizes), measured, str(answer)])
        start = f"{IMPORT_GPUKIT}from gpukit.grading.example import main; main()"
        environment = dict(os.environ)
        if not measured:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", start, told],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        where = f"{path.parent.name}/{path.name}"
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise course.CourseError(f"{exercise_id}: {where} gave no answer within {TIMEOUT_S} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not answer.exists():
            last = said.read_text(errors="replace").strip().rpartition("\n")[2]
            raise course.CourseError(f"{exercise_id}: {where} ended with exit code {code}: {last[:300]}")
        return json.loads(answer.read_text())


def offer(verdict: Verdict, terminal: bool = False) -> str:
    """What a learner's kernel that passes is told to look at next, to be put behind the verdict; "" for any other."""
    known = verdict.passed and verdict.impl == "exercises" and (course.root() / "solutions").is_dir()
    if not known or not registry.exercise(verdict.id).kernel:
        return ""
    return "  next: " + (f"gpukit compare {verdict.id}" if terminal else f'gpukit.compare("{verdict.id}")')


def main() -> None:
    """In the process of its own."""
    exercise_id, path, gpu, sizes, measured, answer = json.loads(sys.argv[-1])
    exercise = registry.exercise(exercise_id)
    spec = importlib.util.spec_from_file_location("exercise", path)
    module = sys.modules["exercise"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, exercise.function)
    if measured:
        found = [_timed(exercise, function, size) for size in sizes]
    elif exercise.kernel:
        found = [_of_kernel(exercise, function, gpu, size) for size in sizes or [None]]
    else:
        found = [_of_function(exercise, function)]
    Path(answer).write_text(json.dumps(found))


def _of_kernel(exercise: Exercise, function: Any, gpu: str, size: tuple[str, Sequence[int]] | None) -> dict:
    from gpukit import hardware
    from gpukit.grading.host import numbers_kept
    from gpukit.grading.worker import call
    from gpukit.simulator.prediction.predict import predict

    args = arguments(exercise, size)
    target = hardware.gpu(gpu)
    with numbers_kept(), hardware.imagined(target):
        prediction = predict(lambda: call(function, args, exercise), gpu=target, sample=PROGRAMS)
    steps = prediction.steps
    moved = [step.launch for step in steps if step.launch is not None]
    compiled = [step.compiled for step in steps if step.compiled is not None]
    return {
        "arguments": described(function, args),
        "launches": len(moved),
        **{
            name: sum(getattr(launch, name) for launch in moved)
            for name in ("load_bytes", "store_bytes", "atomic_bytes")
        },
        "registers": max((c.registers for c in compiled), default=0),
        "shared_bytes": max((c.shared_bytes for c in compiled), default=0),
        "spills": max((c.spills for c in compiled), default=0),
        "time_us": prediction.time_us,
        "limit": prediction.limit,
    }


def _timed(exercise: Exercise, function: Any, size: tuple[str, Sequence[int]]) -> dict:
    import torch

    from gpukit.grading.host import mapped
    from gpukit.grading.worker import call
    from gpukit.timing import time_ms

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_meta:
            return value.cuda()
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return made.copy_(torch.rand(value.shape, device="cuda"))

    args = mapped(on_gpu, arguments(exercise, size))
    return {"time_us": 1e3 * time_ms(lambda: call(function, args, exercise)).median_ms}


def _of_function(exercise: Exercise, function: Any) -> dict:
    import torch

    from gpukit import live

    torch.set_num_threads(1)
    args = arguments(exercise, None)
    with live.watch() as memory:
        function(*args)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        function(*args)
        took.append(time.perf_counter() - start)
    told = {"arguments": described(function, args), "peak_bytes": memory.peak_bytes}
    return {**told, "time_us": 1e6 * statistics.median(took)}


def arguments(exercise: Exercise, size: tuple[str, Sequence[int]] | None) -> tuple:
    """The exercise's example, or one of another dtype and size; the largest case of its check where it has none."""
    import torch

    if exercise.id in EXAMPLES:
        dtype, sizes = size or ("bfloat16", ())
        return EXAMPLES[exercise.id](getattr(torch, dtype), *sizes)
    if size is not None:
        raise course.CourseError(f"{exercise.id} has no example whose size can be chosen")
    cases = exercise.cases(random.Random(0))
    return max(cases, key=lambda case: sum(getattr(arg, "nbytes", 0) for arg in case.args)).args


def described(function: Any, args: tuple) -> str:
    """ "x [4096, 4096] bfloat16, BLOCK_N 4096": tensors and numbers, by the names that the function gives them."""
    code = function.__code__
    names = [*code.co_varnames[: code.co_argcount], "dy"]
    told = []
    for name, arg in zip(names, args, strict=False):
        if hasattr(arg, "shape"):
            told.append(f"{name} {list(arg.shape)} {str(arg.dtype).removeprefix('torch.')}")
        elif isinstance(arg, int | float):
            told.append(f"{name} {arg:g}" if isinstance(arg, float) else f"{name} {arg}")
    return ", ".join(told)


# ---- the inputs ------------------------------------------------------------------------------------------------------


def _t(dtype: Any, *shape: int) -> Any:
    """A tensor with a size and no memory: of floating-point numbers a size is all that counts."""
    import torch

    return torch.empty(shape, dtype=dtype, device="meta")


def _f32(*shape: int) -> Any:
    import torch

    return _t(torch.float32, *shape)


def _ints(count: int, below: int, dtype: str = "int32") -> Any:
    """Indices must be there: 0, 1, 2, ... below `below`, and again from 0."""
    import torch

    return (torch.arange(count) % below).to(getattr(torch, dtype))


def _lengths(count: int, length: int) -> Any:
    import torch

    return torch.full((count,), length, dtype=torch.int32)


def _matrix(dtype: Any, M: int = 4096, N: int = 4096) -> tuple:
    return (_t(dtype, M, N),)


def _matrix_and_dy(dtype: Any, M: int = 4096, N: int = 4096) -> tuple:
    return _t(dtype, M, N), _t(dtype, M, N)


def _flat(dtype: Any, n: int = 1 << 24) -> tuple:
    return (_t(dtype, n),)


def _qkv(dtype: Any, H: int = 32, T: int = 2048, D: int = 128) -> tuple:
    return tuple(_t(dtype, H, T, D) for _ in range(3))


def _adamw(n: int) -> tuple:
    return tuple(_f32(n) for _ in range(4))


def _many(tensors: int, n: int) -> tuple:
    """Equal tensors that follow each other in one buffer."""
    size = n // tensors
    return *_adamw(n), [i * size for i in range(tensors)], [size] * tensors, [0.1] * tensors


_STEP = (10, 1e-3, 0.9, 0.95, 1e-8)  # step, lr, beta1, beta2, eps

# By exercise: (dtype, *sizes) -> the arguments of one call. The sizes are those of the operation's rows in gpukit/results,
# where it has some. Exercises that are not listed are shown on a case of their check.
EXAMPLES = {
    "triton_basics.add_constant": lambda d, n=1 << 24: (_t(d, n), 0.5, 1024),
    "triton_basics.vector_add": lambda d, n=1 << 24: (_t(d, n), _t(d, n), 1024),
    "triton_basics.outer_add": lambda d, M=4096, N=4096: (_t(d, M), _t(d, N)),
    "triton_basics.mul_relu": lambda d, M=4096, N=4096: (_t(d, M, N), _t(d, N), _t(d, M, N)),
    "triton_basics.row_sum": lambda d, M=4096, N=4096: (_t(d, M, N), 1024),
    "triton_basics.dot": lambda d, n=1 << 24: (_t(d, n), _t(d, n), 1024),
    "triton_basics.prefix_sum": lambda d, M=4096, N=4096: (_t(d, M, N), 1024),
    "triton_basics.histogram": lambda d, n=1 << 22, bins=256: (_ints(n, bins), bins, 1024),
    "triton_basics.dropout": lambda d, n=1 << 24: (_t(d, n), 0.1, 1, _t(d, n)),
    "triton_basics.detective_slow": lambda d, M=4096, N=4096: (_t(d, M, N), _t(d, M), 1024),
    "triton_basics.detective_race": lambda d, n=1 << 24: (_t(d, n), 1024),
    "coalescing.detective": lambda d, M=4096, N=4096: (_f32(M, N), _f32(N)),
    "coalescing.gather": lambda d, T=16384, V=128256, D=4096: (_ints(T, V, "int64"), _t(d, V, D)),
    "coalescing.transpose": _matrix,
    "tiling.matmul": lambda d, M=4096, N=4096, K=4096: (_t(d, M, K), _t(d, K, N), 64),
    "fusion.sin_cos": lambda d, n=1 << 24: (_t(d, n), 0.5, 2.0, 1024),
    "fusion.gate": _matrix,
    "fusion.recompute": _matrix_and_dy,
    "fusion.epilogue": lambda d, M=8192, N=4096, K=128: (_t(d, M, K), _t(d, K, N), _t(d, N), _t(d, M, N), 32),
    "fusion.detective": lambda d, M=4096, N=4096: (_t(d, M, N), 50.0),
    "softmax.fused": _matrix,
    "softmax.strided": lambda d, M=4096, N=4096: (_t(d, M, 2 * N)[:, :N],),
    "softmax.online": lambda d, M=4096, N=131072: (_t(d, M, N), 4096),
    "softmax.backward": _matrix_and_dy,
    "softmax.persistent": lambda d, M=32768, N=4096, programs=528: (_t(d, M, N), programs),
    "gelu.detective": _flat,
    "gelu.bias": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, N)),
    "gelu.backward": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, N), _t(d, M, N)),
    "gelu.swiglu": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, M, N), _t(d, M, N)),
    "norms.rms_norm": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, N), 1e-6),
    "norms.detective": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, N), _t(d, N), 1e-5),
    "norms.welford": lambda d, M=4096, N=16384: (_t(d, M, N), 4096, 1e-5),
    "norms.backward": lambda d, M=8192, N=4096, programs=132: (_t(d, M, N), _t(d, N), programs, _t(d, M, N)),
    "norms.residual": lambda d, M=8192, N=4096: (_t(d, M, N), _t(d, M, N), _t(d, N), _t(d, M, N), _t(d, M, N)),
    "norms.rope": lambda d, B=1, H=32, T=8192, D=128: (
        _t(d, B, H, T, D), _f32(T, D // 2), _f32(T, D // 2), _t(d, B, H, T, D)
    ),
    "matmul.strides": lambda d, M=4096, N=4096, K=4096: (_t(d, 1, M, K), _t(d, 1, N, K).mT, 64),
    "matmul.order": lambda d, M=4096, N=4096, K=4096: (_t(d, M, K), _t(d, K, N), 8, 64),
    "matmul.split_k": lambda d, M=16, N=4096, K=16384: (_t(d, M, K), _t(d, K, N), 8),
    "matmul.epilogue": lambda d, M=4096, N=4096, K=4096: (_t(d, M, K), _t(d, N, K), _t(d, N)),
    "matmul.int4": lambda d, M=16, N=4096, K=4096: (_t(d, M, K), _bytes(K // 2, N), _t(d, K // 128, N)),
    "flash_attention.late": _qkv,
    "flash_attention.forward": _qkv,
    "flash_attention.causal": _qkv,
    "flash_attention.window": lambda d, window=512: (*_qkv(d), window),
    "flash_attention.packed": lambda d, B=4, T=2048, H=32, KV=8, D=128: (
        _t(d, B * T, H, D), _t(d, B * T, KV, D), _t(d, B * T, KV, D), T * _ints(B + 1, B + 1), T * _ints(B + 1, B + 1), T
    ),
    "flash_attention.gradients": lambda d, H=32, T=2048, D=128: (
        *(_t(d, H, T, D) for _ in range(4)), _f32(H, T), _f32(H, T), _t(d, H, T, D), _t(d, H, T, D)
    ),
    "kv_cache.decode": lambda d, B=32, T=4096, H=32, D=128: (
        _t(d, B, H, D), _t(d, B, T, H, D), _t(d, B, T, H, D), _lengths(B, T)
    ),
    "kv_cache.packed": lambda d, B=32, T=4096, H=32, KV=8, D=128: (
        _t(d, B, H, D), _t(d, B, T, KV, D), _t(d, B, T, KV, D), _lengths(B, T)
    ),
    "kv_cache.split": lambda d, B=1, T=32768, H=32, D=128: (
        _t(d, B, H, D), _t(d, B, T, H, D), _t(d, B, T, H, D), _lengths(B, T), 16
    ),
    "kv_cache.int8": lambda d, B=32, T=4096, H=32, D=128: (
        *(_t(d, B, H, D) for _ in range(3)), _bytes(B, T, H, D, signed=True), _bytes(B, T, H, D, signed=True),
        _f32(B, T, H), _f32(B, T, H), _lengths(B, T - 1),
    ),
    "losses.cross_entropy": lambda d, M=8192, V=50304: (_t(d, M, V), _ints(M, V, "int64"), 4096),
    "losses.in_place": lambda d, M=8192, V=50304: (_t(d, M, V), _ints(M, V, "int64"), _f32(M), _f32(M), 2048),
    "losses.one_launch": lambda d, M=8192, V=50304: (_t(d, M, V), _ints(M, V, "int64"), _f32()),
    "losses.smoothing": lambda d, M=8192, V=50304: (_t(d, M, V), _ints(M, V, "int64"), 0.1, 1e-4, _f32(M)),
    "losses.kl": lambda d, M=8192, V=50304: (_t(d, M, V), _t(d, M, V), 2048, _f32(M)),
    "adamw.update": lambda d, n=1 << 26: (*_adamw(n), *_STEP, 0.1),
    "adamw.clip": lambda d, n=1 << 26: (_t(d, n), 1.0),
    "adamw.many": lambda d, tensors=148, n=124439808: (*_many(tensors, n), *_STEP, 1024),
    "adamw.rounding": lambda d, n=1 << 24: (_f32(n), 1),
    "capstone.dq": lambda d, H=32, KV=8, T=2048, D=128: (
        _t(d, H, T, D), _t(d, KV, T, D), _t(d, KV, T, D), _t(d, H, T, D), _f32(H, T), _f32(H, T)
    ),
    "capstone.attention": lambda d, H=32, KV=8, T=2048, D=128: (
        _t(d, H, T, D), _t(d, KV, T, D), _t(d, KV, T, D), _t(d, H, T, D)
    ),
}  # fmt: skip


def _bytes(*shape: int, signed: bool = False) -> Any:
    import torch

    return _t(torch.int8 if signed else torch.uint8, *shape)
