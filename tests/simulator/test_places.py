"""Where all programs of a sampled launch gather: told from the indices in memory, or from how programs begin."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit import hardware
from gpukit.simulator.interpreter.lines import LineCounter
from gpukit.simulator.trace import places

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
H200 = hardware.gpu("h200")
PROGRAMS, TURNS, BLOCK, N, ROWS = 256, 4, 32, 32, 1 << 13


@triton.jit
def sums_of_rows(id_ptr, x_ptr, y_ptr, TURNS, SHARED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Of TURNS * BLOCK rows, which SHARED programs have in common."""
    i, col = tl.arange(0, BLOCK), tl.arange(0, N)
    total = tl.zeros((BLOCK, N), tl.float32)
    for turn in range(TURNS):
        row = tl.load(id_ptr + (tl.program_id(0) // SHARED * TURNS + turn) * BLOCK + i)
        total += tl.load(x_ptr + row[:, None] * N + col[None, :])
    tl.store(y_ptr + tl.program_id(0) * N + col, tl.sum(total, 0))


@triton.jit
def neighbors_in_a_table(key_ptr, x_ptr, y_ptr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Three numbers of a table from where each key is hashed to."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at) * 40503 >> 7) & MASK
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(3):
        total += tl.load(x_ptr + slot + k)
    tl.store(y_ptr + at, total)


def numbers(high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def popular() -> torch.Tensor:
    """A row for each draw: the first ones are drawn most often."""
    return ((numbers(1 << 20, PROGRAMS * TURNS * BLOCK) / (1 << 20)) ** 3 * ROWS).int()


def launched(ids: torch.Tensor, sample: int | None = 2, shared: int = 1):
    x, y = torch.empty(ROWS * N), torch.empty(PROGRAMS * N)
    with gpukit.trace(sample=sample) as t:
        sums_of_rows[(PROGRAMS,)](ids, x, y, TURNS, SHARED=shared, N=N, BLOCK=BLOCK)
    return t.launches[0]


def test_a_sample_knows_how_often_l2_has_popular_rows(monkeypatch):
    """As often as when all programs run. A sample that lets each program gather elsewhere reads 1.5 times as much."""
    monkeypatch.setattr(places, "_AGAIN", (0.0, 0.0))  # L2 is played as if it had one half
    gpu = dataclasses.replace(H200, l2_bytes=256 << 10)

    def read(sample):
        sites = launched(popular(), sample).traffic(gpu, compiled=False).sites
        return next(site.dram_bytes for site in sites if site.tensor == "x_ptr")

    assert read(2) == pytest.approx(read(None), rel=0.03)


def test_places_by_indices():
    ids = popular()
    launch = launched(ids)
    (found,) = places.places(launch.recording).values()
    lanes = np.unique(found.starts // (4 * N)), np.unique(found.offsets - found.offsets.min())
    assert found.part == 1 and np.array_equal(lanes[0], np.unique(ids)) and np.array_equal(lanes[1], 4 * np.arange(N))
    shared = launched(ids[: PROGRAMS // 2 * TURNS * BLOCK], shared=2)
    assert not places.places(shared.recording), "two programs read each of them"
    assert not places.places(launched(torch.cat([ids, ids])).recording), "nobody reads the second half"


def test_places_by_how_programs_begin():
    """A hash is no law that the keys tell; but where a program begins, it goes on."""
    n, block, size = 1 << 17, 256, 1 << 16
    keys, x, y = numbers(1 << 22, n, dtype=torch.int64), torch.empty(size + 2), torch.empty(n)
    with gpukit.trace(sample=2) as t:
        neighbors_in_a_table[(n // block,)](keys, x, y, MASK=size - 1, BLOCK=block)
    (found,) = places.places(t.launches[0].recording).values()
    known = round(found.part * n)
    slots = ((keys * 40503 >> 7) & (size - 1))[:known].numpy()
    assert known >= n // 2 and np.array_equal(found.offsets, [0, 4, 8])
    assert np.array_equal((found.starts - found.starts.min()) // 4, slots - slots.min())


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_what_l2_lacks_of_lines_that_are_drawn_by_chance(monkeypatch, part):
    """Of 4,096 lines that are all alike, L2 lacks those that it does not hold, and a launch that goes on does so at that rate."""
    monkeypatch.setattr(places, "_AGAIN", (0.0, 0.0))
    lines, draws = 4096, 1 << 17
    drawn = places.Places(128 * numbers(lines, draws).numpy().astype(np.int64), np.arange(0, 128, 4), part)
    (read,) = places.sectors_read([drawn], 0, lines // 2)
    first = lines * (1 - math.log(2)) / 2  # more are lacking before L2 is full, after ln 2 draws of each line
    assert read == pytest.approx(4 * (first + draws / part / 2), rel=0.01)
    (read,) = places.sectors_read([places.Places(drawn.starts, drawn.offsets)], 0, lines + 1)
    assert read == 4 * lines, "all of them are held"
    if part < 1:
        assert places.sectors_read([drawn], 0, lines + 1) is None, "who knows what comes later"


def test_what_comes_between_takes_room():
    lines, draws = 4096, 1 << 16
    drawn = places.Places(128 * numbers(lines, draws).numpy().astype(np.int64), np.arange(0, 128, 4))
    alone, beside = (places.sectors_read([drawn], others, lines)[0] for others in (0, 1 << 20))
    assert beside > 2 * alone


def test_what_both_halves_of_l2_read_is_in_both():
    """Lines that are read again and again take a quarter more room than those that are read once."""
    lines = 4096
    again = places.Places(128 * numbers(lines, 16 * lines).numpy().astype(np.int64), np.arange(0, 128, 4))
    assert places.sectors_read([again], 0, round(1.3 * lines)) == [4 * lines]
    assert places.sectors_read([again], 0, round(1.2 * lines))[0] > 4 * lines


def test_a_row_and_its_scale_behind_it_are_read_once():
    """Two sites go to the same lines, one right behind the other: the second finds them. In other lines it does not."""
    lines = 4096
    rows = 128 * numbers(1 << 20, 4 * lines).numpy().astype(np.int64)
    row, scale, elsewhere = (places.Places(rows + moved, np.arange(0, 64, 4)) for moved in (0, 0, 1 << 40))
    together, apart = (places.sectors_read([row, other], 0, lines) for other in (scale, elsewhere))
    assert together[1] == 0 and together[0] == pytest.approx(apart[0], rel=0.01) and apart[1] == apart[0] > 0


@triton.jit
def sums_of_segments(x_ptr, start_ptr, y_ptr, BLOCK: tl.constexpr):
    start, stop = tl.load(start_ptr + tl.program_id(0)), tl.load(start_ptr + tl.program_id(0) + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < stop, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total))


def segments(lengths: torch.Tensor, more: int = 0):
    """A sample of sums of segments, whose tensor has so many elements more than they."""
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    x, y = (torch.empty(n, device="meta") for n in (int(lengths.sum()) + more, lengths.numel()))
    with gpukit.trace(sample=2) as t, LineCounter() as lines:
        sums_of_segments[(lengths.numel(),)](x, start, y, BLOCK=32, num_warps=1)
    return t.launches[0], lines


def test_long_programs_stand_for_as_many_as_there_are():
    """Some segments are 300 times as long as most: the mean of 64 of them is off by a quarter."""
    lengths = 1 + (299 * (numbers(1000, 3_000) / 1000) ** 10).long()
    launch, lines = segments(lengths)
    stands_for, turns = launch.recording.stands_for, int((-(-lengths // 32)).sum())
    sample = lengths[[*stands_for]].double().mean()
    assert abs(sample / lengths.double().mean() - 1) > 0.1, "else this would test nothing"
    assert sum(stands_for.values()) == pytest.approx(3_000)
    loaded = sum(access.lanes for access in launch.accesses if access.tensor == "x_ptr")
    assert loaded == pytest.approx(int(lengths.sum()), rel=0.001) and launch.spread is None
    assert launch.store_bytes == 4 * 3_000, "what does not go by the length"
    turned = max(lines.executions(0, stands_for).values())  # the line of the loop runs once more than its turns
    assert turned == pytest.approx(turns + 3_000, rel=0.02)
    begins = np.concatenate([np.arange(a, b, 32) for a, b in itertools.pairwise([0, *lengths.cumsum(0).tolist()])])
    ends = np.minimum(begins + 32, np.repeat(lengths.cumsum(0).numpy(), (-(-lengths // 32)).numpy()))
    sites = launch.traffic(H200, compiled=False).sites
    asked = next(site.l1_sectors for site in sites if site.tensor == "x_ptr")
    assert asked == pytest.approx(((ends - 1) // 8 - begins // 8 + 1).sum(), rel=0.02)


def test_programs_stand_for_the_same_where_nothing_says_how_long_all_are():
    lengths = 1 + (299 * (numbers(1000, 3_000) / 1000) ** 10).long()
    for launch, _ in (segments(lengths, more=1 << 22), segments(torch.full((3_000,), 32))):
        assert {*launch.recording.stands_for.values()} == {3_000 / launch.sampled}


@triton.jit
def sums_of_stretches(x_ptr, start_ptr, y_ptr, BLOCK: tl.constexpr):
    begin, end = tl.load(start_ptr + tl.program_id(0)), tl.load(start_ptr + tl.program_id(0) + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < end, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def test_what_all_programs_have_together_is_read_at_least_once():
    """Stretches of 1 to 2000 numbers behind one another: those that are worked out from a few of them lie across one another."""
    programs = 20_000
    lengths = torch.randint(1, 2001, (programs,), generator=torch.Generator().manual_seed(1))
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    x, y = torch.empty(int(start[-1]), device="meta"), torch.empty(programs, device="meta")
    with gpukit.trace(sample=8) as trace:
        sums_of_stretches[(programs,)](x, start, y, BLOCK=128, num_warps=1)
    found = trace.launches[0].traffic("h200", compiled=False)
    assert found.dram_read_bytes == pytest.approx(4 * (x.numel() + start.numel()), rel=0.01)
