"""What a case is: a piece of work of 50 µs and more, its right result, and a size at which a CPU can check it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
FP8, INT8, INT32, UINT8 = torch.float8_e4m3fn, torch.int8, torch.int32, torch.uint8
MI, KI = 1 << 20, 1 << 10
SMS = 132  # of an H100 and an H200: the grids of persistent kernels
# Errors allowed, as a share of the largest number that is right. A wrong index shows at once; roundings do not, which may
# move what is rounded to 8 bits by one step.
_ALLOWED = {HALF: 0.02, BF16: 0.02, FLOAT: 2e-3, torch.float64: 1e-12, INT8: 0.01}


@dataclass(frozen=True)
class Work:
    """What is launched: call it. `out` holds its results, which `want()` computes with PyTorch from the same inputs."""

    run: Callable[[], object]
    out: Tensor | tuple[Tensor, ...]
    want: Callable[[], Tensor | tuple[Tensor, ...]]

    def __call__(self) -> None:
        self.run()

    def wrong(self) -> str:
        """Run once on results that are cleared, and say what differs from PyTorch's; empty where nothing does."""
        found, wanted = (x if isinstance(x, tuple) else (x,) for x in (self.out, self.want()))
        for x in found:
            x.zero_()
        self.run()
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            y = y.to(x.device).double()
            error, largest = (x.double() - y).abs().max().item(), y.abs().max().item()
            if not error <= _ALLOWED.get(x.dtype, 0) * largest:
                return f"wrong: result {i} is off by {error:.4g}, where the largest number is {largest:.4g}"
        return ""


@dataclass(frozen=True)
class Case:
    """`kind` is the class it belongs to. `build(device, **sizes)` allocates; `full` are the sizes that are measured, `small`
    those of a check on a CPU. `sample` programs of each launch are looked at for a prediction and a count."""

    name: str
    kind: str
    build: Callable[..., Work]
    full: dict[str, Any]
    small: dict[str, Any]
    sample: int = 2
    aligned: bool = False  # of the bars for traffic, the wider ones

    def prepare(self, device: str) -> Work:
        return self.build(device, **self.full)


CASES: dict[str, Case] = {}


def case(
    name: str,
    kind: str,
    full: dict[str, Any],
    small: dict[str, Any],
    sample: int = 2,
    *,
    into: dict[str, Case] = CASES,
):
    """Register `build` under a name that no other case of the set `into` has."""

    def register(build):
        assert name not in into, name
        into[name] = Case(name, kind, build, full, small, sample)
        return build

    return register


def normal(device: str, *shape: int, dtype=BF16) -> Tensor:
    """Random numbers, none of which is known of a "meta" tensor."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == INT8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=HALF if dtype == FP8 else dtype, device=device).to(dtype)


def empty(device: str, *shape: int, dtype=BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def known(device: str, high: int, *shape: int, dtype=INT32) -> Tensor:
    """Random whole numbers below `high`, the same ones everywhere. A prediction reads them, so "meta" has them too."""
    return place(device, torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=dtype))


def place(device: str, x: Tensor) -> Tensor:
    """Move numbers that a prediction reads to where the work runs; for "meta" they stay on the CPU."""
    return x if device == "meta" else x.to(device)
