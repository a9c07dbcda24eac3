"""Host and GPU side by side: what was launched when, what ran when, and when the GPU had nothing to do.

from gpukit.widgets.timeline import of_profile, timeline

timeline(gpu.lanes, title="three kernels")  # of the simulated GPU
timeline(of_profile(profiling.recorded("mlp").note("small MLP")))  # of a real one
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from gpukit.profiling import Profile
from gpukit.simulator.queue_model import Span
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Shape, Words

_LEFT, _RIGHT, _LANE, _TOP = 84, 786, 30, 34
_FILL = {
    "launch": style.PEER,
    "op": style.NEUTRAL,
    "kernel": style.COMPUTE,
    "compile": style.NEUTRAL,
    "flush": style.NEUTRAL,
    "fill": style.NEUTRAL,
    "wait": board.LIGHT,
}
_KEY = {
    "launch": "launch",
    "op": "operation, on the host",
    "kernel": "kernel",
    "compile": "compile",
    "flush": "emptying the L2",
    "fill": "filling a buffer",
    "wait": "host waits",
}
MAX_BARS = 2_000


def timeline(
    spans: Sequence[Span],
    *,
    title: str = "",
    window: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    gaps: bool = True,
) -> style.Picture:
    """A lane for the host and one for each stream; what runs is a box, where the GPU waits between two kernels is orange.

    window  (start, end) in us: what is drawn; default: everything
    marks   (time in us, name): vertical lines, such as where a clock was read
    Raises ValueError where nothing lies in the window, where it has no length, or for more than 2,000 spans.
    """
    low, high = window or (min(s.start_us for s in spans), max(s.end_us for s in spans)) if spans else (0.0, 0.0)
    shown = [s for s in spans if s.end_us > low and s.start_us < high]
    if not shown or not 0 < high - low < math.inf:
        raise ValueError(f"timeline: nothing happens between {low:g} and {high:g} µs")
    if len(shown) > MAX_BARS:
        raise ValueError(f"timeline: at most {MAX_BARS} spans can be told apart, got {len(shown)}: give a window")
    lanes = sorted(
        dict.fromkeys(s.lane for s in shown), key=lambda lane: (not lane.startswith(("host", "launch")), lane)
    )
    bottom = _TOP + _LANE * len(lanes) + (18 if marks else 0)

    def x(us: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (min(max(us, low), high) - low) / (high - low)

    def y(lane: str) -> float:
        return _TOP + _LANE * lanes.index(lane)

    shapes: list[Shape] = [Words(10, 14, title, size=13, bold=True)]
    for tick in _ticks(low, high):
        shapes.append(Line(((x(tick), _TOP), (x(tick), bottom))))
        shapes.append(Words(min(x(tick), _RIGHT - 12), bottom + 12, _time(tick - low), "center", 11))
    for lane in lanes:
        shapes.append(Words(_LEFT - 8, y(lane) + _LANE / 2, lane, "right", 12))
        if gaps and any(s.kind == "kernel" for s in shown if s.lane == lane):
            for start, end in _gaps([s for s in shown if s.lane == lane]):
                shapes.append(_box(x(start), x(end), y(lane), style.WASTE, 0.45, f"idle for {_time(end - start)}"))
    for s in shown:
        fill = _FILL[s.kind]
        words = f"{s.name}: {_time(s.end_us - s.start_us)}"
        edge = {"edge": board.LINE} if s.kind == "wait" else {"edge": board.LIGHT, "edge_width": 0.6}
        left, right = x(s.start_us), max(x(s.end_us), x(s.start_us) + 1)
        middle = clear(left, right, 6.6 * len(s.name) + 6, [x(time) for time, _ in marks])
        text = s.name if middle == (left + right) / 2 else ""
        shapes.append(
            Box(
                left,
                y(s.lane) + 4,
                right - left,
                _LANE - 8,
                fill,
                text=text,
                ink=board.DARK,
                title=words,
                size=11,
                **edge,
            )
        )
        if middle and not text:
            shapes.append(Words(middle, y(s.lane) + _LANE / 2, s.name, "center", 11, board.DARK))
    for time, name in marks:
        shapes.append(Line(((x(time), _TOP - 4), (x(time), bottom)), style.YOURS, 2.5))
        right = x(time) + 5 + 7 * len(name) > WIDTH
        shapes.append(Words(x(time) + (-5 if right else 5), bottom - 9, name, "right" if right else "left", size=11))
    entries = [
        (Box(0, 0, 16, 16, _FILL[kind], edge=board.LINE if kind == "wait" else "none"), name)
        for kind, name in _KEY.items()
        if any(s.kind == kind for s in shown)
    ]
    if any(shape.opacity == 0.45 for shape in shapes if isinstance(shape, Box)):
        entries.append((Box(0, 0, 16, 16, style.WASTE, 0.45), "GPU idle"))
    key, height = board.legend(entries, _LEFT, bottom + 36, _RIGHT - _LEFT)
    return board.still(Drawing([*shapes, *key], height, describe(shown, title, (low, high))))


def describe(spans: Sequence[Span], title: str = "", window: tuple[float, float] = (-math.inf, math.inf)) -> str:
    """The timeline in words: how long in all, how many kernels, how long the GPU worked."""
    total = min(window[1], max(s.end_us for s in spans)) - max(window[0], min(s.start_us for s in spans))
    kernels = [s for s in spans if s.kind == "kernel"]
    busy = sum(s.end_us - s.start_us for s in kernels)
    text = f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}, {_time(busy)} of work in {_time(total)}"
    return f"{title}: {text}" if title else text


def of_profile(profile: Profile) -> list[Span]:
    """A profile's operations (the outermost), launches and kernels, as spans of the lanes host, launches and GPU."""
    found = []
    ends: dict[int, float] = {}  # of the outermost operation so far, by thread
    for s in profile.spans:
        if s.kind == "op" and s.start_us >= ends.get(s.lane, -math.inf):
            ends[s.lane] = s.end_us
            found.append(Span("host" if s.lane == 0 else f"host {s.lane + 1}", s.name, "op", s.start_us, s.end_us))
        elif s.kind == "launch" and "Synchronize" not in s.name:
            found.append(Span("launches", s.name, "launch", s.start_us, s.end_us))
        elif s.on_gpu:
            found.append(Span("GPU" if s.lane == 0 else f"GPU {s.lane + 1}", s.name, "kernel", s.start_us, s.end_us))
    return found


def clear(left: float, right: float, width: float, marks: Sequence[float]) -> float | None:
    """The middle of a text of this width between left and right, in the widest part without a mark if one would cross it;
    None where there is no room."""
    if right - left <= width:
        return None
    middle = (left + right) / 2
    if all(abs(mark - middle) > width / 2 for mark in marks):
        return middle
    edges = [left, *sorted(mark for mark in marks if left < mark < right), right]
    begin, end = max(itertools.pairwise(edges), key=lambda part: part[1] - part[0])
    return (begin + end) / 2 if end - begin > width else middle


def _box(left: float, right: float, top: float, fill: str, opacity: float, title: str) -> Box:
    return Box(left, top + 4, right - left, _LANE - 8, fill, opacity, title=title)


def _gaps(spans: Sequence[Span]) -> list[tuple[float, float]]:
    ordered = sorted(spans, key=lambda s: s.start_us)
    found, end = [], ordered[0].end_us
    for s in ordered[1:]:
        if s.start_us > end:
            found.append((end, s.start_us))
        end = max(end, s.end_us)
    return found


def _ticks(low: float, high: float) -> list[float]:
    """About six round distances from the left edge."""
    rough = (high - low) / 6
    step = next(m * 10.0**e for e in range(-3, 13) for m in (1, 2, 5) if m * 10.0**e >= rough)
    return [low + i * step for i in range(math.floor((high - low) / step + 1e-9) + 1)]


def _time(us: float) -> str:
    if us >= 10_000:
        return f"{us / 1000:,.4g} ms"
    return f"{us:,.4g} µs"
