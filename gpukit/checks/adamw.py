"""The exercises of notebook 16: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from gpukit.accounting.tiling import cdiv
from gpukit.grading.exercise import Case, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, lengths, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts


class _Inputs(Inputs):
    def states(self, n: int, scale: float = 1.0) -> tuple[Tensor, ...]:
        """p, g, m and v [n] of a run that is under way, with gradients of about `scale`; in every ninth element nothing has
        ever moved, the next one is a thousand times as large, and the one behind it as much smaller."""
        p = self.apart(n) if n < 5 else self.normal(n)
        g, m, v = (self.normal(n, scale=scale * share) for share in (1, 1 / 3, 1))
        for x in (g, m, v):
            x[8::9] = 0
            x[9::9] *= 1000
            x[10::9] /= 1000
        return p, g, m, v.square()


# ----------------------------------------------------------------------------------------------------- adamw.update
def _update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    wd: float,
    twist: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of one tensor, with options that gpukit.reference's has as constants; `twist` names the wrong idea that it
    follows."""
    old_m, old_v = m, v
    if twist == "coupled-decay":
        g = g + wd * p
    if twist == "betas-exchanged":
        beta1, beta2 = 1 - beta1, 1 - beta2
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * (1 if twist == "not-squared" else g)
    if twist == "betas-exchanged":
        beta1, beta2 = 1 - beta1, 1 - beta2
    used_m = old_m if twist in ("old-moments", "old-m") else m
    used_v = old_v if twist in ("old-moments", "old-v") else v
    t = step + {"counts-from-zero": -1, "counts-from-two": 1}.get(twist, 0)
    first = 1 if twist in ("no-bias-correction", "corrects-v-only") else 1 - beta1**t
    second = 1 if twist in ("no-bias-correction", "corrects-m-only") else 1 - beta2**t
    size = (used_v / second).sqrt() + eps
    if twist == "eps-in-the-root":
        size = (used_v / second + eps).sqrt()
    if twist == "eps-in-the-root-of-v":
        size = (used_v + eps).sqrt() / second**0.5
    if twist == "eps-before-the-correction":
        size = (used_v.sqrt() + eps) / second**0.5
    if twist == "v-corrected-without-root":
        size = used_v.sqrt() / second + eps
    if twist == "root-upside-down":
        size = (used_v * second).sqrt() + eps
    moved = (-lr if twist == "uphill" else lr) * (used_m / first) / size
    if twist == "decay-after-the-step":
        return (p - moved) * (1 - lr * wd), m, v
    decay = {"coupled-decay": 0.0, "no-decay": 0.0, "decay-without-lr": wd}.get(twist, lr * wd)
    return p * (1 - decay) - moved, m, v


def _twisted(twist: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: dict(zip("pmv", _update(*args, twist=twist), strict=True))


def _update_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    zeros = make.torch.zeros

    def state(
        n: int, step: int, *, scale: float = 1.0, eps: float = 1e-8, wd: float = 0.1, beta1: float = 0.0, idle: int = 0,
        beta2: float = 0.0, tags: str = "",
    ) -> Case:  # fmt: skip
        """idle: so many of the first elements have a gradient of 0"""
        p, g, m, v = make.states(n, scale)
        g[:idle] = 0
        if step == 1:
            m, v = zeros(n), zeros(n)
        lr, beta2 = rng.choice((0.01, 0.02, 0.05)), beta2 or rng.choice((0.98, 0.99))
        decay, large_eps = f"weight decay {wd:g}" if wd else "", f"eps {eps:g}" if eps > 1e-8 else ""
        name = listed(
            f"p [{n}]", f"step {step}", decay, large_eps, "" if beta1 else "beta1 0", "gradients of 0" * bool(idle)
        )
        return case(name, p, g, m, v, step, lr, beta1, beta2, eps, wd, tags=tags)

    one, prime, less, block, more, long = lengths(1024)
    return [
        state(one, 1, beta1=0.9, tags="early decay"),
        state(less, 1, wd=0.0, beta1=0.8, tags="early"),
        state(block, 3, wd=0.0, beta1=0.9, tags="early"),
        state(more, 5, wd=0.5, beta1=0.8, tags="early decay tail"),
        state(781, 20, beta1=0.9, tags="early decay tail"),
        state(600, 10, scale=1e-3, eps=0.01, wd=0.0, beta1=0.8, tags="early large-eps"),
        state(prime, 2, wd=0.2, tags="early decay"),
        state(200, 4, scale=1e-7, wd=0.0, beta1=0.9, tags="early tiny"),
        state(long, 100_000, wd=0.0, beta1=0.9),
        state(more, 7, wd=0.3, beta1=0.9, idle=1024, tags="early decay idle"),
        state(450, 2_000, wd=0.0, beta1=0.9, beta2=0.999, tags="early"),  # 1 - beta2^step is 0.86
        state(333, 1_000_000, wd=0.2, beta1=0.9, scale=1e-3, eps=0.01, tags="decay large-eps"),
    ]


UPDATE = KernelExercise(
    id="adamw.update",
    function="adamw_update",
    cases=_update_cases,
    reference=_update,
    huge=lambda: (*(far(5 << 30, dtype="float32"),) * 4, 1, 1e-3, 0.9, 0.99, 1e-8, 0.1),
    in_place=(0, 2, 3),
    traffic=Traffic(reads=4, writes=3, memory=0),
    misconceptions=(
        *(
            Misconception(label, gives=_twisted(label))
            for label in (
                "coupled-decay",
                "no-decay",
                "decay-without-lr",
                "decay-after-the-step",
                "no-bias-correction",
                "corrects-m-only",
                "corrects-v-only",
                "v-corrected-without-root",
                "counts-from-zero",
                "counts-from-two",
                "root-upside-down",
                "betas-exchanged",
                "not-squared",
                "uphill",
                "eps-in-the-root",
                "eps-before-the-correction",
                "old-moments",
            )
        ),
        Misconception("eps-in-the-root", gives=_twisted("eps-in-the-root-of-v")),
        Misconception("old-moments", gives=_twisted("old-m")),
        Misconception("old-moments", gives=_twisted("old-v")),
        Misconception(
            "moment-not-stored",
            when=lambda evidence: (
                evidence.output in "mv" and evidence.outputs.equal(evidence.case.args["mv".index(evidence.output) + 2])
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- adamw.clip
def _clip(g: Tensor, max_norm: float) -> Tensor:
    wide = g if g.element_size() == 8 else g.float()
    return _clip_of(wide.square().sum(), max_norm)


def _clip_of(squares: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).view(1)


def _clip_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, dtype: str, scale: float, max_norm: float, tags: str = "") -> Case:
        norm = f"norm about {scale * n**0.5:.3g}, max_norm {max_norm:g}"
        g = make.normal(n, scale=scale, dtype=dtype)
        return tensor_case(g, max_norm, shown=f"g [{n:,}]", note=norm, tags=tags)

    one, prime, less, block, more, long = lengths(1024)
    even = make.torch.full((100,), 3e-7)  # the norm is 3e-6
    return [
        tensor_case(even, 3.3e-6, shown="g [100]", note="norm 3e-06, max_norm 3.3e-06", tags="small"),
        case(one, "float32", 1.0, 0.001),
        case(less, "float32", 1.0, 1.0),
        case(long, "float32", 10.0, 2.0),
        case(block, "float32", 1e-3, 1.0, "small"),
        case(prime, "float32", 1e-6, 1e-6),
        case(100, "float32", 0.0, 1.0, "small"),
        case(781, "bfloat16", 1.0, 1.0, "16-bit"),
        case(2500, "bfloat16", 300.0, 5.0, "16-bit"),
        case(more, "float16", 1.0, 1.0, "16-bit"),
        case(3000, "float16", 3000.0, 1.0, "16-bit overflow"),
        case(900, "float16", 0.0001, 0.001, "16-bit"),
        case(4000, "bfloat16", 0.001, 0.02, "16-bit"),
        case(1024 * 1024 + 1500, "bfloat16", 1.0, 7.0, "16-bit many-blocks"),  # of which the sums are more than a block
    ]


def _squares_in_own_dtype(evidence: Evidence) -> bool:
    """Only cases in 16 bits fail, among them those that overflow."""
    return only("16-bit")(evidence) and not any("overflow" in case.tags for case in evidence.passed)


def _rounded_squares(evidence: Evidence) -> bool:
    """The squares of g rounded to its dtype, then added up exactly."""
    import torch

    g, max_norm = evidence.case.args
    expected = _clip_of((g * g).double().sum(), max_norm)
    return g.element_size() == 2 and torch.allclose(evidence.outputs.double(), expected, rtol=2e-6, atol=0)


def _clip_gives(formula: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    return lambda g, max_norm: formula(g, max_norm).view(1)


def _clipped_above(g: Tensor, max_norm: float) -> Tensor:
    """1 where the norm itself is not above max_norm."""
    norm = g.square().sum().sqrt()
    return (max_norm / (norm + 1e-6)).where(norm > max_norm, norm.new_ones(()))


CLIP = KernelExercise(
    id="adamw.clip",
    function="clip_scale",
    cases=_clip_cases,
    reference=_clip,
    huge=lambda: (far(5 << 30), 1.0),
    traffic=Traffic(  # a sum for each block of 1024, there and back
        reads=lambda g, max_norm: nbytes(g) + 4 * cdiv(len(g), 1024),
        writes=lambda g, max_norm: 4 * cdiv(len(g), 1024) + 4,
        memory=lambda g, max_norm: 4 * cdiv(len(g), 1024) + 4,
        launches=2,
    ),
    misconceptions=(
        Misconception("scales-up", gives=_clip_gives(lambda g, max_norm: max_norm / (g.square().sum().sqrt() + 1e-6))),
        Misconception(
            "sum-of-magnitudes",
            gives=_clip_gives(lambda g, max_norm: (max_norm / (g.abs().sum() + 1e-6)).clamp(max=1.0)),
        ),
        Misconception(
            "sum-of-magnitudes",
            gives=_clip_gives(lambda g, max_norm: (max_norm / (g.abs().sum().sqrt() + 1e-6)).clamp(max=1.0)),
        ),
        Misconception(
            "no-root", gives=_clip_gives(lambda g, max_norm: (max_norm / (g.square().sum() + 1e-6)).clamp(max=1.0))
        ),
        Misconception("compared-first", gives=_clip_gives(_clipped_above)),
        Misconception(
            "no-eps", gives=_clip_gives(lambda g, max_norm: (max_norm / g.square().sum().sqrt()).clamp(max=1.0))
        ),
        Misconception("cast-after-the-product", when=_rounded_squares),
        Misconception("squares-in-own-dtype", when=_squares_in_own_dtype),
    ),
)


# ------------------------------------------------------------------------------------------------------- adamw.many
def _many(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    starts: list[int],
    sizes: list[int],
    weight_decays: list[float],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    BLOCK: int,
    twist: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Every tensor by itself; `twist` names the wrong idea that it follows."""
    p, m, v = p.clone(), m.clone(), v.clone()
    first = 0  # program of this tensor
    for start, size, weight_decay in zip(starts, sizes, weight_decays, strict=True):
        begin, blocks = 0, cdiv(size, BLOCK)
        if twist == "tail-lost":
            size -= size % BLOCK
        if twist == "one-decay":
            weight_decay = weight_decays[0]
        if twist == "first-block-only":
            size = min(size, BLOCK)
        if twist == "counted-from-program-0":
            begin, size = first * BLOCK, min(size, (first + blocks) * BLOCK)
        if twist == "offset-against-size":
            size = min(size, size - start)
        first += blocks
        part = slice(start + begin, start + max(begin, size))
        new = _update(p[part], g[part], m[part], v[part], step, lr, beta1, beta2, eps, weight_decay)
        for whole, block in zip((p, m, v), new, strict=True):
            whole[part] = block
    return p, m, v


def _many_gives(twist: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: dict(zip("pmv", _many(*args, twist=twist), strict=True))


def _gaps_updated(evidence: Evidence) -> bool:
    """Something between two tensors moved."""
    import torch

    args = evidence.case.args
    outside = torch.ones(args[0].shape, dtype=torch.bool)
    for start, size in zip(args[4], args[5], strict=True):
        outside[start : start + size] = False
    before = args["pgmv".index(evidence.output)]
    return evidence.output in "pmv" and bool((evidence.outputs != before)[outside].any())


def _many_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def tensors(sizes: list[int], BLOCK: int, gap: int = 0, tags: str = "", last_first: bool = False) -> Case:
        starts = [sum(sizes[:i]) + gap * i for i in range(len(sizes))]
        total = starts[-1] + sizes[-1] + gap
        decays = [0.1 * (i % 3) + 0.1 for i in range(len(sizes))]
        if last_first:  # as they lie in the buffer
            starts, sizes, decays = starts[::-1], sizes[::-1], [0.0, *decays[1:]]
        lr, step = rng.choice((0.01, 0.02)), rng.choice((3, 10))
        shown = ", ".join(map(str, sizes[:5])) + (", …" if len(sizes) > 5 else "")
        p, g, m, v = make.states(total)
        if "idle" in tags:
            g[starts[0] : starts[0] + sizes[0]] = 0
        args = (p, g, m, v, starts, sizes, decays, step, lr, 0.9, 0.99, 1e-8, BLOCK)
        return case(f"{len(sizes)} tensor{'s' * (len(sizes) > 1)} of {shown}, BLOCK {BLOCK}", *args, tags=tags)

    return [
        tensors([64], 64),
        tensors([256, 128], 128, gap=16),
        tensors([1000], 256, gap=24, tags="partial"),
        tensors([64, 64, 64], 64, gap=64, tags="tensors"),
        tensors([100, 1, 300, 7], 64, gap=8, tags="partial tensors"),
        tensors([5, 0, 0, 130, 64], 64, gap=32, tags="partial tensors empty-tensor"),
        tensors([1] * 20, 32, gap=3, tags="partial tensors"),
        tensors([70, 64], 64, gap=8, tags="partial tensors idle"),
        tensors([3, 2000, 9, 4], 128, gap=4, tags="partial tensors uneven"),
        tensors([63, 64, 65, 130, 0], 64, gap=5, tags="partial tensors", last_first=True),
        tensors([8192, 600], 1024, gap=40, tags="partial tensors uneven"),
    ]


def _blocks(sizes: list[int], BLOCK: int) -> int:
    return sum(cdiv(size, BLOCK) for size in sizes)


def _grid_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    sizes, BLOCK = case.args[5], case.args[12]
    needed = _blocks(sizes, BLOCK)
    started = sum(launch.programs for launch in launches)
    if len(launches) > 1:
        return "launches", (
            f"{len(launches)} launches for {len(sizes)} tensors: with 2,000 small tensors the launches would take longer "
            "than the work"
        )
    if started > needed:
        text = f"{started} programs for the work of {needed}, so some have no elements. "
        if started == len(sizes) * max(cdiv(size, BLOCK) for size in sizes):
            text += (
                "The smallest tensor has as many as the largest. Where do you know how many blocks each tensor needs?"
            )
        else:
            text += "How many does a tensor need that fills its last block, and how many does one without elements?"
        return "empty-programs", text
    return None


def _huge_many() -> list[tuple]:
    """A tensor that begins beyond 2^32 elements, and one whose last block is so far from its first."""
    return [
        (*(far(n, dtype="float32"),) * 4, [start], [n - start], [0.1], 1, 1e-3, 0.9, 0.99, 1e-8, BLOCK)
        for n, start, BLOCK in ((5 << 30, (5 << 30) - 2048, 1024), (3 << 30, 0, 1 << 16))
    ]


MANY = KernelExercise(
    id="adamw.many",
    function="adamw_many",
    cases=_many_cases,
    reference=_many,
    huge=_huge_many,
    in_place=(0, 2, 3),
    torch_ops=frozenset({"lift_fresh"}),
    traffic=Traffic(  # and a few words of the tables for each program
        reads=lambda p, g, m, v, starts, sizes, *rest: 16 * sum(sizes) + 48 * _blocks(sizes, rest[-1]),
        writes=lambda p, g, m, v, starts, sizes, *rest: 12 * sum(sizes),
    ),
    launch_rule=_grid_rule,
    misconceptions=(
        Misconception("tail-lost", gives=_many_gives("tail-lost")),
        Misconception("first-block-only", gives=_many_gives("first-block-only")),
        Misconception("counted-from-program-0", gives=_many_gives("counted-from-program-0")),
        Misconception("offset-against-size", gives=_many_gives("offset-against-size")),
        Misconception("one-decay", gives=_many_gives("one-decay")),
        Misconception(
            "update-first",
            when=lambda evidence: (
                len(evidence.case.args[5]) == 1 and evidence.case.args[5][0] == evidence.case.args[12]
            ),
        ),
        Misconception("neighbour", when=_gaps_updated),
    ),
)


# --------------------------------------------------------------------------------------------------- adamw.rounding
def _bits(x: Tensor) -> Tensor:
    import torch

    return x.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _to_bf16_bits(bits: Tensor) -> Tensor:
    """The upper 16 of 32 bits, as int16."""
    import torch

    upper = bits >> 16 & 0xFFFF
    return torch.where(upper >= 1 << 15, upper - (1 << 16), upper).to(torch.int16)


def _rounded(x: Tensor, seed: int, noise: Callable[[Tensor], Tensor]) -> Tensor:
    import torch

    from gpukit.reference.triton_basics import randint

    return _to_bf16_bits(_bits(x) + noise(randint(seed, torch.arange(x.numel()))))


def _at_random(x: Tensor, seed: int) -> Tensor:
    return _rounded(x, seed, lambda words: words & 0xFFFF)


def _nearest(x: Tensor, seed: int) -> Tensor:
    import torch

    return x.float().bfloat16().view(torch.int16)


def _rounds_twice(x: Tensor, seed: int) -> Tensor:
    """The noise added, and the sum rounded to the nearest, where it should be cut off."""
    import torch

    from gpukit.reference.triton_basics import randint

    bits = _bits(x) + (randint(seed, torch.arange(x.numel())) & 0xFFFF)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return signed.view(torch.float32).bfloat16().view(torch.int16)


def _away_from_zero(x: Tensor, seed: int) -> Tensor:
    return _rounded(x, seed, lambda words: words * 0 + 0xFFFF)


def _too_much_noise(evidence: Evidence) -> bool:
    """All 32 random bits were added; where that makes a NaN, its bits are anybody's."""
    x, seed = evidence.case.args
    y = _rounded(x, seed, lambda words: words)
    number = (y & 0x7FFF) <= 0x7F80
    return evidence.outputs.shape == y.shape and bool((evidence.outputs == y)[number].all()) and bool(number.any())


def _other_choice(evidence: Evidence) -> bool:
    """Each number that is wrong became the other one of its two neighbors."""
    upper = _bits(evidence.case.args[0]) >> 16
    beyond = (evidence.outputs.to(upper.dtype) - upper) & 0xFFFF
    return evidence.outputs.shape == upper.shape and bool((beyond <= 1).all())


def _same_noise(x: Tensor, seed: int) -> Tensor:
    """Every block of 1,024 has the noise of the first."""
    import torch

    from gpukit.reference.triton_basics import randint

    lanes = torch.arange(x.numel()) % 1024
    return _to_bf16_bits(_bits(x) + (randint(seed, lanes) & 0xFFFF))


def _rounding_cases(rng: Random) -> list[Case]:
    from gpukit.reference.triton_basics import randint

    make = _Inputs(rng)
    inf = float("inf")
    special = make.normal(500)
    special[::5], special[1::7], special[2::9] = inf, -inf, 0.0
    zeros = make.torch.zeros(1500)
    zeros[:700] *= -1
    exact = make.normal(300).bfloat16().float()
    ones = 1 + make.torch.full((2000,), 2.0**-12)  # 1/32 of the way to the next bfloat16
    ends = make.torch.tensor([3.4e38, -3.4e38, 1e-40, -1e-45, 2.0**-126, -0.0]).repeat(100)

    def numbers(x: Tensor, note: str, tags: str = "", seed: int | None = None) -> Case:
        seed = rng.randrange(1, 1 << 31) if seed is None else seed
        return case(f"x [{len(x)}], {note}", x, seed, tags=tags)

    # What the noise leaves of the way to the next bfloat16, or one less: the first carry by as little as can be.
    edge = rng.randrange(1, 1 << 31)
    low = (1 << 16) - (randint(edge, make.torch.arange(1100)) & 0xFFFF)
    low[1::2] -= 1
    edges = ((0x3F80 << 16) + (low & 0xFFFF)).to(make.torch.int32).view(make.torch.float32)

    one, prime, less, block, more, long = lengths(1024)
    return [
        numbers(make.normal(one), "one number"),
        numbers(make.normal(prime), "normal noise, seed 0", seed=0),
        numbers(make.normal(less), "normal noise"),
        numbers(make.normal(block), "normal noise, the largest seed", seed=(1 << 31) - 1),
        numbers(make.normal(more), "normal noise", "blocks"),
        numbers(ends, "the largest and the smallest there are", "subnormal"),
        numbers(edges, "where the noise carries by one, or misses by one", "blocks", seed=edge),
        numbers(-make.normal(781).abs(), "negative", "negative"),
        numbers(ones, "a little above 1", "blocks"),
        numbers(exact, "already bfloat16", "exact"),
        numbers(make.normal(long, scale=1e30), "around 1e30", "blocks"),
        numbers(make.normal(700, scale=1e-30), "around 1e-30"),
        numbers(special, "with infinities and zeros", "special"),
        numbers(zeros, "zeros, some of them -0", "exact blocks"),
        numbers(make.normal(70_000), "more than 16 bits can count", "blocks"),
    ]


ROUNDING = KernelExercise(
    id="adamw.rounding",
    function="round_at_random",
    cases=_rounding_cases,
    reference=_at_random,
    traffic=Traffic(reads=1, writes=0.5, memory=0.5),
    misconceptions=(
        Misconception("round-to-nearest", gives=_nearest),
        Misconception("cut-off", gives=lambda x, seed: _to_bf16_bits(_bits(x))),
        Misconception("always-up", gives=_away_from_zero),
        Misconception("rounds-twice", gives=_rounds_twice),
        Misconception("upper-bits", gives=lambda x, seed: _rounded(x, seed, lambda words: words >> 16)),
        Misconception("too-much-noise", when=_too_much_noise),
        Misconception("same-noise", gives=_same_noise),
        Misconception("other-choice", when=_other_choice),
    ),
)


# ----------------------------------------------------------------------------------------------------- adamw.resume
def _train(
    p: Tensor,
    q: Tensor,
    gradients: Tensor,
    turns: list[bool],
    stop: int,
    lr: float,
    weight_decay: float,
    twist: str = "",
) -> tuple[Tensor, ...]:
    """Training that is never stopped; `twist` names what goes wrong at the stop, or in between."""
    import torch

    options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8}
    params, steps, held = [p, q], [0, 0], [twist == "state-for-all"] * 2
    states = [[torch.zeros_like(p), torch.zeros_like(p)] for _ in params]

    def step(i: int, each: list[Tensor | None]) -> None:
        for k, g in enumerate(each):
            if g is None and twist == "steps-without-gradient":
                g = torch.zeros_like(p)
            if g is None:
                continue
            steps[k] += 1
            held[k] = True
            t = i + 1 if twist == "one-count" else steps[k]
            options_now = (options["lr"], *options["betas"], options["eps"], (weight_decay, 0.0)[k])
            if twist == "one-decay":
                options_now = (*options_now[:-1], weight_decay)
            params[k], *states[k] = _update(params[k], g, *states[k], t, *options_now)

    for i, g in enumerate(gradients):
        if i == stop:
            if twist in ("live-checkpoint", "live-dictionary"):  # what the lost step did to the states
                before, counts = list(params), list(steps)
                step(i, [g if twist == "live-dictionary" or has else None for has in held])
                params[:] = before
                if twist == "live-checkpoint":
                    steps[:] = counts
            if twist in ("step-lost", "all-lost"):
                steps[:] = [0, 0]
            if twist in ("moments-lost", "moments-left-out", "all-lost"):
                states[:] = [[torch.zeros_like(p), torch.zeros_like(p)] for _ in params]
            if twist == "all-lost":
                held[:] = [False, False]
            if twist == "options-lost":
                options |= {"lr": 1.0, "betas": (0.5, 0.5), "eps": 1.0}
            if twist == "eps-lost":
                options["eps"] = 1.0
            if twist == "state-merged":  # the resumed optimizer had taken a step with g before it was one
                for k in range(2):
                    if not held[k]:
                        zero = torch.zeros_like(p)
                        _, *states[k] = _update(params[k], g, zero, zero, 1, 1.0, 0.5, 0.5, 1.0, 0.0)
                        steps[k], held[k] = 1, True
            if twist == "live-options":  # what a schedule made of them after the checkpoint
                options["lr"] = 2 * lr
        step(i, [g, g if turns[i] else None])
    nothing = torch.full_like(p, float("nan"))
    return *params, *(
        x if has and twist != "moments-left-out" else nothing for has, of in zip(held, states, strict=True) for x in of
    )


def _train_gives(twist: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: {f"y[{i}]": y for i, y in enumerate(_train(*args, twist=twist))}


def _right_but_for_names(evidence: Evidence) -> bool:
    """p and q are right, and of m and v something was not found."""
    return all(o.wrong.kind == "nan" and o.wrong.output not in ("y[0]", "y[1]") for o in evidence.outcomes if o.wrong)


def _train_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def run(n: int, steps: int, stop: int, wd: float = 0.0, q: str = "in every second step") -> Case:
        turns = {
            "in every second step": [i % 2 == 0 for i in range(steps)],
            "never": [False] * steps,
            "in the last step": [i == steps - 1 for i in range(steps)],
        }[q]
        gradients = make.normal(steps, n)
        gradients[:, 3::7] = 0
        p, q_before = (make.apart(n) if n < 5 else make.normal(n) for _ in range(2))
        args = (p, q_before, gradients, turns, stop, rng.choice((0.01, 0.02)), wd)
        stopped = stop < steps
        end = f"stopped after {stop}" if stopped else "never stopped"
        name = listed(f"p [{n}]", f"{steps} steps", f"q {q}", end, f"weight decay {wd:g}" if wd else "")
        return case(name, *args, tags="stopped" if stopped else "")

    return [
        run(1, 1, 9),
        run(64, 1, 9, wd=0.5),
        run(100, 2, 9),
        run(781, 4, 9, wd=0.5),
        run(13, 3, 9, wd=0.5, q="never"),
        run(64, 3, 1),
        run(100, 5, 3),
        run(1025, 5, 2, wd=0.5),
        run(300, 7, 5),
        run(50, 2, 0, wd=0.2),
        run(64, 4, 2, q="never"),
        run(70, 4, 2, wd=0.2, q="in the last step"),
    ]


RESUME = KernelExercise(
    id="adamw.resume",
    function="train",
    returns=("p", "q", "m_p", "v_p", "m_q", "v_q"),
    cases=_train_cases,
    reference=_train,
    torch_ops=frozenset({"_local_scalar_dense", "lift_fresh", "add", "add_"}),  # step counts may be tensors
    misconceptions=(
        *(
            Misconception(label, gives=_train_gives(label))
            for label in (
                "step-lost",
                "all-lost",
                "moments-lost",
                "options-lost",
                "moments-left-out",
                "live-checkpoint",
                "state-for-all",
                "one-count",
                "steps-without-gradient",
                "one-decay",
            )
        ),
        Misconception("live-checkpoint", gives=_train_gives("live-dictionary")),
        Misconception("options-lost/2", gives=_train_gives("eps-lost")),
        Misconception("state-merged", gives=_train_gives("state-merged")),
        Misconception("live-checkpoint/2", gives=_train_gives("live-options")),
        Misconception("names-of-its-own", when=_right_but_for_names),
        Misconception("update-first", when=lambda evidence: len(evidence.case.args[2]) == 1),
        Misconception("not-resumed", when=only("stopped")),
    ),
)

EXERCISES = (UPDATE, CLIP, MANY, ROUNDING, RESUME)
