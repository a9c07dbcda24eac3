"""Matrix products on tensor cores: tiles in PyTorch, any strides, precision, order, shares of K, epilogues, 4-bit weights.

Seven exercises, from top to bottom; notebooks/12_matmul.ipynb explains them. c [M, N] = a [M, K] @ b [K, N]. Kernels add
up in float32. Give tl.dot the argument input_precision="ieee", so that float32 means float32. The code outside the gaps is
complete.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


# -------------------------------------------------------------------------------------------------------- matmul.tiles
def matmul_tiles(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    """a [M, K] and b [K, N] in bfloat16 -> c [M, N] in float32, tile by tile, as a GPU's programs would, in PyTorch alone.

    Products and sums are float32. BLOCK is the edge of a tile along M, N and K, and sizes need not be multiples of it.
    Memory: besides c, at any time at most as much as eight tiles of BLOCK x BLOCK float32 numbers.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.zeros(M, N, dtype=torch.float32, device=a.device)
    # BEGIN SOLUTION
    for m in range(0, M, BLOCK):
        for n in range(0, N, BLOCK):
            acc = c[m : m + BLOCK, n : n + BLOCK]  # a view: what is added to it is added to c
            for k in range(0, K, BLOCK):
                # Converted before they are multiplied: the product of bfloat16 tiles would be rounded to bfloat16.
                acc += a[m : m + BLOCK, k : k + BLOCK].float() @ b[k : k + BLOCK, n : n + BLOCK].float()
    # END SOLUTION
    return c


# ------------------------------------------------------------------------------------------------------ matmul.strides
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    stride_ab, stride_am, stride_ak,
    stride_bb, stride_bk, stride_bn,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one product of the batch. c is contiguous; a and b have the strides that are given."""
    pid_m, pid_n, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # BEGIN SOLUTION
    stride_ak = tl.cast(stride_ak, tl.int64)  # BLOCK_K of them may be beyond 32 bits
    stride_bk = tl.cast(stride_bk, tl.int64)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + batch * stride_ab + offs_m * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + batch * stride_bb + offs_k[:, None] * stride_bk + offs_n * stride_bn
    for k in range(0, K, BLOCK_K):
        mask_k = k + offs_k < K
        a = tl.load(a_ptrs, mask=(offs_m < M) & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + batch * M * N + offs_m * N + offs_n
    tl.store(c_ptrs, acc, mask=(offs_m < M) & (offs_n < N))
    # END SOLUTION


def matmul(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    """a [B, M, K] and b [B, K, N] of one dtype and any strides -> c [B, M, N] in that dtype, contiguous.

    A matrix may be transposed, its rows may lie apart, and a stride may be 0, as in a tensor that was expanded. Nothing may
    be copied. Bound: each matrix of a is loaded ceil(N / BLOCK) times, each of b ceil(M / BLOCK) times, c is stored once.
    Lanes beyond the edge of a or b may be masked off, or load other rows and columns of the same matrix.
    """
    (batches, M, K), N = a.shape, b.shape[2]
    c = torch.empty(batches, M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK), batches)
    blocks = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "BLOCK_K": 32}
    matmul_kernel[grid](a, b, c, *a.stride(), *b.stride(), M, N, K, **blocks)
    return c


# ---------------------------------------------------------------------------------------------------- matmul.precision
def which(a: Tensor, b: Tensor, c: Tensor) -> str:
    """How c [M, N] was computed from a [M, K] and b [K, N]. All three are float32. The answer is one of these names:

    "ieee"       float32 operands, float32 sums
    "tf32"       operands as the tensor cores read float32: the last 13 bits of the mantissa are cut off; float32 sums
    "fp16"       operands rounded to float16, float32 sums
    "bf16"       operands rounded to bfloat16, float32 sums
    "bf16 sums"  operands rounded to bfloat16, and the sum is rounded to bfloat16, too, again and again while it grows

    The order in which the products were added is unknown. Where several ways fit, return the first of them in this list.
    All elements are finite.
    """
    # BEGIN SOLUTION
    ways = {
        "ieee": lambda x: x,
        "tf32": lambda x: (x.view(torch.int32) & -(2**13)).view(torch.float32),
        "fp16": lambda x: x.half(),
        "bf16": lambda x: x.bfloat16(),
    }
    # What float32 sums may lose depends on the size of the terms, not on that of the result: terms may cancel.
    terms = a.double().abs() @ b.double().abs()
    for name, read in ways.items():
        error = (c.double() - read(a).double() @ read(b).double()).abs()
        if bool((error <= 2**-20 * terms).all()):
            return name
    return "bf16 sums"
    # END SOLUTION


# -------------------------------------------------------------------------------------------------------- matmul.order
@triton.jit
def ordered_kernel(
    a_ptr, b_ptr, c_ptr,
    N, K, tiles_m, tiles_n,
    GROUP_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of c, in groups of GROUP_M rows of tiles. a, b and c are contiguous and have whole
    tiles only."""
    pid = tl.program_id(0)
    # BEGIN SOLUTION
    # STUB: place = pid % (GROUP_M * tiles_n)
    # STUB: first = pid // (GROUP_M * tiles_n) * GROUP_M
    # STUB: rows = min(tiles_m - first, GROUP_M)
    # STUB: pid_m = first + place // tiles_n % rows
    # STUB: pid_n = place % tiles_n
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    pid_m = first + place % rows
    pid_n = place // rows
    # END SOLUTION
    # In 64 bits, because the number of a row times N or K may need more than 32.
    offs_m = pid_m.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs_n = pid_n * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        offs_k = k + tl.arange(0, BLOCK).to(tl.int64)
        a = tl.load(a_ptr + offs_m * K + offs_k[None, :])
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + offs_m * N + offs_n, acc)


def matmul_ordered(a: Tensor, b: Tensor, GROUP_M: int, BLOCK: int = 16) -> Tensor:
    """Contiguous a [M, K] and b [K, N] -> c [M, N]. BLOCK divides M, N and K; GROUP_M need not divide the
    number of rows of tiles.

    Bound: what the L2 of a small model of a GPU reads from memory. Programs start in the order of their ids.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    tiles_m, tiles_n = M // BLOCK, N // BLOCK
    ordered_kernel[(tiles_m * tiles_n,)](a, b, c, N, K, tiles_m, tiles_n, GROUP_M=GROUP_M, BLOCK=BLOCK, num_warps=1)
    return c


# ------------------------------------------------------------------------------------------------------ matmul.split_k
@triton.jit
def shares_kernel(
    a_ptr, b_ptr, partial_ptr,
    M, N, K,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (m, n, share) computes the sums of one tile over one of SPLIT_K shares of K. a and b are contiguous. The
    layout of partial is your choice."""
    share = tl.program_id(2)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # BEGIN SOLUTION
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)  # whole blocks; the last shares may be shorter, or empty
    first = share * steps * BLOCK_K
    for k in range(first, min(first + steps * BLOCK_K, K), BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)  # times N it may be beyond 32 bits
        a = tl.load(a_ptr + offs_m * K + offs_k[None, :], mask=(offs_m < M) & (offs_k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n, mask=(offs_k[:, None] < K) & (offs_n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(partial_ptr + (share * M + offs_m) * N + offs_n, acc, mask=(offs_m < M) & (offs_n < N))
    # END SOLUTION


@triton.jit
def add_kernel(partial_ptr, c_ptr, size, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    """c from its parts. One program adds up BLOCK of the M N = size elements, always in the same order."""
    # BEGIN SOLUTION
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for share in range(SPLIT_K):  # always in this order, so that two runs agree to the bit
        total += tl.load(partial_ptr + share * size + offs, mask=offs < size, other=0.0)
    tl.store(c_ptr + offs, total, mask=offs < size)
    # END SOLUTION


def matmul_split_k(a: Tensor, b: Tensor, SPLIT_K: int) -> Tensor:
    """a [M, K] and b [K, N], contiguous, few rows and a long K -> c [M, N] in their dtype, in two launches, no atomics.

    In general SPLIT_K divides neither K nor the number of blocks of 32 in K. a and b may have more than 2^31 elements; the
    partial sums are fewer. Bound: a is loaded ceil(N / 32) times and b ceil(M / 16) times; SPLIT_K M N partial sums are
    stored once and loaded once.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    # BEGIN SOLUTION
    partial = torch.empty(SPLIT_K, M, N, dtype=torch.float32, device=a.device)
    # END SOLUTION
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32), SPLIT_K)
    shares_kernel[grid](a, b, partial, M, N, K, SPLIT_K=SPLIT_K, BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)
    add_kernel[(triton.cdiv(M * N, 256),)](partial, c, M * N, SPLIT_K=SPLIT_K, BLOCK=256)
    return c


# ----------------------------------------------------------------------------------------------------- matmul.epilogue
@triton.jit
def linear_gelu_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y. All tensors are contiguous."""
    # In 64 bits, because the number of a row times N or K may need more than 32.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs_m * K + offs_k[None, :], mask=(offs_m < M) & (offs_k[None, :] < K), other=0.0)
        w = tl.load(weight_ptr + offs_n * K + offs_k[:, None], mask=(offs_n < N) & (offs_k[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    # BEGIN SOLUTION
    z = acc + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    y = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=(offs_m < M) & (offs_n < N))
    # END SOLUTION


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x weight^T + bias) in one launch; x [M, K], weight [N, K] as nn.Linear keeps it, bias [N] -> y [M, N].

    gelu(z) = z / 2 (1 + erf(z / sqrt(2))), computed in float32. All tensors are contiguous. Bound: what the product reads;
    the bias is loaded once per row of tiles, and y is stored once.
    """
    (M, K), N = x.shape, weight.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    linear_gelu_kernel[grid](x, weight, bias, y, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    return y


# --------------------------------------------------------------------------------------------------------- matmul.int4
@triton.jit
def int4_kernel(
    x_ptr, packed_ptr, scales_ptr, y_ptr,
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y and takes GROUP rows of the weight at a time. All tensors are contiguous."""
    # In 64 bits, because the number of a row times N or K may need more than 32.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_j = tl.arange(0, GROUP // 2).to(tl.int64)  # rows of packed in one group
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(K // GROUP):
        # BEGIN SOLUTION
        rows = group * (GROUP // 2) + offs_j
        word = tl.load(packed_ptr + rows[:, None] * N + offs_n, mask=offs_n < N, other=0)
        scale = tl.load(scales_ptr + group * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        even = tl.load(x_ptr + offs_m * K + 2 * rows[None, :], mask=offs_m < M, other=0.0)
        odd = tl.load(x_ptr + offs_m * K + 2 * rows[None, :] + 1, mask=offs_m < M, other=0.0)
        low, high = (word & 15).to(tl.int32) - 8, (word >> 4).to(tl.int32) - 8
        part = tl.dot(even, low.to(even.dtype), input_precision="ieee")
        part = tl.dot(odd, high.to(odd.dtype), part, input_precision="ieee")
        acc += part * scale  # one product for each sum of the group, not one for each weight
        # END SOLUTION
    tl.store(y_ptr + offs_m * N + offs_n, acc, mask=(offs_m < M) & (offs_n < N))


def int4_linear(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [M, K] times the weight [K, N] of 4-bit integers -> y [M, N] in x's dtype; all tensors are contiguous.

    packed [K / 2, N] uint8: row j holds row 2 j of the weight in its low four bits and row 2 j + 1 in its high four bits,
    each as q + 8 with q from -8 to 7. scales [K / GROUP, N]: a weight is q times the scale of its group, which is GROUP
    rows of its column. GROUP is a power of two, at least 32. x and packed may have more than 2^31 elements; scales has fewer.
    Bound: packed and scales are loaded once per row of tiles, x once per column of tiles.
    """
    (M, K), N = x.shape, packed.shape[1]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32))
    int4_kernel[grid](x, packed, scales, y, M, N, K, GROUP=K // scales.shape[0], BLOCK_M=16, BLOCK_N=32)
    return y
