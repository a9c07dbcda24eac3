"""Plain data between judge and worker: JSON with tensors as raw bytes behind it.

Not pickle, which would run the learner's code in the judge, and not the learner's own types: an object whose `==` is always
true, or a Tensor subclass, arrives as its type's name and can only be wrong.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_FRAME = 1 << 30
_LOOK_S = 0.5  # how often a deadline is looked at


@dataclass(frozen=True)
class Foreign:
    """A value of a type that is not plain data."""

    type: str
    text: str


@dataclass(frozen=True)
class Imaginary:
    """A tensor that has addresses and no memory behind them; `dtype` is a name such as "float16". `order` lists its dimensions
    from the outermost in memory to the innermost (empty: contiguous). Neighbors in memory lie `gap` elements apart."""

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()
    gap: int = 1

    def tensor(self) -> Tensor:
        import torch

        order = self.order or tuple(range(len(self.shape)))
        places = [*(self.shape[i] for i in order), self.gap]
        made = torch.empty(places, dtype=getattr(torch, self.dtype), device="meta")[..., 0]
        return made.permute([order.index(i) for i in range(len(order))])


@dataclass(frozen=True)
class Layout:
    """What a tensor looks like without its numbers: a dtype such as "float16", and how it lies in a storage of `nbytes`."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


class Closed(EOFError):
    """The other side is gone."""


class Malformed(ValueError):
    """What came is no message."""


def send(sock: socket.socket, message: Any) -> None:
    blobs: list[bytes] = []
    head = json.dumps(_encode(message, blobs)).encode()
    sizes = [len(head), *(len(blob) for blob in blobs)]
    sock.sendall(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + head)
    for blob in blobs:
        sock.sendall(blob)


@dataclass
class Allowance:
    """How many bytes the other side may still say. What it says is kept until a check ends, and a byte of `text`, which is all
    but the numbers in tensors, may become 30 bytes of Python's. The most that a right answer says in a check is 0.4 MiB of each."""

    text: int = 8 << 20
    numbers: int = 64 << 20

    def take(self, text: int, numbers: int) -> None:
        """Raises Malformed if that is more than is left."""
        self.text -= text
        self.numbers -= numbers
        if self.text < 0:
            raise Malformed(f"its answers have more than {Allowance.text >> 20} MiB beside the numbers in tensors")
        if self.numbers < 0:
            raise Malformed(f"the tensors in its answers have more than {Allowance.numbers >> 20} MiB")


class Deadline(Protocol):
    def check(self) -> None:
        """Raises TimeoutError if the other side has had its time."""


def receive(sock: socket.socket, deadline: Deadline | None = None, allowance: Allowance | None = None) -> Any:
    """The next message. Raises Closed at the end of the connection, TimeoutError when `deadline` says so, and Malformed for
    bytes that `send` does not make, or more than the `allowance`."""
    (count,) = struct.unpack("<I", _exactly(sock, 4, deadline))
    if not 1 <= count <= 10_000:
        raise Malformed("it is no message")
    sizes = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count, deadline))
    if sum(sizes) > MAX_FRAME:
        raise Malformed(f"it has more than {MAX_FRAME >> 20} MiB")
    if allowance is not None:
        allowance.take(sizes[0], sum(sizes[1:]))
    head, *blobs = (_exactly(sock, size, deadline) for size in sizes)
    try:
        return _decode(json.loads(head.decode()), blobs)
    except Exception as error:  # JSON, a dtype, a layout, nesting: the other side may have sent anything
        raise Malformed(f"its contents cannot be read ({type(error).__name__})") from None


def _exactly(sock: socket.socket, size: int, deadline: Deadline | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            sock.settimeout(_LOOK_S)
        try:
            got = sock.recv_into(view)
            if not got:
                raise Closed("connection closed")
            view = view[got:]
        except ConnectionError:
            raise Closed("connection closed") from None
        except TimeoutError:
            if deadline is None:
                raise
        if view and deadline is not None:
            deadline.check()
    return data


def _encode(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": hex(value)}  # the json module refuses very long decimal integers
    if kind is float:
        return {"float": value.hex()}
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, blobs) for item in value]}
    if kind is dict:
        return {"dict": [[_encode(key, blobs), _encode(item, blobs)] for key, item in value.items()]}
    if kind is Imaginary:
        return {"imaginary": [value.dtype, list(value.order), value.gap, *value.shape]}
    if kind is Layout:
        return {"layout": [value.dtype, list(value.shape), list(value.stride), value.offset, value.nbytes]}
    if kind is Foreign:
        return {"foreign": [value.type, value.text]}
    import torch

    if kind is torch.Tensor and value.layout == torch.strided and value.device.type != "meta":
        value = value.detach().cpu()
        raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        blobs.append(raw.numpy().tobytes())
        layout = [list(value.shape), list(value.stride()), value.storage_offset()]
        return {"tensor": [len(blobs) - 1, str(value.dtype).removeprefix("torch."), *layout]}
    if kind is torch.Tensor:
        layout = str(value.layout).removeprefix("torch.")
        return {"foreign": [f"{layout} tensor on device {value.device.type}", f"shape {list(value.shape)}"]}
    if hasattr(kind, "item") and kind.__module__ == "numpy":
        return _encode(value.item(), blobs) if getattr(value, "ndim", 1) == 0 else _foreign(value)
    return _foreign(value)


def _foreign(value: Any) -> Any:
    try:
        text = repr(value)[:200]
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    return {"foreign": [type(value).__name__, text]}


def _decode(value: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, data),) = value.items()
    match kind:
        case "int":
            return int(data, 16)
        case "float":
            return float.fromhex(data)
        case "list":
            return [_decode(item, blobs) for item in data]
        case "tuple":
            return tuple(_decode(item, blobs) for item in data)
        case "dict":
            return {_decode(key, blobs): _decode(item, blobs) for key, item in data}
        case "imaginary":
            dtype, order, gap, *shape = data
            return Imaginary(tuple(shape), dtype, tuple(order), gap)
        case "layout":
            dtype, shape, stride, offset, nbytes = data
            return Layout(dtype, tuple(shape), tuple(stride), offset, nbytes)
        case "foreign":
            return Foreign(*data)
        case "tensor":
            import torch

            blob, dtype, shape, stride, offset = data
            raw = torch.frombuffer(blobs[blob], dtype=torch.uint8).clone() if blobs[blob] else torch.empty(0).byte()
            blobs[blob] = b""  # of one tensor: each that names it would make a copy
            return raw.view(getattr(torch, dtype)).as_strided(shape, stride, offset)
    raise Malformed(f"unknown kind {kind!r}")
