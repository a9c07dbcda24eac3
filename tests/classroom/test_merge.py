"""A learner's text and a changed stub, line by line."""

import textwrap

import pytest

from gpukit import course
from gpukit.classroom.merge import merge, section
from gpukit.grading import stubs

ROOT = course.root(__file__)
OLD = textwrap.dedent('''\
    """A file of two exercises."""

    import torch


    # ---------------------------------------- toy.first
    def first(x: int, n: int) -> int:
        """What it returns."""
        raise NotImplementedError("toy.first")  # your code here


    # ---------------------------------------- toy.second
    def second(x):
        """Starts from code."""
        y = x + 1  # your code here
        z = y + 1
        return z
    ''')
GAP = '    raise NotImplementedError("toy.first")  # your code here\n'
MINE = OLD.replace(GAP, "    total = x * n\n    return total\n").replace("import torch", "import math\n\nimport torch")


def merged(mine: str, new: str, old: str | None = OLD):
    found = merge(old, mine, new)
    again = merge(old, found.text, new)
    assert again.text == found.text, "a second time changes nothing"
    return found


def test_a_filled_gap_goes_into_a_stub_that_changed_around_it():
    new = OLD.replace("What it returns.", "x times n,\n    in whole numbers.").replace(
        "two exercises", "three exercises"
    )
    new += "\n\n# ---------------------------------------- toy.third\ndef third():\n" + GAP.replace("first", "third")
    found = merged(MINE, new)
    assert found.to_do == {}
    assert found.text == new.replace(GAP, "    total = x * n\n    return total\n").replace(
        "import torch", "import math\n\nimport torch"
    )


def test_lines_next_to_the_gap_are_merged():
    old = OLD.replace(GAP, "    a = x\n" + GAP + "    return a\n")
    new = old.replace("    a = x\n", "    a = 2 * x\n").replace("    return a\n", "    return a + n\n")
    mine = old.replace(GAP, "    a += n\n")
    assert merged(mine, new, old).text == new.replace(GAP, "    a += n\n")


def test_a_stub_that_did_not_change_leaves_the_file_alone():
    anything = "def f(:\n"
    assert merge(OLD, anything, OLD).text == anything and merge(OLD, OLD, OLD).text == OLD
    assert merge(OLD, OLD, OLD.replace("two", "2")).text == OLD.replace("two", "2")


def test_another_signature_keeps_the_new_stub_and_the_other_answers():
    new = OLD.replace("def second(x):", "def second(x, y):")
    mine = MINE.replace("    z = y + 1\n", "    z = 2 * y\n")
    found = merged(mine, new)
    assert found.to_do == {"toy.second": "second has other arguments now"}
    assert "total = x * n" in found.text and "def second(x, y):" in found.text and "z = 2 * y" not in found.text
    untouched = merged(MINE, new)
    assert untouched.to_do == {}, "there was nothing to lose in toy.second"
    annotated = merged(mine, OLD.replace("x: int, n: int", "x: int, n: float"))
    assert annotated.to_do == {} and "n: float" in annotated.text, "an annotation is no other argument"


def test_code_to_start_from_is_replaced_only_if_the_learner_left_it():
    new = OLD.replace("    z = y + 1\n", "    z = y + 2\n")
    mine = OLD.replace("    y = x + 1  # your code here\n    z = y + 1\n", "    z = x\n")
    assert "z = x" in merged(mine, new).text and not merged(mine, new).to_do
    half = merged(OLD.replace("y = x + 1  # your", "y = x + 5  # your"), new)
    assert "x + 5" in half.text and "toy.second" in half.to_do, "both changed the gap: the learner should look"


def test_both_changed_the_same_line_outside_a_gap():
    why = {"toy.first": "you and the new release changed the same lines"}
    new = OLD.replace("What it returns.", "x times n.")
    found = merged(MINE.replace("What it returns.", "My notes."), new)
    assert found.to_do == why and "My notes." in found.text and "total = x * n" in found.text, (
        "one edit with the answer"
    )
    old, new = (text.replace(GAP, f"    n = int(n)\n{GAP}") for text in (OLD, new))
    mine = old.replace(GAP, "    total = x * n\n").replace("What it returns.", "My notes.")
    found = merged(mine, new, old)
    assert found.to_do == why and "x times n." in found.text and "total = x * n" in found.text, "an edit of its own"


def test_an_exercise_that_is_gone_is_named():
    new = OLD[: section(OLD, "toy.second")[0]]
    mine = MINE.replace("z = y + 1", "z = y")
    assert merge(OLD, mine, new).to_do == {"toy.second": "the new release has no such exercise"}
    assert merge(OLD, MINE, new).to_do == {}


def test_rules_and_markers_that_were_deleted():
    new = OLD.replace("What it returns.", "x times n.")
    bare = "\n".join(line for line in MINE.split("\n") if "# ---" not in line and "your code here" not in line)
    found = merge(OLD, bare, new)
    assert "total = x * n" in found.text and "x times n." in found.text
    twice = MINE + MINE[MINE.index("# ---") :]
    assert "total = x * n" in merge(OLD, twice, new).text and "x times n." in merge(OLD, twice, new).text
    assert section(twice, "toy.first") is None


def test_a_file_that_is_something_else_altogether_is_kept_by_the_caller():
    new = OLD.replace("What it returns.", "x times n.").replace("def second(x):", "def second(x, y):")
    for mine in ("", "def mine():\n    return 1\n", "x" * 1000, "\n" * 30_000, MINE.replace("def ", "dfe ")):
        found = merge(OLD, mine, new)
        assert found.text == mine or found.to_do or not mine.strip(), mine[:40]


def test_without_the_old_stub_nothing_is_guessed():
    assert merge(None, MINE, OLD).text == MINE and not merge(None, MINE, OLD).to_do
    found = merge(None, MINE, OLD.replace("first(x: int", "first(z: int"))
    assert "NotImplementedError" in found.text and "not known" in found.to_do[""]


@pytest.mark.skipif(not (ROOT / "solutions").is_dir(), reason="a copy of the course without solutions")
def test_the_solution_of_every_concept_goes_into_its_reworded_stub():
    """Each gap filled as the solution fills it, each docstring reworded: nothing is lost, and the result is the solution's."""
    for concept, stub in stubs.made(ROOT).items():
        solution = (ROOT / "solutions" / f"{concept}.py").read_text()
        mine = "".join(
            line for line in solution.splitlines(keepends=True) if "SOLUTION" not in line and "# STUB" not in line
        )
        for text in (stub, mine):
            assert '"""' in text
        found = merged(mine, _reworded(stub), stub)
        assert found.to_do == {} and found.text == _reworded(mine), concept


def _reworded(text: str) -> str:
    """Each function's docstring begins with another line."""
    return text.replace('    """', '    """In other words.\n\n    ', 1) + "\n# The end.\n"
