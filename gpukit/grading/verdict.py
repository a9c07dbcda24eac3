"""The outcome of one check, the same object for notebook, pytest, command line and reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass

STATES = ("pass", "fail", "todo", "error", "timeout", "crashed", "missing", "no-gpu")
MAX_LINES = 8


@dataclass(frozen=True)
class Verdict:
    """state is one of STATES; `diagnosis` a label such as "tail-mask" ("" for a pass); `lines` what the learner reads."""

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

    @property
    def passed(self) -> bool:
        return self.state == "pass"

    def __str__(self) -> str:
        if self.passed:
            note = "  (solutions: an instructor's run, not a grade)" if self.impl == "solutions" else ""
            return f"PASS {self.id}  {self.checks_passed}/{self.checks_total}{note}"
        return "\n".join(self.lines[:MAX_LINES])

    def as_dict(self) -> dict:
        return asdict(self)


class CheckFailed(AssertionError):
    """Raised by `gpukit.check`; shows the diagnosis and nothing else, in a notebook as on the command line."""

    def __init__(self, verdict: Verdict):
        super().__init__(str(verdict))
        self.verdict = verdict

    def _render_traceback_(self) -> list[str]:  # IPython shows this in place of a traceback
        return str(self.verdict).splitlines()
