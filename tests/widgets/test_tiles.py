"""The tile viewer, without a browser: who owns what, its controls, and what a saved notebook keeps."""

import numpy as np
import pytest

from gpukit.accounting.tiling import Grid
from gpukit.widgets import board
from gpukit.widgets import tiles as module
from gpukit.widgets.tiles import tiles


def cells(view):
    return module.cells(view.grid, view.program)


def states(view):
    return [[state for state, _ in line] for line in cells(view)]


def texts(view):
    return [[text for _, text in line] for line in cells(view)]


def boxes(view):
    return [shape for shape in view.drawing(**view.values()).shapes if isinstance(shape, board.Box)]


def test_a_vector_has_one_line_a_program():
    view = tiles((13,), (4,), program=3)
    assert view.grid.size == (4,)
    assert module._heads(view.grid) == ["program 0", "program 1", "program 2", "program 3"]
    assert texts(view) == [["0"] * 4, ["1"] * 4, ["2"] * 4, ["12", "", "", ""]]
    assert states(view)[3] == ["now", "masked-now", "masked-now", "masked-now"]
    assert view.sentence() == (
        "Program 3 of grid (4,): 4 lanes, 1 with an element, 3 masked off (element 12). "
        "All together: 4 programs, 16 lanes for 13 elements, 3 masked off."
    )


def test_a_matrix_is_drawn_as_it_lies():
    view = tiles((6, 10), (4, 8), program=3)
    assert (view.grid.size, view.grid.ids(3)) == ((2, 2), (1, 1))
    assert texts(view)[4][8:10] == ["48", "49"] and texts(view)[0][8:10] == ["0,1", "0,1"]
    assert sum(state == "now" for line in states(view) for state in line) == 4
    assert sum(state.startswith("masked") for line in states(view) for state in line) == 128 - 60
    assert "rows 4 to 5, columns 8 to 9" in view.sentence()


@pytest.mark.parametrize("view", (tiles((13,), (4,), program=3), tiles((6, 10), (4, 8)), tiles((24, 24), (16, 16))))
def test_every_lane_is_a_box_and_every_program_has_a_frame(view):
    drawn = boxes(view)
    assert [(box.title, box.text) for box in drawn if box.title] == [
        (module._WORDS[state], text) for line in cells(view) for state, text in line
    ]
    frames = [box for box in drawn if box.edge == board.INK]
    cell = next(box.width for box in drawn if box.title)
    assert len(frames) == view.grid.programs
    assert sum(frame.width * frame.height for frame in frames) == pytest.approx(
        view.grid.programs * np.prod(view.grid.block) * cell**2
    )
    assert max(box.x + box.width for box in drawn) <= board.WIDTH


def test_states_differ_in_more_than_colour():
    by_words = {box.title: box for box in boxes(tiles((6, 10), (4, 8), program=3)) if box.title}
    assert set(by_words) == set(module._WORDS.values())
    looks = {state: by_words[text] for state, text in module._WORDS.items()}
    assert looks["masked"].hatch != looks["masked-now"].hatch != "none" != looks["masked"].hatch
    assert looks["now"].hatch == looks["other"].hatch == "none" and looks["now"].bold and not looks["other"].bold


@pytest.mark.parametrize(
    ("shape", "block"),
    (((1,), (1,)), ((24,), (16,)), ((5,), (8,)), ((3, 7), (2, 4)), ((24, 24), (16, 16)), ((1, 9), (4, 2))),
)
def test_every_element_has_one_owner(shape, block):
    view = tiles(shape, block)
    owned = np.zeros(shape, dtype=int)
    for program in range(view.grid.programs):
        view.program = program
        lanes, owns = view.grid.lanes(program), view.grid.owns(program)
        assert owns == [range(r.start, min(r.stop, n)) for r, n in zip(lanes, shape, strict=True)]
        assert [len(r) for r in lanes] == list(block)
        owned[np.ix_(*map(list, owns))] += 1
        now = [int(text) for line in cells(view) for state, text in line if state == "now"]
        assert sorted(now) == sorted(np.arange(owned.size).reshape(shape)[np.ix_(*map(list, owns))].ravel().tolist())
    assert (owned == 1).all()


def test_the_first_axis_of_the_grid_moves_fastest():
    assert [Grid((8, 4), (4, 2)).ids(program) for program in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_controls_follow_each_other_and_reset():
    view = tiles((13,), (4,), program=3)
    before = view.picture_area.value
    view.controls["BLOCK_N"].value = 8
    assert (view.grid.programs, view.controls["program"].max, view.program) == (2, 1, 1)
    assert "Program 1 of grid (2,)" in view.picture_area.value
    view.controls["N"].value = 16
    assert "0 masked off" in view.sentence() and view.sentence().count("masked off") == 1
    view.reset_button.click()
    assert (view.grid, view.program) == (Grid((13,), (4,)), 3)
    assert view.picture_area.value == before


def test_what_a_saved_notebook_keeps():
    view = tiles((6, 10), (4, 8), program=3)
    data, metadata = view._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000
    assert metadata["alt"].startswith("Program (1, 1) of grid (2, 2)")
    assert repr(view) == "tile viewer: a tensor [6, 10] in blocks of 4 x 8, program 3"
    view.program = 0
    assert repr(view) == "tile viewer: a tensor [6, 10] in blocks of 4 x 8, program 3"
    assert view._repr_png_()[0] == data != tiles((6, 10), (4, 8)).picture().data


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        (((2, 2, 2), (1, 1, 1)), "one or two numbers"),
        (((4,), (2, 2)), "one or two numbers"),
        (((25,), (4,)), "each size must be 1 to 24"),
        (((0,), (4,)), "each size must be 1 to 24"),
        (((4,), (3,)), "each block size must be one of"),
        (((13,), (4,), 4), "program must be 0 to 3, got 4"),
    ),
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        tiles(*arguments)
