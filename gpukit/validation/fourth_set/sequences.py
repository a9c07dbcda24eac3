"""Along a sequence: sums in three launches, states that change with each step, and gradients of a convolution's taps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, MI, Work, empty, known, normal

PARTS, STATES, TAPS = "scans in parts", "states along a sequence", "gradients of taps"


@triton.jit
def sums_of_blocks(x_ptr, part_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at), 0))


@triton.jit
def sums_before(part_ptr, PARTS: tl.constexpr):
    """In place, by one program: what all blocks before a block hold."""
    at = tl.arange(0, PARTS)
    part = tl.load(part_ptr + at)
    tl.store(part_ptr + at, tl.cumsum(part, 0) - part)


@triton.jit
def sums_within(x_ptr, part_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0) + tl.load(part_ptr + tl.program_id(0)))


@case("prefix sums of 64 Mi int32 in three launches", PARTS, dict(n=64 * MI, block=4096), dict(n=4096, block=128))
def _(device, n, block):
    x, y = known(device, 16, n), empty(device, n, dtype=INT32)
    parts = empty(device, n // block, dtype=INT32)

    def run():
        sums_of_blocks[(n // block,)](x, parts, BLOCK=block, num_warps=8)
        sums_before[(1,)](parts, PARTS=n // block, num_warps=16)
        sums_within[(n // block,)](x, parts, y, BLOCK=block, num_warps=8)

    return Work(run, y, lambda: x.cumsum(0))


@triton.jit
def selective_scan(x_ptr, step_ptr, a_ptr, b_ptr, c_ptr, y_ptr, T, C, STATE: tl.constexpr, BLOCK: tl.constexpr):
    """h = exp(step a) h + step x b, y = h c, token by token: STATE numbers for each of BLOCK channels stay in registers."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, STATE)
    a = tl.load(a_ptr + channel[:, None] * STATE + n[None, :])
    h = tl.zeros((BLOCK, STATE), tl.float32)
    for t in range(T):
        token = tl.program_id(1) * T + t
        x = tl.load(x_ptr + token * C + channel).to(tl.float32)
        step = tl.load(step_ptr + token * C + channel).to(tl.float32)
        b, c = tl.load(b_ptr + token * STATE + n).to(tl.float32), tl.load(c_ptr + token * STATE + n).to(tl.float32)
        h = tl.exp(step[:, None] * a) * h + (step * x)[:, None] * b[None, :]
        tl.store(y_ptr + token * C + channel, tl.sum(h * c[None, :], 1).to(y_ptr.dtype.element_ty))


@case(
    "selective scan, 8 sequences of 1024 tokens, 4096 channels of 16 fp16",
    STATES,
    dict(B=8, T=1024, C=4096),
    dict(B=2, T=9, C=64),
    sample=1,
)
def _(device, B, T, C):
    x, step = normal(device, B, T, C, dtype=HALF), normal(device, B, T, C, dtype=HALF).sigmoid()
    a = -normal(device, C, 16, dtype=FLOAT).sigmoid()
    b, c = normal(device, B, T, 16, dtype=HALF), normal(device, B, T, 16, dtype=HALF)
    y = empty(device, B, T, C, dtype=HALF)

    def run():
        return selective_scan[(C // 32, B)](x, step, a, b, c, y, T, C, STATE=16, BLOCK=32)

    def want():
        h, out = torch.zeros(B, C, 16, device=x.device), []
        for t in range(T):
            s = step[:, t, :, None].float()
            h = (s * a).exp() * h + s * x[:, t, :, None].float() * b[:, t, None, :].float()
            out.append((h * c[:, t, None, :].float()).sum(2))
        return torch.stack(out, 1)

    return Work(run, y, want)


@triton.jit
def decaying_states(q_ptr, k_ptr, v_ptr, w_ptr, o_ptr, T, D: tl.constexpr):
    """S = w S + k v^T and o = q S, token by token: a D x D matrix per head, whose rows decay at rates of their own."""
    i = tl.arange(0, D)
    s = tl.zeros((D, D), tl.float32)
    for t in range(T):
        at = (tl.program_id(0) * T + t) * D + i
        q, k = tl.load(q_ptr + at).to(tl.float32), tl.load(k_ptr + at).to(tl.float32)
        v, w = tl.load(v_ptr + at).to(tl.float32), tl.load(w_ptr + at).to(tl.float32)
        s = w[:, None] * s + k[:, None] * v[None, :]
        tl.store(o_ptr + at, tl.sum(q[:, None] * s, 0).to(o_ptr.dtype.element_ty))


@case(
    "states of 64 x 64 that decay, 512 heads, 512 tokens fp16",
    STATES,
    dict(H=512, T=512, D=64),
    dict(H=2, T=9, D=32),
    sample=1,
)
def _(device, H, T, D):
    q, k, v = (normal(device, H, T, D, dtype=HALF) for _ in range(3))
    w, o = normal(device, H, T, D, dtype=HALF).sigmoid(), empty(device, H, T, D, dtype=HALF)

    def want():
        s, out = torch.zeros(H, D, D, device=q.device), []
        for t in range(T):
            s = w[:, t, :, None].float() * s + k[:, t, :, None].float() * v[:, t, None, :].float()
            out.append((q[:, t, :, None].float() * s).sum(1))
        return torch.stack(out, 1)

    return Work(lambda: decaying_states[(H,)](q, k, v, w, o, T, D=D), o, want)


@triton.jit
def tap_gradients(x_ptr, dy_ptr, dw_ptr, T, C, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of three taps of a causal convolution of each channel: ROWS tokens per program, which are added to others'."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2 = (
        tl.zeros((STEP, BLOCK), tl.float32),
        tl.zeros((STEP, BLOCK), tl.float32),
        tl.zeros((STEP, BLOCK), tl.float32),
    )
    for first in range(0, ROWS, STEP):
        t = tl.program_id(1) * ROWS + first + tl.arange(0, STEP)[:, None]
        at = t * C + channel[None, :]
        dy = tl.load(dy_ptr + at).to(tl.float32)
        w0 += dy * tl.load(x_ptr + at).to(tl.float32)
        w1 += dy * tl.load(x_ptr + at - C, mask=t >= 1, other=0.0).to(tl.float32)
        w2 += dy * tl.load(x_ptr + at - 2 * C, mask=t >= 2, other=0.0).to(tl.float32)
    tl.atomic_add(dw_ptr + channel, tl.sum(w0, 0))
    tl.atomic_add(dw_ptr + C + channel, tl.sum(w1, 0))
    tl.atomic_add(dw_ptr + 2 * C + channel, tl.sum(w2, 0))


@case(
    "gradients of 3 taps of 4096 channels, 32768 tokens fp16",
    TAPS,
    dict(T=32 * KI, C=4096, rows=512),
    dict(T=64, C=64, rows=32),
)
def _(device, T, C, rows):
    x, dy, dw = normal(device, T, C, dtype=HALF), normal(device, T, C, dtype=HALF), empty(device, 3, C, dtype=FLOAT)

    def run():
        return tap_gradients[(C // 64, T // rows)](x, dy, dw, T, C, ROWS=rows, STEP=16, BLOCK=64)

    def want():
        return torch.stack([(dy[tap:].float() * x[: T - tap].float()).sum(0) for tap in range(3)])

    return Work(run, dw, want)


@triton.jit
def viterbi(score_ptr, move_ptr, best_ptr, T, S: tl.constexpr):
    """The best path through T steps of S states: the largest over all states before, step by step, for one sequence."""
    i = tl.arange(0, S)
    move = tl.load(move_ptr + i[:, None] * S + i[None, :])
    best = tl.zeros((S,), tl.float32)
    for t in range(T):
        score = tl.load(score_ptr + (tl.program_id(0) * T + t) * S + i)
        # Layouts differ between what was and what comes: the sum over a diagonal turns a row into a column.
        column = tl.sum(tl.where(i[:, None] == i[None, :], best[None, :], 0.0), 1)
        best = score + tl.max(column[:, None] + move, 0)
    tl.store(best_ptr + tl.program_id(0) * S + i, best)


@case(
    "best paths of 1024 sequences, 512 steps of 32 states fp32", STATES, dict(B=1024, T=512), dict(B=2, T=9), sample=1
)
def _(device, B, T):
    score, move = normal(device, B, T, 32, dtype=FLOAT), normal(device, 32, 32, dtype=FLOAT)
    best = empty(device, B, 32, dtype=FLOAT)

    def want():
        found = torch.zeros(B, 32, device=score.device)
        for t in range(T):
            found = score[:, t] + (found[:, :, None] + move).amax(1)
        return found

    return Work(lambda: viterbi[(B,)](score, move, best, T, S=32, num_warps=1), best, want)
