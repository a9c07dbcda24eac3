"""One launch in the interpreter: what the kernel gets for its arguments, and its programs, one after another.

A launch makes one `Memory`. Each pointer argument carries its `Parameter` through the pointer arithmetic, so that an access
knows the tensor it was meant for, however far off it lands. Whoever watches launches (gpukit/launches.py) is told of each.
"""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from gpukit import hardware
from gpukit.launches import watchers
from gpukit.simulator.interpreter import gluon, language, running, shortcuts
from gpukit.simulator.interpreter.arithmetic import LIBDEVICE, bind_libdevice, min_dot_size
from gpukit.simulator.interpreter.bounds import Memory, note_written
from gpukit.simulator.interpreter.digits import radices
from gpukit.simulator.interpreter.faults import Fault
from gpukit.simulator.interpreter.frames import frames_of, user_frames, where
from gpukit.simulator.interpreter.running import Call, interpreter_module
from gpukit.simulator.interpreter.turns import GOLDEN
from gpukit.simulator.interpreter.type_cache import cache_types
from gpukit.simulator.interpreter.unknown import must_be_known

PARAMETER = "gpukit.parameter"  # key under which a pointer handle carries the Parameter it came from
_MAX_GRID = (2**31 - 1, 65_535, 65_535)  # CUDA C++ Programming Guide, table of compute capabilities


def run(plain):
    def run(self, *args, grid, warmup, **kwargs):
        if warmup:
            return
        if running.now is not None:
            raise RuntimeError(f"{self.__name__} was launched from inside another kernel")
        running.now = running.Running()
        try:
            launch(self, args, kwargs, grid)
        except Fault as fault:
            raise fault.with_traceback(user_frames(frames_of(fault.__traceback__))) from None
        finally:
            running.now = None

    return run


def launch(function, args, kwargs, grid) -> None:
    ti = interpreter_module()
    fn = function.rewrite()
    known = inspect.getfullargspec(fn)
    options = {k: v for k, v in kwargs.items() if k not in known.args and k not in known.kwonlyargs}
    args = [gluon.plain(value) for value in args]
    kwargs = {k: gluon.plain(v) for k, v in kwargs.items() if k not in options}
    arguments = inspect.getcallargs(fn, *args, **kwargs)
    grid = _grid(grid(arguments) if callable(grid) else grid)
    file = function.fn.__code__.co_filename
    call = Call(
        function, function.__name__, file if file.startswith("<") else os.path.abspath(file), grid, arguments, options
    )
    samples = [watcher.sample for watcher in watchers if watcher.sample is not None]
    call.sampled = min(*samples, call.programs) if samples else None
    running.now.sampling = bool(samples)
    running.now.marking = any(getattr(watcher, "marking", False) for watcher in watchers)
    running.now.num_warps = call.num_warps
    running.now.recorders = [watcher.begin(call) for watcher in watchers]
    if any(watcher.dry for watcher in watchers):
        return

    executor = ti.GridExecutor(fn, function.arg_names, grid, function.pre_run_hooks)
    # Tensors on a GPU are interpreted on copies, which Triton makes and writes back.
    devices = {t.device.type for t in _tensors(arguments.values())}
    if "meta" in devices and not running.now.sampling:
        name = next(n for n, v in arguments.items() if any(t.device.type == "meta" for t in _tensors([v])))
        raise ValueError(f"{name} is a meta tensor, which has no memory: only gpukit.trace(sample=N) can run on those")
    if "cpu" in devices and "meta" not in devices and hardware.imagined_gpu() is None:  # the launch will really run
        _refuse_cpu_tensors(function, arguments)
    remote = devices != {"cpu"} and bool(devices) and not running.now.sampling
    hosts, host_kwargs = executor._init_args_hst(args, kwargs) if remote else (args, kwargs)
    for hook in function.pre_run_hooks:
        hook(*hosts, **host_kwargs)
    memory = running.now.memory = Memory(grid, where)
    host_arguments = inspect.getcallargs(fn, *hosts, **host_kwargs)
    if running.now.sampling:
        host_arguments = {name: _readable(value) for name, value in host_arguments.items()}
    memory.add_guarded()
    memory.alone |= running.now.sampling  # a sampled launch stores nothing

    # The compiler takes `min` and `max` from triton.language when it is imported. Triton does that at the first kernel it
    # compiles, which must not be while the interpreter's stand in their place.
    importlib.import_module("triton.compiler.code_generator")
    scope = _language()
    running.now.in_gluon = gluon.is_gluon(function)
    if running.now.in_gluon:
        gluon.bind(scope)
    running.now.scope = scope
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
            if running.now.shared is not None:
                running.now.shared.end()

        _bind_names(function)
        try:
            with np.errstate(all="ignore"):  # a GPU computes inf and NaN silently
                if call.sampled is None:
                    for linear in range(call.programs):
                        program(linear)
                else:
                    _sample(call, program)
                    for tensor in _tensors(arguments.values()):
                        note_written(tensor)  # by the programs that were left out, for the next launch
            for recorder in running.now.recorders:
                recorder.end()
            if memory.race:
                raise memory.race
            if memory.unwritten:
                for recorder in running.now.recorders:
                    recorder.unwritten(memory.unwritten)
            if memory.disorder:
                for recorder in running.now.recorders:
                    recorder.disorder(memory.disorder)
        except (Fault, NotImplementedError):  # a gap in an exercise says what it is
            raise
        except Exception as exc:
            raise InterpreterError(repr(exc)) from exc
    finally:
        scope.restore()
    if remote and not hasattr(function, "compiled"):
        executor._restore_args_dev(args, hosts, kwargs, host_kwargs)


_meanings: dict[tuple[bool, ...], list[tuple[object, str, object]]] = {}


def _language():
    """The scope in which Triton's language is the interpreter's, for a whole launch and every function that the kernel calls,
    where Triton makes one at each call. What each of some 600 names means is worked out once and put in its place at each
    launch: it took longer than most launches of the tests."""
    ti = interpreter_module()
    loaded = tuple(name in sys.modules for name in LIBDEVICE)
    if loaded in _meanings:
        scope = ti._LangPatchScope()
        for owner, name, meaning in _meanings[loaded]:
            scope.set_attr(owner, name, meaning)
        return scope
    scope = ti._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    truth = tl.core.tensor.__bool__

    def index(self):
        must_be_known(self.handle.data, "a bound")
        _turns_differ()
        return int(self.handle.data.item())  # NumPy >= 2.4, Triton 3.6

    def chosen(self):
        must_be_known(self.handle.data, "a branch")
        _turns_differ()
        return truth(self)

    scope.set_attr(tl.core.tensor, "__index__", index)
    scope.set_attr(tl.core.tensor, "__bool__", chosen)
    cache_types(scope)
    bind_libdevice(scope)
    targets = ti.interpreter_builder.codegen_fns
    scope.set_attr(ti.interpreter_builder, "codegen_fns", {**targets, "min_dot_size": min_dot_size})
    language.bind(scope)
    shortcuts.bind(scope)
    places = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
    _meanings[loaded] = [(owner, name, shortcuts.direct(vars(owner)[name])) for owner, name in places.values()]
    return scope


def _turns_differ() -> None:
    """A bound or a branch, perhaps in a loop: what a turn does may depend on which one it is."""
    if running.now is not None:
        running.now.work += running.TURN_LANES
        if running.now.turns is not None:
            running.now.turns.alike = False


def _readable(value):
    """Integers on a GPU as a copy: a sampled launch reads them, since they may be indices."""
    if not getattr(value, "is_cuda", False) or value.is_floating_point():
        return value
    copy = value.new_empty(0, device="cpu")
    return copy.set_(value.untyped_storage().cpu(), value.storage_offset(), value.size(), value.stride())


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
    """Run `call.sampled` programs, spread over the grid, or more where these differ, and the first steps of those that are on
    the GPU together at first: enough to tell what these share. Afterwards call.sampled says how many have run whole."""
    whole: dict[int, tuple[int, int]] = {}  # and how much there was to do, and by which indices
    for number, group in enumerate(_spread(call)):
        most = _MOST_SAMPLED if len({*whole.values()}) > 1 else _BY_INDICES if running.now.indices else 0
        if running.now.work >= _SAMPLED_WORK and number != call.sampled:
            most = 0
        if len(whole) >= max(call.sampled, most):
            break
        for linear in group:
            if linear not in whole:
                before, running.now.places = running.now.work, 0
                for recorder in running.now.recorders:
                    recorder.begins(linear)
                program(linear)
                whole[linear] = running.now.work - before, running.now.places
    call.sampled = len(whole)
    wanted = [(recorder, recorder.window()) for recorder in running.now.recorders]
    window = max((programs for _, programs in wanted), default=0)
    lookers = [recorder for recorder, programs in wanted if programs]
    for recorder in running.now.recorders:
        recorder.role = "window"
    ran = set(whole)

    def begin(linear: int) -> None:
        if linear in ran:
            return
        ran.add(linear)
        running.now.seen, running.now.again, running.now.shortened, running.now.lengths = {}, 0, False, []
        try:
            program(linear)
        except running.Enough:
            running.now.shortened = True
        except Exception:  # what a loop would have computed by its end may be missed after it
            if not running.now.shortened:
                raise
        if running.now.shortened:
            for recorder in running.now.recorders:
                recorder.cut(linear)

    rest = sorted(set(range(window)) - ran)
    if len(rest) < 4 * _PROBES or not _inferred(call, window, rest, lookers, ran, begin):
        running.now.few = _FEW
        for linear in rest:
            begin(linear)


def _spread(call: Call) -> Iterator[list[int]]:
    """Numbers of programs, some of them twice: first so many as are asked for, spread over the grid, one by one; then all at once those
    that lie as far from the grid's other end, and further ones in such pairs. With what grows along an axis, the two of a pair have
    together as much to do as any other two."""
    axes = sum(n > 1 for n in call.grid)

    def place(i: int) -> int:
        if axes < 2 and i < call.sampled:
            # One in each of as many equal parts, not always at the same place of it: rows repeat their alignment every few programs.
            return int((i + (0.5 + i * GOLDEN) % 1) * call.programs / call.sampled)
        linear, unit = 0, 1
        for n, step in zip(call.grid, (GOLDEN, 2**0.5, 3**0.5), strict=False):
            linear += int((0.5 + i * step) % 1 * n) * unit
            unit *= n
        return linear

    first = [place(i) for i in range(call.sampled)]
    yield from ([linear] for linear in first)
    yield [call.programs - 1 - linear for linear in first]
    for i in range(call.sampled, max(call.sampled, _MOST_SAMPLED)):
        yield [place(i), call.programs - 1 - place(i)]
    yield from ([linear] for linear in range(call.programs))


def _inferred(call: Call, window: int, rest: list[int], lookers: list, ran: set[int], begin) -> bool:
    """Run some programs of `rest`, and tell the recorders `lookers` from these where the others of the window begin; False if
    they do not say. begin(program) runs one that is not in `ran`, and adds it."""
    whole, different, lengths = {*ran}, set(), {}

    def look(linear: int) -> None:
        if linear not in ran:
            begin(linear)
            lengths[linear] = running.now.lengths

    look(rest[0])  # from which the others are told apart

    def starts(linear: int) -> np.ndarray | None:
        """Where its accesses begin, and how often its loops would turn: both must follow the digits."""
        if linear in whole:  # it went through its loops, and comes one step before its neighbor
            if not 1 < linear < window - 1 or linear + 1 in whole:
                return None
            zero, one, next_one = starts(0), starts(1), starts(linear + 1)
            return None if zero is None or one is None or next_one is None else next_one - (one - zero)
        look(linear)
        found = lookers[0].starts(linear)
        if found is None or len(lengths[linear]) != len(lengths[rest[0]]):
            different.add(linear)
            return None
        return np.concatenate([found, np.array(lengths[linear], dtype=np.int64)])

    axes = None if running.now.lost else radices(window, starts)
    if axes is None:
        return False
    begun = [linear for linear in rest if linear in ran]
    last, first = _last(call.programs, rest, axes) | _akin(different, rest, axes), _first(rest, axes)
    for edges in (last, last | first):
        inner = [linear for linear in rest if linear not in edges and linear not in ran]
        probes = [linear for linear in begun if linear not in edges]
        if len(inner) > _PROBES:
            probes += np.random.default_rng(0).choice(inner, _PROBES, replace=False).tolist()
        for linear in sorted({*probes, *edges}):
            look(linear)
        others = [linear for linear in rest if linear not in ran]
        if running.now.lost or not others or len(probes) < 2:
            return False
        turns = [lengths[linear] for linear in probes]
        if all([recorder.inferred(axes, probes, others, turns) for recorder in lookers]):
            return True
    return False


# Where programs differ, the first few of a sample are chance: more of them run until the interpreter has had so much to do.
_MOST_SAMPLED, _SAMPLED_WORK = 64, 1 << 25
_BY_INDICES = 16  # programs that show whether those differ which read integers: two may be alike by chance
_PROBES = 32
_FEW = 8  # accesses of a program that cannot be worked out from others: more would take long


def _akin(programs: set[int], window: list[int], axes: list[int]) -> set[int]:
    """Those that have the lowest digit that is not 0 in common with one of `programs`."""
    found, unit = set(), 1
    for n in axes:
        digits = {linear // unit % n for linear in programs if linear % unit == 0} - {0}
        found |= {linear for linear in window if linear // unit % n in digits}
        unit *= n
    return found


def _first(window: list[int], axes: list[int]) -> set[int]:
    """The first ones of each axis, whose masks or clamped addresses may be others."""
    found, unit = set(), 1
    for n in axes:
        found |= {linear for linear in window if linear // unit % n == 0}
        unit *= n
    return found


def _last(programs: int, window: list[int], axes: list[int]) -> set[int]:
    """The last ones of each axis, whose masks may be others."""
    found, unit = set(), 1
    for n in axes[:-1]:
        found |= {linear for linear in window if linear // unit % n == n - 1}
        unit *= n
    return found | {linear for linear in window if linear // unit == (programs - 1) // unit}


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
    ti = interpreter_module()
    if isinstance(given, tuple):
        items = [_value(f"{name}[{i}]", g, h, memory) for i, (g, h) in enumerate(zip(given, host, strict=True))]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    # As on a GPU a bool arrives as int1 and a float as fp32; Triton 3.6 refuses the one, all leave the other a float.
    if isinstance(given, bool):
        return tl.tensor(ti.TensorHandle(np.array([given]), tl.int1), tl.int1)
    if isinstance(given, float):
        return tl.tensor(ti.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)
    value = ti._implicit_cvt(host)
    if hasattr(given, "layout") and hasattr(given, "block_shape"):  # a descriptor of Gluon's
        gluon.describe(value, given.layout)
    tensor = _tensor(given)
    if tensor is not None:
        handle = getattr(value.handle, "base", value.handle)  # a descriptor holds its pointer in `base`
        parameter = handle.attr[PARAMETER] = memory.add(name, tensor, _tensor(host))
        if parameter.buffer.imaginary:
            offset = tensor.storage_offset() * tensor.element_size()
            handle.data = np.array([parameter.buffer.base + offset], dtype=np.uint64)
    return value


def _bind_names(function) -> None:
    """What is a builtin elsewhere, among the names of a function that is about to run."""
    names = function.fn.__globals__
    if id(names) not in running.now.bound:
        running.now.bound.add(id(names))
        language.bind_words(running.now.scope, names)
        if running.now.in_gluon:
            gluon.bind_names(running.now.scope, names)


def call(plain):
    def __call__(self, *args, **kwargs):
        if running.now is None:
            import torch

            if any(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())):  # no program would run it
                name = self.fn.__name__
                raise RuntimeError(f"{name} is called without a grid: {name}[grid](...) launches it")
            return plain(self, *args, **kwargs)
        _bind_names(self)
        return self.rewrite()(*args, **kwargs)

    return __call__


def first_config(plain):
    """Timing a config in the interpreter says nothing, and a kernel that is run once per config is run too often."""

    def run(self, *args, **kwargs):
        if not triton.knobs.runtime.interpret or len(self.configs) < 2:
            return plain(self, *args, **kwargs)
        configs = self.configs
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            self.configs = list(self.prune_configs(kwargs))[:1]
            return plain(self, *args, **kwargs)
        finally:
            self.configs = configs

    return run


def counted_launch(plain):
    """A launch that is about to run on the GPU: if somebody traces, it is first interpreted, on copies of its tensors."""

    def run(self, *args, grid, warmup, **kwargs):
        if triton.knobs.runtime.interpret and gluon.is_gluon(self):  # which @gluon.jit makes without asking for this
            return _interpreted(self).run(*args, grid=grid, warmup=warmup, **kwargs)
        if watchers and not warmup:
            _interpreted(self).run(*args, grid=grid, warmup=False, **kwargs)
            no_memory = any(t.device.type == "meta" for t in _tensors([*args, *kwargs.values()]))
            if hardware.imagined_gpu() is not None or no_memory or any(watcher.dry for watcher in watchers):
                return None
        try:
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        except triton.compiler.errors.CompilationError as error:
            gap = _gap(error)
            if gap is None:
                raise
        raise NotImplementedError(gap)  # as the interpreter says it

    return run


def _gap(error: BaseException | None) -> str | None:
    """The exercise whose gap is still empty, if that is what the compiler stumbled over: it compiles no `raise`."""
    while error is not None:
        match getattr(error, "node", None):
            case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(gap))])):
                return gap
        error = error.__cause__
    return None


def device_function(plain):
    def __call__(self, *args, **kwargs):
        if running.now is None:
            return plain(self, *args, **kwargs)
        return _interpreted(self)(*args, **kwargs)

    return __call__


_twins: dict[object, object] = {}


def _interpreted(function):
    """The interpreter's version of a function that Triton would compile."""
    twin = _twins.get(function.fn)  # by the plain function: hashing the other reads its source, and all that it calls
    if twin is None:
        twin = _twins[function.fn] = interpreter_module().InterpretedFunction(function.fn)
        twin.compiled = function  # what ran in the end is the compiled one: the interpreter must not write back
    return twin
