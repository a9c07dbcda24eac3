"""The cache model: against Nsight Compute on an H200, and against what can be worked out by hand."""

import csv
import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit import hardware
from gpukit.kernels.norms import norm_fwd
from gpukit.simulator.trace import caches, coalesce, instructions, levels, recording, waves
from gpukit.validation import simulated_counts, times
from gpukit.validation.counted_kernels import CASES, _matmul

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
H200 = hardware.gpu("h200")


def traced(launch, **options):
    with gpukit.trace(**options) as t:
        launch()
    return t.launches[0]


def assumed(launch, gpu=H200, **options):
    return traced(launch, **options).traffic(gpu, compiled=False)


@triton.jit
def copy(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs * stride, mask=offs < n), mask=offs < n)


@triton.jit
def transpose(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask)
    tl.store(y_ptr + offs_n[None, :] * M + offs_m[:, None], x, mask=mask)


@triton.jit
def softmax(x_ptr, y_ptr, stride_m, n, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_m + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride_m + offs, e / tl.sum(e, 0), mask=offs < n)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        offs_k = k + tl.arange(0, BK)
        a_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        b_mask = (offs_k[:, None] < K) & (offs_n[None, :] < N)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16), mask=mask)


def matmul_of(n, tile):
    grid = (triton.cdiv(n, tile), triton.cdiv(n, tile))
    return lambda x, y: matmul[grid](x, x, y, n, n, n, BM=tile, BN=tile, BK=32)


MI = 1 << 20
AGAIN = list(csv.DictReader((times.RESULTS / "h200" / "l2_again.csv").read_text().splitlines()))
# Launch; distinct sectors that the programs' loads and stores touch; then what ncu counted on an H200: sectors from L2 to
# L1, sectors that L1 was asked for, sectors that it was given to store, bytes read from DRAM. Triton 3.6, driver 580, fp16;
# x is both operands of a matmul.
MEASURED = {
    "copy": (
        lambda x, y: copy[(1024,)](x, y, MI, 1, BLOCK=1024),
        65_536, 65_536, 65_536, 65_536, 65_536, 2_099_968,
    ),
    "stride 2": (
        lambda x, y: copy[(1024,)](x, y, MI, 2, BLOCK=1024),
        131_072, 65_536, 131_072, 1_048_576, 65_536, 4_197_888,
    ),
    "stride 16": (
        lambda x, y: copy[(1024,)](x, y, MI, 16, BLOCK=1024),
        1_048_576, 65_536, 1_048_576, 1_048_576, 65_536, 33_560_064,
    ),
    "transpose, 64x64": (
        lambda x, y: transpose[(16, 16)](x, y, 1024, 1024, BM=64, BN=64),
        65_536, 65_536, 65_536, 65_536, 65_536, 2_101_504,
    ),
    "transpose, 1x1024": (
        lambda x, y: transpose[(1024, 1)](x, y, 1024, 1024, BM=1, BN=1024),
        65_536, 1_048_576, 65_536, 65_536, 1_048_576, 2_101_760,
    ),
    "softmax, 1024x781": (
        lambda x, y: softmax[(1024,)](x, y, 781, 781, BLOCK=1024),
        50_944, 50_944, 50_944, 73_984, 73_984, 1_605_632,
    ),
    "matmul 512, 64x64": (matmul_of(512, 64), 262_144, 16_384, 262_144, 262_144, 16_384, 532_992),
    "matmul 512, 128x128": (matmul_of(512, 128), 131_072, 16_384, 131_072, 131_072, 16_384, 537_856),
    "matmul 500, 64x64": (matmul_of(500, 64), 322_000, 18_625, 255_747, 346_000, 21_625, 515_584),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_measured_on_an_h200(name):
    launch, loads, stores, l2_reads, asked, stored, dram = MEASURED[name]
    x, y = torch.zeros(16 * MI, dtype=torch.float16), torch.zeros(MI, dtype=torch.float16)
    recorded = traced(lambda: launch(x, y))
    assert (recorded.load_sectors, recorded.store_sectors) == (loads, stores)
    traffic = recorded.traffic(compiled=False)
    assert (traffic.l1_read_sectors, traffic.l1_write_sectors) == (asked, stored)
    assert stores <= traffic.l2_write_sectors <= stored and (traffic.l2_write_sectors == stored) == (stores == stored)
    assert traffic.l2_read_sectors == pytest.approx(l2_reads, rel=0.05 if "500" in name else 0)
    # The kernel's own code is fetched too: some 10 KB.
    assert dram - 16_000 <= traffic.dram_read_bytes <= dram
    assert traffic.dram_write_bytes == 0 and traffic.dirty_bytes > 0


def test_with_the_compiled_kernel_the_ragged_matmul_is_exact():
    """Shared memory and registers say how many programs an SM holds, and so how large L1 is."""
    x, y = torch.zeros(MI, dtype=torch.float16), torch.zeros(MI, dtype=torch.float16)
    launch = traced(lambda: MEASURED["matmul 500, 64x64"][0](x, y))
    assert launch.traffic().layouts == "compiled"
    assert launch.l2_read_sectors == pytest.approx(255_747, rel=0.002)
    assert (launch.traffic().l1_write_sectors, launch.traffic().l1_read_sectors) == (21_625, 346_000)
    # What is assumed where nothing can be compiled is what the compiler does.
    guessed = launch.traffic(compiled=False)
    assert (guessed.l1_write_sectors, guessed.l1_read_sectors) == (21_625, 346_000)
    assert guessed.layouts == "assumed" and launch.traffic(compiled=False) is guessed


# ---- which lanes move together ------------------------------------------------------------------------------------

# (block, elements a thread, order, warps) -> threads of a warp and warps, as Triton 3.6 prints them in TTGIR
BLOCKED = {
    ((1024,), 8, (0,), 4): ((32,), (4,)),
    ((64, 64), 8, (1, 0), 4): ((4, 8), (4, 1)),
    ((64, 32), 8, (1, 0), 4): ((8, 4), (4, 1)),
    ((64, 64), 1, (1, 0), 4): ((1, 32), (2, 2)),
    ((64, 64), 8, (0, 1), 4): ((8, 4), (1, 4)),
    ((1, 1024), 8, (1, 0), 4): ((1, 32), (1, 4)),
    ((128, 16), 8, (1, 0), 8): ((16, 2), (8, 1)),
}


@pytest.mark.parametrize("arguments", BLOCKED, ids=str)
def test_blocked_layouts_are_tritons(arguments):
    layout = coalesce.blocked(*arguments)
    assert (layout.threads_per_warp, layout.warps_per_cta) == BLOCKED[arguments]


def stored(N, stride, num_warps=4):
    x, y = (torch.zeros(64, stride, dtype=torch.float16) for _ in range(2))
    return assumed(lambda: softmax[(64,)](x, y, stride, N, BLOCK=1024, num_warps=num_warps)).l1_write_sectors


def test_a_mask_that_16_does_not_divide_makes_narrow_stores():
    assert stored(784, 784) == 64 * 49  # 8 halves a thread: 512 bytes and 16 sectors a warp
    assert stored(776, 776) > stored(784, 784)  # a row is 48.5 sectors, and the compiler cannot see that 8 divides it
    # Rows begin on sectors, but each of the 8 halves of a thread is an instruction of its own: 98 sectors, 8 times.
    assert stored(781, 1024) == sum(
        len({(w, r, (w * 256 + lane * 8 + r) // 16) for lane in range(32) if w * 256 + lane * 8 + r < 781})
        for w in range(4)
        for r in range(8)
    ) * 64  # fmt: skip


def test_of_stores_that_share_a_sector_most_meet_on_the_way():
    """A row of 781 halves begins and ends inside a sector, and 8 narrow stores fill each: asked for 8 times."""
    x, y = (torch.zeros(64, 1024, dtype=torch.float16) for _ in range(2))
    traffic = assumed(lambda: softmax[(64,)](x, y, 1024, 781, BLOCK=1024))
    asked, distinct = traffic.l1_write_sectors, 64 * 49
    assert distinct < traffic.l2_write_sectors < asked
    assert traffic.l2_write_sectors == round(distinct + instructions.ALONE * (asked - distinct))
    assert traffic.dram_read_bytes == 64 * 50 * 32  # a pair of sectors at a time


@triton.jit
def interleaved(x_ptr, y_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The PARTS numbers of each element, which lie side by side, one statement after another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for part in tl.static_range(PARTS):
        tl.store(y_ptr + at * PARTS + part, x * part)


@pytest.mark.parametrize(("parts", "block"), [(2, 128), (3, 256), (2, 1024)])
def test_stores_of_several_statements_to_a_sector_meet_if_they_follow_soon(parts, block):
    """Of re and im, or of the three coordinates of points. With 8 stores of a warp in between none meet."""
    n = 4096
    x, y = torch.zeros(n), torch.zeros(parts * n)
    traffic = assumed(lambda: interleaved[(n // block,)](x, y, PARTS=parts, BLOCK=block))
    distinct = parts * n * 4 // 32
    assert traffic.l1_write_sectors == parts * distinct
    share = instructions.ALONE if block < 1024 else 1.0
    assert traffic.l2_write_sectors == pytest.approx(distinct + share * (parts - 1) * distinct, abs=parts)
    # Those that have met are whole.
    odd = sum(site.odd_sectors for site in traffic.sites if site.kind == "store")
    assert odd < traffic.l2_write_sectors if block < 1024 else odd == traffic.l2_write_sectors


@triton.jit
def copy_rows(x_ptr, y_ptr, stride_m, n, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + row * stride_m + offs, tl.load(x_ptr + row * stride_m + offs, mask=offs < n), mask=offs < n)


@pytest.mark.parametrize(
    ("kernel", "alone"), [(softmax, instructions.ALONE_IN_STEP), (copy_rows, instructions.ALONE_APART)]
)
def test_warps_that_have_met_at_a_barrier_store_in_step(kernel, alone):
    """Rows of 781 that begin anywhere: each warp's 64 bytes share a sector with the next warp's. For its sums the softmax
    needs a barrier; a copy does not."""
    x, y = (torch.zeros(64, 781, dtype=torch.float16) for _ in range(2))
    launch = traced(lambda: kernel[(64,)](x, y, 781, 781, BLOCK=1024))
    traffic = launch.traffic(H200)
    assert traffic.layouts == "compiled"
    asked, distinct = traffic.l1_write_sectors, launch.store_sectors
    assert traffic.l2_write_sectors == round(distinct + alone * (asked - distinct)) < asked


# ---- copies to shared memory -----------------------------------------------------------------------------------------

LANE = np.arange(32)


@pytest.mark.parametrize(
    ("begins", "sectors", "alone"),
    [
        (16 * LANE, 16, 0),  # 512 bytes in a row
        (16 * (LANE % 4), 16, 0),  # 64 bytes, again and again
        (LANE // 8 * 8192 + 16 * (LANE % 8), 16, 0),  # four rows
        (32 * LANE, 32, 32),  # halves of sectors
        (32 * (LANE % 8), 32, 32),
        (16 * (LANE // 2), 32, 32),  # two neighbors alike
        (0 * LANE, 32, 32),
    ],
)  # fmt: skip
def test_sectors_that_copies_past_l1_move(begins, sectors, alone):
    """As an H200 was counted to move them."""
    rows = (begins[:, None] + 4 * np.arange(4)).reshape(1, -1)  # of 4-byte elements, four to a lane
    together, own = instructions._past_l1(rows)
    assert (together + own, own) == (sectors, alone)
    nobody = np.full((1, 128), instructions._NOBODY)
    assert instructions._past_l1(nobody) == (0, 0)


@pytest.mark.parametrize(
    ("begins", "width", "clocks"),
    [
        (4 * LANE, 4, 2.9), (16 * LANE, 16, 5.4), (8 * LANE, 8, 3.8), (4 * (LANE % 16), 4, 3.8), (4 * (LANE % 8), 4, 5.6),
        (4 * (LANE % 4), 4, 9.5), (0 * LANE, 4, 34.5), (32 * LANE, 4, 9.5),
    ],
)  # fmt: skip
def test_clocks_of_copies_through_l1(begins, width, clocks):
    """Measured on an H200 where L1 had the bytes (the first three), and else less what it took to bring them in."""
    assert instructions._clocks(begins[None], width, copies=True) == pytest.approx(clocks, rel=0.03, abs=0.8)


# ---- L1 -----------------------------------------------------------------------------------------------------------


@triton.jit
def passes(x_ptr, y_ptr, n, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(PASSES):
        for start in range(0, n, BLOCK):
            total += tl.load(x_ptr + tl.program_id(0) * n + start + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0) + tl.arange(0, 1), tl.sum(total, 0))


@pytest.mark.parametrize(("kib", "missed"), [(32, 0), (128, 0.025), (256, 0.45), (512, 1)])
def test_a_second_pass_finds_in_l1_what_fits(kib, missed):
    """Of the second pass; an H200's L1 of 248 KiB missed 2.5% of 128 KiB and 58% of 256 KiB."""
    x, y = torch.zeros(kib * 256), torch.zeros(1)
    traffic = assumed(lambda: passes[(1,)](x, y, kib * 256, PASSES=2, BLOCK=4096))
    assert traffic.l1_bytes == 256 * 1024 and traffic.l1_read_sectors == 2 * kib * 32
    assert traffic.l2_read_sectors / (kib * 32) - 1 == pytest.approx(missed, abs=0.06)
    assert traffic.l1_hit_rate == pytest.approx((1 - missed) / 2, abs=0.03)
    assert traffic.dram_read_bytes == kib * 1024


def test_least_recently_used_is_exact():
    """Against a list in order of use; the units of one access are used together."""
    random, stack = np.random.default_rng(0), []
    lru = levels.Lru(units=200, accesses=2000, capacity=40)
    for _ in range(1000):
        unit = int(random.integers(0, 200 if random.random() < 0.3 else 45))
        age = stack.index(unit) if unit in stack else 200
        one = np.array([unit])
        assert lru.within(one)[0] == (age < 40)
        assert age >= 40 or lru.ages(one)[0] == age
        lru.use(one)
        stack = [unit, *(other for other in stack if other != unit)]
    lru.use(np.arange(30))
    assert lru.within(np.arange(30)).all() and (lru.ages(np.arange(30)) == 0).all()
    lru.use(np.arange(30, 45))
    assert not lru.within(np.arange(30)).any() and lru.within(np.arange(30, 45)).all()


@pytest.mark.parametrize("kib", [4, 16, 64])
def test_l2_plays_many_accesses_as_one_after_another(kib):
    random = np.random.default_rng(kib)
    together, alone = (levels.L2(2048, 20_000, kib * 1024) for _ in range(2))
    for _ in range(200):
        asks = []
        for _ in range(int(random.integers(1, 40))):
            first = int(random.integers(0, 8000)) if random.random() < 0.5 else int(random.integers(0, 400))
            sectors = np.unique(first + random.integers(0, 40, random.integers(1, 30)))
            asks.append(
                (random.random() < 0.4, *levels.by_line(sectors, random.integers(0, 33, sectors.size).astype(np.uint8)))
            )
        for ask in asks:
            alone._one(*ask)
        sizes, writes = np.array([lines.size for _, lines, *_ in asks]), np.array([write for write, *_ in asks])
        columns = [np.concatenate(column) for column in zip(*(ask[1:] for ask in asks), strict=True)]
        weights, one = np.ones(sizes.sum(), dtype=np.int64), np.ones_like(sizes)
        together.play(sizes, writes, 0 * one, one, *columns, weights)
    assert together.uses == alone.uses
    for name in ("fills", "dram_read", "dram_written", "dirtied"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=0.02), name
    assert together.finish() == pytest.approx(alone.finish(), rel=0.1)


OWN, OTHER, TWO, BESIDE, STORED, WORDS = (
    "each SM reads its own again",
    "another SM reads it in each pass",
    "two SMs read it",
    "each SM reads its own again and as much that is read once",
    "each SM stores to its own again",
    "one word of each line is stored",
)


def passes_over(how, mebibytes, passes=8):
    """Bytes read from DRAM and written there by passes of 132 SMs over so many MiB, in pieces of 4 KiB (gpukit.validation.passes)."""
    of_a_piece, pieces = 32, mebibytes * MI // 4096
    beside = pieces if how == BESIDE else 0
    l2 = levels.L2((pieces + passes * beside) * of_a_piece, 2 * passes * pieces, H200.l2_bytes)
    some = np.uint32(32) if how == WORDS else levels._WHOLE

    def play(piece, sm):
        lines = (piece[:, None] * of_a_piece + np.arange(of_a_piece)).reshape(-1)
        asked, one = np.full(lines.size, some), np.ones_like(piece)
        filled = asked >> np.uint32(3) if how == WORDS else asked
        writes, readers = np.full(piece.size, how in (STORED, WORDS)), one * (1 + (how == TWO))
        l2.play(one * of_a_piece, writes, sm, readers, lines, asked, filled, np.ones_like(lines))

    for n in range(passes):
        for first in range(0, pieces, 132):
            piece = np.arange(first, min(pieces, first + 132))
            play((piece + 37 * n) % pieces if how == OTHER else piece, piece - first)
            if beside:
                play(pieces * (n + 1) + piece, piece - first)
    return l2.dram_read * 32, l2.dram_written * 32


@pytest.mark.parametrize("mebibytes", [16, 28, 36, 40, 48, 56])
@pytest.mark.parametrize("how", [OWN, OTHER, TWO, BESIDE, STORED, WORDS])
def test_passes_over_what_l2_may_hold(how, mebibytes):
    """Within a sixth of what the passes move, as an H200 was counted to read and write."""
    measured = [row for row in AGAIN if row["passes"] == how and row["mebibytes"] == str(mebibytes)]
    if not measured:
        assert (how, mebibytes) == (BESIDE, 56)
        return
    moved = mebibytes * MI * 8 * (2 if how == BESIDE else 1)
    wanted = [float(measured[0][f"dram_{which}_bytes"]) for which in ("read", "write")]
    assert passes_over(how, mebibytes) == tuple(pytest.approx(each, abs=moved / 6) for each in wanted)


@pytest.mark.parametrize(
    ("stored", "read", "written"),
    [
        (12, 14, 0.6),  # matmul 1536 x 2048 x 1000 in float32
        (9.2, 28, 3.2),  # causal attention of 20 heads
        (16, 24, 3.5),  # attention in fp8
        (24.5, 17, 4.0),  # scores of 4096 keys
        (22, 23, 6.4),  # a convolution of int8
        (24, 36, 9.8),  # attention of 24 heads that share 6
        (24.5, 25, 10.9),  # depthwise 7 x 7
        (30.5, 35, 16.8),  # searches in a tree
        (32, 26, 18.4),  # bmc,cbn->mn
        (48, 48, 27.1),  # triangular factors
    ],
)  # fmt: skip
def test_what_is_stored_is_written_before_l2_is_full(stored, read, written):
    """MiB that an H200 was counted to write while kernels of the validation sets read and stored so many, which L2 could hold."""
    pieces = [round(mebibytes * MI / 4096) for mebibytes in (read, stored)]
    most = max(pieces)
    l2 = levels.L2(2 * most * 32, 2 * most, H200.l2_bytes)
    at = np.arange(most + 1)
    for i in range(most):
        for stores, count in enumerate(pieces):
            piece = at[i] * count // most
            if piece < at[i + 1] * count // most:
                lines = (stores * most + piece) * 32 + np.arange(32)
                whole = np.full(32, levels._WHOLE)
                one = np.ones(1, dtype=np.int64)
                l2.play(32 * one, one == stores, i % 132 * one, one, lines, whole, whole, np.ones_like(lines))
    l2.finish()
    assert l2.dram_read * 32 == pieces[0] * 4096
    assert l2.dram_written * 32 / MI == pytest.approx(written, abs=2 + 0.06 * (stored + read))


@triton.jit
def products(a_ptr, b_ptr, c_ptr, K, shift, BLOCK: tl.constexpr):
    m, n, lanes = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK, tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(0, 4 * K, BLOCK):
        k = i % K
        rows = m + lanes + shift * (tl.program_id(1) % 2)
        a = tl.load(a_ptr + rows[:, None] * K + k + lanes[None, :])
        total += tl.dot(a, tl.load(b_ptr + (k + lanes)[:, None] * K + n + lanes[None, :]))
    tl.store(c_ptr + (m + lanes)[:, None] * K + n + lanes[None, :], total.to(tl.float16))


@pytest.mark.parametrize("shift", [0, 8])
def test_lines_that_are_asked_for_together_count_as_each_by_itself(shift, monkeypatch):
    """Tiles that are loaded four times, and with a shift tiles of a that lie across one another; a small L2 gives lines up."""
    together, found = waves._Asks._together, []

    def traffic(ask) -> caches.Traffic:
        monkeypatch.setattr(waves._Asks, "_together", ask)
        a, b, c = (torch.empty(520, 512, dtype=torch.float16, device="meta") for _ in "abc")
        gpu = dataclasses.replace(H200, l2_bytes=128 * 1024)
        return assumed(lambda: products[(8, 8)](a, b, c, 512, shift, BLOCK=64), gpu, sample=2)

    some = traffic(lambda *given: found.append(together(*given)) or found[-1])
    assert found[0].any() and found[0].all() == (shift == 0)
    each = traffic(lambda asks, kind, lines: np.zeros(kind.size, dtype=bool))
    # Lines of different kinds last for different times, and those that are asked for together are of one kind.
    assert some.dirty_bytes == pytest.approx(each.dirty_bytes, rel=0.1)
    assert some.dram_read_bytes == pytest.approx(each.dram_read_bytes, rel=0.01)
    assert some.dram_write_bytes + some.dirty_bytes == each.dram_write_bytes + each.dirty_bytes
    assert some.dram_read_bytes > 2 * 520 * 512 * 2  # what was given up was read again


def test_halves_of_lines():
    """Of tiles that begin with a line all lines are read whole; of such as begin within one each line in two halves."""
    x, y = torch.zeros(64 * 512 + 16), torch.zeros(64 * 16)

    @triton.jit
    def tiles(x_ptr, y_ptr, begin, BLOCK: tl.constexpr):
        r, c = tl.program_id(0) * 4 + tl.arange(0, 4), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + begin + r[:, None] * 512 + c[None, :])
        tl.store(y_ptr + tl.program_id(0) * 64 + tl.program_id(1) * 4 + tl.arange(0, 4), tl.sum(value, 1))

    def read(begin):
        (site, _) = assumed(lambda: tiles[(16, 16)](x, y, begin, BLOCK=32)).sites
        return site.dram_bytes, site.dram_half_bytes

    assert read(0) == (64 * 2048, 0)
    assert read(16) == (64 * 2048, 64 * 2048)  # less half a line at the beginning, and one more at the end


@triton.jit
def put_tiles(x_ptr, y_ptr, begin, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    r, c = tl.program_id(0) * 4 + tl.arange(0, 4), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = begin + r[:, None] * 512 + c[None, :]
    tl.store(y_ptr + at, tl.load((y_ptr if IN_PLACE else x_ptr) + at))


@pytest.mark.parametrize("sample", [None, 2])
def test_sectors_that_a_program_leaves_to_others_to_fill(sample):
    """Rows of 128 bytes that begin with a sector fill all of theirs; others share one at each end, in two lines. Of rows of 16
    bytes each is smaller than a sector. What a program has read is there, and what its second store completes is no part either."""
    device = "meta" if sample else "cpu"
    x, y = (torch.empty(64 * 512 + 32, device=device) for _ in range(2))

    def parts(work):
        return [site.parts for site in assumed(work, sample=sample).sites if site.kind == "store"]

    def tiles(begin, in_place=False):
        return parts(lambda: put_tiles[(16, 16)](x, y, begin, IN_PLACE=in_place, BLOCK=32))

    def small():
        return assumed(lambda: put_tiles[(16, 128)](x, y, 0, IN_PLACE=False, BLOCK=4), sample=sample).sites[-1]

    assert tiles(0) == tiles(8) == tiles(16) == [0]
    assert tiles(1) == tiles(7) == [64 * 16 * 2]
    assert tiles(1, in_place=True) == [0]
    assert (small().parts, small().small_parts) == (0, 64 * 128)
    n = 1 << 16
    x, y = (torch.empty(k * n, device=device) for k in (1, 2))
    assert parts(lambda: pairs[(n // 1024,)](x, y, BLOCK=1024)) == [0, 0]


@triton.jit
def shifted(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


def test_requests_that_fill_sectors_in_part():
    """Of 128 bytes that a warp stores from 4 bytes behind a line on, two requests bring five sectors, and each has a part."""
    x, y = torch.empty(1 << 14), torch.empty((1 << 14) + 1)
    launch = lambda y: shifted[(16,)](x, y, BLOCK=1024, num_warps=32)  # noqa: E731
    whole, odd = (assumed(lambda y=y: launch(y)).sites[-1] for y in (y[:-1], y[1:]))
    assert (whole.requests, whole.odd_requests, whole.odd_sectors) == (16 * 32, 0, 0)
    share = odd.l2_sectors / odd.l1_sectors  # some meet on the way
    assert odd.l1_sectors == 16 * 32 * 5 and 0.8 < share < 1
    assert odd.requests == pytest.approx(16 * 32 * 2 * share, rel=0.01)
    assert 0.8 * odd.requests < odd.odd_requests <= odd.requests, "two that meet may make a whole sector"


def test_stores_that_meet_make_sectors_whole():
    """Two that fill half a sector each: of 100 pairs a third stays apart, and the others are whole sectors."""
    assert caches._still_odd(200, 100, 0, 100 + 100 / 3) == pytest.approx((100 + 100 / 3 - 200 / 3) / 200)
    assert caches._still_odd(200, 100, 100, 100 + 100 / 3) == pytest.approx(
        (100 + 100 / 3) / 200
    )  # others fill the rest
    assert caches._still_odd(100, 100, 100, 100) == 1.0


@triton.jit
def rows_up_to_a_diagonal(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row, total = N - 1 - tl.program_id(0), tl.zeros([BLOCK], tl.float32)
    for first in range(0, row + 1, BLOCK):
        total += tl.load(x_ptr + row * N + first + tl.arange(0, BLOCK))
    tl.store(y_ptr + row, tl.sum(total))


def test_where_the_first_programs_have_most_to_do_the_rest_reads_less():
    """Rows up to a diagonal, the longest first: half of the matrix, and not as much in each wave as in the first ones."""
    n = 8192
    x, y = torch.empty(n * n, device="meta"), torch.empty(n, device="meta")
    moved = assumed(lambda: rows_up_to_a_diagonal[(n,)](x, y, N=n, BLOCK=256), sample=2)
    assert moved.dram_read_bytes == pytest.approx(4 * n * n / 2, rel=0.1)


def test_programs_share_the_l1_of_their_sm_only():
    """Program p runs on SM p mod 132: of 264 programs that read one block, each SM's second finds it in L1."""
    x, y = torch.zeros(1024), torch.zeros(264)

    @triton.jit
    def same(x_ptr, y_ptr, BLOCK: tl.constexpr):
        tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), 0))

    traffic = assumed(lambda: same[(264,)](x, y, BLOCK=1024))
    assert (traffic.l1_read_sectors, traffic.l2_read_sectors) == (264 * 128, 132 * 128)
    assert traffic.dram_read_bytes == 4096 and traffic.l2_hit_rate == pytest.approx(131 / 132)


@pytest.mark.parametrize(
    ("shared", "programs", "kib"),
    [(0, 8, 256), (1024, 1, 248), (48 * 1024, 2, 156), (48 * 1024 + 128, 1, 28), (227 * 1024, 1, 28)],
)
def test_shared_memory_leaves_l1_the_rest(shared, programs, kib):
    """For more than 48 KiB Triton's launcher asks for as much shared memory as there is (cuFuncSetCacheConfig)."""
    assert caches.l1_bytes(H200, shared, programs) == kib * 1024


# ---- L2 -----------------------------------------------------------------------------------------------------------


def small_l2(kib):
    return dataclasses.replace(H200, l2_bytes=kib * 1024)


def test_l2_keeps_what_was_written_until_it_needs_the_room():
    x, y = torch.zeros(MI), torch.zeros(MI)
    launch = traced(lambda: copy[(256,)](x, y, MI, 1, BLOCK=4096))
    whole = launch.traffic(H200, compiled=False)
    assert (whole.dram_read_bytes, whole.dram_write_bytes, whole.dirty_bytes) == (4 * MI, 0, 4 * MI)
    small = caches.traffic(launch.recording, small_l2(1024), None)
    assert small.dram_read_bytes == 4 * MI and small.dram_write_bytes + small.dirty_bytes == 4 * MI
    assert small.dirty_bytes == pytest.approx(
        1.5 * levels.L2_WAITS * levels.L2_HOLDS * MI, rel=0.05
    )  # one wave: all load, then all store


def test_what_comes_back_too_late_is_read_again():
    @triton.jit
    def twice(x_ptr, y_ptr, half, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs) + tl.load(x_ptr + (offs + half) % (2 * half))
        tl.store(y_ptr + tl.program_id(0), tl.sum(x, 0))

    x, y = torch.zeros(MI), torch.zeros(512)
    launch = traced(lambda: twice[(512,)](x, y, MI // 2, BLOCK=2048, num_warps=32))
    assert caches.traffic(launch.recording, small_l2(8192), None).dram_read_bytes == pytest.approx(4 * MI, rel=0.005)
    assert caches.traffic(launch.recording, small_l2(1024), None).dram_read_bytes > 7.9 * 1024**2


def test_a_line_of_four_sectors_is_the_unit_of_room():
    """One sector of each line: it takes a whole line's room, and no more than its own bytes from DRAM."""
    cache = levels.L2(1024, 100, round(128 * 128.9 / levels.L2_HOLDS))
    every_fourth = np.arange(0, 1024, 4)
    assert cache.capacity == 128
    # DRAM is read a pair of sectors at a time.
    assert cache.read(every_fourth[:64]) == 128 and cache.read(every_fourth[:64]) == 0
    assert cache.read(every_fourth[64:]) == 384 and cache.read(every_fourth[:64]) == 128
    cache.write(np.arange(4), np.full(4, 32, dtype=np.uint8))
    assert cache.finish() == 4 and cache.dram_written == 0


def test_a_sector_written_in_part_is_completed_in_the_end():
    x, y = torch.zeros(MI, dtype=torch.float16), torch.zeros(16 * MI, dtype=torch.float16)

    @triton.jit
    def spread(x_ptr, y_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs * STRIDE, tl.load(x_ptr + offs))

    def run(stride):
        return assumed(lambda: spread[(256,)](x, y, STRIDE=stride, BLOCK=4096))

    whole, parts = run(1), run(16)
    assert (whole.dram_read_bytes, whole.dram_write_bytes, whole.dirty_bytes) == (2 * MI, 0, 2 * MI)
    # 2 of 32 bytes each, 32 MiB of sectors: nearly all were waiting too long by the end.
    waiting = levels.L2_PARTS * H200.l2_bytes
    assert parts.dirty_bytes == pytest.approx(waiting, rel=0.1)
    assert parts.dram_read_bytes == pytest.approx(2 * MI + 32 * MI - waiting, rel=0.02)
    assert parts.dram_write_bytes == parts.dram_read_bytes - 2 * MI

    cache = levels.L2(16, 10, MI)
    half = np.full(2, 16, dtype=np.uint8)
    cache.write(np.arange(2), half)
    cache.write(np.arange(2), half)  # the other half: nothing of it is needed from DRAM
    assert (cache.read(np.arange(2)), cache.dram_read, cache.dirtied) == (0, 0, 2)
    cache.write(np.arange(4, 6), half)
    assert (cache.read(np.arange(4, 6)), cache.finish()) == (2, 4)


def test_lanes_on_one_element_are_as_many_atomics():
    """Nsight Compute counts a sector for each of them, going and coming, and the going twice where it crosses L2: half of all."""
    y = torch.zeros(2, dtype=torch.int32)

    @triton.jit
    def count(y_ptr):
        tl.atomic_add(y_ptr + tl.arange(0, 128) % 2, 1)

    traffic = assumed(lambda: count[(64,)](y))
    assert traffic.l2_atomic_sectors == traffic.l2_read_sectors == 64 * 4 * 16
    assert simulated_counts.count(traffic, "l2_atomic_sectors") == 1.5 * 64 * 4 * 16


def test_an_atomic_is_answered():
    """As on an H200 (column sums by atomics): what L2 sends are the loads and one sector for each that is added to."""
    x, y = torch.zeros(64, 2048), torch.zeros(2048)

    @triton.jit
    def add(x_ptr, y_ptr, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.atomic_add(y_ptr + offs, tl.load(x_ptr + tl.program_id(0) * BLOCK + offs))

    traffic = assumed(lambda: add[(64,)](x, y, BLOCK=2048))
    assert (traffic.l2_atomic_sectors, traffic.l2_read_sectors) == (64 * 256, 2 * 64 * 256)
    assert traffic.l2_write_sectors == 0 and traffic.dram_read_bytes == (64 + 1) * 8192


@triton.jit
def pairs(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """The halves of each pair by a store of its own."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + 2 * offs, x)
    tl.store(y_ptr + 2 * offs + 1, -x)


@pytest.mark.parametrize("sample", [None, 2])
def test_stores_right_behind_one_another_fill_a_sector_together(sample):
    """Nsight Compute sees no reads for complex products on an H100: the second store fills what the first one began, though
    all programs of a wave store more in the meantime than L2 keeps unfinished sectors for."""
    n = 1 << 21
    x, y = (torch.empty(k * n, device="meta" if sample else "cpu") for k in (1, 2))
    gpu = dataclasses.replace(H200, l2_bytes=2**20)
    traffic = assumed(lambda: pairs[(n // 1024,)](x, y, BLOCK=1024), gpu, sample=sample)
    assert traffic.dram_read_bytes == pytest.approx(4 * n, rel=0.01)
    assert traffic.dram_write_bytes + traffic.dirty_bytes == pytest.approx(8 * n, rel=0.01)


def test_a_store_waits_for_the_load_before_it():
    """Only stores that follow one another share a turn, and each program has turns of its own."""
    program, step = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 3, 0, 1, 2])
    stores = np.array([False, True, True, False, True, True, True])
    assert waves._turns(program, step, stores).tolist() == [0, 1, 1, 3, 0, 0, 0]
    assert waves._turns(*np.zeros((3, 0), dtype=np.int64)).size == 0


def test_stores_of_lanes_that_share_no_sector_do_not_meet():
    """A lane for each row of 32 bytes, eight instructions that fill it: each of them reaches L2 with all its lanes (counted on
    an H100)."""
    y = torch.zeros(16 * 32, dtype=torch.float16)

    @triton.jit
    def down(y_ptr):
        at = 2 * tl.arange(0, 8)[:, None] + 16 * tl.arange(0, 32)[None, :]
        tl.store(y_ptr + at, tl.zeros((8, 32), tl.float16))

    traffic = assumed(lambda: down[(1,)](y, num_warps=1))
    assert traffic.l1_write_sectors == traffic.l2_write_sectors == 8 * 32


@pytest.mark.parametrize(
    ("offsets", "lattice"),
    [([0], 4096), ([0, 2048], 2048), ([0, 512, 1536], 512), ([0, 96, 160], 128), ([0, 4, 8], 128), ([64, 64], 4096)],
)
def test_a_gather_is_moved_along_the_lattice_on_which_it_lies(offsets, lattice):
    """From a tensor of 4,096 bytes. What all programs ask for at one address stays there."""
    assert waves._lattice(np.array(offsets), 4096) == lattice


# ---- sampled launches ---------------------------------------------------------------------------------------------


def on(device, n, dtype=torch.float32):
    return torch.zeros(n, dtype=dtype, device=device)


SAMPLES = {
    "rows": (32, lambda d: softmax[(400,)](on(d, 400 * 781), on(d, 400 * 781), 781, 781, BLOCK=1024)),
    "tiles": (16, lambda d: transpose[(16, 16)](on(d, 1 << 18), on(d, 1 << 18), 512, 512, BM=32, BN=32)),
    "two passes": (4, lambda d: passes[(300,)](on(d, 300 * 4096), on(d, 300), 4096, PASSES=2, BLOCK=1024)),
    "matmul": (
        4,
        lambda d: matmul[(4, 4)](*(on(d, 256 * 256, torch.float16) for _ in "abc"), 256, 256, 256, 64, 64, 32),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_the_traffic_of_the_whole(name):
    sample, launch = SAMPLES[name]
    whole, part = assumed(lambda: launch("cpu")), assumed(lambda: launch("meta"), sample=sample)
    for counter in ("l1_read_sectors", "l2_read_sectors", "l2_write_sectors", "dram_read_bytes"):
        assert getattr(part, counter) == pytest.approx(getattr(whole, counter), rel=0.02), counter


def test_what_l1_holds_is_not_read_from_dram_by_a_sample():
    """A second pass over rows of 256 KiB, from the end backwards: what its SM's L1 still holds is not asked of L2."""
    traffic = assumed(CASES["gpukit softmax 512x131072 bf16, online"].prepare("meta"), sample=2)
    first, second, _ = traffic.sites
    assert first.dram_bytes == 512 * 131072 * 2 and second.l2_sectors < 0.7 * second.l1_sectors
    assert second.dram_bytes <= second.l2_sectors * 32 * 1.02  # a pair of sectors at a time


def test_what_programs_share_late_is_shared_in_a_sample():
    """The weights of a norm are read in its last pass, which no program of the window has reached."""

    def launch():
        x, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((24, 65536), (65536,)))
        norm_fwd(x, None, weight, None, 1e-6, centre=False)

    whole, part = assumed(launch), assumed(launch, sample=4)
    of = {site.tensor: site.dram_bytes for site in part.sites}
    assert of["weight_ptr"] == 65536 * 2
    assert part.dram_read_bytes == pytest.approx(whole.dram_read_bytes, rel=0.01)


def test_writes_of_a_sample_leave_l2_in_the_end():
    traffic = assumed(CASES["copy 512 MB"].prepare("meta"), sample=8)
    assert traffic.dram_read_bytes == 512 * MI
    assert traffic.dram_write_bytes + traffic.dirty_bytes == pytest.approx(512 * MI, rel=0.01)
    # An H200 wrote 511.9 MB meanwhile. (Of kernels that move less it writes more before it must: the model stands between.)
    assert traffic.dirty_bytes == pytest.approx(512 * MI - 511_894_784, abs=12 * MI)


@pytest.mark.parametrize("grouped", [1, 8])
def test_tiles_that_span_more_than_their_tensors_pages(grouped):
    """Tiles of 128 rows of 32 KiB in tensors of 512 MiB, most of them never reached by the programs that are looked at."""
    traffic = assumed(_matmul(16384, 16384, 16384, 128, 256, 64, GROUP_M=grouped, num_warps=8)("meta"), sample=1)
    assert traffic.l2_read_sectors == (64 + 128) * 16384 * 16384 * 2 // 32
    assert traffic.dram_write_bytes + traffic.dirty_bytes == pytest.approx(16384 * 16384 * 2, rel=0.01)
    assert 2 * 16384 * 16384 * 2 < traffic.dram_read_bytes < traffic.l2_read_sectors * 32


def test_unused_addresses_take_no_memory():
    step = recording.STORAGE_ALIGNMENT
    start = np.array([5 * step + 64, 5 * step + 64, 900 * step, 40 * step - 32])
    reach = np.array(
        [[0, -64, 0, 32], [step - 1, 0, 7, 40]]
    )  # the second begins before, the first reaches into the next
    packed, size = waves._packed(start, reach, recording.STORAGE_ALIGNMENT)
    assert packed.tolist() == [64, 64, 3 * step, 2 * step - 32] and size == 4 * step


def test_the_same_launch_has_the_same_traffic():
    def once():
        return assumed(_matmul(1024, 1024, 1024, 128, 128, 64, num_warps=8)("meta"), sample=1)

    assert once() == once()


@pytest.fixture(scope="module")
def real_shapes():
    """Traffic of a few large launches, each traced on two programs. What that costs: test_speed.py."""
    names = (
        "rows of 65536",
        "matmul 8192, rows of tiles",
        "matmul 8192, groups of 8",
        "attention 16 heads, 16384 tokens",
    )
    return {name: assumed(CASES[name].prepare("meta"), sample=2) for name in names}


def test_dram_bytes_of_real_shapes(real_shapes):
    rows = real_shapes["rows of 65536"]
    assert rows.dram_read_bytes == 4096 * 65536 * 2
    attention = real_shapes["attention 16 heads, 16384 tokens"]  # k and v of a head stay in L2 while it is at work
    assert attention.dram_read_bytes == pytest.approx(3 * 16 * 16384 * 128 * 2, rel=0.05)


def test_grouped_order_helps_matmul(real_shapes):
    """132 programs at a time: 4 rows by 32 columns of tiles, or 8 by 16.5, in which a column is twice as wide as a row."""
    rows, groups = (real_shapes[f"matmul 8192, {order}"] for order in ("rows of tiles", "groups of 8"))
    assert rows.l2_read_sectors == groups.l2_read_sectors == (64 + 32) * 8192 * 8192 * 2 // 32
    assert groups.dram_read_bytes < 0.75 * rows.dram_read_bytes


def test_a_sampled_launch_without_accesses_moves_nothing():
    @triton.jit
    def idle(x_ptr):
        pass

    with gpukit.trace(sample=2) as t:
        idle[(1000,)](torch.zeros(4))
    found = t.launches[0].traffic(hardware.gpu("h200"), False)
    assert (found.l2_read_sectors, found.dram_read_bytes, found.dram_write_bytes) == (0, 0, 0)


# ---- what cannot be answered --------------------------------------------------------------------------------------


def test_a_launch_that_did_not_run_has_no_traffic():
    launch = traced(lambda: copy[(1,)](torch.zeros(16), torch.zeros(16), 16, 1, BLOCK=16), dry=True)
    with pytest.raises(ValueError, match="copy was traced with dry=True: it made no accesses"):
        launch.traffic()


def test_too_many_irregular_accesses(monkeypatch):
    monkeypatch.setattr(recording, "MAX_IRREGULAR_LANES", 100)
    index = torch.randperm(256)

    @triton.jit
    def picked(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))

    launch = traced(lambda: picked[(4,)](torch.zeros(256), index, torch.zeros(256), BLOCK=64))
    assert launch.load_sectors > 0
    with pytest.raises(ValueError, match="picked made too many irregular accesses to keep"):
        launch.traffic()


def test_a_report_says_it_level_by_level():
    x, y = torch.zeros(4096), torch.zeros(4096)
    text = str(assumed(lambda: copy[(1,)](x, y, 4096, 1, BLOCK=4096)))
    assert text.splitlines()[0] == "L1          512 sectors asked for, 0% of them there"
    assert "DRAM to L2  16,384 bytes" in text and "lanes as assumed" in text


@pytest.mark.parametrize("used", ([0], [0, 1, 2], [0, 8, 16], [0, 1, 7, 8, 14], [3, 50, 51, 99]))
def test_what_no_program_reached_lies_in_the_gaps_of_others(used):
    used = np.array(used)
    lines, moves = waves._places(used)
    taken = [line for move in moves for line in (used + move).tolist()]
    assert len(set(taken)) == len(taken) and max(taken) < lines
    steps = np.diff(used)[np.diff(used) > 1]
    assert len(moves) > 1 or steps.size == 0 or steps.min() - 1 < 2


@pytest.mark.parametrize(
    "apart, first, clocks",
    [
        (4, 0, 1),
        (4, 12, 1),
        (8, 0, 2),
        (16, 4, 4),
        (32, 0, 8),
        (96, 0, 8),
        (128, 0, 32),
        (132, 8, 9.6),
        (100, 0, 7.5),
        (0, 0, 1),
    ],
)
def test_lanes_that_meet_in_a_bank_of_l1(apart, first, clocks):
    """The H100 took 1.2, 2.1, 8.1 and 32 clocks for lanes 4, 8, 32 and 128 bytes apart, wherever they began. The H200 took 8.7
    for lanes 96 bytes apart, and where lanes meet in no bank 7.8 for 100 bytes (25 lines) and 9.7 for 132 (32 lines)."""
    row = first + apart * np.arange(32, dtype=np.int64)
    assert instructions._clocks(np.stack([row, row[::-1]]), 4) == pytest.approx(2 * clocks)
    assert instructions._clocks(np.full((2, 32), instructions._NOBODY), 4) == 0


def test_clocks_of_l1_for_wide_and_narrow_elements():
    lanes = np.arange(32, dtype=np.int64)
    assert instructions._clocks(8 * lanes[None], 8) == 2  # 256 bytes
    assert instructions._clocks(2 * lanes[None], 2) == 1  # two lanes to a word
    assert instructions._clocks(np.stack([0 * lanes, 128 * lanes, 1000 + 4 * lanes]), 4) == 1 + 32 + 1


def test_l1_moves_wide_loads_for_a_few_lanes_at_a_time():
    """Four rows of 8 lanes that load the same 128 bytes take as long as 512 bytes; where each lane skips 16 bytes, lanes of such a
    row meet in banks, too. An H200 took 20 clocks for two loads of this kind and one of 512 bytes."""
    lanes = np.arange(32)[:, None] % 8
    four = np.arange(4)
    assert instructions._clocks((16 * lanes + 4 * four).reshape(1, -1), 4) == 4
    assert instructions._clocks((32 * lanes + 4 * four).reshape(1, -1), 4) == 8
    assert instructions._clocks((16 * np.arange(32)[:, None] + 4 * four).reshape(1, -1), 4) == 4
    assert instructions._clocks((8 * (np.arange(32)[:, None] % 16) + 4 * np.arange(2)).reshape(1, -1), 4) == 2


def test_clocks_of_l1_that_were_measured():
    measured = {row.name: row.value for row in times.machine("h100-sxm").values()}
    for apart in (4, 8, 32, 128):
        clocks = H200.boost_mhz / measured[f"L1, lanes {apart} bytes apart, one SM"]
        assert clocks == pytest.approx(instructions._clocks(apart * np.arange(32)[None], 4), rel=0.16), apart


@triton.jit
def gather(index_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


def gathered(elements: int, sample: int | None) -> caches.SiteTraffic:
    """Of 512 programs that draw 1,024 elements each."""
    index = torch.randint(elements, (512 * 1024,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x, y = (torch.empty(n, dtype=torch.float32) for n in (elements, 512 * 1024))
    launch = traced(lambda: gather[(512,)](index, x, y, BLOCK=1024), sample=sample)
    (site,) = (s for s in launch.traffic(H200, compiled=False).sites if s.tensor == "x_ptr")
    return site


@pytest.mark.parametrize("elements", [1 << 10, 1 << 20])
def test_each_program_of_a_sample_gathers_elsewhere(elements):
    """Programs that were not looked at used to ask for the very elements of one that was, and to find them all in L1."""
    whole, some = gathered(elements, None), gathered(elements, 2)
    assert some.l2_sectors == pytest.approx(whole.l2_sectors, rel=0.25)
    assert some.dram_bytes == pytest.approx(whole.dram_bytes, rel=0.5)


@triton.jit
def neighbors(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(3):
        total += tl.load(x_ptr + offs + k)
    tl.store(y_ptr + offs, total)


def test_a_line_that_is_loaded_in_several_widths():
    """The compiler loads 16 bytes per thread where it sees that they are aligned, then 4, then 8: each thread's four
    elements take one instruction, four, and two."""
    x, y = torch.empty(4 * 512 + 4, device="meta"), torch.empty(4 * 512, device="meta")
    launch = traced(lambda: neighbors[(4,)](x, y, BLOCK=512), sample=4)
    compiled = gpukit.compile(neighbors, x, y, BLOCK=512, gpu="h200")
    assert {a.bits for a in compiled.accesses if a.kind == "load"} == {128, 64, 32}
    load, _ = launch.traffic(H200, compiled).sites
    # A warp's 128 elements are 512 bytes. Where an instruction takes every other or every fourth, its lanes meet in banks.
    assert load.l1_clocks == 4 * 4 * 4 * (1 + 4 + 2)


@triton.jit
def outer_sums(a_ptr, b_ptr, y_ptr, T, D: tl.constexpr):
    i = tl.arange(0, D)
    s = tl.zeros((D, D), tl.float32)
    for t in range(T):
        a, b = tl.load(a_ptr + t * D + i), tl.load(b_ptr + t * D + i)
        s = a[:, None] * b[None, :] + b[None, :] * s
    tl.store(y_ptr + i[:, None] * D + i[None, :], s)


def test_two_blocks_on_one_line_have_layouts_of_their_own():
    """Each thread holds the element of b that is its column, and all those of a that are its rows: loads of one shape on one
    line, one with an instruction in each warp, the other with many."""
    a, b, y = (torch.empty(n, device="meta") for n in (16 * 64, 16 * 64, 64 * 64))
    launch = traced(lambda: outer_sums[(1,)](a, b, y, 16, D=64), sample=1)
    compiled = gpukit.compile(outer_sums, a, b, y, 16, D=64, gpu="h200")
    of_a, of_b = (next(x for x in compiled.layouts if x.tensors == (name,)) for name in ("a_ptr", "b_ptr"))
    assert of_a.line == of_b.line and of_a.layout != of_b.layout
    sites = {site.tensor: site for site in launch.traffic(H200, compiled).sites}
    for name, access in (("a_ptr", of_a), ("b_ptr", of_b)):
        assert sites[name].instructions == 16 * 4 * access.layout.held((64,))
    # Each warp's instructions ask for one row of 64 numbers, or for half of one, sector by sector, when they first meet it.
    assert sites["a_ptr"].instructions > 8 * sites["b_ptr"].instructions


def test_the_instructions_of_a_warp_that_ask_for_something_new():
    """Two warps, three instructions each, of four lanes: the second instruction asks again for what the first did, the third for
    one sector more. What another warp has asked for is new all the same."""
    sectors = np.arange(10, 15)
    rows = np.array([[10, 11, 12, 13], [13, 12, 11, 10], [10, 10, 14, instructions._NOBODY]] * 2)
    asked_by, places = instructions._new_to_their_warp(rows, 2, sectors)
    assert asked_by.tolist() == [0, 0, 0, 0, 2, 3, 3, 3, 3, 5] and places.tolist() == [0, 1, 2, 3, 4] * 2
    form = instructions.Form(0, 0, 0, sectors, sectors, 0, 0, 0, False, 0, 6, 4, 4, asked_by, places)
    assert form.late(None) == 4 and form.late(sectors == 14) == 2 and form.late(sectors == 12) == 2
    assert form.late(np.zeros(5, dtype=bool)) == 0 and form.late(sectors > 12) == 4


@triton.jit
def two_passes(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x + tl.load(x_ptr + offs))


def test_loads_that_l1_lacks_are_late():
    x, y = torch.empty(2, 1024, device="meta")
    traffic = assumed(lambda: two_passes[(1,)](x, y, BLOCK=1024), sample=1)
    first, second = (site for site in traffic.sites if site.kind == "load")
    # 16 bytes a thread: an instruction brings in 512, which are whole pairs of sectors.
    assert (first.instructions, first.new, first.new_pairs, first.late) == (8, 8, 8, 8)
    assert (second.instructions, second.new, second.new_pairs, second.late) == (8, 8, 8, 0)


@triton.jit
def along_rows(x_ptr, y_ptr, STEPS, WIDTH: tl.constexpr):
    """A lane goes along a row, a sector in each turn."""
    i = tl.arange(0, 32)
    total = tl.zeros((32,), tl.float32)
    for step in range(STEPS):
        total += tl.load(x_ptr + i * WIDTH + step * 8)
    tl.store(y_ptr + i, total)


def test_of_each_pair_of_sectors_one_comes_from_device_memory():
    x, y = torch.empty(32 * 128, device="meta"), torch.empty(32, device="meta")
    traffic = assumed(lambda: along_rows[(1,)](x, y, 16, WIDTH=128, num_warps=1), sample=1)
    (site,) = (site for site in traffic.sites if site.kind == "load")
    assert (site.instructions, site.new, site.late, site.fresh) == (16, 16, 16, 8)


@triton.jit
def repeated(at_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Each row of the grid reads `at` again."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(1) * tl.num_programs(0) * BLOCK + offs
    tl.store(y_ptr + own, tl.load(x_ptr + own) + tl.load(at_ptr + offs))


def test_a_sample_reads_a_tensor_again_only_where_l2_has_lost_it():
    """12 MiB for each of 16 rows of programs: in L2 since the row before, unless L2 is smaller than what a row moves."""
    n, rows = 3 << 20, 16
    at, x, y = (torch.empty(k * n, device="meta") for k in (1, rows, rows))

    def at_bytes(gpu: hardware.Gpu) -> int:
        found = assumed(lambda: repeated[(n // 1024, rows)](at, x, y, BLOCK=1024), gpu, sample=2)
        return sum(site.dram_bytes for site in found.sites if site.tensor == "at_ptr")

    assert at_bytes(H200) == pytest.approx(4 * n, rel=0.01)
    assert at_bytes(dataclasses.replace(H200, l2_bytes=4 << 20)) > 10 * 4 * n


@triton.jit
def summed(x_ptr, y_ptr, STEPS, ODD: tl.constexpr, BLOCK: tl.constexpr):
    """Stores of ODD elements after a loop: those of two programs fill a sector together."""
    total = tl.zeros((BLOCK,), tl.float32)
    offs = tl.program_id(0) * ODD + tl.arange(0, BLOCK)
    for i in range(STEPS):
        total += tl.load(x_ptr + i * 128 + tl.arange(0, BLOCK))
    tl.store(y_ptr + offs, total, mask=tl.arange(0, BLOCK) < ODD)


def test_a_sample_knows_where_programs_store_after_a_loop():
    programs, odd = 4096, 61
    x, y = torch.empty(1024, device="meta"), torch.empty(programs * odd, device="meta")
    gpu = dataclasses.replace(H200, l2_bytes=4 << 20)
    found = assumed(lambda: summed[(programs,)](x, y, 8, ODD=odd, BLOCK=64), gpu, sample=2)
    stored = found.dram_write_bytes + found.dirty_bytes
    assert stored == pytest.approx(4 * programs * odd, rel=0.02) and found.dram_read_bytes < 0.1 * stored


@pytest.mark.parametrize(
    "opcode, answered", [("RED.E.ADD.STRONG.GPU", False), ("ATOMG.E.ADD.STRONG.GPU", True), ("LDG.E", True)]
)
def test_what_the_compiler_made_a_reduction_is_not_answered(opcode, answered):
    """Counted on an H100: relaxed atomics whose answer nobody asks for are RED, and only loads come from L2."""
    from types import SimpleNamespace

    from gpukit.simulator.trace.contention import answers

    compiled = SimpleNamespace(instructions=[SimpleNamespace(opcode=opcode, line=7)])
    assert answers(7, compiled) is answered
    assert answers(8, compiled) and answers(7, None), "of another line, or of what nobody compiled"


@triton.jit
def turned_round(x_ptr, y_ptr, A, B, C, BA: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr):
    a = tl.program_id(2) * BA + tl.arange(0, BA)[:, None, None]
    b = tl.program_id(1) * BB + tl.arange(0, BB)[None, :, None]
    c = tl.program_id(0) * BC + tl.arange(0, BC)[None, None, :]
    tl.store(y_ptr + (c * B + b) * A + a, tl.load(x_ptr + (a * B + b) * C + c))


@pytest.mark.parametrize(
    "B, BA, part",
    [
        (640, 32, 1.0),  # who stores the next 32 bytes of a line comes 5,120 programs later, which move 84 MB
        (32, 32, 0.0),  # 256 programs later
        (640, 128, 0.0),  # a program stores whole lines
    ],
)
def test_lines_leave_l2_in_part_where_their_rest_comes_too_late(B, BA, part):
    A, C = 512, 1024
    x, y = (torch.empty(shape, dtype=torch.int8, device="meta") for shape in ((A, B, C), (C, B, A)))
    grid = C // 32, B // (128 // BA), A // BA
    found = assumed(lambda: turned_round[grid](x, y, A, B, C, BA=BA, BB=128 // BA, BC=32), sample=2)
    assert found.pieces == pytest.approx(part * A * B * C / 32, rel=0.01)
    assert found.piece_bytes == 32 * found.pieces
    assert found.dram_write_bytes + found.dirty_bytes == pytest.approx(A * B * C, rel=0.01)


def test_pieces_of_lines_are_counted_when_they_leave():
    l2 = levels.L2(1 << 12, 1 << 12, 1 << 30)
    for sectors in ([0, 1], [4, 5, 6, 7], [8], [9]):
        l2.write(np.array(sectors), np.full(len(sectors), waves.WHOLE))
    l2.finish()
    assert (l2.pieces, l2.piece_sectors) == (2, 4), "a half of the first line and of the third"


@triton.jit
def the_same_rows(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def test_what_programs_ask_for_together_comes_from_device_memory_for_all_of_them():
    """132 programs read the same at one time: nearly all that they ask L2 for is there, or on its way."""
    x, y = torch.empty(1 << 20, device="meta"), torch.empty(132, device="meta")
    found = assumed(lambda: the_same_rows[(132,)](x, y, 1 << 20, BLOCK=4096), sample=2)
    (site,) = (s for s in found.sites if s.kind == "load")
    assert site.first == pytest.approx(1.0, rel=0.01)
    assert site.dram_bytes < 0.01 * site.l2_sectors * 32
