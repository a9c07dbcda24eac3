"""Blocks of a matrix of attention scores, and online softmax along one of its rows: arithmetic on lengths, nothing is run.

Query i of T_q stands beside key i + T_k - T_q, as in gpukit.kernels.flash_attention.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """The scores of T_q queries and T_k keys in blocks of BLOCK_M x BLOCK_N.

    causal  a query sees no key behind its own place
    window  and none so many or more away from it; None: any
    Raises ValueError for a number that is not a whole one, at least 1.
    """

    T_q: int
    T_k: int
    BLOCK_M: int
    BLOCK_N: int
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("T_q", "T_k", "BLOCK_M", "BLOCK_N", "window"):
            value = getattr(self, name)
            if (name != "window" or value is not None) and (not isinstance(value, int) or value < 1):
                raise ValueError(f"blocks: {name} must be a whole number, at least 1, got {value!r}")

    @property
    def rows(self) -> int:
        return -(-self.T_q // self.BLOCK_M)

    @property
    def columns(self) -> int:
        return -(-self.T_k // self.BLOCK_N)

    def keys(self, query: int) -> range:
        """The keys that a query sees."""
        place = query + self.T_k - self.T_q
        reach = self.T_q + self.T_k if self.window is None else self.window
        last = place if self.causal else place + reach - 1
        return range(max(place - reach + 1, 0), max(min(last + 1, self.T_k), 0))

    def kind(self, row: int, column: int) -> str:
        """ "full": every query sees every key, no mask is needed; "cut": some; "none": the block can be left out."""
        queries = range(row * self.BLOCK_M, min((row + 1) * self.BLOCK_M, self.T_q))
        first, end = column * self.BLOCK_N, min((column + 1) * self.BLOCK_N, self.T_k)
        seen = sum(max(min(keys.stop, end) - max(keys.start, first), 0) for keys in map(self.keys, queries))
        return "full" if seen == len(queries) * (end - first) else "cut" if seen else "none"

    def walk(self) -> list[tuple[int, int]]:
        """(row, column) of the blocks in which something is seen, row by row: what programs work through."""
        return [(i, j) for i in range(self.rows) for j in range(self.columns) if self.kind(i, j) != "none"]

    def states(
        self, query: int, scores: Sequence[float], values: Sequence[float], step: int
    ) -> list[tuple[int, State]]:
        """What a query holds after each of its blocks among the first `step` of the walk, as (column of the block, state).
        scores and values: one for each key; a score that the query does not see counts as -inf."""
        keys = self.keys(query)
        seen = [score if key in keys else -math.inf for key, score in enumerate(scores)]
        columns = [j for i, j in self.walk()[:step] if i == query // self.BLOCK_M]
        parts = [slice(j * self.BLOCK_N, (j + 1) * self.BLOCK_N) for j in columns]
        return list(zip(columns, online([list(zip(seen[p], values[p], strict=True)) for p in parts]), strict=True))

    def count(self) -> dict[str, int]:
        """How many blocks are of each kind."""
        found = Counter(self.kind(i, j) for i in range(self.rows) for j in range(self.columns))
        return {kind: found[kind] for kind in ("full", "cut", "none")}


@dataclass(frozen=True)
class State:
    """What one query holds after a block: its largest score m, l = sum(exp(s - m)), acc = sum(exp(s - m) v), and the factor
    by which the block scaled what was there before."""

    m: float
    l: float
    acc: float
    factor: float

    @property
    def o(self) -> float:
        return self.acc / self.l if self.l else 0.0

    @property
    def lse(self) -> float:
        return self.m + math.log(self.l) if self.l else -math.inf


def online(blocks: Sequence[Sequence[tuple[float, float]]]) -> list[State]:
    """The state after each block of (score, value); -inf is the score of a key that does not count."""
    m, l, acc, states = -math.inf, 0.0, 0.0, []
    for block in blocks:
        m_new = max([m, *(score for score, _ in block)])
        base = 0.0 if m_new == -math.inf else m_new
        factor = math.exp(m - base)
        weights = [math.exp(score - base) for score, _ in block]
        l = l * factor + math.fsum(weights)
        acc = acc * factor + math.fsum(w * value for w, (_, value) in zip(weights, block, strict=True))
        m = m_new
        states.append(State(m, l, acc, factor))
    return states
