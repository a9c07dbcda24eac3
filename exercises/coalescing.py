"""Coalescing: what the instructions of a warp cost, and three kernels that move whole sectors.

In the order of notebooks/06_coalescing.ipynb, which explains them. loop_cost, transactions and bank_passes are plain Python
and count for one block or one warp. The others are Triton kernels; the checks compare their values, and count the sectors of
32 bytes that they touch.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor

WARP = 32


# ------------------------------------------------------------------------------------------------ coalescing.divergence
def loop_cost(trips: list[int]) -> tuple[int, float]:
    """The cost of a loop in which thread i needs trips[i] rounds. A warp issues one instruction per round.

    trips  one number per thread of a block, thread 0 first; the number of threads need not be a multiple of 32
    Returns two numbers: how many instructions all warps of the block issue together, and how many lanes an issued
    instruction keeps busy on average (0.0 if none is issued).
    """
    raise NotImplementedError("coalescing.divergence")  # your code here


# --------------------------------------------------------------------------------------------------- coalescing.sectors
def transactions(addresses: list[int | None]) -> tuple[int, int]:
    """The cost of one load of a warp: (sectors of 32 bytes that move, lines of 128 bytes that they belong to).

    addresses  for each lane the byte address that it wants, a multiple of the element's size; None: the lane is off
    Sectors and lines begin at addresses that are multiples of their size.
    """
    raise NotImplementedError("coalescing.sectors")  # your code here


# ------------------------------------------------------------------------------------------------- coalescing.detective
@triton.jit
def bias_relu_kernel(x_ptr, bias_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    """One program computes BLOCK elements. The values are right, but it moves eight times the sectors that it should."""
    pid = tl.program_id(0)
    i = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # your code here
    m, n = i % M, i // M
    mask = i < tl.cast(M, tl.int64) * N
    x = tl.load(x_ptr + m * N + n, mask=mask)
    bias = tl.load(bias_ptr + n, mask=mask)
    tl.store(y_ptr + m * N + n, tl.maximum(x + bias, 0.0), mask=mask)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """x [M, N] and bias [N], float32, contiguous -> max(x + bias, 0) [M, N].

    Bound: x is read once and y is written once, both in as few sectors as their bytes fill.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK = 256
    bias_relu_kernel[(triton.cdiv(M * N, BLOCK),)](x, bias, y, M, N, BLOCK=BLOCK)
    return y


# ---------------------------------------------------------------------------------------------------- coalescing.gather
@triton.jit
def embedding_kernel(ids_ptr, table_ptr, y_ptr, T, D, BLOCK: tl.constexpr):
    """BLOCK is the number of elements of a program, along the dimension that you choose."""
    raise NotImplementedError("coalescing.gather")  # your code here


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """ids [T], int64, each from 0 to V - 1; table [V, D], both contiguous -> y [T, D], whose row t is table[ids[t]].

    Bound: each row that is asked for is read once and y is written once, in as few sectors as their bytes fill. An id may be
    read once for each block of its row, and a block has 64 elements or more.
    """
    (T,) = ids.shape
    _, D = table.shape
    y = torch.empty(T, D, dtype=table.dtype, device=table.device)
    raise NotImplementedError("coalescing.gather")  # your code here
    embedding_kernel[grid](ids, table, y, T, D, BLOCK=BLOCK)
    return y


# ----------------------------------------------------------------------------------------------------- coalescing.banks
def bank_passes(words: list[int | None]) -> int:
    """The number of passes over shared memory that one load of a warp takes.

    words  for each lane the number of the 4-byte word that it wants; None: the lane is off
    Word w lies in bank w % 32. In one pass each bank hands out one word, to every lane that wants that word.
    """
    raise NotImplementedError("coalescing.banks")  # your code here


# ------------------------------------------------------------------------------------------------- coalescing.transpose
@triton.jit
def transpose_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program moves one tile of x, of BLOCK_M rows and BLOCK_N columns, to its place in y."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    raise NotImplementedError("coalescing.transpose")  # your code here


def transpose(x: Tensor) -> Tensor:
    """x [M, N] contiguous, elements of 2 or 4 bytes -> y [N, M] contiguous, y[n, m] = x[m, n].

    Bound: x is read once and y is written once, both in as few sectors as their bytes fill.
    """
    M, N = x.shape
    y = torch.empty(N, M, dtype=x.dtype, device=x.device)
    raise NotImplementedError("coalescing.transpose")  # your code here
    transpose_kernel[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return y
