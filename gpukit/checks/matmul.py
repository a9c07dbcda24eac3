"""The exercises of notebook 12: cases, bounds on traffic, caches and memory, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, far, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts


# ------------------------------------------------------------------------------------------------------------ inputs
class _Matrices(Inputs):
    def noise(self, M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
        """With all digits of float32."""
        return self.normal(M, K), self.normal(K, N)

    def pair(self, M: int, N: int, K: int, dtype: str = "float32") -> tuple[Tensor, Tensor]:
        return self.coarse(M, K, dtype=dtype), self.coarse(K, N, dtype=dtype, bits=5)


def _case(x: Tensor, y: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
    return tensor_case(x, y, *rest, shown=f"{list(x.shape)} times {list(y.shape)}", note=note, tags=tags)


def _blocks(a: Tensor, b: Tensor, step: int) -> list[Tensor]:
    """The product of each block of K."""
    return [x @ y for x, y in zip(a.split(step, -1), b.split(step, -2), strict=True)]


# -------------------------------------------------------------------------------------------------------- matmul.tiles
def _tiles_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, BLOCK, tags in (
        (1, 1, 1, 16, ""),
        (32, 32, 16, 16, ""),
        (32, 48, 64, 16, "long-k"),
        (37, 16, 32, 16, "ragged long-k"),
        (16, 53, 33, 16, "ragged long-k"),
        (3, 70, 100, 32, "ragged long-k"),
        (8, 5, 10, 3, "ragged long-k"),
        (23, 15, 31, 7, "ragged long-k"),
        (16, 16, 1024, 16, "long-k deep"),
        (160, 176, 16, 16, "wide"),  # a whole row of tiles is more than eight
    ):
        cases.append(_case(*make.pair(M, N, K, "bfloat16"), BLOCK, tags=tags, note=f"BLOCK {BLOCK}"))
    a, b = make.factors(17, 20, 70, "bfloat16")
    for (note, left), (_, right) in zip(make.layouts(a), make.layouts(b), strict=True):
        cases.append(_case(left, right, 16, tags="ragged long-k", note=f"BLOCK 16, large sums, both {note}"))
    a, b = make.pair(9, 20, 40, "bfloat16")
    cases.append(_case(a * 2.0**-30, b, 16, tags="ragged long-k", note="BLOCK 16, a around 1e-9"))
    a, b = make.pair(16, 16, 48, "bfloat16")
    a[:, :16], b[16:32] = 0, 0
    cases.append(_case(a, b, 16, tags="long-k", note="BLOCK 16, tiles of zeros in a and in b"))
    return cases


def _exact(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    return (a.double() @ b.double()).float()


def _whole(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    M, N = a.shape[0] // BLOCK * BLOCK, b.shape[1] // BLOCK * BLOCK
    c = _exact(a, b, BLOCK)
    c[M:], c[:, N:] = 0, 0
    return c


def _tiles_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    a, b, BLOCK = case.args
    beyond, tile = peak_bytes - 4 * a.shape[0] * b.shape[1], 4 * BLOCK * BLOCK
    if beyond <= 8 * tile:
        return None
    return (
        "memory",
        f"{beyond:,} bytes were held at once besides c, and eight tiles are {8 * tile:,}. Which of your tensors grows with K, "
        "M or N?",
    )


TILES = FunctionExercise(
    id="matmul.tiles",
    function="matmul_tiles",
    cases=_tiles_cases,
    expected=_exact,
    tolerance=2e-5,
    memory_rule=_tiles_memory,
    misconceptions=(
        Misconception("last-block-wins", gives=lambda a, b, BLOCK: _blocks(a.float(), b.float(), BLOCK)[-1]),
        Misconception("first-block-only", gives=lambda a, b, BLOCK: _blocks(a.float(), b.float(), BLOCK)[0]),
        Misconception(
            "last-block-dropped",
            gives=lambda a, b, BLOCK: (
                a[:, : a.shape[1] // BLOCK * BLOCK].float() @ b[: a.shape[1] // BLOCK * BLOCK].float()
            ),
        ),
        Misconception("edge-tiles", gives=_whole),
        Misconception("rounded-sums", when=lambda evidence: evidence.kind == "values" and evidence.near(0.03)),
    ),
)


# ------------------------------------------------------------------------------------------------------ matmul.strides
def _strides_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    normal = make.normal
    cases = [
        _case(normal(1, 1, 1), normal(1, 1, 1), 16, note="one element"),
        _case(normal(2, 32, 40), normal(2, 40, 16), 16, tags="batched", note="a batch of 2"),
        _case(normal(1, 17, 29), normal(1, 29, 35), 16, tags="ragged"),
        _case(normal(1, 24, 40).mT, normal(1, 24, 16), 16, tags="a-strides", note="a transposed"),
        _case(
            normal(1, 20, 33), normal(1, 50, 33).mT, 32, tags="b-strides", note="b transposed: a linear layer's weight"
        ),
        _case(
            normal(2, 5, 3, 16, dtype="bfloat16").transpose(1, 2)[1],
            normal(3, 16, 7, dtype="bfloat16"),
            16,
            tags="a-strides batched",
            note="heads of a [B, T, H, D]",
        ),
        _case(
            normal(3, 18, 40),
            normal(1, 40, 13).expand(3, 40, 13),
            16,
            tags="b-strides batched",
            note="b expanded: stride 0",
        ),
        _case(
            normal(1, 1, 40).expand(2, 18, 40),
            normal(2, 40, 13),
            16,
            tags="a-strides batched",
            note="one row of a expanded to all",
        ),
        _case(
            normal(2, 64, 96, dtype="float16")[:, ::2, ::3],
            normal(2, 32, 30, dtype="float16"),
            16,
            tags="a-strides batched",
            note="every second row and third column of a",
        ),
        _case(
            normal(2, 64, 31), normal(2, 31, 32).mT.contiguous().mT, 32, tags="b-strides batched", note="b transposed"
        ),
        _case(
            normal(6, 20, 33)[::2],
            normal(7, 33, 18)[::3],
            16,
            tags="a-strides b-strides batched",
            note="every second matrix of a, every third of b",
        ),
    ]
    for dtype, i in (("float16", 0), ("bfloat16", 1), ("float32", 2)):
        a, b = make.factors(9, 17, 70, dtype)
        (note, a), (_, b) = make.layouts(a)[i], make.layouts(b)[i]
        cases.append(
            _case(a[None], b[None], 16, tags="a-strides b-strides large-sums", note=f"large sums, both {note}")
        )
    a, b = normal(1, 32, 64), normal(1, 64, 16)
    a[:, :16], a[:, 16:, :32] = 0, 0
    cases.append(_case(a, b, 16, tags="zeros", note="tiles of zeros in a and in c"))
    a, b = make.integers(-2, 3, 1, 20, 24).float(), make.integers(-2, 3, 1, 24, 18).float()
    cases.append(_case(make.stained(a), b, 16, tags="special", note="a with a NaN"))
    return cases


def _a_times_b(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    return a @ b


def _products_read(a: Tensor, b: Tensor, BLOCK: int) -> int:
    """Bytes of a and b that tiles of BLOCK need; beyond the edge as well, for those who wrap rows and columns around it."""
    (batches, M, K), N = a.shape, b.shape[2]
    return 2 * batches * cdiv(M, BLOCK) * cdiv(N, BLOCK) * BLOCK * K * a.element_size()


def _products_bytes(a: Tensor, b: Tensor, BLOCK: int) -> int:
    return len(a) * a.shape[1] * b.shape[2] * a.element_size()


def _still(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    """Every step multiplies the first blocks, masked by what is left of K."""
    left = [min(32, a.shape[2] - k) for k in range(0, a.shape[2], 32)]
    return sum(a[..., :k] @ b[:, :k] for k in left)


STRIDES = KernelExercise(
    id="matmul.strides",
    function="matmul",
    cases=_strides_cases,
    contiguous=True,
    returns=("c",),
    reference=_a_times_b,
    # A column of b begins, and a row of c, beyond 2^31 elements.
    huge=lambda: [  # the offset of each dimension of a and b alone is beyond 2^32
        (a, b, 128)
        for a, b in (
            (far(1, 5 << 20, 1024, transposed=True), far(1, 1024, 5 << 20, transposed=True)),
            (far(1, 5 << 20, 1024), far(1, 1024, 5 << 20)),
            (far(40_000, 256, 512), far(40_000, 512, 256)),
            # One step along K fits into 32 bits, BLOCK_K of them do not.
            (far(1, 64, 96, gap=5 << 25), far(1, 96, 64, transposed=True, gap=5 << 25)),
        )
    ],
    traffic=Traffic(reads=_products_read, writes=_products_bytes, memory=_products_bytes),  # memory: no copy of a or b
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("low-precision-sums", when=ideas.rounded_sums),
        Misconception(
            "a-contiguous", gives=ideas.On(lambda a, b, BLOCK: (ideas.as_if_contiguous(a), b, BLOCK), _a_times_b)
        ),
        Misconception(
            "b-contiguous", gives=ideas.On(lambda a, b, BLOCK: (a, ideas.as_if_contiguous(b), BLOCK), _a_times_b)
        ),
        Misconception("first-matrix", gives=lambda a, b, BLOCK: (a[:1] @ b[:1]).expand(a.shape[0], -1, -1)),
        Misconception("first-matrix/2", gives=lambda a, b, BLOCK: a[:1] @ b),
        Misconception("first-matrix/3", gives=lambda a, b, BLOCK: a @ b[:1]),
        Misconception("k-does-not-move", gives=_still),
        Misconception("first-block-only", gives=lambda a, b, BLOCK: a[..., :32] @ b[:, :32]),
        Misconception("last-block-wins", gives=lambda a, b, BLOCK: _blocks(a, b, 32)[-1]),
        Misconception("tf32", gives=lambda a, b, BLOCK: ideas.tf32(a) @ ideas.tf32(b)),
    ),
)


# ---------------------------------------------------------------------------------------------------- matmul.precision
_SHARES = tuple(digit * 10.0**-place for place in range(2, 7) for digit in (1, 3))  # bounds that somebody may choose
WAYS = ("ieee", "tf32", "fp16", "bf16", "bf16 sums")


def _read(name: str, x: Tensor) -> Tensor:
    """x as the operands of `name` hold it, in float32."""
    if name == "tf32":
        return ideas.tf32(x)
    return x.half().float() if name == "fp16" else x.bfloat16().float() if name.startswith("bf16") else x


def _product(name: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = _read(name, a), _read(name, b)
    if name != "bf16 sums":
        return sum(_blocks(a, b, 32))
    total = a[:, :0] @ b[:0]
    for part in _blocks(a, b, 16):
        total = (total + part).bfloat16().float()
    return total


def _precision_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)

    def product(name: str, way: str, a: Tensor, b: Tensor, *tags: str) -> Case:
        return Case(name, (a, b, _product(way, a, b)), frozenset(tags))

    cases = []
    for way in WAYS:
        cases.append(product(f"{way}, K 256", way, *make.noise(8, 8, 256), way))
        a, b = make.noise(4, 6, 1024)
        if way == "fp16":
            # All a little below what float16 holds, so that all are rounded up: noise on both sides averages out in 1,024
            # terms, to less than the largest error that float32 sums of them might have.
            a, b = (_read("fp16", x) * (1 - 2**-12) for x in (a, b))
        cases.append(product(f"{way}, K 1024, all positive", way, a.abs(), b.abs(), way, "positive"))
    for way in ("ieee", "bf16"):
        a, b = make.noise(8, 8, 64)
        cases.append(product(f"{way}, numbers around 1e3", way, a * 1e3, b * 1e3, way, "scaled"))
    for way in ("fp16", "bf16"):  # below 6e-5 float16 has fewer digits
        a, b = make.noise(8, 8, 64)
        cases.append(product(f"{way}, numbers around 1e-6", way, a * 1e-6, b, way, "small-numbers"))
    a, b = make.noise(8, 8, 64)
    a[0] = a[0].bfloat16().float() * 2.0**12  # large terms, and every way to read them is exact
    cases.append(
        product("tf32, one row of large numbers that bfloat16 holds exactly", "tf32", a, b.bfloat16().float(), "tf32")
    )
    a, b = (x.bfloat16().float() for x in make.noise(8, 8, 64))
    a[2, 5], b[5] = 1 + 2.0**-11 + 2.0**-12, 0  # cut, it is 1; rounded to 10 bits, 1 + 2^-10
    b[5, 3] = 64
    cases.append(product("tf32, which one element of c alone shows", "tf32", a, b, "tf32", "one-element"))
    for way in ("tf32", "bf16 sums"):
        a, b = make.noise(8, 8, 64)
        a[3], b[:, 5] = 0, 0
        a, b = make.layouts(a)[0][1], make.layouts(b)[1][1]
        cases.append(product(f"{way}, a row and a column of zeros, a transposed, b with gaps", way, a, b, way))
    a = b = make.torch.full((1, 1), 1 + 2.0**-9 + 2.0**-15)
    cases.append(product("bf16, one element", "bf16", a, b, "bf16"))
    cases.append(product("ieee, zeros alone", "ieee", 0 * a, b, "ieee", "several-fit"))
    a, b = make.noise(8, 8, 64)
    a, b = a.repeat(1, 2), b.repeat(2, 1)
    a[:, 64:] *= -1
    a += 1e-2 * make.normal(8, 128)
    cases.append(product("ieee, terms that cancel", "ieee", a, b, "ieee", "cancel"))
    a, b = (x.bfloat16().float() for x in make.noise(8, 8, 128))
    cases.append(product("numbers that bfloat16 holds exactly", "bf16", a, b, "ieee", "several-fit"))
    a, b = (_read("fp16", _read("tf32", x)) for x in make.noise(8, 8, 128))
    cases.append(product("numbers that float16 holds exactly", "fp16", a, b, "ieee", "several-fit"))
    # A little above what float16 holds, cutting gives what rounding gives; a little below what bfloat16 holds, both round up.
    a, b = (_read("fp16", x) * (1 + 2**-13) for x in make.noise(8, 8, 128))
    cases.append(product("tf32, and float16 reads the same", "tf32", a, b, "several-fit"))
    a, b = (x.bfloat16().float() * (1 - 2**-13) for x in make.noise(8, 8, 128))
    cases.append(product("fp16, and bfloat16 reads the same", "fp16", a, b, "fp16", "several-fit"))
    return cases


def _fitting(
    a: Tensor, b: Tensor, c: Tensor, reads: str = "ab", share: float = 2**-20, of: str = "terms", wide: bool = True
) -> list[str]:
    """The ways that fit, and at last the one that is named where none does.

    reads   the operands that somebody converts
    share, of  the bound on the error: which share of the sizes of the terms, of the result, or of 1
    wide    whether products are computed in float64
    """
    size = {
        "terms": lambda product: a.abs().double() @ b.abs().double(),
        "result": lambda product: product.abs(),
        "1": lambda product: product.new_ones(()),
    }[of]
    found = []
    for name in WAYS[:-1]:
        left, right = (_read(name, x) if which in reads else x for x, which in ((a, "a"), (b, "b")))
        product = left.double() @ right.double() if wide else (left @ right).double()
        if bool(((c.double() - product).abs() <= share * size(product)).all()):
            found.append(name)
    return [*found, WAYS[-1]]


def _which(a: Tensor, b: Tensor, c: Tensor, **how: Any) -> str:
    return _fitting(a, b, c, **how)[0]


def _another_fits(evidence: Evidence) -> bool:
    """Every wrong answer is a way that fits, too."""
    return all(o.reply.output in _fitting(*o.case.args)[:-1] for o in evidence.outcomes if o.wrong)


def _by_size(evidence: Evidence) -> bool:
    """Every answer, right or wrong, is what thresholds on the size of the error give: in one way to measure it, no larger error
    has an earlier name."""

    def sizes(a: Tensor, b: Tensor, c: Tensor) -> tuple[float, ...]:
        product, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        error = (c.double() - product).abs()
        found = (
            (error / terms).max(),
            (error / product.abs()).max(),
            error.max(),
            error.mean(),
            error.max() / c.abs().max(),
        )
        return tuple(float(x) if x == x else math.inf for x in found)

    answers = [o.reply.output for o in evidence.outcomes]
    if not set(answers) <= set(WAYS):
        return False
    named = [WAYS.index(answer) for answer in answers]
    measured = zip(*(sizes(*o.case.args) for o in evidence.outcomes), strict=True)
    return any([*by] == sorted(by) for by in ([i for _, i in sorted(zip(m, named, strict=True))] for m in measured))


def _tf32_rounded(evidence: Evidence) -> bool:
    """tf32 is never recognized, and at most float16, which rounds to as many bits, is mistaken for it."""
    passed = any("tf32" in case.tags for case in evidence.passed)
    return not passed and all({"tf32", "fp16"} & case.tags for case in evidence.failed)


PRECISION = FunctionExercise(
    id="matmul.precision",
    function="which",
    cases=_precision_cases,
    expected=_which,
    misconceptions=(
        Misconception("not-all-elements", when=only("one-element")),
        Misconception("several-fit", when=_another_fits),
        *(Misconception("one-operand", gives=partial(_which, reads=reads)) for reads in "ab"),
        Misconception("tf32-is-cut", when=_tf32_rounded),
        *(Misconception("bitwise", gives=partial(_which, share=0.0, wide=wide)) for wide in (True, False)),
        *(Misconception("absolute-error", gives=partial(_which, share=share, of="1")) for share in _SHARES),
        *(Misconception("relative-error", gives=partial(_which, share=share, of="result")) for share in _SHARES),
        Misconception("size-alone", when=_by_size),
    ),
)


# -------------------------------------------------------------------------------------------------------- matmul.order
_SMS, _L2_BYTES = 16, 15 << 10


def _order_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for tiles_m, tiles_n, K, GROUP_M, BLOCK, dtype in (
        (1, 1, 16, 1, 16, "float32"),
        (2, 3, 16, 2, 16, "float32"),
        (4, 2, 32, 2, 16, "bfloat16"),
        (5, 2, 16, 2, 16, "float16"),
        (4, 1, 16, 3, 16, "float32"),
        (1, 5, 16, 2, 16, "float32"),
        (3, 4, 16, 8, 16, "float32"),
        (4, 3, 32, 3, 32, "float32"),
        (8, 16, 32, 4, 16, "float16"),
        (8, 16, 32, 2, 16, "float16"),
    ):
        tags = "short-group" if tiles_m % GROUP_M else ""
        note = f"{tiles_m} x {tiles_n} tiles of {BLOCK}, GROUP_M {GROUP_M}"
        a, b = make.pair(BLOCK * tiles_m, BLOCK * tiles_n, K, dtype)
        cases.append(_case(a, b, GROUP_M, BLOCK, tags=tags, note=note))
    a, b = make.pair(32, 32, 16, "float32")
    cases.append(_case(make.stained(a), b, 2, 16, tags="special", note="2 x 2 tiles of 16, GROUP_M 2, a with a NaN"))
    return cases


def _tiles_read(a: Tensor, b: Tensor, GROUP_M: int, BLOCK: int) -> int:
    return 2 * a.numel() * b.shape[1] // BLOCK * a.element_size()


def _c_bytes(a: Tensor, b: Tensor, *_: int) -> int:
    return a.shape[0] * b.shape[1] * a.element_size()


_OTHER_GROUPS = (
    "{read:.0f} KiB come from memory, and groups of GROUP_M = 2 rows of tiles cannot do with less than 80: the tiles are computed in "
    "groups of another size. GROUP_M is the caller's choice, who knows the L2; where does your kernel use it?"
)


def _order_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """64 KiB are what groups of 4 x 4 tiles read, 142 what rows of 16 do; a fifth more is somebody's own order. 80 KiB are what
    groups of 2 rows read, and no order in such groups reads much less."""
    a, b, GROUP_M, _ = case.args
    if a.shape[0] * b.shape[1] < 128 * 256:  # what little the others read fits into the L2, in any order
        return None
    read, enough = sum(launch.dram_read_bytes for launch in launches), 64 << 10
    loaded = sum(launch.load_bytes for launch in launches)
    tiles = _tiles_read(*case.args)
    if loaded < 0.95 * tiles:
        return (
            "tile-size",
            f"{loaded:,} bytes are loaded, where tiles of BLOCK = 16 load {tiles:,}: larger tiles help in any order. What does "
            "the order alone do?",
        )
    if GROUP_M == 2:
        return None if read >= 0.85 * (80 << 10) else ("group-size", _OTHER_GROUPS.format(read=read / 1024))
    if read <= 1.2 * enough:
        return None
    return (
        "order",
        f"{read / 1024:.0f} KiB come from memory where {enough // 1024} are enough ({_SMS} programs at a time, an L2 of "
        f"{_L2_BYTES // 1024} KiB, modelled). Which tiles do the first {_SMS} programs compute, and how many strips of a and "
        "of b do they need together?",
    )


ORDER = KernelExercise(
    id="matmul.order",
    function="matmul_ordered",
    cases=_order_cases,
    returns=("c",),
    reference=lambda a, b, GROUP_M, BLOCK: a @ b,
    # Rows of a and of b begin, and rows of c, beyond 2^31 elements.
    huge=lambda: (far(5 << 20, 1024), far(1024, 5 << 20), 8, 128),
    traffic=Traffic(reads=_tiles_read, writes=_c_bytes, memory=_c_bytes),
    caches=(_SMS, _L2_BYTES),
    launch_rule=_order_rule,
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("short-group", when=only("short-group")),
        Misconception("lost-tiles", when=lambda evidence: evidence.kind == "nan"),
    ),
)


# ------------------------------------------------------------------------------------------------------ matmul.split_k
def _split_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)

    def case(M: int, N: int, K: int, SPLIT_K: int, dtype: str, sums: bool = False) -> Case:
        blocks = cdiv(K, 32)
        tags = "uneven" if blocks % SPLIT_K else ""
        tags += " empty" if cdiv(blocks, SPLIT_K) * (SPLIT_K - 1) >= blocks else ""
        tags += " large-sums" if sums else ""
        a, b = make.factors(M, N, K, dtype) if sums else make.pair(M, N, K, dtype)
        return _case(a, b, SPLIT_K, tags=tags, note=f"SPLIT_K {SPLIT_K}" + ", large sums" * sums)

    a, b = make.pair(3, 20, 70, "float32")
    return [
        case(16, 32, 64, 1, "float32"),
        case(4, 32, 128, 2, "float32"),
        case(3, 50, 100, 3, "float32"),
        case(17, 32, 96, 2, "bfloat16"),
        case(2, 7, 160, 4, "float16"),
        case(1, 33, 40, 4, "float32"),
        case(1, 1, 31, 3, "float32"),
        case(1, 32, 225, 4, "float32"),
        case(1, 32, 480, 8, "float32"),
        case(16, 32, 512, 8, "float16"),
        case(5, 33, 128, 2, "float16", sums=True),
        case(5, 16, 200, 3, "bfloat16", sums=True),
        case(1, 20, 128, 2, "float32", sums=True),
        _case(make.stained(a), b, 2, tags="uneven special", note="SPLIT_K 2, a with a NaN"),
    ]


def _split_reads(a: Tensor, b: Tensor, SPLIT_K: int) -> int:
    M, N = len(a), b.shape[1]
    return cdiv(N, 32) * nbytes(a) + cdiv(M, 16) * nbytes(b) + 4 * SPLIT_K * M * N


def _split_writes(a: Tensor, b: Tensor, SPLIT_K: int) -> int:
    """The float32 sums of all shares, and c: what is stored, and what has to be allocated."""
    return 4 * SPLIT_K * len(a) * b.shape[1] + _c_bytes(a, b)


def _split_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    a, _, SPLIT_K = case.args
    blocks = cdiv(a.shape[1], 32)
    enough = 2 * cdiv(blocks, SPLIT_K) + 1  # two loads for each block of K and a store
    if launches and launches[0].longest > enough:
        return (
            "not-shared",
            f"one program makes {launches[0].longest} loads and stores, where {enough} do if SPLIT_K programs share a "
            "tile's K. Which part of K is share 1's?",
        )
    if not any(launch.atomic_bytes for launch in launches):
        stored, parts = sum(launch.store_bytes for launch in launches), 4 * SPLIT_K * len(a) * case.args[1].shape[1]
        if blocks % SPLIT_K or stored >= parts:
            return None
        return (
            "not-shared",
            f"{stored:,} bytes are stored, where {SPLIT_K} parts of each tile are {parts:,}: fewer than SPLIT_K programs share "
            "its K",
        )
    return (
        "atomics",
        "atomics add in whatever order the programs arrive, and another order rounds otherwise: two runs do not agree. Where "
        "can each share leave its sums so that somebody adds them in a fixed order?",
    )


def _share(a: Tensor, SPLIT_K: int) -> int:
    return cdiv(cdiv(a.shape[1], 32), SPLIT_K) * 32


def _overlapping(a: Tensor, b: Tensor, each: int) -> Tensor:
    """Shares of `each` elements of K, of which the last block is whole all the same."""
    firsts = range(0, a.shape[1], each)
    return sum(a[:, k : k + cdiv(each, 32) * 32] @ b[k : k + cdiv(each, 32) * 32] for k in firsts)


SPLIT_K = KernelExercise(
    id="matmul.split_k",
    function="matmul_split_k",
    cases=_split_cases,
    returns=("c",),
    reference=lambda a, b, SPLIT_K: a @ b,
    huge=lambda: [  # rows of b begin beyond 2^32 elements; rows of a do
        (far(1, 5120), far(5120, 1 << 20), 4),
        (far(32, 1 << 28), far(1 << 28, 32), 65_535),
    ],
    traffic=Traffic(reads=_split_reads, writes=_split_writes, launches=2, memory=_split_writes),
    launch_rule=_split_rule,
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("low-precision-parts", when=ideas.rounded_sums),
        Misconception(
            "one-share-only", gives=lambda a, b, SPLIT_K: a[:, : _share(a, SPLIT_K)] @ b[: _share(a, SPLIT_K)]
        ),
        Misconception(
            "one-share-only/2",
            gives=lambda a, b, SPLIT_K: (
                a[:, (SPLIT_K - 1) * _share(a, SPLIT_K) :] @ b[(SPLIT_K - 1) * _share(a, SPLIT_K) :]
            ),
        ),
        Misconception("mean-of-shares", gives=lambda a, b, SPLIT_K: a @ b / SPLIT_K),
        Misconception("everyone-does-it-all", gives=lambda a, b, SPLIT_K: SPLIT_K * (a @ b)),
        Misconception(
            "shares-overlap",
            gives=lambda a, b, SPLIT_K: sum(
                a[:, s * _share(a, SPLIT_K) :] @ b[s * _share(a, SPLIT_K) :] for s in range(SPLIT_K)
            ),
        ),
        Misconception("shares-overlap/2", gives=lambda a, b, SPLIT_K: _overlapping(a, b, cdiv(a.shape[1], SPLIT_K))),
        Misconception(
            "tail-dropped",
            gives=lambda a, b, SPLIT_K: (
                a[:, : cdiv(a.shape[1], 32) // SPLIT_K * SPLIT_K * 32]
                @ b[: cdiv(a.shape[1], 32) // SPLIT_K * SPLIT_K * 32]
            ),
        ),
        Misconception("empty-share", when=only("empty", kind="nan")),
    ),
)


# ----------------------------------------------------------------------------------------------------- matmul.epilogue
def _epilogue_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, dtype, tags in (
        (32, 32, 32, "float32", ""),
        (32, 64, 64, "float32", ""),
        (5, 41, 70, "float32", "ragged"),
        (33, 32, 16, "bfloat16", "ragged"),
        (1, 7, 100, "float16", "ragged"),
        (1, 1, 1, "float32", "ragged"),
        (64, 33, 40, "float16", "ragged"),
    ):
        x, weight, bias = (
            make.coarse(M, K, dtype=dtype),
            make.coarse(N, K, dtype=dtype, bits=5),
            make.coarse(N, dtype=dtype, bits=5),
        )
        if (
            M * N == 1
        ):  # a row of its own: of GELU's left tail, where 1 + erf cancels, only a digit or two would be right
            x, weight, bias = x.abs(), weight.abs(), bias.abs()
        # About the root of K, by a power of two, which leaves the sums exact.
        cases.append(_case(x, weight / 2 ** (K.bit_length() // 2), bias, tags=f"once {tags}"))
    x, weight, bias = make.coarse(16, 32), make.coarse(48, 32, bits=5), make.coarse(48, bits=5)
    cases.append(_case(x, weight, bias * 30, tags="large", note="bias around 30"))
    for dtype in ("float16", "bfloat16"):
        x, weight, bias = make.normal(7, 40, scale=0.1), make.normal(33, 40, scale=0.1), make.normal(33, scale=0.1)
        x, weight, bias = (t.to(getattr(make.torch, dtype)) for t in (x, weight, bias - 3.7))
        cases.append(_case(x, weight, bias, tags="tiny", note="all sums around -3.7"))
    for dtype, factor in (("float16", 16), ("bfloat16", 64), ("float32", 64)):
        # 16 x 32, 64 times, and a little: 32,768 and something, of which the bias takes 32,768 away. Elsewhere the bias is
        # beyond float16.
        x, weight = make.torch.full((7, 65), float(factor)), make.torch.full((33, 65), 32.0)
        x[:, -1], weight[:, -1] = make.integers(-4, 5, 7) / 4, make.integers(-32, 33, 33) / 16
        bias = make.torch.full((33,), -2048.0 * factor)
        x, weight, bias = (t.to(getattr(make.torch, dtype)) for t in (x, weight, bias))
        cases.append(_case(x, weight, bias, tags="large-sums", note="large sums, of which the bias leaves little"))
    x, weight, bias = make.coarse(40, 32), make.coarse(64, 32, bits=5) / 4, make.coarse(64, bits=5)
    x[:32], bias[:32] = 0, 0
    cases.append(_case(x, weight, bias, tags="zeros", note="tiles of zeros in x and in bias"))
    x, weight = make.integers(-2, 3, 4, 40).float(), make.integers(-2, 3, 20, 40).float()
    cases.append(_case(make.stained(x), weight, make.coarse(20, bits=5), tags="special", note="x with a NaN"))
    return cases


def _linear_reads(x: Tensor, weight: Tensor, bias: Tensor) -> int:
    return cdiv(len(weight), 32) * nbytes(x) + cdiv(len(x), 32) * nbytes(weight, bias)


def _linear_bytes(x: Tensor, weight: Tensor, *_: Tensor) -> int:
    return len(x) * len(weight) * x.element_size()


_gelu = ideas.reference("gelu.gelu")


def _after(finish: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """What comes of the product z and the bias by another epilogue."""
    return lambda x, weight, bias: finish(x @ weight.mT, bias)


def _with_bias_by_rows(beyond: str, z: Tensor, bias: Tensor) -> Tensor:
    """Row m gets element m of the bias; beyond its N elements zeros, or the first ones again."""
    import torch

    rows = torch.arange(len(z))
    bias = bias[rows % len(bias)]
    return _gelu(z + (bias if beyond == "from the first on" else bias.where(rows < z.shape[1], 0 * bias))[:, None])


EPILOGUE = KernelExercise(
    id="matmul.epilogue",
    function="linear_gelu",
    cases=_epilogue_cases,
    reference=ideas.in_float32(_after(lambda z, bias: _gelu(z + bias))),
    huge=lambda: (far(1 << 20, 5120), far(1 << 20, 5120), far(1 << 20)),
    traffic=Traffic(reads=_linear_reads, writes=_linear_bytes, memory=_linear_bytes),
    launch_rule=ideas.in_registers("the tile is complete in registers when the loop ends: who needs it in memory?"),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception(
            "short-constant", gives=_after(lambda z, bias: 0.5 * (z + bias) * (1 + (0.7071 * (z + bias)).erf()))
        ),
        Misconception("low-precision-sums", when=ideas.rounded_sums),
        Misconception("low-precision-gelu", when=ideas.only("tiny")),
        Misconception("no-bias", gives=_after(lambda z, bias: _gelu(z))),
        Misconception("bias-after", gives=_after(lambda z, bias: _gelu(z) + bias)),
        *(
            Misconception("bias-by-rows", gives=_after(partial(_with_bias_by_rows, beyond)))
            for beyond in ("zeros", "from the first on")
        ),
        Misconception("bias-once", gives=_after(lambda z, bias: z * 0.5 * (1 + ((z + bias) / 2**0.5).erf()))),
        Misconception("bias-once", gives=_after(lambda z, bias: (z + bias) * 0.5 * (1 + (z / 2**0.5).erf()))),
        Misconception("no-activation", gives=_after(lambda z, bias: z + bias)),
        Misconception("tanh-form", gives=_after(lambda z, bias: _gelu(z + bias, "tanh"))),
        Misconception("quick-gelu", gives=_after(lambda z, bias: (z + bias) * (1.702 * (z + bias)).sigmoid())),
        Misconception("relu", gives=_after(lambda z, bias: (z + bias).relu())),
        Misconception("erf-argument", gives=_after(lambda z, bias: 0.5 * (z + bias) * (1 + (z + bias).erf()))),
        Misconception(
            "erf-argument/2", gives=_after(lambda z, bias: 0.5 * (z + bias) * (1 + (2**0.5 * (z + bias)).erf()))
        ),
        Misconception("silu", gives=_after(lambda z, bias: (z + bias) * (z + bias).sigmoid())),
        Misconception("half-missing", gives=_after(lambda z, bias: 2 * _gelu(z + bias))),
        Misconception(
            "bias-each-step", gives=lambda x, weight, bias: _gelu(x @ weight.mT + cdiv(x.shape[1], 32) * bias)
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------- matmul.int4
def _int4_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, GROUP, dtype, tags in (
        (16, 32, 32, 32, "float32", ""),
        (16, 32, 64, 64, "float32", ""),
        (3, 45, 96, 32, "float32", "groups ragged"),
        (1, 32, 128, 64, "float16", "groups"),
        (17, 33, 96, 32, "bfloat16", "groups ragged"),
        (1, 1, 128, 128, "float32", "ragged"),
    ):
        x = make.coarse(M, K, dtype=dtype)
        packed = make.integers(0, 256, K // 2, N, dtype="uint8")
        # Powers of two, which cost no bits: all sums are exact in float32.
        scales = 2.0 ** -make.integers(1, 4, K // GROUP, N).to(x.dtype)
        cases.append(_case(x, packed, scales, tags=f"once {tags}", note=f"groups of {GROUP}"))
    x, packed = make.coarse(2, 64), make.integers(0, 256, 32, 7, dtype="uint8")
    scales = 2.0 ** -make.integers(27, 31, 2, 7).float()  # less than float16 holds
    scales[0, 1:] *= -1
    scales[1, :3] = 0
    cases.append(_case(x, packed, scales, tags="groups", note="groups of 32, scales tiny, 0 or negative"))
    for dtype in ("float16", "bfloat16", "float32"):
        # Whole numbers again: one group's sums leave float16, those of the next take nearly all of them away.
        x, _ = make.factors(5, 1, 256, dtype)
        packed = make.integers(0, 256, 128, 20, dtype="uint8")
        packed[:2], packed[2:64] = 0, 255
        packed[64:] = packed[:64]
        packed[-1] -= 1
        scales = make.torch.full((2, 20), 4).to(x.dtype)
        cases.append(_case(x, packed, scales, tags="groups large-sums", note="groups of 128, large sums"))
    x, packed = make.coarse(16, 96), make.integers(0, 256, 48, 32, dtype="uint8")
    scales = 2.0 ** -make.integers(1, 4, 3, 32).float()
    scales[1], packed[32:] = 0, 0x88
    cases.append(_case(x, packed, scales, tags="groups zeros", note="groups of 32, one of scale 0, one of weights 0"))
    x, packed = make.stained(make.integers(-2, 3, 4, 64).float()), make.integers(0, 256, 32, 20, dtype="uint8")
    scales = make.torch.ones(2, 20)
    cases.append(_case(x, packed, scales, tags="groups special", note="groups of 32, x with a NaN"))
    return cases


def _int4_reads(x: Tensor, packed: Tensor, scales: Tensor) -> int:
    return cdiv(packed.shape[1], 32) * nbytes(x) + cdiv(len(x), 16) * nbytes(packed, scales)


def _int4_bytes(x: Tensor, packed: Tensor, scales: Tensor) -> int:
    return len(x) * packed.shape[1] * x.element_size()


def _int4_gives(
    low: int = 0,
    offset: int = 8,
    scale: str = "own",
    signed: bool = False,
    block: bool = False,
    shift: int = 4,
    wraps: bool = False,
) -> Callable[..., Tensor]:
    """x times the weight as somebody reads it: which nibble comes first, what is taken away, whose scale."""

    def gives(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        import torch

        K, group = x.shape[1], x.shape[1] // scales.shape[0]
        nibbles = [packed & 15, packed >> 4 << 4 >> shift]
        pair = [(n.int() ^ 8) - 8 if signed else n.int() - offset for n in (nibbles[low], nibbles[1 - low])]
        if wraps:
            pair = [n % 256 for n in pair]
        if block:  # all low ones of a group, then all high ones
            parts = [part.reshape(-1, group // 2, part.shape[1]) for part in pair]
            q = torch.cat(parts, 1).reshape(K, -1)
        else:
            q = torch.stack(pair, 1).reshape(K, -1)
        factor = {
            "own": scales,
            "first": scales[:1].expand_as(scales),
            "none": torch.ones_like(scales),
        }[scale]
        return x @ (q.to(x.dtype) * factor.to(x.dtype).repeat_interleave(group, 0))

    return gives


def _group_by_group(x: Tensor, packed: Tensor, scales: Tensor, fault: str) -> Tensor:
    """The groups one after the other, with a fault in what each does to the sum so far."""
    parts = len(scales)
    groups = zip(x.chunk(parts, 1), packed.chunk(parts), scales.split(1), strict=True)
    acc = x.new_zeros(len(x), packed.shape[1])
    for columns, rows, scale in groups:
        part = _int4_gives()(columns, rows, scale)
        acc = part if fault == "last" else acc * scale + part
    return acc


INT4 = KernelExercise(
    id="matmul.int4",
    function="int4_linear",
    cases=_int4_cases,
    reference=ideas.in_float32(_int4_gives()),
    huge=lambda: (far(1 << 20, 10_240), far(5120, 1 << 20, dtype="uint8"), far(80, 1 << 20)),
    traffic=Traffic(reads=_int4_reads, writes=_int4_bytes, memory=_int4_bytes),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("low-precision-sums", when=ideas.rounded_sums),
        Misconception("halves-exchanged", gives=_int4_gives(low=1)),
        Misconception("no-offset", gives=_int4_gives(offset=0)),
        Misconception("twos-complement", gives=_int4_gives(signed=True)),
        Misconception("no-scale", gives=_int4_gives(scale="none")),
        Misconception("first-scale", gives=_int4_gives(scale="first")),
        Misconception("rows-of-halves", gives=_int4_gives(block=True)),
        Misconception("last-group-wins", gives=lambda *args: _group_by_group(*args, fault="last")),
        Misconception("scaled-again", gives=lambda *args: _group_by_group(*args, fault="scaled")),
        Misconception("not-shifted", gives=_int4_gives(shift=0)),
        Misconception("wrapped", gives=_int4_gives(wraps=True)),
    ),
)

EXERCISES = [TILES, STRIDES, PRECISION, ORDER, SPLIT_K, EPILOGUE, INT4]
