"""Which SM runs which tile in which wave, and what a size that does not fit costs.

    from gpukit.widgets.waves import efficiency, waves

    waves(1793, gpu="a100", tile=(256, 128))

Numbers come from gpukit.accounting.tiling; this draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ipywidgets as widgets
import traitlets

from gpukit import hardware
from gpukit.accounting.tiling import Tiling
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Shape, Words
from gpukit.widgets.view import CAPTION, View, menu, slider

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64), (32, 32))
MAX_SIZE = 16_384
_AREA = 330  # pixels of the longer side of C
_SM = (30, 22)  # pixels of one SM
_SMS_A_LINE = 13


class WaveView(View):
    """`size` (C is square), `gpu`, `tile` and `wave` (from 1) are traits."""

    size = traitlets.Int(1792)
    gpu = traitlets.Unicode("a100-80gb")
    tile = traitlets.Tuple(traitlets.Int(), traitlets.Int(), default_value=(256, 128))
    wave = traitlets.Int(1)

    def __init__(self, size: int, gpu: str, tile: tuple[int, int], programs_per_sm: int, wave: int):
        self.programs_per_sm = programs_per_sm
        start = {"size": size, "gpu": hardware.gpu(gpu).key, "tile": tile}
        waves = self._tiling(**start).waves
        sizes = [*TILES, *([tile] if tile not in TILES else [])]
        controls = {
            "size": widgets.BoundedIntText(
                size, min=1, max=MAX_SIZE, description="M = N (elements)", style=CAPTION, layout={"width": "190px"}
            ),
            "gpu": menu("GPU", [(f"{g.name}, {g.sms} SMs", g.key) for g in hardware.GPUS], 260),
            "tile": menu("tile", [(f"{m} x {n}", (m, n)) for m, n in sizes], 140),
            "wave": slider("wave", 1, waves, 230),
        }
        super().__init__(controls, {**start, "wave": min(wave, waves)})

    @traitlets.validate("size")
    def _size_valid(self, proposal) -> int:
        if not 1 <= proposal["value"] <= MAX_SIZE:
            raise traitlets.TraitError(f"size must be 1 to {MAX_SIZE:,}, got {proposal['value']}")
        return proposal["value"]

    def _tiling(self, size: int, gpu: str, tile: tuple[int, int]) -> Tiling:
        return Tiling(size, size, *tile, hardware.gpu(gpu).sms, self.programs_per_sm)

    @property
    def tiling(self) -> Tiling:
        return self._tiling(self.size, self.gpu, self.tile)

    def adapt(self) -> None:
        """Another size has another number of waves."""
        self.controls["wave"].max = self.tiling.waves

    def drawing(self, wave: int, **chosen) -> Drawing:
        tiling = self._tiling(**chosen)
        words = _sentence(tiling, wave - 1)
        shapes, height = _shapes(tiling, wave - 1, words)
        return Drawing(shapes, height, f"{hardware.gpu(chosen['gpu']).name}. {words}")

    def __repr__(self) -> str:
        gpu = hardware.gpu(self._start["gpu"]).name
        start = self._tiling(**{name: self._start[name] for name in ("size", "gpu", "tile")})
        return (
            f"wave viewer: C [{start.M}, {start.N}] in {_count(start.tiles, 'tile')} of {start.BLOCK_M} x "
            f"{start.BLOCK_N}, {_count(start.waves, 'wave')} on {gpu}, {start.sms} SMs"
        )


def waves(
    size: int, gpu: str = "h200", tile: tuple[int, int] = (128, 128), programs_per_sm: int = 1, wave: int = 1
) -> WaveView:
    """Show C [size, size] cut into tiles, wave by wave, on the SMs of `gpu`.

    tile   BLOCK_M, BLOCK_N
    wave   the one to begin with, from 1; the last one if there are fewer
    Raises ValueError for an unknown GPU, a size or a tile that is not 1 to 16,384, and for more than a million tiles.
    """
    for name, value in (("size", size), ("tile", tile[0]), ("tile", tile[1])):
        if not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"waves: {name} must be a whole number from 1 to {MAX_SIZE:,}, got {value!r}")
    if Tiling(size, size, *tile, 1).tiles > 1_000_000:
        raise ValueError(f"waves: C [{size}, {size}] holds more than a million tiles of {tile[0]} x {tile[1]}")
    return WaveView(size, gpu, tuple(tile), programs_per_sm, wave)


def _sentence(tiling: Tiling, wave: int) -> str:
    programs = tiling.programs(wave)
    which = f"tile {programs[0]}" if len(programs) == 1 else f"tiles {programs[0]} to {programs[-1]}"
    free = max(0, tiling.sms - len(programs))
    idle = f"{free} of {tiling.sms} SMs are idle" if free else f"all {tiling.sms} SMs work"
    return (
        f"Wave {wave + 1} of {tiling.waves} computes {which}; {idle}. "
        f"C [{tiling.M}, {tiling.N}] takes {tiling.num_m} x {tiling.num_n} = {_count(tiling.tiles, 'tile')} of "
        f"{tiling.BLOCK_M} x {tiling.BLOCK_N}. {tiling.efficiency:.0%} of what is paid for is used: "
        f"{tiling.tile_efficiency:.0%} of the tiles' area, {tiling.wave_efficiency:.0%} of the places in the waves."
    )


def _count(n: int, one: str) -> str:
    return f"{n:,} {one if n == 1 else one + 's'}"


# ---- the picture -----------------------------------------------------------------------------------------------------


def _shapes(tiling: Tiling, wave: int, words: str) -> tuple[list[Shape], float]:
    first, *rest = words.removesuffix(".").split(". ")
    shapes: list[Shape] = [
        Words(10, 16, first + ".", size=13, bold=True),
        *(Words(10, 36 + 18 * i, text + ".") for i, text in enumerate(rest)),
    ]
    top = 96
    left = _matrix(tiling, wave, 10, top)
    lines = -(-tiling.sms // _SMS_A_LINE)
    right = _chip(tiling, wave, WIDTH - 10 - _SMS_A_LINE * (_SM[0] + 3), top)
    bottom = top + max(_AREA, lines * (_SM[1] + 3)) + 14
    timeline, bottom = _timeline(tiling, wave, bottom)
    keys, bottom = board.legend(
        [
            (Box(0, 0, 0, 0, style.COMPUTE), "in this wave"),
            (Box(0, 0, 0, 0, style.NEUTRAL, 0.6), "in an earlier wave"),
            (Box(0, 0, 0, 0, style.WASTE, edge=board.INK, text="/"), "paid for and not used: beyond C's edge, or idle"),
        ],
        10, bottom, WIDTH - 20,
    )  # fmt: skip
    return [*shapes, *left, *right, *timeline, *keys], bottom


def _matrix(tiling: Tiling, wave: int, left: float, top: float) -> list[Shape]:
    """C, its tiles colored by when they are computed. Tiles that lie side by side and look alike are one box."""
    whole_m, whole_n = tiling.num_m * tiling.BLOCK_M, tiling.num_n * tiling.BLOCK_N
    scale = _AREA / max(whole_m, whole_n)
    high, wide = tiling.BLOCK_M * scale, tiling.BLOCK_N * scale
    begin, end = tiling.programs(wave)[0], tiling.programs(wave)[-1] + 1
    shapes: list[Shape] = [Words(left, top - 12, f"C [{tiling.M}, {tiling.N}]", bold=True)]
    frames: list[tuple[float, float, float, float]] = []
    looks = ((0, begin, style.NEUTRAL, 0.6), (begin, end, style.COMPUTE, 1.0))
    for row in range(tiling.num_m):
        ids = row * tiling.num_n, (row + 1) * tiling.num_n
        for low, after, fill, opacity in looks:
            a, b = max(low, ids[0]), min(after, ids[1])
            if a < b:
                place = left + (a - ids[0]) * wide, top + row * high, (b - a) * wide, high
                shapes.append(Box(*place, fill, opacity))
                if fill == style.COMPUTE:
                    above = frames.pop() if frames and (frames[-1][0], frames[-1][2]) == (place[0], place[2]) else None
                    frames.append((*above[:3], above[3] + high) if above else place)  # whole rows have one frame
    inner_w, inner_h = tiling.N * scale, tiling.M * scale
    if whole_n > tiling.N:
        shapes.append(Box(left + inner_w, top, (whole_n - tiling.N) * scale, whole_m * scale, style.WASTE))
    if whole_m > tiling.M:
        shapes.append(Box(left, top + inner_h, inner_w, (whole_m - tiling.M) * scale, style.WASTE))
    if min(wide, high) >= 4:
        right, bottom = left + whole_n * scale, top + whole_m * scale
        shapes += [Line(((left, top + i * high), (right, top + i * high))) for i in range(tiling.num_m + 1)]
        shapes += [Line(((left + j * wide, top), (left + j * wide, bottom))) for j in range(tiling.num_n + 1)]
    shapes += [Box(*place, edge=style.COMPUTE, edge_width=3) for place in frames]
    shapes += [Box(left, top, inner_w, inner_h, edge=board.INK, edge_width=2)]
    if wide >= 4 + 5 * len(str(tiling.tiles)) and high >= 12:
        for pid in range(tiling.tiles):
            row, column = divmod(pid, tiling.num_n)
            x, y = (column + 0.5) * wide, (row + 0.5) * high
            wasted = x > inner_w or y > inner_h
            ink = board.DARK if wasted else board.LIGHT if begin <= pid < end else board.INK
            shapes.append(Words(left + x, top + y, str(pid), "center", 9, ink))
    return shapes


def _chip(tiling: Tiling, wave: int, left: float, top: float) -> list[Shape]:
    """The SMs, each with the tiles that it computes in this wave."""
    on: dict[int, list[int]] = {}
    for pid in tiling.programs(wave):
        on.setdefault(tiling.sm(pid), []).append(pid)
    shapes: list[Shape] = [Words(left, top - 12, f"the {tiling.sms} SMs and their tiles", bold=True)]
    for sm in range(tiling.sms):
        line, column = divmod(sm, _SMS_A_LINE)
        place = left + column * (_SM[0] + 3), top + line * (_SM[1] + 3), *_SM
        own = on.get(sm, [])
        title = f"SM {sm}: " + (", ".join(f"tile {pid}" for pid in own) or "idle")
        if own:
            text = str(own[0]) if len(own) == 1 else f"{len(own)} t."
            size = 10 if len(text) <= 4 else 8
            shapes.append(Box(*place, style.COMPUTE, text=text, size=size, ink=board.LIGHT, bold=True, title=title))
        else:
            shapes.append(Box(*place, style.WASTE, text="/", edge=board.INK, title=title, ink=board.DARK))
    return shapes


def _timeline(tiling: Tiling, wave: int, top: float) -> tuple[list[Shape], float]:
    """Time runs to the right; of each wave, how many of the places are taken."""
    left, height = 170, 34
    wide = (WIDTH - 10 - left) / tiling.waves
    full, share = tiling.waves - 1, tiling.tail / tiling.slots
    empty = height * (1 - share)
    last = left + full * wide
    shapes: list[Shape] = [Words(10, top + height / 2, "places taken, by wave")]
    if full:
        shapes.append(Box(left, top, full * wide, height, style.NEUTRAL, 0.6))
    shapes.append(Box(last, top, wide, empty, style.WASTE))
    shapes.append(Box(last, top + empty, wide, height - empty, style.NEUTRAL, 0.6))
    above = empty if wave == full else 0
    shapes.append(Box(left + wave * wide, top + above, max(wide, 1), height - above, style.COMPUTE))
    if wide >= 3:
        shapes += [Line(((left + i * wide, top), (left + i * wide, top + height))) for i in range(1, tiling.waves)]
    shapes.append(Box(left, top, WIDTH - 10 - left, height, edge=board.INK))
    return shapes, top + height + 20


# ---- the saw ---------------------------------------------------------------------------------------------------------


def efficiency(rows: Iterable[tuple[int, float]], mark: Sequence[int] = (), name: str = "") -> style.Picture:
    """The share of the peak that tile and wave quantization leave, by size: rows of (size, share), and sizes to mark."""
    rows = list(rows)
    shares = dict(rows)
    with style.use():
        fig, ax = style.figure(height=3.4)
        ax.plot(*zip(*((n, 100 * share) for n, share in rows), strict=True), color=style.COMPUTE, lw=1.6)
        for i, n in enumerate(mark):
            ax.plot([n], [100 * shares[n]], "o", color=style.YOURS)
            text, side = f"{n:,}: {shares[n]:.0%}", 1 if i % 2 else -1
            style.label(ax, n, 100 * shares[n], text, dx=8 * side, dy=-4 * side)
        style.axes(ax, x="M = N (elements)", y="left of the peak (%)", grid="y", whole="x")
        ax.set(ylim=(0, 104), xlim=(rows[0][0], rows[-1][0]))
    marked = "".join(f"{shares[n]:.0%} at {n:,}; " for n in mark)
    best = max(shares, key=shares.__getitem__)
    alt = f"{name + ': ' if name else ''}share of the peak that is left, from {rows[0][0]:,} to {rows[-1][0]:,}"
    return style.picture(fig, alt=f"{alt}; {marked}at most {shares[best]:.0%}, at {best:,}.")
