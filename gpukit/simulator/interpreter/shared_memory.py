"""Shared memory of a program in Gluon, and what goes on in it beside the warps.

Copies of the TMA unit and products of warpgroups take their time, and the warps go on meanwhile. Here they are in flight
until somebody waits for them, as long as the hardware may take: a copy from global memory lands when all have arrived at its
barrier and somebody waits for it, a copy to global memory reads its block until `store_wait`, a product its operands until
`warpgroup_mma_wait`, and before that its result holds NaN. Whoever touches a block too early gets a SynchronizationFault, and
so do groups of warps that all wait for one another.

Groups of warps (`gl.warp_specialize`) are threads that take turns: one runs until it has to wait, and in every other program
until it arrives at a barrier. Which one begins changes from program to program.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/ (mbarrier, cp.async.bulk.tensor, wgmma, the async proxy)
"""

import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import triton.language as tl

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.faults import SynchronizationFault, program_ids
from gpukit.simulator.interpreter.frames import line_in_kernel, where
from gpukit.simulator.interpreter.running import interpreter_module

LIMIT_BYTES = 227 * 1024  # what a program may have on an SM of Hopper


def number(value) -> int:
    """The integer in a constant, or in a tensor of one element."""
    return int(value.handle.data.item() if isinstance(value, tl.tensor) else getattr(value, "value", value))


def fault(what: str, place: tuple[str, int] | None = None) -> SynchronizationFault:
    """The fault `what`, a clause, in the program that runs."""
    memory = running.now.memory
    file, line = place or where()
    return SynchronizationFault(what=what, program=program_ids(memory.linear, memory.grid), file=file, line=line)


class Abandoned(BaseException):
    """Ends a group of warps whose program failed in another one."""


class Allocation:
    """What one call of gl.allocate_shared_memory got.

    writers   of each element the group of warps, counted from 1, whose write the async proxy (TMA unit, tensor cores) need
              not see yet; 0 for none, -1 where nobody has written
    barriers  by their place
    """

    def __init__(self, dtype, shape: Sequence[int]):
        storage = np.dtype(interpreter_module()._get_np_dtype(dtype))
        self.data = _nothing(storage, dtype, shape)
        self.writers = np.full(shape, -1, dtype=np.int8)
        self.barriers: dict[int, Barrier] = {}
        self.line = line_in_kernel()


def _nothing(storage: np.dtype, dtype, shape) -> np.ndarray:
    """What memory holds that nobody has written: NaN, or the largest integer."""
    if storage.kind == "f":
        value = np.nan
    elif dtype.is_floating():  # bits of bf16 and fp8
        value = 0x7FC0 if storage.itemsize == 2 else 0x7F
    else:
        value = np.iinfo(storage).max
    return np.full(shape, value, dtype=storage)


class Block:
    """A block in shared memory, or a part of one: gl.shared_memory_descriptor."""

    def __init__(self, allocation: Allocation, data: np.ndarray, writers: np.ndarray, dtype, layout):
        self.allocation, self.data, self.writers, self.dtype, self.layout = allocation, data, writers, dtype, layout
        self.shape = list(data.shape)
        self.type = SimpleNamespace(element_ty=dtype, shape=self.shape, layout=layout)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def _part(self, cut: Callable[[np.ndarray], np.ndarray]) -> "Block":
        data = cut(self.data)
        if not np.may_share_memory(data, self.data):
            raise ValueError(f"a block in shared memory of shape {self.shape} cannot be seen so without a copy")
        return Block(self.allocation, data, cut(self.writers), self.dtype, self.layout)

    def index(self, index) -> "Block":
        i = number(index)
        if not 0 <= i < self.shape[0]:
            raise fault(f"index {i} of a block in shared memory that has {self.shape[0]}")
        return self._part(lambda x: x[i])

    def slice(self, start, length, dim=0) -> "Block":
        start, length, dim = number(start), number(length), number(dim)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise fault(f"elements {start} to {start + length} of a block in shared memory that has {self.shape[dim]}")
        return self._part(lambda x: x[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order) -> "Block":
        return self._part(lambda x: x.transpose([number(axis) for axis in order]))

    def reshape(self, shape) -> "Block":
        return self._part(lambda x: x.reshape([number(n) for n in shape]))

    def load(self, layout=None) -> tl.tensor:
        program().read(self, "loads")
        handle = interpreter_module().TensorHandle(self.data.copy(), self.dtype)
        return tl.core.tensor(handle, tl.block_type(self.dtype, self.shape))

    def store(self, value) -> None:
        program().write(self, "stores to")
        if value.dtype.scalar != self.dtype or list(value.handle.data.shape) != self.shape:
            raise ValueError(
                f"a value of {value.dtype.scalar} {list(value.handle.data.shape)} for a block of {self.dtype} {self.shape}"
            )
        self.data[...] = value.handle.data
        self.writers[...] = program().group.number + 1

    def _keep_alive(self) -> None:
        pass

    def __str__(self) -> str:
        return f"a block {self.shape} of the allocation of line {self.allocation.line}"


class Barrier:
    """An mbarrier. A phase is over when all have arrived and all bytes that were announced have landed.

    parity    of the phase that goes on: 0 for the first
    missing   arrivals of this phase
    expected  bytes that were announced and have not landed
    landing   what lets the copies in flight land
    """

    def __init__(self, count: int, name: str):
        self.count = self.missing = count
        self.parity = self.expected = 0
        self.landing: list[Copy] = []
        self.name = name

    def arrive(self, count: int) -> None:
        self.over(1 - self.parity)  # copies may have landed meanwhile
        if count > self.missing:
            raise fault(f"arrives {count} times at {self.name}, where {self.missing} of {self.count} are missing")
        self.missing -= count
        self._turn()

    def over(self, parity: int) -> bool:
        """Whether the phase of that parity is over."""
        if self.missing == 0 and self.landing:
            for copy in self.landing:
                copy.land()
                self.expected -= copy.bytes
            self.landing = []
            self._turn()
        return self.parity != parity

    def _turn(self) -> None:
        if self.missing == 0 and self.expected == 0 and not self.landing:
            self.parity ^= 1
            self.missing = self.count

    def __str__(self) -> str:
        arrived = f"{self.count - self.missing} of {self.count} have arrived"
        bytes_ = f", {self.expected:,} announced bytes are not on their way" if self.expected else ""
        return f"{self.name}: {arrived}{bytes_}"


class Copy:
    """A copy from global memory that has not landed."""

    def __init__(self, block: Block, value: np.ndarray, bytes_: int):
        self.block, self.value, self.bytes = block, value, bytes_

    def land(self) -> None:
        self.block.data[...] = self.value.reshape(self.block.data.shape)
        program().copies.remove(self)


class Product:
    """A product of a warpgroup that nobody has waited for: `shown` becomes `result` when it is done."""

    def __init__(self, operands: list[Block], shown: np.ndarray, result: np.ndarray):
        self.operands, self.shown, self.result = operands, shown, result


class Group:
    """Warps that run one function; `products` and `stores` are what they have begun and not waited for."""

    def __init__(self, number: int, warps: int):
        self.number, self.warps = number, warps
        self.products: list[Product] = []
        self.stores: list[Block] = []
        self.waiting: tuple[Barrier, int] | None = None  # for that phase of it
        self.place: tuple[str, int] = "", 0
        self.turn = threading.Semaphore(0)
        self.finished = False

    def ready(self) -> bool:
        return not self.finished and (self.waiting is None or self.waiting[0].over(self.waiting[1]))

    def waits_for(self) -> str:
        barrier, parity = self.waiting
        return f"waits for phase {parity} of {barrier}"


class Program:
    """Shared memory and warps of the program that runs."""

    def __init__(self, linear: int, warps: int):
        self.linear, self.warps = linear, warps
        self.copies: list[Copy] = []
        self.allocations: list[Allocation] = []
        self.groups = [Group(0, warps)]
        self.group = self.groups[0]
        self.failed: BaseException | None = None

    # ---- memory
    def allocate(self, dtype, shape: list[int], layout) -> Block:
        allocation = Allocation(dtype, shape)
        self.allocations.append(allocation)
        total = sum(a.data.nbytes for a in self.allocations)
        if total > LIMIT_BYTES:
            raise fault(
                f"the program's blocks in shared memory take {total:,} bytes; an SM has {LIMIT_BYTES:,} for one"
            )
        return Block(allocation, allocation.data, allocation.writers, dtype, layout)

    def touch(self, block: Block, does: str) -> None:
        if any(np.may_share_memory(copy.block.data, block.data) for copy in self.copies):
            raise fault(f"{does} {block} before the copy into it has landed: nobody has waited for its barrier")

    def read(self, block: Block, does: str) -> None:
        """Some warp, tensor core or TMA unit is about to read the block."""
        self.touch(block, does)
        if (block.writers < 0).any():
            raise fault(f"{does} {block}, which nobody has written")

    def read_asynchronously(self, block: Block, does: str) -> None:
        self.read(block, does)
        if (block.writers > 0).any():
            raise fault(
                f"{does} {block}, which warps have written: without fence_async_shared it may see what was there before"
            )

    def write(self, block: Block, does: str) -> None:
        self.touch(block, does)
        for group in self.groups:
            for product in group.products:
                if any(np.may_share_memory(operand.data, block.data) for operand in product.operands):
                    raise fault(f"{does} {block} while a product still reads it: warpgroup_mma_wait comes first")
            if any(np.may_share_memory(source.data, block.data) for source in group.stores):
                raise fault(f"{does} {block} while a copy to global memory still reads it: store_wait comes first")

    def fence(self) -> None:
        for allocation in self.allocations:
            allocation.writers[allocation.writers == self.group.number + 1] = 0

    # ---- products
    def begin(self, operands: list[Block], shape, dtype, result: np.ndarray) -> np.ndarray:
        """A product has begun: what its result holds until it is done."""
        shown = _nothing(result.dtype, dtype, shape)
        self.group.products.append(Product(operands, shown, result))
        return shown

    def in_flight(self, data: np.ndarray) -> np.ndarray:
        """The result that `data` will hold, if it is a product's that is not done."""
        for product in self.group.products:
            if product.shown is data:
                return product.result
        return data

    def wait_for_products(self, but: int) -> None:
        done = len(self.group.products) - but
        for product in self.group.products[: max(done, 0)]:
            product.shown[...] = product.result
        self.group.products = self.group.products[max(done, 0) :]

    # ---- groups of warps
    def run(self, functions: list, arguments: list, warps: list[int]):
        """Each function in a group of warps of its own; what the first one returns."""
        if len(self.groups) > 1:
            raise ValueError("warp_specialize inside of warp_specialize")
        if self.group.products or self.group.stores:
            raise fault("warp_specialize begins while products or copies of the warps before are in flight")
        self.groups = [Group(i, n) for i, n in enumerate(warps)]
        results: dict[int, object] = {}
        threads = []
        for group, function, given in zip(self.groups, functions, arguments, strict=True):
            context = contextvars.copy_context()  # NumPy's errstate
            body = self._body(group, function, given, results)
            threads.append(threading.Thread(target=context.run, args=(body,), daemon=True))
        for thread in threads:
            thread.start()
        first = self.linear % len(self.groups)
        self.group = self.groups[first]
        self.group.turn.release()
        for thread in threads:
            thread.join()
        groups, self.groups = self.groups, [Group(0, self.warps)]
        self.group = self.groups[0]
        if self.failed is not None:
            raise self.failed
        for group in groups:
            self._end_of(group)
        return results[0]

    def _body(self, group: Group, function, given, results: dict):
        def body() -> None:
            group.turn.acquire()
            try:
                if self.failed is None:
                    results[group.number] = function(*given)
            except Abandoned:
                pass
            except BaseException as exc:
                self.failed = self.failed or exc
            group.finished = True
            try:
                self._pass_on(group)
            except SynchronizationFault as exc:
                self.failed = self.failed or exc
                self._pass_on(group)

        return body

    def _pass_on(self, group: Group) -> None:
        """Give the turn to a group that can go on; after a failure to each, to end it. Returns when it is `group`'s turn again,
        at once if that has finished."""
        later = self.groups[group.number + 1 :] + self.groups[: group.number + 1]
        for other in later:
            if other.ready() or (self.failed is not None and not other.finished):
                self.group = other
                if other is not group:
                    other.turn.release()
                    if group.finished:
                        return
                    group.turn.acquire()
                if self.failed is not None:
                    raise Abandoned
                return
        if not all(other.finished for other in self.groups):
            raise self._deadlock()

    def _deadlock(self) -> SynchronizationFault:
        waiting = [group for group in self.groups if not group.finished]
        clauses = [f"group {group.number}, line {group.place[1]}, {group.waits_for()}" for group in waiting]
        if len(self.groups) == 1:
            clauses = [waiting[0].waits_for()]
        return fault("; ".join(clauses) + "; nobody is left who could end this", waiting[0].place)

    def wait(self, barrier: Barrier, parity: int) -> None:
        if barrier.over(parity):
            return
        group = self.group
        group.waiting, group.place = (barrier, parity), where()
        self._pass_on(group)
        group.waiting = None

    def arrive(self, barrier: Barrier, count: int) -> None:
        """What waits for this arrival goes on at once in every other program, and as late as possible in the rest: mistakes in
        what comes before an arrival show in the former, and in what comes behind a wait in the latter."""
        barrier.arrive(count)
        if self.linear % 2 == 0:
            self._pass_on(self.group)

    def end(self) -> None:
        """The program is over."""
        self._end_of(self.group)

    def _end_of(self, group: Group) -> None:
        if group.stores:
            raise fault("warps end while a copy to global memory still reads shared memory: store_wait comes first")
        if group.products:
            raise fault("warps end while a product is in flight: warpgroup_mma_wait comes first")


def program() -> Program:
    """The program that runs; made by the first of its calls that asks."""
    now = running.now
    if now.shared is None or now.shared.linear != now.memory.linear:
        now.shared = Program(now.memory.linear, now.num_warps)
    return now.shared
