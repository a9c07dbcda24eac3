"""Which program owns which elements: the blocks that a launch grid lays over a tensor, and the lanes that hang over.

    from gpukit.widgets.tiles import tiles

    tiles((13,), (4,))  # x [13] in blocks of 4
    tiles((6, 10), (4, 8))  # x [6, 10] in tiles of 4 x 8, grid (2, 2)

The arithmetic is a kernel's: offs = program_id * BLOCK + arange(0, BLOCK), mask = offs < size, along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets
import traitlets

from gpukit.accounting.tiling import Grid
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Shape, Words
from gpukit.widgets.view import CAPTION, View, slider

MAX_SIZE, MAX_BLOCK = 24, 16
_BLOCKS = (1, 2, 4, 8, 16)
_LEFT, _CELL = 90, 26  # pixels: where the lanes begin, and of each at most
_LOOKS = {
    "now": {"fill": style.READS, "ink": board.LIGHT, "bold": True},
    "masked-now": {"hatch": style.WASTE},
    "other": {},
    "masked": {"hatch": style.NEUTRAL},
}
_WORDS = {
    "now": "lanes of the program in view, with their offsets",
    "masked-now": "its lanes without an element: masked off",
    "other": "elements of another program, with its number",
    "masked": "masked-off lanes of another program",
}


class TileView(View):
    """The tensor's sizes `M` and `N`, the block's `BLOCK_M` and `BLOCK_N` and the `program` to look at are traits; a tensor
    [N] has no M."""

    M = traitlets.Int(1)
    N = traitlets.Int(1)
    BLOCK_M = traitlets.Int(1)
    BLOCK_N = traitlets.Int(1)
    program = traitlets.Int(0)

    def __init__(self, shape: tuple[int, ...], block: tuple[int, ...], program: int):
        axes = ("M", "N")[-len(shape) :]
        sizes = {name: slider(name, 1, MAX_SIZE, 250) for name in axes}
        blocks = {
            f"BLOCK_{name}": widgets.SelectionSlider(
                options=_BLOCKS, description=f"BLOCK_{name}" if len(axes) > 1 else "BLOCK", style=CAPTION,
                layout={"width": "250px"},
            )
            for name in axes
        }  # fmt: skip
        start = {**dict(zip(sizes, shape, strict=True)), **dict(zip(blocks, block, strict=True)), "program": program}
        last = Grid(shape, block).programs - 1
        super().__init__({**sizes, "program": slider("program", 0, last, 250), **blocks}, start)

    def adapt(self) -> None:
        self.controls["program"].max = self.grid.programs - 1

    @property
    def grid(self) -> Grid:
        return _grid(**self.values())

    def drawing(self, program: int, **sizes: int) -> Drawing:
        grid = _grid(**sizes)
        words = sentence(grid, program), total(grid)
        shapes: list[Shape] = [Words(10, 16 + 18 * i, text) for i, text in enumerate(words)]
        lines, top = cells(grid, program), 54
        wide = min(_CELL, (WIDTH - _LEFT - 10) / len(lines[0]))
        for row, (head, line) in enumerate(zip(_heads(grid), lines, strict=True)):
            y = top + row * wide
            shapes.append(Words(_LEFT - 8, y + wide / 2, head, "right"))
            for column, (state, text) in enumerate(line):
                size = board.fits(text, wide)
                look = {"edge": board.LINE, "text": text, "size": size, "title": _WORDS[state], **_LOOKS[state]}
                shapes.append(Box(_LEFT + column * wide, y, wide, wide, **look))
        high, long = grid.block if len(grid.block) > 1 else (1, *grid.block)
        frame = {"edge": board.INK, "edge_width": 2}
        for row in range(0, len(lines), high):
            for column in range(0, len(lines[0]), long):
                shapes.append(Box(_LEFT + column * wide, top + row * wide, long * wide, high * wide, **frame))
        looks = [(Box(0, 0, 0, 0, edge=board.LINE, **_LOOKS[state]), text) for state, text in _WORDS.items()]
        keys, bottom = board.legend(looks, 10, top + len(lines) * wide + 24, WIDTH - 20)
        return Drawing([*shapes, *keys], bottom, " ".join(words))

    def __repr__(self) -> str:
        program = self._start["program"]
        grid = _grid(**self._start)
        tile = " x ".join(map(str, grid.block))
        return f"tile viewer: a tensor {list(grid.shape)} in blocks of {tile}, program {program}"


def _grid(**sizes: int) -> Grid:
    shape, block = (tuple(sizes[n] for n in names if n in sizes) for names in (("M", "N"), ("BLOCK_M", "BLOCK_N")))
    return Grid(shape, block)


def tiles(shape: Sequence[int], block: Sequence[int], program: int = 0) -> TileView:
    """Show how a grid of programs covers a tensor.

    shape    [N] or [M, N], each from 1 to 24
    block    BLOCK, or BLOCK_M and BLOCK_N: powers of two from 1 to 16
    program  the one in view, counted as at a launch: the grid's first axis moves fastest
    Raises ValueError for anything else.
    """
    shape, block = tuple(shape), tuple(block)
    if len(shape) not in (1, 2) or len(block) != len(shape):
        raise ValueError(f"tiles: shape and block must both have one or two numbers, got {shape} and {block}")
    if not all(1 <= n <= MAX_SIZE for n in shape):
        raise ValueError(f"tiles: each size must be 1 to {MAX_SIZE}, got shape {shape}")
    if not all(b in _BLOCKS for b in block):
        raise ValueError(f"tiles: each block size must be one of {_BLOCKS}, got {block}")
    programs = Grid(shape, block).programs
    if not 0 <= program < programs:
        raise ValueError(f"tiles: program must be 0 to {programs - 1}, got {program}")
    return TileView(shape, block, program)


# ---- in words --------------------------------------------------------------------------------------------------------


def sentence(grid: Grid, program: int) -> str:
    """One program in words."""
    ids, owns = grid.ids(program), grid.owns(program)
    lanes, used = math.prod(grid.block), math.prod(map(len, owns))
    name = str(ids[0]) if len(ids) == 1 else str(ids)
    kinds = ("elements",) if len(ids) == 1 else ("rows", "columns")
    places = [
        f"{what} {own[0]} to {own[-1]}" if len(own) > 1 else f"{what[:-1]} {own[0]}"
        for what, own in zip(kinds, owns, strict=True)
    ]
    text = f"Program {name} of grid {grid.size}: {_count(lanes, 'lane')}, {used} with an element"
    text += f", {lanes - used} masked off" if used < lanes else ""
    return f"{text} ({', '.join(places)})."


def total(grid: Grid) -> str:
    """The whole launch in words."""
    lanes, elements = grid.programs * math.prod(grid.block), math.prod(grid.shape)
    text = f"All together: {_count(grid.programs, 'program')}, {_count(lanes, 'lane')} "
    return text + f"for {_count(elements, 'element')}, {lanes - elements} masked off."


def _count(n: int, one: str) -> str:
    return f"{n} {one if n == 1 else one + 's'}"


# ---- lane by lane ----------------------------------------------------------------------------------------------------


def cells(grid: Grid, program: int) -> list[list[tuple[str, str]]]:
    """For each lane its state, a key of _LOOKS, and its text: its offset in memory where the program in view owns it, else
    the program that does. One dimension is drawn with one line a program, two as they lie."""
    ids = grid.ids(program)
    if len(ids) == 1:
        (n,), (b,) = grid.shape, grid.block
        return [
            [_cell(p == ids[0], i < n, f"{i}", f"{p}") for i in range(p * b, p * b + b)] for p in range(grid.programs)
        ]
    (rows, columns), (block_m, block_n) = grid.shape, grid.block
    return [
        [
            _cell(
                (m // block_m, n // block_n) == ids,
                m < rows and n < columns,
                f"{m * columns + n}",
                f"{m // block_m},{n // block_n}",
            )
            for n in range(grid.size[1] * block_n)
        ]
        for m in range(grid.size[0] * block_m)
    ]


def _cell(own: bool, exists: bool, offset: str, program: str) -> tuple[str, str]:
    if not exists:
        return ("masked-now" if own else "masked"), ""
    return ("now", offset) if own else ("other", program)


def _heads(grid: Grid) -> list[str]:
    """What stands before each line."""
    if len(grid.shape) == 1:
        return [f"program {p}" for p in range(grid.programs)]
    return [f"row {m}" if m < grid.shape[0] else "" for m in range(grid.size[0] * grid.block[0])]
