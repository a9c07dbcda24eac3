"""What notebook 01 shows: number formats as bits and as numbers on a line, what rounding does, and what fewer bits buy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from IPython.display import Markdown
from torch import Tensor

from gpukit import testing
from gpukit.accounting import autocast, dtypes
from gpukit.accounting.dtypes import FORMATS
from gpukit.hardware import GPUS, gpu
from gpukit.lessons import diagram
from gpukit.lessons import layer as layers
from gpukit.lessons.course_map import course_map as _map
from gpukit.widgets import ladder, precision, style
from gpukit.widgets.bits import EXPONENT, MANTISSA, SIGN
from gpukit.widgets.style import Picture, Table

_SMALL = ("fp8_e5m2", "fp8_e4m3", "fp4_e2m1")


def course_map() -> Picture:
    return _map("dtypes")


def promise() -> Markdown:
    rungs = {row["rung"]: row for row in ladder.rows("gpt2")}
    step, loss = ({name: float(rungs[name][key]) for name in ("naive", "bf16")} for key in ("step_ms", "loss"))
    return Markdown(
        f"One training step of GPT-2 takes **{step['naive']:,.0f} ms** on an H200 when its matrix products read numbers of "
        "32 "
        f"bits, and **{step['bf16']:,.0f} ms** when they read bfloat16, a format of 16 bits (measured). The loss falls "
        "just as "
        f"fast: after {rungs['bf16']['steps']} steps it is {loss['naive']:.3f} and {loss['bf16']:.3f}. With another format "
        "of 16 bits the "
        f"same run can stop learning, or end in NaN. This notebook shows why."
    )


# ---- what bits mean --------------------------------------------------------------------------------------------------


def layouts() -> Picture:
    """The fields of each format, a box per bit."""
    names = ("fp32", "tf32", "fp16", "bf16", *_SMALL)
    bit, left = 0.5, 2.6
    with diagram.canvas(19.2, 7.4) as ax:
        for x, name, colour in (
            (left, "sign", SIGN),
            (left + 2, "exponent", EXPONENT),
            (left + 5, "mantissa", MANTISSA),
        ):
            diagram.box(ax, x, 0.1, bit, 0.6, "", colour)
            diagram.text(ax, x + 0.65, 0.4, name, align="left")
        for row, name in enumerate(names):
            fmt, y = FORMATS[name], 1.1 + 0.88 * row
            diagram.text(ax, left - 0.25, y + 0.3, name, align="right", code=True)
            colours = [SIGN] + [EXPONENT] * fmt.exponent_bits + [MANTISSA] * fmt.mantissa_bits
            for i, colour in enumerate(colours):
                diagram.box(ax, left + bit * i, y, bit, 0.6, "", colour)
            if unread := fmt.storage_bits - fmt.bits:
                place = left + bit * fmt.bits
                diagram.box(ax, place, y, bit * unread, 0.6, "in memory, not read", "none", dashed=True, size=8)
    said = "; ".join(f"{n}: {FORMATS[n].exponent_bits} and {FORMATS[n].mantissa_bits}" for n in names)
    return diagram.picture(ax, alt=f"Each format has one sign bit, then exponent bits, then mantissa bits. {said}.")


def near_zero(name: str = "fp8_e4m3", top: float = 2.0**-5) -> Picture:
    """The numbers of a format next to zero, with its subnormal numbers and as if it had none."""
    fmt = FORMATS[name]
    values = [fmt.decode(bits) for bits in range(fmt.max_bits + 1) if fmt.decode(bits) <= top]
    normal = [value for value in values if value >= fmt.smallest_normal]
    subnormal = [value for value in values if 0 < value < fmt.smallest_normal]
    with style.use():
        fig, axes = style.figure(2, 1, height=2.4, sharex=True)
        for ax, shown, title in zip(axes, (True, False), ("with subnormal numbers", "as if it had none"), strict=True):
            ax.vlines(normal, 0, 1, color=style.READS, lw=2, label="normal")
            if shown:
                ax.vlines(subnormal, 0, 1, color=style.WASTE, lw=2, label="subnormal")
                ax.legend(loc="upper right", ncol=2, bbox_to_anchor=(1, 1.65), fontsize=9)
            ax.vlines([0], 0, 1, color=style.INK, lw=3)
            ax.set_title(f"{name} {title}", fontsize=10)
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
        axes[-1].set_xlabel("value")
    return style.picture(
        fig, alt=f"{name} has {len(subnormal)} subnormal numbers between 0 and its smallest normal number, "
        f"{fmt.smallest_normal:g}, as far apart as the first normal numbers. Without them there would be a gap.",
    )  # fmt: skip


def _written(x: float, digits: int) -> str:
    """x as a text would have it: integers up to a million in full, all else in so many digits."""
    return f"{x:,.0f}" if x == x // 1 and abs(x) <= 1e6 else f"{x:.{digits}g}"


def formats() -> Table:
    whole = {"exponent": "exponent_bits", "mantissa": "mantissa_bits", "bias": "bias", "in memory": "storage_bits"}
    real = {
        "largest": "max",
        "smallest normal": "smallest_normal",
        "smallest subnormal": "smallest_subnormal",
        "eps": "eps",
    }
    rows = [
        (f.name, *(getattr(f, x) for x in whole.values()), *(_written(getattr(f, x), 3) for x in real.values()))
        for f in FORMATS.values()
    ]
    columns = {"format": "", "exponent": "bits", "mantissa": "bits", "bias": "", "in memory": "bits"}
    return style.table(
        columns | dict.fromkeys(real, ""), rows, caption="computed; eps is the distance from 1 to the next number"
    )


def range_and_precision() -> Picture:
    return precision.range_and_precision(list(FORMATS.values()))


def what_becomes_of(*numbers: float) -> Table:
    """Each number in several formats."""
    columns = ("fp32", "bf16", "fp16", *_SMALL)
    rows = [(_written(x, 6), *(_written(FORMATS[name].round(x), 6) for name in columns)) for x in numbers]
    return style.table(
        dict.fromkeys(("number", *columns), ""), rows, caption="computed: the nearest number of each format"
    )


def what_becomes_of_them() -> Markdown:
    smallest = FORMATS["fp16"].smallest_subnormal
    return Markdown(
        "**What you saw.** Of these formats only fp32 and bf16, with 8 exponent bits, hold 1e-8. The smallest number of "
        "fp16 is "
        f"{smallest:.3g}, and everything that is nearer to 0 than to it, up to {smallest / 2:.3g}, becomes 0. If Adam's "
        "epsilon "
        "is stored in fp16, Adam divides by zero wherever its other term, the root of the second moment, is 0 as well. In the other direction fp16 tells 1.001 from 1.002, and bf16 rounds "
        "both to "
        f"1: with {FORMATS['bf16'].mantissa_bits} mantissa bits its next number after 1 is {1 + FORMATS['bf16'].eps}. A "
        "million "
        "is infinity in fp16. The fp8 and fp4 formats have neither the range nor the precision to hold such different "
        "numbers "
        f"side by side, which is why they always come with a scale."
    )


def number_lines() -> Picture:
    return precision.number_lines([FORMATS["fp4_e2m1"], FORMATS["fp8_e5m2"], FORMATS["fp8_e4m3"]], high=8)


# ---- rounding and sums -----------------------------------------------------------------------------------------------


def rounding() -> Picture:
    """Where fp16 rounds four numbers between 4,096 and 4,108, two of them ties."""
    fp16, marks = FORMATS["fp16"], (4096, 4100, 4104, 4108)

    def place(value: float) -> float:
        return 2 + 1.25 * (value - marks[0])

    with diagram.canvas(19.2, 4.6) as ax:
        ax.plot([place(marks[0]) - 0.6, place(marks[-1]) + 0.6], [2.9, 2.9], color=style.INK, lw=1.5)
        for i, mark in enumerate(marks):
            ax.plot([place(mark)] * 2, [2.65, 3.15], color=style.READS, lw=3)
            diagram.text(ax, place(mark), 3.6, f"{mark:,}", bold=True)
            diagram.text(ax, place(mark), 4.1, "odd mantissa" if i % 2 else "even mantissa", size=9)
        for value, name, colour in (
            (4096.8, "4,096.8", style.COMPUTE), (4098, "4,098 (tie)", style.WRITES),
            (4102, "4,102 (tie)", style.WRITES), (4106.8, "4,106.8", style.COMPUTE),
        ):  # fmt: skip
            diagram.text(ax, place(value), 0.9, name, color=colour)
            diagram.arrow(ax, (place(value), 1.25), (place(fp16.round(value)), 2.6), colour=colour)
    return diagram.picture(
        ax, alt="From 4,096 on fp16 holds every fourth integer. 4,096.8 goes to 4,096 and 4,106.8 to 4,108, the nearest. "
            "The "
        "ties 4,098 and 4,102 are in the middle: they go to 4,096 and 4,104, whose mantissa is even.",
    )  # fmt: skip


def running_sums(sums: dict[str, Sequence[float]], step: float) -> Picture:
    return precision.running_sums(sums, step)


def what_sums_say(sums: dict[str, Sequence[float]], step: float) -> Markdown:
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    last = sums["fp16"][-1]
    count = sums["fp16"].index(last) + 1
    return Markdown(
        f"**What you saw.** The sum in fp16 stops at {last:g}. There, neighboring numbers are {fp16.spacing(last)} apart. "
        "A step "
        f"of {step} is less than half of that, so the nearest number to the new sum is the old sum. In bf16 the same "
        "happens "
        f"at {sums['bf16'][-1]:g}, where the spacing is {bf16.spacing(sums['bf16'][-1])}. The sum was wrong before it "
        "stopped, "
        f"too: fp16 reaches {last:g} after {count:,} additions, when the sum should be {count * step:.0f}. Between 128 and "
        "256 "
        f"the spacing is {fp16.spacing(128)}, so that each step of {step} is rounded up to {fp16.spacing(128)}."
    )


def remedies(sums: dict[str, Sequence[float]], x: Tensor, short: Tensor) -> Table:
    rows = [
        ("one long sum in fp16", sums["fp16"][-1]),
        (f"{len(short)} short sums in fp16, added up in fp32", short.float().sum().item()),
        ("x.sum(): fp32 inside, rounded to fp16 once, at the end", x.sum().item()),
        ("x.float().sum()", x.float().sum().item()),
        ("exact, for the 0.1 that fp16 stores", x.double().sum().item()),
    ]
    return style.table({"20,000 times 0.1": "", "sum": ""}, rows, caption="computed", formats={"sum": ".1f"})


# ---- tolerance -------------------------------------------------------------------------------------------------------


def _in_fp16(x: Tensor, width: int) -> Tensor:
    """The sums of rows in fp16: `width` sums side by side, then their sum, pair by pair."""
    total = torch.zeros(len(x), width, dtype=torch.float16)
    for start in range(0, x.shape[1], width):
        total = total + x[:, start : start + width]
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total[:, 0]


def kernels_for_sums(x: Tensor) -> dict[str, Tensor]:
    """Five ways to add up the rows of x, which is fp16: each gives fp16."""
    return {
        "fp32 sum, rounded at the end": x.float().flip(-1).sum(-1).half(),
        "64 fp16 sums side by side, added pair by pair": _in_fp16(x, 64),
        "one long fp16 sum": _in_fp16(x, 1),
        "fp32, without the last 2 numbers": x[:, :-2].float().sum(-1).half(),
        "fp32, without the last 64 numbers": x[:, :-64].float().sum(-1).half(),
    }


def judged(x: Tensor) -> list[tuple[str, float, bool]]:
    """(kernel, largest error, whether the course's rule accepts it) for each way to add up the rows of x."""
    truth, native = x.double().sum(-1), x.sum(-1)
    return [
        (name, (y.double() - truth).abs().max().item(), testing.compare(y, truth, native) is None)
        for name, y in kernels_for_sums(x).items()
    ]


def tolerance(x: Tensor) -> Picture:
    """The errors of several kernels beside PyTorch's and the allowed one."""
    truth, native = x.double().sum(-1), x.sum(-1)
    theirs = (native.double() - truth).abs().max().item()
    allowed = testing.error_bound(truth, native).max().item()
    rows = [("PyTorch, x.sum(-1)", theirs, True), *judged(x)]
    with style.use():
        fig, ax = style.figure(width=9, height=3.4)
        for row, (_, error, accepted) in enumerate(rows):
            colour = style.PEER if row == 0 else style.COMPUTE if accepted else style.WRITES
            ax.barh(row, error, color=colour)
            style.label(ax, error, row, f"{error:.2g}", dx=-6, color="white")
            if row:
                ax.text(130, row, "accepted" if accepted else "rejected", va="center")
        ax.axvline(allowed, color=style.BOUND, ls="--")
        ax.text(allowed * 1.06, -0.75, f"allowed: {allowed:.3g}", color=style.BOUND, va="center")
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        ax.invert_yaxis()
        style.axes(ax, x="largest error, compared with float64", log="x")
        ax.set_xlim(0.3, 500)
    said = "; ".join(f"{name}: {error:.3g}, {'accepted' if ok else 'rejected'}" for name, error, ok in rows[1:])
    return style.picture(fig, alt=f"PyTorch's error is {theirs:.3g}, the allowed one {allowed:.3g}. {said}.")


def what_tolerance_says(x: Tensor) -> Markdown:
    truth, native = x.double().sum(-1), x.sum(-1)
    theirs = (native.double() - truth).abs().max().item()
    allowed = testing.error_bound(truth, native).max().item()
    errors = {name: error for name, error, _ in judged(x)}
    side, long = errors["64 fp16 sums side by side, added pair by pair"], errors["one long fp16 sum"]
    two, many = errors["fp32, without the last 2 numbers"], errors["fp32, without the last 64 numbers"]
    return Markdown(
        f"**What you saw.** PyTorch is off by {theirs:.3g} at most, so the rule allows {allowed:.3g}. A kernel that adds "
        "in fp32 "
        f"in another order is as good as PyTorch. Sums in fp16 side by side are off by {side:.2g}, which is still within "
        "the "
        f"rule. One long sum in fp16, the mistake of the previous section, is off by {long:.2g} and is rejected. The "
        "last "
        f"two bars show what a tolerance cannot do. A kernel that forgets 64 numbers is off by {many:.2g} and is rejected, "
        "but one "
        f"that forgets 2 numbers is off by {two:.2g} only, and passes on these inputs. That is why the checks of this "
        "course "
        f"choose inputs in which each element can matter, for instance one large number at the end of a row."
    )


# ---- training --------------------------------------------------------------------------------------------------------


def weights(nearest: Sequence[float], draws: Sequence[Sequence[float]], step: float) -> Picture:
    return precision.trajectories([1 + i * step for i in range(len(nearest))], nearest, draws)


def gradients(gradient: Tensor, scales: Sequence[int]) -> Picture:
    exponents = gradient.abs().double().log2().flatten().tolist()
    return precision.gradients_in_range(exponents, scales, FORMATS["fp16"])


def what_gradients_say(gradient: Tensor) -> Markdown:
    def stored(scale: int) -> Tensor:
        return (gradient.double() * 2.0**scale).half()

    def share(scale: int) -> float:
        return (stored(scale) == 0).double().mean().item()

    lost, over = int((stored(30) == 0).sum()), int(stored(30).isinf().sum())
    scaler = torch.amp.GradScaler("cpu")
    return Markdown(
        f"**What you saw.** Without a scale, {share(0):.0%} of the gradients become 0 in fp16, and nothing is "
        f"learned from them. With a scale of 2^16 it is {share(16):.0%}. With 2^30 it is {lost} of "
        f"{gradient.numel():,}, but {over} overflow to infinity, and "
        f"a single infinity makes the whole step useless. So the best scale is the largest one that does not "
        f"overflow. It changes during training, and no one knows it beforehand. PyTorch's `GradScaler` searches for it: it "
        f"starts at {scaler.get_scale():,.0f}, multiplies by {scaler.get_backoff_factor()} after an overflow, and by "
        f"{scaler.get_growth_factor():g} after {scaler.get_growth_interval():,} good steps in a row."
    )


def mixed_precision() -> Picture:
    """A training step in mixed precision: what is kept in 16 bits, and what in 32."""
    with diagram.canvas(19.2, 5.4) as ax:
        diagram.box(ax, 0, 1.6, 3.6, 1.6, "weights\nand Adam's states\nin fp32", style.READS)
        diagram.arrow(ax, (3.6, 2.4), (5.6, 2.4), "cast")
        diagram.box(ax, 5.6, 1.6, 3.0, 1.6, "weights\nin 16 bits", style.WASTE)
        diagram.arrow(ax, (8.6, 2.4), (9.9, 2.4))
        diagram.box(ax, 9.9, 0.0, 5.2, 4.0, "", "none", dashed=True)
        diagram.box(ax, 10.2, 0.2, 4.6, 1.5, "matrix products:\n16-bit inputs,\nsums in fp32", style.WASTE)
        diagram.box(ax, 10.2, 1.9, 4.6, 1.3, "what needs its range\nor precision: fp32", style.READS)
        diagram.text(ax, 12.5, 3.55, "forward and backward pass", size=9)
        diagram.arrow(ax, (15.1, 1.7), (16.0, 1.7))
        diagram.box(ax, 16.0, 0.9, 3.0, 1.6, "gradients", style.WASTE)
        ax.plot([17.5, 17.5, 1.8, 1.8], [2.45, 4.9, 4.9, 3.9], color=style.INK, lw=2)
        diagram.arrow(ax, (1.8, 4.0), (1.8, 3.2))
        diagram.text(ax, 5.9, 4.6, "optimizer step in fp32", size=9)
    return diagram.picture(
        ax, alt="Mixed precision: weights and Adam's states are kept in fp32 and cast to 16 bits for each step. Matrix "
            "products "
        "read 16-bit numbers and add in fp32; what needs the range or precision of fp32 runs in fp32. The optimizer updates the fp32 "
        "weights.",
    )  # fmt: skip


def autocast_rules() -> Table:
    rows = []
    for op in autocast.OPERATIONS:
        from_fp32, from_bf16 = (autocast.runs_in(op, dtype) for dtype in ("float32", "bfloat16"))
        rows.append((op.name, op.kind, from_fp32, from_bf16, op.cuda))
    columns = ["operation", "kind", "CPU, fp32 input", "CPU, bf16 input", "CUDA (documentation)"]
    return style.table(
        dict.fromkeys(columns, ""),
        rows,
        caption="the dtype that each operation runs in under autocast; CPU: tried here",
    )


def what_autocast_says() -> Markdown:
    found = [(autocast.runs_in(op, "bfloat16") == "float32", op.cuda == "fp32") for op in autocast.OPERATIONS]
    differ = sum(cpu != cuda for cpu, cuda in found)
    return Markdown(
        f"**What you saw.** Matrix products run in 16 bits on both devices. Elementwise operations keep the dtype of their "
        f"input. For bf16 input, {differ} of {len(found)} operations differ: CUDA runs reductions and exponentials in "
        "fp32, "
        f"and the CPU leaves them in bf16. The rules belong to the device "
        f"([PyTorch's list]({autocast.SOURCE})), so look at the dtype of a result instead of remembering it."
    )


# ---- products in 8 bits ----------------------------------------------------------------------------------------------


def fp8_product() -> Picture:
    """A matrix product in fp8 with a factor per tensor."""
    with diagram.canvas(19.4, 4.8) as ax:
        for y, name in ((0.3, "a"), (2.9, "b")):
            diagram.box(ax, 0, y, 2.2, 1.4, f"{name}\nbf16", style.PEER)
            diagram.arrow(ax, (2.2, y + 0.7), (6.0, y + 0.7), f"divided by factor_{name}", size=8)
            diagram.box(ax, 6.0, y, 2.4, 1.4, f"{name}8\ne4m3, up to 448", style.WASTE, size=9)
            diagram.arrow(ax, (8.4, y + 0.7), (9.8, 2.1 if y < 1 else 2.6))
        diagram.box(ax, 9.8, 1.5, 3.2, 1.7, "tensor cores\nmultiply and\nadd up", style.COMPUTE)
        diagram.arrow(ax, (13.0, 2.35), (17.0, 2.35), "times factor_a x factor_b", size=8)
        diagram.box(ax, 17.0, 1.65, 2.2, 1.4, "c\nbf16", style.PEER)
    return diagram.picture(
        ax, alt="a and b are divided by a factor each, so that their largest element becomes 448, and are rounded to fp8. "
            "The "
        "tensor cores multiply and add; the result is multiplied by both factors and rounded to bf16.",
    )  # fmt: skip


def relative_error(c: Tensor, truth: Tensor) -> float:
    """The root mean square of the error, as a share of the truth's."""
    return ((c.double() - truth).square().mean() / truth.square().mean()).sqrt().item()


def fp8_errors(a: Tensor, b: Tensor) -> Table:
    """The error of a b^T under four treatments, for a as it is and for a as small as gradients are."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double()

    def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
        factor = x.abs().max() / torch.finfo(dtype).max
        return cast(x / factor, dtype) * factor

    ways = {
        "bf16": lambda x: x.bfloat16().double(),
        "e4m3, no factor": lambda x: cast(x, e4m3),
        "e5m2, no factor": lambda x: cast(x, e5m2),
        "e4m3, with a factor": lambda x: scaled(x, e4m3),
        "e5m2, with a factor": lambda x: scaled(x, e5m2),
    }
    rows = []
    for name, way in ways.items():
        errors = [100 * relative_error(way(each) @ way(b).T, each @ b.T) for each in (a, a / 10_000)]
        rows.append((name, *errors))
    columns = {"both operands in": "", "a as it is": "%", "a divided by 10,000": "%"}
    caption = "computed: error of a b^T compared with float64, as a share of its size; exact sums"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys([*columns][1:], ".2f"))


BLOCK, FEW_BITS = 32, 14  # products of one step of the tensor cores; what Hopper keeps of a sum of fp8 products


def _cut(x: Tensor, bits: int) -> Tensor:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(fraction * 2.0**bits), exponent - bits)


def few_bits(products: Tensor, every: int) -> Tensor:
    """Sums of products [rows, K] as Hopper is modelled to add them: BLOCK products at once, the sum cut to FEW_BITS bits; after
    each `every` products the sum goes to an exact one and starts again."""
    total = torch.zeros(len(products), dtype=torch.float64)
    part = torch.zeros_like(total)
    for start in range(0, products.shape[1], BLOCK):
        part = _cut(part + products[:, start : start + BLOCK].sum(-1), FEW_BITS)
        if (start + BLOCK) % every == 0:
            total, part = total + part, torch.zeros_like(part)
    return total + part


def accumulators(k: int = 4096) -> Table:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.rand(256, k, generator=generator, dtype=torch.float64).to(torch.float8_e4m3fn).double() for _ in range(2)
    )
    products = a * b
    truth = products.sum(-1)
    rows = []
    for every, name in (
        (k, f"{FEW_BITS} bits over all {k:,} products"),
        (512, "into an fp32 sum after each 512"),
        (128, "into an fp32 sum after each 128"),
    ):
        rows.append((name, 100 * (few_bits(products, every) / truth - 1).mean().item()))
    caption = f"modelled: sums of {k:,} fp8 products of positive numbers; {BLOCK} products are added at a time, and the sum is cut to {FEW_BITS} bits"
    return style.table({"the sum is kept": "", "mean error": "%"}, rows, caption=caption, formats={"mean error": ".3f"})


def fp8_training() -> Markdown:
    small, large = ({row["rung"]: row for row in ladder.rows(name)} for name in ("gpt2", "gpt-1.3b"))

    def gain(rungs: dict) -> float:
        return float(rungs["bf16 weights"]["step_ms"]) / float(rungs["fp8"]["step_ms"])

    return Markdown(
        "Notebook 17 trains this way: inputs and weights in e4m3, gradients in e5m2, a factor for each tensor, everything "
        "else "
        f"in bf16. Measured on an H200, a step of a model with 1.3 billion parameters becomes **{gain(large):.2f}** times "
        "as "
        f"fast as with products in bf16, and a step of GPT-2, whose matrices are smaller, only {gain(small):.2f} times. "
        f"Computing the factors and casting cost time, too. After {small['fp8']['steps']} steps GPT-2's loss was "
        f"{float(small['fp8']['loss']):.3f} with fp8 and {float(small['bf16 weights']['loss']):.3f} with bf16."
    )


# ---- blocks and integers ---------------------------------------------------------------------------------------------


def outlier() -> list[float]:
    """128 ordinary numbers, one of them replaced by 60."""
    rng = random.Random(1)
    values = [rng.gauss(0, 1) for _ in range(128)]
    values[70] = 60.0
    return values


def become_zero(values: Sequence[float], element: str = "fp4_e2m1") -> dict[str, int]:
    """How many of the values become 0, by how many share a scale."""
    return {
        f"one scale for {n}": dtypes.mx_dequantise(dtypes.mx_quantise(values, element, n)).count(0) for n in (128, 32)
    }


def blocks(values: Sequence[float], element: str = "fp4_e2m1") -> Picture:
    stored = {f"one scale for {n}": dtypes.mx_dequantise(dtypes.mx_quantise(values, element, n)) for n in (128, 32)}
    return precision.blocks(values, stored, block=32)


def block_errors(values: Sequence[float]) -> Table:
    rows = []
    for element in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1"):
        for n in (128, 32):
            kept = dtypes.mx_dequantise(dtypes.mx_quantise(values, element, n))
            error = sum(abs(k - v) for k, v in zip(kept, values, strict=True)) / sum(map(abs, values))
            rows.append((element, n, dtypes.mx_bits_per_element(element, n), kept.count(0), 100 * error))
    columns = {
        "element": "",
        "share a scale": "numbers",
        "memory": "bits each",
        "become 0": "of 128",
        "mean error": "%",
    }
    return style.table(columns, rows, caption="computed", formats={"memory": ".2f", "mean error": ".1f"})


def saturated(values: Sequence[float], element: str, block: int) -> int:
    """How many elements are beyond the format's largest number after the division by their block's scale."""
    fmt = FORMATS[element]
    found = 0
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = 2.0 ** dtypes.mx_scale_exponent(part, fmt.max_exponent)
        found += sum(abs(value) / scale > fmt.max for value in part)
    return found


def what_blocks_say(values: Sequence[float]) -> Markdown:
    lost = become_zero(values)
    few, many = (saturated(values, "fp8_e4m3", n) for n in (128, 32))
    return Markdown(
        f"**What you saw.** In fp4 the outlier's scale turns {lost['one scale for 128']} of 128 numbers into 0. With a "
        "scale for each 32 it is "
        f"{lost['one scale for 32']}: the block with the outlier still suffers, and the other three do not notice it. The "
        "fp8 formats have "
        "enough range of their own, and hardly need the blocks. Their finer blocks are even a little worse. The reason is "
        "the "
        "scale, which has to be a power of two. In e4m3 it brings the largest number of a block to between 256 and 512, "
        "but "
        f"the format ends at 448. A number above that *saturates*: it becomes 448. With one scale this happens to {few} "
        "number, "
        f"and with four scales to {many}, because each of the four blocks brings its own largest numbers up there."
    )


def byte(first: int, second: int) -> Picture:
    """The eight bits of a byte that holds two integers of 4 bits."""
    value = dtypes.pack_int4([first, second])[0]
    with diagram.canvas(14, 4.4) as ax:
        for i, bit in enumerate(f"{value:08b}"):
            diagram.box(ax, 1 + 1.5 * i, 1.3, 1.5, 1.2, bit, style.READS if i < 4 else style.YOURS, size=14)
            diagram.text(ax, 1.75 + 1.5 * i, 2.85, f"bit {7 - i}", size=8)
        diagram.text(ax, 4, 0.8, f"high half: the second number, {second}")
        diagram.text(ax, 10, 0.8, f"low half: the first number, {first}")
        diagram.text(ax, 7, 3.7, f"the byte {value}")
    return diagram.picture(ax, alt=f"The byte {value:08b}: its high half holds {second}, its low half holds {first}.")


def packed(numbers: Sequence[float]) -> Table:
    """Weights as int4 with one scale, two to a byte, and what comes back."""
    stored = {bits: dtypes.quantise_symmetric(numbers, bits) for bits in (8, 4)}
    off = {b: max(abs(s * i - w) for i, w in zip(q, numbers, strict=True)) for b, (s, q) in stored.items()}
    scale, integers = stored[4]
    data = dtypes.pack_int4(integers)
    rows = []
    for n, back in enumerate(dtypes.unpack_int4(data, count=len(numbers))):
        bits = f"{data[n // 2]:08b}"
        rows.append((numbers[n], integers[n], bits[:4] if n % 2 else bits[4:], bits, scale * back))
    columns = {"weight": "", "integer": "", "its 4 bits": "", "its byte": "", "comes back as": ""}
    caption = f"computed; int4: {len(data)} bytes, off by at most {off[4]:.2g}; int8: {len(numbers)} bytes, off by at most {off[8]:.2g}"
    return style.table(columns, rows, caption=caption, formats={"weight": ".2f", "comes back as": ".2f"})


# ---- what it buys ----------------------------------------------------------------------------------------------------


def rates() -> Table:
    names = ["fp32", "tf32", "fp16", "fp8", "fp4"]
    rows = [(g.name, *(g.peak_flops.get(d, 0) / 1e12 or None for d in names), g.hbm_gbps) for g in GPUS]
    columns = {"GPU": "", **dict.fromkeys(names, "TFLOP/s"), "memory": "GB/s"}
    return style.table(
        columns, rows, caption="from data sheets: dense peak rates; an empty cell means that the GPU has no such unit"
    )


def what_rates_say() -> Markdown:
    h100, b200 = gpu("h100-sxm").peak_flops, gpu("b200").peak_flops
    return Markdown(
        f"**What you saw.** On an H100, fp16 on the tensor cores has {h100['fp16'] / h100['fp32']:.0f} times the peak rate "
        "of fp32, "
        f"and fp8 twice the rate of fp16. On a B200, fp4 has {b200['fp4'] / b200['fp32']:.0f} times the rate of fp32. "
        "Halving the bits "
        f"usually doubles the rate. The large step is the one from fp32, which runs on the ordinary arithmetic units, to "
        f"anything that the tensor cores take. GeForce cards such as the RTX 3090 run tf32 no faster than fp32."
    )


_STORED = {"fp32": 32.0, "bf16": 16.0, "fp8, a factor per tensor": 8.0, "MX fp4, a scale per 32": 4.25}


def layer_bytes() -> dict[str, float]:
    """The bytes of the weights of one layer of Llama 3 8B, by format."""
    return {name: layers.weights() * bits / 8 for name, bits in _STORED.items()}


def layer() -> Table:
    rate = gpu("h200").hbm_gbps
    rows = [(name, _STORED[name], n / 1e6, n / rate / 1e3) for name, n in layer_bytes().items()]
    columns = {"weights in": "", "memory": "bits each", "one layer": "MB", "least time to read it": "µs"}
    caption = f"computed: a layer of Llama 3 8B on an H200, at the data sheet's {rate:,} GB/s"
    formats = {"memory": ".2f", "one layer": ".0f", "least time to read it": ".0f"}
    return style.table(columns, rows, caption=caption, formats=formats)


def what_the_layer_says() -> Markdown:
    us = {name: n / gpu("h200").hbm_gbps / 1e3 for name, n in layer_bytes().items()}
    return Markdown(
        f"**The line of the budget.** In [00](00_start.ipynb) reading a layer in bf16 took at least {us['bf16']:.0f} µs. "
        "In fp8 it "
        f"takes {us['fp8, a factor per tensor']:.0f} µs, and in MX fp4 {us['MX fp4, a scale per 32']:.0f} µs (computed). "
        "While a "
        "model writes one text, most of its time is spent on reading weights, so fewer bits per weight are the first way "
        "to "
        f"make it faster. [12 Matmul](12_matmul.ipynb) has kernels that read such weights."
    )
