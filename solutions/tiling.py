"""Tiles: the matrix product C [M, N] = A [M, K] B [K, N], with C cut into tiles of BLOCK_M x BLOCK_N, one program per tile.

Six exercises, from top to bottom; notebooks/07_tiling.ipynb explains them. Five are arithmetic in plain Python, and one is
a kernel. All sizes are whole numbers, at least 1.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


# ------------------------------------------------------------------------------------------------------ tiling.traffic
def matmul_reads(M: int, N: int, K: int, BLOCK_M: int, BLOCK_N: int, itemsize: int) -> int:
    """The bytes of A and B that all programs of a tiled matmul load together. An element has `itemsize` bytes.

    A program loads the rows of A and the columns of B that its tile of C needs, each element once. Lanes beyond the edge
    of a matrix are masked off and load nothing. Caches are ignored: a load counts even if a cache answers it.
    """
    # BEGIN SOLUTION
    tiles_down = -(-M // BLOCK_M)
    tiles_across = -(-N // BLOCK_N)
    elements = tiles_across * M * K + tiles_down * K * N  # a row of tiles reads its rows of A once for each tile in it
    return elements * itemsize
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------- tiling.matmul
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of C. A [M, K], B [K, N] and C [M, N] are contiguous: row i of A begins at i * K."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # its rows of A and C
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # its columns of B and C
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # BEGIN SOLUTION
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_a = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        mask_b = (offs_k[:, None] < K) & (offs_n[None, :] < N)
        # 0 beyond the edge: those products add nothing.
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask_a, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=mask_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask_c = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask_c)
    # END SOLUTION


def matmul(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    """a [M, K] and b [K, N], contiguous and of one dtype; BLOCK 16, 32, 64 or 128 -> c [M, N] in that dtype.

    Products are added up in float32. For float32 inputs pass input_precision="ieee" to tl.dot, because by default it rounds
    them to TF32.
    Bound: a is loaded ceil(N / BLOCK) times, b ceil(M / BLOCK) times, and c is stored once. Lanes beyond the edge of a or b may
    be masked off, or load other rows and columns.
    """
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    matmul_kernel[grid](a, b, c, M, N, K, BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=min(BLOCK, 32))
    return c


# -------------------------------------------------------------------------------------------------------- tiling.waves
def waves(M: int, N: int, BLOCK_M: int, BLOCK_N: int, sms: int, programs_per_sm: int) -> tuple[int, int, float]:
    """(tiles, waves, efficiency) of C [M, N] in tiles of BLOCK_M x BLOCK_N, on `sms` SMs that hold programs_per_sm each.

    Every tile takes equally long, whether it lies inside C or hangs over the edge. A wave is as many tiles as the GPU
    computes at a time. The last wave takes as long as the others, even if it is not full. efficiency is the number of
    elements of C over the number of elements that all places of all waves could hold: 1.0 where nothing is wasted.
    """
    # BEGIN SOLUTION
    tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)
    slots = sms * programs_per_sm
    count = -(-tiles // slots)
    return tiles, count, M * N / (count * slots * BLOCK_M * BLOCK_N)
    # END SOLUTION


# -------------------------------------------------------------------------------------------------------- tiling.align
def align_rows(N: int, itemsize: int, alignment: int) -> tuple[int, int]:
    """(widest, stride) for rows of N elements of `itemsize` bytes.

    widest  in bytes: the widest load with which every row may begin if the rows lie one right after the other. It is a
            power of two and at most `alignment`. A load of n bytes must begin at a multiple of n.
    stride  in elements: the smallest distance from the start of one row to the start of the next, at least N, with which
            every row begins at a multiple of `alignment` bytes.

    Row 0 begins at a multiple of `alignment`. itemsize and alignment are powers of two, itemsize <= alignment.
    """
    # BEGIN SOLUTION
    widest = alignment
    while N * itemsize % widest:
        widest //= 2
    lanes = alignment // itemsize
    return widest, -(-N // lanes) * lanes
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------ tiling.grouped
def grouped(pid: int, num_m: int, num_n: int, GROUP_M: int) -> tuple[int, int]:
    """(pid_m, pid_n): the row and the column of the tile that program `pid` computes, of num_m rows and num_n columns of
    tiles.

    The programs compute one group of GROUP_M rows of tiles after the other. Within a group they go down the first column
    of tiles, then down the second, and so on to the last. The last group has the rows that are left.
    """
    # BEGIN SOLUTION
    in_group = GROUP_M * num_n  # programs of a full group
    first = pid // in_group * GROUP_M
    rows = min(GROUP_M, num_m - first)
    inside = pid % in_group
    return first + inside % rows, inside // rows
    # END SOLUTION


# ---------------------------------------------------------------------------------------------------- tiling.occupancy
def programs_per_sm(
    num_warps: int, registers: int, shared_bytes: int, max_warps: int, sm_registers: int, sm_shared_bytes: int
) -> int:
    """How many programs fit on one SM at a time.

    A program needs    num_warps warps of 32 threads; `registers` registers per thread; shared_bytes bytes of shared memory,
                       to which the system adds 1,024 for itself
    An SM has          max_warps warps; sm_registers registers; sm_shared_bytes bytes of shared memory

    Real hardware hands out registers and shared memory in multiples of some size. That is ignored here;
    gpukit.simulator.compiler.occupancy includes it.
    """
    # BEGIN SOLUTION
    by_warps = max_warps // num_warps
    by_registers = sm_registers // (registers * 32 * num_warps)
    by_shared = sm_shared_bytes // (shared_bytes + 1024)
    return min(by_warps, by_registers, by_shared)
    # END SOLUTION
