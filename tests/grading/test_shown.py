"""How a verdict looks in a notebook: a todo is amber and stops nothing, a pass is green, a failure raises, which is red."""

import shutil

import pytest

import gpukit
from gpukit import course
from gpukit.grading.verdict import COLORS, RED, CheckFailed, Shown, Verdict

ROOT = course.root(__file__)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUKIT_IMPL", raising=False)
    return tmp_path


def test_a_todo_is_shown_and_returns(copy, capsys):
    gpukit.check("dtypes.decode")
    assert capsys.readouterr().out.startswith("dtypes.decode: not written yet")
    with pytest.raises(CheckFailed):
        gpukit.check("start.bytes_moved")  # handed out wrong, not empty


def test_a_concept_is_one_line_for_each_exercise_and_their_number(copy, capsys):
    gpukit.check("dtypes")
    *lines, count = capsys.readouterr().out.splitlines()
    of_dtypes = [name for name in gpukit.grading.registry.catalog() if name.startswith("dtypes.")]
    assert [line.split()[:2] for line in lines] == [["TODO", name] for name in of_dtypes]
    assert count == f"0 of {len(of_dtypes)} exercises pass"
    gpukit.check("start")
    assert capsys.readouterr().out.startswith("FAIL start.bytes_moved  values differ (0 of 7 cases pass)\n0 of 1 ")


@pytest.mark.parametrize(("state", "color"), [*COLORS.items(), ("fail", RED), ("error", RED)])
def test_each_state_has_its_color(state, color):
    shown = Shown([(state, "a < b")])._repr_mimebundle_()
    assert color in shown["text/html"] and "a &lt; b" in shown["text/html"] and shown["text/plain"] == "a < b"


def test_the_line_of_a_verdict():
    lines = ("a.b: not written yet: exercises/a.py, line 3 still raises NotImplementedError", "  more")
    assert Verdict("a.b", "todo", 0, 1, "exercises", lines).line == "TODO a.b  not written yet: exercises/a.py, line 3"
    assert Verdict("a.b", "pass", 2, 2, "exercises").line == "PASS a.b  2/2"
