"""Products with weights of 8 or 4 bits: c = a @ (weight scales) + bias, where `scales` holds one number for each group of
rows in each column.

The same kernel, to be read first: `int4_linear` in solutions/matmul.py.

With few rows of a, as in decoding, a matmul is as fast as its weights come from memory, so weights of a quarter of the
bytes take a quarter of the time. They stay integers until they are in registers. Within a block of K the integers
themselves are multiplied, which is exact, and one product with the scale is made for each element of the block's sums.

Traffic: weight and scales once, a once for each column of tiles, c once; with few rows the weight is nearly all of it.
Formats: int8 [K, N] is one weight in each, and its columns are best contiguous. int4 is int16 [K / 4, N], four weights in
each: of 64 rows of weights, row j of 16 holds rows j, 16 + j, 32 + j and 48 + j, from the lowest bits on, each as q + 8.
So the four meet runs of neighboring columns of a, and two of these integers fill a register of two bfloat16.
Source: https://arxiv.org/abs/2208.07339 (weights alone, activations in 16 bits); https://arxiv.org/abs/2210.17323 (groups).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_runs, check_tensors
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._device import properties
from gpukit.kernels._dtypes import DTYPES
from gpukit.kernels._launch import interpreted, launch, power_of_2
from gpukit.kernels._tiles import added, counters, epilogue, is_last, tile_at
from gpukit.kernels.matmul import product

GROUP = 128  # rows that share a scale, unless told otherwise
PACKED_ROWS = 64  # rows of weights in 16 rows of int16


@triton.jit
def _four_bits(word, i: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The i-th weight of an int16, -8..7, in DTYPE. The bits of 128 in bfloat16 end in seven zeros: with the four bits in
    their place they are 128 + q + 8, without the conversion of an integer, which takes as long as eight products.

    PTX: for two of them at once, which Triton does not see: 2.9 instructions a weight in all, and 4.3 without. lop3 with
    0xEA is (shifted & first) | second."""
    if PTX and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.u32 t, $1, {4 * i}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        ) - 136.0  # fmt: skip
    q = (word >> (4 * i)) & 15
    if DTYPE == tl.bfloat16:
        return (q | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif DTYPE == tl.float16:
        return (q | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return q.to(DTYPE) - 8.0


@triton.jit
def _eight_bits(q, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Integers of 8 bits in DTYPE. Triton makes bfloat16 of them as above, but float16 by converting each, at a quarter of
    the speed.

    PTX: prmt puts each byte q + 128 into the bits of 1024 in float16, two at a time."""
    if PTX and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; xor.b32 t, $2, 0x80808080;
                 prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342; }""",
            "=r,=r,r", [q], dtype=tl.float16, is_pure=True, pack=4,
        ) - 1152.0  # fmt: skip
    return q.to(DTYPE)


@triton.jit
def quantized_matmul_kernel(
    a_ptr, weight_ptr, scales_ptr, c_ptr, bias_ptr, parts_ptr, counters_ptr,
    stride_am, stride_ak, stride_wk, stride_wn, stride_sg, stride_sn,
    M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPLIT_K: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of c per program, or with SPLIT_K > 1 of them, which go to parts [SPLIT_K, M, N] and of which the last adds
    all. BLOCK_K divides GROUP, so that a block of K has one scale in each column."""
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    share = tl.program_id(0) // (tiles_m * tiles_n)
    pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_m, mask_n = offs_m < M, offs_n < N
    steps = tl.cdiv(K // BLOCK_K, SPLIT_K)
    first = share * steps * BLOCK_K

    # Rows of the weight's tensor, and the columns of a that the first weight in each of them meets.
    PACKED: tl.constexpr = 4 if BITS == 4 else 1
    ROWS: tl.constexpr = BLOCK_K // PACKED
    offs_w = tl.arange(0, ROWS)
    offs_a = offs_w if PACKED == 1 else offs_w // 16 * 64 + offs_w % 16
    a_ptrs = a_ptr + offs_m * stride_am + (first + offs_a[None, :]).to(tl.int64) * stride_ak
    weight_ptrs = weight_ptr + (first // PACKED + offs_w[:, None]).to(tl.int64) * stride_wk + offs_n * stride_wn
    scales_ptrs = scales_ptr + offs_n * stride_sn
    step_a, step_w = tl.cast(stride_ak, tl.int64) * BLOCK_K, tl.cast(stride_wk, tl.int64) * ROWS

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(first, min(first + steps * BLOCK_K, K), BLOCK_K):
        weight = tl.load(weight_ptrs, mask=mask_n, other=0)
        scale = tl.load(scales_ptrs + tl.cast(k // GROUP, tl.int64) * stride_sg, mask=mask_n, other=0.0)
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.static_range(PACKED):
            a = tl.load(a_ptrs + i * 16 * stride_ak, mask=mask_m, other=0.0)
            q = _four_bits(weight, i, DTYPE, PTX) if BITS == 4 else _eight_bits(weight, DTYPE, PTX)
            part = tl.dot(a, q, part, input_precision="ieee")
        acc += part * scale.to(tl.float32)
        a_ptrs += step_a
        weight_ptrs += step_w

    mask, offs = mask_m & mask_n, offs_m * N + offs_n
    if SPLIT_K > 1:
        size = tl.cast(M, tl.int64) * N
        tl.store(parts_ptr + share * size + offs, acc, mask=mask)
        if not is_last(counters_ptr + tile, SPLIT_K):
            return
        acc = added(parts_ptr + offs, size, mask, SPLIT_K)
    y = epilogue(acc, acc, None, bias_ptr, None, None, offs_m, offs_n, M, N, "", False)
    tl.store(c_ptr + offs, y, mask=mask)


@cache
def _config(M: int, N: int, K: int, group: int, bits: int, dtype: torch.dtype, sms: int) -> dict:
    """Narrow tiles of all the rows, and shares of K until there are some programs for each SM: the weight is read once
    and what counts is how many loads are under way. sms: 0 in the interpreter."""
    BLOCK_M = min(max(power_of_2(M), 16), 64)
    BLOCK_N = 128
    BLOCK_K = min(group & -group, 128)  # the largest power of two that divides the group
    if dtype == torch.float32:
        BLOCK_K = min(BLOCK_K, 64)
    tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)
    split = 1
    # int4 14336 x 4096 for 16 rows: 20.9 us in 4 shares, 22.9 with half of the columns in a tile; int8 29.5 and 30.2.
    while tiles * split < 3 * sms and K // BLOCK_K >= 8 * split:
        split *= 2
    return {
        "SPLIT_K": split, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": 8,
        "num_warps": 4, "num_stages": 3 if sms else 1,
    }  # fmt: skip


def quantized_matmul_fwd(
    a: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, bits: int, *, keep: bool = True
) -> Tensor:
    """c [M, N] of a [M, K], weight [K, N] or for 4 bits [K / 4, N], and scales [K / group, N]. keep: see `counters`."""
    (M, K), N = a.shape, weight.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    if K == 0:
        return c.zero_() if bias is None else c.copy_(bias.expand(M, N))
    group = K // scales.shape[0]
    gpu = properties(a.device)
    config = _config(M, N, K, group, bits, a.dtype, gpu.sms if gpu else 0)
    split, bias = config["SPLIT_K"], None if bias is None else bias.contiguous()
    tiles = -(-M // config["BLOCK_M"]) * -(-N // config["BLOCK_N"])
    parts = count = None
    if split > 1:
        parts = torch.empty(split * M * N, dtype=torch.float32, device=a.device)
        count = counters(tiles, a.device, keep)
    launch(
        quantized_matmul_kernel, tiles * split, a, weight, scales, c, bias, parts, count,
        *a.stride(), *weight.stride(), *scales.stride(), M, N, K, BITS=bits, GROUP=group, PTX=not interpreted(), **config,
    )  # fmt: skip
    return c


def _gradients(backward, ctx, dc: Tensor) -> tuple:
    weight, scales, bias = ctx.saved_tensors
    need_a, _, _, need_bias, _ = ctx.needs_input_grad
    da = None
    if need_a:
        transposed = dequantize(weight, scales, dc.dtype).mT
        compiled = backward is not _operator.launcher  # or differentiated once more, which a launcher cannot be
        da = product(dc[None], transposed[None], "ieee", compiled=compiled)[0]
    dbias = dc.sum(0, dtype=torch.float32).to(bias.dtype) if need_bias else None
    return da, None, None, dbias


_operator = operator(
    "quantized_matmul",
    quantized_matmul_fwd,
    like=lambda a, weight, scales, bias, bits: a.new_empty((a.shape[0], weight.shape[1])),
    keep=False,
)
_quantized = differentiable(
    _operator,
    _operator,  # of which the gradient makes no use: its product is an ordinary one
    keep=lambda inputs, c: (inputs[1:4], inputs[4:]),
    gradients=_gradients,
    again=lambda ctx, dc: _gradients(None, ctx, dc),
)


# ---------------------------------------------------------------------------------------------------------- the weights
def pack_int4(q: Tensor) -> Tensor:
    """Integers -8..7 [K, N] as int16 [K / 4, N], four in each. Raises ValueError for others and unless 64 divides K."""
    if q.ndim != 2 or q.shape[0] % PACKED_ROWS:
        raise ValueError(f"pack_int4: q must be [K, N] with K a multiple of {PACKED_ROWS}, got {list(q.shape)}")
    low, high = (int(x) for x in q.aminmax()) if q.numel() else (0, 0)
    if q.dtype.is_floating_point or low < -8 or high > 7:
        raise ValueError(f"pack_int4: q must be integers from -8 to 7, got {low} to {high} in {q.dtype}")
    K, N = q.shape
    parts = (q.to(torch.int32) + 8).reshape(K // 64, 4, 16, N).unbind(1)
    word = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    return torch.where(word < 32768, word, word - 65536).to(torch.int16).reshape(K // 4, N)


def unpack_int4(packed: Tensor) -> Tensor:
    """What `pack_int4` packed: int8 [K, N] of int16 [K / 4, N]. Raises ValueError unless 16 divides K / 4."""
    if packed.ndim != 2 or packed.shape[0] % 16 or packed.dtype != torch.int16:
        raise ValueError(
            "unpack_int4: packed must be int16 [K / 4, N] with K a multiple of 64, got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    rows, N = packed.shape
    word = packed.reshape(rows // 16, 1, 16, N)
    q = torch.cat([(word >> shift) & 15 for shift in (0, 4, 8, 12)], dim=1)
    return q.reshape(4 * rows, N).to(torch.int8) - 8


def _quantize(op: str, weight: Tensor, group: int, largest: int) -> tuple[Tensor, Tensor]:
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        raise ValueError(
            f"{op}: weight must be [K, N] of floating-point numbers, got {list(weight.shape)} {weight.dtype}"
        )
    if group < 64 or group % 64 or weight.shape[0] % group:
        raise ValueError(f"{op}: group must be a multiple of 64 that divides K = {weight.shape[0]}, got {group}")
    K, N = weight.shape
    groups = weight.float().reshape(K // group, group, N)
    # The scale as it will be stored, so that the integers are the nearest ones to what it makes of them.
    scales = (groups.abs().amax(1) / largest).to(weight.dtype)
    divisor = scales.float().unsqueeze(1)
    q = torch.where(divisor == 0, 0, groups / divisor).round().clamp(-largest - 1, largest)
    return q.reshape(K, N).to(torch.int8), scales


def quantize_int8(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """weight [K, N] as integers int8 [K, N], whose columns are contiguous, and scales [K / group, N] in the weight's dtype:
    weight is about q scale, each group's largest number at 127. Raises ValueError for a group that does not divide K or is
    no multiple of 64."""
    q, scales = _quantize("quantize_int8", weight, group, 127)
    return q.mT.contiguous().mT, scales


def quantize_int4(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """weight [K, N] as packed integers int16 [K / 4, N] and scales [K / group, N], each group's largest number at 7.
    Raises as `quantize_int8`."""
    q, scales = _quantize("quantize_int4", weight, group, 7)
    return pack_int4(q), scales


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that int8 weights, or packed int4 weights (int16), stand for: [K, N] in dtype."""
    q = unpack_int4(weight) if weight.dtype == torch.int16 else weight
    return (q.float() * scales.float().repeat_interleave(q.shape[0] // max(len(scales), 1), 0)).to(dtype)


# --------------------------------------------------------------------------------------------------------------- public
def _quantized_matmul(op: str, a: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    check_tensors(op, a=a, weight=weight, scales=scales)
    check_runs(op, "a", a)
    if a.dtype == torch.float32 and torch.is_autocast_enabled(a.device.type):
        a = a.to(torch.get_autocast_dtype(a.device.type))
    stored = torch.int16 if bits == 4 else torch.int8
    if a.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: a must be float16, bfloat16 or float32, got {a.dtype}")
    if weight.dtype != stored:
        raise TypeError(f"{op}: weight must be {stored}, as quantize_int{bits} makes it, got {weight.dtype}")
    if scales.dtype not in DTYPES:
        raise TypeError(f"{op}: scales must be float16, bfloat16, float32 or float64, got {scales.dtype}")
    shape, stored = a.shape, weight.shape
    if not shape or len(stored) != 2 or shape[-1] != stored[0] * (4 if bits == 4 else 1):
        raise ValueError(
            f"{op}: a [..., K] and weight [{'K / 4' if bits == 4 else 'K'}, N] must agree in K, got {list(shape)} and "
            f"{list(stored)}"
        )
    K, N = shape[-1], stored[1]
    groups = scales.shape
    if len(groups) != 2 or groups[1] != N or (K and (not groups[0] or K % (64 * groups[0]))):
        raise ValueError(
            f"{op}: scales must be [K / group, {N}] for K = {K} and a group that is a multiple of 64, got {list(groups)}"
        )
    if bias is not None:
        check_tensors(op, bias=bias)
        if bias.shape != (N,) or bias.dtype not in DTYPES:
            raise ValueError(f"{op}: bias must be [{N}] of floating-point numbers, got {list(bias.shape)} {bias.dtype}")
    device = a.device
    if weight.device != device or scales.device != device or (bias is not None and bias.device != device):
        for name, x in (("weight", weight), ("scales", scales), ("bias", bias)):
            if x is not None and x.device != device:
                raise ValueError(f"{op}: {name} is on {x.device}, a on {device}; they must be on one device")
    if len(shape) != 2:
        a = a.reshape(shape[:-1].numel(), K)
    inputs = a, weight, scales, bias, bits
    # Autograd's part of a call costs the CPU more than a launch does, and a decoding step has many: only where it is needed.
    grad = torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad))
    c = _quantized(*inputs) if grad or torch.compiler.is_compiling() else quantized_matmul_fwd(*inputs)
    return c if len(shape) == 2 else c.view(*shape[:-1], N)


def int8_matmul(a: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ (weight scales) + bias, summed in float32.

    a [..., K] float16, bfloat16 or float32, any strides; weight int8 [K, N] and scales [K / group, N] as `quantize_int8`
    makes them, the group a multiple of 64; bias [N]. Returns c [..., N], contiguous, in a's dtype. a and bias have
    gradients. Raises TypeError and ValueError for what does not fit.
    """
    return _quantized_matmul("int8_matmul", a, weight, scales, bias, 8)


def int4_matmul(a: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `int8_matmul`, with weight int16 [K / 4, N] as `quantize_int4` makes it, four weights in each."""
    return _quantized_matmul("int4_matmul", a, weight, scales, bias, 4)
