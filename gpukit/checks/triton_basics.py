"""The exercises of notebook 05: cases, bounds, and what each wrong idea computes.

Sums are made of whole numbers, which float32 adds without rounding: no order of adding is punished.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, padding
from gpukit.grading.inputs import Inputs, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs(Inputs):
    def whole(self, *shape: int, low: int = -9, high: int = 10, dtype: str = "float32") -> Tensor:
        return self.integers(low, high, *shape, dtype=dtype)

    def eighths(self, n: int) -> Tensor:
        """`rows` in steps of 1/8: sums that float32 adds without rounding, and float16 does not."""
        return self.rows(n, "float64").mul_(8).round_().div_(8).float()

    def drowned(self, n: int, dtype: str) -> Tensor:
        """Rows [2, 3 n] of 1024, small numbers, -1024: in 16 bits the small numbers are lost beside the large ones."""
        x = self.whole(2, 3 * n, dtype=dtype) / 8
        x[:, :n], x[:, 2 * n :] = 1024.0, -1024.0
        return x


def _blocked(x: Tensor, *rest: Any, note: str = "", tags: str = "") -> Case:
    """A case whose last argument is the block size along the last dimension of x."""
    n, block = x.shape[-1], rest[-1]
    facts = [tags, "blocks long" if n > block else "", "partial" if n % block else ""]
    return tensor_case(x, *rest, note=listed(note, f"BLOCK {block}"), tags=" ".join(facts))


# ----------------------------------------------------------------------------------------------- what launches may do
def _no_idle_program(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    n, block = case.args[0].numel(), case.args[-1]
    programs, needed = sum(launch.programs for launch in launches), cdiv(n, block)
    if programs > needed:
        return (
            "idle-programs",
            f"{programs:,} programs run where {needed:,} would be enough: what do the others do?",
        )
    return None


def _shared(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """Each block has a program of its own."""
    blocks, programs = cdiv(case.args[0].shape[-1], case.args[-1]), max(launch.programs for launch in launches)
    if programs >= blocks:
        return None
    few = "one program does" if programs == 1 else f"{programs} programs do"
    return "one-program", f"{few} the work of {blocks} blocks: how many SMs of a GPU are idle meanwhile?"


def _not_alone(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    return _shared(case, launches) if max(launch.programs for launch in launches) == 1 else None


# --------------------------------------------------------------------------------------------- what a wrong idea gives
def _nan_from(y: Tensor, end: int) -> Tensor:
    """y, of which only the first `end` elements of the last dimension were stored."""
    y = y.clone()
    y[..., max(end, 0) :] = float("nan")
    return y


def _nan_if(rest: int, y: Tensor) -> Tensor:
    """Lanes past the end hold NaN where a load has no `other`, and are added up like all others."""
    return y * float("nan") if rest else y


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _unlike(name: str, wrong: Tensor, right: Tensor) -> dict[str, Tensor]:
    """What a wrong idea gives for one of several results. Raises ValueError where it gives the right one: then it does
    not explain why another result is wrong."""
    if wrong.equal(right):
        raise ValueError(f"the idea gives the right {name}")
    return {name: wrong}


def _only_16_bits(*tags: str) -> Callable[[Evidence], bool]:
    """As `only`, and 16-bit numbers among what failed: float32 sums that alone are wrong have another fault."""
    return lambda evidence: (
        only(*tags)(evidence) and any(case.tags & {"float16", "bfloat16"} for case in evidence.failed)
    )


def _special(x: Tensor, *rest: Any, note: str = "") -> Case:
    """A case with infinities and NaN among the numbers of x."""
    return _blocked(x, *rest, note=listed(note, "with infinities and NaN"), tags="special")


_ONE_BLOCK = Misconception("one-block", when=lambda evidence: evidence.kind == "nan" and evidence.tag("blocks"))


# ------------------------------------------------------------------------------------------ triton_basics.add_constant
def _constant_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, c: float, block: int, note: str = "") -> Case:
        return _blocked(x, c, block, note=listed(note, f"c {c:g}"))

    normal = make.normal
    return [
        case(normal(1), 2.5, 16),
        case(normal(64), -3.0, 64),
        case(normal(781), 0.5, 1024),
        case(normal(1000), -1.25, 256),
        case(normal(1024), 10.0, 128),
        case(normal(1025), -0.75, 1024),
        case(normal(63), 0.0, 64),
        case(normal(333, dtype="float16"), 1.5, 64),
        case(normal(65, dtype="bfloat16"), 1e-3, 64),
        case(make.rows(65).view(-1), 0.1, 64, "small and large"),
        case(normal(200), 1 / 3, 64),  # has more digits than 16 bits hold
        # Of 1000.3 float16 makes 1000.5.
        case(normal(130, dtype="float16") - 1000, 1000.3, 32, "around -1000"),
        _special(make.special(27).view(-1), 1.5, 32),
    ]


def _one_apart(x: Tensor, c: float, BLOCK: int) -> Tensor:
    return _nan_from(x + c, BLOCK + cdiv(len(x), BLOCK) - 1)


ADD_CONSTANT = KernelExercise(
    id="triton_basics.add_constant",
    function="add_constant",
    cases=_constant_cases,
    reference=lambda x, c, BLOCK: x + c,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("program-stride", gives=_one_apart),
        _ONE_BLOCK,
        Misconception("no-constant", gives=lambda x, c, BLOCK: x.clone()),
        Misconception("sign", gives=lambda x, c, BLOCK: x - c),
        ideas.NOT_FINITE,
    ),
)


# -------------------------------------------------------------------------------------------- triton_basics.vector_add
def _vector_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 16), (64, 64), (781, 1024), (1000, 256), (1024, 128), (1025, 256), (130, 64))
    pairs = [(make.normal(n), make.normal(n), block) for n, block in sizes]
    pairs += [
        (x := make.normal(n, dtype=dtype), make.like(x), 128) for n, dtype in ((300, "float16"), (127, "bfloat16"))
    ]
    pairs += [(make.rows(65).view(-1), make.rows(65).flip(0).reshape(-1), 64)]
    special = make.special(27).view(-1)
    return [
        *(_blocked(x, y, block, note="y the same") for x, y, block in pairs),
        _special(special, make.like(special), 32, note="y finite"),
    ]


VECTOR_ADD = KernelExercise(
    id="triton_basics.vector_add",
    function="vector_add",
    returns=("z",),
    cases=_vector_cases,
    reference=lambda x, y, BLOCK: x + y,
    traffic=Traffic(reads=2, writes=1),
    launch_rule=_no_idle_program,
    misconceptions=(
        Misconception("grid-floor", gives=lambda x, y, BLOCK: _nan_from(x + y, len(x) // BLOCK * BLOCK)),
        _ONE_BLOCK,
        Misconception("same-input", gives=lambda x, y, BLOCK: x + x),
        ideas.NOT_FINITE,
    ),
)


# --------------------------------------------------------------------------------------------- triton_basics.outer_add
def _outer_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 1, 16, 64), (5, 300, 16, 64), (32, 128, 16, 64), (33, 70, 16, 32), (100, 3, 32, 16), (50, 129, 8, 128))
    pairs = [(make.normal(M), make.normal(N), *blocks) for M, N, *blocks in sizes]
    pairs += [(x := make.normal(17, dtype="float16"), make.like(x, 63), 16, 64)]
    pairs += [(x := make.normal(15, dtype="bfloat16"), make.like(x, 65), 16, 64)]
    pairs += [(make.rows(5).view(-1), make.rows(3).view(-1), 16, 16)]
    cases = []
    for x, y, block_m, block_n in pairs:
        M, N = len(x), len(y)
        tags = f"{'blocks' if M > block_m or N > block_n else ''} {'partial' if M % block_m or N % block_n else ''}"
        note = f"y [{N}], tiles of {block_m} x {block_n}"
        cases.append(tensor_case(x, y, block_m, block_n, note=note, tags=tags))
    special = "y [5], tiles of 16 x 16, with infinities and NaN"
    return [*cases, tensor_case(make.special(7).view(-1), make.normal(5), 16, 16, note=special, tags="special partial")]


def _outer(x: Tensor, y: Tensor, *_: int) -> Tensor:
    return x[:, None] + y[None, :]


def _axes_swapped(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    """The grid's first axis counts tiles along M, and the kernel takes it for the one along N."""
    rows, columns = cdiv(len(y), BLOCK_N) * BLOCK_M, cdiv(len(x), BLOCK_M) * BLOCK_N
    z = _nan_from(_outer(x, y), columns)
    z[rows:] = float("nan")
    return z


def _first_columns(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    return _nan_from(_outer(x, y), BLOCK_N)


def _first_rows(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    z = _outer(x, y)
    z[BLOCK_M:] = float("nan")
    return z


OUTER_ADD = KernelExercise(
    id="triton_basics.outer_add",
    function="outer_add",
    returns=("z",),
    cases=_outer_cases,
    contiguous=True,
    reference=_outer,
    # Many rows and columns; and rows so long that those of one tile do not fit into 2^31 elements, as long as a grid lets them be.
    huge=lambda: [(far(65536), far(81920), 16, 64), (far(64), far(65535 * 1024), 64, 1024)],
    traffic=Traffic(
        reads=lambda x, y, *tiles: cdiv(len(y), tiles[1]) * nbytes(x) + cdiv(len(x), tiles[0]) * nbytes(y),
        writes=lambda x, y, *tiles: len(y) * nbytes(x),
    ),
    misconceptions=(
        Misconception("grid-axes", gives=_axes_swapped),
        Misconception("one-block", gives=_first_columns),
        Misconception("one-block/2", gives=_first_rows),
        ideas.NOT_FINITE,
    ),
)


# ---------------------------------------------------------------------------------------------- triton_basics.mul_relu
def _mul_relu(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).relu()


def _mul_relu_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, dy: Tensor, tags: str = "", note: str = "") -> Case:
        return tensor_case(x, make.like(x, x.shape[1]), dy, note=note, tags=tags)

    zeros = normal(20, 40)
    zeros[::2, ::3] = 0.0
    hard = make.rows(65)
    (_, transposed), (_, gaps), (_, sparse) = make.layouts(hard)
    of_sum, of_row, dy_transposed, dy_gaps, dy_sparse, _ = (dy for _, dy in make.upstream(hard))
    large = [make.signs(*shape) * 2.0**100 for shape in ((20, 33), (33,), (20, 33))]
    return [
        case(normal(1, 1), normal(1, 1)),
        case(normal(5, 70), normal(5, 70)),
        tensor_case(*large[:2], normal(20, 33), note="products beyond float32", tags="beyond"),
        tensor_case(normal(20, 33), *large[1:], note="gradients beyond float32", tags="beyond"),
        case(zeros, normal(20, 40), "zero", "every sixth element 0"),
        case(normal(32, 128, dtype="float16"), normal(32, 128, dtype="float16")),
        case(normal(70, 33).t(), normal(33, 70), "strided", "transposed"),
        case(normal(33, 70), normal(70, 33).t(), "strided-dy", "dy transposed"),
        case(normal(40, 100), normal(1, 100).expand(40, 100), "strided-dy", "dy expanded: stride 0"),
        case(normal(130, 20, dtype="bfloat16"), normal(130, 20, dtype="bfloat16")),
        case(hard, of_sum, "strided-dy", "dy of a sum: stride 0"),
        case(transposed, dy_gaps, "strided", "transposed, dy with gaps"),
        case(gaps, dy_sparse, "strided", "with gaps, dy every second element"),
        case(sparse, dy_transposed, "strided", "every second element, dy transposed"),
        case(hard[:1].expand(17, 65), of_row[:1].expand(17, 65), "strided", "one row expanded, dy too"),
    ]


def _chosen(mask: Tensor, x: Tensor) -> Tensor:
    """x where the mask says so, else 0; a product with the mask would be NaN where x is infinite."""
    return x.where(mask, 0.0)


def _dx(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    return lambda x, w, dy: _unlike("dx", formula(x, w, dy), _chosen(x * w > 0, dy * w))


def _y(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    return lambda x, w, dy: _unlike("y", formula(x, w), _mul_relu(x, w))


MUL_RELU = KernelExercise(
    id="triton_basics.mul_relu",
    function="mul_relu",
    cases=_mul_relu_cases,
    contiguous=True,
    reference=_mul_relu,
    huge=lambda: [
        (far(65536, 81920, transposed=not way), far(81920), far(65536, 81920, transposed=way)) for way in (False, True)
    ],
    gradients=1,
    traffic=Traffic(  # w once for each row of tiles, in both passes
        reads=lambda x, w, dy: 3 * nbytes(x) + 2 * cdiv(len(x), 16) * nbytes(w),
        writes=lambda x, w, dy: 2 * nbytes(x),
        launches=2,
        saved=lambda x, w, dy: nbytes(x, w),
    ),
    misconceptions=(
        Misconception("no-relu", gives=_y(lambda x, w: x * w)),
        Misconception("relu-first", gives=_y(lambda x, w: x.relu() * w)),
        Misconception("weight-axis", gives=_y(lambda x, w: (x * w[: len(x), None]).relu())),
        Misconception("contiguous-assumed", gives=_y(lambda x, w: _mul_relu(ideas.as_if_contiguous(x), w))),
        Misconception("no-mask-in-backward", gives=_dx(lambda x, w, dy: dy * w)),
        Misconception("sign-of-x", gives=_dx(lambda x, w, dy: _chosen(x > 0, dy * w))),
        Misconception("sign-of-dy", gives=_dx(lambda x, w, dy: (dy * w).relu())),
        Misconception("no-weight", gives=_dx(lambda x, w, dy: _chosen(x * w > 0, dy))),
        Misconception("times-zero", when=only("beyond", kind="nan")),
        Misconception("gradient-at-zero", gives=_dx(lambda x, w, dy: _chosen(x * w >= 0, dy * w))),
        Misconception(
            "gradient-strides", gives=_dx(lambda x, w, dy: _chosen(x * w > 0, ideas.as_if_contiguous(dy) * w))
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- triton_basics.row_sum
def _row_sum_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    whole = make.whole
    drowned = "1024, small numbers, -1024"
    return [
        _blocked(whole(1, 1), 16),
        _blocked(whole(3, 64), 64),
        _blocked(whole(4, 512), 64),
        _blocked(whole(3, 50), 64),
        _blocked(whole(7, 781), 128),
        _blocked(whole(5, 1025), 256),
        _blocked(whole(2, 1000, dtype="bfloat16"), 128, tags="once"),
        _blocked(make.drowned(64, "float16"), 64, tags="cancel", note=drowned),
        _blocked(make.drowned(50, "bfloat16"), 32, tags="cancel", note=drowned),
        _blocked(make.eighths(63), 64, tags="large", note="small and large"),
        _blocked(make.eighths(1025), 512, tags="large", note="small and large"),
        _special(make.special(70), 32),
    ]


def _last_block(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x.split(BLOCK_N, -1)[-1])


def _padding_of_one(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x) + padding(x.shape[-1], BLOCK_N)


def _rows_a_block_apart(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x.as_strided(x.shape, (BLOCK_N, 1)))


ROW_SUM = KernelExercise(
    id="triton_basics.row_sum",
    function="row_sum",
    cases=_row_sum_cases,
    reference=lambda x, BLOCK_N: x.sum(-1),
    huge=lambda: (far(81920, 65536), 8192),
    traffic=Traffic(reads=1, writes=lambda x, BLOCK_N: nbytes(x[:, 0])),
    misconceptions=(
        Misconception("one-block", gives=lambda x, BLOCK_N: _sum(x[:, :BLOCK_N])),
        Misconception("accumulator", gives=_last_block),
        Misconception("tail-block", gives=lambda x, BLOCK_N: _sum(x[:, : x.shape[-1] // BLOCK_N * BLOCK_N])),
        Misconception(
            "tail-mask",
            gives=_padding_of_one,
            fill=lambda evidence: {"lanes": padding(evidence.case.args[0].shape[-1], evidence.case.args[1])},
        ),
        Misconception("tail-mask/2", gives=lambda x, BLOCK_N: _nan_if(x.shape[-1] % BLOCK_N, _sum(x))),
        Misconception("row-stride", gives=_rows_a_block_apart),
        Misconception("program-id", gives=lambda x, BLOCK_N: _sum(x[:1]).expand(len(x))),
        Misconception("low-precision-sum", when=_only_16_bits("cancel", "bfloat16", "large")),
        ideas.NOT_FINITE,
    ),
)


# --------------------------------------------------------------------------------------------------- triton_basics.dot
def _dot_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, block: int, dtype: str = "float32", **values: int) -> Case:
        x, y = (make.whole(n, dtype=dtype, **values) for _ in range(2))
        return _blocked(x, y, block, note="y the same", tags="large" if values else "")

    # Odd numbers above 4096 are none of float16's, and stand in turns in x and in y.
    x, y = make.whole(100), 2 * make.whole(100, low=2100, high=2400) + 1
    x[::2], y[::2] = y[::2].clone(), x[::2].clone()
    return [
        case(1, 16),
        case(64, 64),
        case(50, 64),
        case(256, 256, "float16", low=20, high=30),
        case(512, 64),
        case(781, 128),
        case(1025, 256),
        case(2000, 128, "bfloat16"),
        case(127, 64, low=-300, high=300),
        case(100, 32, "float16", low=250, high=301),  # products that float16 rounds, or that leave it
        case(90, 64, "bfloat16", low=-255, high=256),
        _blocked(x, y, 32, note="y the same", tags="large"),
        _blocked(make.torch.zeros(33), make.whole(33), 32, note="y the same, x zeros"),
        _special(make.special(90)[2], make.whole(90), 32, note="y finite"),
        _special(make.special(90)[1], make.torch.zeros(90), 32, note="y zeros"),
    ]


def _dot(x: Tensor, y: Tensor, BLOCK: int) -> Tensor:
    return (x.double() * y.double()).sum().float().reshape(1)


def _product_of_sums(x: Tensor, y: Tensor, BLOCK: int) -> Tensor:
    sums = [_sum(a) * _sum(b) for a, b in zip(x.split(BLOCK), y.split(BLOCK), strict=True)]
    return sum(sums).reshape(1)


def _rounded_products(evidence: Evidence) -> bool:
    """Products that were rounded to 16 bits, and then added up without any loss."""
    import torch

    def told(outcome: Outcome) -> bool:
        x, y, _ = outcome.case.args
        guess = (x * y).double().sum().reshape(1)
        return x.dtype.itemsize == 2 and torch.allclose(outcome.wrong.actual.double(), guess, rtol=1e-5, atol=0)

    return evidence.kind == "values" and all(told(outcome) for outcome in evidence.outcomes if outcome.wrong)


DOT = KernelExercise(
    id="triton_basics.dot",
    function="dot",
    returns=("z",),
    cases=_dot_cases,
    reference=_dot,
    # A launch that adds up what the programs left, or an atomic add for each product, is as good.
    traffic=Traffic(
        reads=lambda x, y, BLOCK: nbytes(x, y) + 4 * cdiv(len(x), BLOCK),
        writes=lambda x, y, BLOCK: 4 * (len(x) + 1),
        launches=2,
    ),
    launch_rule=_shared,
    misconceptions=(
        Misconception(
            "not-zeroed",  # what should be NaN is so by accident
            when=lambda evidence: evidence.kind == "nan" and all("special" in case.tags for case in evidence.passed),
        ),
        Misconception("sum-then-multiply", gives=_product_of_sums),
        Misconception(
            "tail-mask",
            gives=lambda x, y, BLOCK: (_sum(x * y) + padding(len(x), BLOCK)).reshape(1),
            fill=lambda evidence: {"lanes": padding(len(evidence.case.args[0]), evidence.case.args[2])},
        ),
        Misconception("tail-mask/2", gives=lambda x, y, BLOCK: _nan_if(len(x) % BLOCK, _dot(x, y, BLOCK))),
        Misconception("low-precision-sum/2", when=_rounded_products),
        Misconception("low-precision-sum", when=_only_16_bits("float16", "bfloat16", "large")),
        ideas.NOT_FINITE,
    ),
)


# -------------------------------------------------------------------------------------------- triton_basics.prefix_sum
def _prefix_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    whole = make.whole
    steps = make.torch.zeros(100, 16, dtype=make.torch.float16)
    steps[0], steps[1:, 3] = 256.0, 1.0
    stuck = make.torch.ones(2, 70, dtype=make.torch.float16)
    stuck[:, 0] = 2048.0
    return [
        _blocked(whole(1, 1), 16),
        _blocked(whole(3, 64), 64),
        _blocked(whole(3, 50), 64),
        _blocked(whole(3, 512), 64),
        _blocked(whole(4, 781), 128),
        _blocked(whole(2, 1025), 256),
        _blocked(whole(5, 100, low=-255, high=256, dtype="bfloat16"), 32, tags="once"),
        _blocked(whole(3, 100, low=-800, high=801, dtype="float16"), 32, tags="once"),
        _blocked(steps.view(1, -1), 16, tags="large", note="4096 in the first block, then 1 a block"),
        _blocked(stuck, 128, tags="large", note="2048, then 1 each"),
        _blocked(make.eighths(65), 64, tags="large", note="small and large"),
        _special(make.special(70), 32),
        _special(make.special(50), 64),
    ]


def _prefix(x: Tensor, BLOCK_N: int) -> Tensor:
    return x.cumsum(-1)


def _with_carry(carry: Callable[[list[Tensor], int], Any]) -> Callable[[Tensor, int], Tensor]:
    """Prefix sums of each block plus what `carry(blocks, k)` says came before block k."""

    def gives(x: Tensor, BLOCK_N: int) -> Tensor:
        import torch

        blocks = list(x.split(BLOCK_N, -1))
        return torch.cat([block.cumsum(-1) + carry(blocks, k) for k, block in enumerate(blocks)], -1)

    return gives


def _total(blocks: list[Tensor]) -> Any:
    return sum(block.sum(-1, keepdim=True) for block in blocks)


def _largest_so_far(blocks: list[Tensor], k: int) -> Any:
    carry = 0.0
    for block in blocks[:k]:
        carry = (block.cumsum(-1) + carry).amax(-1, keepdim=True)
    return carry


def _lane_by_lane(blocks: list[Tensor], k: int) -> Any:
    return sum(block.cumsum(-1)[..., : blocks[k].shape[-1]] for block in blocks[:k])


PREFIX_SUM = KernelExercise(
    id="triton_basics.prefix_sum",
    function="prefix_sum",
    cases=_prefix_cases,
    reference=_prefix,
    huge=lambda: (far(81920, 65536), 8192),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("no-carry", gives=_with_carry(lambda blocks, k: 0.0)),
        Misconception("carry-one-block", gives=_with_carry(lambda blocks, k: _total(blocks[k - 1 : k]) if k else 0.0)),
        Misconception("carry-too-early", gives=_with_carry(lambda blocks, k: _total(blocks[: k + 1]))),
        Misconception("carry-last-element", gives=_with_carry(lambda blocks, k: sum(b[..., -1:] for b in blocks[:k]))),
        Misconception("carry-of-lanes", gives=_with_carry(_lane_by_lane)),
        Misconception("carry-maximum", gives=_with_carry(_largest_so_far)),
        Misconception("exclusive", gives=lambda x, BLOCK_N: x.cumsum(-1) - x),
        Misconception("tail-block", when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial")),
        Misconception("low-precision-sum", when=_only_16_bits("large", "bfloat16", "float16")),
        ideas.NOT_FINITE,
    ),
)


# --------------------------------------------------------------------------------------------- triton_basics.histogram
def _histogram_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, num_bins: int, block: int, low: int = 0, high: int = 0, tags: str = "", note: str = "") -> Case:
        x = make.whole(n, low=low, high=high or num_bins, dtype="int32")
        x[: min(n, 3)] = num_bins // 2  # there is always a bin with several in it
        if "outside" in tags:
            x[3:7] = make.torch.tensor([-1, num_bins, -(1 << 31), (1 << 31) - 1])
        return _blocked(x, num_bins, block, note=f"{num_bins} bins" + note, tags=tags)

    return [
        case(1, 4, 16),
        case(64, 8, 64),
        case(50, 10, 64),
        case(512, 16, 128),
        case(781, 7, 256),
        case(1000, 100, 128),
        case(300, 5, 128, low=-3, high=9, tags="outside", note=", values from -3 to 8"),
        case(2000, 3, 512),
        case(130, 1, 64, low=-1, high=2, tags="outside", note=", values from -1 to 1"),
        case(63, 9, 64, low=-(1 << 31), high=1 << 31, tags="outside", note=", any numbers"),
        case(257, 7, 256, low=6, high=7, note=", all of them 6"),
        case(120, 4000, 128),
    ]


def _histogram(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    import torch

    inside = x[(x >= 0) & (x < num_bins)].long()
    return torch.bincount(inside, minlength=num_bins).int()


def _present(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    """A bin counts once for each block that has it, however often."""
    return sum(_histogram(block, num_bins, BLOCK).clamp_max(1) for block in x.split(BLOCK))


def _padding_in_bin_0(share: int) -> Callable[[Tensor, int, int], Tensor]:
    """Of the lanes past the end, one in `share` counts."""

    def gives(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
        counts = _histogram(x, num_bins, BLOCK)
        counts[0] += padding(len(x), BLOCK) // share
        return counts

    return gives


def _adds_values(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    import torch

    return _histogram(x, num_bins, BLOCK) * torch.arange(num_bins, dtype=torch.int32)


HISTOGRAM = KernelExercise(
    id="triton_basics.histogram",
    function="histogram",
    returns=("counts",),
    cases=_histogram_cases,
    reference=_histogram,
    # Atomic adds: one for each element, or for each bin of each block.
    traffic=Traffic(reads=1, writes=lambda x, bins, BLOCK: max(nbytes(x), 4 * bins * cdiv(len(x), BLOCK)) + 4 * bins),
    launch_rule=_shared,
    misconceptions=(
        Misconception("lost-updates", gives=_present),
        *(  # without `other`, every second lane holds 0 (_outside in gpukit/simulator/interpreter/memory_ops.py)
            Misconception(
                name,
                gives=_padding_in_bin_0(share),
                fill=lambda evidence, share=share: {
                    "lanes": padding(len(evidence.case.args[0]), evidence.case.args[2]) // share
                },
            )
            for name, share in (("tail-mask", 1), ("tail-mask/2", 2))
        ),
        Misconception("adds-values", gives=_adds_values),
        Misconception(
            "one-block", gives=lambda x, num_bins, BLOCK: _histogram(x[:BLOCK], num_bins, BLOCK) * cdiv(len(x), BLOCK)
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- triton_basics.dropout
_dropout = ideas.reference("triton_basics.dropout")


def _dropout_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, p: float, dy: Tensor | None = None, seed: int = -1, tags: str = "", note: str = "") -> Case:
        seed = rng.randrange(1, 1 << 31) if seed < 0 else seed
        blocks = "blocks" if x.numel() > 256 else ""
        dy = make.like(x) if dy is None else dy
        return tensor_case(
            x, p, seed, dy, note=listed("" if "tie" in tags else f"p {p:g}", note), tags=f"{tags} {blocks}"
        )

    normal = make.normal
    hard = make.rows(23)
    (_, of_sum), _, (_, transposed), (_, gaps), *_ = make.upstream(hard)
    special = normal(300)
    special[::7], special[1::7], special[2::7] = float("inf"), -float("inf"), float("nan")
    seed = rng.randrange(1, 1 << 31)
    drawn = _true_numbers(seed)(make.torch.arange(300), 256).sort().values
    alike = drawn[1:][drawn[1:].half() == drawn[:-1].half()]  # numbers that 16 bits do not tell from the one below
    alike = float(alike[len(alike) // 2])
    return [
        case(normal(200), 0.25),
        case(normal(1), 0.5),
        case(normal(1000), 0.5),
        case(normal(1024), 0.125),
        case(normal(1025), 0.8),
        case(normal(7, 90), 0.3, tags="leading"),
        case(normal(300), 0.0),
        case(normal(300), 1.0, tags="dropped"),
        case(normal(700, dtype="float16"), 0.5, tags="once"),
        case(normal(500, dtype="bfloat16"), 0.3, tags="once"),  # 1 / 0.7 has more digits than 16 bits hold
        case(hard, 0.5, of_sum, tags="strided-dy leading", note="dy of a sum: stride 0"),
        case(hard, 0.25, transposed, seed=0, tags="strided-dy leading", note="dy transposed, seed 0"),
        case(
            hard.view(3, 4, 23),
            0.9375,
            gaps.view(3, 4, 23),
            seed=(1 << 40) + 3,
            tags="strided-dy leading",
            note="a large seed",
        ),
        case(special, 0.5, tags="special", note="with infinities and NaN"),
        *(
            case(normal(300, dtype=dtype), alike, seed=seed, tags=f"tie{more}", note="the number of one element is p")
            for dtype, more in (("float32", ""), ("float16", " close"), ("bfloat16", " close"))
        ),
    ]


def _dropped(x: Tensor, kept: Callable[[Tensor, int], Tensor], p: float, scale: float) -> Tensor:
    """x times `scale` where the numbers of `kept(indices, 256)` are at least p, counted through memory."""
    import torch

    numbers = kept(torch.arange(x.numel()), 256).view(x.shape)
    return torch.where(numbers >= p, x * scale, torch.zeros_like(x))


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _numbers(per_block: Callable[[Any, int, Tensor, int], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What dropout gives if the random numbers of each element come from elsewhere."""

    def gives(x: Tensor, p: float, seed: int, dy: Tensor) -> dict[str, Tensor]:
        from gpukit.reference.triton_basics import rand

        wrong = _dropped(x, lambda i, block: per_block(rand, seed, i, block), p, _scale(p))
        return _unlike("y", wrong, _dropout(x, p, seed))

    return gives


def _seed_and_block(rand: Any, seed: int, i: Tensor, block: int) -> Tensor:
    import torch

    return torch.cat([rand(seed + int(part[0]) // block, part % block) for part in i.split(block)])


def _seed_and_element(rand: Any, seed: int, i: Tensor, block: int) -> Tensor:
    import torch

    return torch.cat([rand(seed + int(part[0]) // block, part) for part in i.split(block)])


def _true_numbers(seed: int) -> Callable[[Tensor, int], Tensor]:
    from gpukit.reference.triton_basics import rand

    return lambda i, block: rand(seed, i)


def _complement(x: Tensor, p: float, seed: int) -> Tensor:
    import torch

    return torch.where(_dropout(torch.ones_like(x), p, seed) == 0, x * _scale(p), torch.zeros_like(x))


def _times_mask(x: Tensor, p: float, seed: int, dy: Tensor) -> dict[str, Tensor]:
    """A product with 0, which is NaN for an infinity or NaN: in x, or as 1 / (1 - p) where p is 1."""
    kept = _true_numbers(seed)(_places(x), 256).view(x.shape) >= p
    return _unlike("y", x * kept * (1 / (1 - p) if p < 1 else float("inf")), _dropout(x, p, seed))


def _places(x: Tensor) -> Tensor:
    import torch

    return torch.arange(x.numel())


DROPOUT = KernelExercise(
    id="triton_basics.dropout",
    function="dropout",
    cases=_dropout_cases,
    reference=_dropout,
    gradients=1,
    traffic=Traffic(  # a dy that is not contiguous is copied first
        reads=lambda x, p, seed, dy: nbytes(x, dy) + (0 if dy.is_contiguous() else nbytes(dy)),
        writes=lambda x, p, seed, dy: nbytes(x, dy) + (0 if dy.is_contiguous() else nbytes(dy)),
        launches=2,
        saved=0,
    ),
    misconceptions=(
        Misconception("same-numbers", gives=_numbers(lambda rand, seed, i, block: rand(seed, i % block))),
        Misconception("one-number", gives=_numbers(lambda rand, seed, i, block: rand(seed, i // block))),
        Misconception("seed-per-program", gives=_numbers(_seed_and_block)),
        Misconception("seed-per-program/2", gives=_numbers(_seed_and_element)),
        Misconception(
            "inverted", gives=lambda x, p, seed, dy: _unlike("y", _complement(x, p, seed), _dropout(x, p, seed))
        ),
        Misconception(
            "not-scaled",
            gives=lambda x, p, seed, dy: _unlike("y", _dropped(x, _true_numbers(seed), p, 1.0), _dropout(x, p, seed)),
        ),
        Misconception(
            "scaled-by-p",
            gives=lambda x, p, seed, dy: {"y": _dropped(x, _true_numbers(seed), p, 1 / p if p else float("inf"))},
        ),
        Misconception("zero-times-infinity", gives=_times_mask),
        Misconception("strict", when=lambda evidence: evidence.tag("tie")),
        Misconception("rounded-numbers", when=only("close")),
        Misconception("gradient-undropped", gives=lambda x, p, seed, dy: {"dx": dy * 1.0}),
        Misconception(
            "gradient-undropped", gives=lambda x, p, seed, dy: {"dx": dy / (1 - p) if p < 1 else dy * float("inf")}
        ),
        Misconception(
            "unwritten-gradient",
            when=lambda evidence: evidence.output == "dx" and evidence.kind == "nan" and evidence.tag("blocks"),
        ),
        Misconception("new-numbers", when=lambda evidence: evidence.output == "dx" and _half_dropped(evidence)),
    ),
)


def _half_dropped(evidence: Evidence) -> bool:
    """The gradient has zeros, at other places than it should."""
    if evidence.kind != "values":
        return False
    yours, right = evidence.outputs == 0, evidence.expected == 0
    return bool(yours.any()) and bool((yours != right).any())


# ---------------------------------------------------------------------------------------- triton_basics.detective_slow
def _scale_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 1, 16), (3, 64, 64), (3, 50, 64), (5, 512, 128), (7, 781, 128), (2, 1025, 256), (4, 3000, 512))
    pairs = [(make.normal(M, N), make.normal(M), block) for M, N, block in sizes]
    pairs += [(x := make.normal(6, 129, dtype="float16"), make.like(x, 6), 128)]
    pairs += [(make.rows(31), make.normal(12), 32)]
    return [*(_blocked(x, s, block) for x, s, block in pairs), _special(make.special(40), make.normal(5), 16)]


def _scaled(x: Tensor, s: Tensor, BLOCK_N: int) -> Tensor:
    return x * s[:, None]


def _diagonal(x: Tensor, s: Tensor, BLOCK_N: int) -> Tensor:
    """Row m gets block m only."""
    import torch

    columns, rows = torch.arange(x.shape[1])[None, :], torch.arange(len(x))[:, None]
    return torch.where(columns // BLOCK_N == rows, _scaled(x, s, BLOCK_N), float("nan"))


DETECTIVE_SLOW = KernelExercise(
    id="triton_basics.detective_slow",
    function="scale_rows",
    cases=_scale_cases,
    reference=_scaled,
    huge=lambda: (far(81920, 65536), far(81920), 8192),
    traffic=Traffic(  # each program loads its number of s, one without a block too
        reads=lambda x, s, BLOCK_N: nbytes(x) + (cdiv(x.shape[1], BLOCK_N) + 1) * nbytes(s), writes=1
    ),
    misconceptions=(
        Misconception("grid-axes", gives=_diagonal),
        _ONE_BLOCK,
        ideas.NOT_FINITE,
    ),
)


# ---------------------------------------------------------------------------------------- triton_basics.detective_race
def _mean_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 16), (64, 64), (50, 64), (512, 64), (781, 128), (1025, 1024), (2000, 256))
    tensors = [(make.normal(n), block) for n, block in sizes]
    tensors += [(make.normal(65, dtype="float16"), 64), (make.rows(5).view(-1), 16)]
    return [*(_blocked(x, block) for x, block in tensors), _special(make.special(27).view(-1), 32)]


def _neighbour_mean(x: Tensor, BLOCK: int) -> Tensor:
    y = x.clone()
    y[:-1] = (x[:-1] + x[1:]) / 2
    return y


DETECTIVE_RACE = KernelExercise(
    id="triton_basics.detective_race",
    function="neighbour_mean",
    cases=_mean_cases,
    reference=_neighbour_mean,
    traffic=Traffic(reads=2, writes=1),
    launch_rule=_not_alone,
    misconceptions=(
        Misconception("fresh-memory", gives=lambda x, BLOCK: x * float("nan")),
        _ONE_BLOCK,
        ideas.NOT_FINITE,
    ),
)

EXERCISES = [
    ADD_CONSTANT,
    VECTOR_ADD,
    OUTER_ADD,
    MUL_RELU,
    ROW_SUM,
    DOT,
    PREFIX_SUM,
    HISTOGRAM,
    DROPOUT,
    DETECTIVE_SLOW,
    DETECTIVE_RACE,
]
