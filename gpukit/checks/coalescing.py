"""The exercises of notebook 06: cases, bounds on 32-byte sectors, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from gpukit.accounting.tiling import cdiv
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, listed, nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts

WARP, SECTOR, LINE, BANKS = 32, 32, 128, 32


# ----------------------------------------------------------------------------------------------- coalescing.divergence
def _warps(trips: list[int]) -> list[list[int]]:
    return [trips[first : first + WARP] for first in range(0, len(trips), WARP)]


def _cost(issued: float, trips: list[int]) -> tuple[float, float]:
    share = sum(trips) / issued if issued else 0.0
    return issued, share


def _loop_cost(trips: list[int]) -> tuple[float, float]:
    return _cost(sum(max(warp) for warp in _warps(trips)), trips)


def _interleaved(trips: list[int]) -> tuple[float, float]:
    warps = len(_warps(trips))
    return _cost(sum(max(trips[w::warps]) for w in range(warps)), trips)


def _divergence_cases(rng: Random) -> list[Case]:
    def threads(name: str, trips: list[int], tags: str = "") -> Case:
        return case(f"{len(trips)} threads, {name}", trips, tags=tags)

    def some(n: int) -> list[int]:
        return [rng.randrange(1, 60) for _ in range(n)]

    one_long = [2] * 128
    one_long[rng.randrange(40, 60)] = rng.randrange(100, 200)
    return [
        threads("7 rounds each", [7] * 64, "uniform"),
        threads("random rounds", some(32)),
        threads("random rounds", some(256)),
        threads("thread i goes round i times", list(range(128))),
        threads("one of them long", one_long),
        threads("odd threads 10, even threads 0", [10 * (i % 2) for i in range(64)]),
        threads("the first half 10, the second 0", [10 * (i < 64) for i in range(128)]),
        threads("the last warp not full", some(70), "ragged"),
        threads("fewer than a warp", some(5), "ragged"),
        threads("no rounds at all", [0] * 40, "zero ragged"),
        threads("one more than a warp", [*some(32), 90], "ragged"),
        threads("one less than a warp", some(31), "ragged"),
        threads("the middle warp idle", [*some(32), *[0] * 32, *some(32)]),
        threads("alone", [3], "ragged"),
    ]


def _mean_of_means(trips: list[int], idle: bool) -> tuple[float, float]:
    """The second result as the mean of what each warp keeps busy, those counted that issue nothing or not."""
    busy = [sum(warp) / max(warp) if max(warp) else 0.0 for warp in _warps(trips) if idle or max(warp)]
    return _loop_cost(trips)[0], sum(busy) / max(len(busy), 1)


def _at_first(trips: list[int]) -> float:
    """The lanes that a warp has in its first round, on average."""
    return sum(trip > 0 for trip in trips) / len(_warps(trips))


DIVERGENCE = FunctionExercise(
    id="coalescing.divergence",
    function="loop_cost",
    cases=_divergence_cases,
    returns=("instructions", "busy lanes"),
    expected=_loop_cost,
    tolerance=1e-9,
    misconceptions=(
        Misconception("block-in-step", gives=lambda trips: _cost(max(trips) * len(_warps(trips)), trips)),
        Misconception("first-to-leave", gives=lambda trips: _cost(sum(min(warp) for warp in _warps(trips)), trips)),
        Misconception(
            "average-lane", gives=lambda trips: _cost(sum(sum(warp) / len(warp) for warp in _warps(trips)), trips)
        ),
        Misconception("full-average", gives=lambda trips: _cost(sum(trips) / WARP, trips)),
        Misconception("every-thread-issues", gives=lambda trips: _cost(sum(trips), trips)),
        Misconception(
            "partial-warp",
            gives=lambda trips: _cost(sum(max(warp) for warp in _warps(trips) if len(warp) == WARP), trips),
        ),
        Misconception("interleaved-warps", gives=_interleaved),
        Misconception("mean-of-means", gives=lambda trips: _mean_of_means(trips, True)),
        Misconception("mean-of-means", gives=lambda trips: _mean_of_means(trips, False)),
        Misconception("lanes-at-first", gives=lambda trips: (_loop_cost(trips)[0], _at_first(trips))),
        Misconception("rounds-per-thread", gives=lambda trips: (_loop_cost(trips)[0], sum(trips) / len(trips))),
        Misconception(
            "each-count-by-itself", gives=lambda trips: _cost(sum(sum(set(warp)) for warp in _warps(trips)), trips)
        ),
        Misconception("share-not-count", gives=lambda trips: (_loop_cost(trips)[0], _loop_cost(trips)[1] / WARP)),
    ),
    timeout_s=20.0,
)


# -------------------------------------------------------------------------------------------------- coalescing.sectors
def _live(addresses: Sequence[int | None]) -> list[int]:
    return [address for address in addresses if address is not None]


def _units(addresses: Sequence[int | None], unit: int) -> int:
    return len({address // unit for address in _live(addresses)})


def _runs(addresses: Sequence[int | None], unit: int) -> int:
    """How often a lane wants another unit than the lane before it."""
    wanted = [address // unit for address in _live(addresses)]
    return sum(1 for before, here in zip([None, *wanted], wanted, strict=False) if here != before)


def _transactions(addresses: list[int | None]) -> tuple[int, int]:
    return _units(addresses, SECTOR), _units(addresses, LINE)


def _from_first(addresses: list[int | None]) -> tuple[int, int]:
    live = _live(addresses)
    moved = [address - min(live) for address in live]
    return _units(moved, SECTOR), _units(moved, LINE)


def _span(addresses: list[int | None]) -> tuple[int, int]:
    live = _live(addresses)
    return tuple(max(live) // unit - min(live) // unit + 1 if live else 0 for unit in (SECTOR, LINE))


def _distance(addresses: list[int | None]) -> tuple[int, int]:
    live = _live(addresses)
    return tuple((max(live) - min(live)) // unit + 1 if live else 0 for unit in (SECTOR, LINE))


def _asked(addresses: list[int | None]) -> tuple[int, int]:
    size = 4 * len(_live(addresses))
    return cdiv(size, SECTOR), cdiv(size, LINE)


def _sector_cases(rng: Random) -> list[Case]:
    base = 256 * rng.randrange(1, 1000)

    def strided(size: int, stride: int = 1, offset: int = 0) -> list[int | None]:
        return [base + (offset + lane * stride) * size for lane in range(WARP)]

    def off(addresses: list[int | None], keep: Callable[[int], bool]) -> list[int | None]:
        return [address if keep(lane) else None for lane, address in enumerate(addresses)]

    shuffled = strided(4)
    rng.shuffle(shuffled)
    return [
        case("neighbors, 4 bytes each", strided(4)),
        case("neighbors, 2 bytes each", strided(2)),
        case("neighbors, 16 bytes each", strided(16)),
        case("neighbors in another order", shuffled),
        case("neighbors, 4 bytes each, from the middle of a sector", strided(4, offset=1), tags="misaligned"),
        case("every second element of 4 bytes", strided(4, 2)),
        case("every seventh element of 4 bytes", strided(4, 7)),
        case("a column: 4 bytes every 4,096", strided(4, 1024)),
        case("all lanes one address", [base + 12] * WARP),
        case("addresses anywhere", [4 * rng.randrange(10_000) for _ in range(WARP)]),
        case("neighbors from address 124 down to 0", [124 - 4 * lane for lane in range(WARP)], tags="zero"),
        case("lane 0 at address 0, the others off", [0, *[None] * 31], tags="zero off"),
        case("lanes 0 to 12 of 32 on", off(strided(4), lambda lane: lane < 13), tags="off"),
        case("every third lane on", off(strided(8), lambda lane: lane % 3 == 0), tags="off"),
        case("all lanes off", [None] * WARP, tags="off"),
    ]


SECTORS = FunctionExercise(
    id="coalescing.sectors",
    function="transactions",
    cases=_sector_cases,
    returns=("sectors", "lines"),
    expected=_transactions,
    misconceptions=(
        Misconception("per-lane", gives=lambda addresses: (len(_live(addresses)), len(_live(addresses)))),
        Misconception("per-lane", gives=lambda addresses: (len(set(_live(addresses))),) * 2),
        Misconception("lane-by-lane", gives=lambda addresses: (_runs(addresses, SECTOR), _runs(addresses, LINE))),
        Misconception("from-first", gives=_from_first),
        Misconception("span", gives=_span),
        Misconception("span", gives=_distance),
        Misconception("bytes-asked", gives=_asked),
        Misconception(
            "packed-lines", gives=lambda addresses: (_units(addresses, SECTOR), cdiv(_units(addresses, SECTOR), 4))
        ),
        Misconception("off-lanes", gives=lambda addresses: _transactions([address or 0 for address in addresses])),
        Misconception("zero-is-off", gives=lambda addresses: _transactions([address or None for address in addresses])),
        Misconception("unit", gives=lambda addresses: (_units(addresses, 4 * SECTOR), _units(addresses, 4 * LINE))),
        Misconception("unit/2", gives=lambda addresses: (_units(addresses, LINE), _units(addresses, LINE))),
        Misconception("order", gives=lambda addresses: _transactions(addresses)[::-1]),
    ),
    timeout_s=20.0,
)


# ------------------------------------------------------------------------------------------ what the kernels may touch
def _whole_sectors(advice: str) -> Callable:
    """A rule for cases tagged "aligned": no access may touch many more sectors than its bytes fill. Small accesses, such as
    one number a program, are let off."""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        if "aligned" not in case.tags:
            return None
        found = [
            (access.sectors * SECTOR / access.bytes, access.kind, access.tensor, access.line, access.bytes)
            for launch in launches
            for access in launch.accesses
            if access.bytes
        ]
        total = sum(size for *_, size in found)
        ratio, kind, tensor, line, _ = max(entry for entry in found if entry[-1] >= 0.25 * total)
        if ratio > 1.3:
            return "uncoalesced", (
                f"the {kind} of {tensor.removesuffix('_ptr')} in line {line} touches {ratio:.1f} times the 32-byte sectors "
                f"that its bytes fill: {advice}"
            )
        return None

    return rule


# ------------------------------------------------------------------------------------------------ coalescing.detective
def _detective_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def matrix(x: Tensor, note: str = "") -> Case:
        M, N = x.shape
        tags = "aligned" if N % 8 == 0 else ""  # rows begin with a sector, for those who give each a program
        return case(listed(f"x [{M}, {N}] float32", note), x, make.normal(N), tags=tags)

    shapes = (
        (1, 1),
        (16, 64),
        (20, 100),
        (1, 300),
        (7, 40),
        (40, 7),
        (100, 1),
        (17, 15),
        (1, 256),
        (257, 1),
        (200, 40),
    )
    huge = [make.signs(*shape) * 2.0**127 for shape in ((9, 37), (37,))]
    return [
        *(matrix(make.normal(*shape)) for shape in shapes),
        matrix(make.rows(37), "rows of many kinds"),
        case("x [9, 37] float32, sums beyond float32", *huge, tags="beyond"),
    ]


def _bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return (x + bias).relu()


def _bias_by_row(x: Tensor, bias: Tensor) -> Tensor:
    import torch

    return (x + bias[torch.arange(x.shape[0]) % x.shape[1]][:, None]).relu()


def _first_row_only(x: Tensor, bias: Tensor) -> Tensor:
    y = _bias_relu(x, bias)
    y[1:] = float("nan")
    return y


DETECTIVE = KernelExercise(
    id="coalescing.detective",
    function="bias_relu",
    cases=_detective_cases,
    reference=_bias_relu,
    # Long rows; and short ones, whose number no float32 holds.
    huge=lambda: [(far(7 << 30 >> k, 1 << k, dtype="float32"), far(1 << k, dtype="float32")) for k in (16, 5)],
    # The bias is asked for once an element; in the last block by lanes past the end as well, which is no mistake.
    traffic=Traffic(reads=lambda x, bias: 2 * nbytes(x) + 1024 * bias.element_size(), writes=1, memory=1),
    launch_rule=_whole_sectors("how far apart in memory are the elements of lanes 0 and 1?"),
    misconceptions=(
        Misconception("bias-per-row", gives=_bias_by_row),
        Misconception("no-relu", gives=lambda x, bias: x + bias),
        Misconception("times-zero", when=only("beyond", kind="nan")),
        Misconception("mask-one-row", gives=_first_row_only),
    ),
)


# --------------------------------------------------------------------------------------------------- coalescing.gather
def _gather_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def gather(T: int, V: int, D: int, dtype: str = "float32", tags: str = "", note: str = "") -> Case:
        ids, table = make.indices(V, T), make.normal(V, D, dtype=dtype)
        if note == "one token again and again":
            ids.fill_(V - 1)
        name = listed(f"ids [{T}], table [{V}, {D}] {dtype}", note)
        aligned = "" if D * table.element_size() % SECTOR else "aligned"
        return case(name, ids, table, tags=f"{tags} {aligned} {'tail' if D & (D - 1) else ''}")

    special = make.normal(7, 40)
    special[:, ::7], special[:, 1::7], special[:, 2::7] = float("nan"), float("inf"), -float("inf")
    return [
        gather(1, 1, 1),
        gather(5, 8, 64),
        gather(16, 40, 100),
        gather(33, 50, 256, "float16"),
        gather(7, 11, 1500, tags="long", note="rows longer than 1,024"),
        gather(24, 30, 48, "bfloat16", note="one token again and again"),
        gather(40, 7, 16, note="more tokens than rows"),
        gather(9, 5, 1, note="one column"),
        gather(4, 9, 1025, "float16", tags="long", note="one element beyond 1,024"),
        gather(130, 200, 32, note="more than 128 tokens"),
        case("ids [9], table [7, 40] float32, with infinities and NaN", make.indices(7, 9), special, tags="tail"),
        gather(33, 90, 512, "float16"),
    ]


def _embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long()]


def _rows_bytes(ids: Tensor, table: Tensor) -> int:
    return ids.numel() * table.shape[1] * table.element_size()


def _gathered(ids: Tensor, table: Tensor) -> int:
    """The rows, and an id for each block of them that is not too short."""
    return _rows_bytes(ids, table) + ids.numel() * ids.element_size() * cdiv(table.shape[1], 64)


def _ends_unwritten(evidence: Evidence) -> bool:
    """What is wrong in every case are all elements from one column on, the same in all cases, and nobody stored them."""
    begins = set()
    for outcome in (outcome for outcome in evidence.outcomes if outcome.wrong):
        if outcome.wrong.kind != "nan":
            return False
        missing = outcome.wrong.actual.isnan() & ~outcome.wrong.expected.isnan()
        begins.add(int(missing[0].int().argmax()))
        if not bool(missing[:, max(begins) :].all()) or bool(missing[:, : min(begins)].any()):
            return False
    return len(begins) == 1


def _huge_gather() -> tuple:
    import torch

    # The last rows of the table, and of y, begin beyond 2^32; the tokens are more than one axis of a grid may have. Row 69,999
    # begins beyond 2^32, too: in 32 bits its offset is that of another row. Row 40,000's is negative there.
    ids = torch.full((70_000,), 69_999)
    ids[::2] = 40_000
    return ids, far(70_000, 65_536)


GATHER = KernelExercise(
    id="coalescing.gather",
    function="embedding",
    cases=_gather_cases,
    reference=_embedding,
    huge=_huge_gather,
    traffic=Traffic(reads=_gathered, writes=_rows_bytes, memory=_rows_bytes, again=True),  # an id for each block
    launch_rule=_whole_sectors(
        "in which of the two dimensions are elements neighbors in memory, and how many neighbors does a program move?"
    ),
    misconceptions=(
        Misconception("not-gathered", gives=lambda ids, table: table[: ids.numel()]),
        Misconception("block-not-covered", when=_ends_unwritten),
    ),
)


# ---------------------------------------------------------------------------------------------------- coalescing.banks
def _of_banks(words: Sequence[int | None], bank: Callable[[int], int] = lambda word: word % BANKS) -> list[set[int]]:
    banks: dict[int, set[int]] = {}
    for word in _live(words):
        banks.setdefault(bank(word), set()).add(word)
    return list(banks.values())


def _bank_passes(words: list[int | None]) -> int:
    return max(map(len, _of_banks(words)), default=0)


def _bank_cases(rng: Random) -> list[Case]:
    first = 32 * rng.randrange(10)

    def strided(stride: int) -> list[int | None]:
        return [first + lane * stride for lane in range(WARP)]

    half = [word if lane < 16 else None for lane, word in enumerate(strided(2))]
    return [
        case("neighboring words", strided(1)),
        case("every second word", strided(2)),
        case("every third word", strided(3)),
        case("every twelfth word", strided(12)),
        case("a column of a tile 32 words wide", strided(32)),
        case("a column of a tile 33 words wide", strided(33)),
        case("all lanes one word", [first + 5] * WARP, tags="broadcast"),
        case("two words of one bank", [first + 32 * (lane % 2) for lane in range(WARP)], tags="broadcast"),
        case("pairs of lanes share a word", [first + lane // 2 * 2 for lane in range(WARP)], tags="broadcast"),
        case("a gather", [rng.randrange(2048) for _ in range(WARP)]),
        case("a gather from 48 words", [rng.randrange(48) for _ in range(WARP)], tags="broadcast"),
        case("every second word, half of the lanes off", half, tags="off"),
        case("word 0, the other lanes off", [0, *[None] * 31], tags="off zero"),
        case("words 0 and 32, and the others off", [0, 32, *[None] * 30], tags="off zero"),
        case("all lanes off", [None] * WARP, tags="off"),
    ]


BANK_PASSES = FunctionExercise(
    id="coalescing.banks",
    function="bank_passes",
    cases=_bank_cases,
    expected=_bank_passes,
    misconceptions=(
        Misconception(
            "zero-is-off",
            gives=lambda words: _bank_passes([word or None for word in words]),
        ),
        Misconception(
            "no-broadcast",
            gives=lambda words: max((sum(w % BANKS == b for w in _live(words)) for b in range(BANKS)), default=0),
        ),
        Misconception("one-at-a-time", gives=lambda words: len(set(_live(words)))),
        Misconception("banks-counted", gives=lambda words: len(_of_banks(words))),
        Misconception(
            "bank-of-block", gives=lambda words: max(map(len, _of_banks(words, lambda word: word // BANKS)), default=0)
        ),
        Misconception(
            "bytes", gives=lambda words: max(map(len, _of_banks(words, lambda word: word // 4 % BANKS)), default=0)
        ),
        Misconception("words-by-banks", gives=lambda words: cdiv(len(set(_live(words))), BANKS)),
        Misconception("words-by-banks", gives=lambda words: cdiv(len(_live(words)), BANKS)),
        Misconception("extra-passes", gives=lambda words: max(_bank_passes(words) - 1, 0)),
        Misconception("extra-passes", gives=lambda words: _bank_passes(words) - 1),
        Misconception("off-lanes", gives=lambda words: _bank_passes([word or 0 for word in words])),
        Misconception("off-lanes/2", gives=lambda words: max(1, _bank_passes(words))),
    ),
    timeout_s=20.0,
)


# ------------------------------------------------------------------------------------------------ coalescing.transpose
def _transpose_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def matrix(M: int, N: int, dtype: str = "float32") -> Case:
        if dtype.startswith("int"):
            bits = int(dtype[3:]) - 1
            x = make.integers(-(1 << bits), (1 << bits) - 1, M, N, dtype=dtype)
        else:
            x = make.normal(M, N, dtype=dtype)
        whole = all(n * x.element_size() % SECTOR == 0 for n in (M, N))
        return case(f"x [{M}, {N}] {dtype}", x, tags="aligned" if whole else "")

    return [
        matrix(1, 1),
        matrix(32, 32),
        matrix(64, 96, "float16"),
        matrix(33, 31),
        matrix(50, 70, "bfloat16"),
        matrix(1, 37),
        matrix(37, 1),
        matrix(31, 65, "int32"),
        matrix(129, 3, "int16"),
        matrix(64, 128),
        matrix(128, 64, "float16"),
    ]


def _tiles_in_place(evidence: Evidence, block: int) -> bool:
    """Each tile is where it belongs in y, and inside it rows are rows still. What lanes hold that were off at the load does
    not count."""
    import torch

    def of(x: Tensor) -> Tensor:
        M, N = x.shape
        y = x.new_full((N, M), torch.nan)
        for m in range(0, M, block):
            for n in range(0, N, block):
                tile, part = x.new_full((block, block), torch.nan), x[m : m + block, n : n + block]
                tile[: part.shape[0], : part.shape[1]] = part
                y[n : n + block, m : m + block] = tile[: min(block, N - n), : min(block, M - m)]
        return y

    def in_place(outcome: Outcome) -> bool:
        expected, y = of(outcome.case.args[0].double()), outcome.reply.outputs["y"].double()
        return bool((expected.isnan() | (y == expected)).all())

    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    return all(outcome.wrong.kind in ("values", "nan") and in_place(outcome) for outcome in failed)


TRANSPOSE = KernelExercise(
    id="coalescing.transpose",
    function="transpose",
    cases=_transpose_cases,
    contiguous=True,
    reference=lambda x: x.t().contiguous(),
    huge=lambda: (far(81920, 65536),),
    traffic=Traffic(reads=1, writes=1, memory=1),
    launch_rule=_whole_sectors("how long is a tile in the direction in which this tensor's elements are neighbors?"),
    misconceptions=(
        Misconception("not-transposed", gives=lambda x: x.reshape(x.shape[1], x.shape[0])),
        *(
            Misconception("tile-not-transposed", when=partial(_tiles_in_place, block=block))
            for block in (16, 32, 64, 128)
        ),
    ),
)


EXERCISES = [DIVERGENCE, SECTORS, DETECTIVE, GATHER, BANK_PASSES, TRANSPOSE]
