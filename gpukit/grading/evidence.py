"""What a check saw, as the ideas of an exercise and the words of a diagnosis look at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpukit.grading.messages import Reply

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.exercise import Case
    from gpukit.testing import Mismatch


@dataclass
class Outcome:
    """One case after its run. `wrong` is None where the result is right."""

    case: Case
    reply: Reply
    wrong: Wrong | None = None


@dataclass
class Wrong:
    """How the result of one case differs: `kind` "values" or a label such as "shape"; `text` says so in a sentence."""

    kind: str
    text: str
    output: str = "y"
    actual: Any = None
    expected: Any = None
    mismatch: Mismatch | None = None


class Evidence:
    """What a misconception may look at. `outputs` and `expected` are of the first case that failed."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        self.first = next(outcome for outcome in outcomes if outcome.wrong)
        self.failed = tuple(outcome.case for outcome in outcomes if outcome.wrong)
        self.passed = tuple(outcome.case for outcome in outcomes if not outcome.wrong)
        self.case = self.first.case
        self.kind = self.first.wrong.kind
        self.output = self.first.wrong.output
        self.outputs = self.first.wrong.actual
        self.expected = self.first.wrong.expected

    def tag(self, name: str) -> bool:
        """Every case that failed has this tag and none that passed."""
        return all(name in case.tags for case in self.failed) and not any(name in case.tags for case in self.passed)

    def near(self, share: float) -> bool:
        """Off by less than `share` of the largest element: what a dtype loses, and nothing else."""
        yours, right = self.outputs.double(), self.expected.double()
        return bool((yours - right).abs().max() < share * right.abs().max())

    @cached_property
    def row_ratio(self) -> Tensor | None:
        """yours / expected per row, [..., 1], if each row is the expected one times a constant and one constant is not 1. A
        single number is always some multiple of another."""
        if self.kind != "values" or not hasattr(self.outputs, "untyped_storage"):
            return None
        import torch

        yours, right = self.outputs.double(), self.expected.double()
        if (
            yours.ndim == 0
            or yours.shape[-1] < 2
            or not bool(torch.isfinite(yours).all() & torch.isfinite(right).all())
        ):
            return None
        ratio = yours.sum(-1, keepdim=True) / right.sum(-1, keepdim=True)
        eps = torch.finfo(self.outputs.dtype).eps if self.outputs.dtype.is_floating_point else 1e-6
        close = torch.allclose(yours, right * ratio, rtol=4 * eps, atol=4 * eps * float(right.abs().max()))
        moved = bool(((ratio - 1).abs() > 16 * eps).any())
        return ratio if close and moved and bool(torch.isfinite(ratio).all()) else None

    @cached_property
    def ratio(self) -> float | None:
        """yours / expected, if that is one constant."""
        rows = self.row_ratio
        if rows is None or float(rows.max() - rows.min()) > 1e-2 * abs(float(rows.mean())):
            return None
        return float(rows.mean())
