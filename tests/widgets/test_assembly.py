"""The listing of a compiled kernel's stages and its viewer, without a browser."""

import ipywidgets as widgets
import pytest
import torch
import traitlets
import triton
import triton.language as tl

import gpukit
from gpukit.simulator.compiler import assembly as instructions
from gpukit.simulator.compiler import listing
from gpukit.simulator.compiler.listing import STAGES
from gpukit.widgets import assembly as module
from gpukit.widgets import board, style
from gpukit.widgets.assembly import assembly

OLD = triton.__version__ < "3.9"  # 3.6 and 3.7 do not say which line called a function that was inlined


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def mixed_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    total = tl.sum(tl.exp2(x), axis=0)
    tl.store(y_ptr + offs, _twice(x) * total, mask=offs < n)


FIRST = mixed_kernel.fn.__code__.co_firstlineno + 1  # below the decorator
LOAD, SUM, STORE = FIRST + 2, FIRST + 3, FIRST + 4


@pytest.fixture(scope="module")
def compiled():
    x = torch.empty(4096, device="meta")
    return gpukit.compile(mixed_kernel, x, x, 4096, BLOCK=1024, gpu="h100")


@pytest.fixture
def view(compiled):
    return assembly(compiled, stage="SASS", line=LOAD)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_rows_know_what_they_do_and_where_they_came_from(compiled, stage):
    rows = listing.listing(compiled, stage)
    file = compiled.file
    load = [row for row in rows if row.kind == listing.LOAD]
    store = [row for row in rows if row.kind == listing.STORE]
    assert load and all(row.came_from(file, LOAD) and not row.came_from(file, STORE) for row in load)
    assert store and all(row.came_from(file, STORE) for row in store)
    if stage in ("PTX", "SASS"):  # 8 elements a thread, in pieces of 16 bytes
        assert [row.bits for row in load] == [row.bits for row in store] == [128, 128]
        assert any(row.kind == listing.SPECIAL and row.came_from(file, SUM) for row in rows)
        assert any(row.kind == listing.SHARED and (row.came_from(file, SUM) or OLD) for row in rows)
        assert any(row.kind == listing.BARRIER for row in rows)


def test_a_line_inside_a_called_function_also_belongs_to_the_caller(compiled):
    helper = _twice.fn.__code__.co_firstlineno + 2
    doubled = [row for row in listing.listing(compiled, "PTX") if row.came_from(compiled.file, helper)]
    assert doubled and all(row.came_from(compiled.file, STORE) or OLD for row in doubled)
    assert helper in compiled.source and (STORE in compiled.source or OLD)


def test_an_unknown_stage(compiled):
    with pytest.raises(ValueError, match="stage must be one of TTIR, TTGIR, PTX, SASS, got 'LLIR'"):
        listing.listing(compiled, "LLIR")


_PTX = """
    ld.local.b32 %r1, [%rd1];
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    cp.async.wait_group 0;
    bar.sync 0;
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
    wgmma.wait_group.sync.aligned 0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    atom.global.gpu.acq_rel.add.f32 %f1, [%rd1], %f2;
    ex2.approx.ftz.f32 %f1, %f2;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    st.global.b16 [%rd1], %rs1;
    add.f32 %f1, %f2, %f3;
"""


def test_kinds_of_ptx():
    kinds = [listing._ptx(instruction) for instruction in instructions.ptx(_PTX)]
    assert kinds == [
        (listing.SPILL, 0), (listing.SHARED, 0), (listing.COPY, 128), (listing.BARRIER, 0), (listing.BARRIER, 0),
        (listing.TENSOR, 0), (listing.BARRIER, 0), (listing.TENSOR, 0), (listing.ATOMIC, 32), (listing.SPECIAL, 0),
        (listing.LOAD, 128), (listing.STORE, 16), ("", 0),
    ]  # fmt: skip


# ---- the viewer -----------------------------------------------------------------------------------------------------


def test_choosing_a_line_marks_its_rows_and_folds_the_others(view):
    assert view.chosen() and all(row.came_from(view.compiled.file, LOAD) for row in view.chosen())
    shown = view.picture_area.value
    marked = f'fill="{style.YOURS}" fill-opacity="0.25"'
    assert shown.count(marked) == len(view.chosen()) + 1  # and the legend's
    assert "LDG.E.128" in shown and "more row" in shown and "STG" not in shown
    assert "2 x global load of 128 bits per thread" in view.sentence()
    counts = listing.counts(view.rows, view.chosen())
    assert counts[listing.LOAD] == (2, 2) and counts[listing.STORE] == (2, 0)


def test_menus_and_traits_follow_each_other_and_reset(view):
    view.controls["line"].value = STORE
    assert view.line == STORE and "STG.E.128" in view.picture_area.value
    view.stage = "PTX"
    assert view.controls["stage"].value == "PTX" and "st.global.v4.b32" in view.picture_area.value
    view.line = 0
    assert not view.chosen() and "more row" not in view.picture_area.value and view.sentence().endswith("instructions.")
    view.reset_button.click()
    assert (view.stage, view.line) == ("SASS", LOAD) and "LDG.E.128" in view.picture_area.value
    with pytest.raises(traitlets.TraitError):
        view.stage = "LLIR"


def test_controls_are_those_that_arrow_keys_work_in(view):
    assert isinstance(view.controls["stage"], widgets.Dropdown) and isinstance(view.controls["line"], widgets.Select)
    assert [value for _, value in view.controls["line"].options] == [0, *view.source]
    shown = view.picture_area.value
    assert (
        'tabindex="0"' in shown and shown.count('role="img"') == 1
    )  # the listing scrolls with keys and is read as text


def test_tags_say_in_words_what_their_colour_says(view):
    view.line = 0
    shapes, _ = module._lines(view.rows, [], 0, board.WIDTH)
    tags = [shape for shape in shapes if isinstance(shape, board.Box)]
    assert len(tags) == sum(bool(row.kind) for row in view.rows)
    words = {tag.title: tag.text.split()[0] for tag in tags}
    assert len(set(words.values())) == len(words)
    assert {tag.fill for tag in tags} <= set(style.COLOURS.values())


def test_a_long_listing_is_whole_on_the_page_and_cut_in_the_still(view, monkeypatch):
    rows = [listing.Row(f"{'X' * 200} {i}") for i in range(100)]
    monkeypatch.setitem(view._listings, "TTIR", rows)
    view.stage, view.line = "TTIR", 0
    assert all(f"X {i}</text>" in view.picture_area.value for i in range(100))
    words = [shape for shape in view.drawing("TTIR", 0).shapes if isinstance(shape, board.Words)]
    assert words[-1].text == "... and so on" and sum("XX" in each.text for each in words) == module._STILL_ROWS
    assert max(len(each.text) for each in words if "XX" in each.text) == module._STILL_COLUMNS


def test_source_cannot_break_the_page(view, monkeypatch):
    row = listing.Row("<script>", frames=((view.compiled.file, LOAD),))
    monkeypatch.setitem(view._listings, "TTIR", [row])
    view.stage = "TTIR"
    assert "<script>" not in view.picture_area.value and "&lt;script&gt;" in view.picture_area.value


def test_what_a_saved_notebook_keeps(view):
    text = repr(view)
    data, metadata = view._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) <= style.MAX_PNG_BYTES and "mixed_kernel" in metadata["alt"]
    view.stage, view.line = "PTX", 0
    assert repr(view) == text and view._repr_png_()[0] == data
    assert text.startswith("assembly viewer: mixed_kernel for H100 SXM, SASS: ") and "0x" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "LLIR"}, "assembly: stage must be one of TTIR, TTGIR, PTX, SASS, got 'LLIR'"),
        ({"line": 1}, "assembly: line must be 0 or a line of mixed_kernel, [0-9]+ to [0-9]+, got 1"),
    ],
)
def test_wrong_arguments_are_named(compiled, arguments, message):
    with pytest.raises(ValueError, match=message):
        assembly(compiled, **arguments)
