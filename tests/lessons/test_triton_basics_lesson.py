"""What notebook 05 shows."""

import pytest
import torch

import gpukit
from gpukit.lessons import triton_basics as lesson


def test_the_promise_is_recorded_and_within_what_memory_allows():
    rows = lesson._measured("residual_add")
    moved = 3 * 16_384 * 4_096 * 2
    assert rows["torch"].bytes == moved
    assert all(row.gbps < 4800 for row in rows.values())
    assert f"takes {moved / 4800e3:.0f} µs (computed)" in lesson.promise().data


def test_programs_and_blocks_make_the_tensor():
    sizes = lesson.block_sizes()
    assert [row[0] for row in sizes.rows] == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert all(block * programs == 16_384 * 4_096 for block, programs, *_ in sizes.rows)
    assert lesson.block_size_factor() == pytest.approx(sizes.rows[0][2] / min(row[2] for row in sizes.rows))
    assert "3 lanes of the last program" in lesson.launch().alt and "5 lanes" in lesson.launch(11, 16).alt
    assert "1 lies inside y" in lesson.block_of_pointers().alt


def test_two_kernels_move_twice_the_bytes():
    x, w = torch.randn(64, 32), torch.randn(32)
    with gpukit.trace() as eager:
        torch.relu(x * w)
    fused = 2 * x.nbytes + w.nbytes
    table = lesson.two_kernels(eager.torch_ops, fused)
    assert [row[0] for row in table.rows] == ["mul", "relu", "one kernel"]
    assert table.rows[-1][1:] == (x.nbytes + w.nbytes, x.nbytes)
    assert sum(sum(row[1:]) for row in table.rows[:-1]) == eager.bytes


def test_scans_and_sums_are_right():
    numbers = (3, 1, 4, 1, 5, 9, 2, 6)
    assert f"The last sum is {sum(numbers)}" in lesson.scan(numbers).alt
    assert "2 lanes of the last block lie past the end" in lesson.accumulator().alt


def test_one_address_is_the_slowest():
    rows = lesson._histograms()
    atomics = {bins: row.median_ms for (provider, bins), row in rows.items() if provider == "atomics"}
    assert max(atomics, key=atomics.get) == 1 and min(atomics, key=atomics.get) == 1 << 20
    assert lesson.reveal_atomics() is not None


def test_the_budget_has_two_additions_a_layer():
    (_, _, one, two, model), _ = lesson.budget().rows
    assert two == pytest.approx(2 * one) and model == pytest.approx(32 * two / 1e3)
