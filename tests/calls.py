"""How much a piece of code does, in a number that no other work on the machine changes: the functions that it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

# A picture that follows a slider: redrawn in a tenth of a second even where a call takes a microsecond.
REDRAW = 100_000


def calls(work: Callable[[], object]) -> int:
    """Calls of Python functions and of built-in ones while `work()` runs, in this thread."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
