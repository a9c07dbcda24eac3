"""The access viewer, without a browser: what each step shows, its controls, and what a saved notebook keeps."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit.simulator.trace.replay import BEFORE, FETCHED, NOW, UNTOUCHED, after
from gpukit.widgets import board, style
from gpukit.widgets.access import access


@triton.jit
def share_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    first = tl.program_id(0) * N
    lanes = tl.arange(0, BLOCK_N)
    inside = lanes < N
    x = tl.load(x_ptr + first + lanes, mask=inside, other=0.0)
    tl.store(y_ptr + first + lanes, x / tl.sum(x, axis=0), mask=inside)


def traced(rows: int, columns: int, dtype=torch.float32, detail: bool = True):
    x = torch.ones(rows, columns, dtype=dtype)
    with gpukit.trace(detail=detail) as t:
        share_kernel[(rows,)](x, torch.empty_like(x), columns, BLOCK_N=triton.next_power_of_2(columns))
    return t.launches[0]


SHAPES = {"x_ptr": (4, 13), "y_ptr": (4, 13)}


@pytest.fixture(scope="module")
def launch():
    return traced(4, 13)


@pytest.fixture
def view(launch):
    return access(launch, SHAPES)


def test_steps_are_the_accesses_in_order(view):
    assert view.controls["step"].max == 8
    texts = [view.told(step) for step in range(1, 9)]
    assert [text.split()[1] for text in texts] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [text.split()[2] for text in texts] == ["loads", "stores"] * 4


def test_frame_shows_now_before_fetched_and_masked(view):
    x, y = view.memories
    frame = after(view.events, x, 3)  # program 1 loads elements 13 to 25, which lie in sectors 1 to 3
    assert np.flatnonzero(frame.state == NOW).tolist() == list(range(13, 26))
    assert np.flatnonzero(frame.state == BEFORE).tolist() == list(range(8))
    assert np.flatnonzero(frame.state == FETCHED).tolist() == [*range(8, 13), *range(26, 32)]
    assert frame.program[:26] == ["0"] * 13 + ["1"] * 13
    assert (frame.masked_row, frame.masked) == (1, 3)
    assert np.flatnonzero(after(view.events, y, 3).state).tolist() == list(range(13))  # only program 0 has stored
    assert after(view.events, y, 3).masked == 0


def test_every_element_is_touched_once_in_the_end(view):
    for memory in view.memories:
        frame = after(view.events, memory, 8)
        assert frame.program == [str(row) for row in range(4) for _ in range(13)]
        assert all(frame.state != UNTOUCHED)


def test_sentence_counts_bytes_and_sectors(view):
    assert view.told(1).startswith(
        "Program 0 loads 13 elements of x: 52 bytes, in 2 sectors of 32 = 64 bytes; 3 lanes masked off. Line "
    )
    assert "in 3 sectors of 32 = 96 bytes" in view.told(3)
    assert "tl.load(x_ptr + first + lanes" in view.told(1)


@pytest.mark.parametrize(("dtype", "itemsize"), ((torch.float16, 2), (torch.float64, 8)))
def test_sectors_depend_on_the_dtype(dtype, itemsize):
    view = access(traced(2, 16, dtype), {"x_ptr": (2, 16), "y_ptr": (2, 16)})
    memory = view.memories[0]
    assert memory.itemsize == itemsize
    assert sum(memory.sector_begins(offset) for offset in range(32)) == 32 * itemsize // 32


def test_buttons_slider_and_reset_move_the_picture(view):
    shown = {view.picture_area.value}
    for button, step in ((view.forward_button, 1), (view.forward_button, 2), (view.back_button, 1)):
        button.click()
        assert view.controls["step"].value == step
        shown.add(view.picture_area.value)
    assert len(shown) == 3
    view.controls["step"].value = 8
    assert view.forward_button.disabled
    view.forward_button.click()
    assert view.controls["step"].value == 8
    view.reset_button.click()
    assert view.controls["step"].value == 0
    assert view.back_button.disabled
    assert view.picture_area.value in shown


def test_play_goes_through_every_step_and_follows_the_slider(view):
    assert (view.play.min, view.play.max, view.play.step) == (0, 8, 1) and not view.play.repeat
    shown = []
    for step in range(9):  # what the browser does every PLAY_MS
        view.play.value = step
        shown.append(view.picture_area.value)
    assert view.controls["step"].value == 8 and len(set(shown)) == 9
    view.controls["step"].value = 3
    assert view.play.value == 3 and view.picture_area.value == shown[3]
    view.reset_button.click()
    assert view.play.value == 0


def test_at_most_five_controls(view):
    assert len(view.children[0].children) <= 5


def test_every_element_is_a_box_and_its_state_a_look(view):
    view.step = 3
    drawn = view.drawing(3).shapes
    x, y = (view.memories[i] for i in range(2))
    boxes = [s for s in drawn if isinstance(s, board.Box) and s.title.startswith("element")]
    states = [*after(view.events, x, 3).state, *after(view.events, y, 3).state]
    looks = {
        NOW: (style.READS, 1.0),
        BEFORE: (style.READS, 0.33),
        FETCHED: (style.WASTE, 0.6),
        UNTOUCHED: ("none", 1.0),
    }
    for box, state in zip(boxes[:52], states, strict=False):
        assert (box.fill, box.opacity) == looks[state]
    assert len(boxes) == 104 and boxes[13].title == "element 13, sector 1" and boxes[13].text == "1"
    assert sum(isinstance(s, board.Line) for s in drawn) == 2 * 7  # 52 elements of 4 bytes begin 7 sectors
    masked = [s for s in drawn if isinstance(s, board.Box) and s.title == "lane masked off"]
    assert len(masked) == 3 and all(s.dashed for s in masked)


def test_tensors_wider_than_the_board_can_be_scrolled():
    wide = access(traced(1, 60), {"x_ptr": (1, 60)})
    assert wide.drawing(0).width > board.WIDTH and 'tabindex="0" style="overflow-x:auto"' in wide.picture_area.value
    assert wide.picture().width == board.WIDTH


def test_board_is_svg_that_cannot_be_broken_by_source_lines(view):
    view.step = 1
    assert "tl.load(x_ptr" in view.picture_area.value
    assert "lanes &lt; N" not in view.picture_area.value  # only the line of the access is quoted
    assert ElementTree.fromstring(view.picture_area.value).get("aria-label") == view.sentence()


def test_saved_form_is_constant_and_small(view):
    assert repr(view) == "access viewer: share_kernel on x [4, 13] and y [4, 13], 8 steps"
    view.controls["step"].value = 5
    assert repr(view) == "access viewer: share_kernel on x [4, 13] and y [4, 13], 8 steps"
    data, metadata = view._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 100_000
    assert metadata["alt"].startswith("Step 0 of 8. Before the launch of share_kernel: 4 programs, 8 accesses.")
    assert data == view._repr_png_()[0]


def test_still_picks_the_step_of_the_saved_picture(launch):
    alt = access(launch, SHAPES, still=3)._repr_png_()[1]["alt"]
    assert alt.startswith("Step 3 of 8. Program 1 loads 13 elements of x")
    assert access(launch, SHAPES, still=99).picture().alt.startswith("Step 8 of 8.")


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: access(traced(4, 13, detail=False), SHAPES), "detail=True"),
        (lambda: access(traced(4, 13), {"z_ptr": (4, 13)}), "touches no 'z_ptr'; it touches x_ptr, y_ptr"),
        (lambda: access(traced(4, 13), {"x_ptr": (2, 13)}), r"touched at element 51, outside its shape \[2, 13\]"),
        (lambda: access(traced(2, 700), {"x_ptr": (2, 700)}), "at most 1,024 elements, got 1,400"),
    ),
)
def test_error_names_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
