"""A launch of a kernel in PTX, with all threads side by side: each instruction runs for the threads that have come to it, the
ones that are furthest behind first.

Every access is checked: it must lie in an array, at a multiple of its width. What moved is counted by instruction. What the
hardware decides by itself, such as the order of blocks, is one possible order here; two threads that write one address are
not told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpukit.simulator.cuda import compute
from gpukit.simulator.cuda.ptx import TYPES, Instruction, Kernel, PtxError, number

WARP, SECTOR, WIDEST = 32, 32, 16  # threads; bytes; bytes that one thread's access moves at most
MOST_STEPS = 20_000  # instructions, each for all threads that are at it
_MOST_THREADS = 1024  # of a block
_MOST_SHARED, _MOST_LOCAL = 48 << 10, 256 << 20  # bytes of a block that every GPU has; of all threads' own arrays
# Addresses: shared and local memory have windows of their own, and each array has one, in whose middle it begins.
_SHARED, _LOCAL, _WINDOW = 1 << 36, 1 << 38, 44
_SPACES = ("global", "const", "shared", "local", "param")


class KernelFault(Exception):
    """What a kernel does to memory that it must not do, or that it does not end.

    what    "out-of-bounds", "misaligned" or "endless"; of a few blocks on addresses alone also "stored-twice" or "unreached"
    kind    "load" or "store" of `tensor`, where there is one
    line    of the source
    """

    def __init__(self, what: str, message: str, line: int = 0, kind: str = "", tensor: str = ""):
        super().__init__(message)
        self.what, self.line, self.kind, self.tensor = what, line, kind, tensor


@dataclass
class Array:
    """An argument: its bytes, which a kernel may change, or only how many there are. `itemsize` is for messages. `stores`: of
    an array without bytes, where each store of a thread began, in bytes, and how many it moved."""

    name: str
    nbytes: int
    data: np.ndarray | None
    itemsize: int = 1
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def find_wrapped(self, width: int) -> KernelFault | None:
        """What numbers of threads or elements that were computed in 32 bits did to a result of which a few blocks stored their
        share: two threads stored one element, or none stored with `width` bytes, as most of it must be."""
        wide = [at for at, moved in self.stores if moved >= width]
        if not wide:
            text = f"{self.name}: no thread of the first or the last block stores {width} bytes at a time"
            return KernelFault("unreached", text, 0, "store", self.name)
        step = self.itemsize
        elements = [(at[:, None] + np.arange(0, moved, step)).ravel() // step for at, moved in self.stores]
        found, times = np.unique(np.concatenate(elements), return_counts=True)
        if (times == 1).all():
            return None
        text = f"{self.name}: {int((times > 1).sum()):,} elements, the first has the index {int(found[times > 1][0]):,}"
        return KernelFault("stored-twice", text, 0, "store", self.name)


@dataclass
class Access:
    """All that one load or store in the text moved: bytes, 32-byte sectors touched by warps, and bytes per thread and instruction."""

    kind: str
    array: str
    line: int
    width: int
    bytes: int = 0
    sectors: int = 0


@dataclass
class Launch:
    """What to run. `arguments` are Arrays and numbers; `blocks`: which of the grid's blocks run, all without."""

    kernel: Kernel
    grid: int
    threads: int
    arguments: list
    blocks: list[int] | None = None
    accesses: dict[tuple, Access] = field(default_factory=dict)

    def run(self) -> list[Access]:
        """What was moved, in the order of the text. Raises KernelFault, PtxError."""
        _Machine(self).run()
        return [self.accesses[key] for key in sorted(self.accesses)]


class _Machine:
    def __init__(self, launch: Launch):
        self.launch, self.kernel = launch, launch.kernel
        kernel, threads = launch.kernel, launch.threads
        if not 1 <= threads <= _MOST_THREADS or not 1 <= launch.grid < 1 << 31:
            raise PtxError(f"is launched with {launch.grid:,} blocks of {threads:,} threads, which no GPU takes")
        if kernel.shared.nbytes > _MOST_SHARED:
            raise PtxError(
                f"has {kernel.shared.nbytes:,} bytes of shared memory, and a block may have {_MOST_SHARED:,}"
            )
        blocks = np.arange(launch.grid) if launch.blocks is None else np.array(launch.blocks)
        self.threads = threads
        self.count = len(blocks) * threads
        if kernel.local.nbytes * self.count > _MOST_LOCAL:
            raise PtxError(f"has arrays of {kernel.local.nbytes:,} bytes in each thread")
        lane = np.arange(self.count)
        self.blocks = blocks
        self.warps = lane // threads * (_MOST_THREADS // WARP) + lane % threads // WARP
        one = np.ones(self.count, np.uint32)
        self.special = {
            "%tid.x": (lane % threads).astype(np.uint32), "%ntid.x": threads * one,
            "%ctaid.x": blocks.repeat(threads).astype(np.uint32), "%nctaid.x": np.uint32(launch.grid) * one,
            "%laneid": (lane % threads % WARP).astype(np.uint32), "%warpid": (lane % threads // WARP).astype(np.uint32),
            **{f"%{name}.{axis}": one * (name[0] == "n") for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "yz"},
        }  # fmt: skip
        self.arrays = [argument for argument in launch.arguments if isinstance(argument, Array)]
        held = Array("constant", kernel.data.nbytes, np.frombuffer(bytearray(kernel.initial), np.uint8))
        self.arrays.append(held)
        self.params: dict[str, np.ndarray] = {}
        numbers = iter(range(len(self.arrays)))
        for (kind, name), value in zip(kernel.params, launch.arguments, strict=True):
            if isinstance(value, Array):
                self.params[name] = np.array(_base(next(numbers)), np.uint64)
            else:
                self.params[name] = np.array(value).astype(TYPES[kind])
        self.symbols = {
            **{name: _base(len(self.arrays) - 1) + at for name, at in kernel.data.places.items()},
            **kernel.shared.places,
            **kernel.local.places,
        }
        self.shared = np.zeros((len(blocks), kernel.shared.nbytes), np.uint8)
        self.local = np.zeros((self.count, kernel.local.nbytes), np.uint8)
        self.registers: dict[str, np.ndarray] = {}  # as unsigned integers, predicates as bool

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        code, end = self.kernel.code, len(self.kernel.code)
        at = np.zeros(self.count, np.int64)
        waiting = np.zeros(self.count, bool)
        looping = 0  # the line from which threads went back last
        with np.errstate(all="ignore"):
            for _ in range(MOST_STEPS):
                ready = (at < end) & ~waiting
                if not ready.any():
                    if not waiting.any():
                        return
                    self._open_barrier(waiting, at >= end)
                    continue
                now = int(at[ready].min())
                on = np.flatnonzero(ready & (at == now))
                at[on] = now + 1
                instruction = code[now]
                if instruction.guard:
                    name, negated = instruction.guard
                    on = on[self._get(name, "pred", on) != negated]
                if not len(on):
                    continue
                name = instruction.op[0]
                if name == "bra":
                    to = self.kernel.labels[instruction.args[0]]
                    at[on] = to
                    looping = instruction.line if to <= now else looping
                elif name in ("ret", "exit"):
                    at[on] = end
                elif name in ("bar", "barrier"):
                    waiting[on] = True
                else:
                    try:
                        self._execute(instruction, on)
                    except KernelFault as fault:
                        fault.line = instruction.line
                        raise
                    except PtxError as error:
                        raise PtxError(str(error), instruction.line) from None
                    except (KeyError, IndexError, TypeError, ValueError):
                        said = f"has the instruction {'.'.join(instruction.op)}, which is not interpreted here"
                        raise PtxError(said, instruction.line) from None
        running = int(np.flatnonzero(at < end)[0])
        raise KernelFault(
            "endless", f"{self._who(running)} is still running after {MOST_STEPS:,} instructions", looping
        )

    def _open_barrier(self, waiting: np.ndarray, ended: np.ndarray) -> None:
        """Threads of a block wait for all the others; one that has ended will never come, which a GPU lets pass."""
        whole = (waiting | ended).reshape(-1, self.threads).all(1).repeat(self.threads)
        waiting[whole] = False

    def _who(self, lane: int) -> str:
        return f"thread {lane % self.threads} of block {self.blocks[lane // self.threads]}"

    def _execute(self, instruction: Instruction, on: np.ndarray) -> None:
        op, args = instruction.op, instruction.args
        if op[0] in ("ld", "ldu"):
            self._load(instruction, on)
        elif op[0] == "st":
            self._store(instruction, on)
        elif op[0] == "cvta":
            window = {"shared": _SHARED, "local": _LOCAL}.get(op[2] if op[1] == "to" else op[1], 0)
            address = self._get(args[1], "s64", on)
            self._set(args[0], address - window if op[1] == "to" else address + window, on)
        elif op[0] == "mov" and ("{" in args[0] or "{" in args[1]):
            self._pack(op[-1], args, on)
        elif op[0] == "shfl":
            self._shuffle(op, args, on)
        elif op[0] in ("membar", "fence", "prefetch", "prefetchu", "nanosleep", "discard"):
            pass
        elif op[0] not in ("call", "atom", "red"):
            kinds = compute.operand_types(op, len(args) - 1)
            values = [self._get(arg, kind, on) for arg, kind in zip(args[1:], kinds, strict=True)]
            kind = TYPES[compute.result_type(op)]
            result = np.broadcast_to(compute.compute(op, *values), on.shape)
            first, _, second = args[0].partition("|")
            self._set(first, result if result.dtype == kind else result.astype(kind), on)
            if second:  # of setp, the opposite
                self._set(second, ~result, on)
        else:
            raise PtxError(f"has the instruction {'.'.join(op)}, which is not interpreted here")

    # -- registers -----------------------------------------------------------------------------------------------------

    def _get(self, name: str, kind: str, on: np.ndarray) -> np.ndarray:
        """The operand as `kind`, one for each thread of `on`."""
        as_type = np.dtype(TYPES[kind])
        negated, bare = name.startswith("!"), name.lstrip("!")
        if bare in self.special:
            return self.special[bare][on].astype(as_type)
        if bare in self.symbols:
            return np.full(on.shape, self.symbols[bare], as_type)
        if not bare.startswith("%"):
            if as_type == np.bool_:
                return np.full(on.shape, bare != "0")
            return np.broadcast_to(number(bare, as_type), on.shape)
        if bare not in self.registers:
            if bare.rstrip("0123456789") not in self.kernel.registers:
                raise PtxError(f"reads {bare}, which is not interpreted here")
            raise PtxError("uses a variable that was never given a value")
        bits = self.registers[bare][on]
        if bits.dtype == np.bool_ or as_type == np.bool_:
            return ~bits if negated else bits
        return (bits if bits.itemsize == as_type.itemsize else bits.astype(f"u{as_type.itemsize}")).view(as_type)

    def _set(self, name: str, values: np.ndarray, on: np.ndarray) -> None:
        if name == "_":
            return
        bits = self.kernel.registers[name.rstrip("0123456789")] // 8
        if values.dtype != np.bool_:
            if values.itemsize != bits:  # wider or narrower, with its sign
                values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{bits}")
            values = np.ascontiguousarray(values).view(f"u{bits}")
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, values.dtype)
        self.registers[name][on] = values

    def _pack(self, kind: str, args: tuple[str, ...], on: np.ndarray) -> None:
        """mov.b64 {%r1, %r2}, %rd1 and back."""
        names = _names(args[0] if "{" in args[0] else args[1])
        part = f"b{8 * np.dtype(TYPES[kind]).itemsize // len(names)}"
        if "{" in args[1]:
            parts = np.stack([self._get(name, part, on) for name in names], 1)
            self._set(args[0], parts.view(TYPES[kind])[:, 0], on)
        else:
            parts = self._get(args[1], kind, on).copy().view(TYPES[part]).reshape(len(on), -1)
            for name, values in zip(names, parts.T, strict=True):
                self._set(name, values, on)

    def _shuffle(self, op: tuple[str, ...], args: tuple[str, ...], on: np.ndarray) -> None:
        first, _, second = args[0].partition("|")
        lane = (on % self.threads % WARP).astype(np.int64)
        by, clamp = (self._get(args[i], "u32", on).astype(np.int64) for i in (2, 3))
        segment, last = clamp >> 8 & 31, clamp & 31
        least, most = lane & segment, lane & segment | last & ~segment
        wanted = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | by & ~segment}[
            next(part for part in op if part in ("up", "down", "bfly", "idx"))
        ]
        there = wanted >= most if "up" in op else wanted <= most
        values = np.zeros(self.count, np.uint32)
        values[on] = own = self._get(args[1], "b32", on)
        source = np.where(there, on - lane + wanted, on)
        inside = source // self.threads == on // self.threads
        self._set(first, np.where(inside, values[np.where(inside, source, on)], own), on)
        if second:
            self._set(second, there, on)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _load(self, instruction: Instruction, on: np.ndarray) -> None:
        op, (to, place) = instruction.op, instruction.args
        kind = np.dtype(TYPES[op[-1]])
        if op[1] == "param":
            self._set(to, np.broadcast_to(self.params[place.strip("[]")], on.shape), on)
            return
        names = _names(to)
        found = self._move(instruction, "load", place, on, kind.itemsize * len(names), None).view(kind)
        for name, values in zip(names, found.T, strict=True):
            self._set(name, values, on)

    def _store(self, instruction: Instruction, on: np.ndarray) -> None:
        op, (place, names) = instruction.op, instruction.args
        values = np.stack([self._get(name, op[-1], on) for name in _names(names)], 1)
        self._move(instruction, "store", place, on, values.shape[1] * values.itemsize, values.view(np.uint8))

    def _move(self, instruction, kind: str, place: str, on: np.ndarray, width: int, values) -> np.ndarray:
        """Load, or store `values`, bytes [threads, width] each."""
        base, _, offset = place.strip("[]").replace(" ", "").partition("+")
        address = self._get(base, "s64", on) + int(offset or 0)
        space = next((part for part in instruction.op if part.partition("::")[0] in _SPACES), "").partition("::")[0]
        if not space:  # an address that may point anywhere
            space = {0: "", 1: "shared", 2: "local"}[int(np.digitize(address[0], (_SHARED, _LOCAL, 2 * _LOCAL))) % 3]
            address = address - {"": 0, "shared": _SHARED, "local": _LOCAL}[space]
        if space in ("shared", "local"):
            memory = self.shared if space == "shared" else self.local
            row = on // self.threads if space == "shared" else on
            self._aligned(kind, f"{space} memory", address, width, on)
            outside = (address < 0) | (address + width > memory.shape[1])
            self._inside(kind, f"{space} memory", outside, address, on, 1, memory.shape[1], width)
            where = address[:, None] + np.arange(width)
            if values is None:
                return memory[row[:, None], where]
            memory[row[:, None], where] = values
            return values
        which = (address >> _WINDOW) - 1
        found = np.zeros((len(on), width), np.uint8)
        for each in np.unique(which):
            here = which == each
            if not 0 <= each < len(self.arrays):
                raise KernelFault(
                    "out-of-bounds", f"{self._who(on[here][0])} uses an address of nothing", 0, kind, "any array"
                )
            array, at = self.arrays[each], address[here] - _base(each)
            outside = (at < 0) | (at + width > array.nbytes)
            self._inside(kind, array.name, outside, at, on[here], array.itemsize, array.nbytes, width)
            self._aligned(kind, array.name, at, width, on[here])
            if array is not self.arrays[-1]:
                self._count(instruction, kind, array.name, address[here], width, on[here])
            if array.data is None:
                if kind == "store":
                    array.stores.append((at, width))
                continue
            where = at[:, None] + np.arange(width)
            if values is None:
                found[here] = array.data[where]
            else:
                array.data[where] = values[here]
        return found

    def _inside(self, kind, name, outside, at, on, itemsize: int, nbytes: int, width: int) -> None:
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            many = f"{int(outside.sum()):,} threads, the first is " if outside.sum() > 1 else ""
            text = f"{many}{self._who(on[lane])}: {width} bytes at index {int(at[lane]) // itemsize:,}"
            text += f"{', before the start' if at[lane] < 0 else ''} of {name} [{nbytes // itemsize:,}]"
            raise KernelFault("out-of-bounds", text, 0, kind, name)

    def _aligned(self, kind, name, at, width: int, on) -> None:
        if (wrong := at % width != 0).any():
            lane = int(np.flatnonzero(wrong)[0])
            text = f"{self._who(on[lane])}: an access of {width} bytes at byte {int(at[lane]):,}, which is no multiple of {width}"
            raise KernelFault("misaligned", text, 0, kind, name)

    def _count(self, instruction: Instruction, kind: str, name: str, address, width: int, on) -> None:
        access = self.launch.accesses.setdefault(
            (instruction.line, kind, name, width), Access(kind, name, instruction.line, width)
        )
        access.bytes += width * len(on)
        access.sectors += len(np.unique(self.warps[on] << 40 | (address & (1 << _WINDOW) - 1) // SECTOR))


def _base(number: int) -> int:
    return (number + 1 << _WINDOW) + (1 << _WINDOW - 1)


def _names(operand: str) -> list[str]:
    return operand.strip("{}").replace(" ", "").split(",")
