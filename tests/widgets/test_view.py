"""The base of the views, on a view of squares: what it links, how often it draws, what a saved notebook keeps."""

import xml.etree.ElementTree as ElementTree

import pytest
import traitlets

from gpukit.widgets import board
from gpukit.widgets.board import Box, Drawing, Words
from gpukit.widgets.view import Walk, slider


class Squares(Walk):
    """`count` squares in a row, of which `step` are filled."""

    title = "squares"
    count = traitlets.Int()

    def __init__(self, count: int = 3, still: int = 2):
        self.drawn = 0
        super().__init__({"count": slider("count", 1, 99, 200)}, {"count": count}, still={"step": still})

    def last(self) -> int:
        return self.count

    def drawing(self, count: int, step: int) -> Drawing:
        self.drawn += 1
        boxes = [Box(20 * i, 0, 18, 18, "#000000" if i < step else "none", edge=board.INK) for i in range(count)]
        return Drawing(boxes, 20, f"{step} of {count}", max(20 * count, board.WIDTH))


def test_traits_and_controls_follow_each_other_and_each_change_is_drawn_once():
    view = Squares()
    assert view.drawn == 1 and view.sentence() == "0 of 3"
    for change in (
        lambda: setattr(view, "step", 3),
        lambda: setattr(view.controls["step"], "value", 2),
        lambda: setattr(view.controls["count"], "value", 1),  # takes the step with it
        view.reset_button.click,
    ):
        before, shown = view.drawn, view.picture_area.value
        change()
        assert view.drawn == before + 1 and view.picture_area.value != shown
        assert view.values() == {name: control.value for name, control in view.controls.items()}
    assert view.sentence() == "0 of 3"


def test_steps_end_where_they_end():
    view = Squares(count=5)
    view.step = 99
    assert view.step == view.controls["step"].value == 5 and view.forward_button.disabled
    view.count = 2
    assert (view.step, view.controls["step"].max) == (2, 2)
    view.count = 3
    view.forward_button.click()
    assert view.step == 3
    view.step = -4
    assert view.step == 0 and not view.forward_button.disabled


def test_what_is_saved_is_the_beginning_or_the_still_whatever_is_shown():
    view = Squares(still=2)
    data, metadata = view._repr_png_()
    assert metadata == {"width": board.WIDTH, "alt": "2 of 3"} and repr(view) == "squares: count 3, step 0"
    view.count, view.step = 7, 6
    assert view._repr_png_() == (data, metadata) and repr(view) == "squares: count 3, step 0"


def test_a_wide_drawing_scrolls_and_its_still_does_not():
    view = Squares(count=60)
    (svg,) = ElementTree.fromstring(view.picture_area.value)
    assert "overflow-x:auto" in view.picture_area.value and "width:1200px" in svg.get("style")
    assert view.picture().width == board.WIDTH
    assert ElementTree.fromstring(Squares().picture_area.value).tag == "svg"


@pytest.mark.parametrize("place", ((0, 0, 26, 26), (3.5, 117.2, 22.5, 20), (90, 54, 5, 400), (-7, 2, 3, 1)))
def test_stripes_stay_in_their_box_and_fill_it(place):
    x, y, width, height = place
    stripes = board._stripes(Box(*place, hatch="#000000"))
    assert board._stripes(Box(*place)) == []
    for (a, b), (c, d) in stripes:
        assert x <= a <= c <= x + width and y <= d <= b <= y + height
        assert a + b == pytest.approx(c + d)  # all of them rise at 45 degrees
    sums = [a + b for (a, b), _ in stripes]
    assert abs(len(sums) - (width + height) / board._STRIPES_APART) <= 1 and sums == sorted(sums)


def test_long_words_are_wrapped_and_short_boxes_shrink_their_text():
    shapes, y = board.paragraph("many words " * 40, 16)
    assert len(shapes) == 4 and y == 16 + 18 * 4 and all(len(s.text) <= 120 for s in shapes)
    assert board.paragraph("", 16) == ([], 16)
    assert board.fits("7", 26) == board.fits("", 26) == 11 > board.fits("23,23", 26) > 5


def test_code_keeps_its_blanks():
    shown = board.svg(Drawing([Words(0, 0, "    x  = 1", code=True)], 10, "code"))
    assert "white-space:pre" in shown and "    x  = 1" in shown and "--jp-code-font-family" in shown
