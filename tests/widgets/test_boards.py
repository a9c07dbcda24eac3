"""The viewers of notebook 07, without a browser: what they show, their controls, and what a saved notebook keeps."""

import re
import xml.etree.ElementTree as ElementTree

import ipywidgets as widgets
import pytest
import traitlets

from gpukit.accounting.roofline import Point
from gpukit.accounting.tiling import Tiling
from gpukit.widgets import board, style
from gpukit.widgets.board import Box, Dot, Drawing, Line, Words
from gpukit.widgets.cache import cache
from gpukit.widgets.roofline import roofline
from gpukit.widgets.waves import efficiency, waves
from tests.calls import REDRAW, calls

POINTS = [Point("naive", 1e9, 2e9), Point("mine", 1e12, 1e9, time_us=2000), Point("model", 1e12, 2e9, 1500, "modelled")]
VIEWS = {
    "waves": lambda: waves(1793, gpu="a100", tile=(256, 128), wave=2),
    "cache": lambda: cache(group_m=3, still=14),
    "roofline": lambda: roofline(POINTS, gpu="h200", dtype="bf16"),
}


@pytest.fixture(params=VIEWS)
def view(request):
    return VIEWS[request.param]()


def root(view) -> ElementTree.Element:
    return ElementTree.fromstring(view.picture_area.value)


# ---- what all of them have in common ---------------------------------------------------------------------------------


def test_at_most_five_controls_and_one_of_them_resets(view):
    controls = view.children[0].children
    assert 2 <= len(controls) <= 5
    assert [c.description for c in controls if isinstance(c, widgets.Button)][-1] == "reset"
    assert all(isinstance(c, widgets.Button) or c.description for c in controls)


def test_live_picture_is_svg_with_words_for_those_who_cannot_see_it(view):
    svg = root(view)
    assert svg.tag == "svg" and svg.get("role") == "img"
    assert svg.get("aria-label") == view.sentence()
    _, _, width, height = map(float, svg.get("viewBox").split())
    for rect in svg.iter("rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert -1 <= x and x + w <= width + 1 and -1 <= y and y + h <= height + 1


def test_saved_form_is_constant_and_small(view):
    text = repr(view)
    data, metadata = view._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) <= style.MAX_PNG_BYTES
    assert metadata["alt"]
    for trait, value in (("wave", 1), ("step", 3), ("gpu", "t4")):
        if trait in view.trait_names():
            setattr(view, trait, value)
    assert repr(view) == text
    assert view._repr_png_()[0] == data


def test_colours_are_those_of_the_course(view):
    used = {c.upper() for c in re.findall(r"#[0-9a-fA-F]{6}", view.picture_area.value)}
    own = {*style.COLOURS.values(), board.DARK, board.LIGHT, "#BDBDBD"}
    assert used <= {colour.upper() for colour in own}


def test_reset_restores_the_first_picture():
    for make, changes in (
        (VIEWS["waves"], {"size": 3000, "gpu": "t4", "tile": (64, 64), "wave": 4}),
        (VIEWS["cache"], {"group_m": 9, "capacity": 90, "step": 7}),
        (VIEWS["roofline"], {"gpu": "t4"}),
    ):
        view = make()
        before = view.picture_area.value
        for name, value in changes.items():
            setattr(view, name, value)
        assert view.picture_area.value != before
        view.children[0].children[-1].click()
        assert view.picture_area.value == before


@pytest.mark.parametrize(
    ("make", "change"),
    (
        (lambda: waves(16384, gpu="t4", tile=(32, 32)), lambda view: setattr(view, "wave", 3000)),
        (lambda: waves(4096, gpu="b200", tile=(128, 128)), lambda view: setattr(view, "size", 4095)),
        (lambda: cache(tiles=12, sms=16, capacity=96), lambda view: setattr(view, "step", 50)),
        (lambda: cache(tiles=12, sms=16), lambda view: setattr(view, "capacity", 24)),
        (lambda: roofline(POINTS), lambda view: setattr(view, "gpu", "a100-80gb")),
    ),
)
def test_a_redraw_is_quick(make, change):
    view = make()
    assert calls(lambda: change(view)) < REDRAW


# ---- waves -----------------------------------------------------------------------------------------------------------


def test_waves_says_what_is_idle():
    view = VIEWS["waves"]()
    assert view.sentence() == (
        "A100 80GB SXM. Wave 2 of 2 computes tiles 108 to 119; 96 of 108 SMs are idle. C [1793, 1793] takes 8 x 15 = 120 "
        "tiles of 256 x 128. 45% of what is paid for is used: 82% of the tiles' area, 56% of the places in the waves."
    )
    titles = [title.text for title in root(view).iter("title")]
    assert len(titles) == 108
    assert titles[0] == "SM 0: tile 108" and titles[11] == "SM 11: tile 119"
    assert titles[12:] == [f"SM {sm}: idle" for sm in range(12, 108)]
    view.wave = 1
    assert "all 108 SMs work" in view.sentence()


def test_waves_follows_size_gpu_and_tile():
    view = VIEWS["waves"]()
    view.controls["size"].value = 1792  # one press of the arrow key
    assert (view.tiling.tiles, view.tiling.waves, view.wave, view.controls["wave"].max) == (98, 1, 1, 1)
    view.controls["gpu"].value = "t4"
    assert view.tiling.sms == 40 and view.controls["wave"].max == 3
    view.controls["tile"].value = (64, 64)
    assert view.tiling == Tiling(1792, 1792, 64, 64, 40)
    with pytest.raises(traitlets.TraitError, match="size must be 1 to 16,384, got 0"):
        view.size = 0


def test_two_programs_an_sm():
    view = waves(1024, gpu="t4", tile=(128, 128), programs_per_sm=2)
    titles = [title.text for title in root(view).iter("title")]
    assert titles[0] == "SM 0: tile 0, tile 40" and titles[39] == "SM 39: tile 39"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"size": 0}, "waves: size must be a whole number from 1 to 16,384, got 0"),
        ({"size": 64, "tile": (0, 4)}, "waves: tile must be a whole number"),
        ({"size": 64, "gpu": "abacus"}, "no GPU is called 'abacus'"),
        ({"size": 16384, "tile": (1, 1)}, "more than a million tiles of 1 x 1"),
    ),
)
def test_waves_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        waves(**arguments)


def test_the_saw_names_what_it_marks():
    picture = efficiency([(n, Tiling(n, n, 256, 128, 108).efficiency) for n in range(1700, 1900)], (1792, 1793), "A100")
    assert picture.alt.startswith(
        "A100: share of the peak that is left, from 1,700 to 1,899; 91% at 1,792; 45% at 1,793"
    )


# ---- cache -----------------------------------------------------------------------------------------------------------


def test_cache_steps_and_marks():
    view = VIEWS["cache"]()
    assert view.sentence().startswith("Before the launch: 81 programs, 9 at a time")
    view.forward_button.click()
    assert view.step == view.controls["step"].value == 1
    assert "18 requests are for 6 different pieces: 6 come from memory, 0 were in L2" in view.sentence()
    texts = [text.text for text in root(view).iter("text")]
    assert texts.count("M") == 6 + 1  # and the one in the legend
    view.controls["step"].value = 10  # the second wave: its rows of A have stayed
    assert "3 come from memory, 3 were in L2" in view.sentence()
    assert [text.text for text in root(view).iter("text")].count("2") >= 3 + 1


def test_cache_compares_the_orders():
    view = VIEWS["cache"]()
    view.step = 81
    texts = [text.text for text in root(view).iter("text")]
    assert "810  (44% hits)" in texts and "324  (78% hits)" in texts
    assert view.forward_button.disabled
    view.forward_button.click()
    assert view.step == 81


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"tiles": 13}, "cache: tiles must be a whole number from 1 to 12, got 13"),
        ({"sms": 0}, "cache: sms must be"),
        ({"group_m": 10}, "cache: group_m must be a whole number from 1 to 9, got 10"),
    ),
)
def test_cache_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        cache(**arguments)


# ---- roofline --------------------------------------------------------------------------------------------------------


def test_roofline_places_points_and_says_where():
    view = VIEWS["roofline"]()
    assert "naive: 0.500 FLOPs per byte, 2.40 TFLOP/s at most, limited by memory" in view.sentence()
    assert "mine: 1,000 FLOPs per byte, 500 TFLOP/s measured, 51% of the roof there" in view.sentence()
    circles = {circle.find("title").text.partition(":")[0]: circle for circle in root(view).iter("circle")}
    assert set(circles) == {"naive", "mine", "model"}
    assert float(circles["naive"].get("cx")) < float(circles["model"].get("cx")) < float(circles["mine"].get("cx"))
    assert float(circles["naive"].get("cy")) > float(circles["mine"].get("cy"))
    assert "fill:none" in circles["naive"].get("style")  # a ring: no time is known
    assert style.YOURS in circles["mine"].get("style") and style.PEER in circles["model"].get("style")


def test_roofline_keeps_to_what_the_gpu_can():
    view = VIEWS["roofline"]()
    view.gpu = "t4"
    assert view.dtype == view.controls["dtype"].value == "fp16"  # a T4 has no bf16
    view.controls["dtype"].value = "fp32"
    assert view.dtype == "fp32" and "T4, fp32" in view.sentence()
    with pytest.raises(traitlets.TraitError, match="dtype must be one of fp64, fp32, fp16, int8, got 'fp8'"):
        view.dtype = "fp8"
    view.reset_button.click()
    assert (view.gpu, view.dtype) == ("h200", "bf16")


def test_names_of_neighbours_do_not_lie_on_each_other():
    same = [Point(f"kernel {i}", 1e9 * (1 + i / 50), 1e9) for i in range(5)]
    heights = [float(t.get("y")) for t in root(roofline(same)).iter("text") if t.text.startswith("kernel")]
    assert min(b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)) >= 14


@pytest.mark.parametrize("intensity", [30, 60, 90, 120, 180, 205, 207, 400])
def test_the_line_at_the_ridge_goes_through_no_name(intensity):
    view = roofline([Point("a long name", 1e9 * intensity, 1e9)], gpu="h200", dtype="bf16")
    (dashed,) = (line for line in root(view).iter("polyline") if "dasharray" in line.get("style"))
    ridge = float(dashed.get("points").partition(",")[0])
    (name,) = (text for text in root(view).iter("text") if text.text == "a long name")
    begin = float(name.get("x"))
    assert not begin < ridge < begin + 7 * len(name.text)


def test_roofline_errors():
    with pytest.raises(ValueError, match="points must be 1 to 12 kernels, got 0"):
        roofline([])
    with pytest.raises(ValueError, match="dtype must be one of"):
        roofline(POINTS, gpu="t4", dtype="bf16")


# ---- the board -------------------------------------------------------------------------------------------------------


def test_board_escapes_and_draws_both_ways():
    shapes = [
        Box(0, 0, 20, 10, style.READS, 0.5, edge=board.INK, text="<b>", title='"&"'),
        Line(((0, 0), (20, 10)), dashed=True),
        Dot(5, 5, 2, style.YOURS, board.INK, "a < b"),
        Words(1, 1, "x & y", "right", bold=True),
    ]
    svg = ElementTree.fromstring(board.svg(Drawing(shapes, 50, 'alt "<"', 100)))
    assert svg.get("aria-label") == 'alt "<"'
    assert [text.text for text in svg.iter("text")] == ["<b>", "x & y"]
    picture = board.still(Drawing(shapes, 50, "four shapes", 100))
    assert picture.data.startswith(b"\x89PNG") and picture.alt == "four shapes" and picture.width == 100
