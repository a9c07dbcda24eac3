"""Matrix products in 8 bits, for training: about twice the tensor cores' rate of bfloat16, with 3 bits of mantissa or 2.

A tensor is multiplied by a scale that brings its largest element to the format's largest number, rounded, and the product of
two such tensors is divided by both scales. Inputs and weights are in e4m3 (3 bits of mantissa, at most 448), gradients in e5m2
(2 bits, at most 57,344), whose range they need. Sums are in float32 inside the product, and its result is bfloat16.

Sources: the formats, https://arxiv.org/abs/2209.05433; scaling by the tensor's own maximum, which costs one more pass over it
than a scale remembered from earlier steps and needs no history, https://arxiv.org/abs/2309.17224 discusses both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpukit.kernels._cast_transpose import cast_transpose

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, N] in 8 bits, its transpose [N, M], and the float32 factor [] that both have to be multiplied by again."""
    factor = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return *cast_transpose(x, factor, dtype), factor


def product(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, bias: Tensor | None = None, *, fast: bool
) -> Tensor:
    """a [M, K] b^T [K, N] in bfloat16, of b [N, K]: the tensor cores read both along K. `fast` sums in fewer bits than float32
    between the tensor cores' steps, which is enough forward and not for gradients."""
    return torch._scaled_mm(
        a, b.mT, scale_a=a_factor, scale_b=b_factor, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> x weight^T + bias [M, N]. What is kept for the backward pass has 8 bits."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x8_t, x_factor = rounded(x, FORWARD)
        weight8, weight8_t, weight_factor = rounded(weight, FORWARD)
        ctx.save_for_backward(x8_t, x_factor, weight8_t, weight_factor)
        ctx.has_bias = bias is not None
        return product(x8, weight8, x_factor, weight_factor, bias, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x8_t, x_factor, weight8_t, weight_factor = ctx.saved_tensors
        dy8, dy8_t, dy_factor = rounded(dy, BACKWARD)
        dx = product(dy8, weight8_t, dy_factor, weight_factor, fast=False)
        dweight = product(dy8_t, x8_t, dy_factor, x_factor, fast=False)
        return dx, dweight, dy.sum(0) if ctx.has_bias else None


class Linear(nn.Linear):
    """nn.Linear whose three products are in 8 bits. Its weight is bfloat16; the sizes must be multiples of 16."""

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def to_fp8(model: nn.Module) -> None:
    """Let the linear layers in the blocks of a GPT multiply in 8 bits. The head stays as it is: its errors go into the loss
    undamped. Raises ValueError for weights that are not bfloat16, and for sizes that the tensor cores do not take."""
    for name, module in model.blocks.named_modules():
        if type(module) is not nn.Linear:
            continue
        if module.weight.dtype != torch.bfloat16:
            raise ValueError(f"to_fp8: the weights must be bfloat16, got {module.weight.dtype} in blocks.{name}")
        if module.in_features % 16 or module.out_features % 16:
            raise ValueError(f"to_fp8: sizes must be multiples of 16, got {list(module.weight.shape)} in blocks.{name}")
        module.__class__ = Linear  # the parameters stay the same objects
