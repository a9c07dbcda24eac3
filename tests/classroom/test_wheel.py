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
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    run(folder, python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    # Appended to the search path, and without .pth files of their own: one of them leads to this checkout.
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "packages.pth").write_text("\n".join([*packages, sysconfig.get_path("purelib")]) + "\n")
    return python


def run(cwd: Path, *call: object, status: int = 0) -> str:
    """What a command says, run where nothing of this environment leads back to the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GPUKIT_IMPL", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in call], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_colab_notebook_reaches_its_first_check(installed, tmp_path):
    """Its cells as a shell and a Python of the wheel run them; the installation itself is the fixture's."""
    cells = json.loads((ROOT / "docs" / "colab.ipynb").read_text())["cells"]
    install, check = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    pip, init, change = install.splitlines()
    assert pip == "%pip install --quiet gpukit" and init.startswith("!gpukit ") and change.startswith("%cd ")
    run(tmp_path, installed.parent / "gpukit", *init.split()[1:])
    said = run(tmp_path / change.split()[1], installed, "-c", check, status=1)
    assert "start.bytes_moved: values differ" in said  # the first exercise begins with a wrong answer


def test_a_first_exercise_passes_where_only_the_wheel_is(installed, tmp_path):
    gpukit = installed.parent / "gpukit"
    where = run(tmp_path, installed, "-c", "import gpukit; print(gpukit.__file__)")
    assert where.startswith(str(installed.parents[1])), "the wheel's package, not the checkout's"
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
