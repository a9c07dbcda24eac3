"""The tile viewer, without a browser: who owns what, its controls, and what a saved notebook keeps."""

import numpy as np
import pytest

from gpukit.widgets.tiles import tiles


def states(view):
    return [[state for state, _ in line] for line in view.cells()]


def texts(view):
    return [[text for _, text in line] for line in view.cells()]


def test_a_vector_has_one_line_a_program():
    view = tiles((13,), (4,), program=3)
    assert view.grid == (4,)
    assert view.heads() == ["program 0", "program 1", "program 2", "program 3"]
    assert texts(view) == [["0"] * 4, ["1"] * 4, ["2"] * 4, ["12", "", "", ""]]
    assert states(view)[3] == ["now", "masked-now", "masked-now", "masked-now"]
    assert view.sentence() == "Program 3 of grid (4,): 4 lanes, 1 with an element, 3 masked off (element 12)."
    assert view.total() == "All together: 4 programs, 16 lanes for 13 elements, 3 masked off."


def test_a_matrix_is_drawn_as_it_lies():
    view = tiles((6, 10), (4, 8), program=3)
    assert (view.grid, view.ids) == ((2, 2), (1, 1))
    assert texts(view)[4][8:10] == ["48", "49"] and texts(view)[0][8:10] == ["0,1", "0,1"]
    assert sum(state == "now" for line in states(view) for state in line) == 4
    assert sum(state.startswith("masked") for line in states(view) for state in line) == 128 - 60
    assert "rows 4 to 5, columns 8 to 9" in view.sentence()
    assert [view.begins_tile(row, 8) for row in (3, 4)] == [(False, True), (True, True)]


@pytest.mark.parametrize(
    ("shape", "block"),
    (((1,), (1,)), ((24,), (16,)), ((5,), (8,)), ((3, 7), (2, 4)), ((24, 24), (16, 16)), ((1, 9), (4, 2))),
)
def test_every_element_has_one_owner(shape, block):
    view = tiles(shape, block)
    owned = np.zeros(shape, dtype=int)
    for program in range(view.programs):
        view.program.value = program
        axes = [offs[offs < n] for offs, n in zip(view.lanes(), shape, strict=True)]
        owned[np.ix_(*axes)] += 1
        now = [int(text) for line in view.cells() for state, text in line if state == "now"]
        assert sorted(now) == sorted(np.arange(owned.size).reshape(shape)[np.ix_(*axes)].ravel().tolist())
    assert (owned == 1).all()


def test_the_first_axis_of_the_grid_moves_fastest():
    view = tiles((8, 4), (4, 2))
    seen = []
    for program in range(4):
        view.program.value = program
        seen.append(view.ids)
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_controls_follow_each_other_and_reset():
    view = tiles((13,), (4,), program=3)
    before = view.board.value
    view.blocks[0].value = 8
    assert (view.programs, view.program.max, view.program.value) == (2, 1, 1)
    assert "Program 1 of grid (2,)" in view.board.value
    view.sizes[0].value = 16
    assert "0 masked off" in view.total() and "masked off" not in view.sentence()
    view.reset_button.click()
    assert (view.shape, view.block, view.program.value) == ((13,), (4,), 3)
    assert view.board.value == before


def test_states_differ_in_more_than_colour():
    board = tiles((13,), (4,), program=3).board.value
    assert "repeating-linear-gradient" in board  # masked lanes are hatched
    assert 'title="its lanes without an element: masked off"' in board


def test_what_a_saved_notebook_keeps():
    view = tiles((6, 10), (4, 8), program=3)
    data, metadata = view._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000
    assert metadata["alt"].startswith("Program (1, 1) of grid (2, 2)")
    assert repr(view) == "tile viewer: a tensor [6, 10] in blocks of 4 x 8, program 3"
    view.program.value = 0
    assert repr(view) == "tile viewer: a tensor [6, 10] in blocks of 4 x 8, program 3"
    assert view.picture().data == tiles((6, 10), (4, 8)).picture().data


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
