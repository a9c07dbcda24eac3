"""How a run that grades is ended from outside: by a signal, once, so that what it has found is kept."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ending() -> Iterator[list[int]]:
    """The signals that ask a program to end raise KeyboardInterrupt, once: what there is of a report is then written in peace,
    and the processes around it are ended. Yields the signal that came, after which others are ignored for good."""
    ended_by: list[int] = []

    def end(number, _):
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        ended_by.append(number)
        raise KeyboardInterrupt

    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # nohup gpukit grade
            before[number] = signal.signal(number, end)
    try:
        yield ended_by
    finally:
        for number, handler in before.items() if not ended_by else ():
            signal.signal(number, handler)
