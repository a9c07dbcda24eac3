"""AdamW for the model: which weights decay, whose implementation runs, and how large a step the gradients may ask for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpukit.train.presets import Settings


def adamw(
    model: nn.Module, settings: Settings, *, fused: bool = True, master_weights: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `settings.optimizer` names. Matrices and tables decay towards 0; biases and the gains of norms, which
    have one dimension, do not: each of them is one number per channel, and pulling it to 0 would only switch channels off.

    fused           PyTorch's AdamW on a GPU: one kernel for many tensors; without, several kernels for each tensor
    master_weights  gpukit's AdamW with 16-bit weights: it updates a float32 copy of them
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": settings.rate, "betas": settings.betas, "eps": 1e-8}
    if settings.optimizer == "gpukit":
        from gpukit.kernels import AdamW  # here, since Triton is not on every system

        return AdamW(groups, max_norm=settings.clip, master_weights=master_weights, **options)
    if fused and parameters[0].is_cuda:
        return torch.optim.AdamW(groups, fused=True, **options)
    return torch.optim.AdamW(groups, foreach=None if fused else False, **options)


def update(
    optimizer: torch.optim.Optimizer, rate: float, settings: Settings, *, norm_wanted: bool, keep: bool = False
) -> Tensor | None:
    """One step with the learning rate `rate`, and gradients whose norm is at most `settings.clip`; they are gone after it, or
    zeros with `keep`.

    Returns the norm that the gradients had before clipping. gpukit's AdamW clips on the way, without saying the norm, so there
    it is computed only where it is wanted.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = None
    if settings.optimizer == "torch" or norm_wanted:
        norm = nn.utils.get_total_norm(gradients)
        if hasattr(norm, "full_tensor"):  # of gradients in shares (FSDP): the norm over all of them
            norm = norm.full_tensor()
    if settings.optimizer == "torch":
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, settings.clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep)
    return norm
