"""The exercises of notebook 08: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import ideas, wire
from gpukit.grading.exercise import Case, CudaExercise, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import padding
from gpukit.grading.inputs import Inputs, case, far, lengths, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts


def _only_first(count: Callable[..., int]) -> Callable[[Evidence], bool]:
    """The first `count(*args)` elements were written, and no other."""

    def when(evidence: Evidence) -> bool:
        if evidence.kind != "nan":
            return False
        y, first = evidence.outputs.reshape(-1), count(*evidence.case.args)
        return 0 < first < len(y) and not bool(y[:first].isnan().any()) and bool(y[first:].isnan().all())

    return when


_BLOCK_0 = Misconception("program-id", when=_only_first(lambda *_: 1024))


# ----------------------------------------------------------------------------------------------------- fusion.accesses
Ops, Kernels, Needed = dict[str, list[str]], list[list[str]], list[str]
_GELU = {
    "half": ["x"],
    "a": ["x"],
    "b": ["a", "x"],
    "c": ["b", "x"],
    "d": ["x", "c"],
    "e": ["d"],
    "t": ["e"],
    "u": ["t"],
    "y": ["half", "u"],
}
_SIGMOIDS = {"s1": ["x"], "s2": ["s1"], "y": ["s2"], "ds2": ["dy", "y"], "ds1": ["ds2", "s2"], "dx": ["ds1", "s1"]}
_AGAIN = {
    "s1": ["x"],
    "s2": ["s1"],
    "y": ["s2"],
    "r1": ["x"],
    "r2": ["r1"],
    "r3": ["r2"],
    "ds2": ["dy", "r3"],
    "ds1": ["ds2", "r2"],
    "dx": ["ds1", "r1"],
}


def _random_graph(rng: Random) -> tuple[Ops, Kernels, Needed]:
    """Twelve operations in four kernels; some results are used by several of them, one by nobody."""
    ops: Ops = {}
    known = ["x", "w"]
    for i in range(12):
        ops[f"t{i}"] = [rng.choice(known[-5:]) for _ in range(rng.choice((1, 2, 2)))]
        known.append(f"t{i}")
    names = list(ops)
    cuts = [0, *sorted(rng.sample(range(1, 12), 3)), 12]
    kernels = [names[a:b] for a, b in itertools.pairwise(cuts)]
    return ops, kernels, [names[-1], rng.choice(names[:6])]


def _accesses_cases(rng: Random) -> list[Case]:
    waves = {"s": ["x"], "ss": ["s"], "c": ["x"], "cc": ["c"], "y": ["ss", "cc"]}
    apart = [[name] for name in _GELU]
    return [
        case("one operation", {"y": ["x"]}, [["y"]], ["y"]),
        case("sin and cos, five kernels", waves, [[name] for name in waves], ["y"]),
        case("sin and cos, one kernel", waves, [list(waves)], ["y"]),
        case("sin and cos, two kernels", waves, [["s", "ss"], ["c", "cc", "y"]], ["y"]),
        case("x * x, then + x", {"q": ["x", "x"], "y": ["q", "x"]}, [["q", "y"]], ["y"]),
        case("GELU, nine kernels", _GELU, apart, ["y"]),
        case("GELU, cut in the middle", _GELU, [["half", "a", "b", "c", "d"], ["e", "t", "u", "y"]], ["y"]),
        case("a residual that is needed too", {"u": ["x", "r"], "y": ["u"]}, [["u", "y"]], ["u", "y"]),
        case("an input that is needed too", {"y": ["x", "r"]}, [["y"]], ["x", "y"]),
        case("a kernel listed from its end", {"a": ["x"], "b": ["a"], "y": ["b", "x"]}, [["y", "b", "a"]], ["y"]),
        case("a result for two kernels", {"u": ["x"], "v": ["u"], "w": ["u"]}, [["u"], ["v"], ["w"]], ["v", "w"]),
        case("nothing is needed in the end", {"u": ["x"], "y": ["u"], "z": ["u"]}, [["u", "y"], ["z"]], []),
        case("sigmoids, all kept", _SIGMOIDS, [["s1", "s2", "y"], ["ds2", "ds1", "dx"]], ["y", "dx"]),
        case("sigmoids, computed again", _AGAIN, [["s1", "s2", "y"], list(_AGAIN)[3:]], ["y", "dx"]),
        *(case(f"random graph {i}", *_random_graph(rng)) for i in (1, 2, 3)),
    ]


def _accesses(
    ops: Ops,
    kernels: Kernels,
    needed: Needed,
    *,
    made_here: bool = False,
    each_op: bool = False,
    inputs: bool = True,
    writes: Callable[[str, set[str], set[str], set[str]], bool] = lambda t, inside, later, needed: t in later | needed,
) -> tuple[int, int]:
    """The counts, or those of a wrong idea.

    made_here  reads what the same kernel made        each_op  reads a tensor once for each operation that needs it
    inputs     whether inputs of the graph are read   writes   (tensor, used inside, used later, needed) -> is it written
    """
    read = written = 0
    for i, kernel in enumerate(kernels):
        later = {t for other in kernels[i + 1 :] for op in other for t in ops[op]}
        inside = {t for op in kernel for t in ops[op]}
        for group in [[op] for op in kernel] if each_op else [kernel]:
            wanted = {t for op in group for t in ops[op]}
            read += sum((made_here or t not in kernel) and (inputs or t in ops) for t in wanted)
        written += sum(writes(t, inside, later, set(needed)) for t in kernel)
    return read, written


def _wrong_accesses(**idea: Any) -> Callable[[Ops, Kernels, Needed], tuple[int, int]]:
    return lambda ops, kernels, needed: _accesses(ops, kernels, needed, **idea)


def _everything(*_: Any) -> bool:
    return True


def _each_tensor_once(ops: Ops, kernels: Kernels, needed: Needed) -> tuple[int, int]:
    """A tensor that several kernels read counts once."""
    made_by = {t: i for i, kernel in enumerate(kernels) for t in kernel}
    read = {t for i, kernel in enumerate(kernels) for op in kernel for t in ops[op] if made_by.get(t) != i}
    return len(read), _accesses(ops, kernels, needed)[1]


ACCESSES = FunctionExercise(
    id="fusion.accesses",
    function="accesses",
    cases=_accesses_cases,
    returns=("tensors read", "tensors written"),
    expected=_accesses,
    misconceptions=(
        Misconception("nothing-fused", gives=_wrong_accesses(made_here=True, each_op=True, writes=_everything)),
        Misconception("read-per-operation", gives=_wrong_accesses(each_op=True)),
        Misconception("reads-its-own", gives=_wrong_accesses(made_here=True)),
        Misconception("writes-everything", gives=_wrong_accesses(writes=_everything)),
        Misconception(
            "own-use", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in inside | later | needed)
        ),
        Misconception("only-results", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in needed)),
        Misconception("never-needed", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later)),
        Misconception(
            "used-inside",
            gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later | needed and t not in inside),
        ),
        Misconception(
            "used-inside", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in needed or t not in inside)
        ),
        Misconception("inputs-free", gives=_wrong_accesses(inputs=False)),
        Misconception("each-tensor-once", gives=_each_tensor_once),
        Misconception("order", gives=lambda *graph: _accesses(*graph)[::-1]),
    ),
    timeout_s=20.0,
)


# ------------------------------------------------------------------------------------------------------ fusion.sin_cos


def _sin_cos_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def case(x: Tensor, a: float, b: float, block: int, tags: str = "") -> Case:
        facts = ["blocks" if x.numel() > block else "", "partial" if x.numel() % block else "", tags]
        return tensor_case(x, a, b, block, note=f"a {a:g}, b {b:g}, BLOCK {block}", tags=" ".join(facts))

    normal = make.normal
    # Where sin(x)**2 - cos(x)**2 is what two large numbers leave of each other.
    small = normal(40, scale=0.02) + 0.785398
    return [
        case(make.torch.full((1,), 0.7), 2.0, -3.0, 16),
        *(
            case(normal(n, scale=3), a, b, 16)
            for n, a, b in zip(lengths(16)[1:], (0, 1.5, -2, 0.5, 3), (2.5, 0, 1, 1, -1), strict=True)
        ),
        *(case(small.to(getattr(make.torch, t)), 5e4, -5e4, 16, "tiny") for t in ("float16", "bfloat16")),
        case(normal(70, scale=100), 1.0, 2.0, 32),
        case(normal(64, scale=3), 1.5, 0.25, 64),
        case(normal(781, scale=3), -1.0, 3.0, 128),
        case(normal(3, 7, 11, scale=3), 2.0, 1.0, 32, tags="leading"),
        case(normal(2048, scale=3, dtype="float16"), 1.25, -0.5, 256, "once"),
        case(normal(1025, scale=3, dtype="bfloat16"), 4.0, 1.0, 256, "once"),
        case(normal(40, 300, scale=3), 0.75, -2.0, 1024, tags="leading"),
        case(make.special(13), 2.0, 2.0, 32, tags="special leading"),
        case(make.special(7), 0.0, 1.5, 16, tags="special leading"),
    ]


def _sin_cos(x: Tensor, a: float, b: float, *_: Any) -> Tensor:
    return a * x.sin() ** 2 + b * x.cos() ** 2


SIN_COS = KernelExercise(
    id="fusion.sin_cos",
    function="sin_cos",
    cases=_sin_cos_cases,
    reference=ideas.in_float32(_sin_cos),
    huge=lambda: (far(5 << 30), 0.75, -2.0, 1024),
    traffic=Traffic(reads=1, writes=1, memory=1),
    launch_rule=ideas.in_registers("what a block has computed is in registers still: who needs it in memory?"),
    misconceptions=(
        Misconception("low-precision", when=ideas.only("tiny")),
        Misconception(
            "square-first", gives=lambda x, a, b, *_: a * (x.float() ** 2).sin() + b * (x.float() ** 2).cos()
        ),
        Misconception("swapped", gives=lambda x, a, b, *_: a * x.cos() ** 2 + b * x.sin() ** 2),
        Misconception("not-squared", gives=lambda x, a, b, *_: a * x.sin() + b * x.cos()),
        Misconception("weight-squared", gives=lambda x, a, b, *_: (a * x.sin()) ** 2 + (b * x.cos()) ** 2),
        Misconception("one-term", gives=lambda x, a, b, *_: a * x.sin() ** 2),
        Misconception("one-term", gives=lambda x, a, b, *_: b * x.cos() ** 2),
        Misconception("program-id", when=_only_first(lambda x, a, b, block: block)),
        ideas.NOT_FINITE,
    ),
)


# --------------------------------------------------------------------------------------------------------- fusion.gate
def _gate_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)
    normal = make.normal

    def case(x: Tensor, note: str = "", tags: str = "") -> Case:
        return tensor_case(x, note=note, tags=tags, tail=True)

    high, low = normal(2, 256, scale=2), normal(2, 100, scale=2) - 12
    high[:, ::3] += 120
    kinds, far = [make.rows(n) for n in (1, 31, 33, 64)], []
    for x in kinds:
        x[10, :1] = x[7, :1] = 1
        x[2] += 121  # about -78, so that a padding lane of -80 counts; below -80 no float32 holds some sums
        far.append(x.bfloat16())  # not in float32: a GPU's exp(78) is wrong by 20 times its rounding
        x[2] += 69  # about -9
    return [
        case(normal(1, 1)),
        case(normal(3, 64, scale=2)),
        case(normal(8, 256, scale=2, dtype="bfloat16"), tags="once"),
        case(normal(2, 1024, scale=2, dtype="float16"), tags="once"),
        case(high, "every third around 120", "large"),
        case(low, "around -12", "tiny"),
        *(case(x, "rows of many kinds", "kinds") for x in kinds),
        *(case(x, "rows of many kinds", "kinds once") for x in far[1:]),
        case(normal(5, 50, scale=2)),
        case(normal(2, 1025, scale=2), tags="long"),
        case(normal(17, 781, scale=2)),
        case(make.torch.full((1, 40000), 2.0).half(), "constant", "constant long"),
        case((low - 5).half()[:1], "around -17", "tiny"),  # whose sigmoids float16 does not hold
        case(make.special(40), "with infinities and NaN", "special"),
    ]


def _gate(x: Tensor) -> Tensor:
    score = x.sigmoid()
    return score / score.sum(-1, keepdim=True)


def _padded_gate(x: Tensor) -> Tensor:
    """Padding lanes that hold 0 have a sigmoid of one half."""
    score = x.sigmoid()
    return score / (score.sum(-1, keepdim=True) + 0.5 * padding(x.shape[-1]))


def _overflowing_gate(x: Tensor) -> Tensor:
    """exp(x) / (1 + exp(x)) in float32."""
    e = x.float().exp()
    score = e / (1 + e)
    return score / score.sum(-1, keepdim=True)


def _only_in_16_bits(evidence: Evidence) -> bool:
    """Rows of tiny scores fail in float16 and bfloat16, and pass in float32; some of them without a score about -78, which
    float32 does not have."""
    failed = {tag for case in evidence.failed for tag in case.tags}
    return ideas.only("tiny", "kinds")(evidence) and "tiny" in failed and "float32" not in failed


def _smaller_where_padded(evidence: Evidence) -> bool:
    """Only rows with padding lanes are wrong, each by a factor below 1: the sum is too large."""
    rows = evidence.row_ratio
    return ideas.only("tail")(evidence) and rows is not None and 0 < float(rows.min()) <= float(rows.max()) < 1 + 1e-6


GATE = KernelExercise(
    id="fusion.gate",
    function="gate",
    cases=_gate_cases,
    reference=ideas.in_float32(_gate),
    huge=lambda: (far(81920, 65536),),
    traffic=Traffic(reads=1, writes=1, memory=1),
    launch_rule=ideas.in_registers("the scores need no memory between the sum and the division: where can they wait?"),
    misconceptions=(
        Misconception("low-precision", when=_only_in_16_bits),
        Misconception(
            "padding-through-function",
            gives=_padded_gate,
            fill=lambda evidence: {"lanes": padding(evidence.case.args[0].shape[-1])},
        ),
        Misconception("not-normalised", gives=lambda x: x.sigmoid()),
        Misconception("softmax", gives=lambda x: x.softmax(-1)),
        Misconception("normalised-first", gives=lambda x: (x / x.sum(-1, keepdim=True)).sigmoid()),
        Misconception("mean", gives=lambda x: _gate(x) * x.shape[-1]),
        Misconception("overflow", gives=_overflowing_gate),
        ideas.NOT_FINITE,
        Misconception("lost-digits", when=ideas.only("tiny", "kinds", "special")),
        Misconception("padding-counts", when=_smaller_where_padded),
        Misconception("program-id", when=_only_first(lambda x: x.shape[-1])),
        Misconception("block-too-small", when=lambda evidence: evidence.kind == "nan" and evidence.tag("long")),
    ),
)


# --------------------------------------------------------------------------------------------------------- fusion.cuda
def _swiglu_cases(rng: Random) -> list[Case]:
    draw = Inputs(rng)

    def launched(n: int, blocks: int, threads: int, note: str = "", tags: str = "", scale: float = 3.0) -> Case:
        tags += f" {'open' if n % 4 else ''} {'loops' if blocks * threads < n // 4 else ''}"
        gate, up = draw.normal(n, scale=scale), draw.normal(n)
        name = f"n = {n:,}, {blocks} block{'s' if blocks > 1 else ''} of {threads}"
        return case(listed(name, note), gate, up, blocks, threads, tags=tags)

    special = launched(70, 1, 32, "infinities and NaN", "special")
    for x in special.args[:2]:
        x[rng.randrange(8) :: 9] = float("nan")
        x[rng.randrange(8) :: 11] = float("inf")
        x[rng.randrange(8) :: 13] = -float("inf")
    # silu of a gate far below 0 is small and not nothing: an `up` as large as it is small shows it.
    low = launched(120, 1, 64, "gates from -83 to -15 and large up", "low")
    gate, up = low.args[:2]
    gate.copy_(-83 + 68 * gate.argsort().argsort() / 120)
    up.copy_((-gate).exp() * up.abs().clamp(0.2, 2))  # no product of the two is beyond float32
    gate[0], up[0] = 10, 1000  # beside it the few wrong digits of a fast exponential do not count
    return [
        launched(4096, 4, 256),
        launched(1, 1, 32),
        launched(3, 2, 64),
        launched(4, 1, 32),
        launched(1021, 8, 128),
        launched(20_011, 3, 96),
        launched(8192, 1, 256),
        launched(1000, 2, 33),
        launched(15, 1, 1),
        launched(515, 2, 1024, "gates around 200", "large", scale=200.0),
        special,
        low,
    ]


def _swiglu(gate: Tensor, up: Tensor, *_: int) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def _launch_swiglu(gate: Any, up: Any, blocks: int, threads: int) -> tuple[tuple[Any, ...], int, int]:
    y = gate if isinstance(gate, wire.Imaginary) else gate.new_full(gate.shape, float("nan"))
    return (gate, up, y, gate.shape[0]), blocks, threads


def _swiglu_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """Each element moves once, and only those behind the last float4 one by one."""
    n = case.args[0].numel()
    for array in ("gate", "up", "y"):
        moved = [access for access in launches[0].accesses if access.tensor == array]
        narrow = [access for access in moved if access.width < 16]
        every, singly = (sum(access.bytes for access in some) for some in (moved, narrow))
        did = "stored" if array == "y" else "loaded"
        lines = ", ".join(str(line) for line in sorted({access.line for access in moved}))
        times = f"{array} is {did} {every / 4 / n:.3g} times (line {lines})"
        if every > 4 * n and n % 4 and every - singly == 4 * (n - n % 4):
            return "everybody-ends", (
                f"{times}: the elements behind the last float4 are the work of a few threads. Which threads do them in yours?"
            )
        if every > 4 * n:
            return "traffic", f"{times}. Do two threads take one element, or does a thread take one again?"
        if singly > 4 * (n % 4):
            worst = max(narrow, key=lambda access: access.bytes)
            return "not-vectorized", (
                f"{array} is {did} {worst.width} bytes at a time (line {worst.line}). The compiler does not join accesses for "
                "you: to what type must a pointer point, so that one access moves 16 bytes?"
            )
    return None


def _unwritten(first: Callable[..., int], last: Callable[..., int]) -> Callable[[Evidence], bool]:
    """In each case that is wrong the elements from one index up to another were not written, and no others."""

    def when(evidence: Evidence) -> bool:
        for outcome in evidence.outcomes:
            if outcome.wrong:
                hole = outcome.wrong.expected.isnan()
                hole[first(*outcome.case.args) : last(*outcome.case.args)] = True
                if outcome.wrong.kind != "nan" or not bool((outcome.wrong.actual.isnan() == hole).all()):
                    return False
        return True

    return when


def _size(gate: Tensor, *_: Any) -> int:
    return gate.numel()


def _whole(gate: Tensor, *_: Any) -> int:
    """The elements in whole float4s."""
    return gate.numel() // 4 * 4


def _once(gate: Tensor, up: Tensor, blocks: int, threads: int) -> int:
    """The elements that all threads take if each takes one float4."""
    return 4 * blocks * threads


def _first_of_four(gate: Tensor, up: Tensor, *_: int) -> Tensor:
    """The first element of a float4 stands for all four."""
    y = _swiglu(gate, up)
    whole = y[: _whole(gate)].reshape(-1, 4)
    whole[:] = whole[:, :1].clone()
    return y


# Floats: in 32 bits the numbers of the last ones are negative, and those of their pieces, too; more pieces than 32 bits count
# without a sign, one for each thread; and so many pieces that 32 bits keep nothing of their number.
_HUGE, _WRAPPED, _ROUND = (11 << 30) + 3, (6 << 32) + 3, (4 << 32) + 3


def _huge_swiglu(n: int, blocks: int) -> tuple[Any, ...]:
    return far(n, dtype="float32"), far(n, dtype="float32"), blocks, 256


CUDA = CudaExercise(
    id="fusion.cuda",
    function="swiglu_cuda",
    cases=_swiglu_cases,
    reference=_swiglu,
    huge=lambda: [
        _huge_swiglu(_HUGE, _HUGE // 1024 + 1),
        _huge_swiglu(_WRAPPED, _WRAPPED // 1024),
        _huge_swiglu(_ROUND, _ROUND // 1024 - 1),
    ],
    kernel_name="swiglu",
    parameters=(("const float*", "gate"), ("const float*", "up"), ("float*", "y"), ("long long", "n")),
    launch=_launch_swiglu,
    launch_rule=_swiglu_rule,
    misconceptions=(
        Misconception("tail", when=_unwritten(_whole, _size)),
        Misconception("few-threads", when=_unwritten(lambda *args: _whole(*args) + args[2] * args[3], _size)),
        Misconception("one-pass", when=_unwritten(_once, _whole)),
        Misconception("one-pass", when=_unwritten(lambda *args: min(_once(*args), _whole(*args)), _size)),
        Misconception("swapped", gives=lambda gate, up, *_: _swiglu(up, gate)),
        Misconception("no-product", gives=lambda gate, *_: _swiglu(gate, 1)),
        Misconception("first-of-four", gives=_first_of_four),
        Misconception("small-is-nothing", when=ideas.only("low")),
    ),
)


# ---------------------------------------------------------------------------------------------------- fusion.recompute
def _recompute_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)
    normal = make.normal

    def case(*shape: int, dtype: str = "float32", scale: float = 2.0, mean: float = 0.0, tags: str = "") -> Case:
        x, dy = normal(*shape, scale=scale).add_(mean).to(getattr(make.torch, dtype)), normal(*shape, dtype=dtype)
        if x.numel() == 1:  # its gradient is the largest there is; beyond 4, 1 - s1 keeps few digits of it
            x.clamp_(-3, 3)
        facts = "blocks" if x.numel() > 1024 else ""
        return tensor_case(x, dy, note=f"around {mean:g}" if mean else "", tags=f"{facts} {tags}")

    x, far, special = normal(7, 30, scale=2.0), normal(100, scale=2.0), make.special(19)
    far[::5], far[1::5] = -100 - far[::5].abs(), 100 + far[1::5].abs()
    return [
        case(1),
        case(64),
        case(781),
        case(3, 5, 7, tags="leading"),
        case(1024, dtype="float16", tags="once"),
        case(1025, dtype="bfloat16", tags="once"),
        case(256, scale=20.0, tags="large"),
        tensor_case(far, make.like(far), note="some beyond 100, some below -100", tags="far"),
        case(100, scale=0.5, mean=9.0, dtype="float16", tags="tiny"),
        case(100, scale=0.5, mean=9.0, dtype="bfloat16", tags="tiny"),
        *(tensor_case(x, dy, note=f"dy {note}", tags="strided-dy leading") for note, dy in make.upstream(x)),
        case(50, 70, tags="leading"),
        case(3, 2000, tags="leading"),
        tensor_case(special, make.like(special), note="with infinities and NaN", tags="special leading"),
    ]


def _three_sigmoids(x: Tensor) -> Tensor:
    return x.sigmoid().sigmoid().sigmoid()


def _slope(s: Tensor) -> Tensor:
    return s * (1 - s)


def _sigmoids_backward(formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What a backward pass gives that multiplies dy by `formula` of x, s1, s2, y."""

    def gives(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        s1 = x.sigmoid()
        s2 = s1.sigmoid()
        return {"dx": dy * formula(x, s1, s2, s2.sigmoid())}

    return gives


def _inverted_sigmoids(evidence: Evidence) -> bool:
    """dx is what comes out when x is recovered from the rounded y."""
    if evidence.output != "dx":
        return False
    for outcome in evidence.outcomes:
        if outcome.wrong and "special" not in outcome.case.tags:
            y, dx = (outcome.reply.outputs[name].double() for name in ("y", "dx"))
            s2 = (y / (1 - y)).log()
            s1 = (s2 / (1 - s2)).log()
            predicted = outcome.case.args[1].double() * _slope(y) * _slope(s2) * _slope(s1)
            if not predicted.allclose(dx, rtol=0.05, atol=0.02 * float(dx.abs().max()), equal_nan=True):
                return False
    return True


def _passes(count: int) -> Callable[[Tensor, Tensor], int]:
    """The bytes of `count` accesses, and of the copy that a dy in another layout needs."""
    return lambda x, dy: (count + (not dy.is_contiguous())) * nbytes(x)


RECOMPUTE = KernelExercise(
    id="fusion.recompute",
    function="three_sigmoids",
    cases=_recompute_cases,
    reference=ideas.in_float32(_three_sigmoids),
    huge=lambda: (far(5 << 30), far(5 << 30)),
    gradients=1,
    traffic=Traffic(reads=_passes(3), writes=_passes(2), launches=2, memory=_passes(2), saved=1),
    misconceptions=(
        Misconception("low-precision", when=ideas.only("tiny")),
        Misconception("overflow", when=ideas.only("far", "special", kind="nan")),
        Misconception("only-the-last", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y))),
        Misconception("slope-missing", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y) * _slope(s2))),
        Misconception("slope-missing", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y) * _slope(s1))),
        Misconception("slope-missing", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1))),
        Misconception(
            "slope-of-the-input", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1) * _slope(x))
        ),
        Misconception(
            "sum-of-slopes", gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) + _slope(s1) + _slope(y))
        ),
        Misconception(
            "y-taken-for-x",
            gives=lambda x, dy: _sigmoids_backward(lambda _, s1, s2, y: _slope(s2) * _slope(s1) * _slope(y))(
                _three_sigmoids(x), dy
            ),
        ),
        Misconception(
            "forgets-dy",
            gives=lambda x, dy: {
                "dx": _sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1) * _slope(y))(x, dy)["dx"] / dy
            },
        ),
        ideas.NOT_FINITE,
        Misconception("inverted", when=_inverted_sigmoids),
        _BLOCK_0,
    ),
)


# ----------------------------------------------------------------------------------------------------- fusion.epilogue
def _epilogue_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)
    normal = make.normal

    def of(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, block: int, note: str = "", tags: str = "") -> Case:
        (M, K), N = a.shape, len(scale)
        ragged = "partial" if M % block or N % block else ""
        shown = f"a [{M}, {K}], b [{K}, {N}]"
        note = listed(f"BLOCK {block}", note)
        return tensor_case(a, b, scale, residual, block, shown=shown, note=note, tags=f"{ragged} {tags}")

    def case(M: int, N: int, K: int, block: int, dtype: str = "float32", tags: str = "") -> Case:
        a, b = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype)
        scale, residual = normal(N, scale=0.5, dtype=dtype), normal(M, N, scale=2.0, dtype=dtype)
        return of(a, b, scale, residual, block, tags=tags)

    def narrow(M: int, N: int, K: int, tags: str = "") -> Case:
        """Multiples of 1/4, which float32 adds exactly: few numbers in a row, and the ReLU, may leave it but a tiny one."""
        a, b, scale, residual = (make.integers(-8, 9, *shape) / 4 for shape in ((M, K), (K, N), (N,), (M, N)))
        return of(a, b, scale, residual, 16, tags=tags)

    def sums(dtype: str) -> Case:
        """The product is 16 x 32, 64 times, and a little; the residual takes all but the little away."""
        a, b, scale = make.torch.full((9, 65), 16.0), make.torch.full((65, 20), 32.0), make.torch.full((20,), -0.5)
        a[:, -1], b[-1] = make.integers(-4, 5, 9) / 4, make.integers(-32, 33, 20) / 16
        tensors = (t.to(getattr(make.torch, dtype)) for t in (a, b, scale, make.torch.full((9, 20), 2.0**14)))
        return of(*tensors, 16, "large sums, of which the residual leaves little", "large-sums")

    def taken_away() -> Case:
        """Products around -512, and a residual that leaves some units of them: 16 bits would keep most of that."""
        a, b = make.torch.full((9, 65), 2.0), make.torch.full((65, 20), 4.0)
        a[:, -1], b[-1] = make.integers(-4, 5, 9) / 4, make.integers(-4, 5, 20) / 4
        residual = 512.0 + make.integers(2, 9, 9, 20)
        return of(
            a, b, make.torch.full((20,), -1.0), residual, 16, "products of -512 and what lifts them above 0", "lifted"
        )

    huge = make.signs(9, 1) * 2.0**60, make.signs(1, 20) * 2.0**60, make.signs(20) * 2.0**100, normal(9, 20)
    # The last one apart, never more rows than columns: whoever scales rows finds a number for each, and reads the diagnosis.
    return [
        case(16, 16, 16, 16, tags="square"),
        narrow(1, 1, 8),
        case(16, 32, 32, 16, "float16", "once"),
        case(16, 48, 20, 16),
        case(17, 30, 24, 16, "bfloat16", "once"),
        case(20, 45, 33, 32),
        case(5, 65, 128, 64),
        case(32, 32, 1, 16, tags="square"),
        of(*huge, 16, "products beyond float32", "beyond"),
        *map(sums, ("float16", "bfloat16", "float32")),
        taken_away(),
        case(64, 64, 64, 32, tags="square"),
        narrow(33, 5, 17, tags="tall"),
    ]


def _epilogue(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, *_: Any) -> Tensor:
    return (a @ b * scale + residual).relu()


def _by_row(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, *_: Any) -> Tensor:
    """scale[m] for scale[n]."""
    return (a @ b * scale[: len(a), None] + residual).relu()


def _epilogue_reads(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, block: int) -> int:
    """a for each column of tiles, b for each row of them, residual once; and scale for each row of the result: whoever loads a
    tile of it where a row would do repeats what the caches hold, which is not this exercise's subject."""
    return -(-len(scale) // block) * nbytes(a) + -(-len(a) // block) * nbytes(b) + 2 * nbytes(residual)


def _epilogue_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    accesses = [access for launch in launches for access in launch.accesses]
    loaded = sum(access.bytes for access in accesses if access.tensor == "residual_ptr")
    if loaded > nbytes(case.args[3]):
        return "traffic", "residual_ptr is loaded more than once: who in a tile needs the same element twice?"
    return ideas.in_registers("acc is in registers already: what does a trip to memory and back add to it?")(
        case, launches
    )


def _down_the_tile(evidence: Evidence) -> bool:
    """The numbers for a tile's columns were laid out as a column: its row i is scaled by the number i of them."""

    def scaled(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, block: int) -> Tensor:
        import torch

        rows, columns = torch.arange(len(a)), torch.arange(len(scale))
        of_tile = columns // block * block + rows[:, None] % block
        return (a.double() @ b.double() * scale[of_tile] + residual).relu()

    def near(outcome: Outcome) -> bool:
        given = scaled(*outcome.case.args)
        return bool((outcome.wrong.actual.double() - given).abs().max() <= 0.02 * given.abs().max())

    whole = [o for o in evidence.outcomes if o.wrong and len(o.case.args[2]) % o.case.args[4] == 0]
    return bool(whole) and all(map(near, whole))


def _residual_left_out(evidence: Evidence) -> bool:
    """What the residual lifts above 0 by some units is 0. Rounded to 16 bits it would be some units, too."""
    lifted = [outcome for outcome in evidence.outcomes if outcome.wrong and "lifted" in outcome.case.tags]
    return (
        bool(lifted)
        and ideas.only("lifted", "large-sums", "beyond")(evidence)
        and all(
            outcome.wrong.kind == "values" and bool((outcome.wrong.actual[outcome.wrong.expected >= 1] == 0).all())
            for outcome in lifted
        )
    )


EPILOGUE = KernelExercise(
    id="fusion.epilogue",
    function="epilogue",
    cases=_epilogue_cases,
    reference=ideas.in_float32(_epilogue),
    huge=lambda: [  # a begins its rows beyond 2^32, or the residual and y
        (far(M, K), far(K, N), far(N), far(M, N), 32) for M, K, N in ((3 << 24, 96, 32), (1 << 22, 16, 1536))
    ],
    traffic=Traffic(
        reads=_epilogue_reads,
        writes=lambda a, b, scale, residual, _: nbytes(residual),
        memory=lambda a, b, scale, residual, _: nbytes(residual),
        slack=0.01,
        again=True,  # "scale is small and does not matter"
    ),
    launch_rule=_epilogue_rule,
    misconceptions=(
        Misconception("residual-left-out", when=_residual_left_out),
        Misconception("low-precision", when=ideas.rounded_sums),
        Misconception("scale-by-row", gives=_by_row),
        Misconception("scale-by-row", when=_down_the_tile),
        Misconception("residual-scaled", gives=lambda a, b, scale, residual, *_: ((a @ b + residual) * scale).relu()),
        Misconception("relu-first", gives=lambda a, b, scale, residual, *_: (a @ b * scale).relu() + residual),
        Misconception("no-relu", gives=lambda a, b, scale, residual, *_: a @ b * scale + residual),
        Misconception("times-zero", when=ideas.only("beyond", kind="nan")),
        Misconception("no-residual", gives=lambda a, b, scale, *_: (a @ b * scale).relu()),
        Misconception("no-scale", gives=lambda a, b, scale, residual, *_: (a @ b + residual).relu()),
        Misconception(
            "transposed-tile",
            gives=lambda a, b, scale, residual, *_: (a @ b * scale + residual.reshape(residual.shape[::-1]).t()).relu(),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- fusion.detective
def _soft_cap_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def case(x: Tensor, cap: float, note: str = "", tags: str = "") -> Case:
        facts = "blocks" if x.numel() > 1024 else ""
        return tensor_case(x, cap, note=listed(f"cap {cap:g}", note), tags=f"{facts} {tags}")

    normal = make.normal
    large = normal(200, scale=30) + 1e4
    large[::2] *= -1
    small = normal(100, scale=0.02)
    return [
        case(make.torch.full((1,), 25.0), 30.0),
        case(normal(64, scale=30), 30.0),
        case(normal(781, scale=30), 50.0),
        case(normal(6, 100, scale=20, dtype="float16"), 20.0, tags="leading"),
        case(large, 30.0, "around 1e4 and -1e4", "large"),
        case(normal(7, 5, 3), 0.5),
        case(small.half(), 30.0, "far below the cap", "tiny"),
        case(small.bfloat16(), 2.0, "far below the cap", "tiny"),
        case(normal(1025, scale=30), 50.0),
        case(normal(2048, scale=30, dtype="float16"), 30.0, tags="once"),
        case(normal(50, 70, scale=30, dtype="bfloat16"), 50.0, tags="leading once"),
        case(make.special(31), 5.0, "with infinities and NaN", tags="special leading"),
    ]


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * (x / cap).tanh()


DETECTIVE = KernelExercise(
    id="fusion.detective",
    function="soft_cap",
    cases=_soft_cap_cases,
    reference=ideas.in_float32(_soft_cap),
    huge=lambda: (far(5 << 30), 50.0),
    traffic=Traffic(reads=1, writes=1, memory=1),
    misconceptions=(
        Misconception("low-precision", when=ideas.only("tiny")),
        Misconception("clamped", gives=lambda x, cap: x.clamp(-cap, cap)),
        Misconception("not-capped", gives=lambda x, cap: (x / cap).tanh()),
        _BLOCK_0,
        ideas.NOT_FINITE,
    ),
)

EXERCISES = [ACCESSES, SIN_COS, GATE, CUDA, RECOMPUTE, EPILOGUE, DETECTIVE]
