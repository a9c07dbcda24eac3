"""The table of traced against measured traffic: gpukit/results/<gpu>/traffic.csv, and the bars it is held to."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
BARS = {"l2_read_sectors": (0.02, 0.05), "l2_write_sectors": (0.02, 0.05)}  # aligned, unaligned
DRAM_BAR = 0.10
# Below these a percentage says nothing: the kernel's own code is fetched too, some 10 KB of it.
_SMALLEST = {"sectors": 4096, "bytes": 1_000_000}
# Why a row misses its bar: (kernel, counter) -> the reason, printed beside it.
REASONS: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Row:
    """One counter of one kernel; the fields are the columns of the CSV file. `bar` is the deviation allowed, 0 for a
    counter that is shown and not judged."""

    kernel: str
    counter: str
    traced: int
    measured: int
    ratio: float
    bar: float
    gpu: str
    triton: str
    date: str

    @property
    def judged(self) -> bool:
        least = _SMALLEST["bytes" if self.counter.endswith("bytes") else "sectors"]
        return self.bar > 0 and max(self.traced, self.measured) >= least

    @property
    def misses(self) -> bool:
        return self.judged and not 1 - self.bar <= self.ratio <= 1 + self.bar


def bar(counter: str, aligned: bool) -> float:
    if counter.startswith("dram"):
        return DRAM_BAR
    return BARS[counter][0 if aligned else 1] if counter in BARS else 0.0


def ratio(traced: float, measured: float) -> float:
    return traced / measured if measured else (1.0 if not traced else float("inf"))


def write(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(f.name for f in fields(Row))
        for row in rows:
            values = {f.name: getattr(row, f.name) for f in fields(Row)}
            writer.writerow(f"{row.ratio:.4f}" if name == "ratio" else value for name, value in values.items())


def read(path: Path) -> list[Row]:
    """Raises FileNotFoundError with what to run."""
    if not path.exists():
        raise FileNotFoundError(
            f"no such file: {path}; on a machine with that GPU run: python -m gpukit.validation --measure"
        )
    with path.open(newline="") as file:
        return [
            Row(
                r["kernel"], r["counter"], int(r["traced"]), int(r["measured"]), float(r["ratio"]), float(r["bar"]),
                r["gpu"], r["triton"], r["date"],
            )
            for r in csv.DictReader(file)
        ]  # fmt: skip


def text(rows: list[Row], everything: bool = True) -> str:
    """The table and, below it, how many rows are within their bars."""
    shown = [row for row in rows if everything or row.misses]
    titles = ["kernel", "counter", "traced", "measured", "ratio", "bar", ""]
    cells = [
        [
            row.kernel, row.counter, f"{row.traced:,}", f"{row.measured:,}", f"{row.ratio:.3f}",
            f"{row.bar:.0%}" if row.judged else "-", "MISS" if row.misses else "",
        ]
        for row in shown
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in [titles, *cells]) for i in range(len(titles))]
    lines = []
    for line in [titles, *cells]:
        padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    reasons = [
        f"{row.kernel}, {row.counter}: {REASONS.get((row.kernel, row.counter), 'reason not known')}"
        for row in shown
        if row.misses
    ]
    return "\n".join([*lines, "", *reasons, *([""] if reasons else []), *summary(rows)])


def summary(rows: list[Row]) -> list[str]:
    lines = []
    for counter in dict.fromkeys(row.counter for row in rows if row.bar):
        judged = [row for row in rows if row.counter == counter and row.judged]
        within = [row for row in judged if not row.misses]
        worst = max(judged, key=lambda row: abs(row.ratio - 1), default=None)
        text = f"{counter}: {len(within)} of {len(judged)} kernels within their bar"
        lines.append(text + (f"; the worst is {worst.kernel}, {worst.ratio:.3f}" if worst else ""))
    return lines
