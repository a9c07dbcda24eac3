"""The most memory that is allocated at a time, without a GPU: PyTorch runs on the meta device, where a tensor has a size
and no memory, and every storage is counted from its birth to its death."""

from __future__ import annotations

import weakref

from gpukit import dispatch


class PeakMemory(dispatch.Mode):
    """`bytes` now, `peak` at most; `add` counts tensors that were there before. What a kernel takes and gives back inside
    itself is not seen."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref] = {}
        self.at = ""

    def add(self, tensors) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._dies(key, size))
                self.bytes += size

    def _dies(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size

    def operation(self, func, args, kwargs):
        result = func(*args, **kwargs)
        self.add(dispatch.tensors(result))
        if self.bytes > self.peak:
            self.peak, self.at = self.bytes, str(func)
        return result
