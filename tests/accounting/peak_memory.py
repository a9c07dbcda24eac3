"""The peak memory of training steps on this GPU against the prediction: `python -m tests.accounting.peak_memory memory.csv`.

A step is forward, backward and optimizer of tests/accounting/transformer.py, the third of three. measured_bytes is what PyTorch's
allocator had handed out at most, without what it held before there was a model (cuBLAS's workspace); reserved_bytes what it
had taken from the GPU for that. The same model under tests/accounting/peak.py is in tests/accounting/test_memory.py.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import traceback
from datetime import UTC, datetime

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpukit.accounting.memory import Run, recipe_named, training_memory
from gpukit.accounting.models import Config, parameters, preset
from tests.accounting.transformer import Transformer

LLAMA = Config(
    "llama-0.6b", 32000, hidden=2048, layers=10, heads=16, kv_heads=4, glu=True, intermediate=5632, norm="rmsnorm",
    tied_embeddings=False,
)  # fmt: skip
WIDE = Config(
    "wide-block", 1024, hidden=4096, layers=4, heads=32, kv_heads=8, glu=True, intermediate=14336, norm="rmsnorm"
)

# (config, recipe, batch, tokens, run)
SETTINGS = (
    (LLAMA, "bf16-adamw", 8, 2048, Run()),
    (LLAMA, "bf16-adamw", 16, 2048, Run()),
    (LLAMA, "bf16-adamw", 8, 4096, Run()),
    (LLAMA, "bf16-adamw", 8, 4096, Run(recompute="selective")),
    (LLAMA, "bf16-adamw", 8, 4096, Run(recompute="full")),
    (LLAMA, "bf16-adamw", 1, 32768, Run(recompute="full")),
    (LLAMA, "bf16-adamw", 8, 2048, Run(attention="eager")),
    (LLAMA, "bf16-adamw", 8, 2048, Run(attention="eager", recompute="selective")),
    (LLAMA, "bf16-adamw", 8, 2048, Run(attention="eager", recompute="full")),
    (WIDE, "bf16-pure", 4, 4096, Run()),
    (WIDE, "bf16-pure", 4, 4096, Run(recompute="full")),
    (WIDE, "bf16-pure", 2, 2048, Run(attention="eager", recompute="selective")),
    (preset("gpt2"), "fp32-adamw", 16, 1024, Run("fp32", "eager", dropout=True)),
    (preset("gpt2-medium"), "bf16-adamw", 16, 1024, Run(attention="eager", dropout=True)),
    (preset("gpt2-medium"), "bf16-adamw", 16, 1024, Run()),
    (preset("gpt2-medium"), "bf16-adamw", 16, 1024, Run(logits="bf16")),
    (preset("qwen2.5-0.5b"), "bf16-adamw", 2, 8192, Run()),
)  # fmt: skip
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer:
    """torch.optim.AdamW; with a master copy, on that, one parameter after another, so that no gradient is there in fp32
    but the one at work."""

    def __init__(self, parameters, master: bool):
        self.weights = list(parameters)
        self.master = [w.detach().float() for w in self.weights] if master else self.weights
        self.steppers = [torch.optim.AdamW([m], lr=1e-4, fused=True) for m in self.master]

    def step(self) -> None:
        for weight, master, stepper in zip(self.weights, self.master, self.steppers, strict=True):
            if master is not weight:
                master.grad = weight.grad.float()
            stepper.step()
            if master is not weight:
                master.grad = None
                weight.data.copy_(master)
            weight.grad.zero_()


def measure(c: Config, recipe: str, batch: int, tokens: int, run: Run) -> dict:
    """One row. Raises whatever the step raises."""
    how = recipe_named(recipe)
    prediction = training_memory(c, batch, tokens, recipe=recipe, run=run)
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.set_default_dtype(_DTYPES[how.weights])
    try:
        with torch.device("cuda"):
            model = Transformer(c, run)
    finally:
        torch.set_default_dtype(torch.float32)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer = Optimizer(model.parameters(), bool(how.master))
    ids = torch.randint(c.vocab_size, (batch, tokens), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model.loss(ids, ids).backward()
            optimizer.step()
    states = sum(prediction.parts[name] for name in ("weights", "gradients", "optimizer"))
    measured = torch.cuda.max_memory_allocated() - base
    return {
        "model": c.name, "parameters": parameters(c).total, "recipe": recipe, "attention": run.attention,
        "recompute": run.recompute, "dropout": int(run.dropout), "logits": run.logits, "batch": batch, "tokens": tokens,
        "moment": prediction.moment, "predicted_bytes": prediction.total_bytes, "measured_bytes": measured,
        "ratio": f"{prediction.total_bytes / measured:.4f}", "predicted_states_bytes": states,
        "measured_states_bytes": torch.cuda.memory_allocated() - base,
        "reserved_bytes": torch.cuda.max_memory_reserved(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def _workspaces() -> None:
    """Let cuBLAS take the workspaces that it keeps, in the forward's thread and in the backward's."""
    for dtype in _DTYPES.values():
        x = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()
        (x[None] @ x[None]).sum().backward()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="the CSV file to write")
    out = parser.parse_args(argv).out
    _workspaces()
    rows, failed = [], 0
    for setting in SETTINGS:
        try:
            rows.append(measure(*setting))
        except Exception:  # the other rows are worth having
            failed += 1
            traceback.print_exc()
            continue
        row = rows[-1]
        words = " ".join(str(row[name]) for name in list(row)[:9])
        print(
            f"{words}: {row['predicted_bytes'] / 1e9:.3f} GB predicted, {row['measured_bytes'] / 1e9:.3f} measured, ratio {row['ratio']}",
            flush=True,
        )
        with open(out, "w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerows(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
