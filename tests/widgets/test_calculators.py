"""The calculators as widgets, without a browser: what they show, their fields, and what a saved notebook keeps."""

import functools
import re
import xml.etree.ElementTree as ElementTree

import ipywidgets as widgets
import pytest
import traitlets

from gpukit import hardware
from gpukit.accounting import flops, memory, roofline
from gpukit.accounting.memory import Parallel
from gpukit.widgets import board, calculator, style
from gpukit.widgets.calculator import Bar
from gpukit.widgets.decoding import decoding
from gpukit.widgets.flop_explorer import flop_explorer
from gpukit.widgets.memory_calculator import memory_calculator
from gpukit.widgets.roofline import model_roofline
from gpukit.widgets.training_cost import training_cost
from tests.calls import REDRAW, calls

MAKERS = {
    "memory": memory_calculator,
    "serving": lambda: memory_calculator("llama3-70b", batch=16, serving=True),
    "cost": lambda: training_cost("70B", mfu=0.5, price=2),
    "flops": lambda: flop_explorer("llama3-8b", 8192, "training", "full"),
    "roofline": lambda: model_roofline("deepseek-v3", 32, 4096, "decode"),
    "decoding": lambda: decoding("llama3-8b", batch=16, cache="int8"),
}
CHANGES = {
    "memory": {
        "model": "deepseek-v3",
        "gpus": "2048xh200",
        "recompute": "full",
        "tokens": 32768,
        "recipe": "bf16-adamw-8bit",
    },
    "serving": {"model": "mixtral-8x7b", "batch": 64, "gpus": "2xa100"},
    "cost": {"model": "llama3-405b", "gpus": "16384xb200", "mfu": "0.38"},
    "flops": {"model": "gpt2-xl", "phase": "decode", "tokens": "1M"},
    "roofline": {"model": "gpt2", "phase": "prefill", "batch": 1},
    "decoding": {"model": "llama3-405b", "gpu": "b200", "batch": 2, "tokens": "1K", "weights": "int4"},
}


@pytest.fixture(params=MAKERS)
def view(request):
    made = MAKERS[request.param]()
    made.changes = CHANGES[request.param]
    return made


def root(view) -> ElementTree.Element:
    return ElementTree.fromstring(view.picture_area.value)


# ---- what all of them have in common ---------------------------------------------------------------------------------


def test_every_field_is_a_named_control_and_a_trait(view):
    controls = view.children[0].children
    assert [c.description for c in controls if isinstance(c, widgets.Button)] == ["reset"]
    assert all(c.description for c in controls) and len(controls) == len(view.controls) + 1
    for name, control in view.controls.items():
        assert getattr(view, name) == control.value
    for name, value in view.changes.items():
        view.controls[name].value = str(value)
        assert getattr(view, name) == str(value)


def test_the_picture_is_svg_with_words_for_those_who_cannot_see_it(view):
    for _ in range(2):
        svg = root(view)
        assert svg.get("role") == "img" and svg.get("aria-label") == view.sentence() and "modelled" in view.sentence()
        assert not re.search(r"\b(inf|nan)\b", view.picture_area.value)
        _, _, width, height = map(float, svg.get("viewBox").split())
        for rect in svg.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert -1 <= x and x + w <= width + 1 and -1 <= y and y + h <= height + 1
        for text in svg.iter("text"):
            assert 0 <= float(text.get("y")) <= height
        for name, value in view.changes.items():
            setattr(view, name, value)


def test_what_is_saved_is_constant_and_small(view):
    text, (data, metadata) = repr(view), view._repr_png_()
    assert data.startswith(b"\x89PNG") and len(data) <= style.MAX_PNG_BYTES and "modelled" in metadata["alt"]
    before = view.picture_area.value
    for name, value in view.changes.items():
        setattr(view, name, value)
    assert view.picture_area.value != before
    assert repr(view) == text and view._repr_png_()[0] == data
    view.children[0].children[-1].click()
    assert view.picture_area.value == before


def test_a_redraw_is_quick(view):
    for name, value in view.changes.items():
        assert calls(functools.partial(setattr, view, name, value)) < REDRAW, name


def test_colours_are_those_of_the_course(view):
    used = {c.upper() for c in re.findall(r"#[0-9a-fA-F]{6}", view.picture_area.value)}
    assert used <= {c.upper() for c in (*style.COLOURS.values(), board.DARK, board.LIGHT, "#BDBDBD")}


@pytest.mark.parametrize(
    ("make", "name", "value", "words"),
    (
        ("memory", "batch", "-3", "batch must be a number such as 8192, 1.5B or 15T, got '-3'"),
        ("memory", "batch", "0", "training_memory: batch must be a whole number from 1"),
        ("memory", "tokens", "1.5", "tokens must be a whole number, got '1.5'"),
        ("memory", "tokens", "1" + "0" * 30, "tokens must be a whole number from 1 to"),
        ("memory", "gpus", "8xh1000", "no GPU is called 'h1000'"),
        ("serving", "gpus", "3xh100", "tensor must divide heads, and 3 does not divide 64"),
        ("cost", "mfu", "1.2", "mfu must be a number above 0 and at most 1, got 1.2"),
        ("cost", "mfu", "nan", "mfu must be a number above 0 and at most 1, got nan"),
        ("cost", "model", "1e30", "model must be a number such as"),
        ("cost", "gpus", "8xt4", "dtype must be one of"),
        ("cost", "price", "-1", "price_per_gpu_hour must be a number above 0"),
        ("flops", "tokens", "", "tokens must be a number such as"),
        ("flops", "tokens", "0", "tokens must be a whole number from 1 to 10^10, got 0"),
        ("flops", "tokens", "1" + "0" * 30, "tokens must be a whole number from 1 to"),
        ("roofline", "batch", "0", "batch must be a whole number from 1"),
        ("roofline", "tokens", "0", "tokens must be a whole number from 1"),
        ("roofline", "gpu", "t4", "dtype must be one of"),
        ("decoding", "batch", "0", "decode_step: batch must be a whole number from 1"),
        ("decoding", "tokens", "many", "tokens must be a number such as"),
    ),
)
def test_what_cannot_be_calculated_is_said_on_the_board(make, name, value, words):
    view = MAKERS[make]()
    before = view.picture_area.value
    setattr(view, name, value)
    assert words in view.sentence() and view.sentence() == root(view).get("aria-label")
    assert words[:20] in "".join(text.text for text in root(view).iter("text"))
    view.reset()
    assert view.picture_area.value == before


def test_makers_refuse_what_cannot_be_calculated():
    for call, words in (
        (lambda: memory_calculator(batch=-1), "batch must be a number"),
        (lambda: memory_calculator(zero=4), "zero must be a whole number from 0 to 3, got 4"),
        (lambda: memory_calculator("lama"), "no model is called 'lama'"),
        (lambda: memory_calculator(recipe="adam"), "no recipe is called 'adam'"),
        (lambda: memory_calculator(recompute="half"), "recompute must be one of none, selective, full, got 'half'"),
        (lambda: training_cost("70B", mfu=0), "mfu must be a number above 0"),
        (lambda: flop_explorer(phase="backward"), "phase must be one of forward, training, decode, got 'backward'"),
        (lambda: flop_explorer(recompute="half"), "recompute must be one of"),
        (lambda: model_roofline(phase="train"), "phase must be one of prefill, decode, got 'train'"),
        (lambda: model_roofline(gpu="h1"), "no GPU is called 'h1'"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value)
    with pytest.raises(traitlets.TraitError):
        memory_calculator().model = "lama"


# ---- what each of them says ------------------------------------------------------------------------------------------


def titles(view) -> list[str]:
    return [title.text for title in root(view).iter("title")]


def test_memory_calculator():
    view = memory_calculator("llama3-8b", 1, 8192, "8xh100", zero=3)
    wanted = memory.training_memory("llama3-8b", 8, 8192, parallel=Parallel(data=8, zero=3))
    assert wanted.reason(hardware.gpu("h100")) in view.sentence()
    assert "activations 44.06 GB" in view.sentence() and "during the loss" in view.sentence()
    assert titles(view)[4 * 5 : 5 * 5] == [
        "weights: 2.008 GB", "gradients: 2.008 GB", "optimizer: 12.05 GB", "activations: 44.06 GB", "working: 15.28 GB",
    ]  # fmt: skip
    longest = int(re.search(r"longest sequence that fits: ([\d,]+)", view.sentence())[1].replace(",", ""))
    for tokens, words in ((longest, "It fits"), (longest + 1, "It does not fit")):
        view.tokens = tokens
        assert words in view.sentence()
    view.recompute = "full"
    assert "It fits" in view.sentence()
    view.gpus = "1xt4"
    assert "No sequence fits" in view.sentence() and "most of it is optimizer" in view.sentence()
    assert "1 sequence of" in view.sentence()


def test_what_serving_does_not_use_cannot_be_set():
    view = memory_calculator()
    assert not view.controls["zero"].disabled
    view.what = "serving"
    assert all(view.controls[name].disabled for name in ("zero", "recipe", "recompute", "attention"))
    assert "kv cache" in view.sentence() and "Serving llama3-8b" in view.sentence()


def test_training_cost():
    view = training_cost("70B", "15T", "1024xh100", 0.5, price=2)
    assert "143.9 days" in view.sentence() and "would promise 72.0 days" in view.sentence()
    assert "3.537 M GPU-hours, 7.075 M at 2 each; 214 tokens per parameter" in view.sentence()
    assert "B200 63.3 days" in view.sentence()
    view.model = "deepseek-v3"
    assert "6 x 37.55 B" in view.sentence()
    view.price = ""
    assert " each" not in view.sentence()


def test_flop_explorer():
    view = flop_explorer("gpt2", 1024)
    counted = flops.forward_flops("gpt2", 1, 1024)
    assert f"attention's square {counted.attention_flops / 1024 / 1e6:.3g} MFLOP" in view.sentence()
    assert "7.1% for attention's square; together 6.9% more than 2 N = 2 x 124.4 M = 249 MFLOP" in view.sentence()
    assert view.controls["recompute"].disabled
    view.phase = "training"
    assert not view.controls["recompute"].disabled and "6 N = 6 x 124.4 M" in view.sentence()
    assert "computed again" not in view.sentence()
    view.recompute = "selective"
    assert "computed again" in view.sentence()
    view.phase, view.tokens = "decode", 1
    assert "less than 2 N" in view.sentence() or "more than 2 N" in view.sentence()


def test_model_roofline():
    view = model_roofline("llama3-8b", 1, 4096, "decode", "h200")
    points = roofline.model_points("llama3-8b", 1, 1, past=4095, together=True)
    took = roofline.least_us(points, hardware.gpu("h200"), "bf16")
    assert f"at least {style.number(took / 1e3)} ms, at most {style.number(1e6 / took)} tokens/s" in view.sentence()
    assert {title.split(":")[0] for title in titles(view)} == {point.name for point in points}
    assert "limited by compute" not in view.sentence()
    view.phase = "prefill"
    assert "mlp: " in view.sentence() and "limited by compute" in view.sentence()


# ---- bars ------------------------------------------------------------------------------------------------------------


def test_bars_keep_their_proportions_and_tear_where_they_are_too_long():
    rows = [
        Bar("short", [("a", 1, style.READS), ("b", 3, style.YOURS)], "4", now=True),
        Bar("long", [("a", 99, style.READS)], "99"),
    ]
    shapes, bottom = calculator.bars(rows, 50, most=10, bound=6, bound_text="six")
    boxes = [s for s in shapes if isinstance(s, board.Box) and s.fill != "none"]
    assert boxes[1].width == pytest.approx(3 * boxes[0].width) and boxes[2].width == pytest.approx(10 * boxes[0].width)
    words = [s.text for s in shapes if isinstance(s, board.Words)]
    assert words.count("»") == 1 and {"short", "long", "4", "99", "six"} <= set(words)
    (line,) = (s for s in shapes if isinstance(s, board.Line) and s.dashed)
    assert line.points[0][0] == pytest.approx(boxes[0].x + 6 * boxes[0].width) and line.points[1][1] < bottom
    text = next(s for s in shapes if isinstance(s, board.Words) and s.text == "4")
    assert text.x + 8 < line.points[0][0] or text.x > line.points[0][0]
