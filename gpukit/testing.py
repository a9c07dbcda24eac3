"""The one tolerance rule of the project, and buffers that notice a stray write. Tests, checks and benchmarks all use these.

The rule compares with float64 and needs no hand-tuned number: a kernel may be as wrong as twice PyTorch in the same dtype,
plus a few units of rounding of the row's (a gradient: of the tensor's) largest value. After the tests of FlashAttention,
https://github.com/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUT_EPS = 2
GRADIENT_EPS = 16
# A GPU's own exp and division in float32 are good to 2 units of rounding each (PTX ISA: ex2.approx, div.full). On an H200
# one element of 17 million of PyTorch's own float32 softmax is outside the bound without this. Nothing in 16 bits.
INTRINSIC_EPS = 4


@dataclass(frozen=True)
class Mismatch:
    """The worst element of a tensor that is outside its bound."""

    index: tuple[int, ...]
    expected: float
    actual: float
    bound: float
    wrong: int  # elements outside their bound
    total: int

    def __str__(self) -> str:
        return (
            f"element {list(self.index)}: expected {self.expected:.6g}, got {self.actual:.6g}, allowed error "
            f"{self.bound:.2g}; {self.wrong} of {self.total} elements are outside their bound"
        )


def error_bound(truth: Tensor, native: Tensor, *, gradient: bool = False) -> Tensor:
    """The largest error allowed in each element, float64.

    truth   the reference computed in float64
    native  the reference computed by PyTorch in the dtype under test
    An output is judged row by row (a row is the last dimension). A gradient is judged as a whole, since a row whose terms
    cancel has no scale of its own.
    """
    finite = torch.isfinite(truth) & torch.isfinite(native.double())
    zero = torch.zeros((), dtype=torch.float64, device=truth.device)
    error = torch.where(finite, (native.double() - truth).abs(), zero)
    size = torch.where(torch.isfinite(truth), truth.abs(), zero)
    eps = torch.finfo(native.dtype).eps if native.dtype.is_floating_point else 0.0  # integers are exact
    slack = INTRINSIC_EPS * torch.finfo(torch.float32).eps if eps > 1e-10 else 0.0  # not for float64
    if truth.numel() == 0:
        return size
    if gradient or truth.ndim == 0:
        units = GRADIENT_EPS if gradient else OUTPUT_EPS
        return torch.full_like(size, 2 * error.max() + (units * eps + slack) * size.max())
    row = 2 * error.amax(-1, keepdim=True) + (OUTPUT_EPS * eps + slack) * size.amax(-1, keepdim=True)
    return row.expand_as(size)


def compare(actual: Tensor, truth: Tensor, native: Tensor, *, gradient: bool = False) -> Mismatch | None:
    """The worst violation of the rule in `actual`, or None. All three have one shape; NaN matches only NaN, and an infinity
    only the same infinity (or what PyTorch gives in that dtype, where float64 does not overflow and the dtype does). They
    are compared where `truth` is."""
    truth = truth.detach().double()
    actual, native = actual.detach().to(truth.device), native.detach().to(truth.device)
    if actual.numel() == 0:
        return None
    bound = error_bound(truth, native, gradient=gradient)
    value = actual.double()
    error = (value - truth).abs()
    finite = torch.isfinite(truth)
    same = (value == truth) | (value == native.double()) | (torch.isnan(value) & torch.isnan(truth))
    return _worst(~torch.where(finite, (error <= bound) | same, same), value, truth, bound)


def compare_rounded(actual: Tensor, truth: Tensor, single: Tensor, *, gradient: bool = False) -> Mismatch | None:
    """The worst element of `actual`, in 16 bits, that is not a number of float32 arithmetic rounded once; or None.

    single  the reference computed by PyTorch in float32
    Before it was rounded, the number may have been off by 64 times what the rule allows in float32. All that kernels may do
    otherwise in float32 disappears in that; it is still less than a tenth of the rounding to 16 bits.
    """
    truth = truth.detach().double()
    value = actual.detach().to(truth.device).double()
    if actual.numel() == 0 or actual.dtype.itemsize != 2 or not actual.dtype.is_floating_point:
        return None
    slack = 64 * error_bound(truth, single.detach().to(truth.device), gradient=gradient)
    lowest, highest = ((truth + off).to(actual.dtype).double() for off in (-slack, slack))
    wrong = torch.isfinite(truth) & ~((lowest <= value) & (value <= highest))
    return _worst(wrong, value, truth.to(actual.dtype).double(), (highest - lowest) / 2)


def _worst(wrong: Tensor, value: Tensor, truth: Tensor, bound: Tensor) -> Mismatch | None:
    if not bool(wrong.any()):
        return None
    error = (value - truth).abs()
    excess = torch.where(wrong, torch.nan_to_num(error / bound.clamp_min(1e-300), nan=torch.inf), -1.0)
    at = int(excess.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), truth.shape))
    return Mismatch(
        index, float(truth[index]), float(value[index]), float(bound[index]), int(wrong.sum()), truth.numel()
    )


def assert_close(
    actual: Tensor, truth: Tensor, native: Tensor, *, gradient: bool = False, what: str = "result"
) -> None:
    """Raise AssertionError unless `actual` is a plain tensor of native's shape and dtype whose values meet the rule."""
    if type(actual) is not Tensor:
        raise AssertionError(f"{what}: expected a torch.Tensor, got {type(actual).__name__}")
    if actual.shape != native.shape or actual.dtype != native.dtype:
        raise AssertionError(
            f"{what}: expected {list(native.shape)} {native.dtype}, got {list(actual.shape)} {actual.dtype}"
        )
    mismatch = compare(actual, truth, native, gradient=gradient)
    if mismatch is not None:
        raise AssertionError(f"{what}: {mismatch}")


def poison(tensor: Tensor) -> Tensor:
    """Fill with what no correct kernel leaves behind: NaN, or the largest integer. In place; returns the tensor."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last, what lies between them included. No stride is below 0."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def guarded(x: Tensor, stride: tuple[int, ...] | None = None, band: int | None = None) -> tuple[Tensor, Callable]:
    """A copy of x inside a poisoned buffer, and a function that raises if anything but the copy's elements was written.

    stride  of the copy, in elements (default: contiguous); gaps between its rows are poisoned too
    band    poisoned elements before and after (default: x's largest row, at least 4,096), so that a store without its
            mask lands in the band and not in somebody else's memory
    """
    stride = x.contiguous().stride() if stride is None else stride
    band = max(4096, x.shape[-1] if x.ndim else 1) if band is None else band
    span = span_of(x.shape, stride)
    buffer = poison(torch.empty(span + 2 * band, dtype=x.dtype, device=x.device))
    view = buffer.as_strided(x.shape, stride, band)
    view.copy_(x)
    ours = torch.zeros(buffer.shape, dtype=torch.bool, device=x.device)
    ours.as_strided(x.shape, stride, band).fill_(True)
    before = buffer.clone()

    def verify(name: str = "tensor") -> None:
        width = buffer.element_size()
        changed = (buffer.view(torch.uint8).view(-1, width) != before.view(torch.uint8).view(-1, width)).any(-1) & ~ours
        if bool(changed.any()):
            first = int(changed.nonzero()[0]) - band
            raise AssertionError(
                f"{int(changed.sum())} elements outside {name} {list(x.shape)} were written; first at offset {first}"
            )

    return view, verify


def guarded_empty(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Callable]:
    """A poisoned output between poisoned bands, and its `verify`: see `guarded`."""
    return guarded(poison(torch.empty(shape, dtype=dtype, device=device)))
