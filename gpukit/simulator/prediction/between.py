"""What one launch leaves in L2 for the next. A launch's traffic is counted with cold caches, as Nsight Compute measures it; in
a row of launches, tensors that fit in L2 together are read from there after the first."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from gpukit import hardware
from gpukit.simulator.trace.launch import Launch
from gpukit.simulator.trace.levels import L2_HOLDS

if TYPE_CHECKING:
    from gpukit.simulator.trace.caches import Traffic


class Between:
    """The tensors that the last launches used, and how many bytes of each. A launch uses all of its tensors at the same time, so
    that L2 has all of what it used or, once that is more than fits, of each of them only the end, which the next launch comes to last."""

    def __init__(self, gpu: hardware.Gpu):
        self.room = L2_HOLDS * gpu.l2_bytes
        self.used: list[dict[object, float]] = []  # of each launch, by storage

    def launched(self, launch: Launch) -> dict[str, float]:
        """Of the launch's tensors, by name, how many bytes are in L2 when it begins. Those of the launch are then the last."""
        mine: dict[object, float] = {}
        storages = {}
        for name, argument in launch.arguments.items():
            tensor = getattr(argument, "base", argument)
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                moved = sum(access.bytes - access.again_bytes for access in launch.accesses if access.tensor == name)
                storages[name] = storage._cdata
                mine[storage._cdata] = min(storage.nbytes(), mine.get(storage._cdata, 0) + moved)
        found: dict[object, float] = {}
        since = 0.0
        for used in reversed(self.used):
            earlier = {storage: size for storage, size in used.items() if storage not in found}
            since += sum(earlier.values())
            if since > self.room:  # others have taken the place of what was used earlier
                break
            found |= earlier
        self.used.append(mine)
        return {name: found[storage] for name, storage in storages.items() if storage in found}

    def moved(self, size: float) -> None:
        """PyTorch moves so many bytes of tensors that are not known."""
        self.used.append({object(): size})


def warmed(traffic: Traffic | SimpleNamespace, launch: Launch, found: dict[str, float]) -> Traffic | SimpleNamespace:
    """The traffic of a launch that finds so many bytes of its tensors in L2: it does not read them from device memory, and if
    all its tensors are there, what it writes takes the place of nothing that would have to be written there before."""
    if not found or not traffic.sites:
        return traffic
    on_tensor: Counter = Counter()
    for site in traffic.sites:
        on_tensor[site.tensor] += site.dram_bytes
    sites = []
    for site in traffic.sites:
        if site.dram_bytes and site.tensor in found:
            left = max(0.0, on_tensor[site.tensor] - found[site.tensor]) / on_tensor[site.tensor]
            read, halves = round(left * site.dram_bytes), round(left * site.dram_half_bytes)
            site = dataclasses.replace(site, dram_bytes=read, dram_half_bytes=halves, first=left * site.first)
        sites.append(site)
    read = sum(site.dram_bytes for site in traffic.sites) - sum(site.dram_bytes for site in sites)
    tensors = {access.tensor for access in launch.accesses}
    dirty = 0 if tensors <= {*found} else traffic.dirty_bytes
    return dataclasses.replace(
        traffic, sites=tuple(sites), dram_read_bytes=max(0, traffic.dram_read_bytes - read), dirty_bytes=dirty
    )
