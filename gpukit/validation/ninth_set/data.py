"""Data: ciphers, packed codes, signatures, trimmed means, depths, scales in tiles, parities, features, palettes, and digits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, MI, SMS, UINT8, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

CIPHERS, CODES, SIGNATURES = "stream ciphers", "codes of 12 bits", "signatures of documents"
TRIMMED, DEPTHS, SCALES = "means without extremes", "nearest points of pixels", "scales in tiles of 512"
DISKS, MACHINES, PALETTES = "parities of disks", "factorization machines", "palettes of rows"
MESSAGES, DIGITS = "messages added in fp16", "digits of keys"


@triton.jit
def turned(x, by: tl.constexpr):
    """Bits leave a word on the left, and come back on the right."""
    return (x << by) | (x >> (32 - by))


@triton.jit
def quarter(a, b, c, d):
    """A quarter of a round: sums, exclusive ors and rotations of four words."""
    a += b
    d = turned(d ^ a, 16)
    c += d
    b = turned(b ^ c, 12)
    a += b
    d = turned(d ^ a, 8)
    c += d
    return a, turned(b ^ c, 7), c, d


@triton.jit
def encrypt(x_ptr, key_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """ChaCha with 20 rounds. Each lane makes the 16 words of one block out of the key and the block's number."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = at.to(tl.uint32) * 0
    a0, a1, a2, a3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    b0, b1, b2, b3 = (
        zero + tl.load(key_ptr),
        zero + tl.load(key_ptr + 1),
        zero + tl.load(key_ptr + 2),
        zero + tl.load(key_ptr + 3),
    )
    c0, c1, c2, c3 = (
        zero + tl.load(key_ptr + 4),
        zero + tl.load(key_ptr + 5),
        zero + tl.load(key_ptr + 6),
        zero + tl.load(key_ptr + 7),
    )
    d0, d1, d2, d3 = at.to(tl.uint32), zero + 1, zero + 2, zero + 3
    for _ in range(10):
        a0, b0, c0, d0 = quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = quarter(a3, b0, c1, d2)
    x, y, live = x_ptr + at * 16, y_ptr + at * 16, at < n
    one = a0 + 0x61707865, a1 + 0x3320646E, a2 + 0x79622D32, a3 + 0x6B206574
    two = b0 + tl.load(key_ptr), b1 + tl.load(key_ptr + 1), b2 + tl.load(key_ptr + 2), b3 + tl.load(key_ptr + 3)
    three = c0 + tl.load(key_ptr + 4), c1 + tl.load(key_ptr + 5), c2 + tl.load(key_ptr + 6), c3 + tl.load(key_ptr + 7)
    four = d0 + at.to(tl.uint32), d1 + 1, d2 + 2, d3 + 3
    for i in tl.static_range(4):
        tl.store(y + i, tl.load(x + i, mask=live, other=0) ^ one[i], mask=live)
        tl.store(y + 4 + i, tl.load(x + 4 + i, mask=live, other=0) ^ two[i], mask=live)
        tl.store(y + 8 + i, tl.load(x + 8 + i, mask=live, other=0) ^ three[i], mask=live)
        tl.store(y + 12 + i, tl.load(x + 12 + i, mask=live, other=0) ^ four[i], mask=live)


@case(
    "3,000,000 blocks of 64 bytes encrypted by a stream cipher of 20 rounds, 128 per program",
    CIPHERS,
    dict(n=3_000_000),
    dict(n=200),
)
def _(device, n):
    """The words are tensors of int32, of which the kernel is given views as uint32."""
    x, y, key = known(device, (1 << 31) - 1, n, 16), empty(device, n, 16, dtype=INT32), known(device, (1 << 31) - 1, 8)
    words = [z.view(torch.uint32) for z in (x, key, y)]

    def want():
        full = (1 << 32) - 1
        head = torch.tensor([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], device=y.device)
        number = torch.arange(n, device=y.device)[:, None]
        rest = torch.arange(1, 4, device=y.device).expand(n, 3)
        first = torch.cat([head.expand(n, 4), key.to(y.device).long().expand(n, 8), number, rest], 1)
        s = [first[:, i].clone() for i in range(16)]

        def mix(a, b, d, by):
            s[a] = (s[a] + s[b]) & full
            z = s[d] ^ s[a]
            s[d] = (z << by | z >> (32 - by)) & full

        for _ in range(10):
            for shift in (0, 1):
                for i in range(4):
                    a, b, c, d = i, 4 + (i + shift) % 4, 8 + (i + 2 * shift) % 4, 12 + (i + 3 * shift) % 4
                    for one, two, three, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                        mix(one, two, three, by)
        stream = (torch.stack(s, 1) + first) & full
        found = x.to(y.device).long() ^ stream
        return torch.where(found >= 1 << 31, found - (1 << 32), found)

    return Work(lambda: encrypt[(triton.cdiv(n, 128),)](*words, n, BLOCK=128), y, want)


@triton.jit
def decode(word_ptr, table_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Codes of 12 bits follow one another in words of 32, some of them in two. A table says what each code stands for."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word, bit, live = at * 3 // 8, at * 12 % 32, at < n
    low = tl.load(word_ptr + word, mask=live, other=0) >> bit
    split = live & (bit > 20)
    high = tl.load(word_ptr + word + 1, mask=split, other=0) << tl.where(split, 32 - bit, 0)
    left = (1 << tl.minimum(32 - bit, 12)) - 1
    code = (low & left) | (high & (4095 - left))
    tl.store(y_ptr + at, tl.load(table_ptr + code, mask=live, other=0), mask=live)


@case(
    "60,000,000 codes of 12 bits decoded by a table of 4096 int64, 1024 per program",
    CODES,
    dict(n=60_000_000),
    dict(n=3000),
)
def _(device, n):
    words, y = known(device, (1 << 31) - 1, triton.cdiv(n * 3, 8) + 1), empty(device, n, dtype=torch.int64)
    table = place(device, known("meta", 1 << 40, 4096, dtype=torch.int64))

    def want():
        at = torch.arange(n, device=y.device)
        both = words.to(y.device).long()
        both = (both[:-1] & 0xFFFFFFFF) | both[1:] << 32
        return table[(both[at * 3 // 8] >> (at * 12 % 32)) & 4095]

    return Work(lambda: decode[(triton.cdiv(n, 1024),)](words, table, y, n, BLOCK=1024), y, want)


@triton.jit
def sign_documents(x_ptr, start_ptr, a_ptr, b_ptr, y_ptr, S: tl.constexpr, BT: tl.constexpr):
    """The least of each of S hashes of a document's words, BT words at a time."""
    i, s, document = tl.arange(0, BT), tl.arange(0, S), tl.program_id(0)
    a, b = tl.load(a_ptr + s), tl.load(b_ptr + s)
    start, stop = tl.load(start_ptr + document), tl.load(start_ptr + document + 1)
    least = tl.full((BT, S), 0x7FFFFFFF, tl.int32)
    for first in range(start, stop, BT):
        live = first + i < stop
        x = tl.load(x_ptr + first + i, mask=live, other=0)[:, None] * a[None, :] + b[None, :]
        x = (x ^ (x >> 15)) * 0x2C1B3C6D
        least = tl.where(live[:, None], tl.minimum(least, (x ^ (x >> 12)) & 0x7FFFFFFF), least)
    tl.store(y_ptr + document * S + s, tl.min(least, 0))


@case(
    "signatures of 128 hashes of 24 Ki documents of 20 to 1500 words int32, 8 words at a time, 2 warps",
    SIGNATURES,
    dict(B=24 * KI, longest=1500, S=128),
    dict(B=5, longest=60, S=16),
)
def _(device, B, longest, S):
    length = 20 + ((longest - 20) * (known("meta", 1000, B) / 1000) ** 3).long()
    start, words = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    x, a, b = known(device, 1 << 30, words), known(device, (1 << 31) - 1, 2, S)[0] | 1, known(device, 1 << 30, S)
    y = empty(device, B, S, dtype=INT32)

    def want():
        out = torch.full_like(y, 0x7FFFFFFF)
        row = torch.repeat_interleave(torch.arange(B), length).to(y.device)
        for s in range(S):
            z = x.to(y.device) * a[s].item() + b[s].item()
            z = (z ^ (z >> 15)) * 0x2C1B3C6D
            out[:, s].scatter_reduce_(0, row, (z ^ (z >> 12)) & 0x7FFFFFFF, "amin")
        return out

    return Work(lambda: sign_documents[(B,)](x, start, a, b, y, S=S, BT=8, num_warps=2), y, want)


@triton.jit
def trimmed_means(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The mean of the middle four of eight numbers, one from each of eight workers, by a sort."""
    at, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 8)
    x = tl.load(x_ptr + i[None, :].to(tl.int64) * n + at[:, None], mask=(at < n)[:, None], other=0.0).to(tl.float32)
    x = tl.where((i >= 2) & (i < 6), tl.sort(x), 0.0)
    tl.store(y_ptr + at, (tl.sum(x, 1) / 4).to(y_ptr.dtype.element_ty), mask=at < n)


@case(
    "means of the middle 4 of 8 tensors of 25,000,001 bf16, by a sort, 512 per program",
    TRIMMED,
    dict(n=25_000_001),
    dict(n=1001),
)
def _(device, n):
    x, y = normal(device, 8, n), empty(device, n)
    return Work(
        lambda: trimmed_means[(triton.cdiv(n, 512),)](x, y, n, BLOCK=512),
        y,
        lambda: x.float().sort(0).values[2:6].mean(0),
    )


@triton.jit
def nearest_points(pixel_ptr, near_ptr, best_ptr, n, BLOCK: tl.constexpr):
    """The largest number of a pixel has how near a point is in its upper half, and the point's number in its lower half."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    both = tl.load(near_ptr + at, mask=live, other=0).to(tl.int64) << 32 | at.to(tl.int64)
    tl.atomic_max(best_ptr + tl.load(pixel_ptr + at, mask=live, other=0), both, mask=live, sem="relaxed")


@triton.jit
def depths_of(best_ptr, y_ptr, BLOCK: tl.constexpr):
    """How far away a pixel's nearest point is, and -1 where there is none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    near = (tl.load(best_ptr + at) >> 32).to(tl.float32)
    tl.store(y_ptr + at, tl.where(near > 0, 1024 / near, -1.0))


@case(
    "nearest of 10,000,000 points in 1024 x 2048 pixels, by atomics on int64, and depths fp32, two launches",
    DEPTHS,
    dict(n=10_000_000, H=KI, W=2 * KI),
    dict(n=3001, H=16, W=64),
)
def _(device, n, H, W):
    """Most points lie in the middle of the picture. The best ones are not cleared by what is measured."""
    share = known("meta", 1 << 16, 2, 3, n).sum(1).double() / (3 << 16)
    pixel = place(device, ((share[0] * H).int() * W + (share[1] * W).int()).contiguous())
    near = 1 + known(device, 1 << 20, n)
    best, y = empty(device, H * W, dtype=torch.int64), empty(device, H * W, dtype=FLOAT)

    def run():
        nearest_points[(triton.cdiv(n, 512),)](pixel, near, best, n, BLOCK=512)
        depths_of[(H * W // 1024,)](best, y, BLOCK=1024)

    def want():
        both = near.to(y.device).long() << 32 | torch.arange(n, device=y.device)
        found = torch.zeros_like(best).scatter_reduce_(0, pixel.to(y.device).long(), both, "amax")
        return found, torch.where(found > 0, 1024 / (found >> 32).double(), -1.0)

    return Work(run, (best, y), want)


@triton.jit
def scales_in_tiles(x_ptr, y_ptr, K, BK: tl.constexpr):
    """Scales of 128 rows and 4 columns become 512 neighbors: row 32 i + j and column k go to place 16 j + 4 i + k."""
    m, k, block = tl.program_id(0) * 128 + tl.arange(0, 128), tl.arange(0, BK), tl.program_id(1)
    x = tl.load(x_ptr + m[:, None] * K + block * BK + k[None, :])
    x = tl.permute(tl.reshape(x, (4, 32, BK // 4, 4)), (2, 1, 0, 3))
    first = (tl.program_id(0) * (K // 4) + block * (BK // 4)) * 512
    tl.store(y_ptr + first + tl.arange(0, BK * 128), tl.reshape(x, (BK * 128,)))


@case(
    "scales of 327,680 rows of 768 bytes in tiles of 32 x 4 x 4, 128 x 64 per program",
    SCALES,
    dict(M=320 * KI, K=768),
    dict(M=256, K=128),
)
def _(device, M, K):
    x, y = normal(device, M, K, dtype=torch.int8).view(UINT8), empty(device, M * K, dtype=UINT8)

    def want():
        return x.view(M // 128, 4, 32, K // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)

    return Work(lambda: scales_in_tiles[(M // 128, K // 64)](x, y, K, BK=64), y, want)


@triton.jit
def parities(x_ptr, p_ptr, q_ptr, n, DISKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Two parities of bytes of all disks, from which two lost disks can be computed. The second one is a polynomial at 2, in
    the field of 256 elements."""
    for first in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        p, q = tl.zeros((BLOCK,), tl.uint8), tl.zeros((BLOCK,), tl.uint8)
        for disk in tl.static_range(DISKS):
            x = tl.load(x_ptr + disk * n + at, mask=at < n, other=0)
            p ^= x
            q = (q << 1) ^ ((q >> 7) * 29) ^ x
        tl.store(p_ptr + at, p, mask=at < n)
        tl.store(q_ptr + at, q, mask=at < n)


@case(
    "two parities of 8 disks of 60,000,000 bytes, by 264 programs of 8 warps, 3 stages",
    DISKS,
    dict(n=60_000_000, disks=8, programs=2 * SMS),
    dict(n=20_001, disks=3, programs=2),
)
def _(device, n, disks, programs):
    x = normal(device, disks, n, dtype=torch.int8).view(UINT8)
    p, q = empty(device, n, dtype=UINT8), empty(device, n, dtype=UINT8)

    def run():
        parities[(programs,)](x, p, q, n, DISKS=disks, BLOCK=4096, STAGES=3, num_warps=8)

    def want():
        one, two = torch.zeros_like(p), torch.zeros_like(p).int()
        for disk in x:
            one, two = one ^ disk, (two << 1 & 255) ^ (two >> 7) * 29 ^ disk
        return one, two

    return Work(run, (p, q), want)


@triton.jit
def factorize(id_ptr, v_ptr, w_ptr, y_ptr, n, FIELDS, D: tl.constexpr, BLOCK: tl.constexpr):
    """A sigmoid of weights of all features of a sample, and of the products of all pairs of their vectors."""
    at, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    live = at < n
    total, squares = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
    alone = tl.zeros((BLOCK,), tl.float32)
    for field in range(FIELDS):
        row = tl.load(id_ptr + at * FIELDS + field, mask=live, other=0)
        v = tl.load(v_ptr + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        alone += tl.load(w_ptr + row, mask=live, other=0.0)
        total += v
        squares += v * v
    y = tl.sigmoid(alone + tl.sum(total * total - squares, 1) / 2)
    tl.store(y_ptr + at, y, mask=live)


@case(
    "factorization machines of 150,000 samples of 39 of 8,000,000 features of 16 fp32, 32 per program",
    MACHINES,
    dict(n=150_000, fields=39, rows=8_000_000, D=16),
    dict(n=100, fields=5, rows=500, D=16),
)
def _(device, n, fields, rows, D):
    """Each field has features of its own, some of which are far more frequent than others."""
    each = rows // fields
    share = (known("meta", 1 << 24, n, fields).double() / (1 << 24)) ** 4
    ids = place(device, (share * each).int() + each * torch.arange(fields, dtype=INT32))
    v, w, y = (
        normal(device, rows, D, dtype=FLOAT) / 32,
        normal(device, rows, dtype=FLOAT),
        empty(device, n, dtype=FLOAT),
    )

    def want():
        alone, total, squares = 0, 0, 0
        for row in ids.long().unbind(1):
            alone, total, squares = alone + w[row], total + v[row], squares + v[row].square()
        return (alone + (total.square() - squares).sum(1) / 2).sigmoid()

    return Work(lambda: factorize[(triton.cdiv(n, 32),)](ids, v, w, y, n, fields, D=D, BLOCK=32), y, want)


@triton.jit
def palettes(code_ptr, palette_ptr, y_ptr, N, R: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of 4 bits name the 16 colors of their row's palette, which a program keeps in registers."""
    row, i = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, 16)
    colors = tl.load(palette_ptr + row[:, None] * 16 + i[None, :])
    for first in range(0, N // 2, BLOCK):
        at = row[:, None] * (N // 2) + first + tl.arange(0, BLOCK)[None, :]
        code = tl.load(code_ptr + at).to(tl.int32)
        both = tl.join(tl.gather(colors, code & 15, 1), tl.gather(colors, code >> 4, 1))
        at = row[:, None] * N + 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(y_ptr + at, tl.reshape(both, (R, 2 * BLOCK)))


@case(
    "14,336 x 10,240 weights of 4 bits by palettes of rows fp16, tl.gather, 4 rows of 512 at a time, 1 warp",
    PALETTES,
    dict(M=14_336, N=10_240),
    dict(M=8, N=2048),
)
def _(device, M, N):
    code, y = known(device, 256, M, N // 2, dtype=UINT8), empty(device, M, N, dtype=HALF)
    palette = normal(device, M, 16, dtype=HALF)

    def want():
        both = torch.stack([code & 15, code >> 4], 2).view(M, N)
        return palette.gather(1, both.to(palette.device).long())

    return Work(lambda: palettes[(M // 4,)](code, palette, y, N, R=4, BLOCK=256, num_warps=1), y, want)


@triton.jit
def add_messages(x_ptr, source_ptr, target_ptr, y_ptr, n, R: tl.constexpr, D: tl.constexpr):
    """The rows of sources are added to those of targets in 16 bits; edges come in any order."""
    i, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    live = i < n
    source, target = tl.load(source_ptr + i, mask=live, other=0), tl.load(target_ptr + i, mask=live, other=0)
    x = tl.load(x_ptr + source[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    tl.atomic_add(y_ptr + target[:, None] * D + d[None, :], x, mask=live[:, None], sem="relaxed")


@case(
    "rows of 64 fp16 along 900,001 edges between 300,000 nodes added by atomics, 16 edges per program",
    MESSAGES,
    dict(edges=900_001, n=300_000, D=64),
    dict(edges=101, n=20, D=16),
)
def _(device, edges, n, D):
    """Numbers are -1, 0 and 1, so that sums are exact. They are not cleared by what is measured. Some targets are popular."""
    source, share = known(device, n, edges), known("meta", 1 << 20, edges).double() / (1 << 20)
    target = place(device, (share.flip(0) ** 2 * n).int())
    x, y = normal(device, n, D, dtype=HALF).clamp(-1, 1).round(), empty(device, n, D, dtype=HALF)

    def want():
        zero = torch.zeros(n, D, device=y.device)
        return zero.index_add_(0, target.to(y.device).long(), x[source.to(y.device).long()].float())

    return Work(lambda: add_messages[(triton.cdiv(edges, 16),)](x, source, target, y, edges, R=16, D=D), y, want)


@triton.jit
def count_digits(x_ptr, y_ptr, shift, BLOCK: tl.constexpr):
    """How often each of 256 digits is among BLOCK keys. The counts of one digit lie side by side."""
    digit = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) >> shift & 255
    tl.store(y_ptr + tl.arange(0, 256) * tl.num_programs(0) + tl.program_id(0), tl.histogram(digit.to(tl.int32), 256))


@case(
    "digits of 8 bits of 48 Mi keys int64 counted for each 4096 of them, by tl.histogram, 8 warps",
    DIGITS,
    dict(n=48 * MI),
    dict(n=8192),
)
def _(device, n):
    x, y = known(device, 1 << 40, n, dtype=torch.int64), empty(device, 256, n // 4096, dtype=INT32)

    def want():
        digit = (x.to(y.device) >> 16 & 255).view(-1, 4096)
        return torch.stack([(digit == i).sum(1) for i in range(256)])

    return Work(lambda: count_digits[(n // 4096,)](x, y, 16, BLOCK=4096, num_warps=8), y, want)
