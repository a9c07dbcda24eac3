"""Products that the older sets lack: float32 by parts, groups of unequal size, a vector, chains, and windows as products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, INT32, KI, Work, empty, known, normal, place
from gpukit.validation.third_set.case import case

PARTS, GROUPS, VECTOR = "float32 on tensor cores", "groups of unequal size", "a matrix times a vector"
CHAINS, WINDOWS, OTHER = "chains of products", "windows as products", "other attention"


@triton.jit
def exact_product(
    a_ptr, b_ptr, c_ptr, N, K, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + offs_m[:, None] * K + k + offs_k[None, :])
        b = tl.load(b_ptr + (k + offs_k)[:, None] * N + offs_n[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total)


def _exact(device, M, N, K, precision):
    a, b, c = normal(device, M, K, dtype=FLOAT), normal(device, K, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        return exact_product[(M // 64, N // 64)](a, b, c, N, K, PRECISION=precision, BM=64, BN=64, BK=32)

    return Work(run, c, lambda: a.double() @ b.double())


_SQUARE, _SMALL = dict(M=2048, N=2048, K=2048), dict(M=64, N=128, K=96)
case(
    "matmul 2048 fp32 in three tf32 parts", PARTS, _SQUARE | dict(precision="tf32x3"), _SMALL | dict(precision="ieee")
)(_exact)


@triton.jit
def groups_product(
    x_ptr, w_ptr, y_ptr, group_ptr, row_ptr, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Experts: tile i holds rows from row_ptr[i] on, for the weights that group_ptr[i] names."""
    tile = tl.program_id(1)
    group = tl.load(group_ptr + tile).to(tl.int64)
    offs_m = tl.load(row_ptr + tile) + tl.arange(0, BM)
    offs_n, offs_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + offs_m[:, None] * K + k + offs_k[None, :])
        w = tl.load(w_ptr + group * K * N + (k + offs_k)[:, None] * N + offs_n[None, :])
        total = tl.dot(x, w, total)
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(y_ptr.dtype.element_ty))


@case(
    "16 experts of 2048 x 2048 bf16, 128 tiles of 64 rows",
    GROUPS,
    dict(tiles=128, experts=16, N=2048, K=2048),
    dict(tiles=3, experts=2, N=128, K=128),
)
def _(device, tiles, experts, N, K):
    group = known("cpu", experts, tiles).sort().values
    x, w, y = normal(device, tiles * 64, K), normal(device, experts, K, N), empty(device, tiles * 64, N)
    first = place(device, torch.arange(tiles, dtype=INT32) * 64)
    of_tile = place(device, group)

    def run():
        return groups_product[(N // 128, tiles)](x, w, y, of_tile, first, N, K=K, BM=64, BN=128, BK=64)

    def want():
        return torch.cat([x[i * 64 : i * 64 + 64].float() @ w[g].float() for i, g in enumerate(group.tolist())])

    return Work(run, y, want)


@triton.jit
def times_vector(a_ptr, x_ptr, y_ptr, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS rows of a matrix times a vector that all programs read."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows[:, None] * N + offs[None, :]).to(tl.float32)
        total += a * tl.load(x_ptr + offs).to(tl.float32)[None, :]
    tl.store(y_ptr + rows, tl.sum(total, 1))


@case("16384 x 16384 fp16 times a vector", VECTOR, dict(M=16 * KI, N=16 * KI), dict(M=8, N=2048))
def _(device, M, N):
    a, x, y = normal(device, M, N, dtype=HALF), normal(device, N, dtype=HALF), empty(device, M, dtype=FLOAT)

    def run():
        return times_vector[(M // 4,)](a, x, y, N, ROWS=4, BLOCK=1024)

    return Work(run, y, lambda: a.float() @ x.float())


@triton.jit
def vector_times(a_ptr, x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The transposed matrix: a program walks down BLOCK columns, and adds what it has found to theirs."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(first, first + ROWS):
        total += tl.load(a_ptr + i * N + cols).to(tl.float32) * tl.load(x_ptr + i).to(tl.float32)
    tl.atomic_add(y_ptr + cols, total)


@case("a vector times 16384 x 16384 fp16, rows in 64 parts", VECTOR, dict(M=16 * KI, N=16 * KI), dict(M=128, N=512))
def _(device, M, N):
    a, x, y = normal(device, M, N, dtype=HALF), normal(device, M, dtype=HALF), empty(device, N, dtype=FLOAT)

    def run():
        return vector_times[(N // 256, 64)](a, x, y, M, N, ROWS=M // 64, BLOCK=256)

    return Work(run, y, lambda: x.float() @ a.float())


@triton.jit
def low_rank(x_ptr, a_ptr, b_ptr, y_ptr, N, K, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y = (x a) b with a rank of R: x a stays in registers, and is used for all columns of b."""
    offs_m, offs_r = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, R)
    offs_k, offs_n = tl.arange(0, BK), tl.arange(0, BN)
    inner = tl.zeros((BM, R), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + offs_m[:, None] * K + k + offs_k[None, :])
        a = tl.load(a_ptr + (k + offs_k)[:, None] * R + offs_r[None, :])
        inner = tl.dot(x, a, inner)
    small = inner.to(x_ptr.dtype.element_ty)
    for n in range(0, N, BN):
        b = tl.load(b_ptr + offs_r[:, None] * N + n + offs_n[None, :])
        y = tl.dot(small, b)
        tl.store(y_ptr + offs_m[:, None] * N + n + offs_n[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "adapters of rank 32, 32768 rows, 4096 to 4096 bf16",
    CHAINS,
    dict(M=32 * KI, N=4096, K=4096, R=32),
    dict(M=64, N=128, K=128, R=16),
)
def _(device, M, N, K, R):
    x, a, b, y = normal(device, M, K), normal(device, K, R), normal(device, R, N), empty(device, M, N)

    def run():
        return low_rank[(M // 64,)](x, a, b, y, N, K, R=R, BM=64, BN=64, BK=64)

    return Work(run, y, lambda: (x.float() @ a.float()).to(BF16).float() @ b.float())


@triton.jit
def gated_products(x_ptr, w_ptr, v_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """silu(x w) * (x v): two products side by side, of one x."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + offs_m[:, None] * K + k + offs_k[None, :])
        gate = tl.dot(x, tl.load(w_ptr + (k + offs_k)[:, None] * N + offs_n[None, :]), gate)
        up = tl.dot(x, tl.load(v_ptr + (k + offs_k)[:, None] * N + offs_n[None, :]), up)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty))


@case("gated products, 2048 rows, 4096 to 4096 bf16", CHAINS, dict(M=2048, N=4096, K=4096), dict(M=128, N=128, K=128))
def _(device, M, N, K):
    x, w, v, y = normal(device, M, K), normal(device, K, N), normal(device, K, N), empty(device, M, N)

    def run():
        return gated_products[(M // 128, N // 64)](x, w, v, y, N, K, BM=128, BN=64, BK=64)

    return Work(run, y, lambda: F.silu(x.float() @ w.float()) * (x.float() @ v.float()))


@triton.jit
def convolution_as_product(
    x_ptr, w_ptr, y_ptr, H, W, C: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """3 x 3 weights, channels last: nine products of shifted pixels, those beyond the edge 0."""
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n, offs_k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    i, j = pixel % (H * W) // W, pixel % W
    total = tl.zeros((BM, BN), tl.float32)
    for part in range(9 * (C // BK)):
        tap = part // (C // BK)
        c = part % (C // BK) * BK + offs_k
        di, dj = tap // 3 - 1, tap % 3 - 1
        live = (i + di >= 0) & (i + di < H) & (j + dj >= 0) & (j + dj < W)
        x = tl.load(x_ptr + (pixel + di * W + dj)[:, None] * C + c[None, :], mask=live[:, None], other=0.0)
        w = tl.load(w_ptr + (tap * C + c)[:, None] * N + offs_n[None, :])
        total = tl.dot(x, w, total)
    tl.store(y_ptr + pixel[:, None] * N + offs_n[None, :], total.to(y_ptr.dtype.element_ty))


@case(
    "3 x 3 convolution of 16 images of 56 x 56 x 256 fp16 as products",
    WINDOWS,
    dict(images=16, H=56, W=56, C=256, N=256),
    dict(images=2, H=8, W=4, C=64, N=64),
)
def _(device, images, H, W, C, N):
    x, w = normal(device, images, H, W, C, dtype=HALF), normal(device, 9 * C, N, dtype=HALF)
    y = empty(device, images, H, W, N, dtype=HALF)

    def run():
        grid = (images * H * W // 64, N // 64)
        return convolution_as_product[grid](x, w, y, H, W, C=C, N=N, BM=64, BN=64, BK=64)

    def want():
        weights = w.float().view(3, 3, C, N).permute(3, 2, 0, 1)
        return F.conv2d(x.float().permute(0, 3, 1, 2), weights, padding=1).permute(0, 2, 3, 1)

    return Work(run, y, want)


@triton.jit
def linear_attention(q_ptr, k_ptr, v_ptr, o_ptr, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """o = (q k^T, causal) v without a softmax: a head walks along its tokens with the D x D sums of k^T v so far."""
    head = tl.program_id(0)
    offs_t, offs_d = tl.arange(0, BLOCK), tl.arange(0, D)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, T, BLOCK):
        at = (head * T + start + offs_t)[:, None] * D + offs_d[None, :]
        q, k, v = tl.load(q_ptr + at), tl.load(k_ptr + at), tl.load(v_ptr + at)
        scores = tl.where(offs_t[:, None] >= offs_t[None, :], tl.dot(q, tl.trans(k)), 0.0)
        o = tl.dot(scores.to(v.dtype), v) + tl.dot(q, state.to(q.dtype))
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty))
        state += tl.dot(tl.trans(k), v)


@case(
    "linear attention, 512 heads of 64, 1024 tokens bf16",
    OTHER,
    dict(H=512, T=1024, D=64),
    dict(H=2, T=128, D=64),
    sample=1,
)
def _(device, H, T, D):
    q, k, v, o = normal(device, H, T, D), normal(device, H, T, D), normal(device, H, T, D), empty(device, H, T, D)

    def want():
        mask = torch.ones(T, T, device=q.device).tril()
        return torch.stack([(a.float() @ b.float().t() * mask) @ c.float() for a, b, c in zip(q, k, v, strict=True)])

    return Work(lambda: linear_attention[(H,)](q, k, v, o, T, D=D, BLOCK=64), o, want)
