"""FlashAttention block by block: which blocks of the scores are whole, cut or left out, and what a row holds meanwhile.

    from gpukit.widgets.attention import attention

    attention(scores, values, block=(4, 4), mask="causal")

Scores and values go in; gpukit.accounting.attention says what is seen and what online softmax makes of it; this draws it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import traitlets

from gpukit.accounting.attention import Blocks, State
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Shape, Words
from gpukit.widgets.view import Walk, menu, slider

MASKS = ("all", "causal", "window")
MAX_LENGTH = 24
_AREA = 400  # pixels of the matrix, at most
_CELL = 30  # pixels of one score, at most
_LATER, _DONE, _NOW = 0.2, 0.5, 0.95  # opacities of a block


class AttentionView(Walk):
    """`mask` ("all", "causal" or "window"), `query` (whose row is told) and `step` are traits."""

    mask = traitlets.Enum(MASKS, "causal")
    query = traitlets.Int(0)

    def __init__(self, scores, values, block: tuple[int, int], window: int, mask: str, query: int, step: int):
        self.scores, self.numbers, self.block, self.window = scores, values, block, window
        sees = [("every key", "all"), ("causal", "causal"), (f"causal, window of {window}", "window")]
        controls = {"mask": menu("sees", sees, 220), "query": slider("query", 0, len(scores) - 1, 200)}
        still = {"step": min(step, len(self.blocks_of(mask).walk()))}
        super().__init__(controls, {"mask": mask, "query": query}, still=still)

    def blocks_of(self, mask: str) -> Blocks:
        lengths = len(self.scores), len(self.numbers)
        return Blocks(*lengths, *self.block, causal=mask != "all", window=self.window if mask == "window" else None)

    def last(self) -> int:
        return len(self.blocks_of(self.mask).walk())

    def _sentence(self, mask: str, query: int, step: int) -> str:
        blocks = self.blocks_of(mask)
        walk, count = blocks.walk(), blocks.count()
        kinds = f"{count['full']} seen whole, {count['cut']} cut, {count['none']} left out"
        text = f"{blocks.T_q} queries, {blocks.T_k} keys, {blocks.rows * blocks.columns} blocks: {kinds}. "
        if step == 0:
            return f"{text}Before the first block. Step forward."
        row, column = walk[step - 1]
        kind = {"full": "seen whole: no mask", "cut": "cut: some scores become -inf"}[blocks.kind(row, column)]
        return f"{text}Step {step} of {len(walk)}: program {row}, block {column} of the keys, {kind}."

    def __repr__(self) -> str:
        lengths = f"{len(self.scores)} queries, {len(self.numbers)} keys"
        return f"attention viewer: {lengths}, blocks of {self.block[0]} x {self.block[1]}, {self._start['mask']}"

    # ---- the picture -------------------------------------------------------------------------------------------------

    def drawing(self, mask: str, query: int, step: int) -> Drawing:
        words = self._sentence(mask, query, step)
        first, rest = words.split(". ", 1)
        shapes = board.heading(f"{first}.", rest)
        left, top = 46, 84
        cell = min(_AREA / max(len(self.scores), len(self.numbers)), _CELL)
        shapes += self._matrix(mask, query, step, left, top, cell)
        shapes += self._row(mask, query, step, left + _AREA + 24, top)
        bottom = top + max(cell * len(self.scores), 34 + 24 * (-(-len(self.numbers) // self.block[1]) + 3)) + 28
        keys, bottom = board.legend(
            [
                (Box(0, 0, 0, 0, style.COMPUTE, _NOW), "the block at work"),
                (Box(0, 0, 0, 0, style.COMPUTE, _DONE), "done"),
                (Box(0, 0, 0, 0, style.COMPUTE, _LATER), "to come"),
                (Box(0, 0, 0, 0, style.WASTE, _DONE), "computed and masked"),
                (Box(0, 0, 0, 0, edge=board.LINE), "left out"),
            ],
            10, bottom, WIDTH - 20,
        )  # fmt: skip
        return Drawing([*shapes, *keys], bottom, words)

    def _matrix(self, mask: str, query: int, step: int, left: float, top: float, cell: float) -> list[Shape]:
        """The scores: a box for each place, colored by when its block is computed and whether it counts."""
        blocks = self.blocks_of(mask)
        (BLOCK_M, BLOCK_N), T_q, T_k = self.block, blocks.T_q, blocks.T_k
        walk = blocks.walk()
        when = {at: number for number, at in enumerate(walk, start=1)}
        shapes: list[Shape] = [Words(left, top - 18, "scores: a row for each query, a column for each key", bold=True)]
        for i in range(T_q):
            keys = blocks.keys(i)
            y = top + i * cell
            for j in range(T_k):
                number = when.get((i // BLOCK_M, j // BLOCK_N))
                if number is None:
                    continue
                opacity = _NOW if number == step else _DONE if number < step else _LATER
                fill = style.COMPUTE if j in keys else style.WASTE
                shapes.append(Box(left + j * cell, y, cell, cell, fill, opacity))
                if i == query and j in keys and cell >= 18:
                    ink = board.LIGHT if number == step else board.INK
                    text = f"{self.scores[i][j]:.1f}"
                    shapes.append(Words(left + (j + 0.5) * cell, y + cell / 2, text, "center", 9, ink))
            if cell >= 12:
                shapes.append(Words(left - 8, y + cell / 2, str(i), "right", 10, bold=i == query))
        for row in range(blocks.rows):
            for column in range(blocks.columns):
                x, y = left + column * BLOCK_N * cell, top + row * BLOCK_M * cell
                wide, high = min(BLOCK_N, T_k - column * BLOCK_N), min(BLOCK_M, T_q - row * BLOCK_M)
                shapes.append(Box(x, y, wide * cell, high * cell, edge=board.LINE))
        if step:
            row, column = walk[step - 1]
            wide, high = min(BLOCK_N, T_k - column * BLOCK_N), min(BLOCK_M, T_q - row * BLOCK_M)
            place = left + column * BLOCK_N * cell, top + row * BLOCK_M * cell, wide * cell, high * cell
            shapes.append(Box(*place, edge=board.INK, edge_width=3))
        shapes.append(Box(left, top + query * cell, T_k * cell, cell, edge=style.YOURS, edge_width=2.5))
        return shapes

    def _row(self, mask: str, query: int, step: int, left: float, top: float) -> list[Shape]:
        """The state of one query, a line for each block that it has seen."""
        names = ("block", "m", "factor", "l", "acc")
        edges = [left + x for x in (40, 100, 170, 235, 305)]
        shapes: list[Shape] = [Words(left, top - 18, f"what query {query} holds", bold=True)]
        shapes += [Words(x, top + 8, name, "right") for x, name in zip(edges, names, strict=True)]
        y = top + 34
        states = self.blocks_of(mask).states(query, self.scores[query], self.numbers, step)
        for number, (column, state) in enumerate(states):
            now = number == len(states) - 1 and self.blocks_of(mask).walk()[step - 1][0] == query // self.block[0]
            cells = (str(column), *(_number(x) for x in (state.m, state.factor, state.l, state.acc)))
            shapes += [Words(x, y, text, "right", bold=now) for x, text in zip(edges, cells, strict=True)]
            y += 24
        last = states[-1][1] if states else State(-math.inf, 0.0, 0.0, 1.0)
        if not states:
            shapes.append(Words(left, y, "nothing: m = -inf, l = 0, acc = 0"))
            y += 24
        passed = step and self.blocks_of(mask).walk()[step - 1][0] > query // self.block[0]
        if passed or step == len(self.blocks_of(mask).walk()):
            shapes.append(Words(left, y + 10, f"o = {_number(last.o)}, LSE = {_number(last.lse)}", bold=True))
        return shapes


def attention(
    scores: Sequence[Sequence[float]],
    values: Sequence[float],
    block: tuple[int, int] = (4, 4),
    mask: str = "causal",
    window: int = 6,
    query: int = 0,
    step: int = 0,
) -> AttentionView:
    """Show how programs walk over the blocks of `scores` [T_q, T_k], at most 24 each, and what one query holds meanwhile.

    values  one number a key, for what is v
    block   BLOCK_M, BLOCK_N
    mask    "all", "causal", or "window": causal, and no key `window` or more before its own place
    step    of the picture that a saved notebook keeps; the viewer begins at 0
    Raises ValueError for sizes, a mask or a query that do not fit.
    """
    lengths = {len(row) for row in scores}
    if not 1 <= len(scores) <= MAX_LENGTH or len(lengths) != 1 or not 1 <= max(lengths) <= MAX_LENGTH:
        raise ValueError(
            f"attention: scores must be 1 to {MAX_LENGTH} rows of one length, 1 to {MAX_LENGTH}, got {len(scores)} rows "
            f"of {', '.join(map(str, sorted(lengths))) or 'nothing'}"
        )
    if len(values) != max(lengths):
        raise ValueError(f"attention: values must be one number a key, {max(lengths)}, got {len(values)}")
    if mask not in MASKS:
        raise ValueError(f"attention: mask must be one of {', '.join(MASKS)}, got {mask!r}")
    if not 0 <= query < len(scores):
        raise ValueError(f"attention: query must be 0 to {len(scores) - 1}, got {query}")
    Blocks(len(scores), len(values), *block, window=window)
    rows = [list(map(float, row)) for row in scores]
    return AttentionView(rows, list(map(float, values)), tuple(block), window, mask, query, step)


def _number(x: float) -> str:
    return "-inf" if x == -math.inf else f"{x:.3f}"
