"""The exercise of notebook 00: a first check that fails, says why, and passes after one line is fixed."""

from __future__ import annotations

from random import Random

from gpukit.grading.exercise import Case, FunctionExercise, Misconception

_ITEMSIZES = {"float8": 1, "bfloat16": 2, "float32": 4, "float64": 8}


def _case(M: int, N: int, dtype: str) -> Case:
    return Case(f"x [{M}, {N}] {dtype}, itemsize {_ITEMSIZES[dtype]}", (M, N, _ITEMSIZES[dtype]))


def _cases(rng: Random) -> list[Case]:
    return [
        _case(4096, 4096, "float32"),
        _case(rng.randrange(2, 100), rng.randrange(100, 1000), "bfloat16"),
        _case(rng.randrange(100, 1000), rng.randrange(2, 100), "float64"),
        _case(37, 781, "float8"),
        _case(1, 1, "bfloat16"),
        _case(8192, 128256, "bfloat16"),  # the logits of 8,192 tokens of Llama 3: more bytes than an int32 holds
        _case(3, 2**60 + 1, "float8"),  # more than a float holds exactly
    ]


EXERCISES = [
    FunctionExercise(
        id="start.bytes_moved",
        function="bytes_moved",
        cases=_cases,
        expected=lambda M, N, itemsize: 2 * M * N * itemsize,
        unit="bytes",
        misconceptions=(
            Misconception("one-way", gives=lambda M, N, itemsize: M * N * itemsize),
            Misconception("elements", gives=lambda M, N, itemsize: 2 * M * N),
            Misconception("fixed-itemsize", gives=lambda M, N, itemsize: 2 * M * N * 4),
            Misconception("bits", gives=lambda M, N, itemsize: 16 * M * N * itemsize),
            Misconception("scaled-unit", when=lambda evidence: _scaled(evidence)),
            Misconception("square", gives=lambda M, N, itemsize: 2 * N * N * itemsize),
            Misconception("square", gives=lambda M, N, itemsize: 2 * M * M * itemsize),
            Misconception("one-row", gives=lambda M, N, itemsize: 2 * N * itemsize),
            Misconception("one-byte-write", gives=lambda M, N, itemsize: M * N * itemsize + M * N),
            Misconception("added-sides", gives=lambda M, N, itemsize: 2 * (M + N) * itemsize),
            Misconception("added-sides", gives=lambda M, N, itemsize: (M + N) * itemsize),
            Misconception("eighth", gives=lambda M, N, itemsize: 2 * M * N * itemsize / 8),
            Misconception("eighth", gives=lambda M, N, itemsize: 2 * M * N * itemsize // 8),
            Misconception("three-trips", gives=lambda M, N, itemsize: 3 * M * N * itemsize),
            Misconception("four-trips", gives=lambda M, N, itemsize: 4 * M * N * itemsize),
            Misconception("rounded", gives=lambda M, N, itemsize: float(2 * M * N * itemsize)),
        ),
        timeout_s=20.0,
    )
]


def _scaled(evidence) -> bool:
    """The first result is the expected one in a larger unit, rounded or not."""
    yours, right = evidence.outputs, evidence.expected
    units = [base**power for base in (1000, 1024) for power in (1, 2, 3)]
    return isinstance(yours, int | float) and any(abs(right / unit - yours) < 1 for unit in units if right >= unit)
