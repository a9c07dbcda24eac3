"""Plain data between judge and worker: JSON with tensors as raw bytes behind it.

Not pickle, which would run the learner's code in the judge, and not the learner's own types: an object whose `==` is always
true, or a Tensor subclass, arrives as its type's name and can only be wrong.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

MAX_FRAME = 1 << 30


@dataclass(frozen=True)
class Foreign:
    """A value of a type that is not plain data."""

    type: str
    text: str


@dataclass(frozen=True)
class Imaginary:
    """A contiguous tensor that has addresses and no memory behind them; `dtype` is a name such as "float16"."""

    shape: tuple[int, ...]
    dtype: str


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


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """The next message. Raises Closed at the end of the connection, TimeoutError after `deadline` (time.monotonic), and
    Malformed for bytes that `send` does not make."""
    (count,) = struct.unpack("<I", _exactly(sock, 4, deadline))
    if not 1 <= count <= 10_000:
        raise Malformed("it is no message")
    sizes = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count, deadline))
    if sum(sizes) > MAX_FRAME:
        raise Malformed(f"it has more than {MAX_FRAME >> 20} MiB")
    head, *blobs = (_exactly(sock, size, deadline) for size in sizes)
    try:
        return _decode(json.loads(head.decode()), blobs)
    except Exception as error:  # JSON, a dtype, a layout, nesting: the other side may have sent anything
        raise Malformed(f"its contents cannot be read ({type(error).__name__})") from None


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            got = sock.recv_into(view)
        except ConnectionError:
            got = 0
        if not got:
            raise Closed("connection closed")
        view = view[got:]
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
        return {"imaginary": [value.dtype, *value.shape]}
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
            return Imaginary(tuple(data[1:]), data[0])
        case "foreign":
            return Foreign(*data)
        case "tensor":
            import torch

            blob, dtype, shape, stride, offset = data
            raw = torch.frombuffer(blobs[blob], dtype=torch.uint8).clone() if blobs[blob] else torch.empty(0).byte()
            return raw.view(getattr(torch, dtype)).as_strided(shape, stride, offset)
    raise Malformed(f"unknown kind {kind!r}")
