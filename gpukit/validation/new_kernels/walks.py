"""Long walks: each step of a program waits for the one before, and nothing else is left to do meanwhile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import BF16, FLOAT, INT32, KI, MI, SMS, Work, case, empty, known, normal, place

KIND = "dependent walks"


@triton.jit
def follow(next_ptr, start_ptr, end_ptr, steps):
    """One list per program: what is loaded is the address of the next load."""
    at = tl.load(start_ptr + tl.program_id(0))
    for _ in range(steps):
        at = tl.load(next_ptr + at)
    tl.store(end_ptr + tl.program_id(0), at)


def _follow(device, n, programs, steps):
    following = place(device, torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(INT32))
    start, end = known(device, n, programs), empty(device, programs, dtype=INT32)

    def want():
        at = start.long()
        for _ in range(steps):
            at = following[at].long()
        return at

    return Work(lambda: follow[(programs,)](following, start, end, steps, num_warps=1), end, want)


case(
    "linked lists in 128 MiB, 528 programs",
    KIND,
    dict(n=32 * MI, programs=528, steps=256),
    dict(n=500, programs=3, steps=9),
)(_follow)
case(
    "linked lists in 8 MiB, 132 programs",
    KIND,
    dict(n=2 * MI, programs=132, steps=512),
    dict(n=90, programs=2, steps=5),
)(_follow)


@triton.jit
def binary_search(table_ptr, x_ptr, y_ptr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the first 2 ** LEVELS - 1 entries are below x: LEVELS gathers, one after the other."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    at = tl.zeros((BLOCK,), tl.int32)
    for level in range(LEVELS):
        step = 1 << (LEVELS - 1 - level)
        at = tl.where(tl.load(table_ptr + at + step - 1) < x, at + step, at)
    tl.store(y_ptr + offs, at)


@case("binary search in 16 Mi, 2 Mi queries", KIND, dict(levels=24, n=2 * MI), dict(levels=7, n=1024))
def _(device, levels, n):
    table, x = place(device, torch.arange(1 << levels, dtype=INT32) * 64), known(device, 64 << levels, n)
    y = empty(device, n, dtype=INT32)
    return Work(
        lambda: binary_search[(n // 512,)](table, x, y, LEVELS=levels, BLOCK=512),
        y,
        lambda: torch.searchsorted(table, x).clamp(max=(1 << levels) - 1),
    )


@triton.jit
def linear_recurrence(a_ptr, x_ptr, y_ptr, T, C, BLOCK: tl.constexpr):
    """h = a * h + x along T steps, for BLOCK of C channels per program."""
    offs = tl.program_id(1) * T * C + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros((BLOCK,), tl.float32)
    for _ in range(T):
        h = tl.load(a_ptr + offs).to(tl.float32) * h + tl.load(x_ptr + offs).to(tl.float32)
        tl.store(y_ptr + offs, h.to(y_ptr.dtype.element_ty))
        offs += C


@case("linear recurrence of 1,024 steps", KIND, dict(B=4, T=1024, C=4096), dict(B=2, T=9, C=256), sample=1)
def _(device, B, T, C):
    a, x, y = normal(device, B, T, C).sigmoid(), normal(device, B, T, C), empty(device, B, T, C)

    def want():
        h, out = torch.zeros(B, C, device=x.device), []
        for t in range(T):
            h = a[:, t].float() * h + x[:, t].float()
            out.append(h)
        return torch.stack(out, 1)

    return Work(lambda: linear_recurrence[(C // 128, B)](a, x, y, T, C, BLOCK=128), y, want)


@triton.jit
def row_prefix_sums(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Running sums of a long row; each block begins with the sum of all before it."""
    offs = tl.program_id(0) * N + tl.arange(0, BLOCK)
    before = 0.0
    for _ in range(0, N, BLOCK):
        x = tl.load(x_ptr + offs)
        tl.store(y_ptr + offs, tl.cumsum(x, 0) + before)
        before += tl.sum(x, 0)
        offs += BLOCK


@case("prefix sums of 64 rows of 256 Ki", KIND, dict(M=64, N=256 * KI), dict(M=2, N=8192), sample=1)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        return row_prefix_sums[(M,)](x, y, N, BLOCK=4096, num_warps=8)

    return Work(run, y, lambda: x.double().cumsum(1))


@triton.jit
def divisions_in_turn(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(steps):
        x = x * 0.999 + 0.5 / (2.0 + x * x)
    tl.store(y_ptr + offs, x)


@case("4,096 divisions in turn", KIND, dict(programs=SMS, steps=4096), dict(programs=2, steps=20), sample=1)
def _(device, programs, steps):
    x, y = normal(device, programs * 128, dtype=FLOAT), empty(device, programs * 128, dtype=FLOAT)

    def want():
        z = x
        for _ in range(steps):
            z = z * 0.999 + 0.5 / (2.0 + z * z)
        return z

    return Work(lambda: divisions_in_turn[(programs,)](x, y, steps, BLOCK=128), y, want)


@triton.jit
def row_logsumexp(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """The maximum and the sum of a row in one pass; both are complete after each block."""
    offs = tl.program_id(0) * N + tl.arange(0, BLOCK)
    m, s = -float("inf"), 0.0
    for _ in range(0, N, BLOCK):
        x = tl.load(x_ptr + offs).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
        m = new
        offs += BLOCK
    tl.store(y_ptr + tl.program_id(0), m + tl.log(s))


@case("log-sum-exp of 264 rows of 256 Ki, online", KIND, dict(M=264, N=256 * KI), dict(M=3, N=8192), sample=1)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=BF16), empty(device, M, dtype=FLOAT)
    return Work(lambda: row_logsumexp[(M,)](x, y, N, BLOCK=2048), y, lambda: x.float().logsumexp(1))
