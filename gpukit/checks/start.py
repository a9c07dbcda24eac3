"""The exercise of notebook 00: a first check that fails, says why, and passes after one line is mended."""

from __future__ import annotations

from random import Random

from gpukit.grading.exercise import Case, FunctionExercise, Label, Misconception, Variant

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
    ]


def _of_solution(line: str) -> tuple[tuple[str, str], ...]:
    """The solution with another last line."""
    return (("return read_bytes + write_bytes", line),)


EXERCISES = [
    FunctionExercise(
        id="start.bytes_moved",
        title="How many bytes must a kernel move?",
        notebook="00_start",
        function="bytes_moved",
        label=Label(1, 3, "the smallest useful cost model: bytes in, bytes out"),
        hints=(
            "Follow one element of x from memory to the chip, and its result y. How many trips does that make?",
            "A byte costs the same on its way out as on its way in, so the total has two terms: bytes read, bytes "
            "written. y has the shape and the element size of x.",
            "Return the product of M, N and itemsize counted twice: once for reading x, once for writing y.",
        ),
        cases=_cases,
        expected=lambda M, N, itemsize: 2 * M * N * itemsize,
        unit="bytes",
        misconceptions=(
            Misconception(
                "one-way",
                "so this counts one direction. x has to come in; what has to happen to y before the kernel is done?",
                gives=lambda M, N, itemsize: M * N * itemsize,
            ),
            Misconception(
                "elements",
                "so these are elements, and memory is paid for by the byte. Which argument has not been used?",
                gives=lambda M, N, itemsize: 2 * M * N,
            ),
            Misconception(
                "fixed-itemsize",
                "so every element is taken to have 4 bytes. What would bfloat16 cost?",
                gives=lambda M, N, itemsize: 2 * M * N * 4,
            ),
            Misconception(
                "bits",
                "so these are bits: eight times too many. In which unit is itemsize given?",
                gives=lambda M, N, itemsize: 16 * M * N * itemsize,
            ),
            Misconception(
                "scaled-unit",
                "so this is in KiB, MiB or GiB. In which unit does the contract want the answer?",
                when=lambda evidence: _scaled(evidence),
            ),
            Misconception(
                "square",
                "so the matrix is taken to be square. Does the count use both M and N?",
                gives=lambda M, N, itemsize: 2 * N * N * itemsize,
            ),
            Misconception(
                "square",
                "so the matrix is taken to be square. Does the count use both M and N?",
                gives=lambda M, N, itemsize: 2 * M * M * itemsize,
            ),
            Misconception(
                "one-row",
                "so this is the traffic of a single row. How many rows are there?",
                gives=lambda M, N, itemsize: 2 * N * itemsize,
            ),
            Misconception(
                "one-byte-write",
                "so what is read is counted in bytes and what is written in elements. How large is an element of y?",
                gives=lambda M, N, itemsize: M * N * itemsize + M * N,
            ),
            Misconception(
                "added-sides",
                "so the sides are added. How many elements does a matrix of 2 rows and 3 columns have?",
                gives=lambda M, N, itemsize: 2 * (M + N) * itemsize,
            ),
            Misconception(
                "three-trips",
                "so there are three trips for every element. A good kernel reads x once and writes y once: which one "
                "is the third?",
                gives=lambda M, N, itemsize: 3 * M * N * itemsize,
            ),
        ),
        wrong=(
            Variant("reads only", _of_solution("return read_bytes"), diagnosis="one-way"),
            Variant("counts elements", _of_solution("return 2 * M * N"), diagnosis="elements"),
            Variant("always float32", _of_solution("return 2 * M * N * 4"), diagnosis="fixed-itemsize"),
            Variant("counts bits", _of_solution("return (read_bytes + write_bytes) * 8"), diagnosis="bits"),
            Variant("in MiB", _of_solution("return (read_bytes + write_bytes) / 2**20"), diagnosis="scaled-unit"),
            Variant("in whole KiB", _of_solution("return (read_bytes + write_bytes) // 1024"), diagnosis="scaled-unit"),
            Variant("rows for columns", _of_solution("return 2 * M * M * itemsize"), diagnosis="square"),
            Variant("one row", _of_solution("return 2 * N * itemsize"), diagnosis="one-row"),
            Variant("write forgets itemsize", _of_solution("return read_bytes + M * N"), diagnosis="one-byte-write"),
            Variant("adds the sides", _of_solution("return 2 * (M + N) * itemsize"), diagnosis="added-sides"),
            Variant("reads twice", _of_solution("return 2 * read_bytes + write_bytes"), diagnosis="three-trips"),
            Variant("returns nothing", _of_solution("read_bytes + write_bytes"), diagnosis="type"),
        ),
        right=(
            Variant("one product", _of_solution("return 2 * M * N * itemsize")),
            Variant(
                "row by row",
                source="def bytes_moved(M, N, itemsize):\n"
                "    total = 0\n"
                "    for _ in range(M):\n"
                "        total += N * itemsize  # a row of x in\n"
                "        total += N * itemsize  # a row of y out\n"
                "    return total\n",
            ),
            Variant(
                "math.prod",
                source="import math\n\n\ndef bytes_moved(M, N, itemsize):\n    return math.prod((2, M, N, itemsize))\n",
            ),
        ),
        timeout_s=20.0,
    )
]


def _scaled(evidence) -> bool:
    """The first result is the expected one in a larger unit, rounded or not."""
    yours, right = evidence.outputs, evidence.expected
    units = [base**power for base in (1000, 1024) for power in (1, 2, 3)]
    return isinstance(yours, int | float) and any(abs(right / unit - yours) < 1 for unit in units if right >= unit)
