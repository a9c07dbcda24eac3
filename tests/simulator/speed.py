"""Work whose cost is known: test_speed.py counts its calls, `make measure` takes its processor time."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

import gpukit
from gpukit import hardware
from gpukit.kernels._flash_backward import flash_attention_bwd
from gpukit.kernels.flash_attention import reach
from gpukit.kernels.matmul import matmul_fwd
from gpukit.kernels.rope import rope_turn
from gpukit.simulator.interpreter import layer
from gpukit.validation.timed_kernels import CASES


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _matmul(M: int, N: int, K: int) -> Callable[[], object]:
    a, b = _empty(M, K), _empty(K, N)
    return lambda: matmul_fwd(a, b, None, None, None, "", "ieee", False, False)


def _attention_backward(heads: int, tokens: int, size: int) -> Callable[[], object]:
    do, q, k, v, o = (_empty(1, heads, tokens, size) for _ in range(5))
    lse = _empty(1, heads, tokens, dtype=torch.float32)
    return lambda: flash_attention_bwd(do, None, q, k, v, o, lse, *reach(True, None), size**-0.5, "ieee")


def _rope(sequences: int, heads: int, tokens: int, size: int) -> Callable[[], object]:
    q, k, angles = (
        _empty(sequences, heads, tokens, size),
        _empty(sequences, heads, tokens, size),
        _empty(tokens, size // 2),
    )
    return lambda: rope_turn(q, k, angles, angles, False)


# A trace of a few programs, the compilation and the prediction: a case of CASES, or what makes the work.
REAL_SHAPES = {
    "softmax 4096 x 65536": "gpukit softmax 4096 x 65536 bf16, online",
    "matmul 8192^3": "matmul 8192 bf16, groups of 128x256x64",
    "attention of 16,384 tokens": "attention 8 heads, 16384 tokens, head 128",
    "matmul 16384^3, as chosen for an H200": partial(_matmul, 16384, 16384, 16384),
    "attention backward of 16 heads, 16,384 tokens, head 64, causal, three launches": partial(
        _attention_backward, 16, 16384, 64
    ),
    "rope of 8 sequences, 32 heads, 4096 tokens": partial(_rope, 8, 32, 4096, 128),
}


@triton.jit
def row_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0) * N
    x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row + offs, e / tl.sum(e, axis=0), mask=offs < N)


def processor_s(call: Callable[[], object]) -> float:
    """Of this process and of those that it started and waited for: other people's work on the machine counts little."""

    def now() -> float:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime

    before = now()
    call()
    return now() - before


def rows(programs: int, how: str, N: int = 1000) -> Callable[[], None]:
    """A launch of `row_kernel` on that many rows. `how`: "plain" for Triton's own interpreter, "layer" for ours, "trace" for
    ours inside gpukit.trace, "sample" where that looks at four programs."""
    x = torch.zeros(programs, N)
    blocks = {"trace": gpukit.trace, "sample": lambda: gpukit.trace(sample=4)}

    def launch() -> None:
        if how == "plain":
            layer.uninstall()
        try:
            with blocks.get(how, contextlib.nullcontext)():
                # So many warps that few programs fit on a GPU together: a sample looks at the beginning of each of those.
                row_kernel[(programs,)](x, torch.empty_like(x), N, BLOCK=1024, num_warps=32)
        finally:
            layer.install()

    return launch


def real_shape(name: str) -> Callable[[], object]:
    """One of REAL_SHAPES, predicted for an H200."""
    made, gpu = REAL_SHAPES[name], hardware.gpu("h200")
    if isinstance(made, str):
        case = CASES[made]
        work, sample = case.prepare("meta"), case.sample
    else:
        work, sample = made(), 2

    def predict() -> object:
        with hardware.imagined(gpu):  # whose kernels are chosen
            return gpukit.predict(work, gpu=gpu, sample=sample)

    return predict
