"""Products: of three weights, between rows, by descriptors, of experts, of small complex matrices, of features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.eighth_set.case import case
from gpukit.validation.new_kernels.case import (
    FLOAT,
    HALF,
    INT8,
    INT32,
    KI,
    MI,
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)

THREE, BETWEEN = "products with weights of -1, 0 and 1", "matrices that lie between rows"
PERSISTENT, GATHERED = "persistent products by descriptors", "experts that gather their rows"
COMPLEX, FEATURES = "products of 3 x 3 complex matrices", "products of all pairs of features"


@triton.jit
def three_weights(x_ptr, w_ptr, row_ptr, y_ptr, scale, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x of int8 times weights of 2 bits: a byte holds one weight of each quarter of K."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.int32)
    for first in range(0, K // 4, BK):
        k = first + tl.arange(0, BK)
        packed = tl.load(w_ptr + n[None, :] * (K // 4) + k[:, None])
        for quarter in tl.static_range(4):
            x = tl.load(x_ptr + m[:, None] * K + quarter * (K // 4) + k[None, :])
            w = ((packed >> 2 * quarter) & 3).to(tl.int8) - 1
            total = tl.dot(x, w, total, out_dtype=tl.int32)
    y = total.to(tl.float32) * (tl.load(row_ptr + m) * scale)[:, None]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "512 rows int8 by 8192 x 8192 weights of -1, 0 and 1 in 2 bits, 128x64x64, 4 warps",
    THREE,
    dict(M=512, N=8192, K=8192),
    dict(M=128, N=64, K=512),
)
def _(device, M, N, K):
    x, row, y = normal(device, M, K, dtype=INT8), normal(device, M, dtype=FLOAT).sigmoid(), empty(device, M, N)
    code = normal(device, 4, N, K // 4).clamp(-1, 1).round().to(INT8) + 1
    packed = (code[0] | code[1] << 2 | code[2] << 4 | code[3] << 6).view(UINT8)

    def run():
        three_weights[(M // 128, N // 64)](
            x, packed, row, y, 0.125, N, K, BM=128, BN=64, BK=64, num_warps=4, num_stages=3
        )

    def want():
        w = torch.cat([*code], 1).float() - 1
        return x.float() @ w.T * row[:, None] / 8

    return Work(run, y, want)


@triton.jit
def matrices_between_rows(a_ptr, b_ptr, c_ptr, B, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[m, i, n] is the sum of a[m, i, k] b[i, k, n] over k: consecutive rows of a matrix lie B rows apart."""
    i = tl.program_id(2)
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(a_ptr + (m * B + i)[:, None] * K + k[None, :])
        total = tl.dot(a, tl.load(b_ptr + (i * K + k)[:, None] * N + n[None, :]), total, input_precision="tf32")
    tl.store(c_ptr + (m * B + i)[:, None] * N + n[None, :], total)


@case(
    "96 matrices of 512 x 640 between rows times 640 x 512 each, tf32, 64x64x32, 4 warps",
    BETWEEN,
    dict(M=512, B=96, N=512, K=640),
    dict(M=64, B=3, N=64, K=64),
)
def _(device, M, B, N, K):
    a, b, c = (
        normal(device, M, B, K, dtype=FLOAT),
        normal(device, B, K, N, dtype=FLOAT),
        empty(device, M, B, N, dtype=FLOAT),
    )

    def run():
        matrices_between_rows[(N // 64, M // 64, B)](a, b, c, B, N, K, BM=64, BN=64, BK=32, num_warps=4, num_stages=4)

    return Work(run, c, lambda: torch.einsum("mik,ikn->min", a.double(), b.double()))


@triton.jit
def persistent_by_descriptors(
    a, b, c, bias_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    """The square of max(a @ b.T + bias, 0) by a fixed number of programs: GROUP tiles of rows for each tile of columns."""
    down = tl.cdiv(M, BM)
    for tile in range(tl.program_id(0), down * (N // BN), tl.num_programs(0)):
        group = tile // (GROUP * (N // BN)) * GROUP
        high = tl.minimum(down - group, GROUP)
        inside = tile % (GROUP * (N // BN))
        m, n = (group + inside % high) * BM, inside // high * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(a.load([m, k]), tl.trans(b.load([n, k])), total)
        y = tl.maximum(total + tl.load(bias_ptr + n + tl.arange(0, BN))[None, :], 0.0)
        c.store([m, n], (y * y).to(c.dtype))


@case(
    "matmul 5000 x 4096 x 4096 fp16, bias and squared ReLU, descriptors, 132 programs, 128x128x64, 8 warps",
    PERSISTENT,
    dict(M=5000, N=4096, K=4096, programs=SMS),
    dict(M=200, N=256, K=128, programs=3),
)
def _(device, M, N, K, programs):
    a, b, c = normal(device, M, K, dtype=HALF) / 16, normal(device, N, K, dtype=HALF), empty(device, M, N, dtype=HALF)
    bias = normal(device, N, dtype=FLOAT)
    tiles = [TensorDescriptor.from_tensor(x, block) for x, block in ((a, [128, 64]), (b, [128, 64]), (c, [128, 128]))]

    def run():
        persistent_by_descriptors[(programs,)](
            *tiles, bias, M, N, K, BM=128, BN=128, BK=64, GROUP=8, num_warps=8, num_stages=4
        )

    return Work(run, c, lambda: (a.float() @ b.float().T + bias).relu().square())


@triton.jit
def gathered_experts(
    x_ptr, w_ptr, row_ptr, expert_ptr, share_ptr, y_ptr, rows, N, K, TOP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM choices of one expert: token i // TOP made choice i. The number `rows` fills up the last block of an expert."""
    choice = tl.load(row_ptr + tl.program_id(1) * BM + tl.arange(0, BM))
    live, expert = choice < rows, tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    x = x_ptr + (choice // TOP)[:, None] * K + k[None, :]
    w = w_ptr + expert * N * K + n[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        total = tl.dot(tl.load(x + first, mask=live[:, None], other=0.0), tl.load(w + first), total)
    total *= tl.load(share_ptr + choice, mask=live, other=0.0)[:, None]
    tl.store(y_ptr + choice[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "4 of 64 experts for 4096 tokens, rows gathered, 2048 to 1408 bf16, 64x128x64, 4 warps",
    GATHERED,
    dict(T=4096, experts=64, N=1408, K=2048),
    dict(T=40, experts=5, N=128, K=128),
)
def _(device, T, experts, N, K):
    """Some experts are chosen several times as often as others."""
    expert = (known("meta", 1000, 4 * T).double() / 1000).pow(1.5).mul(experts).long()
    rows, blocks = [], []
    for e in range(experts):
        mine = (expert == e).nonzero()[:, 0]
        rows.append(torch.nn.functional.pad(mine, (0, -len(mine) % 64), value=4 * T))
        blocks += [e] * (len(rows[-1]) // 64)
    row, block = place(device, torch.cat(rows).int()), place(device, torch.tensor(blocks, dtype=INT32))
    x, w, y = normal(device, T, K), normal(device, experts, N, K), empty(device, 4 * T, N)
    share = normal(device, 4 * T, dtype=FLOAT).sigmoid()

    def run():
        gathered_experts[(N // 128, len(blocks))](
            x, w, row, block, share, y, 4 * T, N, K, TOP=4, BM=64, BN=128, BK=64, num_warps=4, num_stages=3
        )

    def want():
        out = torch.zeros(4 * T, N, device=x.device)
        for e in range(experts):
            mine = (expert == e).nonzero()[:, 0].to(x.device)
            out[mine] = x[mine // 4].float() @ w[e].float().T * share[mine][:, None]
        return out

    return Work(run, y, want)


@triton.jit
def complex_three(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    """c = a b of 3 x 3 complex matrices, one per lane: real and imaginary parts of each element have a plane of their own."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            real, imaginary = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(3):
                a = a_ptr + (i * 3 + k) * 2 * n + at
                b = b_ptr + (k * 3 + j) * 2 * n + at
                ar, ai, br, bi = tl.load(a), tl.load(a + n), tl.load(b), tl.load(b + n)
                real += ar * br - ai * bi
                imaginary += ar * bi + ai * br
            tl.store(c_ptr + (i * 3 + j) * 2 * n + at, real)
            tl.store(c_ptr + ((i * 3 + j) * 2 + 1) * n + at, imaginary)


@case("products of 2 Mi pairs of 3 x 3 complex matrices fp32, 54 planes", COMPLEX, dict(n=2 * MI), dict(n=256))
def _(device, n):
    a, b, c = (make(device, 3, 3, 2, n, dtype=FLOAT) for make in (normal, normal, empty))

    def want():
        x, y = (torch.complex(z[:, :, 0], z[:, :, 1]) for z in (a, b))
        z = torch.einsum("ikn,kjn->ijn", x, y)
        return torch.stack([z.real, z.imag], 2)

    return Work(lambda: complex_three[(n // 128,)](a, b, c, n, BLOCK=128), c, want)


@triton.jit
def feature_pairs(x_ptr, y_ptr, F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """A sample's first feature as it is, and the products of all pairs of its F features: a triangle without gaps."""
    sample, i, j, d = tl.program_id(0), tl.arange(0, 32), tl.arange(0, 32), tl.arange(0, D)
    x = tl.load(x_ptr + (sample * F + i)[:, None] * D + d[None, :], mask=(i < F)[:, None], other=0.0)
    pairs = tl.dot(x, tl.trans(x))
    tl.store(y_ptr + sample * WIDTH + d, tl.load(x_ptr + sample * F * D + d))
    at = D + i[:, None] * (i[:, None] - 1) // 2 + j[None, :]
    below = (i[:, None] > j[None, :]) & (i < F)[:, None]
    tl.store(y_ptr + sample * WIDTH + at, pairs.to(y_ptr.dtype.element_ty), mask=below)


@case(
    "products of all pairs of 27 features of 64 fp16 for 96 Ki samples, rows of 415, 1 warp",
    FEATURES,
    dict(B=96 * KI, F=27, D=64),
    dict(B=5, F=27, D=64),
)
def _(device, B, F, D):
    x, y = normal(device, B, F, D, dtype=HALF), empty(device, B, D + F * (F - 1) // 2, dtype=HALF)

    def want():
        i, j = torch.tril_indices(F, F, -1, device=x.device)
        pairs = (x.float() @ x.float().transpose(1, 2))[:, i, j]
        return torch.cat([x[:, 0].float(), pairs], 1)

    return Work(lambda: feature_pairs[(B,)](x, y, F=F, D=D, WIDTH=y.shape[1], num_warps=1), y, want)
