"""The launch that is being interpreted just now: what the parts of the interpreter say to one another."""

import sys
from dataclasses import dataclass, field

import numpy as np

from gpukit.simulator.interpreter.bounds import Memory

INTERPRETER = "triton.runtime.interpreter"


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

    @property
    def num_warps(self) -> int:
        return int(self.options.get("num_warps") or 4)  # Triton's default


class Running:
    """The launch that is being interpreted.

    sampling   it computes nothing: floats load as 0, nothing is stored, dots are counted and not done
    marking    integers that wrap around in 32 bits are marked (wrapped.py)
    scope      what Triton puts in the place of its language, and takes away in the end
    shared     of a kernel in Gluon: shared memory and warps of the program that runs (shared_memory.py), made when it asks
    num_warps  that a program has
    in_gluon   the kernel is in Gluon, and so is what it calls
    work       how much there was to interpret, in lanes of accesses
    places     of a program of a sampled launch: a number for where, from one another, the lanes of its accesses lay that were
               no grid. It is another one in programs that go by different indices
    indices    programs have read integers that exist, by which they may go
    bound      ids of the globals whose names have been given their meaning
    answers    how often each line has gone by the answer of an atomic, which a sampled launch does not know
    lost       a program of a sampled launch did something with an integer that it read which integers.py does not follow
    seen       where this program made accesses, and whether any of their lanes was live, if it is only to show where its
               accesses begin; else None. It goes through each loop until each access there has had a live lane, and ends
               where it makes one for a second time
    lengths    turns that its loops would have, if it is only to show where its accesses begin
    again      how often it has made one again, while another one had had no live lane yet
    few        of how many of these the two on one line are told apart; None for all
    shortened  it has left such a loop before its end
    turns      who looks at the turns of the loop that runs, if anybody does (turns.py)
    uniform    loops (turns.py) whose turns were found to do the same: the next time only the last turn is checked
    """

    def __init__(self):
        self.memory: Memory | None = None
        self.recorders: list = []
        self.sampling = self.marking = self.indices = False
        self.answers: dict[tuple[str, int], int] = {}
        self.lost = False
        self.seen: dict | None = None
        self.lengths: list[int] = []
        self.again = 0
        self.few: int | None = None
        self.shortened = False
        self.turns = None
        self.uniform: set[tuple] = set()
        self.scope = None
        self.shared = None
        self.num_warps = 4
        self.in_gluon = False
        self.work = self.places = 0
        self.bound: set[int] = set()


MOST_AGAIN = 256
# An access takes as long to interpret as so many lanes, however few it has; so does a turn of a loop, a bound or a branch.
ACCESS_LANES, TURN_LANES = 4096, 8192


class Enough(BaseException):
    """Ends a program that has shown where its accesses begin. A kernel cannot catch it by mistake."""


now: Running | None = None


def busy() -> bool:
    """Whether a launch is being prepared or interpreted: PyTorch ops seen now are ours, not the user's."""
    return now is not None


def interpreter_module():
    """Triton's own interpreter, which is private."""
    return sys.modules[INTERPRETER]
