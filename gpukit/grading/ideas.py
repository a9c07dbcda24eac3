"""What the checks of several concepts have in common beside their inputs: references, what wrong ideas are made of, rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, Misconception

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts


def reference(name: str, arguments: int | None = None) -> Callable[..., Any]:
    """A function of gpukit.reference, "gelu.swiglu", loaded when it is called, since it imports torch.

    arguments  how many it takes of a case's; those behind, such as block sizes, say how to compute, not what
    """
    module, _, function = name.partition(".")
    return lambda *args: getattr(import_module(f"gpukit.reference.{module}"), function)(*args[:arguments])


def in_float32(function: Callable[..., Any], wider: str = "float") -> Callable[..., Any]:
    """`function` of tensors in 16 bits, computed in float32 and rounded once to the dtype of the first: what an exercise asks
    for whose arithmetic is in float32. PyTorch would round after each operation, and so might the learner.

    wider  "double" where PyTorch's own float32 is coarser than a kernel's
    """

    def wide(*args: Any) -> Any:
        narrow = args[0].dtype
        if narrow.itemsize > 2:
            return function(*args)
        return function(*(getattr(arg, wider)() if getattr(arg, "dtype", None) == narrow else arg for arg in args)).to(
            narrow
        )

    return wide


# -------------------------------------------------------------------------------------------- what wrong ideas compute
def options(make: Callable[..., Callable[..., Any]]) -> Callable[..., partial]:
    """Decorates a function whose options say how to be wrong, and which gives the function that is. What it gives are partials
    then, so that two wrong ideas at once can be told: each with its option (gpukit/grading/recognize.py)."""
    names = list(signature(make).parameters)

    def made(*given: Any, **named: Any) -> partial:
        return partial(_with_options, make, **dict(zip(names, given, strict=False)), **named)

    return made


class On:
    """A wrong idea that is the right function of other arguments, `function(*change(*args))`: what takes x for contiguous, or
    forgets a factor of q. The change can be made beside any other idea of the exercise (gpukit/grading/recognize.py)."""

    def __init__(self, change: Callable[..., tuple], function: Callable[..., Any]):
        self.change, self.function = change, function

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.change(*args))


def _with_options(make: Callable[..., Callable[..., Any]], *args: Any, **chosen: Any) -> Any:
    return make(**chosen)(*args)


def padding(n: int, block: int = 0) -> int:
    """Lanes past the end of n elements: in the last one of blocks, or in one block that is a power of two."""
    return -n % block if block else (1 << (n - 1).bit_length()) - n


def as_if_contiguous(x: Tensor) -> Tensor:
    """What is read of x by one who takes it for contiguous. Nothing behind x's own elements if it has no gaps."""
    return x.as_strided(x.shape, x.contiguous().stride())


def stored_like(x: Tensor, y: Tensor) -> Tensor:
    """What a contiguous result holds if y is stored at the offsets that its elements have in x."""
    memory = y.new_empty(x.numel())
    memory.as_strided(x.shape, x.stride()).copy_(y)
    return memory.view(x.shape)


def each_block(of: Callable[[Tensor], Tensor], x: Tensor, block: int) -> Tensor:
    """`of` each block of the last dimension as if there were no others, side by side."""
    import torch

    return torch.cat([of(part) for part in x.split(block, -1)], -1)


def tf32(x: Tensor) -> Tensor:
    """x as tensor cores read float32: without the last 13 bits. What float16 and bfloat16 hold stays as it is."""
    import torch

    return (x.float().view(torch.int32) & -(2**13)).view(torch.float32)


def online_softmax(s: Tensor, v: Tensor, step: int, fault: str = "", rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """m and l [..., queries, 1] and acc of scores s [..., queries, keys] and values v [..., keys, D], in blocks of `step` keys
    and of `rows` queries, with one fault."""
    import torch

    m = torch.full_like(s[..., :1], 0 if fault in ("from 0 on", "no maximum") else -torch.inf)
    l, acc = torch.zeros_like(m), v.new_zeros(*s.shape[:-1], v.shape[-1])
    for part, values in zip(s.split(step, -1), v.split(step, -2), strict=True):
        top = part.amax(-1, keepdim=True)
        if fault == "one maximum":
            top = torch.cat([x.amax(-2, keepdim=True).expand_as(x) for x in top.split(rows, -2)], -2)
        m_new = m if fault == "no maximum" else top if fault in ("of the block", "m stays") else torch.maximum(m, top)
        p, shrink = exp_of_float32(part - m_new), exp_of_float32(m_new - m if fault == "inverted" else m - m_new)
        if fault in ("last", "m stays") or (fault == "inverted" and bool(m.isneginf().all())):
            shrink = torch.zeros_like(shrink)
        l = (l if fault in ("l", "both") else l * shrink) + p.sum(-1, keepdim=True)
        acc = (acc if fault in ("acc", "both") else acc * shrink) + p @ values
        if fault == "last acc":
            acc = p @ values
        if fault in ("divided", "divided, also in the end"):
            acc = acc / l
        m = m if fault == "m stays" else m_new
    return m, l, acc


def exp_of_float32(x: Tensor) -> Tensor:
    """What underflows in float32 is 0 and what overflows there inf, whatever the dtype is here."""
    import torch

    y = torch.exp(x)
    return torch.where(y < 2**-149, 0, torch.where(y > torch.finfo(torch.float32).max, torch.inf, y))


# --------------------------------------------------------------------------------------- by what they are recognized
def rounded_sums(evidence: Evidence) -> bool:
    """Cases tagged "large-sums" fail, whose whole numbers (`Inputs.factors`) are exact in float32 sums alone; what else fails is
    off by no more than what 16 bits lose."""

    def near(outcome: Outcome) -> bool:
        yours, right = outcome.wrong.actual.double(), outcome.wrong.expected.double()
        return bool((yours - right).abs().max() < 0.03 * right.abs().max())

    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    rest = [outcome for outcome in failed if "large-sums" not in outcome.case.tags]
    return len(rest) < len(failed) and all(map(near, rest))


def few_roundings(of: Callable[..., dict[str, tuple[Tensor, Tensor]]], most: float = 1) -> Callable[[Evidence], bool]:
    """Every wrong case is in 16 bits, and its results are off by what `most` roundings to them lose on the way, or less. `of` gives
    by name, for arguments in float64, the right result, and by how much it changes if the numbers on the way change by a share
    of 1."""

    def rounded(evidence: Evidence) -> bool:
        import torch

        from gpukit.grading import compare

        for outcome in (outcome for outcome in evidence.outcomes if outcome.wrong):
            dtype = outcome.case.args[0].dtype
            if outcome.wrong.kind != "values" or dtype.itemsize > 2:
                return False
            for name, (right, changes) in of(*compare.doubled(outcome.case.args)).items():
                error = (outcome.reply.outputs[name].double() - right).abs()
                if not bool((error <= most * torch.finfo(dtype).eps * changes).all()):
                    return False
        return True

    return rounded


def only(*tags: str, kind: str = "") -> Callable[[Evidence], bool]:
    """Every case that failed has one of the tags; and the first of them failed by `kind`, if that is given."""
    return lambda evidence: (
        kind in ("", evidence.kind) and all(case.tags.intersection(tags) for case in evidence.failed)
    )


def left_out(tag: str, evidence: Evidence) -> bool:
    """Cases with the tag fail, in which what is small adds up, and of the others in float32 a few at most, by little: what rounds
    operands fails in more of them."""
    exact = [case for case in (*evidence.failed, *evidence.passed) if "float32" in case.tags]
    return (
        only("float32")(evidence)
        and any(tag in case.tags for case in evidence.failed)
        and 3 * len(evidence.failed) < len(exact)
        and evidence.near(0.01)
    )


# What is left out because it is small: a weight, or the change of a factor.
faint, creeping = partial(left_out, "faint"), partial(left_out, "creeping")


def wrong_rows(outcome: Outcome) -> Tensor:
    """Which rows of the result that is wrong are off by more than rounding; of a vector, which elements."""
    import torch

    yours, right = outcome.wrong.actual.double(), outcome.wrong.expected.double()
    size = right.abs().where(right.isfinite(), right.new_zeros(()))
    allowed = 16 * torch.finfo(outcome.wrong.actual.dtype).eps * (size.amax(-1, keepdim=True) if size.ndim else size)
    wrong = ~((yours == right) | ((yours - right).abs() <= allowed))
    return wrong.any(-1) if wrong.ndim > 1 else wrong


# What makes an infinity or a NaN of an input a number.
NOT_FINITE = Misconception("not-finite", when=only("special"))


def only_rows(where: Callable[..., Tensor], kind: str = "") -> Callable[[Evidence], bool]:
    """Every row that is wrong, in every case, is one of `where(*arguments)`; and the first case failed by `kind`, if that is
    given."""
    return lambda evidence: (
        kind in ("", evidence.kind)
        and not any(bool((wrong_rows(o) & ~where(*o.case.args)).any()) for o in evidence.outcomes if o.wrong)
    )


# ----------------------------------------------------------------------------------------------- what launches may do
def in_registers(sentence: str) -> Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None]:
    """A rule against a kernel that loads what it has stored; `sentence` is said behind where it does. (What is loaded twice,
    as tiles of a product must be, may not be to blame for traffic that a rule like this explains.)"""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        for launch in launches:
            stored = {access.tensor: access.line for access in launch.accesses if access.kind == "store"}
            for access in launch.accesses:
                if access.kind == "load" and access.tensor in stored:
                    name, line = access.tensor, stored[access.tensor]
                    return "traffic", f"{name} is stored in line {line} and loaded in line {access.line}: {sentence}"
        return None

    return rule


def no_atomics(sentence: str) -> Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None]:
    """A rule against atomics, which add in whatever order the programs arrive. {bytes} in the sentence: how many."""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        added = sum(launch.atomic_bytes for launch in launches)
        return ("atomics", sentence.format(bytes=f"{added:,}")) if added else None

    return rule
