"""What notebook 07 shows."""

import pytest

from gpukit.accounting import tiling
from gpukit.hardware import GPUS, gpu
from gpukit.lessons import layer
from gpukit.lessons import tiling as lesson


def test_measured_rates_are_below_the_peak_and_the_library_is_best():
    rows = lesson._tiles()
    assert all(0 < row.tflops * 1e12 < gpu("h200").peak("bf16") for row in rows.values())
    assert min(rows, key=lambda name: rows[name].median_ms) == "library"
    assert lesson.warps_factor() > 5 and "11 times as fast" in lesson.promise().data


def test_pictures_count_what_a_program_loads():
    assert "8 + 8 elements are loaded for 8 multiply-adds" in lesson.one_element().alt
    assert "32 + 32 elements are loaded for 128 multiply-adds" in lesson.one_tile().alt
    assert "4,096 FLOPs" in lesson.tensor_core().alt


def test_the_roof_has_the_reads_of_each_tile():
    points = {point.name: point for point in lesson.points()}
    stored = 4096 * 4096 * 2
    assert points["128 x 128"].bytes == tiling.matmul_reads(4096, 4096, 4096, 128, 128, 2) + stored
    assert points["everything once"].bytes == 3 * stored


def test_a_tile_alone_reaches_the_ridge_of_an_rtx_3090_only():
    reach = {row[0]: row[3] for row in lesson.ridges().rows}
    assert len(reach) == len(GPUS)
    assert {name for name, tile in reach.items() if tile != "none of them"} == {"RTX 3090"}


def test_rows_of_16_bytes_are_fast_and_triton_wants_16_elements():
    rows = {row[0]: row[1:] for row in lesson.alignment().rows}
    assert {size: widest for size, (widest, *_) in rows.items()} == {1791: 2, 1792: 16, 1793: 2, 1800: 16, 1808: 16}
    slow = {size for size, (_, library, _) in rows.items() if library > 2 * rows[1792][1]}
    slow_tile = {size for size, (*_, tile) in rows.items() if tile > 2 * rows[1792][2]}
    assert slow == {1791, 1793} and slow_tile == {1791, 1793, 1800}
    assert lesson.alignment_factor() == pytest.approx(rows[1793][1] / rows[1792][1])


def test_a_nearly_square_wave_reads_least():
    reads = {row[0]: row[1] for row in lesson.orders().rows}
    assert min(reads, key=reads.get) == 16 and reads[1] == pytest.approx(reads[128])


def test_the_budget_divides_the_layers_flops_by_measured_rates():
    flops = 2 * layer.TOKENS * layer.weights()
    for _, tflops, ms in lesson.budget().rows:
        assert ms == pytest.approx(flops / tflops / 1e9)


def test_one_element_more_per_row_is_slow_at_every_size():
    even, odd = lesson._by_size(0), lesson._by_size(1)
    assert len(even) == len(odd) == 25 and all(odd[size + 1] < even[size] / 3 for size in even)
    assert f"{max(even.values()):.0f} TFLOP/s" in lesson.by_size().alt


def test_three_stages_hide_the_wait_and_four_cost_a_program():
    us = {at: row.median_ms * 1e3 for at, row in lesson._stages().items()}
    assert (
        lesson.stages_factor() > 1.5 and us[256, 4] == pytest.approx(us[256, 3], rel=0.05) and us[128, 3] < us[128, 4]
    )
    assert lesson._stage_programs(128, 3) == (96, 2) and lesson._stage_programs(128, 4) == (128, 1)
    assert [row[:3] for row in lesson.stages().rows if row[1] == 3] == [("128 x 128", 3, 96), ("128 x 256", 3, 144)]
