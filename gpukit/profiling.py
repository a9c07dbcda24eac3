"""Where the time goes: torch.profiler's record of some calls, as a table, as spans to draw, and as a trace file.

    from gpukit import profiling

    profile = profiling.profile(step)  # runs it, on the GPU if there is one
    profile.table()  # by name: how often, how long on the host, how long on the GPU
    profile.gaps()  # when the GPU had nothing to do
    profile.save("step.json.gz")  # opens in https://ui.perfetto.dev; profiling.load reads it again

A record made on an H200 ships with the course: `profiling.recorded("mlp")`.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_KINDS = {
    "cpu_op": "op",
    "user_annotation": "note",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
}
MAX_BYTES = 100_000  # of a record that ships


@dataclass(frozen=True)
class Span:
    """Something that took time. Microseconds since the record began.

    kind      "op" (a PyTorch operation), "note" (a range that the program named), "launch" (a call of the CUDA runtime),
              all on the host, or "kernel" (on the GPU, copies included)
    lane      the host's thread or the GPU's stream
    launched  of a kernel: the correlation id that the launch has too; 0: none
    """

    name: str
    kind: str
    start_us: float
    duration_us: float
    lane: int = 0
    launched: int = 0

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def on_gpu(self) -> bool:
        return self.kind == "kernel"


@dataclass(frozen=True)
class Profile:
    """A record: its spans in order of their start, and what it was made on."""

    spans: tuple[Span, ...]
    device: str
    about: str = ""

    @property
    def kernels(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.on_gpu)

    @property
    def span_us(self) -> float:
        """From the first start to the last end; 0 where nothing is recorded."""
        if not self.spans:
            return 0.0
        return max(span.end_us for span in self.spans) - min(span.start_us for span in self.spans)

    @property
    def busy_us(self) -> float:
        """How long at least one kernel ran."""
        return sum(end - start for start, end in _union(self.kernels))

    def gaps(self) -> list[tuple[float, float]]:
        """(start, end) in us of each stretch between the first and the last kernel in which none ran."""
        busy = _union(self.kernels)
        return [(one[1], other[0]) for one, other in pairwise(busy)]

    def between(self, start_us: float, end_us: float) -> Profile:
        """What began in this stretch; a kernel belongs to the launch that it came from."""
        issued = {s.launched for s in self.spans if s.launched and not s.on_gpu and start_us <= s.start_us < end_us}
        kept = [s for s in self.spans if (s.launched in issued if s.on_gpu else start_us <= s.start_us < end_us)]
        return Profile(tuple(kept), self.device, self.about)

    def note(self, name: str) -> Profile:
        """What began inside the first range that the program called `name`. Raises ValueError for an unknown one."""
        for span in self.spans:
            if span.kind == "note" and span.name == name:
                return self.between(span.start_us, span.end_us)
        raise ValueError(f"name must be one of {', '.join(sorted(self.notes)) or 'none'}, got {name!r}")

    @property
    def notes(self) -> dict[str, Span]:
        found: dict[str, Span] = {}
        for span in self.spans:
            if span.kind == "note":
                found.setdefault(span.name, span)
        return found

    def table(self, limit: int = 10) -> list[tuple[str, str, int, float, float]]:
        """Rows (name, kind, calls, host us, GPU us), the longest first: by GPU time where there was a GPU.

        Host time is an operation's own, without the operations and launches inside it; GPU time is the kernel's.
        Raises ValueError for a limit below 1.
        """
        _check_count(limit=limit, least=1)
        rows: dict[tuple[str, str], list[float]] = {}
        for span, own in _own_times(self.spans):
            row = rows.setdefault((span.name, span.kind), [0, 0.0, 0.0])
            row[0] += 1
            row[2 if span.on_gpu else 1] += own
        listed = [(name, kind, int(calls), host, gpu) for (name, kind), (calls, host, gpu) in rows.items()]
        return sorted(listed, key=lambda row: (-row[4], -row[3]))[:limit]

    def save(self, path: Path | str) -> Path:
        """Write a Chrome trace, which Perfetto and chrome://tracing show; gzipped if the name ends in .gz."""
        back = {"op": "cpu_op", "note": "user_annotation", "launch": "cuda_runtime", "kernel": "kernel"}
        events = [
            {
                "ph": "X",
                "name": span.name,
                "cat": back[span.kind],
                "ts": round(span.start_us, 3),
                "dur": round(span.duration_us, 3),
                "pid": int(span.on_gpu),
                "tid": span.lane,
                **({"args": {"correlation": span.launched}} if span.launched else {}),
            }
            for span in self.spans
        ]
        names = [
            {"ph": "M", "name": "process_name", "pid": i, "args": {"name": n}} for i, n in enumerate(("host", "GPU"))
        ]
        text = json.dumps({"device": self.device, "about": self.about, "traceEvents": names + events}, indent=None)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":  # no time of writing in it: the same record gives the same bytes
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"profile: {len(self.spans)} spans, {len(self.kernels)} of them kernels, on {self.device}"


def profile(fn: Callable, *inputs, calls: int = 1, warmup: int = 2, name: str = "", about: str = "") -> Profile:
    """Record `calls` calls of fn(*inputs) after `warmup` others, until the GPU is done.

    name   of each call's range in the record; default: fn's own
    about  a sentence that is saved with it
    Raises ValueError for fewer than one call or a negative warm-up; what fn raises comes through.
    """
    _check_count(calls=calls, least=1)
    _check_count(warmup=warmup, least=0)
    import torch
    from torch.profiler import ProfilerActivity, record_function

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(warmup):
        fn(*inputs)
    wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    recording = torch.profiler.profile(activities=activities)
    with _quiet():
        recording.start()
    try:
        for _ in range(calls):
            with record_function(name or getattr(fn, "__name__", "call")):
                fn(*inputs)
        wait()
    finally:
        with _quiet():
            recording.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    return _profile(trace["traceEvents"], device, about)


def _check_count(least: int, **given: int) -> None:
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a whole number from {least} on, got {count!r}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's C++ writes to stderr when it starts and stops: a notebook would keep it as output."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def load(path: Path | str) -> Profile:
    """A record written by `Profile.save` or by torch.profiler. Raises FileNotFoundError, and ValueError for other files."""
    path = Path(path)
    raw = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        events = trace["traceEvents"]
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"path must be a Chrome trace, got {path.name}: {type(error).__name__}") from None
    properties = trace.get("deviceProperties") or [{}]
    return _profile(events, trace.get("device") or properties[0].get("name", "cpu"), trace.get("about", ""))


def recorded(name: str, gpu: str = "h200") -> Profile:
    """The record gpukit/results/<gpu>/<name>.json.gz. Raises FileNotFoundError, which says what there is."""
    path = RESULTS / gpu / f"{name}.json.gz"
    if not path.exists():
        there = sorted(f"{p.name.removesuffix('.json.gz')} on {p.parent.name}" for p in RESULTS.glob("*/*.json.gz"))
        raise FileNotFoundError(f"no record {name!r} of {gpu!r}; there are: {', '.join(there) or 'none'}")
    return load(path)


def _profile(events: Sequence[dict], device: str, about: str) -> Profile:
    spans = []
    for event in events:
        kind = _KINDS.get(event.get("cat", ""))
        if event.get("ph") == "X" and kind is not None:
            args = event.get("args", {})
            lane = args.get("stream", event["tid"]) if kind == "kernel" else event["tid"]
            at = float(event["ts"]), float(event.get("dur", 0))
            spans.append(Span(event["name"], kind, *at, int(lane), int(args.get("correlation", 0))))
    first = min((span.start_us for span in spans), default=0.0)
    lanes: dict[tuple[bool, int], int] = {}  # thread and stream numbers mean nothing: 0, 1, ... as they appear
    spans.sort(key=lambda span: (span.start_us, -span.duration_us))
    renumbered = []
    for s in spans:
        own = [key for key in lanes if key[0] == s.on_gpu]
        lane = lanes.setdefault((s.on_gpu, s.lane), len(own))
        at = round(s.start_us - first, 3), round(s.duration_us, 3)  # nanoseconds
        renumbered.append(Span(s.name, s.kind, *at, lane, s.launched))
    return Profile(tuple(renumbered), device, about)


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The stretches that at least one span covers."""
    merged: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        if merged and span.start_us <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.end_us)
        else:
            merged.append([span.start_us, span.end_us])
    return [(start, end) for start, end in merged]


def _own_times(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """Each span with its time less that of the spans directly inside it, on its own lane."""
    own = {id(span): span.duration_us for span in spans}
    open_spans: dict[tuple[bool, int], list[Span]] = {}
    for span in spans:  # by start, the longer first: what encloses comes before what is inside
        if span.kind == "note":
            continue
        stack = open_spans.setdefault((span.on_gpu, span.lane), [])
        while stack and stack[-1].end_us <= span.start_us:
            stack.pop()
        if stack and not span.on_gpu:
            own[id(stack[-1])] -= span.duration_us
        stack.append(span)
    return [(span, own[id(span)]) for span in spans if span.kind != "note"]
