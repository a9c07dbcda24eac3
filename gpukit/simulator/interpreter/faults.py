"""What a kernel did to memory that it must not do, as exceptions that say where."""


class Fault(Exception):
    """What a kernel did to memory that it must not do. The fields say where; `str()` is one sentence.

    kind         "load", "store" or "atomic"
    tensor       the kernel parameter that the pointer came from; "any tensor" where that is not known and none is near
    program      ids of the program, as many as the grid has axes
    file, line   where tl.load, tl.store or tl.atomic_* was called
    count        lanes of this access that are at fault
    lane         position of the first of them in the block
    first_index  its distance, in elements of the view, from the view's first element (negative: before it)
    size, shape  of the view: the guarded one if there is one, else the tensor that was passed
    name         what the view is called: the name given to `guard`, else the parameter's
    """

    kind: str
    tensor: str
    program: tuple[int, ...]
    file: str
    line: int
    count: int
    lane: int
    first_index: int
    size: int
    shape: tuple[int, ...]
    name: str

    def __init__(self, **fields: object):
        self.__dict__.update(fields)
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        raise NotImplementedError


class MemoryFault(Fault):
    """An access outside every legal element; `where` is "past the end", "before the start" or "between rows". It is "far away"
    where nobody knows which tensor was meant: then there is no view, its name is empty, and its numbers are 0."""

    where: str

    def _sentence(self) -> str:
        elements = "1 element" if self.count == 1 else f"{self.count} elements"
        if self.where == "far away":
            return (
                f"{self.kind} outside {self.tensor}: {_program(self.program)}, line {self.line}: {elements} far from every tensor, "
                "and the pointer does not tell which one was meant"
            )
        place = "between the rows" if self.where == "between rows" else self.where
        return (
            f"{self.kind} outside {self.tensor}: {_program(self.program)}, line {self.line}: {elements} {place} of "
            f"{self.name} {list(self.shape)}; first at index {self.first_index}"
        )


class WrappedFault(MemoryFault):
    """An access inside its tensor whose offset, or the bound in whose mask, wrapped around in 32 bits: it is another
    element's. `where` is "inside"."""

    def _sentence(self) -> str:
        return (
            f"{self.kind} of {self.tensor}: {_program(self.program)}, line {self.line}: an offset or a bound that is "
            f"computed in 32 bits wraps around; {self.name} is {list(self.shape)}"
        )


class RaceFault(Fault):
    """Two programs of one launch use one address and nothing says which comes first.

    other   ids of the other program, None where there are several
    clash   what the other one did: "load", "store" or "atomic"
    """

    other: tuple[int, ...] | None
    clash: str

    def _sentence(self) -> str:
        other = "another program" if self.other is None else _program(self.other)
        did = {
            ("store", "store"): f"stores a value that differs from the one {other} stored",
            ("store", "load"): f"stores to what {other} loads",
            ("load", "store"): f"loads what {other} stores",
            ("store", "atomic"): f"stores to what {other} changes by an atomic",
            ("atomic", "store"): f"changes by an atomic what {other} stores",
        }[self.kind, self.clash]
        return (
            f"race on {self.tensor}: {_program(self.program)}, line {self.line}: {did}, at index {self.first_index} of "
            f"{self.name} {list(self.shape)}; programs run in any order"
        )


class WarpFault(Fault):
    """Two threads of one program use one address, at least one of them stores, and no barrier says which comes first.

    clash  what the other thread did: "load" or "store"; before  its line
    """

    clash: str
    before: int

    def _sentence(self) -> str:
        other = f"another thread of the program {self.clash}s in line {self.before}"
        did = {
            ("store", "store"): f"stores another value than {other}",
            ("store", "load"): f"stores to what {other}",
            ("load", "store"): f"loads what {other}",
        }[self.kind, self.clash]
        return (
            f"race on {self.tensor}: {_program(self.program)}, line {self.line}: {did}, at index {self.first_index} of "
            f"{self.name} {list(self.shape)}; the warps of a program run in any order until a barrier"
        )


class UnwrittenFault(Fault):
    """A load, or an atomic, of elements of a fresh tensor (torch.empty) that nobody has written."""

    def _sentence(self) -> str:
        elements = "1 element" if self.count == 1 else f"{self.count} elements"
        return (
            f"{self.kind} of {self.tensor}: {_program(self.program)}, line {self.line}: {elements} of {self.name} "
            f"{list(self.shape)} that nobody has written; first at index {self.first_index}"
        )


class UnknownFault(Fault, ValueError):
    """What a sampled launch does depends on numbers that nobody knows. `source` is the parameter that they come from, `what`
    depends on them, and `why` says why they are not known:

    "no values"   integers of a tensor without values
    "not read"    floats, which a sampled launch does not read and in which it computes nothing
    "atomic"      the answer of an atomic, which depends on what other programs did before
    "endless"     the same, in a loop that waits for such an answer
    """

    what: str
    source: str
    why: str

    def _sentence(self) -> str:
        if self.why == "atomic":
            return (
                f"line {self.line}: {self.what} depends on the answer of an atomic on {self.source}, which is taken to be 0; "
                "what follows from another one is left out"
            )
        if self.why == "endless":
            return (
                f"line {self.line}: a loop waits for the answer of an atomic on {self.source}, and how long it waits depends on "
                "the other programs: a sample cannot tell"
            )
        if self.why == "not read":
            return (
                f"line {self.line}: {self.what} depends on the numbers in {self.source}, which a sample does not read: run all "
                "programs (sample=None) on tensors that have values"
            )
        return (
            f"line {self.line}: {self.what} depends on what {self.source} holds, and here {self.source} is a tensor "
            "without values: pass one that has them (the others may be on the meta device)"
        )


class SynchronizationFault(Fault):
    """A program in Gluon touches shared memory that is not ready, or waits for what never comes. `what` is the clause that
    says so; of the other fields it has program, file and line."""

    what: str

    def _sentence(self) -> str:
        return f"{_program(self.program)}, line {self.line}: {self.what}"


def _program(ids) -> str:
    return f"program {ids[0]}" if len(ids) == 1 else f"program {tuple(ids)}"


def program_ids(linear: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of the linear-th program in launch order (axis 0 fastest, as on a GPU)."""
    ids = []
    for n in grid:
        ids.append(linear % n)
        linear //= n
    return tuple(ids)
