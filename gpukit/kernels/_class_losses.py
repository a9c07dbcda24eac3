"""What the losses with a class index share: the checks of their arguments, the reduction of the rows' losses,
and the losses in PyTorch's operations, of which second derivatives are taken."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpukit.kernels._arguments import check_device, check_stored, check_tensors
from gpukit.kernels._dtypes import DTYPES, torch_acc_dtype
from gpukit.kernels._launch import interpreted


def is_soft(target: Tensor) -> bool:
    """Whether it holds probabilities."""
    return target.is_floating_point()


def count(losses: Tensor, target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor | int:
    """What the mean divides by: the targets that count, each as often as its class weighs; with probabilities all rows."""
    if is_soft(target):
        return losses.numel()
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    # A target outside has made the loss NaN, or raised.
    weights = weight.to(losses.dtype)[torch.where(counts, target, 0).clamp(0, len(weight) - 1)]
    return torch.where(counts, weights, 0).sum()


def reduced(losses: Tensor, target: Tensor, reduction: str, number: Tensor | int | None) -> Tensor:
    """The losses [M] as PyTorch's `reduction` of them. number: what the mean divides by."""
    if reduction == "none":
        return losses.view(target.shape[:-1] if is_soft(target) else target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / number


def in_pytorch(
    x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, weight: Tensor | None
) -> Tensor:
    """The losses [M] in PyTorch's operations, for second derivatives."""
    wide = torch_acc_dtype(x.dtype)
    x, weight = x.to(wide), None if weight is None else weight.to(wide)
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    if is_soft(target):
        losses = F.cross_entropy(x, target.to(wide), weight, **options)
        return losses + z_loss * x.logsumexp(-1).square() if z_loss else losses
    losses = F.cross_entropy(x, target.long(), weight, ignore_index=ignore_index, **options)
    return losses + z_loss * torch.where(target == ignore_index, 0.0, x.logsumexp(-1).square()) if z_loss else losses


def lies_apart(x: Tensor) -> bool:
    """Whether no two elements of x share their memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def check(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    z_loss: float,
    dim: int = -1,
    soft: bool = False,
    classes: int | None = None,
) -> None:
    """soft: whether the target may hold probabilities. classes: where the logits [..., classes] are not there yet, and `logits`
    stands for what they are made from."""
    check_tensors("cross_entropy", logits=logits, target=target)
    if logits.dtype not in DTYPES:
        raise TypeError(f"cross_entropy: logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    soft = soft and target.dtype in DTYPES
    if not soft and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cross_entropy: target must hold class indices, int64 or int32, got {target.dtype}")
    shape = list(logits.shape) if classes is None else [*logits.shape[:-1], classes]
    leading = shape.copy()
    V = leading.pop(dim) if leading else 0
    if V == 0 or list(target.shape) != (shape if soft else leading):
        raise ValueError(
            f"cross_entropy: logits [..., V] need a target [...]{', or probabilities [..., V],' if soft else ''} and at "
            f"least one class, got {shape} and {list(target.shape)}"
            + (f", V being dimension {dim}" if dim != -1 else "")
        )
    if logits.device != target.device or not (logits.is_cuda or interpreted()):
        raise ValueError(
            f"cross_entropy: logits are on {logits.device} and target on {target.device}; Triton needs both on one GPU "
            "here, or TRITON_INTERPRET=1 before Python starts"
        )
    top = torch.iinfo(torch.int64 if soft else target.dtype).max
    if soft and isinstance(ignore_index, int) and ignore_index >= 0:
        raise ValueError(f"cross_entropy: ignore_index is for class indices, not for probabilities, got {ignore_index}")
    if not (isinstance(ignore_index, int) and -top <= ignore_index <= top):
        raise TypeError(
            f"cross_entropy: ignore_index must be an integer of target's {target.dtype}, got {ignore_index!r}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"cross_entropy: z_loss must be 0 or more, got {z_loss}")


def checked_weight(weight: Tensor, logits: Tensor) -> Tensor:
    """The class weights of logits [..., V], contiguous; raises TypeError or ValueError for what they cannot be."""
    check_tensors("cross_entropy", weight=weight)
    if weight.dtype not in DTYPES:
        raise TypeError(f"cross_entropy: weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
    if weight.shape != logits.shape[-1:]:
        raise ValueError(
            f"cross_entropy: weight must have the shape [{logits.shape[-1]}], one for each class, got {list(weight.shape)}"
        )
    check_device("cross_entropy", "weight", weight, "logits", logits)
    check_stored("cross_entropy", "weight", weight)
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError("cross_entropy: weight requires a gradient, and gets none here; pass weight.detach()")
    return weight.detach().contiguous()
