"""Which pieces of A and B are in L2 while a tiled matmul runs, row by row or in groups.

    from gpukit.widgets.cache import cache

    cache(tiles=9, sms=9, capacity=54, group_m=3, still=40)

A toy: a GPU with a handful of SMs and an L2 that holds a few pieces, so that each of them can be drawn. The steps come from
gpukit.accounting.tiling.play; this draws them.
"""

from __future__ import annotations

import traitlets

from gpukit.accounting.tiling import CacheStep, Tile, hit_rate, play
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Shape, Words
from gpukit.widgets.view import Walk, menu

MAX_TILES = 12
_BOARD = 430  # pixels of A beside B above C
_MISSED, _FOUND, _HELD = (style.READS, 1.0), (style.READS, 0.5), (style.READS, 0.25)


class CacheView(Walk):
    """`group_m`, `capacity` (pieces that L2 holds) and `step` are traits."""

    group_m = traitlets.Int(1)
    capacity = traitlets.Int(54)

    def __init__(self, tiles: int, sms: int, capacity: int, group_m: int, still: int):
        self.tiles, self.sms = tiles, sms
        self._played: dict[tuple[int, int], list[CacheStep]] = {}
        self.groups = [g for g in sorted({1, 2, 3, 4, tiles, group_m}) if g <= tiles]
        names = {1: "1: row by row", tiles: f"{tiles}: column by column"}
        sizes = sorted({tiles * f // 2 for f in (2, 4, 8, 12, 20, 4 * tiles)} | {capacity})
        controls = {
            "group_m": menu("GROUP_M (rows of tiles)", [(names.get(g, str(g)), g) for g in self.groups], 300),
            "capacity": menu("L2 holds", [(f"{n} pieces", n) for n in sizes], 160),
        }
        start = {"group_m": group_m, "capacity": capacity}
        last = len(self._steps(group_m, capacity))
        super().__init__(controls, start, still={"step": min(max(still, 0), last)})

    def _steps(self, group_m: int, capacity: int) -> list[CacheStep]:
        key = group_m, capacity
        if key not in self._played:
            n = self.tiles
            self._played[key] = play(n, n, n, group_m=group_m, slots=self.sms, capacity=capacity)
        return self._played[key]

    def last(self) -> int:
        return len(self._steps(self.group_m, self.capacity))

    def _sentence(self, group_m: int, capacity: int, number: int) -> str:
        steps = self._steps(group_m, capacity)
        if number == 0:
            n = self.tiles
            return (
                f"Before the launch: {n * n} programs, {self.sms} at a time, each of {n} steps along K. "
                f"L2 is empty and holds {capacity} pieces. Step forward"
            )
        step = steps[number - 1]
        first = step.wave * self.sms
        return (
            f"Wave {step.wave + 1} of {steps[-1].wave + 1}, step {step.k + 1} of {self.tiles} along K: programs {first} to "
            f"{first + len(step.programs) - 1} ask. Their {step.requests} requests are for {len(step.missed) + len(step.found)} "
            f"different pieces: {len(step.missed)} come from memory, {len(step.found)} were in L2. "
            f"So far {_reads(steps[:number])} pieces read, hit rate {hit_rate(steps[:number]):.0%}"
        )

    def drawing(self, group_m: int, capacity: int, step: int) -> Drawing:
        steps, words = self._steps(group_m, capacity), self._sentence(group_m, capacity, step)
        first, rest = words.split(". ", 1)
        shapes = board.heading(f"{first}.", f"{rest}.")
        top = 62
        shapes += _matrices(steps, step, self.tiles, 10, top)
        totals = {g: self._steps(g, capacity) for g in self.groups}
        shapes += _totals(totals, group_m, step, self.tiles, 10 + _BOARD + 30, top)
        keys, bottom = board.legend(
            [
                (Box(0, 0, 0, 0, *_MISSED, text="M", ink=board.LIGHT, bold=True), "now read from memory"),
                (Box(0, 0, 0, 0, *_FOUND, edge=board.INK, text="2"), "asked for and found in L2"),
                (Box(0, 0, 0, 0, *_HELD, edge=board.LINE), "in L2"),
                (Box(0, 0, 0, 0, style.COMPUTE), "computed now"),
                (Box(0, 0, 0, 0, style.NEUTRAL, 0.6), "done"),
            ],
            10, top + _BOARD + 22, WIDTH - 20,
        )  # fmt: skip
        return Drawing([*shapes, *keys], bottom, f"{words}.")

    def __repr__(self) -> str:
        start, n = self._start, self.tiles
        return (
            f"cache viewer: {n} x {n} programs of {n} steps, {self.sms} at a time, L2 of {start['capacity']} pieces, "
            f"GROUP_M = {start['group_m']}"
        )


def cache(tiles: int = 9, sms: int = 9, capacity: int = 54, group_m: int = 1, still: int = 0) -> CacheView:
    """Walk through a matmul of tiles x tiles programs, each with `tiles` steps along K, `sms` of them at a time.

    capacity  pieces of A and B that L2 holds, each as large as a tile of the drawing
    group_m   rows of tiles in a group of programs; 1 is row by row
    still     the step that a saved notebook shows
    Raises ValueError for more than 12 tiles, and for a number below 1 or a group_m above `tiles`.
    """
    limits = {"tiles": (tiles, MAX_TILES), "sms": (sms, tiles * tiles), "capacity": (capacity, 2 * MAX_TILES**2)}
    for name, (value, most) in {**limits, "group_m": (group_m, tiles)}.items():
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"cache: {name} must be a whole number from 1 to {most}, got {value!r}")
    return CacheView(tiles, sms, capacity, group_m, still)


def _reads(steps: list[CacheStep]) -> int:
    return sum(len(step.missed) for step in steps)


# ---- the picture -----------------------------------------------------------------------------------------------------


def _matrices(steps: list[CacheStep], number: int, n: int, left: float, top: float) -> list[Shape]:
    """A to the left of C and B above it, so that a tile of C lies where its row of A meets its column of B."""
    cell = _BOARD / (2 * n + 1)
    now = steps[number - 1] if number else None
    far = (n + 1) * cell
    shapes: list[Shape] = [
        Words(left, top + far - 14, "A", bold=True, size=14),
        Words(left + far - 16, top + 8, "B", bold=True, size=14),
        Words(left + far - 16, top + far - 14, "C", bold=True, size=14),
    ]
    for i in range(n):
        for j in range(n):
            shapes.append(_tile(now, ("A", i, j), left + j * cell, top + far + i * cell, cell))
            shapes.append(_tile(now, ("B", i, j), left + far + j * cell, top + i * cell, cell))
    before = {p for step in steps[: max(0, number - 1)] if now and step.wave < now.wave for p in step.programs}
    first = now.wave * len(steps[0].programs) if now else 0
    ids = {program: first + i for i, program in enumerate(now.programs)} if now else {}
    for i in range(n):
        for j in range(n):
            at = left + far + j * cell, top + far + i * cell, cell, cell
            if (i, j) in ids:
                look = {"fill": style.COMPUTE, "text": str(ids[i, j]), "ink": board.LIGHT, "size": 10, "bold": True}
            else:
                look = {"fill": style.NEUTRAL, "opacity": 0.6} if (i, j) in before else {}
            shapes.append(Box(*at, edge=board.LINE, **look))
    return shapes


def _tile(now: CacheStep | None, tile: Tile, x: float, y: float, cell: float) -> Box:
    name = f"{tile[0]} {tile[1]}, {tile[2]}"
    if now and tile in now.missed:
        fill, opacity = _MISSED
        look = {"text": "M", "ink": board.LIGHT, "bold": True, "edge": board.INK}
    elif now and tile in now.found:
        (fill, opacity), look = _FOUND, {"text": "2", "edge": board.INK}
    elif now and tile in now.held:
        (fill, opacity), look = _HELD, {"edge": board.LINE}
    else:
        fill, opacity, look = "none", 1.0, {"edge": board.LINE}
    return Box(x, y, cell, cell, fill, opacity, size=11, title=name, **look)


def _totals(
    totals: dict[int, list[CacheStep]], chosen: int, number: int, n: int, left: float, top: float
) -> list[Shape]:
    """What each order reads from memory by this step (filled) and in the end (outline)."""
    shapes: list[Shape] = [Words(left, top + 8, "pieces read from memory, by GROUP_M", bold=True)]
    most = max(_reads(steps) for steps in totals.values())
    wide = WIDTH - 10 - left - 140
    for i, (group, steps) in enumerate(totals.items()):
        y = top + 34 + 34 * i
        total, now = _reads(steps), _reads(steps[:number])
        shapes.append(Words(left, y + 10, str(group), bold=group == chosen, size=13))
        shapes.append(Box(left + 24, y, wide * now / most, 20, style.READS, 1.0 if group == chosen else 0.45))
        shapes.append(
            Box(left + 24, y, wide * total / most, 20, edge=board.INK, edge_width=2 if group == chosen else 1)
        )
        text = f"{total:,}  ({hit_rate(steps):.0%} hits)"
        shapes.append(Words(WIDTH - 10, y + 10, text, "right", size=11, bold=group == chosen))
    y = top + 34 + 34 * len(totals) + 8
    shapes.append(Words(left, y, "filled: by this step; outline: in the end"))
    shapes.append(Words(left, y + 20, f"the least: {2 * n * n} pieces, each once"))
    return shapes
