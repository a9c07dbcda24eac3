"""`pytest --nbval notebooks` as a grader, on tiny notebooks with a judge made for the test.

That judge reads the verdict from exercises/<concept>.py ("# state: pass"), so a test says in one word what is graded.
"""

import json
import os
import re
import signal
import subprocess
import sys
import types
from importlib.metadata import entry_points, version
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukit.grading import registry
from gpukit.grading.check_cells import check_ids, kernel_environment, protect_imports
from gpukit.grading.verdict import Verdict
from tests.waiting import until

pytest_plugins = ["pytester"]

CHECK_A = 'import gpukit; gpukit.check("alpha.first")'
CHECK_B = 'import gpukit; gpukit.check("beta.second")'
INSTALLED = any(entry.value == "gpukit.grading.plugin" for entry in entry_points(group="pytest11"))
# Plain: a run inside a test finds gpukit imported, and warns that it cannot rewrite the plugin's asserts.
PLUGIN = ["--assert=plain", *([] if INSTALLED else ["-p", "gpukit.grading.plugin"])]


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Each run inside a test would load it anew, which takes seconds."""
    import nbval.plugin  # noqa: F401


def cell(source, output=None, tags=(), **changes):
    """A saved code cell: `output` is the text that it printed."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": output}] if output else []
    metadata = {"tags": list(tags)} if tags else {}
    content = {"cell_type": "code", "execution_count": 1, "metadata": metadata, "outputs": outputs, "source": source}
    return {**content, **changes}


class Course:
    """A course in a temporary folder: notebooks/01_tiny.ipynb owes alpha.first and beta.second."""

    def __init__(self, pytester, monkeypatch, folder="course"):
        self.pytester = pytester
        self.root = pytester.path / folder
        for name in ("notebooks", "exercises"):
            (self.root / name).mkdir(parents=True)
        self.calls = []
        known = {
            name: SimpleNamespace(id=name, notebook="01_tiny", concept=name.partition(".")[0])
            for name in ("alpha.first", "beta.second")
        }
        monkeypatch.setattr(registry, "exercises", lambda: known)
        fake = types.ModuleType("gpukit.grading.judge")
        fake.judge = self.judge
        monkeypatch.setitem(sys.modules, "gpukit.grading.judge", fake)
        self.answer("alpha", "pass")
        self.answer("beta", "pass")

    def judge(self, exercise_id, impl="exercises", root=None, seed=None, terminal=False):
        self.calls.append((exercise_id, impl, root, seed))
        if exercise_id not in registry.exercises():
            raise registry.UnknownExercise(f"no exercise is called {exercise_id!r}")
        text = (root / "exercises" / f"{exercise_id.partition('.')[0]}.py").read_text()
        state = "pass" if impl == "solutions" else re.search(r"# state: (\S+)", text)[1]
        if state == "interrupt":
            raise KeyboardInterrupt
        if state == "broken":
            raise OSError("no such device")
        passed = 3 if state == "pass" else 1
        lines = (
            () if state == "pass" else (f"{exercise_id}: {state}", f"  see {root}/exercises: what fills the padding?")
        )
        label = "" if state == "pass" else "tail-mask"
        return Verdict(exercise_id, state, passed, 3, impl, lines, label, 0.25, 7, detail="learner output")

    def answer(self, concept, state):
        (self.root / "exercises" / f"{concept}.py").write_text(f"# state: {state}\n")

    def notebook(self, *cells, name="01_tiny.ipynb", text=None):
        content = {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        for number, each in enumerate(cells):
            each.setdefault("id", f"cell-{number}")
        path = self.root / "notebooks" / name
        path.write_text(json.dumps(content) if text is None else text)
        return path

    def run(self, *args, where=None, cwd=None, **kwargs):
        os.chdir(cwd or self.root)
        target = [] if where == () else [where or "notebooks"]
        report = self.pytester.path / "out.json"
        result = self.pytester.runpytest_inprocess(
            *PLUGIN,
            "-p",
            "no:cacheprovider",
            "--color=no",
            "--nbval",
            f"--gpukit-json={report}",
            *args,
            *target,
            **kwargs,
        )
        self.output = result.stdout.str() + result.stderr.str()
        self.outcomes = {} if result.ret == 4 else result.parseoutcomes()
        self.report = json.loads(report.read_text()) if report.exists() else None
        report.unlink(missing_ok=True)
        return result

    def states(self):
        return {r["id"]: r["state"] for r in self.report["exercises"]}


@pytest.fixture
def course(pytester, monkeypatch):
    monkeypatch.delenv("GPUKIT_IMPL", raising=False)
    # What the kernels of these tests import: a gpukit whose check always claims a pass, and costs nothing.
    fake = pytester.path / "fake" / "gpukit.py"
    fake.parent.mkdir()
    fake.write_text("def check(exercise_id):\n    print('PASS', exercise_id, ' 3/3')\n")
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    return Course(pytester, monkeypatch)


# ---- states, toggle and report
def test_stubs_fail_as_todo_and_nothing_else_does(course):
    course.answer("alpha", "todo")
    course.answer("beta", "todo")
    course.notebook(cell("print(1)", "1\n"), cell(CHECK_A), cell("x = 2"), cell(CHECK_B), cell("print(x)", "2\n"))
    result = course.run("-v")
    assert result.ret == 1
    assert course.outcomes == {"passed": 3, "failed": 2}
    assert course.states() == {"alpha.first": "todo", "beta.second": "todo"}
    assert "::Cell 1 FAILED alpha.first" in course.output
    assert "FAILED alpha.first notebooks/01_tiny.ipynb::Cell 1 - alpha.first: todo" in course.output
    assert "0 of 2 exercises pass, 2 todo" in course.output
    assert "learner output" in course.output  # -v shows the detail


def test_solutions_pass_and_say_that_they_are_no_grade(course, monkeypatch):
    course.answer("alpha", "todo")
    course.notebook(cell("import os; print(os.environ['GPUKIT_IMPL'])", "solutions\n"), cell(CHECK_A), cell(CHECK_B))
    result = course.run("--gpukit-impl=solutions")
    assert result.ret == 0 and course.outcomes == {"passed": 3}
    assert course.report["impl"] == "solutions" and course.report["complete"] is True
    assert "an instructor's run, not a grade" in course.output
    monkeypatch.setenv("GPUKIT_IMPL", "solutions")
    assert course.run("-k", "alpha.first").ret == 0  # the variable alone
    assert course.run("--gpukit-impl=exercises", "-k", "alpha.first").ret == 1  # the option goes before the variable


def test_what_a_stopped_run_did_not_reach_is_missing_and_was_asked_for(course):
    course.answer("alpha", "fail")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    course.run("-x", where="notebooks/01_tiny.ipynb")
    assert course.states() == {"alpha.first": "fail", "beta.second": "missing"} and course.report["complete"] is False
    assert "beta.second  missing" in course.output and "0 of 2 exercises pass, 1 fail, 1 missing" in course.output
    assert "not asked for" not in course.output
    course.run("-x", where="notebooks/01_tiny.ipynb::Cell 0")
    assert course.states()["beta.second"] == "missing" and "; 1 more was not asked for" in course.output


def test_unknown_implementation_is_one_sentence(course):
    course.notebook(cell(CHECK_A))
    assert course.run("--gpukit-impl=answers").ret == 4
    assert "must be exercises or solutions, got 'answers'" in course.output


def test_reports_have_exactly_the_agreed_fields_no_paths_and_no_colours(course):
    course.answer("beta", "fail")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    junit = course.root / "out.xml"
    mine = course.root / "mine.xml"
    course.run(f"--junitxml={junit}", f"--gpukit-junit={mine}", "--color=yes", "--gpukit-seed=7")
    assert list(course.report) == ["impl", "complete", "fence", "exercises"]
    assert course.report["exercises"][0] == {
        "id": "alpha.first", "state": "pass", "checks_passed": 3, "checks_total": 3,
        "label": "", "diagnosis": "", "seconds": 0.25,
    }  # fmt: skip
    assert course.report["exercises"][1]["label"] == "tail-mask"
    assert course.report["exercises"][1]["diagnosis"].startswith("beta.second: fail")
    assert str(course.root) not in json.dumps(course.report)
    xml = junit.read_text()
    assert '<property name="exercise" value="beta.second"' in xml and "#x1B" not in xml
    assert '<testcase classname="beta" name="beta.second"' in mine.read_text()
    assert {seed for *_, seed in course.calls} == {7}


def test_failure_text_is_the_diagnosis_alone(course):
    course.answer("alpha", "fail")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    course.run()
    failures = course.output.partition("FAILURES")[2].partition("gpukit: exercises")[0]
    assert "alpha.first: fail\n  see " in failures
    assert "Traceback" not in failures and "Input:" not in failures and "import gpukit" not in failures


# ---- what is saved in a notebook decides nothing
CHANGED_CHECKS = {
    "stripped": cell(CHECK_A, execution_count=None),
    "saved as passed": cell(CHECK_A, "PASS alpha.first  3/3\n"),
    "saved as failed": cell(CHECK_A, "FAIL\n"),
    "saved with an error": cell(
        CHECK_A, outputs=[{"output_type": "error", "ename": "CheckFailed", "evalue": "no", "traceback": []}]
    ),
    "outputs without a count": cell(CHECK_A, "PASS\n", execution_count=None),
    "skip": cell(CHECK_A, tags=["nbval-skip"]),
    "raises-exception": cell(CHECK_A, tags=["raises-exception"]),
    "ignored output": cell(CHECK_A, tags=["nbval-ignore-output"]),
    "commented marks": cell("# NBVAL_SKIP\n# NBVAL_RAISES_EXCEPTION\n" + CHECK_A),
    "try": cell('import gpukit\ntry:\n    gpukit.check("alpha.first")\nexcept Exception:\n    pass'),
    "never called": cell('import gpukit\nif False:\n    gpukit.check("alpha.first")'),
    "imported name": cell('from gpukit import check\ncheck("alpha.first")'),
    "magic": cell('%%time\nimport gpukit\ngpukit.check("alpha.first")'),
    "raises before": cell('1 / 0\nimport gpukit\ngpukit.check("alpha.first")'),
    "noise": cell("import warnings; warnings.warn('hm'); import sys; print('chatter', file=sys.stderr)\n" + CHECK_A),
    "a liar's check": cell("import gpukit; gpukit.check = lambda e: None\ngpukit.check('alpha.first')"),
    "rewritten input": cell(
        "get_ipython().input_transformers_post.append(lambda lines: ['pass'])\n" + CHECK_A.replace("; ", "\n")
    ),
    "custom handler": cell("get_ipython().set_custom_exc((Exception,), lambda *a, **k: None)\n" + CHECK_A),
    "hidden errors": cell("get_ipython().showtraceback = lambda *a, **k: None\n" + CHECK_A),
}


@pytest.mark.parametrize("state", ["pass", "fail"])
def test_verdict_is_the_files_alone(course, state):
    course.answer("alpha", state)
    course.notebook(*CHANGED_CHECKS.values(), cell(CHECK_B))
    course.run("-rA")
    graded = len(CHANGED_CHECKS)
    expected = {"passed": graded + 1} if state == "pass" else {"failed": graded, "passed": 1}
    assert course.outcomes == expected
    assert course.states() == {"alpha.first": state, "beta.second": "pass"}
    assert len(course.calls) == 2  # judged once, however many cells ask


def test_deleted_check_is_missing_and_reported_once(course):
    course.notebook(cell("# gpukit.check('alpha.first')\nx = 'gpukit.check(\"alpha.first\")'"), cell(CHECK_B))
    assert course.run(where="notebooks/01_tiny.ipynb").ret == 1
    assert course.outcomes == {"failed": 1, "passed": 2}
    assert course.states() == {"alpha.first": "missing", "beta.second": "pass"}
    assert 'alpha.first: missing: 01_tiny.ipynb has no cell  gpukit.check("alpha.first"): put it back' in course.output


def test_deleted_notebook_fails_the_run_on_all_notebooks(course):
    course.notebook(cell("print(1)", "1\n"), name="02_other.ipynb")
    assert course.run().ret == 1
    assert course.states() == {"alpha.first": "missing", "beta.second": "missing"}
    assert course.report["complete"] is False
    assert "0 of 2 exercises pass, 2 missing" in course.output
    assert course.run(where="notebooks/02_other.ipynb").ret == 0


def test_conftest_beside_the_notebooks_is_not_loaded(course):
    course.answer("alpha", "fail")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    cheat = "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport():\n"
    cheat += "    report = yield\n    report.outcome = 'passed'\n    return report\n"
    (course.root / "notebooks" / "conftest.py").write_text(cheat)
    (course.root / "conftest.py").write_text(cheat)
    course.run()
    assert course.outcomes == {"failed": 1, "passed": 1}
    (course.root / "tests").mkdir()
    assert course.run("tests").ret == 4  # with other folders conftest files are loaded, so this one is refused
    assert "notebooks/conftest.py could change grades: remove it" in course.output


def test_settings_beside_the_notebooks_are_refused(course):
    course.notebook(cell(CHECK_A))
    (course.root / "notebooks" / "pytest.ini").write_text("[pytest]\naddopts = -k nothing\n")
    assert course.run().ret == 4
    assert "notebooks/pytest.ini could change grades" in course.output


# ---- nbval's own cells
def test_demo_cells_keep_nbvals_rules_and_lose_its_gaps(course):
    course.notebook(
        cell("print(1)", "2\n"),
        cell("1 / 0", tags=["raises-exception", "nbval-ignore-output"]),
        cell("1 / 0", tags=["nbval-skip"]),
        cell("import os; print([k for k in os.environ if k.startswith('PYTEST_')])", "[]\n"),
        cell("import os; os.system('echo from C')", outputs=[
            {"output_type": "stream", "name": "stdout", "text": "from C\n"},
            {"output_type": "execute_result", "data": {"text/plain": "0"}, "metadata": {}, "execution_count": 5},
        ]),
        cell("print('trailing  ')", "trailing\n"),
        cell("object()", outputs=[
            {"output_type": "execute_result", "data": {"text/plain": "<object at 0x7fffdeadbeef>"}, "metadata": {},
             "execution_count": 7}
        ]),
        cell("get_ipython().showtraceback = lambda *a, **k: None"),
        cell("1 / 0"),
        cell(CHECK_A), cell(CHECK_B),
    )  # fmt: skip
    course.run()
    assert course.outcomes == {"failed": 2, "skipped": 1, "passed": 8}, course.output
    assert "Cell 8 of 01_tiny.ipynb failed, and hid it: ZeroDivisionError: division by zero" in course.output
    assert "\x1b" not in course.output


def test_a_stale_output_fails_unless_its_tag_says_that_it_depends_on_more(course):
    tags = ("hardware", "answers", "mine")
    cells = [cell("print(2)", "1\n", tags=[tag]) for tag in tags]
    cells.append(cell("1 / 0", tags=["hardware"]))  # such a cell must still run
    course.notebook(*cells, cell("print(2)", "1\n", metadata={"tags": "hardware"}), cell(CHECK_A), cell(CHECK_B))
    course.run()
    assert course.outcomes == {"failed": 3, "passed": 4}, course.output
    said = "The saved output is stale or the cell wrong. `gpukit nb run 01_tiny` saves it anew."
    assert course.output.count(said) == 2
    assert "'1\\n' == '2\\n'" in course.output and "ZeroDivisionError" in course.output


@pytest.mark.parametrize("pin, state", [("{}", "failed"), ("9.{}", "passed"), (None, "passed")])
def test_what_a_compiler_made_is_compared_with_the_version_that_saved_it(course, pin, state):
    if pin:
        pinned = pin.format(version("triton"))
        (course.root / "constraints.txt").write_text(f"torch==2.0\ntriton=={pinned}\n")
    course.notebook(cell("print(2)", "1\n", tags=["compiler"]), cell(CHECK_A), cell(CHECK_B))
    course.run()
    assert course.outcomes == {"passed": 2 + (state == "passed")} | ({"failed": 1} if state == "failed" else {})


def test_verdict_is_handed_to_the_kernel_before_the_cell_runs(course):
    source = "import json, os; print(json.load(open(os.environ['GPUKIT_VERDICTS'] + '/alpha.first.json'))['state'])"
    course.answer("alpha", "fail")
    course.notebook(cell(CHECK_A), cell(source, "fail\n"), cell(CHECK_B))
    course.run()
    assert course.outcomes == {"failed": 1, "passed": 2}, course.output


def test_a_cell_may_check_several_exercises(course):
    course.answer("beta", "fail")
    course.notebook(cell(CHECK_A + '; gpukit.check("beta.second")'))
    course.run()
    assert course.outcomes == {"failed": 1}
    assert course.states() == {"alpha.first": "pass", "beta.second": "fail"}


def test_unknown_exercise_and_broken_grader_fail_with_a_sentence(course):
    course.answer("alpha", "broken")
    course.notebook(cell('gpukit.check("../../alpha.frist")'), cell(CHECK_A), cell(CHECK_B))
    course.run()
    assert course.outcomes == {"failed": 2, "passed": 1}
    assert "no exercise is called '../../alpha.frist'" in course.output
    assert "alpha.first: not graded, because the grader failed: OSError: no such device" in course.output


def test_no_gpu_is_a_skip_not_a_failure(course):
    course.answer("alpha", "skipped")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    assert course.run().ret == 0
    assert course.outcomes == {"skipped": 1, "passed": 1}


# ---- kernels that misbehave
def test_dead_kernel_is_named_at_once_and_checks_go_on(course):
    course.notebook(cell("import os; os._exit(3)"), cell("print(1)", "1\n"), cell(CHECK_A), cell(CHECK_B))
    course.run()
    assert course.outcomes == {"failed": 2, "passed": 2}
    # nbval alone waits for the cell's limit, and then says that it was too short
    assert "Cell 0 of 01_tiny.ipynb: the kernel died while this cell ran (exit code 3)" in course.output
    assert "past its limit" not in course.output
    assert "not run: the kernel died in Cell 0 of 01_tiny.ipynb (exit code 3)" in course.output


def test_kernel_killed_by_a_check_cell(course):
    course.notebook(
        cell("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n" + CHECK_A), cell(CHECK_B), cell("1")
    )
    course.run()
    assert course.outcomes == {"passed": 2, "failed": 1}
    assert "not run: the kernel died in Cell 0 of 01_tiny.ipynb (killed by SIGSEGV)" in course.output


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(60)",
        "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass",
        "while True:\n    try:\n        print('x' * 1000)\n        __import__('time').sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        pass",
    ],
    ids=["loop", "swallows the interrupt", "prints for ever"],
)
def test_timeout_credits_nothing_later(course, source):
    course.notebook(cell(source), cell("print(1)", "1\n"), cell(CHECK_A), cell(CHECK_B))
    course.run("--nbval-cell-timeout=1")
    assert course.outcomes == {"failed": 2, "passed": 2}, course.output
    assert "not run: Cell 0 of 01_tiny.ipynb ran past its limit of 1 s" in course.output


def test_kernel_that_cannot_start_leaves_the_checks_graded(course, monkeypatch):
    course.notebook(cell("print(1)", "1\n"), cell(CHECK_A), cell(CHECK_B))

    def no_kernel(*args, **kwargs):
        raise RuntimeError("no ports left")

    monkeypatch.setattr("nbval.kernel.start_new_kernel", no_kernel)
    course.run()
    assert course.outcomes == {"failed": 1, "passed": 2}
    assert "not run: the kernel did not start (RuntimeError: no ports left); try: gpukit doctor" in course.output


# ---- damaged files
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "01_tiny.ipynb is not JSON (line 1): restore it from git"),
        ("[]", "01_tiny.ipynb has no cells"),
        ('{"nbformat": 4, "cells": []}', "01_tiny.ipynb has no cells"),
        (
            '{"nbformat": 4, "nbformat_minor": 5, "cells": [3]}',
            "01_tiny.ipynb is not a notebook that nbformat can read",
        ),
        ('{"nbformat": 99, "cells": [{}]}', "01_tiny.ipynb is not a notebook that nbformat can read"),
    ],
)
def test_damaged_notebook_is_one_sentence_and_others_go_on(course, text, sentence):
    course.notebook(text=text)
    course.notebook(cell("print(1)", "1\n"), name="02_other.ipynb")
    assert course.run().ret == 1
    assert course.outcomes == {"failed": 3, "passed": 1}
    assert sentence in course.output
    assert course.states() == {"alpha.first": "missing", "beta.second": "missing"}
    assert "alpha.first: missing: 01_tiny.ipynb cannot be read" in course.output


def test_other_peoples_notebooks_are_left_to_nbval(course):
    folder = course.root / "elsewhere"
    folder.mkdir()
    path = course.notebook(cell("# NBVAL_SKIP\n" + CHECK_A), cell("print(1)", "1\n"))
    path.rename(folder / path.name)
    course.run("--nbval-current-env", where="elsewhere")
    assert course.outcomes == {"skipped": 1, "passed": 1}
    assert course.calls == [] and course.report is None


# ---- parts of a run, other folders, killed runs
def test_interrupted_run_still_writes_its_report(course):
    course.answer("beta", "interrupt")
    course.notebook(cell(CHECK_A), cell(CHECK_B))
    course.run(no_reraise_ctrlc=True)
    assert course.states() == {"alpha.first": "pass", "beta.second": "missing"}
    assert course.report["complete"] is False


def test_part_of_a_run_gives_the_same_verdicts(course):
    course.answer("alpha", "fail")
    course.notebook(cell("x = 1"), cell("print(x)", "1\n"), cell(CHECK_A), cell(CHECK_B))
    course.run(where="notebooks/01_tiny.ipynb::Cell 2")
    assert course.outcomes == {"failed": 1}
    assert course.states()["alpha.first"] == "fail"
    course.run("-k", "beta.second")
    assert course.outcomes["passed"] == 1 and "failed" not in course.outcomes
    for _ in range(2):
        course.run("-p", "cacheprovider", "--lf")
        assert course.outcomes["failed"] == 1


FAKE_JUDGE = """
import sys, types
from gpukit.grading import registry
from gpukit.grading.verdict import Verdict
known = {name: types.SimpleNamespace(id=name, notebook="01_tiny") for name in ("alpha.first", "beta.second")}
registry.exercises = lambda: known
fake = sys.modules["gpukit.grading.judge"] = types.ModuleType("gpukit.grading.judge")
fake.judge = lambda name, **_: Verdict(name, "fail" if name == "alpha.first" else "pass", 1, 1, "exercises", (name,))
"""


def test_xdist_gives_the_same_verdicts(course):
    xdist = pytest.importorskip("xdist")
    course.notebook(cell("x = 1"), cell("print(x)", "1\n"), cell(CHECK_A), cell(CHECK_B))
    (course.root / "fakejudge.py").write_text(FAKE_JUDGE)
    path = [str(Path(__file__).resolve().parents[2]), str(course.root), str(Path(xdist.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "fakejudge", "--nbval", "-n2", "notebooks"]
    command += ["--gpukit-json=out.json"]
    done = subprocess.run(command, cwd=course.root, env=environment, capture_output=True, text=True)
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    rows = json.loads((course.root / "out.json").read_text())["exercises"]
    assert {r["id"]: r["state"] for r in rows} == {"alpha.first": "fail", "beta.second": "pass"}


def test_from_another_folder_and_a_path_with_spaces(pytester, monkeypatch):
    course = Course(pytester, monkeypatch, "my course, 2nd try")
    course.answer("alpha", "fail")
    course.notebook(
        cell("import os; print(os.path.basename(os.getcwd()))", "notebooks\n"), cell(CHECK_A), cell(CHECK_B)
    )
    (course.root / "sanitize.cfg").write_text("regex: a\nreplace: b\n")
    (course.root / "pytest.ini").write_text("[pytest]\naddopts = --nbval-sanitize-with=sanitize.cfg\n")
    course.run(cwd=course.root / "notebooks", where=())
    assert course.outcomes == {"failed": 1, "passed": 2}, course.output
    assert course.calls[0][2] == course.root


@pytest.mark.parametrize(("given", "seconds"), [([], 120), (["--nbval-cell-timeout=2000"], 2000)])
def test_nbval_gets_the_courses_settings(course, given, seconds):
    os.chdir(course.root)
    command = [*PLUGIN, "--nbval", "--nbval-kernel-name=gone", *given, "notebooks"]
    config = course.pytester.parseconfigure(*command)
    config.pluginmanager.get_plugin("gpukit-grading").prepare(course.root)
    assert config.option.nbval_cell_timeout == seconds
    assert config.option.nbval_current_env and config.option.nbval_kernel_name is None


def test_killed_grader_leaves_no_kernel(course, tmp_path):
    source = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    course.notebook(cell(source))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "pytest", *PLUGIN, "--nbval", "notebooks"]
    grader = subprocess.Popen(command, cwd=course.root, env=environment, stdout=subprocess.DEVNULL)
    pid_file = tmp_path / "pid"
    until(lambda: pid_file.exists() and pid_file.read_text())
    grader.send_signal(signal.SIGKILL)
    grader.wait()
    until(lambda: not Path(f"/proc/{pid_file.read_text()}").exists())


def test_loading_the_plugin_loads_nothing_heavy():
    code = (
        "import sys, gpukit.grading.plugin; print({'torch', 'triton', 'numpy', 'nbval', 'nbformat'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_an_unexpected_nbval_is_refused_with_one_sentence(course, monkeypatch):
    course.notebook(cell(CHECK_A))
    monkeypatch.delitem(sys.modules, "gpukit.grading.cells", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0")
    assert course.run().ret == 4
    assert "gpukit grades with nbval 0.11 and found 0.12.0: pip install 'nbval>=0.11,<0.12'" in course.output


# ---- gpukit.grading.check_cells
@pytest.mark.parametrize(
    ("source", "ids"),
    [
        (CHECK_A, ["alpha.first"]),
        ('v = gpukit.check(exercise_id="a.b"); gpukit.check("c.d"); gpukit.check("a.b")', ["a.b", "c.d"]),
        ('# gpukit.check("a.b")', []),
        ('"""gpukit.check("a.b")"""', []),
        ('other.check("a.b")', []),
        ("gpukit.check(name)", []),
        ('gpukit.check("a.b"', ["a.b"]),
        ("", []),
    ],
)
def test_check_ids(source, ids):
    assert check_ids(source) == ids


def test_kernel_environment_is_clean_and_absolute(monkeypatch):
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "x")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", "relative")
    environment = kernel_environment("solutions")
    assert not any(name.startswith("PYTEST_") for name in environment) and "MPLBACKEND" not in environment
    assert environment["GPUKIT_IMPL"] == "solutions"
    assert all(os.path.isabs(entry) for entry in environment["PYTHONPATH"].split(os.pathsep))


def test_a_learners_file_cannot_shadow_an_import(tmp_path, monkeypatch):
    for name in ("notebooks", "exercises", "lib"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "exercises"), str(tmp_path / "lib")])
    protect_imports(tmp_path)
    assert sys.path == [str(tmp_path / "lib"), str(tmp_path)]
