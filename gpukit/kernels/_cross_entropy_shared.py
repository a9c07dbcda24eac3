"""Cross-entropy in place of rows that several programs share, in Triton: the logits are read once, and their gradient takes their
place (gpukit.kernels.cross_entropy launches it and says what is computed; gpukit.kernels._rows_shared says how programs share a
row, and is to be read first).

What is new beside a softmax is that a part is overwritten, while a program that has lost patience may want to read it. A program
overwrites its part only after it has seen its own message in memory. Whoever computes the message of another part looks for that
message twice: before the part is read, so that no part is read whose message has come, and once more afterwards. If there is still
none, the part was what it had been. If it has come meanwhile, it is used, and what was read is thrown away. Both give the same
bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._launch import interpreted, launch
from gpukit.kernels._rows_shared import NOTHING, PATIENCE, _awaited, _exp, _kept, _load, _pair, _row_state, _state

# Numbers of a piece, 8 for each thread, and the registers of a thread that keeps 8 or 10 pieces of a part. Times on an H200, in µs:
# 4,096 x 50,304: 10 pieces 204, 8 in seven parts 218, 12 (80 registers) 217; 8,192 x 32,000: 8 pieces 260, 10 in four parts 280;
# 4,096 x 128,256: 518 with 8, 521 with 10. In 64 registers 10 pieces take 209, 281 and 532.
# Full parts are masked as others are: without masks the compiler holds the addresses, and lacks registers.
PIECE, WARPS = 1024, 4
REGISTERS = {8: 64, 10: 72}


@triton.jit
def _put_gradient(
    x_ptr, held, words, first, N, target, x_target, share, says, ignored, loss_ptr, stats_ptr,
    Z_LOSS: tl.constexpr, PIECE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores share times the gradient of the part `held`, which begins at column `first`, from the messages of all. `says`: whether
    this program stores the row's loss and stats, too. target: -1 where it is no class."""
    m, l = _row_state(words)
    log_l = tl.log(l)
    loss = log_l + (m - x_target)
    factor = 1.0 / l
    if Z_LOSS != 0:
        loss += Z_LOSS * (m + log_l) * (m + log_l)
        factor *= 1 + 2 * Z_LOSS * (m + log_l)
    factor *= share
    tl.store(loss_ptr, tl.where(ignored, 0.0, loss), mask=says)
    tl.store(stats_ptr, m, mask=says)
    tl.store(stats_ptr + 1, log_l, mask=says)
    behind = (target - first).to(tl.int32)
    for i in tl.static_range(len(held)):
        columns = i * PIECE + tl.arange(0, PIECE)
        dx = _exp(_kept(held[i], PTX).to(tl.float32) - m) * factor
        dx = tl.where(columns == behind, dx - share, dx)
        tl.store(x_ptr + first + columns, dx, mask=first + columns < N)


@triton.jit
def cross_entropy_shared_kernel(
    x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr, words_ptr,
    stride_xm,
    N, ignore_index, patience,
    Z_LOSS: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program per part, PIECES times PIECE numbers, those of a row one after the other. words [M, parts]: 0. The other
    arguments are those of gpukit.kernels.cross_entropy's first kernel."""
    parts = tl.cdiv(N, PIECES * PIECE)
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    first = part * (PIECES * PIECE)
    x_ptr += row * stride_xm
    words_ptr += row * parts
    loss_ptr += row
    stats_ptr += 2 * row
    target = tl.load(target_ptr + row).to(tl.int64)
    share = tl.load(scale_ptr).to(tl.float32)
    if not PTX:
        # For the interpreter, which runs one program after the other and looks for races: who has read this part before has
        # looked for its message afterwards, and this program comes later.
        tl.atomic_add(words_ptr + part, 0, sem="acquire")
    held = _load(x_ptr, first, N, PIECES, PIECE, False)
    ignored = target == ignore_index
    share = tl.where(ignored, 0.0, share)
    # The program whose part contains the target says the loss, and where it is no class, the first one.
    target = tl.where((target >= 0) & (target < N), target, -1)
    own = (target >= first) & (target < first + PIECES * PIECE)
    says = own | ((target < 0) & (part == 0))
    x_target = tl.load(x_ptr + target, mask=own, other=float("nan")).to(tl.float32)
    m, l = _state(held, PTX)
    tl.atomic_xchg(words_ptr + part, _pair(m, l), sem="relaxed")

    words, missing = _awaited(words_ptr, parts, patience, SLOTS, NOTHING)
    if missing > 0:
        for i in tl.range(0, parts):
            # Asked for by an atomic operation, which one thread does for all: they must not part here.
            word = tl.atomic_add(words_ptr + i, 0, sem="relaxed")
            if word == 0:
                m, l = _state(_load(x_ptr, i * (PIECES * PIECE), N, PIECES, PIECE, False), PTX)
                word = tl.atomic_add(words_ptr + i, 0, sem="acq_rel")
                if word == 0:
                    word = _pair(m, l)
            words = tl.where(tl.arange(0, SLOTS) == i, word, words)
        held = _load(x_ptr, first, N, PIECES, PIECE, False)  # again: registers are scarce
        _put_gradient(
            x_ptr, held, words, first, N, target, x_target, share, says, ignored, loss_ptr, stats_ptr,
            Z_LOSS, PIECE, PTX,
        )  # fmt: skip
    else:
        _put_gradient(
            x_ptr, held, words, first, N, target, x_target, share, says, ignored, loss_ptr, stats_ptr,
            Z_LOSS, PIECE, PTX,
        )  # fmt: skip


def pieces_of(N: int) -> int:
    """Of a part: as many as leave the fewest lanes of the last one idle."""
    return min(REGISTERS, key=lambda pieces: -(-N // (pieces * PIECE)) * pieces)


def cross_entropy_parts(
    x: Tensor, target: Tensor, losses: Tensor, stats: Tensor, scale: Tensor, ignore_index: int, z_loss: float,
    patience: int = PATIENCE,
) -> None:  # fmt: skip
    """Fill losses [M] and stats [M, 2], and put scale times the gradient in the place of x [M, N], of 16 bits, whose rows may lie
    apart."""
    M, N = x.shape
    pieces = pieces_of(N)
    parts = -(-N // (pieces * PIECE))
    words = torch.zeros(M * parts, dtype=torch.int64, device=x.device)
    launch(
        cross_entropy_shared_kernel, M * parts, x, target, losses, stats, scale, words, x.stride(0), N, ignore_index, patience,
        Z_LOSS=z_loss, SLOTS=32 * WARPS, PIECES=pieces, PIECE=PIECE, PTX=not interpreted(),
        num_warps=WARPS, maxnreg=REGISTERS[pieces],
    )  # fmt: skip
