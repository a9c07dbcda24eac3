"""The exercises of notebook 08: cases, bounds, hints, and the wrong answers that each check must recognise.

Sums are made of whole numbers, which float32 adds without rounding: no order of adding is punished.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "08_triton_basics"


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

    def whole(self, *shape: int, low: int = -9, high: int = 10, dtype: str = "float32") -> Tensor:
        return self.torch.randint(low, high, shape, generator=self.generator).to(getattr(self.torch, dtype))


def _case(x: Tensor, *rest: Any, shown: str = "", tags: str = "") -> Case:
    dtype = str(x.dtype).removeprefix("torch.")
    return Case(
        f"x {list(x.shape)} {dtype}" + (f", {shown}" if shown else ""), (x, *rest), frozenset({dtype, *tags.split()})
    )


def _blocked(x: Tensor, *rest: Any, shown: str = "", tags: str = "") -> Case:
    """A case whose last argument is the block size along the last dimension of x."""
    n, block = x.shape[-1], rest[-1]
    facts = [tags, "blocks long" if n > block else "", "partial" if n % block else ""]
    return _case(x, *rest, shown=", ".join(filter(None, [shown, f"BLOCK {block}"])), tags=" ".join(facts))


def _cdiv(n: int, block: int) -> int:
    return -(-n // block)


# ----------------------------------------------------------------------------------------------- what launches may do
def _no_idle_program(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    n, block = case.args[0].numel(), case.args[-1]
    programs, needed = sum(launch.programs for launch in launches), _cdiv(n, block)
    if programs > needed:
        return (
            "idle-programs",
            f"{programs:,} programs run where {needed:,} have something to do: what do the others do?",
        )
    return None


def _shared_and_read_once(*tensors: int) -> Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None]:
    """The work is spread over programs, and the tensors at these positions of the arguments are read once."""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        blocks = _cdiv(case.args[0].shape[-1], case.args[-1])
        if blocks > 1 and max(launch.programs for launch in launches) == 1:
            text = f"one program does the work of {blocks} blocks: how many SMs of a GPU are idle meanwhile?"
            return "one-program", text
        return _read_once(*tensors)(case, launches)

    return rule


def _read_once(*tensors: int) -> Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None]:
    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        size = sum(case.args[i].numel() * case.args[i].element_size() for i in tensors)
        read = sum(launch.load_bytes for launch in launches)
        if size >= 1024 and read > 1.2 * size:  # what is carried between kernels, a number a block, is read as well
            return "traffic", f"{read:,} bytes are loaded where {size:,} are enough: which element is loaded twice?"
        return None

    return rule


# --------------------------------------------------------------------------------------------- what a wrong idea gives
def _nan_from(y: Tensor, end: int) -> Tensor:
    """y, of which only the first `end` elements of the last dimension were stored."""
    y = y.clone()
    y[..., max(end, 0) :] = float("nan")
    return y


def _as_if_contiguous(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).view(x.shape)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _unlike(name: str, wrong: Tensor, right: Tensor) -> dict[str, Tensor]:
    """What a wrong idea gives for one of several results. Raises ValueError where it gives the right one: then it does
    not explain why another result is wrong."""
    if wrong.equal(right):
        raise ValueError(f"the idea gives the right {name}")
    return {name: wrong}


_ONE_BLOCK = Misconception(
    "one-block",
    "the first block is right and the rest was never written, so every program wrote the same elements. "
    "What distinguishes program 1 from program 0?",
    when=lambda evidence: evidence.kind == "nan" and evidence.tag("blocks"),
)
_OUTSIDE = Misconception("out-of-bounds", "which lanes have an element, and which access was not told?")


# ------------------------------------------------------------------------------------------ triton_basics.add_constant
def _constant_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, c: float, block: int, dtype: str = "float32") -> Case:
        return _blocked(make.normal(n, dtype=dtype), c, block, shown=f"c {c:g}")

    return [
        case(1, 2.5, 16),
        case(64, -3.0, 64),
        case(781, 0.5, 1024),
        case(1000, -1.25, 256),
        case(1024, 10.0, 128),
        case(1025, -0.75, 1024),
        case(333, 1.5, 64, "float16"),
    ]


def _one_apart(x: Tensor, c: float, BLOCK: int) -> Tensor:
    return _nan_from(x + c, BLOCK + _cdiv(len(x), BLOCK) - 1)


_C_OFFS = "    # BEGIN SOLUTION\n    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
_C_LOAD = "    x = tl.load(x_ptr + offs, mask=offs < n)\n    tl.store(y_ptr + offs, x + c"
_C_STORE = "    tl.store(y_ptr + offs, x + c, mask=offs < n)\n"
_C_LAUNCH = "    add_constant_kernel[(triton.cdiv(n, BLOCK),)](x, y, c, n, BLOCK=BLOCK)\n"

ADD_CONSTANT = KernelExercise(
    id="triton_basics.add_constant",
    title="Add a constant",
    notebook=NOTEBOOK,
    function="add_constant",
    label=Label(1, 10, "program ids, offsets, masks, load and store"),
    hints=(
        "There are BLOCK lanes in a program. Which elements of x belong to the lanes of program 0, which to those of "
        "program 3? Write the numbers down for BLOCK = 4.",
        "An offset is the number of elements of all programs before this one plus the number of the lane. The last "
        "program may have lanes without an element: a mask keeps both accesses away from them.",
        "Three lines: the program's number times BLOCK plus a range of BLOCK lanes; the load from x at these offsets where "
        "they are below n; the store of the sum to y, at the same offsets, where they are below n.",
    ),
    cases=_constant_cases,
    reference=lambda x, c, BLOCK: x + c,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "program-stride",
            "neighbouring programs begin one element apart and do each other's work. "
            "How many elements does one program cover?",
            gives=_one_apart,
        ),
        _ONE_BLOCK,
        Misconception("no-constant", "this is x itself. Where does c come in?", gives=lambda x, c, BLOCK: x.clone()),
        Misconception(
            "sign", "the constant was taken away. What is x + c for a negative c?", gives=lambda x, c, BLOCK: x - c
        ),
        _OUTSIDE,
    ),
    wrong=(
        Variant(
            "ignores-the-program-id",
            ((_C_OFFS, _C_OFFS.replace("tl.program_id(0) * BLOCK + ", "")),),
            diagnosis="one-block",
        ),
        Variant(
            "one-element-a-program",
            ((_C_OFFS, _C_OFFS.replace("tl.program_id(0) * BLOCK", "tl.program_id(0)")),),
            diagnosis="program-stride",
        ),
        Variant("no-store-mask", ((_C_STORE, _C_STORE.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant("no-load-mask", ((_C_LOAD, _C_LOAD.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant("mask-too-wide", ((_C_STORE, _C_STORE.replace("offs < n", "offs <= n")),), diagnosis="out-of-bounds"),
        Variant("mask-of-the-block", ((_C_LOAD, _C_LOAD.replace("< n", "< BLOCK")),), diagnosis="out-of-bounds"),
        Variant("copies", ((_C_STORE, _C_STORE.replace("x + c", "x")),), diagnosis="no-constant"),
        Variant("subtracts", ((_C_STORE, _C_STORE.replace("x + c", "x - c")),), diagnosis="sign"),
        Variant("in-place", ((_C_LAUNCH, _C_LAUNCH.replace("(x, y, c", "(x, x, c")),), diagnosis="input-changed"),
        Variant("calls-torch", ((_C_LAUNCH, "    return x + c\n"),), diagnosis="not-your-kernel"),
        Variant(
            "loads-twice",
            ((_C_STORE, "    x = (x + tl.load(x_ptr + offs, mask=offs < n)) / 2\n" + _C_STORE),),
            diagnosis="traffic",
        ),
    ),
    right=(
        Variant(
            "moves-the-pointers",
            (
                (
                    _C_OFFS,
                    "    # BEGIN SOLUTION\n    first = tl.program_id(0) * BLOCK\n    offs = tl.arange(0, BLOCK)\n"
                    "    n -= first\n    x_ptr += first\n    y_ptr += first\n",
                ),
            ),
        ),
        Variant(
            "grid-stride-loop",
            (
                (
                    _C_OFFS + _C_LOAD + ", mask=offs < n)\n",
                    "    # BEGIN SOLUTION\n"
                    "    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):\n"
                    "        offs = first + tl.arange(0, BLOCK)\n"
                    "        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)\n"
                    "        tl.store(y_ptr + offs, c + x, mask=offs < n)\n",
                ),
                (_C_LAUNCH, _C_LAUNCH.replace("(triton.cdiv(n, BLOCK),)", "(2,)")),
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------- triton_basics.vector_add
def _vector_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 16), (64, 64), (781, 1024), (1000, 256), (1024, 128), (1025, 256), (130, 64))
    cases = [_blocked(make.normal(n), make.normal(n), block, shown="y the same") for n, block in sizes]
    return [
        *cases,
        _blocked(make.normal(300, dtype="float16"), make.normal(300, dtype="float16"), 128, shown="y the same"),
    ]


_V_GRID = "    grid = (triton.cdiv(n, BLOCK),)\n"
_V_LOAD = "    y = tl.load(y_ptr + offs, mask=offs < n)\n    tl.store(z_ptr"
_V_LINES = (
    "    x = tl.load(x_ptr + offs, mask=offs < n)\n    y = tl.load(y_ptr + offs, mask=offs < n)\n"
    "    tl.store(z_ptr + offs, x + y, mask=offs < n)\n"
)

VECTOR_ADD = KernelExercise(
    id="triton_basics.vector_add",
    title="Add two vectors, and choose the grid",
    notebook=NOTEBOOK,
    function="vector_add",
    label=Label(1, 10, "the launch grid: how many programs"),
    hints=(
        "n = 1000, BLOCK = 256. How many programs are needed so that every element has one? And for n = 1024?",
        "A grid is a tuple of numbers of programs. n divided by BLOCK, rounded down, loses the elements of a last, "
        "partly filled block; one more than that is one too many where the division has no remainder.",
        "The grid has one axis, whose length is n divided by BLOCK rounded up; Triton has a function for it. In the "
        "kernel, the lines of add_constant with a second load.",
    ),
    cases=_vector_cases,
    reference=lambda x, y, BLOCK: x + y,
    traffic=Traffic(reads=2, writes=1),
    launch_rule=_no_idle_program,
    misconceptions=(
        Misconception(
            "grid-floor",
            "the elements of the last block, the one that is not full, were never written. "
            "How often does BLOCK fit into n, and what is left over?",
            gives=lambda x, y, BLOCK: _nan_from(x + y, len(x) // BLOCK * BLOCK),
        ),
        _ONE_BLOCK,
        Misconception(
            "same-input", "this is x + x. Which pointer does the second load use?", gives=lambda x, y, BLOCK: x + x
        ),
        _OUTSIDE,
    ),
    wrong=(
        Variant("rounds-down", ((_V_GRID, "    grid = (n // BLOCK,)\n"),), diagnosis="grid-floor"),
        Variant("always-one-more", ((_V_GRID, "    grid = (n // BLOCK + 1,)\n"),), diagnosis="idle-programs"),
        Variant("a-program-an-element", ((_V_GRID, "    grid = (n,)\n"),), diagnosis="idle-programs"),
        Variant("one-program", ((_V_GRID, "    grid = (1,)\n"),), diagnosis="one-block"),
        Variant("grid-is-a-number", ((_V_GRID, "    grid = triton.cdiv(n, BLOCK)\n"),), diagnosis="exception"),
        Variant(
            "second-load-unmasked",
            ((_V_LOAD, _V_LOAD.replace(", mask=offs < n", "")),),
            diagnosis="out-of-bounds",
        ),
        Variant("x-plus-x", ((_V_LOAD, _V_LOAD.replace("y_ptr + offs", "x_ptr + offs")),), diagnosis="same-input"),
        Variant("calls-torch", ((_V_GRID, "    return x + y\n" + _V_GRID),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant("grid-from-the-launch", ((_V_GRID, '    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)\n'),)),
        Variant(
            "by-hand",
            (
                (_V_GRID, "    grid = ((n + BLOCK - 1) // BLOCK, 1, 1)\n"),
                (
                    _V_LINES,
                    "    every = tl.minimum(offs, n - 1)  # lanes past the end repeat the last element\n"
                    "    z = tl.load(y_ptr + every, mask=offs < n, other=0.0)\n"
                    "    z += tl.load(x_ptr + every, mask=offs < n, other=0.0)\n"
                    "    tl.store(z_ptr + offs, z, mask=offs < n)\n",
                ),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------- triton_basics.outer_add
def _outer_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 1, 16, 64), (5, 300, 16, 64), (32, 128, 16, 64), (33, 70, 16, 32), (100, 3, 32, 16), (50, 129, 8, 128))
    cases = []
    for M, N, block_m, block_n in sizes:
        tags = f"{'blocks' if M > block_m or N > block_n else ''} {'partial' if M % block_m or N % block_n else ''}"
        shown = f"y [{N}], tiles of {block_m} x {block_n}"
        cases.append(_case(make.normal(M), make.normal(N), block_m, block_n, shown=shown, tags=tags))
    return cases


def _outer(x: Tensor, y: Tensor, *_: int) -> Tensor:
    return x[:, None] + y[None, :]


def _axes_swapped(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    """The grid's first axis counts tiles along M, and the kernel takes it for the one along N."""
    rows, columns = _cdiv(len(y), BLOCK_N) * BLOCK_M, _cdiv(len(x), BLOCK_M) * BLOCK_N
    z = _nan_from(_outer(x, y), columns)
    z[rows:] = float("nan")
    return z


def _first_columns(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    return _nan_from(_outer(x, y), BLOCK_N)


def _first_rows(x: Tensor, y: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    z = _outer(x, y)
    z[BLOCK_M:] = float("nan")
    return z


_P_M = "    # BEGIN SOLUTION\n    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)\n"
_P_N = "    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)\n    x = tl.load(x_ptr + offs_m, mask=offs_m < M)\n"
_P_MASK = "    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]\n"
_P_STORE = "    tl.store(z_ptr + offs_m[:, None] * N + offs_n[None, :], x[:, None] + y[None, :], mask=mask)\n"

OUTER_ADD = KernelExercise(
    id="triton_basics.outer_add",
    title="Every sum of two vectors: tiles of a matrix",
    notebook=NOTEBOOK,
    function="outer_add",
    label=Label(2, 15, "blocks in two dimensions, broadcasting, two axes of programs"),
    hints=(
        "Element [m, n] of a contiguous matrix [M, N]: how many elements lie before it in memory? Now let m be a "
        "column of numbers and n a row of numbers.",
        "A range of BLOCK_M lanes becomes a column by indexing with [:, None], one of BLOCK_N lanes a row with "
        "[None, :]; between the two every operation broadcasts to a tile, offsets and masks included. A lane of the "
        "tile counts only if its row exists and its column exists.",
        "Rows: the first program id times BLOCK_M plus a range; columns: the second times BLOCK_N plus a range. Load x "
        "at the rows and y at the columns, each with its mask. The offset in z is the row times N plus the column, "
        "the mask is both masks together, the value the sum of a column and a row.",
    ),
    cases=_outer_cases,
    reference=_outer,
    misconceptions=(
        Misconception(
            "grid-axes",
            "some tiles have no owner: the grid counts tiles along M on its first axis, and the kernel takes that for "
            "columns. Which axis of the grid is which in the host code?",
            gives=_axes_swapped,
        ),
        Misconception(
            "one-block",
            "only the first tile of each row of tiles was written. Which program id moves along the columns?",
            gives=_first_columns,
        ),
        Misconception(
            "one-block",
            "only the topmost tiles were written. Which program id moves along the rows?",
            gives=_first_rows,
        ),
        Misconception("race", "two elements of z got one address. How many elements lie between two rows of z?"),
        Misconception("out-of-bounds", "a lane of a tile has two ways to lie outside: how many comparisons is that?"),
    ),
    wrong=(
        Variant(
            "axes-swapped",
            (
                (_P_M, _P_M.replace("program_id(0)", "program_id(1)")),
                (_P_N, _P_N.replace("program_id(1)", "program_id(0)")),
            ),
            diagnosis="grid-axes",
        ),
        Variant("ignores-columns", ((_P_N, _P_N.replace("tl.program_id(1) * BLOCK_N + ", "")),), diagnosis="one-block"),
        Variant("ignores-rows", ((_P_M, _P_M.replace("tl.program_id(0) * BLOCK_M + ", "")),), diagnosis="one-block"),
        Variant("rows-m-apart", ((_P_STORE, _P_STORE.replace("[:, None] * N", "[:, None] * M")),), diagnosis="race"),
        Variant("masks-rows-only", ((_P_MASK, "    mask = (offs_m < M)[:, None]\n"),), diagnosis="out-of-bounds"),
        Variant("masks-columns-only", ((_P_MASK, "    mask = (offs_n < N)[None, :]\n"),), diagnosis="out-of-bounds"),
        Variant("or-for-and", ((_P_MASK, _P_MASK.replace("&", "|")),), diagnosis="out-of-bounds"),
        Variant(
            "no-broadcast",
            ((_P_STORE, _P_STORE.replace("x[:, None] + y[None, :]", "x + y")),),
            diagnosis="exception",
        ),
        Variant(
            "calls-torch",
            (("    outer_add_kernel[grid](x,", "    return x[:, None] + y[None, :]\n    outer_add_kernel[grid](x,"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "shaped-from-the-start",
            (
                (_P_M, _P_M.replace("tl.arange(0, BLOCK_M)", "tl.arange(0, BLOCK_M)[:, None]")),
                (_P_N, _P_N.replace("tl.arange(0, BLOCK_N)", "tl.arange(0, BLOCK_N)[None, :]")),
                (_P_MASK, "    mask = (offs_m < M) & (offs_n < N)\n"),
                (_P_STORE, "    tl.store(z_ptr + offs_m * N + offs_n, x + y, mask=mask)\n"),
            ),
        ),
        Variant(
            "unravels-one-axis",
            (
                (
                    "    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))\n",
                    "    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)\n",
                ),
                (
                    _P_M,
                    "    # BEGIN SOLUTION\n    across = tl.cdiv(N, BLOCK_N)\n"
                    + _P_M.partition("\n")[2].replace("tl.program_id(0)", "(tl.program_id(0) // across)"),
                ),
                (_P_N, _P_N.replace("tl.program_id(1)", "(tl.program_id(0) % across)")),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------- triton_basics.mul_relu
def _mul_relu(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).relu()


def _mul_relu_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, dy: Tensor, tags: str = "", note: str = "") -> Case:
        return _case(x, normal(x.shape[1]).to(x.dtype), dy, shown=note, tags=tags)

    zeros = normal(20, 40)
    zeros[::2, ::3] = 0.0
    return [
        case(normal(1, 1), normal(1, 1)),
        case(normal(5, 70), normal(5, 70)),
        case(zeros, normal(20, 40), "zero", "every sixth element 0"),
        case(normal(32, 128, dtype="float16"), normal(32, 128, dtype="float16")),
        case(normal(70, 33).t(), normal(33, 70), "strided", "transposed"),
        case(normal(33, 70), normal(70, 33).t(), "strided-dy", "dy transposed"),
        case(normal(40, 100), normal(1, 100).expand(40, 100), "strided-dy", "dy expanded: stride 0"),
        case(normal(130, 20, dtype="bfloat16"), normal(130, 20, dtype="bfloat16")),
    ]


def _positive(x: Tensor, w: Tensor) -> Tensor:
    return x * w > 0


def _dx(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    return lambda x, w, dy: _unlike("dx", formula(x, w, dy), dy * w * _positive(x, w))


def _y(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    return lambda x, w, dy: _unlike("y", formula(x, w), _mul_relu(x, w))


_M_LOAD = "    # BEGIN SOLUTION\n    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask)\n    w = tl.load(w_ptr + offs_n, mask=offs_n < N)\n    tl.store(y_ptr"
_M_STORE = "    tl.store(y_ptr + offs_m * N + offs_n, tl.maximum(x * w, 0.0), mask=mask)\n"
_M_DY = "    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask)\n"
_M_DX = "    dx = tl.where(x * w > 0, dy * w, 0.0)\n"

MUL_RELU = KernelExercise(
    id="triton_basics.mul_relu",
    title="Multiply and ReLU in one kernel, and its gradient",
    notebook=NOTEBOOK,
    function="mul_relu",
    label=Label(3, 30, "strides, fusion, a gradient as a kernel of its own"),
    hints=(
        "y = max(x w, 0). If dy says how the loss changes with y, how does it change with x where the product is "
        "positive? And where it is negative?",
        "An element lies at row times the row's stride plus column times the column's stride; x and dy each have their "
        "own pair. w belongs to the columns. The gradient passes where the product was positive and is multiplied by w "
        "there; elsewhere it is 0. The product costs nothing to compute again.",
        "Forward: load x at its strides and w at the columns; store the larger of their product and 0, row times N "
        "plus column. Backward: the same two loads, dy at its strides; dx is dy times w where the product is greater "
        "than 0, and 0 elsewhere.",
    ),
    cases=_mul_relu_cases,
    reference=_mul_relu,
    gradients=1,
    traffic=Traffic(reads=3, writes=2, launches=2, slack=0.1),
    misconceptions=(
        Misconception(
            "no-relu",
            "negative products pass through. What does ReLU make of them?",
            gives=_y(lambda x, w: x * w),
        ),
        Misconception(
            "relu-first",
            "ReLU was applied to x and not to the product. What is the sign of x w if both are negative?",
            gives=_y(lambda x, w: x.relu() * w),
        ),
        Misconception(
            "weight-axis",
            "w was taken by row. Its length is N: which index does it belong to?",
            gives=_y(lambda x, w: (x * w[: len(x), None]).relu()),
        ),
        Misconception(
            "contiguous-assumed",
            "x was read as if its rows lay one after the other. What do its two strides say?",
            gives=_y(lambda x, w: _mul_relu(_as_if_contiguous(x), w)),
        ),
        Misconception(
            "no-mask-in-backward",
            "the gradient passes everywhere. What does a small change of x do to y where the product is negative?",
            gives=_dx(lambda x, w, dy: dy * w),
        ),
        Misconception(
            "sign-of-x",
            "the gradient passes where x is positive. Is that where the product is positive?",
            gives=_dx(lambda x, w, dy: dy * w * (x > 0)),
        ),
        Misconception(
            "sign-of-dy",
            "the backward pass applies ReLU to the gradient. Whose sign decides whether it passes?",
            gives=_dx(lambda x, w, dy: (dy * w).relu()),
        ),
        Misconception(
            "no-weight",
            "the gradient passes at the right places and is not multiplied by anything. How much does x w change when "
            "x changes by 1?",
            gives=_dx(lambda x, w, dy: dy * _positive(x, w)),
        ),
        Misconception(
            "gradient-at-zero",
            "it differs only where the product is exactly 0. Which side does the docstring choose?",
            gives=_dx(lambda x, w, dy: dy * w * (x * w >= 0)),
        ),
        Misconception(
            "gradient-strides",
            "dy was read as if it lay like dx. Which strides does it have?",
            gives=_dx(lambda x, w, dy: _as_if_contiguous(dy) * w * _positive(x, w)),
        ),
        Misconception("out-of-bounds", "each tensor has its own strides, and w its own mask: which one went astray?"),
    ),
    wrong=(
        Variant("no-relu", ((_M_STORE, _M_STORE.replace("tl.maximum(x * w, 0.0)", "x * w")),), diagnosis="no-relu"),
        Variant(
            "relu-of-x",
            ((_M_STORE, _M_STORE.replace("tl.maximum(x * w, 0.0)", "tl.maximum(x, 0.0) * w")),),
            diagnosis="relu-first",
        ),
        Variant(
            "w-by-row",
            ((_M_LOAD, _M_LOAD.replace("w_ptr + offs_n, mask=offs_n < N", "w_ptr + offs_m, mask=offs_m < M")),),
            diagnosis="weight-axis",
        ),
        Variant(
            "assumes-contiguous-x",
            ((_M_LOAD, _M_LOAD.replace("offs_m * stride_xm + offs_n * stride_xn", "offs_m * N + offs_n")),),
            diagnosis="contiguous-assumed",
        ),
        Variant("gradient-everywhere", ((_M_DX, "    dx = dy * w\n"),), diagnosis="no-mask-in-backward"),
        Variant("gradient-by-x", ((_M_DX, _M_DX.replace("x * w > 0", "x > 0")),), diagnosis="sign-of-x"),
        Variant("relu-of-the-gradient", ((_M_DX, "    dx = tl.maximum(dy * w, 0.0)\n"),), diagnosis="sign-of-dy"),
        Variant("gradient-without-w", ((_M_DX, _M_DX.replace("dy * w", "dy")),), diagnosis="no-weight"),
        Variant("passes-at-zero", ((_M_DX, _M_DX.replace("> 0", ">= 0")),), diagnosis="gradient-at-zero"),
        Variant(
            "assumes-contiguous-dy",
            ((_M_DY, _M_DY.replace("offs_m * stride_dym + offs_n * stride_dyn", "offs_m * N + offs_n")),),
            diagnosis="gradient-strides",
        ),
        Variant("no-store-mask", ((_M_STORE, _M_STORE.replace(", mask=mask", "")),), diagnosis="out-of-bounds"),
        Variant(
            "loads-x-again",
            ((_M_DX, "    x += tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask)\n" + _M_DX),),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (("    return MulReluFunction.apply(x, w)\n", "    return torch.relu(x * w)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "where-and-product",
            (
                (_M_STORE, _M_STORE.replace("tl.maximum(x * w, 0.0)", "tl.where(x * w > 0, x * w, 0.0)")),
                (_M_DX, "    dx = dy * w * (x * w > 0)\n"),
            ),
        ),
        Variant(
            "saves-the-result",
            (
                ("        ctx.save_for_backward(x, w)\n", ""),
                (
                    "*x.stride(), BLOCK_M=16, BLOCK_N=64)\n        return y\n",
                    "*x.stride(), BLOCK_M=16, BLOCK_N=64)\n        ctx.save_for_backward(y, w)\n        return y\n",
                ),
                (_M_DX, "    dx = tl.where(x > 0, dy * w, 0.0)  # x is y here: positive where the product was\n"),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- triton_basics.row_sum
def _row_sum_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    whole = make.whole
    cancel = whole(2, 192, dtype="float16") / 8
    cancel[:, :64], cancel[:, 128:] = 1024.0, -1024.0
    return [
        _blocked(whole(1, 1), 16),
        _blocked(whole(3, 64), 64),
        _blocked(whole(4, 512), 64),
        _blocked(whole(3, 50), 64),
        _blocked(whole(7, 781), 128),
        _blocked(whole(5, 1025), 256),
        _blocked(whole(2, 1000, dtype="bfloat16"), 128),
        _blocked(cancel, 64, tags="cancel", shown="1024, small numbers, -1024"),
    ]


def _last_block(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x.split(BLOCK_N, -1)[-1])


def _padding_of_one(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x) + -x.shape[-1] % BLOCK_N


def _rows_a_block_apart(x: Tensor, BLOCK_N: int) -> Tensor:
    return _sum(x.as_strided(x.shape, (BLOCK_N, 1)))


_R_ROW = "    row_ptr = x_ptr + pid_m.to(tl.int64) * N  # a matrix may have more elements than 32 bits can count\n"
_R_LOOP = "    for start in range(0, N, BLOCK_N):\n        x = tl.load(row_ptr + start + offs_n, mask=start + offs_n < N, other=0.0)\n"
_R_ADD = "        acc += x.to(tl.float32)\n"
_R_ACC = "    acc = tl.zeros((BLOCK_N,), tl.float32)\n"
_R_STORE = "    tl.store(y_ptr + pid_m, tl.sum(acc, axis=0))\n"

ROW_SUM = KernelExercise(
    id="triton_basics.row_sum",
    title="Sum of a row longer than a block",
    notebook=NOTEBOOK,
    function="row_sum",
    label=Label(2, 20, "loops, accumulators, reductions"),
    hints=(
        "A row of 1000 and a block of 128: how many times must the program load, and what is different the last time?",
        "A loop over starting points in steps of BLOCK_N; an accumulator that lives outside it, in float32. It may hold "
        "one number for each lane: then the lanes are added up once, after the loop. A lane past the end must add what "
        "changes no sum.",
        "The row begins at the program's number times N. Start with BLOCK_N zeros; for each start from 0 to N in steps "
        "of BLOCK_N, load at start plus lane, masked by N with 0 for the rest, and add it; store the sum over the lanes.",
    ),
    cases=_row_sum_cases,
    reference=lambda x, BLOCK_N: x.sum(-1),
    launch_rule=_read_once(0),
    misconceptions=(
        Misconception(
            "one-block",
            "only the first BLOCK_N elements of each row are in the sum. What comes after them?",
            gives=lambda x, BLOCK_N: _sum(x[:, :BLOCK_N]),
        ),
        Misconception(
            "accumulator",
            "only the last block of each row is in the sum. What happens to the earlier ones when the next arrives?",
            gives=_last_block,
        ),
        Misconception(
            "tail-block",
            "the last block is missing where it is not full. How many blocks does it take to cover N?",
            gives=lambda x, BLOCK_N: _sum(x[:, : x.shape[-1] // BLOCK_N * BLOCK_N]),
        ),
        Misconception(
            "tail-mask",
            lambda evidence: (
                f"so the {-evidence.case.args[0].shape[-1] % evidence.case.args[1]} lanes past the end of the row add "
                "something. Which value changes no sum?"
            ),
            gives=_padding_of_one,
        ),
        Misconception(
            "row-stride",
            "the rows are taken to begin BLOCK_N elements apart. How long is a row?",
            gives=_rows_a_block_apart,
        ),
        Misconception(
            "program-id",
            "every result is the sum of row 0. Which row does program 2 compute?",
            gives=lambda x, BLOCK_N: _sum(x[:1]).expand(len(x)),
        ),
        Misconception(
            "low-precision-sum",
            "in float16, 1024 plus 0.3 is 1024: the small numbers drown before the large ones cancel. In which dtype "
            "is the accumulator?",
            when=lambda evidence: evidence.tag("cancel"),
        ),
        Misconception("out-of-bounds", "which element of the row is the last one that the last block may load?"),
    ),
    wrong=(
        Variant(
            "one-block", ((_R_LOOP, _R_LOOP.replace("range(0, N, BLOCK_N)", "range(0, 1)")),), diagnosis="one-block"
        ),
        Variant("overwrites", ((_R_ADD, "        acc = x.to(tl.float32)\n"),), diagnosis="accumulator"),
        Variant(
            "whole-blocks-only",
            ((_R_LOOP, _R_LOOP.replace("range(0, N, BLOCK_N)", "range(0, N - BLOCK_N + 1, BLOCK_N)")),),
            diagnosis="tail-block",
        ),
        Variant("pads-with-one", ((_R_LOOP, _R_LOOP.replace("other=0.0", "other=1.0")),), diagnosis="tail-mask"),
        Variant(
            "no-mask",
            ((_R_LOOP, _R_LOOP.replace(", mask=start + offs_n < N, other=0.0", "")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "mask-of-the-lane",
            ((_R_LOOP, _R_LOOP.replace("mask=start + offs_n", "mask=offs_n")),),
            diagnosis="out-of-bounds",
        ),
        Variant("rows-a-block-apart", ((_R_ROW, _R_ROW.replace(") * N", ") * BLOCK_N")),), diagnosis="row-stride"),
        Variant("always-row-0", ((_R_ROW, "    row_ptr = x_ptr\n"),), diagnosis="program-id"),
        Variant(
            "sums-in-own-dtype",
            (
                (_R_ACC, _R_ACC.replace("tl.float32", "x_ptr.dtype.element_ty")),
                (_R_ADD, "        acc += x\n"),
            ),
            diagnosis="low-precision-sum",
        ),
        Variant(
            "reads-twice",
            (
                (
                    _R_ADD,
                    "        x += tl.load(row_ptr + start + offs_n, mask=start + offs_n < N, other=0.0)\n        acc += x.to(tl.float32) / 2\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (("    row_sum_kernel[(M,)](x,", "    return x.sum(-1)\n    row_sum_kernel[(M,)](x,"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "a-number-a-block",
            (
                (_R_ACC, "    total = 0.0\n"),
                (_R_ADD, "        total += tl.sum(x.to(tl.float32), axis=0)\n"),
                (_R_STORE, "    tl.store(y_ptr + pid_m, total)\n"),
            ),
        ),
        Variant(
            "walks-backwards-with-while",
            (
                (
                    _R_LOOP,
                    "    left = N\n    while left > 0:\n        offs = left - 1 - offs_n\n        left -= BLOCK_N\n"
                    "        x = tl.load(row_ptr + offs, mask=offs >= 0, other=0.0)\n",
                ),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- triton_basics.dot
def _dot_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, block: int, dtype: str = "float32", **values: int) -> Case:
        x, y = (make.whole(n, dtype=dtype, **values) for _ in range(2))
        return _blocked(x, y, block, shown="y the same", tags="large" if values else "")

    return [
        case(1, 16),
        case(64, 64),
        case(50, 64),
        case(256, 256, "float16", low=20, high=30),
        case(512, 64),
        case(781, 128),
        case(1025, 256),
        case(2000, 128, "bfloat16"),
    ]


def _dot(x: Tensor, y: Tensor, BLOCK: int) -> Tensor:
    return (x.double() * y.double()).sum().float().reshape(1)


def _product_of_sums(x: Tensor, y: Tensor, BLOCK: int) -> Tensor:
    sums = [_sum(a) * _sum(b) for a, b in zip(x.split(BLOCK), y.split(BLOCK), strict=True)]
    return sum(sums).reshape(1)


_D_LOAD = "    y = tl.load(y_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)\n    tl.atomic_add"
_D_X = "    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)\n    y = tl.load(y_ptr + offs, mask=offs < n, other=0.0)"
_D_ADD = "    tl.atomic_add(z_ptr, tl.sum(x * y, axis=0))\n"
_D_ZERO = "    z = torch.zeros(1, dtype=torch.float32, device=x.device)\n"
_D_LAUNCH = "    dot_kernel[(triton.cdiv(n, BLOCK),)](x, y, z, n, BLOCK=BLOCK)\n"

DOT = KernelExercise(
    id="triton_basics.dot",
    title="Dot product: many programs, one number",
    notebook=NOTEBOOK,
    function="dot",
    label=Label(3, 20, "atomics, and what memory holds before the first of them"),
    hints=(
        "Each program knows the sum of its own block. Ten programs want to add theirs to one number in memory, all at "
        "the same time. What can go wrong between loading it and storing it?",
        "An atomic add does the load, the addition and the store as one step that nothing can come between. It adds "
        "to what is there, so somebody must have put a 0 there first; fresh memory holds anything.",
        "Load both blocks with 0 past the end, in float32; add up their product over the lanes; add that number "
        "atomically to z. In the host code, make z a tensor of one float32 zero on the device of x.",
    ),
    cases=_dot_cases,
    reference=_dot,
    launch_rule=_shared_and_read_once(0, 1),
    misconceptions=(
        Misconception(
            "not-zeroed",
            "an atomic add adds to what is there, and fresh memory holds anything (here: NaN). What should it hold?",
            when=lambda evidence: evidence.kind == "nan" and not evidence.passed,
        ),
        Misconception(
            "sum-then-multiply",
            "the sums were multiplied, not the products summed. Which comes first in a dot product?",
            gives=_product_of_sums,
        ),
        Misconception(
            "tail-mask",
            lambda evidence: (
                f"so the {-len(evidence.case.args[0]) % evidence.case.args[2]} lanes past the end add something. "
                "Which value makes a product vanish?"
            ),
            gives=lambda x, y, BLOCK: (_sum(x * y) + -len(x) % BLOCK).reshape(1),
        ),
        Misconception(
            "low-precision-sum",
            "products of 16-bit numbers were added in 16 bits, where float16 counts in steps of 2 from 2048 on and "
            "ends at 65504. When must the numbers become float32?",
            when=lambda evidence: all(case.tags & {"float16", "bfloat16"} for case in evidence.failed),
        ),
        Misconception(
            "race",
            "between one program's load and its store, another program's sum is lost, or overwritten at once. "
            "Which operation does all of it in one step?",
        ),
        _OUTSIDE,
    ),
    wrong=(
        Variant("stores", ((_D_ADD, "    tl.store(z_ptr, tl.sum(x * y, axis=0))\n"),), diagnosis="race"),
        Variant(
            "load-add-store",
            ((_D_ADD, "    tl.store(z_ptr, tl.load(z_ptr) + tl.sum(x * y, axis=0))\n"),),
            diagnosis="race",
        ),
        Variant("fresh-memory", ((_D_ZERO, _D_ZERO.replace("zeros", "empty")),), diagnosis="not-zeroed"),
        Variant(
            "multiplies-sums",
            ((_D_ADD, "    tl.atomic_add(z_ptr, tl.sum(x, axis=0) * tl.sum(y, axis=0))\n"),),
            diagnosis="sum-then-multiply",
        ),
        Variant(
            "pads-with-one",
            ((_D_X, _D_X.replace("other=0.0", "other=1.0")),),
            diagnosis="tail-mask",
        ),
        Variant(
            "sums-in-own-dtype",
            (
                (_D_X, _D_X.replace(".to(tl.float32)", "", 1)),
                (_D_LOAD, _D_LOAD.replace(".to(tl.float32)", "")),
            ),
            diagnosis="low-precision-sum",
        ),
        Variant("no-mask", ((_D_X, _D_X.replace(", mask=offs < n, other=0.0", "", 1)),), diagnosis="out-of-bounds"),
        Variant(
            "one-program",
            ((_D_LAUNCH, "    BLOCK = triton.next_power_of_2(n)\n" + _D_LAUNCH),),
            diagnosis="one-program",
        ),
        Variant(
            "returns-a-scalar",
            ((_D_LAUNCH + "    return z\n", _D_LAUNCH + "    return z[0]\n"),),
            diagnosis="shape",
        ),
        Variant(
            "calls-torch",
            ((_D_LAUNCH, "    return torch.dot(x.float(), y.float()).view(1)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "partial-sums",
            source='''import torch
import triton
import triton.language as tl


@triton.jit
def partial_kernel(x_ptr, y_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=offs < n, other=0).to(tl.float32)
    tl.store(partial_ptr + pid, tl.sum(x * y))


@triton.jit
def combine_kernel(partial_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(z_ptr, tl.sum(tl.load(partial_ptr + offs, mask=offs < n, other=0.0)))


def dot(x, y, BLOCK=1024):
    """The same bits every time: no atomics, two launches."""
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    partial = torch.empty(blocks, dtype=torch.float32, device=x.device)
    z = torch.empty(1, dtype=torch.float32, device=x.device)
    partial_kernel[(blocks,)](x, y, partial, n, BLOCK=BLOCK)
    combine_kernel[(1,)](partial, z, blocks, BLOCK=triton.next_power_of_2(blocks))
    return z
''',
        ),
        Variant(
            "every-lane-atomic",
            (
                (_D_ADD, "    tl.atomic_add(z_ptr + tl.zeros_like(offs), x * y, mask=offs < n)\n"),
                (_D_ZERO, "    z = torch.empty(1, dtype=torch.float32, device=x.device).fill_(0)\n"),
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------- triton_basics.prefix_sum
def _prefix_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    whole = make.whole
    steps = make.torch.zeros(100, 16, dtype=make.torch.float16)
    steps[0], steps[1:, 3] = 256.0, 1.0
    return [
        _blocked(whole(1, 1), 16),
        _blocked(whole(3, 64), 64),
        _blocked(whole(3, 50), 64),
        _blocked(whole(3, 512), 64),
        _blocked(whole(4, 781), 128),
        _blocked(whole(2, 1025), 256),
        _blocked(whole(5, 100, dtype="bfloat16"), 32),
        _blocked(steps.view(1, -1), 16, tags="large", shown="4096 in the first block, then 1 a block"),
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


_S_ZERO = "    carry = tl.zeros((), tl.float32)  # the sum of everything before this block\n"
_S_LOOP = "    for start in range(0, N, BLOCK_N):\n        mask = start + offs_n < N\n"
_S_LOAD = "        x = tl.load(x_ptr + row + start + offs_n, mask=mask, other=0.0).to(tl.float32)\n"
_S_STORE = "        tl.store(y_ptr + row + start + offs_n, carry + tl.cumsum(x, axis=0), mask=mask)\n"
_S_CARRY = "        carry += tl.sum(x, axis=0)\n"

PREFIX_SUM = KernelExercise(
    id="triton_basics.prefix_sum",
    title="Prefix sum of a row longer than a block",
    notebook=NOTEBOOK,
    function="prefix_sum",
    label=Label(3, 20, "scans, and what is carried from block to block"),
    hints=(
        "Blocks of two: [1, 2], [3, 4]. tl.cumsum gives 1, 3 for the first and 3, 7 for the second. What must be added "
        "to the second, and where can you get it?",
        "Carry one number along the row: the sum of everything before the block. It is added to all running sums of "
        "the block, and grows by the block's own sum only after that.",
        "The carry begins at 0 in float32. For each start: load a block with 0 past the end, in float32; store the "
        "carry plus the running sums, masked; add the block's sum to the carry.",
    ),
    cases=_prefix_cases,
    reference=_prefix,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "no-carry",
            "each block starts again from 0. What does it need to know about the blocks before it?",
            gives=_with_carry(lambda blocks, k: 0.0),
        ),
        Misconception(
            "carry-one-block",
            "a block knows only of the one right before it. What happened to the blocks before that?",
            gives=_with_carry(lambda blocks, k: _total(blocks[k - 1 : k]) if k else 0.0),
        ),
        Misconception(
            "carry-too-early",
            "each block's own sum is in its results twice. When does the carry grow, before the store or after it?",
            gives=_with_carry(lambda blocks, k: _total(blocks[: k + 1])),
        ),
        Misconception(
            "carry-last-element",
            "what is carried is the last element of a block, not its sum. What has to be known of the past?",
            gives=_with_carry(lambda blocks, k: sum(b[..., -1:] for b in blocks[:k])),
        ),
        Misconception(
            "exclusive",
            "each result lacks its own element: this is the sum before it. What does the docstring include?",
            gives=lambda x, BLOCK_N: x.cumsum(-1) - x,
        ),
        Misconception(
            "tail-block",
            "the last block of a row was not written where it is not full. How many blocks does it take to cover N?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial"),
        ),
        Misconception(
            "low-precision-sum",
            "the sum gets stuck at 4096, where float16 counts in steps of 4. In which dtype is the carry kept?",
            when=lambda evidence: evidence.tag("large"),
        ),
        Misconception("out-of-bounds", "the load and the store of the last block both need to know where the row ends"),
        Misconception("race", "rows overlap: does a store reach beyond the N elements of its own row?"),
    ),
    wrong=(
        Variant("no-carry", ((_S_CARRY, ""),), diagnosis="no-carry"),
        Variant("carries-one-block", ((_S_CARRY, "        carry = tl.sum(x, axis=0)\n"),), diagnosis="carry-one-block"),
        Variant("carries-too-early", ((_S_STORE + _S_CARRY, _S_CARRY + _S_STORE),), diagnosis="carry-too-early"),
        Variant(
            "carries-the-last-element",
            ((_S_CARRY, "        carry += tl.sum(tl.where(offs_n == BLOCK_N - 1, x, 0.0), axis=0)\n"),),
            diagnosis="carry-last-element",
        ),
        Variant(
            "exclusive",
            ((_S_STORE, _S_STORE.replace("tl.cumsum(x, axis=0)", "tl.cumsum(x, axis=0) - x")),),
            diagnosis="exclusive",
        ),
        Variant(
            "whole-blocks-only",
            ((_S_LOOP, _S_LOOP.replace("range(0, N,", "range(0, N - BLOCK_N + 1,")),),
            diagnosis="tail-block",
        ),
        Variant(
            "sums-in-own-dtype",
            (
                (_S_ZERO, _S_ZERO.replace("tl.float32", "x_ptr.dtype.element_ty")),
                (_S_LOAD, _S_LOAD.replace(".to(tl.float32)", "")),
            ),
            diagnosis="low-precision-sum",
        ),
        Variant("no-store-mask", ((_S_STORE, _S_STORE.replace(", mask=mask", "")),), diagnosis="out-of-bounds"),
        Variant("no-load-mask", ((_S_LOAD, _S_LOAD.replace(", mask=mask, other=0.0", "")),), diagnosis="out-of-bounds"),
        Variant(
            "reads-twice",
            (
                (
                    _S_CARRY,
                    "        carry += tl.sum(tl.load(x_ptr + row + start + offs_n, mask=mask, other=0.0).to(tl.float32), axis=0)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (("    prefix_sum_kernel[(M,)](x,", "    return x.cumsum(-1)\n    prefix_sum_kernel[(M,)](x,"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "carries-the-last-result",
            (
                (
                    _S_STORE + _S_CARRY,
                    "        y = carry + tl.cumsum(x, axis=0)\n"
                    "        tl.store(y_ptr + row + start + offs_n, y, mask=mask)\n"
                    "        carry = tl.sum(tl.where(offs_n == BLOCK_N - 1, y, 0.0), axis=0)\n",
                ),
            ),
        ),
        Variant(
            "carry-in-the-first-lane",
            (
                (
                    _S_STORE + _S_CARRY,
                    "        x += tl.where(offs_n == 0, carry, 0.0)\n"
                    "        tl.store(y_ptr + row + start + offs_n, tl.cumsum(x, axis=0), mask=mask)\n"
                    "        carry = tl.sum(x, axis=0)\n",
                ),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------- triton_basics.histogram
def _histogram_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, num_bins: int, block: int, low: int = 0, high: int = 0, tags: str = "", note: str = "") -> Case:
        x = make.whole(n, low=low, high=high or num_bins, dtype="int32")
        x[: min(n, 3)] = num_bins // 2  # there is always a bin with several in it
        return _blocked(x, num_bins, block, shown=f"{num_bins} bins" + note, tags=tags)

    return [
        case(1, 4, 16),
        case(64, 8, 64),
        case(50, 10, 64),
        case(512, 16, 128),
        case(781, 7, 256),
        case(1000, 100, 128),
        case(300, 5, 128, low=-3, high=9, tags="masked", note=", values from -3 to 8"),
        case(2000, 3, 512),
    ]


def _histogram(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    import torch

    inside = x[(x >= 0) & (x < num_bins)].long()
    return torch.bincount(inside, minlength=num_bins).int()


def _present(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    """A bin counts once for each block that has it, however often."""
    return sum(_histogram(block, num_bins, BLOCK).clamp_max(1) for block in x.split(BLOCK))


def _padding_in(bin: int) -> Callable[[Tensor, int, int], Tensor]:
    def gives(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
        counts = _histogram(x, num_bins, BLOCK)
        counts[bin] += -len(x) % BLOCK
        return counts

    return gives


def _adds_values(x: Tensor, num_bins: int, BLOCK: int) -> Tensor:
    import torch

    return _histogram(x, num_bins, BLOCK) * torch.arange(num_bins, dtype=torch.int32)


_H_LOAD = "    bins = tl.load(x_ptr + offs, mask=offs < n, other=-1)\n"
_H_MASK = "    counted = (bins >= 0) & (bins < num_bins)  # a lane past the end holds -1\n"
_H_ADD = "    tl.atomic_add(counts_ptr + bins, 1, mask=counted)\n"
_H_LAUNCH = "    histogram_kernel[(triton.cdiv(n, BLOCK),)](x, counts, n, num_bins, BLOCK=BLOCK)\n"

HISTOGRAM = KernelExercise(
    id="triton_basics.histogram",
    title="Histogram: addresses that come out of the data",
    notebook=NOTEBOOK,
    function="histogram",
    label=Label(3, 20, "gather and scatter, atomics on addresses that collide"),
    hints=(
        "The lanes of one program hold 3, 5, 3, 0. Each wants to raise the count of its own bin. What happens to bin 3 "
        "if each of them loads the count, adds 1 and stores it?",
        "An offset may come out of memory like any other number. Atomic adds on one address happen one after the other, "
        "also for two lanes of one program. A lane must stay silent if it is past the end, or if its value is no bin.",
        "Load the block's values, with a number past the end that is no bin; the mask says that the value is at least "
        "0 and below num_bins; add 1 atomically at counts plus the value, under that mask.",
    ),
    cases=_histogram_cases,
    reference=_histogram,
    launch_rule=_shared_and_read_once(0),
    misconceptions=(
        Misconception(
            "lost-updates",
            "several lanes of a program loaded one count, each added 1, and each stored the same result. "
            "Which operation lets nobody in between?",
            gives=_present,
        ),
        Misconception(
            "tail-mask",
            lambda evidence: (
                f"bin 0 holds too many: {-len(evidence.case.args[0]) % evidence.case.args[2]} lanes past the end counted "
                "themselves. What do these lanes hold, and who says that they must not count?"
            ),
            gives=_padding_in(0),
        ),
        Misconception(
            "adds-values",
            "each bin holds its count times its number. What is added for one element?",
            gives=_adds_values,
        ),
        Misconception(
            "one-block",
            "only the first block was counted. Which elements does program 1 look at?",
            gives=lambda x, num_bins, BLOCK: _histogram(x[:BLOCK], num_bins, BLOCK) * _cdiv(len(x), BLOCK),
        ),
        Misconception(
            "out-of-bounds",
            "the data decide the address here, and not every value is a bin: which ones does the docstring leave out?",
        ),
        Misconception(
            "race", "several programs count into the same bins. Which operation loads, adds and stores in one step?"
        ),
    ),
    wrong=(
        Variant(
            "load-add-store",
            (
                (
                    _H_ADD,
                    "    count = tl.load(counts_ptr + bins, mask=counted)\n"
                    "    tl.store(counts_ptr + bins, count + 1, mask=counted)\n",
                ),
            ),
            diagnosis="lost-updates",
        ),
        Variant("pads-with-bin-0", ((_H_LOAD, _H_LOAD.replace("other=-1", "other=0")),), diagnosis="tail-mask"),
        Variant("counts-any-value", ((_H_MASK, "    counted = offs < n\n"),), diagnosis="out-of-bounds"),
        Variant(
            "below-num-bins-only",
            ((_H_MASK, "    counted = (offs < n) & (bins < num_bins)\n"),),
            diagnosis="out-of-bounds",
        ),
        Variant("adds-the-value", ((_H_ADD, _H_ADD.replace(", 1, ", ", bins, ")),), diagnosis="adds-values"),
        Variant("no-load-mask", ((_H_LOAD, "    bins = tl.load(x_ptr + offs)\n"),), diagnosis="out-of-bounds"),
        Variant(
            "always-the-first-block",
            ((_H_LOAD, "    offs = tl.arange(0, BLOCK)\n" + _H_LOAD),),
            diagnosis="one-block",
        ),
        Variant(
            "one-program",
            ((_H_LAUNCH, "    BLOCK = triton.next_power_of_2(n)\n" + _H_LAUNCH),),
            diagnosis="one-program",
        ),
        Variant(
            "reads-twice",
            ((_H_LOAD, _H_LOAD + "    bins = tl.maximum(bins, tl.load(x_ptr + offs, mask=offs < n, other=-1))\n"),),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            ((_H_LAUNCH, "    return torch.bincount(x[(x >= 0) & (x < num_bins)], minlength=num_bins).int()\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "compares-with-every-bin",
            (
                ("num_bins, BLOCK: tl.constexpr):", "num_bins, BINS: tl.constexpr, BLOCK: tl.constexpr):"),
                (
                    _H_MASK + _H_ADD,
                    "    every = tl.arange(0, BINS)\n"
                    "    found = tl.sum((bins[:, None] == every[None, :]).to(tl.int32), axis=0)\n"
                    "    tl.atomic_add(counts_ptr + every, found, mask=every < num_bins)\n",
                ),
                (_H_LAUNCH, _H_LAUNCH.replace("BLOCK=BLOCK", "BINS=triton.next_power_of_2(num_bins), BLOCK=BLOCK")),
            ),
        ),
        Variant(
            "counts-in-registers-first",
            (
                ("num_bins, BLOCK: tl.constexpr):", "num_bins, BINS: tl.constexpr, BLOCK: tl.constexpr):"),
                (
                    _H_MASK + _H_ADD,
                    "    spare = (bins < 0) | (bins >= num_bins)\n"
                    "    found = tl.histogram(tl.where(spare, BINS - 1, bins), BINS)\n"
                    "    every = tl.arange(0, BINS)\n"
                    "    tl.atomic_add(counts_ptr + every, found, mask=(every < num_bins) & (found > 0))\n",
                ),
                (_H_LAUNCH, _H_LAUNCH.replace("BLOCK=BLOCK", "BINS=triton.next_power_of_2(num_bins + 1), BLOCK=BLOCK")),
            ),
        ),
        Variant(
            "tail-in-the-mask",
            (
                (_H_LOAD, _H_LOAD.replace(", other=-1", "")),
                (_H_MASK, "    counted = (offs < n) & (bins >= 0) & (bins < num_bins)\n"),
                (_H_ADD, _H_ADD.replace(", 1, ", ", tl.full((BLOCK,), 1, tl.int32), ")),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- triton_basics.dropout
def _dropout(x: Tensor, p: float, seed: int) -> Tensor:
    from gpukit.reference.triton_basics import dropout

    return dropout(x, p, seed)


def _dropout_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(shape: tuple[int, ...], p: float, dtype: str = "float32", tags: str = "") -> Case:
        x, dy = make.normal(*shape, dtype=dtype), make.normal(*shape, dtype=dtype)
        blocks = "blocks" if x.numel() > 256 else ""
        return _case(x, p, rng.randrange(1, 1 << 31), dy, shown=f"p {p:g}", tags=f"{tags} {blocks}")

    return [
        case((200,), 0.25),
        case((1,), 0.5),
        case((1000,), 0.5),
        case((1024,), 0.1),
        case((1025,), 0.8),
        case((7, 90), 0.3, tags="leading"),
        case((300,), 0.0),
        case((300,), 1.0, tags="dropped"),
        case((700,), 0.5, "float16"),
        case((500,), 0.2, "bfloat16"),
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


def _true_numbers(seed: int) -> Callable[[Tensor, int], Tensor]:
    from gpukit.reference.triton_basics import rand

    return lambda i, block: rand(seed, i)


def _complement(x: Tensor, p: float, seed: int) -> Tensor:
    import torch

    return torch.where(_dropout(torch.ones_like(x), p, seed) == 0, x * _scale(p), torch.zeros_like(x))


def _nan_if_all_dropped(x: Tensor, p: float, seed: int, dy: Tensor) -> dict[str, Tensor]:
    return _unlike("y", x * (1.0 if p < 1 else float("nan")), x)  # it explains p = 1 and nothing else


_X_LOAD = "    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)\n    keep"
_X_KEEP = "    keep = tl.rand(seed, offs) >= p\n"
_X_STORE = "    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0.0), mask=mask)\n"
_X_BACK = "        dropout_kernel[(triton.cdiv(n, 256),)](dy, dx, ctx.p, ctx.seed, n, BLOCK=256)\n"

DROPOUT = KernelExercise(
    id="triton_basics.dropout",
    title="Dropout that remembers nothing but its seed",
    notebook=NOTEBOOK,
    function="dropout",
    label=Label(3, 25, "counter-based random numbers, recomputing instead of storing"),
    hints=(
        "tl.rand(seed, i) gives one number for one i. Which i makes element 300 get the same number whichever program "
        "computes it? And what does the backward pass need to know to drop the same elements?",
        "The number belongs to the element, so i is its offset in the tensor, not the lane. What survives grows by "
        "1 / (1 - p), so that the mean stays. The gradient of the survivors has the same factor, the gradient of the "
        "others is 0: dropout of dy, with the same numbers.",
        "Load x; an element is kept where the random number at its own offset is at least p; store x divided by 1 - p "
        "where it is kept and 0 elsewhere, by a choice and not by a product. The backward pass launches the same kernel "
        "on dy and dx with the p and the seed that ctx holds.",
    ),
    cases=_dropout_cases,
    reference=_dropout,
    gradients=1,
    traffic=Traffic(reads=2, writes=2, launches=2),
    misconceptions=(
        Misconception(
            "same-numbers",
            "every block drops the same lanes. Which number tells element 256 from element 0?",
            gives=_numbers(lambda rand, seed, i, block: rand(seed, i % block)),
        ),
        Misconception(
            "seed-per-program",
            "each program has a seed of its own, so the result depends on BLOCK. What do the two arguments of tl.rand "
            "stand for in the docstring?",
            gives=_numbers(_seed_and_block),
        ),
        Misconception(
            "inverted",
            "the elements that should go are the ones that stay. Which of the two happens with probability p?",
            gives=lambda x, p, seed, dy: _unlike("y", _complement(x, p, seed), _dropout(x, p, seed)),
        ),
        Misconception(
            "not-scaled",
            "the right elements are kept, at their old size. What happens to the mean if a fraction p vanishes?",
            gives=lambda x, p, seed, dy: _unlike("y", _dropped(x, _true_numbers(seed), p, 1.0), _dropout(x, p, seed)),
        ),
        Misconception(
            "scaled-by-p",
            "the right elements are kept and divided by p. Which fraction of the elements survives?",
            gives=lambda x, p, seed, dy: {"y": _dropped(x, _true_numbers(seed), p, 1 / p if p else float("inf"))},
        ),
        Misconception(
            "zero-times-infinity",
            "only p = 1 goes wrong, where 1 / (1 - p) is infinite, and 0 times that is NaN. Does a dropped element have "
            "to be multiplied at all?",
            gives=_nan_if_all_dropped,
        ),
        Misconception(
            "gradient-undropped",
            "y is right and the gradient passes everywhere. How does y change with an element that was dropped?",
            gives=lambda x, p, seed, dy: {"dx": dy * 1.0},
        ),
        Misconception(
            "new-numbers",
            "y is right, and the gradient was dropped elsewhere. Which numbers did the forward pass draw?",
            when=lambda evidence: evidence.output == "dx" and _half_dropped(evidence),
        ),
        _OUTSIDE,
        Misconception("traffic", "what was kept follows from the seed: does a mask have to be written and read again?"),
    ),
    wrong=(
        Variant(
            "numbers-by-lane", ((_X_KEEP, _X_KEEP.replace("offs", "tl.arange(0, BLOCK)")),), diagnosis="same-numbers"
        ),
        Variant(
            "seed-by-program",
            ((_X_KEEP, _X_KEEP.replace("seed, offs", "seed + tl.program_id(0), tl.arange(0, BLOCK)")),),
            diagnosis="seed-per-program",
        ),
        Variant("keeps-the-others", ((_X_KEEP, _X_KEEP.replace(">=", "<")),), diagnosis="inverted"),
        Variant("no-scale", ((_X_STORE, _X_STORE.replace("x / (1 - p)", "x")),), diagnosis="not-scaled"),
        Variant("divides-by-p", ((_X_STORE, _X_STORE.replace("x / (1 - p)", "x / p")),), diagnosis="scaled-by-p"),
        Variant(
            "multiplies-by-the-mask",
            ((_X_STORE, _X_STORE.replace("tl.where(keep, x / (1 - p), 0.0)", "x * keep * (1 / (1 - p))")),),
            diagnosis="zero-times-infinity",
        ),
        Variant("passes-the-gradient", ((_X_BACK, "        dx.copy_(dy)\n"),), diagnosis="gradient-undropped"),
        Variant("draws-again", ((_X_BACK, _X_BACK.replace("ctx.seed", "ctx.seed + 1")),), diagnosis="new-numbers"),
        Variant("no-store-mask", ((_X_STORE, _X_STORE.replace(", mask=mask", "")),), diagnosis="out-of-bounds"),
        Variant(
            "calls-torch",
            (
                (
                    "    return DropoutFunction.apply(x, p, seed)\n",
                    "    return x * (torch.rand_like(x) >= p) / (1 - p)\n",
                ),
            ),
            diagnosis="values",
        ),
        Variant(
            "keeps-a-copy",
            ((_X_BACK, "        dy = dy.clone()\n" + _X_BACK),),
            diagnosis="traffic",
        ),
    ),
    right=(
        Variant(
            "whole-numbers",
            (
                (_X_KEEP, "    bits = tl.randint(seed, offs)\n    keep = tl.uint_to_uniform_float(bits) >= p\n"),
                (_X_STORE, _X_STORE.replace("x / (1 - p)", "x * (1 / (1 - p))")),
            ),
        ),
        Variant(
            "zeroes-the-dropped",
            (
                (_X_LOAD, "    keep"),
                (
                    _X_STORE,
                    "    x = tl.load(x_ptr + offs, mask=mask & keep, other=0.0).to(tl.float32)\n"
                    "    scale = tl.where(p < 1, 1 / (1 - p), 0.0)\n"
                    "    tl.store(y_ptr + offs, x * scale, mask=mask)\n",
                ),
            ),
        ),
    ),
)


def _half_dropped(evidence: Evidence) -> bool:
    """The gradient has zeros, at other places than it should."""
    yours, right = evidence.outputs == 0, evidence.expected == 0
    return bool(yours.any()) and bool((yours != right).any())


# ---------------------------------------------------------------------------------------- triton_basics.detective_slow
def _scale_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 1, 16), (3, 64, 64), (3, 50, 64), (5, 512, 128), (7, 781, 128), (2, 1025, 256), (4, 3000, 512))
    return [_blocked(make.normal(M, N), make.normal(M), block) for M, N, block in sizes]


def _scaled(x: Tensor, s: Tensor, BLOCK_N: int) -> Tensor:
    return x * s[:, None]


def _diagonal(x: Tensor, s: Tensor, BLOCK_N: int) -> Tensor:
    """Row m gets block m only."""
    import torch

    columns, rows = torch.arange(x.shape[1])[None, :], torch.arange(len(x))[:, None]
    return torch.where(columns // BLOCK_N == rows, _scaled(x, s, BLOCK_N), float("nan"))


_Z_OFFS = "    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)\n    x = tl.load(x_ptr + row + offs_n, mask=offs_n < N)\n"
_Z_STORE = "    tl.store(y_ptr + row + offs_n, x * s, mask=offs_n < N)\n"
_Z_LOOP = (
    "    for start in range(0, N, BLOCK_N):\n        offs_n = start + tl.arange(0, BLOCK_N)\n"
    "        x = tl.load(x_ptr + row + offs_n, mask=offs_n < N)\n"
    "        tl.store(y_ptr + row + offs_n, x * s, mask=offs_n < N)\n"
)
_Z_LAUNCH = "    scale_rows_kernel[(M, triton.cdiv(N, BLOCK_N))](x, s, y, N, BLOCK_N=BLOCK_N)\n"

DETECTIVE_SLOW = KernelExercise(
    id="triton_basics.detective_slow",
    title="Detective: right, and several times too slow",
    notebook=NOTEBOOK,
    function="scale_rows",
    label=Label(2, 15, "reading a trace: who does which work, and how often"),
    hints=(
        "Trace one call with x [4, 4096] and BLOCK_N = 1024. How many programs ran, and how many bytes did one of them "
        "load? What would you have expected of each?",
        "A row can be covered in two ways: by one program that loops over the blocks, or by one program for each block. "
        "What does a kernel do that has both?",
        "Mend either side. In the kernel: no loop, and offsets that begin at the second program id times BLOCK_N. Or in "
        "the host code: a grid with one program a row.",
    ),
    cases=_scale_cases,
    reference=_scaled,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "grid-axes",
            "row m has only its block m. Which axis of the grid counts blocks?",
            gives=_diagonal,
        ),
        _ONE_BLOCK,
        Misconception(
            "traffic",
            "the values are right because every program stores the same ones. Who covers a row here: the loop, or the "
            "grid?",
        ),
        _OUTSIDE,
    ),
    wrong=(
        Variant("unmended", ((_Z_OFFS + _Z_STORE, _Z_LOOP),), diagnosis="traffic"),
        Variant(
            "starts-at-its-block",
            ((_Z_OFFS + _Z_STORE, _Z_LOOP.replace("range(0, N,", "range(tl.program_id(1) * BLOCK_N, N,")),),
            diagnosis="traffic",
        ),
        Variant(
            "neither-loop-nor-grid",
            ((_Z_OFFS, _Z_OFFS.replace("tl.program_id(1) * BLOCK_N + ", "")),),
            diagnosis="one-block",
        ),
        Variant(
            "grid-cut-too",
            ((_Z_LAUNCH, _Z_LAUNCH.replace("(M, triton.cdiv(N, BLOCK_N))", "(M,)")),),
            diagnosis="one-block",
        ),
        Variant("wrong-axis", ((_Z_OFFS, _Z_OFFS.replace("program_id(1)", "program_id(0)")),), diagnosis="grid-axes"),
        Variant(
            "loses-a-mask",
            ((_Z_OFFS + _Z_STORE, _Z_OFFS + _Z_STORE.replace(", mask=offs_n < N", "")),),
            diagnosis="out-of-bounds",
        ),
        Variant("calls-torch", ((_Z_LAUNCH, "    return x * s[:, None]\n"),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "keeps-the-loop",
            ((_Z_OFFS + _Z_STORE, _Z_LOOP), (_Z_LAUNCH, _Z_LAUNCH.replace("(M, triton.cdiv(N, BLOCK_N))", "(M,)"))),
        ),
        Variant(
            "shares-the-loop",
            (
                (
                    _Z_OFFS + _Z_STORE,
                    _Z_LOOP.replace(
                        "range(0, N, BLOCK_N)",
                        "range(tl.program_id(1) * BLOCK_N, N, tl.num_programs(1) * BLOCK_N)",
                    ),
                ),
                (_Z_LAUNCH, _Z_LAUNCH.replace("(M, triton.cdiv(N, BLOCK_N))", "(M, 2)")),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------- triton_basics.detective_race
def _mean_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    sizes = ((1, 16), (64, 64), (50, 64), (512, 64), (781, 128), (1025, 1024), (2000, 256))
    return [_blocked(make.normal(n), block) for n, block in sizes]


def _neighbour_mean(x: Tensor, BLOCK: int) -> Tensor:
    y = x.clone()
    y[:-1] = (x[:-1] + x[1:]) / 2
    return y


def _several_programs(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    return _shared_and_read_once()(case, launches)


_N_EMPTY = "    y = torch.empty_like(x)\n    neighbour_mean_kernel"
_N_LAUNCH = "    neighbour_mean_kernel[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK)\n"
_N_LOAD = "    neighbour = tl.load(x_ptr + offs + 1, mask=offs + 1 < n, other=0.0)\n"
_N_STORE = "    tl.store(y_ptr + offs, tl.where(offs + 1 < n, (x + neighbour) / 2, x), mask=offs < n)\n"
_N_UNMENDED = (
    (_N_EMPTY, _N_EMPTY.replace("empty_like(x)", "empty_like(x).copy_(x)")),
    (_N_LAUNCH, _N_LAUNCH.replace("(x, y, n", "(y, y, n")),
)

DETECTIVE_RACE = KernelExercise(
    id="triton_basics.detective_race",
    title="Detective: right today",
    notebook=NOTEBOOK,
    function="neighbour_mean",
    label=Label(2, 15, "races: programs run in any order"),
    hints=(
        "Program 0 needs the first element of program 1's block. When does program 1 overwrite it: before or after "
        "program 0 has read it? Who decides?",
        "A program may load what another one stores only if something puts the two in order. Inside one launch nothing "
        "does. A tensor that is only read and another that is only written need no order.",
        "Give the kernel a fresh buffer for the result and let it read from x itself: no copy is needed.",
    ),
    cases=_mean_cases,
    reference=_neighbour_mean,
    traffic=Traffic(reads=2, writes=1),
    launch_rule=_several_programs,
    misconceptions=(
        _ONE_BLOCK,
        Misconception("race", "the values were right because the interpreter runs the programs in order. Does a GPU?"),
        Misconception("traffic", "who reads x while the kernel runs, and who writes it? Does anybody need a copy?"),
        Misconception("out-of-bounds", "which element has no neighbour?"),
    ),
    wrong=(
        Variant("unmended", _N_UNMENDED, diagnosis="race"),
        Variant("in-place-on-x", ((_N_LAUNCH, _N_LAUNCH.replace("(x, y, n", "(x, x, n")),), diagnosis="race"),
        Variant(
            "a-barrier-in-each-program",
            (*_N_UNMENDED, (_N_STORE, "    tl.debug_barrier()\n" + _N_STORE)),
            diagnosis="race",
        ),
        Variant(
            "one-large-program",
            (_N_UNMENDED[0], (_N_LAUNCH, "    BLOCK = triton.next_power_of_2(n)\n" + _N_UNMENDED[1][1])),
            diagnosis="one-program",
        ),
        Variant("keeps-the-copy", _N_UNMENDED[:1], diagnosis="traffic"),
        Variant(
            "only-the-first-block",
            ((_N_LAUNCH, _N_LAUNCH.replace("(triton.cdiv(n, BLOCK),)", "(1,)")),),
            diagnosis="one-block",
        ),
        Variant(
            "neighbour-of-the-last",
            ((_N_LOAD, _N_LOAD.replace("mask=offs + 1 < n", "mask=offs < n")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "calls-torch",
            ((_N_LAUNCH, "    y.copy_(x)\n    y[:-1] = (x[:-1] + x[1:]) / 2\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "the-last-is-its-own-neighbour",
            (
                (_N_LOAD, "    neighbour = tl.load(x_ptr + tl.minimum(offs + 1, n - 1), mask=offs < n, other=0.0)\n"),
                (_N_STORE, "    tl.store(y_ptr + offs, 0.5 * x + 0.5 * neighbour, mask=offs < n)\n"),
            ),
        ),
        Variant(
            "a-grid-stride-loop",
            (
                (
                    "    x = tl.load(x_ptr + offs, mask=offs < n)\n" + _N_LOAD + _N_STORE,
                    "    for _ in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):\n"
                    "        x = tl.load(x_ptr + offs, mask=offs < n)\n"
                    "        neighbour = tl.load(x_ptr + offs + 1, mask=offs + 1 < n)\n"
                    "        tl.store(y_ptr + offs, (x + neighbour) * 0.5, mask=offs + 1 < n)\n"
                    "        tl.store(y_ptr + offs, x, mask=offs == n - 1)\n"
                    "        offs += tl.num_programs(0) * BLOCK\n",
                ),
                (_N_LAUNCH, _N_LAUNCH.replace("(triton.cdiv(n, BLOCK),)", "(2,)")),
            ),
        ),
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
