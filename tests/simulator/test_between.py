"""What one launch leaves in L2 for the next: which tensors are found there, and what it changes."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit import hardware
from gpukit.simulator.prediction.between import Between, warmed
from gpukit.simulator.prediction.predict import MEMORY, predict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
H200 = hardware.gpu("h200")
MI = 1 << 20


@triton.jit
def twice(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


def copies(*pairs):
    with gpukit.trace(gpu=H200, sample=2) as t:
        for x, y in pairs:
            twice[(x.numel() // 1024,)](x, y, BLOCK=1024)
    return t.launches


def test_what_fits_is_found_and_what_others_displaced_is_not():
    small, other, large = (torch.empty(n * MI, device="meta") for n in (2, 2, 16))  # 8, 8 and 64 MiB
    there, back, far, again = copies((small, other), (other, small), (large, large), (small, other))
    between = Between(H200)
    assert between.launched(there) == {}, "the first launch finds nothing"
    assert between.launched(back) == {"x_ptr": 8 * MI, "y_ptr": 8 * MI}
    assert between.launched(far) == {}, "it was never used"
    assert between.launched(again) == {}, "64 MiB came in between"
    between.moved(1 * MI)
    assert {*between.launched(again)} == {"x_ptr", "y_ptr"}
    between.moved(64 * MI)
    assert between.launched(again) == {}
    # Of two tensors that do not fit together L2 has the ends, which are gone before the next launch comes to them.
    x, y = (torch.empty(6 * MI, device="meta") for _ in range(2))
    between = Between(H200)
    assert [between.launched(each) for each in copies((x, y), (y, x))] == [{}, {}]


def test_a_launch_reads_from_device_memory_what_it_does_not_find():
    x, y = (torch.empty(2 * MI, device="meta") for _ in range(2))
    (launch,) = copies((x, y))
    cold = launch.traffic(H200, compiled=False)
    assert warmed(cold, launch, {}) is cold and cold.dram_read_bytes == 8 * MI
    half = warmed(cold, launch, {"x_ptr": 4 * MI})
    assert half.dram_read_bytes == 4 * MI and half.dirty_bytes == cold.dirty_bytes
    warm = warmed(cold, launch, {"x_ptr": 8 * MI, "y_ptr": 8 * MI})
    assert warm.dram_read_bytes == warm.dirty_bytes == 0
    assert dataclasses.replace(warm, sites=(), dram_read_bytes=0, dirty_bytes=0) == dataclasses.replace(
        cold, sites=(), dram_read_bytes=0, dirty_bytes=0
    ), "nothing else changes"


def test_a_row_of_launches_over_a_small_tensor_goes_at_the_rate_of_l2():
    x, y = (torch.empty(2 * MI, device="meta") for _ in range(2))

    def steps(*sizes):
        tensors = [(torch.empty(n, device="meta"), torch.empty(n, device="meta")) for n in sizes]
        return predict(lambda: [twice[(each[0].numel() // 1024,)](*each, BLOCK=1024) for each in tensors]).steps

    def row():
        for _ in range(3):
            twice[(2 * MI // 1024,)](x, y, BLOCK=1024)

    first, *others = predict(row).steps
    assert first.resources[MEMORY] > 0 and first.time_us > others[0].time_us
    assert all(MEMORY not in step.resources for step in others)
    one, two = steps(2 * MI, 2 * MI)
    assert one.resources[MEMORY] == pytest.approx(two.resources[MEMORY]), "others' tensors are no help"
