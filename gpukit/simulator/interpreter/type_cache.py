"""What Triton's interpreter works out anew at each operation, and is worked out once here."""

import numpy as np
import triton.language as tl


def np_dtype(plain):
    """Triton builds a table of all types at each of some ten calls per op; this remembers the scalar ones."""
    known: dict[str, np.dtype] = {}

    def _get_np_dtype(tt_dtype):
        if type(tt_dtype) is tl.block_type:
            tt_dtype = tt_dtype.element_ty
        if type(tt_dtype) is not tl.dtype:
            return plain(tt_dtype)
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = plain(tt_dtype)
        return found

    return _get_np_dtype


def cache_types(scope) -> None:
    """Each op of a kernel makes several tensors and block types, and Triton works out the shape of each anew: half the
    time of an op. Their shapes are few, so each is worked out once."""
    blocks: dict[tuple, tuple] = {}
    tensors: dict[tuple, tuple] = {}
    block_init, tensor_init = tl.block_type.__init__, tl.tensor.__init__

    def block_type(self, element_ty, shape):
        key = tuple(shape)
        try:
            self.shape, self.numel, text = blocks[key]
        except (KeyError, TypeError):
            block_init(self, element_ty, shape)
            if all(type(n) is int for n in key):
                blocks[key] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        try:
            self.shape, self.numel = tensors[key]
        except KeyError:
            tensor_init(self, handle, type)
            tensors[key] = self.shape, self.numel
            return
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    scope.set_attr(tl.block_type, "__init__", block_type)
    scope.set_attr(tl.tensor, "__init__", tensor)
