"""The course from an installed wheel: `gpukit init`, and a first exercise there."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gpukit import course
from gpukit.classroom import copies, release

ROOT = course.root(__file__)
STUB, ANSWER = "return M * N * itemsize", "return 2 * M * N * itemsize"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of an empty environment with the wheel, and with this one's packages instead of downloads."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", "--quiet", wheel)
    run(folder, sys.executable, "-m", "pip", "--python", python, *install)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    # Appended to the search path, and without .pth files of their own: one of them leads to this checkout.
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "packages.pth").write_text("\n".join([*packages, sysconfig.get_path("purelib")]) + "\n")
    return python


def run(cwd: Path, *call: object, status: int = 0, **variables: str) -> str:
    """What a command says, run where nothing of this environment leads back to the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GPUKIT_IMPL", "VIRTUAL_ENV")}
    environment |= variables
    done = subprocess.run([str(part) for part in call], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_colab_notebook_runs_to_a_first_pass(installed, tmp_path):
    """Its cells in a kernel of the wheel, in their order, in an empty folder, and then what a learner does next: repair the answer
    and run the check again. pip has no network here, and finds the wheel installed with all that it requires."""
    notebook = json.loads((ROOT / "docs" / "colab.ipynb").read_text())
    install, check = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "%pip install" in "".join(install["source"])
    repair = (
        'from pathlib import Path\n\npath = Path("../exercises/start.py")\n'
        f"path.write_text(path.read_text().replace({STUB!r}, {ANSWER!r}))"
    )
    notebook["cells"] += [check | {"id": "repair", "source": repair}, check | {"id": "again"}]
    (tmp_path / "colab.ipynb").write_text(json.dumps(notebook))
    call = ("nbconvert", "--to", "notebook", "--execute", "--allow-errors", "--inplace", "colab.ipynb")
    run(tmp_path, installed, "-m", *call, PIP_NO_INDEX="1", PATH=f"{installed.parent}{os.pathsep}{os.environ['PATH']}")
    cells = json.loads((tmp_path / "colab.ipynb").read_text())["cells"]
    shown = {cell["id"]: json.dumps(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"}
    assert "ERROR" not in shown["install"] and "course: gpukit" in shown["install"]
    assert "start.bytes_moved: values differ" in shown["check"]  # the first exercise begins with a wrong answer
    assert "PASS start.bytes_moved" in shown["again"]


def test_a_first_exercise_passes_where_only_the_wheel_is(installed, tmp_path):
    gpukit = installed.parent / "gpukit"
    where = run(tmp_path, installed, "-c", "import gpukit; print(gpukit.__file__)")
    assert where.startswith(str(installed.parents[1])), "the wheel's package, not the checkout's"
    assert "with gpukit init DIR" in " ".join(run(tmp_path, gpukit, "check", "start", status=2).split())
    assert "next: cd course, then gpukit lab" in run(tmp_path, gpukit, "init", "course")
    made = tmp_path / "course"
    said = copies.read(made)
    assert len(said.concepts) == len(list((ROOT / "notebooks").glob("*.ipynb"))) and said.commit == ""
    assert {path.name for path in made.iterdir()} == {
        *("exercises", "notebooks", "docs", "README.md", copies.NAME),
    }
    readme = (made / "README.md").read_text()
    assert "\ngpukit lab " in readme and "\ngpukit check " in readme and "make lab" not in readme
    path = made / "exercises" / "start.py"
    handed_out = path.read_text()
    path.write_text(handed_out.replace(STUB, ANSWER))
    assert "PASS start.bytes_moved" in run(made, gpukit, "check", "start.bytes_moved")
    assert "start.bytes_moved" in run(made, gpukit, "reset", "start.bytes_moved")
    assert path.read_text() == handed_out and STUB in handed_out
    refused = run(tmp_path, gpukit, "init", "course", status=2)
    assert "course is there and not an empty folder" in refused and "Traceback" not in refused
    # An instructor without a checkout releases some concepts of what the wheel carries.
    assert "01_dtypes" in run(made, gpukit, "release", tmp_path / "week.zip", "--concepts", "memory")
    assert copies.load(tmp_path / "week.zip")[0].concepts == ("memory",)
    assert "this copy" in run(made, gpukit, "update", tmp_path / "week.zip")


def test_init_from_a_checkout_says_where_the_course_is(tmp_path):
    with pytest.raises(course.CourseError, match=f"gpukit runs from {ROOT}, which is the course itself"):
        release.init(tmp_path / "x")
    assert not (tmp_path / "x").exists()
