"""An assignment as an autograder for Gradescope: `gpukit class gradescope ASSIGNMENT -o autograder.zip`.

The zip has, in its root as Gradescope wants it, setup.sh (run once, when the image is built), run_autograder (run for each
submission), assignment.toml, README.md and course/. That is the learners' copy of the course with the assignment's concepts, as
`gpukit release` makes and searches it: it holds no solution and no known answer, but the checks, which hold what they need to
tell right from wrong, and the assignment's secret. Gradescope shows the files of an autograder to instructors only.

This module also is what run_autograder runs. Folders are those that Gradescope documents, below /autograder; AUTOGRADER names
another place for all of them. https://gradescope-autograders.readthedocs.io/en/latest/specs/
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import time
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

from gpukit import course
from gpukit.classroom import assignment, grade, gradebook, intake, marks, pool, release, store
from gpukit.classroom.assignment import Assignment
from gpukit.classroom.marks import Mark, Marked
from gpukit.grading import fence

VISIBILITY = ("visible", "hidden", "after_due_date", "after_published")
_EPOCH = (2020, 1, 1, 0, 0, 0)  # of the files in the zip: equal courses make equal zips


def autograder(path: Path, out: Path, root: Path, visibility: str = "visible") -> Assignment:
    """Write the zip `out` for the assignment in the file `path`. `root` is the course; `visibility`, one of VISIBILITY, says
    when students see the verdicts. Raises CourseError, also where `out` exists.
    """
    chosen = assignment.read(path)
    if out.suffix != ".zip":
        raise course.CourseError(f"-o must name a file that ends in .zip, got {out}")
    if out.exists():
        raise course.CourseError(f"{out} exists: nothing is overwritten; name another file")
    if not out.absolute().parent.is_dir():
        raise course.CourseError(f"there is no folder {out.parent} to put {out.name} into")
    with tempfile.TemporaryDirectory(prefix="gpukit-") as folder:
        made = Path(folder).resolve() / "course"
        said, _ = release.release(made, list(chosen.concepts), root, chosen.own)
        files = {
            f"course/{name.relative_to(made).as_posix()}": name.read_bytes()
            for name in made.rglob("*")
            if name.is_file()
        }
    files["assignment.toml"] = chosen.text.encode()
    files["setup.sh"] = _SETUP.encode()
    files["run_autograder"] = _RUN.format(visibility=visibility).encode()
    files["README.md"] = _README.format(title=chosen.title, made=said).encode()
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in sorted(files.items()):
                info = zipfile.ZipInfo(name, _EPOCH)
                mode = 0o755 if name in ("setup.sh", "run_autograder") else 0o644
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | mode) << 16
                archive.writestr(info, data)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return chosen


def run(place: Path, visibility: str = "visible") -> int:
    """Grade the submission in `place` (Gradescope's /autograder) and write results/results.json there. Returns 0, or 1 if the
    grader itself failed on an exercise: then there are no results, Gradescope says so, and the submission can be run again.
    """
    start = time.perf_counter()
    chosen = assignment.read(place / "source" / "assignment.toml")
    student, submitted = _metadata(place / "submission_metadata.json")
    try:
        found = intake.one(place / "submission", chosen.concepts)
    except course.CourseError as error:
        found = intake.Submission("", refused=dict.fromkeys(chosen.concepts, str(error)))
    handed_in = intake.Submission(
        student,
        path=found.path or "submission",
        submitted=submitted,
        files=found.files,
        refused=found.refused,
        notes=found.notes,
    )
    with tempfile.TemporaryDirectory(prefix="gpukit-") as folder, store.Store(Path(folder) / store.NAME) as kept:
        grade.enter(chosen, [handed_in], kept)
        grade.grade(kept, course.root(), lambda: pool.pool(os.cpu_count() or 1))
        (row,) = marks.marked(chosen, kept)
    failed = [mark for mark in row.marks if mark.points is None and mark.graded is None]
    for mark in failed:
        print(f"{mark.exercise}: {mark.why}")
    if failed:
        return 1
    (place / "results").mkdir(exist_ok=True)
    text = json.dumps(results(row, visibility, time.perf_counter() - start), indent=1, ensure_ascii=False)
    (place / "results" / "results.json").write_text(f"{text}\n", encoding="utf-8")
    return 0


def results(row: Marked, visibility: str, seconds: float) -> dict[str, Any]:
    """What Gradescope reads. The score at the top has the late rule applied; those of the tests have not."""
    notes = "\n".join(row.handed_in.notes)
    return {
        "score": round(row.score, 2),
        "execution_time": round(seconds),
        "output": f"{gradebook.points(row)}\n{notes}".strip(),
        "visibility": visibility,
        "stdout_visibility": "hidden",
        "extra_data": {"fence": fence.active(), "days_late": row.days_late},
        "tests": [_test(mark, visibility) for mark in row.marks],
    }


def _test(mark: Mark, visibility: str) -> dict[str, Any]:
    graded = mark.graded
    found = {
        "name": f"{mark.exercise}: {graded.title}" if graded else mark.exercise,
        "output": gradebook.report_row(mark)["diagnosis"] if mark.state != "pass" else "",
        "tags": [mark.exercise.partition(".")[0], mark.state],
        "visibility": visibility,
    }
    if mark.points is not None:  # without a GPU an exercise that needs one counts neither way
        found |= {"score": mark.points, "max_score": mark.possible}
    if graded:
        versions = {name: getattr(graded, name) for name in ("gpukit", "torch", "triton")}
        found["extra_data"] = {"seed": graded.seed, "file": graded.file_hash, "check": graded.check_version, **versions}
    return found


def _metadata(path: Path) -> tuple[str, str]:
    """Who handed in, by e-mail address, and when; what the file does not tell is "student" and ""."""
    try:
        told = json.loads(path.read_bytes())
        student = min(user["email"] for user in told["users"])
        when = datetime.fromisoformat(told["created_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return "student", ""
    return str(student), when.isoformat() if when.tzinfo else ""


_SETUP = """\
#!/usr/bin/env bash
# Run once, when Gradescope builds the image: an environment of its own with the course and PyTorch for CPUs.
# AUTOGRADER: Gradescope's folder. PYTHON: a Python, 3.11 to 3.13. PIP: what installs packages.
set -euo pipefail
place="${AUTOGRADER:-/autograder}"
if [ -z "${PYTHON:-}" ]; then
  fits='import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
  for python in python3 python3.13 python3.12 python3.11; do
    if "$python" -c "$fits" 2>/dev/null; then PYTHON="$python"; break; fi
  done
fi
if [ -z "${PYTHON:-}" ]; then  # the image of Ubuntu 24.04 has Python 3.12
  apt-get update
  apt-get install -y python3.12 python3.12-venv
  PYTHON=python3.12
fi
"$PYTHON" -m venv "$place/venv"
${PIP:-"$place/venv/bin/python" -m pip} install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \\
  --constraint "$place/source/course/constraints.txt" --editable "$place/source/course"
"""

_RUN = """\
#!/usr/bin/env bash
# Run for each submission; writes results/results.json in Gradescope's folder.
set -euo pipefail
place="${{AUTOGRADER:-/autograder}}"
cd "$place/source/course"
exec "$place/venv/bin/python" -P -m gpukit.classroom.gradescope "$place" {visibility}
"""

_README = """\
# Autograder: {title}

Upload this zip to Gradescope as it is (assignment settings, Configure Autograder), with a base image that has Python 3.11 to 3.13, such as Ubuntu 24.04.

- `setup.sh` installs the course and PyTorch for CPUs (2 GB), once.
- `run_autograder` grades a submission, the exercises' .py files or a zip of them, and writes `results.json`.
- `assignment.toml` says which exercises count, for how much and until when. The late rule is applied to the score.
- `course/` is the learners' copy ({made}): no solutions and no known answers, but the checks, which hold what they need to tell right from wrong.
"""


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2]))
