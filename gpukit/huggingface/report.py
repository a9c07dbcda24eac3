"""What `gpukit.patch` did to a model: a table of what was replaced, what was not and why, and which calls fell back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from gpukit.tables import aligned

PARTS = ("norms", "rope", "mlp", "attention", "loss")


@dataclass
class Report:
    """What was replaced in one model. Printing it shows three tables; the last one grows while the model runs.

    model      the class of the model that was patched
    options    which parts were asked for: {"norms": True, "rope": True, ...}
    replaced   how many modules: {(part, class of the module, name of the kernel): count}
    kept       modules that stay as they were: {(part, class of the module, reason): count}
    fallbacks  calls that a replaced module handed to the original code: {(part, reason): count}. Inside torch.compile
               nothing is counted.
    """

    model: str
    options: dict[str, bool]
    replaced: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    kept: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, part: str) -> int:
        """How many modules have a kernel for `part`, one of "norms", "rope", "mlp", "attention" and "loss"."""
        return sum(n for (of, _, _), n in self.replaced.items() if of == part)

    def fell_back(self, part: str, reason: str) -> None:
        """Count one call that goes to the original code."""
        if not torch.compiler.is_compiling():
            self.fallbacks[part, reason] += 1

    def __str__(self) -> str:
        tables = [
            _table(("replaced", "module", "kernel", "modules"), self.replaced),
            _table(("not replaced", "module", "reason", "modules"), self.kept),
            _table(("fell back", "reason", "calls"), self.fallbacks),
        ]
        return "\n\n".join([f"gpukit.patch: {self.model}", *filter(None, tables)])

    __repr__ = __str__  # what a notebook shows for the last line of a cell


def _table(title: tuple[str, ...], rows: Counter) -> str:
    if not rows:
        return ""
    ordered = sorted(rows, key=lambda row: (PARTS.index(row[0]), row[1:]))
    lines = [title, *((*row, f"{rows[row]:,}") for row in ordered)]
    return "\n".join(aligned(lines, right=[len(title) - 1]))
