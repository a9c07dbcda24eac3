"""`python -m gpukit.lessons.measured`: what lessons show and `gpukit bench` has no operation for, measured on this GPU.

    python -m gpukit.lessons.measured attention_by_length matmul_by_size --out DIR

attention_by_length   16 heads of size 128 in bfloat16, no mask, 16,384 tokens in sequences of 512 to 16,384: three lines of
                      PyTorch ("formula"), PyTorch's fused kernels and ours, forward and with backward, with their memory.
                      The formula rounds its scores to 16 bits, coarser than the rule for results allows; it is timed
                      all the same, since that is how attention is written by hand
matmul_by_size        square products in bfloat16 from 1,024 to 2,560 by 64, each beside the next larger number: cuBLAS
                      ("library") and ours, in a CUDA graph
gelu_in_cuda          GELU of 16,384 x 4,096 in bfloat16 and float32: the kernels of gpukit/kernels/fusion.cu with one element per
                      thread ("cuda") and with 16 bytes per thread ("cuda-vector"), beside PyTorch's; needs nvcc
triton_basics         what notebook 05 shows of its exercises: an addition with blocks of each size, a fused kernel, histograms
tiling                what notebook 07 shows of its exercises: its matmul with each tile and number of warps; rows of 1,791 to
                      1,808 elements, in a kernel whose loads become wider if 16 divides the row, beside cuBLAS
tiling_stages         the same matmul with one to six stages
attention_by_hand     what notebook 13 has no times of: our kernel with pointers ("pointers") beside ours in Gluon, causal, 16 heads of
                      16,384 tokens; and for one head of 4,096 tokens in float32 the walk over blocks of 128 in PyTorch's
                      operations of its exercise ("blocks") beside the three lines ("formula") and our kernel
softmax_persistent    what notebook 09 shows of its exercises: softmax with a program per row and with fewer programs, beside
                      ours, in a CUDA graph

The last five run exercises/: with GPUKIT_IMPL=solutions they measure the solutions, which is what is recorded (of 05,
07 and 09 on 2026-11-23, in one round).

Rows go to gpukit/results/<gpu>/<name>.csv; one that is measured again replaces the older one. Providers take turns in three
rounds, and the median round is the row, as in `gpukit bench`.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit import benchmark, course, kernels
from gpukit.accounting.tiling import cdiv
from gpukit.kernels._flash_choices import config_of
from gpukit.kernels.flash_attention import UNLIMITED, flash_attention_fwd
from gpukit.op import Cost
from gpukit.reference import flash_attention as attention
from gpukit.timing import Timing, time_ms
from gpukit.validation import counted_kernels

ROUNDS = 3
HEADS, HEAD_SIZE, TOKENS = 16, 128, 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SIZES = tuple(n + more for n in range(1024, 2561, 64) for more in (0, 1))


class Measured(NamedTuple):
    """A row of each provider: its time, and the memory that a call takes in bytes."""

    op: str
    mode: str
    shape: tuple[int, ...]
    timed: dict[str, tuple[Timing, int]]
    cost: Cost
    dtype: str = "bfloat16"


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in three lines of PyTorch: q, k, v [B, H, T, D] -> [B, H, T, D]."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores, dim=-1)
    return weights @ v


def attention_by_length() -> Iterator[Measured]:
    calls = {
        "formula": formula, "sdpa-flash": attention.OP.peers["sdpa-flash"], "sdpa-cudnn": attention.OP.peers["sdpa-cudnn"],
        "gpukit": kernels.flash_attention,
    }  # fmt: skip
    for length in LENGTHS:
        shape = (TOKENS // length, HEADS, length, HEAD_SIZE)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        forward = attention.cost(shape, q.dtype)
        yield Measured("attention_by_length", "fwd", shape, _in_turns(calls, (q, k, v)), forward)
        for x in (q, k, v):
            x.requires_grad_()
        both = {name: _with_backward(call, do) for name, call in calls.items()}
        backward = attention.cost_bwd(shape, q.dtype)
        cost = Cost(
            forward.read_bytes + backward.read_bytes, forward.write_bytes + backward.write_bytes,
            forward.flops + backward.flops,
        )  # fmt: skip
        yield Measured("attention_by_length", "fwd+bwd", shape, _in_turns(both, (q, k, v)), cost)


def _with_backward(call: Callable, do: Tensor) -> Callable:
    return lambda q, k, v: torch.autograd.grad(call(q, k, v), (q, k, v), do)


def matmul_by_size() -> Iterator[Measured]:
    calls = {"library": lambda a, b: F.linear(a, b.mT), "gpukit": kernels.matmul}
    for n in SIZES:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cost = Cost(4 * n * n, 2 * n * n, 2 * n**3)
        yield Measured("matmul_by_size", "fwd-graph", (n, n, n), _in_turns(calls, (a, b), graph=True, rep_ms=20), cost)


@triton.jit
def _blocks_first(x_ptr, counts_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """A histogram that is counted within each block before an atomic per bin."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    tl.atomic_add(counts_ptr + tl.arange(0, BINS), tl.histogram(x, BINS, mask=offs < n))


def _histogram_of_blocks(x: Tensor, bins: int) -> Tensor:
    counts = torch.zeros(bins, dtype=torch.int32, device=x.device)
    _blocks_first[(cdiv(len(x), 1024),)](x, counts, len(x), BINS=bins, BLOCK=1024)
    return counts


def triton_basics() -> Iterator[Measured]:
    mine = course.exercise("triton_basics")
    shape = M, N = 16384, 4096
    x, y = torch.randn(2, M, N, device="cuda", dtype=torch.bfloat16)
    w, n = torch.randn(N, device="cuda", dtype=torch.bfloat16), M * N
    blocks = {f"block {2**i}": partial(mine.vector_add, BLOCK=2**i) for i in range(6, 14)}
    flat = (x.view(-1), y.view(-1))
    yield Measured("residual_add", "fwd", shape, _in_turns({"torch": torch.add, **blocks}, flat), Cost(4 * n, 2 * n, n))
    both = {"torch": lambda x, w: torch.relu(x * w), "fused": mine.mul_relu}
    both["compile"] = torch.compile(both["torch"])
    once = Cost(2 * n + 2 * N, 2 * n, 2 * n)
    yield Measured("mul_relu", "fwd", shape, _in_turns(both, (x, w)), once)
    yield Measured("mul", "fwd", shape, _in_turns({"torch, broadcast": torch.mul}, (x, w)), once)
    yield Measured("mul", "fwd", shape, _in_turns({"torch": torch.mul}, (x, y)), Cost(4 * n, 2 * n, n))
    yield Measured("relu", "fwd", shape, _in_turns({"torch": torch.relu}, (x,)), Cost(2 * n, 2 * n, n))
    n = 1 << 24
    for bins in (1, 16, 256, 4096, 1 << 20):
        values = torch.randint(bins, (n,), dtype=torch.int32, device="cuda")
        calls = {"atomics": partial(mine.histogram, num_bins=bins)}
        if 1 < bins <= 4096:
            calls["blocks first"] = partial(_histogram_of_blocks, bins=bins)
        yield Measured("histogram", "fwd", (n, bins), _in_turns(calls, (values,)), Cost(4 * n, 4 * bins, 0), "int32")


TILES = (16, 16, 1), (32, 32, 4), (64, 64, 4), (64, 64, 8), (128, 128, 4), (128, 128, 8), (128, 256, 4), (128, 256, 8)


def tiling() -> Iterator[Measured]:
    kernel, n = course.exercise("tiling").matmul_kernel, 4096
    a, b, c = torch.randn(3, n, n, device="cuda", dtype=torch.bfloat16)
    calls = {"library": torch.matmul}
    for BM, BN, warps in TILES:
        sizes = {"BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_K": 64, "num_warps": warps}
        launch = partial(kernel[(n // BM, n // BN)], **sizes)
        calls[f"{BM} x {BN}, {warps} warps"] = lambda a, b, launch=launch: launch(a, b, c, n, n, n)
    yield Measured("tiles", "fwd", (n, n, n), _in_turns(calls, (a, b)), Cost(4 * n * n, 2 * n * n, 2 * n**3))
    for n in (1791, 1792, 1793, 1800, 1808):
        a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
        cost = Cost(4 * n * n, 2 * n * n, 2 * n**3)
        yield Measured(
            "alignment", "fwd", (n, n, n), _in_turns({"library": torch.matmul, "tile": _tiled}, (a, b)), cost
        )


def tiling_stages() -> Iterator[Measured]:
    kernel, n = course.exercise("tiling").matmul_kernel, 4096
    a, b, c = torch.randn(3, n, n, device="cuda", dtype=torch.bfloat16)
    calls = {}
    for BN, stages in ((128, 1), (128, 2), (128, 3), (128, 4), (128, 6), (256, 1), (256, 2), (256, 3), (256, 4)):
        sizes = {"BLOCK_M": 128, "BLOCK_N": BN, "BLOCK_K": 64, "num_warps": 8, "num_stages": stages}
        launch = partial(kernel[(n // 128, n // BN)], **sizes)
        calls[f"128 x {BN}, {stages} stages"] = lambda a, b, launch=launch: launch(a, b, c, n, n, n)
    yield Measured("stages", "fwd", (n, n, n), _in_turns(calls, (a, b)), Cost(4 * n * n, 2 * n * n, 2 * n**3))


def _tiled(a: Tensor, b: Tensor) -> Tensor:
    """The counted matmul in tiles of 128 x 128."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    tile = {"BM": 128, "BN": 128, "BK": 64, "GROUP_M": 8, "SPLIT_K": 1, "num_warps": 8, "num_stages": 3}
    counted_kernels.matmul[(cdiv(M, 128) * cdiv(N, 128), 1)](a, b, c, M, N, K, *a.stride(), *b.stride(), **tile)
    return c


def gelu_in_cuda() -> Iterator[Measured]:
    from gpukit import nvcc

    library = nvcc.build(Path(kernels.__file__).parent / "fusion.cu")

    def call(name: str) -> Callable[[Tensor], Tensor]:
        def gelu(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            library.launch(name, x, y, x.numel())
            return y

        return gelu

    for dtype in ("bfloat16", "float32"):
        calls = {
            "library": lambda x: F.gelu(x, approximate="tanh"),
            "cuda": call(f"gelu_{dtype}"),
            "cuda-vector": call(f"gelu_vector_{dtype}"),
        }
        x = torch.randn(16384, 4096, device="cuda", dtype=getattr(torch, dtype))
        yield Measured("gelu_tanh", "fwd", (16384, 4096), _in_turns(calls, (x,)), Cost(x.nbytes, x.nbytes, 0), dtype)


def attention_by_hand() -> Iterator[Measured]:
    shape = (1, HEADS, TOKENS, HEAD_SIZE)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = {"pointers": by_pointers, "gpukit": partial(kernels.flash_attention, causal=True)}
    yield Measured(
        "attention_causal", "fwd", shape, _in_turns(calls, (q, k, v)), attention.cost(shape, q.dtype, causal=True)
    )
    mine = course.exercise("flash_attention")
    shape = (1, 1, 4096, HEAD_SIZE)
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    calls = {
        "blocks": lambda q, k, v: mine.attention_tiles(q[0, 0], k[0, 0], v[0, 0], 128),
        "formula": formula,
        "gpukit": kernels.flash_attention,
    }
    yield Measured(
        "attention_in_blocks", "fwd", shape, _in_turns(calls, (q, k, v)), attention.cost(shape, q.dtype), "float32"
    )


def by_pointers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by our kernel with pointers, also where another one is faster."""
    config = config_of("forward", q.shape[-1], q.dtype, "ieee", q.device)
    return flash_attention_fwd(q, k, v, UNLIMITED, 0, q.shape[-1] ** -0.5, "ieee", config=config)[0]


def softmax_persistent() -> Iterator[Measured]:
    mine = course.exercise("softmax")
    few = {f"programs-{n}": partial(mine.softmax_persistent, max_programs=n) for n in (132, 528, 1056, 2112)}
    calls = {"fused": mine.softmax_fused, **few, "gpukit": kernels.softmax}
    for shape in ((65536, 128), (65536, 256), (65536, 1024), (16384, 4096), (4096, 16384)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        cost = Cost(2 * x.numel(), 2 * x.numel(), 5 * x.numel())
        yield Measured("softmax_persistent", "fwd-graph", shape, _in_turns(calls, (x,), graph=True), cost)


def _in_turns(calls: dict[str, Callable], inputs: tuple[Tensor, ...], **options) -> dict[str, tuple[Timing, int]]:
    """The median of three rounds, and the memory that a call takes, by provider."""
    rounds: dict[str, list[Timing]] = {name: [] for name in calls}
    peaks: dict[str, int] = {}
    for turn in range(ROUNDS):
        for name in [*calls][:: -1 if turn % 2 else 1]:
            rounds[name].append(time_ms(calls[name], *inputs, **options))
            gc.collect()
            torch.cuda.empty_cache()
            peaks[name] = benchmark.peak_bytes(calls[name], inputs, "cuda")
    return {
        name: (sorted(times, key=lambda t: t.median_ms)[ROUNDS // 2], peaks[name]) for name, times in rounds.items()
    }


ALL = {
    f.__name__: f
    for f in (
        attention_by_length,
        matmul_by_size,
        gelu_in_cuda,
        triton_basics,
        tiling,
        tiling_stages,
        attention_by_hand,
        softmax_persistent,
    )
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukit.lessons.measured", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ALL)} (default: all)")
    parser.add_argument("--commit", default="", help="of the code measured (default: GPUKIT_COMMIT, else git's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<gpu>/ (default: gpukit/results)")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in ALL]:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(ALL)}")
    if not torch.cuda.is_available():
        print("gpukit.lessons.measured needs a GPU; nothing was measured", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    shared = benchmark.identity(gpu, given.commit)
    folder = (given.out or benchmark.RESULTS) / benchmark.gpu_key(gpu)
    for name in given.names or ALL:
        for found in ALL[name]():
            for provider, (timing, peak) in found.timed.items():
                spread = timing.median_ms, timing.p20_ms, timing.p80_ms
                row = benchmark.Row(
                    found.op, provider, found.mode, found.dtype, found.shape, *spread, found.cost.bytes, found.cost.flops,
                    peak, **shared, sm_mhz=timing.sm_mhz,
                )  # fmt: skip
                benchmark.write([row], folder / f"{name}.csv")
                print(benchmark.line(row), f"{peak / 2**30:.2f} GiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
