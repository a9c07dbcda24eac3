"""What the calculators accept: whole and positive numbers within a range that has a meaning. All raise BadArgument."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST_PARAMETERS = 10**15  # a thousand times the largest models of 2025
MOST_TOKENS = 10**18
MOST_SIZE = 10**9  # one dimension of a tensor, a count of GPUs


class BadArgument(ValueError):
    """An argument outside what is allowed: its `name` and the broken `rule` apart, for those who call it otherwise, such as a
    command that has --seq for `tokens`."""

    def __init__(self, where: str, name: str, rule: str):
        super().__init__(f"{where}: {name} {rule}")
        self.name, self.rule = name, rule


def whole(where: str, name: str, value: float, least: int = 1, most: int = MOST_SIZE) -> int:
    """`value` as an int. 70e9 is a whole number too; 1.5, True, "8" and NaN are not."""
    number = isinstance(value, int | float) or hasattr(value, "__index__")  # numpy's integers have __index__
    if isinstance(value, bool) or not number or not math.isfinite(value) or int(value) != value:
        raise BadArgument(where, name, f"must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise BadArgument(where, name, f"must be a whole number from {_text(least)} to {_text(most)}, got {value!r}")
    return int(value)


def positive(where: str, name: str, value: float, most: float = 1e18) -> float:
    """`value` if it is a number above 0 and at most `most`."""
    number = isinstance(value, int | float) or hasattr(value, "__float__")
    if isinstance(value, bool) or isinstance(value, str) or not number or not 0 < value <= most:
        raise BadArgument(where, name, f"must be a number above 0 and at most {_text(most)}, got {value!r}")
    return value


def choice(where: str, name: str, value: str, allowed: Iterable[str]) -> str:
    """`value` if it is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise BadArgument(where, name, f"must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def divides(where: str, name: str, divisor: int, of: str, value: int) -> None:
    """Whether `divisor`, the argument called `name`, leaves no rest in `value`."""
    if value % divisor:
        raise BadArgument(where, name, f"must divide {of}, and {divisor:,} does not divide {value:,}")


def _text(limit: float) -> str:
    """10^15 for a power of ten that is long to read, else with commas."""
    power = round(math.log10(limit)) if limit > 0 else 0
    return f"10^{power}" if power > 4 and limit == 10**power else f"{limit:,}"
