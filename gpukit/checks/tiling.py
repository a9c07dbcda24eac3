"""The exercises of notebook 06: cases, traffic bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from gpukit.accounting import tiling
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence

NOTEBOOK = "06_tiling"


def case(name: str, *args, tags: str = "") -> Case:
    return Case(name, args, frozenset(tags.split()))


def _up(a: int, b: int) -> int:
    return -(-a // b)


# ------------------------------------------------------------------------------------------------------ tiling.traffic
def _traffic_cases(rng: Random) -> list[Case]:
    cases = []
    for what, M, N, K, BM, BN, itemsize in (
        ("square, tiles fit", 4096, 4096, 4096, 128, 128, 2),
        ("square, one element a tile", 64, 64, 64, 1, 1, 4),
        ("one tile holds all of C", 64, 48, 1024, 128, 64, 2),
        ("a long M", 8192, 512, 1024, 128, 64, 2),
        ("a long N", 256, 16384, 2048, 64, 256, 2),
        ("ragged", rng.randrange(1001, 1999, 2), rng.randrange(513, 899, 2), 777, 64, 128, 4),
        ("ragged", rng.randrange(301, 499, 2), rng.randrange(2001, 2999, 2), 1023, 128, 32, 2),
        ("a short K", 2048, 1024, 16, 256, 128, 1),
    ):
        tags = "ragged" if M % BM or N % BN else ""
        name = f"C [{M}, {N}], K {K}, tiles {BM} x {BN}, {itemsize} bytes each ({what})"
        cases.append(case(name, M, N, K, BM, BN, itemsize, tags=tags))
    return cases


def _reads_swapped(M, N, K, BM, BN, itemsize):
    return (_up(M, BM) * M * K + _up(N, BN) * K * N) * itemsize


TRAFFIC = FunctionExercise(
    id="tiling.traffic",
    title="What a tiled matmul reads",
    notebook=NOTEBOOK,
    function="matmul_reads",
    label=Label(1, 10, "reuse: how often each input travels, as a function of the tile"),
    hints=(
        "Take one element of A. Which elements of C does it take part in, and in how many different tiles do they lie?",
        "An element of A is needed along a whole row of C. Every tile that this row crosses belongs to another program, "
        "and each of them loads the element once. With B it is the columns.",
        "Round the number of tiles across N and down M up to whole numbers. The elements of A times the tiles across, "
        "plus the elements of B times the tiles down, times the bytes of an element.",
    ),
    cases=_traffic_cases,
    expected=tiling.matmul_reads,
    unit="bytes",
    misconceptions=(
        Misconception(
            "swapped-tiles",
            "A is counted once for each tile down, B once for each tile across. In which direction do the tiles lie that "
            "share a row of A?",
            gives=_reads_swapped,
        ),
        Misconception(
            "each-once",
            "that is every element once, which one program that computes all of C would load. How many programs need the "
            "same row of A?",
            gives=lambda M, N, K, BM, BN, itemsize: (M * K + K * N) * itemsize,
        ),
        Misconception(
            "no-reuse",
            "that is two loads for each multiply-add, as if every element of C were computed on its own. What do the "
            "elements of one tile share?",
            gives=lambda M, N, K, BM, BN, itemsize: 2 * M * N * K * itemsize,
        ),
        Misconception(
            "partial-tiles-dropped",
            "where the tile does not divide C, the tiles at the edge are missing. Who computes the last rows and columns?",
            gives=lambda M, N, K, BM, BN, itemsize: (N // BN * M * K + M // BM * K * N) * itemsize,
        ),
        Misconception(
            "fractions-of-a-tile",
            "N / BLOCK_N is not a whole number here. Can a program load half a row of A?",
            gives=lambda M, N, K, BM, BN, itemsize: (M * K * N / BN + K * N * M / BM) * itemsize,
        ),
        Misconception(
            "fractions-of-a-tile",
            "N / BLOCK_N is not a whole number here. Can a program load half a row of A?",
            gives=lambda M, N, K, BM, BN, itemsize: (M * K * N // BN + K * N * M // BM) * itemsize,
        ),
        Misconception(
            "padding-loaded",
            "lanes beyond the edge of C are counted as loads. What does a masked-off lane read?",
            gives=lambda M, N, K, BM, BN, itemsize: _up(M, BM) * _up(N, BN) * (BM + BN) * K * itemsize,
        ),
        Misconception(
            "elements-not-bytes",
            "those are elements. How many bytes does each of them take?",
            gives=lambda M, N, K, BM, BN, itemsize: tiling.matmul_reads(M, N, K, BM, BN, 1),
        ),
        Misconception(
            "writes-counted",
            "the stores of C are in it. Which matrices are asked for?",
            gives=lambda M, N, K, BM, BN, itemsize: tiling.matmul_reads(M, N, K, BM, BN, itemsize) + M * N * itemsize,
        ),
    ),
    wrong=(
        Variant(
            "tiles swapped",
            (("tiles_across * M * K + tiles_down * K * N", "tiles_down * M * K + tiles_across * K * N"),),
            diagnosis="swapped-tiles",
        ),
        Variant(
            "everything once",
            (("tiles_across * M * K + tiles_down * K * N", "M * K + K * N"),),
            diagnosis="each-once",
        ),
        Variant(
            "two loads a product",
            (("tiles_across * M * K + tiles_down * K * N", "2 * M * N * K"),),
            diagnosis="no-reuse",
        ),
        Variant(
            "division rounds down",
            (
                ("tiles_down = -(-M // BLOCK_M)\n    tiles_across", "tiles_down = M // BLOCK_M\n    tiles_across"),
                ("tiles_across = -(-N // BLOCK_N)\n", "tiles_across = N // BLOCK_N\n"),
            ),
            diagnosis="partial-tiles-dropped",
        ),
        Variant(
            "true division",
            source="""def matmul_reads(M, N, K, BLOCK_M, BLOCK_N, itemsize):
    return (M * K * N / BLOCK_N + K * N * M / BLOCK_M) * itemsize
""",
            diagnosis="fractions-of-a-tile",
        ),
        Variant(
            "whole tiles loaded",
            source="""def matmul_reads(M, N, K, BLOCK_M, BLOCK_N, itemsize):
    programs = -(-M // BLOCK_M) * -(-N // BLOCK_N)
    return programs * (BLOCK_M + BLOCK_N) * K * itemsize
""",
            diagnosis="padding-loaded",
        ),
        Variant("elements", (("return elements * itemsize", "return elements"),), diagnosis="elements-not-bytes"),
        Variant(
            "C stored as well",
            (("return elements * itemsize", "return (elements + M * N) * itemsize"),),
            diagnosis="writes-counted",
        ),
    ),
    right=(
        Variant(
            "program by program",
            source="""def matmul_reads(M, N, K, BLOCK_M, BLOCK_N, itemsize):
    total = 0
    for m in range(0, M, BLOCK_M):
        for n in range(0, N, BLOCK_N):
            rows, columns = min(BLOCK_M, M - m), min(BLOCK_N, N - n)
            total += (rows + columns) * K
    return total * itemsize
""",
        ),
        Variant(
            "with triton.cdiv",
            source="""import triton


def matmul_reads(M, N, K, BLOCK_M, BLOCK_N, itemsize):
    return K * itemsize * (M * triton.cdiv(N, BLOCK_N) + N * triton.cdiv(M, BLOCK_M))
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- tiling.matmul
class _Matrices:
    """Seeded pairs of matrices and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str) -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

    def case(self, M: int, N: int, K: int, BLOCK: int, dtype: str = "float32", tags: str = "", note: str = "") -> Case:
        a, b = self.normal(M, K, dtype=dtype), self.normal(K, N, dtype=dtype)
        return self.named(a, b, BLOCK, tags, note)

    def named(self, a: Tensor, b: Tensor, BLOCK: int, tags: str = "", note: str = "") -> Case:
        (M, K), N = a.shape, b.shape[1]
        dtype = str(a.dtype).removeprefix("torch.")
        name = f"a [{M}, {K}] @ b [{K}, {N}] {dtype}, BLOCK {BLOCK}" + (f", {note}" if note else "")
        found = {dtype, *tags.split()}
        found |= {"ragged-c"} if M % BLOCK or N % BLOCK else set()
        found |= {"ragged-k"} if K % min(BLOCK, 32) else set()
        found |= {"long-k"} if min(BLOCK, 32) < K else set()
        return Case(name, (a, b, BLOCK), frozenset(found))


def _matmul_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    a, b = make.normal(16, 64, dtype="float16"), make.normal(64, 16, dtype="float16")
    a[:, :32], a[:, 32:] = a[:, :32].abs() + 60, -(a[:, 32:].abs() + 60)
    b = b.abs() + 60  # the sum is beyond 65,504 after half of K, and comes back
    return [
        make.case(16, 16, 16, 16),
        make.case(64, 32, 16, 16),
        make.case(32, 48, 64, 16),
        make.case(32, 32, 33, 16, note="one element in the last block of K"),
        make.case(37, 53, 32, 16),
        make.case(1, 70, 24, 32),
        make.case(50, 1, 40, 16, "bfloat16"),
        make.case(48, 80, 96, 16, "float16"),
        make.named(a, b, 16, tags="large-sums", note="partial sums beyond 65,504"),
        make.case(128, 128, 128, 32),
    ]


def _blocks_of_k(a: Tensor, b: Tensor, BLOCK: int) -> list[Tensor]:
    step = min(BLOCK, 32)
    return [x @ y for x, y in zip(a.split(step, 1), b.split(step, 0), strict=True)]


def _column_major(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    M, K = a.shape
    return a.reshape(K, M).t() @ b


def _b_column_major(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    K, N = b.shape
    return a @ b.reshape(N, K).t()


_LOOP = "    for start in range(0, K, BLOCK_K):\n"
_OFFS_K = "        offs_k = start + tl.arange(0, BLOCK_K).to(tl.int64)\n"
_MASK_A = "        mask_a = (offs_m[:, None] < M) & (offs_k[None, :] < K)\n"
_MASK_B = "        mask_b = (offs_k[:, None] < K) & (offs_n[None, :] < N)\n"
_A = "        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask_a, other=0.0)\n"
_B = "        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=mask_b, other=0.0)\n"
_DOT = '        acc = tl.dot(a, b, acc, input_precision="ieee")\n'
_MASK_C = "    mask_c = (offs_m[:, None] < M) & (offs_n[None, :] < N)\n"
_C = "    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask_c)\n"
_BODY = _A + _B + _DOT
_GRID = "    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))\n"
_CALL = (
    "    matmul_kernel[grid](a, b, c, M, N, K, BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=min(BLOCK, 32))\n    return c\n"
)

MATMUL = KernelExercise(
    id="tiling.matmul",
    title="A matmul that reads N / T times",
    notebook=NOTEBOOK,
    function="matmul",
    label=Label(3, 35, "a tile of C kept in registers, a loop along K, masks in two dimensions"),
    hints=(
        "A tile of C needs BLOCK_M whole rows of A. They do not fit on the SM at once. Does the sum over k have to be "
        "finished in one go?",
        "Walk along K in steps of BLOCK_K: load a block of A, BLOCK_M x BLOCK_K, and a block of B, BLOCK_K x BLOCK_N, and "
        "let tl.dot add their product to acc. Each block has an edge in two directions, and so has its mask; beyond the "
        "edge of K a product must come out as 0.",
        "In the loop: the numbers of this step's columns of A; a mask of A from rows and K, a mask of B from K and "
        "columns; both loads, row number times row length plus column number, with 0 for the masked-off lanes; tl.dot "
        "with acc as its third argument. After the loop: one store, with a mask of rows and columns.",
    ),
    cases=_matmul_cases,
    reference=lambda a, b, BLOCK: a @ b,
    traffic=Traffic(reads=8, writes=1),  # the largest case: A and B of 128 x 128, 128 / 32 = 4 tiles across and down
    misconceptions=(
        Misconception(
            "first-block-only",
            "these are the products of the first block of K. How do the others get into the sum?",
            gives=lambda a, b, BLOCK: _blocks_of_k(a, b, BLOCK)[0],
        ),
        Misconception(
            "last-block-wins",
            "these are the products of the last block of K: each step takes the place of the sum so far. What does "
            "tl.dot do with a third argument?",
            gives=lambda a, b, BLOCK: _blocks_of_k(a, b, BLOCK)[-1],
        ),
        Misconception(
            "last-block-dropped",
            "the last, partial block of K is missing. How many steps does it take to cover K?",
            gives=lambda a, b, BLOCK: (
                a[:, : a.shape[1] // min(BLOCK, 32) * min(BLOCK, 32)]
                @ b[: a.shape[1] // min(BLOCK, 32) * min(BLOCK, 32)]
            ),
        ),
        Misconception(
            "a-strides",
            "A is read as if its columns lay one after the other. How far apart in memory are two rows of A [M, K], and "
            "how far two columns?",
            gives=_column_major,
        ),
        Misconception(
            "b-strides",
            "B is read as if its columns lay one after the other. How far apart in memory are two rows of B [K, N], and "
            "how far two columns?",
            gives=_b_column_major,
        ),
        Misconception(
            "low-precision-sum",
            "the sum was kept in float16, which ends at 65,504; on the way to the result it is larger here. In which "
            "dtype does acc begin, and what keeps it that way?",
            when=lambda evidence: (
                any("large-sums" in case.tags for case in evidence.failed)
                and not any("float32" in case.tags for case in evidence.failed)
            ),
        ),
        Misconception(
            "tf32",
            "the inputs were rounded to 10 mantissa bits before they were multiplied. Which argument of tl.dot says that "
            "float32 means float32? (For a GPU Triton makes a dot, with that rounding, of tl.sum(a[:, :, None] * "
            "b[None, :, :], axis=1) as well.)",
            when=lambda evidence: evidence.tag("float32") and _nearly(evidence),
        ),
        Misconception(
            "stays-zero",
            "the result is 0: the products never reach acc. What does tl.dot return?",
            gives=lambda a, b, BLOCK: 0 * (a @ b),
        ),
        Misconception("traffic", "a tile of C needs every element of its rows of A and of its columns of B once"),
        Misconception(
            "out-of-bounds",
            "a block of A has an edge at M and one at K, a block of B at K and at N, a tile of C at M and at N",
        ),
        Misconception(
            "program-id",
            "only tiles in the first row or column of tiles were stored. Which tile of C is program (2, 1)'s?",
            when=lambda evidence: evidence.kind == "nan" and _first_tile_only(evidence),
        ),
    ),
    wrong=(
        Variant("no loop", ((_LOOP, "    for start in range(0, BLOCK_K, BLOCK_K):\n"),), diagnosis="first-block-only"),
        Variant("no sum", ((_DOT, _DOT.replace("a, b, acc,", "a, b,")),), diagnosis="last-block-wins"),
        Variant(
            "whole blocks of K only",
            ((_LOOP, "    for start in range(0, K // BLOCK_K * BLOCK_K, BLOCK_K):\n"),),
            diagnosis="last-block-dropped",
        ),
        Variant(
            "A by columns",
            ((_A, _A.replace("offs_m[:, None] * K + offs_k[None, :]", "offs_m[:, None] + offs_k[None, :] * M")),),
            diagnosis="a-strides",
        ),
        Variant(
            "B by columns",
            ((_B, _B.replace("offs_k[:, None] * N + offs_n[None, :]", "offs_k[:, None] + offs_n[None, :] * K")),),
            diagnosis="b-strides",
        ),
        Variant(
            "sum in the inputs' dtype",
            (
                (
                    _DOT,
                    '        acc = (acc + tl.dot(a, b, input_precision="ieee")).to(c_ptr.dtype.element_ty).to(tl.float32)\n',
                ),
            ),
            diagnosis="low-precision-sum",
        ),
        Variant("TF32", ((_DOT, _DOT.replace(', input_precision="ieee"', "")),), diagnosis="tf32"),
        Variant(
            "product thrown away", ((_DOT, '        tl.dot(a, b, input_precision="ieee")\n'),), diagnosis="stays-zero"
        ),
        Variant(
            "no mask along K",
            (
                (_MASK_A, "        mask_a = (offs_m[:, None] < M) & (offs_k[None, :] >= 0)\n"),
                (_MASK_B, "        mask_b = (offs_k[:, None] >= 0) & (offs_n[None, :] < N)\n"),
            ),
            diagnosis="out-of-bounds",
        ),
        Variant("no mask on the store", ((_C, _C.replace(", mask=mask_c", "")),), diagnosis="out-of-bounds"),
        Variant(
            "only rows masked on the store",
            ((_MASK_C, "    mask_c = (offs_m[:, None] < M) & (offs_n[None, :] >= 0)\n"),),
            diagnosis="out-of-bounds",
        ),
        Variant("no mask on A", ((_A, _A.replace(", mask=mask_a, other=0.0", "")),), diagnosis="out-of-bounds"),
        Variant(
            "tiles half as wide",
            (
                (_GRID, _GRID.replace("triton.cdiv(N, BLOCK)", "triton.cdiv(N, max(BLOCK // 2, 16))")),
                (_CALL, _CALL.replace("BLOCK_N=BLOCK", "BLOCK_N=max(BLOCK // 2, 16)")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "tiles of 16, whatever BLOCK says",
            (
                (_GRID, _GRID.replace("M, BLOCK", "M, 16").replace("N, BLOCK", "N, 16")),
                (
                    _CALL,
                    _CALL.replace(
                        "BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=min(BLOCK, 32)", "BLOCK_M=16, BLOCK_N=16, BLOCK_K=16"
                    ),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "A loaded for each column",
            (
                (
                    _A + _B + _DOT,
                    _B
                    + "        for n in range(0, BLOCK_N):\n"
                    + "    "
                    + _A
                    + "            column = tl.sum(tl.where(tl.arange(0, BLOCK_N)[None, :] == n, b, 0.0), axis=1)\n"
                    + "            product = tl.sum(a.to(tl.float32) * column[None, :].to(tl.float32), axis=1)\n"
                    + "            acc += tl.where(tl.arange(0, BLOCK_N)[None, :] == n, product[:, None], 0.0)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant("calls torch", ((_CALL, "    return torch.matmul(a, b)\n"),), diagnosis="not-your-kernel"),
        Variant(
            "every program the first column",
            (
                (
                    "    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)",
                    "    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)",
                ),
            ),
            diagnosis="program-id",
        ),
    ),
    right=(
        Variant(
            "pointers that move",
            (
                (
                    _LOOP
                    + _OFFS_K
                    + _MASK_A
                    + _MASK_B
                    + "        # 0 beyond the edge: those products add nothing.\n"
                    + _BODY,
                    "    offs_k = tl.arange(0, BLOCK_K)\n"
                    "    a_ptrs = a_ptr + offs_m[:, None] * K + offs_k[None, :]\n"
                    "    b_ptrs = b_ptr + offs_k[:, None] * N + offs_n[None, :]\n"
                    "    for step in range(tl.cdiv(K, BLOCK_K)):\n"
                    "        left = K - step * BLOCK_K\n"
                    "        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & (offs_k < left)[None, :], other=0.0)\n"
                    "        b = tl.load(b_ptrs, mask=(offs_k < left)[:, None] & (offs_n < N)[None, :], other=0.0)\n"
                    '        acc += tl.dot(a, b, input_precision="ieee")\n'
                    "        a_ptrs += BLOCK_K\n"
                    "        b_ptrs += BLOCK_K * N\n",
                ),
            ),
        ),
        Variant(
            "edges wrapped around",
            (
                # Rows and columns beyond the edge are taken from the beginning and never stored.
                (_MASK_A, "        mask_a = offs_k[None, :] < K\n"),
                (_MASK_B, "        mask_b = offs_k[:, None] < K\n"),
                (_A, _A.replace("offs_m[:, None] * K", "(offs_m % M)[:, None] * K")),
                (_B, _B.replace("offs_n[None, :]", "(offs_n % N)[None, :]")),
            ),
        ),
        Variant(
            # In float32 Triton's compiler would make a tf32 dot of it.
            "sums instead of dots",
            (
                (
                    _DOT,
                    "        products = a.to(tl.float64)[:, :, None] * b.to(tl.float64)[None, :, :]\n"
                    "        acc += tl.sum(products, axis=1).to(tl.float32)\n",
                ),
            ),
        ),
    ),
)


def _first_tile_only(evidence: Evidence) -> bool:
    """Tile (0, 0) was stored, and all of the tiles below it or all to its right were not."""
    missing, BLOCK = evidence.outputs.isnan(), evidence.case.args[2]
    rest = missing[BLOCK:], missing[:, BLOCK:]
    return not bool(missing[:BLOCK, :BLOCK].any()) and any(part.numel() and bool(part.all()) for part in rest)


def _nearly(evidence: Evidence) -> bool:
    """Off by about 2^-11 of the terms, not by more."""
    y, right = evidence.outputs.double(), evidence.expected.double()
    return bool((y - right).abs().max() < 2e-3 * right.abs().max())


# -------------------------------------------------------------------------------------------------------- tiling.waves
def _waves_cases(rng: Random) -> list[Case]:
    cases = []
    for what, M, N, BM, BN, sms, per_sm in (
        ("an A100, 98 tiles", 1792, 1792, 256, 128, 108, 1),
        ("an A100, one more", 1793, 1793, 256, 128, 108, 1),
        ("an H200", 4096, 4096, 128, 256, 132, 1),
        ("an exact fit", 11 * 128, 12 * 128, 128, 128, 132, 1),
        ("one tile", 128, 128, 128, 128, 108, 1),
        ("two programs an SM", 4096, 4096, 128, 128, 132, 2),
        ("four programs an SM", 3000, 5000, 64, 64, 108, 4),
        ("a T4", rng.randrange(1001, 1999, 2), rng.randrange(1001, 1999, 2), 128, 64, 40, 1),
        ("a tall C", rng.randrange(20_001, 29_999, 2), rng.randrange(129, 255, 2), 256, 128, 148, 1),
        ("thin", 17, rng.randrange(5001, 9999, 2), 16, 128, 58, 3),
    ):
        name = f"C [{M}, {N}], tiles {BM} x {BN}, {sms} SMs x {per_sm} ({what})"
        cases.append(case(name, M, N, BM, BN, sms, per_sm))
    return cases


def _tiling(*args: int) -> tiling.Tiling:
    return tiling.Tiling(*args)


def _waves(*args: int) -> tuple[int, int, float]:
    t = _tiling(*args)
    return t.tiles, t.waves, t.efficiency


def _of(tiles: Callable[..., int], count: Callable[[int, int], float] = _up) -> Callable[..., tuple]:
    """What follows from another number of tiles or of waves."""

    def gives(M, N, BM, BN, sms, per_sm):
        n = tiles(M, N, BM, BN)
        waves = count(n, sms * per_sm)
        return n, waves, M * N / (waves * sms * per_sm * BM * BN)

    return gives


def _tiles(M, N, BM, BN):
    return _up(M, BM) * _up(N, BN)


WAVES = FunctionExercise(
    id="tiling.waves",
    title="Tiles, waves and what they waste",
    notebook=NOTEBOOK,
    function="waves",
    label=Label(2, 15, "tile quantization and wave quantization, and that they multiply"),
    hints=(
        "C [1793, 1793] is one row and one column larger than C [1792, 1792]. How many tiles of 256 x 128 touch that one "
        "row, and how long does the GPU take for them?",
        "Tiles are counted in each direction, rounded up; waves are tiles over the places on the whole GPU, rounded up. "
        "What is paid for is every place in every wave, each a whole tile large.",
        "Tiles: the product of two divisions, each rounded up. Places: SMs times programs per SM. Waves: tiles over "
        "places, rounded up. Efficiency: the elements of C over waves times places times the elements of a tile.",
    ),
    cases=_waves_cases,
    expected=_waves,
    tolerance=1e-9,
    misconceptions=(
        Misconception(
            "area",
            "the tiles are counted by area. Can a piece of 1 x 256 left over at the right and one left over at the "
            "bottom share a tile?",
            gives=_of(lambda M, N, BM, BN: _up(M * N, BM * BN)),
        ),
        Misconception(
            "partial-tiles-dropped",
            "only whole tiles are counted. Who computes the last rows and columns?",
            gives=_of(lambda M, N, BM, BN: M // BM * (N // BN)),
        ),
        Misconception(
            "one-program-an-sm",
            "every SM gets one program only. How many places does the GPU have when each holds several?",
            gives=lambda M, N, BM, BN, sms, per_sm: _waves(M, N, BM, BN, sms, 1),
        ),
        Misconception(
            "fractions-of-a-wave",
            "the waves are not rounded up. How long does the GPU take for a wave of one tile?",
            gives=_of(_tiles, lambda tiles, slots: tiles / slots),
        ),
        Misconception(
            "tail-dropped",
            "the waves are rounded down: the last one, which is not full, is missing. Who computes its tiles?",
            gives=lambda *args: (
                _tiling(*args).tiles,
                _tiling(*args).tiles // _tiling(*args).slots,
                _tiling(*args).efficiency,
            ),
        ),
        Misconception(
            "tail-dropped",
            "the waves are rounded down: the last one, which is not full, is missing. Who computes its tiles?",
            gives=_of(_tiles, lambda tiles, slots: max(1, tiles // slots)),
        ),
        Misconception(
            "full-gpu-assumed",
            "the efficiency counts the waste at the edge of C and not the places that stay empty in the last wave. What "
            "do the other SMs do meanwhile?",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, _tiling(*args).tile_efficiency),
        ),
        Misconception(
            "edge-ignored",
            "the efficiency counts the places that stay empty and not what hangs over the edge of C. Does a tile at the "
            "edge take less time?",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, _tiling(*args).wave_efficiency),
        ),
        Misconception(
            "percent",
            "the efficiency is a share, 1.0 where nothing is wasted. Is yours in percent?",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, 100 * _tiling(*args).efficiency),
        ),
        Misconception(
            "upside-down",
            "the efficiency is above 1: paid over used. Which of the two is the smaller?",
            gives=lambda *args: (_tiling(*args).tiles, _tiling(*args).waves, 1 / _tiling(*args).efficiency),
        ),
    ),
    wrong=(
        Variant(
            "tiles by area",
            (("tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)", "tiles = -(-M * N // (BLOCK_M * BLOCK_N))"),),
            diagnosis="area",
        ),
        Variant(
            "whole tiles only",
            (("tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)", "tiles = M // BLOCK_M * (N // BLOCK_N)"),),
            diagnosis="partial-tiles-dropped",
        ),
        Variant(
            "one program an SM", (("slots = sms * programs_per_sm", "slots = sms"),), diagnosis="one-program-an-sm"
        ),
        Variant(
            "waves not rounded",
            (("count = -(-tiles // slots)", "count = tiles / slots"),),
            diagnosis="fractions-of-a-wave",
        ),
        Variant(
            "waves rounded down",
            (("count = -(-tiles // slots)", "count = max(1, tiles // slots)"),),
            diagnosis="tail-dropped",
        ),
        Variant(
            "edge waste only",
            (("M * N / (count * slots * BLOCK_M * BLOCK_N)", "M * N / (tiles * BLOCK_M * BLOCK_N)"),),
            diagnosis="full-gpu-assumed",
        ),
        Variant(
            "idle places only",
            (("M * N / (count * slots * BLOCK_M * BLOCK_N)", "tiles / (count * slots)"),),
            diagnosis="edge-ignored",
        ),
        Variant(
            "in percent",
            (("M * N / (count * slots * BLOCK_M * BLOCK_N)", "100 * M * N / (count * slots * BLOCK_M * BLOCK_N)"),),
            diagnosis="percent",
        ),
        Variant(
            "paid over used",
            (("M * N / (count * slots * BLOCK_M * BLOCK_N)", "count * slots * BLOCK_M * BLOCK_N / (M * N)"),),
            diagnosis="upside-down",
        ),
    ),
    right=(
        Variant(
            "two shares multiplied",
            source="""import math


def waves(M, N, BLOCK_M, BLOCK_N, sms, programs_per_sm):
    down, across = math.ceil(M / BLOCK_M), math.ceil(N / BLOCK_N)
    count = math.ceil(down * across / (sms * programs_per_sm))
    inside = (M / (down * BLOCK_M)) * (N / (across * BLOCK_N))
    busy = down * across / (count * sms * programs_per_sm)
    return down * across, count, inside * busy
""",
        ),
        Variant(
            "dealt out one by one",
            source="""def waves(M, N, BLOCK_M, BLOCK_N, sms, programs_per_sm):
    tiles = len(range(0, M, BLOCK_M)) * len(range(0, N, BLOCK_N))
    left, count = tiles, 0
    while left > 0:
        left -= sms * programs_per_sm
        count += 1
    paid = (tiles - left) * BLOCK_M * BLOCK_N
    return [tiles, count, M * N / paid]
""",
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
    ):
        cases.append(
            case(f"rows of {N} x {itemsize} bytes, alignment {alignment} bytes ({what})", N, itemsize, alignment)
        )
    return cases


def _stride(N: int, itemsize: int, alignment: int) -> int:
    return tiling.align_rows(N, itemsize, alignment)[1]


def _widest(N: int, itemsize: int, alignment: int) -> int:
    return tiling.align_rows(N, itemsize, alignment)[0]


ALIGN = FunctionExercise(
    id="tiling.align",
    title="Rows that begin where a wide load may",
    notebook=NOTEBOOK,
    function="align_rows",
    label=Label(2, 10, "alignment of rows, and what padding buys"),
    hints=(
        "Row 0 begins at a multiple of everything. At which byte do row 1, row 2 and row 3 begin, if rows have 6 bytes?",
        "If row 1 begins at a multiple of n bytes then so do all others. For the second number, count in lanes: how many "
        "elements fit into `alignment` bytes?",
        "First: begin with `alignment` and halve until it divides the bytes of a row. Second: divide N by the number of "
        "elements in `alignment` bytes, round up, and multiply by it again.",
    ),
    cases=_align_cases,
    expected=tiling.align_rows,
    misconceptions=(
        Misconception(
            "elements-not-bytes",
            "the first number comes from the length of a row in elements. In which unit are addresses counted?",
            gives=lambda N, itemsize, alignment: (math.gcd(N, alignment), _stride(N, itemsize, alignment)),
        ),
        Misconception(
            "one-element",
            "one element at a time is always allowed. Which rows allow more?",
            gives=lambda N, itemsize, alignment: (itemsize, _stride(N, itemsize, alignment)),
        ),
        Misconception(
            "row-0-only",
            "row 0 may begin with the widest load. May row 1?",
            gives=lambda N, itemsize, alignment: (alignment, _stride(N, itemsize, alignment)),
        ),
        Misconception(
            "padded-too-much",
            "rows that fit already get padding too. What is the remainder for them, and what must be added then?",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                N + alignment // itemsize - N % (alignment // itemsize),
            ),
        ),
        Misconception(
            "rounded-down",
            "the stride is smaller than a row. Where does the end of the row go?",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                N // (alignment // itemsize) * (alignment // itemsize),
            ),
        ),
        Misconception(
            "power-of-two",
            "the rows are padded to a power of two, up to twice the memory. What is the next multiple that will do?",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                max(1 << (N - 1).bit_length(), alignment // itemsize),
            ),
        ),
        Misconception(
            "alignment-in-elements",
            "the stride is a multiple of `alignment` elements. `alignment` is in bytes: how many elements is that?",
            gives=lambda N, itemsize, alignment: (_widest(N, itemsize, alignment), _up(N, alignment) * alignment),
        ),
        Misconception(
            "stride-in-bytes",
            "the stride is in bytes. What do tensor.stride() and pointer arithmetic in Triton count?",
            gives=lambda N, itemsize, alignment: (
                _widest(N, itemsize, alignment),
                _stride(N, itemsize, alignment) * itemsize,
            ),
        ),
    ),
    wrong=(
        Variant(
            "of the elements", (("while N * itemsize % widest:", "while N % widest:"),), diagnosis="elements-not-bytes"
        ),
        Variant(
            "element by element", (("    widest = alignment\n", "    widest = itemsize\n"),), diagnosis="one-element"
        ),
        Variant(
            "of row 0", (("    while N * itemsize % widest:\n        widest //= 2\n", ""),), diagnosis="row-0-only"
        ),
        Variant(
            "always one more",
            (("return widest, -(-N // lanes) * lanes", "return widest, (N // lanes + 1) * lanes"),),
            diagnosis="padded-too-much",
        ),
        Variant(
            "down",
            (("return widest, -(-N // lanes) * lanes", "return widest, N // lanes * lanes"),),
            diagnosis="rounded-down",
        ),
        Variant(
            "to a power of two",
            (("return widest, -(-N // lanes) * lanes", "return widest, max(lanes, triton.next_power_of_2(N))"),),
            diagnosis="power-of-two",
        ),
        Variant(
            "alignment in elements",
            (("    lanes = alignment // itemsize\n", "    lanes = alignment\n"),),
            diagnosis="alignment-in-elements",
        ),
        Variant(
            "in bytes",
            (("return widest, -(-N // lanes) * lanes", "return widest, -(-N // lanes) * alignment"),),
            diagnosis="stride-in-bytes",
        ),
    ),
    right=(
        Variant(
            "a common divisor and a remainder",
            source="""import math


def align_rows(N, itemsize, alignment):
    stride = N
    while stride * itemsize % alignment:
        stride += 1
    return math.gcd(N * itemsize, alignment), stride
""",
        ),
        Variant(
            "with bits",
            source="""def align_rows(N, itemsize, alignment):
    row = N * itemsize
    widest = min(row & -row, alignment)
    padded = (row + alignment - 1) & ~(alignment - 1)
    return (widest, padded // itemsize)
""",
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


def _in_rows(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    return divmod(pid, num_n)


def _in_columns(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    return pid % num_m, pid // num_m


def _groups_of_columns(pid: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    n, m = tiling.grouped(pid, num_n, num_m, group)
    return m, n


GROUPED = FunctionExercise(
    id="tiling.grouped",
    title="An order that L2 likes",
    notebook=NOTEBOOK,
    function="grouped",
    label=Label(2, 15, "program ids are yours to map: grouped order for reuse in L2"),
    hints=(
        "With 9 x 9 tiles and GROUP_M = 3, programs 0 to 26 compute the first three rows of tiles. Which tile is program "
        "3's, and which program 27's?",
        "Three numbers locate a program: its group, its place inside the group, and how many rows that group has. The "
        "last group may have fewer than GROUP_M. Going down a column means that the row changes fastest.",
        "A full group has GROUP_M times num_n programs. The group's first row is the quotient of pid by that, times "
        "GROUP_M; its rows are GROUP_M or what is left of num_m, whichever is less. The remainder is the place inside: "
        "its remainder by the rows is the row, its quotient is the column.",
    ),
    cases=_grouped_cases,
    expected=tiling.grouped,
    misconceptions=(
        Misconception(
            "row-major",
            "that is row by row: the column changes fastest. Which programs share a tile of B then, and how far apart do "
            "they run?",
            gives=_in_rows,
        ),
        Misconception(
            "column-major",
            "that is column by column over all rows. Where does a group of GROUP_M rows end?",
            gives=_in_columns,
        ),
        Misconception(
            "short-group",
            "the last group is treated as if it had GROUP_M rows, so that programs compute rows of tiles that do not "
            "exist. How many rows does it have?",
            gives=_full_groups,
        ),
        Misconception(
            "place-not-reset",
            "the row is counted with the id of the program, not with its place in the group. It goes well while all "
            "groups are equally high. What is the first program of a shorter group?",
            gives=_global_counter,
        ),
        Misconception(
            "transposed",
            "row and column have changed places. Which comes first, pid_m or pid_n?",
            gives=lambda *args: tiling.grouped(*args)[::-1],
        ),
        Misconception(
            "groups-of-columns",
            "the groups are made of columns of tiles. GROUP_M counts rows: how many programs does a group have?",
            gives=_groups_of_columns,
        ),
    ),
    wrong=(
        Variant("row by row", source="def grouped(pid, num_m, num_n, GROUP_M):\n    return pid // num_n, pid % num_n\n",
                diagnosis="row-major"),
        Variant("column by column", source="def grouped(pid, num_m, num_n, GROUP_M):\n    return pid % num_m, pid // num_m\n",
                diagnosis="column-major"),
        Variant("all groups full", (("rows = min(GROUP_M, num_m - first)", "rows = GROUP_M"),), diagnosis="short-group"),
        Variant(
            "pid in place of the place", (("first + inside % rows,", "first + pid % rows,"),), diagnosis="place-not-reset"
        ),
        Variant(
            "row and column swapped",
            (("return first + inside % rows, inside // rows", "return inside // rows, first + inside % rows"),),
            diagnosis="transposed",
        ),
        Variant(
            "groups of columns",
            source="""def grouped(pid, num_m, num_n, GROUP_M):
    first = pid // (GROUP_M * num_m) * GROUP_M
    width = min(GROUP_M, num_n - first)
    inside = pid % (GROUP_M * num_m)
    return inside // width, first + inside % width
""",
            diagnosis="groups-of-columns",
        ),
        Variant(
            "rows inside the group",
            (("return first + inside % rows, inside // rows", "return first + inside // num_n, inside % num_n"),),
            diagnosis="row-major",
        ),
    ),
    right=(
        Variant(
            "the list of all tiles",
            source="""def grouped(pid, num_m, num_n, GROUP_M):
    order = []
    for first in range(0, num_m, GROUP_M):
        for n in range(num_n):
            for m in range(first, min(first + GROUP_M, num_m)):
                order.append((m, n))
    return order[pid]
""",
        ),
        Variant(
            "the tutorial's names",
            source="""def grouped(pid, num_pid_m, num_pid_n, GROUP_SIZE_M):
    group_id = pid // (GROUP_SIZE_M * num_pid_n)
    group_size_m = min(num_pid_m - group_id * GROUP_SIZE_M, GROUP_SIZE_M)
    pid_n, pid_m = divmod(pid - group_id * GROUP_SIZE_M * num_pid_n, group_size_m)
    return [group_id * GROUP_SIZE_M + pid_m, pid_n]
""",
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- tiling.occupancy
_A100, _H200, _L4 = (64, 65536, 167_936), (64, 65536, 233_472), (48, 65536, 102_400)


def _occupancy_cases(rng: Random) -> list[Case]:
    cases = []
    for what, num_warps, registers, shared, sm in (
        ("A100, nothing shared, few registers", 4, 32, 0, _A100),
        ("A100, shared memory is short", 4, 64, 49_152, _A100),
        ("A100, one fits", 8, 128, 98_304, _A100),
        ("A100, registers are short", 8, 168, 16_384, _A100),
        ("A100, registers and shared memory", 4, 255, 32_768, _A100),
        ("H200, a large tile", 8, 255, 196_608, _H200),
        ("H200, warps are short", 16, 24, 8_192, _H200),
        ("H200, the kibibyte counts", 4, 40, 233_472 // 4, _H200),
        ("H200, does not fit", 8, 128, 240_000, _H200),
        ("L4, any", rng.choice((2, 4, 8)), rng.randrange(40, 200, 8), rng.randrange(8_000, 40_000, 128), _L4),
        ("L4, any", rng.choice((2, 4, 8)), rng.randrange(40, 200, 8), rng.randrange(0, 4_000, 128), _L4),
    ):
        cases.append(
            case(
                f"{num_warps} warps, {registers} registers, {shared:,} bytes ({what})",
                num_warps,
                registers,
                shared,
                *sm,
            )
        )
    for i, same in enumerate(("first", "second")):
        cases[9 + i] = case(f"L4, drawn at random, {same}", *cases[9 + i].args)
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


OCCUPANCY = FunctionExercise(
    id="tiling.occupancy",
    title="How many programs on one SM",
    notebook=NOTEBOOK,
    function="programs_per_sm",
    label=Label(2, 10, "occupancy: the scarcest of warps, registers and shared memory"),
    hints=(
        "An SM hands out three things to a program. What happens to the next program when one of them is used up and "
        "plenty of the others is left?",
        "Each of the three admits so many whole programs; the smallest number decides. Registers are given to threads, "
        "of which a warp has 32; shared memory is given to programs, with a kibibyte on top for the system.",
        "Three divisions rounded down: the SM's warps by the program's; the SM's registers by registers times 32 times "
        "warps; the SM's shared memory by the program's plus 1,024. The result is the least of them.",
    ),
    cases=_occupancy_cases,
    expected=_programs,
    unit="programs",
    misconceptions=(
        Misconception(
            "registers-of-threads",
            "registers hardly count in yours. Are they a program's, a warp's or a thread's, and how many threads does a "
            "program have?",
            gives=_without("registers"),
        ),
        Misconception(
            "system-share",
            "one program too many where it is close: the system takes shared memory for each program as well. How much?",
            gives=lambda w, r, s, mw, mr, ms: min(mw // w, mr // (r * 32 * w), ms // s if s else 1 << 30),
        ),
        Misconception(
            "warps-only",
            "that is what the warps allow. Does every program find its registers and its shared memory?",
            gives=lambda *args: _admits(*args)["warps"],
        ),
        Misconception(
            "no-shared-memory", "shared memory is not considered. How much do all programs together need?",
            gives=_without("shared"),
        ),
        Misconception(
            "no-warps", "an SM also has room for so many warps only, however little each of them needs",
            gives=_without("warps"),
        ),
        Misconception(
            "rounded-up",
            "the divisions round up. What does a program do that finds nine tenths of what it needs?",
            gives=lambda w, r, s, mw, mr, ms: min(_up(mw, w), _up(mr, r * 32 * w), _up(ms, s + 1024)),
        ),
        Misconception(
            "at-least-one",
            "a program that needs more than an SM has is said to fit. What happens at its launch?",
            gives=lambda *args: max(1, _programs(*args)),
        ),
    ),
    wrong=(
        Variant(
            "registers of warps", (("registers * 32 * num_warps", "registers * num_warps"),), diagnosis="registers-of-threads"
        ),
        Variant(
            "registers of programs", (("(registers * 32 * num_warps)", "registers"),), diagnosis="registers-of-threads"
        ),
        Variant(
            "without the system's kibibyte",
            (("(shared_bytes + 1024)", "max(shared_bytes, 1)"),),
            diagnosis="system-share",
        ),
        Variant("warps only", (("min(by_warps, by_registers, by_shared)", "by_warps"),), diagnosis="warps-only"),
        Variant(
            "registers forgotten",
            (("min(by_warps, by_registers, by_shared)", "min(by_warps, by_shared)"),),
            diagnosis="registers-of-threads",
        ),
        Variant(
            "shared memory forgotten",
            (("min(by_warps, by_registers, by_shared)", "min(by_warps, by_registers)"),),
            diagnosis="no-shared-memory",
        ),
        Variant(
            "warps forgotten",
            (("min(by_warps, by_registers, by_shared)", "min(by_registers, by_shared)"),),
            diagnosis="no-warps",
        ),
        Variant(
            "rounded up",
            (
                ("by_registers = sm_registers // (registers * 32 * num_warps)",
                 "by_registers = -(-sm_registers // (registers * 32 * num_warps))"),
                ("by_shared = sm_shared_bytes // (shared_bytes + 1024)",
                 "by_shared = -(-sm_shared_bytes // (shared_bytes + 1024))"),
            ),
            diagnosis="rounded-up",
        ),
        Variant(
            "one always fits",
            (("min(by_warps, by_registers, by_shared)", "max(1, min(by_warps, by_registers, by_shared))"),),
            diagnosis="at-least-one",
        ),
    ),
    right=(
        Variant(
            "one more until it breaks",
            source="""def programs_per_sm(num_warps, registers, shared_bytes, max_warps, sm_registers, sm_shared_bytes):
    needs = (num_warps, registers * num_warps * 32, shared_bytes + 1024)
    has = (max_warps, sm_registers, sm_shared_bytes)
    count = 0
    while all((count + 1) * need <= limit for need, limit in zip(needs, has)):
        count += 1
    return count
""",
        ),
        Variant(
            "floor of the smallest ratio",
            source="""import math


def programs_per_sm(num_warps, registers, shared_bytes, max_warps, sm_registers, sm_shared_bytes):
    threads = 32 * num_warps
    ratios = [max_warps / num_warps, sm_registers / threads / registers, sm_shared_bytes / (shared_bytes + 1024)]
    return math.floor(min(ratios))
""",
        ),
    ),
)  # fmt: skip

EXERCISES = [TRAFFIC, MATMUL, WAVES, ALIGN, GROUPED, OCCUPANCY]
