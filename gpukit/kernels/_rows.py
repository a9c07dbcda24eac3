"""A tensor as rows, sums over columns, and what kernels do with rows of 16 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._dtypes import acc_dtype
from gpukit.kernels._launch import launch


@triton.jit
def as_it_is(x):
    """x, of 16 bits, on an NVIDIA GPU. Behind an instruction that it does not know, the compiler keeps these numbers, and not
    those in float32 that it makes of them, which take twice the registers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def anew(x, N):
    """x, of 16 bits, on an NVIDIA GPU, N being positive. Here not even ptxas sees that it is x. Behind `as_it_is` alone it makes
    float32 of x once for several uses, and keeps that, where a row takes most registers."""
    zero = tl.full(x.shape, 0, tl.int16) + (N >> 31).to(tl.int16)
    return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zero], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def mean_of(total, N):
    """total / N, correctly rounded: a GPU's quick division would not give 3 as the mean of a row of threes, and
    1 / sqrt(eps) times its error is no small number."""
    if total.dtype == tl.float32:
        return tl.div_rn(total, tl.cast(N, tl.float32))
    return total / N


@triton.jit
def column_sums_kernel(
    partial_ptr, out_ptr, second_ptr,
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """partial [1 or 2, P, N]. second_ptr: where the sums of partial[1] go, or None."""
    # The programs of the second sum, if there is one, follow those of the first.
    blocks_n = tl.cdiv(N, BLOCK_N)
    which = (tl.program_id(0) // blocks_n).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_p = tl.arange(0, BLOCK_P)[:, None]
    # Rows in the same order in every run, and joined in the same tree: the same bits.
    acc = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in tl.range(0, P, BLOCK_P):
        offs = (which * P + start + offs_p) * N + offs_n
        acc += tl.load(partial_ptr + offs, mask=(start + offs_p < P) & (offs_n < N), other=0.0)
    sums = tl.sum(acc, axis=0, keep_dims=True)
    tl.store(out_ptr + offs_n, sums, mask=(offs_n < N) & (which == 0))
    if second_ptr is not None:
        tl.store(second_ptr + offs_n, sums, mask=(offs_n < N) & (which == 1))


def column_sums(partial: Tensor, like: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums over P of partial [1 or 2, P, N], as tensors like `like` [N] and `second` [N]; None without a second.
    Always in the same order."""
    out, out_second = empty(like), None if second is None else empty(second)
    several, P, N = partial.shape
    # Narrow blocks of columns, so that there are enough programs: 264 x 8192 in 8.5 us, in 9.4 with 32 columns and half
    # the rows.
    launch(
        column_sums_kernel, several * -(-N // 16), partial, out, out_second, P, N,
        BLOCK_P=256, BLOCK_N=16, ACC=acc_dtype(partial.dtype), num_warps=8,
    )  # fmt: skip
    return out, out_second


def empty(x: Tensor) -> Tensor:
    """Room for a result of x's shape, dtype and device: contiguous, whatever x is."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def as_rows(x: Tensor, copy_interleaved: bool = False) -> Tensor:
    """x [..., N] as [M, N]: a view where the strides allow it, else a copy.

    Rows that span 2^31 elements are copied, because offsets within a row are int32. So are interleaved rows (those of a
    transposed matrix) if asked for: each element of one row fetches a sector of 32 bytes.
    """
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    stride_m, stride_n = x.stride()
    if x.shape[1] * stride_n >= 2**31 or (0 < stride_m < stride_n and copy_interleaved):
        return x.contiguous()
    return x
