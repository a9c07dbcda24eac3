"""The matmul on Hopper and later: tensor descriptors and a grid of one program an SM (gpukit.kernels.matmul chooses it).

A tensor descriptor names a whole matrix once; the TMA unit then fetches a tile from two coordinates, where the pointer
version computes an address for every 16 bytes. It fills what lies outside with zeros and leaves the threads' registers
free. It asks for addresses and row strides that 16 bytes divide, so other operands are copied into padded rows first.

A program works on one tile after another, so that the loads for the next tile can start while this one is stored.
Source: https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._tiles import epilogue, tile_at


@triton.jit
def matmul_persistent_kernel(
    a_desc, b_desc, c_desc,
    c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr,
    M, N, K,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """c = activation(a @ b), tile after tile.

    A_ROWS, B_ROWS  whether a's descriptor is of [M, K] and b's of [K, N]; else of their transposes
    c_desc          None where c's rows are not aligned: then it is stored through c_ptr
    PIECES          1, 2 or 4 stores of BLOCK_N / PIECES columns: a whole tile in the output's dtype may not fit beside the
                    operands in shared memory
    """
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    # With fp8 operands the tensor cores of Hopper keep 14 bits of a sum: no longer than one block of K at a time.
    IMPRECISE: tl.constexpr = BLOCK_K if a_desc.dtype == tl.float8e4nv else None
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        m, n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = acc
        for k in tl.range(0, K, BLOCK_K):
            a = a_desc.load([m, k]) if A_ROWS else a_desc.load([k, m]).T
            b = b_desc.load([k, n]) if B_ROWS else b_desc.load([n, k]).T
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=IMPRECISE)
            if GATED:
                b = b_desc.load([k, N + n]) if B_ROWS else b_desc.load([N + n, k]).T
                up = tl.dot(a, b, up, max_num_imprecise_acc=IMPRECISE)
        _store(
            acc, up, c_desc, c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr, m, n, M, N,
            ACTIVATION, BLOCK_M, BLOCK_N, PIECES,
        )  # fmt: skip


@triton.jit
def _store(
    acc, up, c_desc, c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr, m, n, M, N,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The epilogue and the store, in as many pieces."""
    HALF: tl.constexpr = BLOCK_N // 2
    if PIECES > 1:
        # [M, N] as [M, 2, N / 2], and the halves apart.
        left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        up_left, up_right = left, right
        if ACTIVATION == "swiglu":
            up_left, up_right = tl.split(tl.permute(tl.reshape(up, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        _store(
            left, up_left, c_desc, c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr, m, n, M, N,
            ACTIVATION, BLOCK_M, HALF, PIECES // 2,
        )  # fmt: skip
        _store(
            right, up_right, c_desc, c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr, m, n + HALF, M, N,
            ACTIVATION, BLOCK_M, HALF, PIECES // 2,
        )  # fmt: skip
    else:
        offs_m = m.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        offs_n = n + tl.arange(0, BLOCK_N)[None, :]
        y = epilogue(acc, up, z_ptr, bias_ptr, residual_ptr, scale_ptr, offs_m, offs_n, M, N, ACTIVATION, False)
        if c_desc is None:
            tl.store(c_ptr + offs_m * N + offs_n, y, mask=(offs_m < M) & (offs_n < N))
        else:
            c_desc.store([m, n], y.to(c_desc.dtype))


def describable(x: Tensor, rows_only: bool | None = None) -> bool:
    """Whether the TMA unit can read x [R, C] as it lies in memory.

    rows_only  True or False: the dimension that has to be contiguous is the last or the first (fp8 operands of the tensor
               cores, all along K); None: either
    """
    unit = 16 // x.itemsize
    stride_r, stride_c = x.stride()
    by_rows = rows_only is not False and stride_c == 1 and stride_r % unit == 0 and stride_r >= x.shape[1]
    by_columns = rows_only is not True and stride_r == 1 and stride_c % unit == 0 and stride_c >= x.shape[0]
    return x.data_ptr() % 16 == 0 and (by_rows or by_columns)


def described(x: Tensor, rows_only: bool | None = None) -> Tensor:
    """x itself if it is describable, else a copy in rows, or columns where x has them, padded to 16 bytes."""
    if describable(x, rows_only):
        return x
    unit = 16 // x.itemsize
    R, C = x.shape
    by_rows = x.stride(0) >= x.stride(1) if rows_only is None else rows_only
    strides = (-(-C // unit) * unit, 1) if by_rows else (1, -(-R // unit) * unit)
    return torch.empty_strided((R, C), strides, dtype=x.dtype, device=x.device).copy_(x)


def oriented(x: Tensor, block: list[int]) -> tuple[Tensor, list[int], bool]:
    """What a descriptor is made of: x and the blocks to be read of it, or the transposes of both, and whether it is x."""
    return (x, block, True) if x.stride(1) == 1 else (x.mT, block[::-1], False)


@checked_once
def _of_rows(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _descriptor(x: Tensor, block: list[int]) -> tuple[TensorDescriptor, bool]:
    x, block, rows = oriented(x, block)
    return _of_rows(x, *block), rows


def matmul_persistent(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    programs: int,
    constants: dict,
) -> None:
    """Fill c [M, N], contiguous, from a [M, K] and b [K, N] (2 N columns for "swiglu"), which `described` returned."""
    (M, K), N = a.shape, c.shape[1]
    BLOCK_M, BLOCK_N, BLOCK_K = constants["BLOCK_M"], constants["BLOCK_N"], constants["BLOCK_K"]
    a_desc, a_rows = _descriptor(a, [BLOCK_M, BLOCK_K])
    b_desc, b_rows = _descriptor(b, [BLOCK_K, BLOCK_N])
    if N * c.itemsize % 16 == 0:
        c_desc = _of_rows(c, BLOCK_M, BLOCK_N // constants["PIECES"])
    else:  # an address of two registers for each element that is stored
        c_desc, constants = None, constants | {"PIECES": min(8, BLOCK_N // 16)}
    tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)
    launch(
        matmul_persistent_kernel, min(programs, tiles), a_desc, b_desc, c_desc, c, z, bias, residual, scale, M, N, K,
        A_ROWS=a_rows, B_ROWS=b_rows, **constants,
    )  # fmt: skip
