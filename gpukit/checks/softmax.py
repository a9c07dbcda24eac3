"""The exercises of notebook 09: cases, traffic bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "09_softmax"


def reference(x: Tensor, *_: Any) -> Tensor:
    return x.softmax(-1)


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).mul_(2).to(getattr(self.torch, dtype))

    def case(self, x: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
        dtype = str(x.dtype).removeprefix("torch.")
        name = f"x {list(x.shape)} {dtype}" + (f", {note}" if note else "")
        found = {dtype, *tags.split()}
        if x.shape[-1] & (x.shape[-1] - 1):
            found.add("tail")  # the row is shorter than the power of two that holds it
        return Case(name, (x, *rest), frozenset(found))


def _named(argument: str, cases: list[Case]) -> list[Case]:
    """Cases that say their second argument too; for a single element it makes no difference."""
    return [
        case if case.args[0].numel() == 1 else replace(case, name=f"{case.name}, {argument} {case.args[1]}")
        for case in cases
    ]


def _fused_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    shifts = make.torch.tensor([[1e4], [300.0], [-1e4]])
    masked = make.normal(3, 100)
    masked[0, ::2] = masked[1, :99] = masked[2, 0] = -float("inf")
    return [
        make.case(make.normal(1, 1)),
        make.case(make.normal(1, 781)),
        make.case(make.normal(3, 64)),
        make.case(make.normal(2, 1024, dtype="float16")),
        make.case(make.normal(2, 1025, dtype="bfloat16"), tags="long"),
        make.case(make.normal(3, 128) + shifts, tags="large", note="rows around 1e4, 300 and -1e4"),
        make.case(make.normal(2, 90) - 1e4, tags="large", note="around -1e4"),
        make.case(make.normal(2, 1000)),
        make.case(make.normal(37, 781)),
        make.case(masked, tags="masked", note="with -inf"),
        make.case(make.torch.full((1, 65536), 3.0).half(), tags="long constant", note="constant"),
    ]


def _strided_cases(rng: Random) -> list[Case]:
    """Permuted tensors without gaps: wrong strides then give wrong values, which say more than a fault would."""
    make = _Inputs(rng)
    normal = make.normal
    heads = normal(2, 5, 3, 24).transpose(1, 2)
    channels = normal(2, 40, 3, dtype="float16").transpose(1, 2)
    last_first = normal(33, 2, 3, 2).permute(1, 2, 3, 0)
    large = normal(2, 1024, 2).transpose(1, 2) + 1e4
    return [
        make.case(normal(1, 1)),
        make.case(normal(781), note="one dimension"),
        make.case(normal(3, 64)),
        make.case(normal(6, 6).t(), tags="strided", note="transposed"),
        make.case(normal(97, 5).t(), tags="strided", note="transposed"),
        make.case(normal(2, 3, 40, dtype="bfloat16"), tags="leading"),
        make.case(heads, tags="strided leading", note="[B, T, H, D] seen as [B, H, T, D]"),
        make.case(channels, tags="strided leading", note="[B, N, C] seen as [B, C, N]"),
        make.case(last_first, tags="strided leading", note="its last dimension outermost in memory"),
        make.case(large, tags="strided leading large", note="transposed, around 1e4"),
    ]


def _online_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal
    steps = make.torch.arange(512.0) // 64 * 40
    masked = normal(3, 300)
    masked[0, :130] = masked[1, 64:] = masked[2, :299] = -float("inf")
    cases = [
        make.case(normal(1, 1), 64),
        make.case(normal(3, 64), 64),
        make.case(normal(2, 1024, dtype="float16"), 128, tags="long"),
        make.case(normal(2, 512) + 1e4, 128, tags="long large", note="around 1e4"),
        make.case(normal(2, 512) + steps, 64, tags="long", note="rising by 40 a block"),
        make.case(normal(2, 512) - steps, 64, tags="long", note="falling by 40 a block"),
        make.case(normal(2, 1000, dtype="bfloat16"), 256, tags="long"),
        make.case(normal(2, 1025), 256, tags="long", note="one element in the last block"),
        make.case(normal(5, 781), 128, tags="long"),
        make.case(masked, 64, tags="long masked", note="with blocks of -inf"),
    ]
    partial = [case.tags | {"partial"} if _block_padding(*case.args) else case.tags for case in cases]
    return _named("BLOCK_N", [replace(case, tags=tags) for case, tags in zip(cases, partial, strict=True)])


def _backward_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal
    masked = normal(2, 100)
    masked[0, ::3] = masked[1, :99] = -float("inf")
    return [
        make.case(normal(1, 1), normal(1, 1)),
        make.case(normal(3, 64), normal(3, 64)),
        make.case(normal(2, 1024, dtype="float16"), normal(2, 1024, dtype="float16")),
        make.case(normal(5, 781), normal(5, 781)),
        make.case(normal(2, 1000, dtype="bfloat16"), normal(2, 1000, dtype="bfloat16")),
        make.case(normal(2, 1025), normal(2, 1025) + 5, tags="long", note="dy around 5"),
        make.case(normal(3, 50), normal(1, 50).expand(3, 50), tags="strided", note="dy expanded: stride 0"),
        make.case(normal(3, 50), normal(50, 3).t(), tags="strided", note="dy transposed"),
        make.case(normal(2, 96) + 1e4, normal(2, 96), tags="large", note="around 1e4"),
        make.case(masked, normal(2, 100), tags="masked", note="with -inf"),
    ]


def _persistent_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    masked = make.normal(3, 100)
    masked[0, ::2] = masked[2, 1:] = -float("inf")
    cases = [
        make.case(make.normal(1, 1), 8, tags="few-rows"),
        make.case(make.normal(3, 64), 8, tags="few-rows"),
        make.case(make.normal(8, 64), 4, tags="many-rows"),
        make.case(make.normal(12, 1024, dtype="float16"), 4, tags="many-rows"),
        make.case(make.normal(37, 781), 8, tags="many-rows remainder"),
        make.case(make.normal(7, 1000), 4, tags="many-rows remainder"),
        make.case(make.normal(5, 1025, dtype="bfloat16"), 3, tags="many-rows remainder"),
        make.case(make.normal(5, 128) + 1e4, 2, tags="many-rows remainder large", note="around 1e4"),
        make.case(masked, 2, tags="many-rows remainder masked", note="with -inf"),
        make.case(make.normal(6, 33), 1, tags="many-rows", note="one program"),
    ]
    return _named("max_programs", cases)


# ------------------------------------------------------- what a wrong idea computes, in float32, from float64 inputs
def _row_padding(x: Tensor, *_: Any) -> int:
    return (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]


def _block_padding(x: Tensor, BLOCK_N: int) -> int:
    return -x.shape[-1] % BLOCK_N


def _no_maximum(x: Tensor, *_: Any) -> Tensor:
    e = x.float().exp()
    return e / e.sum(-1, keepdim=True)


def _not_normalised(x: Tensor, *_: Any) -> Tensor:
    return (x.float() - x.float().amax(-1, keepdim=True)).exp()


def _scaled_before_subtracting(x: Tensor, *_: Any) -> Tensor:
    scaled = x.float() * 1.4426950408889634
    e = (scaled - scaled.amax(-1, keepdim=True)).exp2()
    return e / e.sum(-1, keepdim=True)


def _as_if_contiguous(x: Tensor, *_: Any) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).view(x.shape).softmax(-1)


def _as_if_unit_stride(x: Tensor, *_: Any) -> Tensor:
    return x.as_strided(x.shape, (*x.stride()[:-1], 1)).softmax(-1)


def _stored_like_x(x: Tensor, *_: Any) -> Tensor:
    """The right values, at the offsets that they have in x."""
    import torch

    memory = torch.empty(x.numel(), dtype=x.dtype)
    memory.as_strided(x.shape, x.stride()).copy_(x.softmax(-1))
    return memory.view(x.shape)


def _first_index_fastest(x: Tensor, *_: Any) -> Tensor:
    """The last two leading indices unravelled with the first of them moving fastest."""
    y = x.softmax(-1)
    return y.transpose(-3, -2).reshape(x.shape) if x.ndim > 2 else y


def _blocks(x: Tensor, BLOCK_N: int) -> list[Tensor]:
    return list(x.float().split(BLOCK_N, -1))


def _online(x: Tensor, BLOCK_N: int, rescale: bool, keep: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The running maximum and sum over blocks of x."""
    import torch

    m = torch.full((*x.shape[:-1], 1), -float("inf"))
    total = torch.zeros_like(m)
    for block in _blocks(x, BLOCK_N)[keep]:
        m_new = torch.maximum(m, block.amax(-1, keepdim=True))
        shift = torch.where(m_new.isinf(), 0.0, m_new)
        if rescale:
            total = total * (m - shift).exp()
        total = total + _row((block - shift).exp())
        m = m_new
    return m, total


def _no_rescale(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=False)
    return (x.float() - m).exp() / total


def _last_block_not_counted(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=True, keep=slice(x.shape[-1] // BLOCK_N))
    return (x.float() - m).exp() / total


def _each_block_alone(x: Tensor, BLOCK_N: int) -> Tensor:
    import torch

    return torch.cat([block.softmax(-1) for block in _blocks(x, BLOCK_N)], -1)


def _last_maximum(x: Tensor, BLOCK_N: int) -> Tensor:
    """The sum is right, but the second pass subtracts each block's own maximum."""
    import torch

    _, total = _online(x, BLOCK_N, rescale=True)
    return torch.cat([_not_normalised(block) / total for block in _blocks(x, BLOCK_N)], -1)


def _forgets_the_maximum(x: Tensor, BLOCK_N: int) -> Tensor:
    """Each block's maximum takes the place of the one before, and the sum is rescaled by their difference."""
    m, total = float("-inf"), 0.0
    for block in _blocks(x, BLOCK_N):
        m_new = block.amax(-1, keepdim=True)
        shift = m_new.where(~m_new.isinf(), m_new.new_zeros(()))
        total = total * (m - shift).exp() + (block - shift).exp().sum(-1, keepdim=True)
        m = m_new
    return (x.float() - m).exp() / total


def _log_sum_exp(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=True)
    return (x.float() - (m + total.log())).exp()


def _infinity_minus_infinity(x: Tensor, BLOCK_N: int) -> Tensor:
    """NaN in every row whose first block is all -inf."""
    import torch

    lost = x[..., :BLOCK_N].isinf().all(-1, keepdim=True)
    return torch.where(lost, float("nan"), x.softmax(-1))


def _only_row_0(evidence: Evidence) -> bool:
    y = evidence.outputs
    return y.ndim == 2 and not bool(y[0].isnan().any()) and bool(y[1:].isnan().all()) and len(y) > 1


def _gradient(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """What a backward pass gives that computes dx as `formula` of y, dy and x."""
    return lambda x, dy: {"dx": formula(x.softmax(-1), dy, x)}


def _overwrites_y(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = x.softmax(-1)
    dx = y * (dy - _row(y * dy))
    return {"y": dx, "dx": dx}


def _row(terms: Tensor) -> Tensor:
    return terms.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------------ shared wrong ideas
def _common(padding: Callable[..., int]) -> tuple[Misconception, ...]:
    """`padding(*args)`: how many lanes of the row's last block lie past its end."""

    def padded_maximum(x: Tensor, *rest: Any) -> Tensor:
        m = x.float().amax(-1, keepdim=True)
        return m.clamp_min(0) if padding(x, *rest) else m

    def pads_with_zero(x: Tensor, *rest: Any) -> Tensor:
        m = padded_maximum(x, *rest)
        e = (x.float() - m).exp()
        return e / (_row(e) + padding(x, *rest) * (-m).exp())

    def masks_only_the_sum(x: Tensor, *rest: Any) -> Tensor:
        e = (x.float() - padded_maximum(x, *rest)).exp()
        return e / _row(e)

    return (
        Misconception(
            "tail-mask",
            lambda evidence: (
                f"so the {padding(*evidence.case.args)} padding lanes are being counted in the sum. "
                "What value do they hold after tl.load, and after tl.exp?"
            ),
            gives=pads_with_zero,
        ),
        Misconception(
            "max-over-padding",
            "the sum is right, but where all of a row is negative its maximum is 0: it was taken over the padding "
            "lanes too. Which value can never win a maximum?",
            gives=masks_only_the_sum,
        ),
        Misconception(
            "no-max-subtraction",
            "in float32 exp overflows above 88.7, and below -104 it gives 0. What can be subtracted from a whole row "
            "without changing its softmax?",
            gives=_no_maximum,
        ),
        Misconception(
            "no-normalisation",
            "the largest element of each row is 1, so these are the numerators. "
            "What must the elements of a row add up to?",
            gives=_not_normalised,
        ),
    )


# ----------------------------------------------------------------------------------------------------- softmax.fused
_F_MASK = "    mask_n = offs_n < N\n    row = pid_m.to(tl.int64) * N\n    # exp"
_F_LOAD = 'tl.load(x_ptr + row + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)\n'
_F_STORE = "    tl.store(y_ptr + row + offs_n, y, mask=mask_n)\n"
_F_MATHS = "    numerator = tl.exp(x - tl.max(x, axis=0))\n    y = numerator / tl.sum(numerator, axis=0)\n" + _F_STORE
_F_LAUNCH = "    softmax_fused_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))\n    return y\n"
_F_ZERO = (_F_LOAD, _F_LOAD.replace('-float("inf")', "0.0"))

FUSED = KernelExercise(
    id="softmax.fused",
    title="Softmax in one read and one write",
    notebook=NOTEBOOK,
    function="softmax_fused",
    label=Label(2, 20, "masks, padding values, reductions over a block"),
    hints=(
        "A row of 781 elements sits in a block of 1024 lanes. After tl.load, what do the other 243 lanes hold, and "
        "what will tl.max and tl.sum make of them?",
        "tl.load takes a mask and a value for the lanes outside it. One value serves both reductions: it never wins a "
        "maximum, and its exponential is 0. Subtract the row's maximum before the exponential.",
        "Six lines: the mask that compares the lane numbers with N; the masked load of this program's row, converted "
        "to float32; the exponential of the row minus its maximum; that divided by its sum; the store, with the same "
        "mask.",
    ),
    cases=_fused_cases,
    reference=reference,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        *_common(_row_padding),
        Misconception(
            "lost-digits",
            "x * log2(e) is rounded before the maximum is subtracted: near 1e4 float32 numbers are 0.001 apart. "
            "What size are the numbers if the subtraction comes first?",
            gives=_scaled_before_subtracting,
        ),
        Misconception(
            "low-precision-sum",
            "the sum was kept in float16, which ends at 65504: 65,536 terms of 1 are already too many. "
            "Where does the kernel go over to float32?",
            when=lambda evidence: evidence.tag("constant"),
        ),
        Misconception(
            "program-id",
            "row 0 is there and no other row was written. Which row does program 5 compute?",
            when=_only_row_0,
        ),
        Misconception(
            "block-too-small",
            "only the longest rows are wrong, and they end in elements that were never written. "
            "How long must a block be that holds any N?",
            when=lambda evidence: evidence.tag("long"),
        ),
        Misconception("traffic", "one load is enough if the row stays in registers between the maximum and the sum"),
        Misconception("race", "rows overlap: does the store reach beyond the N elements of its own row?"),
    ),
    wrong=(
        Variant("pads-with-zero", (_F_ZERO,), diagnosis="tail-mask"),
        Variant(
            "masks-only-the-sum",
            (
                _F_ZERO,
                (_F_MATHS, _F_MATHS.replace("    y =", "    numerator = tl.where(mask_n, numerator, 0.0)\n    y =")),
            ),
            diagnosis="max-over-padding",
        ),
        Variant(
            "no-maximum",
            ((_F_MATHS, _F_MATHS.replace("x - tl.max(x, axis=0)", "x")),),
            diagnosis="no-max-subtraction",
        ),
        Variant(
            "no-sum",
            ((_F_MATHS, _F_MATHS.replace(" / tl.sum(numerator, axis=0)", "")),),
            diagnosis="no-normalisation",
        ),
        Variant(
            "sums-in-own-dtype",
            ((_F_MATHS, _F_MATHS.replace("axis=0))\n", "axis=0)).to(y_ptr.dtype.element_ty)\n", 1)),),
            diagnosis="low-precision-sum",
        ),
        Variant(
            "scales-before-subtracting",
            (
                (
                    _F_MATHS,
                    "    x = x * 1.4426950408889634\n" + _F_MATHS.replace("tl.exp(", "tl.exp2("),
                ),
            ),
            diagnosis="lost-digits",
        ),
        Variant("no-store-mask", ((_F_STORE, _F_STORE.replace(", mask=mask_n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "no-load-mask",
            ((_F_LOAD, _F_LOAD.replace(', mask=mask_n, other=-float("inf")', "")),),
            diagnosis="out-of-bounds",
        ),
        Variant("mask-one-too-wide", ((_F_MASK, _F_MASK.replace("< N", "<= N")),), diagnosis="out-of-bounds"),
        Variant("mask-for-one-size", ((_F_MASK, _F_MASK.replace("< N", "< 781")),), diagnosis="out-of-bounds"),
        Variant("rows-a-block-apart", ((_F_MASK, _F_MASK.replace("* N", "* BLOCK_N")),), diagnosis="out-of-bounds"),
        Variant(
            "every-program-row-0", ((_F_MASK, _F_MASK.replace("pid_m.to(tl.int64) * N", "0")),), diagnosis="program-id"
        ),
        Variant(
            "block-for-one-size",
            ((_F_LAUNCH, _F_LAUNCH.replace("BLOCK_N=BLOCK_N", "BLOCK_N=1024")),),
            diagnosis="block-too-small",
        ),
        Variant("writes-over-x", ((_F_LAUNCH, _F_LAUNCH.replace("(x, y, N", "(x, x, N")),), diagnosis="input-changed"),
        Variant(
            "loads-three-times",
            (
                (
                    "    x = " + _F_LOAD + _F_MATHS,
                    "    m = tl.max(" + _F_LOAD[:-1] + ", axis=0)\n"
                    "    total = tl.sum(tl.exp(" + _F_LOAD[:-1] + " - m), axis=0)\n"
                    "    x = " + _F_LOAD + "    y = tl.exp(x - m) / total\n" + _F_STORE,
                ),
            ),
            diagnosis="traffic",
        ),
        Variant("calls-torch", ((_F_LAUNCH, "    return torch.softmax(x, -1)\n"),), diagnosis="not-your-kernel"),
        Variant(
            "kernel-beside-torch",
            ((_F_LAUNCH, _F_LAUNCH.replace("return y", "return y.copy_(torch.softmax(x, -1))")),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "exp2-and-reciprocal",
            (
                (
                    _F_MATHS,
                    "    numerator = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)\n"
                    "    y = numerator * (1.0 / tl.sum(numerator, axis=0))\n" + _F_STORE,
                ),
            ),
        ),
        Variant(
            "masked-after-the-load",
            (
                _F_ZERO,
                (_F_MATHS, '    x = tl.where(mask_n, x, -float("inf"))\n' + _F_MATHS),
            ),
        ),
        Variant(
            "four-rows-a-program",
            (
                ("def softmax_fused_kernel(x_ptr, y_ptr, N,", "def softmax_fused_kernel(x_ptr, y_ptr, M, N,"),
                (
                    _F_MASK,
                    "    offs_m = pid_m * 4 + tl.arange(0, 4)\n"
                    "    mask_n = (offs_m < M)[:, None] & (offs_n < N)[None, :]\n"
                    "    row = offs_m.to(tl.int64)[:, None] * N\n    # exp",
                ),
                (
                    "    x = " + _F_LOAD + _F_MATHS,
                    '    x = tl.load(x_ptr + row + offs_n[None, :], mask=mask_n, other=-float("inf")).to(tl.float32)\n'
                    "    # a row past the end holds -inf only; its NaN is not stored\n"
                    "    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])\n"
                    "    y = numerator / tl.sum(numerator, axis=1)[:, None]\n"
                    "    tl.store(y_ptr + row + offs_n[None, :], y, mask=mask_n)\n",
                ),
                (_F_LAUNCH, _F_LAUNCH.replace("(M,)", "(triton.cdiv(M, 4),)").replace("(x, y, N", "(x, y, M, N")),
            ),
        ),
        Variant("tl-softmax", ((_F_MATHS, "    y = tl.softmax(x)\n" + _F_STORE),)),
    ),
)


# --------------------------------------------------------------------------------------------------- softmax.strided
_S_INDEX = "    a, b, c = row // (B * C), row // C % B, row % C\n"
_S_ROW = "    x_row = x_ptr + a * stride_xa + b * stride_xb + c * stride_xc\n"
_S_LOAD = '    x = tl.load(x_row + offs_n.to(tl.int64) * stride_xn, mask=mask_n, other=-float("inf")).to(tl.float32)\n'
_S_MATHS = (
    "    numerator = tl.exp(x - tl.max(x, axis=0))\n    y = numerator / tl.sum(numerator, axis=0)\n"
    "    tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)\n"
)
_S_VIEW = "    x_4d = x[(None,) * (4 - x.ndim)]  # a view: missing leading dimensions have size 1\n"

STRIDED = KernelExercise(
    id="softmax.strided",
    title="Softmax of any strided tensor",
    notebook=NOTEBOOK,
    function="softmax_strided",
    label=Label(2, 20, "strides, unravelling a program id, 64-bit offsets"),
    hints=(
        "Program 7 of a tensor [2, 3, 4, N] computes one row. Which a, b and c is that, and how many elements from "
        "x_ptr does that row begin?",
        "The program id is a counter whose last digit, c, moves fastest: divisions and remainders by C and B undo it. "
        "An offset is the sum of index times stride over all dimensions, the last one included. Both factors are "
        "32-bit unless you say otherwise.",
        "Convert the program id to int64; get c as its remainder by C, b as the quotient's remainder by B, a from "
        "what is left. Start at x_ptr plus the three products; step along the row by stride_xn. In y, row number pid "
        "starts at pid times N. In between stand the lines of softmax.fused.",
    ),
    cases=_strided_cases,
    reference=reference,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "contiguous-assumed",
            "these are the rows of a contiguous tensor of this shape that begins at the same place. "
            "How far apart do x.stride() say the elements are?",
            gives=_as_if_contiguous,
        ),
        Misconception(
            "unit-stride-assumed",
            "the rows begin at the right places, and then neighbours in memory were read. "
            "What is the distance between two elements of a row here?",
            gives=_as_if_unit_stride,
        ),
        Misconception(
            "output-strides",
            "every value is right and lies in the wrong place: y was written with the strides of x. "
            "How is y laid out, whatever x is?",
            gives=_stored_like_x,
        ),
        Misconception(
            "leading-order",
            "every row is a right one, in the wrong order: the first leading index moves fastest in yours. "
            "Which index moves fastest in a contiguous y?",
            gives=_first_index_fastest,
        ),
        *_common(_row_padding),
        Misconception(
            "out-of-bounds",
            "an offset is the sum of index times stride, each index with its own: which of them went astray here?",
        ),
        Misconception("traffic", "the strides already say where each element lies: nothing has to be moved first"),
    ),
    wrong=(
        Variant(
            "assumes-contiguous",
            ((_S_ROW, "    x_row = x_ptr + row * N\n"), (_S_LOAD, _S_LOAD.replace(" * stride_xn", ""))),
            diagnosis="contiguous-assumed",
        ),
        Variant(
            "ignores-the-last-stride",
            ((_S_LOAD, _S_LOAD.replace(" * stride_xn", "")),),
            diagnosis="unit-stride-assumed",
        ),
        Variant(
            "swaps-strides",
            (
                (_S_ROW, _S_ROW.replace("stride_xc", "stride_xn")),
                (_S_LOAD, _S_LOAD.replace("stride_xn", "stride_xc")),
            ),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "first-index-fastest",
            ((_S_INDEX, "    a, b, c = row // (B * C), row % B, row // B % C\n"),),
            diagnosis="leading-order",
        ),
        Variant(
            "one-stride-for-all-rows",
            ((_S_ROW, "    x_row = x_ptr + row * stride_xc\n"),),
            diagnosis="out-of-bounds",
        ),
        Variant("pads-with-zero", ((_S_LOAD, _S_LOAD.replace('-float("inf")', "0.0")),), diagnosis="tail-mask"),
        Variant(
            "no-maximum",
            ((_S_MATHS, _S_MATHS.replace("x - tl.max(x, axis=0)", "x")),),
            diagnosis="no-max-subtraction",
        ),
        Variant(
            "stores-with-strides-of-x",
            (
                (
                    _S_MATHS,
                    _S_MATHS.replace(
                        "row * N + offs_n", "a * stride_xa + b * stride_xb + c * stride_xc + offs_n * stride_xn"
                    ),
                ),
            ),
            diagnosis="output-strides",
        ),
        Variant("copies-first", ((_S_VIEW, _S_VIEW.replace("x[", "x.contiguous()[")),), diagnosis="traffic"),
        Variant(
            "calls-torch", ((_S_VIEW, "    return torch.softmax(x, -1)\n" + _S_VIEW),), diagnosis="not-your-kernel"
        ),
    ),
    right=(
        Variant(
            "three-program-ids",
            (
                (_S_INDEX, "    c, b, a = tl.program_id(0), tl.program_id(1), tl.program_id(2)\n"),
                (
                    _S_ROW,
                    "    row = (a.to(tl.int64) * B + b) * C + c\n"
                    "    x_row = x_ptr + a.to(tl.int64) * stride_xa + b.to(tl.int64) * stride_xb "
                    "+ c.to(tl.int64) * stride_xc\n",
                ),
                ("softmax_strided_kernel[(A * B * C,)](", "softmax_strided_kernel[(C, B, A)]("),
            ),
        ),
        Variant(
            "peels-digits",
            (
                (
                    _S_INDEX,
                    "    c = row % C\n    rest = (row - c) // C\n    b = rest % B\n    a = (rest - b) // B\n",
                ),
                (
                    _S_MATHS,
                    "    x = x - tl.max(x, axis=0)\n"
                    "    y = tl.exp(x) * (1.0 / tl.sum(tl.exp(x), axis=0))\n"
                    "    tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)\n",
                ),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- softmax.online
_O_START = (
    "    l_i = tl.zeros((), tl.float32)  # sum of exp(x - m_i) over them\n    for start in range(0, N, BLOCK_N):\n"
)
_O_SECOND = "        m_i = m_new\n    for start in range(0, N, BLOCK_N):\n"
_O_MAX = "        m_new = tl.maximum(m_i, tl.max(x, axis=0))\n"
_O_SHIFT = (
    "        # Nothing but -inf so far: -inf - (-inf) would be NaN, so subtract 0 until there is a number.\n"
    '        shift = tl.where(m_new == -float("inf"), 0.0, m_new)\n'
)
_O_UPDATE = "        l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift), axis=0)\n"
_O_LOAD = '        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)\n'
_O_STORE = "        tl.store(y_ptr + row + start + offs_n, tl.exp(x - m_i) / l_i, mask=mask_n)\n"
_O_SHORT = "range(0, N - BLOCK_N + 1, BLOCK_N)"
_O_ALL = "range(0, N, BLOCK_N)"

ONLINE = KernelExercise(
    id="softmax.online",
    title="Rows longer than a block, in two passes",
    notebook=NOTEBOOK,
    function="softmax_online",
    label=Label(3, 40, "a running maximum and a running sum that stay consistent"),
    hints=(
        "After the first block you hold its maximum m and the sum l of exp(x - m). The second block has a larger "
        "maximum. What is wrong with l now, and by which factor?",
        "Carry m and l together. Where the maximum moves from m_old to m_new, every term in l is too large by "
        "exp(m_new - m_old): one multiplication repairs the whole sum. The second pass needs only the final m and l. "
        "And ask what -inf minus -inf is.",
        "Pass one, for each block: the new maximum of the old one and the block's; l times the exponential of old "
        "minus new, plus the sum of the exponentials of the block minus new; then the new maximum becomes the old. "
        "While the maximum is still -inf, subtract 0 in its place. Pass two: load again, subtract, exponentiate, "
        "divide, store.",
    ),
    cases=_online_cases,
    reference=reference,
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception(
            "no-rescale",
            "the sum of the earlier blocks was made with an older, smaller maximum and added as it is. "
            "By which factor is exp(x - m_old) larger than exp(x - m_new)?",
            gives=_no_rescale,
        ),
        Misconception(
            "rescale-sign",
            "everything that was stored is NaN, from the first block on. There m_old is -inf and m_new is a number: in "
            "which order must they be subtracted, so that exp gives 0 and not infinity?",
            when=lambda evidence: evidence.kind == "nan" and not evidence.passed and evidence.first.reply.stored,
        ),
        Misconception(
            "tail-block",
            "the sum lacks the last block of the row, where that block is not full. "
            "How many blocks of BLOCK_N does it take to cover N?",
            gives=_last_block_not_counted,
        ),
        Misconception(
            "tail-block",
            "the last block of a row was not written where that block is not full. "
            "How many blocks of BLOCK_N does it take to cover N?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial"),
        ),
        Misconception(
            "block-alone",
            "each block adds up to 1 by itself, as if it were a row. Which maximum and which sum belong to the whole "
            "row, and when are they known?",
            gives=_each_block_alone,
        ),
        Misconception(
            "block-maximum",
            "the sum belongs to the whole row, but the second pass subtracts each block's own maximum. "
            "Which maximum was the sum made with?",
            gives=_last_maximum,
        ),
        Misconception(
            "maximum-forgotten",
            "the maximum falls when a later block is smaller, and then the rescaled sum overflows. "
            "What must the running maximum be compared with?",
            gives=_forgets_the_maximum,
        ),
        Misconception(
            "inf-minus-inf",
            "only rows whose first block is all -inf are NaN: there the maximum is still -inf, and -inf - (-inf) is "
            "NaN. What else could be subtracted until a number turns up?",
            gives=_infinity_minus_infinity,
        ),
        Misconception(
            "lost-digits",
            "far from 0, m + log(l) has no digits left for the logarithm: near 1e4 float32 numbers are 0.001 apart. "
            "Which of the two should be subtracted, and what can be done with the other?",
            gives=_log_sum_exp,
        ),
        *_common(_block_padding),
        Misconception(
            "lost-digits",  # the same idea, where another order of rounding hides the formula
            "only rows far from 0 are wrong: near 1e4 float32 numbers are 0.001 apart. What is added to such a number, and "
            "could it wait until after the subtraction?",
            when=lambda evidence: evidence.kind == "values" and all("large" in case.tags for case in evidence.failed),
        ),
        Misconception("traffic", "with the running sum rescaled as the maximum moves, one pass yields both of them"),
    ),
    wrong=(
        Variant("no-rescale", ((_O_UPDATE, _O_UPDATE.replace(" * tl.exp(m_i - shift)", "")),), diagnosis="no-rescale"),
        Variant(
            "rescale-upside-down",
            ((_O_UPDATE, _O_UPDATE.replace("m_i - shift", "shift - m_i")),),
            diagnosis="rescale-sign",
        ),
        Variant("last-block-not-counted", ((_O_START, _O_START.replace(_O_ALL, _O_SHORT)),), diagnosis="tail-block"),
        Variant(
            "last-block-dropped",
            ((_O_START, _O_START.replace(_O_ALL, _O_SHORT)), (_O_SECOND, _O_SECOND.replace(_O_ALL, _O_SHORT))),
            diagnosis="tail-block",
        ),
        Variant(
            "each-block-alone",
            (
                (
                    _O_STORE,
                    "        numerator = tl.exp(x - tl.max(x, axis=0))\n"
                    + _O_STORE.replace("tl.exp(x - m_i) / l_i", "numerator / tl.sum(numerator, axis=0)"),
                ),
            ),
            diagnosis="block-alone",
        ),
        Variant(
            "second-pass-block-maximum",
            ((_O_STORE, _O_STORE.replace("m_i", "tl.max(x, axis=0)")),),
            diagnosis="block-maximum",
        ),
        Variant(
            "forgets-the-maximum", ((_O_MAX, "        m_new = tl.max(x, axis=0)\n"),), diagnosis="maximum-forgotten"
        ),
        Variant("subtracts-infinity", ((_O_SHIFT, "        shift = m_new\n"),), diagnosis="inf-minus-inf"),
        Variant(
            "subtracts-log-sum-exp",
            ((_O_STORE, _O_STORE.replace("tl.exp(x - m_i) / l_i", "tl.exp(x - (m_i + tl.log(l_i)))")),),
            diagnosis="lost-digits",
        ),
        Variant(
            "pads-with-zero",
            ((_O_LOAD + _O_MAX, _O_LOAD.replace('-float("inf")', "0.0") + _O_MAX),),
            diagnosis="tail-mask",
        ),
        Variant("no-store-mask", ((_O_STORE, _O_STORE.replace(", mask=mask_n", "")),), diagnosis="out-of-bounds"),
        Variant(
            "three-passes",
            (
                (
                    _O_LOAD + _O_MAX + _O_SHIFT + _O_UPDATE + _O_SECOND,
                    _O_LOAD
                    + "        m_i = tl.maximum(m_i, tl.max(x, axis=0))\n"
                    + "    for start in range(0, N, BLOCK_N):\n        mask_n = start + offs_n < N\n"
                    + _O_LOAD
                    + "        l_i += tl.sum(tl.exp(x - m_i), axis=0)\n"
                    + "    for start in range(0, N, BLOCK_N):\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (
                (
                    "    softmax_online_kernel[(M,)](x, y, N,",
                    "    y.copy_(torch.softmax(x, -1))\n    return y\n    softmax_online_kernel[(M,)](x, y, N,",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "starts-at-a-finite-number",
            (
                (
                    'm_i = tl.full((), -float("inf"), tl.float32)',
                    "m_i = tl.full((), -3.0e38, tl.float32)",
                ),
                (_O_SHIFT, "        shift = m_new\n"),
            ),
        ),
        Variant(
            "a-maximum-and-a-sum-in-every-lane",
            (
                (
                    'm_i = tl.full((), -float("inf"), tl.float32)',
                    "m_i = tl.full((BLOCK_N,), -3.0e38, tl.float32)",
                ),
                (_O_START, _O_START.replace("tl.zeros((), ", "tl.zeros((BLOCK_N,), ")),
                (
                    _O_MAX + _O_SHIFT + _O_UPDATE,
                    _O_MAX.replace("tl.max(x, axis=0)", "x")
                    + "        l_i = l_i * tl.exp(m_i - m_new) + tl.exp(x - m_new)\n",
                ),
                (
                    _O_SECOND,
                    "        m_i = m_new\n"
                    "    m_row = tl.max(m_i, axis=0)\n"
                    "    l_row = tl.sum(l_i * tl.exp(m_i - m_row), axis=0)\n"
                    "    for start in range(0, N, BLOCK_N):\n",
                ),
                (_O_STORE, _O_STORE.replace("m_i", "m_row").replace("l_i", "l_row")),
            ),
        ),
        Variant(
            "second-pass-backwards-in-exp2",
            (
                (_O_UPDATE, _O_UPDATE.replace("tl.exp(x - shift)", "tl.exp2((x - shift) * 1.4426950408889634)")),
                (
                    _O_SECOND + "        mask_n",
                    _O_SECOND + "        start = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start\n        mask_n",
                ),
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- softmax.backward
_B_Y = "    y = tl.load(y_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
_B_DY = "    dy = tl.load(dy_ptr + row * stride_dym + offs_n * stride_dyn, mask=mask_n, other=0.0).to(tl.float32)\n"
_B_DX = "    dx = y * (dy - tl.sum(y * dy, axis=0))\n"
_B_SAVE = "        ctx.save_for_backward(y)\n"
_B_BACK = "        (y,) = ctx.saved_tensors\n        return softmax_backward(y, dy)\n"


def _dx_wrong(old: str, new: str, name: str, diagnosis: str) -> Variant:
    return Variant(name, ((_B_DX, _B_DX.replace(old, new)),), diagnosis=diagnosis)


BACKWARD = KernelExercise(
    id="softmax.backward",
    title="The gradient, and what to save for it",
    notebook=NOTEBOOK,
    function="softmax",
    label=Label(3, 30, "a vector-Jacobian product in one pass; autograd.Function"),
    hints=(
        "dy says how much each y matters. Raising one x raises its own y and lowers every other y of the row. Which "
        "of these two effects does y * dy hold, and where is the other?",
        "The derivative of y_i by x_j is y_i (1 if i = j else 0) minus y_i y_j. Summed against dy, the second part is "
        "the same number for every j of a row, up to y_j: one reduction. Nothing but y and dy is needed.",
        "Forward: call softmax_fused, save its result, return it. Backward: fetch it and launch. Kernel: load y and "
        "dy of the row, each with its own strides and a padding value that adds nothing to a sum of products; "
        "subtract that sum from dy; multiply by y; store.",
    ),
    cases=_backward_cases,
    reference=reference,
    gradients=1,
    traffic=Traffic(reads=3, writes=2, launches=2),  # forward: x, y; backward: y and dy, dx
    misconceptions=(
        Misconception(
            "overwrites-y",
            "y was right until the backward pass wrote dx over it, and y belongs to the caller. "
            "Where should dx be written?",
            gives=_overwrites_y,
        ),
        Misconception(
            "forward-first",
            "it is y that is wrong, before any gradient: softmax.fused must pass first.",
            when=lambda evidence: evidence.output == "y",
        ),
        Misconception(
            "missing-row-sum",
            "this is y * dy: how each x moves its own y. Each x also lowers every other y of its row. How much in all?",
            gives=_gradient(lambda y, dy, x: y * dy),
        ),
        Misconception(
            "diagonal-only",
            "y * (1 - y) * dy is the sigmoid's gradient: it keeps the diagonal of the Jacobian alone. "
            "Does y_1 depend on x_2?",
            gives=_gradient(lambda y, dy, x: y * (1 - y) * dy),
        ),
        Misconception(
            "sum-of-dy",
            "the sum of dy was subtracted as it is. The y that move weigh in it: by how much does each?",
            gives=_gradient(lambda y, dy, x: y * (dy - _row(dy))),
        ),
        Misconception(
            "mean-of-dy",
            "the terms of the row's sum were averaged. Is there a 1/N anywhere in the derivative?",
            gives=_gradient(lambda y, dy, x: y * (dy - _row(y * dy) / y.shape[-1])),
        ),
        Misconception(
            "saved-x",
            "the formula is right, but with x for y. Which tensor does the derivative speak of, and which was saved?",
            gives=_gradient(lambda y, dy, x: x * (dy - _row(x * dy))),
        ),
        Misconception(
            "sign",
            "every element has the wrong sign. Where dy is 1 for one y and 0 elsewhere, which way should its x go?",
            gives=_gradient(lambda y, dy, x: y * (_row(y * dy) - dy)),
        ),
        Misconception(
            "padding-inf",
            "rows shorter than their block are NaN. -inf was the right padding under an exponential; "
            "what does it do in a sum of products?",
            when=lambda evidence: evidence.tag("tail"),
        ),
        Misconception("launches", "the forward pass has y in its hands already: what does it cost to keep it?"),
    ),
    wrong=(
        _dx_wrong("(dy - tl.sum(y * dy, axis=0))", "dy", "no-row-sum", "missing-row-sum"),
        _dx_wrong("(dy - tl.sum(y * dy, axis=0))", "(1 - y) * dy", "diagonal-only", "diagonal-only"),
        _dx_wrong("tl.sum(y * dy, axis=0)", "tl.sum(dy, axis=0)", "sum-of-dy", "sum-of-dy"),
        _dx_wrong("tl.sum(y * dy, axis=0)", "tl.sum(y * dy, axis=0) / N", "mean-of-dy", "mean-of-dy"),
        _dx_wrong("(dy - tl.sum(y * dy, axis=0))", "(tl.sum(y * dy, axis=0) - dy)", "wrong-sign", "sign"),
        Variant("saves-x", ((_B_SAVE, _B_SAVE.replace("(y)", "(x)")),), diagnosis="saved-x"),
        Variant(
            "pads-with-minus-inf",
            ((_B_Y, _B_Y.replace("other=0.0", 'other=-float("inf")')),),
            diagnosis="padding-inf",
        ),
        Variant(
            "assumes-contiguous-dy",
            ((_B_DY, _B_DY.replace("row * stride_dym + offs_n * stride_dyn", "row * N + offs_n")),),
            diagnosis="out-of-bounds",
        ),
        Variant("writes-over-y", (("    dx = torch.empty_like(y)\n", "    dx = y\n"),), diagnosis="overwrites-y"),
        Variant(
            "computes-y-again",
            (
                (_B_SAVE, _B_SAVE.replace("(y)", "(x)")),
                (_B_BACK, "        (x,) = ctx.saved_tensors\n        return softmax_backward(softmax_fused(x), dy)\n"),
            ),
            diagnosis="launches",
        ),
        Variant(
            "backward-in-torch",
            ((_B_BACK, _B_BACK.replace("softmax_backward(y, dy)", "y * (dy - (y * dy).sum(-1, keepdim=True))")),),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "autograd-of-torch",
            (("    return SoftmaxFunction.apply(x)\n", "    return torch.softmax(x, -1)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "product-first",
            ((_B_DX, "    weighted = y * dy\n    dx = weighted - y * tl.sum(weighted, axis=0)\n"),),
        ),
        Variant(
            "recomputes-y-from-x",
            (
                (_B_SAVE, _B_SAVE.replace("(y)", "(x)")),
                (
                    _B_Y,
                    _B_Y.replace("other=0.0", 'other=-float("inf")')
                    + "    y = tl.exp(y - tl.max(y, axis=0))\n    y = y / tl.sum(y, axis=0)\n",
                ),
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------ softmax.persistent
_P_FOR = "    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):\n"
_P_OFFS = "        offs = tl.cast(row, tl.int64) * N + offs_n\n"
_P_LOAD = '        x = tl.load(x_ptr + offs, mask=mask_n, other=-float("inf")).to(tl.float32)\n'
_P_STORE = "        tl.store(y_ptr + offs, numerator / tl.sum(numerator, axis=0), mask=mask_n)\n"
_P_MATHS = "        numerator = tl.exp(x - tl.max(x, axis=0))\n" + _P_STORE
_P_GRID = "    num_programs = min(M, max_programs)\n"
_P_LAUNCH = (
    "    softmax_persistent_kernel[(num_programs,)](\n"
    "        x, y, M, N, BLOCK_N=BLOCK_N, NUM_STAGES=2, num_warps=num_warps_for(BLOCK_N)\n    )\n"
)
_P_STEP = "tl.num_programs(0), num_stages"


def _at_most_max_programs(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    (x, max_programs), programs = case.args, launches[0].programs
    if programs <= max_programs:
        return None
    return "programs", (
        f"{programs} programs for {len(x)} rows, where the GPU holds {max_programs} at a time: "
        "who takes the rows that are left over?"
    )


PERSISTENT = KernelExercise(
    id="softmax.persistent",
    title="A few programs that walk over all rows",
    notebook=NOTEBOOK,
    function="softmax_persistent",
    label=Label(3, 30, "a fixed grid, a grid-stride loop, loads in flight"),
    hints=(
        "With 12 programs and 4,096 rows, which rows does program 5 take? And with 12 programs and 7 rows?",
        "Begin at your own number and step by how many of you there are: tl.program_id and tl.num_programs know both, "
        "and the range ends at M by itself. tl.range takes num_stages, which lets the compiler load the next row "
        "while this one is being computed.",
        "Host: the smaller of M and max_programs. Kernel: a tl.range from the program id to M in steps of the number "
        "of programs, with num_stages; inside it the row offset in int64 and the lines of softmax.fused.",
    ),
    cases=_persistent_cases,
    reference=reference,
    traffic=Traffic(reads=1, writes=1),
    launch_rule=_at_most_max_programs,
    misconceptions=(
        Misconception(
            "rows-left-over",
            "rows stay unwritten exactly where M is not a multiple of the number of programs. Who takes the remainder?",
            when=lambda evidence: evidence.tag("remainder"),
        ),
        Misconception(
            "program-id",
            "the other programs left no rows of their own. Where does each of them begin?",
            when=_only_row_0,
        ),
        Misconception(
            "rows-skipped",
            "rows are missing wherever there are more rows than programs. After its first row, which one is a "
            "program's second?",
            when=lambda evidence: evidence.tag("many-rows"),
        ),
        *_common(_row_padding),
        Misconception("launches", "one launch starts every program; walking over the rows is a loop inside the kernel"),
        Misconception(
            "traffic", "each row belongs to one program: where does a program begin, and where does it step to?"
        ),
    ),
    wrong=(
        Variant(
            "drops-the-remainder",
            (
                (
                    _P_FOR,
                    "    share = M // tl.num_programs(0)\n"
                    "    for row in tl.range(tl.program_id(0) * share, (tl.program_id(0) + 1) * share):\n",
                ),
            ),
            diagnosis="rows-left-over",
        ),
        Variant(
            "step-one-too-long",
            ((_P_FOR, _P_FOR.replace(_P_STEP, "tl.num_programs(0) + 1, num_stages")),),
            diagnosis="rows-skipped",
        ),
        Variant("starts-at-0", ((_P_FOR, _P_FOR.replace("tl.program_id(0)", "0")),), diagnosis="program-id"),
        Variant("step-1", ((_P_FOR, _P_FOR.replace(_P_STEP, "1, num_stages")),), diagnosis="traffic"),
        Variant(
            "one-row-a-program",
            ((_P_FOR, "    for row in tl.range(tl.program_id(0), tl.program_id(0) + 1):\n"),),
            diagnosis="rows-skipped",
        ),
        Variant(
            "past-the-last-row",
            (
                (
                    _P_FOR,
                    "    share = tl.cdiv(M, tl.num_programs(0))\n"
                    "    for row in tl.range(tl.program_id(0) * share, (tl.program_id(0) + 1) * share):\n",
                ),
            ),
            diagnosis="out-of-bounds",
        ),
        Variant("a-program-a-row", ((_P_GRID, "    num_programs = M\n"),), diagnosis="programs"),
        Variant(
            "two-launches",
            (
                (
                    _P_LAUNCH,
                    "    for part in (slice(0, M // 2), slice(M // 2, M)):\n"
                    "        rows = x[part]\n"
                    "        softmax_persistent_kernel[(num_programs,)](rows, y[part], rows.shape[0], N, BLOCK_N, 2)\n",
                ),
            ),
            diagnosis="launches",
        ),
        Variant("pads-with-zero", ((_P_LOAD, _P_LOAD.replace('-float("inf")', "0.0")),), diagnosis="tail-mask"),
        Variant(
            "no-maximum",
            ((_P_MATHS, _P_MATHS.replace("x - tl.max(x, axis=0)", "x")),),
            diagnosis="no-max-subtraction",
        ),
        Variant("calls-torch", ((_P_LAUNCH, "    return torch.softmax(x, -1)\n"),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "a-run-of-rows-each",
            (
                (
                    _P_FOR,
                    "    share = tl.cdiv(M, tl.num_programs(0))\n"
                    "    first = tl.program_id(0) * share\n"
                    "    for row in tl.range(first, tl.minimum(first + share, M), num_stages=NUM_STAGES):\n",
                ),
            ),
        ),
        Variant(
            "while-loop-and-idle-programs",
            (
                (
                    _P_FOR + _P_OFFS,
                    "    row = tl.program_id(0)\n    while row < M:\n" + _P_OFFS,
                ),
                (_P_STORE, _P_STORE + "        row += tl.num_programs(0)\n"),
                (_P_GRID, "    num_programs = max_programs\n"),
            ),
        ),
        Variant(
            "two-rows-at-a-time",
            (
                (
                    _P_FOR + _P_OFFS,
                    "    for first in tl.range(2 * tl.program_id(0), M, 2 * tl.num_programs(0)):\n"
                    "        offs_m = first + tl.arange(0, 2)\n"
                    "        mask = (offs_m < M)[:, None] & mask_n[None, :]\n"
                    "        offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]\n",
                ),
                (_P_LOAD, _P_LOAD.replace("mask_n", "mask")),
                (
                    _P_MATHS,
                    "        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])\n"
                    "        tl.store(y_ptr + offs, numerator / tl.sum(numerator, axis=1)[:, None], mask=mask)\n",
                ),
            ),
        ),
    ),
)

EXERCISES = [FUSED, STRIDED, ONLINE, BACKWARD, PERSISTENT]
