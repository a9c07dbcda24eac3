"""The dtype that operations run in under torch.autocast: measured here, and as PyTorch documents it for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference"


@dataclass(frozen=True)
class Operation:
    """cuda: "16 bit" or "fp32" where the documentation lists the operation, else "as input".

    call  (torch, x [8, 8], labels [8]) -> the result
    """

    name: str
    kind: str
    cuda: str
    call: Callable[..., Tensor]


OPERATIONS = (
    Operation("matmul", "matrix product", "16 bit", lambda torch, x, _: x @ x),
    Operation("linear", "matrix product", "16 bit", lambda torch, x, _: torch.nn.functional.linear(x, x)),
    Operation("conv1d", "matrix product", "16 bit", lambda torch, x, _: torch.nn.functional.conv1d(x, x[..., None])),
    Operation("add", "elementwise", "as input", lambda torch, x, _: x + x),
    Operation("relu", "elementwise", "as input", lambda torch, x, _: x.relu()),
    Operation("gelu", "elementwise", "as input", lambda torch, x, _: torch.nn.functional.gelu(x)),
    Operation("sum", "reduction", "fp32", lambda torch, x, _: x.sum()),
    Operation("cumsum", "reduction", "fp32", lambda torch, x, _: x.cumsum(0)),
    Operation("norm", "reduction", "fp32", lambda torch, x, _: x.norm()),
    Operation("softmax", "reduction", "fp32", lambda torch, x, _: x.softmax(-1)),
    Operation("layer_norm", "reduction", "fp32", lambda torch, x, _: torch.nn.functional.layer_norm(x, (8,))),
    Operation("exp", "range grows", "fp32", lambda torch, x, _: x.exp()),
    Operation("log", "range grows", "fp32", lambda torch, x, _: x.log()),
    Operation("pow", "range grows", "fp32", lambda torch, x, _: x**3),
    Operation("cross_entropy", "loss", "fp32", lambda torch, x, t: torch.nn.functional.cross_entropy(x, t)),
    Operation("mse_loss", "loss", "fp32", lambda torch, x, _: torch.nn.functional.mse_loss(x, x)),
)


def runs_in(operation: Operation, input_dtype: str, device: str = "cpu", autocast_dtype: str = "bfloat16") -> str:
    """The dtype of the operation's result under autocast, for an input of `input_dtype`: "bfloat16", "float32"."""
    import torch

    x = torch.ones(8, 8, dtype=getattr(torch, input_dtype), device=device)
    labels = torch.zeros(8, dtype=torch.int64, device=device)
    with torch.autocast(device, dtype=getattr(torch, autocast_dtype)):
        result = operation.call(torch, x, labels)
    return str(result.dtype).removeprefix("torch.")
