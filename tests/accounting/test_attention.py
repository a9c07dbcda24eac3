"""Blocks of attention scores against the mask itself, and online softmax along a row against softmax."""

import itertools
import math

import pytest
import torch

from gpukit.accounting.attention import Blocks, online
from gpukit.reference.flash_attention import pairs, seen

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = [(1, 1), (10, 16), (16, 10), (7, 7), (5, 1), (1, 9), (24, 24)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window", (None, 1, 3, 40))
@pytest.mark.parametrize(("T_q", "T_k"), LENGTHS)
def test_blocks_are_those_of_the_mask(T_q, T_k, causal, window):
    blocks, mask = Blocks(T_q, T_k, 4, 3, causal, window), seen(T_q, T_k, causal, window)
    assert [list(blocks.keys(i)) for i in range(T_q)] == [row.nonzero().flatten().tolist() for row in mask]
    assert sum(len(blocks.keys(i)) for i in range(T_q)) == pairs(T_q, T_k, causal, window)
    kinds = []
    for i, rows in enumerate(mask.split(4)):
        for j, part in enumerate(rows.split(3, dim=1)):
            kinds.append("full" if part.all() else "cut" if part.any() else "none")
            assert blocks.kind(i, j) == kinds[-1]
            assert ((i, j) in blocks.walk()) == bool(part.any())
    assert blocks.count() == {kind: kinds.count(kind) for kind in ("full", "cut", "none")}


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"T_q": 0}, "blocks: T_q must be a whole number, at least 1, got 0"),
        ({"BLOCK_N": 2.5}, "blocks: BLOCK_N must be a whole number, at least 1, got 2.5"),
        ({"window": 0}, "blocks: window must be a whole number, at least 1, got 0"),
    ),
)
def test_blocks_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Blocks(**{"T_q": 4, "T_k": 4, "BLOCK_M": 2, "BLOCK_N": 2, **options})


def test_online_softmax_ends_at_softmax_and_says_what_it_scaled():
    s, v = torch.randn(2, 20, generator=GENERATOR, dtype=torch.float64) * 3
    blocks = [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(s.split(6), v.split(6), strict=True)]
    states = online(blocks)
    assert states[-1].o == pytest.approx(float(s.softmax(0) @ v), rel=1e-12)
    assert states[-1].lse == pytest.approx(float(s.logsumexp(0)), rel=1e-12)
    for before, after in itertools.pairwise(states):
        assert after.factor == pytest.approx(math.exp(before.m - after.m), rel=1e-12)
    assert states[0].factor == 0


def test_a_row_that_sees_nothing_stays_empty():
    (state,) = online([[(-math.inf, 1.0), (-math.inf, 2.0)]])
    assert (state.m, state.l, state.acc, state.o, state.lse) == (-math.inf, 0, 0, 0, -math.inf)


@pytest.mark.parametrize("query", (0, 4, 9))
def test_states_along_the_walk_end_at_attention(query):
    scores, values = torch.randn(2, 16, generator=GENERATOR, dtype=torch.float64)
    blocks = Blocks(10, 16, 4, 4, causal=True)
    states = blocks.states(query, scores.tolist(), values.tolist(), len(blocks.walk()))
    assert [column for column, _ in states] == [j for i, j in blocks.walk() if i == query // 4]
    own = slice(blocks.keys(query).stop)
    assert states[-1][1].o == pytest.approx(float(scores[own].softmax(0) @ values[own]), rel=1e-12)
    assert blocks.states(query, scores.tolist(), values.tolist(), 0) == []
