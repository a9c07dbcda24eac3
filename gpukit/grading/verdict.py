"""The outcome of one check, the same object for notebook, pytest, command line and reports."""

from __future__ import annotations

import html
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

STATES = ("pass", "fail", "todo", "error", "timeout", "crashed", "missing", "skipped")
# Work that is still to be done is no mistake: a notebook as it is handed out must not be full of red.
COLORS = {"pass": "#009E73", "todo": "#E69F00"}  # green and amber; every other state is red
RED = "#D55E00"
_ANSI = {"pass": 32, "todo": 33}
MAX_LINES = 8
MAX_LINE = 400
MAX_DETAIL = 1 << 17


@dataclass(frozen=True)
class Verdict:
    """state is one of STATES; `diagnosis` a label such as "tail-mask" ("" for a pass); `lines` what the learner reads, of a pass
    a note at most."""

    id: str
    state: str
    checks_passed: int
    checks_total: int
    impl: str  # "exercises" or "solutions"
    lines: tuple[str, ...] = ()
    diagnosis: str = ""
    seconds: float = 0.0
    seed: int = 0
    detail: str = ""  # what the learner's code printed, and the whole traceback: `gpukit check -v`

    def __post_init__(self) -> None:
        lines = (printable(part) for line in self.lines for part in line.split("\n"))
        object.__setattr__(self, "lines", tuple(lines))
        object.__setattr__(self, "detail", printable(self.detail, MAX_DETAIL, "\n\t"))

    @property
    def passed(self) -> bool:
        return self.state == "pass"

    def __str__(self) -> str:
        if self.passed:
            note = "  (solutions: an instructor's run, not a grade)" if self.impl == "solutions" else ""
            return "\n".join([f"PASS {self.id}  {self.checks_passed}/{self.checks_total}{note}", *self.lines])
        return "\n".join(self.lines[:MAX_LINES])

    @property
    def line(self) -> str:
        """The verdict in one line, for a list of several."""
        said = self.lines[0].removeprefix(f"{self.id}: ").partition(" still raises")[0] if self.lines else ""
        return str(self).partition("\n")[0] if self.passed else f"{self.state.upper()} {self.id}  {said}"

    def as_dict(self) -> dict:
        return asdict(self)


def not_graded(exercise_id: str, impl: str, error: Exception) -> Verdict:
    """The verdict where the grader itself failed: it costs this exercise and no other."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    lines = (f"{exercise_id}: not graded, because the grader failed: {said}", "try: gpukit doctor")
    detail = "".join(traceback.format_exception(error))
    return Verdict(exercise_id, "error", 0, 0, impl, lines, "grader", detail=detail)


def printable(text: str, limit: int = MAX_LINE, kept: str = "") -> str:
    """`text`, in which a learner may have put anything, as a terminal may show it: escape codes and other characters that are
    none to read are spelled out, and what is too long is cut."""
    text = text[:limit].expandtabs(4) if "\t" not in kept else text[:limit]
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) < limit else text[: limit - 1] + "…"


class CheckFailed(AssertionError):
    """Raised by `gpukit.check`; shows the diagnosis and nothing else, in a notebook as on the command line."""

    def __init__(self, verdict: Verdict):
        super().__init__(str(verdict))
        self.verdict = verdict

    def _render_traceback_(self) -> list[str]:  # IPython shows this in place of a traceback
        return str(self.verdict).splitlines()


# ---- how it looks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """Lines of (state, text): a strip in the state's color for each in a notebook, the same text anywhere else."""

    lines: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        return "\n".join(text for _, text in self.lines)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        strips = "".join(_strip(COLORS.get(state, RED) if state else "#808080", text) for state, text in self.lines)
        return {"text/plain": str(self), "text/html": strips}

    def show(self) -> None:
        """In a notebook's cell, or as text."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None:
            print(self)
        else:
            from IPython.display import display

            display(self)


def _strip(color: str, text: str) -> str:
    look = (
        f"border-left:5px solid {color};background:{color}22;padding:0.3em 0.8em;margin:1px 0;white-space:pre-wrap;"
        "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);line-height:1.4"
    )
    return f'<div style="{look}">{html.escape(text)}</div>'


def in_color(state: str, text: str) -> str:
    """`text` in the color of a state where standard output is a terminal that shows colors."""
    if not (sys.stdout and sys.stdout.isatty()) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    first, *rest = text.split("\n")
    return "\n".join([f"\x1b[{_ANSI.get(state, 31)}m{first}\x1b[0m", *rest])
