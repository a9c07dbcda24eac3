"""The exercises of notebook 07: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from gpukit.accounting import tiling
from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.inputs import Inputs, case, far, listed, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome


# ------------------------------------------------------------------------------------------------------ tiling.traffic
def _traffic_cases(rng: Random) -> list[Case]:
    cases = []
    for what, M, N, K, BM, BN, itemsize in (
        ("square, tiles fit", 4096, 4096, 4096, 128, 128, 2),
        ("one element beyond the tiles", 64 * 17 + 1, 32 * 9 + 1, 100, 64, 32, 2),
        ("smaller than a tile", 17, 5, 3, 64, 128, 2),
        ("square, one element a tile", 64, 64, 64, 1, 1, 4),
        ("one tile holds all of C", 64, 48, 1024, 128, 64, 2),
        ("a long M", 8192, 512, 1024, 128, 64, 2),
        ("a long N", 256, 16384, 2048, 64, 256, 2),
        ("ragged", rng.randrange(1001, 1999, 2), rng.randrange(513, 899, 2), 777, 64, 128, 4),
        ("ragged", rng.randrange(301, 499, 2), rng.randrange(2001, 2999, 2), 1023, 128, 32, 2),
        ("a short K", 2048, 1024, 16, 256, 128, 1),
        ("a short M, many columns of tiles", 16, 4096, 256, 64, 128, 2),
        ("a short N, many rows of tiles", 4096, 32, 256, 64, 128, 2),
        ("all sizes 1", 1, 1, 1, 1, 1, 1),
        ("one element of C", 1, 1, 9, 16, 32, 4),
        ("one product for each element of C", 40, 70, 1, 16, 32, 2),
    ):
        tags = "ragged" if M % BM or N % BN else ""
        name = f"C [{M}, {N}], K {K}, tiles {BM} x {BN}, {itemsize} bytes each ({what})"
        cases.append(case(name, M, N, K, BM, BN, itemsize, tags=tags))
    long = 2**48 + 1
    name = f"C [65, 65], K {long}, tiles 64 x 64, 1 byte each (more than a float holds exactly)"
    return [*cases, case(name, 65, 65, long, 64, 64, 1, tags="ragged")]


def _reads_swapped(M, N, K, BM, BN, itemsize):
    return (cdiv(M, BM) * M * K + cdiv(N, BN) * K * N) * itemsize


def _fractions_of_a_tile(evidence: Evidence) -> bool:
    """Divisions that are not rounded up, whatever is rounded later and in whatever order the factors come."""

    def near(outcome: Outcome) -> bool:
        M, N, K, BM, BN, itemsize = outcome.case.args
        given = (M * K * N / BN + K * N * M / BM) * itemsize
        return abs(outcome.reply.output - given) <= 2 * itemsize + 1e-9 * given

    return all(map(near, evidence.outcomes))


TRAFFIC = FunctionExercise(
    id="tiling.traffic",
    function="matmul_reads",
    cases=_traffic_cases,
    expected=tiling.matmul_reads,
    unit="bytes",
    misconceptions=(
        Misconception("swapped-tiles", gives=_reads_swapped),
        Misconception("each-once", gives=lambda M, N, K, BM, BN, itemsize: (M * K + K * N) * itemsize),
        Misconception("no-reuse", gives=lambda M, N, K, BM, BN, itemsize: 2 * M * N * K * itemsize),
        Misconception(
            "partial-tiles-dropped",
            gives=lambda M, N, K, BM, BN, itemsize: (N // BN * M * K + M // BM * K * N) * itemsize,
        ),
        Misconception("fractions-of-a-tile", when=_fractions_of_a_tile),
        Misconception(
            "one-tile-too-many",
            gives=lambda M, N, K, BM, BN, itemsize: ((N // BN + 1) * M * K + (M // BM + 1) * K * N) * itemsize,
        ),
        Misconception(
            "padding-loaded",
            gives=lambda M, N, K, BM, BN, itemsize: cdiv(M, BM) * cdiv(N, BN) * (BM + BN) * K * itemsize,
        ),
        Misconception(
            "elements-not-bytes", gives=lambda M, N, K, BM, BN, itemsize: tiling.matmul_reads(M, N, K, BM, BN, 1)
        ),
        Misconception(
            "writes-counted",
            gives=lambda M, N, K, BM, BN, itemsize: tiling.matmul_reads(M, N, K, BM, BN, itemsize) + M * N * itemsize,
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- tiling.matmul
def _case(a: Tensor, b: Tensor, BLOCK: int, tags: str = "", note: str = "") -> Case:
    (M, K), N = a.shape, b.shape[1]
    tags += " ragged-c" if M % BLOCK or N % BLOCK else ""
    tags += " ragged-k" if K % min(BLOCK, 32) else ""
    tags += " long-k" if min(BLOCK, 32) < K else ""
    shown = f"a [{M}, {K}] @ b [{K}, {N}]"
    return tensor_case(a, b, BLOCK, shown=shown, note=listed(f"BLOCK {BLOCK}", note), tags=tags)


def _matmul_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def case(M: int, N: int, K: int, BLOCK: int, dtype: str = "float32", note: str = "") -> Case:
        return _case(make.coarse(M, K, dtype=dtype), make.coarse(K, N, dtype=dtype, bits=5), BLOCK, note=note)

    # The finite sums are small: a dtype of 16 bits holds them.
    nothing, endless = make.integers(-1, 2, 20, 41).float(), make.integers(-4, 5, 41, 33).float()
    nothing[:, 16:32] = 0
    endless[20, 3], endless[25, 20] = float("inf"), float("nan")

    def sums(M: int, N: int, K: int, BLOCK: int, dtype: str) -> Case:
        return _case(*make.factors(M, N, K, dtype), BLOCK, tags="large-sums", note="partial sums beyond 65,504")

    return [
        case(1, 1, 1, 16),
        case(16, 16, 16, 16),
        case(32, 16, 48, 16),
        case(17, 15, 33, 16, note="one element in the last block of K"),
        case(32, 53, 32, 32),
        case(32, 48, 41, 16, note="9 elements in the last block of K"),
        case(1, 40, 24, 16),
        case(50, 1, 31, 16, "bfloat16"),
        case(32, 16, 64, 16, "float16"),
        _case(make.integers(-8, 9, 65, 70).float(), make.integers(-8, 9, 70, 3).float(), 64),  # exact in any order
        case(4, 129, 40, 128, "bfloat16"),
        sums(16, 32, 96, 32, "float16"),
        sums(9, 20, 70, 16, "bfloat16"),
        sums(7, 16, 67, 32, "float32"),
        _case(nothing, endless, 16, note="zeros times infinity and NaN", tags="special"),
    ]


def _whole_tiles(a: Tensor, b: Tensor, BLOCK: int) -> int:
    """Bytes of A and B that tiles of BLOCK need; beyond the edge as well, for those who wrap rows and columns around it."""
    across, down = cdiv(b.shape[1], BLOCK), cdiv(a.shape[0], BLOCK)
    return 2 * across * down * BLOCK * a.shape[1] * a.element_size()


def _c_bytes(a: Tensor, b: Tensor, BLOCK: int) -> int:
    return a.shape[0] * b.shape[1] * a.element_size()


def _blocks_of_k(a: Tensor, b: Tensor, BLOCK: int) -> list[Tensor]:
    step = min(BLOCK, 32)
    return [x @ y for x, y in zip(a.split(step, 1), b.split(step, 0), strict=True)]


def _first_block_again(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    blocks = _blocks_of_k(a, b, BLOCK)
    return len(blocks) * blocks[0]


def _doubled_each_step(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    total, *rest = _blocks_of_k(a, b, BLOCK)
    for block in rest:
        total = 2 * total + block
    return total


def _column_major(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    M, K = a.shape
    return a.reshape(K, M).t() @ b


def _b_column_major(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    K, N = b.shape
    return a @ b.reshape(N, K).t()


MATMUL = KernelExercise(
    id="tiling.matmul",
    function="matmul",
    cases=_matmul_cases,
    returns=("c",),
    reference=lambda a, b, BLOCK: a @ b,
    huge=lambda: (far(5 << 20, 1024), far(1024, 5 << 20), 128),
    traffic=Traffic(reads=_whole_tiles, writes=_c_bytes, memory=_c_bytes),
    misconceptions=(
        Misconception("first-block-only", gives=lambda a, b, BLOCK: _blocks_of_k(a, b, BLOCK)[0]),
        Misconception("last-block-wins", gives=lambda a, b, BLOCK: _blocks_of_k(a, b, BLOCK)[-1]),
        Misconception(
            "last-block-dropped",
            gives=lambda a, b, BLOCK: (
                a[:, : a.shape[1] // min(BLOCK, 32) * min(BLOCK, 32)]
                @ b[: a.shape[1] // min(BLOCK, 32) * min(BLOCK, 32)]
            ),
        ),
        Misconception("k-does-not-move", gives=_first_block_again),
        Misconception("added-twice", gives=_doubled_each_step),
        Misconception("a-strides", gives=_column_major),
        Misconception("b-strides", gives=_b_column_major),
        Misconception("low-precision-sum", when=ideas.rounded_sums),
        Misconception("tf32", gives=lambda a, b, BLOCK: ideas.tf32(a) @ ideas.tf32(b)),
        Misconception("stays-zero", gives=lambda a, b, BLOCK: 0 * (a @ b)),
        Misconception("program-id", when=lambda evidence: evidence.kind == "nan" and _first_tile_only(evidence)),
        Misconception("not-finite", when=ideas.only("special")),
    ),
)


def _first_tile_only(evidence: Evidence) -> bool:
    """Tile (0, 0) was stored, and all of the tiles below it or all to its right were not."""
    missing, BLOCK = evidence.outputs.isnan(), evidence.case.args[2]
    rest = missing[BLOCK:], missing[:, BLOCK:]
    return not bool(missing[:BLOCK, :BLOCK].any()) and any(part.numel() and bool(part.all()) for part in rest)


# -------------------------------------------------------------------------------------------------------- tiling.waves
def _waves_cases(rng: Random) -> list[Case]:
    cases = []
    for what, M, N, BM, BN, sms, per_sm in (
        ("an A100, 98 tiles", 1792, 1792, 256, 128, 108, 1),
        ("an A100, one more", 1793, 1793, 256, 128, 108, 1),
        ("an H200", 4096, 4096, 128, 256, 132, 1),
        ("an exact fit", 11 * 128, 12 * 128, 128, 128, 132, 1),
        ("one tile", 128, 128, 128, 128, 108, 1),
        ("two programs per SM", 4096, 4096, 128, 128, 132, 2),
        ("four programs per SM", 3000, 5000, 64, 64, 108, 4),
        ("a T4", rng.randrange(1001, 1999, 2), rng.randrange(1001, 1999, 2), 128, 64, 40, 1),
        ("a tall C", rng.randrange(20_001, 29_999, 2), rng.randrange(129, 255, 2), 256, 128, 148, 1),
        ("thin", 17, rng.randrange(5001, 9999, 2), 16, 128, 58, 3),
        ("one element, a GPU of one SM", 1, 1, 16, 32, 1, 1),
        ("an element a tile", 3, 7, 1, 1, 1, 2),
    ):
        name = f"C [{M}, {N}], tiles {BM} x {BN}, {sms} SMs x {per_sm} ({what})"
        cases.append(case(name, M, N, BM, BN, sms, per_sm))
    return cases


def _tiling(*args: int) -> tiling.Tiling:
    return tiling.Tiling(*args)


def _waves(*args: int) -> tuple[int, int, float]:
    t = _tiling(*args)
    return t.tiles, t.waves, t.efficiency


def _of(tiles: Callable[..., int], count: Callable[[int, int], float] = cdiv) -> Callable[..., tuple]:
    """What follows from another number of tiles or of waves."""

    def gives(M, N, BM, BN, sms, per_sm):
        n = tiles(M, N, BM, BN)
        waves = count(n, sms * per_sm)
        return n, waves, M * N / (waves * sms * per_sm * BM * BN)

    return gives


def _tiles(M, N, BM, BN):
    return cdiv(M, BM) * cdiv(N, BN)


WAVES = FunctionExercise(
    id="tiling.waves",
    function="waves",
    cases=_waves_cases,
    returns=("tiles", "waves", "efficiency"),
    expected=_waves,
    tolerance=1e-9,
    misconceptions=(
        Misconception("area", gives=_of(lambda M, N, BM, BN: cdiv(M * N, BM * BN))),
        Misconception("partial-tiles-dropped", gives=_of(lambda M, N, BM, BN: M // BM * (N // BN))),
        Misconception("one-program-an-sm", gives=lambda M, N, BM, BN, sms, per_sm: _waves(M, N, BM, BN, sms, 1)),
        Misconception("fractions-of-a-wave", gives=_of(_tiles, lambda tiles, slots: tiles / slots)),
        Misconception(
            "tail-dropped",
            gives=lambda *args: (
                _tiling(*args).tiles,
                _tiling(*args).tiles // _tiling(*args).slots,
                _tiling(*args).efficiency,
            ),
        ),
        Misconception("tail-dropped", gives=_of(_tiles, lambda tiles, slots: max(1, tiles // slots))),
        Misconception("one-wave-too-many", gives=_of(_tiles, lambda tiles, slots: tiles // slots + 1)),
        Misconception(
            "full-gpu-assumed",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, _tiling(*args).tile_efficiency),
        ),
        Misconception(
            "edge-ignored",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, _tiling(*args).wave_efficiency),
        ),
        Misconception(
            "percent", gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, 100 * _tiling(*args).efficiency)
        ),
        Misconception(
            "upside-down",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, 1 / _tiling(*args).efficiency),
        ),
    ),
)


# -------------------------------------------------------------------------------------------------------- tiling.align
def _align_cases(rng: Random) -> list[Case]:
    cases = []
    for what, N, itemsize, alignment in (
        ("fits", 4096, 2, 16),
        ("one too many", 4097, 2, 16),
        ("the size of the lesson", 1793, 2, 16),
        ("GPT-2's vocabulary", 50257, 2, 128),
        ("a multiple of 4", 4 * rng.randrange(101, 199, 2), 2, 16),
        ("even", 2 * rng.randrange(501, 999, 2), 2, 32),
        ("float32", rng.randrange(1001, 1999, 2), 4, 16),
        ("float32, a multiple of 8", 8 * rng.randrange(101, 199, 2), 4, 128),
        ("bytes", 4 * rng.randrange(101, 199, 2), 1, 16),
        ("bytes, odd", rng.randrange(1001, 1999, 2), 1, 32),
        ("short", 3, 2, 16),
        ("float64", rng.randrange(101, 199, 2), 8, 16),
        ("one element a row", 1, 2, 16),
        ("as wide as the alignment", rng.randrange(101, 199, 2), 8, 8),
        ("one byte, no alignment", 1, 1, 1),
    ):
        name = f"rows of {N} x {itemsize} bytes, alignment {alignment} bytes ({what})"
        cases.append(case(name, N, itemsize, alignment))
    return cases


def _stride(N: int, itemsize: int, alignment: int) -> int:
    return tiling.align_rows(N, itemsize, alignment)[1]


def _widest(N: int, itemsize: int, alignment: int) -> int:
    return tiling.align_rows(N, itemsize, alignment)[0]


ALIGN = FunctionExercise(
    id="tiling.align",
    function="align_rows",
    cases=_align_cases,
    returns=("widest", "stride"),
    expected=tiling.align_rows,
    timeout_s=5.0,
    misconceptions=(
        Misconception(
            "elements-not-bytes",
            gives=lambda N, itemsize, alignment: (math.gcd(N, alignment), _stride(N, itemsize, alignment)),
        ),
        Misconception("one-element", gives=lambda N, itemsize, alignment: (itemsize, _stride(N, itemsize, alignment))),
        Misconception("row-0-only", gives=lambda N, itemsize, alignment: (alignment, _stride(N, itemsize, alignment))),
        Misconception(
            "wider-than-allowed",
            gives=lambda N, itemsize, alignment: ((N * itemsize) & -(N * itemsize), _stride(N, itemsize, alignment)),
        ),
        Misconception(
            "padded-too-much",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                N + alignment // itemsize - N % (alignment // itemsize),
            ),
        ),
        Misconception(
            "rounded-down",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                N // (alignment // itemsize) * (alignment // itemsize),
            ),
        ),
        Misconception(
            "power-of-two",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                max(1 << (N - 1).bit_length(), alignment // itemsize),
            ),
        ),
        Misconception(
            "alignment-in-elements",
            gives=lambda N, itemsize, alignment: (_widest(N, itemsize, alignment), cdiv(N, alignment) * alignment),
        ),
        Misconception(
            "stride-in-bytes",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                _stride(N, itemsize, alignment) * itemsize,
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ tiling.grouped
def _grouped_cases(rng: Random) -> list[Case]:
    cases = []
    for num_m, num_n, group in ((9, 9, 3), (8, 5, 4), (5, 8, 2), (7, 5, 4), (4, 7, 1), (3, 5, 8), (5, 5, 3)):
        last_group = num_m // group * group * num_n if num_m % group else (num_m - group) * num_n
        inside = rng.randrange(num_n + 1, max(num_n + 2, min(group, num_m) * num_n - 1))
        pids = {0, 1, inside, max(0, last_group), min(max(0, last_group) + 2, num_m * num_n - 1), num_m * num_n - 1}
        chosen = sorted(pids)[-4:] if group > 1 else sorted(pids)[:3]
        while len(chosen) < 4:
            chosen.append((chosen[-1] + 1) % (num_m * num_n))
        for i, pid in enumerate(sorted(chosen)):
            in_last = group < num_m and num_m % group and pid >= num_m // group * group * num_n
            tags = "short-group" if in_last or group > num_m else ""
            name = f"{num_m} x {num_n} tiles, GROUP_M {group}, program {'ABCD'[i]}"
            cases.append(case(name, pid, num_m, num_n, group, tags=tags))
    for pid, num_m, num_n, group in ((0, 1, 1, 1), (0, 1, 1, 4), (4, 6, 1, 4), (5, 1, 6, 2)):
        name = f"{num_m} x {num_n} tiles, GROUP_M {group}, program {pid}"
        cases.append(case(name, pid, num_m, num_n, group, tags="short-group" if num_m % group else ""))
    return cases


def _group_parts(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    """(first row of the group, number of the program in it)."""
    return pid // (group * num_n) * group, pid % (group * num_n)


def _full_groups(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    first, inside = _group_parts(pid, num_m, num_n, group)
    return first + inside % group, inside // group


def _global_counter(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    first, inside = _group_parts(pid, num_m, num_n, group)
    rows = min(group, num_m - first)
    return first + pid % rows, inside // rows


def _without_first(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    m, n = tiling.grouped(pid, num_m, num_n, group)
    return m - _group_parts(pid, num_m, num_n, group)[0], n


def _group_as_row(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    number, inside = divmod(pid, group * num_n)
    rows = min(group, num_m - number)
    return number + inside % rows, inside // rows


def _in_rows(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    return divmod(pid, num_n)


def _in_columns(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    return pid % num_m, pid // num_m


def _groups_of_columns(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    n, m = tiling.grouped(pid, num_n, num_m, group)
    return m, n


GROUPED = FunctionExercise(
    id="tiling.grouped",
    function="grouped",
    cases=_grouped_cases,
    returns=("pid_m", "pid_n"),
    expected=tiling.grouped,
    misconceptions=(
        Misconception("row-major", gives=_in_rows),
        Misconception("column-major", gives=_in_columns),
        Misconception("short-group", gives=_full_groups),
        Misconception("rows-above", gives=_without_first),
        Misconception("group-not-row", gives=_group_as_row),
        Misconception("place-not-reset", gives=_global_counter),
        Misconception("transposed", gives=lambda *args: tiling.grouped(*args)[::-1]),
        Misconception("groups-of-columns", gives=_groups_of_columns),
    ),
)


# ---------------------------------------------------------------------------------------------------- tiling.occupancy
_A100, _H200, _L4 = (64, 65536, 167_936), (64, 65536, 233_472), (48, 65536, 102_400)


def _occupancy_cases(rng: Random) -> list[Case]:
    cases = []
    for what, num_warps, registers, shared, sm in (
        ("A100, nothing shared, few registers", 4, 32, 0, _A100),
        ("an SM with little shared memory, nothing shared", 1, 16, 0, (64, 65536, 16_384)),
        ("an SM of one warp, one register", 1, 1, 0, (1, 65536, 16_384)),
        ("an SM with registers for one thread less than a warp has", 1, 1, 0, (64, 31, 16_384)),
        ("A100, shared memory is short", 4, 64, 49_152, _A100),
        ("A100, one fits", 8, 128, 98_304, _A100),
        ("A100, registers are short", 8, 168, 16_384, _A100),
        ("A100, registers and shared memory", 4, 255, 32_768, _A100),
        ("H200, a large tile", 8, 255, 196_608, _H200),
        ("H200, warps are short", 16, 24, 8_192, _H200),
        ("H200, as many programs as warps", 1, 16, 1_024, _H200),
        ("L4, warps for one and a half", 32, 16, 8_192, _L4),
        ("H200, the kibibyte counts", 4, 40, 233_472 // 4, _H200),
        ("H200, it just fits", 4, 40, 233_472 // 4 - 1024, _H200),
        ("H200, one byte too many", 4, 40, 233_472 // 4 - 1023, _H200),
        ("H200, does not fit", 8, 128, 240_000, _H200),
        ("L4, any", rng.choice((2, 4, 8)), rng.randrange(40, 200, 8), rng.randrange(8_000, 40_000, 128), _L4),
        ("L4, any", rng.choice((2, 4, 8)), rng.randrange(40, 200, 8), rng.randrange(0, 4_000, 128), _L4),
    ):
        name = f"{num_warps} warps, {registers} registers, {shared:,} bytes ({what})"
        cases.append(case(name, num_warps, registers, shared, *sm))
    for i, same in ((-2, "first"), (-1, "second")):
        cases[i] = case(f"L4, drawn at random, {same}", *cases[i].args)
    return cases


def _admits(num_warps, registers, shared, max_warps, sm_registers, sm_shared) -> dict[str, int]:
    return {
        "warps": max_warps // num_warps,
        "registers": sm_registers // (registers * 32 * num_warps),
        "shared": sm_shared // (shared + 1024),
    }


def _programs(*args: int) -> int:
    return min(_admits(*args).values())


def _without(name: str) -> Callable[..., int]:
    return lambda *args: min(value for key, value in _admits(*args).items() if key != name)


def _occupied(
    w: int, r: int, s: int, mw: int, mr: int, ms: int,
    registers: Callable[[int, int], int] = lambda w, r: 32 * w * r,
    shared: Callable[[int, int], int] = lambda s, ms: ms // (s + 1024),
) -> int:  # fmt: skip
    """registers: how many a program takes; shared: how many programs the shared memory of an SM has room for."""
    return min(mw // w, mr // registers(w, r), shared(s, ms))


def _rounded(
    rounds: Callable[[float], int], which: tuple[int, ...], w: int, r: int, s: int, mw: int, mr: int, ms: int
) -> int:
    """Some of the three quotients rounded another way than down."""
    return min(
        rounds(Fraction(has, needs)) if i in which else has // needs
        for i, (has, needs) in enumerate(((mw, w), (mr, 32 * r * w), (ms, s + 1024)))
    )


OCCUPANCY = FunctionExercise(
    id="tiling.occupancy",
    function="programs_per_sm",
    cases=_occupancy_cases,
    expected=_programs,
    unit="programs",
    misconceptions=(
        Misconception("registers-of-threads", gives=_without("registers")),
        Misconception(
            "system-share",
            gives=lambda w, r, s, mw, mr, ms: min(mw // w, mr // (r * 32 * w), ms // s if s else 1 << 30),
        ),
        *(
            Misconception("registers-of-threads", gives=partial(_occupied, registers=count))
            for count in (lambda w, r: r, lambda w, r: 32 * r, lambda w, r: w * r)
        ),
        *(
            Misconception("system-share/2", gives=partial(_occupied, shared=count))
            for count in (lambda s, ms: (ms - 1024) // max(s, 1), lambda s, ms: (ms - 1024) // s if s else 1 << 30)
        ),
        Misconception(
            "system-share/3",
            gives=partial(_occupied, shared=lambda s, ms: ms // (s + 1024) if s else 1 << 30),
        ),
        *(
            Misconception(name, gives=lambda *args, only=only: _admits(*args)[only])
            for name, only in (("warps-only", "warps"), ("warps-only/2", "registers"), ("warps-only/3", "shared"))
        ),
        Misconception("largest-limit", gives=lambda *args: max(_admits(*args).values())),
        Misconception("warps-as-threads", gives=lambda w, r, s, mw, *sm: _programs(w, r, s, mw // 32, *sm)),
        Misconception("shared-per-warp", gives=lambda w, r, s, *sm: _programs(w, r, w * (s + 1024) - 1024, *sm)),
        Misconception("shared-per-warp", gives=lambda w, r, s, *sm: _programs(w, r, w * s, *sm)),
        Misconception("warps-not-programs", gives=lambda w, *rest: w * _programs(w, *rest)),
        Misconception("no-shared-memory", gives=_without("shared")),
        Misconception("no-warps", gives=_without("warps")),
        *(
            Misconception(name, gives=partial(_rounded, rounds, which))
            for name, rounds in (("rounded-up", math.ceil), ("rounded-up/2", round))
            for which in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
        ),
        Misconception("at-least-one", gives=lambda *args: max(1, _programs(*args))),
    ),
)

EXERCISES = [TRAFFIC, MATMUL, WAVES, ALIGN, GROUPED, OCCUPANCY]
