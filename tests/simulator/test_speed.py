"""What the simulator costs, counted in calls, which are the same on a busy machine. `make measure` prints the seconds."""

import pytest
import triton

from tests.calls import calls

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

if triton.knobs.runtime.interpret:
    from tests.simulator import speed

# Calls of tracing and predicting a real shape, a few percent more than there are: on the machine of the table in
# design/measuring.md a million takes half a second. Of the softmax, 1.6 million are the warps of an SM that are followed instruction by instruction.
REAL_SHAPES = {
    "softmax 4096 x 65536": 3.7e6,
    "matmul 8192^3": 1.15e6,
    "attention of 16,384 tokens": 2.2e6,
    "rope of 8 sequences, 32 heads, 4096 tokens": 4.0e6,
}


@pytest.fixture(scope="module")
def rows():
    """Calls of a launch of so many rows."""
    known = {}

    def count(programs: int, how: str) -> int:
        if (programs, how) not in known:
            speed.rows(programs, how)()  # what the first launch of a process imports and compiles
            known[programs, how] = calls(speed.rows(programs, how))
        return known[programs, how]

    return count


def test_tracing_costs_little(rows):
    """A fifth of what Triton's own interpreter takes at most; the layer makes up for more than the trace costs."""
    assert rows(128, "trace") <= rows(128, "plain") / 5


def test_the_layer_is_faster_than_what_it_changes(rows):
    """In processor time by more than three."""
    assert rows(128, "layer") < rows(128, "plain") / 6


def test_a_traced_program_takes_few_calls(rows):
    assert rows(512, "trace") <= 512 * 2_200


def test_cost_is_linear_in_the_programs(rows):
    """Four times the programs take four times as long, and those that a sample leaves out nothing."""
    assert 2 <= rows(512, "trace") / rows(128, "trace") <= 4
    assert rows(4096, "sample") <= 1.01 * rows(2048, "sample")


@pytest.mark.parametrize("name", REAL_SHAPES)
def test_a_real_shape_takes_few_calls(name):
    """Without the compiler, which runs in a process of its own."""
    assert calls(speed.real_shape(name)) <= REAL_SHAPES[name]
