"""What the threads of one program do to each other in global memory.

A program is several warps, and each goes at its own pace until a barrier. Triton puts barriers where data crosses from
thread to thread in shared memory (reductions, tl.dot, tl.trans, ...) and nowhere else: that one thread loads what another one
stores, it does not see. Here all lanes load before the next line runs, so such a kernel is always right.

Which thread has which lane is the compiler's decision. Certain is this: equal lanes of blocks of one shape have one thread, a
single number is loaded by every thread and stored by the first one, and lane 0 of a block is the first thread's. Blocks of two
shapes are not compared: what goes from the one to the other passes through shared memory.
"""

import numpy as np

from gpukit.simulator.interpreter.addresses import Access

_MOST = 256  # accesses that are kept of each tensor: of a long loop without a barrier the last ones


class Warps:
    """What one program has loaded and stored since its last barrier."""

    def __init__(self):
        self._since: dict[int, list[Access]] = {}

    def barrier(self) -> None:
        """All threads have arrived: what they did before, they did before what comes now."""
        if self._since:
            self._since = {}

    def add(self, access: Access) -> tuple[Access, np.ndarray] | None:
        """Note a load or a store. An earlier one that another thread made at one of its addresses, at least one of the two a
        store, and for each lane of this one whether that is so; None if there is none."""
        known = self._since.setdefault(id(access.buffer), [])
        found = None
        for earlier in reversed(known):
            if access.kind == "load" == earlier.kind or access.low >= earlier.high or earlier.low >= access.high:
                continue
            lanes = _by_others(access, earlier)
            if lanes is not None:
                found = earlier, lanes
                break
        known.append(access)
        del known[:-_MOST]
        return found


def _by_others(access: Access, earlier: Access) -> np.ndarray | None:
    """For each lane of an access whether another thread made the earlier one at its address; None if that is true of no lane."""
    single, before = access.pointers.size == 1, earlier.pointers.size == 1
    if single and before:  # one thread stores, and all load; what the others loaded before, it may not have needed
        back = (earlier.kind, access.kind, earlier.low) == ("store", "load", access.low)
        return np.ones(1, dtype=bool) if back else None
    if not (single or before or access.pointers.shape == earlier.pointers.shape):
        return None
    if access.tile and earlier.tile and access.tile[:3] == earlier.tile[:3]:
        return None
    _, mine, others = np.intersect1d(access.offsets, earlier.offsets, return_indices=True)
    lane, other = _lanes(access)[mine], _lanes(earlier)[others]
    apart = lane != other
    if single:
        apart = other != 0 if access.kind == "store" else np.ones_like(other, dtype=bool)
    elif before:
        apart = lane != 0 if earlier.kind == "store" else np.ones_like(lane, dtype=bool)
    if not apart.any():
        return None
    bad = np.zeros(access.lanes, dtype=bool)
    bad[mine[apart]] = True
    return bad


def _lanes(access: Access) -> np.ndarray:
    """The numbers of the live lanes in their block."""
    return np.arange(access.lanes) if access.live is None else np.flatnonzero(access.live)
