"""The forward pass of one layer of Llama 3 8B, part by part, from times that were measured on an H200.

The story of the course: 04 times the layer with PyTorch, and each notebook after it improves one of its lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpukit import benchmark
from gpukit.accounting.models import preset
from gpukit.widgets import style
from gpukit.widgets.style import Table

TOKENS = 16_384  # four sequences of 4,096
LLAMA = preset("llama3-8b")
HIDDEN, INTERMEDIATE, KV = LLAMA.hidden, LLAMA.intermediate, LLAMA.kv_heads * LLAMA.head_size


@dataclass(frozen=True)
class Part:
    """A line of the layer: `times` calls of the operation that was measured, with PyTorch and with the course's kernel."""

    name: str
    operation: str
    shape: tuple[int, ...]
    times: int
    notebook: str

    def us(self, provider: str) -> float:
        row = next(row for row in benchmark.rows(self.operation) if self._is(row, provider))
        return 1e3 * row.median_ms * self.times

    def _is(self, row: benchmark.Row, provider: str) -> bool:
        key = row.op, row.provider, row.mode, row.dtype, row.shape
        return key == (self.operation, provider, "fwd", "bfloat16", self.shape)


PARTS = (
    Part("residual addition and RMSNorm, twice", "residual_rms_norm", (TOKENS, HIDDEN), 2, "11"),
    Part("RoPE of q and k", "rope", (4, 32, 8, 4096, 128), 1, "11"),
    Part("causal attention, 32 heads", "flash_attention_causal", (4, 16, 4096, 128), 2, "13"),
    Part("SwiGLU", "swiglu", (8192, INTERMEDIATE), 2, "10"),
)


def weights() -> int:
    """Of the layer's seven matrices: q and output, k and v, gate, up and down."""
    return 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INTERMEDIATE


def products_us() -> float:
    """The seven matrix products at the rate that the largest of them was measured at."""
    measured = Part("", "linear", (TOKENS, HIDDEN, INTERMEDIATE), 1, "").us("library")
    return measured * weights() / (HIDDEN * INTERMEDIATE)


def totals_us() -> tuple[float, float]:
    """(with PyTorch's functions, with the kernels of this course)."""
    pytorch, ours = (products_us() + sum(part.us(name) for part in PARTS) for name in ("library", "gpukit"))
    return pytorch, ours


def table() -> Table:
    """All lines, with the share of each and the notebook that is about it."""
    total = totals_us()[0]
    rows = [("seven matrix products", "12", products_us(), products_us() / total, products_us())]
    for part in PARTS:
        rows.append((part.name, part.notebook, part.us("library"), part.us("library") / total, part.us("gpukit")))
    rows.append(("the layer", "", total, 1.0, totals_us()[1]))
    columns = {"part": "", "notebook": "", "PyTorch": "µs", "share": "", "kernels of this course": "µs"}
    caption = "One layer of Llama 3 8B, forward, 16,384 tokens in bfloat16, H200: sums of measured times"
    return style.table(
        columns, rows, caption=caption, formats={"PyTorch": ",.0f", "share": ".0%", "kernels of this course": ",.0f"}
    )
