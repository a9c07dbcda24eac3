"""The device: carries out what the host wrote down (gpukit.grading.host) on the judge's data, in a process that never runs
the learner's Python.

Of the learner's file it has the judge's own copy of the text, and runs only the functions that a launch names, after
gpukit.grading.kernel_text has looked at them. What its storages hold comes from the judge's inputs, from constants, from
copies and from launches: there is no other way in. The tape comes from a process that may say anything, so nothing about it
is believed; what makes no sense raises.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpukit.grading import kernel_text, wire
from gpukit.grading.host import mapped
from gpukit.grading.kernel_text import Refused
from gpukit.simulator.compiler import worker as compiler
from gpukit.simulator.compiler.compile import JIT_OPTIONS, STRINGS_FOR_ANNOTATIONS
from gpukit.simulator.interpreter import bounds
from gpukit.testing import poison, span_of

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
    ).split()
    if hasattr(torch, name)
}
_MOST_COMMANDS = 100_000
_MOST_BYTES = 8 << 30  # of all storages that the host asked for
_MOST_NUMBERS = 1 << 17  # that the host may bring along in one case


class Device:
    """Storages by the names that the host gave them.

    source   the learner's file, as the judge has it
    path     what the file is called in the traces of its kernels
    uploads  whether the host may bring numbers of its own
    """

    def __init__(self, source: str, path: str, uploads: bool):
        lines = source.split("\n")
        text = [f"{line}\n" for line in lines]
        linecache.cache[path] = (len(source), None, text, path)  # None: never looked for on disk
        self.path, self.uploads = path, uploads
        self._parameters, self._texts, self._flags = _read(source)
        self._kernels: dict[str, Any] = {}
        self._case = 0
        self.storages: dict[str, torch.Tensor] = {}  # flat, uint8
        self.given: dict[str, torch.Tensor] = {}  # the tensors of the case, by their storages
        self.before: set[str] = set()  # storages that were there before the case
        self.kept: dict[str, int] = {}
        self.left = False  # whether another forward pass left something behind

    def arguments(self, args: tuple) -> tuple:
        """The next case. Its tensors lie in storages that the host knows by their number."""
        numbers = iter(range(1 << 30))
        self.given, self.before = {}, {*self.storages}

        def tensor(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                name = f"a{self._case}.{next(numbers)}"
                self.storages[name], self.given[name] = _flat(value), value
            return value

        args = mapped(tensor, args)
        self._case += 1
        return args

    def play(self, tape: str, launching: bool = True, uploads: bool | None = None) -> dict[str, Any]:
        """Carry out the commands. The results that the tape names.

        launching  False: launches do nothing

        Afterwards `kept` holds the bytes of each storage that was left between a forward and a backward pass. Of an argument
        those of its elements: what lies between them is its owner's.
        """
        told = json.loads(tape)
        commands = told["commands"]
        if len(commands) > _MOST_COMMANDS:
            raise Refused(f"{len(commands):,} operations on tensors")
        self.allocated_bytes = 0
        self.returned: tuple[str, torch.Tensor, torch.Tensor] | None = None  # of a forward pass: storage, now and then
        self._numbers_left = _MOST_NUMBERS if (self.uploads if uploads is None else uploads) else 0
        for name, *command in commands:
            with _disable_current_modes():
                act = {"new": self._new, "data": self._data, "free": self._free, "backward": self._backward}.get(name)
                if act is not None:
                    act(*command)
                    continue
                if name == "launch":
                    launch = self._launch(*command) if launching else None
                elif name == "fill":
                    to, number = self.tensor(command[0]), _number(command[1])
                elif name == "copy":
                    to, source = map(self.tensor, command)
                else:
                    raise Refused(f"the command {str(name)[:40]}")
            if name == "fill":
                to.fill_(number)
            elif name == "copy":
                to.copy_(source)
            elif launch is not None:
                launch()
        outputs = {name: self._result(ref) for name, ref in told["outputs"].items()}
        return outputs if self.returned is None else outputs | {"y": self.returned[1]}

    def parameters(self, function: str) -> list[str]:
        """What a function of the file calls its arguments; nothing if the file does not say."""
        return self._parameters.get(function, [])

    def _result(self, told: Any) -> Any:
        if told is None or isinstance(told, str):
            return told and wire.Foreign(_short(told), "")
        return self.tensor(told)

    # -- storages ------------------------------------------------------------------------------------------------------

    def tensor(self, ref: Any) -> torch.Tensor:
        """The tensor that a command names. Raises Refused for one that leaves its storage."""
        name, dtype, shape, stride, offset = ref
        flat, dtype = self.storages[name], _DTYPES[dtype]
        numbers = [*shape, *stride, offset]
        if (
            len(shape) != len(stride)
            or len(shape) > 16
            or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
        ):
            raise Refused("a tensor that cannot be")
        span = span_of(shape, stride)
        if (offset + span) * dtype.itemsize > flat.numel() and span:
            raise Refused("a tensor that leaves its storage")
        whole = torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage())
        return whole.as_strided(shape, stride, offset)

    def _new(self, name: str, dtype: str, nbytes: int, device: str) -> None:
        kind = _DTYPES[dtype]
        taken = sum(flat.numel() for flat in self.storages.values() if not flat.is_meta)
        if type(name) is not str or name in self.storages or type(nbytes) is not int or device not in ("cpu", "meta"):
            raise Refused("a storage that cannot be")
        if not 0 <= nbytes < 1 << 48 or (device == "cpu" and taken + nbytes > _MOST_BYTES):
            raise MemoryError
        made = poison(torch.empty(nbytes // kind.itemsize, dtype=kind, device=device))
        bounds.note_allocation(made)
        self.allocated_bytes += nbytes
        self.storages[name] = _flat(made)

    def _data(self, ref: Any, numbers: list) -> None:
        to = self.tensor(ref)
        self._numbers_left -= len(numbers)
        if self._numbers_left < 0:
            raise Refused("numbers of the host's own")
        to.copy_(torch.tensor([self._value(number) for number in numbers], dtype=to.dtype).reshape(to.shape))
        bounds.note_written(to)

    def _free(self, names: list[str]) -> None:
        for name in names:
            del self.storages[name]

    def _backward(self, ref: Any, freed: list[str], left: bool) -> None:
        y = self.tensor(ref)
        self.returned = ref[0], y, y.clone()
        self._free(freed)
        self.kept = {name: self.given.get(name, flat).nbytes for name, flat in self.storages.items()}
        self.left = left is not False

    def _value(self, number: Any) -> Any:
        """A number, or an address in one of the storages here."""
        if isinstance(number, list):
            _, name, offset = number
            return self.storages[name].data_ptr() + _number(offset)
        return _number(number)

    # -- launches ------------------------------------------------------------------------------------------------------

    def _launch(self, launch: dict) -> Any:
        """The launch as a function without arguments."""
        fields = sorted({name for packed in launch["arguments"].values() for name in _fields(packed)})
        kernel, functions = self._kernel(launch["kernel"], launch["functions"], fields)
        arguments = {_short(name): self._argument(packed, functions) for name, packed in launch["arguments"].items()}
        options = {_short(name): _plain(value) for name, value in launch["options"].items()}
        grid = tuple(_number(n) for n in launch["grid"])
        return lambda: kernel[grid](**arguments, **options)

    def _argument(self, packed: Any, functions: _Functions) -> Any:
        tag, *rest = packed
        if tag == "tensor":
            return self.tensor(*rest)
        if tag == "address":
            return self._value(packed)
        if tag == "tuple":
            return _tuple((self._argument(item, functions) for item in rest[0]), rest[1])
        if tag == "reinterpret":
            import triton
            import triton.language as tl

            return triton.reinterpret(self.tensor(rest[0]), tl.dtype(rest[1]))
        if tag == "descriptor":
            from triton.tools.tensor_descriptor import TensorDescriptor

            (_, base), *sizes, padding = rest
            shape, strides, block = ([_number(n) for n in numbers] for numbers in sizes)
            return TensorDescriptor(self.tensor(base), shape, strides, block, _plain(padding))
        return functions.value(packed)

    def _kernel(self, key: str, told: dict, fields: list[str]) -> tuple[Any, _Functions]:
        """The kernel that a launch names, and what else its functions are; made once."""
        known = json.dumps([key, told, fields], sort_keys=True)
        if known not in self._kernels:
            functions = {_short(name): self._function(record) for name, record in told.items()}
            names = {name: getattr(builtins, name) for name in kernel_text.BUILTINS}
            made = _Functions({"functions": functions, "files": {}, "fields": fields}, names)
            made.define()
            self._kernels[known] = made.functions[key], made
        return self._kernels[known]

    def _function(self, told: dict) -> dict:
        name, line = told["name"], told["line"]
        if (name, line) not in self._texts:
            raise Refused(f"{_short(str(name))}, which is not in this file")
        if not all(type(given) is str and not given.startswith("__") for given in told["globals"]):
            raise Refused("a name that cannot be")
        return {
            "name": name,
            "module": "exercise",
            "file": self.path,
            "line": line,
            "source": self._texts[name, line],
            "flags": self._flags,
            "kind": "constexpr_function" if told["kind"] == "constexpr_function" else "jit",
            "options": {key: _option(told["options"][key]) for key in JIT_OPTIONS if key in told["options"]},
            "constexpr_globals": [name for name in told["constexpr_globals"] if type(name) is str],
            "globals": dict(told["globals"]),
        }


@cache  # the devices of a check have one file
def _read(source: str) -> tuple[dict[str, list[str]], dict[tuple[str, int], str], int]:
    """Of the file's own functions the names of their arguments, of all functions by name and line the text, and the flags with
    which they are compiled."""
    lines = source.split("\n")
    tree = ast.parse(source)
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    parameters = {node.name: [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)] for node in own}
    texts: dict[tuple[str, int], str] = {}
    flags = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n")
            texts[node.name, node.lineno] = text
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            if "annotations" in {name.name for name in node.names}:
                flags = STRINGS_FOR_ANNOTATIONS
    return parameters, texts, flags


class _Functions(compiler.Job):
    """The functions of a launch. What the names in them mean comes from the host, so each is one of a few harmless things."""

    def define(self) -> None:
        """Make them, once their text has been looked at. Raises Refused."""
        told = [packed for function in self.job["functions"].values() for packed in function["globals"].values()]
        fields = {*self.job["fields"], *(name for packed in told for name in _fields(packed))}
        kernel_text.named_tuple("Fields", sorted(fields))
        for function in self.job["functions"].values():
            tree = ast.parse(function["source"])
            try:
                kernel_text.function(tree, function["name"], self._known(function["globals"]), fields)
            except Refused as refused:
                raise Refused(refused.what, function["line"] + refused.line - 1) from None
        super().define()
        for key, function in self.job["functions"].items():
            looked_at, runs = ast.parse(function["source"]).body[0], kernel_text.as_run(self.functions[key].fn)
            if ast.dump(looked_at) != ast.dump(runs):
                raise Refused(f"{function['name']} twice in one text", function["line"])

    def _known(self, told: dict[str, Any]) -> dict[str, Any]:
        return {
            name: None if packed[0] == "function" else self.value(packed)
            for name, packed in told.items()
            if packed[0] != compiler.MISSING
        }

    def value(self, packed: Any) -> Any:
        import triton.language as tl

        tag, *rest = packed
        if tag == "value":
            return _plain(*rest)
        if tag == "tuple":
            return _tuple(map(self.value, rest[0]), rest[1])
        if tag == "namedtuple":
            return kernel_text.named_tuple(*rest)
        if tag == "constexpr":
            return tl.constexpr(self.value(rest[0]))
        if tag == "dtype":
            return tl.dtype(rest[0])
        if tag == "function":
            return self.functions[rest[0]]
        if tag == "import":
            return kernel_text.imported(*rest)
        raise Refused(f"an argument of the kind {str(tag)[:40]}")


def _tuple(items: Iterable, fields: list[str]) -> tuple:
    return kernel_text.named_tuple("Fields", fields)(*items) if fields else tuple(items)


def _fields(packed: Any) -> Iterator[str]:
    """The names of fields of the tuples in packed values."""
    if isinstance(packed, list) and packed[:1] in (["tuple"], ["namedtuple"]):
        yield from packed[2]
    for item in packed if isinstance(packed, list) else ():
        yield from _fields(item)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _plain(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, float, str):
        raise Refused("a value that is no number")
    return value


def _option(value: Any) -> Any:
    """What triton.jit is told: do_not_specialize lists arguments."""
    return [_plain(item) for item in value] if type(value) is list else _plain(value)


def _number(value: Any) -> Any:
    if type(value) not in (bool, int, float):
        raise Refused("a value that is no number")
    return value


def _short(name: Any) -> str:
    if type(name) is not str or len(name) > 100:
        raise Refused("a name that cannot be")
    return name
