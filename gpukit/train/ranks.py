"""Which of several processes this is, and the few things that processes tell each other.

`torchrun --nproc-per-node 2 -m gpukit.train ...` starts two processes and says in the environment which is which. Each has a
copy of the model and its own part of every batch (data parallelism); PyTorch's DistributedDataParallel (DDP) averages the
gradients. All of the training loop's knowledge about several processes is in this file. A process alone is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

# How long the others wait for a process that has died before they end. A checkpoint must be written within it, too, since
# they wait for the process that writes.
PATIENCE_S = 60


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

    def largest(self, value: int, device: torch.device) -> int:
        """The largest of the processes' numbers, so that all do the same where one was told to stop."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: object) -> list:
        """What each process has, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def copies(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as it is called in training: its backward pass averages gradients over all processes."""
        if self.world == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        # The model's buffers are computed, the same everywhere: they need not travel in each step.
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)

    def averaging(self, model: nn.Module, on: bool) -> contextlib.AbstractContextManager:
        """A backward pass inside averages gradients only where `on`: of several passes in a step only the last needs to."""
        return model.no_sync() if self.world > 1 and not on else contextlib.nullcontext()


@contextlib.contextmanager
def joined(device_type: str):
    """The ranks of this process, connected to the others for as long as the block lasts, as torchrun's environment says."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    ranks = Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")))
    if device_type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=PATIENCE_S))
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
