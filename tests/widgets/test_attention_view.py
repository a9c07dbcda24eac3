"""The viewer of notebook 13, without a browser."""

import re
import xml.etree.ElementTree as ElementTree

import ipywidgets as widgets
import pytest
import torch
import traitlets

from gpukit.widgets import board, style
from gpukit.widgets.attention import attention

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(10, 16, generator=GENERATOR).tolist()
VALUES = torch.randn(16, generator=GENERATOR).tolist()


def view(**options):
    return attention(SCORES, VALUES, **options)


def root(shown) -> ElementTree.Element:
    return ElementTree.fromstring(shown.picture_area.value)


# ---- the viewer ------------------------------------------------------------------------------------------------------


def test_controls():
    controls = view().children[0].children
    assert len(controls) == 5 and all(c.description for c in controls)
    assert [c.description for c in controls if isinstance(c, widgets.Button)][-1] == "reset"


@pytest.mark.parametrize("mask", ("all", "causal", "window"))
def test_picture_is_svg_within_its_frame_in_the_colours_of_the_course(mask):
    shown = view(mask=mask)
    for step in (0, 3, shown.controls["step"].max):
        shown.step = step
        svg = root(shown)
        assert svg.get("role") == "img" and svg.get("aria-label") == shown.sentence()
        _, _, width, height = map(float, svg.get("viewBox").split())
        for rect in svg.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert -1 <= x and x + w <= width + 1 and -1 <= y and y + h <= height + 1
        used = {c.upper() for c in re.findall(r"#[0-9a-fA-F]{6}", shown.picture_area.value)}
        own = {*style.COLOURS.values(), board.DARK, board.LIGHT, "#BDBDBD"}
        assert used <= {colour.upper() for colour in own}


def test_steps_tell_the_block_and_the_state():
    shown = view(query=5)
    assert shown.sentence().startswith("10 queries, 16 keys, 12 blocks: 6 seen whole, 5 cut, 1 left out. Before")
    for _ in range(5):
        shown.forward_button.click()
    assert "Step 5 of 11: program 1, block 1 of the keys, seen whole: no mask." in shown.sentence()
    states = shown.blocks_of("causal").states(5, SCORES[5], VALUES, 5)
    assert [column for column, _ in states] == [0, 1]
    scores, values = torch.tensor(SCORES[5][:8]), torch.tensor(VALUES[:8])
    assert states[-1][1].o == pytest.approx(float(scores.softmax(0) @ values), rel=1e-5)
    assert not any(text.text.startswith("o = ") for text in root(shown).iter("text"))
    shown.step = shown.controls["step"].max
    last = shown.blocks_of("causal").states(5, SCORES[5], VALUES, shown.step)[-1][1]
    assert f"o = {last.o:.3f}, LSE = {last.lse:.3f}" in [text.text for text in root(shown).iter("text")]
    assert shown.forward_button.disabled


def test_another_mask_has_other_blocks():
    shown = view()
    shown.step = 11
    shown.controls["mask"].value = "window"
    assert shown.step == shown.controls["step"].max == 8
    shown.controls["mask"].value = "all"
    assert shown.controls["step"].max == 12
    with pytest.raises(traitlets.TraitError):
        shown.mask = "some"
    before = view().picture_area.value
    shown.reset_button.click()
    assert shown.picture_area.value == before


def test_queries_that_see_nothing():
    shown = attention(torch.zeros(6, 2).tolist(), [1.0, 2.0], query=1)
    shown.step = shown.controls["step"].max
    assert "o = 0.000, LSE = -inf" in [text.text for text in root(shown).iter("text")]


def test_saved_form_is_constant_and_small():
    shown = view(query=5, step=7)
    text, (data, metadata) = repr(shown), shown._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) <= style.MAX_PNG_BYTES
    assert "Step 7 of 11" in metadata["alt"]
    shown.mask, shown.query, shown.step = "all", 2, 3
    assert repr(shown) == text and shown._repr_png_()[0] == data


@pytest.mark.parametrize(
    ("scores", "values", "options", "message"),
    (
        ([], [], {}, "scores must be 1 to 24 rows"),
        ([[1.0] * 30], [1.0] * 30, {}, "scores must be 1 to 24 rows"),
        ([[1.0], [1.0, 2.0]], [1.0], {}, "rows of one length"),
        ([[1.0, 2.0]], [1.0], {}, "values must be one number a key, 2, got 1"),
        ([[1.0]], [1.0], {"mask": "none"}, "mask must be one of all, causal, window, got 'none'"),
        ([[1.0]], [1.0], {"query": 1}, "query must be 0 to 0, got 1"),
        ([[1.0]], [1.0], {"block": (0, 4)}, "BLOCK_M must be a whole number"),
        ([[1.0]], [1.0], {"window": 0}, "window must be a whole number"),
    ),
)
def test_viewer_errors(scores, values, options, message):
    with pytest.raises(ValueError, match=message):
        attention(scores, values, **options)
