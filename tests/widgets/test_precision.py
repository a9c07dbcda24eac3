"""The pictures of number formats: each says in words what it shows, and stays small."""

import pytest

from gpukit.accounting.dtypes import FORMATS, mx_dequantise, mx_quantise
from gpukit.widgets import precision
from gpukit.widgets.style import MAX_PNG_BYTES

FP16 = FORMATS["fp16"]
VALUES = [0.5, -0.25, 3.0, 40.0] * 16
PICTURES = {
    "range": (lambda: precision.range_and_precision(list(FORMATS.values())), "bf16 9.2e-41 to 3.4e+38 with 8 bits"),
    "lines": (lambda: precision.number_lines([FORMATS["fp4_e2m1"], FORMATS["fp8_e4m3"]], 8), "fp4_e2m1 has 8"),
    "sums": (lambda: precision.running_sums({"fp16": [1.0, 2.0], "fp32": [1.0, 2.0]}, 1.0), "fp16 ends at 2"),
    "weights": (lambda: precision.trajectories([1, 2], [1, 1], [[1, 1.5], [1, 2.5]]), "stochastically 1.5 to 2.5"),
    "gradients": (
        lambda: precision.gradients_in_range([-30.0, -20.0, -10.0, 0.0], [0, 20], FP16),
        "with scale 2^0 25.0% become 0; with scale 2^20 0.0% become 0, 1 overflow",
    ),
    "blocks": (
        lambda: precision.blocks(VALUES, {"one scale": mx_dequantise(mx_quantise(VALUES, "fp4_e2m1", 64))}, 32),
        "one scale: 32 of 64 become 0",
    ),
}


@pytest.mark.parametrize(("make", "words"), PICTURES.values(), ids=PICTURES)
def test_picture(make, words):
    picture = make()
    assert picture.data.startswith(b"\x89PNG") and len(picture.data) <= MAX_PNG_BYTES
    assert words in picture.alt
    assert repr(picture) == picture.alt
