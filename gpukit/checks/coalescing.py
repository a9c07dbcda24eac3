"""The exercises of notebook 05: cases, bounds on 32-byte sectors, hints, and the wrong answers that each check recognises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "05_coalescing"
WARP, SECTOR, LINE, BANKS = 32, 32, 128, 32


def _edit(old: str, new: str) -> tuple[tuple[str, str], ...]:
    return ((old, new),)


# ----------------------------------------------------------------------------------------------- coalescing.divergence
def _warps(trips: list[int]) -> list[list[int]]:
    return [trips[first : first + WARP] for first in range(0, len(trips), WARP)]


def _cost(issued: float, trips: list[int]) -> tuple[float, float]:
    return issued, sum(trips) / issued if issued else 0.0


def _loop_cost(trips: list[int]) -> tuple[float, float]:
    return _cost(sum(max(warp) for warp in _warps(trips)), trips)


def _interleaved(trips: list[int]) -> tuple[float, float]:
    warps = len(_warps(trips))
    return _cost(sum(max(trips[w::warps]) for w in range(warps)), trips)


def _divergence_cases(rng: Random) -> list[Case]:
    def case(name: str, trips: list[int], tags: str = "") -> Case:
        return Case(f"{len(trips)} threads, {name}", (trips,), frozenset(tags.split()))

    def some(n: int) -> list[int]:
        return [rng.randrange(1, 60) for _ in range(n)]

    one_long = [2] * 128
    one_long[rng.randrange(40, 60)] = rng.randrange(100, 200)
    return [
        case("7 rounds each", [7] * 64, "uniform"),
        case("random rounds", some(32)),
        case("random rounds", some(256)),
        case("thread i goes round i times", list(range(128))),
        case("one of them long", one_long),
        case("odd threads 10, even threads 0", [10 * (i % 2) for i in range(64)]),
        case("the first half 10, the second 0", [10 * (i < 64) for i in range(128)]),
        case("the last warp not full", some(70), "ragged"),
        case("fewer than a warp", some(5), "ragged"),
        case("no rounds at all", [0] * 40, "zero ragged"),
    ]


_D_ISSUED = "sum(max(trips[first : first + WARP]) for first in range(0, len(trips), WARP))"
_D_BUSY = "sum(trips) / issued if issued else 0.0"

DIVERGENCE = FunctionExercise(
    id="coalescing.divergence",
    title="What a loop costs whose lanes disagree",
    notebook=NOTEBOOK,
    function="loop_cost",
    label=Label(2, 8, "warps, active lanes, the price of a loop that ends at different times"),
    hints=(
        "Thread 3 needs 40 rounds, its 31 neighbours need 2. How many rounds does their warp go, and what do the 31 do?",
        "A warp has one program counter: it goes on until its last lane is done, whatever the others need. Warps do not "
        "wait for each other. Every round that a thread does keeps one lane busy once.",
        "Cut the list into pieces of 32, the last of which may be shorter; add up the largest number of each piece. That "
        "is the first result. Divide the sum of all trips by it for the second, and think of the case in which it is 0.",
    ),
    cases=_divergence_cases,
    expected=_loop_cost,
    tolerance=1e-9,
    misconceptions=(
        Misconception(
            "block-in-step",
            "so all warps of the block go on until the slowest thread of all is done. Who shares a program counter: the "
            "threads of a block, or those of a warp?",
            gives=lambda trips: _cost(max(trips) * len(_warps(trips)), trips),
        ),
        Misconception(
            "first-to-leave",
            "so a warp stops when its first lane is done. What becomes of the lanes that need more rounds?",
            gives=lambda trips: _cost(sum(min(warp) for warp in _warps(trips)), trips),
        ),
        Misconception(
            "average-lane",
            "so a warp costs what its lanes need on average. What does it do in the rounds that only one lane needs?",
            gives=lambda trips: _cost(sum(sum(warp) / len(warp) for warp in _warps(trips)), trips),
        ),
        Misconception(
            "full-average",
            "so a warp costs what its lanes need on average. What does it do in the rounds that only one lane needs?",
            gives=lambda trips: _cost(sum(trips) / WARP, trips),
        ),
        Misconception(
            "every-thread-issues",
            "so every thread issues its own instructions, and no lane ever works beside another. How many threads does "
            "one instruction of a warp serve?",
            gives=lambda trips: _cost(sum(trips), trips),
        ),
        Misconception(
            "partial-warp",
            "so threads after the last full warp cost nothing. How many warps does a block of 70 threads have?",
            gives=lambda trips: _cost(sum(max(warp) for warp in _warps(trips) if len(warp) == WARP), trips),
        ),
        Misconception(
            "interleaved-warps",
            "so neighbouring threads are in different warps. Which 32 threads are the first warp?",
            gives=_interleaved,
        ),
        Misconception(
            "share-not-count",
            "the second result is a share of 32. The contract asks how many lanes: in which unit is that?",
            gives=lambda trips: (_loop_cost(trips)[0], _loop_cost(trips)[1] / WARP),
        ),
    ),
    wrong=(
        Variant("block-wide maximum", _edit(_D_ISSUED, "max(trips) * -(-len(trips) // WARP)"), diagnosis="block-in-step"),
        Variant("minimum of a warp", _edit("max(trips[first", "min(trips[first"), diagnosis="first-to-leave"),
        Variant(
            "average of a warp",
            _edit(_D_ISSUED, "sum(sum(w) / len(w) for w in (trips[f : f + 32] for f in range(0, len(trips), 32)))"),
            diagnosis="average-lane",
        ),
        Variant("all rounds by 32", _edit(_D_ISSUED, "sum(trips) / WARP"), diagnosis="full-average"),
        Variant("every thread for itself", _edit(_D_ISSUED, "sum(trips)"), diagnosis="every-thread-issues"),
        Variant(
            "only full warps", _edit("range(0, len(trips), WARP)", "range(0, len(trips) // 32 * 32, 32)"),
            diagnosis="partial-warp",
        ),
        Variant(
            "every n-th thread",
            _edit(_D_ISSUED, "sum(max(trips[w :: -(-len(trips) // 32)]) for w in range(-(-len(trips) // 32)))"),
            diagnosis="interleaved-warps",
        ),
        Variant("share of a warp", _edit(_D_BUSY, "sum(trips) / issued / WARP if issued else 0.0"), diagnosis="share-not-count"),
        Variant("divides by nothing", _edit(_D_BUSY, "sum(trips) / issued"), diagnosis="exception"),
        Variant("one number", _edit(f"return issued, {_D_BUSY}", "return issued"), diagnosis="type"),
    ),
    right=(
        Variant(
            "round by round",
            source="""def loop_cost(trips):
    issued = busy = 0
    for warp in range((len(trips) + 31) // 32):
        lanes = trips[32 * warp : 32 * warp + 32]
        k = 0
        while any(n > k for n in lanes):
            issued += 1
            busy += sum(n > k for n in lanes)
            k += 1
    return issued, busy / max(issued, 1)
""",
        ),
        Variant(
            "a dictionary of warps",
            source="""from collections import defaultdict


def loop_cost(trips):
    longest = defaultdict(int)
    for thread, n in enumerate(trips):
        longest[thread // 32] = max(longest[thread // 32], n)
    issued = sum(longest.values())
    return issued, float(sum(trips) / issued) if issued > 0 else 0.0
""",
        ),
    ),
    timeout_s=20.0,
)  # fmt: skip


# -------------------------------------------------------------------------------------------------- coalescing.sectors
def _live(addresses: Sequence[int | None]) -> list[int]:
    return [address for address in addresses if address is not None]


def _units(addresses: Sequence[int | None], unit: int) -> int:
    return len({address // unit for address in _live(addresses)})


def _transactions(addresses: list[int | None]) -> tuple[int, int]:
    return _units(addresses, SECTOR), _units(addresses, LINE)


def _from_first(addresses: list[int | None]) -> tuple[int, int]:
    live = _live(addresses)
    moved = [address - min(live) for address in live]
    return _units(moved, SECTOR), _units(moved, LINE)


def _span(addresses: list[int | None]) -> tuple[int, int]:
    live = _live(addresses)
    return tuple(max(live) // unit - min(live) // unit + 1 if live else 0 for unit in (SECTOR, LINE))


def _asked(addresses: list[int | None]) -> tuple[int, int]:
    size = 4 * len(_live(addresses))
    return -(-size // SECTOR), -(-size // LINE)


def _sector_cases(rng: Random) -> list[Case]:
    base = 256 * rng.randrange(1, 1000)

    def case(name: str, addresses: list[int | None], tags: str = "") -> Case:
        return Case(name, (addresses,), frozenset(tags.split()))

    def strided(size: int, stride: int = 1, offset: int = 0) -> list[int | None]:
        return [base + (offset + lane * stride) * size for lane in range(WARP)]

    def off(addresses: list[int | None], keep: Callable[[int], bool]) -> list[int | None]:
        return [address if keep(lane) else None for lane, address in enumerate(addresses)]

    shuffled = strided(4)
    rng.shuffle(shuffled)
    return [
        case("neighbours, 4 bytes each", strided(4)),
        case("neighbours, 2 bytes each", strided(2)),
        case("neighbours, 16 bytes each", strided(16)),
        case("neighbours in another order", shuffled),
        case("neighbours, 4 bytes each, from the middle of a sector", strided(4, offset=1), "misaligned"),
        case("every second element of 4 bytes", strided(4, 2)),
        case("every seventh element of 4 bytes", strided(4, 7)),
        case("a column: 4 bytes every 4,096", strided(4, 1024)),
        case("all lanes one address", [base + 12] * WARP),
        case("a gather", [4 * rng.randrange(10_000) for _ in range(WARP)]),
        case("lanes 0 to 12 of 32 on", off(strided(4), lambda lane: lane < 13), "off"),
        case("every third lane on", off(strided(8), lambda lane: lane % 3 == 0), "off"),
        case("all lanes off", [None] * WARP, "off"),
    ]


_T_SECTORS = "sectors = {address // 32 for address in wanted}"
_T_LINES = "lines = {address // 128 for address in wanted}"
_T_WANTED = "wanted = [address for address in addresses if address is not None]"
_T_RETURN = "return len(sectors), len(lines)"

SECTORS = FunctionExercise(
    id="coalescing.sectors",
    title="What one load of a warp moves",
    notebook=NOTEBOOK,
    function="transactions",
    label=Label(2, 8, "sectors and lines: alignment, sharing, lanes that are off"),
    hints=(
        "Two lanes want addresses 28 and 36. They are eight bytes apart: do they share a sector? And 64 and 92?",
        "A sector begins at a multiple of 32, wherever the lanes begin. It moves once, however many lanes want "
        "something in it, and not at all if none does. Lines follow the same rule with 128.",
        "Leave out the lanes that are off. Divide each address by 32, rounding down, and count how many different "
        "quotients there are; then the same with 128.",
    ),
    cases=_sector_cases,
    expected=_transactions,
    misconceptions=(
        Misconception(
            "per-lane",
            "so every lane pays for a sector of its own. What happens when two lanes want bytes of the same one?",
            gives=lambda addresses: (len(_live(addresses)), len(_live(addresses))),
        ),
        Misconception(
            "from-first",
            "so sectors begin at the first lane's address. They are a fixed grid over memory: where does the sector "
            "begin that holds address 100?",
            gives=_from_first,
        ),
        Misconception(
            "span",
            "so everything between the lowest and the highest address moves. Which sectors between two lanes does "
            "nobody want?",
            gives=_span,
        ),
        Misconception(
            "bytes-asked",
            "so these are the bytes that were asked for, in units of 32. Memory does not pack them: which sectors do the "
            "lanes of a stride-2 load touch?",
            gives=_asked,
        ),
        Misconception(
            "packed-lines",
            "the sectors are right, but the lines are a quarter of them, as if all sectors of a line were always wanted. "
            "How many lines do two sectors touch that lie 4,096 bytes apart?",
            gives=lambda addresses: (_units(addresses, SECTOR), -(-_units(addresses, SECTOR) // 4)),
        ),
        Misconception(
            "off-lanes",
            "so a lane that is off still fetches something. What does a load do for it?",
            gives=lambda addresses: _transactions([address or 0 for address in addresses]),
        ),
        Misconception(
            "unit",
            "so these are not sectors of 32 bytes. In which unit are the addresses given, and how large is a sector in it?",
            gives=lambda addresses: (_units(addresses, 4 * SECTOR), _units(addresses, 4 * LINE)),
        ),
        Misconception(
            "unit",
            "so these are not sectors of 32 bytes. How large is one, and how large is a line?",
            gives=lambda addresses: (_units(addresses, LINE), _units(addresses, LINE)),
        ),
        Misconception(
            "order",
            "both counts are there, in the other order. Which does the contract name first?",
            gives=lambda addresses: _transactions(addresses)[::-1],
        ),
    ),
    wrong=(
        Variant("a sector a lane", _edit(_T_RETURN, "return len(wanted), len(wanted)"), diagnosis="per-lane"),
        Variant(
            "relative to the first",
            _edit(_T_WANTED, f"{_T_WANTED}\n    wanted = [address - min(wanted) for address in wanted]"),
            diagnosis="from-first",
        ),
        Variant(
            "from lowest to highest",
            _edit(
                _T_RETURN,
                "if not wanted:\n        return 0, 0\n"
                "    return max(sectors) - min(sectors) + 1, max(lines) - min(lines) + 1",
            ),
            diagnosis="span",
        ),
        Variant(
            "bytes by 32", _edit(_T_RETURN, "return -(-4 * len(wanted) // 32), -(-4 * len(wanted) // 128)"),
            diagnosis="bytes-asked",
        ),
        Variant("four sectors a line", _edit("len(lines)", "-(-len(sectors) // 4)"), diagnosis="packed-lines"),
        Variant(
            "off means address 0", _edit(_T_WANTED, "wanted = [address or 0 for address in addresses]"),
            diagnosis="off-lanes",
        ),
        Variant(
            "32 elements", _edit(_T_WANTED, "wanted = [address // 4 for address in addresses if address is not None]"),
            diagnosis="unit",
        ),
        Variant("lines twice", _edit("len(sectors), ", "len(lines), "), diagnosis="unit"),
        Variant("lines first", _edit(_T_RETURN, "return len(lines), len(sectors)"), diagnosis="order"),
        Variant("forgets that lanes are off", _edit(_T_WANTED, "wanted = addresses"), diagnosis="exception"),
    ),
    right=(
        Variant(
            "sort and count changes",
            source="""def transactions(addresses):
    counts = []
    for shift in (5, 7):
        numbers = sorted(address >> shift for address in addresses if address is not None)
        counts.append(sum(1 for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]))
    return tuple(counts)
""",
        ),
        Variant(
            "with torch.unique",
            source="""import torch


def transactions(addresses):
    live = torch.tensor([a for a in addresses if a is not None], dtype=torch.int64)
    return torch.unique(live // 32).numel(), torch.unique(live // 128).numel()
""",
        ),
    ),
    timeout_s=20.0,
)  # fmt: skip


# ------------------------------------------------------------------------------------------ what the kernels may touch
def _whole_sectors(advice: str, least_bytes: Callable[..., int] | None = None) -> Callable:
    """A rule for cases tagged "aligned": no access may touch many more sectors than its bytes fill, and all loads together
    may ask for little more than `least_bytes(*args)`. Small accesses, such as one number a program, are let off."""

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
        loaded = sum(launch.load_bytes for launch in launches)
        if least_bytes and loaded > 1.2 * least_bytes(*case.args):
            times = loaded / least_bytes(*case.args)
            return "traffic", f"{times:.1f} times the bytes are loaded that the result needs: which are never used?"
        return None

    return rule


def _tensors(rng: Random):
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(*shape: int, dtype: str = "float32") -> Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    def below(high: int, size: int) -> Tensor:
        return torch.randint(high, (size,), generator=generator)

    return normal, below


# ------------------------------------------------------------------------------------------------ coalescing.detective
def _detective_cases(rng: Random) -> list[Case]:
    normal, _ = _tensors(rng)

    def case(M: int, N: int, tags: str = "") -> Case:
        return Case(f"x [{M}, {N}] float32", (normal(M, N), normal(N)), frozenset(tags.split()))

    return [
        case(1, 1),
        case(16, 64),
        case(20, 100),
        case(1, 300),
        case(7, 40),
        case(40, 7),
        case(100, 1),
        case(512, 40, "aligned"),
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


_P_INDEX = "    m, n = i // N, i % N\n"
_P_MASK = "    mask = i < M * N\n"
_P_LOAD = "    x = tl.load(x_ptr + m * N + n, mask=mask)\n    bias"
_P_STORE = "    tl.store(y_ptr + m * N + n, tl.maximum(x + bias, 0.0), mask=mask)\n"
_P_LAUNCH = "    bias_relu_kernel[(triton.cdiv(M * N, BLOCK),)](x, bias, y, M, N, BLOCK=BLOCK)\n    return y\n"

DETECTIVE = KernelExercise(
    id="coalescing.detective",
    title="Right values, eight times the traffic",
    notebook=NOTEBOOK,
    function="bias_relu",
    label=Label(2, 15, "detective: which elements do neighbouring lanes hold?"),
    hints=(
        "Take M = 512, N = 40 and write down m and n for lanes 0, 1 and 2 of program 0. How far apart are these three "
        "elements in memory?",
        "A flat index is unravelled into a row and a column. Any way to do that which visits every element once gives the "
        "right values; only one of them lets neighbouring lanes have neighbouring addresses.",
        "In a row-major matrix the column moves fastest. The column must be the remainder of the flat index, and the "
        "row its quotient, both by the number of columns.",
    ),
    cases=_detective_cases,
    reference=_bias_relu,
    traffic=Traffic(reads=2, writes=1),  # the bias is asked for once an element
    launch_rule=_whole_sectors("how far apart in memory are the elements of lanes 0 and 1?"),
    misconceptions=(
        Misconception(
            "bias-per-row",
            "so bias[m] was added, one number a row. The bias has one number a column: which index selects it?",
            gives=_bias_by_row,
        ),
        Misconception(
            "no-relu",
            "negative results came through. What does the last line have to do with them?",
            gives=lambda x, bias: x + bias,
        ),
        Misconception(
            "mask-one-row",
            "only the first N elements were computed. The lanes count all elements of x: how many are there?",
            gives=_first_row_only,
        ),
        Misconception("race", "two programs write one element: does every i get an (m, n) of its own?"),
        Misconception("traffic", "what is loaded once and kept need not be loaded again"),
    ),
    wrong=(
        Variant("as it was found", ((_P_INDEX, "    m, n = i % M, i // M\n"),), diagnosis="uncoalesced"),
        Variant(
            "a block of four", _edit("    BLOCK = 256\n", "    BLOCK = 4\n"), diagnosis="uncoalesced",
        ),
        Variant("bias of the row", ((_P_LOAD, _P_LOAD.replace("    bias", "    n, m = m, n\n    bias")),
                                    (_P_STORE, "    n, m = m, n\n" + _P_STORE)), diagnosis="bias-per-row"),
        Variant("without ReLU", _edit("tl.maximum(x + bias, 0.0)", "x + bias"), diagnosis="no-relu"),
        Variant("masks one row", _edit(_P_MASK, "    mask = i < N\n"), diagnosis="mask-one-row"),
        Variant("no mask", _edit(_P_MASK, "    mask = i >= 0\n"), diagnosis="out-of-bounds"),
        Variant("divides by the rows", ((_P_INDEX, "    m, n = i // M, i % M\n"),), diagnosis="out-of-bounds"),
        Variant(
            "loads x twice",
            ((_P_LOAD, "    x = tl.load(x_ptr + m * N + n, mask=mask)\n" + _P_LOAD.replace("x = ", "x = 0 * x + ")),),
            diagnosis="traffic",
        ),
        Variant("calls torch", ((_P_LAUNCH, "    return torch.relu(x + bias)\n"),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "a row a program",
            source="""import torch
import triton
import triton.language as tl


@triton.jit
def row_kernel(x_ptr, bias_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        y = tl.load(x_ptr + row + n, mask=n < N) + tl.load(bias_ptr + n, mask=n < N)
        tl.store(y_ptr + row + n, tl.where(y > 0, y, 0.0), mask=n < N)


def bias_relu(x, bias):
    y = torch.empty_like(x)
    row_kernel[(x.shape[0],)](x, bias, y, x.shape[1], BLOCK_N=64)
    return y
""",
        ),
        Variant(
            "the column from the row",
            ((_P_INDEX, "    m = i // N\n    n = i - m * N\n"), (_P_MASK, "    mask = (m < M) & (n < N)\n")),
        ),
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------- coalescing.gather
def _gather_cases(rng: Random) -> list[Case]:
    normal, below = _tensors(rng)

    def case(T: int, V: int, D: int, dtype: str = "float32", tags: str = "", note: str = "") -> Case:
        ids = below(V, T)
        if note == "one token again and again":
            ids.fill_(V - 1)
        elif V > 1:
            ids[0] = V - 1  # never the identity
        name = f"ids [{T}], table [{V}, {D}] {dtype}" + (f", {note}" if note else "")
        found = frozenset(tags.split()) | ({"tail"} if D & (D - 1) else set())
        return Case(name, (ids, normal(V, D, dtype=dtype)), found)

    return [
        case(1, 1, 1),
        case(5, 8, 64),
        case(16, 40, 100),
        case(33, 50, 256, "float16"),
        case(7, 11, 1500, tags="long", note="rows longer than 1,024"),
        case(24, 30, 48, "bfloat16", note="one token again and again"),
        case(40, 7, 16, note="more tokens than rows"),
        case(130, 200, 32, note="more than 128 tokens", tags="aligned"),
        case(64, 160, 256, "float16", tags="aligned"),
    ]


def _embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long()]


_G_TOKEN = "    token = tl.program_id(0).to(tl.int64)\n"
_G_ROW = "    row = tl.load(ids_ptr + token)  # one number for the whole program: its lanes share one row\n"
_G_LOAD = "    x = tl.load(table_ptr + row * D + offs_d, mask=mask_d)\n"
_G_STORE = "    tl.store(y_ptr + token * D + offs_d, x, mask=mask_d)\n"
_G_MASK = "    mask_d = offs_d < D\n"
_G_OFFS = "    offs_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"
_G_GRID = "    grid = (T, triton.cdiv(D, BLOCK))\n"
_G_BLOCK = "    BLOCK = min(1024, triton.next_power_of_2(D))\n"
_G_LAUNCH = "    embedding_kernel[grid](ids, table, y, T, D, BLOCK=BLOCK)\n"

GATHER = KernelExercise(
    id="coalescing.gather",
    title="An embedding: rows gathered by number",
    notebook=NOTEBOOK,
    function="embedding",
    label=Label(3, 20, "a gather whose lanes still share sectors; choosing what a block runs along"),
    hints=(
        "Two neighbouring tokens may want rows that lie anywhere. Two neighbouring elements of one row lie where? Along "
        "which of the two should a program's lanes run?",
        "Let a program serve one token: it loads one id, which all its lanes share, and its lanes run along the row. "
        "Rows longer than a block need a second dimension of the grid, or a loop.",
        "The program's number is the token. Load its id with a single pointer. Lane offsets run from the block's "
        "beginning along D, masked by D; load from the table at id times D plus offset, store at token times D plus "
        "offset. The grid has T programs, times as many as it takes blocks to cover D.",
    ),
    cases=_gather_cases,
    reference=_embedding,
    launch_rule=_whole_sectors(
        "which of the two dimensions has neighbours in memory?",
        least_bytes=lambda ids, table: ids.numel() * (8 + table.shape[1] * table.element_size()),
    ),
    misconceptions=(
        Misconception(
            "not-gathered",
            "row t of your result is row t of the table. Where do the ids come in?",
            gives=lambda ids, table: table[: ids.numel()],
        ),
        Misconception(
            "block-not-covered",
            "only rows longer than a block are wrong, and they end in elements that were never written. What covers the "
            "rest of a long row?",
            when=lambda evidence: evidence.tag("long"),
        ),
        Misconception("out-of-bounds", "where does the row of an id begin in the table, and where does a row end?"),
        Misconception("race", "two programs write one place: which number says where in y a token's row belongs?"),
    ),
    wrong=(
        Variant(
            "lanes along the tokens",
            (
                (_G_TOKEN, "    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\n"),
                (_G_OFFS, "    offs_d = tl.program_id(1)\n"),
                (_G_MASK, "    mask_d = token < T\n"),
                (_G_ROW, "    row = tl.load(ids_ptr + token, mask=mask_d, other=0)\n"),
                (_G_GRID, "    grid = (triton.cdiv(T, BLOCK), D)\n"),
                (_G_BLOCK, "    BLOCK = 32\n"),
            ),
            diagnosis="uncoalesced",
        ),
        Variant("blocks of four", ((_G_BLOCK, "    BLOCK = 4\n"),), diagnosis="uncoalesced"),
        Variant("rows in order", ((_G_LOAD, _G_LOAD.replace("row * D", "token * D")),), diagnosis="not-gathered"),
        Variant("one block a row", ((_G_GRID, "    grid = (T, 1)\n"),), diagnosis="block-not-covered"),
        Variant("no mask", ((_G_MASK, "    mask_d = offs_d >= 0\n"),), diagnosis="out-of-bounds"),
        Variant(
            "rows a block apart", ((_G_LOAD, _G_LOAD.replace("row * D", "row * BLOCK")),), diagnosis="out-of-bounds"
        ),
        Variant(
            "stored where it came from", ((_G_STORE, _G_STORE.replace("token", "row")),), diagnosis="out-of-bounds"
        ),
        Variant(
            "loads everything, keeps one row",
            (
                (
                    _G_LOAD,
                    _G_LOAD + "    for other in range(0, T):\n"
                    "        x += 0 * tl.load(table_ptr + (row + 0 * other) * D + offs_d, mask=mask_d)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant("calls torch", ((_G_LAUNCH, "    y = table[ids]\n"),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "a loop along the row",
            (
                (
                    _G_OFFS + _G_MASK + _G_ROW + _G_LOAD + _G_STORE,
                    _G_ROW + "    for first in range(0, D, BLOCK):\n"
                    "        offs_d = first + tl.arange(0, BLOCK)\n"
                    "        x = tl.load(table_ptr + row * D + offs_d, mask=offs_d < D)\n"
                    "        tl.store(y_ptr + token * D + offs_d, x, mask=offs_d < D)\n",
                ),
                (_G_GRID, "    grid = (T,)\n"),
                (_G_BLOCK, "    BLOCK = 128\n"),
            ),
        ),
        Variant(
            "eight tokens a program",
            (
                (_G_TOKEN, "    token = (tl.program_id(0).to(tl.int64) * 8 + tl.arange(0, 8))[:, None]\n"),
                (_G_OFFS, "    offs_d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]\n"),
                (_G_MASK, "    mask_d = (token < T) & (offs_d < D)\n"),
                (_G_ROW, "    row = tl.load(ids_ptr + token, mask=token < T, other=0)\n"),
                (_G_GRID, "    grid = (triton.cdiv(T, 8), triton.cdiv(D, BLOCK))\n"),
            ),
        ),
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

    def case(name: str, words: list[int | None], tags: str = "") -> Case:
        return Case(name, (words,), frozenset(tags.split()))

    def strided(stride: int) -> list[int | None]:
        return [first + lane * stride for lane in range(WARP)]

    half = [word if lane < 16 else None for lane, word in enumerate(strided(2))]
    return [
        case("neighbouring words", strided(1)),
        case("every second word", strided(2)),
        case("every third word", strided(3)),
        case("every twelfth word", strided(12)),
        case("a column of a tile 32 words wide", strided(32)),
        case("a column of a tile 33 words wide", strided(33)),
        case("all lanes one word", [first + 5] * WARP, "broadcast"),
        case("two words of one bank", [first + 32 * (lane % 2) for lane in range(WARP)], "broadcast"),
        case("pairs of lanes share a word", [first + lane // 2 * 2 for lane in range(WARP)], "broadcast"),
        case("a gather", [rng.randrange(2048) for _ in range(WARP)]),
        case("a gather from 48 words", [rng.randrange(48) for _ in range(WARP)], "broadcast"),
        case("every second word, half of the lanes off", half, "off"),
        case("all lanes off", [None] * WARP, "off"),
    ]


_B_ADD = "            of_bank[word % 32].add(word)\n"
_B_RETURN = "    return max(len(distinct) for distinct in of_bank)\n"
_B_TEST = "        if word is not None:\n"

BANK_PASSES = FunctionExercise(
    id="coalescing.banks",
    title="How often shared memory is asked",
    notebook=NOTEBOOK,
    function="bank_passes",
    label=Label(2, 10, "banks, conflicts, broadcast"),
    hints=(
        "Lanes 0 and 1 both want word 7. Lanes 2 and 3 want words 8 and 40. Which of the two pairs has to take turns?",
        "A bank hands out one word at a time, to everyone who wants that word. All 32 banks work at once, so the "
        "slowest bank decides.",
        "For each of the 32 banks collect the different words wanted of it, lanes that are off left out. The result is "
        "the size of the largest collection, 0 if all are empty.",
    ),
    cases=_bank_cases,
    expected=_bank_passes,
    misconceptions=(
        Misconception(
            "no-broadcast",
            "so lanes that want the same word take turns. What does a bank do with a word that several lanes want?",
            gives=lambda words: max((sum(w % BANKS == b for w in _live(words)) for b in range(BANKS)), default=0),
        ),
        Misconception(
            "one-at-a-time",
            "so words are handed out one after the other, all banks together. How many banks work at once?",
            gives=lambda words: len(set(_live(words))),
        ),
        Misconception(
            "banks-counted",
            "that is how many banks are in use. The more, the better: what has to be waited for?",
            gives=lambda words: len(_of_banks(words)),
        ),
        Misconception(
            "bank-of-block",
            "so words 0 to 31 lie in one bank. Neighbouring words lie in neighbouring banks: in which is word 33?",
            gives=lambda words: max(map(len, _of_banks(words, lambda word: word // BANKS)), default=0),
        ),
        Misconception(
            "bytes",
            "so four neighbouring words share a bank, as if the numbers were bytes. What does the contract call them?",
            gives=lambda words: max(map(len, _of_banks(words, lambda word: word // 4 % BANKS)), default=0),
        ),
        Misconception(
            "extra-passes",
            "that is how many passes come on top of the first. How many are there in all?",
            gives=lambda words: max(_bank_passes(words) - 1, 0),
        ),
        Misconception(
            "extra-passes",
            "that is how many passes come on top of the first. How many are there in all?",
            gives=lambda words: _bank_passes(words) - 1,
        ),
        Misconception(
            "off-lanes",
            "so lanes that are off still want something. What does a load do for them?",
            gives=lambda words: _bank_passes([word or 0 for word in words]),
        ),
        Misconception(
            "off-lanes",
            "so a warp without an active lane takes a pass. What would be handed out in it?",
            gives=lambda words: max(1, _bank_passes(words)),
        ),
    ),
    wrong=(
        Variant(
            "counts lanes",
            (("set() for", "[] for"), (_B_ADD, _B_ADD.replace("add", "append"))),
            diagnosis="no-broadcast",
        ),
        Variant("counts words", ((_B_RETURN, _B_RETURN.replace("max", "sum")),), diagnosis="one-at-a-time"),
        Variant(
            "counts banks", ((_B_RETURN, "    return sum(1 for distinct in of_bank if distinct)\n"),),
            diagnosis="banks-counted",
        ),
        Variant(
            "32 words a bank",
            (("for _ in range(32)]", "for _ in range(4096)]"), (_B_ADD, _B_ADD.replace("word % 32", "word // 32"))),
            diagnosis="bank-of-block",
        ),
        Variant("bytes", ((_B_ADD, _B_ADD.replace("word % 32", "word // 4 % 32")),), diagnosis="bytes"),
        Variant("conflicts only", ((_B_RETURN, _B_RETURN[:-1] + " - 1\n"),), diagnosis="extra-passes"),
        Variant("off means word 0", ((_B_TEST, "        word = word or 0\n        if True:\n"),), diagnosis="off-lanes"),
        Variant("at least one pass", ((_B_RETURN, _B_RETURN.replace("max(", "max(1, *(").replace("\n", ")\n")),),
                diagnosis="off-lanes"),
    ),
    right=(
        Variant(
            "pass by pass",
            source="""def bank_passes(words):
    waiting = {word for word in words if word is not None}
    passes = 0
    while waiting:
        served = {}
        for word in waiting:
            served.setdefault(word % 32, word)
        waiting -= set(served.values())
        passes += 1
    return passes
""",
        ),
        Variant(
            "with Counter",
            source="""from collections import Counter


def bank_passes(words):
    banks = Counter(word % 32 for word in {w for w in words if w is not None})
    return banks.most_common(1)[0][1] if banks else 0
""",
        ),
    ),
    timeout_s=20.0,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ coalescing.transpose
def _transpose_cases(rng: Random) -> list[Case]:
    normal, _ = _tensors(rng)

    def case(M: int, N: int, dtype: str = "float32", tags: str = "") -> Case:
        return Case(f"x [{M}, {N}] {dtype}", (normal(M, N, dtype=dtype),), frozenset(tags.split()))

    return [
        case(1, 1),
        case(32, 32),
        case(64, 96, "float16"),
        case(33, 31),
        case(50, 70, "bfloat16"),
        case(1, 37),
        case(37, 1),
        case(128, 192, tags="aligned"),
        case(128, 128, "float16", tags="aligned"),
    ]


_X_MASK = "    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)\n"
_X_LOAD = "    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask)\n"
_X_STORE = "    tl.store(y_ptr + offs_n[None, :] * M + offs_m[:, None], x, mask=mask)\n"
_X_TILE = "    BLOCK_M = BLOCK_N = 32\n"
_X_HOST = "    y = torch.empty(N, M, dtype=x.dtype, device=x.device)\n"

TRANSPOSE = KernelExercise(
    id="coalescing.transpose",
    title="A transpose in whole sectors",
    notebook=NOTEBOOK,
    function="transpose",
    label=Label(3, 25, "two-dimensional tiles: rows on the way in, columns on the way out"),
    hints=(
        "A program that moves one row of x writes one column of y. How many bytes of each sector of y does it fill, and "
        "who fills the rest?",
        "Neither a row nor a column will do: a tile must be several elements wide in both directions, so that a row of "
        "it fills whole sectors of x and a column of it fills whole sectors of y. 32 bytes are how many elements?",
        "The mask holds where the row is below M and the column below N. Load at row times N plus column; store at "
        "column times M plus row, the same block of values with the same mask. Make both sides of the tile at least "
        "32 bytes long for the smallest element.",
    ),
    cases=_transpose_cases,
    reference=lambda x: x.t().contiguous(),
    traffic=Traffic(reads=1, writes=1),
    launch_rule=_whole_sectors("how long is a tile in the direction in which this tensor's elements are neighbours?"),
    misconceptions=(
        Misconception(
            "not-transposed",
            "the elements of x arrived in the order that they had in x. Where in y does x[m, n] belong, counted from "
            "its first element?",
            gives=lambda x: x.reshape(x.shape[1], x.shape[0]),
        ),
        Misconception("out-of-bounds", "a row of x has N elements, a row of y has M: which offset uses which?"),
        Misconception("race", "two programs write one element: is the row of y as long as you think?"),
        Misconception("traffic", "a tile that is loaded once can be stored in any order"),
    ),
    wrong=(
        Variant("a row a program", ((_X_TILE, "    BLOCK_M, BLOCK_N = 1, 128\n"),), diagnosis="uncoalesced"),
        Variant("a column a program", ((_X_TILE, "    BLOCK_M, BLOCK_N = 128, 1\n"),), diagnosis="uncoalesced"),
        Variant("tiles of 8 x 8", ((_X_TILE, "    BLOCK_M = BLOCK_N = 8\n"),), diagnosis="uncoalesced"),
        Variant(
            "a copy", ((_X_STORE, _X_STORE.replace("offs_n[None, :] * M + offs_m[:, None]", "offs_m[:, None] * N + offs_n[None, :]")),),
            diagnosis="not-transposed",
        ),
        Variant("rows of y are N long", ((_X_STORE, _X_STORE.replace("* M", "* N")),), diagnosis="out-of-bounds"),
        Variant("rows of x are M long", ((_X_LOAD, _X_LOAD.replace("* N", "* M")),), diagnosis="out-of-bounds"),
        Variant("no mask", ((_X_MASK, "    mask = (offs_m[:, None] >= 0) & (offs_n[None, :] >= 0)\n"),), diagnosis="out-of-bounds"),
        Variant("masks swapped", ((_X_MASK, _X_MASK.replace("< M", "< K").replace("< N", "< M").replace("< K", "< N")),),
                diagnosis="out-of-bounds"),
        Variant("torch transposes", ((_X_HOST, "    return x.t().clone(memory_format=torch.contiguous_format)\n" + _X_HOST),), diagnosis="not-your-kernel"),
        Variant("loads twice", ((_X_LOAD, _X_LOAD + _X_LOAD.replace("x = ", "x = x * 0 + ")),), diagnosis="traffic"),
    ),
    right=(
        Variant(
            "transposed in registers",
            (
                (
                    _X_STORE,
                    "    turned = (offs_n[:, None] < N) & (offs_m[None, :] < M)\n"
                    "    tl.store(y_ptr + offs_n[:, None] * M + offs_m[None, :], tl.trans(x), mask=turned)\n",
                ),
                (_X_TILE, "    BLOCK_M, BLOCK_N = 64, 16\n"),
            ),
        ),
        Variant(
            "reads columns, writes rows",
            (
                (_X_MASK, "    mask = (offs_n[:, None] < N) & (offs_m[None, :] < M)\n"),
                (_X_LOAD, "    x = tl.load(x_ptr + offs_m[None, :] * N + offs_n[:, None], mask=mask)\n"),
                (_X_STORE, "    tl.store(y_ptr + offs_n[:, None] * M + offs_m[None, :], x, mask=mask)\n"),
            ),
        ),
    ),
)  # fmt: skip


EXERCISES: list[Any] = [DIVERGENCE, SECTORS, DETECTIVE, GATHER, BANK_PASSES, TRANSPOSE]
