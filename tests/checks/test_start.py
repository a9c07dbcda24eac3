"""Notebook 00 and its exercise, whose known wrong and right answers tests/checks/test_answers.py judges with all others."""

import json
import re
from random import Random

import pytest
import torch

import gpukit
from gpukit import course
from gpukit.grading.judge import judge_source
from gpukit.grading.registry import exercise
from gpukit.grading.stubs import clear
from gpukit.reference import softmax

ROOT = course.root(__file__)
EXERCISE = exercise("start.bytes_moved")
CELLS = {cell["id"]: cell for cell in json.loads((ROOT / "notebooks/00_start.ipynb").read_text())["cells"]}


def solution() -> str:
    return (ROOT / "solutions/start.py").read_text()


def stub() -> str:
    return clear(solution(), {EXERCISE.function: EXERCISE.id})


def test_the_stub_runs_and_is_wrong_so_that_the_first_check_fails_with_a_diagnosis():
    verdict = judge_source(EXERCISE, stub(), seed=1)
    assert (verdict.state, verdict.diagnosis) == ("fail", "one-way")
    assert (verdict.checks_passed, verdict.checks_total) == (0, 7)
    assert "expected 134,217,728 bytes, yours 67,108,864" in str(verdict)
    assert 'hint 1 of 3: gpukit.hint("start.bytes_moved")' in str(verdict)


def test_one_fixed_line_is_enough():
    wrong = "return M * N * itemsize"
    assert stub().count(wrong) == 1
    assert judge_source(EXERCISE, stub().replace(wrong, "return 2 * M * N * itemsize"), seed=1).passed


def test_cases_are_fresh_for_every_seed_and_tell_every_misconception_from_the_answer():
    first, second = (EXERCISE.cases(Random(seed)) for seed in (1, 2))
    assert len(first) == len(second) == 7
    assert [case.args for case in first] != [case.args for case in second]
    for misconception in EXERCISE.misconceptions:
        if misconception.gives is not None:
            assert any(misconception.gives(*case.args) != EXERCISE.expected(*case.args) for case in first)


def test_hints_and_diagnoses_do_not_contain_the_answer():
    sentences = EXERCISE.prose.sentences.values()
    texts = [*EXERCISE.hints, *sentences]
    assert not [text for text in texts if "*" in text or "return " in text]
    assert all(sentence.endswith("?") for sentence in sentences)


@pytest.mark.parametrize(("shape", "dtype"), (((37, 781), torch.float32), ((64, 128), torch.bfloat16)))
def test_the_formula_is_what_a_trace_counts(shape, dtype):
    with gpukit.trace() as counted:
        torch.relu(x := torch.zeros(shape, dtype=dtype))
    relu = counted.torch_ops[-1]
    assert relu.read_bytes + relu.write_bytes == EXERCISE.expected(*shape, x.element_size())


def test_the_five_lines_move_four_times_the_need():
    x = torch.zeros(64, 512)
    with gpukit.trace() as counted:
        softmax.softmax(x)
    M, N = x.shape
    assert counted.bytes == (8 * M * N + 4 * M) * 4  # 5 M N + 2 M read, 3 M N + 2 M written
    assert round(counted.bytes / softmax.cost(x.shape, x.dtype).bytes, 1) == 4.0


def test_the_kernel_in_the_notebook_moves_what_the_formula_says(tmp_path):
    pytest.importorskip("triton")
    source = "".join(CELLS["kernel"]["source"])
    path = tmp_path / "cell.py"  # Triton reads a kernel's source from a file
    path.write_text(source)
    names: dict = {}
    exec(compile(source, str(path), "exec"), names)
    x = torch.randn(37, 781)
    y = torch.empty_like(x)
    with gpukit.trace() as counted:
        names["relu_kernel"][(-(-x.numel() // 1024),)](x, y, x.numel(), BLOCK=1024)
    assert torch.equal(y, torch.relu(x))
    assert counted.bytes == EXERCISE.expected(37, 781, 4)


def test_the_first_check_comes_early():
    """Half an hour of reading, at 60 words a minute with cells to run."""
    read = 0
    for name, cell in CELLS.items():
        if name == "check-start-bytes-moved":
            break
        read += len("".join(cell["source"]).split()) if cell["cell_type"] == "markdown" else 0
    assert read <= 1800


def test_the_notebooks_prose_quotes_the_exercises_label_and_links_to_files_that_exist():
    prose = "\n".join("".join(cell["source"]) for cell in CELLS.values() if cell["cell_type"] == "markdown")
    assert f"difficulty {EXERCISE.label.difficulty}/5, {EXERCISE.label.minutes} min" in prose
    for link in re.findall(r"\]\(([^)#]+)\)", prose):
        assert link.startswith("https://") or (ROOT / "notebooks" / link).resolve().exists(), link
    assert "!" not in prose
