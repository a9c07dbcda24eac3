"""The exercises of notebook 07: cases, traffic bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence

NOTEBOOK = "07_fusion"


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, size: float = 1.0, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).mul_(size).to(getattr(self.torch, dtype))

    def full(self, *shape: int, value: float) -> Tensor:
        return self.torch.full(shape, value)


def _case(x: Tensor, *rest: Any, shown: str = "", tags: str = "") -> Case:
    dtype = str(x.dtype).removeprefix("torch.")
    name = f"x {list(x.shape)} {dtype}" + (f", {shown}" if shown else "")
    return Case(name, (x, *rest), frozenset({dtype, *tags.split()}))


def _only_first(count: Callable[..., int]) -> Callable[[Evidence], bool]:
    """The first `count(*args)` elements were written, and no other."""

    def when(evidence: Evidence) -> bool:
        if evidence.kind != "nan":
            return False
        y, first = evidence.outputs.reshape(-1), count(*evidence.case.args)
        return 0 < first < len(y) and not bool(y[:first].isnan().any()) and bool(y[first:].isnan().all())

    return when


_OUTSIDE = Misconception("out-of-bounds", "the last block hangs over the end: which of its lanes may touch memory?")
_BLOCK_0 = Misconception(
    "program-id",
    "the first block is right and the rest was never written. What distinguishes program 1 from program 0?",
    when=_only_first(lambda *_: 1024),
)


# ----------------------------------------------------------------------------------------------------- fusion.accesses
Ops, Kernels, Needed = dict[str, list[str]], list[list[str]], list[str]
_GELU = {
    "half": ["x"], "a": ["x"], "b": ["a", "x"], "c": ["b", "x"], "d": ["x", "c"], "e": ["d"], "t": ["e"], "u": ["t"],
    "y": ["half", "u"],
}  # fmt: skip
_SIGMOIDS = {"s1": ["x"], "s2": ["s1"], "y": ["s2"], "ds2": ["dy", "y"], "ds1": ["ds2", "s2"], "dx": ["ds1", "s1"]}
_AGAIN = {
    "s1": ["x"], "s2": ["s1"], "y": ["s2"], "r1": ["x"], "r2": ["r1"], "r3": ["r2"], "ds2": ["dy", "r3"],
    "ds1": ["ds2", "r2"], "dx": ["ds1", "r1"],
}  # fmt: skip


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
    def case(name: str, ops: Ops, kernels: Kernels, needed: Needed) -> Case:
        return Case(name, (ops, kernels, needed))

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


_A_MADE = "wanted = {tensor for output in made for tensor in ops[output]}"
_A_READS = "reads += len(wanted - set(made))"
_A_LATER = "later = {tensor for kernel in kernels[i + 1 :] for output in kernel for tensor in ops[output]}"
_A_WRITES = "writes += len(set(made) & (later | set(needed)))"

ACCESSES = FunctionExercise(
    id="fusion.accesses",
    title="Count what a fused graph reads and writes",
    notebook=NOTEBOOK,
    function="accesses",
    label=Label(2, 15, "which tensors live in memory, and which only in registers"),
    hints=(
        "Draw a line around each kernel. Which arrows cross a line from outside, and which from inside?",
        "A tensor comes in if some operation of the kernel needs it and none of them makes it; then it comes in once, "
        "however many of them need it. A tensor goes out if a later kernel or the caller needs it, whether or not the "
        "kernel has used it too.",
        "For each kernel take the set of all tensors that its operations need, and take away the set of those that it "
        "makes: so many reads. Take the set of those that it makes, and keep what is needed at the end or by an "
        "operation of any kernel after this one: so many writes.",
    ),
    cases=_accesses_cases,
    expected=_accesses,
    misconceptions=(
        Misconception(
            "nothing-fused",
            "so each operation goes to memory and back, whatever shares a kernel. Where is the result of the first "
            "operation when the second one of the same kernel needs it?",
            gives=_wrong_accesses(made_here=True, each_op=True, writes=_everything),
        ),
        Misconception(
            "read-per-operation",
            "so a kernel reads x again for each of its operations. Where is x after the first of them?",
            gives=_wrong_accesses(each_op=True),
        ),
        Misconception(
            "reads-its-own",
            "so a kernel reads from memory what it has made itself. Who wrote it there?",
            gives=_wrong_accesses(made_here=True),
        ),
        Misconception(
            "writes-everything",
            "so every result is written. Which of them does nobody outside its kernel ever look at?",
            gives=_wrong_accesses(writes=_everything),
        ),
        Misconception(
            "only-results",
            "so only what is needed at the end is written. How does a tensor get from one kernel to the next?",
            gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in needed),
        ),
        Misconception(
            "never-needed",
            "so a tensor is written only for a later kernel. Who needs the last one?",
            gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later),
        ),
        Misconception(
            "used-inside",
            "so what a kernel uses itself is never written. Can somebody else need it as well?",
            gives=_wrong_accesses(writes=lambda t, inside, later, needed: t in later | needed and t not in inside),
        ),
        Misconception(
            "inputs-free",
            "so the inputs of the graph cost nothing. Where do they lie before the first kernel?",
            gives=_wrong_accesses(inputs=False),
        ),
        Misconception(
            "each-tensor-once",
            "so a tensor that two kernels need is read once. Does anything stay in registers when a kernel ends?",
            gives=_each_tensor_once,
        ),
        Misconception(
            "order",
            "both counts are there, in the other order. Which does the contract name first?",
            gives=lambda *graph: _accesses(*graph)[::-1],
        ),
    ),
    wrong=(
        Variant(
            "every-operation",
            source="def accesses(ops, kernels, needed):\n"
            "    return sum(len(set(inputs)) for inputs in ops.values()), len(ops)\n",
            diagnosis="nothing-fused",
        ),
        Variant(
            "once-for-each-operation",
            ((_A_READS, "reads += sum(len(set(ops[output]) - set(made)) for output in made)"),),
            diagnosis="read-per-operation",
        ),
        Variant("reads-what-it-made", ((_A_READS, "reads += len(wanted)"),), diagnosis="reads-its-own"),
        Variant("writes-all", ((_A_WRITES, "writes += len(made)"),), diagnosis="writes-everything"),
        Variant("writes-results", ((_A_WRITES, "writes += len(set(made) & set(needed))"),), diagnosis="only-results"),
        Variant("writes-for-later", ((_A_WRITES, "writes += len(set(made) & later)"),), diagnosis="never-needed"),
        Variant(
            "keeps-what-it-uses",
            ((_A_WRITES, "writes += len((set(made) & (later | set(needed))) - wanted)"),),
            diagnosis="used-inside",
        ),
        Variant(
            "inputs-for-nothing",
            ((_A_READS, "reads += len(wanted.intersection(ops) - set(made))"),),
            diagnosis="inputs-free",
        ),
        Variant(
            "one-read-a-tensor",
            (
                ("    reads = writes = 0\n", "    reads = writes = 0\n    seen = set()\n"),
                (_A_READS, "reads += len(wanted - set(made) - seen)\n        seen |= wanted - set(made)"),
            ),
            diagnosis="each-tensor-once",
        ),
        Variant("the-other-order", (("return reads, writes", "return writes, reads"),), diagnosis="order"),
        Variant("their-sum", (("return reads, writes", "return reads + writes"),), diagnosis="type"),
        Variant(
            "counts-twice-given",
            (
                (_A_MADE, "wanted = [tensor for output in made for tensor in ops[output]]"),
                (_A_READS, "reads += sum(tensor not in made for tensor in wanted)"),
            ),
            diagnosis="values",
        ),
        Variant(
            "next-kernel-only", ((_A_LATER, _A_LATER.replace("[i + 1 :]", "[i + 1 : i + 2]")),), diagnosis="values"
        ),
    ),
    right=(
        Variant(
            "who-makes-what",
            source="""def accesses(ops, kernels, needed):
    home = {name: i for i, kernel in enumerate(kernels) for name in kernel}
    crossings = set()
    for name, inputs in ops.items():
        for tensor in inputs:
            if home.get(tensor, -1) != home[name]:
                crossings.add((tensor, home[name]))
    outgoing = {tensor for tensor, _ in crossings if tensor in home} | {name for name in needed if name in home}
    return len(crossings), len(outgoing)
""",
        ),
        Variant(
            "backwards",
            source="""def accesses(ops, kernels, needed):
    alive = set(needed)
    reads = writes = 0
    for kernel in reversed(kernels):
        writes += sum(1 for name in kernel if name in alive)
        incoming = []
        for name in kernel:
            for tensor in ops[name]:
                if tensor not in kernel and tensor not in incoming:
                    incoming.append(tensor)
        reads += len(incoming)
        alive.update(incoming)
    return [reads, writes]
""",
        ),
    ),
    timeout_s=20.0,
)


# ------------------------------------------------------------------------------------------------------ fusion.sin_cos
def _sin_cos_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, a: float, b: float, block: int, tags: str = "") -> Case:
        facts = ["blocks" if x.numel() > block else "", "partial" if x.numel() % block else "", tags]
        return _case(x, a, b, block, shown=f"a {a:g}, b {b:g}, BLOCK {block}", tags=" ".join(facts))

    normal = make.normal
    return [
        case(make.full(1, value=0.7), 2.0, -3.0, 16),
        case(normal(64, size=3), 1.5, 0.25, 64),
        case(normal(50, size=3), 0.5, 2.0, 64),
        case(normal(781, size=3), -1.0, 3.0, 128),
        case(normal(3, 7, 11, size=3), 2.0, 1.0, 32, tags="leading"),
        case(normal(2048, size=3, dtype="float16"), 1.25, -0.5, 256),
        case(normal(1025, size=3, dtype="bfloat16"), 4.0, 1.0, 256),
        case(normal(40, 300, size=3), 0.75, -2.0, 1024, tags="leading"),
    ]


def _sin_cos(x: Tensor, a: float, b: float, *_: Any) -> Tensor:
    return a * x.sin() ** 2 + b * x.cos() ** 2


_S_LOAD = "    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)\n    sine"
_S_MATHS = "    sine, cosine = tl.sin(x), tl.cos(x)\n"
_S_STORE = "    tl.store(y_ptr + offs, a * sine * sine + b * cosine * cosine, mask=offs < n)\n"
_S_LAUNCH = "    sin_cos_kernel[(triton.cdiv(n, BLOCK),)](x, y, a, b, n, BLOCK=BLOCK)\n"

SIN_COS = KernelExercise(
    id="fusion.sin_cos",
    title="Five operations in one read and one write",
    notebook=NOTEBOOK,
    function="sin_cos",
    label=Label(2, 15, "a chain of elementwise operations in registers"),
    hints=(
        "How many operations of the formula need x? How many of them need memory?",
        "A loaded block is a value like any other: it can be used as often as you like. The mask that keeps the load "
        "inside x keeps the store inside y.",
        "Three steps: load the block with a mask that compares its offsets with n, and convert it to float32; take the "
        "sine and the cosine of that value; store the sum of the two weighted squares with the same mask.",
    ),
    cases=_sin_cos_cases,
    reference=_sin_cos,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "square-first",
            "this is the sine of a square. In sin(x)**2, what is squared?",
            gives=lambda x, a, b, *_: a * (x.float() ** 2).sin() + b * (x.float() ** 2).cos(),
        ),
        Misconception(
            "swapped",
            "a and b have changed places. Which of them belongs to the sine?",
            gives=lambda x, a, b, *_: a * x.cos() ** 2 + b * x.sin() ** 2,
        ),
        Misconception(
            "not-squared",
            "nothing is squared here: a sin(x) + b cos(x).",
            gives=lambda x, a, b, *_: a * x.sin() + b * x.cos(),
        ),
        Misconception(
            "weight-squared",
            "the weights are squared along with what they weigh. Which comes first?",
            gives=lambda x, a, b, *_: (a * x.sin()) ** 2 + (b * x.cos()) ** 2,
        ),
        Misconception(
            "one-term",
            "one of the two terms is missing.",
            gives=lambda x, a, b, *_: a * x.sin() ** 2,
        ),
        Misconception(
            "one-term",
            "one of the two terms is missing.",
            gives=lambda x, a, b, *_: b * x.cos() ** 2,
        ),
        Misconception(
            "program-id",
            "the first block is right and the rest was never written. What distinguishes program 1 from program 0?",
            when=_only_first(lambda x, a, b, block: block),
        ),
        Misconception("traffic", "a block that is in registers can be used twice: who brings it there, and how often?"),
        Misconception("launches", "what one kernel leaves in memory the next one has to fetch: who saves the trip?"),
        _OUTSIDE,
    ),
    wrong=(
        Variant(
            "loads-twice",
            (
                (
                    _S_MATHS,
                    "    again = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)\n"
                    "    sine, cosine = tl.sin(x), tl.cos(again)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "through-memory",
            (
                (
                    _S_MATHS,
                    "    tl.store(y_ptr + offs, a * tl.sin(x) * tl.sin(x), mask=offs < n)\n    cosine = tl.cos(x)\n",
                ),
                (
                    _S_STORE,
                    "    y = tl.load(y_ptr + offs, mask=offs < n).to(tl.float32) + b * cosine * cosine\n"
                    "    tl.store(y_ptr + offs, y, mask=offs < n)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "through-a-scratch-tensor",
            (
                ("def sin_cos_kernel(x_ptr, y_ptr, a,", "def sin_cos_kernel(x_ptr, t_ptr, y_ptr, a,"),
                (_S_MATHS, "    tl.store(t_ptr + offs, tl.sin(x), mask=offs < n)\n    cosine = tl.cos(x)\n"),
                (
                    _S_STORE,
                    "    sine = tl.load(t_ptr + offs, mask=offs < n)\n" + _S_STORE,
                ),
                (
                    _S_LAUNCH,
                    "    t = torch.empty(n, dtype=torch.float32, device=x.device)\n"
                    + _S_LAUNCH.replace("(x, y,", "(x, t, y,"),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "two-launches",
            (
                (
                    _S_LAUNCH,
                    "    half = torch.empty_like(x, dtype=torch.float32)\n"
                    "    sin_cos_kernel[(triton.cdiv(n, BLOCK),)](x, half, a, 0.0, n, BLOCK=BLOCK)\n"
                    "    add_kernel[(triton.cdiv(n, BLOCK),)](x, half, y, b, n, BLOCK=BLOCK)\n",
                ),
                (
                    "def sin_cos(x: Tensor, a",
                    "@triton.jit\ndef add_kernel(x_ptr, half_ptr, y_ptr, b, n, BLOCK: tl.constexpr):\n"
                    "    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    cosine = tl.cos(tl.load(x_ptr + offs, mask=offs < n).to(tl.float32))\n"
                    "    half = tl.load(half_ptr + offs, mask=offs < n)\n"
                    "    tl.store(y_ptr + offs, half + b * cosine * cosine, mask=offs < n)\n\n\n"
                    "def sin_cos(x: Tensor, a",
                ),
            ),
            diagnosis="launches",
        ),
        Variant(
            "sine-of-square",
            ((_S_STORE, "    tl.store(y_ptr + offs, a * tl.sin(x * x) + b * tl.cos(x * x), mask=offs < n)\n"),),
            diagnosis="square-first",
        ),
        Variant("weights-swapped", ((_S_MATHS, "    cosine, sine = tl.sin(x), tl.cos(x)\n"),), diagnosis="swapped"),
        Variant(
            "no-squares",
            ((_S_STORE, _S_STORE.replace("sine * sine", "sine").replace("cosine * cosine", "cosine")),),
            diagnosis="not-squared",
        ),
        Variant(
            "squares-the-weights",
            ((_S_STORE, _S_STORE.replace("a * sine * sine + b", "a * a * sine * sine + b * b")),),
            diagnosis="weight-squared",
        ),
        Variant("sine-only", ((_S_STORE, _S_STORE.replace(" + b * cosine * cosine", "")),), diagnosis="one-term"),
        Variant("sixteen-bit-sine", ((_S_LOAD, _S_LOAD.replace(".to(tl.float32)", "")),), diagnosis="exception"),
        Variant("no-store-mask", ((_S_STORE, _S_STORE.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant("no-load-mask", ((_S_LOAD, _S_LOAD.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "one-block", ((_S_LAUNCH, _S_LAUNCH.replace("(triton.cdiv(n, BLOCK),)", "(1,)")),), diagnosis="program-id"
        ),
        Variant(
            "calls-torch",
            ((_S_LAUNCH, "    return a * torch.sin(x) ** 2 + b * torch.cos(x) ** 2\n"),),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "half-in-torch",
            (
                (_S_LAUNCH, "    x = torch.sin(x)\n" + _S_LAUNCH),
                (_S_MATHS, "    sine = x\n    cosine = tl.sqrt(1 - x * x)\n"),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "over-x",
            ((_S_LAUNCH, _S_LAUNCH.replace("(x, y,", "(x, x,") + "    return x\n"),),
            diagnosis="input-changed",
        ),
    ),
    right=(
        Variant(
            "one-function-is-enough",
            (
                (_S_MATHS, "    sine = tl.sin(x)\n"),
                (_S_STORE, _S_STORE.replace("a * sine * sine + b * cosine * cosine", "b + (a - b) * sine * sine")),
            ),
        ),
        Variant(
            "double-angle",
            (
                (_S_MATHS, "    twice = tl.cos(2 * x)\n"),
                (
                    _S_STORE,
                    _S_STORE.replace("a * sine * sine + b * cosine * cosine", "0.5 * (a + b) + 0.5 * (b - a) * twice"),
                ),
            ),
        ),
        Variant(
            "few-programs-walk",
            source="""import torch
import triton
import triton.language as tl


@triton.jit
def walk(source, target, weights_a, weights_b, size, LANES: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(size, LANES), tl.num_programs(0)):
        i = block * LANES + tl.arange(0, LANES)
        inside = i < size
        angle = tl.cast(tl.load(source + i, inside, 0.0), tl.float32)
        s, c = tl.sin(angle), tl.cos(angle)
        tl.store(target + i, tl.fma(weights_a * s, s, weights_b * c * c), inside)


def sin_cos(x, a, b, BLOCK=1024):
    y = x.new_empty(x.shape)
    walk[(min(4, triton.cdiv(x.numel(), BLOCK)),)](x, y, a, b, x.numel(), LANES=BLOCK)
    return y
""",
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------- fusion.gate
def _gate_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, shown: str = "", tags: str = "") -> Case:
        tail = "tail" if x.shape[-1] & (x.shape[-1] - 1) else ""
        return _case(x, shown=shown, tags=f"{tail} {tags}")

    high, low = normal(2, 256, size=2), normal(2, 100, size=2) - 12
    high[:, ::3] += 120
    return [
        case(normal(1, 1)),
        case(normal(3, 64, size=2)),
        case(normal(8, 256, size=2, dtype="bfloat16")),
        case(normal(2, 1024, size=2, dtype="float16")),
        case(high, "every third around 120", "large"),
        case(low, "around -12", "tiny"),
        case(normal(5, 50, size=2)),
        case(normal(2, 1025, size=2), tags="long"),
        case(normal(17, 781, size=2)),
        case(make.full(1, 40000, value=2.0).half(), "constant", "constant long"),
    ]


def _gate(x: Tensor) -> Tensor:
    score = x.sigmoid()
    return score / score.sum(-1, keepdim=True)


def _row_padding(x: Tensor) -> int:
    return (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]


def _padded_gate(x: Tensor) -> Tensor:
    """Padding lanes that hold 0 have a sigmoid of one half."""
    score = x.sigmoid()
    return score / (score.sum(-1, keepdim=True) + 0.5 * _row_padding(x))


def _overflowing_gate(x: Tensor) -> Tensor:
    """exp(x) / (1 + exp(x)) in float32."""
    e = x.float().exp()
    score = e / (1 + e)
    return score / score.sum(-1, keepdim=True)


_G_LOAD = '    x = tl.load(x_ptr + row + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)\n'
_G_SCORE = "    score = 1 / (1 + tl.exp(-x))\n"
_G_STORE = "    tl.store(y_ptr + row + offs_n, score / tl.sum(score, axis=0), mask=mask_n)\n"
_G_LAUNCH = "    gate_kernel[(M,)](x, y, N, BLOCK_N=triton.next_power_of_2(N))\n"
_G_ZERO = (_G_LOAD, _G_LOAD.replace('-float("inf")', "0.0"))

GATE = KernelExercise(
    id="fusion.gate",
    title="A row sum after an elementwise function",
    notebook=NOTEBOOK,
    function="gate",
    label=Label(2, 20, "a reduction fused with what comes before it; what padding becomes on the way"),
    hints=(
        "A lane past the end of the row holds what you gave it at the load. The sigmoid is applied to it too: what does "
        "it add to the sum?",
        "Two ways out: a value whose sigmoid is 0, or a choice after the sigmoid that puts a 0 where the mask is off. "
        "The row stays in registers between the sum and the division.",
        "A mask that compares the lanes with N; the masked load of the row, with a value in the other lanes whose "
        "sigmoid vanishes, in float32; one over one plus the exponential of minus that; the store of it divided by its "
        "sum over the lanes, with the same mask.",
    ),
    cases=_gate_cases,
    reference=_gate,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "padding-through-function",
            lambda evidence: (
                f"the {_row_padding(*evidence.case.args)} padding lanes add one half each to the sum. They held 0 after "
                "the load: what did the sigmoid make of it?"
            ),
            gives=_padded_gate,
        ),
        Misconception(
            "not-normalised",
            "these are the sigmoids. What must a row add up to?",
            gives=lambda x: x.sigmoid(),
        ),
        Misconception(
            "softmax",
            "this is a softmax: exponentials over their sum. Which function does the contract name?",
            gives=lambda x: x.softmax(-1),
        ),
        Misconception(
            "normalised-first",
            "the row was divided by its sum before the sigmoid. Which comes first?",
            gives=lambda x: (x / x.sum(-1, keepdim=True)).sigmoid(),
        ),
        Misconception(
            "mean",
            "each row adds up to its length: it was divided by the mean, not by the sum.",
            gives=lambda x: _gate(x) * x.shape[-1],
        ),
        Misconception(
            "overflow",
            "only large inputs go wrong: exp(120) is no float32. Which form of the sigmoid has an exponential that may "
            "become infinite and still gives 1?",
            gives=_overflowing_gate,
        ),
        Misconception(
            "lost-digits",
            "only rows of tiny scores go wrong: the padding was added to their sum and taken away again. Which digits of a "
            "small number survive the company of a large one?",
            when=lambda evidence: evidence.tag("tiny"),
        ),
        Misconception(
            "program-id",
            "row 0 is there and no other row was written. Which row does program 5 compute?",
            when=_only_first(lambda x: x.shape[-1]),
        ),
        Misconception(
            "block-too-small",
            "only the longest rows are wrong, and they end in elements that were never written. How long must a block be "
            "that holds any N?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("long"),
        ),
        Misconception("traffic", "the scores need no memory between the sum and the division: where can they wait?"),
        Misconception("launches", "a program holds its whole row: what does it need a second kernel for?"),
        Misconception("race", "rows overlap: does the store reach beyond the N elements of its own row?"),
        _OUTSIDE,
    ),
    wrong=(
        Variant("pads-with-zero", (_G_ZERO,), diagnosis="padding-through-function"),
        Variant("no-sum", ((_G_STORE, _G_STORE.replace(" / tl.sum(score, axis=0)", "")),), diagnosis="not-normalised"),
        Variant("exponentials", ((_G_SCORE, "    score = tl.exp(x - tl.max(x, axis=0))\n"),), diagnosis="softmax"),
        Variant("mean-of-row", ((_G_STORE, _G_STORE.replace("score / tl", "score * N / tl")),), diagnosis="mean"),
        Variant(
            "divides-first",
            (
                _G_ZERO,
                (_G_SCORE, "    score = 1 / (1 + tl.exp(-x / tl.sum(x, axis=0)))\n"),
                (_G_STORE, _G_STORE.replace(" / tl.sum(score, axis=0)", "")),
            ),
            diagnosis="normalised-first",
        ),
        Variant(
            "exp-over-one-plus-exp", ((_G_SCORE, "    score = tl.exp(x) / (1 + tl.exp(x))\n"),), diagnosis="overflow"
        ),
        Variant(
            "takes-the-padding-back",
            (
                _G_ZERO,
                (
                    _G_STORE,
                    "    total = tl.sum(score, axis=0) - 0.5 * tl.sum((~mask_n).to(tl.float32), axis=0)\n"
                    + _G_STORE.replace("tl.sum(score, axis=0)", "total"),
                ),
            ),
            diagnosis="lost-digits",
        ),
        Variant(
            "scores-through-y",
            (
                (
                    _G_SCORE,
                    _G_SCORE + "    tl.store(y_ptr + row + offs_n, score, mask=mask_n)\n"
                    "    total = tl.sum(score, axis=0)\n"
                    "    score = tl.load(y_ptr + row + offs_n, mask=mask_n).to(tl.float32)\n",
                ),
                (_G_STORE, _G_STORE.replace("tl.sum(score, axis=0)", "total")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "loads-twice",
            (
                (
                    _G_STORE,
                    "    total = tl.sum(score, axis=0)\n"
                    + _G_LOAD
                    + _G_SCORE
                    + _G_STORE.replace("tl.sum(score, axis=0)", "total"),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "two-launches",
            (
                (
                    "def gate(x: Tensor)",
                    "@triton.jit\ndef sums_kernel(x_ptr, sums_ptr, N, BLOCK_N: tl.constexpr):\n"
                    "    row = tl.program_id(0).to(tl.int64)\n    offs_n = tl.arange(0, BLOCK_N)\n"
                    '    x = tl.load(x_ptr + row * N + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)\n'
                    "    tl.store(sums_ptr + row, tl.sum(1 / (1 + tl.exp(-x)), axis=0))\n\n\n"
                    "def gate(x: Tensor)",
                ),
                ("def gate_kernel(x_ptr, y_ptr,", "def gate_kernel(x_ptr, sums_ptr, y_ptr,"),
                (_G_STORE, _G_STORE.replace("tl.sum(score, axis=0)", "tl.load(sums_ptr + tl.program_id(0))")),
                (
                    _G_LAUNCH,
                    "    sums = torch.empty(M, dtype=torch.float32, device=x.device)\n"
                    "    sums_kernel[(M,)](x, sums, N, BLOCK_N=triton.next_power_of_2(N))\n"
                    + _G_LAUNCH.replace("(x, y,", "(x, sums, y,"),
                ),
            ),
            diagnosis="launches",
        ),
        Variant("no-store-mask", ((_G_STORE, _G_STORE.replace(", mask=mask_n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "no-load-mask",
            ((_G_LOAD, _G_LOAD.replace(', mask=mask_n, other=-float("inf")', "")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "mask-one-too-wide",
            (("    mask_n = offs_n < N\n    # sigmoid", "    mask_n = offs_n <= N\n    # sigmoid"),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "block-for-one-size",
            ((_G_LAUNCH, _G_LAUNCH.replace("triton.next_power_of_2(N)", "min(triton.next_power_of_2(N), 1000)")),),
            diagnosis="exception",
        ),
        Variant(
            "block-too-short",
            ((_G_LAUNCH, _G_LAUNCH.replace("triton.next_power_of_2(N)", "min(triton.next_power_of_2(N), 1024)")),),
            diagnosis="block-too-small",
        ),
        Variant(
            "calls-torch",
            ((_G_LAUNCH, "    x = x.sigmoid()\n    return x / x.sum(-1, keepdim=True)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "masks-after-the-function",
            (_G_ZERO, (_G_SCORE, "    score = tl.where(mask_n, tl.sigmoid(x), 0.0)\n")),
        ),
        Variant(
            "half-a-tanh-in-two-steps",
            (
                (_G_SCORE, "    t = tl.exp(-tl.abs(x))\n    score = tl.where(x >= 0, 1.0, t) / (1.0 + t)\n"),
                (
                    _G_STORE,
                    "    share = 1.0 / tl.sum(score, axis=0)\n    tl.store(y_ptr + row + offs_n, score * share, mask_n)\n",
                ),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- fusion.recompute
def _recompute_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(*shape: int, dtype: str = "float32", size: float = 2.0, tags: str = "") -> Case:
        x, dy = normal(*shape, size=size, dtype=dtype), normal(*shape, dtype=dtype)
        facts = "blocks" if x.numel() > 1024 else ""
        return _case(x, dy, tags=f"{facts} {tags}")

    return [
        case(1),
        case(64),
        case(781),
        case(3, 5, 7, tags="leading"),
        case(1024, dtype="float16"),
        case(1025, dtype="bfloat16"),
        case(256, size=20.0, tags="large"),
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


_R_SAVE = "        ctx.save_for_backward(x)\n"
_R_LOAD = "    x = tl.load(saved_ptr + offs, mask=offs < n).to(tl.float32)\n"
_R_DY = "    dy = tl.load(dy_ptr + offs, mask=offs < n).to(tl.float32)\n"
_R_AGAIN = "    s1 = sigmoid(x)\n    s2 = sigmoid(s1)\n    y = sigmoid(s2)\n"
_R_STORE = "    tl.store(dx_ptr + offs, dy * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1), mask=offs < n)\n"
_R_BACKWARD = (
    "        three_sigmoids_backward_kernel[(triton.cdiv(dy.numel(), 1024),)](saved, dy, dx, dy.numel(), BLOCK=1024)\n"
)

RECOMPUTE = KernelExercise(
    id="fusion.recompute",
    title="Compute it again instead of keeping it",
    notebook=NOTEBOOK,
    function="three_sigmoids",
    label=Label(3, 30, "recomputation in a fused backward pass; what to save"),
    hints=(
        "The chain rule multiplies three slopes, and each is made of the result of its own sigmoid. Which one tensor of "
        "the forward pass lets you compute all three results, without losing digits?",
        "Arithmetic in registers costs next to nothing here; a tensor in memory costs a write now and a read later. Save "
        "where the chain begins and run it again in the backward kernel, then multiply dy by the three slopes.",
        "In forward, save x. In the backward kernel load what was saved and dy, masked, in float32; apply the sigmoid "
        "three times and keep all three results; store dy times each result times one minus that result.",
    ),
    cases=_recompute_cases,
    reference=_three_sigmoids,
    gradients=1,
    traffic=Traffic(reads=3, writes=2, launches=2),
    misconceptions=(
        Misconception(
            "only-the-last",
            "y is right; the gradient is that of the last sigmoid alone. Through how many does dy have to go back?",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y)),
        ),
        Misconception(
            "slope-missing",
            "y is right; one of the three slopes is missing from the product.",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y) * _slope(s2)),
        ),
        Misconception(
            "slope-missing",
            "y is right; one of the three slopes is missing from the product.",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(y) * _slope(s1)),
        ),
        Misconception(
            "slope-missing",
            "y is right; one of the three slopes is missing from the product.",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1)),
        ),
        Misconception(
            "slope-of-the-input",
            "y is right; each slope was made of what went into its sigmoid. Of which number is s (1 - s) the slope: of "
            "the sigmoid's argument or of its result?",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1) * _slope(x)),
        ),
        Misconception(
            "sum-of-slopes",
            "y is right; the slopes were added. What does the chain rule do with them?",
            gives=_sigmoids_backward(lambda x, s1, s2, y: _slope(s2) + _slope(s1) + _slope(y)),
        ),
        Misconception(
            "y-taken-for-x",
            "y is right; the backward pass treats the saved tensor as x, and it is y. What did forward save?",
            gives=lambda x, dy: _sigmoids_backward(lambda _, s1, s2, y: _slope(s2) * _slope(s1) * _slope(y))(
                _three_sigmoids(x), dy
            ),
        ),
        Misconception(
            "forgets-dy",
            "y is right; this is the derivative of y alone. What is it to be multiplied by?",
            gives=lambda x, dy: {
                "dx": _sigmoids_backward(lambda x, s1, s2, y: _slope(s2) * _slope(s1) * _slope(y))(x, dy)["dx"] / dy
            },
        ),
        Misconception(
            "inverted",
            "y is right. All of y lies between 0.62 and 0.68 and has been rounded: few digits are left to find x again. "
            "Which tensor still has them?",
            when=_inverted_sigmoids,
        ),
        _BLOCK_0,
        Misconception(
            "traffic", "which tensors are kept in memory from one pass to the other, and which could be computed again?"
        ),
        Misconception("launches", "one launch for each pass is enough: what does each of yours leave for the next?"),
        _OUTSIDE,
    ),
    wrong=(
        Variant(
            "last-slope-only",
            ((_R_STORE, "    tl.store(dx_ptr + offs, dy * y * (1 - y), mask=offs < n)\n"),),
            diagnosis="only-the-last",
        ),
        Variant("two-slopes", ((_R_STORE, _R_STORE.replace(" * s1 * (1 - s1)", "")),), diagnosis="slope-missing"),
        Variant(
            "middle-slope-missing", ((_R_STORE, _R_STORE.replace(" * s2 * (1 - s2)", "")),), diagnosis="slope-missing"
        ),
        Variant(
            "slopes-of-inputs",
            ((_R_STORE, _R_STORE.replace("y * (1 - y)", "x * (1 - x)")),),
            diagnosis="slope-of-the-input",
        ),
        Variant(
            "adds-slopes",
            (
                (
                    _R_STORE,
                    _R_STORE.replace(
                        "dy * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1)",
                        "dy * (y * (1 - y) + s2 * (1 - s2) + s1 * (1 - s1))",
                    ),
                ),
            ),
            diagnosis="sum-of-slopes",
        ),
        Variant("saves-y", ((_R_SAVE, _R_SAVE.replace("(x)", "(y)")),), diagnosis="y-taken-for-x"),
        Variant("without-dy", ((_R_STORE, _R_STORE.replace("dy * y", "y")), (_R_DY, "")), diagnosis="forgets-dy"),
        Variant(
            "saves-y-and-inverts",
            (
                (_R_SAVE, _R_SAVE.replace("(x)", "(y)")),
                (_R_LOAD, _R_LOAD.replace("x =", "y =")),
                (_R_AGAIN, "    s2 = tl.log(y / (1 - y))\n    s1 = tl.log(s2 / (1 - s2))\n"),
            ),
            diagnosis="inverted",
        ),
        Variant(
            "keeps-all-three",
            (
                (
                    "def three_sigmoids_kernel(x_ptr, y_ptr, n,",
                    "def three_sigmoids_kernel(x_ptr, s1_ptr, s2_ptr, y_ptr, n,",
                ),
                (
                    "    tl.store(y_ptr + offs, sigmoid(sigmoid(sigmoid(x))), mask=offs < n)\n",
                    "    s1 = sigmoid(x)\n    s2 = sigmoid(s1)\n    tl.store(s1_ptr + offs, s1, mask=offs < n)\n"
                    "    tl.store(s2_ptr + offs, s2, mask=offs < n)\n    tl.store(y_ptr + offs, sigmoid(s2), mask=offs < n)\n",
                ),
                (
                    "def three_sigmoids_backward_kernel(saved_ptr,",
                    "def three_sigmoids_backward_kernel(s1_ptr, s2_ptr, y_ptr,",
                ),
                (
                    _R_LOAD,
                    "    s1 = tl.load(s1_ptr + offs, mask=offs < n).to(tl.float32)\n"
                    "    s2 = tl.load(s2_ptr + offs, mask=offs < n).to(tl.float32)\n"
                    "    y = tl.load(y_ptr + offs, mask=offs < n).to(tl.float32)\n",
                ),
                (_R_AGAIN, ""),
                (
                    "        three_sigmoids_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)\n",
                    "        s1, s2 = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x, dtype=torch.float32)\n"
                    "        three_sigmoids_kernel[(triton.cdiv(x.numel(), 1024),)](x, s1, s2, y, x.numel(), BLOCK=1024)\n",
                ),
                (_R_SAVE, "        ctx.save_for_backward(s1, s2, y)\n"),
                ("        (saved,) = ctx.saved_tensors\n", "        s1, s2, y = ctx.saved_tensors\n"),
                (_R_BACKWARD, _R_BACKWARD.replace("(saved, dy", "(s1, s2, y, dy")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "saves-a-copy",
            ((_R_SAVE, "        ctx.save_for_backward(x.clone())\n"),),
            diagnosis="traffic",
        ),
        Variant("no-store-mask", ((_R_STORE, _R_STORE.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "one-program",
            ((_R_BACKWARD, _R_BACKWARD.replace("(triton.cdiv(dy.numel(), 1024),)", "(1,)")),),
            diagnosis="program-id",
        ),
        Variant(
            "backward-in-torch",
            (
                (
                    _R_BACKWARD,
                    "        s1 = saved.sigmoid()\n        s2 = s1.sigmoid()\n        y = s2.sigmoid()\n"
                    "        dx = dy * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "no-function",
            (
                (
                    "    return ThreeSigmoidsFunction.apply(x)\n",
                    "    return torch.sigmoid(torch.sigmoid(torch.sigmoid(x)))\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "with-exponentials",
            (
                (
                    _R_AGAIN,
                    "    e1 = tl.exp(-tl.abs(x))\n    slope = e1 / ((1 + e1) * (1 + e1))\n"
                    "    s1 = tl.where(x < 0, e1, 1.0) / (1 + e1)\n    for _ in tl.static_range(2):\n"
                    "        e = tl.exp(-s1)\n        slope *= e / ((1 + e) * (1 + e))\n        s1 = 1 / (1 + e)\n",
                ),
                (_R_STORE, "    tl.store(dx_ptr + offs, slope * dy, offs < n)\n"),
            ),
        ),
        Variant(
            "step-by-step",
            (
                (_R_LOAD, "    inside = offs < n\n    x = tl.load(saved_ptr + offs, inside, other=0).to(tl.float32)\n"),
                (_R_DY, "    g = tl.load(dy_ptr + offs, inside, other=0).to(tl.float32)\n"),
                (_R_AGAIN, "    a = tl.sigmoid(x)\n    b = tl.sigmoid(a)\n    c = tl.sigmoid(b)\n"),
                (
                    _R_STORE,
                    "    g *= c - c * c\n    g *= b - b * b\n    g *= a - a * a\n    tl.store(dx_ptr + offs, g, inside)\n",
                ),
                (_R_SAVE, "        ctx.save_for_backward(*[x])\n"),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- fusion.epilogue
def _epilogue_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(M: int, N: int, K: int, block: int, dtype: str = "float32", tags: str = "") -> Case:
        a, b = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype)
        scale, residual = normal(N, size=0.5, dtype=dtype), normal(M, N, size=2.0, dtype=dtype)
        ragged = "partial" if M % block or N % block else ""
        name = f"a [{M}, {K}], b [{K}, {N}] {dtype}, BLOCK {block}"
        return Case(name, (a, b, scale, residual, block), frozenset({dtype, *f"{ragged} {tags}".split()}))

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


_E_MASK = "    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)\n    tile"
_E_SCALE = "    scale = tl.load(scale_ptr + offs_n, mask=offs_n < N).to(tl.float32)\n"
_E_RESIDUAL = "    residual = tl.load(residual_ptr + tile, mask=mask).to(tl.float32)\n"
_E_STORE = "    tl.store(y_ptr + tile, tl.maximum(acc * scale[None, :] + residual, 0.0), mask=mask)\n"
_E_FORMULA = "tl.maximum(acc * scale[None, :] + residual, 0.0)"
_E_LAUNCH = (
    "    epilogue_kernel[grid](a, b, scale, residual, y, M, N, K, BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=BLOCK_K)\n"
)


def _formula(text: str) -> tuple[tuple[str, str], ...]:
    return ((_E_STORE, _E_STORE.replace(_E_FORMULA, text)),)


EPILOGUE = KernelExercise(
    id="fusion.epilogue",
    title="What a matmul does on its way out",
    notebook=NOTEBOOK,
    function="epilogue",
    label=Label(3, 25, "an epilogue: work on the accumulator while it is still in registers"),
    hints=(
        "acc has the shape of the tile. Which elements of scale and of residual belong to it, and how does a row of "
        "numbers meet a tile?",
        "scale belongs to columns: as many numbers as the tile has columns, the same for each of its rows. residual and y "
        "have the shape of the product, so one set of offsets and one mask serve both.",
        "Make the tile's offsets, row times N plus column, and the mask of what lies inside M and N. Load scale at the "
        "columns and residual at the offsets, both masked, in float32. Multiply acc by scale as a row, add residual, "
        "take the larger of that and 0, store it with the mask.",
    ),
    cases=_epilogue_cases,
    reference=_epilogue,
    # Of the largest case, 64 x 64 x 64 in tiles of 32: a twice, b twice, residual; and whoever loads a tile of scale where a
    # row would do repeats what the caches hold, which is not this exercise's subject.
    traffic=Traffic(reads=6, writes=1, slack=0.01),
    misconceptions=(
        Misconception(
            "scale-by-row",
            "each row was scaled, not each column. Along which dimension of acc does scale lie?",
            gives=_by_row,
        ),
        Misconception(
            "residual-scaled",
            "the residual was scaled along with the product. What does the formula multiply by scale?",
            gives=lambda a, b, scale, residual, *_: ((a @ b + residual) * scale).relu(),
        ),
        Misconception(
            "relu-first",
            "the residual was added after the ReLU, so that negative numbers come out. Which is the last step?",
            gives=lambda a, b, scale, residual, *_: (a @ b * scale).relu() + residual,
        ),
        Misconception(
            "no-relu",
            "negative numbers come out: the last step is missing.",
            gives=lambda a, b, scale, residual, *_: a @ b * scale + residual,
        ),
        Misconception(
            "no-residual",
            "the residual is missing.",
            gives=lambda a, b, scale, *_: (a @ b * scale).relu(),
        ),
        Misconception(
            "no-scale",
            "the scale is missing.",
            gives=lambda a, b, scale, residual, *_: (a @ b + residual).relu(),
        ),
        Misconception(
            "transposed-tile",
            "the residual was read across rows and columns: n * M + m is the address in its transpose.",
            gives=lambda a, b, scale, residual, *_: (a @ b * scale + residual.reshape(residual.shape[::-1]).t()).relu(),
        ),
        Misconception("traffic", "acc is in registers already: what does a trip to memory and back add to it?"),
        Misconception(
            "launches", "the second kernel has to fetch what the first one stored: which of them had it in registers?"
        ),
        Misconception("race", "do two programs store to one element? Which rows and columns are a program's own?"),
        _OUTSIDE,
    ),
    wrong=(
        Variant(
            "scales-rows",
            (
                (_E_SCALE, _E_SCALE.replace("offs_n, mask=offs_n < N", "offs_m, mask=offs_m < N")),
                *_formula(_E_FORMULA.replace("[None, :]", "[:, None]")),
            ),
            diagnosis="scale-by-row",
        ),
        Variant(
            "scales-both", _formula("tl.maximum((acc + residual) * scale[None, :], 0.0)"), diagnosis="residual-scaled"
        ),
        Variant("adds-last", _formula("tl.maximum(acc * scale[None, :], 0.0) + residual"), diagnosis="relu-first"),
        Variant("keeps-negatives", _formula("acc * scale[None, :] + residual"), diagnosis="no-relu"),
        Variant("drops-residual", _formula("tl.maximum(acc * scale[None, :], 0.0)"), diagnosis="no-residual"),
        Variant("drops-scale", _formula("tl.maximum(acc + residual, 0.0)"), diagnosis="no-scale"),
        Variant(
            "residual-transposed",
            ((_E_RESIDUAL, _E_RESIDUAL.replace("+ tile", "+ offs_n[None, :] * M + offs_m[:, None]")),),
            diagnosis="transposed-tile",
        ),
        Variant(
            "through-memory",
            (
                (
                    _E_MASK,
                    "    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)\n"
                    "    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask)\n"
                    "    acc = tl.load(c_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask)\n    tile",
                ),
                (
                    "    a_ptr, b_ptr, scale_ptr, residual_ptr, y_ptr,\n",
                    "    a_ptr, b_ptr, scale_ptr, residual_ptr, c_ptr, y_ptr,\n",
                ),
                (
                    _E_LAUNCH,
                    "    c = torch.empty(M, N, dtype=torch.float32, device=a.device)\n"
                    + _E_LAUNCH.replace("residual, y,", "residual, c, y,"),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "two-launches",
            (
                (
                    "def epilogue(a: Tensor",
                    "@triton.jit\ndef finish_kernel(c_ptr, scale_ptr, residual_ptr, y_ptr, N, n, BLOCK: tl.constexpr):\n"
                    "    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    c = tl.load(c_ptr + offs, mask=offs < n)\n"
                    "    scale = tl.load(scale_ptr + offs % N, mask=offs < n).to(tl.float32)\n"
                    "    residual = tl.load(residual_ptr + offs, mask=offs < n).to(tl.float32)\n"
                    "    tl.store(y_ptr + offs, tl.maximum(c * scale + residual, 0.0), mask=offs < n)\n\n\n"
                    "def epilogue(a: Tensor",
                ),
                (_E_SCALE + _E_RESIDUAL + _E_STORE, "    tl.store(y_ptr + tile, acc, mask=mask)\n"),
                (
                    _E_LAUNCH,
                    "    c = torch.empty(M, N, dtype=torch.float32, device=a.device)\n"
                    + _E_LAUNCH.replace("residual, y,", "residual, c,")
                    + "    finish_kernel[(triton.cdiv(M * N, 256),)](c, scale, residual, y, N, M * N, BLOCK=256)\n",
                ),
            ),
            diagnosis="launches",
        ),
        Variant(
            "rest-in-torch",
            (
                (_E_SCALE + _E_RESIDUAL + _E_STORE, "    tl.store(y_ptr + tile, acc, mask=mask)\n"),
                (_E_LAUNCH, _E_LAUNCH + "    y = torch.relu(y * scale + residual)\n"),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant("no-store-mask", ((_E_STORE, _E_STORE.replace(", mask=mask", "")),), diagnosis="out-of-bounds"),
        Variant("scale-unmasked", ((_E_SCALE, _E_SCALE.replace(", mask=offs_n < N", "")),), diagnosis="out-of-bounds"),
        Variant(
            "rows-unmasked",
            ((_E_MASK, "    mask = (offs_n[None, :] < N) & (offs_m[:, None] >= 0)\n    tile"),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "calls-torch",
            ((_E_LAUNCH, "    return torch.relu(a @ b * scale + residual)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "broadcast-at-the-load",
            (
                (
                    _E_SCALE,
                    "    columns = offs_n[None, :] + tl.zeros_like(offs_m)[:, None]\n"
                    "    scale = tl.load(scale_ptr + offs_n[None, :], offs_n[None, :] < N, other=0.0).to(tl.float32)\n",
                ),
                (
                    _E_STORE,
                    "    acc = tl.fma(acc, tl.broadcast_to(scale, acc.shape), residual)\n"
                    "    tl.store(y_ptr + offs_m[:, None] * N + columns, tl.where(acc > 0, acc, 0.0), mask)\n",
                ),
            ),
        ),
        Variant(
            "starts-from-the-residual",
            (
                (_E_RESIDUAL, ""),
                (
                    _E_STORE,
                    "    acc *= scale[None, :]\n    acc += tl.load(residual_ptr + tile, mask=mask, other=0.0)\n"
                    "    tl.store(y_ptr + tile, (acc * (acc > 0)).to(y_ptr.dtype.element_ty), mask=mask)\n",
                ),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- fusion.detective
def _soft_cap_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, cap: float, shown: str = "", tags: str = "") -> Case:
        facts = "blocks" if x.numel() > 1024 else ""
        return _case(x, cap, shown=f"cap {cap:g}" + (f", {shown}" if shown else ""), tags=f"{facts} {tags}")

    normal = make.normal
    large = normal(200, size=30) + 1e4
    large[::2] *= -1
    return [
        case(make.full(1, value=25.0), 30.0),
        case(normal(64, size=30), 30.0),
        case(normal(781, size=30), 50.0),
        case(normal(6, 100, size=20, dtype="float16"), 20.0, tags="leading"),
        case(large, 30.0, "around 1e4 and -1e4", "large"),
        case(normal(1025, size=30), 50.0),
        case(normal(2048, size=30, dtype="float16"), 30.0),
        case(normal(50, 70, size=30, dtype="bfloat16"), 50.0, tags="leading"),
    ]


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * (x / cap).tanh()


_C_LOAD = (
    "    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)\n    # END SOLUTION\n    tl.store(y_ptr + offs, CAP"
)
_C_STORE = "    tl.store(y_ptr + offs, CAP * (1 - 2 / (tl.exp(x * (2 / CAP)) + 1)), mask=offs < n)\n"
_C_EMPTY = "    y = torch.empty_like(x)\n    soft_cap"
_C_LAUNCH = "    soft_cap_kernel[(triton.cdiv(n, 1024),)](x, y, n, CAP=cap, BLOCK=1024)\n    return y\n"
_C_BARE = (_C_LOAD, _C_LOAD.replace(".to(tl.float32)", ""))

DETECTIVE = KernelExercise(
    id="fusion.detective",
    title="Detective: fused, and five times the bytes",
    notebook=NOTEBOOK,
    function="soft_cap",
    label=Label(2, 15, "reading a trace: traffic that no kernel makes; conversions belong into registers"),
    hints=(
        "Trace one call on a tensor in 16 bits. How many steps does the report list, and how many of them are launches?",
        "A conversion is an operation like any other: outside a kernel it reads a tensor and writes a tensor. Inside, "
        "between the load and the arithmetic, it costs nothing that memory sees.",
        "Pass x itself to the kernel and give y its dtype. Convert what was loaded to float32 in the kernel; the store "
        "converts back to whatever y holds.",
    ),
    cases=_soft_cap_cases,
    reference=_soft_cap,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "clamped",
            "these are hard limits. A tanh bends long before it reaches them.",
            gives=lambda x, cap: x.clamp(-cap, cap),
        ),
        Misconception(
            "not-capped",
            "this is the tanh alone, between -1 and 1. Who multiplies by cap?",
            gives=lambda x, cap: (x / cap).tanh(),
        ),
        Misconception(
            "traffic",
            "the kernel itself may be fine: what does the report say of the steps around it, and who decides which dtype "
            "the kernel loads and stores?",
        ),
        _BLOCK_0,
        _OUTSIDE,
    ),
    wrong=(
        Variant(
            "unmended",
            (
                _C_BARE,
                (_C_EMPTY, "    x32 = x.float()\n    y = torch.empty_like(x32)\n    soft_cap"),
                (_C_LAUNCH, _C_LAUNCH.replace("(x, y,", "(x32, y,").replace("return y", "return y.to(x.dtype)")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "mends-the-input-only",
            (
                (_C_EMPTY, "    y = torch.empty_like(x, dtype=torch.float32)\n    soft_cap"),
                (_C_LAUNCH, _C_LAUNCH.replace("return y", "return y.to(x.dtype)")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "mends-the-output-only",
            (_C_BARE, (_C_LAUNCH, _C_LAUNCH.replace("(x, y,", "(x.float(), y,"))),
            diagnosis="traffic",
        ),
        Variant(
            "forgets-the-way-back",
            ((_C_EMPTY, "    y = torch.empty_like(x, dtype=torch.float32)\n    soft_cap"),),
            diagnosis="dtype",
        ),
        Variant("no-conversion", (_C_BARE,), diagnosis="exception"),
        Variant(
            "clamps",
            ((_C_STORE, "    tl.store(y_ptr + offs, tl.minimum(tl.maximum(x, -CAP), CAP), mask=offs < n)\n"),),
            diagnosis="clamped",
        ),
        Variant("loses-the-cap", ((_C_STORE, _C_STORE.replace("CAP * (1 -", "1 * (1 -")),), diagnosis="not-capped"),
        Variant("no-store-mask", ((_C_STORE, _C_STORE.replace(", mask=offs < n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "in-place",
            ((_C_LAUNCH, _C_LAUNCH.replace("(x, y,", "(x, x,").replace("return y", "return x")),),
            diagnosis="input-changed",
        ),
        Variant("calls-torch", ((_C_LAUNCH, "    return cap * torch.tanh(x / cap)\n"),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "converts-at-both-ends",
            (
                (
                    _C_STORE,
                    "    y = CAP * (1 - 2 / (tl.exp(x * (2 / CAP)) + 1))\n    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n)\n",
                ),
                (_C_EMPTY, "    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n    soft_cap"),
            ),
        ),
        Variant(
            "a-sigmoid-of-twice",
            (
                (
                    _C_LOAD,
                    _C_LOAD.replace(
                        "    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)",
                        "    u = tl.load(x_ptr + offs, offs < n, other=0).to(tl.float32) / CAP",
                    ),
                ),
                (_C_STORE, "    tl.store(y_ptr + offs, CAP * (2 * tl.sigmoid(2 * u) - 1), mask=offs < n)\n"),
            ),
        ),
        Variant(
            "rows-of-its-own",
            source="""import torch
import triton
import triton.language as tl


@triton.jit
def cap_kernel(x_ptr, y_ptr, cap, n, LANES: tl.constexpr, ROWS: tl.constexpr):
    lane = tl.program_id(0) * LANES * ROWS + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    u = tl.load(x_ptr + lane, mask=lane < n, other=0.0).to(tl.float32) / cap
    e = tl.exp(-2 * tl.abs(u))
    y = (1 - e) / (1 + e) * cap
    tl.store(y_ptr + lane, tl.where(u < 0, -y, y), mask=lane < n)


def soft_cap(x, cap):
    y = x.new_empty(x.shape)
    cap_kernel[(triton.cdiv(x.numel(), 512),)](x, y, cap, x.numel(), LANES=128, ROWS=4)
    return y
""",
        ),
    ),
)

EXERCISES = [ACCESSES, SIN_COS, GATE, RECOMPUTE, EPILOGUE, DETECTIVE]
