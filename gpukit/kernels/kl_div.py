"""Kullback-Leibler divergence from log-probabilities x to probabilities (or log-probabilities) t, element by element:
t (log t - x), whose gradient with respect to x is -t.

The same kernel, to be read first: `kl_div` in solutions/losses.py.

Traffic for n elements: forward two reads, backward one read and one write, the least possible. Where the loss is reduced,
every program leaves the sum of its block, and one more launch adds these up: no atomics, the same sum every time.

Limits: the gradient with respect to t, which hardly anybody needs, is left to PyTorch's operations; so are second ones.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.kl_div.html
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._dtypes import DTYPES, acc_dtype, torch_acc_dtype
from gpukit.kernels._launch import interpreted, launch


@triton.jit
def kl_div_fwd_kernel(
    x_ptr, t_ptr, out_ptr,
    n,
    LOG_TARGET: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out: the elements' terms, or REDUCED, the sum of each program's."""
    # int64: logits of a batch may be more than 2^31.
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
    if LOG_TARGET:
        t = tl.load(t_ptr + offs, mask=mask, other=0.0).to(ACC)
        # Padding is 0 in both, of which the term is 0.
        loss = tl.exp(t) * (t - x)
    else:
        # Padding of 1 beside x = 0: 1 log 1 - 0 is 0, so the sum may take all lanes.
        t = tl.load(t_ptr + offs, mask=mask, other=1.0).to(ACC)
        # 0 log 0 is 0. The logarithm of a negative "probability" is NaN, as in PyTorch.
        loss = tl.where(t == 0, 0.0, t * tl.log(tl.where(t == 0, 1.0, t))) - t * x
    if REDUCED:
        tl.store(out_ptr + pid, tl.sum(loss, axis=0))
    else:
        tl.store(out_ptr + offs, loss, mask=mask)


@triton.jit
def kl_div_bwd_kernel(
    t_ptr, dloss_ptr, dx_ptr,
    n,
    SCALE: tl.constexpr, LOG_TARGET: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx = -t dloss SCALE; the one dloss of a REDUCED loss is read where it is, and never sent to the CPU."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    t = tl.load(t_ptr + offs, mask=mask, other=0.0).to(ACC)
    if LOG_TARGET:
        t = tl.exp(t)
    if REDUCED:
        # To read the one number on the CPU would make it wait for the GPU.
        dloss = tl.load(dloss_ptr).to(ACC) * SCALE
    else:
        dloss = tl.load(dloss_ptr + offs, mask=mask, other=0.0).to(ACC)
    tl.store(dx_ptr + offs, -t * dloss, mask=mask)


# Blocks, on an H200 with 4096 x 32768: bf16 forward 183 us (1,024: 195), fp32 backward 258 us (2,048: 269).
_FWD, _BWD = {"BLOCK": 2048, "num_warps": 4}, {"BLOCK": 1024, "num_warps": 4}


def kl_div_fwd(x: Tensor, t: Tensor, log_target: bool, reduced: bool) -> Tensor:
    """The terms in x's shape and dtype, or their sums by block [blocks] in float32 (float64 for float64)."""
    programs = -(-x.numel() // _FWD["BLOCK"])
    if reduced:
        out = torch.empty(programs, dtype=torch_acc_dtype(x.dtype), device=x.device)
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if programs:
        launch(
            kl_div_fwd_kernel, programs, x.contiguous(), t.contiguous(), out, x.numel(),
            LOG_TARGET=log_target, REDUCED=reduced, ACC=acc_dtype(x.dtype), **_FWD,
        )  # fmt: skip
    return out


def kl_div_bwd(t: Tensor, dloss: Tensor, log_target: bool, reduced: bool, scale: float) -> Tensor:
    """dx, contiguous, in t's shape and dtype."""
    dx = torch.empty_like(t, memory_format=torch.contiguous_format)
    if t.numel():
        launch(
            kl_div_bwd_kernel, -(-t.numel() // _BWD["BLOCK"]), t.contiguous(), dloss.contiguous(), dx, t.numel(),
            SCALE=scale, LOG_TARGET=log_target, REDUCED=reduced, ACC=acc_dtype(t.dtype), **_BWD,
        )  # fmt: skip
    return dx


def _loss(x: Tensor, t: Tensor, log_target: bool, reduced: bool, scale: float) -> Tensor:
    out = kl_div_fwd(x, t, log_target, reduced)
    return (out.sum() * scale).to(x.dtype) if reduced else out


def _second(ctx, dloss: Tensor) -> Tensor:
    (t,), (log_target, reduced, scale) = ctx.saved_tensors, ctx.settings
    dx = -(t.exp() if log_target else t) * dloss
    return dx * scale if reduced else dx


_kl_div = differentiable(
    operator("kl_div", _loss, like=lambda x, t, log_target, reduced, scale: x.new_empty(() if reduced else x.shape)),
    operator("kl_div_bwd", kl_div_bwd, like=lambda t, *_: t.new_empty(t.shape)),
    keep=lambda inputs, _: (inputs[1:2], inputs[2:]),
    gradients=lambda backward, ctx, dloss: backward(*ctx.saved_tensors, dloss, *ctx.settings),
    again=_second,
)


_REDUCTIONS = ("mean", "batchmean", "sum", "none")


def kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """KL divergence of log-probabilities `input` from `target`, as torch.nn.functional.kl_div.

    input and target: one shape, one dtype (float16, bfloat16, float32 or float64), any strides; a tensor that is not
    contiguous is copied. Sums in float32 (float64 for float64). reduction "mean" divides by the number of elements,
    "batchmean" by the length of the first dimension: of rows of log-probabilities that is the divergence. "none" gives
    the terms. For a temperature T scale the logits, x = log_softmax(logits / T), and the loss by T^2.

    Raises TypeError for a dtype, ValueError for shapes, devices or a reduction that do not fit.
    """
    check_tensors("kl_div", input=input, target=target)
    if input.dtype not in DTYPES or target.dtype != input.dtype:
        raise TypeError(
            "kl_div: input and target must have one dtype of float16, bfloat16, float32 and float64, got "
            f"{input.dtype} and {target.dtype}"
        )
    if input.shape != target.shape:
        raise ValueError(
            f"kl_div: input and target must have one shape, got {list(input.shape)} and {list(target.shape)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"kl_div: reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if reduction == "batchmean" and input.ndim == 0:
        raise ValueError("kl_div: reduction 'batchmean' divides by the first dimension, and input has none")
    if input.device != target.device or not (input.is_cuda or interpreted()):
        raise ValueError(
            f"kl_div: input is on {input.device} and target on {target.device}; Triton needs both on one GPU here, or "
            "TRITON_INTERPRET=1 before Python starts"
        )
    if target.requires_grad:
        return F.kl_div(input, target, reduction=reduction, log_target=log_target)
    count = {"mean": input.numel(), "batchmean": len(input) if input.ndim else 1}.get(reduction, 1)
    scale = 1 / count if count else float("nan")  # the mean of nothing, as in PyTorch
    return _kl_div(input, target, log_target, reduction != "none", scale)
