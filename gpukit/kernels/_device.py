"""The GPU that a launch is made for: what host code asks of it, and which kernels were written for it alone."""

import importlib
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from gpukit import hardware
from gpukit.kernels._launch import interpreted


class Device(NamedTuple):
    """A GPU as its driver describes it, under the names of gpukit.hardware.Gpu."""

    compute_capability: tuple[int, int]
    sms: int
    smem_per_sm_bytes: int


@cache
def _driven(device: torch.device) -> Device:
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_multiprocessor)


def properties(device: torch.device) -> Device | hardware.Gpu | None:
    """What is known of the GPU called `device`; for the CPU, of the imagined GPU, and None where none is imagined."""
    return _driven(device) if device.type == "cuda" else hardware.imagined_gpu()


def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU. In the interpreter 2, unless a GPU is imagined, so that a grid of a fixed size is one there too."""
    gpu = properties(device)
    return gpu.sms if gpu else 2


@cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"gpukit.kernels.{name}")
    except (ImportError, AttributeError):
        return None


stood_in_for: set[str] = set()  # modules with kernels in Gluon that a pointer kernel took the place of, in a trace


def for_hopper(name: str, device: torch.device) -> ModuleType | None:
    """The module of this package with kernels for this GPU, most in Gluon, or None: it is not of Hopper's kind, or imagined or
    watched, where the kernels for every GPU stand in, or Triton's Gluon, which is experimental, lacks what the kernels take."""
    gpu = properties(device)
    if gpu is None or gpu.compute_capability[0] != 9:
        return None
    if interpreted():
        stood_in_for.add(name)
        return None
    return _imported(name)
