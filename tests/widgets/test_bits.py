"""The bit viewer, without a browser and without a kernel: traits and buttons."""

import math

import pytest

from gpukit.accounting.dtypes import FORMATS, Format
from gpukit.widgets.bits import BitViewer, bit_viewer


def pressed(viewer: BitViewer) -> int:
    return int("".join(button.description for button in viewer.buttons), 2)


def consistent(viewer: BitViewer) -> bool:
    """Traits, buttons, menu and field show one and the same number."""
    value = FORMATS[viewer.format].decode(viewer.bits)
    return (
        pressed(viewer) == viewer.bits == int("".join(str(int(b.value)) for b in viewer.buttons), 2)
        and viewer.format_menu.value == viewer.format
        and viewer.value_field.value == repr(viewer.value)
        and (viewer.value == value or (math.isnan(value) and math.isnan(viewer.value)))
        and FORMATS[viewer.format].hex(viewer.bits) in viewer.readout.value
    )


@pytest.mark.parametrize("name", FORMATS)
def test_starts_in_every_format(name):
    viewer = bit_viewer(name, 1.5)
    assert (viewer.format, viewer.value, len(viewer.buttons)) == (name, 1.5, FORMATS[name].bits)
    assert consistent(viewer)
    assert "normal" in viewer.readout.value


def test_every_bit_can_be_flipped():
    viewer = bit_viewer("fp16", 1.0)
    for place, button in enumerate(viewer.buttons):
        before = viewer.bits
        button.value = not button.value
        assert viewer.bits == before ^ 1 << (15 - place)
        assert consistent(viewer)
        button.value = not button.value
        assert viewer.bits == before == 0x3C00


def test_flipping_to_infinity_and_nan_and_back():
    viewer = bit_viewer("fp16", 1.0)
    viewer.buttons[1].value = True
    assert viewer.value == math.inf and "infinity" in viewer.readout.value
    viewer.buttons[-1].value = True
    assert math.isnan(viewer.value) and "NaN" in viewer.readout.value
    viewer.buttons[-1].value = viewer.buttons[1].value = False
    assert viewer.value == 1.0


def test_buttons_belong_to_their_fields():
    viewer = bit_viewer("fp32", 0.1)
    for name, fields in (("fp32", (1, 8, 23)), ("bf16", (1, 8, 7)), ("fp64", (1, 11, 52)), ("fp4_e2m1", (1, 2, 1))):
        viewer.format = name
        for field, count in zip(("sign", "exponent", "mantissa"), fields, strict=True):
            assert sum(f"gpukit-{field}" in button._dom_classes for button in viewer.buttons) == count
        assert [len(row.children) for row in viewer._rows.values()] == list(fields)
    viewer.format = "fp16"
    assert viewer.buttons[1].tooltip == "exponent bit, worth 2^4"
    assert viewer.buttons[6].tooltip == "mantissa bit, worth 2^-1"


def test_setting_the_value_rounds_it():
    viewer = bit_viewer("fp16")
    viewer.value = 0.1
    assert viewer.value == 0.0999755859375
    assert "asked for 0.1: off by" in viewer.readout.value
    viewer.value = 1e-8
    assert viewer.value == 0.0 and consistent(viewer)
    viewer.value = 1e6
    assert viewer.value == math.inf and "too large" in viewer.readout.value


def test_setting_the_bits():
    viewer = bit_viewer("fp16")
    viewer.bits = 1
    assert viewer.value == 2.0**-24 and "subnormal" in viewer.readout.value and consistent(viewer)
    with pytest.raises(ValueError, match="bits must be"):
        viewer.bits = 1 << 16
    assert viewer.bits == 1


def test_typing_a_number():
    viewer = bit_viewer("fp32")
    for text, value in (("0.5", 0.5), ("1/3", FORMATS["fp32"].round(1 / 3)), ("-inf", -math.inf), ("1,024", 1024.0)):
        viewer.value_field.value = text
        assert viewer.value == value and consistent(viewer)
    viewer.value_field.value = "nan"
    assert math.isnan(viewer.value) and consistent(viewer)
    viewer.value_field.value = "-0"
    assert viewer.bits == 1 << 31


@pytest.mark.parametrize("text", ["spam", "", "1/0", "2 **", "<b>"])
def test_typing_something_else_changes_nothing(text):
    viewer = bit_viewer("fp32", 2.5)
    viewer.value_field.value = text
    assert viewer.value == 2.5 and consistent(viewer)
    assert "is not a number" in viewer.readout.value
    assert "<b>'" not in viewer.readout.value


def test_what_is_typed_is_rounded_once():
    """1 + 2^-11 + 2^-60 is beyond the tie of fp16, but a float64 on the way would make it the tie."""
    viewer = bit_viewer("fp16")
    viewer.value_field.value = f"{2**60 + 2**49 + 1}/{2**60}"
    assert viewer.value == 1 + 2.0**-10


def test_changing_the_format_starts_from_what_was_asked():
    viewer = bit_viewer("fp32", 0.1)
    viewer.format_menu.value = "fp4_e2m1"
    assert viewer.value == 0.0 and consistent(viewer)
    viewer.format = "fp32"
    assert viewer.value == FORMATS["fp32"].round(0.1) and consistent(viewer)


def test_nan_into_a_format_without_nan():
    viewer = bit_viewer("fp16", math.nan)
    viewer.format = "fp4_e2m1"
    assert viewer.value == 0.0 and "fp4_e2m1 has no NaN" in viewer.readout.value and consistent(viewer)
    viewer.value = math.nan
    assert viewer.value == 0.0 and consistent(viewer)


def test_walking_to_the_neighbours():
    viewer = bit_viewer("fp16", 1.0)
    viewer.up_button.click()
    assert viewer.value == 1 + 2.0**-10
    viewer.down_button.click()
    viewer.down_button.click()
    assert viewer.value == 1 - 2.0**-11 and consistent(viewer)
    viewer.value = math.inf
    viewer.up_button.click()
    assert viewer.value == math.inf


def test_reset():
    viewer = bit_viewer("fp16", 0.1)
    viewer.format = "fp64"
    viewer.value = 7
    viewer.reset_button.click()
    assert (viewer.format, viewer.value) == ("fp16", 0.0999755859375) and consistent(viewer)


def test_a_format_of_ones_own():
    viewer = bit_viewer(Format("e3m2", 3, 2, has_inf=False, has_nan=False), 3.0)
    assert (viewer.format, viewer.value, len(viewer.buttons)) == ("e3m2", 3.0, 6)
    viewer.format = "fp16"
    viewer.format = "e3m2"
    assert viewer.value == 3.0


def test_unknown_format():
    with pytest.raises(ValueError, match="no format is called 'fp12'"):
        bit_viewer("fp12")
    viewer = bit_viewer("fp16")
    with pytest.raises(ValueError, match="no format is called 'fp12'"):
        viewer.format = "fp12"
    assert viewer.format == "fp16" and consistent(viewer)


def test_saved_form_is_the_same_every_time():
    first, second = bit_viewer("fp16", 0.1), bit_viewer("fp16", 0.1)
    assert repr(first) == repr(second) == "bit viewer: fp16 0x2E66 = 0.0999755859375"
    assert first._repr_html_() == second._repr_html_()
    text = first._repr_html_()
    assert text.count(">1</span>") + text.count(">0</span>") == 16
    assert "subnormal" not in text and "normal, 0x2E66" in text
