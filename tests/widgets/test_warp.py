"""The warp and bank viewers and the timeline, without a browser."""

import ipywidgets as widgets
import numpy as np
import pytest

from gpukit.simulator import simt
from gpukit.widgets import warp
from gpukit.widgets.board import Box
from gpukit.widgets.warp import PATTERNS, bank_viewer, timeline, warp_viewer


def cells(view):
    """The boxes of the words, without the legend's."""
    return [s for s in view.drawing(**view.values()).shapes if isinstance(s, Box) and s.height == warp._HIGH]


def count(view, look):
    return sum(look.items() <= vars(cell).items() for cell in cells(view))


def rows(view):
    return len({cell.y for cell in cells(view)})


def texts(view):
    return [cell.text for cell in cells(view)]


def test_neighbours_fill_one_line():
    view = warp_viewer(4, 1, 0, 32)
    assert rows(view) == 1
    assert texts(view) == [str(lane) for lane in range(32)]
    assert count(view, warp.WANTED) == 32
    assert "128 bytes wanted, 4 sectors = 128 bytes moved (100% of them used), 1 line" in view.sentence()


@pytest.mark.parametrize("element_bytes", (1, 2, 4, 8, 16))
@pytest.mark.parametrize(("stride", "offset", "lanes"), [(1, 0, 32), (2, 1, 32), (7, 3, 20), (32, 31, 32), (0, 5, 32)])
def test_cells_are_what_the_model_counts(element_bytes, stride, offset, lanes):
    view = warp_viewer(element_bytes, stride, offset, lanes)
    addresses = (offset + np.arange(lanes) * stride) * element_bytes
    wanted = {int(a + b) // 4 for a in addresses for b in range(element_bytes)}
    sectors = len({cell // 8 for cell in wanted})
    assert count(view, warp.WANTED) == len(wanted)
    assert count(view, warp.WANTED) + count(view, warp.WASTED) == 8 * sectors
    assert rows(view) == len({cell // 32 for cell in wanted}) and len(cells(view)) == 32 * rows(view)
    assert f"{sectors} sector" in view.sentence() and f"{sectors} sector" in repr(view)


def test_small_elements_share_a_cell_and_idle_lanes_want_nothing():
    view = warp_viewer(2, 1, 0, 5)
    assert texts(view)[:4] == ["0-1", "2-3", "4", ""]
    assert count(view, warp.WANTED) == 3 and count(view, warp.WASTED) == 5
    assert [cell.hatch != "none" for cell in cells(view)[:9]] == [False] * 3 + [True] * 5 + [False]
    empty = warp_viewer(lanes=0)
    assert cells(empty) == [] and "0 sectors" in empty.sentence()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pitch", (32, 33, 34, 40))
def test_banks(pattern, pitch):
    view = bank_viewer(pattern, pitch)
    row, column = PATTERNS[pattern](np.arange(32))
    words = set((row * pitch + column).tolist())
    passes = int(simt.bank_passes((row * pitch + column) * 4))
    assert count(view, warp.WANTED) == len({word % 32 for word in words})
    assert count(view, warp.WANTED) + count(view, warp.LATER) == len(words)
    assert repr(view).endswith(f"{passes} pass" + ("es" if passes > 1 else ""))
    if pattern == "a column":
        assert passes == {32: 32, 33: 1, 34: 2, 40: 8}[pitch]


def test_one_word_goes_to_every_lane():
    assert [text for text in texts(bank_viewer("one word", 32)) if text] == ["0-31"]


@pytest.mark.parametrize("viewer", (warp_viewer, bank_viewer))
def test_controls(viewer):
    shown = viewer()
    assert 2 <= len(shown.controls) <= 4  # and the reset
    assert all(isinstance(c, widgets.IntSlider | widgets.Dropdown) for c in shown.controls.values())
    assert all(c.description for c in shown.controls.values())
    before, text = shown.picture_area.value, repr(shown)
    slider = next(c for c in shown.controls.values() if isinstance(c, widgets.IntSlider))
    slider.value += 1
    assert shown.picture_area.value != before
    assert repr(shown) == text  # what a saved notebook keeps does not depend on what was clicked
    shown.reset_button.click()
    assert shown.picture_area.value == before


def test_the_board_can_be_told_apart_without_colour():
    view = warp_viewer(stride=3).picture_area.value
    assert view.count("<path") == 32 * 2 + 1  # waste is striped, also in the legend
    assert "<title>" in view and "wanted by the lane with this number" in view


@pytest.mark.parametrize(
    "viewer", (warp_viewer(2, 9), warp_viewer(lanes=0), warp_viewer(16, 32), bank_viewer(), bank_viewer("a row", 40))
)
def test_still(viewer):
    data, about = viewer._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000
    assert about["alt"] == viewer.sentence()
    assert data == viewer.picture().data
    assert len(repr(viewer)) < 110  # longer ones are cut off in a saved notebook


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: warp_viewer(3), "element_bytes must be one of 1, 2, 4, 8, 16, got 3"),
        (lambda: warp_viewer(stride=33), "stride must be one of"),
        (lambda: warp_viewer(lanes=64), "lanes must be one of"),
        (lambda: bank_viewer(pitch=31), "pitch 32 to 40"),
        (lambda: bank_viewer("a heap"), "pattern must be one of a column"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def half(t, x):
    with t.where(t.lane < 16):
        x[t.index] = 1.0


def test_timeline():
    x = np.zeros(64, dtype=np.float32)
    run = simt.launch(half, x, grid=1, block=64, detail=True)
    still = timeline(run, warp=1)
    assert still.alt == "Warp 1 issues 2 instructions; on average 24.0 of its 32 lanes are active in one."
    assert still.data.startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="detail=True"):
        timeline(simt.launch(half, x, grid=1, block=64))
    with pytest.raises(ValueError, match="warp must be 0 to 1, got 2"):
        timeline(run, warp=2)
