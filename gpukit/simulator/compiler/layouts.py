"""Which thread holds which element of a block: the layouts that Triton's compiler chose, read from TTGIR.

A layout says for each (warp, lane, register) the element of the block that is there. All of them are linear over bits:
https://arxiv.org/abs/2505.23819 (Linear Layouts); the attributes are those of TritonGPUAttrDefs.td.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Layout:
    """One layout. `kind` is "blocked", "slice", "linear" or the name of another attribute; `text` the attribute itself.

    size_per_thread, threads_per_warp, warps_per_cta, order   of a blocked layout (of a slice: its parent's), else ()
    """

    kind: str
    text: str
    size_per_thread: tuple[int, ...] = ()
    threads_per_warp: tuple[int, ...] = ()
    warps_per_cta: tuple[int, ...] = ()
    order: tuple[int, ...] = ()  # dimensions, the fastest first
    sliced: tuple[int, ...] = ()  # dimensions of the parent that are gone
    linear: tuple[tuple[tuple[int, ...], ...], ...] = ()  # bases of register, lane and warp

    def _bases(self, shape: tuple[int, ...]) -> tuple[list, list, list]:
        """Bases of registers, lanes and warps: bit i of the register number adds bases[i] to the element's indices.
        A zero base means that both values of that bit hold the same element."""
        if self.kind == "linear":
            # A layout larger than the block, say of a row that is added to a tile: what lies beyond are copies.
            return tuple([tuple(x % n for x, n in zip(b, shape, strict=True)) for b in bases] for bases in self.linear)
        if self.kind not in ("blocked", "slice"):
            raise NotImplementedError(f"elements of a {self.kind} layout are not modelled")
        full = list(shape)
        for dim in sorted(self.sliced):
            full.insert(dim, 1)  # a slice is its parent for a tensor of size 1 there
        taken = [1] * len(full)

        def take(sizes) -> list:
            bases = []
            for dim in self.order:
                for _ in range(sizes[dim].bit_length() - 1):
                    inside = taken[dim] < full[dim]
                    bases.append(tuple(taken[dim] if d == dim and inside else 0 for d in range(len(full))))
                    taken[dim] *= 2 if inside else 1
            return bases

        registers, lanes, warps = take(self.size_per_thread), take(self.threads_per_warp), take(self.warps_per_cta)
        # A block larger than one such tile repeats it, in further registers.
        registers += take([max(1, n // t) for n, t in zip(full, taken, strict=True)])
        kept = [d for d in range(len(full)) if d not in self.sliced]
        registers, lanes, warps = ([tuple(b[d] for d in kept) for b in bases] for bases in (registers, lanes, warps))
        # A register that repeats another's element is not kept.
        return [b for b in registers if any(b)], lanes, warps

    def elements(self, shape: tuple[int, ...], redundant: int | None = None) -> np.ndarray:
        """Flat (row-major) index in the block of each element held: [warps, registers, 32 lanes], int64.

        redundant   what to put where a thread holds a copy of what another one holds, as a store leaves it out (for
                    instance -1); None keeps the copies. Raises NotImplementedError for layouts of tensor cores.
        """
        registers, lanes, warps = self._bases(tuple(shape))
        strides = np.cumprod([1, *shape[:0:-1]])[::-1]

        def offsets(bases) -> np.ndarray:
            steps = [int(np.dot(b, strides)) for b in bases]
            n = np.arange(1 << len(steps))
            total = np.zeros(n.shape, dtype=np.int64)
            for bit, step in enumerate(steps):
                total ^= np.where(n >> bit & 1, step, 0)
            return total

        held = offsets(warps)[:, None, None] ^ offsets(registers)[None, :, None] ^ offsets(lanes)[None, None, :]
        if redundant is not None:
            copies = np.zeros(held.shape, dtype=bool)
            for axis, bases in ((0, warps), (2, lanes)):
                bits = sum(1 << i for i, b in enumerate(bases) if not any(b))
                index = np.arange(held.shape[axis]) & bits != 0
                copies |= index.reshape([-1 if a == axis else 1 for a in range(3)])
            held = np.where(copies, redundant, held)
        return held

    def held(self, shape: tuple[int, ...]) -> int:
        """How many elements of a block each thread holds, copies of what others hold included. Raises as `elements`."""
        return 1 << len(self._bases(tuple(shape))[0])

    def instructions(self, shape: tuple[int, ...], per_thread: int) -> np.ndarray:
        """The elements that each instruction of each warp touches together when a thread moves `per_thread` elements at
        once: flat indices [instructions, 32 * per_thread], -1 for lanes that repeat another one's."""
        held = self.elements(shape, redundant=-1)
        warps, registers, lanes = held.shape
        per_thread = min(per_thread, registers)
        held = held.reshape(warps, registers // per_thread, per_thread, lanes).swapaxes(2, 3)
        return held.reshape(warps * (registers // per_thread), lanes * per_thread)


@dataclass(frozen=True)
class AccessLayout:
    """The layout of one load, store or atomic of a block, by source line.

    shape       of the block
    element     MLIR type of an element: "f16", "bf16", "f32", "i32"
    to          "registers", "shared memory" (cp.async) or "TMA" (a tile moved by one instruction: no layout)
    count       how many of the line are alike: 2 for tl.load(a) + tl.load(b)
    tensors     the kernel's arguments that they start from, as far as the code tells
    """

    kind: str
    file: str
    line: int
    shape: tuple[int, ...]
    element: str
    layout: Layout | None
    to: str
    count: int = 1
    tensors: tuple[str, ...] = ()

    @property
    def element_bytes(self) -> int:
        digits = re.search(r"\d+", self.element)
        return max(1, int(digits[0]) // 8) if digits else 1

    @cached_property
    def contiguous(self) -> int:
        """Elements that are next to each other in one thread's registers, along the fastest dimension."""
        layout = self.layout
        return layout.size_per_thread[layout.order[0]] if layout and layout.order else 1


_ALIAS = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", re.MULTILINE)
_LOC = re.compile(r"^(#loc\w*) = loc\((.*)\)\s*$", re.MULTILINE)
_OPS = (
    (re.compile(r"\btt\.load\b"), "load", "registers"),
    (re.compile(r"\btt\.store\b"), "store", "registers"),
    (re.compile(r"\btt\.atomic_\w+"), "atomic", "registers"),
    (re.compile(r"\bttg\.async_copy_global_to_local\b"), "load", "shared memory"),
    (re.compile(r"\bttng\.async_tma_(?:copy_global_to_local|gather)\b"), "load", "TMA"),
    (re.compile(r"\bttng\.async_tma_(?:copy_local_to_global|scatter|store)\b(?!_wait)"), "store", "TMA"),
    (re.compile(r"\bttng\.async_tma_reduce\b"), "atomic", "TMA"),
)
_POINTERS = re.compile(r"tensor<((?:\d+x)*)!tt\.ptr<([\w.]+)(?:, \d+)?>(?:, (#[\w.]+(?:<.*?>+)?))?>")
_DESCRIPTOR = re.compile(r"!tt\.tensordesc<(?:tensor<)?((?:\d+x)+)(\w+)")


def access_layouts(ttgir: str) -> list[AccessLayout]:
    """The layouts of all loads, stores and atomics of blocks; one entry for equal ones (copies of a pipelined loop)."""
    aliases = dict(_ALIAS.findall(ttgir))
    places = dict(_LOC.findall(ttgir))
    comes_from = _comes_from(ttgir)
    found: dict[AccessLayout, set[int]] = {}
    tensors: dict[AccessLayout, set[str]] = {}
    for line in ttgir.split("\n"):
        op = next((op for op in _OPS if op[0].search(line)), None)
        if op is None:
            continue
        _, kind, to = op
        file, number, column = _place(line, places)
        block = (_DESCRIPTOR if to == "TMA" else _POINTERS).search(line)
        if block is None:  # a scalar
            continue
        shape = tuple(int(n) for n in block[1].split("x") if n)
        layout = None if to == "TMA" else _layout(block[3] or "", aliases)
        access = AccessLayout(kind, file, number, shape, block[2], layout, to)
        found.setdefault(access, set()).add(column)
        tensors.setdefault(access, set()).add(_argument(line.partition(op[0].search(line)[0])[2], comes_from))
    return [
        replace(access, count=len(columns), tensors=tuple(sorted(tensors[access] - {""})))
        for access, columns in found.items()
    ]


_DEFINED = re.compile(r"^\s*(%[\w.]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$", re.MULTILINE)
_NAME = re.compile(r"%[\w.]+(?:#\d+)?")


def _comes_from(ttgir: str) -> dict[str, str]:
    """Each pointer, or block of them, and what it was made of: another one, or an argument of the kernel, which comes from
    itself. A result of a loop is named %0#1 and comes from what the loop began with."""
    found = {}
    for header in re.findall(r"^\s*tt\.func .*$", ttgir, re.MULTILINE):
        found.update((name, name) for name in re.findall(r"(%[\w.]+): !tt\.(?:ptr|tensordesc)", header))
    for name, op, rest in _DEFINED.findall(ttgir):
        if op in ("scf.for", "scf.while"):
            started = re.search(r"iter_args\((.*?)\) ->", rest) or re.search(r"\((.*?)\) :", rest)
            pairs = re.findall(r"(%[\w.]+) = (%[\w.]+(?:#\d+)?)", started[1]) if started else []
            for i, (inside, first) in enumerate(pairs):
                found[inside] = first
                found[f"{name}#{i}" if len(pairs) > 1 else name] = first
        elif "!tt.ptr" in rest:
            operands = _NAME.findall(rest)
            if op == "arith.select":  # the first one says which
                operands = operands[1:]
            if operands:
                found[name] = operands[0]
    return found


def _argument(operands: str, comes_from: dict[str, str]) -> str:
    """The argument that the pointers of an access, the first of its operands, start from; empty where that is not known."""
    first = _NAME.search(operands)
    name, seen = first[0] if first else "", set()
    while name in comes_from and name not in seen:
        seen.add(name)
        if comes_from[name] == name:
            return name[1:]
        name = comes_from[name]
    return ""


def _place(line: str, places: dict[str, str]) -> tuple[str, int, int]:
    """File, line and column of an operation: the innermost that is not Triton's own."""
    own = ("?", 0, 0)
    todo = re.findall(r"loc\((#loc\w*)\)", line)[-1:]
    while todo:
        text = places.get(todo.pop(0), "")
        if m := re.match(r'"([^"]+)":(\d+):(\d+)', text):
            own = m[1], int(m[2]), int(m[3])
            if "/triton/language/" not in own[0]:
                return own
        todo = re.findall(r"#loc\w*", text) + todo  # name(#loc), callsite(#inner at #outer)
    return own


def _numbers(name: str, text: str) -> tuple[int, ...]:
    m = re.search(rf"{name} = \[([\d, ]*)\]", text)
    return tuple(int(n) for n in m[1].split(",") if n.strip()) if m else ()


def _layout(text: str, aliases: dict[str, str]) -> Layout:
    text = aliases.get(text, text)
    kind = re.match(r"#ttg\.(\w+)<", text)
    kind = kind[1] if kind else "unknown"
    if kind == "blocked":
        fields = [_numbers(name, text) for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")]
        return Layout(kind, text, *fields)
    if kind == "slice":
        dim = int(re.search(r"dim = (\d+)", text)[1])
        parent = _layout(re.search(r"parent = (#[\w.]+(?:<.*>)?)\}>", text)[1], aliases)
        if parent.kind not in ("blocked", "slice"):
            return Layout("slice of " + parent.kind, text)
        gone = [d for d in range(len(parent.order)) if d not in parent.sliced][dim]
        fields = (parent.size_per_thread, parent.threads_per_warp, parent.warps_per_cta, parent.order)
        return Layout(kind, text, *fields, sliced=(*parent.sliced, gone))
    if kind == "linear":
        return Layout(kind, text, linear=tuple(_vectors(name, text) for name in ("register", "lane", "warp")))
    return Layout(kind, text)


def _vectors(name: str, text: str) -> tuple[tuple[int, ...], ...]:
    m = re.search(rf"{name} = \[((?:\[[\d, ]*\](?:, )?)*)\]", text)
    return tuple(tuple(int(n) for n in v.split(",")) for v in re.findall(r"\[([\d, ]+)\]", m[1])) if m else ()
