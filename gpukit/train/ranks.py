"""Which of several processes this is, and what processes tell each other.

`torchrun --nproc-per-node 2 -m gpukit.train ...` starts two processes and says in the environment which is which. Each takes its
own part of every batch (data parallelism), and the gradients are averaged. `settings.sharding` says what each process holds:

    ddp    PyTorch's DistributedDataParallel: a whole copy of the model and of the optimizer's state
    fsdp   PyTorch's FSDP2 (`fully_shard`): an equal share of weights, gradients and optimizer state, in float32. A block's
           weights are gathered from all processes just before the block runs and dropped right after it

All of the training loop's knowledge about several processes is in this file. A process alone is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpukit.course import CourseError

# A process says every BEAT_S seconds that it is alive. Another one is given up when it was not heard of for MISSED of one's own
# beats, or for MISSED_IF_BROKEN where a connection broke as well. The beats are counted, and not the seconds: after Ctrl-Z and
# `fg` all processes go on together. torchrun gives the others 30 seconds when one has died; the sentence comes before that.
BEAT_S, MISSED, MISSED_IF_BROKEN = 1.0, 15, 3

# What processes wait for each other while all are alive, for instance for a slow disk. Whether they are alive the beats say.
PATIENCE = datetime.timedelta(hours=1)

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """rank: the number of this process, from 0; world: how many there are; local_rank: its number on this machine, which is
    the number of its GPU."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The average over all processes."""
        return self.sum(value) / self.world if self.world > 1 else value

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def largest(self, value: int) -> int:
        """The largest of the processes' numbers, so that all do the same where one was told to stop."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: T) -> list[T]:
        """What each process has, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work()` returned in each process, in the order of ranks. Where it raised OSError or CourseError in one process,
        all of them raise that, so that they go on alike."""
        result, failed = None, None
        try:
            result = work()
        except (OSError, CourseError) as error:
            failed = error
        results = self.gather((result, failed))
        for _, failed in results:
            if failed is not None:
                raise failed
        return [result for result, _ in results]

    def laid_out(self, model: nn.Module, device: torch.device, sharding: str, dtype: str) -> nn.Module:
        """`model` on its device, as it is called in training: its backward pass averages gradients over all processes. With
        "fsdp" its parameters are shares (DTensors) from then on, so an optimizer is made after this."""
        if self.world == 1:
            return model.to(device)
        if sharding == "fsdp":
            return _fully_sharded(model, device, dtype, self.world)
        devices = [device] if device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "`broadcast_buffers`", FutureWarning
            )  # what replaces it torch 2.11 does not know
            # The model's buffers are computed, the same everywhere: they need not travel in each step. Gradients are views of
            # what travels, or every gradient would be there twice.
            return nn.parallel.DistributedDataParallel(
                model.to(device), device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def averaging(self, model: nn.Module, on: bool) -> contextlib.AbstractContextManager:
        """A backward pass inside averages gradients. Copies (DDP) do so only where `on`: of several passes in a step only the
        last needs to. Shares (FSDP) always do, or each process would have to keep all gradients between the passes."""
        copies = isinstance(model, nn.parallel.DistributedDataParallel)
        return model.no_sync() if copies and not on else contextlib.nullcontext()


ALONE = Ranks()


def _fully_sharded(model: nn.Module, device: torch.device, dtype: str, world: int) -> nn.Module:
    """Each block's parameters are gathered together, in bf16 where the matrix products run in it; the tables and the last norm
    in float32, since the residual stream is float32 in one process, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world,))
    gathered = torch.bfloat16 if dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)  # which also moves it to the device
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "generate")
    return model


# ---- joining, and noticing that another process is gone --------------------------------------------------------------


def started() -> Ranks:
    """Which of how many processes this is, as torchrun's environment says."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ALONE
    return Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def joined(device_type: str):
    """The ranks of this process, connected to the others for as long as the block lasts. Where another process dies or stops
    answering inside the block, this process says so and ends with status 1. Raises CourseError where there are too few GPUs."""
    ranks = started()
    if ranks.world == 1:
        yield ranks
        return
    if device_type == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise CourseError(
                f"torchrun started process {ranks.local_rank} (counted from 0) on this machine, and each needs a GPU of its own: "
                f"--nproc-per-node can be at most {torch.cuda.device_count()} here"
            )
        torch.cuda.set_device(ranks.local_rank)
    # gloo carries what lies in the CPU's memory, such as what checkpoints have to agree on.
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    # A connection of its own: PyTorch's may be waiting for something. The store lies in torchrun, or in process 0.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    heartbeat = Heartbeat(dist.PrefixStore("gpukit", store), ranks.rank, ranks.world)
    heartbeat.start()
    try:
        yield ranks
        ranks.gather(None)  # whoever is done waits for the others, which would miss it
    except RuntimeError as error:
        # gloo names itself in the message and has no class of its own. That a process is gone the heartbeat finds, and ends
        # this one.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            heartbeat.broken()
        raise
    finally:
        heartbeat.stop()
        dist.destroy_process_group()


class Heartbeat(threading.Thread):
    """Tells the other processes that this one is alive, and where one of them is not, says so and ends this one.

    A thread, since the process itself may be waiting for the lost one: inside NCCL it could do so forever.
    """

    def __init__(self, store: dist.Store, rank: int, world: int):
        super().__init__(daemon=True, name="heartbeat")
        self.store, self.rank, self.world = store, rank, world
        others = [other for other in range(world) if other != rank]
        self._seen: dict[int, bytes | None] = dict.fromkeys(others)
        self._missed = dict.fromkeys(others, 0)
        self._limit = MISSED
        self._over = threading.Event()

    def run(self) -> None:
        beats = 0
        while not self._over.wait(BEAT_S):
            beats += 1
            try:
                self.store.set(str(self.rank), str(beats))
                heard = {other: self._heard(other) for other in self._seen}
            except RuntimeError:
                if not self._over.wait(BEAT_S):  # it may be that all are done
                    _end("torchrun, or process 0," if self.rank < 2 else "")
                return
            for other, value in heard.items():
                self._missed[other] = self._missed[other] + 1 if value == self._seen[other] else 0
                self._seen[other] = value
            gone = [other for other, missed in self._missed.items() if missed >= self._limit]
            if gone:
                first_left = min(set(range(self.world)) - set(gone))
                names = " and ".join(f"process {other}" for other in gone)
                _end(f"{names} of {self.world} (counted from 0)" if self.rank == first_left else "")

    def _heard(self, other: int) -> bytes | None:
        return self.store.get(str(other)) if self.store.check([str(other)]) else None

    def broken(self) -> None:
        """A connection broke: wait until it is known whether a process is gone."""
        self._limit = MISSED_IF_BROKEN
        self._over.wait(2 * (MISSED_IF_BROKEN + 1) * BEAT_S)

    def stop(self) -> None:
        self._over.set()
        self.join()


def _end(lost: str) -> None:
    """End this process, also where its main thread waits for the lost one; say why, unless another process does."""
    if lost:
        print(
            f"stopped: {lost} has died or no longer answers. Its last lines above may say why; a process that the system kills for "
            "lack of memory writes none. The same command with --resume goes on from the last checkpoint",
            flush=True,
        )
    os._exit(1)
