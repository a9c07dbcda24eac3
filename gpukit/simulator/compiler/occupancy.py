"""Occupancy: how many programs (CUDA's blocks) are on one SM at a time.

Each of five resources admits some number of programs; the smallest wins. The granularities are those of NVIDIA's
occupancy calculator: https://docs.nvidia.com/nsight-compute/NsightCompute/index.html#occupancy-calculator and the limits
those of https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities
"""

from __future__ import annotations

from dataclasses import dataclass

from gpukit.hardware import KIB, Gpu

WARP = 32
# The table of compute capabilities has these, but gpukit.hardware.Gpu does not.
_MAX_PROGRAMS = {(7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32, (12, 0): 24}
_REGISTERS_PER_WARP_STEP = 256  # a warp gets registers in steps of 256, that is 8 a thread
_WARPS_STEP = 4  # an SM has four schedulers, each with a quarter of the registers
_SHARED_STEP = 128


def reserved_shared_bytes(gpu: Gpu) -> int:
    """Shared memory that the system takes from each program: 1 KiB since compute capability 8.0."""
    return KIB if gpu.compute_capability >= (8, 0) else 0


@dataclass(frozen=True)
class Occupancy:
    """programs on one SM, the warps that makes, of how many, and how many programs each resource would admit."""

    programs: int
    warps: int
    max_warps: int
    admits: dict[str, int]

    @property
    def fraction(self) -> float:
        return self.warps / self.max_warps

    @property
    def limit(self) -> str:
        """The resource that admits the fewest programs."""
        return min(self.admits, key=self.admits.__getitem__)

    def __str__(self) -> str:
        if not self.programs:
            return f"0: one program asks for more than an SM has ({self.limit})"
        noun = "program" if self.programs == 1 else "programs"
        return (
            f"{self.programs} {noun} per SM = {self.warps} of {self.max_warps} warps ({self.fraction:.0%}), "
            f"limited by {self.limit}"
        )


def occupancy(gpu: Gpu, num_warps: int, registers: int, shared_bytes: int) -> Occupancy:
    """Programs per SM of a kernel with `num_warps` warps, `registers` a thread and `shared_bytes` a program."""
    max_warps = gpu.max_threads_per_sm // WARP
    registers_per_warp = _up(max(registers, 1) * WARP, _REGISTERS_PER_WARP_STEP)
    warps_by_registers = gpu.registers_per_sm // registers_per_warp // _WARPS_STEP * _WARPS_STEP
    shared = _up(shared_bytes + reserved_shared_bytes(gpu), _SHARED_STEP)
    too_much = shared_bytes > gpu.smem_per_block_bytes
    admits = {
        "registers": warps_by_registers // num_warps,
        "shared memory": 0 if too_much else gpu.smem_per_sm_bytes // shared if shared else _programs(gpu),
        "warps": max_warps // num_warps,
        "programs": _programs(gpu),
    }
    programs = min(admits.values())
    return Occupancy(programs, programs * num_warps, max_warps, admits)


def _programs(gpu: Gpu) -> int:
    return _MAX_PROGRAMS[gpu.compute_capability]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
