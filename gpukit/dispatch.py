"""Looking at PyTorch's operations while they run, below autograd: the base of our dispatch modes, and the tensors in what an
operation takes and gives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Mode(TorchDispatchMode):
    """A context manager that is asked to run each operation inside it: a subclass says how in `operation`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports torch._dynamo at the first operation: one to three seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run `func`, an operation such as aten.mm.default, and return its result."""
        raise NotImplementedError


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order; one that is there twice is named twice."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Those of the tensors that an operation is given in which it writes: x in x.add_(1), `out` in torch.mm(a, b, out=out)."""
    return tensors(
        [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def storages(values: Any) -> set[int]:
    """The keys of the storages in which these tensors lie."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(values)}


def map_tensors(function: Any, values: Any) -> Any:
    """`values` with each tensor in it replaced by `function(tensor)`."""
    return tree_map_only(torch.Tensor, function, values)
