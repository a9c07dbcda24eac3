"""The register of the sixth set."""

from __future__ import annotations

from functools import partial

import torch

from gpukit.validation.new_kernels import case as form

CASES: dict[str, form.Case] = {}
case = partial(form.case, into=CASES)


def permutation(device: str, n: int, dtype=form.INT32) -> torch.Tensor:
    """The numbers below n in an order that is the same everywhere."""
    return form.place(device, torch.randperm(n, generator=torch.Generator().manual_seed(0), dtype=dtype))
