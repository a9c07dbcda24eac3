"""Waiting for what another thread or process does. How long it takes says nothing: only that it happens."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120  # a machine may be busy; what never happens has to fail some time


def until(condition: Callable[[], object]) -> None:
    """Return as soon as `condition()` is true. Raises TimeoutError if it does not become so."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for has not happened")
        time.sleep(0.02)
