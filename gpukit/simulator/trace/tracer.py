"""What a piece of code moves: `with gpukit.trace() as t:` counts the memory traffic of Triton launches and PyTorch ops.

Launches are counted in Triton's interpreter, access by access; a test holds the sectors to those that Nsight Compute
measured on an H200. What the caches of a GPU make of them is worked out when somebody asks (caches.py). PyTorch ops are
counted as if each read its inputs and wrote its outputs once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpukit import hardware, launches
from gpukit.simulator.interpreter import bounds
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.interpreter.faults import UnwrittenFault, WarpFault, program_ids
from gpukit.simulator.trace import caches, places
from gpukit.simulator.trace.launch import Access, Event, Launch, cell, html_table, text_table
from gpukit.simulator.trace.recording import Recording, Site
from gpukit.simulator.trace.torch_ops import CountOps, TorchOp

if TYPE_CHECKING:
    import pandas

try:
    from gpukit.simulator.interpreter import layer
except ModuleNotFoundError as exc:  # no wheels outside Linux; PyTorch ops can be counted all the same
    if exc.name != "triton":
        raise
    layer = None

MAX_DETAIL_PROGRAMS = 1024


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
        self._begun: list[
            tuple[int, dict]
        ] = []  # of a sampled launch: programs that ran whole, and what was counted before each
        self._moved: dict[int, int] = {}  # bytes of each of them
        # The accesses of the running program: (what they are counted under, their lanes) -> where they began.
        self._program, self._made = -1, {}

    def begins(self, linear: int) -> None:
        """A program of a sampled launch that runs whole."""
        self._begun.append((linear, self._counts()))

    def _counts(self) -> dict[tuple[int, str], int]:
        """Of the launch, -1, and of its accesses, by number: what is scaled to the whole grid."""
        things = (
            (-1, self.launch, _LAUNCH_COUNTS),
            *((i, a, _ACCESS_COUNTS) for i, a in enumerate(self.launch.accesses)),
        )
        return {(i, name): getattr(thing, name) for i, thing, names in things for name in names}

    def access(self, access, linear: int, file: str, line: int) -> None:
        launch = self.launch
        key, row, site = self._place(access, file, line)
        if access.lanes:
            launch.recording.add(access, linear, site)
        if access.guided is not None:
            launch.recording.guide(access, linear)
        if self.role == "window":
            return
        row.count += 1
        if access.lanes:
            self._count(row, access, linear, 1, access.sectors, *access.runs)
            row.again_bytes += self._again(key, access, linear)
            if launch.sampled is None:
                self.trace._mark(access)
        if self.trace.detail:
            self._keep(access, key[1], linear, line)

    def _place(self, access, file: str, line: int) -> tuple[tuple, Access, Site]:
        """What accesses are counted together by, their row, and their site."""
        tensor = access.parameter.name if access.parameter else "?"
        key = access.kind, tensor, file, line, access.pointers.shape, access.width
        known = self.rows.get(key)
        if known is None:
            known = self.rows[key] = self._new_row(key, access)
        return key, *known

    def _count(self, row: Access, access, linear: int, times: int, sectors: int, run: int, vector: int) -> None:
        """So many accesses with the same lanes, which touch `sectors` together; `run` and `vector` are the shortest among
        them."""
        launch, kind = self.launch, access.kind
        moved = times * access.lanes * access.width
        self._moved[linear] = self._moved.get(linear, 0) + moved
        row.lanes += times * access.lanes
        row.bytes += moved
        row.sectors += sectors
        setattr(launch, f"{kind}_bytes", getattr(launch, f"{kind}_bytes") + moved)
        setattr(launch, f"{kind}_sectors", getattr(launch, f"{kind}_sectors") + sectors)
        row.run_bytes = min(row.run_bytes or run, run)
        row.vector_bytes = min(row.vector_bytes or vector, vector)

    def _again(self, key: tuple, access, linear: int, step: int = 0, times: int = 1) -> int:
        """The bytes of accesses, each of them `step` further on than the one before, that this program has moved already, as far
        as their lanes are a grid. A single number counts once: it stays in a register or in L1, and the code is often simpler where
        it is loaded where it is used."""
        tile = access.tile
        if tile is None or access.pointers.size == 1:
            return 0
        if linear != self._program:
            self._program, self._made = linear, {}
        made = self._made.setdefault((key, tile[1:]), set())
        before = len(made)
        made.update(tile.start + step * number for number in range(times))
        sharing = math.prod(n for n, stride in zip(tile.extents, tile.strides, strict=True) if stride == 0)
        moved = access.lanes * access.width
        return times * moved - (len(made) - before) * (moved // sharing)

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
            self.launch.recording.dots = True

    def turn_begins(self) -> None:
        """Of a loop: there is nothing to remember."""

    def repeat(self, turn: tuple[list, int], steps: list[int], times: int, before, after) -> None:
        """A turn of a loop is done so many times more, each access by its step further on each time."""
        accesses, flops = turn
        self.launch.recording.repeat(steps, times)
        for (access, linear, *place), step in zip(accesses, steps, strict=True):
            key, row, _ = self._place(access, *place)
            # Where in a sector they begin repeats itself after so many of them.
            period = SECTOR_BYTES // math.gcd(step, SECTOR_BYTES)
            some = [access.moved(step * number) for number in range(1, min(period, times) + 1)]
            sectors = [each.sectors for each in some]
            every, rest = divmod(times, period)
            runs, vectors = zip(*(each.runs for each in some), strict=True)
            row.count += times
            self._count(row, access, linear, times, every * sum(sectors) + sum(sectors[:rest]), min(runs), min(vectors))
            row.again_bytes += self._again(key, some[0], linear, step, times)
        if self.trace.detail:
            for number in range(1, times + 1):
                for (access, linear, _, line), step in zip(accesses, steps, strict=True):
                    self._keep(access.moved(step * number), access.parameter.name, linear, line)
        if flops:
            self.dot(flops * times)

    def rewind(self, state) -> None:
        pass

    def window(self) -> int:
        """After the sampled programs have run: of how many programs, from the first on, to look at the beginning."""
        return caches.window(self.launch.recording, self.trace.gpu)

    def unwritten(self, fault) -> None:
        """The launch read what nobody has written."""
        self.trace.unwritten.append(fault)
        if self.trace.raises:
            raise fault

    def disorder(self, fault) -> None:
        """Two threads of one program use one address, and no barrier stands between them."""
        self.trace.disorder.append(fault)
        if self.trace.raises:
            raise fault

    def unknown(self, fault) -> None:
        """What the launch moves depends on numbers that nobody knows."""
        if fault.why != "atomic":
            raise fault
        if str(fault) not in self.launch.assumed:
            self.launch.assumed.append(str(fault))

    def wrapped(self, fault) -> None:
        """An offset begins at 0 again: it is counted where it leads."""

    def starts(self, linear: int) -> np.ndarray | None:
        """Where the first accesses of a program of the window begin, if they are those of the others."""
        return self.launch.recording.starts(linear)

    def inferred(self, radices: list[int], probes: list[int], others: list[int], turns: list[list[int]]) -> bool:
        """Whether it is known from the first accesses of `probes` where those of `others` begin; then they are noted, and these
        programs need not run. `turns`: of each probe, those that its loops would have."""
        return self.launch.recording.infer(radices, probes, others, turns)

    def _reads_integers(self) -> bool:
        for site in self.launch.recording.sites:
            tensor = self.launch.arguments.get(site.tensor)
            tensor = getattr(tensor, "base", None) if not isinstance(tensor, torch.Tensor) else tensor
            floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if site.kind == "load" and not floats:  # what an atomic answers is unknown in a sample
                return True
        return False

    def cut(self, linear: int) -> None:
        """A program of the window was ended early."""
        self.launch.recording.cut.add(linear)

    def end(self) -> None:
        """The launch is over: a sampled one is scaled to the whole grid."""
        launch = self.launch
        if launch.sampled is None:
            return
        launch.sampled = launch.recording.call.sampled
        programs, before = zip(*self._begun, strict=True)
        stands_for = launch.recording.stands_for = places.stand_for(launch.recording, programs)
        moved = [self._moved.get(program, 0) for program in programs]
        even = len({*stands_for.values()}) == 1  # else it is known how much all programs have to do
        if even and launch.sampled < launch.programs and max(moved) > 1.1 * min(moved) and self._reads_integers():
            mean = sum(moved) / len(moved)
            # The mean of all programs is probably within two standard errors of the sample's; with two programs the range is what
            # they moved.
            error = 2 * statistics.stdev(moved) / len(moved) ** 0.5 / mean
            launch.spread = max(min(moved) / mean, 1 - error), min(max(moved) / mean, 1 + error)
        for (number, name), last in self._counts().items():
            own = np.diff([*(counts.get((number, name), 0) for counts in before), last]).tolist()
            total = sum(stands_for[program] * count for program, count in zip(programs, own, strict=True))
            setattr(launch if number < 0 else launch.accesses[number], name, round(total))


_LAUNCH_COUNTS = *(f"{kind}_{what}" for kind in ("load", "store", "atomic") for what in ("bytes", "sectors")), "flops"
_ACCESS_COUNTS = ("count", "lanes", "bytes", "sectors", "again_bytes")


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
        on_launch: Callable[..., object] | None = None,
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
        self.disorder: list[WarpFault] = []
        self.events: list[Launch | TorchOp] = []
        self._marks: dict[int, _Marks] = {}
        self._mode = CountOps(self.events)

    def __enter__(self) -> Trace:
        if layer is not None:
            layer.install()
            launches.watch(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._mode.__exit__(*exc_info)
        if layer is not None:
            launches.unwatch(self)
            if not launches.watched():
                bounds.forget_allocations()

    def begin(self, call: Any) -> _Recorder:
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
            options=call.options, gpu=self.gpu.key, sampled=None if self.dry else call.sampled, recording=Recording(call),
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

    def rows(self, caches: bool = False) -> list[dict[str, Any]]:
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

    def dataframe(self, caches: bool = False) -> pandas.DataFrame:
        """`rows` as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(self.rows(caches))

    def _table(self, caches: bool = False) -> tuple[list[str], list[list[str]]]:
        """Column titles and rows; equal steps in a row share one line, steps that move nothing have none. Atomics have a column
        where there are any."""
        kinds = (
            ["load", "store", "atomic"] if any(launch.atomic_sectors for launch in self.launches) else ["load", "store"]
        )
        titles = [
            "step",
            "times",
            "programs",
            "read (bytes)",
            "written (bytes)",
            *(f"{kind} sectors" for kind in kinds),
        ]
        titles += ["dot (FLOP)", *(_CACHE_COLUMNS.values() if caches else ())]
        rows: list[list] = []
        for e in self.events:
            more: list[int | None] = [None] * len(_CACHE_COLUMNS) if caches else []
            if isinstance(e, Launch):
                how = " (not run)" if e.dry else "" if e.sampled is None else f" ({e.sampled} run)"
                name = f"{e.kernel}{list(e.grid)}{how}"
                sectors = [getattr(e, f"{kind}_sectors") for kind in kinds]
                counts = [e.programs, e.read_bytes, e.write_bytes, *sectors, e.flops]
                if caches and not e.dry:
                    more = [getattr(e.traffic(), column) for column in _CACHE_COLUMNS]
            elif e.read_bytes or e.write_bytes:
                name, counts = e.name, [None, e.read_bytes, e.write_bytes, *[None] * len(kinds), None]
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
        cells = [[cell(c) for c in row] for row in [*table, ["total", *total]]]
        return titles, cells

    def report(self, caches: bool = False) -> str:
        """The steps of the block and their totals as an aligned text table. `caches` adds, for the launches, what the
        caches of the trace's GPU make of them; each launch is taken to find them cold."""
        return text_table(*self._table(caches))

    def __repr__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        return html_table(*self._table())


_CACHE_COLUMNS = {
    "l2_read_sectors": "L2 read sectors",
    "l2_write_sectors": "L2 write sectors",
    "dram_read_bytes": "DRAM read (bytes)",
    "dram_write_bytes": "DRAM written (bytes)",
}


def trace(
    dry: bool = False,
    detail: bool = False,
    on_launch: Callable[..., object] | None = None,
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
    sample     run that many programs of each launch, spread over it, or more (64 at most) where the first ones differ, and scale
               what they count to the whole grid. Nothing is computed: floats load as 0 and stores are dropped, so tensors of
               any size cost nothing, meta tensors (torch.empty(..., device="meta")) and untouched torch.empty alike. Integers
               in memory are read, since they may be indices, or a mask or a bound. UnknownFault, a ValueError, where one of
               these depends on integers of a meta tensor, or on floats; where it depends on the answer of an atomic,
               `launch.assumed` says so. Loops that wait for what another program stores may not end.

    raises     whether a launch that reads what nobody has written (of a torch.empty made in the block) raises
               UnwrittenFault when it ends, and one in which threads of a program race WarpFault; `t.unwritten` and
               `t.disorder` list these faults either way

    Where there is a GPU, each launch is interpreted on copies of its tensors first and then runs.
    Blocks nest: an inner block's work counts in the outer one too. Raises MemoryFault and RaceFault where a kernel
    leaves its tensors or programs collide, UnwrittenFault, ValueError for a grid too large for `detail` and for an unknown GPU.
    """
    return Trace(dry=dry, detail=detail, on_launch=on_launch, gpu=gpu, sample=sample, raises=raises)
