"""How a kernel counts its programs, told from where a few of them begin."""

import numpy as np
import pytest

from gpukit.simulator.interpreter.digits import radices


def counted(address, programs):
    ran = set()

    def starts(program):
        ran.add(program)
        found = address(program)
        return None if found is None else np.array(found)

    return radices(programs, starts), ran


@pytest.mark.parametrize(
    ("address", "programs", "expected"),
    (
        (lambda p: [64 * p], 1000, [1000]),
        (lambda p: [p % 16, p // 16], 256, [16, 16]),
        (lambda p: [p % 16, p // 16], 250, [16, 16]),
        (lambda p: [p // 3], 100, [3, 34]),
        (lambda p: [p % 8 + 8 * (p // 512), p % 512 // 8], 2048, [8, 64, 4]),  # groups of 8 rows of tiles
        (lambda p: [7, p % 5, 100 * (p // 5 % 7), p // 35], 35 * 11, [5, 7, 11]),
        (lambda p: [0], 77, [77]),
        (lambda p: [p * p], 16, [2, 2, 2, 2]),  # not linear in any digits, which the caller finds out
        (lambda p: [p] if p != 1 else None, 10, None),
        (lambda p: [p] if p < 10 else None, 30, None),
        (lambda p: [p % 16, p // 16] if p % 16 < 15 else None, 256, [16, 16]),  # the last of a digit is another one
        (lambda p: [p % 16, p // 16] if p % 16 < 14 else None, 256, [16, 16]),
        (lambda p: [p] if p % 16 < 15 else None, 255, [16, 16]),  # or of one of those that lie on a line
        (lambda p: [p % 16, p // 16] if p % 16 < 13 else None, 256, None),
    ),
)
def test_the_digits_are_found_with_few_programs(address, programs, expected):
    found, ran = counted(address, programs)
    assert found == expected
    assert len(ran) <= 4 * np.log2(programs) + 2


def test_one_program_has_no_digits():
    assert counted(lambda p: [p], 1)[0] == []
