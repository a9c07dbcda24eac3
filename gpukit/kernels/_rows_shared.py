"""Softmax, and its gradient, of a row that several programs share, in Triton: each number is read once and written once
(gpukit.kernels._rows_choices says which rows; softmax launches it).

A row of y and one of dy, 131,072 numbers each, take 512 KiB, more than the registers and the shared memory of an SM. Here each
program takes one part of a row and keeps it in registers. What it cannot know alone is sum(y dy) over the whole row, or forward
the maximum m and the sum l of exp(x - m). It computes these of its own part, posts them in memory, and waits until those of the
other parts are there: 8 bytes per part are exchanged, and no part is read twice. Several programs share an SM, so that some
load while others wait.

Forward, a program keeps its part in the 16 bits of memory, in pieces of which a thread has 8 numbers, and makes float32 of a piece
only while it computes with it: an exponential for the sum, and once more for the result. Kept in float32, exponentials would not
be computed again, but they take twice the registers, fewer programs fit on an SM, and fewer bytes are on their way: 4,096 x 65,536
take 268 µs on an H200 in place of 253. gpukit.kernels._cross_entropy_shared is made of the same functions.

A message is one word of 64 bits: for the gradient the sum in its upper half and a 1 below, forward m and l. It is never the 0
that was there before: where m is 0, l is at least 1. It is written and read as a whole, hence no order of stores has to be
enforced. Messages are always joined in the same order, and the result has the same bits in every run.

Nobody waits forever. A GPU gives no promise that all programs of a row run at the same time: another stream may take their
place, and the interpreter runs one after the other. A program whose patience ends computes all messages itself, from the row
in memory. That costs time and changes no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._launch import interpreted, launch
from gpukit.kernels._rows import as_it_is

# Numbers of a part, and the warps for it: a thread keeps 32 numbers of y and 32 of dy in 32 registers. With 64 registers per
# thread four programs share an SM. 4,096 x 131,072 on an H100: 1,083 us; 1,094 with half of that in a part, 1,090 with twice.
PART, WARPS, REGISTERS = 8192, 8, 64
# Forward a part is as long and comes in pieces; a thread keeps 64 numbers in 32 registers, and nine programs share an SM. 4,096 x
# 65,536 on an H200: 253 us (a copy in calls takes 259), 272 with half of the pieces, 256 with 12 of them and 72 registers; 297 by
# a program per row that reads it twice.
PIECES, FORWARD_WARPS, FORWARD_REGISTERS = 8, 4, 56
# How often a program looks for the words of the others before it computes them: about a millisecond.
PATIENCE = 1024


@triton.jit
def _kept(x, PTX: tl.constexpr):
    return as_it_is(x) if PTX else x


@triton.jit
def _word(dot):
    """A sum in float32 as a message, which is not 0 whatever the sum is."""
    return (dot.to(tl.int32, bitcast=True).to(tl.int64) << 32) | 1


@triton.jit
def _sum_in(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _part(y_ptr, dy_ptr, part, N, BLOCK: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    """A part of y and of dy, [BLOCK] each, in 16 bits; what lies beyond the row's end is 0."""
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < N) | EVEN
    y = tl.load(y_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_first")
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_first")
    return _kept(y, PTX), _kept(dy, PTX)


@triton.jit
def _dot(y, dy, LOG: tl.constexpr):
    """sum(y dy), or sum(dy)."""
    dy = dy.to(tl.float32)
    return tl.sum(dy if LOG else y.to(tl.float32) * dy, axis=0)


@triton.jit
def _put(dx_ptr, y, dy, dot, part, N, LOG: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    y, dy = y.to(tl.float32), dy.to(tl.float32)
    dx = dy - tl.exp2(y * 1.4426950408889634) * dot if LOG else y * (dy - dot)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(dx_ptr + offs, dx, mask=(offs < N) | EVEN)


@triton.jit
def _posted(words_ptr, parts, SLOTS: tl.constexpr, NOTHING: tl.constexpr):
    """The words of a row, as far as they have come, and how many have not. Beyond the last part stands NOTHING, which adds none.

    There are as many slots as threads, hence each word is loaded by one thread alone, and what follows from the words is the
    same for all threads. Two threads that load a word each for themselves may see it come at different times, and one of
    them would leave a loop in which the other stays."""
    slots = tl.arange(0, SLOTS)
    words = tl.load(words_ptr + slots, mask=slots < parts, other=NOTHING, volatile=True)
    return words, tl.sum((words == 0).to(tl.int32), axis=0)


@triton.jit
def _awaited(words_ptr, parts, patience, SLOTS: tl.constexpr, NOTHING: tl.constexpr):
    """What `_posted` says when all words have come, or patience ends."""
    words, missing = _posted(words_ptr, parts, SLOTS, NOTHING)
    looked = 0
    while (missing > 0) & (looked < patience):
        words, missing = _posted(words_ptr, parts, SLOTS, NOTHING)
        looked += 1
    return words, missing


@triton.jit
def softmax_bwd_shared_kernel(
    y_ptr, dy_ptr, dx_ptr, words_ptr,
    stride_dym,
    N, patience,
    LOG: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program per part, those of a row one after the other. words [M, parts]: 0. EVEN: all parts are full."""
    parts = tl.cdiv(N, BLOCK)
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    y_ptr += row * N
    dy_ptr += row * stride_dym
    dx_ptr += row * N
    words_ptr += row * parts
    y, dy = _part(y_ptr, dy_ptr, part, N, BLOCK, EVEN, PTX)
    tl.atomic_xchg(words_ptr + part, _word(_dot(y, dy, LOG)), sem="relaxed")

    words, missing = _awaited(words_ptr, parts, patience, SLOTS, 1)
    if missing > 0:
        for i in tl.range(0, parts):
            y, dy = _part(y_ptr, dy_ptr, i, N, BLOCK, EVEN, PTX)
            words = tl.where(tl.arange(0, SLOTS) == i, _word(_dot(y, dy, LOG)), words)
        # Loaded again, so that nothing has to be kept meanwhile: registers are scarce.
        y, dy = _part(y_ptr, dy_ptr, part, N, BLOCK, EVEN, PTX)
        _put(dx_ptr, y, dy, tl.sum(_sum_in(words), axis=0), part, N, LOG, BLOCK, EVEN)
    else:
        _put(dx_ptr, _kept(y, PTX), _kept(dy, PTX), tl.sum(_sum_in(words), axis=0), part, N, LOG, BLOCK, EVEN)


# ---------------------------------------------------------------------------------------------------------------- forward
NOTHING = tl.constexpr(-0x80_0000 << 32)  # the message of a part without numbers: -inf and 0


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _pair(m, l):
    """A maximum and a sum in float32 as a message."""
    low = l.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def _load(x_ptr, first, N, PIECES: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr):
    """The part of a row that begins at column `first`: PIECES tensors [PIECE] of 16 bits, -inf beyond the row's end."""
    held = ()
    for i in tl.static_range(PIECES):
        offs = first + i * PIECE + tl.arange(0, PIECE)
        # Nobody reads x again, yet the L2 is faster if told to keep it, by 4%: what is written leaves it instead.
        x = tl.load(x_ptr + offs, mask=(offs < N) | EVEN, other=-float("inf"), eviction_policy="evict_last")
        held = held + (x,)  # noqa: RUF005 no star here
    return held


@triton.jit
def _state(held, PTX: tl.constexpr):
    """A part's maximum m, and its sum of exp(x - m). The maximum is finite where all numbers are -inf, so that -inf - m is never
    NaN."""
    top = held[0].to(tl.float32)
    for i in tl.static_range(1, len(held)):
        top = tl.maximum(top, held[i].to(tl.float32))
    m = tl.maximum(tl.max(top, axis=0), -3.4028234663852886e38)
    total = _exp(_kept(held[0], PTX).to(tl.float32) - m)
    for i in tl.static_range(1, len(held)):
        total += _exp(_kept(held[i], PTX).to(tl.float32) - m)
    return m, tl.sum(total, axis=0)


@triton.jit
def _row_state(words):
    """A row's maximum m, and its sum of exp(x - m), from the messages of all parts."""
    maxima, sums = _sum_in(words), (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    m = tl.max(maxima, axis=0)
    return m, tl.sum(sums * _exp(maxima - m), axis=0)


@triton.jit
def _put_softmax(
    y_ptr, held, words, first, N,
    LOG: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores the softmax, or log-softmax, of the part `held`, which begins at column `first`, from the messages of all."""
    m, total = _row_state(words)
    scale = tl.log(total) if LOG else 1.0 / total
    for i in tl.static_range(len(held)):
        x = _kept(held[i], PTX).to(tl.float32) - m
        offs = first + i * PIECE + tl.arange(0, PIECE)
        tl.store(y_ptr + offs, x - scale if LOG else _exp(x) * scale, mask=(offs < N) | EVEN)


@triton.jit
def softmax_fwd_shared_kernel(
    x_ptr, y_ptr, words_ptr,
    stride_xm,
    N, patience,
    LOG: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program per part, PIECES times PIECE numbers, those of a row one after the other. words [M, parts]: 0. EVEN: all parts are
    full."""
    parts = tl.cdiv(N, PIECES * PIECE)
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    first = part * (PIECES * PIECE)
    x_ptr += row * stride_xm
    y_ptr += row * N
    words_ptr += row * parts
    held = _load(x_ptr, first, N, PIECES, PIECE, EVEN)
    m, l = _state(held, PTX)
    tl.atomic_xchg(words_ptr + part, _pair(m, l), sem="relaxed")

    words, missing = _awaited(words_ptr, parts, patience, SLOTS, NOTHING)
    if missing > 0:
        for i in tl.range(0, parts):
            m, l = _state(_load(x_ptr, i * (PIECES * PIECE), N, PIECES, PIECE, EVEN), PTX)
            words = tl.where(tl.arange(0, SLOTS) == i, _pair(m, l), words)
        held = _load(x_ptr, first, N, PIECES, PIECE, EVEN)  # again, as above
        _put_softmax(y_ptr, held, words, first, N, LOG, PIECE, EVEN, PTX)
    else:
        _put_softmax(y_ptr, held, words, first, N, LOG, PIECE, EVEN, PTX)


# -------------------------------------------------------------------------------------------------------------- launchers
def softmax_parts(x: Tensor, y: Tensor, log: bool, patience: int = PATIENCE) -> None:
    """Fill y [M, N], contiguous, with the softmax, or log-softmax, of x, whose rows may lie apart. Both are of 16 bits."""
    M, N = x.shape
    parts = -(-N // PART)
    words = torch.zeros(M * parts, dtype=torch.int64, device=x.device)
    launch(
        softmax_fwd_shared_kernel, M * parts, x, y, words, x.stride(0), N, patience,
        LOG=log, SLOTS=32 * FORWARD_WARPS, PIECES=PIECES, PIECE=PART // PIECES, EVEN=N % PART == 0, PTX=not interpreted(),
        num_warps=FORWARD_WARPS, maxnreg=FORWARD_REGISTERS,
    )  # fmt: skip


def softmax_gradients(y: Tensor, dy: Tensor, dx: Tensor, log: bool, patience: int = PATIENCE) -> None:
    """Fill dx [M, N], contiguous as y is; the rows of dy may lie apart. All are of 16 bits."""
    M, N = y.shape
    parts = -(-N // PART)
    words = torch.zeros(M * parts, dtype=torch.int64, device=y.device)
    launch(
        softmax_bwd_shared_kernel, M * parts, y, dy, dx, words, dy.stride(0), N, patience,
        LOG=log, SLOTS=32 * WARPS, BLOCK=PART, EVEN=N % PART == 0, PTX=not interpreted(), num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
