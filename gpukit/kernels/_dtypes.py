"""The dtypes that the kernels take, and what they keep sums in."""

import torch
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def acc_dtype(dtype: torch.dtype) -> tl.dtype:
    """What sums are kept in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def torch_acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
