"""What a piece of code moves: `with gpukit.trace() as t:` counts the memory traffic of Triton launches and PyTorch ops.

Launches are counted in Triton's interpreter, access by access; a test holds the sectors to those that Nsight Compute
measured on an H200. What the caches of a GPU make of them is worked out when somebody asks (caches.py). PyTorch ops are
counted as if each read its inputs and wrote its outputs once.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit import hardware, launches, tables
from gpukit.simulator.interpreter import bounds
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.interpreter.faults import UnwrittenFault, program_ids
from gpukit.simulator.trace.recording import Recording, Site

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled
    from gpukit.simulator.trace.caches import Traffic

try:
    from gpukit.simulator.interpreter import layer, running
except ModuleNotFoundError as exc:  # no wheels outside Linux; PyTorch ops can be counted all the same
    if exc.name != "triton":
        raise
    layer = None

MAX_DETAIL_PROGRAMS = 1024


@dataclass
class Access:
    """All executions of one tl.load, tl.store or atomic on one tensor. `count` is how often it ran (once per program
    and loop iteration), `lanes` how many elements that were, masked-off lanes left out. `via` is "tma" for a tensor
    descriptor, else "lsu".

    run_bytes      the shortest run of lanes that lie next to each other in memory, among all executions
    vector_bytes   what one thread could move at once, judged by these runs and by where they begin: 16 at best
    """

    kind: str
    tensor: str
    file: str
    line: int
    count: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    via: str = "lsu"
    run_bytes: int = 0
    vector_bytes: int = 0


@dataclass
class Event:
    """One executed access, kept by trace(detail=True): `offsets` of its lanes in elements from the tensor's first one,
    in lane order, and how many lanes were `masked` off."""

    program: tuple[int, ...]
    kind: str
    tensor: str
    line: int
    offsets: np.ndarray = field(repr=False)
    masked: int


@dataclass
class Launch:
    """One kernel launch. Bytes are lanes that are not masked off times their size; sectors are distinct 32-byte
    sectors per access and program, summed. `function` is the @triton.jit object, `file` where it is defined,
    `arguments` and `options` are what the caller passed: the kernel's parameters by name, and num_warps and so on.

    l2_read_sectors, l2_write_sectors, dram_read_bytes, dram_write_bytes are what the caches of the trace's GPU make of
    it: see `traffic`. A trace with sample=N ran `sampled` of the programs and scaled every count; else that is None.
    """

    kernel: str
    file: str
    grid: tuple[int, ...]
    programs: int
    function: object = field(repr=False)
    load_bytes: int = 0
    store_bytes: int = 0
    atomic_bytes: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    atomic_sectors: int = 0
    flops: int = 0  # of tl.dot: 2 M N K
    dry: bool = False
    accesses: list[Access] = field(default_factory=list, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)
    arguments: dict = field(default_factory=dict, repr=False, compare=False)
    options: dict = field(default_factory=dict, repr=False, compare=False)
    gpu: str = "h200"
    sampled: int | None = None
    recording: Recording = field(default_factory=Recording, repr=False)

    @property
    def name(self) -> str:
        return self.kernel

    @property
    def read_bytes(self) -> int:
        return self.load_bytes

    @property
    def write_bytes(self) -> int:
        return self.store_bytes + self.atomic_bytes

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def descriptors(self) -> list[Access]:
        """The accesses through tensor descriptors, which a GPU's TMA unit makes."""
        return [access for access in self.accesses if access.via == "tma"]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        titles = ["access", "times", "bytes", "sectors", "used", "run (bytes)", "a thread (bytes)"]
        rows = [
            [
                f"{a.kind} {a.tensor}, line {a.line}" + (" (descriptor)" if a.via == "tma" else ""),
                *map(_cell, (a.count, a.bytes, a.sectors)),
                f"{a.bytes / (a.sectors * SECTOR_BYTES):.0%}" if a.sectors else "",
                *map(_cell, (a.run_bytes, a.vector_bytes)),
            ]
            for a in self.accesses
        ]
        sectors = sum(a.sectors for a in self.accesses)
        used = f"{self.bytes / (sectors * SECTOR_BYTES):.0%}" if sectors else ""
        total = ["total", *map(_cell, (sum(a.count for a in self.accesses), self.bytes, sectors)), used, "", ""]
        return titles, [*rows, total]

    def report(self) -> str:
        """What each access costs, as an aligned text table: how much of its sectors it uses, how long its runs of
        neighbouring elements are, and what a thread could move at once."""
        return _text(*self._table())

    def _repr_html_(self) -> str:
        return _html(*self._table())

    @property
    def num_warps(self) -> int:
        return int(self.options.get("num_warps") or 4)  # Triton's default

    def traffic(self, gpu: str | hardware.Gpu | None = None, compiled: Compiled | bool = True) -> Traffic:
        """What the caches of a GPU (default: the trace's) make of this launch: sectors and bytes at each level.

        compiled   the kernel compiled for that GPU, which says which lanes store together and how many programs share
                   an SM. True compiles it now (seconds the first time, then from a cache) and falls back on False where
                   that fails; False assumes what Triton's compiler does by default.
        Raises ValueError for a launch that was not run, and for one whose irregular accesses were too many to keep.
        """
        from gpukit.simulator.trace import caches

        target = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu or self.gpu)
        key = target.key, compiled if isinstance(compiled, bool) else id(compiled)
        if key not in self._traffic:
            self._traffic[key] = caches.traffic(self, target, compiled)
        return self._traffic[key]

    @property
    def _traffic(self) -> dict:
        return self.recording.answers

    @property
    def l2_read_sectors(self) -> int:
        return self.traffic().l2_read_sectors

    @property
    def l2_write_sectors(self) -> int:
        return self.traffic().l2_write_sectors

    @property
    def dram_read_bytes(self) -> int:
        return self.traffic().dram_read_bytes

    @property
    def dram_write_bytes(self) -> int:
        return self.traffic().dram_write_bytes


@dataclass
class TorchOp:
    """One PyTorch op: bytes of the tensors it reads and of those it writes; views and bare allocations move none."""

    name: str
    read_bytes: int
    write_bytes: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


class _Marks:
    """Which elements of one storage launches loaded and stored inside the block."""

    def __init__(self, buffer):
        self.storage = buffer.storage  # kept alive, so that its address stays its own
        self.nbytes = buffer.nbytes
        self.unit = 0
        self.touched: dict[str, np.ndarray] = {}

    def add(self, kind: str, access) -> None:
        if self.unit == 0 or access.width < self.unit:
            self._refine(access.width)
        kinds = ("load", "store") if kind == "atomic" else (kind,)
        index = access.index(self.unit)
        for k in kinds:
            if k not in self.touched:
                self.touched[k] = np.zeros(self.nbytes // self.unit, dtype=bool)
            self.touched[k][index] = True

    def _refine(self, unit: int) -> None:
        if self.unit:
            self.touched = {k: np.repeat(a, self.unit // unit) for k, a in self.touched.items()}
        self.unit = unit

    def of(self, kind: str, tensor) -> np.ndarray:
        marks = self.touched.get(kind)
        size = tensor.element_size()
        if marks is None:
            return np.zeros(tuple(tensor.shape), dtype=bool)
        if size < self.unit:
            marks = np.repeat(marks, self.unit // size)
        elif size > self.unit:
            per = size // self.unit
            marks = marks[: marks.size // per * per].reshape(-1, per).any(axis=1)
        return bounds.mark(marks, tensor, 0).copy()


class _Recorder:
    """Counts the accesses of one launch. `role` says how the running program counts: "whole", or in a sampled launch
    "window" if it only shows where its accesses begin."""

    def __init__(self, trace: Trace, launch: Launch):
        self.trace, self.launch = trace, launch
        self.rows: dict[tuple, tuple[Access, Site]] = {}
        self.role = "whole"
        self.counting = launch.sampled is None

    def access(self, access, linear: int, file: str, line: int) -> None:
        launch, kind = self.launch, access.kind
        tensor = access.parameter.name if access.parameter else "?"
        key = kind, tensor, file, line, access.pointers.shape, access.width
        known = self.rows.get(key)
        if known is None:
            known = self.rows[key] = self._new_row(key, access)
        row, site = known
        if access.lanes:
            launch.recording.add(access, linear, site)
        if self.role == "window":
            return
        row.count += 1
        if access.lanes:
            moved, sectors = access.lanes * access.width, access.sectors
            row.lanes += access.lanes
            row.bytes += moved
            row.sectors += sectors
            setattr(launch, f"{kind}_bytes", getattr(launch, f"{kind}_bytes") + moved)
            setattr(launch, f"{kind}_sectors", getattr(launch, f"{kind}_sectors") + sectors)
            run, vector = access.runs
            row.run_bytes = min(row.run_bytes or run, run)
            row.vector_bytes = min(row.vector_bytes or vector, vector)
            if launch.sampled is None:
                self.trace._mark(access)
        if self.trace.detail:
            self._keep(access, tensor, linear, line)

    def _new_row(self, key, access) -> tuple[Access, Site]:
        kind, tensor, file, line, shape, width = key
        where = (kind, tensor, file, line)
        row = next((a for a in self.launch.accesses if (a.kind, a.tensor, a.file, a.line) == where), None)
        if row is None:
            row = Access(*where, via=access.via)
            self.launch.accesses.append(row)
        return row, Site(*where, tuple(shape), width, access.via)

    def _keep(self, access, tensor: str, linear: int, line: int) -> None:
        offsets = np.zeros(0, dtype=np.int64)
        if access.lanes:
            own = access.parameter.tensor
            offsets = access.offsets // own.element_size() - own.storage_offset()
        program = program_ids(linear, self.launch.grid)
        self.launch.events.append(Event(program, access.kind, tensor, line, offsets, access.masked))

    def dot(self, flops: int) -> None:
        if self.role == "whole":
            self.launch.flops += flops

    def window(self) -> int:
        """After the sampled programs have run: of how many programs, from the first on, to look at the beginning."""
        from gpukit.simulator.trace import caches

        return caches.window(self.launch)

    def unwritten(self, fault) -> None:
        """The launch read what nobody has written."""
        self.trace.unwritten.append(fault)
        if self.trace.raises:
            raise fault

    def cut(self, linear: int) -> None:
        """A program of the window was ended early."""
        self.launch.recording.cut.add(linear)

    def end(self) -> None:
        """The launch is over: a sampled one is scaled to the whole grid."""
        launch = self.launch
        if launch.sampled is None:
            return
        scale = launch.programs / launch.sampled
        counts = [f"{kind}_{what}" for kind in ("load", "store", "atomic") for what in ("bytes", "sectors")]
        for thing, names in ((launch, [*counts, "flops"]), *((a, _ACCESS_COUNTS) for a in launch.accesses)):
            for name in names:
                setattr(thing, name, round(getattr(thing, name) * scale))


_ACCESS_COUNTS = ("count", "lanes", "bytes", "sectors")


class Trace:
    """What ran inside the block; see `trace`.

    events       Launch and TorchOp objects in the order in which they ran
    launches     the Launch objects, torch_ops the TorchOp objects
    read_bytes, write_bytes, bytes    totals over both; an atomic counts once, as a write
    """

    def __init__(
        self,
        dry: bool = False,
        detail: bool = False,
        on_launch: Callable | None = None,
        gpu: str | hardware.Gpu = "h200",
        sample: int | None = None,
        raises: bool = True,
    ):
        if sample is not None and (not isinstance(sample, int) or sample < 1):
            raise ValueError(f"sample must be a number of programs, at least 1, got {sample!r}")
        self.dry, self.detail, self.on_launch, self.sample = dry, detail, on_launch, sample
        self.gpu = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu)
        self.raises = raises
        self.unwritten: list[UnwrittenFault] = []
        self.events: list[Launch | TorchOp] = []
        self._marks: dict[int, _Marks] = {}
        self._mode = _CountOps(self)

    def __enter__(self) -> Trace:
        if layer is not None:
            layer.install()
            launches.watch(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self._mode.__exit__(*exc_info)
        if layer is not None:
            launches.unwatch(self)
            if not launches.watched():
                bounds.forget_allocations()

    def begin(self, call) -> _Recorder:
        """Called by the interpreter before each launch."""
        if self.on_launch is not None:
            self.on_launch(call.kernel, call.arguments)
        if self.detail and call.programs > MAX_DETAIL_PROGRAMS:
            raise ValueError(
                f"trace(detail=True) keeps every access of every program, so a grid may have at most "
                f"{MAX_DETAIL_PROGRAMS} programs; {call.kernel} was launched with {call.programs}"
            )
        launch = Launch(
            call.kernel, call.file, call.grid, call.programs, call.function, dry=self.dry, arguments=call.arguments,
            options=call.options, gpu=self.gpu.key, sampled=None if self.dry else call.sampled,
        )  # fmt: skip
        self.events.append(launch)
        return _Recorder(self, launch)

    def _mark(self, access) -> None:
        buffer = access.buffer
        marks = self._marks.get(buffer.key)
        if marks is None:
            marks = self._marks[buffer.key] = _Marks(buffer)
        marks.add(access.kind, access)

    @property
    def launches(self) -> list[Launch]:
        return [e for e in self.events if isinstance(e, Launch)]

    @property
    def torch_ops(self) -> list[TorchOp]:
        return [e for e in self.events if isinstance(e, TorchOp)]

    @property
    def read_bytes(self) -> int:
        return sum(e.read_bytes for e in self.events)

    @property
    def write_bytes(self) -> int:
        return sum(e.write_bytes for e in self.events)

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self.launches)

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements launches in the block stored to (atomics too): bool, in the tensor's shape, on the CPU."""
        return self._touched("store", tensor)

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements launches in the block loaded (atomics too): bool, in the tensor's shape, on the CPU."""
        return self._touched("load", tensor)

    def _touched(self, kind: str, tensor) -> torch.Tensor:
        if any(launch.sampled is not None for launch in self.launches):
            raise ValueError("a sampled trace does not know which elements were touched: trace without sample=")
        marks = self._marks.get(tensor.untyped_storage().data_ptr())
        if marks is None or tensor.numel() == 0:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        return torch.from_numpy(marks.of(kind, tensor))

    def rows(self, caches: bool = False) -> list[dict]:
        """One dictionary for each step, in order: name, kind ("launch" or "torch"), programs, bytes, sectors and FLOPs;
        with `caches` also what L2 and DRAM move for a launch."""
        rows = []
        for e in self.events:
            row = {"name": e.name, "kind": "torch", "read_bytes": e.read_bytes, "write_bytes": e.write_bytes}
            if isinstance(e, Launch):
                row |= {"kind": "launch", "grid": e.grid, "programs": e.programs, "sampled": e.sampled}
                row |= {name: getattr(e, name) for name in ("load_sectors", "store_sectors", "atomic_sectors", "flops")}
                if caches and not e.dry:
                    row |= {name: getattr(e.traffic(), name) for name in _CACHE_COLUMNS}
            rows.append(row)
        return rows

    def dataframe(self, caches: bool = False):
        """`rows` as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(self.rows(caches))

    def _table(self, caches: bool = False) -> tuple[list[str], list[list[str]]]:
        """Column titles and rows; equal steps in a row share one line, steps that move nothing have none."""
        titles = ["step", "times", "programs", "read (bytes)", "written (bytes)"]
        titles += ["load sectors", "store sectors", "dot (FLOP)", *(_CACHE_COLUMNS.values() if caches else ())]
        rows: list[list] = []
        for e in self.events:
            more: list[int | None] = [None] * len(_CACHE_COLUMNS) if caches else []
            if isinstance(e, Launch):
                how = " (not run)" if e.dry else "" if e.sampled is None else f" ({e.sampled} run)"
                name = f"{e.kernel}{list(e.grid)}{how}"
                counts = [e.programs, e.read_bytes, e.write_bytes, e.load_sectors, e.store_sectors, e.flops]
                if caches and not e.dry:
                    more = [getattr(e.traffic(), column) for column in _CACHE_COLUMNS]
            elif e.read_bytes or e.write_bytes:
                name, counts = e.name, [None, e.read_bytes, e.write_bytes, None, None, None]
            else:
                continue
            counts = counts + more
            if rows and rows[-1][0] == name and rows[-1][2] == counts:
                rows[-1][1] += 1
            else:
                rows.append([name, 1, counts])
        table = [[name, times, *(c if c is None else c * times for c in counts)] for name, times, counts in rows]
        columns = [[row[i] for row in table] for i in range(1, len(titles))]
        total = [sum(c for c in column if c is not None) for column in columns]
        cells = [[_cell(c) for c in row] for row in [*table, ["total", *total]]]
        return titles, cells

    def report(self, caches: bool = False) -> str:
        """The steps of the block and their totals as an aligned text table. `caches` adds, for the launches, what the
        caches of the trace's GPU make of them; each launch is taken to find them cold."""
        return _text(*self._table(caches))

    def __repr__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        return _html(*self._table())


_CACHE_COLUMNS = {
    "l2_read_sectors": "L2 read sectors",
    "l2_write_sectors": "L2 write sectors",
    "dram_read_bytes": "DRAM read (bytes)",
    "dram_write_bytes": "DRAM written (bytes)",
}


def _text(titles: list[str], rows: list[list[str]]) -> str:
    """An aligned table; the last row is the total."""
    return "\n".join(tables.aligned([titles, *rows], right=range(1, len(titles)), rules=[1, -1]))


def _html(titles: list[str], rows: list[list[str]]) -> str:
    def tr(cells, tag: str) -> str:
        first, *rest = (html.escape(c) for c in cells)
        numbers = "".join(f'<{tag} style="text-align:right">{c}</{tag}>' for c in rest)
        return f'<tr><{tag} style="text-align:left">{first}</{tag}>{numbers}</tr>'

    body = "".join(tr(row, "td") for row in rows[:-1])
    head, foot = tr(titles, "th"), tr(rows[-1], "th")
    return f"<table><thead>{head}</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def _cell(value) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:,}"


def trace(
    dry: bool = False,
    detail: bool = False,
    on_launch: Callable | None = None,
    gpu: str | hardware.Gpu = "h200",
    sample: int | None = None,
    raises: bool = True,
) -> Trace:
    """Count the memory traffic of everything in a `with` block.

        with gpukit.trace() as t:
            softmax(x)
        print(t.report())

    dry        list launches but do not run them
    detail     also keep each access with its element offsets in `launch.events`; at most 1,024 programs a launch
    on_launch  called as on_launch(kernel_name, arguments) before each launch; `arguments` maps the kernel's parameter
               names to what the caller passed
    gpu        whose caches `launch.l2_read_sectors`, `launch.dram_read_bytes` and so on are about
    sample     run that many programs of each launch, spread over it, and scale what they count to the whole grid. Nothing
               is computed: floats load as 0 and stores are dropped, so tensors of any size cost nothing, meta tensors
               (torch.empty(..., device="meta")) and untouched torch.empty alike. Integers in memory are read, since they
               may be indices. Loops that wait for another program's value may not end.

    raises     whether a launch that reads what nobody has written (of a torch.empty made in the block) raises
               UnwrittenFault when it ends; `t.unwritten` lists these faults either way

    Where there is a GPU, each launch is interpreted on copies of its tensors first and then runs.
    Blocks nest: an inner block's work counts in the outer one too. Raises MemoryFault and RaceFault where a kernel
    leaves its tensors or programs collide, UnwrittenFault, ValueError for a grid too large for `detail` and for an unknown GPU.
    """
    return Trace(dry=dry, detail=detail, on_launch=on_launch, gpu=gpu, sample=sample, raises=raises)


# ---- PyTorch ops --------------------------------------------------------------------------------------------------

_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_METADATA = {"_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "resize_as_", "detach", "alias"}
# What these are given is a pattern for shape and dtype, or is overwritten without being read.
_WRITE_ONLY = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros"}
_WRITE_ONLY |= {"new_ones", "new_full", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
_WRITE_ONLY |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}
# These read as many elements of their source as they return, those write as many as they are given.
_GATHER = {"embedding": "weight", "index": "self", "index_select": "self", "gather": "self", "take": "self"}
_SCATTER = {"index_put_": "values", "index_copy_": "source", "scatter_": "src", "index_add_": "source"}
_SCATTER |= {"scatter_add_": "src", "masked_scatter_": "source"}
_READ_A_VALUE = {"_local_scalar_dense", "equal"}


def _nbytes(tensors) -> int:
    """Bytes of the distinct elements; one tensor given twice counts once, as does an expanded row; sparse ones 0."""
    seen = {}
    for t in tensors:
        if t.layout is not torch.strided:
            continue
        distinct = 1
        for n, stride in zip(t.shape, t.stride(), strict=True):
            distinct *= 1 if stride == 0 and n > 0 else n
        key = (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)
        seen[key] = distinct * t.element_size()
    return sum(seen.values())


def _flat(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _count(func, args, kwargs, out) -> tuple[int, int]:
    """Bytes an op reads and writes."""
    name = func._schema.name.split("::")[-1]
    returns = func._schema.returns
    outputs = list(_flat(out))
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if is_view or name in _ALLOCATE or name in _METADATA or torch.Tag.inplace_view in func.tags:
        return 0, 0
    given = {}
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        given[argument.name] = (list(_flat(value)), written, argument.kwarg_only)
    if name in _SCATTER:
        source = given.get(_SCATTER[name], ([], False, False))[0]
        reads = [t for key, (ts, _, _) in given.items() if key != "self" for t in ts]
        moved = _nbytes(source)
        return _nbytes(reads) + (moved if "add" in name else 0), moved
    mutated = [t for ts, written, _ in given.values() if written for t in ts]
    written_bytes = _nbytes(mutated) if mutated else _nbytes(outputs)
    if not outputs and not mutated:
        written_bytes = 0
        if name not in _READ_A_VALUE:
            return 0, 0
    if name in _WRITE_ONLY:
        return 0, written_bytes
    reads = []
    for key, (tensors, written, kwarg_only) in given.items():
        overwritten = written and (kwarg_only or name == "copy_")  # out=... and copy_ do not read their destination
        if not overwritten and _GATHER.get(name) != key:
            reads += tensors
    return _nbytes(reads) + (_nbytes(outputs) if name in _GATHER else 0), written_bytes


def _note_memory(func, args, kwargs, out) -> None:
    """Tell the interpreter which memory is fresh and which has been filled."""
    name = func._schema.name.split("::")[-1]
    if name in _ALLOCATE:
        for tensor in _flat(out):
            if tensor.layout is torch.strided:
                bounds.note_allocation(tensor)
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in _flat(value):
                if tensor.layout is torch.strided:
                    bounds.note_written(tensor)


class _CountOps(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports torch._dynamo at the first op: one to three seconds

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        events = self.trace.events
        before = len(events)
        out = func(*args, **kwargs)
        launched = len(events) > before  # a custom op that is made of launches: they have been counted
        if not launched and (layer is None or not running.busy()):
            read, write = _count(func, args, kwargs, out)
            _note_memory(func, args, kwargs, out)
            events.append(TorchOp(func._schema.name.replace("::", "."), read, write))
        return out
