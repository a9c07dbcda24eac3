"""How long the simulator may take. Bounds leave room for a machine that is busy; `make measure` prints the figures."""

import pytest
import triton

from gpukit.simulator.compiler import compile as compile_module

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

if triton.knobs.runtime.interpret:
    from tests.simulator import speed

ROOM = 1.6  # two busy hyperthreads share one core
PLAIN_S = 0.2  # 128 programs in Triton's own interpreter, on the machine of CONTRIBUTING.md's table


def slower():
    """How many times slower this machine is, at this moment: shared ones differ by a factor of two."""
    return max(1.0, speed.rows_s(128, "plain") / PLAIN_S)


def test_tracing_costs_little():
    """At most 1.3 times what Triton's own interpreter takes; the layer makes up for more than the trace costs."""
    assert speed.rows_s(128, "trace") <= 1.3 * speed.rows_s(128, "plain")


def test_the_layer_is_faster_than_what_it_changes():
    assert speed.rows_s(128, "layer") < speed.rows_s(128, "plain")


def test_a_thousand_programs_take_two_seconds():
    assert speed.rows_s(1024, "trace", best_of=1) <= 2 * ROOM * slower()


def test_cost_is_linear_in_the_programs():
    """Four times the programs take four times as long, and as little for those that a sample leaves out."""
    few, many = speed.rows_s(128, "trace"), speed.rows_s(512, "trace")
    assert 2 <= many / few <= 4 * ROOM
    # Four times as long, if it cost anything; 2.5 because a loaded machine is no quiet one.
    assert speed.rows_s(8192, "sample") <= 2.5 * speed.rows_s(2048, "sample")


@pytest.mark.parametrize("name", speed.REAL_SHAPES if triton.knobs.runtime.interpret else ())
def test_a_real_shape_takes_five_seconds(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKIT_CACHE", str(tmp_path))  # nothing is compiled yet
    monkeypatch.setattr(compile_module, "_recent", {})
    assert speed.real_shape_s(name) <= 5 * ROOM * slower()
