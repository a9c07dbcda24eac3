"""What a chain of operations moves through memory, and what happens to it when neighbors share a kernel.

    from gpukit.accounting import fusion as graphs
    from gpukit.widgets.fusion import fusion

    fusion(graphs.sin_cos(1 << 26))
    fusion([graphs.softmax(4096, 4096), graphs.gelu(1 << 26)], gpu="h100", fused=(True, True, False, False))

Numbers come from gpukit.accounting.fusion; this draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
import traitlets

from gpukit import hardware
from gpukit.accounting.fusion import Graph, Kernel, Plan
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Shape, Words
from gpukit.widgets.view import WRAP, View, button, menu

MAX_OPS, MAX_TENSORS = 9, 16
_MARGIN, _LEFT, _RIGHT = 10, 126, 790  # names stand between the first two, the picture between the last two
_ROW = 26  # pixels from one tensor to the next
_COLOUR = {"read": style.READS, "write": style.WRITES}


class FusionView(View):
    """`chain` (the name of a graph), `gpu` and `fused` (a bool for each pair of neighbors) are traits. Tab goes from
    button to button, Space fuses a pair or parts it."""

    chain = traitlets.Unicode()
    gpu = traitlets.Unicode("h200")
    fused = traitlets.Tuple()

    def __init__(self, graphs: dict[str, Graph], gpu: str, fused: tuple[bool, ...]):
        self.graphs, self._paired = graphs, ""
        able = [g for g in hardware.GPUS if all(graph.dtype in g.peak_flops for graph in graphs.values())]
        controls = {
            "chain": menu("chain", graphs, 330),
            "gpu": menu("GPU", [(f"{g.name}, {g.hbm_gbps:,.0f} GB/s", g.key) for g in able], 250),
        }
        self.fuse_button = button("fuse all", lambda: self._fuse(self.graph.fusible), "one kernel, as far as possible")
        self.part_button = button("separate all", lambda: self._fuse(()), "each operation in a kernel of its own")
        menus = [control for name, control in controls.items() if name != "chain" or len(graphs) > 1]
        self.pairs = widgets.HBox(layout=WRAP)
        start = {"chain": next(iter(graphs)), "gpu": hardware.gpu(gpu).key, "fused": fused}
        super().__init__(controls, start, row=[*menus, self.fuse_button, self.part_button], below=[self.pairs])

    @property
    def graph(self) -> Graph:
        return self.graphs[self.chain]

    @property
    def plan(self) -> Plan:
        return self.graph.plan(self.fused)

    @traitlets.validate("chain")
    def _chain_valid(self, proposal) -> str:
        if proposal["value"] not in self.graphs:
            raise traitlets.TraitError(f"chain must be one of {', '.join(self.graphs)}, got {proposal['value']!r}")
        return proposal["value"]

    @traitlets.validate("fused")
    def _fused_valid(self, proposal) -> tuple[bool, ...]:
        try:
            return self.graph.plan(proposal["value"]).fused
        except ValueError as error:
            raise traitlets.TraitError(str(error)) from None

    def _fuse(self, fused: tuple[bool, ...]) -> None:
        self.fused = fused or (False,) * self.graph.boundaries

    def adapt(self) -> None:
        """Another chain begins with nothing fused."""
        if self._paired != self.chain:
            if self._paired:
                self._fuse(())
            self._paired, self.pairs.children = self.chain, [*map(self._pair, range(self.graph.boundaries))]
        for toggle, together, can in zip(self.pairs.children, self.fused, self.graph.fusible, strict=True):
            toggle.value = together
            toggle.icon = "link" if together else "unlink" if can else "lock"

    def _pair(self, i: int) -> widgets.ToggleButton:
        """The button of a pair of neighbors. Icons say what colors say too: a chain, a broken one, a lock."""
        first, second = self.graph.ops[i : i + 2]
        can = self.graph.fusible[i]
        tip = (
            f"{first.name} and {second.name} in one kernel" if can else f"{second.name} must begin a kernel of its own"
        )
        toggle = widgets.ToggleButton(
            description=f"{i + 1} + {i + 2}", tooltip=tip, disabled=not can, layout={"width": "84px"}
        )
        toggle.observe(lambda change: self._fuse((*self.fused[:i], change["new"], *self.fused[i + 1 :])), "value")
        return toggle

    def drawing(self, chain: str, gpu: str, fused: tuple[bool, ...]) -> Drawing:
        plan = self.graphs[chain].plan(fused)
        words = _sentence(plan, gpu)
        shapes, height = _shapes(plan, gpu, words)
        return Drawing(shapes, height, f"{chain}. {words}")

    def __repr__(self) -> str:
        plan = self.graphs[self._start["chain"]].plan(self._start["fused"])
        return (
            f"fusion viewer: {plan.graph.name}, {len(plan.graph.ops)} operations in {_count(plan.kernels, 'kernel')}, "
            f"{plan.reads} reads and {plan.writes} writes"
        )


def fusion(graphs: Graph | Sequence[Graph], gpu: str = "h200", fused: Sequence[bool] | None = None) -> FusionView:
    """Show what a graph moves, and fuse its operations pair by pair.

    graphs   one, or several to choose from; of at most 9 operations and 16 tensors
    fused    of the first graph: which pairs of neighbors begin fused; default: none
    Raises ValueError for a graph that is too large, names that are not distinct, an unknown GPU, one that has no rate for
    a graph's dtype, and for pairs that cannot be fused.
    """
    graphs = [graphs] if isinstance(graphs, Graph) else list(graphs)
    if not graphs:
        raise ValueError("fusion: graphs must hold at least one graph, got none")
    named = {graph.name: graph for graph in graphs}
    if len(named) < len(graphs):
        raise ValueError(f"fusion: graphs must have distinct names, got {[graph.name for graph in graphs]}")
    for graph in graphs:
        if len(graph.ops) > MAX_OPS or len(graph.tensors) > MAX_TENSORS:
            raise ValueError(
                f"fusion: a graph may have {MAX_OPS} operations and {MAX_TENSORS} tensors, {graph.name!r} has "
                f"{len(graph.ops)} and {len(graph.tensors)}"
            )
        hardware.gpu(gpu).peak(graph.dtype)
    return FusionView(named, gpu, graphs[0].plan(fused).fused)


# ---- words -----------------------------------------------------------------------------------------------------------


def _count(things: Sequence, one: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else one + 's'}"


def _size(nbytes: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 10 << power:
            return f"{nbytes / (1 << power):,.0f} {unit}"
    return f"{nbytes:,.0f} B"


def _time(us: float) -> str:
    return f"{style.number(us)} µs" if us < 10_000 else f"{style.number(us / 1000)} ms"


def _totals(plan: Plan, gpu: str) -> str:
    return f"{_size(plan.bytes)}, {_time(plan.time_us(hardware.gpu(gpu)))}"


def _sentence(plan: Plan, gpu: str) -> str:
    few, apart = plan.graph.plan(plan.graph.fusible), plan.graph.plan()
    one = len(plan.kernels) == 1
    return (
        f"{_count(plan.kernels, 'kernel')} {'reads' if one else 'read'} {_size(plan.read_bytes)} and "
        f"{'writes' if one else 'write'} {_size(plan.write_bytes)}: {plan.reads} + {plan.writes} trips to memory, "
        f"{_time(plan.time_us(hardware.gpu(gpu)))} on {hardware.gpu(gpu).name} (modelled). "
        f"Nothing fused: {_totals(apart, gpu)}; everything that can be: {_totals(few, gpu)}."
    )


# ---- the picture -----------------------------------------------------------------------------------------------------


def _shapes(plan: Plan, gpu: str, words: str) -> tuple[list[Shape], float]:
    graph = plan.graph
    first, rest = words.split(". ", 1)
    wide = (_RIGHT - _LEFT) / len(graph.ops)
    top = 78
    chip = top + _ROW * len(graph.tensors) + 34  # where the operations begin
    shapes: list[Shape] = [
        Words(_MARGIN, 16, first + ".", size=13, bold=True),
        Words(_MARGIN, 36, rest),
        Words(_MARGIN, top - 14, "device memory", bold=True),
        Line(((_MARGIN, chip - 22), (_RIGHT, chip - 22)), style.BOUND, 2, dashed=True),
        Words(_MARGIN, chip + 23, "registers", bold=True),
        Words(_MARGIN, chip + 74, "read by kernel", size=11),
        Words(_MARGIN, chip + 91, "written by it", size=11),
    ]
    rows = {tensor: top + _ROW * i for i, tensor in enumerate(graph.tensors)}
    for tensor, y in rows.items():
        shapes += _lane(plan, tensor, y, wide)
    shapes += _arrows(plan, rows, chip, wide)
    for number, kernel in enumerate(plan.kernels, 1):
        shapes += _kernel(plan, kernel, number, chip, wide, gpu)
    bars, bottom = _bars(plan, gpu, chip + 118)
    keys, bottom = board.legend(
        [
            (Box(0, 0, 0, 0, style.READS), "read"),
            (Box(0, 0, 0, 0, style.WRITES), "write"),
            (Box(0, 0, 0, 0, style.NEUTRAL, 0.45, edge=board.INK), "lies in memory"),
            (Box(0, 0, 0, 0, edge=board.LINE), "never does: stays in registers"),
            (Box(0, 0, 0, 0, style.COMPUTE), "operation"),
            (Box(0, 0, 0, 0, edge=board.INK, edge_width=2), "kernel"),
        ],
        _MARGIN, bottom, WIDTH - 20,
    )  # fmt: skip
    return [*shapes, *bars, *keys], bottom


def _middle(op: int, wide: float) -> float:
    return _LEFT + (op + 0.5) * wide


def _lane(plan: Plan, tensor: str, y: float, wide: float) -> list[Shape]:
    """A tensor as a box that is as long as it lies in memory; an outline where it never does."""
    size = _size(plan.graph.nbytes(tensor))
    life = plan.life(tensor)
    if life is None:
        made = next(i for i, op in enumerate(plan.graph.ops) if op.output == tensor)
        used = [i for i, op in enumerate(plan.graph.ops) if tensor in op.inputs]
        begin, end = made, max(used, default=made)
    else:
        begin, end = life
    left = _LEFT if begin < 0 else _middle(begin, wide) - 12
    right = _RIGHT if end >= len(plan.graph.ops) else _middle(end, wide) + 22
    box = Box(
        left, y, right - left, _ROW - 7, *((style.NEUTRAL, 0.45) if life else ("none", 1.0)),
        edge=board.INK if life else board.LINE,
        title=f"{tensor}: {size}" + ("" if life else ", in registers only"),
    )  # fmt: skip
    line = y + (_ROW - 7) / 2
    name = Words(_MARGIN, line, tensor, size=11, bold=life is not None)
    return [box, name, Words(_LEFT - 8, line, size if life else "-", "right", size=11)]


def _arrows(plan: Plan, rows: dict[str, float], chip: float, wide: float) -> list[Shape]:
    largest = max(map(plan.graph.nbytes, plan.graph.tensors))
    shapes: list[Shape] = []
    for op in range(len(plan.graph.ops)):
        moves = [move for move in plan.moves if move.op == op]
        for i, move in enumerate(moves):
            x = _middle(op, wide) + (i - (len(moves) - 1) / 2) * 15 + 4
            low = rows[move.tensor] + _ROW - 7
            nbytes = plan.graph.nbytes(move.tensor)
            thick = 1.5 if nbytes < largest / 50 else 4
            colour = _COLOUR[move.kind]
            name = f"{plan.graph.ops[op].name} {move.kind}s {move.tensor}: {_size(nbytes)}"
            shapes.append(Box(x - thick / 2, low, thick, chip - low, colour, title=name))
            tip, back = (chip, chip - 8) if move.kind == "read" else (low, low + 8)
            shapes.append(Line(((x - 6, back), (x, tip), (x + 6, back)), colour, 2.5))
    return shapes


def _kernel(plan: Plan, kernel: Kernel, number: int, y: float, wide: float, gpu: str) -> list[Shape]:
    """The operations of a kernel in one frame, and below it what the kernel moves."""
    left, right = _LEFT + kernel.first * wide + 3, _LEFT + (kernel.last + 1) * wide - 3
    shapes: list[Shape] = [Box(left, y, right - left, 46, edge=board.INK, edge_width=2)]
    for i, op in enumerate(kernel.ops, kernel.first):
        x = _LEFT + i * wide + 9
        if i > kernel.first:  # what the operation before it made comes over without memory
            shapes.append(Line(((x - 18, y + 23), (x, y + 23)), style.COMPUTE, 5))
        title = f"{op.name}: {', '.join(op.inputs)} to {op.output}"
        size = 11 if len(op.name) * 6.5 < wide - 22 else 9
        shapes.append(
            Box(
                x, y + 8, wide - 18, 30, style.COMPUTE, text=op.name, size=size, ink=board.LIGHT, bold=True, title=title
            )
        )
        shapes.append(Words(x + (wide - 18) / 2, y + 57, str(i + 1), "center", 11))
    read, written = plan.kernel_bytes(kernel)
    us = plan.kernel_us(kernel, hardware.gpu(gpu))
    title = f"kernel {number}: {len(kernel.reads)} reads, {len(kernel.writes)} writes, {_time(us)}"
    for i, (nbytes, colour) in enumerate(((read, style.READS), (written, style.WRITES))):
        line = y + 74 + 17 * i
        shapes += [Box(left + 4, line - 5, 10, 10, colour, title=title), Words(left + 18, line, _size(nbytes), size=11)]
    return shapes


def _bars(plan: Plan, gpu: str, y: float) -> tuple[list[Shape], float]:
    """The bytes of this choice between those of nothing fused and of everything fused."""
    apart, few = plan.graph.plan(), plan.graph.plan(plan.graph.fusible)
    scale = (_RIGHT - _LEFT - 240) / apart.bytes
    shapes: list[Shape] = []
    for i, (name, choice) in enumerate((("nothing fused", apart), ("this choice", plan), ("all that can be", few))):
        line, mine = y + 24 * i, choice is plan
        reads, writes = choice.read_bytes * scale, choice.write_bytes * scale
        look = 1.0 if mine else 0.4
        shapes += [
            Words(_MARGIN, line + 9, name, bold=mine),
            Box(_LEFT, line, reads, 18, style.READS, look, title=f"read: {_size(choice.read_bytes)}"),
            Box(_LEFT + reads, line, writes, 18, style.WRITES, look, title=f"written: {_size(choice.write_bytes)}"),
            Words(_LEFT + reads + writes + 8, line + 9, f"{_totals(choice, gpu)} (modelled)", bold=mine),
        ]
    return shapes, y + 24 * 3 + 16
