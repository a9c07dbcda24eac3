"""The checks against answers whose verdict is known: solutions/answers, and those made from each solution.

Here the solution and the stub of each exercise, and a wrong answer to every third; `gpukit integrity` (in `make prove`) tries
every answer, the right ones with several seeds, those made from the solution, and mutants.
"""

import ast
from dataclasses import replace

import pytest

from gpukit import integrity
from gpukit.grading import prose, registry
from gpukit.grading.exercise import KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.grading.verdict import MAX_LINES
from gpukit.integrity import AnswerError, parse
from tests.checks import known

EXERCISES = list(registry.exercises().values())
KERNELS = [exercise for exercise in EXERCISES if isinstance(exercise, KernelExercise)]
# What a check recognizes and no answer to this exercise shows. The answer that does belongs to another exercise, whose check
# shares the idea; or the result is also another idea's, which comes first.
PROVEN_ELSEWHERE = {
    "softmax": {"tail-mask", "max-over-padding", "no-max-subtraction", "no-normalisation", "forward-first"},
    "fusion": {"program-id"},
    "gelu.backward": {"forward-first"},
    "gelu.swiglu": {"contiguous-assumed"},
    "norms.backward": {"forward-first"},
    "norms.rope": {"gradient-not-turned"},
    "adamw.resume": {"not-resumed"},
    "memory.serve": {"cache-in-elements"},  # as many bytes as keys-only
}


@pytest.mark.parametrize("exercise", EXERCISES[::3], ids=known.ids)
def test_a_wrong_answer_is_rejected_with_its_diagnosis(exercise):
    answer = next(answer for answer in known.wrong(exercise) if answer.diagnosis != integrity.REJECTED)
    verdict = judge_source(exercise, answer.source, seed=1)
    assert not verdict.passed, answer.name
    assert verdict.diagnosis == answer.diagnosis, f"{answer.name}\n{verdict}\n{verdict.detail[-2000:]}"
    assert integrity.badly_said(verdict) == ""


def test_right_answers_alone_count_for_each_seed():
    (row,) = integrity.integrity(["dtypes.round"], known.ROOT, seeds=(7, 9), right_alone=True)
    rights = len(known.right(registry.exercise("dtypes.round")))
    assert row.right == (2 * (rights + 1),) * 2  # and the solution
    assert row.wrong == row.generated == row.mutants == (0, 0) and row.whole


def test_what_is_badly_said():
    said = judge_source(EXERCISES[0], known.wrong(EXERCISES[0])[0].source, seed=1)
    long, many = (replace(said, lines=lines) for lines in (("x" * 141,), ("x",) * (MAX_LINES + 1)))
    none = replace(said, lines=())
    assert [integrity.badly_said(verdict) for verdict in (said, long, many, none)] == [
        "",
        "a line of 141 characters",
        f"{MAX_LINES + 1} lines",
        "0 lines",
    ]


@pytest.mark.parametrize("exercise", EXERCISES, ids=known.ids)
def test_solution_passes_and_stub_does_not(exercise):
    text = integrity.solution(exercise.concept, known.ROOT)
    verdict = judge_source(exercise, text, seed=1)
    assert verdict.passed, f"{verdict}\n{verdict.detail[-2000:]}"
    assert verdict.checks_passed == verdict.checks_total > 0
    stub = judge_source(exercise, clear(text), seed=1)
    assert stub.state in ("todo", "fail"), str(stub)
    ast.parse(clear(text))


@pytest.mark.parametrize("exercise", EXERCISES, ids=known.ids)
def test_exercise_is_complete(exercise):
    assert integrity.unfinished(exercise, known.answers(exercise), known.ROOT) == []
    recognized = {idea.label for idea in exercise.misconceptions}
    shown = {answer.diagnosis for answer in known.wrong(exercise)}
    elsewhere = PROVEN_ELSEWHERE.get(exercise.concept, set()) | PROVEN_ELSEWHERE.get(exercise.id, set())
    assert recognized - shown - elsewhere == set(), "no known answer gets these"


@pytest.mark.parametrize("concept", prose.concepts())
def test_files_of_a_concept_name_the_same_exercises(concept):
    listed = list(registry.concept(concept))
    assert list(prose.concept(concept)) == listed, f"gpukit/checks/{concept}.md and {concept}.py differ"
    answered = list(dict.fromkeys(answer.exercise for answer in known.of_concept(concept)))
    assert answered == listed, f"solutions/answers/{concept}.txt and gpukit/checks/{concept}.py differ"
    shared = set(next(iter(prose.concept(concept).values())).shared)
    used = {idea.name for exercise in registry.concept(concept).values() for idea in exercise.misconceptions}
    assert shared <= used, f"gpukit/checks/{concept}.md says what no check recognizes: {sorted(shared - used)}"


# ------------------------------------------------------------------------------------------------- generated answers
@pytest.mark.parametrize("exercise", KERNELS, ids=known.ids)
def test_generated_answers_are_files_that_differ(exercise):
    text = integrity.solution(exercise.concept, known.ROOT)
    made = integrity.generated(exercise, text)
    assert {"torch-has-the-last-word", "input-changed"} <= {answer.name for answer in made}
    assert len({text, *(answer.source for answer in made)}) == len(made) + 1
    for answer in made:
        ast.parse(answer.source)


# ---------------------------------------------------------------------------------------------------------- mutants
def test_which_mutants_are_tried():
    kernel, function = registry.exercise("softmax.fused"), registry.exercise("dtypes.decode")
    found = list(range(25))
    some = [0, 10, 20]  # the same in every run
    wanted = {"all": (found, found), "some": (some, found), "functions": ([], found), None: ([], [])}
    for mutate, (of_kernel, of_function) in wanted.items():
        assert integrity._tried(found, kernel, mutate) == of_kernel
        assert integrity._tried(found, function, mutate) == of_function


# --------------------------------------------------------------------------------------------------- how they are read
SOLUTION = """import math

# ---------- demo.add
def add(a, b):
    total = a + b
    return total


# ---------- demo.twice
def twice(a):
    total = a + a
    return total
"""


def read(text: str) -> list[integrity.Answer]:
    return parse(text, SOLUTION, "demo.txt")


def test_answers_are_fragments_lines_and_files():
    first, second, third, fourth = read(
        """# a comment
=== demo.add
sign  minus   a + b => a - b
right  in-one-line
    =     total = a + b
    -     return total
    +     return (total)

=== demo.twice
imports  no-math   import math =>
right  by-hand
    | def twice(a):
    |     return 2 * a
"""
    )
    assert (first.exercise, first.name, first.diagnosis, first.where) == (
        "demo.add",
        "minus",
        "sign",
        "demo.txt, line 3",
    )
    assert first.source == SOLUTION.replace("a + b", "a - b")
    assert second.source == SOLUTION.replace("return total", "return (total)", 1)
    assert third.source == SOLUTION.replace("import math", "")
    assert fourth.source == "def twice(a):\n    return 2 * a\n"


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("=== demo.add\nsign  minus   a * b => a - b", "demo.txt, line 2, demo.add: 'a * b' occurs nowhere"),
        (
            "=== demo.add\nsign  minus   total => b",
            "demo.txt, line 2, demo.add: 'total' occurs 2 times in the solution",
        ),
        ("=== demo.add\nsign  minus\n    -     return\n", "demo.txt, line 3, demo.add: 'return' occurs nowhere"),
        ("=== demo.add\nsign  minus   a + b => a + b", "demo.txt, line 2, demo.add: 'minus' changes nothing"),
        ("=== demo.add\nsign\n", "demo.txt, line 2, demo.add: expected 'diagnosis  name', got 'sign'"),
        ("=== demo.add\nsign  minus a + b => a - b", "demo.txt, line 2, demo.add: columns are two spaces apart"),
        (
            "=== demo.ad\nsign  minus   a + b => a - b",
            "demo.txt, line 1: no section of the solution is called 'demo.ad'",
        ),
        ("=== demo.add\nsign  minus  a - b", "demo.txt, line 2, demo.add: expected 'old text => new text'"),
        ("=== demo.add\n    a => b", "demo.txt, line 2: an indented line before the first answer of demo.add"),
        ("sign  minus   a + b => a - b", "demo.txt, line 1, : expected 'diagnosis  name'"),
        (
            "=== demo.add\nx  n   a + b => b\nx  n   a + b => a",
            "demo.txt, line 3, demo.add: a second answer is called 'n'",
        ),
    ),
)
def test_an_answer_that_cannot_be_applied_names_file_line_and_exercise(text, message):
    with pytest.raises(AnswerError) as raised:
        read(text)
    assert message in str(raised.value)


def test_a_concept_without_answers_is_named(tmp_path):
    with pytest.raises(AnswerError, match=r"norms has no known answers: solutions/answers/norms\.txt is missing"):
        integrity.answers("norms", tmp_path)
