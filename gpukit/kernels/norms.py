"""RMSNorm, LayerNorm and residual + RMSNorm over the last dimension (or several), and their gradients.

The same kernels, to be read first: `rms_norm`, `layer_norm`, `layer_norm_long`, `rms_norm_backward` and
`residual_rms_norm` in solutions/norms.py.

    rms_norm(x, weight)                y = x / sqrt(mean(x^2) + eps) weight
    layer_norm(x, weight, bias)        the same of x - mean(x), plus bias
    residual_rms_norm(x, residual, weight)    u = x + residual, y = rms_norm(u, weight); returns (y, u)

So there is one kernel for each direction: a LayerNorm centres its rows first, a residual is added first. Traffic for M
rows of N: forward one read and one write, backward two reads and one write; with a residual one read and one write more
in each: the least possible, while a row stays in the registers of one program. Longer rows are read again.

The gradients of weight and bias are sums over all rows. A fixed number of programs walks over the rows, each adds up its
own in float32, and a second kernel adds up theirs: no locks, no atomics, and the same result in every run.
Sums and statistics are float32 in every dtype; the variance is the mean square of the centred row, which does not cancel
as mean(x^2) - mean(x)^2 does.

Sources: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; Ba et al. 2016, https://arxiv.org/abs/1607.06450
"""

import math
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels import _norm_choices as choices
from gpukit.kernels._arguments import check, check_alike, check_vector
from gpukit.kernels._autograd import differentiable, operator, through_pytorch
from gpukit.kernels._device import properties
from gpukit.kernels._dtypes import torch_acc_dtype
from gpukit.kernels._launch import interpreted, launch, power_of_2
from gpukit.kernels._norm_backward import norm_bwd
from gpukit.kernels._norm_pieces import norm_fwd_pieces_kernel
from gpukit.kernels._rows import as_rows, empty, mean_of


@triton.jit
def _load_input(x_ptr, residual_ptr, offs_x, offs_r, mask, ACC: tl.constexpr):
    """x, or x + residual rounded to their dtype: what is normalized is what is handed on as u. Padding is 0."""
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(ACC)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(ACC)
        x = x.to(x_ptr.dtype.element_ty).to(ACC)
    return x


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, u_ptr, stats_ptr,
    stride_xm, stride_xn, stride_rm, stride_rn,
    M, N,
    EPS: tl.constexpr, CENTRE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows per program, held in registers from the load to the store. EVEN: N is BLOCK_N.

    residual_ptr with u_ptr, weight_ptr and bias_ptr may be None. stats [1 or 2, M]: 1 / sqrt(variance + eps), the mean.
    """
    # Half of each row is inside, so the compiler need not test those lanes.
    tl.assume(N > BLOCK_N // 2)
    # int64: a row's offset passes 2^31 elements long before a GPU's memory is full.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask_m, mask_n = offs_m < M, (offs_n < N) | EVEN
    mask = mask_m & mask_n
    offs_x, offs_r = offs_m * stride_xm + offs_n * stride_xn, offs_m * stride_rm + offs_n * stride_rn
    x = _load_input(x_ptr, residual_ptr, offs_x, offs_r, mask, ACC)
    if weight_ptr is not None:
        # Before the sums, so that it arrives while they are computed.
        weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
    if residual_ptr is not None:
        # u is written now and not read again: what goes on below is the same numbers in registers.
        tl.store(u_ptr + offs_m * N + offs_n, x, mask=mask)
    if CENTRE:
        mean = mean_of(tl.sum(x, axis=1, keep_dims=True), N)
        tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
        x = tl.where(mask_n, x - mean, 0.0)  # the padding would be -mean, and count in the variance
    # Padding is 0 and adds nothing; the divisor is N, not the block.
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + EPS)
    tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    y = x * rstd
    if weight_ptr is not None:
        y *= weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


@triton.jit
def norm_fwd_long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, u_ptr, stats_ptr,
    stride_xm, stride_xn, stride_rm, stride_rn,
    M, N,
    EPS: tl.constexpr, CENTRE: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for each sum, then one that writes."""
    pid_m = tl.program_id(0).to(tl.int64)
    x_ptr += pid_m * stride_xm
    if residual_ptr is not None:
        residual_ptr += pid_m * stride_rm
        u_ptr += pid_m * N
    offs = tl.arange(0, BLOCK_N)

    mean = 0.0
    if CENTRE:
        total = tl.zeros([BLOCK_N], ACC)
        for start in tl.range(0, N, BLOCK_N):
            offs_n = start + offs
            total += _load_input(x_ptr, residual_ptr, offs_n * stride_xn, offs_n * stride_rn, offs_n < N, ACC)
        mean = mean_of(tl.sum(total, axis=0), N)
    # Sums for each lane, joined after the loop: a reduction in each step would make all warps wait.
    squares = tl.zeros([BLOCK_N], ACC)
    rest = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N):
        offs_n = start + offs
        x = _load_input(x_ptr, residual_ptr, offs_n * stride_xn, offs_n * stride_rn, offs_n < N, ACC)
        # The padding would be -mean, and count.
        x = tl.where(offs_n < N, x - mean, 0.0)
        squares += x * x
        rest += x
    variance = tl.sum(squares, axis=0) / N
    if CENTRE:  # what rounding has left of the mean: a sum far from 0 loses digits that the differences still have
        shift = mean_of(tl.sum(rest, axis=0), N)
        mean += shift
        variance -= shift * shift
        tl.store(stats_ptr + M + pid_m, mean)
    rstd = tl.rsqrt(variance + EPS)
    tl.store(stats_ptr + pid_m, rstd)

    for start in tl.range(0, N, BLOCK_N):
        offs_n = start + offs
        mask_n = offs_n < N
        x = _load_input(x_ptr, residual_ptr, offs_n * stride_xn, offs_n * stride_rn, mask_n, ACC)
        if residual_ptr is not None:
            tl.store(u_ptr + offs_n, x, mask=mask_n)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
        tl.store(y_ptr + pid_m * N + offs_n, y, mask=mask_n)


@cache
def _fwd_config(N: int, dtype: torch.dtype, centre: bool) -> tuple:
    """The kernel, and its block: whole rows, as many as make 1,024 elements, 32 of them a thread; 64 in a long LayerNorm,
    whose warps wait for each other twice: 39 µs for 4,096 x 8,192, 42 with twice the warps."""
    if not choices.is_resident(N, dtype, choices.RESIDENT_FWD):
        return norm_fwd_long_kernel, choices.long_config(dtype)
    BLOCK_N = power_of_2(N)
    num_warps = BLOCK_N // (2048 if centre and BLOCK_N > 4096 else 1024)
    return norm_fwd_kernel, choices.resident_config(N, dtype, max(1, 1024 // BLOCK_N), min(max(num_warps, 1), 32))


def _on_hopper(device: torch.device) -> bool:
    gpu = properties(device)
    return gpu is not None and gpu.compute_capability[0] == 9 and not interpreted()


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, u (None without residual), stats [1 or 2, M]."""
    y, u = empty(x), None if residual is None else empty(x)
    stats = _empty_stats(x, centre)
    if x.numel() == 0:
        return y, u, stats
    N, dtype = x.shape[-1], x.dtype
    if (
        residual is None
        and x.stride(-1) == 1
        and _on_hopper(x.device)
        and (pieces := choices.pieces_config(N, dtype, centre))
    ):
        x = as_rows(x)
        launch(
            norm_fwd_pieces_kernel, len(x), x, _contiguous(weight), _contiguous(bias), y, stats, x.stride(0), *x.shape,
            EPS=eps, CENTRE=centre, PTX=not interpreted(), **pieces,
        )  # fmt: skip
        return y, u, stats
    kernel, config = _fwd_config(N, dtype, centre)
    reread = kernel is norm_fwd_long_kernel
    x = as_rows(x, copy_interleaved=reread)
    residual = None if residual is None else as_rows(residual, copy_interleaved=reread)
    M = x.shape[0]
    programs = -(-M // config.get("BLOCK_M", 1))  # rounds up; triton.cdiv costs the CPU 2 us
    launch(
        kernel, programs, x, residual, _contiguous(weight), _contiguous(bias), y, u, stats,
        *x.stride(), *(x if residual is None else residual).stride(), M, N, EPS=eps, CENTRE=centre, **config,
    )  # fmt: skip
    return y, u, stats


def _empty_stats(x: Tensor, centre: bool) -> Tensor:
    return x.new_empty((2 if centre else 1, math.prod(x.shape[:-1])), dtype=torch_acc_dtype(x.dtype))


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
    """The same in PyTorch's operations, for second derivatives. These want one dtype."""
    wide = [None if t is None else t.to(torch_acc_dtype(x.dtype)) for t in (x, weight, bias)]
    if centre:
        return F.layer_norm(wide[0], x.shape[-1:], *wide[1:], eps).to(x.dtype)
    return F.rms_norm(wide[0], x.shape[-1:], wide[1], eps).to(x.dtype)


def _gradients(backward, ctx, dy: Tensor | None, du: Tensor | None = None) -> tuple:
    x, weight, bias, stats = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    if not ctx.given[1]:
        du = None  # without a residual there is no u, and an operator's empty tensor in its place has no gradient
    dx, dweight, dbias = backward(dy, du, x, weight, bias, stats)
    return dx, dx, dweight, dbias  # of x and of the residual alike


def _second(ctx, dy: Tensor | None, du: Tensor | None = None) -> tuple:
    x, weight, bias, _ = ctx.saved_tensors
    eps, centre = ctx.settings
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias = through_pytorch(partial(_plain, eps=eps, centre=centre), (x, weight, bias), (dy,))
    dx = dx if du is None else dx + du
    return dx, dx, dweight, dbias


def _keep(inputs: tuple, results: tuple) -> tuple:
    x, residual, weight, bias, *settings = inputs
    _, u, stats = results
    return (x if residual is None else u, weight, bias, stats), settings


_norm = differentiable(
    operator(
        "norm", norm_fwd,
        like=lambda x, residual, weight, bias, eps, centre: (
            empty(x), None if residual is None else empty(x), _empty_stats(x, centre)
        ),
    ),
    operator(
        "norm_bwd", norm_bwd,
        like=lambda dy, du, x, weight, bias, stats: (
            empty(x), *(None if w is None else empty(w) for w in (weight, bias))
        ),
    ),
    keep=_keep, gradients=_gradients, again=_second, public=2,
    materialize=False,  # the last block of a model hands no gradient to u: no zeros need be read
)  # fmt: skip


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: int = 1) -> None:
    check(op, x=x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if not isinstance(vector, Tensor):  # torch.nn.functional has the normalised shape in this place
            raise TypeError(f"{op}: {name} must be a tensor {list(x.shape[x.ndim - dims :])} or None, got {vector!r}")
        check_vector(op, name, vector, x, dims)
    if not (isinstance(eps, float | int) and eps > 0):
        raise ValueError(f"{op}: eps must be a number above 0, got {eps!r}")


def _dims(op: str, x: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many of x's last dimensions normalized_shape names."""
    check(op, x=x)
    if not isinstance(normalized_shape, int | Sequence):
        raise TypeError(f"{op}: normalized_shape must be an integer, a tuple of them or None, got {normalized_shape!r}")
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or shape != list(x.shape[-len(shape) :]):
        raise ValueError(
            f"{op}: normalized_shape must be the last dimensions of x, one or more of {list(x.shape)}, got {shape}"
        )
    return len(shape)


def _normed(op: str, x, normalized_shape, weight, bias, eps, centre: bool) -> Tensor:
    """Several dimensions are normalized as one: a view of x, of weight and of bias."""
    dims = 1 if normalized_shape is None else _dims(op, x, normalized_shape)
    _check(op, x, weight, bias, eps, dims)
    if dims == 1:
        return _norm(x, None, weight, bias, eps, centre)[0]
    rows = x.reshape(*x.shape[: x.ndim - dims], math.prod(x.shape[x.ndim - dims :]))
    weight, bias = (None if vector is None else vector.reshape(-1) for vector in (weight, bias))
    return _norm(rows, None, weight, bias, eps, centre)[0].view(x.shape)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    normalized_shape: int | Sequence[int] | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) weight over the last dimension, or several.

    x [..., N], float16, bfloat16, float32 or float64, any strides; weight [N] in any of these dtypes, or None. Computed in
    float32 (float64 for float64) and rounded once. normalized_shape: the last dimensions of x that are normalized together,
    as in torch.nn.functional.rms_norm; weight then has that shape. None: the last one.
    Returns y, contiguous, in x's shape and dtype. Raises TypeError for another dtype, ValueError for eps <= 0, a
    normalized_shape that x does not end with, a weight of another shape or device, a tensor without dimensions or one on a
    device that Triton cannot use.
    """
    return _normed("rms_norm", x, normalized_shape, weight, None, eps, False)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) weight + bias over the last dimension, or several, var being the mean square of
    x - mean(x).

    x, weight, normalized_shape and the errors as in `rms_norm`; bias as weight, or None. Returns y, contiguous, in x's shape
    and dtype.
    """
    return _normed("layer_norm", x, normalized_shape, weight, bias, eps, True)


def residual_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(y, u): u = x + residual, rounded to their dtype, and y = rms_norm(u, weight, eps): a block's two outputs in one pass.

    x and residual: one shape and dtype, any strides; weight and the errors as in `rms_norm`. y and u are contiguous and
    new. The gradients of x and residual are equal: what reaches u through y, plus what reaches it directly.
    """
    _check("residual_rms_norm", x, weight, None, eps)
    check_alike("residual_rms_norm", "residual", residual, "x", x)
    return _norm(x, residual, weight, None, eps, False)
