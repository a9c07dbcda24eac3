"""The host: runs the learner's function on tensors that hold no data and writes down what a driver would be asked to do.

In this process a tensor is real but for its numbers, so host code finds the shapes, strides, dtypes and addresses that it may
decide on. Its launches do nothing. What it allocates, fills, copies and launches becomes a list of commands, the tape, as
JSON, which the device (gpukit.grading.device) carries out on the judge's data after this process has ended:

    ["new", id, dtype, bytes, device]     a storage
    ["data", tensor, numbers]             numbers of the host's own: what torch.tensor([...]) holds
    ["fill", tensor, number]
    ["copy", to, from]
    ["launch", launch]                    name and line of each function, what its globals mean, grid, arguments, options
    ["free", ids]                         nothing refers to these storages any more
    ["backward", y, ids, left]            the forward pass has returned y, and nothing refers to these storages any more;
                                          whether another forward pass left tensors behind

A tensor is [id of its storage, dtype, shape, stride, offset]. The arguments of case 3 lie in the storages a3.0, a3.1, ….
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from gpukit import dispatch, launches
from gpukit.grading import wire
from gpukit.simulator.compiler.compile import Packer
from gpukit.testing import poison

ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
_FILLS = frozenset("zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill_ zero_".split())
# Host code may allocate, look at tensors in other ways and copy them. Nothing here computes anything.
HOST_OPS = (
    ALLOCATIONS
    | _FILLS
    | frozenset(
        "view _unsafe_view reshape as_strided expand permute transpose t select slice squeeze unsqueeze unbind split "
        "split_with_sizes alias detach flatten unflatten _reshape_alias movedim unfold view_as_real lift "
        "clone copy_ _to_copy contiguous to".split()
    )
)
_MOST_NUMBERS = 1 << 17  # of one upload: tables, not tensors
_MOST_AGAIN = 1 << 24  # bytes of an argument whose memory is kept for the next call
_PLAIN_DEEPCOPY = torch.Tensor.__deepcopy__
_TRAINED = torch.zeros((), requires_grad=True)


def decoys(args: Any) -> Any:
    """The arguments, with what a tensor looks like in place of each tensor. For the judge."""

    def layout(x: torch.Tensor) -> wire.Layout:
        dtype = str(x.dtype).removeprefix("torch.")
        return wire.Layout(dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes())

    return mapped(lambda x: layout(x) if isinstance(x, torch.Tensor) else x, args)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` of everything in it that is no container."""
    if type(value) in (list, tuple):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Where an argument is imaginary, `torch.tensor([...], device=x.device)` would forget its numbers."""
    plain = torch.tensor

    def tensor(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        forgets = device is not None and torch.device(device).type == "meta"
        return plain(data, device="cpu" if forgets else device, **more)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = plain


def _blank(shape, stride, offset: int, nbytes: int, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
    """A tensor without data in a storage of so many bytes."""
    return poison(torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)).as_strided(shape, stride, offset)


class Places:
    """Where the arguments of calls lie: an argument of so many bytes lies where that of an earlier call lay, so that neither its
    address nor its shape says what is in it. A cache of results that goes by them is wrong in the next call."""

    def __init__(self):
        self._memory: dict[tuple[int, int], torch.Tensor] = {}

    def storage(self, place: int, nbytes: int) -> torch.UntypedStorage:
        """One of its own in the memory of argument `place`, beside those of earlier calls."""
        if nbytes > _MOST_AGAIN:
            return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        if (place, nbytes) not in self._memory:
            self._memory[place, nbytes] = torch.empty(nbytes, dtype=torch.uint8)
        return torch.from_numpy(self._memory[place, nbytes].numpy()).untyped_storage()

    def copied(self, args: Any) -> Any:
        """The arguments, with their tensors there."""
        numbers = count()

        def tensor(value: Any) -> Any:
            if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
                return value
            old = value.untyped_storage()
            new = self.storage(next(numbers), old.nbytes())
            new.copy_(old)
            return value.new_empty(0).set_(new, value.storage_offset(), value.shape, value.stride())

        return mapped(tensor, args)


def _made(value: Any) -> Any:
    """A tensor of which the judge has told what it looks like; anything else as it is."""
    if isinstance(value, wire.Imaginary):
        return value.tensor()
    if isinstance(value, wire.Layout):
        return _blank(value.shape, value.stride, value.offset, value.nbytes, getattr(torch, value.dtype))
    return value


def _twin(x: Any) -> Any:
    """A tensor laid out as another one, without its data."""
    if not isinstance(x, torch.Tensor):
        return x
    return _blank(x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.device)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """PyTorch's own copies the storage where no operation is seen."""
    return memo.setdefault(id(tensor), tensor.detach().clone())


class Recorder(dispatch.Mode):
    """Writes the tape of the operations inside a `with` block, and of the launches, which do not run.

    used  operations beside HOST_OPS: (name, line)
    """

    dry, sample = True, None  # what the interpreter asks of a watcher

    def __init__(self, path: str, line: Callable[[str], int]):
        super().__init__()
        self.path, self.line = path, line
        self.used: list[tuple[str, int]] = []
        self.commands: list[list] = []
        self._known: dict[int, tuple[StorageWeakRef, str, int, int]] = {}  # reference, id, address, bytes
        self._count = self._case = 0
        self._places = Places()
        self._given: tuple = ()  # the arguments of this case and of the one before, as layouts
        self._earlier: tuple = ()

    def __enter__(self) -> Recorder:
        launches.watch(self)
        torch.Tensor.__deepcopy__ = _deepcopy
        return super().__enter__()

    def __exit__(self, *exc_info) -> None:
        super().__exit__(*exc_info)
        torch.Tensor.__deepcopy__ = _PLAIN_DEEPCOPY
        launches.unwatch(self)

    def arguments(self, args: tuple) -> tuple:
        """The tensors of the next case: they have the layouts in `args` and hold no data."""
        numbers = count()

        def tensor(value: Any) -> Any:
            number = next(numbers) if isinstance(value, (wire.Layout, wire.Imaginary)) else 0
            if isinstance(value, wire.Layout):
                memory = torch.empty(0, dtype=getattr(torch, value.dtype))
                memory.set_(self._places.storage(number, value.nbytes // memory.itemsize * memory.itemsize))
                made = poison(memory).as_strided(value.shape, value.stride, value.offset)
            else:
                made = _made(value)
            if isinstance(made, torch.Tensor):
                self._remember(made, f"a{self._case}.{number}")
            return made

        self._given, self._earlier = args, self._given
        self.commands, self.used = [["free", self._forgotten()]], []
        made = mapped(tensor, args)
        self._case += 1
        return made

    def both_passes(self, function: Callable, args: list, names: list[str]) -> dict[str, Any]:
        """The gradients of the first arguments, by their `names`; y is the device's. `args` holds the only references to its
        tensors and is emptied: between the passes only those are left that the forward pass keeps for the backward pass.
        Another forward pass lies between them, as that of a model's next layer does; and one on the arguments of the case before,
        whose numbers and shapes the backward pass must not take for its own."""
        dy, count = args.pop(), len(names)
        with _disable_current_modes():
            far = any(isinstance(value, wire.Imaginary) for value in (*self._given, *self._earlier))
            others = mapped(_twin, args)
            unlike = [] if far else [*mapped(_made, self._earlier[:-1])]
        args[:count] = [_Given.apply(_TRAINED, x) for x in args[:count]]
        wanted = [get_gradient_edge(x) for x in args[:count]]
        y = function(*args)
        args.clear()
        if not isinstance(y, torch.Tensor) or y.grad_fn is None:
            return {"y": y, names[0]: None}
        begins, end = ["backward", self._tensor(y)], get_gradient_edge(y)
        del y
        self.commands.append(command := [*begins, self._forgotten()])
        command.append(self._left_by(function, others, count))
        if unlike and not command[-1]:
            self._left_by(function, unlike, count)
        grads = torch.autograd.grad(end, wanted, dy, allow_unused=True)
        return {"y": None, **dict(zip(names, grads, strict=True))}

    def _left_by(self, function: Callable, args: list, count: int) -> bool:
        """Whether a forward pass leaves tensors behind once nobody holds its result. If not, it is as if it had not been; if so,
        its commands stay, since the backward pass may refer to what they made."""
        before, commands, used = {*self._known}, len(self.commands), [*self.used]
        args[:] = [self._announced(arg) for arg in args]
        args[:count] = [_Given.apply(_TRAINED, x) for x in args[:count]]
        function(*args)
        args.clear()
        gone = self._forgotten()
        if left := not {*self._known} <= before:
            self.commands.append(["free", gone])
        else:
            del self.commands[commands:]
        self.used = used
        return left

    def _announced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._tensor(value, filled=True)
        return value

    def _forgotten(self) -> list[str]:
        """The storages to which nothing refers any more."""
        gone = [key for key, (reference, *_) in self._known.items() if reference.expired()]
        return [self._known.pop(key)[1] for key in gone]

    def tape(self, outputs: dict[str, Any]) -> str:
        """The commands since `arguments`, and which tensors the results are; of what is none, the type."""

        def told(value: Any) -> list | str | None:
            if type(value) is torch.Tensor and value.layout == torch.strided:
                return self._tensor(value)
            return None if value is None else type(value).__name__

        results = {name: told(value) for name, value in outputs.items()}
        return json.dumps({"commands": self.commands, "outputs": results})

    # -- operations ----------------------------------------------------------------------------------------------------

    def operation(self, func, args, kwargs):
        name = func.name().removeprefix("aten::").partition(".")[0]
        out = func(*args, **kwargs)
        if name in ALLOCATIONS:
            self._tensor(poison(out), filled=True)
        elif name in _FILLS:
            self._fill(out, args)
        elif name == "copy_":
            self.commands.append(["copy", self._tensor(args[0]), self._tensor(args[1])])
        elif name in HOST_OPS:
            for tensor in dispatch.tensors(out):
                if self._key(tensor) not in self._known:  # clone, a conversion: no view of what it was made from
                    to = self._tensor(tensor, filled=True)
                    self.commands.append(["copy", to, self._tensor(args[0])])
        else:
            if len(self.used) < 20:
                self.used.append((name, self.line(self.path)))
            changed = (args[0],) if name.endswith("_") else ()
            for tensor in dispatch.tensors((out, changed)):
                self._data(tensor)
        return out

    def _fill(self, out: torch.Tensor, args: tuple) -> None:
        if len(args) > 1 and isinstance(args[1], torch.Tensor):
            self.commands.append(["copy", self._tensor(out), self._tensor(args[1])])
        elif out.numel():
            number = 0 if out.is_meta else out[(0,) * out.ndim].item()
            self.commands.append(["fill", self._tensor(out, filled=True), number])

    def _data(self, tensor: torch.Tensor) -> None:
        """What the host knows of a tensor by itself."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        to = self._tensor(tensor, filled=True)
        if tensor.numel() <= _MOST_NUMBERS:
            self.commands.append(["data", to, [self._number(number) for number in tensor.reshape(-1).tolist()]])

    # -- what a tensor is called ---------------------------------------------------------------------------------------

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _remember(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        address = 0 if tensor.is_meta else storage.data_ptr()
        # A weak reference keeps the key from meaning another storage.
        self._known[self._key(tensor)] = StorageWeakRef(storage), name, address, storage.nbytes()

    def _tensor(self, tensor: torch.Tensor, filled: bool = False) -> list:
        """A tensor as a command has it. A storage that nobody has heard of is announced, with what the host put there unless it
        is about to be `filled`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._key(tensor) not in self._known:
            self._count += 1
            self._remember(tensor, f"n{self._count}")
            self.commands.append(
                ["new", f"n{self._count}", dtype, tensor.untyped_storage().nbytes(), tensor.device.type]
            )
            if not filled:
                self._data(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()))
        name = self._known[self._key(tensor)][1]
        return [name, dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]

    def _number(self, value: Any) -> Any:
        """A number, or the place in a storage that it is the address of."""
        if type(value) is int and value > 1 << 20:
            # The latest first: an argument may lie where an earlier one lay.
            for _, name, address, nbytes in reversed(self._known.values()):
                if address and address <= value < address + nbytes:
                    return ["address", name, value - address]
        return value

    # -- launches ------------------------------------------------------------------------------------------------------

    def begin(self, call: Any) -> Recorder:
        """Called by the interpreter for each launch."""
        if os.path.realpath(call.file) != os.path.realpath(self.path):
            self.used.append((f"the kernel {call.kernel} of another file", self.line(self.path)))
            return self
        packer = _Packer(self)
        launch = {
            "kernel": packer.function(call.function),
            "grid": list(call.grid),
            "arguments": {name: packer.value(value) for name, value in call.arguments.items()},
            "options": call.options,
        }
        launch["functions"] = {key: self._function(packed) for key, packed in packer.functions.items()}
        self.commands.append(["launch", launch])
        return self

    def _function(self, packed: dict) -> dict:
        """What the device cannot read in the file's text."""
        return {key: packed[key] for key in ("name", "line", "kind", "options", "constexpr_globals", "globals")}


class _Given(torch.autograd.Function):
    """An argument as the result of an operation that keeps nothing. Of a leaf, autograd itself keeps a reference."""

    @staticmethod
    def forward(ctx, trained: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, dx: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Packer(Packer):
    """Tensors by name, numbers as they are."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def value(self, value: Any) -> list | None:
        if type(value) is int and isinstance(number := self.recorder._number(value), list):
            return number
        if isinstance(value, torch.Tensor):
            return ["tensor", self.recorder._tensor(value)]
        if isinstance(getattr(value, "base", None), torch.Tensor) and not hasattr(value, "block_shape"):
            return ["reinterpret", self.recorder._tensor(value.base), value.dtype.name]
        if value is torch.Tensor:  # as an annotation
            return ["import", "torch", "Tensor"]
        inner = getattr(value, "fn", None)
        if getattr(inner, "__module__", "") == "triton":  # triton.cdiv
            return ["import", "triton", inner.__name__]
        return super().value(value)
