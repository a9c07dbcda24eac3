"""The base of the views that have controls. Traits say what is shown; one drawing of them is the live picture and the still.

class Squares(View):
    size = traitlets.Int()

    def __init__(self, size: int):
        super().__init__({"size": slider("size", 1, 9)}, {"size": size})

    def drawing(self, size: int) -> Drawing: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
import traitlets

from gpukit.widgets import board, style
from gpukit.widgets.board import Drawing

CAPTION = {"description_width": "initial"}
WRAP = {"flex_flow": "row wrap"}


class View(widgets.VBox):
    """Controls above a picture. A subclass has a trait for each control, and `drawing`, which takes their values by name.

    Arrow keys move the control that has the focus. A saved notebook keeps the picture of the values the view began with.
    """

    title = "view"

    def __init__(
        self,
        controls: Mapping[str, widgets.Widget],
        start: Mapping[str, Any],
        *,
        still: Mapping[str, Any] | None = None,
        row: Sequence[widgets.Widget] | None = None,
        below: Sequence[widgets.Widget] = (),
    ):
        """
        controls  trait -> the control that shows and sets it
        start     trait -> the value it begins with, in the order in which `reset` sets them
        still     trait -> the value in the saved picture, where it is not that of the start
        row       what stands before the reset button, if more than the controls do; `below`: what stands under it
        """
        self.controls, self._start, self._still = dict(controls), dict(start), {**start, **(still or {})}
        self.reset_button = button("reset", self.reset)
        self.picture_area = widgets.HTML()
        top = [*(self.controls.values() if row is None else row), self.reset_button]
        self._quiet = False
        with self._together():
            super().__init__([widgets.HBox(top, layout=WRAP), *below, self.picture_area], **start)
            for name, control in self.controls.items():
                traitlets.link((self, name), (control, "value"))
            self.observe(lambda _: self._changed(), list(start))
        self._changed()

    def drawing(self, **values: Any) -> Drawing:
        """The picture of the traits' values."""
        raise NotImplementedError

    def adapt(self) -> None:
        """Bring into line what depends on the traits: the end of a slider, a button that has nothing to do."""

    def reset(self) -> None:
        """As it was at first."""
        with self._together():
            for name, value in self._start.items():
                setattr(self, name, value)
                self.adapt()
        self._changed()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What changes in here is drawn once, after it."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _changed(self) -> None:
        if self._quiet:
            return
        with self._together():
            self.adapt()
            for name, control in self.controls.items():  # a slider stops at its end
                setattr(self, name, control.value)
        self.picture_area.value = self.html()

    def values(self) -> dict[str, Any]:
        """What is shown: trait -> value."""
        return {name: getattr(self, name) for name in self._start}

    def html(self) -> str:
        """The live picture, in the colors of the page; one wider than a board scrolls."""
        drawing = self.drawing(**self.values())
        scroll = drawing.width > board.WIDTH
        return f'<div tabindex="0" style="overflow-x:auto">{board.svg(drawing)}</div>' if scroll else board.svg(drawing)

    def sentence(self) -> str:
        """What the picture shows, in words."""
        return self.drawing(**self.values()).words

    def picture(self) -> style.Picture:
        """The picture that a saved notebook keeps."""
        return board.still(self.drawing(**self._still))

    def __repr__(self) -> str:
        return f"{self.title}: " + ", ".join(f"{name} {value}" for name, value in self._start.items())

    def _repr_png_(self) -> tuple[bytes, dict]:
        # PNG and not SVG: JupyterLab shows no SVG of a notebook that it does not trust, which a fresh clone is.
        picture = self.picture()
        return picture.data, {"width": picture.width, "alt": picture.alt}


class Walk(View):
    """A view of steps, of which 0 is the beginning: `step` is a trait, its slider goes to `last()`, a button steps on."""

    step = traitlets.Int(0)

    def __init__(self, controls: Mapping[str, widgets.Widget], start: Mapping[str, Any], **options: Any):
        slide = slider("step", 0, 1, 240)
        self.forward_button = button("forward", lambda: setattr(self, "step", self.step + 1))
        options["row"] = [*options.get("row", controls.values()), slide, self.forward_button]
        super().__init__({**controls, "step": slide}, {**start, "step": 0}, **options)

    def last(self) -> int:
        """The last step, for the other traits as they are."""
        raise NotImplementedError

    def adapt(self) -> None:
        self.controls["step"].max = self.last()
        self.step = min(max(self.step, 0), self.last())
        self.forward_button.disabled = self.step == self.last()


# ---- controls --------------------------------------------------------------------------------------------------------


def button(description: str, action: Callable[[], Any], tooltip: str = "") -> widgets.Button:
    made = widgets.Button(description=description, tooltip=tooltip, layout={"width": f"{30 + 8 * len(description)}px"})
    made.on_click(lambda _: action())
    return made


def menu(description: str, options: Sequence, width: int) -> widgets.Dropdown:
    """options: values, or (name, value)."""
    return widgets.Dropdown(options=list(options), description=description, style=CAPTION, layout=_wide(width))


def slider(description: str, low: int, high: int, width: int) -> widgets.IntSlider:
    return widgets.IntSlider(low, low, high, description=description, style=CAPTION, layout=_wide(width))


def field(description: str, width: int) -> widgets.Text:
    """A line of text that counts when Enter is pressed or the field is left."""
    return widgets.Text(description=description, style=CAPTION, layout=_wide(width), continuous_update=False)


def _wide(pixels: int) -> dict[str, str]:
    return {"width": f"{pixels}px", "flex": "0 0 auto"}
