"""Which blocks and which kernels FlashAttention gets, and what its launchers pass on."""

from typing import NamedTuple

import torch
from torch import Tensor

from gpukit.kernels import _flash_descriptors as descriptors
from gpukit.kernels._device import properties
from gpukit.kernels._launch import power_of_2

GLUON = "_flash_hopper"


class Config(NamedTuple):
    """Blocks of queries and keys, warps, and stages of the loop's loads. Backward, BLOCK_N keys a program for dk and dv,
    BLOCK_M queries a program for dq."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


class Table(NamedTuple):
    """The configurations for one kind of GPU, each by the head size rounded up: 64 or less, 128, 256."""

    shared_kib: int  # of an SM, at least
    forward: dict[int, Config]
    backward_kv: dict[int, Config]
    backward_q: dict[int, Config]


# For operands of 16 bits; the first table's 64 and 128 as measured on an H200, the others by registers and shared memory as
# compiled. The blocks of q, k and v that are on their way must fit into shared memory.
TABLES = (
    Table(  # Hopper, and Blackwell's data-centre parts
        220,
        forward={64: Config(128, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(128, 64, 8, 2)},
        backward_kv={64: Config(64, 64, 4, 3), 128: Config(64, 128, 8, 2), 256: Config(32, 32, 4, 1)},
        backward_q={64: Config(64, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    ),
    Table(  # A100
        160,
        forward={64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 2)},
        backward_kv={64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2), 256: Config(32, 32, 4, 1)},
        backward_q={64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 1)},
    ),
    Table(  # GeForce and other small parts
        100,
        forward={64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 1)},
        backward_kv={64: Config(32, 64, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
        backward_q={64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    ),
)
# With a mask, of which a block of scores' size is in registers, and on its way in shared memory, beside q, k and v.
MASKED = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 32, 4, 1)}
# Without tensor cores (float32 with "ieee", Turing) each thread has its operands in registers, so that blocks are small.
PLAIN = {64: Config(32, 16, 4, 1), 128: Config(16, 16, 4, 1), 256: Config(16, 16, 4, 1)}
INTERPRETER = Config(32, 16, 4, 1)


def config_of(
    kind: str, D: int, dtype: torch.dtype, precision: str, device: torch.device, masked: bool = False
) -> Config:
    """kind: "forward", "backward_kv" or "backward_q". masked: whether there is a mask to read."""
    gpu = properties(device)
    if gpu is None:
        return INTERPRETER
    size = max(64, power_of_2(D))
    wide = dtype == torch.float32
    shared_kib = gpu.smem_per_sm_bytes // 1024
    fits = [table for table in TABLES if shared_kib >= table.shared_kib]
    if not fits or (wide and precision == "ieee"):
        return PLAIN[size]
    if masked:
        small = wide or shared_kib < TABLES[1].shared_kib or (kind == "backward_kv" and size > 64)
        return Config(32, 32, 4, 1) if small else MASKED[size]
    return getattr(fits[-1 if wide else 0], kind)[size]  # tf32 has twice the bytes: the smallest blocks


class Packed(NamedTuple):
    """Sequences of several lengths one after the other, as one batch element: where each begins (and the last ends), int32
    [sequences + 1], and how long the longest is."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def by_descriptors(*tensors: Tensor) -> bool:
    """Whether gpukit.kernels._flash_descriptors is for q and the others: Hopper and Blackwell's data-centre parts, 16 bits, a
    head size that was measured, and tensors of which a descriptor can be made."""
    q = tensors[0]
    gpu = properties(q.device)
    return (
        gpu is not None
        and gpu.compute_capability[0] >= 9
        and gpu.smem_per_sm_bytes >= TABLES[0].shared_kib * 1024
        and q.itemsize == 2
        and q.shape[3] in descriptors.BACKWARD_KV
        and all(x.numel() and descriptors.describable(x) for x in tensors)
    )


def near(x: Tensor) -> Tensor:
    """x, or a copy if the offsets within a block of its rows would not fit into int32."""
    return x if max(x.stride(2), x.stride(3)) < 2**22 else x.contiguous()


def options(q: Tensor, config: Config, precision: str) -> dict:
    D = q.shape[3]
    return {
        "PRECISION": precision, "D": D,
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "BLOCK_D": max(16, power_of_2(D)),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def mask_strides(mask: Tensor | None) -> tuple[int | None, ...]:
    return (None,) * 4 if mask is None else mask.stride()


def strides(x: Tensor, packed: Packed | None) -> tuple[int, ...]:
    """Of a tensor or of the LSE. In a packed batch sequences lie where cu_seqlens says, not a stride apart."""
    return x.stride() if packed is None else (0, *x.stride()[1:])
