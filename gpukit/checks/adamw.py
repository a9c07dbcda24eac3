"""The exercises of notebook 16: cases, bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "16_adamw"


class _Inputs:
    """Seeded tensors."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, scale: float = 1.0, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).mul_(scale).to(getattr(self.torch, dtype))

    def states(self, n: int, scale: float = 1.0) -> tuple[Tensor, ...]:
        """p, g, m and v [n] of a run that is under way, with gradients of about `scale`."""
        g, m = self.normal(n, scale=scale), self.normal(n, scale=scale / 3)
        return self.normal(n), g, m, self.normal(n, scale=scale).square()


# ----------------------------------------------------------------------------------------------------- adamw.update
def _update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, beta1: float, beta2: float, eps: float, wd: float,
    twist: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step; `twist` names the wrong idea that it follows."""
    old_m, old_v = m, v
    if twist == "coupled-decay":
        g = g + wd * p
    if twist == "betas-exchanged":
        beta1, beta2 = 1 - beta1, 1 - beta2
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * (1 if twist == "not-squared" else g)
    if twist == "betas-exchanged":
        beta1, beta2 = 1 - beta1, 1 - beta2
    used_m, used_v = (old_m, old_v) if twist == "old-moments" else (m, v)
    t = step + {"counts-from-zero": -1, "counts-from-two": 1}.get(twist, 0)
    first = 1 if twist in ("no-bias-correction", "corrects-v-only") else 1 - beta1**t
    second = 1 if twist in ("no-bias-correction", "corrects-m-only") else 1 - beta2**t
    size = (used_v / second).sqrt() + eps
    if twist == "eps-in-the-root":
        size = (used_v / second + eps).sqrt()
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


def reference_update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return _update(p, g, m, v, *options)


def _twisted(twist: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: dict(zip("pmv", _update(*args, twist=twist), strict=True))


def _update_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    zeros = make.torch.zeros

    def case(n: int, step: int, *, scale: float = 1.0, eps: float = 1e-8, wd: float = 0.1, tags: str = "") -> Case:
        p, g, m, v = make.states(n, scale)
        if step == 1:
            m, v = zeros(n), zeros(n)
        lr, beta1, beta2 = rng.choice((0.01, 0.02, 0.05)), rng.choice((0.8, 0.9)), rng.choice((0.98, 0.99))
        name = (
            f"p [{n}], step {step}"
            + (f", weight decay {wd:g}" if wd else "")
            + (f", eps {eps:g}" if eps > 1e-8 else "")
        )
        return Case(name, (p, g, m, v, step, lr, beta1, beta2, eps, wd), frozenset(tags.split()))

    return [
        case(1, 1, tags="early decay"),
        case(1000, 1, wd=0.0, tags="early"),
        case(1024, 3, wd=0.0, tags="early"),
        case(1025, 5, wd=0.5, tags="early decay tail"),
        case(781, 20, tags="early decay tail"),
        case(600, 10, scale=1e-3, eps=0.01, wd=0.0, tags="early large-eps"),
        case(2500, 100_000, wd=0.0),
        case(333, 100_000, wd=0.2, tags="decay"),
        case(512, 1_000_000, scale=1e-3, eps=0.01, tags="decay large-eps"),
    ]  # fmt: skip


_U_LOADS = (
    "    g = tl.load(g_ptr + offs, mask=mask)\n    m = tl.load(m_ptr + offs, mask=mask)\n"
    "    v = tl.load(v_ptr + offs, mask=mask)\n    p = tl.load(p_ptr + offs, mask=mask)\n"
)
_U_M, _U_V = "    m += new_m * (g - m)\n", "    v += new_v * (g * g - v)\n"
_U_P = "    p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)\n"
_U_STORE_M, _U_STORE_P = "    tl.store(m_ptr + offs, m, mask=mask)\n", "    tl.store(p_ptr + offs, p, mask=mask)\n"
_U_STORES = _U_STORE_M + "    tl.store(v_ptr + offs, v, mask=mask)\n" + _U_STORE_P
_U_DECAY = "    decay = 1 - lr * weight_decay\n"
_U_SIZE = "    step_size = lr / (1 - beta1**step)\n"
_U_ROOT = "    root = math.sqrt(1 - beta2**step)\n"

UPDATE = KernelExercise(
    id="adamw.update",
    title="One step in 28 bytes a parameter",
    notebook=NOTEBOOK,
    function="adamw_update",
    label=Label(2, 25, "an update in place: one load and one store of each state"),
    hints=(
        "Four tensors come in and three go out. In which order must m, v and p be computed, and which of the numbers in "
        "the formula are the same for all elements?",
        "The moments first, then the step from the new moments. 1 - beta^step and the factor of the decay are the same "
        "for all elements, so the CPU computes them; eps is added to the corrected root. The decay multiplies p and "
        "never meets the gradient.",
        "Load all four at the offsets, with the mask. Move m towards g by new_m, and v towards the square of g by new_v. "
        "The new p is the old one times decay, less step_size times m over the root of v, divided by root, plus eps. Store m, "
        "v and p. numbers returns one minus lr times weight decay; lr over one minus beta1 to the power of step; and the "
        "square root of one minus beta2 to the power of step.",
    ),
    cases=_update_cases,
    reference=reference_update,
    in_place=(0, 2, 3),
    traffic=Traffic(reads=4, writes=3),
    misconceptions=(
        *(
            Misconception(label, sentence, gives=_twisted(label))
            for label, sentence in (
                (
                    "coupled-decay",
                    "the decay was added to the gradient, so m and v average it too, and the root divides it again. The W "
                    "of AdamW stands for the opposite. What does the decay multiply?",
                ),
                ("no-decay", "without weight decay this would be right. Which factor does the decay put on p?"),
                (
                    "decay-without-lr",
                    "p shrinks by the weight decay itself, whatever the learning rate. A schedule lowers the step; "
                    "should it leave the decay?",
                ),
                (
                    "decay-after-the-step",
                    "the decay also shrinks the step of this update. Does the formula decay the old p or the new one?",
                ),
                (
                    "no-bias-correction",
                    "m and v begin at 0 and are still too small in early steps; these are uncorrected. "
                    "What is 1 - beta^step at step 1, and at step 1,000,000?",
                ),
                ("corrects-m-only", "m is corrected for its start at 0, v is not. Which of the two was there longer?"),
                (
                    "corrects-v-only",
                    "v is corrected for its start at 0, m is not. Which number does m's correction change?",
                ),
                (
                    "v-corrected-without-root",
                    "v is corrected by 1 - beta2^step, but what you divide by it is the root of v. "
                    "What is the root of a quotient?",
                ),
                ("counts-from-zero", "the exponent is one too small. Which number has the first step?"),
                ("counts-from-two", "the exponent is one too large. Which number has the first step?"),
                (
                    "root-upside-down",
                    "v was multiplied by 1 - beta2^step, not divided. update_block and numbers must agree on what root is: is "
                    "the root of v to become larger or smaller?",
                ),
                (
                    "betas-exchanged",
                    "a moment that keeps only a tenth of itself and takes most of the new gradient averages nothing. Which of "
                    "the two does new_m multiply?",
                ),
                ("not-squared", "v averages the gradient, as m does. Of what is v the average?"),
                ("uphill", "every weight moves along its gradient, where the loss grows. Which way is down?"),
                (
                    "eps-in-the-root",
                    "eps was added to v before the root, where 1e-8 counts as 1e-4. Where does the formula add it?",
                ),
                (
                    "eps-before-the-correction",
                    "eps was added before the correction and so was corrected too. In which order does the formula say it?",
                ),
                ("old-moments", "p moves by the moments of the step before. Which come first, the moments or p?"),
            )
        ),
        Misconception(
            "moment-not-stored",
            "p is right, and a moment is what it was before the call. What does the next step begin from?",
            when=lambda evidence: evidence.output in "mv" and _is_old(evidence, "mv".index(evidence.output) + 2),
        ),
        Misconception("traffic", "28 bytes: what was loaded once is in registers until the program ends"),
        Misconception(
            "launches", "one pass: the moments and the step need the same elements, so one program can do both"
        ),
        Misconception("input-changed", "the gradient is only read: clipping and logging look at it later"),
    ),
    wrong=(
        Variant(
            "adds-the-decay-to-the-gradient",
            (
                (_U_M, "    g += (1 - decay) * p\n" + _U_M),
                (_U_P, _U_P.replace("p * decay", "p")),
                (_U_DECAY, "    decay = 1 - weight_decay\n"),
            ),
            diagnosis="coupled-decay",
        ),
        Variant("forgets-the-decay", ((_U_P, _U_P.replace("p * decay", "p")),), diagnosis="no-decay"),
        Variant("decays-without-lr", ((_U_DECAY, "    decay = 1 - weight_decay\n"),), diagnosis="decay-without-lr"),
        Variant(
            "decays-the-new-p",
            ((_U_P, "    p = (p - step_size * m / (tl.sqrt(v) / root + eps)) * decay\n"),),
            diagnosis="decay-after-the-step",
        ),
        Variant(
            "no-correction",
            ((_U_SIZE, "    step_size = lr\n"), (_U_ROOT, "    root = 1.0\n")),
            diagnosis="no-bias-correction",
        ),
        Variant("corrects-only-m", ((_U_ROOT, "    root = 1.0\n"),), diagnosis="corrects-m-only"),
        Variant("corrects-only-v", ((_U_SIZE, "    step_size = lr\n"),), diagnosis="corrects-v-only"),
        Variant(
            "one-step-ahead",
            ((_U_SIZE, "    step += 1\n" + _U_SIZE),),
            diagnosis="counts-from-two",
        ),
        Variant("multiplies-the-root", ((_U_P, _U_P.replace("/ root", "* root")),), diagnosis="root-upside-down"),
        Variant(
            "keeps-what-is-new",
            ((_U_M + _U_V, "    m = new_m * m + (1 - new_m) * g\n    v = new_v * v + (1 - new_v) * g * g\n"),),
            diagnosis="betas-exchanged",
        ),
        Variant("forgets-the-square", ((_U_V, "    v += new_v * (g - v)\n"),), diagnosis="not-squared"),
        Variant("adds-the-step", ((_U_P, _U_P.replace("- step_size", "+ step_size")),), diagnosis="uphill"),
        Variant("no-root", ((_U_ROOT, "    root = 1 - beta2**step\n"),), diagnosis="v-corrected-without-root"),
        Variant(
            "step-before",
            (
                (_U_SIZE, "    step -= 1\n    step_size = lr / (1 - beta1**step) if step else math.inf\n"),
                (_U_ROOT, "    root = math.sqrt(1 - beta2**step)\n"),
            ),
            diagnosis="counts-from-zero",
        ),
        Variant(
            "eps-under-the-root",
            ((_U_P, _U_P.replace("(tl.sqrt(v) / root + eps)", "tl.sqrt(v / (root * root) + eps)")),),
            diagnosis="eps-in-the-root",
        ),
        Variant(
            "eps-is-corrected",
            ((_U_P, _U_P.replace("(tl.sqrt(v) / root + eps)", "((tl.sqrt(v) + eps) / root)")),),
            diagnosis="eps-before-the-correction",
        ),
        Variant(
            "moves-first",
            ((_U_M + _U_V + _U_P, _U_P + _U_M + _U_V),),
            diagnosis="old-moments",
        ),
        Variant("m-stays", ((_U_STORE_M, ""),), diagnosis="moment-not-stored"),
        Variant("no-mask", ((_U_STORE_P, _U_STORE_P.replace(", mask=mask", "")),), diagnosis="out-of-bounds"),
        Variant(
            "loads-again",
            (
                (
                    _U_M + _U_V + _U_P + _U_STORES,
                    _U_M + _U_STORE_M + _U_V + "    tl.store(v_ptr + offs, v, mask=mask)\n"
                    "    m = tl.load(m_ptr + offs, mask=mask)\n    v = tl.load(v_ptr + offs, mask=mask)\n"
                    + _U_P
                    + _U_STORE_P,
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "stores-the-gradient",
            ((_U_STORE_P, _U_STORE_P + "    tl.store(g_ptr + offs, g * 0, mask=mask)\n"),),
            diagnosis="input-changed",
        ),
        Variant(
            "in-pytorch",
            (
                (
                    "    n = p.numel()\n    decay, step_size, root = numbers(step, lr, beta1, beta2, weight_decay)\n",
                    "    n = p.numel()\n    decay, step_size, root = numbers(step, lr, beta1, beta2, weight_decay)\n"
                    "    m.lerp_(g, 1 - beta1)\n    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)\n"
                    "    p.mul_(decay).addcdiv_(m, v.sqrt() / root + eps, value=-step_size)\n    return\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "betas-spelled-out",
            (
                (_U_M + _U_V, "    m = (1 - new_m) * m + new_m * g\n    v = (1 - new_v) * v + new_v * g * g\n"),
                (_U_P, "    p = p * decay - step_size * (m / (tl.sqrt(v) / root + eps))\n"),
            ),
        ),
        Variant(
            "corrections-in-the-kernel",
            (
                (
                    _U_P,
                    "    m_hat = m * step_size\n    v_hat = v * root\n    p = p - decay * p - m_hat / (tl.sqrt(v_hat) + eps)\n",
                ),
                (_U_DECAY, "    decay = lr * weight_decay\n"),
                (_U_ROOT, "    root = 1 / (1 - beta2**step)\n"),
            ),
        ),
        Variant(
            "another-order-and-helper",
            (
                (
                    _U_LOADS + _U_M + _U_V + _U_P + _U_STORES,
                    "    g = tl.load(g_ptr + offs, mask=mask, other=0.0)\n"
                    "    v = tl.load(v_ptr + offs, mask=mask, other=0.0)\n    v = v + (g * g - v) * new_v\n"
                    "    tl.store(v_ptr + offs, v, mask=mask)\n"
                    "    m = tl.load(m_ptr + offs, mask=mask, other=0.0)\n    m = m + (g - m) * new_m\n"
                    "    tl.store(m_ptr + offs, m, mask=mask)\n"
                    "    w = tl.load(p_ptr + offs, mask=mask, other=0.0) * decay\n"
                    "    tl.store(p_ptr + offs, w - step_size * root * m / (tl.sqrt(v) + eps * root), mask=mask)\n",
                ),
            ),
        ),
    ),
)


def _is_old(evidence: Evidence, argument: int) -> bool:
    return evidence.outputs.equal(evidence.case.args[argument])


# ------------------------------------------------------------------------------------------------------- adamw.clip
def reference_clip(g: Tensor, max_norm: float) -> Tensor:
    wide = g if g.element_size() == 8 else g.float()
    return (max_norm / (wide.square().sum().sqrt() + 1e-6)).clamp(max=1.0).view(1)


def _clip_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, dtype: str, scale: float, max_norm: float, tags: str = "") -> Case:
        norm = f"norm about {scale * n**0.5:.3g}, max_norm {max_norm:g}"
        return Case(
            f"g [{n}] {dtype}, {norm}",
            (make.normal(n, scale=scale, dtype=dtype), max_norm),
            frozenset({dtype, *tags.split()}),
        )

    return [
        case(1, "float32", 1.0, 0.001),
        case(781, "float32", 1.0, 1.0),
        case(3000, "float32", 10.0, 2.0),
        case(2048, "float32", 1e-3, 1.0, "small"),
        case(781, "bfloat16", 1.0, 1.0, "16-bit"),
        case(2500, "bfloat16", 300.0, 5.0, "16-bit"),
        case(1025, "float16", 1.0, 1.0, "16-bit"),
        case(3000, "float16", 3000.0, 1.0, "16-bit overflow"),
        case(900, "float16", 0.0001, 0.001, "16-bit"),
        case(4000, "bfloat16", 0.001, 0.02, "16-bit"),
    ]


def _squares_in_own_dtype(evidence: Evidence) -> bool:
    """Only cases in 16 bits fail, among them those that overflow."""
    return all("16-bit" in case.tags for case in evidence.failed) and not any(
        "overflow" in case.tags for case in evidence.passed
    )


def _rounded_squares(evidence: Evidence) -> bool:
    """The squares of g rounded to its dtype, then added up exactly."""
    import torch

    g, max_norm = evidence.case.args
    expected = reference_of_sum((g * g).double().sum(), max_norm)
    return g.element_size() == 2 and torch.allclose(evidence.outputs.double(), expected, rtol=2e-6, atol=0)


def reference_of_sum(total: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0).view(1)


def _clip_gives(formula: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    return lambda g, max_norm: formula(g, max_norm).view(1)


_C_LOAD = "    g = tl.load(g_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)\n"
_C_SQUARES = "    tl.store(sum_ptr + pid, tl.sum(g * g, axis=0))\n"
_C_TOTAL = "        total += tl.sum(tl.load(sum_ptr + offs, mask=offs < count, other=0.0), axis=0)\n"
_C_SCALE = "    scale = max_norm / (tl.sqrt(total) + 1e-6)\n"
_C_MINIMUM = "    tl.store(scale_ptr, tl.minimum(scale, 1.0))\n"
_C_PLAIN = _C_LOAD.replace(".to(tl.float32)", "")

CLIP = KernelExercise(
    id="adamw.clip",
    title="Detective: the run that stopped learning in float16",
    notebook=NOTEBOOK,
    function="clip_scale",
    label=Label(3, 20, "a norm over 16-bit gradients; reading somebody else's kernel"),
    hints=(
        "In which dtypes does it fail, and in which never? What is the largest number of that dtype, and what is the "
        "square of 300?",
        "A product of two 16-bit numbers is a 16-bit number until somebody converts: it overflows, or rounds each square. "
        "A conversion behind it only keeps what is already wrong.",
        "What tl.load returned has the gradient's dtype. Convert it to float32 there, before it is squared; then the "
        "square, the block's sum and everything after it are float32.",
    ),
    cases=_clip_cases,
    reference=reference_clip,
    traffic=Traffic(reads=1, writes=0.01, launches=2),
    misconceptions=(
        Misconception(
            "scales-up",
            "gradients below max_norm come out larger than they were. What does clipping do to a small gradient?",
            gives=_clip_gives(lambda g, max_norm: max_norm / (g.square().sum().sqrt() + 1e-6)),
        ),
        Misconception(
            "sum-of-magnitudes",
            "that is the sum of |g|, another norm. Which norm is a length?",
            gives=_clip_gives(lambda g, max_norm: (max_norm / (g.abs().sum() + 1e-6)).clamp(max=1.0)),
        ),
        Misconception(
            "no-root",
            "that is max_norm over the sum of the squares, which is the norm squared",
            gives=_clip_gives(lambda g, max_norm: (max_norm / (g.square().sum() + 1e-6)).clamp(max=1.0)),
        ),
        Misconception(
            "cast-after-the-product",
            "what was added up are squares that had been rounded to 16 bits first. Which happens earlier in yours, the "
            "product or the conversion?",
            when=_rounded_squares,
        ),
        Misconception(
            "squares-in-own-dtype",
            "float32 gradients are right and 16-bit ones are not. In which dtype are the squares computed and added up, "
            "and where does that dtype end?",
            when=_squares_in_own_dtype,
        ),
        Misconception("traffic", "the gradient is needed once, for its square"),
    ),
    wrong=(
        Variant("as-found", ((_C_LOAD, _C_PLAIN),), diagnosis="squares-in-own-dtype"),
        Variant(
            "converts-the-sum",
            ((_C_LOAD, _C_PLAIN), (_C_SQUARES, _C_SQUARES.replace("axis=0)", "axis=0).to(tl.float32)"))),
            diagnosis="squares-in-own-dtype",
        ),
        Variant(
            "converts-the-product",
            ((_C_LOAD, _C_PLAIN), (_C_SQUARES, _C_SQUARES.replace("g * g", "(g * g).to(tl.float32)"))),
            diagnosis="cast-after-the-product",
        ),
        Variant("no-minimum", ((_C_MINIMUM, "    tl.store(scale_ptr, scale)\n"),), diagnosis="scales-up"),
        Variant(
            "magnitudes",
            (
                (_C_SQUARES, _C_SQUARES.replace("g * g", "tl.abs(g)")),
                (_C_SCALE, _C_SCALE.replace("tl.sqrt(total)", "total")),
            ),
            diagnosis="sum-of-magnitudes",
        ),
        Variant("without-root", ((_C_SCALE, _C_SCALE.replace("tl.sqrt(total)", "total")),), diagnosis="no-root"),
        Variant(
            "scales-g-down-first",
            (
                (_C_LOAD, _C_PLAIN + "    g = (g / 64).to(g_ptr.dtype.element_ty)\n"),
                (_C_SCALE, _C_SCALE.replace("tl.sqrt(total)", "tl.sqrt(total) * 64")),
            ),
            diagnosis="squares-in-own-dtype",
        ),
        Variant(
            "reads-twice",
            (
                (
                    _C_SQUARES,
                    _C_SQUARES.replace("g * g", "g * tl.load(g_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)"),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "asks-torch",
            (
                (
                    "    square_sums_kernel[(count,)](g, sums, n, BLOCK=BLOCK)\n",
                    "    square_sums_kernel[(count,)](g.float(), sums, n, BLOCK=BLOCK)\n"
                    "    return (max_norm / (g.float().norm() + 1e-6)).clamp(max=1.0).view(1)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "converts-both-factors",
            (
                (_C_LOAD, _C_PLAIN),
                (_C_SQUARES, _C_SQUARES.replace("g * g", "g.to(tl.float32) * g.to(tl.float32)")),
            ),
        ),
        Variant(
            "in-float64",
            (
                (_C_LOAD, _C_LOAD.replace("tl.float32", "tl.float64")),
                (_C_SCALE, "    total = tl.maximum(total, 0.0)\n" + _C_SCALE),
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- adamw.many
def _many(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, starts: list[int], sizes: list[int], weight_decays: list[float],
    step: int, lr: float, beta1: float, beta2: float, eps: float, BLOCK: int, twist: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Every tensor by itself; `twist` names the wrong idea that it follows."""
    p, m, v = p.clone(), m.clone(), v.clone()
    first = 0  # program of this tensor
    for start, size, weight_decay in zip(starts, sizes, weight_decays, strict=True):
        begin, blocks = 0, -(-size // BLOCK)
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


def reference_many(*args: Any) -> tuple[Tensor, ...]:
    return _many(*args)


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

    def case(sizes: list[int], BLOCK: int, gap: int = 0, tags: str = "") -> Case:
        starts = [sum(sizes[:i]) + gap * i for i in range(len(sizes))]
        total = starts[-1] + sizes[-1] + gap
        decays = [0.1 * (i % 3) + 0.1 for i in range(len(sizes))]
        lr, step = rng.choice((0.01, 0.02)), rng.choice((3, 10))
        shown = ", ".join(map(str, sizes[:5])) + (", …" if len(sizes) > 5 else "")
        args = (*make.states(total), starts, sizes, decays, step, lr, 0.9, 0.99, 1e-8, BLOCK)
        return Case(f"{len(sizes)} tensors of {shown}, BLOCK {BLOCK}", args, frozenset(tags.split()))

    return [
        case([64], 64),
        case([256, 128], 128, gap=16),
        case([1000], 256, gap=24, tags="partial"),
        case([64, 64, 64], 64, gap=64, tags="several"),
        case([100, 1, 300, 7], 64, gap=8, tags="partial several"),
        case([5, 0, 0, 130, 64], 64, gap=32, tags="partial several empty"),
        case([1] * 20, 32, gap=3, tags="partial several"),
        case([3, 2000, 9, 4], 128, gap=4, tags="partial several uneven"),
        case([8192, 600], 1024, gap=40, tags="partial several uneven"),
    ]


def _grid_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    sizes, BLOCK = case.args[5], case.args[12]
    needed = sum(-(-size // BLOCK) for size in sizes)
    started = sum(launch.programs for launch in launches)
    if len(launches) > 1:
        return "launches", (
            f"{len(launches)} launches for {len(sizes)} tensors: with 2,000 small tensors the launches would take longer "
            "than the work"
        )
    if started > needed:
        return "empty-programs", (
            f"{started} programs for the work of {needed}: programs without elements were started, as many for the "
            "smallest tensor as for the largest. Who knows how many blocks each tensor has?"
        )
    return None


_M_OWNER = "    tensor = tl.load(owner_ptr + pid)\n"
_M_INSIDE = "    inside = (pid - tl.load(first_ptr + tensor)) * BLOCK + tl.arange(0, BLOCK)\n"
_M_MASK = "    mask = inside < tl.load(size_ptr + tensor)\n"
_M_OFFS = "    offs = tl.load(start_ptr + tensor) + inside\n"
_M_DECAY = "    decay = tl.load(decay_ptr + tensor)\n"
_M_KERNEL = _M_OWNER + _M_INSIDE + _M_MASK + _M_OFFS + _M_DECAY
_M_HOST = (
    "    owner, first = [], []\n    for tensor, size in enumerate(sizes):\n        first.append(len(owner))\n"
    "        owner += [tensor] * triton.cdiv(size, BLOCK)\n    return owner, first\n"
)
_M_GRID = "    adamw_many_kernel[(len(owner),)](\n"

MANY = KernelExercise(
    id="adamw.many",
    title="All tensors in one launch",
    notebook=NOTEBOOK,
    function="adamw_many",
    label=Label(4, 40, "sharing uneven work out: which program does which block of which tensor"),
    hints=(
        "Three tensors of 5, 130 and 64 elements, blocks of 64. How many programs does each need, and which program begins "
        "the second tensor?",
        "Number all blocks of all tensors in one row: that number is the program. The CPU writes down, for each number, "
        "whose block it is, and for each tensor, its first number. The difference says which of its blocks a program has. "
        "The end that the mask looks at is the tensor's own.",
        "share_out walks over the sizes: a tensor's first number is the length of owner so far, and owner grows by as many "
        "entries as the size has blocks, rounded up. The kernel loads its tensor from owner; its place inside is the "
        "program id less that tensor's first, times BLOCK, plus the lanes; the mask compares this with the size; the offset "
        "adds start; the decay is the tensor's.",
    ),
    cases=_many_cases,
    reference=reference_many,
    in_place=(0, 2, 3),
    torch_ops=frozenset({"lift_fresh"}),
    traffic=Traffic(reads=4, writes=3),
    launch_rule=_grid_rule,
    misconceptions=(
        Misconception(
            "tail-lost",
            "the last elements of each tensor stay as they were, those that do not fill a block. "
            "How many blocks have 130 elements?",
            gives=_many_gives("tail-lost"),
        ),
        Misconception(
            "first-block-only",
            "only the first block of each tensor was updated. How does a program know which of its tensor's blocks it has?",
            gives=_many_gives("first-block-only"),
        ),
        Misconception(
            "counted-from-program-0",
            "the first tensor is right, and the later ones hardly move. Program 5 is not its tensor's block 5: which of its "
            "blocks is it?",
            gives=_many_gives("counted-from-program-0"),
        ),
        Misconception(
            "offset-against-size",
            "the first tensor is right, and the later ones stop early or never begin. A size counts from the tensor's "
            "start: from where does what you compare it with count?",
            gives=_many_gives("offset-against-size"),
        ),
        Misconception(
            "one-decay",
            "all tensors were decayed like the first one. Biases and norms usually are not decayed at all: what depends on "
            "the tensor here?",
            gives=_many_gives("one-decay"),
        ),
        Misconception(
            "update-first",
            "even a single tensor that fills its block is wrong: adamw.update must pass first. Does it?",
            when=lambda evidence: (
                len(evidence.case.args[5]) == 1 and evidence.case.args[5][0] == evidence.case.args[12]
            ),
        ),
        Misconception(
            "neighbour",
            "elements behind the end of a tensor were updated, where nothing or somebody else lives. Which end does the mask "
            "compare with: the buffer's or the tensor's?",
            when=_gaps_updated,
        ),
        Misconception(
            "race",
            "two programs update one element: does a program stop at the end of its own tensor, and has each block one "
            "program?",
        ),
        Misconception(
            "out-of-bounds",
            "an index into a table counts tensors or programs, an offset counts elements from the start of a buffer: which "
            "of them is too large here?",
        ),
        Misconception("traffic", "the tables are small: what else is loaded more than once?"),
    ),
    wrong=(
        Variant(
            "whole-blocks-only",
            ((_M_HOST, _M_HOST.replace("triton.cdiv(size, BLOCK)", "(size // BLOCK)")),),
            diagnosis="tail-lost",
        ),
        Variant(
            "always-block-0",
            (
                (_M_INSIDE, "    inside = tl.arange(0, BLOCK)\n"),
                (_M_HOST, _M_HOST.replace("triton.cdiv(size, BLOCK)", "min(size, 1)")),
            ),
            diagnosis="first-block-only",
        ),
        Variant("decay-of-the-first", ((_M_DECAY, "    decay = tl.load(decay_ptr)\n"),), diagnosis="one-decay"),
        Variant(
            "rounds-sizes-up",
            ((_M_MASK, "    mask = inside < (tl.load(size_ptr + tensor) + 7) // 8 * 8\n"),),
            diagnosis="neighbour",
        ),
        Variant(
            "no-subtraction",
            ((_M_INSIDE, "    inside = pid * BLOCK + tl.arange(0, BLOCK)\n"),),
            diagnosis="counted-from-program-0",
        ),
        Variant(
            "mask-of-the-buffer",
            ((_M_MASK + _M_OFFS, _M_OFFS + _M_MASK.replace("inside <", "offs <")),),
            diagnosis="offset-against-size",
        ),
        Variant(
            "no-mask",
            ((_M_MASK, "    mask = inside >= 0\n"),),
            diagnosis="neighbour",
        ),
        Variant(
            "one-grid-for-the-largest",
            (
                (_M_OWNER, "    blocks = tl.num_programs(0) // tl.load(first_ptr)\n    tensor = pid // blocks\n"),
                (_M_INSIDE, "    inside = pid % blocks * BLOCK + tl.arange(0, BLOCK)\n"),
                (
                    _M_HOST,
                    "    blocks = max(triton.cdiv(size, BLOCK) for size in sizes)\n"
                    "    return [0] * (blocks * len(sizes)), [len(sizes)]\n",
                ),
            ),
            diagnosis="empty-programs",
        ),
        Variant("an-update-without-correction", ((_U_ROOT, "    root = 1.0\n"),), diagnosis="update-first"),
        Variant(
            "a-launch-for-each",
            (
                (
                    _M_GRID,
                    "    for i, (start, size) in enumerate(zip(starts, sizes)):\n"
                    "        part = slice(start, start + size)\n"
                    "        decay, _, _ = each[i]\n"
                    "        if size:\n"
                    "            adamw_kernel[(triton.cdiv(size, BLOCK),)](\n"
                    "                p[part], g[part], m[part], v[part], size, 1 - beta1, 1 - beta2, decay, step_size, root, eps,\n"
                    "                BLOCK=BLOCK,\n"
                    "            )\n"
                    "    return\n" + _M_GRID,
                ),
            ),
            diagnosis="launches",
        ),
    ),
    right=(
        Variant(
            "two-comprehensions",
            (
                (
                    _M_HOST,
                    "    blocks = [(size + BLOCK - 1) // BLOCK for size in sizes]\n"
                    "    owner = [i for i, count in enumerate(blocks) for _ in range(count)]\n"
                    "    return owner, [sum(blocks[:i]) for i in range(len(sizes))]\n",
                ),
                (
                    _M_MASK + _M_OFFS,
                    (
                        "    end = tl.load(start_ptr + tensor) + tl.load(size_ptr + tensor)\n"
                        "    offs = tl.load(start_ptr + tensor) + inside\n    mask = offs < end\n"
                    ),
                ),
            ),
        ),
        Variant(
            "offsets-by-program",
            (
                # `first` holds, by program, which block of its tensor it has
                (_M_INSIDE, "    inside = tl.load(first_ptr + pid) * BLOCK + tl.arange(0, BLOCK)\n"),
                (
                    _M_HOST,
                    "    pairs = [(i, block) for i, size in enumerate(sizes) for block in range(-(-size // BLOCK))]\n"
                    "    return [i for i, _ in pairs], [block for _, block in pairs]\n",
                ),
            ),
        ),
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


def reference_rounding(x: Tensor, seed: int) -> Tensor:
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


def _same_noise(x: Tensor, seed: int) -> Tensor:
    """Every block of 1,024 has the noise of the first."""
    import torch

    from gpukit.reference.triton_basics import randint

    lanes = torch.arange(x.numel()) % 1024
    return _to_bf16_bits(_bits(x) + (randint(seed, lanes) & 0xFFFF))


def _rounding_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    inf = float("inf")
    special = make.normal(500)
    special[::5], special[1::7], special[2::9] = inf, -inf, 0.0
    exact = make.normal(300).bfloat16().float()
    ones = 1 + make.torch.full((2000,), 2.0**-12)  # 1/32 of the way to the next bfloat16

    def case(x: Tensor, note: str, tags: str = "") -> Case:
        return Case(f"x [{len(x)}], {note}", (x, rng.randrange(1, 1 << 31)), frozenset(tags.split()))

    return [
        case(make.normal(1), "one number"),
        case(make.normal(64), "normal noise"),
        case(make.normal(1000), "normal noise"),
        case(-make.normal(781).abs(), "negative", "negative"),
        case(ones, "a little above 1", "blocks"),
        case(exact, "already bfloat16", "exact"),
        case(make.normal(1500, scale=1e30), "around 1e30", "blocks"),
        case(make.normal(700, scale=1e-30), "around 1e-30"),
        case(special, "with infinities and zeros", "special"),
    ]


_R_NOISE = "    noise = tl.randint(seed, offs).to(tl.uint32, bitcast=True) & 0xFFFF\n"
_R_BITS = "    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000\n"
_R_CONVERT = "    y = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)\n"
_R_ALL = _R_NOISE + _R_BITS + _R_CONVERT

ROUNDING = KernelExercise(
    id="adamw.rounding",
    title="float32 to bfloat16, up or down at random",
    notebook=NOTEBOOK,
    function="round_at_random",
    label=Label(3, 25, "stochastic rounding as an addition to the bits of a float"),
    hints=(
        "A bfloat16 is the upper half of a float32. What do the lower 16 bits say about the way from one bfloat16 to the "
        "next, and when does adding 16 random bits to them carry?",
        "See the float32 as an unsigned integer of the same bits. Lower half plus noise overflows into the upper half with "
        "exactly the probability that the lower half stands for. Then the lower half must go, or the conversion rounds a "
        "second time.",
        "The noise is the random integer's lower 16 bits. Reinterpret x as uint32, add the noise, clear the lower 16 bits, "
        "reinterpret as float32: this is a bfloat16 already, so the conversion changes nothing.",
    ),
    cases=_rounding_cases,
    reference=reference_rounding,
    traffic=Traffic(reads=1, writes=0.5),
    misconceptions=(
        Misconception(
            "round-to-nearest",
            "each x became the nearest bfloat16, always: an update smaller than half the distance to the next one is lost "
            "however often it comes. Where does chance come in?",
            gives=_nearest,
        ),
        Misconception(
            "cut-off",
            "the lower bits were cut off: every x moves towards zero. What is added before the cut?",
            gives=lambda x, seed: _to_bf16_bits(_bits(x)),
        ),
        Misconception(
            "always-up",
            "every x that is no bfloat16 moves away from zero. How much is added, always?",
            gives=_away_from_zero,
        ),
        Misconception(
            "rounds-twice",
            "the noise was added, and then the sum rounded to the nearest: half a step too much on average. What has to be "
            "gone before the conversion?",
            gives=_rounds_twice,
        ),
        Misconception(
            "upper-bits",
            "these are the upper 16 random bits: as random, but the contract names the lower ones",
            gives=lambda x, seed: _rounded(x, seed, lambda words: words >> 16),
        ),
        Misconception(
            "too-much-noise",
            "more than 16 bits were added: the noise reaches into digits that bfloat16 keeps. How large is the part of x "
            "that is cut off?",
            when=_too_much_noise,
        ),
        Misconception(
            "same-noise",
            "every program uses the same random numbers. What has the second program to ask tl.randint for?",
            gives=_same_noise,
        ),
    ),
    wrong=(
        Variant("converts", ((_R_ALL, "    y = x.to(tl.bfloat16)\n"),), diagnosis="round-to-nearest"),
        Variant("no-noise", ((_R_NOISE, "    noise = 0\n"),), diagnosis="cut-off"),
        Variant("largest-noise", ((_R_NOISE, "    noise = 0xFFFF\n"),), diagnosis="always-up"),
        Variant("keeps-the-lower-half", ((_R_BITS, _R_BITS.replace(" & 0xFFFF0000", "")),), diagnosis="rounds-twice"),
        Variant("shifts-the-noise", ((_R_NOISE, _R_NOISE.replace("& 0xFFFF", ">> 16")),), diagnosis="upper-bits"),
        Variant("all-the-noise", ((_R_NOISE, _R_NOISE.replace(" & 0xFFFF", "")),), diagnosis="too-much-noise"),
        Variant(
            "noise-of-the-lanes",
            ((_R_NOISE, _R_NOISE.replace("(seed, offs)", "(seed, tl.arange(0, BLOCK))")),),
            diagnosis="same-noise",
        ),
        Variant(
            "rounds-in-pytorch",
            (("    return y.view(torch.int16)\n", "    return x.bfloat16().view(torch.int16)\n"),),
            diagnosis="round-to-nearest",
        ),
    ),
    right=(
        Variant(
            "compares-instead-of-carrying",
            (
                (
                    _R_ALL,
                    "    bits = x.to(tl.uint32, bitcast=True)\n    low = bits & 0xFFFF\n"
                    "    noise = tl.randint(seed, offs).to(tl.uint32, bitcast=True) & 0xFFFF\n"
                    "    up = (low + noise > 0xFFFF) & (tl.abs(x) < float('inf'))\n"
                    "    bits = tl.where(up, bits - low + 0x10000, bits - low)\n"
                    "    y = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)\n",
                ),
            ),
        ),
        Variant(
            "upper-half-as-16-bits",
            (
                (
                    _R_ALL,
                    "    noise = tl.where(tl.abs(x) == float('inf'), 0, tl.randint(seed, offs) % 65536 & 65535)\n"
                    "    bits = x.to(tl.int32, bitcast=True) + noise\n"
                    "    y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)\n",
                ),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- adamw.resume
def _train(
    p: Tensor, q: Tensor, gradients: Tensor, stop: int, lr: float, weight_decay: float, twist: str = ""
) -> tuple[Tensor, ...]:  # fmt: skip
    """Training that is never stopped; `twist` names what goes wrong at the stop, or in between."""
    import torch

    options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8}
    params, steps = [p, q], [0, 0]
    states = [[torch.zeros_like(p), torch.zeros_like(p)] for _ in params]

    def step(i: int, each: list[Tensor | None]) -> None:
        for k, g in enumerate(each):
            if g is None and twist == "steps-without-gradient":
                g = torch.zeros_like(p)
            if g is None:
                continue
            steps[k] += 1
            t = i + 1 if twist == "one-count" else steps[k]
            options_now = (options["lr"], *options["betas"], options["eps"], (weight_decay, 0.0)[k])
            if twist == "one-decay":
                options_now = (*options_now[:-1], weight_decay)
            params[k], *states[k] = _update(params[k], g, *states[k], t, *options_now)

    for i, g in enumerate(gradients):
        if i == stop:
            if twist == "live-checkpoint":  # what the lost step did to m and v
                before, counts = list(params), list(steps)
                step(i, [g, g if params[1].grad is None else None])
                params[:], steps[:] = before, counts
            if twist in ("step-lost", "all-lost"):
                steps[:] = [0, 0]
            if twist in ("moments-lost", "all-lost"):
                states[:] = [[torch.zeros_like(p), torch.zeros_like(p)] for _ in params]
            if twist == "options-lost":
                options["lr"], options["betas"] = 1.0, (0.5, 0.5)
        step(i, [g, g if i % 2 == 0 else None])
    return *params, *states[0], *states[1]


def reference_train(*args: Any) -> tuple[Tensor, ...]:
    return _train(*args)


def _train_gives(twist: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: {f"y[{i}]": y for i, y in enumerate(_train(*args, twist=twist))}


def _train_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(n: int, steps: int, stop: int, wd: float = 0.0) -> Case:
        args = (make.normal(n), make.normal(n), make.normal(steps, n), stop, rng.choice((0.01, 0.02)), wd)
        tags = {"stopped"} if 0 < stop < steps else set()
        name = f"{steps} steps, {'stopped after ' + str(stop) if tags else 'never stopped'}"
        return Case(f"p [{n}], {name}" + (f", weight decay {wd:g}" if wd else ""), args, frozenset(tags))

    return [
        case(1, 1, 9),
        case(64, 1, 9, wd=0.5),
        case(100, 2, 9),
        case(781, 4, 9, wd=0.5),
        case(64, 3, 1),
        case(100, 5, 3),
        case(1025, 5, 2, wd=0.5),
        case(300, 7, 5),
    ]


def _only_when_stopped(evidence: Evidence) -> bool:
    return all("stopped" in case.tags for case in evidence.failed)


_T_NONE = "            if p.grad is None:\n                continue\n"
_T_COUNT = '            state["step"] += 1\n'
_T_STATE = (
    "        state = {\n"
    '            i: {"step": s["step"], "exp_avg": s["exp_avg"].clone(), "exp_avg_sq": s["exp_avg_sq"].clone()}\n'
    "            for i, s in self.state.items()\n        }\n"
)
_T_RETURN = '        return {"state": state, "param_groups": [dict(self.options)]}\n'
_T_OPTIONS = '        self.options = dict(state_dict["param_groups"][0])\n'
_T_LOAD = (
    "        self.state = {\n"
    '            i: {"step": int(s["step"]), "exp_avg": s["exp_avg"].clone(), "exp_avg_sq": s["exp_avg_sq"].clone()}\n'
    '            for i, s in state_dict["state"].items()\n        }\n'
)
_T_UPDATE = '                p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"],\n'

RESUME = KernelExercise(
    id="adamw.resume",
    title="An optimizer that can be stopped and resumed",
    notebook=NOTEBOOK,
    function="train",
    returns=("p", "q", "m_p", "v_p", "m_q", "v_q"),
    label=Label(3, 30, "optimizer state: what a checkpoint must hold"),
    hints=(
        "You switch the machine off after step 500. Which numbers must be on the disk so that step 501 is the one that "
        "would have come?",
        "Each parameter has three things of its own: how often it was updated, m and v. The options belong to a checkpoint "
        "as well. And m and v are changed in place: what you hand out now is changed by the next step unless it is a copy.",
        "step: skip a parameter without gradient; make its state, a count of 0 and two tensors of zeros, when it is first "
        "needed; raise the count; call adamw_update with it. state_dict: for each state the count and copies of both "
        "tensors, under the three names, and a copy of the options in a list of one. load_state_dict: take both over.",
    ),
    cases=_train_cases,
    reference=reference_train,
    torch_ops=frozenset({"_local_scalar_dense", "lift_fresh", "add", "add_"}),  # step counts may be tensors
    misconceptions=(
        *(
            Misconception(label, sentence, gives=_train_gives(label))
            for label, sentence in (
                (
                    "step-lost",
                    "m and v came back, the step counts began anew: the moments are corrected for a start at 0 that was long "
                    "ago. What is a parameter's third number?",
                ),
                ("all-lost", "after the stop everything began anew: what does load_state_dict take over?"),
                ("moments-lost", "the count came back, m and v did not. What does a step need besides the gradient?"),
                (
                    "options-lost",
                    "after the stop the run went on with the learning rate and the betas of the new optimizer. A schedule may "
                    "have changed them since the start: where are they kept?",
                ),
                (
                    "live-checkpoint",
                    "the checkpoint was changed by a step after it was taken: it holds the tensors that the optimizer goes on "
                    "to change in place. What does the caller need?",
                ),
                (
                    "one-count",
                    "q, which takes part in every second step, is corrected as if it had been there in all. Whose steps does "
                    "the correction count?",
                ),
                (
                    "steps-without-gradient",
                    "q moves, or its moments shrink, in steps in which it has no gradient. Is no gradient the same as 0?",
                ),
                ("one-decay", "q was decayed with the weight decay of p. Where is its own?"),
            )
        ),
        Misconception(
            "update-first",
            "even the first step of one weight is wrong: adamw.update must pass first. Does it?",
            when=lambda evidence: len(evidence.case.args[2]) == 1,
        ),
        Misconception(
            "not-resumed",
            "without a stop everything is right. What is different after load_state_dict from what there was before "
            "state_dict?",
            when=_only_when_stopped,
        ),
    ),
    wrong=(
        Variant("counts-anew", ((_T_LOAD, _T_LOAD.replace('int(s["step"])', "0")),), diagnosis="step-lost"),
        Variant("loads-nothing", ((_T_LOAD, "        self.state = {}\n"),), diagnosis="all-lost"),
        Variant(
            "loads-zeros",
            ((_T_LOAD, _T_LOAD.replace(".clone()", ".clone().zero_()")),),
            diagnosis="moments-lost",
        ),
        Variant("keeps-its-options", ((_T_OPTIONS, ""),), diagnosis="options-lost"),
        Variant(
            "hands-out-its-own",
            ((_T_STATE, "        state = {i: dict(s) for i, s in self.state.items()}\n"),),
            diagnosis="live-checkpoint",
        ),
        Variant(
            "one-count-for-all",
            (
                ("        self.state = {}\n\n", "        self.state = {}\n        self.steps = 0\n\n"),
                (
                    '        beta1, beta2 = self.options["betas"]\n',
                    '        beta1, beta2 = self.options["betas"]\n        self.steps += 1\n',
                ),
                (_T_COUNT, '            state["step"] = self.steps\n'),
                (
                    _T_OPTIONS,
                    _T_OPTIONS + '        self.steps = max([0, *(s["step"] for s in state_dict["state"].values())])\n',
                ),
            ),
            diagnosis="one-count",
        ),
        Variant(
            "zero-for-none",
            (
                (_T_NONE, ""),
                (_T_UPDATE, _T_UPDATE.replace("p.grad", "torch.zeros_like(p) if p.grad is None else p.grad")),
            ),
            diagnosis="steps-without-gradient",
        ),
        Variant(
            "decay-of-the-first",
            (('self.options["eps"], self.weight_decays[i],', 'self.options["eps"], self.weight_decays[0],'),),
            diagnosis="one-decay",
        ),
        Variant("an-update-without-correction", ((_U_ROOT, "    root = 1.0\n"),), diagnosis="update-first"),
        Variant("no-test-for-none", ((_T_NONE, ""),), diagnosis="exception"),
        Variant(
            "names-of-its-own",
            ((_T_STATE, _T_STATE.replace('"exp_avg":', '"m":')), (_T_LOAD, _T_LOAD.replace('s["exp_avg"]', 's["m"]'))),
            diagnosis="exception",
        ),
    ),
    right=(
        Variant(
            "steps-as-tensors",
            (
                (_T_STATE, _T_STATE.replace('{"step": s["step"],', '{"step": torch.full((), float(s["step"])),')),
                (_T_RETURN, "        return dict(state=state, param_groups=[{**self.options}])\n"),
            ),
        ),
        Variant(
            "copies-on-the-way-out-only",
            (
                (_T_LOAD, '        self.state = {i: dict(s) for i, s in state_dict["state"].items()}\n'),
                (_T_OPTIONS, '        self.options.update(state_dict["param_groups"][0])\n'),
            ),
        ),
        Variant(
            "new-tensors-each-step",
            (
                (
                    _T_COUNT,
                    '            state = self.state[i] = {\n                "step": state["step"] + 1,\n'
                    '                "exp_avg": state["exp_avg"].clone(),\n'
                    '                "exp_avg_sq": state["exp_avg_sq"].clone(),\n            }\n',
                ),
                (_T_STATE, "        state = dict(self.state)\n"),
            ),
        ),
    ),
)

EXERCISES = (UPDATE, CLIP, MANY, ROUNDING, RESUME)
