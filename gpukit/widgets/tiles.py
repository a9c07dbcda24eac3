"""Which program owns which elements: the blocks that a launch grid lays over a tensor, and the lanes that hang over.

    from gpukit.widgets.tiles import tiles

    tiles((13,), (4,))  # x [13] in blocks of 4
    tiles((6, 10), (4, 8))  # x [6, 10] in tiles of 4 x 8, grid (2, 2)

The arithmetic is that of a kernel: offs = program_id * BLOCK + arange(0, BLOCK), mask = offs < size, along each axis.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as widgets
import numpy as np

from gpukit.widgets import style

MAX_SIZE, MAX_BLOCK = 24, 16
_BLOCKS = (1, 2, 4, 8, 16)


class TileView(widgets.VBox):
    """Sliders for the tensor's sizes, the block sizes and the program to look at (arrow keys work), and a reset.

    A saved notebook keeps the picture of the program that was asked for.
    """

    def __init__(self, shape: tuple[int, ...], block: tuple[int, ...], program: int):
        self.initial = (shape, block, program)
        axes = ("M", "N")[-len(shape) :]
        options = {"style": {"description_width": "initial"}, "layout": {"width": "19em"}}
        self.sizes = [
            widgets.IntSlider(n, 1, MAX_SIZE, description=name, **options) for name, n in zip(axes, shape, strict=True)
        ]
        names = [f"BLOCK_{name}" for name in axes] if len(shape) > 1 else ["BLOCK"]
        self.blocks = [
            widgets.SelectionSlider(options=_BLOCKS, value=n, description=name, **options)
            for name, n in zip(names, block, strict=True)
        ]
        self.program = widgets.IntSlider(0, 0, 0, description="program", **options)
        self.reset_button = widgets.Button(description="reset", layout={"width": "6em"})
        self.board = widgets.HTML()
        rows = [widgets.HBox(pair) for pair in zip(self.sizes, self.blocks, strict=True)]
        super().__init__([*rows, widgets.HBox([self.program, self.reset_button]), self.board])

        self.program.max = self.programs - 1
        self.program.value = program
        for control in (*self.sizes, *self.blocks):
            control.observe(lambda _: self._resize(), "value")
        self.program.observe(lambda _: self._draw(), "value")
        self.reset_button.on_click(lambda _: self.reset())
        self._draw()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(slider.value for slider in self.sizes)

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(slider.value for slider in self.blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """Programs along each axis: the size divided by the block, rounded up."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid))

    @property
    def ids(self) -> tuple[int, ...]:
        """The program ids of the program in view. The grid's first axis moves fastest, as at a launch."""
        rest, ids = self.program.value, []
        for n in self.grid:
            rest, i = divmod(rest, n)
            ids.append(i)
        return tuple(ids)

    def reset(self) -> None:
        shape, block, program = self.initial
        for control, value in zip((*self.sizes, *self.blocks), (*shape, *block), strict=True):
            control.value = value
        self.program.value = program

    def _resize(self) -> None:
        self.program.max = self.programs - 1  # the slider moves its value inside by itself
        self._draw()

    def _draw(self) -> None:
        self.board.value = _board(self)

    def lanes(self) -> list[np.ndarray]:
        """Along each axis the offsets of the lanes of the program in view, those past the end included."""
        return [i * b + np.arange(b) for i, b in zip(self.ids, self.block, strict=True)]

    def sentence(self) -> str:
        """The program in view in words."""
        ends = [int(sum(offs < n)) for offs, n in zip(self.lanes(), self.shape, strict=True)]
        lanes, used = int(np.prod(self.block)), int(np.prod(ends))
        name = str(self.ids[0]) if len(self.ids) == 1 else str(self.ids)
        places = [
            f"{what} {offs[0]} to {offs[end - 1]}" if end > 1 else f"{what[:-1]} {offs[0]}"
            for what, offs, end in zip(("rows", "columns")[-len(ends) :], self.lanes(), ends, strict=True)
        ]
        if len(ends) == 1:
            places = [places[0].replace("column", "element")]
        text = f"Program {name} of grid {self.grid}: {_count(lanes, 'lane')}, {used} with an element"
        text += f", {lanes - used} masked off" if used < lanes else ""
        return f"{text} ({', '.join(places)})."

    def total(self) -> str:
        """The whole launch in words."""
        lanes, elements = self.programs * int(np.prod(self.block)), int(np.prod(self.shape))
        text = f"All together: {_count(self.programs, 'program')}, {_count(lanes, 'lane')} "
        return text + f"for {_count(elements, 'element')}, {lanes - elements} masked off."

    def __repr__(self) -> str:
        shape, block, program = self.initial
        tile = " x ".join(map(str, block))
        return f"tile viewer: a tensor {list(shape)} in blocks of {tile}, program {program}"

    def _repr_png_(self) -> tuple[bytes, dict]:  # where no kernel runs, on a repository's page for instance
        picture = self.picture()
        return picture.data, {"width": picture.width, "alt": picture.alt}

    def picture(self) -> style.Picture:
        """What is in view as a still."""
        return _picture(self)

    def cells(self) -> list[list[tuple[str, str]]]:
        """The board: for each lane its state ("other", "now", "masked" or "masked-now") and its text.

        A lane of the program in view shows its offset in memory, any other the program that owns it. One dimension is
        drawn with one line a program, two as they lie.
        """
        if len(self.shape) == 1:
            (n,), (b,) = self.shape, self.block
            return [
                [self._cell(p == self.ids[0], i < n, f"{i}", f"{p}") for i in range(p * b, p * b + b)]
                for p in range(self.programs)
            ]
        (rows, columns), (block_m, block_n) = self.shape, self.block
        return [
            [
                self._cell(
                    (m // block_m, n // block_n) == self.ids,
                    m < rows and n < columns,
                    f"{m * columns + n}",
                    f"{m // block_m},{n // block_n}",
                )
                for n in range(self.grid[1] * block_n)
            ]
            for m in range(self.grid[0] * block_m)
        ]

    @staticmethod
    def _cell(own: bool, exists: bool, offset: str, program: str) -> tuple[str, str]:
        if not exists:
            return ("masked-now" if own else "masked"), ""
        return ("now", offset) if own else ("other", program)

    def begins_tile(self, row: int, column: int) -> tuple[bool, bool]:
        """Whether a tile begins above this cell and to the left of it."""
        if len(self.shape) == 1:
            return True, column == 0
        return row % self.block[0] == 0, column % self.block[1] == 0

    def heads(self) -> list[str]:
        """What stands before each line."""
        if len(self.shape) == 1:
            return [f"program {p}" for p in range(self.programs)]
        return [f"row {m}" if m < self.shape[0] else "" for m in range(self.grid[0] * self.block[0])]


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
    programs = int(np.prod([-(-n // b) for n, b in zip(shape, block, strict=True)]))
    if not 0 <= program < programs:
        raise ValueError(f"tiles: program must be 0 to {programs - 1}, got {program}")
    return TileView(shape, block, program)


def _count(n: int, one: str) -> str:
    return f"{n} {one if n == 1 else one + 's'}"


# ---- the live board: HTML, which follows the page's theme -----------------------------------------------------------

_LINE = "var(--jp-border-color1, #bdbdbd)"
_INK = "var(--jp-content-font-color1, #262626)"
_CELL = "width:26px;min-width:26px;height:24px;padding:0;text-align:center;font-size:11px;line-height:22px;"
_HATCH = "repeating-linear-gradient(45deg,{0} 0 2px,transparent 2px 6px)"
_LOOKS = {
    "other": "background:none;",
    "now": f"background:{style.READS};color:#fff;font-weight:700;",
    "masked": f"background:{_HATCH.format(style.NEUTRAL + '80')};",
    "masked-now": f"background:{_HATCH.format(style.WASTE)};",
}
_WORDS = {
    "now": "lanes of the program in view, with their offsets",
    "masked-now": "its lanes without an element: masked off",
    "other": "elements of another program, with its number",
    "masked": "masked-off lanes of another program",
}


def _board(view: TileView) -> str:
    lines = []
    for row, (head, cells) in enumerate(zip(view.heads(), view.cells(), strict=True)):
        tds = "".join(_cell(view, row, column, *cell) for column, cell in enumerate(cells))
        look = "border:0;padding:0 6px 0 0;font-size:12px;white-space:nowrap;background:none"
        lines.append(f'<tr style="background:none"><td style="{look}">{head}</td>{tds}</tr>')
    table = "border-collapse:collapse;margin:4px 0;table-layout:auto"
    words = f"{html.escape(view.sentence())}<br>{html.escape(view.total())}"
    return (
        f'<div style="color:{_INK};line-height:1.5"><p style="margin:4px 0">{words}</p>'
        f'<div style="overflow-x:auto"><table style="{table}"><tbody>{"".join(lines)}</tbody></table></div>{_legend()}</div>'
    )


def _cell(view: TileView, row: int, column: int, state: str, text: str) -> str:
    lines, columns = len(view.heads()), len(view.lanes()[-1]) * (view.grid[-1] if len(view.grid) > 1 else 1)
    above, left = view.begins_tile(row, column)
    thick = {"top": above, "left": left, "bottom": row == lines - 1, "right": column == columns - 1}
    edges = "".join(
        f"border-{side}:{f'2px solid {_INK}' if on else f'1px solid {_LINE}'};" for side, on in thick.items()
    )
    return f'<td title="{_WORDS[state]}" style="{_CELL}{_LOOKS[state]}{edges}">{text}</td>'


def _legend() -> str:
    spans = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:1em;height:1em;vertical-align:-2px;'
        f'margin-right:4px;border:1px solid {_LINE};{_LOOKS[state]}"></span>{text}</span>'
        for state, text in _WORDS.items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;margin-top:6px">{spans}</div>'


# ---- the still -------------------------------------------------------------------------------------------------------


def _picture(view: TileView) -> style.Picture:
    from matplotlib.patches import Rectangle

    cells, heads = view.cells(), view.heads()
    rows, columns = len(cells), len(cells[0])
    margin = 3.4
    wide = max(columns + margin + 0.5, 20)
    high = rows + 2.4
    fig, ax = style.figure(height=8.0 * high / wide)
    ax.set_axis_off()
    ax.set(xlim=(-margin, wide - margin), ylim=(rows + 2.1, -0.3), aspect="equal")
    faces = {"other": "none", "now": style.READS, "masked": "none", "masked-now": "none"}
    for row, (head, line) in enumerate(zip(heads, cells, strict=True)):
        ax.text(-0.3, row + 0.5, head, ha="right", va="center", size=9)
        for column, (state, text) in enumerate(line):
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=faces[state], edgecolor=style.NEUTRAL, lw=0.6))
            if state.startswith("masked"):
                edge = style.WASTE if state == "masked-now" else style.NEUTRAL
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor="none", edgecolor=edge, lw=0, hatch="////"))
            ink = "white" if state == "now" else style.INK
            ax.text(column + 0.5, row + 0.52, text, ha="center", va="center", size=8, color=ink)
            above, left = view.begins_tile(row, column)
            for edge, ends in ((above, ((column, column + 1), (row, row))), (left, ((column, column), (row, row + 1)))):
                if edge:
                    ax.plot(*ends, color=style.INK, lw=1.8, solid_capstyle="butt")
    ax.plot((0, columns, columns), (rows, rows, 0), color=style.INK, lw=1.8)
    for line, text in enumerate((view.sentence(), view.total())):
        ax.text(-margin + 0.2, rows + 0.7 + 0.9 * line, text, ha="left", va="center", size=9)
    return style.picture(fig, alt=f"{view.sentence()} {view.total()}")
