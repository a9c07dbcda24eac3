"""Widgets without a browser: the style, tables, predictions, the progress panel, the instructor's switch."""

import io
import re

import pytest
from PIL import Image

from gpukit import course
from gpukit.grading.registry import exercises
from gpukit.widgets import predict, progress, style
from gpukit.widgets.implementation import implementation
from gpukit.widgets.predict import parse, reveal


# ---- style -----------------------------------------------------------------------------------------------------------
def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_distinct_and_visible_on_both_themes():
    assert len(set(style.COLOURS.values())) == len(style.COLOURS) == 8
    for name, colour in style.COLOURS.items():
        for page in ("#FFFFFF", "#111111"):
            assert contrast(colour, page) >= 2, f"{name} on {page}"
    assert contrast(style.INK, "#FFFFFF") >= 7


def drawn():
    with style.use():
        fig, ax = style.figure()
        ax.plot([1, 10, 100], [1, 2, 3])
        style.axes(ax, x="row length (elements)", y="traffic (MiB)", log="x", grid="y")
        style.label(ax, 100, 3, "yours")
    return fig, ax


def test_a_figure_is_small_deterministic_and_twice_as_wide_as_high():
    first, second = (style.png(drawn()[0]) for _ in range(2))
    assert first == second
    assert len(first) <= style.MAX_PNG_BYTES // 3
    assert b"tEXt" not in first  # matplotlib's version would change the bytes
    image = Image.open(io.BytesIO(first)).convert("RGBA")
    assert image.size == (1600, 800)
    assert image.getpixel((0, 0))[3] == 0, "the card has round corners"
    assert image.getpixel((800, 10)) == (255, 255, 255, 255)


def test_colours_survive_the_palette():
    fig, ax = style.figure()
    ax.axis("off")
    ax.bar(range(8), [1] * 8, color=list(style.COLOURS.values()), width=1)
    image = Image.open(io.BytesIO(style.png(fig))).convert("RGBA").convert("RGB")
    seen = {colour for _, colour in image.getcolors(1 << 16)}
    for name, text in style.COLOURS.items():
        colour = [int(text[i : i + 2], 16) for i in (1, 3, 5)]
        nearest = min(max(abs(a - b) for a, b in zip(colour, other, strict=True)) for other in seen)
        assert nearest <= 4, f"{name} is off by {nearest} levels of 256"


def test_axes_carry_units_and_say_when_they_are_logarithmic():
    _, ax = drawn()
    assert ax.get_xlabel() == "row length (elements, log scale)"
    assert ax.get_ylabel() == "traffic (MiB)"
    assert ax.get_xscale() == "log"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0, 4000), "2,000"),
        ((0, 120_000), "100,000"),
        ((-3000, 0), "\N{MINUS SIGN}2,000"),
        ((0, 1), "0.4"),
        ((0, 60), "20"),
    ],
)
def test_ticks_have_commas_as_text_has_them(values, ticks):
    with style.use():
        fig, ax = style.figure()
        ax.plot(values, values)
        style.axes(ax, x="tokens", y="tokens")
        fig.canvas.draw()
    for axis in (ax.xaxis, ax.yaxis):
        said = [label.get_text() for label in axis.get_ticklabels()]
        assert any(text.startswith(ticks) for text in said), said


def test_names_on_an_axis_stay():
    with style.use():
        fig, ax = style.figure()
        ax.barh(["1000", "naive"], [1, 2])
        style.axes(ax, x="time (µs)")
        fig.canvas.draw()
    assert [label.get_text() for label in ax.yaxis.get_ticklabels()] == ["1000", "naive"]


def test_use_leaves_nothing_switched_on():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with style.use():
        assert matplotlib.rcParams["axes.spines.top"] is False
    assert dict(matplotlib.rcParams) == before


def test_a_picture_has_words_in_its_text_form():
    picture = style.picture(drawn()[0], alt="Three points on a rising line.")
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == repr(picture) == "Three points on a rising line."
    assert data["image/png"][:4] == b"\x89PNG"
    assert metadata["image/png"]["width"] == 800
    with pytest.raises(ValueError, match="alt must say what the figure shows"):
        style.picture(drawn()[0], alt=" ")


def test_a_figure_that_is_too_large_is_refused():
    import numpy as np

    fig, ax = style.figure()
    ax.imshow(np.random.default_rng(0).random((400, 800, 3)), aspect="auto")
    with pytest.raises(ValueError, match=r"at most 100,000 are allowed; draw fewer points"):
        style.png(fig)


@pytest.mark.parametrize(
    ("value", "text"),
    (
        (0, "0"),
        (16, "16"),
        (16.0, "16"),
        (124_439_808, "124,439,808"),
        (-3, "-3"),
        (0.5, "0.500"),
        (3.14159, "3.14"),
        (21.07, "21.1"),
        (1234.5, "1,234"),
        (1e-9, "1.00e-09"),
        (1.5e20, "1.50e+20"),
        (float("inf"), "inf"),
    ),
)
def test_number(value, text):
    assert style.number(value) == text


TABLE = style.table(
    {"kernel": "", "traffic": "MiB", "ratio": "x"},
    [("naive <5 lines>", 61.0, 2.5), ("fused", 24.41, 1), ("tiny", 0.125, None)],
    caption="softmax",
    formats={"ratio": ".1f"},
    links={"kernel": ("", "a.py", "")},
)


def test_a_table_aligns_on_the_point_in_text():
    text = repr(TABLE)
    assert text.splitlines() == [
        "softmax",
        "kernel           traffic (MiB)  ratio (x)",
        "---------------  -------------  ---------",
        "naive <5 lines>         61            2.5",
        "fused                   24.4          1.0",
        "tiny                     0.125",
    ]


def test_a_table_aligns_on_the_point_in_html_and_escapes():
    html = TABLE._repr_html_()
    assert "traffic (MiB)" in html
    assert "naive &lt;5 lines&gt;" in html
    assert '<a href="a.py">fused</a>' in html
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    wide = {"\u2007": "0", "\u2008": "."}  # blanks as wide as a digit and as a point
    traffic = ["".join(wide.get(c, c) for c in cell) for cell in cells if cell[:2] in ("61", "24", "0.")]
    assert traffic == ["61.000", "24.400", "0.125"]
    assert "color" not in html  # the page's theme colours it


def test_what_a_table_rounds_to_zero_has_no_sign():
    values = [(-2e-6,), (2e-6,), (0,), (-0.0475,), (float("-inf"),)]
    shown = str(style.table({"off": ""}, values, formats={"off": "+.2%"})).split("\n")[2:]
    assert [line.strip() for line in shown] == ["0.00%", "0.00%", "0.00%", "-4.75%", "-inf%"]
    assert "-0.0" not in str(style.table({"off": ""}, [(-0.001,), (1.0,)], formats={"off": ".1f"}))


def test_a_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match=r"2 columns \['a', 'b'\], got a row of 1"):
        style.table({"a": "", "b": ""}, [(1,)])


# ---- predictions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "unit", "value"),
    (
        ("134,217,728", "bytes", 134217728),
        ("1.34e8", "bytes", 1.34e8),
        ("2 * 4096**2 * 4", "bytes", 134217728),
        ("2*4096^2*4", "bytes", 134217728),
        ("16 MiB", "bytes", 16 << 20),
        ("16 MiB", "MiB", 16),
        ("16MiB * 4", "bytes", 64 << 20),
        ("(2 + 2) KiB", "bytes", 4096),
        ("1/4 MiB", "bytes", 1 << 18),
        ("0.128 GB", "MB", 128),
        ("3.5G", "bytes", 3.5e9),
        ("3 Gi", "", 3 << 30),
        ("0.021 ms", "us", 21),
        ("21 us", "us", 21),
        ("2 TFLOPs", "FLOPs", 2e12),
        ("4", "x", 4),
        ("4 x", "x", 4),
        (" .5 ", "", 0.5),
    ),
)
def test_parse(text, unit, value):
    assert parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("", "is not a number"),
        ("2(3)", "is not a number"),
        ("9**9**9**9", "is not a number"),
        ("9" * 5000, "'...' is not a number"),
        ("(" * 300 + "1" + ")" * 300, "is not a number"),
        ("-3", "is not a positive number"),
        ("0", "is not a positive number"),
        ("1e999", "is not a positive number"),
        ("(-8)**0.5", "is not a positive number"),
        ("5 ms", "'ms' does not fit a number of bytes"),
        ("__import__('os')", "'import' does not fit a number of bytes"),
    ),
)
def test_parse_refuses_with_a_sentence(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text, "bytes")


@pytest.fixture
def asked():
    """A prediction of two numbers, forgotten after the test."""
    widget = predict.predict("test-bytes", "How many bytes does `softmax` move?", {"naive": "bytes", "fused": "bytes"})
    yield widget
    widget.reset()


def type_in(widget, **texts):
    for name, text in texts.items():
        widget.entries[name].value = text


def test_a_prediction_is_committed_with_the_button_and_revealed(asked):
    type_in(asked, naive="512 MiB", fused="2 * 4096**2 * 4")
    assert asked.echoes["naive"].value == "= 536,870,912 bytes"
    asked.commit_button.click()
    assert asked.entries["naive"].disabled and asked.commit_button.disabled
    shown = reveal("test-bytes", {"naive": 536870912, "fused": 134217728})
    assert "yours (bytes)" in repr(shown) and "counted (bytes)" in repr(shown)
    assert shown.sentence == "Right, every one within 10%."
    assert "<details>" not in shown._repr_html_()


def test_enter_commits(asked):
    type_in(asked, naive="3", fused="4")
    asked.entries["fused"]._handle_custom_msg({"event": "submit"}, [])
    assert asked.commit_button.disabled


@pytest.mark.parametrize(("naive", "says"), (("", "still empty: naive"), ("many", "&#x27;many&#x27; does not fit")))
def test_nothing_is_committed_while_a_number_cannot_be_read(asked, naive, says):
    type_in(asked, naive=naive, fused="4")
    asked.commit_button.click()
    assert says in asked.status.value
    assert not asked.entries["naive"].disabled
    assert "No prediction was committed" in repr(reveal("test-bytes", {"naive": 1, "fused": 1}))


def test_running_the_cell_again_keeps_the_prediction_and_reset_forgets_it(asked):
    type_in(asked, naive="3", fused="4")
    asked.commit()
    again = predict.predict("test-bytes", asked.question, asked.fields)
    assert again.entries["naive"].value == "3" and again.entries["naive"].disabled
    again.reset_button.click()
    assert not again.entries["naive"].disabled
    assert "No prediction" in reveal("test-bytes", {"naive": 1, "fused": 1}).sentence


@pytest.mark.parametrize(
    ("yours", "sentence"),
    (
        (1.05, "Right, within 10%."),
        (0.5, "Within a factor of two. Which term is counted once too often, or once too few?"),
        (2.0, "Within a factor of two. Which term is counted once too often, or once too few?"),
        (8.0, "Off by 8x. Being wrong here is the lesson: which term did you not see?"),
        (0.1, "Off by 10x. Being wrong here is the lesson: which term did you not see?"),
    ),
)
def test_reveal_says_how_far_off(yours, sentence):
    widget = predict.predict("test-one", "?", {"time": "us"})
    widget.entries["time"].value = f"{yours * 100}"
    widget.commit()
    shown = reveal("test-one", {"time": 100.0}, "measured")
    widget.reset()
    assert shown.sentence == sentence
    assert "measured (us)" in repr(shown)


def test_reveal_names_the_field_that_is_worst(asked):
    type_in(asked, naive="100", fused="1")
    asked.commit()
    assert reveal("test-bytes", {"naive": 100, "fused": 3}).sentence.startswith("Off by 3x for fused.")
    with pytest.raises(ValueError, match=r"must have the fields \['naive', 'fused'\]"):
        reveal("test-bytes", {"naive": 100})


def test_a_number_that_names_something_is_right_or_wrong(asked):
    type_in(asked, naive="2", fused="1")
    asked.commit()
    shown = reveal("test-bytes", {"naive": 2, "fused": 3}, "planted", exact=True)
    assert shown.sentence == "1 of 2 right."
    assert [row[-1] for row in shown.table.rows] == ["yes", "no"]


def test_without_a_prediction_the_answer_is_folded_and_the_same_every_time(asked):
    one, two = (reveal("test-bytes", {"naive": 512, "fused": 128}) for _ in range(2))
    assert repr(one) == repr(two) and one._repr_html_() == two._repr_html_()
    assert one._repr_html_().index("<details>") < one._repr_html_().index("512")


def test_what_would_give_the_answer_away_is_folded_with_it(asked):
    also = (style.table({"step": "", "bytes": ""}, [("all", 777)]), "**7** times `x`")
    folded = reveal("test-bytes", {"naive": 512, "fused": 128}, also=also)._repr_html_()
    assert folded.index("<details>") < folded.index("777") < folded.index("<b>7</b> times <code>x</code>")
    type_in(asked, naive="512", fused="128")
    asked.commit()
    shown = reveal("test-bytes", {"naive": 512, "fused": 128}, also=also)
    assert "777" in repr(shown) and "777" in shown._repr_html_() and "<details>" not in shown._repr_html_()


def test_what_is_said_beside_an_answer_is_shown_as_markdown_is(asked):
    said = "So it is *memory-bound*, 2 * 3 * `a * b` bytes.\n\n**See** [07 Tiling](07_tiling.ipynb), x[i](j) < 3."
    shown = reveal("test-bytes", {"naive": 512, "fused": 128}, also=[said])._repr_html_()
    assert "<p>So it is <i>memory-bound</i>, 2 * 3 * <code>a * b</code> bytes.</p>" in shown
    assert '<p><b>See</b> <a href="07_tiling.ipynb">07 Tiling</a>, x[i](j) &lt; 3.</p>' in shown


def test_powers_in_a_question_are_not_bold():
    text = predict.predict("test-power", "sin(x)**2 + cos(x)**2 in **one** pass", {"kernels": ""}).children[0].value
    assert "sin(x)**2 + cos(x)**2 in <b>one</b> pass" in text


def test_a_prediction_reads_well_where_no_kernel_runs(asked):
    assert repr(asked) == "prediction: naive (bytes), fused (bytes)"
    assert "<code>softmax</code>" in asked._repr_html_()
    assert repr(asked) == repr(predict.predict("test-bytes", "?", asked.fields))


def test_predict_refuses_no_fields():
    with pytest.raises(ValueError, match="one to three numbers, got 0"):
        predict.predict("test-none", "?", {})


# ---- progress --------------------------------------------------------------------------------------------------------
def text_of(panel) -> str:
    return panel.area.outputs[0]["data"]["text/html"]


def test_the_panel_lists_every_exercise_with_links(monkeypatch):
    root = course.root(__file__)
    monkeypatch.chdir(root / "notebooks")
    html = progress.render(list(exercises().values()), {})
    for exercise in exercises().values():
        assert f'<a href="../exercises/{exercise.concept}.py">{exercise.id}</a>' in html
        assert f'href="{exercise.notebook}.ipynb"' in html
    assert f"0 of {len(exercises())} exercises pass" in html


def test_the_panel_shows_states_and_refreshes(monkeypatch):
    verdicts = {}
    monkeypatch.setattr(progress, "recorded", lambda root: verdicts)
    panel = progress.progress("00_start")
    assert "not tried" in text_of(panel) and "0 of 1 pass" in text_of(panel)
    verdicts["start.bytes_moved"] = {"state": "pass", "checks_passed": 6, "checks_total": 6, "edited": False}
    panel.button.click()
    assert "1 of 1 pass" in text_of(panel) and "6/6" in text_of(panel)
    verdicts["start.bytes_moved"]["edited"] = True
    panel.refresh()
    assert "pass, edited since" in text_of(panel)


def test_the_saved_panel_does_not_depend_on_the_learner(monkeypatch):
    saved = {"start.bytes_moved": {"state": "fail", "checks_passed": 1, "checks_total": 6}}
    before = progress.progress()._repr_html_()
    monkeypatch.setattr(progress, "recorded", lambda root: saved)
    panel = progress.progress()
    assert panel._repr_html_() == before
    assert "1/6" in text_of(panel)
    assert repr(panel) == "progress panel: run this cell to see it"


def test_the_first_unfinished_notebook_is_open():
    listed = list(exercises().values())
    done = {e.id: {"state": "pass", "checks_passed": 1, "checks_total": 1} for e in listed if e.notebook == "00_start"}
    opened = re.findall(r"<details open><summary><b[^>]*>(\w+)</b>", progress.render(listed, done))
    assert opened == [next(e.notebook for e in listed if e.notebook != "00_start")]


def test_an_unknown_notebook_is_refused():
    with pytest.raises(ValueError, match=r"notebook must be one of 00_start, .*got '99_nothing'"):
        progress.progress("99_nothing")


# ---- the switch ------------------------------------------------------------------------------------------------------
@pytest.fixture
def chosen(monkeypatch):
    """Whatever a test switches on is off again after it."""
    monkeypatch.setattr(course, "_chosen", None)
    monkeypatch.delenv("GPUKIT_IMPL", raising=False)


def test_the_switch_changes_this_process_and_says_so(chosen):
    switch = implementation()
    assert switch.buttons.value == course.impl() == "exercises"
    switch.buttons.value = "solutions"
    assert course.impl() == "solutions"
    assert "none is recorded" in switch.status.value
    switch.buttons.value = "exercises"
    assert course.impl() == "exercises"
    assert repr(switch) == repr(implementation())


def test_the_switch_is_off_where_there_are_no_solutions(chosen, tmp_path, monkeypatch):
    for name in ("notebooks", "exercises"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    switch = implementation()
    assert switch.buttons.disabled
    assert "no solutions/ folder" in switch.status.value


def test_style_alone_loads_neither_matplotlib_nor_torch():
    import subprocess
    import sys

    code = "import sys, gpukit.widgets.style; print({'matplotlib', 'torch', 'ipywidgets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=course.root(__file__))
    assert done.stdout.strip() == "set()", done.stderr
