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
    by_shape: dict[int, tuple] = {}  # the same by id of the shape's object, which `blocks` keeps alive
    tensors: dict[int, tuple] = {}  # by that id, too
    block_init, tensor_init = tl.block_type.__init__, tl.tensor.__init__

    def block_type(self, element_ty, shape):
        known = by_shape.get(id(shape))
        if known is None:
            key = tuple(shape)
            try:
                known = blocks[key]
            except (KeyError, TypeError):
                block_init(self, element_ty, shape)
                if all(type(n) is int for n in key):
                    known = self.shape, self.numel, str(self.shape)
                    blocks[key] = by_shape[id(self.shape)] = known
                return
        self.shape, self.numel, text = known
        self.element_ty = element_ty
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, type):
        place = id(type.shape) if type.is_block() else 0
        try:
            self.shape, self.numel = tensors[place]
        except KeyError:
            tensor_init(self, handle, type)
            if place == 0 or place in by_shape:
                tensors[place] = self.shape, self.numel
            return
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    scope.set_attr(tl.block_type, "__init__", block_type)
    scope.set_attr(tl.tensor, "__init__", tensor)
