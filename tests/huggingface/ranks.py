"""`python -m tests.huggingface.ranks`: two processes train a patched model with DDP and with FSDP2 on the CPU, and compare
with one process. Prints one line for each; an error ends it with a status other than 0.

A script of its own: the processes are forked once everything is imported, before PyTorch has started a thread.
"""

import functools
import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gpukit
from tests.huggingface.models import build_one_layer, tokens

RANKS = 2


def step(model, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


@functools.cache
def expected() -> dict[str, torch.Tensor]:
    """The gradients of one unpatched process that sees all sequences."""
    model = build_one_layer("llama")
    step(model, tokens(RANKS, 6))
    return {name: p.grad for name, p in model.named_parameters()}


def compare(found: dict[str, torch.Tensor], what: str) -> None:
    truth = expected()
    assert found.keys() == truth.keys(), what
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, truth[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def work(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    ids = tokens(RANKS, 6).chunk(RANKS)[rank]

    model = build_one_layer("llama")
    parallel = DistributedDataParallel(model)
    report = gpukit.patch(parallel)  # the model inside is found
    step(parallel, ids)
    compare({name: p.grad for name, p in model.named_parameters()}, "DDP")
    assert not report.fallbacks and report.count("loss") == 1, report

    for patch_first in (True, False):
        model = build_one_layer("llama")
        report = gpukit.patch(model) if patch_first else None
        for layer in (*model.model.layers, model.lm_head):
            fully_shard(layer)
        fully_shard(model)
        report = report or gpukit.patch(model)
        step(model, ids)
        compare({name: whole(p.grad) for name, p in model.named_parameters()}, "FSDP2")
        assert not report.fallbacks and report.count("loss") == 1, report
        gpukit.unpatch(model)  # and the next step finds everything sharded as FSDP2 left it
        model.zero_grad()
        step(model, ids)
        compare({name: whole(p.grad) for name, p in model.named_parameters()}, "FSDP2, unpatched")
    dist.destroy_process_group()


def main() -> int:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [fork.Process(target=work, args=(rank, f"{folder}/meeting")) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
