"""The exercises of notebook 07: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import padding
from gpukit.grading.inputs import Inputs, case, far, listed, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence


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
        case("a result for two kernels", {"u": ["x"], "v": ["u"], "w": ["u"]}, [["u"], ["v"], ["w"]], ["v", "w"]),
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
    expected=_accesses,
    misconceptions=(
        Misconception("nothing-fused", gives=_wrong_accesses(made_here=True, each_op=True, writes=_everything)),
        Misconception("read-per-operation", gives=_wrong_accesses(each_op=True)),
        Misconception("reads-its-own", gives=_wrong_accesses(made_here=True)),
        Misconception("writes-everything", gives=_wrong_accesses(writes=_everything)),
        Misconception("only-results", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in needed)),
        Misconception("never-needed", gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later)),
        Misconception(
            "used-inside",
            gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later | needed and t not in inside),
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
    return [
        case(make.torch.full((1,), 0.7), 2.0, -3.0, 16),
        case(normal(64, scale=3), 1.5, 0.25, 64),
        case(normal(50, scale=3), 0.5, 2.0, 64),
        case(normal(781, scale=3), -1.0, 3.0, 128),
        case(normal(3, 7, 11, scale=3), 2.0, 1.0, 32, tags="leading"),
        case(normal(2048, scale=3, dtype="float16"), 1.25, -0.5, 256),
        case(normal(1025, scale=3, dtype="bfloat16"), 4.0, 1.0, 256),
        case(normal(40, 300, scale=3), 0.75, -2.0, 1024, tags="leading"),
    ]


def _sin_cos(x: Tensor, a: float, b: float, *_: Any) -> Tensor:
    return a * x.sin() ** 2 + b * x.cos() ** 2


SIN_COS = KernelExercise(
    id="fusion.sin_cos",
    function="sin_cos",
    cases=_sin_cos_cases,
    reference=_sin_cos,
    huge=lambda: (far(3 << 30), 0.75, -2.0, 1024),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "square-first", gives=lambda x, a, b, *_: a * (x.float() ** 2).sin() + b * (x.float() ** 2).cos()
        ),
        Misconception("swapped", gives=lambda x, a, b, *_: a * x.cos() ** 2 + b * x.sin() ** 2),
        Misconception("not-squared", gives=lambda x, a, b, *_: a * x.sin() + b * x.cos()),
        Misconception("weight-squared", gives=lambda x, a, b, *_: (a * x.sin()) ** 2 + (b * x.cos()) ** 2),
        Misconception("one-term", gives=lambda x, a, b, *_: a * x.sin() ** 2),
        Misconception("one-term", gives=lambda x, a, b, *_: b * x.cos() ** 2),
        Misconception("program-id", when=_only_first(lambda x, a, b, block: block)),
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
    return [
        case(normal(1, 1)),
        case(normal(3, 64, scale=2)),
        case(normal(8, 256, scale=2, dtype="bfloat16")),
        case(normal(2, 1024, scale=2, dtype="float16")),
        case(high, "every third around 120", "large"),
        case(low, "around -12", "tiny"),
        case(normal(5, 50, scale=2)),
        case(normal(2, 1025, scale=2), tags="long"),
        case(normal(17, 781, scale=2)),
        case(make.torch.full((1, 40000), 2.0).half(), "constant", "constant long"),
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


GATE = KernelExercise(
    id="fusion.gate",
    function="gate",
    cases=_gate_cases,
    reference=_gate,
    huge=lambda: (far(49152, 65536),),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
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
        Misconception("lost-digits", when=lambda evidence: evidence.tag("tiny")),
        Misconception("program-id", when=_only_first(lambda x: x.shape[-1])),
        Misconception("block-too-small", when=lambda evidence: evidence.kind == "nan" and evidence.tag("long")),
    ),
)


# ---------------------------------------------------------------------------------------------------- fusion.recompute
def _recompute_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)
    normal = make.normal

    def case(*shape: int, dtype: str = "float32", scale: float = 2.0, tags: str = "") -> Case:
        x, dy = normal(*shape, scale=scale, dtype=dtype), normal(*shape, dtype=dtype)
        facts = "blocks" if x.numel() > 1024 else ""
        return tensor_case(x, dy, tags=f"{facts} {tags}")

    return [
        case(1),
        case(64),
        case(781),
        case(3, 5, 7, tags="leading"),
        case(1024, dtype="float16"),
        case(1025, dtype="bfloat16"),
        case(256, scale=20.0, tags="large"),
        case(50, 70, tags="leading"),
        case(3, 2000, tags="leading"),
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
        if outcome.wrong:
            y, dx = (outcome.reply.outputs[name].double() for name in ("y", "dx"))
            s2 = (y / (1 - y)).log()
            s1 = (s2 / (1 - s2)).log()
            predicted = outcome.case.args[1].double() * _slope(y) * _slope(s2) * _slope(s1)
            if not predicted.allclose(dx, rtol=0.05, atol=0.02 * float(dx.abs().max()), equal_nan=True):
                return False
    return True


RECOMPUTE = KernelExercise(
    id="fusion.recompute",
    function="three_sigmoids",
    cases=_recompute_cases,
    reference=_three_sigmoids,
    huge=lambda: (far(3 << 30), far(3 << 30)),
    gradients=1,
    traffic=Traffic(reads=3, writes=2, launches=2),
    misconceptions=(
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
        Misconception("inverted", when=_inverted_sigmoids),
        _BLOCK_0,
    ),
)


# ----------------------------------------------------------------------------------------------------- fusion.epilogue
def _epilogue_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)
    normal = make.normal

    def case(M: int, N: int, K: int, block: int, dtype: str = "float32", tags: str = "") -> Case:
        a, b = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype)
        scale, residual = normal(N, scale=0.5, dtype=dtype), normal(M, N, scale=2.0, dtype=dtype)
        ragged = "partial" if M % block or N % block else ""
        shown = f"a [{M}, {K}], b [{K}, {N}]"
        return tensor_case(a, b, scale, residual, block, shown=shown, note=f"BLOCK {block}", tags=f"{ragged} {tags}")

    return [  # never more rows than columns: whoever scales rows then finds a number for each, and reads the diagnosis
        case(16, 16, 16, 16, tags="square"),
        case(1, 1, 8, 16),
        case(16, 32, 32, 16, "float16"),
        case(16, 48, 20, 16),
        case(17, 30, 24, 16, "bfloat16"),
        case(20, 45, 33, 32),
        case(64, 64, 64, 32, tags="square"),
    ]


def _epilogue(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, *_: Any) -> Tensor:
    return (a @ b * scale + residual).relu()


def _by_row(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, *_: Any) -> Tensor:
    """scale[m] for scale[n]."""
    return (a @ b * scale[: len(a), None] + residual).relu()


EPILOGUE = KernelExercise(
    id="fusion.epilogue",
    function="epilogue",
    cases=_epilogue_cases,
    reference=_epilogue,
    huge=lambda: (far(1 << 25, 96), far(96, 32), far(32), far(1 << 25, 32), 32),
    # Of the largest case, 64 x 64 x 64 in tiles of 32: a twice, b twice, residual; and whoever loads a tile of scale where a
    # row would do repeats what the caches hold, which is not this exercise's subject.
    traffic=Traffic(reads=6, writes=1, slack=0.01),
    misconceptions=(
        Misconception("scale-by-row", gives=_by_row),
        Misconception("residual-scaled", gives=lambda a, b, scale, residual, *_: ((a @ b + residual) * scale).relu()),
        Misconception("relu-first", gives=lambda a, b, scale, residual, *_: (a @ b * scale).relu() + residual),
        Misconception("no-relu", gives=lambda a, b, scale, residual, *_: a @ b * scale + residual),
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
    return [
        case(make.torch.full((1,), 25.0), 30.0),
        case(normal(64, scale=30), 30.0),
        case(normal(781, scale=30), 50.0),
        case(normal(6, 100, scale=20, dtype="float16"), 20.0, tags="leading"),
        case(large, 30.0, "around 1e4 and -1e4", "large"),
        case(normal(1025, scale=30), 50.0),
        case(normal(2048, scale=30, dtype="float16"), 30.0),
        case(normal(50, 70, scale=30, dtype="bfloat16"), 50.0, tags="leading"),
    ]


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * (x / cap).tanh()


DETECTIVE = KernelExercise(
    id="fusion.detective",
    function="soft_cap",
    cases=_soft_cap_cases,
    reference=_soft_cap,
    huge=lambda: (far(3 << 30), 50.0),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("clamped", gives=lambda x, cap: x.clamp(-cap, cap)),
        Misconception("not-capped", gives=lambda x, cap: (x / cap).tanh()),
        _BLOCK_0,
    ),
)

EXERCISES = [ACCESSES, SIN_COS, GATE, RECOMPUTE, EPILOGUE, DETECTIVE]
