"""A panel that times providers side by side, here and now, or shows what is recorded.

from gpukit.widgets.benchmark import bench

bench("softmax")  # choose operation, mode, shapes and providers; run, cancel; recorded rows where there is no GPU
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence

import ipywidgets as widgets

from gpukit import benchmark, hardware
from gpukit.benchmark import Row, counts_flops, when
from gpukit.widgets import board, style
from gpukit.widgets.board import Box, Drawing, Line, Shape, Words
from gpukit.widgets.versus import MODES, NAMES, by, colour, order
from gpukit.widgets.view import CAPTION, WRAP, View, button

_BAR, _LEFT, _RIGHT = 20, 120, 640  # bars lie between left and right, their figures beside that
_SMALL_MS = 20  # a row on the CPU or in a panel: somebody is waiting


class Bench(View):
    """Operation, mode, shapes and providers; run, cancel, progress with the time left; a bar for each row as it comes.

    `source` is "recorded", or "live" where the panel measures: on a GPU if there is one, else PyTorch on the CPU with
    small shapes. A saved notebook keeps the picture of the recorded rows.
    """

    def __init__(self, op: str, gpu: str):
        self.gpu, self.first = gpu, op
        self.rows: list[Row] = []
        self.thread: threading.Thread | None = None
        self._stop = threading.Event()  # of the run that is on; a run whose event is no longer this one is forgotten
        self.live = widgets.ToggleButtons(
            options=[(f"recorded, {hardware.gpu(gpu).name}", False), (f"live, {_here()}", True)],
            style={"button_width": "initial"},
        )
        self.op = widgets.Dropdown(
            options=_choices(gpu, op), value=op, description="operation", style=CAPTION, layout={"width": "18em"}
        )
        self.mode = widgets.Dropdown(description="mode", style=CAPTION, layout={"width": "20em"})
        tall = {"width": "24em", "height": "8em"}
        self.shapes = widgets.SelectMultiple(description="shapes", style=CAPTION, layout=tall)
        self.providers = widgets.SelectMultiple(description="providers", style=CAPTION, layout=tall)
        self.run_button, self.cancel_button = button("run", self.start), button("cancel", self.cancel)
        self.run_button.button_style = "primary"
        self.bar = widgets.IntProgress(0, 0, 1, layout={"width": "14em"})
        self.status = widgets.HTML()
        progress = [self.run_button, self.cancel_button, self.bar, self.status]
        below = [widgets.HBox(row, layout=WRAP) for row in ([self.shapes, self.providers], progress)]
        self.cancel()
        super().__init__({}, {}, row=[self.live, self.op, self.mode], below=below)
        for control in (self.op, self.live):
            control.observe(lambda _: self._offer(), "value")
        for control in (self.mode, self.shapes, self.providers):
            control.observe(lambda _: self._select(), "value")
        self._offer()

    # -- what can be chosen
    def _offer(self) -> None:
        """The modes, shapes and providers of the operation, all of them chosen."""
        if self.live.value and self.op.value not in benchmark.operations():
            self.live.value = False  # which comes back here
            self.status.value = f"{self.op.value} is recorded only; {self.status.value}"
            return
        self.cancel()
        self._stop = threading.Event()
        self.rows = []
        if self.live.value:
            op = benchmark.operation(self.op.value)
            steps = benchmark.plan(op, device=_device())
            modes, shapes = steps[0][3], [step[0] for step in steps]
            providers = benchmark.providers_of(op)
        else:
            recorded = _recorded(self.op.value, self.gpu)
            modes = [m for m in MODES if any(row.mode == m for row in recorded)]
            shapes, providers = [row.shape for row in recorded], [row.provider for row in recorded]
        with self._together():
            self.mode.options = [(MODES[m], m) for m in modes]
            self.mode.value = modes[0]
            self.shapes.options = [(by(s), s) for s in sorted(set(shapes), key=lambda s: (math.prod(s), s))]
            self.providers.options = [(NAMES.get(p, p), p) for p in order(providers)]
            self.shapes.value = tuple(value for _, value in self.shapes.options)
            self.providers.value = tuple(value for _, value in self.providers.options)
        self.run_button.disabled = not self.live.value
        self.bar.value = 0
        self._select()

    def _select(self) -> None:
        if self._quiet:
            return
        if not self.live.value:
            wanted = _recorded(self.op.value, self.gpu)
            self.rows = [
                r
                for r in wanted
                if r.mode == self.mode.value and r.shape in self.shapes.value and r.provider in self.providers.value
            ]
            date = f", {when(self.rows)}" if self.rows else ""
            self.status.value = f"recorded on an {hardware.gpu(self.gpu).name}{date}: nothing is measured here"
        elif not self.rows:
            self.status.value = f"nothing measured yet on {_here()}"
        self._changed()

    # -- measuring
    def start(self) -> None:
        """Measure what is chosen, in a thread of its own, so that cancel is heard."""
        if self.thread is not None and self.thread.is_alive():
            return
        if not (self.live.value and self.shapes.value and self.providers.value):
            self.status.value = "choose at least one shape and one provider"
            return
        self._stop = threading.Event()
        self.rows, self._begun = [], time.monotonic()
        self.run_button.disabled, self.cancel_button.disabled = True, False
        self.status.value = f"preparing: {self.op.value} on {_here()}"
        self.thread = threading.Thread(target=self._measure, args=(self._stop,), daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """Stop after the row that is being measured."""
        self._stop.set()
        self.run_button.disabled, self.cancel_button.disabled = not self.live.value, True

    def _measure(self, stop: threading.Event) -> None:
        said: list[str] = []
        rows: list[Row] = []

        def go_on(done: int, total: int, what: str) -> bool:
            if not stop.is_set():
                spent = time.monotonic() - self._begun
                left = f", {spent / done * (total - done):.0f} s left" if done else ""
                self.bar.max, self.bar.value = total, done
                self.status.value = f"{done} of {total}{left}: {what}"
            return not stop.is_set()

        def on_row(row: Row) -> None:
            if self._stop is stop:
                rows.append(row)
                self.rows = rows
                self._changed()

        try:
            benchmark.run(
                self.op.value,
                list(self.providers.value),
                list(self.shapes.value),
                [benchmark.operation(self.op.value).bench_dtypes[0]],
                [self.mode.value],
                device=_device(),
                record=False,
                rep_ms=_SMALL_MS,
                say=said.append,
                go_on=go_on,
                on_row=on_row,
            )
            end = "cancelled" if stop.is_set() else "done"
        except Exception as error:  # shown in the panel: nobody sees what a thread prints
            end = f"{type(error).__name__}: {str(error)[:200]}"
        if self._stop is stop:
            left_out = [
                f"{line.split()[0]} {line.partition(': ')[2].partition(':')[0]}" for line in said if _no_row(line)
            ]
            self.bar.value = self.bar.max
            self.status.value = "; ".join([f"{end}, {len(rows)} rows, {_here()}", *dict.fromkeys(left_out)])
            self.run_button.disabled, self.cancel_button.disabled = False, True

    def reset(self) -> None:
        """As it was at first."""
        self.cancel()
        self.live.value, self.op.value = False, self.first
        self._offer()

    # -- drawing
    def drawing(self) -> Drawing:
        return _bars(self.rows, "live" if self.live.value else "recorded")

    def __repr__(self) -> str:
        return f"benchmark panel: {self.first}, recorded on an {hardware.gpu(self.gpu).name}"

    def picture(self) -> style.Picture:
        """The recorded rows that the panel begins with, as a still."""
        rows = _recorded(self.first, self.gpu)
        first = next(mode for mode in MODES if any(row.mode == mode for row in rows))
        return board.still(_bars([row for row in rows if row.mode == first], "recorded"))


def bench(op: str = "softmax", gpu: str = "h200") -> Bench:
    """The panel, beginning with the rows of `op` that are recorded for `gpu`. Raises FileNotFoundError where there are
    none, ValueError for an unknown GPU."""
    key = hardware.gpu(gpu).key
    if all(row.op != op for row in benchmark.rows(op, key)):  # a file of measurements that are no operation's
        raise FileNotFoundError(
            f"{op!r} is not an operation; recorded on {key} are: {', '.join(_choices(key, 'none'))}"
        )
    return Bench(op, key)


def _recorded(op: str, gpu: str) -> list[Row]:
    """The rows of one operation in the dtype that was measured most."""
    own = [row for row in benchmark.rows(op, gpu) if row.op == op]
    dtype = Counter(row.dtype for row in own).most_common(1)[0][0]
    return [row for row in own if row.dtype == dtype]


def _choices(gpu: str, op: str) -> list[str]:
    there = (path.stem for path in sorted((benchmark.RESULTS / gpu).glob("*.csv")) if benchmark.holds_times(path))
    return [name for name in there if any(row.op == name for row in benchmark.rows(name, gpu))] or [op]


def _no_row(line: str) -> bool:
    return any(why in line for why in ("not timed", "interpreter", "not installed", "Error"))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _here() -> str:
    if _device() == "cpu":
        return "this CPU, small shapes"
    import torch

    return torch.cuda.get_device_name()


def _words(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nothing measured yet."
    parts = []
    for shape in dict.fromkeys(row.shape for row in rows):
        times = ", ".join(
            f"{NAMES.get(row.provider, row.provider)} {row.median_ms * 1e3:,.1f} µs"
            for row in rows
            if row.shape == shape
        )
        parts.append(f"{by(shape)}: {times}")
    return f"{rows[0].op} on {rows[0].gpu}. " + "; ".join(parts) + "."


def _bars(rows: Sequence[Row], how: str) -> Drawing:
    """A bar for each row, by shape; its length is the rate."""
    if not rows:
        nothing = Words(10, 20, "run measures what is chosen; each row appears here as it comes", size=13)
        return Drawing([nothing], 40, _words(rows))
    words = _words(rows)
    rows = sorted(rows, key=lambda r: (math.prod(r.shape), r.shape, order(x.provider for x in rows).index(r.provider)))
    flops = counts_flops(rows[0])
    unit = "TFLOP/s" if flops else "GB/s"
    rates = [row.tflops if flops else row.gbps for row in rows]
    top, bound = max(rates), None
    try:
        gpu = hardware.gpu(rows[0].gpu)
        bound = gpu.peak("bf16") / 1e12 if flops else gpu.hbm_gbps
    except ValueError:
        pass
    scale = (_RIGHT - _LEFT) / max(top, bound or 0)
    title = f"{rows[0].op}, {MODES[rows[0].mode]}, {rows[0].dtype}: {how}, {rows[0].gpu}"
    shapes: list[Shape] = [Words(10, 16, title, size=13, bold=True)]
    y, last = 34.0, None
    for row, rate in zip(rows, rates, strict=True):
        if row.shape != last:
            shapes.append(Words(10, y + 10, by(row.shape), size=12, bold=True))
            y, last = y + 20, row.shape
        shapes.append(Words(_LEFT - 8, y + _BAR / 2, NAMES.get(row.provider, row.provider), "right", 11))
        fill = colour(row.provider, [r.provider for r in rows])
        text = f"{row.median_ms * 1e3:,.1f} µs, {style.number(rate)} {unit}"
        note = ", launch-bound" if row.note else ""
        title = f"{text}, p20 to p80 {row.p20_ms * 1e3:,.1f} to {row.p80_ms * 1e3:,.1f} µs{note}"
        shapes.append(Box(_LEFT, y + 3, max(1.0, rate * scale), _BAR - 6, fill, title=title))
        shapes.append(Words(_RIGHT + 12, y + _BAR / 2, text, size=11))
        y += _BAR
    if bound:
        x = _LEFT + bound * scale
        shapes.insert(1, Line(((x, 34), (x, y)), style.BOUND, 1.5, dashed=True))
        shapes.append(Words(x, y + 12, f"data sheet: {bound:,.0f} {unit}", "center", 11))
    return Drawing(shapes, y + 24, words)
