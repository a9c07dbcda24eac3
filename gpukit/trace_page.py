"""A trace as one HTML file that needs neither Python nor a network: `gpukit trace softmax --html softmax.html`.

    from gpukit import trace_page

    trace_page.save("mine.html", gpukit.predict(lambda: softmax(x), gpu="h200"))

The page has the predicted time with its resources, and for each launch its table, what the caches make of it, its machine
code, and the accesses of one program, step by step, on the memory that they touch. It is light or dark as the reader's
browser is.
"""

from __future__ import annotations

import bisect
import html
import linecache
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from gpukit import trace_report
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.interpreter.faults import program_ids
from gpukit.simulator.prediction.predict import Prediction, Step
from gpukit.simulator.trace.launch import Launch
from gpukit.simulator.trace.levels import LINE_BYTES
from gpukit.widgets import board, style
from gpukit.widgets.board import Box, Drawing, Line, Shape, Words

MAX_STEPS = 48  # accesses of a program that are drawn
MAX_LINES = 12  # lines of memory in a picture
_LEFT, _WIDE, _HIGH = 96.0, 672.0, 22.0  # pixels: before a line of memory, its length and height
_COLORS = {"load": style.READS, "store": style.WRITES, "atomic": style.WRITES}
_VERBS = {"load": "loads", "store": "stores", "atomic": "updates"}


def save(path: str | Path, of: Prediction | trace_report.Report) -> Path:
    """Write the page and return its path. Raises OSError where it cannot be written."""
    path = Path(path)
    path.write_text(page(of), encoding="utf-8")
    return path


def page(of: Prediction | trace_report.Report) -> str:
    """The page as text."""
    if isinstance(of, Prediction):
        names = ", ".join(dict.fromkeys(step.name for step in of.steps))
        title = f"{names} on {of.gpu.name}: traffic is counted, machine code compiled, time modelled; no GPU took part"
        of = trace_report.Report(title, (), of)
    head, _, rest = of.title.partition(": ")
    facts = "".join(f"<p>{html.escape(' '.join(fact.split()))}</p>" for fact in of.facts)
    ended = f'<p class="note">{html.escape(of.ended)}</p>' if of.ended else ""
    sections = "".join(_section(step, times, i) for i, (step, times) in enumerate(of.steps()))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(head)}</title>\n'
        f"<style>{_LOOK}</style></head>\n<body>\n<h1>{html.escape(head)}</h1>\n"
        f"<p>{html.escape(rest[:1].upper() + rest[1:])}.</p>{facts}{ended}\n"
        f'<section><h2>Predicted time</h2><div class="wide">{_breakdown(of.prediction)}</div></section>\n{sections}'
        f"<footer>Made by gpukit trace. Sectors have {SECTOR_BYTES} bytes, lines {LINE_BYTES}.</footer>\n"
        f"<script>{_STEPS}</script>\n</body>\n</html>\n"
    )


def _breakdown(prediction: Prediction) -> str:
    """A bar for each resource, the limit's in full color."""
    longest = max(*prediction.resources.values(), prediction.time_us)
    rows = "".join(
        f'<tr><th>{html.escape(name)}</th><td class="number">{us:,.1f} µs</td><td class="bars"><div class="bar'
        f'{" limit" if is_limit else ""}" style="width:{100 * us / longest:.1f}%"></div></td></tr>'
        for name, us, is_limit in prediction.rows()
    )
    steps = ""
    if len(prediction.steps) > 1:
        each = "".join(
            f'<tr><th>{html.escape(s.name)}</th><td class="number">{s.time_us:,.1f} µs</td>'
            f"<td>limited by {html.escape(s.limit)}</td></tr>"
            for s in prediction.steps
        )
        steps = f"<h3>Step by step</h3><table>{each}</table>"
    notes = "".join(f'<p class="note">{html.escape(reason)}</p>' for reason in prediction.uncertain)
    return (
        f"<p><strong>{prediction.time_us:,.1f} µs</strong> on {html.escape(prediction.gpu.name)}, limited by "
        f"{html.escape(prediction.limit)}. Each bar is the time that one resource would need alone.</p>"
        f"<table>{rows}</table>{notes}{steps}<p>Rates reached: {html.escape(prediction.machine.source)}.</p>"
    )


def _section(step: Step, times: int, number: int) -> str:
    cache = _facts_table(trace_report.cache_facts(step).items())
    return (
        f"<section><h2>{html.escape(trace_report.heading(step, times))}</h2>"
        f'<h3>Traffic</h3><div class="wide">{step.launch._repr_html_()}{cache}</div>'
        f"<h3>Access patterns</h3>{_patterns(step.launch, number)}"
        f'<h3>Machine code</h3><div class="wide">{step.compiled._repr_html_()}</div></section>\n'
    )


def _facts_table(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{rows}</table>"


# ---- the accesses of one program ----------------------------------------------------------------------------------


def _patterns(launch: Launch, number: int) -> str:
    """A picture for each access of a program, of which one is shown at a time."""
    pictures = drawings(launch)
    if not pictures:
        return "<p>The program that was looked at makes no access.</p>"
    figures = "".join(
        f"<figure{'' if i == 0 else ' hidden'}>{board.svg(drawing)}</figure>" for i, drawing in enumerate(pictures)
    )
    walk = (
        f'<div class="walk"><button type="button" data-by="-1">back</button><button type="button" data-by="1">forward'
        f'</button><label>step <input type="range" min="0" max="{len(pictures) - 1}" value="0" '
        f'aria-label="step of launch {number + 1}"></label></div>'
        if len(pictures) > 1
        else ""
    )
    return f'<div class="steps">{walk}<div class="wide">{figures}</div></div>'


def drawings(launch: Launch) -> list[Drawing]:
    """One drawing for each of the first accesses of one program: its lines of memory, and which elements it asks for."""
    recording = launch.recording
    rows = np.array(recording.program, dtype=np.int64)
    if recording.call.sampled is not None:
        rows = rows[: recording.whole]
    if not rows.size:
        return []
    program = int(rows[rows.size // 2])
    own = np.flatnonzero(rows == program)
    return [_drawing(launch, program, int(row), i, own.size) for i, row in enumerate(own[:MAX_STEPS].tolist())]


def _drawing(launch: Launch, program: int, row: int, step: int, steps: int) -> Drawing:
    recording = launch.recording
    site = recording.sites[recording.site[row]]
    addresses = np.unique(_addresses(launch, row))
    bases = sorted(recording._bases.values())
    base = bases[bisect.bisect_right(bases, int(addresses[0])) - 1] if bases else 0
    asked = addresses - base
    sectors = recording.units(row, SECTOR_BYTES).size
    lanes, masked = _lanes(launch, row), site.lanes - _lanes(launch, row)
    ids = program_ids(program, launch.grid)
    name = f"{ids[0]:,}" if len(ids) == 1 else str(ids)
    head = (
        f"Step {step + 1} of {steps:,}: program {name} {_VERBS[site.kind]} {_count(lanes, 'element')} of {site.tensor}"
    )
    more = f"{asked.size * site.width:,} bytes, in {_count(sectors, 'sector')} of {SECTOR_BYTES} = {sectors * SECTOR_BYTES:,} bytes"
    more += f"; {_count(masked, 'lane')} masked off" if masked else ""
    code = f"line {site.line}: {linecache.getline(site.file, site.line).strip()}"
    shapes: list[Shape] = [
        *board.heading(head, more),
        Words(10, 58, code, size=board.fits(code, board.WIDTH, 12), code=True),
    ]
    lines = np.unique(np.concatenate([asked // LINE_BYTES, (asked + site.width - 1) // LINE_BYTES]))
    y = 84.0
    shapes.append(Words(_LEFT, y, "bytes of the tensor, a line of 128 in each row"))
    y += 14
    before = None
    for line in lines[:MAX_LINES].tolist():
        if before is not None and line != before + 1:
            shapes.append(Words(_LEFT, y + 8, "..."))
            y += 16
        shapes += _line(asked, site.width, line, y, _COLORS[site.kind])
        before, y = line, y + _HIGH
    if lines.size > MAX_LINES:
        shapes.append(Words(_LEFT, y + 12, f"... and {_count(lines.size - MAX_LINES, 'line')} more"))
        y += 24
    keys, bottom = board.legend(
        [
            (Box(0, 0, 0, 0, _COLORS[site.kind]), f"{site.kind}ed: asked for" if site.kind != "atomic" else "updated"),
            (Box(0, 0, 0, 0, style.WASTE, 0.6), "moved with its sector, not asked for"),
            (Box(0, 0, 0, 0, edge=board.LINE), "not moved"),
        ],
        10,
        y + 20,
        board.WIDTH - 20,
    )
    return Drawing([*shapes, *keys], bottom, f"{head}: {more}. {code}")


def _line(asked: np.ndarray, width: int, line: int, y: float, color: str) -> list[Shape]:
    """One line of memory: runs of bytes that were asked for, that came with their sector, and that stayed."""
    low = np.searchsorted(asked, line * LINE_BYTES - width + 1)
    here = asked[low : np.searchsorted(asked, (line + 1) * LINE_BYTES)]
    state = np.zeros(LINE_BYTES, dtype=np.int8)
    wanted = (here[:, None] + np.arange(width)).reshape(-1) - line * LINE_BYTES
    state[wanted[(wanted >= 0) & (wanted < LINE_BYTES)]] = 2
    moved = (state.reshape(-1, SECTOR_BYTES) > 0).any(axis=1).repeat(SECTOR_BYTES)
    state[moved & (state == 0)] = 1
    edges = [0, *(np.flatnonzero(np.diff(state)) + 1).tolist(), LINE_BYTES]
    pixel = _WIDE / LINE_BYTES
    looks = {0: ("none", 1.0), 1: (style.WASTE, 0.6), 2: (color, 1.0)}
    shapes: list[Shape] = [Words(_LEFT - 8, y + _HIGH / 2 - 1, f"{line * LINE_BYTES:,}", "right")]
    for begin, end in pairwise(edges):
        fill, opacity = looks[int(state[begin])]
        title = f"bytes {line * LINE_BYTES + begin:,} to {line * LINE_BYTES + end - 1:,}"
        box = _LEFT + begin * pixel, y, (end - begin) * pixel, _HIGH - 3
        shapes.append(Box(*box, fill, opacity, board.LINE, title=title))
    for sector in range(LINE_BYTES // SECTOR_BYTES + 1):
        x = _LEFT + sector * SECTOR_BYTES * pixel
        shapes.append(Line(((x, y - 1), (x, y + _HIGH - 2)), board.INK, 2))
    return shapes


def _addresses(launch: Launch, row: int) -> np.ndarray:
    recording = launch.recording
    tile = recording.tile[row]
    offsets = recording.tiles[tile].offsets() if tile >= 0 else recording.irregular[-1 - tile].offsets
    return offsets.reshape(-1) + recording.start[row]


def _lanes(launch: Launch, row: int) -> int:
    return int(_addresses(launch, row).size)


def _count(n: int, one: str) -> str:
    return f"{n:,} {one if n == 1 else one + 's'}"


_LOOK = """
:root { color-scheme: light dark; --page: #ffffff; --text: #262626; --faint: #5f5f5f; --rule: #bdbdbd; --bar: #6e6e6e;
  --limit: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --text: #e8e8e8; --faint: #a9a9a9; --rule: #5a5d61;
  --bar: #9a9a9a; --limit: #ff8c42; } }
:root { --jp-content-font-color1: var(--text); --jp-border-color1: var(--rule); --jp-ui-font-family: inherit; }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-top: 1px solid var(--rule);
  padding-top: 1rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.15rem 0.7rem 0.15rem 0; font-weight: normal; vertical-align: top; }
thead th { border-bottom: 1px solid var(--rule); font-weight: 600; } tfoot th { border-top: 1px solid var(--rule);
  font-weight: 600; }
.number { text-align: right; white-space: nowrap; } .bars { width: 22rem; vertical-align: middle; }
.bar { height: 0.8em; background: var(--bar); min-width: 1px; } .bar.limit { background: var(--limit); }
.note { border-left: 3px solid var(--limit); padding-left: 0.8rem; } .wide { overflow-x: auto; }
.walk { display: flex; gap: 0.6rem; align-items: center; margin-bottom: 0.5rem; } .walk input { width: 16rem; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--rule); border-radius: 4px;
  padding: 0.1rem 0.7rem; } button:disabled { opacity: 0.4; }
label { display: flex; gap: 0.4rem; align-items: center; } figure { margin: 0; } figure[hidden] { display: none; }
footer { margin: 2.5rem 0 1rem; color: var(--faint); }
@media print { figure[hidden] { display: block; } .walk { display: none; } }
"""

_STEPS = """
document.querySelectorAll(".steps").forEach(function (steps) {
  var slider = steps.querySelector("input"), figures = steps.querySelectorAll("figure");
  var buttons = steps.querySelectorAll("button");
  if (!slider) return;
  function show() {
    var step = Number(slider.value);
    figures.forEach(function (figure, i) { figure.hidden = i !== step; });
    buttons[0].disabled = step === 0;
    buttons[1].disabled = step === figures.length - 1;
  }
  slider.addEventListener("input", show);
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      slider.value = Number(slider.value) + Number(button.dataset.by);
      show();
    });
  });
  show();
});
"""
