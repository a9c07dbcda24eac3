"""What was measured on an H200 and is kept in gpukit/results, as the lessons need it: a lesson also opens where nothing is
recorded."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import NamedTuple

from gpukit import benchmark
from gpukit.hardware import gpu


def rows(name: str, key: str = "h200") -> list[benchmark.Row]:
    """The rows of gpukit/results/<key>/<name>.csv; none where nothing is recorded."""
    try:
        return benchmark.rows(name, key)
    except FileNotFoundError:
        return []


def anywhere(name: str) -> list[benchmark.Row]:
    """The rows of an H200, or where there are none those of an H100: all of one GPU. None where nothing is recorded."""
    return rows(name) or rows(name, "h100-sxm")


def days(wanted: Callable[[benchmark.Row], bool], *names: str) -> str:
    """When the rows of these files that are wanted were measured on an H200: a day, or the first and the last one."""
    return benchmark.when(row for name in names for row in rows(name) if wanted(row))


def short(row: benchmark.Row) -> str:
    """The GPU of a row in a sentence: "H100"."""
    return benchmark.gpu_key(row.gpu).partition("-")[0].upper()


def copy_gbps(name: str) -> float:
    """GB/s at which memory was copied in the run of these rows; the data sheet's where no run is recorded."""
    return next((row.gbps for row in rows(name) if row.op == "copy"), gpu("h200").hbm_gbps)


def copy_us(name: str, moved: float) -> float:
    """Microseconds in which a copy moves `moved` bytes at that rate."""
    return moved / copy_gbps(name) / 1e3


class Kept(NamedTuple):
    """Microseconds of long rows on one GPU: read once, because they are kept on an SM or in parts on several, and by the kernels
    that read them twice."""

    kept: float
    others: float | None  # None where they were not measured beside it
    copy: float | None  # of as many bytes as one read and one write; None where it was not measured


def long_rows(gpu: str = "h100-sxm") -> dict[tuple[str, tuple[int, ...]], Kept]:
    """By operation and shape: the rows of gpukit/results/<gpu>/long_rows.csv, the best way to keep a row for each, on one SM
    or in parts, whole or in pieces; none where nothing is recorded."""
    path = benchmark.RESULTS / gpu / "long_rows.csv"
    if not path.exists():
        return {}
    times: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = tuple(map(int, row["shape"].split("x")))
            way, us = row["way"].replace(",", " ").split()[0], float(row["median_us"])
            way = "kept" if way in ("parts", "pieces") else way
            found = times.setdefault((row["operation"], shape), {})
            found[way] = min(us, found.get(way, us))
    return {
        key: Kept(ways["kept"], ways.get("others"), ways.get("copy")) for key, ways in times.items() if "kept" in ways
    }
