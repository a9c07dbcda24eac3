"""RMSNorm, LayerNorm, residual + RMSNorm: what they mean, on which inputs they are judged, and the least they must move."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl

RMS_EPS = 1e-6
LAYER_EPS = 1e-5


def _wide(x: Tensor) -> Tensor:
    """At least float32, which models in 16 bits convert to for a norm: a mean of bf16 squares has two digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> Tensor:
    """x / sqrt(mean(x^2) + eps) weight over the last dimension, as LLaMA's code writes it."""
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * rstd * _wide(weight)).to(x.dtype)


def rms_norm_library(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = LAYER_EPS) -> Tensor:
    """The mean is taken off before the squares are: mean(x^2) - mean(x)^2 cancels where the mean is large."""
    wide = _wide(x)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (centred * rstd * _wide(weight) + _wide(bias)).to(x.dtype)


def layer_norm_library(x: Tensor, weight: Tensor, bias: Tensor, eps: float = LAYER_EPS) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = RMS_EPS) -> tuple[Tensor, Tensor]:
    """(y, u): the sum goes on to the next block as u, and is normalized as it was rounded."""
    u = x + residual
    return rms_norm(u, weight, eps), u


def residual_rms_norm_library(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = RMS_EPS
) -> tuple[Tensor, Tensor]:
    u = x + residual
    return F.rms_norm(u, u.shape[-1:], weight, eps), u


def _liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, RMS_EPS, 0.0, "llama", False)  # False: dy is not written over


def _liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, LAYER_EPS)


def _liger_residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, RMS_EPS, 0.0, "llama", False)


def _quack_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=RMS_EPS)


def _quack_residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=RMS_EPS, prenorm=True)  # prenorm: the sum, too


@lru_cache(maxsize=2)
def _float32(vector: Tensor) -> Tensor:
    """A weight or bias as QuACK's LayerNorm takes it, converted once: a model would store it so."""
    return vector.detach().float()


class _QuackLayerNorm(torch.autograd.Function):
    """QuACK has both kernels and no function that autograd knows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        wide = _float32(weight)
        y, rstd, mean = layernorm_fwd(x, wide, _float32(bias), LAYER_EPS, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, wide, rstd, mean)
        ctx.dtype = weight.dtype
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        from quack.rmsnorm import layernorm_bwd

        x, wide, rstd, mean = ctx.saved_tensors
        dx, dweight, dbias = layernorm_bwd(x, wide, dy, rstd, mean, has_bias=True)
        return dx, dweight.to(ctx.dtype), dbias.to(ctx.dtype)


def _activations(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Normal noise in float64, and by row, as far as there are rows:

    0  large: x^2 overflows fp16
    1  far from zero: the mean is 16 times the spread, so that mean(x^2) - mean(x)^2 loses two digits of seven
    2  constant: the variance is 0, and eps alone keeps the result finite
    3  tiny: eps is as large as the mean of the squares
    4  one element far above the rest

    A row of one element is tiny: else it is 1 or -1 whatever it was, and its gradient nothing but rounding.
    """
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if shape[-1] == 1:
        return x.mul_(1e-3)
    rows = x.view(-1, shape[-1])
    for row, change in enumerate((_large, _far, _constant, _tiny, _peaked)):
        if row < len(rows):
            change(rows[row])
    return x


def _large(row: Tensor) -> None:
    row.mul_(1000)


def _far(row: Tensor) -> None:
    row.mul_(0.25).add_(4)


def _constant(row: Tensor) -> None:
    row.fill_(3)


def _tiny(row: Tensor) -> None:
    row.mul_(1e-3)


def _peaked(row: Tensor) -> None:
    row[-1:] = 100


def _vector(N: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, generator=generator, dtype=torch.float64).to(dtype)  # not ones: a kernel may forget it


def make_rms_norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """x [..., N], weight [N] on the CPU."""
    return _activations(shape, generator).to(dtype), _vector(shape[-1], generator, dtype)


def make_layer_norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, ...]:
    """x [..., N], weight [N], bias [N] on the CPU."""
    return *make_rms_norm_inputs(shape, dtype, generator), _vector(shape[-1], generator, dtype)


def make_residual_rms_norm_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, ...]:
    """x [..., N], residual [..., N], weight [N] on the CPU."""
    x, weight = make_rms_norm_inputs(shape, dtype, generator)
    residual = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(1e-3 if shape[-1] == 1 else 1)
    return x, residual.to(dtype), weight


def _cost(shape, dtype, reads: int, writes: int, vectors_read: int, vectors_written: int, flops: int) -> Cost:
    elements, N, itemsize = math.prod(shape), shape[-1], dtype.itemsize
    return Cost(
        (reads * elements + vectors_read * N) * itemsize,
        (writes * elements + vectors_written * N) * itemsize,
        flops * elements,
    )


def rms_norm_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: x and weight read, y written; a square, a sum and two products an element."""
    return _cost(shape, dtype, 1, 1, 1, 0, flops=4)


def rms_norm_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward, with x_hat = x rstd and g = dy weight: dx = rstd (g - x_hat mean(g x_hat)), dweight = sum of dy x_hat over
    the rows. dy, x and weight read, dx and dweight written; two products for x_hat and g, 2 operations for the mean, 3 for
    dx and 2 for dweight."""
    return _cost(shape, dtype, 2, 1, 1, 1, flops=9)


def layer_norm_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: x, weight and bias read, y written; RMSNorm's 4, 2 more for the mean and 1 for the bias."""
    return _cost(shape, dtype, 1, 1, 2, 0, flops=7)


def layer_norm_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: RMSNorm's 9, and x - mean, the sum of g, its part in dx, and dbias."""
    return _cost(shape, dtype, 2, 1, 1, 2, flops=13)


def residual_rms_norm_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: x, residual and weight read, y and u written; RMSNorm's 4 and the sum."""
    return _cost(shape, dtype, 2, 2, 1, 0, flops=5)


def residual_rms_norm_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: dy, du, u and weight read; one tensor written, the gradient of x and of the residual; dweight written."""
    return _cost(shape, dtype, 3, 1, 1, 1, flops=10)


TEST_SHAPES = ((1, 1), (2, 1), (6, 64), (5, 63), (5, 65), (7, 251), (2, 3, 781), (2, 1025))
BENCH_SHAPES = ((4096, 1024), (16384, 4096), (4096, 8192), (4096, 16384))

RMS_NORM = Op(
    name="rms_norm",
    reference=rms_norm,
    library=rms_norm_library,
    make_inputs=make_rms_norm_inputs,
    cost=rms_norm_cost,
    cost_bwd=rms_norm_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=BENCH_SHAPES,
    peers={
        "liger-triton": _liger_rms_norm,
        "liger-cutedsl": cutedsl("rms_norm", RMS_EPS),
        "quack": _quack_rms_norm,
    },
)
LAYER_NORM = Op(
    name="layer_norm",
    reference=layer_norm,
    library=layer_norm_library,
    make_inputs=make_layer_norm_inputs,
    cost=layer_norm_cost,
    cost_bwd=layer_norm_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=BENCH_SHAPES,
    peers={
        "liger-triton": _liger_layer_norm,
        "liger-cutedsl": cutedsl("layer_norm", LAYER_EPS),
        "quack": _QuackLayerNorm.apply,
    },
)
RESIDUAL_RMS_NORM = Op(
    name="residual_rms_norm",
    reference=residual_rms_norm,
    library=residual_rms_norm_library,
    make_inputs=make_residual_rms_norm_inputs,
    cost=residual_rms_norm_cost,
    cost_bwd=residual_rms_norm_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=BENCH_SHAPES,
    peers={
        "liger-triton": _liger_residual_rms_norm,
        "liger-cutedsl": cutedsl("fused_add_rms_norm", RMS_EPS),
        "quack": _quack_residual_rms_norm,
    },
)
