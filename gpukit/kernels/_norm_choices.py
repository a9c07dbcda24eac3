"""How long a row the norms hold in registers, and the blocks for rows that are shorter or longer."""

import torch

from gpukit.kernels._dtypes import acc_dtype
from gpukit.kernels._launch import power_of_2

# Longer rows do not stay in registers. The backward pass holds x, dy, weight and dweight, four numbers an element.
RESIDENT_FWD = 32768
RESIDENT_BWD = 16384
# The bias's gradient, a fifth number, is a sum over dy alone: of longer rows it is taken apart, in a second look at dy.
BIAS_BWD = 8192


def is_resident(N: int, dtype: torch.dtype, limit: int) -> bool:
    return N <= (limit // 2 if dtype == torch.float64 else limit)  # a float64 takes two registers


def resident_config(N: int, dtype: torch.dtype, BLOCK_M: int, num_warps: int) -> dict:
    BLOCK_N = power_of_2(N)
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "EVEN": N == BLOCK_N,
        "ACC": acc_dtype(dtype),
        "num_warps": num_warps,
    }


PIECE = 2048  # numbers, 8 for each thread


def pieces_config(N: int, dtype: torch.dtype, centre: bool) -> dict | None:
    """How rows of 16-bit numbers are held as they were loaded, on Hopper, or None: for these it was not faster. Measured on an
    H200 with 4,096 rows in bf16: a LayerNorm of 16,384 takes 67 µs in place of 75, and 70 if a row is one piece. The other lengths
    were measured with rows of one piece: a LayerNorm of 5,120 takes 28 µs in place of 35, of 12,288 58 in place of 101; an RMSNorm
    of 12,288 52 in place of 56."""
    least, most = (4097, 16384) if centre else (8193, 16383)
    if dtype.itemsize != 2 or not least <= N <= most:
        return None
    registers = 64 if N % 16 == 0 else 80  # of a thread; rows that begin anywhere are loaded number by number
    return {
        "PIECES": -(-N // PIECE),
        "PIECE": PIECE,
        "EVEN": N % PIECE == 0,
        "num_warps": PIECE // 256,
        "maxnreg": registers,
    }


def long_config(dtype: torch.dtype) -> dict:
    return {"BLOCK_N": 8192, "ACC": acc_dtype(dtype), "num_warps": 16}
