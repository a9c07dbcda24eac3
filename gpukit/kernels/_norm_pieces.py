"""The norms' forward kernel for long rows on Hopper, which keeps a row in the 16 bits of memory (gpukit.kernels.norms launches it and
says what is computed, gpukit.kernels._norm_choices for which rows).

A program has a row, in pieces of which a thread has 8 numbers, and makes float32 of a piece only while it computes with it: once for
each sum, and once more for the result. That takes half of the registers, so that more programs share an SM, and some load while
others wait for a sum. A row of 16,384 numbers needs 64 registers of a thread, and none are lacking; four programs share an SM.
"""

import triton
import triton.language as tl

from gpukit.kernels._rows import anew, mean_of


@triton.jit
def _anew(x, N, PTX: tl.constexpr):
    return anew(x, N) if PTX else x


@triton.jit
def _vector(ptr, i, N, PIECE: tl.constexpr, EVEN: tl.constexpr):
    """The i-th piece of weight or bias [N]: [PIECE] in float32."""
    offs = i * PIECE + tl.arange(0, PIECE)
    return tl.load(ptr + offs, mask=(offs < N) | EVEN, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def norm_fwd_pieces_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr,
    stride_xm,
    M, N,
    EPS: tl.constexpr, CENTRE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A row per program, of 16 bits, in PIECES of PIECE numbers, float32 inside. weight_ptr and bias_ptr may be None. stats
    [1 or 2, M]: 1 / sqrt(variance + eps), the mean. EVEN: all pieces are full."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    held = ()
    for i in tl.static_range(PIECES):
        offs = i * PIECE + tl.arange(0, PIECE)
        # Nobody reads x again, yet the L2 is faster if told to keep it, by 6%.
        x = tl.load(x_ptr + offs, mask=(offs < N) | EVEN, other=0.0, eviction_policy="evict_last")
        held = held + (x,)  # noqa: RUF005 no star here
    mean = 0.0
    if CENTRE:
        total = held[0].to(tl.float32)
        for i in tl.static_range(1, PIECES):
            total += held[i].to(tl.float32)
        mean = mean_of(tl.sum(total, axis=0), N)
    anew_held = ()
    for i in tl.static_range(PIECES):
        anew_held = anew_held + (_anew(held[i], N, PTX),)  # noqa: RUF005
    held = anew_held
    squares = tl.zeros([PIECE], tl.float32)
    for i in tl.static_range(PIECES):
        x = held[i].to(tl.float32)
        if CENTRE:
            # The padding would be -mean, and count in the variance.
            x = tl.where((i * PIECE + tl.arange(0, PIECE) < N) | EVEN, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + EPS)
    tl.store(stats_ptr + row, rstd)
    if CENTRE:
        tl.store(stats_ptr + M + row, mean)
    for i in tl.static_range(PIECES):
        offs = i * PIECE + tl.arange(0, PIECE)
        y = (_anew(held[i], N, PTX).to(tl.float32) - mean) * rstd
        if weight_ptr is not None:
            y *= _vector(weight_ptr, i, N, PIECE, EVEN)
        if bias_ptr is not None:
            y += _vector(bias_ptr, i, N, PIECE, EVEN)
        tl.store(y_ptr + row * N + offs, y, mask=(offs < N) | EVEN)
