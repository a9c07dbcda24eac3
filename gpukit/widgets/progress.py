"""The progress panel: every exercise of the course, what the last check of it said, and links to work on it."""

from __future__ import annotations

import html
import os
from itertools import groupby
from pathlib import Path

import ipywidgets as widgets

from gpukit import course
from gpukit.grading.exercise import Exercise
from gpukit.grading.registry import handed_out
from gpukit.grading.report import recorded
from gpukit.widgets import style


class Progress(widgets.VBox):
    """One bar and one table a notebook; `refresh` reads the last verdicts again."""

    def __init__(self, notebook: str = ""):
        listed = handed_out(course.root()).values()
        self.exercises = [e for e in listed if notebook in ("", e.notebook)]
        if not self.exercises:
            known = ", ".join(dict.fromkeys(e.notebook for e in listed))
            raise ValueError(f"progress: notebook must be one of {known}, got {notebook!r}")
        # An output area and not an HTML widget: JupyterLab opens its links in a tab beside the notebook.
        self.area = widgets.Output()
        self.button = widgets.Button(description="refresh", tooltip="read the last verdicts again")
        self.button.on_click(lambda _: self.refresh())
        super().__init__([self.area, self.button])
        self.refresh()

    def refresh(self) -> None:
        """Show what the last check of every exercise said."""
        text = render(self.exercises, recorded(course.root()))
        data = {"text/html": text, "text/plain": repr(self)}
        self.area.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def __repr__(self) -> str:
        return "progress panel: run this cell to see it"

    def _repr_html_(
        self,
    ) -> str:  # saved with the notebook: nothing of a learner's, nothing that the next exercise dates
        return "<p>Every exercise of the course with its state, its difficulty and a link. Run this cell to see it.</p>"


def progress(notebook: str = "") -> Progress:
    """The panel for the whole course, or for one notebook: `progress("00_start")`. Raises ValueError."""
    return Progress(notebook)


def render(listed: list[Exercise], verdicts: dict[str, dict]) -> str:
    """The panel as HTML. `verdicts` are rows of `gpukit.grading.report.recorded`, by exercise id."""
    states = {e.id: verdicts.get(e.id, {}).get("state", "") for e in listed}
    notebooks = [(name, list(group)) for name, group in groupby(listed, key=lambda e: e.notebook)]
    current = next((name for name, group in notebooks if any(states[e.id] != "pass" for e in group)), "")
    sections = []
    for name, group in notebooks:
        passed = sum(states[e.id] == "pass" for e in group)
        minutes = sum(e.label.minutes for e in group if states[e.id] != "pass")
        rest = f", about {minutes} min to go" if minutes else ""
        title = f'<b style="display:inline-block;min-width:11em">{name}</b>'
        summary = f"{title} {_bar(passed, len(group))} {passed} of {len(group)} pass{rest}"
        opened = " open" if name == current else ""
        sections.append(f"<details{opened}><summary>{summary}</summary>{_table(group, verdicts)}</details>")
    passed = sum(state == "pass" for state in states.values())
    total = f"<p>{_bar(passed, len(listed), width=20)} <b>{passed} of {len(listed)} exercises pass</b></p>"
    return total + "".join(sections) if len(notebooks) > 1 else sections[0]


def _table(group: list[Exercise], verdicts: dict[str, dict]) -> str:
    here = Path.cwd()
    folder = course.root()
    rows, stubs, notebooks = [], [], []
    for e in group:
        verdict = verdicts.get(e.id, {})
        state = verdict.get("state", "not tried")
        if verdict.get("edited"):
            state += ", edited since"
        checks = f"{verdict['checks_passed']}/{verdict['checks_total']}" if verdict else ""
        rows.append((e.id, state, checks, e.title, f"{e.label.difficulty}/5", e.label.minutes, "open"))
        stubs.append(os.path.relpath(course.exercise_file(e.concept, folder, "exercises"), here))
        notebooks.append(os.path.relpath(folder / "notebooks" / f"{e.notebook}.ipynb", here))
    columns = dict.fromkeys(("exercise", "state", "checks", "asks", "difficulty", "time", "notebook"), "")
    columns["time"] = "min"
    return style.table(columns, rows, links={"exercise": stubs, "notebook": notebooks})._repr_html_()


def _bar(passed: int, total: int, width: int = 8) -> str:
    """A bar `width` em wide, in words for a screen reader."""
    done = f"width:{100 * passed / total:.0f}%;height:100%;background:{style.COMPUTE}"
    frame = (
        f"display:inline-block;vertical-align:middle;width:{width}em;height:0.7em;overflow:hidden;border-radius:2px;"
        "background:var(--jp-border-color2, #ccc)"
    )
    words = html.escape(f"{passed} of {total}")
    return f'<span role="img" aria-label="{words}" style="{frame}"><span style="display:block;{done}"></span></span>'
