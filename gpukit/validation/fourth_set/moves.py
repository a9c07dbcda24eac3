"""Numbers that move or are changed one by one: odd sizes, strides, merges, masks that are drawn twice, and gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, MI, Work, empty, known, normal

ODD, MERGES, DROPPED, GATES, PRICES = "odd sizes moved", "merges", "dropped twice", "gates and scales", "prices"


@triton.jit
def last_first(x_ptr, y_ptr, A, B, C, BB: tl.constexpr, BC: tl.constexpr):
    """[a, b, c] becomes [c, a, b], in tiles of b and c with masks, since no size is a multiple of anything."""
    b, c = tl.program_id(0) * BB + tl.arange(0, BB), tl.program_id(1) * BC + tl.arange(0, BC)
    live = (b[:, None] < B) & (c[None, :] < C)
    x = tl.load(x_ptr + (tl.program_id(2) * B + b)[:, None] * C + c[None, :], mask=live)
    tl.store(y_ptr + (c[None, :] * A + tl.program_id(2)) * B + b[:, None], x, mask=live)


@case("251 x 509 x 521 fp32, last dimension first", ODD, dict(A=251, B=509, C=521), dict(A=3, B=37, C=41))
def _(device, A, B, C):
    x, y = normal(device, A, B, C, dtype=FLOAT), empty(device, C, A, B, dtype=FLOAT)

    def run():
        return last_first[(triton.cdiv(B, 32), triton.cdiv(C, 32), A)](x, y, A, B, C, BB=32, BC=32)

    return Work(run, y, lambda: x.permute(2, 0, 1))


@triton.jit
def slices(x_ptr, y_ptr, W, FIRST, STEP, COUNT, BLOCK: tl.constexpr):
    """Every STEP-th number of every second row, from FIRST on."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = j < COUNT
    x = tl.load(x_ptr + 2 * tl.program_id(1) * W + FIRST + STEP * j, mask=live)
    tl.store(y_ptr + tl.program_id(1) * COUNT + j, x, mask=live)


@case("x[::2, 5::3] of 32768 x 8191 fp16", ODD, dict(H=32 * KI, W=8191), dict(H=6, W=400))
def _(device, H, W):
    x, count = normal(device, H, W, dtype=HALF), len(range(5, W, 3))
    y = empty(device, H // 2, count, dtype=HALF)

    def run():
        return slices[(triton.cdiv(count, 1024), H // 2)](x, y, W, 5, 3, count, BLOCK=1024)

    return Work(run, y, lambda: x[::2, 5::3])


@triton.jit
def merge_step(x_ptr, y_ptr, APART, BLOCK: tl.constexpr):
    """The smaller of two numbers that lie APART goes first."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = t // APART * 2 * APART + t % APART
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + at + APART)
    tl.store(y_ptr + at, tl.minimum(a, b))
    tl.store(y_ptr + at + APART, tl.maximum(a, b))


@case("rows of 512 int32, up and down again, put in order in 9 launches", MERGES, dict(n=16 * MI), dict(n=2048))
def _(device, n):
    """Half of a row goes up and half of it down; numbers go to and fro between two tensors."""
    halves = known("cpu", 1 << 30, n).view(-1, 2, 256).sort(2).values
    x = torch.stack([halves[:, 0], halves[:, 1].flip(1)], 1).view(-1)
    x = x if device == "meta" else x.to(device)
    y, z = empty(device, n, dtype=INT32), empty(device, n, dtype=INT32)

    def run():
        source = x
        for step in range(9):
            target = (y, z)[step % 2]
            merge_step[(n // 1024,)](source, target, 256 >> step, BLOCK=512)
            source = target

    return Work(run, y, lambda: x.view(-1, 512).sort(1).values.view(-1))


@triton.jit
def drop(x_ptr, r_ptr, y_ptr, seed, p, BLOCK: tl.constexpr):
    """Dropout, and a residual after it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.where(tl.rand(seed, at) > p, tl.load(x_ptr + at).to(tl.float32) / (1 - p), 0.0)
    tl.store(y_ptr + at, (kept + tl.load(r_ptr + at).to(tl.float32)).to(y_ptr.dtype.element_ty))


@triton.jit
def drop_back(x_ptr, r_ptr, y_ptr, z_ptr, seed, p, BLOCK: tl.constexpr):
    """The same mask again, of which nothing was stored: undo what was kept, and put in what was not."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = (tl.load(y_ptr + at).to(tl.float32) - tl.load(r_ptr + at).to(tl.float32)) * (1 - p)
    z = tl.where(tl.rand(seed, at) > p, kept, tl.load(x_ptr + at).to(tl.float32))
    tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty))


@case("dropout with a residual, and undone, 64 Mi fp16, two launches", DROPPED, dict(n=64 * MI), dict(n=2048))
def _(device, n):
    """What comes back does not depend on what is drawn, so that any generator's result can be checked."""
    x, r, y, z = (normal(device, n, dtype=HALF) for _ in range(4))

    def run():
        drop[(n // 1024,)](x, r, y, 11, 0.1, BLOCK=1024)
        drop_back[(n // 1024,)](x, r, y, z, 11, 0.1, BLOCK=1024)

    return Work(run, z, lambda: x)


@triton.jit
def gate_gradient(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    """Of silu(a) b, where a and b are the halves of a row: both gradients, from one row of twice the length."""
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x_ptr + row * 2 * N + offs).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * N + N + offs).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + offs).to(tl.float32)
    s = 1 / (1 + tl.exp(-a))
    da = dy * b * s * (1 + a * (1 - s))
    tl.store(dx_ptr + row * 2 * N + offs, da.to(dx_ptr.dtype.element_ty))
    tl.store(dx_ptr + row * 2 * N + N + offs, (dy * a * s).to(dx_ptr.dtype.element_ty))


@case("gradients of a gate, 8192 rows of 14336 bf16", GATES, dict(M=8192, N=14_336), dict(M=3, N=2048))
def _(device, M, N):
    x, dy, dx = normal(device, M, 2 * N), normal(device, M, N), empty(device, M, 2 * N)

    def run():
        return gate_gradient[(M, N // 1024)](x, dy, dx, N, BLOCK=1024)

    def want():
        a, b = x.float().chunk(2, 1)
        s = a.sigmoid()
        return torch.cat([dy.float() * b * s * (1 + a * (1 - s)), dy.float() * a * s], 1)

    return Work(run, dx, want)


@triton.jit
def scaled_branch(x_ptr, branch_ptr, bias_ptr, scale_ptr, y_ptr, C, P, BLOCK: tl.constexpr):
    """x + scale * tanh-GELU(branch + bias): bias and scale are those of a channel, which is a plane of P pixels."""
    plane = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = offs < P
    bias, scale = tl.load(bias_ptr + plane % C), tl.load(scale_ptr + plane % C)
    z = tl.load(branch_ptr + plane * P + offs, mask=live).to(tl.float32) + bias
    gelu = z / (1 + tl.exp(-1.5957691 * (z + 0.044715 * z * z * z)))
    y = tl.load(x_ptr + plane * P + offs, mask=live).to(tl.float32) + scale * gelu
    tl.store(y_ptr + plane * P + offs, y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "a scaled branch is added, 128 images of 384 planes of 28 x 28 bf16",
    GATES,
    dict(images=128, C=384, P=784),
    dict(images=2, C=3, P=100),
)
def _(device, images, C, P):
    x, branch, y = normal(device, images, C, P), normal(device, images, C, P), empty(device, images, C, P)
    bias, scale = normal(device, C, dtype=FLOAT), normal(device, C, dtype=FLOAT)

    def run():
        return scaled_branch[(triton.cdiv(P, 1024), images * C)](x, branch, bias, scale, y, C, P, BLOCK=1024)

    def want():
        z = F.gelu(branch.float() + bias[:, None], approximate="tanh")
        return x.float() + scale[:, None] * z

    return Work(run, y, want)


@triton.jit
def prices(s_ptr, k_ptr, t_ptr, call_ptr, put_ptr, rate, sigma, BLOCK: tl.constexpr):
    """What an option to buy and one to sell are worth, by the formula of Black and Scholes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s, k, t = tl.load(s_ptr + at), tl.load(k_ptr + at), tl.load(t_ptr + at)
    spread = sigma * tl.sqrt(t)
    d1 = (tl.log(s / k) + (rate + 0.5 * sigma * sigma) * t) / spread
    n1, n2 = 0.5 + 0.5 * tl.erf(d1 * 0.70710678), 0.5 + 0.5 * tl.erf((d1 - spread) * 0.70710678)
    later = k * tl.exp(-rate * t)
    call = s * n1 - later * n2
    tl.store(call_ptr + at, call)
    tl.store(put_ptr + at, call - s + later)


@case("prices of 32 Mi options fp32", PRICES, dict(n=32 * MI), dict(n=2048))
def _(device, n):
    s, k, t = (normal(device, n, dtype=FLOAT).sigmoid() + 0.5 for _ in range(3))
    call, put = empty(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def want():
        spread = 0.3 * t.double().sqrt()
        d1 = ((s.double() / k).log() + (0.02 + 0.045) * t) / spread
        n1, n2 = torch.special.ndtr(d1), torch.special.ndtr(d1 - spread)
        later = k * (-0.02 * t.double()).exp()
        return s * n1 - later * n2, s * n1 - later * n2 - s + later

    return Work(lambda: prices[(n // 1024,)](s, k, t, call, put, 0.02, 0.3, BLOCK=1024), (call, put), want)
