"""Triton's interpreter made safe and right. The only module that uses private Triton names.

`install()` changes Triton's interpreter in this process: bf16 is rounded as a GPU rounds it, `@triton.autotune` runs
its first config, Triton 3.6 works with NumPy >= 2.4, every load, store and atomic is checked against the live tensors
before memory is touched (`MemoryFault`), and so are two programs on one address (`RaceFault`).

How it hangs together: a launch makes one `Memory`. Each pointer argument carries its `Parameter` through the pointer
arithmetic, so that an access knows the tensor it was meant for, however far off it lands. Traces are told of every
launch, access and dot: they are among `gpukit.launches.watchers`.
"""

import importlib
import inspect
import os
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace, TracebackType

import numpy as np
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from gpukit import hardware
from gpukit.launches import watchers
from gpukit.simulator.interpreter import libdevice
from gpukit.simulator.interpreter.bounds import (
    Access,
    Fault,
    Memory,
    MemoryFault,
    RaceFault,
    UnwrittenFault,
    guard,
    note_written,
    unguard_all,
)
from gpukit.simulator.interpreter.libdevice import Unsupported
from gpukit.simulator.interpreter.numerics import bf16_bits, bf16_floats, fp8_bits, fp8_floats, integers, tf32

__all__ = [
    "Call", "Fault", "MemoryFault", "RaceFault", "Unsupported", "UnwrittenFault", "busy", "guard", "install", "original",
    "unguard_all",
]  # fmt: skip

SUPPORTED = "3.6 to 3.9"
_PARAMETER = "gpukit.parameter"  # key under which a pointer handle carries the Parameter it came from
_DESCRIPTOR = "gpukit.descriptor"  # key of pointers that a tensor descriptor made
_MAX_GRID = (2**31 - 1, 65_535, 65_535)  # CUDA C++ Programming Guide, table of compute capabilities


@dataclass(eq=False)  # arguments are tensors, which have no plain ==
class Call:
    """One launch, as the watchers see it. `arguments` are the kernel's arguments as the caller passed them, by name, and
    `options` what the compiler is told: num_warps, num_stages. `sampled` is how many programs run, None for all."""

    function: object  # the @triton.jit object
    kernel: str
    file: str
    grid: tuple[int, ...]
    arguments: dict = field(repr=False)
    options: dict = field(default_factory=dict, repr=False)
    sampled: int | None = None

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid, dtype=np.int64))


class _Running:
    """The launch that is being interpreted.

    sampling   it computes nothing: floats load as 0, nothing is stored, dots are counted and not done
    seen       where this program made accesses, if it is to end as soon as it makes one a second time; else None
    """

    def __init__(self):
        self.memory: Memory | None = None
        self.recorders: list = []
        self.sampling = False
        self.seen: set | None = None


class _Enough(BaseException):
    """Ends a program that has shown where its accesses begin. A kernel cannot catch it by mistake."""


_running: _Running | None = None


def busy() -> bool:
    """Whether a launch is being prepared or interpreted: PyTorch ops seen now are ours, not the user's."""
    return _running is not None


# ---- where the learner's code is ----------------------------------------------------------------------------------

_OURS = (os.path.dirname(os.path.abspath(triton.__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_internal: dict[str, bool] = {}


def _is_internal(filename: str) -> bool:
    known = _internal.get(filename)
    if known is None:
        known = _internal[filename] = filename.startswith(_OURS)
    return known


def _where() -> tuple[str, int]:
    """File and line of the running access: the innermost frame that is neither Triton's nor the simulator's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _user_frames(frames):
    """A traceback of (frame, last instruction, line) triples, outermost first, without Triton's frames and ours."""
    trace = None
    for frame, instruction, line in reversed([f for f in frames if not _is_internal(f[0].f_code.co_filename)]):
        trace = TracebackType(trace, frame, instruction, line)
    return trace


def _frames_of(trace):
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti, trace.tb_lineno
        trace = trace.tb_next


def _frames_inside_the_launch():
    frames = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _launch.__code__:
        frames.append((frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def original(exc: BaseException) -> tuple[BaseException, str | None, int | None]:
    """The exception behind Triton's InterpreterErrors, and the file and line of user code that it came from."""
    while isinstance(exc, InterpreterError) and exc.__cause__ is not None:
        exc = exc.__cause__
    if isinstance(exc, Fault):
        return exc, exc.file, exc.line
    if isinstance(exc, SyntaxError) and exc.filename:
        return exc, exc.filename, exc.lineno
    file = line = None
    for frame, _, number in _frames_of(exc.__traceback__):
        filename = frame.f_code.co_filename
        if not (_is_internal(filename) or filename.startswith(_LIBRARIES)):
            file, line = filename, number
    return exc, file, line


# ---- launching ----------------------------------------------------------------------------------------------------


def _run(plain):
    def run(self, *args, grid, warmup, **kwargs):
        global _running
        if warmup:
            return
        if _running is not None:
            raise RuntimeError(f"{self.__name__} was launched from inside another kernel")
        _running = _Running()
        try:
            _launch(self, args, kwargs, grid)
        except Fault as fault:
            raise fault.with_traceback(_user_frames(_frames_of(fault.__traceback__))) from None
        finally:
            _running = None

    return run


def _launch(function, args, kwargs, grid) -> None:
    ti = _interpreter_module()
    fn = function.rewrite()
    known = inspect.getfullargspec(fn)
    options = {k: v for k, v in kwargs.items() if k not in known.args and k not in known.kwonlyargs}
    kwargs = {k: v for k, v in kwargs.items() if k not in options}
    arguments = inspect.getcallargs(fn, *args, **kwargs)
    grid = _grid(grid(arguments) if callable(grid) else grid)
    file = function.fn.__code__.co_filename
    call = Call(
        function, function.__name__, file if file.startswith("<") else os.path.abspath(file), grid, arguments, options
    )
    samples = [watcher.sample for watcher in watchers if watcher.sample is not None]
    call.sampled = min(*samples, call.programs) if samples else None
    _running.sampling = bool(samples)
    _running.recorders = [watcher.begin(call) for watcher in watchers]
    if any(watcher.dry for watcher in watchers):
        return

    executor = ti.GridExecutor(fn, function.arg_names, grid, function.pre_run_hooks)
    # Tensors on a GPU are interpreted on copies, which Triton makes and writes back.
    devices = {t.device.type for t in _tensors(arguments.values())}
    if "meta" in devices and not _running.sampling:
        name = next(n for n, v in arguments.items() if any(t.device.type == "meta" for t in _tensors([v])))
        raise ValueError(f"{name} is a meta tensor, which has no memory: only gpukit.trace(sample=N) can run on those")
    if "cpu" in devices and hardware.imagined_gpu() is None:
        _refuse_cpu_tensors(function, arguments)
    remote = devices != {"cpu"} and bool(devices) and not _running.sampling
    hosts, host_kwargs = executor._init_args_hst(args, kwargs) if remote else (args, kwargs)
    for hook in function.pre_run_hooks:
        hook(*hosts, **host_kwargs)
    memory = _running.memory = Memory(grid, _where)
    host_arguments = inspect.getcallargs(fn, *hosts, **host_kwargs)
    memory.add_guarded()
    memory.alone |= _running.sampling  # a sampled launch stores nothing

    # The compiler takes `min` and `max` from triton.language when it is imported. Triton does that at the first kernel it
    # compiles, which must not be while the interpreter's stand in their place.
    importlib.import_module("triton.compiler.code_generator")
    # Patched once for the whole launch and for every function the kernel calls, where Triton patches at each call.
    scope = ti._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope.set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))  # NumPy >= 2.4, Triton 3.6
    _cache_types(scope)
    _bind_libdevice(scope)
    targets = ti.interpreter_builder.codegen_fns
    scope.set_attr(ti.interpreter_builder, "codegen_fns", {**targets, "min_dot_size": _min_dot_size})
    try:
        values = {
            name: given if name in executor.constexprs else _value(name, given, host_arguments[name], memory)
            for name, given in arguments.items()
        }
        axes = grid + (1,) * (3 - len(grid))
        builder = ti.interpreter_builder
        builder.set_grid_dim(*axes)

        def program(linear: int) -> None:
            memory.start_program(linear)
            x, rest = linear % axes[0], linear // axes[0]
            builder.set_grid_idx(x, rest % axes[1], rest // axes[1])
            fn(**values)

        try:
            with np.errstate(all="ignore"):  # a GPU computes inf and NaN silently
                if call.sampled is None:
                    for linear in range(call.programs):
                        program(linear)
                else:
                    _sample(call, program)
                    for tensor in _tensors(arguments.values()):
                        note_written(tensor)  # by the programs that were left out, for the next launch
            for recorder in _running.recorders:
                recorder.end()
            if memory.race:
                raise memory.race
            if memory.unwritten:
                for recorder in _running.recorders:
                    recorder.unwritten(memory.unwritten)
        except (Fault, NotImplementedError):  # a gap in an exercise says what it is
            raise
        except Exception as exc:
            raise InterpreterError(repr(exc)) from exc
    finally:
        scope.restore()
    if remote and not hasattr(function, "compiled"):
        executor._restore_args_dev(args, hosts, kwargs, host_kwargs)


def _refuse_cpu_tensors(function, arguments: dict) -> None:
    """Of a launch on a GPU, which is interpreted only to count it: what it could not read. Pinned memory it can."""
    tensors = {name: list(_tensors([value])) for name, value in arguments.items()}
    on_gpu = next((name for name, found in tensors.items() if any(t.is_cuda for t in found)), None)
    import torch

    if on_gpu is None and not (hasattr(function, "compiled") and torch.cuda.is_available()):
        return
    beside = f" and {on_gpu} on the GPU" if on_gpu else ""
    for name, found in tensors.items():
        if any(t.is_cpu and not t.is_pinned() for t in found):
            raise ValueError(
                f"{function.__name__}: {name} is on the CPU{beside}; a GPU reads no tensor there, so move it with "
                f'{name}.to("cuda") before the launch'
            )


def _sample(call: Call, program) -> None:
    """Run `call.sampled` programs, spread over the grid, and the first steps of those that are on the GPU together at first:
    enough to tell what these share."""
    # One program in each of as many equal parts of the grid, not always at the same place of it: rows repeat their
    # alignment every few programs.
    golden = 0.6180339887498949
    whole = [int((i + (0.5 + i * golden) % 1) * call.programs / call.sampled) for i in range(call.sampled)]
    for linear in whole:
        program(linear)
    window = max((recorder.window() for recorder in _running.recorders), default=0)
    for recorder in _running.recorders:
        recorder.role = "window"
    for linear in sorted(set(range(window)) - set(whole)):
        _running.seen = set()
        try:
            program(linear)
        except _Enough:
            for recorder in _running.recorders:
                recorder.cut(linear)


def _cache_types(scope) -> None:
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


def _grid(grid) -> tuple[int, ...]:
    if not isinstance(grid, (tuple, list)) or not 1 <= len(grid) <= 3:
        raise TypeError(f"the grid must be a tuple of 1 to 3 integers, got {grid!r}")
    for axis, n in enumerate(grid):
        if not isinstance(n, (int, np.integer)) or not 0 <= n <= _MAX_GRID[axis]:
            raise TypeError(f"the grid's axis {axis} must be an integer from 0 to {_MAX_GRID[axis]}, got {n!r}")
    return tuple(int(n) for n in grid)


def _tensors(values):
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif (tensor := _tensor(value)) is not None:
            yield tensor


def _tensor(value):
    """The PyTorch tensor in an argument: itself, or the base of a descriptor or of a reinterpreted tensor."""
    value = value if hasattr(value, "untyped_storage") else getattr(value, "base", None)
    return value if hasattr(value, "untyped_storage") else None


def _value(name: str, given, host, memory: Memory):
    """What the kernel gets for one argument."""
    ti = _interpreter_module()
    if isinstance(given, tuple):
        items = [_value(f"{name}[{i}]", g, h, memory) for i, (g, h) in enumerate(zip(given, host, strict=True))]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    # As on a GPU a bool arrives as int1 and a float as fp32; Triton 3.6 refuses the one, all leave the other a float.
    if isinstance(given, bool):
        return tl.tensor(ti.TensorHandle(np.array([given]), tl.int1), tl.int1)
    if isinstance(given, float):
        return tl.tensor(ti.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)
    value = ti._implicit_cvt(host)
    tensor = _tensor(given)
    if tensor is not None:
        handle = getattr(value.handle, "base", value.handle)  # a descriptor holds its pointer in `base`
        parameter = handle.attr[_PARAMETER] = memory.add(name, tensor, _tensor(host))
        if parameter.buffer.imaginary:
            offset = tensor.storage_offset() * tensor.element_size()
            handle.data = np.array([parameter.buffer.base + offset], dtype=np.uint64)
    return value


def _call(plain):
    def __call__(self, *args, **kwargs):
        if _running is None:
            return plain(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    return __call__


def _first_config(plain):
    """Timing a config in the interpreter says nothing, and a kernel that is run once per config is run too often."""

    def run(self, *args, **kwargs):
        if not triton.knobs.runtime.interpret or len(self.configs) < 2:
            return plain(self, *args, **kwargs)
        configs = self.configs
        try:
            if self.early_config_prune:
                named = dict(zip(self.arg_names, args, strict=False))
                self.configs = list(self.early_config_prune(configs, named, **kwargs)) or configs
            self.configs = self.configs[:1]
            return plain(self, *args, **kwargs)
        finally:
            self.configs = configs

    return run


def _counted_launch(plain):
    """A launch that is about to run on the GPU: if somebody traces, it is first interpreted, on copies of its tensors."""

    def run(self, *args, grid, warmup, **kwargs):
        if watchers and not warmup:
            _interpreted(self).run(*args, grid=grid, warmup=False, **kwargs)
            no_memory = any(t.device.type == "meta" for t in _tensors([*args, *kwargs.values()]))
            if hardware.imagined_gpu() is not None or no_memory or any(watcher.dry for watcher in watchers):
                return None
        return plain(self, *args, grid=grid, warmup=warmup, **kwargs)

    return run


def _device_function(plain):
    def __call__(self, *args, **kwargs):
        if _running is None:
            return plain(self, *args, **kwargs)
        return _interpreted(self)(*args, **kwargs)

    return __call__


_twins: dict[object, object] = {}


def _interpreted(function):
    """The interpreter's version of a function that Triton would compile."""
    twin = _twins.get(function.fn)  # by the plain function: hashing the other reads its source, and all that it calls
    if twin is None:
        twin = _twins[function.fn] = _interpreter_module().InterpretedFunction(function.fn)
        twin.compiled = function  # what ran in the end is the compiled one: the interpreter must not write back
    return twin


# ---- memory -------------------------------------------------------------------------------------------------------


def _admit(kind: str, ptrs, mask, width: int) -> Access:
    """Check an access and tell the watchers. Raises MemoryFault."""
    via = "tma" if _DESCRIPTOR in ptrs.attr else "lsu"
    access = Access(kind, ptrs.data, None if mask is None else mask.data, width, via)
    memory = _running.memory
    memory.admit(access, ptrs.attr.get(_PARAMETER))
    if _running.recorders:
        file, line = _where()
        if _running.seen is not None:
            place = kind, file, line, access.parameter
            if place in _running.seen:
                raise _Enough
            _running.seen.add(place)
        for recorder in _running.recorders:
            recorder.access(access, memory.linear, file, line)
    return access


def _locate_faults() -> None:
    """What is raised when the launch ends has a traceback that shows where it happened."""
    for fault in (_running.memory.race, _running.memory.unwritten):
        if fault is not None and fault.__traceback__ is None:
            fault.__traceback__ = _user_frames(_frames_inside_the_launch())


def _width(ptrs) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _masked_load(plain):
    def create_masked_load(self, ptrs, mask, *rest, **kwargs):
        if _running is not None:
            access = _admit("load", ptrs, mask, _width(ptrs))
            _running.memory.load(access)
            _locate_faults()
            if _running.sampling and (
                ptrs.get_element_ty().is_floating() or access.buffer is None or access.buffer.imaginary
            ):
                return _zeros(ptrs)
        return plain(self, ptrs, mask, *rest, **kwargs)

    return create_masked_load


def _masked_store(plain):
    def create_masked_store(self, ptrs, value, mask, *rest, **kwargs):
        if _running is not None:
            # Triton writes items of the value's own size, whatever the pointer says
            access = _admit("store", ptrs, mask, value.data.itemsize)
            _running.memory.store(access, value.data)
            _locate_faults()
            if _running.sampling:
                return None
        return plain(self, ptrs, value, mask, *rest, **kwargs)

    return create_masked_store


def _int_to_ptr(plain):
    def create_int_to_ptr(self, val, dst_ty):
        pointers = plain(self, val, dst_ty)
        if _running is not None:
            pointers.data = _running.memory.where_copied(pointers.data)
        return pointers

    return create_int_to_ptr


def _zeros(ptrs):
    """What a sampled launch loads: nobody knows what a program it leaves out would have stored."""
    ti = _interpreter_module()
    element = ptrs.get_element_ty()
    return ti.TensorHandle(np.zeros(ptrs.data.shape, dtype=ti._get_np_dtype(element)), element)


def _atomic_rmw(plain):
    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        ti = _interpreter_module()
        access = None
        if _running is not None:
            access = _admit("atomic", ptr, mask, _width(ptr))
            _running.memory.atomic(access, sem != ti._ir.MEM_SEMANTIC.RELAXED, op != ti._ir.ATOMIC_OP.XCHG)
            _locate_faults()
            if _running.sampling:
                return _zeros(ptr)
        if _is_bf16(val) and op == ti._ir.ATOMIC_OP.FADD:
            return _atomic_add_bf16(ti, ptr, val, mask)
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


def _atomic_cas(plain):
    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        if _running is not None:
            access = _admit("atomic", ptr, None, _width(ptr))
            _running.memory.atomic(access, sem != _interpreter_module()._ir.MEM_SEMANTIC.RELAXED)
            _locate_faults()
            if _running.sampling:
                return _zeros(ptr)
        return plain(self, ptr, cmp, val, sem, scope)

    return create_atomic_cas


def _carry(position: int):
    """A pointer that is moved, broadcast or reshaped still belongs to the tensor it came from."""

    def make(plain):
        def carried(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            attr = args[position].attr
            if attr and _PARAMETER in attr:
                out.attr[_PARAMETER] = attr[_PARAMETER]
            return out

        return carried

    return make


def _descriptor_reduce(plain):
    def create_descriptor_reduce(self, kind, desc, value, offsets):
        ti = _interpreter_module()
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


def _materialize_pointers(plain):
    def materialize_pointers(self, offsets):
        ptrs, masks = plain(self, offsets)
        ptrs.attr[_DESCRIPTOR] = True
        if _PARAMETER in self.base.attr:
            ptrs.attr[_PARAMETER] = self.base.attr[_PARAMETER]
        if isinstance(masks, np.ndarray):  # Triton 3.6
            masks = _interpreter_module().TensorHandle(masks, tl.int1)
        return ptrs, masks

    return materialize_pointers


def _np_dtype(plain):
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


# ---- arithmetic ---------------------------------------------------------------------------------------------------
# The interpreter holds bf16 as uint16 bits. An op on them is done in fp32 and rounded once, which for + - * / and sqrt
# is the correctly rounded bf16 result: 24 bits of significand are at least 2 * 8 + 2.


def _is_bf16(handle) -> bool:
    return handle.data.dtype == np.uint16 and handle.dtype.scalar.name == "bf16"


def _floats(handle):
    return bf16_floats(handle.data) if _is_bf16(handle) else handle.data


def _rounded(data):
    """The handle for the result of an op on bf16 operands."""
    make = _interpreter_module().TensorHandle
    return make(data, tl.int1) if data.dtype == np.bool_ else make(bf16_bits(data), tl.bfloat16)


def _elementwise(plain):
    """unary_op, binary_op, ternary_op: operands, then the NumPy function."""

    def op(self, *operands_and_op):
        *operands, function = operands_and_op
        if function is np.where or not any(_is_bf16(x) for x in operands):
            result = plain(self, *operands_and_op)
            # Triton calls a comparison by its operands' type, and would splat it as that.
            if result.data.dtype == np.bool_:
                result.dtype = tl.int1
            return result
        return _rounded(function(*[_floats(x) for x in operands]))

    return op


def _fma(plain):
    def create_fma(self, x, y, z):
        if z.data.dtype == np.float32:  # Triton 3.7 rounds the product as well
            make = _interpreter_module().TensorHandle
            return make((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype)
        if not _is_bf16(z):
            return plain(self, x, y, z)
        return _rounded(_floats(x).astype(np.float64) * _floats(y) + _floats(z))

    return create_fma


def _cast(plain):
    def cast_impl(self, src, dst_type):
        target = dst_type.scalar
        if _is_bf16(src):
            if target.name == "bf16":
                return src
            src = _interpreter_module().TensorHandle(bf16_floats(src.data), tl.float32)
        if target.name == "bf16":
            return _interpreter_module().TensorHandle(bf16_bits(src.data), target)
        if src.data.dtype.kind == "f" and target.is_int() and target.int_bitwidth >= 8:
            ti = _interpreter_module()
            return ti.TensorHandle(integers(src.data, ti._get_np_dtype(target)), target)
        return plain(self, src, dst_type)

    return cast_impl


_FP8 = ("fp8e4nv", "fp8e5")


def _fp_to_fp(plain):
    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        standard = ("fp16", "bf16", "fp32", "fp64")
        target, source = dst_type.scalar, src.dtype.scalar
        if source.name in _FP8 and target.name in standard:
            floats = _interpreter_module().TensorHandle(fp8_floats(src.data, source.name), tl.float32)
            return self.cast_impl(floats, dst_type)
        if target.name in _FP8 and source.name in standard:
            return _interpreter_module().TensorHandle(fp8_bits(_floats(src), target.name), target)
        if "bf16" not in (target.name, source.name) or target.name not in standard or source.name not in standard:
            return plain(self, src, dst_type, rounding_mode)
        ti = _interpreter_module()
        if target.name == "bf16" and rounding_mode == ti._ir.ROUNDING_MODE.RTZ:
            return ti.TensorHandle(bf16_bits(_floats(src), toward_zero=True), target)
        return self.cast_impl(src, dst_type)

    return create_fp_to_fp


def _get_bf16(plain):
    def get_bf16(self, value):
        return _interpreter_module().TensorHandle(bf16_bits([value]), tl.bfloat16)

    return get_bf16


def _dot(plain):
    def create_dot(self, a, b, d, input_precision=None, *rest, **kwargs):
        if _running is not None and _running.recorders:
            *batch, m, k = a.data.shape
            flops = 2 * int(np.prod(batch, dtype=np.int64)) * m * k * b.data.shape[-1]
            for recorder in _running.recorders:
                recorder.dot(flops)
            if _running.sampling:
                return d
        ti = _interpreter_module()
        make = ti.TensorHandle
        if a.dtype.scalar.name in _FP8 and b.dtype.scalar.name in _FP8:
            a, b = (make(fp8_floats(x.data, x.dtype.scalar.name), tl.float32) for x in (a, b))
        elif _is_bf16(a) or _is_bf16(b):
            a, b = (make(bf16_floats(x.data), tl.float32) if _is_bf16(x) else x for x in (a, b))
        elif a.data.dtype == b.data.dtype == np.float32 and input_precision == ti._ir.INPUT_PRECISION.TF32:
            a, b = (make(tf32(x.data), tl.float32) for x in (a, b))
        return plain(self, a, b, d, input_precision, *rest, **kwargs)

    return create_dot


@cache
def _min_dot_rule():
    try:
        from triton.backends.nvidia.compiler import min_dot_size
    except ImportError:  # a Triton built for another maker's GPUs
        return lambda lhs, rhs: (1, 1, 1)
    return min_dot_size(None)


def _min_dot_size(lhs, rhs):
    """The smallest M, N and K that tl.dot takes on NVIDIA's GPUs; Triton's interpreter takes any."""
    return _min_dot_rule()(lhs, rhs)


def _extern_elementwise(plain):
    def create_extern_elementwise(self, libName, libPath, symbol, argList, retType, isPure):
        ti = _interpreter_module()
        result = retType.scalar
        return ti.TensorHandle(libdevice.evaluate(symbol, [x.data for x in argList], ti._get_np_dtype(result)), result)

    return create_extern_elementwise


def _inline_asm(plain):
    def create_inline_asm(self, *args, **kwargs):
        raise Unsupported("inline PTX does not run in the interpreter: write the operation with tl functions")

    return create_inline_asm


def _erf(plain):
    def create_erf(self, arg):
        return self.unary_op(arg, libdevice.erf)

    return create_erf


def _bind_libdevice(scope) -> None:
    """`libdevice.tanh(x)` in a kernel: the functions of tl.extra.libdevice are empty, and those for CUDA ask for what
    Triton's compiler passes them."""
    cuda = sys.modules.get("triton.language.extra.cuda.libdevice")
    if cuda is None:
        return
    semantic = _interpreter_module().interpreter_semantic

    def bound(name, function):
        def call(*args, _semantic=None):
            if function is None:
                raise Unsupported(f"libdevice.{name} is not among NVIDIA's functions in Triton {triton.__version__}")
            try:
                return function(*args, _semantic=semantic)
            except KeyError as exc:
                raise TypeError(f"libdevice.{name} does not take {exc}: cast the arguments, x.to(tl.float32)") from None

        return call

    for module in (cuda, sys.modules.get("triton.language.extra.libdevice")):
        for name, function in list(vars(module).items()) if module else ():
            if callable(function) and getattr(function, "__module__", "") == module.__name__:
                scope.set_attr(module, name, bound(name, getattr(cuda, name, None)))


def _nan_dropping(function):
    """tl.maximum and tl.minimum drop a NaN, as the GPU does; Triton 3.6 kept it."""

    def make(plain):
        return lambda self, lhs, rhs: self.binary_op(lhs, rhs, function)

    return make


def _reduce_sum(plain):
    def sum(self, input):
        if not _is_bf16(input.handle):
            return plain(self, input)
        total = np.sum(bf16_floats(input.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(bf16_bits(total), tl.bfloat16)

    return sum


def _reduce_min_max(plain):
    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        source = input[0] if isinstance(input, tuple) else input
        if idx_reduce_op is None and val_reduce_op in (np.nanmax, np.nanmin):
            # the same value without NumPy's warning about rows that are all NaN
            reduce = np.fmax.reduce if val_reduce_op is np.nanmax else np.fmin.reduce
            value = reduce(_floats(source.handle), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(bf16_bits(value) if _is_bf16(source.handle) else value, source.dtype)
        if not _is_bf16(source.handle):
            return plain(self, input, val_reduce_op, idx_reduce_op)
        out = plain(self, self.to_tensor(bf16_floats(source.handle.data), tl.float32), val_reduce_op, idx_reduce_op)
        if val_reduce_op is None:
            return out
        value, index = out if isinstance(out, tuple) else (out, None)
        value = self.to_tensor(bf16_bits(value.handle.data).reshape(value.shape), tl.bfloat16)
        return value if index is None else (value, index)

    return min_max


def _scan(function):
    def make(plain):
        def scan(self, input):
            if not _is_bf16(input.handle):
                return plain(self, input)
            return [self.to_tensor(bf16_bits(function(bf16_floats(input.handle.data), axis=self.axis)), tl.bfloat16)]

        return scan

    return make


# ---- installing ---------------------------------------------------------------------------------------------------

_INTERPRETER = "triton.runtime.interpreter"

# (module, name in it, replacement made from the plain one). A name that must exist but is not replaced has None.
_PATCHES = (
    (_INTERPRETER, "InterpretedFunction.run", _run),
    (_INTERPRETER, "InterpretedFunction.__call__", _call),
    (_INTERPRETER, "InterpretedFunction.rewrite", None),
    (_INTERPRETER, "GridExecutor._init_args_hst", None),
    (_INTERPRETER, "GridExecutor._restore_args_dev", None),
    (_INTERPRETER, "_patch_lang", None),
    (_INTERPRETER, "_implicit_cvt", None),
    (_INTERPRETER, "_get_np_dtype", _np_dtype),
    (_INTERPRETER, "_interpreter.load", None),
    (_INTERPRETER, "_interpreter.store", None),
    (_INTERPRETER, "_ir.MEM_SEMANTIC.RELAXED", None),
    (_INTERPRETER, "_ir.ATOMIC_OP.FADD", None),
    (_INTERPRETER, "_ir.ROUNDING_MODE.RTZ", None),
    (_INTERPRETER, "TensorHandle", None),
    (_INTERPRETER, "interpreter_builder.set_grid_idx", None),
    (_INTERPRETER, "interpreter_builder.set_grid_dim", None),
    (_INTERPRETER, "InterpreterBuilder.create_masked_load", _masked_load),
    (_INTERPRETER, "InterpreterBuilder.create_masked_store", _masked_store),
    (_INTERPRETER, "InterpreterBuilder.create_atomic_rmw", _atomic_rmw),
    (_INTERPRETER, "InterpreterBuilder.create_atomic_cas", _atomic_cas),
    (_INTERPRETER, "InterpreterBuilder.create_addptr", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_bitcast", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_broadcast", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_expand_dims", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_reshape", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_trans", _carry(0)),
    (_INTERPRETER, "InterpreterBuilder.create_splat", _carry(1)),
    (_INTERPRETER, "TensorDescHandle.materialize_pointers", _materialize_pointers),
    (_INTERPRETER, "InterpreterBuilder.unary_op", _elementwise),
    (_INTERPRETER, "InterpreterBuilder.binary_op", _elementwise),
    (_INTERPRETER, "InterpreterBuilder.ternary_op", _elementwise),
    (_INTERPRETER, "InterpreterBuilder.create_int_to_ptr", _int_to_ptr),
    (_INTERPRETER, "InterpreterBuilder.create_fma", _fma),
    (_INTERPRETER, "InterpreterBuilder.cast_impl", _cast),
    (_INTERPRETER, "InterpreterBuilder.create_fp_to_fp", _fp_to_fp),
    (_INTERPRETER, "InterpreterBuilder.create_dot", _dot),
    (_INTERPRETER, "InterpreterBuilder.create_erf", _erf),
    (_INTERPRETER, "InterpreterBuilder.create_extern_elementwise", _extern_elementwise),
    (_INTERPRETER, "InterpreterBuilder.create_inline_asm", _inline_asm),
    (_INTERPRETER, "_ir.INPUT_PRECISION.TF32", None),
    (_INTERPRETER, "_ir.ATOMIC_OP.XCHG", None),
    (_INTERPRETER, "interpreter_semantic", None),
    (_INTERPRETER, "InterpreterBuilder.create_maxnumf", _nan_dropping(np.fmax)),
    (_INTERPRETER, "InterpreterBuilder.create_minnumf", _nan_dropping(np.fmin)),
    (_INTERPRETER, "ReduceOps.sum", _reduce_sum),
    (_INTERPRETER, "ReduceOps.min_max", _reduce_min_max),
    (_INTERPRETER, "ScanOps.cumsum", _scan(np.cumsum)),
    (_INTERPRETER, "ScanOps.cumprod", _scan(np.cumprod)),
    ("triton.runtime.autotuner", "Autotuner.run", _first_config),
    ("triton.runtime.jit", "JITFunction.run", _counted_launch),
    ("triton.runtime.jit", "JITFunction.__call__", _device_function),
)
# Triton 3.6 has no get_bf16, none has the other.
_ADDED = (
    (_INTERPRETER, "InterpreterBuilder.get_bf16", _get_bf16),
    (_INTERPRETER, "InterpreterBuilder.create_descriptor_reduce", _descriptor_reduce),
)

_installed: list[tuple[object, str, object]] = []
_ABSENT = object()


def _interpreter_module():
    return sys.modules[_INTERPRETER]


def _resolve(module: str, path: str):
    """The owner of a private name, its last part and its value."""
    owner = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, last, getattr(owner, last)


def install() -> None:
    """Make Triton's interpreter in this process safe and right; a second call does nothing.

    Raises RuntimeError if this Triton lacks a name that the layer needs.
    """
    if _installed:
        return
    found = []
    for module, path, make in _PATCHES:
        try:
            found.append((*_resolve(module, path), make))
        except (ImportError, AttributeError) as exc:
            raise RuntimeError(
                f"gpukit's interpreter works with Triton {SUPPORTED}, and Triton {triton.__version__} has no "
                f"{module}.{path}: install a Triton in that range"
            ) from exc
    for module, path, make in _ADDED:
        owner = getattr(importlib.import_module(module), path.split(".")[0])
        found.append((owner, path.split(".")[1], getattr(owner, path.split(".")[1], _ABSENT), make))
    for owner, name, plain, make in found:
        if make is not None:
            _installed.append((owner, name, plain))
            setattr(owner, name, make(plain))


def uninstall() -> None:
    """Put Triton's own interpreter back."""
    while _installed:
        owner, name, plain = _installed.pop()
        if plain is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, plain)
