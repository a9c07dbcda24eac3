"""Loads, stores and atomics: each is checked against the live tensors before memory is touched, and told to the watchers.
Each public function makes the replacement of one of Triton's from the plain one."""

import zlib

import numpy as np
import triton.language as tl

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.addresses import Access
from gpukit.simulator.interpreter.arithmetic import is_bf16
from gpukit.simulator.interpreter.executor import PARAMETER, launch
from gpukit.simulator.interpreter.frames import calls, frames_inside, user_frames, where
from gpukit.simulator.interpreter.integers import Read, guided, plain_array, read
from gpukit.simulator.interpreter.numerics import bf16_bits, bf16_floats
from gpukit.simulator.interpreter.running import interpreter_module
from gpukit.simulator.interpreter.unknown import Unknown, must_be_known, unknown
from gpukit.simulator.interpreter.wrapped import Wrapped

_DESCRIPTOR = "gpukit.descriptor"  # key of pointers that a tensor descriptor made


_FP8_EXTREMES = {
    "fp8e5": (0x7F, 0x7B),
    "fp8e5b16": (0x80, 0x7F),
    "fp8e4b8": (0x80, 0x7F),
}  # bits of NaN, of the largest
_NAN = "gpukit.nan"  # key of pointers whose lanes outside hold NaN: Triton's own is a zero in bf16


def _admit(kind: str, ptrs, mask, width: int) -> Access:
    """Check an access and tell the watchers. Raises MemoryFault."""
    via = "tma" if _DESCRIPTOR in ptrs.attr else "lsu"
    if running.now.sampling:
        for handle, what in ((ptrs, "address"), (mask, "mask")):
            if handle is not None and handle.data.__class__ is Unknown:
                must_be_known(handle.data, f"the {what} of this {kind}")
    guide, pointers, live = None, ptrs.data, None if mask is None else mask.data
    if running.now.seen is not None:
        guide = guided(len(running.now.seen), pointers, live)
        pointers, live = plain_array(pointers), plain_array(live)
    access = Access(kind, pointers, live, width, via)
    memory = running.now.memory
    memory.admit(access, ptrs.attr.get(PARAMETER))
    running.now.work += running.ACCESS_LANES + access.lanes
    if access.lanes and access.tile is None and running.now.sampling and running.now.seen is None:
        running.now.places = zlib.crc32((access.addresses - access.addresses.min()).tobytes(), running.now.places)
    if access.lanes and Wrapped in (ptrs.data.__class__, None if mask is None else mask.data.__class__):
        for recorder in running.now.recorders:
            recorder.wrapped(memory.wrapped(access))
    if running.now.recorders:
        file, line = where()
        access.line = line
        if running.now.seen is not None:
            apart = running.now.few is None or len(running.now.seen) < running.now.few
            place = kind, access.parameter, *(calls(launch.__code__) if apart else [(file, line)])
            if running.now.seen.get(place):
                if all(running.now.seen.values()) or running.now.again == running.MOST_AGAIN:
                    raise running.Enough
                running.now.again += 1
                return access
            access.position, access.guided = len(running.now.seen), guide
            running.now.seen[place] = access.lanes > 0
        for recorder in running.now.recorders:
            recorder.access(access, memory.linear, file, line)
    return access


def _locate_faults() -> None:
    """What is raised when the launch ends has a traceback that shows where it happened."""
    memory = running.now.memory
    for fault in (memory.race, memory.unwritten, memory.disorder):
        if fault is not None and fault.__traceback__ is None:
            fault.__traceback__ = user_frames(frames_inside(launch.__code__))


def _note_order(access: Access, values=None) -> None:
    """What threads of one program do to each other is for those who watch. One warp is in step with itself, and a kernel in
    Gluon has layouts and barriers of its own."""
    if running.now.recorders and running.now.num_warps > 1 and not (running.now.sampling or running.now.in_gluon):
        running.now.memory.note_order(access, values)


def synchronizing(make=None):
    """The replacement of a function that moves data between the threads of a program, with a barrier."""

    def outer(plain):
        replaced = make(plain) if make else plain

        def synchronized(*args, **kwargs):
            result = replaced(*args, **kwargs)
            if running.now is not None and running.now.memory is not None:
                running.now.memory.warps.barrier()
            return result

        return synchronized

    return outer


def _width(ptrs) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def load_with_other(plain):
    """Triton asks `if other` and `if mask` where it means whether there is one. In its interpreter a single number is as true as
    its value, so that other=0 would be none."""

    def load(self, ptr, mask, other, *rest, **kwargs):
        given = other is not None or mask is not None
        one = running.now is not None and given and getattr(ptr.handle, "data", np.zeros(2)).size == 1
        if not one:
            return plain(self, ptr, mask, other, *rest, **kwargs)
        truth = tl.core.tensor.__bool__
        tl.core.tensor.__bool__ = lambda self: True
        try:
            return plain(self, ptr, mask, other, *rest, **kwargs)
        finally:
            tl.core.tensor.__bool__ = truth

    return load


def masked_load(plain):
    def create_masked_load(self, ptrs, mask, other, *rest, **kwargs):
        if running.now is not None and ptrs.attr.get(_NAN):
            other = _outside(ptrs, alike=True)
        elif running.now is not None and other is None:
            other = _outside(ptrs)
        if running.now is not None:
            access = _admit("load", ptrs, mask, _width(ptrs))
            running.now.memory.load(access)
            _note_order(access)
            _locate_faults()
            if running.now.sampling and (
                ptrs.get_element_ty().is_floating() or access.buffer is None or access.buffer.imaginary
            ):
                if running.now.seen is not None and not ptrs.get_element_ty().is_floating():
                    running.now.lost = True
                zeros = _zeros(ptrs)
                if access.lanes and running.now.seen is None:  # the others show only where their accesses begin
                    why = "not read" if ptrs.get_element_ty().is_floating() else "no values"
                    zeros.data = unknown(zeros.data, access.parameter.name, why)
                return zeros
        loaded = plain(self, ptrs, mask, other, *rest, **kwargs)
        if running.now is not None and running.now.sampling:
            running.now.indices = True
            if running.now.seen is not None:
                _follow(loaded, access, mask)
        return loaded

    return create_masked_load


def _follow(loaded, access: Access, mask) -> None:
    """An integer was read by a program that only shows where its accesses begin."""
    if loaded.data.size > 1 or running.now.in_gluon:
        running.now.lost = True
    else:
        loaded.data = read(loaded.data, access.position, access.guided is None and access.lanes == 1)


def _outside(ptrs, alike: bool = False):
    """What lanes hold whose load is masked off without `other`: on a GPU whatever the register held. Here one lane holds NaN
    and the next the largest finite number, since a comparison hides the one and an addition of 0 times it the other. Of
    integers one lane holds the largest and the next 0, which an H200 leaves there: a bound hides the one, and 0 is an index
    like any other. `alike`: NaN, or the largest integer, in all."""
    ti = interpreter_module()
    element = ptrs.get_element_ty()
    dtype = np.dtype(ti._get_np_dtype(element))
    if dtype.kind == "f":
        nan, largest = np.nan, np.finfo(dtype).max
    elif element.is_floating():  # bits: bf16 and fp8
        nan, largest = (0x7FC0, 0x7F7F) if dtype.itemsize == 2 else _FP8_EXTREMES.get(element.name, (0x7F, 0x7E))
    else:
        nan, largest = (True, False) if dtype.kind == "b" else (np.iinfo(dtype).max, 0)
    values = np.full(ptrs.data.shape, nan, dtype=dtype)
    if not alike:
        values[..., ::2] = largest  # the last lane of a block holds NaN, or the largest integer
    return ti.TensorHandle(values, element)


def masked_store(plain):
    def create_masked_store(self, ptrs, value, mask, *rest, **kwargs):
        if running.now is not None:
            # Triton writes items of the value's own size, whatever the pointer says
            access = _admit("store", ptrs, mask, value.data.itemsize)
            running.now.memory.store(access, value.data)
            _note_order(access, value.data)
            _locate_faults()
            if running.now.sampling:
                return None
        return plain(self, ptrs, value, mask, *rest, **kwargs)

    return create_masked_store


def int_to_ptr(plain):
    def create_int_to_ptr(self, val, dst_ty):
        if running.now is not None and isinstance(val.data, Read):  # a table of addresses
            running.now.lost = True
        pointers = plain(self, val, dst_ty)
        if running.now is not None:
            pointers.data = running.now.memory.where_copied(pointers.data)
        return pointers

    return create_int_to_ptr


def _zeros(ptrs):
    """What a sampled launch loads: nobody knows what a program it leaves out would have stored."""
    ti = interpreter_module()
    element = ptrs.get_element_ty()
    return ti.TensorHandle(np.zeros(ptrs.data.shape, dtype=ti._get_np_dtype(element)), element)


def _answer(ptr, access: Access):
    """What an atomic of a sampled launch answers."""
    answer = _zeros(ptr)
    if access.lanes:
        answer.data = unknown(answer.data, access.parameter.name, "atomic")
    return answer


def atomic_rmw(plain):
    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        ti = interpreter_module()
        access = None
        if running.now is not None:
            access = _admit("atomic", ptr, mask, _width(ptr))
            running.now.memory.atomic(access, sem != ti._ir.MEM_SEMANTIC.RELAXED, op != ti._ir.ATOMIC_OP.XCHG)
            _locate_faults()
            if running.now.sampling:
                return _answer(ptr, access)
        if is_bf16(val) and op == ti._ir.ATOMIC_OP.FADD:
            return _atomic_add_bf16(ti, ptr, val, mask)
        if op == ti._ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            return _exchanged_bits(ti, plain, self, op, ptr, val, mask, sem, scope)
        return plain(self, op, ptr, val, mask, sem, scope)

    return create_atomic_rmw


def _atomic_add_bf16(ti, ptr, val, mask):
    """Lanes that share an address add one after another, each sum rounded."""
    before = np.zeros(ptr.data.shape, dtype=np.uint16)
    waiting = mask.data.copy()
    while waiting.any():
        lanes = np.flatnonzero(waiting)
        turn = np.zeros(waiting.size, dtype=bool)
        turn[lanes[np.unique(ptr.data[waiting], return_index=True)[1]]] = True
        turn = turn.reshape(waiting.shape)
        before = ti._interpreter.load(ptr.data, turn, before, np.dtype(np.uint16))
        total = bf16_bits(bf16_floats(before) + bf16_floats(val.data))
        ti._interpreter.store(ptr.data, total, turn)
        waiting &= ~turn
    return ti.TensorHandle(before, tl.bfloat16)


def _exchanged_bits(ti, plain, self, op, ptr, val, *rest):
    """Triton's interpreter exchanges integers only."""
    bits = ti.TensorHandle(val.data.view(f"u{val.data.itemsize}"), val.dtype)
    old = plain(self, op, ptr, bits, *rest)
    return ti.TensorHandle(old.data.view(val.data.dtype), val.dtype.scalar)


def atomic_cas(plain):
    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        if running.now is not None:
            access = _admit("atomic", ptr, None, _width(ptr))
            running.now.memory.atomic(access, sem != interpreter_module()._ir.MEM_SEMANTIC.RELAXED)
            _locate_faults()
            if running.now.sampling:
                return _answer(ptr, access)
        return plain(self, ptr, cmp, val, sem, scope)

    return create_atomic_cas


def carry(position: int):
    """A pointer that is moved, broadcast or reshaped still belongs to the tensor it came from."""

    def make(plain):
        def carried(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            attr = args[position].attr
            if attr and PARAMETER in attr:
                out.attr[PARAMETER] = attr[PARAMETER]
            if args[position].data.__class__ is Wrapped:
                out.data = out.data.view(Wrapped)
            return out

        return carried

    return make


def carry_common(*positions: int):
    """Where pointers of several blocks become one block, it belongs to the tensor that all of them came from, if that is one."""

    def make(plain):
        def carried(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            origins = {args[position].attr.get(PARAMETER) for position in positions}
            if len(origins) == 1 and None not in origins:
                out.attr[PARAMETER] = origins.pop()
            return out

        return carried

    return make


def descriptor_reduce(plain):
    def create_descriptor_reduce(self, kind, desc, value, offsets):
        ti = interpreter_module()
        ptrs, mask = desc.materialize_pointers(offsets)
        name = str(kind).split(".")[-1]
        operations = ti._ir.ATOMIC_OP
        if name == "ADD" and value.dtype.scalar.is_floating():
            name = "FADD"
        elif name in ("MIN", "MAX") and value.dtype.scalar.is_int_unsigned():
            name = "U" + name
        # pointers of the block's own shape: a value may have been broadcast or reshaped to it
        value = ti.TensorHandle(np.broadcast_to(value.data, ptrs.data.shape), value.dtype.scalar)
        relaxed = ti._ir.MEM_SEMANTIC.RELAXED
        return self.create_atomic_rmw(getattr(operations, name), ptrs, value, mask, relaxed, None)

    return create_descriptor_reduce


def pointers_of(descriptor: bool):
    """The pointers of a block that a descriptor or a block pointer names, and which of them are inside."""

    def make(plain):
        def materialize_pointers(self, *args):
            ptrs, masks = plain(self, *args)
            if descriptor:
                ptrs.attr[_DESCRIPTOR] = True
                ptrs.attr[_NAN] = self.padding == interpreter_module()._ir.PADDING_OPTION.PAD_NAN
            if PARAMETER in self.base.attr:
                ptrs.attr[PARAMETER] = self.base.attr[PARAMETER]
            if isinstance(masks, np.ndarray):
                masks = interpreter_module().TensorHandle(masks, tl.int1)
            return ptrs, masks

        return materialize_pointers

    return make


def block_pointer_load(plain):
    def create_tensor_pointer_load(self, ptr, boundary_check, padding_option, *rest):
        ptrs, mask = ptr.materialize_pointers(boundary_check)
        padding = interpreter_module()._ir.PADDING_OPTION
        ptrs.attr[_NAN] = padding_option == padding.PAD_NAN
        other = _zeros(ptrs) if padding_option == padding.PAD_ZERO else None
        return self.create_masked_load(ptrs, mask, other, *rest)

    return create_tensor_pointer_load
