"""The files around the course say what is true: versions, commands and targets that exist."""

import argparse
import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import gpukit
from gpukit import cli
from gpukit.classroom import commands as classroom

ROOT = Path(__file__).resolve().parents[1]


def test_make_alone_prints_every_target():
    said = subprocess.run(
        ["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True
    ).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^  ([a-z-]+) ", said, re.MULTILINE) == phony
    assert max(map(len, said.splitlines())) <= 80


def test_versions_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == gpukit.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == gpukit.__version__


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob(".github/**/*.yml")), ROOT / "docs" / "grade.yml"], ids=lambda path: path.stem
)
def test_forms_and_workflows_are_yaml(path):
    text = yaml.safe_load(path.read_text())
    assert text["name"] and ("jobs" in text or text["body"])


def test_the_container_sets_up_as_make_lab_does():
    """Its first step is the Makefile's own, with the same file and the same environment."""
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"] == "python3 -I gpukit/bootstrap.py --venv .venv"
    assert "-I gpukit/bootstrap.py --venv" in (ROOT / "Makefile").read_text()
    assert container["postAttachCommand"].startswith("make lab")


def test_binder_installs_this_course_on_a_python_that_it_supports():
    lines = (ROOT / ".binder" / "requirements.txt").read_text().splitlines()
    options = dict(line.split() for line in lines if line.startswith("--"))
    assert (ROOT / ".binder" / options["--constraint"]).samefile(ROOT / "constraints.txt")
    assert options["--editable"] == "." and "whl/cpu" in options["--extra-index-url"]
    python = tuple(map(int, (ROOT / ".binder" / "runtime.txt").read_text().strip().removeprefix("python-").split(".")))
    low, high = re.search(r'requires-python = ">=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert tuple(map(int, low.split("."))) <= python < tuple(map(int, high.split(".")))


DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("design/*.md")])
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@documents
def test_commands_that_documents_name_exist(path):
    _, commands = cli._parser()
    text = path.read_text()
    named = set(re.findall(r"`(?:\.venv/bin/)?gpukit ([a-z]+)", text))
    assert named - {*commands} == set()
    actions = commands_of_a_class()
    assert set(re.findall(r"gpukit class ([a-z]+)", text)) <= actions
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@documents
def test_links_of_documents_lead_to_files_and_headings(path):
    for link in re.findall(r"\]\(([^()\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        name, _, place = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        headings = re.findall(r"(?m)^#+ (.*)$", target.read_text()) if place else ()
        assert not place or place in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings}, (
            link
        )


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *ROOT.glob("design/*.md")], ids=lambda path: path.stem)
def test_files_that_pages_for_contributors_name_exist(path):
    """In backticks with their folder, from the root of the project."""
    for name in re.findall(
        r"`((?:gpukit|tests|docs|design|solutions|notebooks|exercises)/[\w./-]*)`", path.read_text()
    ):
        assert (ROOT / name).exists(), name


def commands_of_a_class() -> set[str]:
    parser = argparse.ArgumentParser()
    classroom.add_arguments(parser)
    (actions,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {*actions.choices}


def test_type_checkers_know_every_public_name():
    stub = (ROOT / "gpukit" / "__init__.pyi").read_text()
    told = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", stub, re.MULTILINE)}
    assert told == gpukit._PUBLIC and (ROOT / "gpukit" / "py.typed").exists()


def test_the_picture_at_the_head_is_drawn_from_the_rows():
    from gpukit.widgets import ladder

    assert (ROOT / "docs" / "ladder.svg").read_text() == ladder.front()
    shown = re.findall(r"from ([\d,]+) .* to ([\d,]+) ", (ROOT / "README.md").read_text())[0]
    speeds = [f"{float(row['tokens_per_s']):,.0f}" for row in ladder.rows("gpt2") if row["rung"] in ("naive", "fp8")]
    assert [*shown] == speeds


def test_the_head_counts_lessons_and_exercises_right():
    from gpukit.grading import registry

    head = (ROOT / "README.md").read_text().split("##")[0]
    assert f"{len(registry.catalog())} graded exercises" in head
    assert "eighteen Jupyter notebooks" in head and len([*ROOT.glob("notebooks/*.ipynb")]) == 18


def test_the_diagnosis_that_the_readme_shows_is_the_one_of_the_check():
    from gpukit.grading import registry

    text = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(r"^- tail-mask: (.*)$", (ROOT / "gpukit/checks/softmax.md").read_text(), re.MULTILINE)[1]
    assert sentence.format(lanes=243) in text and 1024 - 781 == 243
    shown = re.search(r"softmax.fused: values differ \((\d+) of (\d+) cases pass\)", text)
    cases = registry.exercise("softmax.fused").cases(random.Random(1))
    lengths = [case.args[0].shape[-1] for case in cases]
    whole = sum(n & (n - 1) == 0 for n in lengths)  # rows without padding lanes, which this mistake leaves right
    assert [*map(int, shown.groups())] == [whole, len(cases)]
