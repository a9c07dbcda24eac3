"""Science and sound: Fourier transforms by products, kernels, factors, charges on grids, lattices, correlations,
rotations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import FLOAT, HALF, KI, Work, empty, known, normal, place
from gpukit.validation.tenth_set.case import case

FOURIER, KERNELS, FACTORS = "Fourier transforms by products", "kernels times a vector", "factors of small matrices"
GRIDS, LATTICES, LAGS = "charges put on grids", "lattices of words in time", "correlations at lags"
ROTATIONS, PATHS = "rotations by four numbers", "shortest paths"


@triton.jit
def fourier_by_products(x_ptr, f_ptr, turn_ptr, y_ptr, ROWS, EACH: tl.constexpr, S: tl.constexpr):
    """Rows of S * S complex numbers: a matrix of S x S is transformed down, turned place by place, and transformed
    across. Real and imaginary parts are planes, of everything."""
    i, j = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    at = i * S + j
    f1, f2 = tl.load(f_ptr + at), tl.load(f_ptr + S * S + at)
    t1, t2 = tl.load(turn_ptr + at), tl.load(turn_ptr + S * S + at)
    for row in range(tl.program_id(0) * EACH, (tl.program_id(0) + 1) * EACH):
        x = x_ptr + row * S * S + at
        x1, x2 = tl.load(x), tl.load(x + ROWS * S * S)
        a1 = (tl.dot(f1, x1) - tl.dot(f2, x2)) / S
        a2 = (tl.dot(f1, x2) + tl.dot(f2, x1)) / S
        b1, b2 = (a1 * t1 - a2 * t2).to(f1.dtype), (a1 * t2 + a2 * t1).to(f1.dtype)
        c1, c2 = tl.dot(b1, f1) - tl.dot(b2, f2), tl.dot(b1, f2) + tl.dot(b2, f1)
        y = y_ptr + row * S * S + j * S + i
        tl.store(y, c1.to(y_ptr.dtype.element_ty))
        tl.store(y + ROWS * S * S, c2.to(y_ptr.dtype.element_ty))


@case(
    "Fourier transforms of 12,000 rows of 4096 complex fp16, by 8 products of 64 x 64 x 64, 4 rows per program, 4 warps",
    FOURIER,
    dict(rows=12_000, S=64),
    dict(rows=8, S=16),
)
def _(device, rows, S):
    x, y = normal(device, 2, rows, S * S, dtype=HALF), empty(device, 2, rows, S * S, dtype=HALF)
    step = torch.outer(torch.arange(S), torch.arange(S)).double() * (-2 * torch.pi / S)
    f = torch.stack([step.cos(), step.sin()]).half().to(device)
    turn = torch.stack([(step / S).cos(), (step / S).sin()]).float().to(device)

    def run():
        fourier_by_products[(rows // 4,)](x, f, turn, y, rows, EACH=4, S=S, num_warps=4, num_stages=2)

    def want():
        z = torch.fft.fft(torch.complex(x[0].float(), x[1].float())) / S
        return torch.stack([z.real, z.imag])

    return Work(run, y, want)


@triton.jit
def kernel_times_vector(
    x_ptr, z_ptr, v_ptr, y_ptr, share, M, N, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Sums of v * exp(-share * squared distance) over N points, for each of M: the matrix of exponentials is not
    stored."""
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    x = tl.load(x_ptr + m[:, None] * D + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
    x_square, total = tl.sum(x * x, 1), tl.zeros((BM,), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        z = tl.load(z_ptr + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
        both = tl.dot(x, tl.trans(z), input_precision="tf32")
        away = x_square[:, None] + tl.sum(z * z, 1)[None, :] - 2 * both
        total += tl.sum(tl.exp(-share * away) * tl.load(v_ptr + n, mask=n < N, other=0.0)[None, :], 1)
    tl.store(y_ptr + m, total, mask=m < M)


@case(
    "kernel of 20,000 and 20,000 points of 50 fp32 times a vector, a tf32 product inside, 64x64x64, 4 warps, 1 stage",
    KERNELS,
    dict(M=20_000, N=20_000, D=50),
    dict(M=70, N=150, D=20),
)
def _(device, M, N, D):
    x, z, v = normal(device, M, D, dtype=FLOAT), normal(device, N, D, dtype=FLOAT), normal(device, N, dtype=FLOAT)
    v, y = v.sigmoid(), empty(device, M, dtype=FLOAT)

    def run():
        kernel_times_vector[(triton.cdiv(M, 64),)](
            x, z, v, y, 0.5 / D, M, N, D=D, BD=triton.next_power_of_2(D), BM=64, BN=64, num_warps=4, num_stages=1
        )

    return Work(run, y, lambda: torch.exp(torch.cdist(x.double(), z.double()) ** 2 * (-0.5 / D)) @ v.double())


@triton.jit
def factor(a_ptr, y_ptr, S: tl.constexpr):
    """The lower triangle L with L @ L.T = a, of one matrix of S x S: column after column is made, and its share taken
    away."""
    i, j = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    at = tl.program_id(0) * S * S + i * S + j
    a = tl.load(a_ptr + at)
    y = tl.zeros((S, S), tl.float32)
    for k in range(S):
        down, across = tl.sum(tl.where(j == k, a, 0.0), 1), tl.sum(tl.where(i == k, a, 0.0), 0)
        corner = tl.rsqrt(tl.sum(tl.where(tl.arange(0, S) == k, down, 0.0), 0))
        down, across = down * corner, across * corner
        y = tl.where((j == k) & (i >= k), down[:, None], y)
        a -= down[:, None] * across[None, :]
    tl.store(y_ptr + at, y)


@case(
    "triangular factors of 12 Ki matrices of 32 x 32 fp32, one per program of 1 warp",
    FACTORS,
    dict(n=12 * KI, S=32),
    dict(n=3, S=16),
)
def _(device, n, S):
    half, y = normal(device, n, S, S, dtype=FLOAT), empty(device, n, S, S, dtype=FLOAT)
    a = half @ half.mT / S + torch.eye(S, device=device)
    return Work(lambda: factor[(n,)](a, y, S=S, num_warps=1), y, lambda: torch.linalg.cholesky(a.double()))


@triton.jit
def charges_on_grid(p_ptr, charge_ptr, y_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A charge is shared by the 8 places around it in a cube whose opposite faces meet, by atomics."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    charge = tl.load(charge_ptr + at, mask=live, other=0.0)
    x, y = tl.load(p_ptr + at, mask=live, other=0.0), tl.load(p_ptr + n + at, mask=live, other=0.0)
    z = tl.load(p_ptr + 2 * n + at, mask=live, other=0.0)
    i, j, k = x.to(tl.int32), y.to(tl.int32), z.to(tl.int32)
    x, y, z = x - i, y - j, z - k
    for corner in tl.static_range(8):
        a, b, c = corner // 4, corner // 2 % 2, corner % 2
        part = charge * (x if a else 1 - x) * (y if b else 1 - y) * (z if c else 1 - z)
        place = ((i + a) % SIDE * SIDE + (j + b) % SIDE) * SIDE + (k + c) % SIDE
        tl.atomic_add(y_ptr + place, part, mask=live, sem="relaxed")


@case(
    "2,000,000 charges fp32 put on 160 x 160 x 160 places, 8 atomics each, 256 per program",
    GRIDS,
    dict(n=2_000_000, side=160),
    dict(n=700, side=8),
)
def _(device, n, side):
    """Charges lie anywhere. What is there is not cleared by what is measured."""
    share = known("meta", 1 << 20, 3, n).float() / (1 << 20)
    p, charge, y = place(device, share * side), normal(device, n, dtype=FLOAT), empty(device, side**3, dtype=FLOAT)

    def run():
        charges_on_grid[(triton.cdiv(n, 256),)](p, charge, y, n, SIDE=side, BLOCK=256)

    def want():
        at, total = p.to(y.device), torch.zeros_like(y, dtype=torch.float64)
        low = at.floor()
        for corner in range(8):
            bits = torch.tensor([corner >> 2 & 1, corner >> 1 & 1, corner & 1], device=y.device)[:, None]
            part = torch.where(bits == 1, at - low, 1 - (at - low)).double().prod(0) * charge
            i, j, k = (low.long() + bits) % side
            total.index_add_(0, (i * side + j) * side + k, part)
        return total

    return Work(run, y, want)


@triton.jit
def log_sum(a, b):
    """log(exp(a) + exp(b)) of numbers either of which may stand for minus infinity."""
    high = tl.maximum(a, b)
    return high + tl.log(tl.exp(a - high) + tl.exp(b - high))


@triton.jit
def words_in_time(blank_ptr, word_ptr, time_ptr, count_ptr, y_ptr, T, U, BU: tl.constexpr):
    """Minus the logarithm of the sum over all ways through a lattice of T moments and U words, diagonal by diagonal: at
    each place the next moment begins, or the next word is said. Lane u holds the place behind u words."""
    b, u = tl.program_id(0), tl.arange(0, BU)
    moments, words = tl.load(time_ptr + b), tl.load(count_ptr + b)
    at = tl.where(u == 0, 0.0, -1e30)
    for step in range(1, moments + words):
        t = step - u
        live = (t >= 0) & (t < moments) & (u <= words)
        waited = tl.load(blank_ptr + (b * T + t - 1) * (U + 1) + u, mask=live & (t > 0), other=-1e30)
        spoken = tl.load(word_ptr + (b * T + t) * U + u - 1, mask=live & (u > 0), other=-1e30)
        before = tl.gather(at, tl.maximum(u - 1, 0), 0)
        at = tl.where(live, log_sum(at + waited, before + spoken), -1e30)
    last = tl.load(blank_ptr + (b * T + moments - 1) * (U + 1) + words)
    tl.store(y_ptr + b, -last - tl.sum(tl.where(u == words, at, 0.0), 0))


@case(
    "losses of 1000 lattices of up to 240 moments and 63 words fp32, diagonal by diagonal, 1 warp",
    LATTICES,
    dict(B=1000, T=240, U=63),
    dict(B=5, T=20, U=9),
)
def _(device, B, T, U):
    blank, word = normal(device, B, T, U + 1, dtype=FLOAT) - 1, normal(device, B, T, U, dtype=FLOAT) - 1
    moments = place(device, T // 2 + 1 + known("meta", T // 2, B))
    words, y = place(device, U // 2 + 1 + known("meta", U // 2, B).flip(0)), empty(device, B, dtype=FLOAT)

    def run():
        words_in_time[(B,)](blank, word, moments, words, y, T, U, BU=triton.next_power_of_2(U + 1), num_warps=1)

    def want():
        rows, last = torch.arange(B, device=y.device), None
        m, w = moments.to(y.device).long(), words.to(y.device).long()
        out, stay, say = torch.zeros(B, device=y.device).double(), blank.double(), word.double()
        for t in range(T):
            now = []
            for u in range(U + 1):
                ways = [last[u] + stay[:, t - 1, u]] if t else []
                ways += [now[u - 1] + say[:, t, u - 1]] if u else []
                now.append(torch.stack(ways).logsumexp(0) if ways else torch.zeros_like(out))
            last = now
            ends = torch.stack(now)[w, rows] + stay[rows, t, w]
            out = torch.where(m - 1 == t, -ends, out)
        return out

    return Work(run, y, want)


@triton.jit
def correlations(x_ptr, y_ptr, n, LAGS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of products of a track with itself, 0 to LAGS - 1 samples later."""
    track, lag, i = tl.program_id(0), tl.arange(0, LAGS), tl.arange(0, BLOCK)
    total = tl.zeros((LAGS, BLOCK), tl.float32)
    for first in range(0, n, BLOCK):
        at = first + i
        now = tl.load(x_ptr + track * n + at, mask=at < n, other=0.0)
        later = at[None, :] + lag[:, None]
        total += now[None, :] * tl.load(x_ptr + track * n + later, mask=later < n, other=0.0)
    tl.store(y_ptr + track * LAGS + lag, tl.sum(total, 1))


@case(
    "correlations of 50 tracks of 120,001 samples fp32 at 32 lags, one program each, 512 at a time, 16 warps",
    LAGS,
    dict(tracks=50, n=120_001, lags=32),
    dict(tracks=2, n=1501, lags=16),
)
def _(device, tracks, n, lags):
    x, y = normal(device, tracks, n, dtype=FLOAT), empty(device, tracks, lags, dtype=FLOAT)

    def want():
        z = x.double()
        return torch.stack([(z[:, : n - lag] * z[:, lag:]).sum(1) for lag in range(lags)], 1)

    return Work(lambda: correlations[(tracks,)](x, y, n, LAGS=lags, BLOCK=512, num_warps=16), y, want)


@triton.jit
def rotate(q_ptr, p_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Points turned by quaternions, which are made to have length 1 first."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    w, i = tl.load(q_ptr + at * 4, mask=live, other=1.0), tl.load(q_ptr + at * 4 + 1, mask=live, other=0.0)
    j, k = tl.load(q_ptr + at * 4 + 2, mask=live, other=0.0), tl.load(q_ptr + at * 4 + 3, mask=live, other=0.0)
    x, y = tl.load(p_ptr + at * 3, mask=live, other=0.0), tl.load(p_ptr + at * 3 + 1, mask=live, other=0.0)
    z = tl.load(p_ptr + at * 3 + 2, mask=live, other=0.0)
    two = 2 / (w * w + i * i + j * j + k * k)
    a, b, c = j * z - k * y + w * x, k * x - i * z + w * y, i * y - j * x + w * z
    tl.store(y_ptr + at * 3, x + two * (j * c - k * b), mask=live)
    tl.store(y_ptr + at * 3 + 1, y + two * (k * a - i * c), mask=live)
    tl.store(y_ptr + at * 3 + 2, z + two * (i * b - j * a), mask=live)


@case(
    "12,000,001 points turned by quaternions of their own fp32, 64 per program of 1 warp",
    ROTATIONS,
    dict(n=12_000_001),
    dict(n=301),
)
def _(device, n):
    q, p, y = (normal(device, n, width, dtype=FLOAT) for width in (4, 3, 3))

    def want():
        w, u = q[:, :1].double(), q[:, 1:].double()
        inner = torch.linalg.cross(u, p.double()) + w * p
        return p + 2 * torch.linalg.cross(u, inner) / q.double().square().sum(1, keepdim=True)

    return Work(lambda: rotate[(triton.cdiv(n, 64),)](q, p, y, n, BLOCK=64, num_warps=1), y, want)


@triton.jit
def shorter_paths(a_ptr, b_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The shortest way from m to n over any k: a product with sums in place of products, and minima in place of
    sums."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    least = tl.full((BM, BN), 1e30, tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
        least = tl.minimum(least, tl.min(a[:, :, None] + b[None, :, :], 1))
    tl.store(y_ptr + m[:, None] * N + n[None, :], least)


@case(
    "shortest paths over one more place, 1024 x 1536 x 1024 fp32, sums of tiles of 32 x 8 x 32, 4 warps",
    PATHS,
    dict(M=KI, N=KI, K=1536),
    dict(M=32, N=64, K=24),
)
def _(device, M, N, K):
    a, b = normal(device, M, K, dtype=FLOAT).abs(), normal(device, K, N, dtype=FLOAT).abs()
    y = empty(device, M, N, dtype=FLOAT)

    def run():
        shorter_paths[(M // 32, N // 32)](a, b, y, N, K, BM=32, BN=32, BK=8, num_warps=4)

    return Work(run, y, lambda: torch.stack([(row[:, None] + b).amin(0) for row in a]))
