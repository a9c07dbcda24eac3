"""Where numbers lie: tiles turned round, by descriptors too, fields of records, padding, and what is used again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, KI, MI, Work, empty, known, normal, place
from gpukit.validation.seventh_set.case import case

TURNED, TILES, ROWS = (
    "tiles of three dimensions",
    "tiles turned round by descriptors",
    "rows by descriptors of a kernel",
)
FIELDS, PADDING = "fields of records", "sequences without their padding"
AGAIN, BACK, DIAGONAL = "launches that fit in L2", "backwards where the first launch ended", "rows up to a diagonal"


@triton.jit
def turn_round(x_ptr, y_ptr, A, B, C, BA: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr):
    """y[c, b, a] = x[a, b, c], a tile of three dimensions at a time."""
    a = tl.program_id(2) * BA + tl.arange(0, BA)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    x = tl.load(x_ptr + (a[:, None, None] * B + b[None, :, None]) * C + c[None, None, :])
    x = tl.permute(x, (2, 1, 0))
    tl.store(y_ptr + (c[:, None, None] * B + b[None, :, None]) * A + a[None, None, :], x)


@case(
    "512 x 640 x 1024 int8, last dimension first, tiles of 32 x 4 x 32",
    TURNED,
    dict(A=512, B=640, C=1024),
    dict(A=64, B=8, C=32),
)
def _(device, A, B, C):
    x, y = normal(device, A, B, C, dtype=INT8), empty(device, C, B, A, dtype=INT8)

    def run():
        turn_round[(C // 32, B // 4, A // 32)](x, y, A, B, C, BA=32, BB=4, BC=32)

    return Work(run, y, lambda: x.permute(2, 1, 0))


@triton.jit
def turn_tile(x, y, scale, BM: tl.constexpr, BN: tl.constexpr):
    """A tile comes by a descriptor, and goes by another one, transposed."""
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    y.store([j, i], tl.trans(x.load([i, j]) * scale))


@case(
    "8192 x 9216 fp32 transposed and scaled, descriptors of 64 x 32",
    TILES,
    dict(M=8192, N=9216),
    dict(M=128, N=96),
)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, N, M, dtype=FLOAT)
    tiles = TensorDescriptor.from_tensor(x, [64, 32]), TensorDescriptor.from_tensor(y, [32, 64])

    def run():
        turn_tile[(M // 64, N // 32)](*tiles, 0.5, BM=64, BN=32)

    return Work(run, y, lambda: x.T / 2)


@triton.jit
def row_norms(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """The norms of BM rows, whose tiles come by a descriptor that the program makes."""
    tiles = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    first = tl.program_id(0) * BM
    total = tl.zeros((BM, BN), tl.float32)
    for j in range(0, N, BN):
        x = tiles.load([first, j]).to(tl.float32)
        total += x * x
    tl.store(y_ptr + first + tl.arange(0, BM), tl.sqrt(tl.sum(total, 1)))


@case(
    "norms of 16384 rows of 12,288 fp16, descriptors made in the kernel, 16 x 128",
    ROWS,
    dict(M=16 * KI, N=12_288),
    dict(M=32, N=256),
)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=HALF), empty(device, M, dtype=FLOAT)

    def run():
        # Where the GPU keeps the descriptors that the programs make.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device=device, dtype=INT8))
        row_norms[(M // 16,)](x, y, M, N, BM=16, BN=128)

    return Work(run, y, lambda: x.float().norm(dim=1))


@triton.jit
def two_fields(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Records of five numbers: the fields 0 and 3 are read, and 1 and 4 of other records are stored."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * 5
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + at + 3)
    tl.store(y_ptr + at + 1, a * b)
    tl.store(y_ptr + at + 4, tl.sqrt(a * a + b * b))


@case("two of five fields of 16 Mi records fp32 from two others", FIELDS, dict(n=16 * MI), dict(n=1024))
def _(device, n):
    x, y = normal(device, n, 5, dtype=FLOAT), empty(device, n, 5, dtype=FLOAT)

    def want():
        a, b, none = x[:, 0], x[:, 3], torch.zeros_like(x[:, 0])
        return torch.stack([none, a * b, none, none, torch.hypot(a, b)], 1)

    return Work(lambda: two_fields[(n // 512,)](x, y, BLOCK=512), y, want)


@triton.jit
def without_padding(x_ptr, start_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """A row of a padded batch goes to its place in the packed one; the program of a row of padding ends at once."""
    start = tl.load(start_ptr + tl.program_id(1))
    if tl.program_id(0) < tl.load(start_ptr + tl.program_id(1) + 1) - start:
        col = tl.arange(0, BLOCK)
        row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        x = tl.load(x_ptr + row * N + col, mask=col < N, other=0.0)
        tl.store(y_ptr + (start + tl.program_id(0)) * N + col, x, mask=col < N)


@case(
    "64 sequences of 1 to 4096 rows of 515 fp16 without their padding",
    PADDING,
    dict(B=64, T=4096, N=515),
    dict(B=3, T=9, N=130),
)
def _(device, B, T, N):
    length = 1 + known("meta", T, B, dtype=torch.int64)
    start = place(device, F.pad(length.cumsum(0), (1, 0)).int())
    x, y = normal(device, B, T, N, dtype=HALF), empty(device, int(length.sum()), N, dtype=HALF)

    def want():
        return torch.cat([x[i, :count] for i, count in enumerate(length.tolist())])

    return Work(lambda: without_padding[(T, B)](x, start, y, N, BLOCK=triton.next_power_of_2(N)), y, want)


@triton.jit
def populations(x_ptr, y_ptr, rate, BLOCK: tl.constexpr):
    """A step of a logistic map."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(y_ptr + at, (rate * x * (1 - x)).to(y_ptr.dtype.element_ty))


@case(
    "12 steps of 9 Mi populations fp16 between two halves of 36 MiB, 12 launches",
    AGAIN,
    dict(n=9 * MI),
    dict(n=4096),
)
def _(device, n):
    x, y = normal(device, n, dtype=HALF).sigmoid(), empty(device, 2, n, dtype=HALF)

    def run():
        for i in range(12):
            populations[(n // 2048,)](y[(i + 1) % 2] if i else x, y[i % 2], 3.2, BLOCK=2048, num_warps=8)

    def want():
        z = x
        for _ in range(12):
            z = (3.2 * z.float() * (1 - z.float())).half()
        return z

    return Work(run, y[1], want)


@triton.jit
def norms_forward(x_ptr, norm_ptr, N: tl.constexpr):
    """The norm of a row."""
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N)).to(tl.float32)
    tl.store(norm_ptr + tl.program_id(0), tl.sqrt(tl.sum(x * x, 0)))


@triton.jit
def divide_backwards(x_ptr, norm_ptr, y_ptr, N: tl.constexpr):
    """A row by its norm, the last rows first: they may still be in L2."""
    row, col = tl.num_programs(0) - 1 - tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + row * N + col).to(tl.float32) / tl.load(norm_ptr + row)
    tl.store(y_ptr + row * N + col, x.to(y_ptr.dtype.element_ty))


@case(
    "12800 rows of 4096 bf16 by their norms, the second launch backwards",
    BACK,
    dict(M=12_800, N=4096),
    dict(M=5, N=512),
)
def _(device, M, N):
    x, y, norm = normal(device, M, N), empty(device, M, N), empty(device, M, dtype=FLOAT)

    def run():
        norms_forward[(M,)](x, norm, N=N)
        divide_backwards[(M,)](x, norm, y, N=N)

    return Work(run, y, lambda: F.normalize(x.float(), dim=1))


@triton.jit
def up_to_diagonal(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """The log of the sum of exponentials of a row, up to the diagonal: the longest programs start last."""
    row = tl.program_id(0)
    largest, total = -1e30, 0.0
    for i in range(0, row + 1, BLOCK):
        col = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + col, mask=col <= row, other=-60000.0).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    tl.store(y_ptr + row, largest + tl.log(total))


@case(
    "16384 rows of up to 16384 fp16, summed up to the diagonal, 1024 at a time",
    DIAGONAL,
    dict(N=16 * KI, block=1024),
    dict(N=40, block=16),
)
def _(device, N, block):
    x, y = normal(device, N, N, dtype=HALF), empty(device, N, dtype=FLOAT)

    def want():
        above = torch.ones(N, N, dtype=torch.bool, device=x.device).triu(1)
        return x.float().masked_fill(above, -torch.inf).logsumexp(1)

    return Work(lambda: up_to_diagonal[(N,)](x, y, N, BLOCK=block), y, want)
