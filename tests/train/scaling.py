"""Rows of gpukit/results/<gpu>/ranks.csv: `python -m tests.train.scaling --gpus 1 2 4` on a machine with GPUs.

Every row is a run of its own through torchrun: the preset's batch shared out over so many GPUs, so that all runs compute the same
loss. After WARM steps TIMED ones are timed together, then PROFILED ones are recorded for the time that NCCL's kernels take, and
the part of it in which nothing else ran. memory_bytes is the most that PyTorch had allocated in the timed steps, on the GPU that
had most. With `--device cpu --steps 2` it is tried without a GPU, and nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gpukit import benchmark, hardware, profiling
from gpukit.accounting.training import mfu
from gpukit.train import data, plan, presets, ranks
from gpukit.train.loop import Trainer

WARM, TIMED, PROFILED = 5, 20, 3
ENGINES = {
    "one": {},
    "ddp": {"sharding": "ddp"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp+recompute": {"sharding": "fsdp", "recompute": "full"},
}
COLUMNS = (
    "preset", "engine", "gpus", "batch", "seq", "micro_batches", "tokens_per_s", "mfu", "scaling", "communication_ms",
    "exposed_ms", "memory_bytes", "predicted_bytes", "ratio", "step", "loss", "gpu", "torch", "triton", "commit", "date",
)  # fmt: skip


def measured(preset: str, engine: str, steps: int, device: str) -> dict:
    """The row of this process's run, the same in all of its processes."""
    settings = presets.preset(preset).settings.replace(**ENGINES[engine], sample=0)
    settings = settings.replace(steps=WARM + steps + PROFILED)
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    with ranks.joined(device) as joined, tempfile.TemporaryDirectory() as folder:
        where = torch.device("cuda", joined.local_rank) if on_gpu else torch.device("cpu")
        # A vocabulary of 50,257 takes a minute to learn, and the loss is of the same tokens in all rows anyway.
        corpus = data.prepare(min(settings.model["vocab_size"], 8192))
        trainer = Trainer(settings, Path(folder), corpus, device=where, ranks=joined, say=lambda line: None)
        for _ in range(WARM):
            trainer.train_step()
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(steps):
            loss, _ = trainer.train_step()
        wait()
        seconds = (time.perf_counter() - begin) / steps
        peak = joined.largest(torch.cuda.max_memory_allocated() if on_gpu else 0)
        loss = joined.mean(loss).item()
        record = profiling.profile(trainer.train_step, calls=PROFILED, warmup=0)
        busy = [dataclasses.replace(record, spans=spans).busy_us for spans in _parted(record)]
        config = plan.accounting_config(preset, settings.model)
        predicted = plan.step_memory(config, settings, joined.world, on_cpu=not on_gpu).total_bytes
        tokens_per_s = settings.tokens_per_step / seconds
        name = torch.cuda.get_device_name() if on_gpu else "cpu"
        row = {
            "preset": preset, "engine": engine, "gpus": joined.world, "batch": settings.batch, "seq": settings.seq,
            "micro_batches": settings.micro_batches, "tokens_per_s": round(tokens_per_s),
            "communication_ms": round(busy[0] / PROFILED / 1e3, 3),
            "exposed_ms": round((busy[2] - busy[1]) / PROFILED / 1e3, 3),
            "memory_bytes": peak, "predicted_bytes": predicted, "step": WARM + steps, "loss": f"{loss:.6f}",
            **benchmark.identity(name),
        }  # fmt: skip
        if on_gpu:
            flops = plan.flops_per_token(config, settings.seq)
            share = mfu(tokens_per_s, flops, hardware.gpu(name), joined.world, settings.dtype)
            row |= {"mfu": f"{share:.4f}", "ratio": f"{predicted / peak:.4f}"}
        return row if joined.main else {}


def _parted(record: profiling.Profile) -> tuple[tuple, tuple, tuple]:
    """Kernels that communicate, the others, and all."""
    communicating = tuple(span for span in record.kernels if span.name.startswith("nccl"))
    return communicating, tuple(set(record.kernels) - set(communicating)), record.kernels


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["gpt2", "gpt-1.3b", "llama-1b"], choices=presets.PRESETS)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=ENGINES)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4], help="numbers of GPUs")
    parser.add_argument("--steps", type=int, default=TIMED, help=f"timed steps (default: {TIMED})")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--row", metavar="FILE", help="measure in this process, and write the row to FILE")
    args = parser.parse_args(argv)
    if args.row:
        row = measured(args.presets[0], args.engines[0], args.steps, args.device)
        if row:
            _write(Path(args.row), [row])
        return 0

    rows, failed = [], 0
    for preset in args.presets:
        for engine in args.engines:
            for gpus in args.gpus:
                if (gpus == 1) != (engine == "one"):
                    continue
                row = _run(preset, engine, gpus, args)
                if row is None:
                    failed += 1
                    continue
                alone = next((r for r in rows if r["preset"] == preset and r["gpus"] == "1"), None)
                if alone:
                    row["scaling"] = f"{int(row['tokens_per_s']) / int(alone['tokens_per_s']) / gpus:.4f}"
                rows.append(row)
                print("  ".join(f"{name} {row[name]}" for name in COLUMNS[:16] if row[name]), flush=True)
                if args.device == "cuda":
                    out = benchmark.RESULTS / benchmark.gpu_key(row["gpu"]) / "ranks.csv"
                    _write(out, [*_others(out, rows), *rows])
    return 1 if failed else 0


def _run(preset: str, engine: str, gpus: int, args: argparse.Namespace) -> dict | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.csv")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        options = ["--presets", preset, "--engines", engine, "--steps", str(args.steps), "--device", args.device]
        command = [sys.executable, *launcher, "-m", "tests.train.scaling", *options, "--row", str(file)]
        if subprocess.run(command).returncode:
            print(f"{preset} {engine} on {gpus}: failed", flush=True)
            return None
        return _read(file)[0]


def _others(out: Path, rows: list[dict]) -> list[dict]:
    """The rows that are there and were not measured anew."""
    anew = {(row["preset"], row["engine"], row["gpus"]) for row in rows}
    there = _read(out) if out.exists() else []
    return [row for row in there if (row["preset"], row["engine"], row["gpus"]) not in anew]


def _read(file: Path) -> list[dict]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def _write(file: Path, rows: list[dict]) -> None:
    with open(file, "w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
