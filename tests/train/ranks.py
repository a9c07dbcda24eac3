"""`python -m tests.train.ranks CASE ...`: runs of several processes with gloo on the CPU. An error ends it with a status other than 0.
With `--device cuda` each process has a GPU of its own, and runs of more processes than there are GPUs are left out.

A script of its own: the processes are forked once everything is imported, before PyTorch has started a thread or a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpukit.accounting import collectives
from gpukit.train import plan, ranks
from gpukit.train.loop import Trainer
from gpukit.train.record import read_metrics
from tests.train import corpus

DEVICE = "cpu"
MODEL = {**corpus.MODEL, "layers": 2, "hidden": 20}  # with 4 processes some shares are empty, and some not equal


def possible(world: int) -> bool:
    """Whether there is a GPU for each of so many processes; on a CPU there is room for all. The driver is asked in a way that
    does not start CUDA, or the processes could not be forked."""
    return DEVICE == "cpu" or world <= torch.cuda._device_count_nvml()


def forked(world: int, work: Callable[[ranks.Ranks], None], killed: int | None = None) -> list[int]:
    """Run `work` in `world` processes that know each other. Returns their exit statuses. The process `killed` is killed once
    the others have ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def begin(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with ranks.joined(DEVICE) as joined:
            work(joined)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=begin, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != killed:
            process.join()
    if killed is not None:
        processes[killed].kill()
        processes[killed].join()
    return [process.exitcode for process in processes]


class Place:
    """A text and a folder for the runs of a case."""

    def __init__(self, folder: Path):
        self.folder, self.text = folder, corpus.prepared(folder)

    def trainer(
        self, name: str, joined: ranks.Ranks, *, device: str | None = None, resume: bool = False, model: dict | None = None,
        **changes,
    ):  # fmt: skip
        settings = corpus.settings(self.folder / "text").replace(model=MODEL | (model or {}), **changes)
        device = device or DEVICE
        where = torch.device("cuda", joined.local_rank) if device == "cuda" else torch.device("cpu")
        options = {"device": where, "ranks": joined, "resume": resume, "say": lambda line: None}
        return Trainer(settings, self.folder / name, self.text, **options)

    def run(self, name: str, world: int, **options) -> None:
        statuses = forked(world, lambda joined: self.trainer(name, joined, **options).run())
        assert statuses == [0] * world, (name, statuses)

    def numbers(self, name: str) -> list[float]:
        columns = ("loss", "gradient_norm", "validation_loss")
        rows = read_metrics(self.folder / name / "metrics.csv")
        return [float(row[column]) for row in rows for column in columns if row[column]]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All of the newest checkpoint but the random numbers, as one process reads it."""
        trainer = self.trainer(name, ranks.ALONE, device="cpu", resume=True)
        return {name: value.clone() for name, value in trainer._state().items() if not name.startswith("random")}


# Of 11 sequences the last process evaluates fewer than the first.
EQUAL = {
    "ddp, two passes": {"world": 2, "sharding": "ddp", "micro_batches": 2},
    "fsdp, two passes": {"world": 2, "sharding": "fsdp", "micro_batches": 2, "recompute": "full"},
    "fsdp on four": {"world": 4, "sharding": "fsdp"},
}


def equal(place: Place) -> None:
    """The same losses, norms and samples with several processes as with one."""
    options = {"steps": 6, "eval_sequences": 11, "clip": 0.5}
    place.run("one", 1, **options)
    expected = place.numbers("one")
    for name, how in EQUAL.items():
        if not possible(how["world"]):
            print(f"{name}: left out, there are not so many GPUs")
            continue
        place.run(name, **options, **how)
        found = place.numbers(name)
        worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        print(f"{name}: {worst:.1e}")
        assert worst < 1e-5, name
        texts = [(place.folder / each / "samples.txt").read_text() for each in (name, "one")]
        assert texts[0] == texts[1], name
    bf16 = {**options, "dtype": "bf16"}
    place.run("one in bf16", 1, **bf16)
    place.run("fsdp in bf16", 2, sharding="fsdp", **bf16)
    pairs = zip(place.numbers("fsdp in bf16"), place.numbers("one in bf16"), strict=True)
    worst = max(abs(a / b - 1) for a, b in pairs)
    print(f"fsdp in bf16: {worst:.1e}")
    assert worst < 2**-8  # a rounding to bf16


def moved(place: Place) -> None:
    """A checkpoint goes from one process to any number of others and back without a changed bit, and the run goes on with it."""
    options = {"steps": 4, "sample": 0}
    place.run("run", 1, **options)
    expected = place.tensors("run")
    assert {name.partition(".")[0] for name in expected} == {"model", "optimizer"} and len(expected) > 80

    def pass_on(joined: ranks.Ranks, sharding: str) -> None:
        trainer = place.trainer("run", joined, resume=True, sharding=sharding)
        assert trainer.step == 4
        trainer.save()

    for world, sharding in ((2, "ddp"), (2, "fsdp"), (4, "fsdp"), (2, "ddp"), (1, "ddp")):
        if not possible(world):
            continue
        assert forked(world, lambda joined, sharding=sharding: pass_on(joined, sharding)) == [0] * world
        found = place.tensors("run")
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), (world, sharding, name)
        print(f"{world} {sharding}: equal")
    shutil.copytree(place.folder / "run", place.folder / "alone")
    for name, how in (("run", {"world": 2, "sharding": "fsdp"}), ("alone", {"world": 1})):
        place.run(name, resume=True, **{**options, "steps": 6}, **how)
    pairs = zip(place.numbers("run"), place.numbers("alone"), strict=True)
    assert max(abs(a / b - 1) for a, b in pairs) < 1e-5


def resumed(place: Place) -> None:
    """A run of two processes with dropout goes on bit for bit."""
    for sharding in ("ddp", "fsdp"):
        options = {"steps": 6, "sharding": sharding, "model": {"dropout": 0.2}, "sample": 0}
        place.run("whole", 2, **options)
        shutil.copytree(place.folder / "whole", place.folder / "parts")
        shutil.rmtree(place.folder / "parts" / "checkpoints" / "step-00000006")
        place.run("parts", 2, resume=True, **options)
        assert place.numbers("parts") == place.numbers("whole"), sharding
        for name in ("whole", "parts"):
            shutil.rmtree(place.folder / name)


def full(place: Place) -> None:
    """One process of two cannot write: both go on, with the checkpoint before."""
    import resource

    def work(joined: ranks.Ranks) -> None:
        trainer = place.trainer("run", joined, sharding="fsdp", sample=0)
        save = trainer.save

        def limited() -> None:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if joined.rank == 1 and trainer.step == 8:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            try:
                save()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        trainer.save = limited
        assert trainer.run() == 0

    assert forked(2, work) == [0, 0]
    names = [path.name for path in (place.folder / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000004", "step-00000012"], names


def lost(place: Place) -> None:
    """A process that is killed, or stands still, ends the others with a sentence."""
    ranks.BEAT_S = 0.1 if DEVICE == "cpu" else 1.0  # to start CUDA and NCCL a process may be silent for seconds
    for world, rank, number in ((2, 1, signal.SIGKILL), (2, 0, signal.SIGKILL), (3, 1, signal.SIGSTOP)):
        world = world if possible(world) else 2

        def work(joined: ranks.Ranks, rank=rank, number=number) -> None:
            trainer = place.trainer(f"{joined.world} {rank}", joined, batch=6, steps=1000)
            step = trainer.train_step

            def interrupted(norm_wanted: bool):
                if trainer.step == 5 and joined.rank == rank:
                    os.kill(os.getpid(), number)
                return step(norm_wanted)

            trainer.train_step = interrupted
            trainer.run()

        print(f"{number.name} to {rank} of {world}", flush=True)
        statuses = forked(world, work, killed=rank)
        expected = [1] * world
        expected[rank] = -signal.SIGKILL
        assert statuses == expected, statuses


# The model's activations, tables and blocks all count for something.
LARGER = {"vocab_size": 1024, "context": 128, "layers": 4, "heads": 4, "hidden": 128}
ROPE = {"positions": "rope", "mlp": "swiglu", "intermediate": 352, "biases": False}
IN_FLOAT32 = ((1, {}), (2, {"sharding": "fsdp"}), (2, {"micro_batches": 2}))
IN_BF16 = (
    (1, {}),
    (1, {"recompute": "full"}),
    (1, {"micro_batches": 4, "model": ROPE}),
    (4, {"sharding": "fsdp", "model": ROPE}),
    (4, {"sharding": "fsdp", "recompute": "full"}),
    (4, {"sharding": "fsdp", "micro_batches": 4}),
)


def memory(place: Place) -> None:
    """What PyTorch allocates in a step is what the plan says."""
    _as_planned(place, IN_FLOAT32)


def memory_in_bf16(place: Place) -> None:
    """The same; a minute on a CPU, so that `make prove` runs it."""
    _as_planned(place, [(world, changes | {"dtype": "bf16"}) for world, changes in IN_BF16])


# The gradients, in float32, are what DDP sends; FSDP sends weights as well, those of blocks in bf16 where products run in it.
SENT = (
    {"sharding": "ddp", "micro_batches": 2},
    {"sharding": "fsdp", "micro_batches": 2},
    {"sharding": "fsdp", "dtype": "bf16", "model": ROPE},
    {"sharding": "fsdp", "dtype": "bf16", "recompute": "full", "model": {"tied_embeddings": False}},
)
ITEMSIZES = {"float": 4, "c10::BFloat16": 2}


def traffic(place: Place) -> None:
    """What a step sends, by PyTorch's record of the calls, is what the plan says."""
    for changes in SENT:

        def work(joined: ranks.Ranks, changes=changes) -> None:
            options = {"sample": 0, **changes, "model": LARGER | changes.get("model", {})}
            trainer = place.trainer("run", joined, **options)
            trainer.train_step(norm_wanted=False)
            trainer.train_step(norm_wanted=False)  # DDP packs its gradients anew after the first step
            with torch.profiler.profile(record_shapes=True, acc_events=True) as record:
                trainer.train_step(norm_wanted=False)
            file = place.folder / f"trace{joined.rank}.json"
            record.export_chrome_trace(str(file))
            found = _sent(json.loads(file.read_text())["traceEvents"], joined.world)
            config = plan.accounting_config("tiny", trainer.settings.model)
            expected = plan.traffic(config, trainer.settings, joined.world)
            print(f"{changes}: {found}", flush=True)
            assert found == expected, expected

        assert forked(2, work) == [0, 0]


def _sent(events: list[dict], world: int) -> collectives.Step:
    """What one process sends by the calls of torch.distributed in a record of shapes; FSDP's norms of gradients, a
    number per tensor, are left out."""
    found = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0)
    for event in events:
        name = event.get("name", "")
        shapes, types = (event.get("args", {}).get(key) for key in ("Input Dims", "Input type"))
        if name == "c10d::allreduce_":
            elements = sum(math.prod(shape) for shape in shapes[0])  # DDP's, in float32; their types are not recorded
            found["all_reduce"] += collectives.all_reduce(elements, world, 4) if elements >= 1024 else 0
        elif name == "c10d::_allgather_base_":  # the output comes first
            found["all_gather"] += collectives.all_gather(math.prod(shapes[0]), world, ITEMSIZES[types[0]])
        elif name == "c10d::_reduce_scatter_base_":
            found["reduce_scatter"] += collectives.reduce_scatter(math.prod(shapes[1]), world, ITEMSIZES[types[1]])
    return collectives.Step(**found)


def _as_planned(place: Place, runs) -> None:
    """Of several processes with shares one runs, and PyTorch fakes the others; it cannot do so for DDP."""
    for world, changes in runs:
        faked = world > 1 and changes.get("sharding") == "fsdp"

        def work(joined: ranks.Ranks, world=world, changes=changes, faked=faked) -> None:
            if faked:
                torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
            options = {"seq": 128, "batch": 16, "optimizer": "torch", **changes}
            options["model"] = LARGER | options.get("model", {})
            found, predicted = _peak(place, ranks.Ranks(0, world) if faked else joined, options)
            print(
                f"{world} {changes}: {found:,} bytes, predicted {predicted:,}, ratio {predicted / found:.3f}",
                flush=True,
            )
            assert abs(predicted / found - 1) < 0.05

        processes = 1 if faked else world
        assert forked(processes, work) == [0] * processes


def _peak(place: Place, joined: ranks.Ranks, options: dict) -> tuple[int, int]:
    """The most that is allocated in a step, as PyTorch's profiler sees it, and what the plan says. Of three steps after the
    second the one with the least counts."""
    mark = 1_234_567  # bytes of a tensor that is there for a moment: before the first step, before each of the three, and after

    def leave_mark() -> None:
        time.sleep(0.02)  # the profiler's clock counts in microseconds
        torch.empty(mark, dtype=torch.uint8)
        time.sleep(0.02)

    with torch.profiler.profile(profile_memory=True, acc_events=True) as record:
        trainer = place.trainer("run", joined, **options)
        leave_mark()
        trainer.train_step()
        for _ in range(4):
            trainer.train_step()
            leave_mark()
    file = place.folder / f"trace{joined.rank}.json"
    record.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    marks = [number for number, event in enumerate(events) if event["Bytes"] == -mark]  # where it is freed
    steps = [events[start + 1 : end] for start, end in itertools.pairwise(marks[1:])]
    assert len(steps) == 3
    most = [max(event["Total Allocated"] for event in step if abs(event["Bytes"]) != mark) for step in steps]
    found = min(most) - before - _freed_unseen(trainer, events[: marks[0]])
    config = plan.accounting_config("tiny", trainer.settings.model)
    return found, plan.step_memory(config, trainer.settings, joined.world, on_cpu=True).total_bytes


def _freed_unseen(trainer, building: list[dict]) -> int:
    """Bytes that the profiler takes to be there. To begin with, DDP sends a copy of all parameters. Where gloo's thread is the
    last one to let go of it, nobody sees that it is freed: the profiler follows the thread of the program."""
    if not isinstance(trainer.called, torch.nn.parallel.DistributedDataParallel):
        return 0
    size = sum(parameter.nbytes for parameter in trainer.called.parameters())
    sent, *later = (event for event in building if abs(event["Bytes"]) == size)
    freed = any(event["Bytes"] == -size and event["Addr"] == sent["Addr"] for event in later)
    return 0 if freed else size


CASES = {case.__name__: case for case in (equal, moved, resumed, full, lost, memory, memory_in_bf16, traffic)}


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    DEVICE = args.device
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](Place(Path(folder)))


if __name__ == "__main__":
    main()
