"""The table of traced against measured traffic: gpukit/results/<gpu>/traffic.csv, and the bars it is held to.

Sectors are judged one by one. Of DRAM, what is read, and what is read and written together. What is written alone is
judged only where it is more than L2 can hold: the rest of what a kernel stores is still in L2 when it ends, and what
others had left there, up to 4 MB under ncu, may leave instead. L1's counters and those of atomics are shown only.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from gpukit import tables
from gpukit.validation.reasons import REASONS

RESULTS = Path(__file__).parents[1] / "results"
# What --kernels chooses -> the module with the cases, and the table among the results.
KERNELS = {
    "counted": ("gpukit.validation.counted_kernels", "traffic.csv"),
    "new": ("gpukit.validation.new_kernels", "halves_traffic.csv"),
    "third": ("gpukit.validation.third_set", "third_traffic.csv"),
    "fourth": ("gpukit.validation.fourth_set", "fourth_traffic.csv"),
    "fifth": ("gpukit.validation.fifth_set", "fifth_traffic.csv"),
    "sixth": ("gpukit.validation.sixth_set", "sixth_traffic.csv"),
    "seventh": ("gpukit.validation.seventh_set", "seventh_traffic.csv"),
    "eighth": ("gpukit.validation.eighth_set", "eighth_traffic.csv"),
    "ninth": ("gpukit.validation.ninth_set", "ninth_traffic.csv"),
    "tenth": ("gpukit.validation.tenth_set", "tenth_traffic.csv"),
    "eleventh": ("gpukit.validation.eleventh_set", "eleventh_traffic.csv"),
    "twelfth": ("gpukit.validation.twelfth_set", "twelfth_traffic.csv"),
}
# counter -> the deviation allowed on aligned and on unaligned kernels, and the least that is judged: below, a percentage
# says little, as the kernel's own code is fetched too, some 10 KB of it.
BARS = {
    "l2_read_sectors": (0.02, 0.05, 4096),
    "l2_write_sectors": (0.02, 0.05, 4096),
    "dram_read_bytes": (0.10, 0.10, 1_000_000),
    "dram_bytes": (0.10, 0.10, 1_000_000),
    "dram_write_bytes": (0.10, 0.10, 64_000_000),
}


@dataclass(frozen=True)
class Row:
    """One counter of one kernel; the fields are the columns of the CSV file. `bar` is the deviation allowed, 0 where the
    counter is shown and not judged. `triton` and `date` are those of the measurement."""

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
    def inside(self) -> bool:
        return not self.bar or 1 - self.bar <= self.ratio <= 1 + self.bar

    @property
    def reason(self) -> str:
        """Why it is not inside: on its GPU, or else on an H100, where most of these kernels were measured first; empty where that
        is not known."""
        if self.inside:
            return ""
        own = REASONS.get((self.kernel, self.counter, self.gpu))
        found = own or REASONS.get((self.kernel, self.counter), "")
        return f"of an H100: {found}" if found and not own and self.gpu != "h100-sxm" else found

    @property
    def unexplained(self) -> bool:
        return not self.inside and not self.reason


def row(
    kernel: str, counter: str, traced: float, measured: float, aligned: bool, gpu: str, triton: str, date: str
) -> Row:
    bar_aligned, bar_unaligned, least = BARS.get(counter, (0.0, 0.0, 0))
    bar = bar_aligned if aligned else bar_unaligned
    if max(traced, measured) < least:
        bar = 0.0
    ratio = traced / measured if measured else (1.0 if not traced else float("inf"))
    return Row(kernel, counter, round(traced), round(measured), round(ratio, 4), bar, gpu, triton, date)


def write(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f.name for f in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def read(path: Path) -> list[Row]:
    """Raises FileNotFoundError with what to run."""
    if not path.exists():
        raise FileNotFoundError(
            f"no such file: {path}; on a machine with that GPU run: python -m gpukit.validation --measure DIR"
        )
    numbers = {"traced": int, "measured": int, "ratio": float, "bar": float}
    with path.open(newline="") as file:
        return [Row(**{name: numbers.get(name, str)(text) for name, text in r.items()}) for r in csv.DictReader(file)]


def text(rows: list[Row], everything: bool = True) -> str:
    """The table, below it a reason for each miss, and how many rows are within their bars."""
    titles = ["kernel", "counter", "traced", "measured", "ratio", "bar", ""]
    cells = [
        [
            row.kernel, row.counter, f"{row.traced:,}", f"{row.measured:,}", f"{row.ratio:.3f}",
            f"{row.bar:.0%}" if row.bar else "-", "" if row.inside else "MISS",
        ]
        for row in rows
        if everything or not row.inside
    ]  # fmt: skip
    lines = tables.aligned([titles, *cells], right=range(2, 6), rules=[1])
    return "\n".join([*lines, "", *_misses(rows), *summary(rows)])


def _misses(rows: list[Row]) -> list[str]:
    """The reasons, each with the kernels and counters that it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        if not row.inside:
            about.setdefault(row.reason or "the reason is not known", []).append(f"{row.kernel} ({row.counter})")
    lines = [line for reason, names in about.items() for line in (f"MISS: {'; '.join(names)}", f"      {reason}")]
    return [*lines, *([""] if lines else [])]


def summary(rows: list[Row]) -> list[str]:
    """One line for each counter that is judged, and one for all."""
    lines = []
    for counter in BARS:
        judged = [row for row in rows if row.counter == counter and row.bar]
        if judged:
            inside = sum(row.inside for row in judged)
            worst = max(judged, key=lambda row: abs(row.ratio - 1))
            lines.append(
                f"{counter}: {inside} of {len(judged)} kernels within their bar; the worst is {worst.kernel}, "
                f"{worst.ratio:.3f}"
            )
    judged = [row for row in rows if row.bar]
    missing, unknown = sum(not row.inside for row in judged), sum(row.unexplained for row in judged)
    return [
        *lines,
        f"{len(judged)} rows judged: {len(judged) - missing} within their bar, {missing - unknown} outside with a reason, "
        f"{unknown} outside without",
    ]
