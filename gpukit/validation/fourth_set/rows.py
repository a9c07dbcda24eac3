"""Rows and columns of a matrix: gradients of norms, losses, choices among logits, and a softmax down the columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, KI, MI, UINT8, Work, empty, known, normal

NORMS, LOSSES, CHOICES, COLUMNS = "norms in training", "losses", "choices among logits", "down columns"


@triton.jit
def sum_parts(part_ptr, out_ptr, PARTS, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the columns of a matrix of partial results."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, PARTS, ROWS):
        total += tl.load(part_ptr + (first + rows)[:, None] * N + cols[None, :])
    tl.store(out_ptr + cols, tl.sum(total, 0))


@triton.jit
def layer_norm_gradient(x_ptr, dy_ptr, w_ptr, dx_ptr, part_ptr, PARTS, N: tl.constexpr, ROWS: tl.constexpr):
    """dx of ROWS rows, one after another, and what these rows add to the gradients of weight and bias."""
    cols = tl.arange(0, N)
    w = tl.load(w_ptr + cols)
    dw, db = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for i in range(ROWS):
        at = (tl.program_id(0) * ROWS + i) * N + cols
        x, dy = tl.load(x_ptr + at).to(tl.float32), tl.load(dy_ptr + at).to(tl.float32)
        centered = x - tl.sum(x, 0) / N
        scale = tl.rsqrt(tl.sum(centered * centered, 0) / N + 1e-5)
        hat, g = centered * scale, w * dy
        dx = scale * (g - tl.sum(g, 0) / N - hat * tl.sum(hat * g, 0) / N)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty))
        dw += dy * hat
        db += dy
    tl.store(part_ptr + tl.program_id(0) * N + cols, dw)
    tl.store(part_ptr + (PARTS + tl.program_id(0)) * N + cols, db)


@case(
    "gradients of layer norm, 16384 rows of 2048 bf16, three launches",
    NORMS,
    dict(M=16 * KI, N=2048),
    dict(M=512, N=64),
)
def _(device, M, N):
    rows = 16
    x, dy, w = normal(device, M, N), normal(device, M, N), normal(device, N, dtype=FLOAT)
    dx, parts = empty(device, M, N), empty(device, 2, M // rows, N, dtype=FLOAT)
    dw, db = empty(device, N, dtype=FLOAT), empty(device, N, dtype=FLOAT)

    def run():
        layer_norm_gradient[(M // rows,)](x, dy, w, dx, parts, M // rows, N=N, ROWS=rows, num_warps=8)
        for part, out in zip(parts, (dw, db), strict=True):
            sum_parts[(N // 32,)](part, out, M // rows, N, ROWS=32, BLOCK=32)

    def want():
        with torch.enable_grad():
            at = [x.float().requires_grad_(), w.clone().requires_grad_(), torch.zeros_like(w).requires_grad_()]
            return torch.autograd.grad(F.layer_norm(at[0], (N,), at[1], at[2]), at, dy.float())

    return Work(run, (dx, dw, db), want)


@triton.jit
def moments_of_rows(x_ptr, part_ptr, PARTS, C, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Sums and sums of squares of BLOCK channels over ROWS pixels, where channels are neighbors."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, squares = tl.zeros((STEP, BLOCK), tl.float32), tl.zeros((STEP, BLOCK), tl.float32)
    for first in range(0, ROWS, STEP):
        rows = tl.program_id(0) * ROWS + first + tl.arange(0, STEP)
        x = tl.load(x_ptr + rows[:, None] * C + cols[None, :]).to(tl.float32)
        total += x
        squares += x * x
    tl.store(part_ptr + tl.program_id(0) * C + cols, tl.sum(total, 0))
    tl.store(part_ptr + (PARTS + tl.program_id(0)) * C + cols, tl.sum(squares, 0))


@triton.jit
def normalize_channels(x_ptr, sum_ptr, square_ptr, w_ptr, y_ptr, P, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.load(sum_ptr + cols) / P
    scale = tl.load(w_ptr + cols) * tl.rsqrt(tl.load(square_ptr + cols) / P - mean * mean + 1e-5)
    at = rows[:, None] * C + cols[None, :]
    y = (tl.load(x_ptr + at).to(tl.float32) - mean[None, :]) * scale[None, :]
    tl.store(y_ptr + at, tl.maximum(y, 0.0).to(y_ptr.dtype.element_ty))


@case(
    "batch norm and ReLU, 401,408 pixels of 256 channels bf16, four launches",
    NORMS,
    dict(P=128 * 56 * 56, C=256, rows=1024),
    dict(P=512, C=64, rows=16),
)
def _(device, P, C, rows):
    x, w, y = normal(device, P, C), normal(device, C, dtype=FLOAT), empty(device, P, C)
    parts = empty(device, 2, 512, C, dtype=FLOAT)  # those beyond P / rows stay 0
    total, squares = empty(device, C, dtype=FLOAT), empty(device, C, dtype=FLOAT)

    def run():
        moments_of_rows[(P // rows, C // 64)](x, parts, 512, C, ROWS=rows, STEP=16, BLOCK=64)
        for part, out in zip(parts, (total, squares), strict=True):
            sum_parts[(C // 32,)](part, out, 512, C, ROWS=32, BLOCK=32)
        normalize_channels[(P // 16, C // 64)](x, total, squares, w, y, P, C, ROWS=16, BLOCK=64)

    return Work(run, y, lambda: F.batch_norm(x.float(), None, None, w, training=True).relu())


@triton.jit
def instance_norm(x_ptr, y_ptr, P, BLOCK: tl.constexpr):
    """A plane per program, which is read three times: for its mean, its variance, and to be scaled."""
    x_ptr += tl.program_id(0) * P
    y_ptr += tl.program_id(0) * P
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, P, BLOCK):
        total += tl.load(x_ptr + start + offs, mask=start + offs < P, other=0.0)
    mean = tl.sum(total, 0) / P
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, P, BLOCK):
        live = start + offs < P
        d = tl.where(live, tl.load(x_ptr + start + offs, mask=live, other=0.0) - mean, 0.0)
        squares += d * d
    scale = tl.rsqrt(tl.sum(squares, 0) / P + 1e-5)
    for start in range(0, P, BLOCK):
        live = start + offs < P
        tl.store(y_ptr + start + offs, (tl.load(x_ptr + start + offs, mask=live) - mean) * scale, mask=live)


@case(
    "instance norm of 4096 planes of 100 x 100 fp32, three passes",
    NORMS,
    dict(planes=4096, P=10_000),
    dict(planes=3, P=1500),
)
def _(device, planes, P):
    x, y = normal(device, planes, P, dtype=FLOAT), empty(device, planes, P, dtype=FLOAT)
    return Work(lambda: instance_norm[(planes,)](x, y, P, BLOCK=1024), y, lambda: F.instance_norm(x[None])[0])


@triton.jit
def focal_losses(x_ptr, target_ptr, y_ptr, BLOCK: tl.constexpr):
    """The sum over a block of -alpha (1 - p)^2 log p, where p is the probability of what is true."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, target = tl.load(x_ptr + at).to(tl.float32), tl.load(target_ptr + at)
    signed = tl.where(target > 0, x, -x)
    small = tl.exp(-tl.abs(signed))
    cross_entropy = tl.maximum(-signed, 0.0) + tl.log(1 + small)
    missing = 1 - tl.where(signed >= 0, 1.0, small) / (1 + small)
    loss = tl.where(target > 0, 0.25, 0.75) * missing * missing * cross_entropy
    tl.store(y_ptr + tl.program_id(0), tl.sum(loss, 0))


@case("focal losses of 64 Mi bf16, summed in blocks of 2048", LOSSES, dict(n=64 * MI), dict(n=8192))
def _(device, n):
    x, target, y = normal(device, n), known(device, 2, n, dtype=UINT8), empty(device, n // 2048, dtype=FLOAT)

    def want():
        p = torch.where(target > 0, x.float(), -x.float()).sigmoid()
        return (torch.where(target > 0, -0.25, -0.75) * (1 - p) ** 2 * p.log()).view(-1, 2048).sum(1)

    return Work(lambda: focal_losses[(n // 2048,)](x, target, y, BLOCK=2048), y, want)


@triton.jit
def margin_losses(x_ptr, target_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """How far other classes come within 1 of the right one, as a mean over a row that is in registers."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=-float("inf"))
    target = tl.load(target_ptr + row)
    right = tl.sum(tl.where(offs == target, x, 0.0), 0)
    tl.store(y_ptr + row, tl.sum(tl.where(offs == target, 0.0, tl.maximum(1 - right + x, 0.0)), 0) / N)


@case("hinge losses of 64 Ki rows of 1000 fp32", LOSSES, dict(M=64 * KI, N=1000), dict(M=5, N=100))
def _(device, M, N):
    x, target, y = normal(device, M, N, dtype=FLOAT), known(device, N, M), empty(device, M, dtype=FLOAT)

    def run():
        return margin_losses[(M,)](x, target, y, N, BLOCK=triton.next_power_of_2(N))

    return Work(run, y, lambda: F.multi_margin_loss(x, target.long(), reduction="none"))


@triton.jit
def divergences(p_ptr, q_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Of two rows of logits, the Kullback-Leibler divergence: maxima and sums first, then both rows again."""
    p_ptr += tl.program_id(0) * N
    q_ptr += tl.program_id(0) * N
    offs = tl.arange(0, BLOCK)
    pm, qm = tl.full((BLOCK,), -1e30, tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    ps, qs = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        p, q = tl.load(p_ptr + start + offs).to(tl.float32), tl.load(q_ptr + start + offs).to(tl.float32)
        new_p, new_q = tl.maximum(pm, p), tl.maximum(qm, q)
        ps = ps * tl.exp(pm - new_p) + tl.exp(p - new_p)
        qs = qs * tl.exp(qm - new_q) + tl.exp(q - new_q)
        pm, qm = new_p, new_q
    largest_p, largest_q = tl.max(pm, 0), tl.max(qm, 0)
    lse_p = largest_p + tl.log(tl.sum(ps * tl.exp(pm - largest_p), 0))
    lse_q = largest_q + tl.log(tl.sum(qs * tl.exp(qm - largest_q), 0))
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        p = tl.load(p_ptr + start + offs).to(tl.float32) - lse_p
        total += tl.exp(p) * (p - tl.load(q_ptr + start + offs).to(tl.float32) + lse_q)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


@case("divergences of 4096 pairs of rows of 32768 bf16", LOSSES, dict(M=4096, N=32 * KI), dict(M=3, N=2048))
def _(device, M, N):
    p, q, y = normal(device, M, N), normal(device, M, N), empty(device, M, dtype=FLOAT)

    def want():
        log_p, log_q = p.float().log_softmax(1), q.float().log_softmax(1)
        return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)

    return Work(lambda: divergences[(M,)](p, q, y, N, BLOCK=1024), y, want)


@triton.jit
def cosines(x_ptr, z_ptr, y_ptr, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of ROWS pairs of rows that are no power of 2 long, in one masked block."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    at, live = rows[:, None] * N + cols[None, :], cols[None, :] < N
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + at, mask=live, other=0.0).to(tl.float32)
    y = tl.sum(x * z, 1) * tl.rsqrt(tl.sum(x * x, 1)) * tl.rsqrt(tl.sum(z * z, 1))
    tl.store(y_ptr + rows, 1 - y)


@case("cosine losses of 128 Ki pairs of rows of 768 fp16", LOSSES, dict(M=128 * KI, N=768), dict(M=8, N=96))
def _(device, M, N):
    x, z, y = normal(device, M, N, dtype=HALF), normal(device, M, N, dtype=HALF), empty(device, M, dtype=FLOAT)

    def run():
        return cosines[(M // 4,)](x, z, y, N, ROWS=4, BLOCK=triton.next_power_of_2(N))

    return Work(run, y, lambda: 1 - F.cosine_similarity(x.float(), z.float()))


@triton.jit
def keep_largest(x_ptr, y_ptr, K, STEPS: tl.constexpr, N: tl.constexpr):
    """Zero all but about the K largest of a row, whose bound STEPS halvings of an interval find in registers."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    low, high = -8.0, 8.0
    for _ in range(STEPS):
        middle = (low + high) * 0.5
        enough = tl.sum((x >= middle).to(tl.int32), 0) >= K
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    tl.store(y_ptr + at, tl.where(x >= low, x, 0.0))


@case("the 50 largest of 4096 rows of 16384 fp32 kept, by halving", CHOICES, dict(M=4096, N=16 * KI), dict(M=3, N=512))
def _(device, M, N):
    x, y, steps = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT), 20

    def run():
        return keep_largest[(M,)](x, y, 50, STEPS=steps, N=N, num_warps=16)

    def want():
        low, high = x.new_full((M, 1), -8.0), x.new_full((M, 1), 8.0)
        for _ in range(steps):
            middle = (low + high) * 0.5
            enough = (x >= middle).sum(1, keepdim=True) >= 50
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return torch.where(x >= low, x, 0.0)

    return Work(run, y, want)


@triton.jit
def perturbed_maxima(x_ptr, u_ptr, y_ptr, N, warmth, BLOCK: tl.constexpr):
    """The largest of x / warmth - log(-log u) in each row: one draw from its softmax."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, N, BLOCK):
        live = start + offs < N
        x = tl.load(x_ptr + row * N + start + offs, mask=live, other=-float("inf")).to(tl.float32)
        u = tl.load(u_ptr + row * N + start + offs, mask=live, other=0.5)
        best = tl.maximum(best, x / warmth - tl.log(-tl.log(u)))
    tl.store(y_ptr + row, tl.max(best, 0))


@case("draws from 2048 rows of 50,257 bf16", CHOICES, dict(M=2048, N=50_257), dict(M=3, N=1500))
def _(device, M, N):
    x, u, y = normal(device, M, N), normal(device, M, N, dtype=FLOAT).sigmoid(), empty(device, M, dtype=FLOAT)

    def run():
        return perturbed_maxima[(M,)](x, u, y, N, 0.7, BLOCK=1024)

    return Work(run, y, lambda: (x.float() / 0.7 - (-u.log()).log()).amax(1))


@triton.jit
def softmax_of_columns(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns per program: down once for maxima and sums, and down again."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    m, s = tl.full((ROWS, BLOCK), -1e30, tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, M, ROWS):
        x = tl.load(x_ptr + (first + rows)[:, None] * N + cols[None, :]).to(tl.float32)
        new = tl.maximum(m, x)
        s = s * tl.exp(m - new) + tl.exp(x - new)
        m = new
    largest = tl.max(m, 0)
    total = tl.sum(s * tl.exp(m - largest[None, :]), 0)
    for first in range(0, M, ROWS):
        at = (first + rows)[:, None] * N + cols[None, :]
        y = tl.exp(tl.load(x_ptr + at).to(tl.float32) - largest[None, :]) / total[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case("softmax down 4096 rows of 16384 bf16", COLUMNS, dict(M=4096, N=16 * KI), dict(M=64, N=128))
def _(device, M, N):
    x, y = normal(device, M, N), empty(device, M, N)

    def run():
        return softmax_of_columns[(N // 64,)](x, y, M, N, ROWS=32, BLOCK=64)

    return Work(run, y, lambda: x.float().softmax(0))
