"""Which wrong idea is named, and what is said of the cases that fail."""

import math
from dataclasses import replace
from functools import partial

import torch

from gpukit.grading import compare, recognize
from gpukit.grading.diagnose import Words
from gpukit.grading.evidence import Evidence, Outcome
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception
from gpukit.grading.ideas import On
from gpukit.grading.messages import Failure, Reply
from gpukit.grading.prose import Label, Prose

SENTENCES = {"no-rest": "Is the rest paid?", "in-bits": "Bits or bytes?", "no-floor": "Below zero?", "twice": "Twice?"}
PROSE = Prose("demo.cost", "Cost", "00_start", Label(1, 1, "cost"), ("one", "two", "three"), SENTENCES)


def cost(n: int, size: int, rest: int, *, bits: int = 1, least: bool = True) -> int:
    value = n * size * bits - rest
    return max(0, value) if least else value


COST = FunctionExercise(
    id="demo.cost",
    prose=PROSE,
    function="cost",
    cases=lambda rng: [],
    expected=cost,
    misconceptions=(
        Misconception("no-rest", gives=lambda n, size, rest: n * size),
        Misconception("in-bits", gives=partial(cost, bits=8)),
        Misconception("no-floor", gives=partial(cost, least=False)),
    ),
)
CASES = [
    Case("3 of 4", (3, 4, 5), frozenset({"long"})),
    Case("7 of 2", (7, 2, 0)),
    Case("1 of 2", (1, 2, 40), frozenset({"long", "gqa"})),
    Case("2 of 2", (2, 2, 50), frozenset({"gqa"})),
]


def seen(exercise, function, cases=CASES) -> Evidence:
    outcomes = []
    for case in cases:
        given = function(*case.args)
        reply = Reply(outputs=given) if exercise.kernel else Reply(output=given)
        outcomes.append(Outcome(case, reply, exercise.compare(case, reply)))
    return Evidence(outcomes)


def named(exercise, function, cases=CASES) -> list[str]:
    return [known.name for known in recognize.ideas(exercise, seen(exercise, function, cases))]


def test_one_idea():
    assert named(COST, lambda n, size, rest: n * size) == ["no-rest"]
    assert named(COST, lambda *args: -7) == []


def test_two_ideas_at_once_are_both_named():
    """By one function with the options of both, and by what each of them adds."""
    assert named(COST, partial(cost, bits=8, least=False)) == ["in-bits", "no-floor"]
    adding = replace(COST, expected=lambda n, size, rest: n * size + rest + 5)
    adding = replace(
        adding,
        misconceptions=(
            Misconception("no-rest", gives=lambda n, size, rest: n * size + 5),
            Misconception("twice", gives=lambda n, size, rest: n * size + rest + 10),
        ),
    )
    assert named(adding, lambda n, size, rest: n * size + 10) == ["no-rest", "twice"]


def _made(fault, scale=None):
    def gives(n, size, rest):
        least = 0 if fault == "no floor" else 1
        return (scale or 1) * max(least, n * size + (0 if fault == "no rest" else rest))

    return gives


def test_two_functions_that_one_made_are_one_with_both_faults():
    both = recognize.merged(_made("no rest"), _made("no floor"))
    assert both(0, 5, 3) == 0 and both(2, 5, 3) == 10
    assert recognize.merged(_made("no rest"), _made("no rest", 8))(2, 5, 3) == 80
    assert recognize.merged(partial(_made, "no rest"), partial(_made, "no floor"))()(0, 5, 3) == 0
    assert recognize.merged(_made("no rest", 2), _made("no floor", 8)) is None, "two numbers for one option"
    assert recognize.merged(_made("no rest"), lambda n, size, rest: n) is None
    assert recognize.merged(_made("no rest"), On(lambda *args: args, cost)) is None


def test_an_idea_on_the_arguments_that_another_changes():
    doubled = replace(
        COST,
        misconceptions=(
            Misconception("twice", gives=On(lambda n, size, rest: (2 * n, size, rest), cost)),
            Misconception("no-rest", gives=lambda n, size, rest: n * size),
        ),
    )
    assert named(doubled, lambda n, size, rest: 2 * n * size) == ["twice", "no-rest"]


def test_results_of_two_ideas_that_have_no_sum_or_quotient():
    inf = torch.tensor([math.inf, 0.0, 1.0, math.nan])
    right = torch.tensor([1.0, 0.0, 1.0, 1.0])
    twice = torch.tensor([2.0, 0.0, 2.0, 2.0])
    assert torch.equal(recognize._either(inf, twice, right)[:3], torch.tensor([math.inf, 0.0, 2.0]))
    assert torch.equal(recognize._product(right * 3, twice, right), 6 * right)
    assert recognize._product(5, 0, 0) == 5 and recognize._product(0, 7, 0) == 7


def test_two_ideas_that_change_no_result_both_are_named():
    """Unless they contradict each other where both change one. NaN is what another NaN is."""
    whole = replace(
        COST,
        expected=lambda n, size, rest: math.nan if rest == 0 else n * size,
        misconceptions=(
            Misconception("no-rest", gives=lambda n, size, rest: n * size),
            Misconception("twice", gives=lambda n, size, rest: math.nan if rest == 0 else n * size * (1 + (n == 3))),
            Misconception("in-bits", gives=lambda n, size, rest: math.nan if rest == 0 else 8 * n * size),
        ),
    )
    assert named(whole, lambda n, size, rest: n * size * (1 + (n == 3))) == ["no-rest", "twice"]

    def either(n, size, rest):  # one result of "twice", the others of "in-bits"
        return math.nan if rest == 0 else n * size * (2 if n == 3 else 8)

    assert named(whole, either) == []


def test_whole_numbers_beyond_a_float_have_factors():
    wide = [*CASES, Case("2^60 + 1 of 3", (2**60 + 1, 3, 0))]
    product = replace(
        COST,
        expected=lambda n, size, rest: 2 * n * size,
        misconceptions=(
            Misconception("no-rest", gives=lambda n, size, rest: n * size),
            Misconception("in-bits", gives=lambda n, size, rest: 16 * n),
        ),
    )
    assert named(product, lambda n, size, rest: 8 * n, wide) == ["no-rest", "in-bits"]


def test_a_pair_that_predicts_all_says_more_than_a_guess():
    guess = Misconception("twice", when=lambda evidence: True)
    exercise = replace(COST, misconceptions=(guess, *COST.misconceptions))
    assert named(exercise, partial(cost, bits=8, least=False)) == ["in-bits", "no-floor"]
    assert named(exercise, lambda *args: -7) == ["twice"]


def test_factors_of_two_ideas_multiply():
    def product(n, size, rest):
        return 2.0 * n * size

    scaled = replace(
        COST,
        expected=product,
        tolerance=1e-9,
        misconceptions=(
            Misconception("in-bits", gives=lambda *args: 8 * product(*args)),
            Misconception("twice", gives=lambda *args: product(*args) / 2),
        ),
    )
    assert named(scaled, lambda n, size, rest: 8.0 * n * size) == ["in-bits", "twice"]


def test_both_sentences_are_told():
    evidence = seen(COST, partial(cost, bits=8, least=False))
    text = "\n".join(Words(COST, "exercises/demo.py").values(evidence.outcomes).lines)
    assert "two things at once: (1) Bits or bytes?" in text and "(2) Below zero?" in text


def _rows(x):
    return {"y": 2 * x, "total": x.sum(-1)}


ROWS = KernelExercise(
    id="demo.cost",
    prose=PROSE,
    function="rows",
    cases=lambda rng: [],
    reference=lambda x: (2 * x, x.sum(-1)),
    misconceptions=(
        Misconception("twice", gives=lambda x: 2 * x),  # of y: it is the right one, so it explains nothing
        Misconception("no-rest", gives=lambda x: {"total": x[..., :-1].sum(-1)}),
        Misconception("in-bits", gives=lambda x: 16 * x),
    ),
)
TENSORS = [Case(f"x [{n}, 5]", (torch.arange(5.0 * n).view(n, 5) + 1,)) for n in (1, 3)]


def test_an_idea_speaks_of_what_is_wrong():
    """An idea about one output does not explain a fault in another."""
    total = lambda x: {**_rows(x), "total": x.sum(-1) + 1}  # noqa: E731
    assert named(ROWS, total, TENSORS) == []
    assert named(ROWS, lambda x: {**_rows(x), "total": x[..., :-1].sum(-1)}, TENSORS) == ["no-rest"]
    assert named(ROWS, lambda x: {**_rows(x), "y": 16 * x}, TENSORS) == ["in-bits"]
    assert named(ROWS, lambda x: {"y": 16 * x, "total": x.sum(-1) + 1}, TENSORS) == []


def test_two_ideas_about_two_outputs():
    assert named(ROWS, lambda x: {"y": 16 * x, "total": x[..., :-1].sum(-1)}, TENSORS) == ["no-rest", "in-bits"]


def test_two_ideas_are_not_named_for_one_case_where_they_would_spoil_the_others():
    def wrong_once(x):
        return {"y": 16 * x, "total": x[..., :-1].sum(-1)} if len(x) == 1 else {**_rows(x)}

    assert named(ROWS, wrong_once, TENSORS[:1]) == ["no-rest", "in-bits"]
    assert named(ROWS, wrong_once, TENSORS) == []


def test_a_tag_is_told_only_if_it_alone_tells_the_cases_apart():
    def fails(*names):
        return recognize.pattern(seen(COST, lambda n, *rest: -1 if f"{n} of {rest[0]}" in names else cost(n, *rest)))

    assert (
        fails("1 of 2", "2 of 2") == "fails for every case with fewer heads for keys and values; passes for the others"
    )
    assert fails("3 of 4", "1 of 2").startswith("fails for every case with rows longer than a block")
    assert fails("1 of 2") == "fails for 1 of 2; passes for 3 of 4 | 7 of 2 | 2 of 2"
    both = [replace(case, tags=case.tags | {"tail"}) if "gqa" in case.tags else case for case in CASES]
    evidence = seen(COST, lambda n, size, rest: -1 if rest >= 40 else cost(n, size, rest), both)
    assert recognize.pattern(evidence).startswith(
        "fails for 1 of 2 | 2 of 2; passes"
    )  # two tags, and one of them is chance


def test_numbers_are_written_until_they_differ():
    assert compare.told_apart(-1.3159, -1.31592) == ("-1.3159", "-1.31592")
    assert compare.told_apart(1.0, 2.0) == ("1", "2")
    off = torch.tensor([1.0, 1.0 + 2**-18])
    wrong = compare.plain(off[1:], off[:1])
    assert "expected 1, yours 1.000004" in wrong.text and "elements differ" not in wrong.text
    assert compare.plain((1, 3), (1, 2), names=("reads", "writes")).text == "writes: expected 2, yours 3"
    assert compare.plain(2.0, 2, unit="bytes").text == "expected 2 bytes, an int, yours 2.0, a float"
    assert compare.plain(0.0, -0.0).text == "expected -0.0, yours 0.0" and compare.plain(-0.0, 0.0) is None


def test_words_fit_the_place_and_the_gap():
    def told(message, terminal):
        words = Words(replace(COST, id="start.cost"), "exercises/start.py", terminal=terminal)
        return "\n".join(words.raised(Failure("NotImplementedError", message, 3, "", True, None, ""), None).lines)

    assert "run this cell again" in told("start.cost", False) and 'gpukit.hint("start.cost")' in told(
        "start.cost", False
    )
    assert "gpukit check start.cost" in told("start.cost", True) and "gpukit hint start.cost 1" in told(
        "start.cost", True
    )
    assert "cell" not in told("start.cost", True)
    assert "belongs to start.other" in told("start.other", False)
