"""The instructor's switch: this notebook's checks run exercises/ or solutions/. Nothing on disk changes."""

from __future__ import annotations

import ipywidgets as widgets

from gpukit import course

_SAYS = {
    "exercises": "Checks in this notebook run your files in exercises/.",
    "solutions": "Checks in this notebook run solutions/ until its kernel restarts; they say so, and none is recorded.",
}
_ABSENT = "This copy of the course has no solutions/ folder, so there is nothing to switch to."


class Implementation(widgets.VBox):
    """Toggle buttons for `gpukit.use`, switched off where there are no solutions."""

    def __init__(self):
        self.present = (course.root() / "solutions").is_dir()
        self.buttons = widgets.ToggleButtons(options=course.IMPLS, value=course.impl(), disabled=not self.present)
        self.status = widgets.HTML()
        super().__init__([widgets.HBox([widgets.Label("instructor"), self.buttons]), self.status])
        self.buttons.observe(lambda change: self._use(change["new"]), "value")
        self._say()

    def _use(self, name: str) -> None:
        course.use(name)
        self._say()

    def _say(self) -> None:
        self.status.value = _SAYS[self.buttons.value] if self.present else _ABSENT

    def __repr__(self) -> str:
        return "instructor's switch: exercises | solutions"


def implementation() -> Implementation:
    """The switch, as a notebook shows it."""
    return Implementation()
