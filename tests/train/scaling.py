"""Rows of gpukit/results/<gpu>/ranks.csv: `python -m tests.train.scaling --gpus 1 2 4` on a machine with GPUs.

Every row is a run of its own through torchrun: the preset's batch shared out over so many GPUs, so that all runs compute the same
loss. After WARM steps TIMED ones are timed together, then PROFILED ones are recorded for the time in which NCCL's kernels run, the
part of it in which nothing else runs (exposed), and the time in which other kernels run. NCCL's kernels begin on the GPU that is
first and wait for the others, so these times are of the GPU on which they were shortest, the one that others waited for. host_ms is
how long its process took to launch a timed step: where that is the whole step, the GPU waits for the host. memory_bytes is the most that PyTorch had allocated in the timed steps, on the GPU that
had most; reserved_bytes is what it had taken from the driver for that. first_loss is of the first step, and mean_loss the mean
up to the last timed step, `step`: the loss of a single later step is moved by rounding alone.

What a GPU sends in a step stands there three times: sent_bytes is computed from the model's shape (plan.traffic); all_reduce_bytes,
all_gather_bytes and reduce_scatter_bytes are what the recorded calls ask for (the sizes that PyTorch hands to NCCL, sent around a
ring); link_bytes is what the counters of the GPU's links counted in the timed steps, where the driver shows them.

A run is a process, and its row is written when it ends, so several runs on different GPUs may write one file.
With `--device cpu --steps 2` it is tried without a GPU, and nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gpukit import benchmark, hardware, profiling
from gpukit.accounting import collectives
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
    "preset", "engine", "gpus", "batch", "seq", "micro_batches", "tokens_per_s", "mfu", "scaling", "host_ms", "computation_ms", "communication_ms",
    "exposed_ms", "calls", "sent_bytes", "all_reduce_bytes", "all_gather_bytes", "reduce_scatter_bytes", "link_bytes",
    "memory_bytes", "predicted_bytes", "ratio", "reserved_bytes", "first_loss", "mean_loss", "step", "gpu", "torch", "triton", "commit", "date",
)  # fmt: skip
# What PyTorch's record of a call of NCCL says: name -> (operation, whether the tensor to be sent is the call's input).
OPERATIONS = {
    "allreduce": ("all_reduce", True),
    "_allgather_base": ("all_gather", False),
    "_reduce_scatter_base": ("reduce_scatter", True),
}
ITEMSIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Int": 4, "Long": 8, "Double": 8, "Byte": 1}


def measured(preset: str, engine: str, steps: int, device: str, traces: Path | None = None) -> dict:
    """The row of this process's run; {} in all processes but the first. The kernels of a step are written into `traces`."""
    settings = presets.preset(preset).settings.replace(**ENGINES[engine], sample=0)
    settings = settings.replace(steps=WARM + steps + 2 * PROFILED + 1)
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    with ranks.joined(device) as joined, tempfile.TemporaryDirectory() as folder:
        where = torch.device("cuda", joined.local_rank) if on_gpu else torch.device("cpu")
        # A vocabulary of 50,257 takes a minute to learn, and the loss is of the same tokens in all rows anyway.
        corpus = data.prepare(min(settings.model["vocab_size"], 8192), say=lambda line: None)
        with where:  # a GPU draws the first weights of a billion parameters at once, and a CPU takes half a minute
            trainer = Trainer(settings, Path(folder), corpus, device=where, ranks=joined, say=lambda line: None)
        losses = [trainer.train_step()[0] for _ in range(WARM)]
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = _link_bytes(where)
        joined.gather(None)  # so that no process begins while another one still counts
        begin = time.perf_counter()
        for _ in range(steps):
            losses.append(trainer.train_step()[0])
        launched = (time.perf_counter() - begin) / steps
        wait()
        seconds = (time.perf_counter() - begin) / steps
        joined.gather(None)
        after = _link_bytes(where)
        peak = joined.largest(torch.cuda.max_memory_allocated() if on_gpu else 0)
        reserved = joined.largest(torch.cuda.max_memory_reserved() if on_gpu else 0)
        losses = joined.mean(torch.stack(losses))
        calls, record, one = _recorded(trainer.train_step, joined)
        if traces and joined.main:
            about = f"the kernels of a step of {preset}, {engine}, on one of {joined.world} GPUs"
            spans = one.kernels if on_gpu else one.spans
            dataclasses.replace(one, spans=spans, about=about).save(
                traces / f"ranks~{preset}~{engine}~{joined.world}.json.gz"
            )
        communication, computation, both = (
            dataclasses.replace(record, spans=spans).busy_us / PROFILED / 1e3 for spans in _parted(record)
        )
        times = [communication, both - computation, computation, launched * 1e3]
        times = joined.gather([round(value, 3) for value in times])
        if joined.main and joined.world > 1:
            print(f"communication, exposed, computation and the host's ms, of each GPU: {times}", flush=True)
        config = plan.accounting_config(preset, settings.model)
        predicted = plan.step_memory(config, settings, joined.world, on_cpu=not on_gpu).total_bytes
        built = plan.accounting_config(preset, settings.shape)  # with the padded table, which travels as well
        computed = plan.traffic(built, settings, joined.world).total if joined.world > 1 else 0
        tokens_per_s = settings.tokens_per_step / seconds
        name = torch.cuda.get_device_name() if on_gpu else "cpu"
        row = {
            "preset": preset, "engine": engine, "gpus": joined.world, "batch": settings.batch, "seq": settings.seq,
            "micro_batches": settings.micro_batches, "tokens_per_s": round(tokens_per_s),
            **dict(zip(("communication_ms", "exposed_ms", "computation_ms", "host_ms"), min(times), strict=True)),
            "sent_bytes": computed, **calls,
            "link_bytes": "" if before is None or after is None else round((after - before) / steps),
            "memory_bytes": peak, "predicted_bytes": predicted, "reserved_bytes": reserved,
            "first_loss": f"{losses[0].item():.6f}", "mean_loss": f"{losses.mean().item():.6f}", "step": len(losses),
            **benchmark.identity(name),
        }  # fmt: skip
        if on_gpu:
            flops = plan.flops_per_token(config, settings.seq)
            share = mfu(tokens_per_s, flops, hardware.gpu(name), joined.world, settings.dtype)
            row |= {"mfu": f"{share:.4f}", "ratio": f"{predicted / peak:.4f}"}
        return row if joined.main else {}


def _recorded(step, joined: ranks.Ranks) -> tuple[dict[str, int | str], profiling.Profile, profiling.Profile]:
    """What one of PROFILED steps sends; the kernels of PROFILED others, and of one more.

    Calls are recorded on the host, which takes it so long that the GPUs wait for it. So the kernels are recorded without them.
    """
    on_gpu = torch.cuda.is_available()
    both = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        for activities, steps in ((both, PROFILED), (both[-1:], PROFILED), (both[-1:], 1)):
            with torch.profiler.profile(activities=activities) as recording:
                joined.gather(
                    None
                )  # the profiler starts at another time in each process, and NCCL's kernels would wait for it
                for _ in range(steps):
                    step()
                if on_gpu:
                    torch.cuda.synchronize()
            recording.export_chrome_trace(str(file))
            found.append(
                profiling.load(file) if found else sent(json.loads(file.read_text())["traceEvents"], joined.world)
            )
    return tuple(found)


def sent(events: list[dict], world: int) -> dict[str, int | str]:
    """What a GPU sends in one of PROFILED steps, by the record of each call of NCCL: bytes by operation, and the number of calls.
    Where a call is not known, it is printed and nothing is said."""
    totals = {"calls": 0, **{f"{operation}_bytes": 0 for operation, _ in OPERATIONS.values()}}
    for event in events:
        about = event.get("args", {})
        if event.get("name") != "record_param_comms" or not int(about.get("In msg nelems") or 0):  # such as a wait
            continue
        name, dtype = about.get("Collective name"), about.get("dtype")
        if name not in OPERATIONS or dtype not in ITEMSIZES:
            print(f"what this call sends is not known: {about}", flush=True)
            return dict.fromkeys(totals, "")
        operation, by_input = OPERATIONS[name]
        elements = int(about["In msg nelems" if by_input else "Out msg nelems"])
        totals[f"{operation}_bytes"] += getattr(collectives, operation)(elements, world, ITEMSIZES[dtype])
        totals["calls"] += 1
    return {name: round(total / PROFILED) for name, total in totals.items()}


def _link_bytes(device: torch.device) -> int | None:
    """What the GPU has sent over its links since they were counted; None where the driver does not show it."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    try:
        command = ["nvidia-smi", "nvlink", "--getthroughput", "d", "--id", f"GPU-{uuid}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    links = re.findall(r"Data Tx: (\d+) KiB", shown)
    return 1024 * sum(map(int, links)) if links else None


def _parted(record: profiling.Profile) -> tuple[tuple, tuple, tuple]:
    """Kernels that communicate, the others, and all."""
    communicating = tuple(span for span in record.kernels if span.name.startswith("nccl"))
    return communicating, tuple(set(record.kernels) - set(communicating)), record.kernels


BRIDGED_US = 50  # a shorter gap between two kernels is no gap in a picture of a step
KINDS = {"AllReduce": "all-reduce", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter"}


def communication(name: str) -> str:
    """What a kernel does that has this name: it computes, or it communicates."""
    if not name.startswith("nccl"):
        return "computation"
    return next((kind for part, kind in KINDS.items() if part in name), "other communication")


def grouped(
    record: profiling.Profile, what: Callable[[str], str] = communication, bridged_us: float = BRIDGED_US
) -> dict[str, list[list[profiling.Span]]]:
    """The kernels of each kind, which `what` tells by the name, in stretches: those between which there is no longer gap."""
    found: dict[str, list[list[profiling.Span]]] = {}
    ends: dict[str, float] = {}
    for span in sorted(record.kernels, key=lambda span: span.start_us):
        kind = what(span.name)
        of_kind = found.setdefault(kind, [])
        if of_kind and span.start_us - ends[kind] < bridged_us:
            of_kind[-1].append(span)
            ends[kind] = max(ends[kind], span.end_us)
        else:
            of_kind.append([span])
            ends[kind] = span.end_us
    return found


def stretches(groups: dict[str, list[list[profiling.Span]]]) -> list[dict]:
    """When the kernels of each kind ran, in ms since the first kernel: rows what, start_ms, ms."""
    begin = min(stretch[0].start_us for of_kind in groups.values() for stretch in of_kind)
    return [
        {
            "what": what,
            "start_ms": f"{(stretch[0].start_us - begin) / 1e3:.2f}",
            "ms": f"{(max(span.end_us for span in stretch) - stretch[0].start_us) / 1e3:.2f}",
        }
        for what, of_kind in groups.items()
        for stretch in of_kind
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["gpt2", "gpt-1.3b", "llama-1b"], choices=presets.PRESETS)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=ENGINES)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4], help="numbers of GPUs")
    parser.add_argument("--steps", type=int, default=TIMED, help=f"timed steps (default: {TIMED})")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write there instead of gpukit/results/<gpu>/ranks.csv"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="record the kernels of a step of each run there")
    parser.add_argument(
        "--draw",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="write the stretches of these records to --out, and measure nothing",
    )
    parser.add_argument("--row", metavar="FILE", help="measure in this process, and write the row to FILE")
    args = parser.parse_args(argv)
    if args.row:
        row = measured(args.presets[0], args.engines[0], args.steps, args.device, args.traces)
        if row:
            write(Path(args.row), [row])
        return 0

    if args.draw:
        rows = []
        for trace in args.draw:
            run = dict(
                zip(("preset", "engine", "gpus"), trace.name.removesuffix(".json.gz").split("~")[1:], strict=True)
            )
            rows += [{**run, **row} for row in stretches(grouped(profiling.load(trace)))]
        write(args.out, rows, [*rows[0]])
        return 0
    failed = 0
    for preset in args.presets:
        for engine in args.engines:
            for gpus in args.gpus:
                if (gpus == 1) != (engine == "one"):
                    continue
                row = _run(preset, engine, gpus, args)
                if row is None:
                    failed += 1
                    continue
                out = None
                if args.device == "cuda":
                    out = args.out or benchmark.RESULTS / benchmark.gpu_key(row["gpu"]) / "ranks.csv"
                rows = merged(_read(out) if out and out.exists() else [], row)
                row = next(r for r in rows if _key(r) == _key(row))
                print("  ".join(f"{name} {row[name]}" for name in COLUMNS[:-5] if row[name]), flush=True)
                if out:
                    write(out, rows)
    return 1 if failed else 0


def _run(preset: str, engine: str, gpus: int, args: argparse.Namespace) -> dict | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.csv")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        options = ["--presets", preset, "--engines", engine, "--steps", str(args.steps), "--device", args.device]
        options += ["--traces", str(args.traces)] if args.traces else []
        command = [sys.executable, *launcher, "-m", "tests.train.scaling", *options, "--row", str(file)]
        if subprocess.run(command).returncode:
            print(f"{preset} {engine} on {gpus}: failed", flush=True)
            return None
        return _read(file)[0]


def _key(row: dict) -> tuple:
    return row["preset"], row["engine"], int(row["gpus"])


def merged(rows: list[dict], new: dict) -> list[dict]:
    """`rows` with the new one in the place of an older one of the same run, in order; `scaling` is the speed per GPU as a part of
    that of one GPU alone, where both were measured on the same kind of GPU."""
    by_key = {_key(row): dict(row) for row in [*rows, new]}
    for (preset, _, gpus), row in by_key.items():
        alone = by_key.get((preset, "one", 1))
        row["scaling"] = ""
        if alone and alone["gpu"] == row["gpu"]:
            row["scaling"] = f"{int(row['tokens_per_s']) / int(alone['tokens_per_s']) / gpus:.4f}"
    presets_, engines = [*presets.PRESETS], [*ENGINES]
    return sorted(
        by_key.values(), key=lambda row: (presets_.index(row["preset"]), int(row["gpus"]), engines.index(row["engine"]))
    )


def _read(file: Path) -> list[dict]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def write(file: Path, rows: list[dict], columns: Sequence[str] = COLUMNS) -> None:
    with open(file, "w", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
