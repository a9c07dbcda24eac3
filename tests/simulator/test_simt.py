"""The thread-level model: what a warp instruction costs, against a slow count of every lane and against known cases."""

import numpy as np
import pytest

from gpukit.simulator import simt

rng = np.random.default_rng(0)


def copy(t, x, y):
    y[t.index] = x[t.index]


def strided(t, x, y, stride):
    y[t.index] = x[t.index * stride]


# ---- one warp ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", (32, 128))
def test_distinct_units_against_sets(unit):
    addresses = rng.integers(0, 2000, (50, 32)) * 2
    active = rng.random((50, 32)) < 0.7
    active[3] = False
    expected = [
        len({a // unit for a, on in zip(*row, strict=True) if on}) for row in zip(addresses, active, strict=True)
    ]
    assert simt.distinct(addresses, unit, active).tolist() == expected
    assert simt.distinct(addresses, unit).tolist() == [len(set((row // unit).tolist())) for row in addresses]


def test_bank_passes_against_sets():
    addresses = rng.integers(0, 300, (50, 32)) * 4
    active = rng.random((50, 32)) < 0.7
    active[3] = False
    expected = []
    for row, on in zip(addresses, active, strict=True):
        words = {int(a) // 4 for a in row[on]}
        expected.append(max((sum(w % 32 == bank for w in words) for bank in range(32)), default=0))
    assert simt.bank_passes(addresses, active).tolist() == expected


LANE = np.arange(32)


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (LANE, 1),
        (LANE * 2, 2),
        (LANE * 3, 1),  # odd strides reach every bank
        (LANE * 32, 32),
        (LANE * 33, 1),
        (LANE * 0, 1),  # one word for all: broadcast
        (LANE // 2, 1),
        (LANE % 2 * 32, 2),  # two words of one bank
        (LANE[::-1], 1),
    ],
)
def test_bank_passes_of_known_patterns(words, passes):
    assert simt.bank_passes(words * 4) == passes


def test_a_global_load_names_its_words_and_lanes():
    load = simt.global_load(np.array([34, 36, 38]), 2)
    assert load.wanted == {8: [0], 9: [1, 2]} and load.moved == set(range(8, 16))
    assert (load.asked_bytes, load.sectors, load.lines) == (6, 1, 1)
    wide = simt.global_load(np.array([16, 16, 128]), 16)  # two lanes want the same bytes
    assert wide.wanted == {**{word: [0, 1] for word in range(4, 8)}, **{word: [2] for word in range(32, 36)}}
    assert (wide.asked_bytes, wide.sectors, wide.lines) == (32, 2, 2)
    nothing = simt.global_load(np.array([], dtype=int), 4)
    assert (nothing.wanted, nothing.moved, nothing.asked_bytes, nothing.sectors) == ({}, set(), 0, 0)


@pytest.mark.parametrize("width", (1, 2, 4, 8, 16))
def test_a_global_load_against_sets(width):
    addresses = rng.integers(0, 100, 32) * width
    load = simt.global_load(addresses, width)
    wanted = {int(a) + byte for a in addresses for byte in range(width)}
    assert load.asked_bytes == len(wanted) and set(load.wanted) == {byte // 4 for byte in wanted}
    assert all((int(addresses[lane]) // 4) <= word for word, lanes in load.wanted.items() for lane in lanes)
    assert len(load.moved) == 8 * load.sectors and load.sectors == len({byte // 32 for byte in wanted})


def test_a_shared_load_waits_for_its_bank():
    load = simt.shared_load(np.array([33, 1, 2, 65, 1]))
    assert load.wanted == {33: [0], 1: [1, 4], 2: [2], 65: [3]}
    assert load.turn == {1: 1, 33: 2, 65: 3, 2: 1} and (load.banks, load.passes) == (2, 3)
    for words in rng.integers(0, 300, (20, 32)):
        assert simt.shared_load(words).passes == simt.bank_passes(words * 4)


def test_narrow_elements_share_words():
    assert simt.bank_passes(LANE * 2) == simt.bank_passes(LANE) == 1  # 16-bit and 8-bit neighbours: one word, one read


@pytest.mark.parametrize(
    ("addresses", "sectors", "lines"),
    [
        (LANE * 4, 4, 1),
        (LANE * 4 + 4, 5, 2),  # one element off
        (LANE * 8, 8, 2),
        (LANE * 128, 32, 32),
        (LANE * 2, 2, 1),
        (LANE * 16, 16, 4),
        (LANE * 0, 1, 1),
        (LANE[::-1] * 4, 4, 1),
        (rng.permutation(32) * 4, 4, 1),  # the order of lanes does not matter
    ],
)
def test_sectors_of_known_patterns(addresses, sectors, lines):
    assert simt.sectors(addresses) == sectors
    assert simt.distinct(addresses, 128) == lines


# ---- launches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (np.int8, np.float16, np.float32, np.float64))
def test_copy_moves_what_it_asks_for(dtype):
    x = rng.integers(0, 100, 4096).astype(dtype)
    y = np.zeros_like(x)
    run = simt.launch(copy, x, y, grid=16, block=256)
    assert (x == y).all()
    assert run.bytes == 2 * x.nbytes
    assert run.sectors * 32 == 2 * x.nbytes
    assert run.total("issued", "load") == run.total("issued", "store") == 128 == run.warps
    assert run.total("sectors", "load") == run.total("sectors", "store") == x.nbytes // 32
    assert run.lanes_per_instruction == 32
    assert run.total("issued", "arithmetic") == 0 == run.passes == run.conflicts


def test_strides_cost_sectors_until_each_lane_has_its_own():
    x, y = np.zeros(1024 * 16, dtype=np.float16), np.zeros(1024, dtype=np.float16)
    loads = [simt.launch(strided, x, y, s, grid=4, block=256).total("sectors", "load") for s in (1, 2, 4, 8, 16)]
    assert loads == [64, 128, 256, 512, 1024]


def test_the_h200_counted_the_same():
    """Nsight Compute on an H200, copies of 1 Mi float16: 65,536, 131,072 and 1,048,576 sectors; here 1/256 of them."""
    n = (1 << 20) // 256
    x, y = np.zeros(n * 16, dtype=np.float16), np.zeros(n, dtype=np.float16)
    for stride, measured in ((1, 65_536), (2, 131_072), (16, 1_048_576)):
        run = simt.launch(strided, x, y, stride, grid=n // 256, block=256)
        assert run.total("sectors", "load") * 256 == measured
        assert run.total("sectors", "store") * 256 == 65_536


def test_views_keep_their_place_and_their_strides():
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    y = np.zeros(32, dtype=np.float32)

    def row(t, v, y):
        y[t.lane] = v[3, t.lane]

    for view, sectors in (
        (x, 4),
        (x.T, 32),
        (x[:, ::2], 8),
        (x[:, 1:], 5),
        (x[:, 8:], 4),
        (np.broadcast_to(x[:, :1], (64, 32)), 1),
    ):
        run = simt.launch(row, view, y, grid=1, block=32)
        assert run.total("sectors", "load") == sectors
        assert (y == view[3, :32]).all()


def test_vectors():
    x = np.arange(1024, dtype=np.float32)
    y = np.zeros_like(x)
    run = simt.launch(copy, x.reshape(-1, 4), y.reshape(-1, 4), grid=1, block=256)
    assert (x == y).all()
    assert run.total("issued", "load") == 8 and run.total("sectors", "load") == 128
    with pytest.raises(simt.SimtError, match="moves 16 bytes a thread from an address that is no multiple"):
        simt.launch(copy, x[1:1021].reshape(-1, 4), y[:1020].reshape(-1, 4), grid=1, block=32)
    with pytest.raises(simt.SimtError, match="moves 32 bytes"):
        simt.launch(copy, x.reshape(-1, 8), y.reshape(-1, 8), grid=1, block=32)


def test_two_dimensional_launch_numbers_threads_along_x():
    x = np.zeros((8, 64), dtype=np.int64)

    def where_am_i(t, x):
        column = t.block.x * t.block_dim.x + t.thread.x
        row = t.block.y * t.block_dim.y + t.thread.y
        x[row, column] = row * 1000 + column

    run = simt.launch(where_am_i, x, grid=(2, 2), block=(32, 4))
    assert (x == np.arange(8)[:, None] * 1000 + np.arange(64)).all()
    assert run.warps == 16 and run.total("sectors", "store") == x.nbytes // 32


def test_the_last_warp_of_a_block_may_not_be_full():
    x = np.zeros(3 * 40, dtype=np.float32)

    def one(t, x):
        x[t.index] = 1.0

    run = simt.launch(one, x, grid=3, block=40)
    assert (x == 1).all()
    assert run.warps == 6 and run.issued == 6 and run.total("lanes") == 120


# ---- divergence ----------------------------------------------------------------------------------------------------------


def test_both_sides_of_a_branch_are_issued():
    def branch(t, x, y, period):
        even = t.index // period % 2 == 0
        value = x[t.index]
        with t.where(even):
            value *= 2
        with t.where(~even):
            value += 1
        y[t.index] = value

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    sides = {}
    for period in (1, 32):
        run = simt.launch(branch, x, y, period, grid=1, block=64)
        even = np.arange(64) // period % 2 == 0
        assert (y == np.where(even, 2 * x, x + 1)).all()
        sides[period] = [(i.issued, i.lanes) for i in run.instructions if i.kind == "arithmetic"]
    assert sides[1][1] == (2, 32) and sides[1][3] == (2, 32)  # both warps, half their lanes
    assert sides[32][1] == (1, 32) and sides[32][3] == (1, 32)  # one warp each, all its lanes


def test_a_warp_loops_until_its_last_lane_is_done():
    def count(t, trips, y):
        n, done = trips[t.index], t.full(0, np.int32)
        for _ in t.range(n):
            done += 1
        y[t.index] = done

    trips = np.zeros(64, dtype=np.int32)
    trips[:32], trips[40] = 3, 7
    y = np.zeros_like(trips)
    run = simt.launch(count, trips, y, grid=1, block=64)
    assert (y == trips).all()
    add = run.instructions[-2]
    assert (add.issued, add.lanes) == (3 + 7, 3 * 32 + 7)


def test_values_of_inactive_lanes_stay():
    def kernel(t, y):
        kept, replaced = t.full(1.0), t.full(1.0)
        with t.where(t.lane < 4):
            kept += 1
            kept[...] = kept * 5
            replaced = replaced + 1  # a new value, for every lane
        y[t.lane, 0], y[t.lane, 1] = kept, replaced
        chosen = np.where(t.lane < 2, kept, 0.0)
        y[t.lane, 2] = chosen

    y = np.zeros((32, 3), dtype=np.float32)
    simt.launch(kernel, y, grid=1, block=32)
    assert y[:, 0].tolist() == [10.0] * 4 + [1.0] * 28
    assert y[:, 1].tolist() == [2.0] * 32
    assert y[:, 2].tolist() == [10.0] * 2 + [0.0] * 30


# ---- shared memory -------------------------------------------------------------------------------------------------------


def transpose(t, x, y, pitch, sync=True):
    tile = t.shared(32, pitch)
    for k in range(0, 32, 8):
        tile[t.thread.y + k, t.thread.x] = x[t.block.y * 32 + t.thread.y + k, t.block.x * 32 + t.thread.x]
    if sync:
        t.sync()
    for k in range(0, 32, 8):
        y[t.block.x * 32 + t.thread.y + k, t.block.y * 32 + t.thread.x] = tile[t.thread.x, t.thread.y + k]


@pytest.mark.parametrize(("pitch", "passes"), [(32, 32), (33, 1), (34, 2), (36, 4)])
def test_transpose_through_shared_memory(pitch, passes):
    x = rng.random((64, 96), dtype=np.float32)
    y = np.zeros((96, 64), dtype=np.float32)
    run = simt.launch(transpose, x, y, pitch, grid=(3, 2), block=(32, 8))
    assert (y == x.T).all()
    assert run.sectors * 32 == 2 * x.nbytes
    rows = 64 * 96 // 32
    assert run.passes == rows * (1 + passes)
    assert run.conflicts == rows * (passes - 1)


def test_a_missing_barrier_is_found():
    x = np.zeros((32, 32), dtype=np.float32)
    with pytest.raises(
        simt.SimtError, match=r"a warp reads shared\[1, 0\], which another warp .* t.sync\(\) must come"
    ):
        simt.launch(transpose, x, x.copy(), 33, False, grid=(1, 1), block=(32, 8))


def test_writing_what_another_warp_read_is_found():
    def shift(t, sync):
        s = t.shared(64)
        s[t.thread.x] = 1.0
        t.sync()
        value = s[(t.thread.x + 1) % 64]
        if sync:
            t.sync()
        s[t.thread.x] = value

    simt.launch(shift, True, grid=2, block=64)
    with pytest.raises(simt.SimtError, match=r"writes shared\[0\]"):
        simt.launch(shift, False, grid=2, block=64)


def test_two_warps_writing_one_word_are_found():
    def clash(t):
        t.shared(32)[t.lane] = 1.0

    simt.launch(clash, grid=4, block=32)  # each block has its own
    with pytest.raises(simt.SimtError, match="writes shared"):
        simt.launch(clash, grid=1, block=64)


def test_a_barrier_in_a_branch_is_found():
    def kernel(t):
        with t.where(t.thread.x < 3):
            t.sync()

    with pytest.raises(simt.SimtError, match="in a branch that not every thread"):
        simt.launch(kernel, grid=1, block=32)


# ---- the result, and bad input -------------------------------------------------------------------------------------------


def test_text_shows_lines_and_totals():
    x = np.zeros(1000, dtype=np.float32)
    text = str(simt.launch(strided, x, np.zeros(500, dtype=np.float32), 2, grid=1, block=500))
    first, header, *rows = text.splitlines()
    assert first == "1 blocks of 500 threads, 16 warps"
    assert header.split() == ["line", "source", "instruction", "issued", "lanes", "bytes", "sectors", "lines", "passes"]
    assert "y[t.index] = x[t.index * stride]" in rows[0] and "load x" in text and "store y" in text
    assert rows[-1].split() == ["total", "48", "31.2", "4,000", "188", "48", "0"]
    assert max(map(len, text.splitlines())) < 140


def test_detail_keeps_every_step():
    x = np.zeros(64, dtype=np.float32)
    assert simt.launch(copy, x, x.copy(), grid=1, block=64).steps == []
    load, store = simt.launch(copy, x, x.copy(), grid=1, block=64, detail=True).steps
    assert (load.instruction.kind, store.instruction.kind) == ("load", "store")
    assert load.addresses[1].tolist() == list(range(128, 256, 4)) and load.active.all() and load.width == 4


def test_a_stray_index_names_thread_and_element():
    x = np.zeros(100, dtype=np.float32)
    with pytest.raises(
        simt.SimtError, match=r"x\[100\] is outside x \[100\], in thread 36 of block 1; 28 threads do that"
    ):
        simt.launch(copy, x, np.zeros(128, dtype=np.float32), grid=2, block=64)
    with pytest.raises(simt.SimtError, match=r"x\[-1\] is outside"):
        simt.launch(lambda t, x: x[t.lane - 1], x, grid=1, block=32)


def test_tensors_are_global_memory():
    """A view begins where it lies in its storage, as an array's does; nothing is copied."""
    import torch

    storage = torch.arange(200.0)
    x, y = storage[3:131], torch.zeros(128, requires_grad=True)
    run = simt.launch(copy, x, y, grid=2, block=64)
    assert (y.detach() == x).all()
    arrays = np.arange(200, dtype=np.float32)[3:131], np.zeros(128, dtype=np.float32)
    assert run.rows() == simt.launch(copy, *arrays, grid=2, block=64).rows()
    assert run.total("sectors", "load") == 4 * 5  # 128 bytes that do not begin on a sector
    for given, words in (
        (torch.zeros(128, dtype=torch.bfloat16), r"x is a tensor of bfloat16, .* x\.float\(\)"),
        (torch.empty(128, device="meta"), "x is on the meta device"),
    ):
        with pytest.raises(ValueError, match=words):
            simt.launch(copy, given, y, grid=1, block=32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: simt.launch(copy, x, x, grid=1, block=2048), ValueError, "at most 1,024 threads, got 2,048"),
        (lambda x: simt.launch(copy, x, x, grid=0, block=32), ValueError, "grid must be a positive number"),
        (lambda x: simt.launch(copy, x, x, grid=1, block=(1, 2, 3)), ValueError, "block must be"),
        (lambda x: simt.launch(copy, x, x, grid=1 << 20, block=1024), ValueError, "a launch here has at most"),
        (
            lambda x: simt.launch(lambda t, x: x[t.lane, t.lane], x, grid=1, block=32),
            IndexError,
            r"line \d+: x has 1 dimensions, got 2",
        ),
        (
            lambda x: simt.launch(lambda t: t.shared(8, dtype=np.float64), grid=1, block=32),
            ValueError,
            r"line \d+: .* 1, 2 or 4 bytes",
        ),
        (
            lambda x: simt.launch(lambda t: t.shared(8, 4)[t.lane], grid=1, block=8),
            IndexError,
            r"line \d+: .* 2 dimensions, got 1",
        ),
        (lambda x: simt.launch(lambda t: bool(t.lane > 3), grid=1, block=32), TypeError, r"line \d+: .*t.where"),
        (
            lambda x: simt.launch(lambda t: t.lane.__setitem__(0, 1), grid=1, block=32),
            TypeError,
            r"line \d+: .*as a whole",
        ),
        (
            lambda x: simt.launch(lambda t, x: x[t.lane], x.tolist(), grid=1, block=32),
            TypeError,
            r"line \d+: .* a list",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call(np.zeros(2048, dtype=np.float32))
