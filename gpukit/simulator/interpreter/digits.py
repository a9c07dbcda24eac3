"""How a kernel counts its programs: which numbers it makes of a program's number by // and %."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_OTHERS = 2  # how many programs at the end of a digit may make other accesses


def radices(programs: int, starts: Callable[[int], np.ndarray | None]) -> list[int] | None:
    """The radices of the digits in which the addresses of a kernel are linear.

    Kernels that put a grid of tiles, or groups of its rows, on one axis compute `pid % n`, `pid // n % m` and so on. Written with
    these digits, a program's number p = d0 + n (d1 + m (d2 + ...)) leads to addresses that go up by so much with each digit.
    Such a digit ends before the first program that leaves the line of those before it: each end is found by doubling and halving,
    so that some log2(programs) programs have to run. The last programs of a digit may make other accesses, as under a causal
    mask, where few blocks are left for them. The end found then may be that of several digits that lie on one line, so shorter
    ones are tried.

    starts   of a program's number: the addresses at which its accesses begin, or None where they are others than program 0's
    Returns the radices, lowest digit first, whose product is at least `programs`; None where not even two neighbors of a digit
    make the same accesses. Whether all programs follow the digits is for the caller to try.
    """
    found: list[int] = []
    unit, first = 1, starts(0)
    while unit < programs:
        second = starts(unit)
        if first is None or second is None:
            return None
        step = second - first

        def follows(count: int, unit=unit, step=step) -> bool:
            own = starts(unit * count)
            return own is not None and bool((own == first + count * step).all())

        most = -(-programs // unit)
        last, beyond = 1, 2  # a count that follows, and one of which that is not known
        while beyond < most and follows(beyond):
            last, beyond = beyond, 2 * beyond
        beyond = min(beyond, most)
        while beyond - last > 1:
            middle = (last + beyond) // 2
            last, beyond = (middle, beyond) if follows(middle) else (last, middle)
        end = beyond
        while beyond < min(most, end + _OTHERS) and starts(unit * beyond) is None:
            beyond += 1
        if beyond > end:
            shorter = (n for n in range(2, beyond) if beyond % n == 0 and starts(unit * (n - 1)) is None)
            beyond = next(shorter, beyond)
        found.append(beyond)
        unit *= beyond
    return found
