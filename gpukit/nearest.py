"""The suggestion that follows an unknown name: one rule for commands, exercises, models, formats and GPUs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST = 3  # characters: fewer are part of too many names


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ "; did you mean 'softmax.fused'?" where one of `known` looks like `name`, else nothing.

    Two names look alike where 60% of their characters agree in order, difflib's own limit, or where one is a part of the
    other: a suggestion that has little to do with what was typed confuses more than none.
    """
    name, names = str(name), list(known)
    near = difflib.get_close_matches(name, names, n=1)
    near = near or [other for other in names if len(name) >= _LEAST and name in other]
    return f"; did you mean {near[0]!r}?" if near else ""
