"""Kernels in Gluon, interpreted: what their words mean while a launch of one runs.

Most of gluon.language is triton.language with layouts, which say which thread holds what. Here no layout is looked at: whether
they fit together is the compiler's business. Shared memory, barriers, the TMA unit, products of warpgroups and groups of warps
are in shared_memory.py.
"""

import inspect
import re
import sys
from functools import cache
from types import ModuleType

import numpy as np
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.simulator.interpreter import language, running
from gpukit.simulator.interpreter.arithmetic import Unsupported
from gpukit.simulator.interpreter.running import interpreter_module
from gpukit.simulator.interpreter.shared_memory import Barrier, Block, Copy, fault, number, program

_GLUON = "triton.experimental.gluon.language"
_SAME = re.compile(r"mov\.b(16|32|64) \$0, \$1;")


def is_gluon(function) -> bool:
    """Whether a @jit object, or the interpreter's version of one, is a kernel in Gluon."""
    function = getattr(function, "compiled", function)
    return getattr(function, "is_gluon", lambda: False)()


class _Layout:
    """Any layout of a block in registers."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_LAYOUT = _Layout()


# ---- arguments of a launch


def plain(value):
    """A descriptor as Triton's own host code makes it; anything else as it is."""
    if type(value).__module__.startswith("triton.experimental.gluon") and hasattr(value, "block_shape"):
        made = TensorDescriptor(value.base, value.shape, value.strides, value.block_shape, value.padding)
        made.layout = value.layout
        return made
    return value


def describe(descriptor, layout) -> None:
    """What a descriptor of Gluon's has more than one of Triton's."""
    descriptor.layout = layout
    descriptor.block_type.shape = _Shape(descriptor.block_type.shape)


class _Shape(tuple):
    """A shape that joins with a list, as all sequences do in the compiler."""

    def __add__(self, other):
        return _Shape((*self, *other))

    def __radd__(self, other):
        return _Shape((*other, *self))


# ---- the language


def bind(scope) -> None:
    """For the time of a launch: Gluon's modules mean what is written here."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            meaning = _meaning(value)
            if meaning is not None:
                scope.set_attr(module, name, meaning)
    scope.set_attr(tl.core.base_type, "layout", _LAYOUT)


def bind_names(scope, names: dict) -> None:
    """The same for what a kernel's file has imported from them by name."""
    for name, value in list(names.items()):
        meaning = None if isinstance(value, ModuleType) else _meaning(value)
        if meaning is not None:
            scope.set_attr(language.Globals(names), name, meaning)


@cache
def _modules() -> list[ModuleType]:
    unlike = ".amd", "._semantic", "._layouts"
    loaded = [(name, module) for name, module in sys.modules.items() if name.startswith(_GLUON) and module is not None]
    return [module for name, module in loaded if not any(part in name for part in unlike)]


def _meaning(value):
    """What a builtin of Gluon's, a function of its library or a layout means here; None for anything else."""
    known = _meanings().get(id(value))
    if known is None and getattr(value, "__triton_builtin__", False) and value.__module__.startswith(_GLUON):
        return _unknown(value.__name__)
    return known


def _unknown(name: str):
    def unknown(*args, **kwargs):
        raise Unsupported(f"Gluon's {name} is not interpreted: gpukit knows what kernels for Hopper need")

    return unknown


@cache
def _meanings() -> dict[int, object]:
    """By id: hashing a function of Gluon's reads its source, and all that it calls."""
    gl = sys.modules[_GLUON]
    found = {}
    for name, value in vars(gl).items():
        if inspect.isclass(value) and issubclass(value, gl._layouts.DistributedLayout):
            found[id(value)] = lambda *args, **kwargs: _LAYOUT
        elif name in _OWN:
            found[id(value)] = _OWN[name]
        elif not inspect.isclass(value) and callable(value) and (hasattr(tl, name) or hasattr(tl.core, name)):
            found[id(value)] = _as_in_triton(name)
    hopper = sys.modules.get("triton.experimental.gluon.language.nvidia.hopper")
    for module, meanings in (
        (hopper, _HOPPER),
        (getattr(hopper, "mbarrier", None), _BARRIERS),
        (getattr(hopper, "tma", None), _TMA),
    ):
        for name, meaning in meanings.items():
            value = getattr(module, name, None)
            if value is not None:
                found[id(value)] = meaning
    return found


def _as_in_triton(name: str):
    def call(*args, **kwargs):
        kwargs.pop("layout", None)
        return getattr(tl if hasattr(tl, name) else tl.core, name)(*args, **kwargs)

    return call


def _constant(value):
    return getattr(value, "value", value)


def _arange(start, end, layout=None):
    return tl.arange(_constant(start), _constant(end))


def _full(shape, value, dtype, layout=None):
    return tl.full([number(n) for n in shape], _constant(value), _constant(dtype))


def _full_like(x, value, shape=None, dtype=None, layout=None):
    return _full(x.shape if shape is None else shape, value, dtype or x.dtype)


def _zeros(shape, dtype, layout=None):
    return _full(shape, 0, dtype)


def _zeros_like(x, shape=None, dtype=None, layout=None):
    return _full_like(x, 0, shape, dtype)


def _same(value, *layout, **options):
    return value


def _static_range(*bounds, **options):
    return range(*(number(n) for n in bounds))


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    """One that only keeps the compiler from moving something."""
    if _SAME.fullmatch(_constant(asm).strip()) and len(args) == 1:
        return args[0]
    raise Unsupported("inline PTX does not run in the interpreter: write the operation with functions of Gluon")


def _allocate(element_ty, shape, layout, value=None) -> Block:
    block = program().allocate(_constant(element_ty), [number(n) for n in _constant(shape)], _constant(layout))
    if value is not None:
        block.store(value)
    return block


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    functions, arguments = zip(*functions_and_args, strict=True)
    warps = [running.now.num_warps, *(number(n) for n in worker_num_warps)]
    if len(warps) != len(functions):
        raise ValueError(
            f"warp_specialize: worker_num_warps has {len(warps) - 1} entries for {len(functions) - 1} functions behind the first"
        )
    return program().run(functions, arguments, warps)


_OWN = {
    "allocate_shared_memory": _allocate,
    "arange": _arange,
    "barrier": lambda *, cluster=False: None,
    "thread_barrier": lambda: None,
    "convert_layout": _same,
    "full": _full,
    "full_like": _full_like,
    "inline_asm_elementwise": _inline_asm,
    "num_ctas": lambda: 1,
    "num_warps": lambda: program().group.warps,
    "set_auto_layout": _same,
    "static_range": _static_range,
    "warp_specialize": _warp_specialize,
    "zeros": _zeros,
    "zeros_like": _zeros_like,
}


# ---- barriers


def _place(block: Block) -> int:
    return block.data.__array_interface__["data"][0]


def _barrier(block: Block) -> Barrier:
    found = block.allocation.barriers.get(_place(block))
    if found is None:
        raise fault("uses a barrier that was not initialized: mbarrier.init comes first")
    return found


def _init(mbarrier: Block, count) -> None:
    name = f"barrier {_index(mbarrier)} of the allocation of line {mbarrier.allocation.line}"
    mbarrier.allocation.barriers[_place(mbarrier)] = Barrier(number(count), name)


def _index(block: Block) -> int:
    return (_place(block) - block.allocation.data.__array_interface__["data"][0]) // block.data.itemsize


def _invalidate(mbarrier: Block) -> None:
    _barrier(mbarrier)
    del mbarrier.allocation.barriers[_place(mbarrier)]


def _expect(mbarrier: Block, bytes_per_cta=None, pred=True, **renamed) -> None:
    if number(pred):
        announced = next(iter(renamed.values()), bytes_per_cta)  # Triton 3.6 calls it `bytes`
        barrier = _barrier(mbarrier)
        barrier.over(1 - barrier.parity)
        barrier.expected += number(announced)
        barrier.arrive(1)


def _arrive(mbarrier: Block, *, count=1, pred=True) -> None:
    if number(pred):
        program().arrive(_barrier(mbarrier), number(count))


def _wait(mbarrier: Block, phase, pred=True, deps=()) -> None:
    if number(pred):
        program().wait(_barrier(mbarrier), number(phase) & 1)


_BARRIERS = {"init": _init, "invalidate": _invalidate, "expect": _expect, "arrive": _arrive, "wait": _wait}


# ---- the TMA unit


def _fetch(tensor_desc, coord, barrier: Block, result: Block, pred=True, **options) -> None:
    if not number(pred):
        return
    value = tensor_desc.load(coord).handle.data
    if value.size != result.data.size:
        raise ValueError(f"a block of {list(value.shape)} is copied to a place of {result.shape} in shared memory")
    now = program()
    now.write(result, "copies to")
    copy = Copy(result, value, tensor_desc.block_type.nbytes)
    result.writers[...] = 0
    now.copies.append(copy)
    _barrier(barrier).landing.append(copy)


def _putting(method: str):
    """A copy to global memory by a method of descriptors: "store", or one that adds to what is there."""

    def put(tensor_desc, coord, src: Block, **options) -> None:
        now = program()
        now.read_asynchronously(src, "copies from")
        shape = [number(n) for n in tensor_desc.block_shape]
        block = interpreter_module().TensorHandle(src.data.reshape(shape).copy(), src.dtype)
        getattr(tensor_desc, method)(coord, tl.core.tensor(block, tl.block_type(src.dtype, shape)))
        now.group.stores.append(src)

    return put


def _store_wait(pendings, read_only=True) -> None:
    stores = program().group.stores
    del stores[: max(len(stores) - number(pendings), 0)]


_TMA = {
    "async_copy_global_to_shared": _fetch,
    "async_load": _fetch,
    "async_copy_shared_to_global": _putting("store"),
    "async_store": _putting("store"),
    **{f"async_atomic_{name}": _putting(f"atomic_{name}") for name in ("add", "min", "max", "and", "or", "xor")},
    "store_wait": _store_wait,
}


# ---- products of warpgroups


def _operand(x, does: str):
    """The data of an operand, which is a block in shared memory or one in registers."""
    ti = interpreter_module()
    if isinstance(x, Block):
        program().read_asynchronously(x, does)
        return ti.TensorHandle(np.ascontiguousarray(x.data), x.dtype)
    return x.handle


def _warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False) -> tl.tensor:
    ti = interpreter_module()
    if number(a.shape[-1]) != number(b.shape[-2]):
        raise ValueError(f"warpgroup_mma: a is {list(a.shape)} and b {list(b.shape)}")
    now = program()
    before = now.in_flight(acc.handle.data)
    if not number(use_acc):
        before = np.zeros_like(before)
    left, right = _operand(a, "multiplies"), _operand(b, "multiplies")
    start = ti.TensorHandle(before, acc.dtype.scalar)
    tf32 = ti._ir.INPUT_PRECISION.TF32
    result = ti.interpreter_builder.create_dot(left, right, start, tf32, 0).data
    if number(is_async):
        blocks = [x for x in (a, b) if isinstance(x, Block)]
        result = now.begin(blocks, result.shape, acc.dtype.scalar, np.asarray(result))
    return tl.core.tensor(ti.TensorHandle(result, acc.dtype.scalar), acc.type)


def _warpgroup_mma_wait(num_outstanding=0, deps=None):
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    program().wait_for_products(number(num_outstanding))
    return deps[0] if len(deps) == 1 else tuple(deps)


_HOPPER = {
    "fence_async_shared": lambda cluster=False: program().fence(),
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_init": _same,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}
