"""The course's formulas and its GPUs on one page: `gpukit cheatsheet` prints it, docs/cheatsheet.html is the page to be printed.

Numbers come from gpukit.hardware and gpukit.accounting, so that each stands in one place.
"""

from __future__ import annotations

import html
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpukit import hardware
from gpukit.accounting import dtypes, memory, models
from gpukit.accounting.roofline import critical_batch
from gpukit.hardware import KIB, MIB
from gpukit.simulator.compiler.occupancy import occupancy
from gpukit.testing import GRADIENT_EPS, INTRINSIC_EPS, OUTPUT_EPS
from gpukit.widgets import style

WIDTH = 100
FILE = "docs/cheatsheet.html"


@dataclass(frozen=True)
class Section:
    """Facts, "name: text" or text alone, and a table above them. `wide`: across the whole page."""

    title: str
    facts: Sequence[str] = ()
    table: style.Table | None = None
    wide: bool = False


def sections() -> list[Section]:
    h200 = hardware.gpu("h200")
    llama = models.preset("llama3-8b")
    saved = sum(memory.block_activations(llama, 1, 4096).values()) / 4096
    cache = {name: memory.kv_cache_bytes(name, 1, 1) for name in ("gpt2", "llama3-8b")}
    batch = {name: critical_batch(hardware.gpu(name)) for name in ("a100", "h100", "h200")}
    return [
        Section("GPUs (peaks are dense: half of what a datasheet prints with sparsity)", table=_gpus(), wide=True),
        Section("Numbers", table=_dtypes()),
        Section(
            "Training state per parameter",
            (
                "ZeRO over N GPUs: stage 1 divides the optimizer's bytes by N, stage 2 also the gradients', stage 3 "
                "(FSDP) also the weights'.",
                "AdamW in float32 moves 28 bytes per parameter and step: p, g, m, v read, p, m, v written.",
            ),
            _states(),
        ),
        Section(
            "FLOPs (a multiply-add is 2)",
            (
                "Matmul [M, K] x [K, N]: 2 M N K. Backward: twice that.",
                "Model of N parameters: 2 N per token forward, 6 N D for training on D tokens, 8 N D with full recomputation.",
                "Attention beside it: 12 L h T per token in training, 4 L h T forward (L layers, width h, T tokens seen; "
                "causal: half).",
                "MFU: (6 N + 12 L h T) x tokens per second / peak. Compute-optimal: D = 20 N.",
            ),
        ),
        Section(
            "Activations and KV cache, 16 bits",
            (
                "GPT block, dropout, eager attention: b s h (34 + 5 a s / h) bytes (a heads); FlashAttention removes the "
                "second term.",
                f"Llama 3 8B, FlashAttention: {saved / 1e3:,.0f} kB per token and layer; only the block's input kept (full "
                f"recomputation): 2 h = {2 * llama.hidden / 1e3:.1f} kB.",
                f"KV cache per token: 2 L x KV heads x head size x 2 bytes. GPT-2 {cache['gpt2']:,}, Llama 3 8B "
                f"{cache['llama3-8b']:,} bytes.",
            ),
        ),
        Section(
            "Roofline",
            (
                "Rate = min(peak, intensity x bandwidth); intensity = FLOPs / bytes of device memory.",
                "Ridge = peak / bandwidth. Below it memory is the limit, above it arithmetic.",
                "16-bit matmul: intensity = M N K / (M K + K N + M N). Elementwise, norms, softmax: below 10.",
                "16-bit weights are read at full arithmetic rate from a batch of "
                + ", ".join(f"{round(tokens):,} ({name.upper()})" for name, tokens in batch.items())
                + " tokens on.",
            ),
        ),
        Section("Tolerance of a check, against float64", (_tolerance(),)),
        Section(
            "Memory accesses",
            (
                "Warp: 32 threads. Sector: 32 bytes, the unit of traffic. Line: 128 bytes, 4 sectors.",
                "32 neighboring float32 of one warp: 4 sectors. One float32 every 32 bytes or more: 32 sectors, 8 times the "
                "traffic.",
                "Widest access of a thread: 16 bytes; the address must be a multiple of them.",
                "Shared memory: 32 banks of 4 bytes. n lanes in one bank at different words take n turns; a row length of "
                "33 words, or a swizzle, removes it.",
            ),
        ),
        Section("Occupancy", (*_occupancy(h200),)),
        Section(
            "Online softmax: merging two partial results",
            (
                "m = max(m1, m2);  a = exp(m1 - m);  b = exp(m2 - m)",
                "l = l1 a + l2 b;  o = (o1 a + o2 b), divided by l once at the end",
                "LSE = m + ln l is enough for the backward pass. A block without keys: m = -inf, l = 0, weight 0.",
            ),
        ),
        Section(
            "Five tricks",
            (
                "Low precision: 16 or 8 bits in memory, sums in float32.",
                "Fusion: one trip to memory for several operations.",
                "Recomputation: compute again what is cheaper to compute than to store.",
                "Coalescing: the threads of a warp read neighboring bytes.",
                "Tiling: load a tile once, use it many times from shared memory and registers.",
            ),
        ),
        Section(
            "When a kernel is slow",
            (
                "Compare the bytes it moves (gpukit.trace) with the least bytes possible.",
                "Divide the least bytes by the bandwidth. If that is nearly the time, only fewer bytes help.",
                "Compare sectors with bytes: are accesses coalesced, and 16 bytes wide?",
                "Below 20 µs a launch is much of the time: fuse kernels, or use a CUDA graph.",
                "Read registers, spills and shared memory (gpukit.compile): do enough programs fit on an SM?",
                "Count programs: fewer than SMs, or a last wave that is nearly empty? Split the work.",
                "Matmul: are the tensor cores used, in the right dtype, with tiles that divide the shape?",
                "Do tiles that run at the same time share rows or columns in L2?",
                "Do many atomics meet at one address? Did the clock fall under load?",
            ),
        ),
    ]


def _gpus() -> style.Table:
    columns = {"": "", "SMs": "", "16 bits": "TFLOP/s", "fp8": "TFLOP/s", "tf32": "TFLOP/s", "fp32": "TFLOP/s"}
    columns |= {"memory": "GB", "bandwidth": "GB/s", "ridge": "16 bits, FLOP/B", "L2": "MiB", "shared": "KiB/SM"}
    columns |= {"registers": "Ki/SM", "threads": "per SM"}
    rows = []
    for gpu in hardware.GPUS:
        peaks = [
            gpu.peak_flops[name] / 1e12 if name in gpu.peak_flops else None for name in ("fp16", "fp8", "tf32", "fp32")
        ]
        ridge = round(gpu.ridge("fp16"))
        on_chip = (
            gpu.l2_bytes // MIB,
            gpu.smem_per_sm_bytes // KIB,
            gpu.registers_per_sm // KIB,
            gpu.max_threads_per_sm,
        )
        rows.append((gpu.name, gpu.sms, *peaks, gpu.hbm_bytes // 10**9, gpu.hbm_gbps, ridge, *on_chip))
    return style.table(columns, rows, formats=dict.fromkeys(("16 bits", "fp8", "tf32", "fp32"), ",.0f"))


def _dtypes() -> style.Table:
    rows = [
        (f.name, f"{f.storage_bits / 8:g}", f"{f.exponent_bits} + {f.mantissa_bits}", f"{f.max:,.0f}" if f.max < 1e6 else f"{f.max:.3g}", f"{2.0**f.min_exponent:.2g}",
         f"2^{-f.mantissa_bits}")
        for f in dtypes.FORMATS.values()
    ]  # fmt: skip
    rows.append(("int8", "1", "", "127", "1", "exact"))
    return style.table(dict.fromkeys(("dtype", "bytes", "exp + man", "largest", "least normal", "eps"), ""), rows)


def _states() -> style.Table:
    rows, n = [], 1 << 20
    for recipe in memory.RECIPES.values():
        states = memory.model_states(n, recipe)
        parts = (states.weights_bytes, states.gradients_bytes, states.optimizer_bytes, states.total_bytes)
        rows.append((recipe.name, *(f"{part / n:.3g}" for part in parts)))
    return style.table({"bytes": "", "weights": "", "gradients": "", "optimizer": "", "total": ""}, rows)


def _occupancy(gpu: hardware.Gpu) -> list[str]:
    full = gpu.registers_per_sm // gpu.max_threads_per_sm
    fits = [(registers, occupancy(gpu, 4, registers, 0)) for registers in (32, 64, 128, 255)]
    shared = [(size, occupancy(gpu, 4, 32, size * KIB).programs) for size in (32, 64, 100, 227)]
    return [
        f"Programs on an SM: the least of what registers, shared memory, warps ({gpu.max_threads_per_sm // 32}) and slots (32) "
        f"admit. All {gpu.max_threads_per_sm:,} threads: at most {full} registers each.",
        f"4 warps on {gpu.name}, registers per thread: "
        + ", ".join(
            f"{registers}: {fit.programs} programs ({fit.fraction:.0%} of the warps)" for registers, fit in fits
        )
        + ". More than 255 registers spill.",
        "Programs by the shared memory of each, KiB (1 more is reserved): "
        + ", ".join(f"{s}: {n}" for s, n in shared)
        + ".",
    ]


def _tolerance() -> str:
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    eps = ", ".join(f"{name} {torch.finfo(dtype).eps:.1e}" for name, dtype in kinds.items())
    return (
        f"Twice the error of PyTorch in the same dtype, plus {OUTPUT_EPS} eps of the row's largest element; a gradient: "
        f"{GRADIENT_EPS} eps of the tensor's largest. For a GPU's exp and division {INTRINSIC_EPS} float32 eps more. eps: {eps}."
    )


# ---- how it is shown -------------------------------------------------------------------------------------------------


def text() -> str:
    """The page for a terminal."""
    parts, wide = [], max(40, shutil.get_terminal_size((WIDTH, 0)).columns)
    for section in sections():
        lines = [section.title, "-" * len(section.title)]
        lines += [str(section.table)] if section.table else []
        for fact in section.facts:
            lines += textwrap.wrap(fact, min(WIDTH, wide), initial_indent="- ", subsequent_indent="  ")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


_LOOK = """
@page { size: A4; margin: 8mm 9mm; }
body { font: 7.5pt/1.25 "DejaVu Sans", Arial, sans-serif; color: #1a1a1a; max-width: 192mm; margin: 0 auto; }
h1 { font-size: 12pt; margin: 0 0 1mm; }
h2 { font-size: 8.4pt; margin: 0 0 0.6mm; color: #0072B2; border-bottom: 0.3mm solid #0072B2; }
section { break-inside: avoid; margin: 0 0 2mm; }
.columns { column-count: 2; column-gap: 5mm; }
table { border-collapse: collapse; width: 100%; margin-bottom: 0.6mm; }
th { font-weight: 600; border-bottom: 0.2mm solid #888; }
th, td { padding: 0.15mm 0.9mm; white-space: nowrap; font-size: 7.1pt; }
.wide th { white-space: normal !important; vertical-align: bottom; }
tr:nth-child(even) td { background: #f2f2f2; }
ul { margin: 0; padding-left: 3mm; }
p { margin: 0; }
footer { color: #666; font-size: 6.4pt; }
"""


def page() -> str:
    """The page as HTML, which prints on one sheet of A4 or letter paper."""
    parts = {True: "", False: ""}
    for section in sections():
        table = re.sub(r"\s*<", "<", section.table._repr_html_()) if section.table else ""
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in section.facts)
        facts = (
            f"<ul>{facts}</ul>"
            if len(section.facts) > 1
            else "".join(f"<p>{html.escape(f)}</p>" for f in section.facts)
        )
        kind = ' class="wide"' if section.wide else ""
        parts[section.wide] += f"<section{kind}>\n<h2>{html.escape(section.title)}</h2>\n{table}{facts}\n</section>\n"
    foot = "gpukit cheatsheet. GPUs' numbers: gpukit/hardware.py names the page of each. Computed, unless it says otherwise."
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>gpukit cheat sheet</title>\n'
        f"<style>{_LOOK}</style></head>\n<body>\n<h1>gpukit: formulas and GPUs</h1>\n{parts[True]}"
        f'<div class="columns">\n{parts[False]}</div>\n<footer>{foot}</footer>\n</body>\n</html>\n'
    )
