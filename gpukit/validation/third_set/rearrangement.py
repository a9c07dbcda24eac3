"""The same numbers elsewhere: dimensions in another order, other grids of pixels, and draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, MI, UINT8, Work, empty, known, normal
from gpukit.validation.third_set.case import case

ORDER, PIXELS, DRAWS = "dimensions in another order", "other grids of pixels", "random numbers"


@triton.jit
def heads_first(x_ptr, y_ptr, T, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """[batch, token, head, D] becomes [batch, head, token, D]: ROWS tokens of a head per program."""
    head, batch = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + ((batch * T + token) * H + head) * D + d)
    tl.store(y_ptr + ((batch * H + head) * T + token) * D + d, x)


@case(
    "heads before tokens, 8 x 4096 x 32 x 64 bf16",
    ORDER,
    dict(B=8, T=4096, H=32, D=64),
    dict(B=2, T=32, H=3, D=16),
)
def _(device, B, T, H, D):
    x, y = normal(device, B, T, H, D), empty(device, B, H, T, D)
    return Work(lambda: heads_first[(T // 32, H, B)](x, y, T, H=H, D=D, ROWS=32), y, lambda: x.transpose(1, 2))


@triton.jit
def channels_last(x_ptr, y_ptr, C, P, BC: tl.constexpr, BP: tl.constexpr):
    """[image, channel, pixel] becomes [image, pixel, channel]; the last tile of pixels is not full."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    base = tl.program_id(2) * C * P
    live = p < P
    x = tl.load(x_ptr + base + c[:, None] * P + p[None, :], mask=live[None, :])
    tl.store(y_ptr + base + p[:, None] * C + c[None, :], tl.trans(x), mask=live[:, None])


@case(
    "channels last, 64 images of 256 channels of 56 x 56 fp16",
    ORDER,
    dict(images=64, C=256, P=3136),
    dict(images=2, C=64, P=90),
)
def _(device, images, C, P):
    x, y = normal(device, images, C, P, dtype=HALF), empty(device, images, P, C, dtype=HALF)
    grid = (triton.cdiv(P, 64), C // 64, images)
    return Work(lambda: channels_last[grid](x, y, C, P, BC=64, BP=64), y, lambda: x.transpose(1, 2))


@triton.jit
def backwards(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The last number first: addresses of a load go down."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + n - 1 - at))


@case("64 Mi fp32 backwards", ORDER, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)
    return Work(lambda: backwards[(n // 1024,)](x, y, n, BLOCK=1024), y, lambda: x.flip(0))


@triton.jit
def pixel_shuffle(x_ptr, y_ptr, C: tl.constexpr, H, W, R: tl.constexpr, BLOCK: tl.constexpr):
    """R * R channels become R x R times the pixels: a row of results per program, whose neighbors lie a plane apart."""
    row, c, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j = tl.arange(0, BLOCK)
    live = j < W * R
    source = (c * R + row % R) * R + j % R
    at = ((image * C * R * R + source) * H + row // R) * W + j // R
    x = tl.load(x_ptr + at, mask=live)
    tl.store(y_ptr + ((image * C + c) * H * R + row) * W * R + j, x, mask=live)


@case(
    "pixel shuffle by 2 of 16 images of 256 x 128 x 128 bf16",
    ORDER,
    dict(images=16, C=64, H=128, W=128, R=2),
    dict(images=2, C=3, H=5, W=6, R=2),
)
def _(device, images, C, H, W, R):
    x, y = normal(device, images, C * R * R, H, W), empty(device, images, C, H * R, W * R)
    block = triton.next_power_of_2(W * R)

    def run():
        return pixel_shuffle[(H * R, C, images)](x, y, C=C, H=H, W=W, R=R, BLOCK=block, num_warps=1)

    return Work(run, y, lambda: F.pixel_shuffle(x, R))


@triton.jit
def twice_as_wide(x_ptr, y_ptr, H, W, BLOCK: tl.constexpr):
    """Bilinear: four neighbors make each of four times as many pixels; what is beyond the edge is the edge."""
    i = tl.program_id(1)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = j < 2 * W
    plane = x_ptr + tl.program_id(2) * H * W
    above, left = (i + 1) // 2 - 1, (j + 1) // 2 - 1
    down, right = 0.75 - 0.5 * (i % 2).to(tl.float32), 0.75 - 0.5 * (j % 2).to(tl.float32)
    i0, i1 = tl.maximum(above, 0), tl.minimum(above + 1, H - 1)
    j0, j1 = tl.maximum(left, 0), tl.minimum(left + 1, W - 1)
    first = tl.load(plane + i0 * W + j0, mask=live) * (1 - right) + tl.load(plane + i0 * W + j1, mask=live) * right
    second = tl.load(plane + i1 * W + j0, mask=live) * (1 - right) + tl.load(plane + i1 * W + j1, mask=live) * right
    y = first * (1 - down) + second * down
    tl.store(y_ptr + (tl.program_id(2) * 2 * H + i) * 2 * W + j, y, mask=live)


@case(
    "48 planes of 512 x 512 fp32, bilinear, twice as large",
    PIXELS,
    dict(planes=48, H=512, W=512),
    dict(planes=2, H=5, W=7),
)
def _(device, planes, H, W):
    x, y = normal(device, planes, H, W, dtype=FLOAT), empty(device, planes, 2 * H, 2 * W, dtype=FLOAT)

    def run():
        return twice_as_wide[(triton.cdiv(2 * W, 256), 2 * H, planes)](x, y, H, W, BLOCK=256)

    def want():
        return F.interpolate(x[None], scale_factor=2, mode="bilinear", align_corners=False)[0]

    return Work(run, y, want)


@triton.jit
def boxes(x_ptr, y_ptr, H, W, R: tl.constexpr, BLOCK: tl.constexpr):
    """Means of R x R bytes: an image R times smaller each way."""
    i = tl.program_id(1)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = j < W // R
    base = (tl.program_id(2) * H + i * R) * W
    total = tl.zeros((BLOCK,), tl.float32)
    for a in tl.static_range(R):
        for b in tl.static_range(R):
            total += tl.load(x_ptr + base + a * W + j * R + b, mask=live, other=0).to(tl.float32)
    at = (tl.program_id(2) * (H // R) + i) * (W // R) + j
    tl.store(y_ptr + at, total / (R * R), mask=live)


@case(
    "means of 4 x 4 bytes of 96 planes of 1080 x 1920",
    PIXELS,
    dict(planes=96, H=1080, W=1920),
    dict(planes=2, H=8, W=24),
)
def _(device, planes, H, W):
    x, y = known(device, 256, planes, H, W, dtype=UINT8), empty(device, planes, H // 4, W // 4, dtype=FLOAT)
    grid = (triton.cdiv(W // 4, 256), H // 4, planes)
    return Work(lambda: boxes[grid](x, y, H, W, R=4, BLOCK=256), y, lambda: F.avg_pool2d(x.float(), 4))


@triton.jit
def flip_signs(x_ptr, y_ptr, seed, BLOCK: tl.constexpr):
    """Each number times 1 or -1, as a random number says; what is drawn is not stored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.where(tl.rand(seed, at) < 0.5, -x, x))


@case("random signs for 64 Mi fp32, square of the result", DRAWS, dict(n=64 * MI), dict(n=2048))
def _(device, n):
    """Squares do not depend on what is drawn, so that any generator's result can be checked."""
    x, y, z = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        flip_signs[(n // 1024,)](x, y, 7, BLOCK=1024)
        squares[(n // 1024,)](y, z, BLOCK=1024)

    return Work(run, z, lambda: x * x)


@triton.jit
def squares(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * x)


@triton.jit
def shifted_rows(x_ptr, shift_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Each row begins where its own number says, and goes on from its begin when it has come to the end."""
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (offs + tl.load(shift_ptr + row)) % N
    tl.store(y_ptr + row * N + offs, tl.load(x_ptr + row * N + source, mask=offs < N), mask=offs < N)


@case("16384 rows of 5000 bf16, each rolled by its own shift", ORDER, dict(M=16384, N=5000), dict(M=4, N=300))
def _(device, M, N):
    x, y, shift = normal(device, M, N), empty(device, M, N), known(device, N, M)

    def run():
        return shifted_rows[(M, triton.cdiv(N, 1024))](x, shift, y, N, BLOCK=1024)

    def want():
        at = (torch.arange(N, device=x.device)[None, :] + shift.long()[:, None]) % N
        return x.gather(1, at)

    return Work(run, y, want)
