"""The numbers of notebook 12, without its looks."""

import re

import pytest
import torch

import gpukit
from gpukit import kernels
from gpukit.hardware import gpu
from gpukit.kernels import quantized_matmul
from gpukit.kernels._matmul_choices import Problem, choices
from gpukit.lessons import layer, results
from gpukit.lessons import matmul as lesson
from gpukit.validation.counted_kernels import matmul as tiled


def micros(op: str, shape: tuple[int, ...], provider: str, mode: str = "fwd") -> float:
    (found,) = (r for r in results.rows(op) if (r.op, r.shape, r.provider, r.mode) == (op, shape, provider, mode))
    return found.median_ms * 1e3


def test_the_promise_has_the_recorded_times():
    cube = (8192, 8192, 8192)
    for provider in ("library", "gpukit-pointers", "gpukit"):
        assert f"{micros('matmul', cube, provider):,.0f} µs" in lesson.promise().data


def test_views_are_what_pytorch_makes_of_them():
    w = torch.arange(24).view(4, 6)
    assert f"W [4, 6] with strides {w.stride()} and W.T [6, 4] with strides {w.T.stride()}" in lesson.views().alt
    assert sorted(w[1:3, 3:6].flatten().tolist()) == sorted(w.T[3:6, 1:3].flatten().tolist())


def test_a_transposed_operand_loads_the_same():
    x = torch.ones(64, 64, dtype=torch.float16)
    tile, launches = {"BM": 32, "BN": 32, "BK": 32, "GROUP_M": 1, "SPLIT_K": 1}, {}
    for name, a in (("a", x), ("a.T", x.T)):
        with gpukit.trace() as t:
            tiled[(4, 1)](a, x, x.clone(), 64, 64, 64, *a.stride(), *x.stride(), **tile)
        (launches[name],) = t.launches
    first, second = lesson.strided(launches).rows
    assert first[1:] == second[1:] == (2 * 2 * 64 * 64 * 2, 2 * 2 * 64 * 64 * 2 // 32, *first[3:])


def test_cutting_is_worse_than_rounding_where_signs_agree():
    ratios = {
        s: lesson.error("bf16", *lesson.operands(s)) / lesson.error("tf32", *lesson.operands(s)) for s in lesson.SIGNS
    }
    assert (
        2.5 < ratios["random signs"] < 4 and ratios["all positive"] < 0.5
    )  # "about three times", and "the order turns around"
    cut = lesson.READS["tf32"](lesson.operands("all positive")[0])
    assert bool((cut <= lesson.operands("all positive")[0]).all())
    assert not lesson.error("fp32", *lesson.operands("random signs"))


def test_tf32s_line_levels_off_and_bf16s_does_not():
    a, b = lesson.operands("all positive")
    short, long = ({name: lesson.error(name, a[:, :K], b[:K]) for name in ("tf32", "bf16")} for K in (256, 4096))
    assert long["tf32"] > 0.8 * short["tf32"] and long["bf16"] < 0.5 * short["bf16"]
    assert short["tf32"] < short["bf16"] * 1.2 and long["tf32"] > long["bf16"]


def test_strips_of_a_wave():
    assert lesson.strips(1) == (5, 32) and lesson.strips(8) == (8, 17)
    assert {lesson.strips(1, wave)[0] for wave in range(15)} == {5}  # of all full waves, as the text says
    last = 3 * 128 + 32 * 256  # the last 68 tiles row by row: the end of one row, and two whole ones
    by_hand = (15 * (5 * 128 + 32 * 256) + last) * 8192 * 2 / 2**30
    assert lesson.strips_gib(8) < lesson.strips_gib(1) == pytest.approx(by_hand)


def test_tiles():
    large, small = lesson.tile_gain()
    assert large > 1 > small
    assert "32 tiles, and 100 of the 132 SMs" in lesson.what_tiles_say()
    ranked = {row[0]: row[1:3] for row in lesson.tiles_large().rows}
    (first, was), (second, and_was) = ranked["4,096: 128 x 128 x 64"], ranked["4,096: 128 x 256 x 64"]
    assert first > second and was > and_was  # the model ranks them as the clock does, as the text says
    rows, groups = ranked["8,192: 128 x 256 x 64, rows"], ranked["8,192: 128 x 256 x 64, groups"]
    assert rows[0] == pytest.approx(groups[0], rel=0.001) and rows[1] > 1.1 * groups[1]  # but not these
    assert min(ranked, key=lambda name: ranked[name][1] / int(name[0]) ** 3) == "8,192: descriptors, persistent"


def test_the_kernel_that_is_shown_is_the_one_that_was_timed():
    assert (
        "a.load([i, k])" in lesson.descriptor_kernel().data and "tl.num_programs(0)" in lesson.descriptor_kernel().data
    )


def test_what_follows_a_product_does_not_grow_with_k():
    assert (
        lesson.after_the_product(512)[0]
        == lesson.after_the_product(8192)[0]
        == pytest.approx(4 * 8192**2 * 2, rel=1e-3)
    )
    assert results.copy_gbps("softmax") == pytest.approx(4200, rel=0.02)  # what the question says
    assert lesson.epilogue_more(512) == pytest.approx(16 * lesson.epilogue_more(8192))
    assert f"{micros('matmul_bias_gelu', (8192,) * 3, 'gpukit'):,.0f} µs" in lesson.what_an_epilogue_saves()
    more = micros("matmul_bias_gelu", (8192,) * 3, "torch") - micros("matmul", (8192,) * 3, "library")
    assert more > 1.2 * lesson.after_the_product(8192)[1], "the text says that they cost more than the model"


def test_errors_of_few_bits_are_those_of_the_projects_kernel():
    w = lesson._weights().float()
    q, scales = kernels.quantize_int8(w, group=128)
    weight = q.float() * scales.float().repeat_interleave(128, 0)
    assert float((weight - w).norm() / w.norm()) == pytest.approx(lesson.quantized_error(8, 128), rel=0.02)
    assert lesson.quantized_error(4, 128) / lesson.quantized_error(8, 128) == pytest.approx(127 / 7, rel=0.1)
    assert lesson.bits_per_weight(4, 32) == 4.5


def test_instructions_per_weight_are_those_of_the_kernel():
    (said,) = re.findall(r"([\d.]+) instructions a weight", quantized_matmul._four_bits.fn.__doc__)
    assert float(said) == lesson.UNPACKING


def test_parts_of_an_int4_product():
    part = lesson.int4_parts()
    assert part["int4"] == pytest.approx(micros("int4_matmul", (1, 14_336, 4096), "gpukit", "fwd-graph"))
    assert max(part["bytes"], part["unpacking"]) < part["int4"] < part["16 bits"]
    assert part["bytes"] < part["bytes in 16 bits"] / 3.8


def test_bars_are_of_rows_in_graphs_where_there_are_any():
    assert lesson.judged("matmul", (1024,) * 3, "library").mode == "fwd-graph"
    assert lesson.judged("matmul", (4096,) * 3, "library").mode == "fwd"
    assert lesson.cublas_share(1024) < 50 < lesson.cublas_share(4096)
    assert "1,793 x 1,793 x 1,793: pointers 8, this course 22, cuBLAS 9" in lesson.squares().alt
    odd = {name: lesson.judged("matmul", (1793,) * 3, name).tflops for name in lesson.NAMES}
    assert max(odd, key=odd.get) == "compile", "the text says that it is ahead of all"


def test_one_cycle_of_all_sms_makes_the_peak_of_the_data_sheet():
    h200 = gpu("h200")
    assert h200.peak("bf16") / (h200.sms * lesson.PER_CYCLE * 1e6) == pytest.approx(1830, abs=1)
    assert "1,830 MHz" in lesson.what_was_measured()


def test_sizes():
    from gpukit.kernels._matmul_choices import WORTH_A_COPY

    first = lesson.copies_from()
    assert 2 * (first - 64) ** 3 < WORTH_A_COPY < 2 * first**3  # the jump is where the kernel begins to copy
    for n in (2048, 2112):
        given = Problem(1, n, n, n, torch.bfloat16, gpu("h200"), wide=True)
        assert choices(given)[0][:4] == (128, 128, 64, 4)  # four warps: two programs per SM
    said = lesson.what_sizes_say().data
    assert "264 places; 2,048 needs 256 of them, and 2,112 needs 289" in said
    assert f"{min(lesson.odd_factors('library')):.1f} to {max(lesson.odd_factors('library')):.1f}" in said


def test_the_layers_products():
    rows = {row[0]: row for row in lesson.layer_products().rows}
    assert (
        rows["this course, bf16"][3]
        < rows["cuBLAS, bf16"][3]
        < rows["pointers, bf16"][3]
        < rows["cuBLAS, fp32"][3] / 10
    )
    assert f"{layer.products_us() / layer.totals_us()[0]:.0%} of the layer" in lesson.layer_line().data


def test_orders_read_about_what_their_strips_are():
    for _, strips, read, _, _ in lesson.orders().rows:
        assert read == pytest.approx(strips, rel=0.1)
    (_, _, rows, _, slow), (_, _, groups, _, fast) = lesson.orders().rows
    said = lesson.what_orders_say().data
    assert f"saves {1 - groups / rows:.0%} of what is read" in said and f"saves {1 - fast / slow:.0%}:" in said
