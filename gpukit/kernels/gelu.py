"""GELU, bias + GELU, SwiGLU and GEGLU, and their gradients: one pass over memory each.

The same kernels, to be read first: `gelu_tanh`, `bias_gelu`, `bias_gelu_backward` and `swiglu` in solutions/gelu.py.

    gelu(x) = x Phi(x), Phi the normal distribution's cumulative function; tanh form: x sigmoid(2 u(x))
    bias_gelu(x, bias) = gelu(x + bias)
    swiglu(gate, up) = gate sigmoid(gate) up            geglu(gate, up) = gelu(gate) up

Traffic for M rows of N: GELU with or without bias one read and one write, backward two reads and one write; a gated unit two
reads and one write, backward three reads and two writes: the least possible. Backward passes compute again what they
need from the inputs: nothing but the inputs is kept. The bias' gradient adds float32 rows, one for each program in a
column: a fixed grid of programs sums whole columns of its rows, then a second kernel sums theirs, in a fixed order.

Sources: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415; Shazeer 2020, https://arxiv.org/abs/2002.05202;
Abramowitz and Stegun 1964, formula 7.1.26, https://personal.math.ubc.ca/~cbm/aands/page_299.htm
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check, check_alike, check_vector
from gpukit.kernels._autograd import differentiable, operator, through_pytorch
from gpukit.kernels._device import multiprocessors
from gpukit.kernels._dtypes import acc_dtype, torch_acc_dtype
from gpukit.kernels._launch import launch, power_of_2
from gpukit.kernels._rows import as_rows, column_sums, empty


@triton.jit
def _reciprocal(d):
    """1 / d for d >= 1, in two instructions where a division takes eight. 0 from 1.8e19 on, where d * d is infinite."""
    if d.dtype == tl.float64:
        return 1.0 / d
    return tl.rsqrt(d * d)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x): 0 where e^-x overflows, without the NaN of e^x / (1 + e^x)."""
    return _reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _normal(x, FINE: tl.constexpr):
    """Phi(-|x|), the tail of the normal distribution, and exp(-x^2 / 2).

    float64 takes tl.erf. For the others that is too much work: 37 instructions per element, more than the arithmetic units
    finish while the memory delivers it. A polynomial in t times exp(-x^2 / 2) does not cancel where x is very negative, as
    1 + erf(x) does. In 16 bits formula 7.1.26 is enough, which takes 19: its error is at most 7e-8, which at x = -5 is 2e-3
    of the tail and at -8 1e-2. For float32, FINE, a polynomial of degree 8 that was fitted for this kernel is wrong by 2e-7
    of the tail at most, for |x| up to 13.
    """
    if x.dtype == tl.float64:
        return 0.5 - 0.5 * tl.erf(tl.abs(x) * 0.7071067811865476), tl.exp(-0.5 * x * x)
    density = tl.exp2(x * x * -0.7213475204444817)  # -0.5 log2(e)
    if FINE:
        t = _reciprocal(1.0 + 0.3 * tl.abs(x))
        poly = t * (0.20634248924910947 + t * (-0.15719667517982966 + t * 0.035673231589947355))
        poly = t * (0.12855626618548543 + t * (-0.053673514555928954 + poly))
        poly = t * (0.1196293159685327 + t * (0.12075369444982195 + t * (0.09991511929387557 + poly)))
    else:
        t = _reciprocal(1.0 + 0.23164188827 * tl.abs(x))
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return poly * density, density


@triton.jit
def _gelu(x, TANH: tl.constexpr, FINE: tl.constexpr):
    if TANH:
        # 0.5 (1 + tanh u) is sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * _sigmoid(x * (1.5957691216057308 + 0.0713548162726002 * x * x))
    # x Phi(x) is x for positive x and 0 for negative, less |x| Phi(-|x|). The minimum: infinity is not to become NaN.
    tail, _ = _normal(x, FINE)
    return tl.maximum(x, 0.0) - tl.minimum(tl.abs(x), 100.0) * tail


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr, FINE: tl.constexpr):
    if TANH:
        s = _sigmoid(x * (1.5957691216057308 + 0.0713548162726002 * x * x))
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488178008 * x * x)
    tail, density = _normal(x, FINE)
    return tl.where(x > 0, 1.0 - tail, tail) + x * density * 0.3989422804014327


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows [BLOCK_M, 1] and columns [1, BLOCK_N], and which of them exist.

    Both in int64: M and N are 1 and the number of elements if everything is contiguous.
    """
    # Tiles in a grid of one dimension, row by row of tiles.
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid_m = (tl.program_id(0) // blocks_n).to(tl.int64)
    pid_n = (tl.program_id(0) % blocks_n).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return offs_m, offs_n, (offs_m < M) & (offs_n < N)


@triton.jit
def gelu_fwd_kernel(
    x_ptr, bias_ptr, y_ptr,
    stride_xm, stride_xn,
    M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile per program. bias_ptr: None without bias."""
    # Lanes outside hold whatever: each element is by itself, and theirs are not stored.
    offs_m, offs_n, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask).to(ACC)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs_n, mask=offs_n < N).to(ACC)
    tl.store(y_ptr + offs_m * N + offs_n, _gelu(x, TANH, x_ptr.dtype.element_ty == tl.float32), mask=mask)


@triton.jit
def gelu_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr,
    stride_dym, stride_dyn, stride_xm, stride_xn,
    M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns per program, and every so many rows; partial [programs in a column, N]: the sums of dx over them.

    bias_ptr and partial_ptr: None without bias.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    # The launcher's grid is a multiple of blocks_n: so many programs share a column of tiles.
    blocks_m = tl.num_programs(0) // blocks_n
    pid_m = (tl.program_id(0) // blocks_n).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_n = offs_n < N
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n).to(ACC)
        dbias = tl.zeros([1, BLOCK_N], ACC)
    for start in tl.range(pid_m * BLOCK_M, M, blocks_m * BLOCK_M):
        offs_m = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        mask = (offs_m < M) & mask_n
        x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask, other=0.0).to(ACC)
        if bias_ptr is not None:
            x += bias
        # In the padding dy is 0, so dx is, and adds nothing to the bias' gradient.
        dx = dy * _gelu_slope(x, TANH, x_ptr.dtype.element_ty == tl.float32)
        tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)
        if bias_ptr is not None:
            dbias += tl.sum(dx, axis=0, keep_dims=True)
    if bias_ptr is not None:
        tl.store(partial_ptr + pid_m * N + offs_n, dbias, mask=mask_n)


@triton.jit
def swiglu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr,
    stride_gm, stride_gn, stride_um, stride_un,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + offs_m * stride_gm + offs_n * stride_gn, mask=mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_um + offs_n * stride_un, mask=mask).to(ACC)
    tl.store(y_ptr + offs_m * N + offs_n, gate * _sigmoid(gate) * up, mask=mask)


@triton.jit
def swiglu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    stride_dym, stride_dyn, stride_gm, stride_gn, stride_um, stride_un,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask).to(ACC)
    gate = tl.load(gate_ptr + offs_m * stride_gm + offs_n * stride_gn, mask=mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_um + offs_n * stride_un, mask=mask).to(ACC)
    # silu' = s + silu (1 - s): both gradients come from one sigmoid.
    s = _sigmoid(gate)
    silu = gate * s
    tl.store(dgate_ptr + offs_m * N + offs_n, dy * up * (s + silu * (1.0 - s)), mask=mask)
    tl.store(dup_ptr + offs_m * N + offs_n, dy * silu, mask=mask)


@triton.jit
def geglu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr,
    stride_gm, stride_gn, stride_um, stride_un,
    M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + offs_m * stride_gm + offs_n * stride_gn, mask=mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_um + offs_n * stride_un, mask=mask).to(ACC)
    y = _gelu(gate, TANH, gate_ptr.dtype.element_ty == tl.float32) * up
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


@triton.jit
def geglu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    stride_dym, stride_dyn, stride_gm, stride_gn, stride_um, stride_un,
    M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask).to(ACC)
    gate = tl.load(gate_ptr + offs_m * stride_gm + offs_n * stride_gn, mask=mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_um + offs_n * stride_un, mask=mask).to(ACC)
    FINE: tl.constexpr = gate_ptr.dtype.element_ty == tl.float32
    tl.store(dgate_ptr + offs_m * N + offs_n, dy * up * _gelu_slope(gate, TANH, FINE), mask=mask)
    tl.store(dup_ptr + offs_m * N + offs_n, dy * _gelu(gate, TANH, FINE), mask=mask)


# Programs on each SM for the bias' gradient: each costs a row of float32 sums.
BIAS_PROGRAMS = 8


@cache
def _tile_config(N: int, single: bool, dtype: torch.dtype) -> dict:
    """Tiles of which each thread holds 32 bytes of each tensor, up to 1,024 columns wide unless there is a `single` row:
    71 us for bias + GELU of 16,384 x 4,096, 78 with 64 bytes."""
    elements = 128 * 32 // dtype.itemsize
    BLOCK_N = min(power_of_2(N), elements if single else 1024)
    return {"BLOCK_M": max(1, elements // BLOCK_N), "BLOCK_N": BLOCK_N, "ACC": acc_dtype(dtype), "num_warps": 4}


def _config(M: int, N: int, dtype: torch.dtype) -> dict:
    return _tile_config(min(N, 4096), M == 1, dtype)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)  # rounds up; triton.cdiv costs the CPU 2 us


def _programs(M: int, N: int, config: dict) -> int:
    return _blocks(M, config["BLOCK_M"]) * _blocks(N, config["BLOCK_N"])


def _rows(*tensors: Tensor) -> tuple[Sequence[Tensor], int, int, tuple[int, ...]]:
    """The tensors, how many rows and columns the kernels shall see of them, and with which strides: one row of all elements if
    all are contiguous, so that short and odd rows fill whole blocks too."""
    if all(x.is_contiguous() for x in tensors):
        N = tensors[0].numel()
        return tensors, 1, N, (N, 1) * len(tensors)
    rows = [as_rows(x, copy_interleaved=True) for x in tensors]
    return rows, *rows[0].shape, sum((x.stride() for x in rows), ())


def gelu_fwd(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = empty(x)
    if x.numel() == 0:
        return y
    if bias is None:
        (x,), M, N, strides = _rows(x)
    else:
        x, bias = as_rows(x, copy_interleaved=True), bias.contiguous()
        (M, N), strides = x.shape, x.stride()
    config = _config(M, N, x.dtype)
    programs = _programs(M, N, config)
    launch(gelu_fwd_kernel, programs, x, bias, y, *strides, M, N, TANH=approximate == "tanh", **config)
    return y


def gelu_bwd(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor | None]:
    dx = empty(x)
    if x.numel() == 0:
        return dx, None if bias is None else torch.zeros_like(bias)
    tanh = approximate == "tanh"
    if bias is None:
        (dy, x), M, N, strides = _rows(dy, x)
        config = _config(M, N, x.dtype)
        programs = _programs(M, N, config)
        launch(gelu_bwd_kernel, programs, dy, x, None, dx, None, *strides, M, N, TANH=tanh, **config)
        return dx, None
    dy, x = as_rows(dy, copy_interleaved=True), as_rows(x, copy_interleaved=True)
    M, N = x.shape
    config = _config(2, N, x.dtype)  # as if there were more than one row, in narrow tiles
    blocks_n = _blocks(N, config["BLOCK_N"])
    blocks_m = min(_blocks(M, config["BLOCK_M"]), max(1, BIAS_PROGRAMS * multiprocessors(x.device) // blocks_n))
    partial = torch.empty((1, blocks_m, N), dtype=torch_acc_dtype(x.dtype), device=x.device)
    launch(
        gelu_bwd_kernel, blocks_m * blocks_n, dy, x, bias.contiguous(), dx, partial, *dy.stride(), *x.stride(),
        M, N, TANH=tanh, **config,
    )  # fmt: skip
    return dx, column_sums(partial, bias)[0]


def _gated_fwd(kernel, gate: Tensor, up: Tensor, **constants: bool) -> Tensor:
    y = empty(gate)
    if gate.numel() == 0:
        return y
    (gate, up), M, N, strides = _rows(gate, up)
    config = _config(M, N, gate.dtype)
    launch(kernel, _programs(M, N, config), gate, up, y, *strides, M, N, **constants, **config)
    return y


def _gated_bwd(kernel, dy: Tensor, gate: Tensor, up: Tensor, **constants: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = empty(gate), empty(up)
    if gate.numel() == 0:
        return dgate, dup
    (dy, gate, up), M, N, strides = _rows(dy, gate, up)
    config = _config(M, N, gate.dtype)
    launch(kernel, _programs(M, N, config), dy, gate, up, dgate, dup, *strides, M, N, **constants, **config)
    return dgate, dup


def swiglu_fwd(gate: Tensor, up: Tensor) -> Tensor:
    return _gated_fwd(swiglu_fwd_kernel, gate, up)


def swiglu_bwd(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _gated_bwd(swiglu_bwd_kernel, dy, gate, up)


def geglu_fwd(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return _gated_fwd(geglu_fwd_kernel, gate, up, TANH=approximate == "tanh")


def geglu_bwd(dy: Tensor, gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return _gated_bwd(geglu_bwd_kernel, dy, gate, up, TANH=approximate == "tanh")


def _second(ctx, dy: Tensor) -> tuple:
    (approximate,) = ctx.settings
    plain = lambda x, bias: F.gelu(x if bias is None else x + bias, approximate=approximate)  # noqa: E731
    return through_pytorch(plain, ctx.saved_tensors, (dy,))


gelu_bwd_operator = operator(
    "gelu_bwd", gelu_bwd, like=lambda dy, x, bias, approximate: (empty(x), None if bias is None else empty(bias))
)
swiglu_bwd_operator = operator("swiglu_bwd", swiglu_bwd, like=lambda dy, gate, up: (empty(gate), empty(up)))
_gelu_of_sum = differentiable(
    operator("gelu", gelu_fwd, like=lambda x, bias, approximate: empty(x)),
    gelu_bwd_operator,
    keep=lambda inputs, y: (inputs[:2], inputs[2:]),
    gradients=lambda backward, ctx, dy: backward(dy, *ctx.saved_tensors, *ctx.settings),
    again=_second,
)
_swiglu = differentiable(
    operator("swiglu", swiglu_fwd, like=lambda gate, up: empty(gate)),
    swiglu_bwd_operator,
    keep=lambda inputs, y: (inputs, ()),
    gradients=lambda backward, ctx, dy: backward(dy, *ctx.saved_tensors),
    again=lambda ctx, dy: through_pytorch(lambda gate, up: F.silu(gate) * up, ctx.saved_tensors, (dy,)),
)


def _second_geglu(ctx, dy: Tensor) -> tuple:
    (approximate,) = ctx.settings
    plain = lambda gate, up: F.gelu(gate, approximate=approximate) * up  # noqa: E731
    return through_pytorch(plain, ctx.saved_tensors, (dy,))


_geglu = differentiable(
    operator("geglu", geglu_fwd, like=lambda gate, up, approximate: empty(gate)),
    operator("geglu_bwd", geglu_bwd, like=lambda dy, gate, up, approximate: (empty(gate), empty(up))),
    keep=lambda inputs, y: (inputs[:2], inputs[2:]),
    gradients=lambda backward, ctx, dy: backward(dy, *ctx.saved_tensors, *ctx.settings),
    again=_second_geglu,
)


def _check_approximate(op: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{op}: approximate must be "none" or "tanh", got {approximate!r}')


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of each element: x Phi(x), or with approximate="tanh" 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    x: any shape and strides, float16, bfloat16, float32 or float64; computed in float32 (float64 for float64). Returns y,
    contiguous, in x's shape and dtype. Raises TypeError for another dtype, ValueError for another `approximate` or a tensor
    on a device that Triton cannot use.
    """
    check("gelu", scalars=True, x=x)
    _check_approximate("gelu", approximate)
    if x.ndim == 0:
        return _gelu_of_sum(x.view(1), None, approximate).view(())
    return _gelu_of_sum(x, None, approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias) in one pass, the sum not rounded in between.

    x [..., N] and `approximate` as in `gelu`; bias [N] in any of these dtypes. Returns y, contiguous, in x's shape and
    dtype; the gradient of the bias has the bias' dtype and is the same in every run. Raises as `gelu` does, and ValueError
    for a bias of another shape or device.
    """
    check("bias_gelu", x=x)
    check_vector("bias_gelu", "bias", bias, x)
    _check_approximate("bias_gelu", approximate)
    return _gelu_of_sum(x, bias, approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(gate) up: the gated unit of LLaMA's feed-forward layers, between its matmuls.

    gate, up: one shape and dtype, any strides (the two halves of one matmul's result, say), dtypes as in `gelu`. Returns
    y, contiguous, in their shape and dtype. Raises TypeError for another or unequal dtypes, ValueError for unequal shapes
    or devices, a tensor without dimensions or one on a device that Triton cannot use.
    """
    check("swiglu", gate=gate, up=up)
    check_alike("swiglu", "up", up, "gate", gate)
    return _swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) up: the gated unit of Gemma's feed-forward layers, which take approximate="tanh".

    gate, up, the result and the errors as in `swiglu`; `approximate` as in `gelu`, which also says what it raises.
    """
    check("geglu", gate=gate, up=up)
    check_alike("geglu", "up", up, "gate", gate)
    _check_approximate("geglu", approximate)
    return _geglu(gate, up, approximate)
