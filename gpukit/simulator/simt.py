"""A GPU's threads without a GPU: blocks, warps and lanes, and what every warp instruction costs.

    def double(t, x, y):
        i = t.index                        # one number a thread
        with t.where(i < len(x)):          # the other lanes sit out
            y[i] = 2 * x[i]

    run = simt.launch(double, x, y, grid=8, block=128)
    print(run)                             # instruction by instruction: lanes, sectors, lines, passes

A kernel is a plain Python function of `t`, a `Threads`, and of NumPy arrays. It is called once; every value in it is a
vector with one element a thread, kept as [warps, 32]. One arithmetic operation on such values is one instruction of every
warp that has an active lane, one index into an array is one load or store. The rules, and where they are written:

- 32 threads with consecutive numbers are a warp (threads are numbered along x first). A warp issues one instruction at a
  time for its active lanes; where lanes disagree on a branch, it issues both sides.
  https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#simt-architecture
- A load or store of a warp moves whole sectors of 32 bytes, each once, however many of its lanes want it.
  https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#coalesced-access-to-global-memory
- A cache line is 128 bytes, four sectors; a warp looks up every line it touches.
  https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html#memory-tables
- Shared memory has 32 banks, four bytes wide. Lanes that want different words of one bank take turns, a pass each; lanes
  that want the same word share it.
  https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#shared-memory-5-x

What it leaves out: time, caches, the order of warps (here all of them run in step; on a GPU they do not), and whatever the
compiler would improve. Arrays begin on 256 bytes, as a GPU's allocations do, and views keep their place in them.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpukit import tables

WARP = 32
SECTOR_BYTES = 32
LINE_BYTES = 128
BANKS = 32
BANK_BYTES = 4
MAX_BLOCK_THREADS = 1024
MAX_THREADS = 1 << 21  # of a launch: each costs 8 bytes a value

# Cycles from a load to its value on an otherwise idle A100: Abdelkhalik et al. 2022, table IV, https://arxiv.org/abs/2208.11174
LATENCY_CYCLES = {"shared memory (store)": 19, "shared memory (load)": 23, "L1": 33, "L2": 200, "global memory": 290}


class SimtError(Exception):
    """The kernel does what a GPU would punish: a stray index, a misaligned vector, a race, a barrier in a branch."""


# ---- what one warp instruction costs -----------------------------------------------------------------------------------


def distinct(addresses: np.ndarray, unit: int, active: np.ndarray | None = None) -> np.ndarray:
    """How many units of `unit` bytes the active lanes of each warp touch: [..., lanes] byte addresses -> [...]."""
    units = np.asarray(addresses, dtype=np.int64) // unit
    if active is not None:
        units = np.where(active, units, -1)
    units = np.sort(units, axis=-1)
    new = np.concatenate([units[..., :1] >= 0, (units[..., 1:] != units[..., :-1]) & (units[..., 1:] >= 0)], axis=-1)
    return new.sum(axis=-1)


def sectors(addresses: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
    """32-byte sectors that each warp moves. Addresses are multiples of the access's width, 16 bytes at most."""
    return distinct(addresses, SECTOR_BYTES, active)


def bank_passes(addresses: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
    """Passes over shared memory that each warp needs: the most distinct words that its lanes want of one bank."""
    words = np.asarray(addresses, dtype=np.int64) // BANK_BYTES
    live = np.ones(words.shape, dtype=bool) if active is None else np.broadcast_to(active, words.shape)
    most = np.zeros(words.shape[:-1], dtype=np.int64)
    for bank in range(BANKS):
        most = np.maximum(most, distinct(words, 1, live & (words % BANKS == bank)))
    return most


WORD_BYTES = 4


@dataclass(frozen=True)
class GlobalLoad:
    """What one load of a warp asks of global memory. `wanted`: word of four bytes -> the lanes that want some of it;
    `moved`: the words of the sectors that come; `asked_bytes`: distinct bytes that lanes want."""

    wanted: dict[int, list[int]]
    moved: set[int]
    asked_bytes: int
    sectors: int
    lines: int


def global_load(addresses: np.ndarray, width: int) -> GlobalLoad:
    """Of the active lanes' byte addresses, multiples of `width`, the bytes that each of them loads."""
    wanted: dict[int, list[int]] = {}
    for lane, address in enumerate(np.asarray(addresses).tolist()):
        for word in range(address // WORD_BYTES, (address + width - 1) // WORD_BYTES + 1):
            wanted.setdefault(word, []).append(lane)
    each = SECTOR_BYTES // WORD_BYTES
    moved = {word // each * each + i for word in wanted for i in range(each)}
    asked = int(distinct(addresses, width)) * width
    return GlobalLoad(wanted, moved, asked, int(sectors(addresses)), int(distinct(addresses, LINE_BYTES)))


@dataclass(frozen=True)
class SharedLoad:
    """What one load of a warp asks of shared memory. `wanted`: word -> its lanes; `turn`: word -> the pass, from 1, in which
    its bank hands it out to all of them, if each bank begins with its first word."""

    wanted: dict[int, list[int]]
    turn: dict[int, int]

    @property
    def banks(self) -> int:
        return len({word % BANKS for word in self.turn})

    @property
    def passes(self) -> int:
        return max(self.turn.values(), default=0)


def shared_load(words: np.ndarray) -> SharedLoad:
    """Of the words of four bytes that the lanes want, by their numbers from the beginning of shared memory."""
    wanted: dict[int, list[int]] = {}
    for lane, word in enumerate(np.asarray(words).tolist()):
        wanted.setdefault(word, []).append(lane)
    turn: dict[int, int] = {}
    for word in sorted(wanted):
        turn[word] = 1 + max((turn[other] for other in turn if other % BANKS == word % BANKS), default=0)
    return SharedLoad(wanted, turn)


# ---- values --------------------------------------------------------------------------------------------------------------


class Lanes(np.ndarray):
    """One value a thread, [warps, 32]. Arithmetic counts as instructions.

    `v += w` and `v[...] = w` change active lanes only. `v = v + w` makes a new value for all lanes, active or not.
    """

    def __array_finalize__(self, source: Any) -> None:
        self.threads = getattr(source, "threads", None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        plain = [_plain(value) for value in inputs]
        threads = next(value.threads for value in (*inputs, *(out or ())) if isinstance(value, Lanes))
        if method != "__call__" or threads is None:  # a reduction over lanes is the host looking on, no instruction
            return getattr(ufunc, method)(*plain, out=tuple(map(_plain, out)) if out else None, **options)
        threads._issue("arithmetic")
        with np.errstate(all="ignore"):  # inactive lanes hold anything
            if out is None:
                return threads._lanes(ufunc(*plain, **options))
            result = ufunc(*plain, **options)
            np.copyto(_plain(out[0]), result, where=_spread(threads.active, result), casting="same_kind")
            return out[0]

    def __array_function__(self, function, types, args, options):
        if function is not np.where or self.threads is None:
            return super().__array_function__(function, types, args, options)
        self.threads._issue("arithmetic")
        return self.threads._lanes(np.where(*map(_plain, args)))

    def __setitem__(self, key, value) -> None:
        if key is not Ellipsis or self.threads is None:
            raise TypeError(f"line {_line()}: a value of the threads is set as a whole: v[...] = new")
        self.threads._issue("arithmetic")
        np.copyto(_plain(self), _plain(value), where=_spread(self.threads.active, self), casting="same_kind")

    def __bool__(self) -> bool:
        raise TypeError(
            f"line {_line()}: lanes may disagree on this: branch with `with t.where(condition):`, loop with `t.range`"
        )

    def __index__(self) -> int:
        raise TypeError(
            f"line {_line()}: the threads' values index global and shared memory only: NumPy arrays and tensors on the CPU that "
            "simt.launch was given, and t.shared(...); a list is passed to the kernel as it is"
        )


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Lanes) else value


def _spread(active: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The active lanes, for a value or for a vector of elements a lane."""
    return active if np.ndim(value) <= 2 else active[..., None]


class Dim(NamedTuple):
    x: Any
    y: Any


class Threads:
    """All threads of a launch. `thread`, `block`: their coordinates (.x, .y); `index`: block.x * block_dim.x + thread.x;
    `lane`: 0 to 31. These stand in registers and cost nothing. `block_dim` and `grid_dim` are plain numbers."""

    def __init__(self, grid: Dim, block: Dim, detail: bool):
        self.grid_dim, self.block_dim = grid, block
        threads, blocks = block.x * block.y, grid.x * grid.y
        self.blocks, self.warps_per_block = blocks, -(-threads // WARP)
        in_block = np.arange(self.warps_per_block * WARP)
        shape = (blocks * self.warps_per_block, WARP)
        number = np.tile(in_block, blocks).reshape(shape)
        of_block = np.repeat(np.arange(blocks), in_block.size).reshape(shape)
        self.exists = self.active = number < threads  # the last warp of a block may not be full
        self.of_block = of_block
        self.run = Run(blocks, threads, shape[0], detail)
        self.thread = Dim(self._lanes(number % block.x), self._lanes(number // block.x))
        self.block = Dim(self._lanes(of_block % grid.x), self._lanes(of_block // grid.x))
        self.index = self._lanes(_plain(self.block.x) * block.x + _plain(self.thread.x))
        self.lane = self._lanes(np.broadcast_to(np.arange(WARP), shape))
        self._shared: list[Shared] = []

    def _lanes(self, values: Any) -> Lanes:
        lanes = np.array(values).view(Lanes)
        lanes.threads = self
        return lanes

    def full(self, value: float, dtype: Any = np.float32) -> Lanes:
        """A value that is the same in every thread to begin with, for sums and counters: `acc = t.full(0.0)`."""
        return self._lanes(np.full(self.active.shape, value, dtype=dtype))

    @contextmanager
    def where(self, condition: Lanes) -> Iterator[None]:
        """A branch: inside the block only the lanes for which `condition` holds are active. Its other side is another
        `with t.where(~condition)`; a warp issues each side in which it has an active lane."""
        outer = self.active
        self.active = outer & _plain(condition)
        try:
            yield
        finally:
            self.active = outer

    def range(self, rounds: Lanes) -> Iterator[int]:
        """A loop with as many rounds as each lane says: `for k in t.range(n):`. Lanes leave one by one, the warp goes on
        until its last lane has left; each round issues one comparison."""
        outer = self.active
        k = 0
        try:
            while True:
                self._issue("arithmetic")
                self.active = self.active & (k < _plain(rounds))
                if not self.active.any():
                    return
                yield k
                k += 1
        finally:
            self.active = outer

    def shared(self, *shape: int, dtype: Any = np.float32) -> Shared:
        """Shared memory of that shape for each block, uninitialised. Elements have 1, 2 or 4 bytes."""
        array = Shared(self, shape, np.dtype(dtype), f"shared {len(self._shared)}" if self._shared else "shared")
        self._shared.append(array)
        return array

    def sync(self) -> None:
        """A barrier: no thread of a block goes on before all of them are here. Raises SimtError inside a branch."""
        if (self.active != self.exists).any():
            raise SimtError(f"line {_line()}: t.sync() in a branch that not every thread of the block takes")
        self._issue("barrier")
        for array in self._shared:
            array.settle()

    def _issue(self, kind: str, array: str = "", addresses: np.ndarray | None = None, width: int = 0) -> Instruction:
        """Count one instruction for every warp with an active lane."""
        instruction = self.run.at(_line(), kind, array)
        instruction.issued += int(self.active.any(axis=-1).sum())
        instruction.lanes += int(self.active.sum())
        instruction.bytes += int(self.active.sum()) * width
        if self.run.detail:
            self.run.steps.append(Step(instruction, self.active.copy(), addresses, width))
        return instruction


def _line() -> int:
    """The line of the kernel, or of a function that it calls, from which we were called."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_lineno


# ---- memory ------------------------------------------------------------------------------------------------------------


class _Array:
    """An array that threads index, with one index a dimension; one less, and a thread moves a vector of the last one."""

    def __init__(self, threads: Threads, data: np.ndarray, name: str):
        self.threads, self.data, self.name = threads, data, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __len__(self) -> int:
        return self.shape[0]

    def _at(self, key: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray, int]:
        """One index a dimension, 0 in inactive lanes; byte addresses; bytes that a lane moves."""
        keys = key if isinstance(key, tuple) else (key,)
        active, shape, strides = self.threads.active, self.shape, self._strides()
        vector = len(keys) == len(shape) - 1 and strides[-1] == self.data.itemsize
        if len(keys) != len(shape) and not vector:
            raise IndexError(f"line {_line()}: {self.name} has {len(shape)} dimensions, got {len(keys)} indices")
        at = tuple(np.broadcast_to(_plain(k), active.shape) for k in keys)
        for dimension, index in enumerate(at):
            stray = active & ((index < 0) | (index >= shape[dimension]))
            if stray.any():
                lane = tuple(np.argwhere(stray)[0])
                where = f"line {_line()}: {self.name}[{', '.join(str(i[lane]) for i in at)}]"
                thread = lane[0] % self.threads.warps_per_block * WARP + lane[1]
                raise SimtError(
                    f"{where} is outside {self.name} {list(shape)}, in thread {thread} of block "
                    f"{self.threads.of_block[lane]}; {int(stray.sum())} threads do that"
                )
        at = tuple(np.where(active, index, 0) for index in at)
        addresses = sum(index * stride for index, stride in zip(at, strides, strict=False)) + self._start()
        width = self.data.itemsize * (shape[-1] if vector else 1)
        if vector and (width not in (2, 4, 8, 16) or (active & (addresses % width != 0)).any()):
            raise SimtError(
                f"line {_line()}: {self.name} moves {width} bytes a thread from an address that is no multiple"
            )
        return at, addresses, width

    def __getitem__(self, key: Any) -> Lanes:
        at, addresses, width = self._at(key)
        self._count("load", addresses, width)
        value = self.data[self._whole(at)]
        return self.threads._lanes(np.where(_spread(self.threads.active, value), value, value.dtype.type(0)))

    def __setitem__(self, key: Any, value: Any) -> None:
        at, addresses, width = self._at(key)
        self._count("store", addresses, width)
        active, whole = self.threads.active, self._whole(at)
        shape = active.shape + self.shape[len(at) :]
        self.data[tuple(i[active] for i in whole)] = np.broadcast_to(_plain(value), shape)[active]


class Global(_Array):
    """A NumPy array in global memory; `x.T`, `x[::2]` and other views keep their strides and their place. `begin`: how many
    bytes after the beginning of its memory it starts, where the array itself does not say."""

    def __init__(self, threads: Threads, data: np.ndarray, name: str, begin: int | None = None):
        super().__init__(threads, data, name)
        self.begin = begin

    def _strides(self) -> tuple[int, ...]:
        return self.data.strides

    def _start(self) -> int:
        if self.begin is not None:
            return self.begin
        root = self.data
        while isinstance(root.base, np.ndarray):
            root = root.base
        return self.data.__array_interface__["data"][0] - root.__array_interface__["data"][0]

    def _whole(self, at):
        return at

    def _count(self, kind: str, addresses: np.ndarray, width: int) -> None:
        instruction = self.threads._issue(kind, self.name, addresses, width)
        instruction.sectors += int(sectors(addresses, self.threads.active).sum())
        instruction.lines += int(distinct(addresses, LINE_BYTES, self.threads.active).sum())


class Shared(_Array):
    """One copy a block. Between two barriers no warp may touch what another warp wrote, nor write what it read."""

    NOBODY, MANY = -1, -2

    def __init__(self, threads: Threads, shape: tuple[int, ...], dtype: np.dtype, name: str):
        if dtype.itemsize not in (1, 2, 4):
            raise ValueError(f"line {_line()}: shared: dtype must have 1, 2 or 4 bytes an element, got {dtype}")
        super().__init__(threads, np.zeros((threads.blocks, *shape), dtype=dtype), name)
        self.settle()

    def settle(self) -> None:
        self.writer = np.full(self.data.shape, self.NOBODY)
        self.reader = np.full(self.data.shape, self.NOBODY)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[1:]

    def _strides(self) -> tuple[int, ...]:
        return self.data.strides[1:]

    def _start(self) -> int:
        return 0

    def _whole(self, at):
        return (self.threads.of_block, *at)

    def _at(self, key: Any):
        at, addresses, width = super()._at(key)
        if len(at) != len(self.shape):
            raise IndexError(f"line {_line()}: {self.name} has {len(self.shape)} dimensions, got {len(at)} indices")
        return at, addresses, width

    def __getitem__(self, key: Any) -> Lanes:
        self._touch(key, "reads")
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._touch(key, "writes")
        super().__setitem__(key, value)

    def _touch(self, key: Any, verb: str) -> None:
        """Note which warp touches what since the last barrier. Raises SimtError where two warps get in each other's way."""
        at, _, _ = self._at(key)
        active = self.threads.active
        place = tuple(i[active] for i in self._whole(at))
        warp = np.broadcast_to(np.arange(active.shape[0])[:, None], active.shape)[active]

        def by_another(mark: np.ndarray) -> np.ndarray:
            return (mark[place] != self.NOBODY) & (mark[place] != warp)

        clash = by_another(self.writer)
        if verb == "writes":
            clash |= by_another(self.reader)
            self.writer[place] = warp
            clash |= self.writer[place] != warp  # two warps write it in this very instruction
        else:
            others = by_another(self.reader)
            self.reader[place] = warp
            others |= self.reader[place] != warp
            self.reader[tuple(p[others] for p in place)] = self.MANY
        if clash.any():
            element = ", ".join(str(p[clash][0]) for p in place[1:])
            raise SimtError(
                f"line {_line()}: a warp {verb} {self.name}[{element}], which another warp of its block touches too; "
                "t.sync() must come between them"
            )

    def _count(self, kind: str, addresses: np.ndarray, width: int) -> None:
        instruction = self.threads._issue(f"shared {kind}", self.name, addresses, width)
        instruction.passes += int(bank_passes(addresses, self.threads.active).sum())


# ---- the result --------------------------------------------------------------------------------------------------------


@dataclass
class Instruction:
    """All executions of one kind of instruction on one line, on one array.

    issued   warp instructions; a warp without an active lane issues none
    lanes    their active lanes, summed; bytes: what these lanes asked for
    sectors, lines   of global memory; passes: over shared memory
    """

    line: int
    kind: str
    array: str
    issued: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    lines: int = 0
    passes: int = 0


@dataclass(frozen=True)
class Step:
    """One executed instruction, kept by launch(detail=True): active lanes and byte addresses, both [warps, 32]."""

    instruction: Instruction
    active: np.ndarray = field(repr=False)
    addresses: np.ndarray | None = field(repr=False)
    width: int


@dataclass
class Run:
    """What a launch cost: `instructions` in the order of their first execution, and sums over them."""

    blocks: int
    threads_per_block: int
    warps: int
    detail: bool = False
    file: str = ""
    instructions: list[Instruction] = field(default_factory=list, repr=False)
    steps: list[Step] = field(default_factory=list, repr=False)

    def at(self, line: int, kind: str, array: str) -> Instruction:
        for known in self.instructions:
            if (known.line, known.kind, known.array) == (line, kind, array):
                return known
        self.instructions.append(Instruction(line, kind, array))
        return self.instructions[-1]

    def total(self, what: str, *kinds: str) -> int:
        """The sum of a field over instructions of these kinds (default: all): total("sectors", "load")."""
        return sum(getattr(i, what) for i in self.instructions if not kinds or i.kind in kinds)

    @property
    def issued(self) -> int:
        return self.total("issued")

    @property
    def lanes_per_instruction(self) -> float:
        """Active lanes of an issued instruction on average; 32 where nothing diverges."""
        return self.total("lanes") / self.issued if self.issued else 0.0

    @property
    def sectors(self) -> int:
        return self.total("sectors")

    @property
    def lines(self) -> int:
        return self.total("lines")

    @property
    def bytes(self) -> int:
        """What lanes asked of global memory; 32 * sectors is what moved."""
        return self.total("bytes", "load", "store")

    @property
    def passes(self) -> int:
        return self.total("passes")

    @property
    def conflicts(self) -> int:
        """Passes over shared memory beyond one an instruction."""
        return self.passes - self.total("issued", "shared load", "shared store")

    def rows(self) -> list[tuple]:
        """(line, source, instruction, issued, lanes each, bytes, sectors, lines, passes): plain rows for a table."""
        return [
            (
                i.line, _short(linecache.getline(self.file, i.line)), f"{i.kind} {i.array}".strip(), i.issued,
                i.lanes / i.issued if i.issued else 0.0, i.bytes, i.sectors, i.lines, i.passes,
            )
            for i in self.instructions
        ]  # fmt: skip

    def __str__(self) -> str:
        titles = ("line", "source", "instruction", "issued", "lanes", "bytes", "sectors", "lines", "passes")
        sums = [f"{self.total(w):,}" for w in ("issued", "bytes", "sectors", "lines", "passes")]
        total = ["", "", "total", sums[0], f"{self.lanes_per_instruction:.1f}", *sums[1:]]
        rows = [[str(r[0]), r[1], r[2], f"{r[3]:,}", f"{r[4]:.1f}", *(f"{n:,}" for n in r[5:])] for r in self.rows()]
        head = f"{self.blocks:,} blocks of {self.threads_per_block:,} threads, {self.warps:,} warps"
        return "\n".join([head, *tables.aligned([titles, *rows, total], right=(0, *range(3, 9)))])


def _short(line: str, width: int = 60) -> str:
    line = line.strip()
    return line if len(line) <= width else line[: width - 4] + " ..."


def launch(
    kernel: Callable[..., None],
    *args: Any,
    grid: int | tuple[int, int],
    block: int | tuple[int, int],
    detail: bool = False,
) -> Run:
    """Run `kernel(t, *args)` with `grid` blocks of `block` threads and count what it does.

    args    NumPy arrays and PyTorch tensors on the CPU become global memory, which the kernel changes in place; anything else
            is passed as it is
    grid, block   a number, or (x, y)
    detail  also keep every executed instruction with its active lanes and addresses in `run.steps`
    Raises SimtError where a GPU would fault or race, ValueError for a block or a launch that is too large and for a tensor
    that is not on the CPU or of a type that NumPy has not.
    """
    grid_dim, block_dim = _dim("grid", grid), _dim("block", block)
    threads = block_dim.x * block_dim.y
    if threads > MAX_BLOCK_THREADS:
        raise ValueError(f"block must have at most {MAX_BLOCK_THREADS:,} threads, got {threads:,}")
    if threads * grid_dim.x * grid_dim.y > MAX_THREADS:
        raise ValueError(
            f"a launch here has at most {MAX_THREADS:,} threads, got {threads * grid_dim.x * grid_dim.y:,}"
        )
    t = Threads(grid_dim, block_dim, detail)
    t.run.file = inspect.getsourcefile(kernel) or ""
    names = [*inspect.signature(kernel).parameters][1:]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    kernel(t, *(_argument(t, a, n) for a, n in zip(args, names, strict=False)))
    return t.run


def _argument(threads: Threads, given: Any, name: str) -> Any:
    """What the kernel gets for an argument. PyTorch is not imported for it."""
    if isinstance(given, np.ndarray):
        return Global(threads, given, name)
    if not hasattr(given, "untyped_storage"):
        return given
    kind = str(given.dtype).removeprefix("torch.")
    if given.device.type != "cpu":
        raise ValueError(
            f"{name} is on the {given.device.type} device: a kernel here needs an array or a tensor on the CPU"
        )
    try:
        data = given.detach().numpy()
    except (TypeError, RuntimeError):
        raise ValueError(
            f"{name} is a tensor of {kind}, which NumPy has not: pass {name}.float(), or its bits as {name}.view(torch.int16)"
            if given.element_size() == 2
            else f"{name} is a tensor of {kind}, which NumPy has not: pass {name}.float()"
        ) from None
    return Global(threads, data, name, given.storage_offset() * given.element_size())


def _dim(name: str, value: int | tuple[int, int]) -> Dim:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 2 or not all(isinstance(n, int) and n >= 1 for n in sizes):
        raise ValueError(f"{name} must be a positive number or a pair (x, y) of them, got {value!r}")
    return Dim(*sizes, *(1,) * (2 - len(sizes)))
