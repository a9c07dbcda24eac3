"""A release proved: `python -m tests.classroom.proved` makes one of the whole course and grades it twice, as it is handed out and
with the solutions in the place of the stubs, by the judge of its own package. `make prove` runs this, `make test` a few concepts of it."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpukit import course
from gpukit.classroom.release import release

# Run in the copy, whose package comes first: the states of the exercises of some concepts.
_JUDGE = """
import json, sys
from pathlib import Path
import gpukit
from gpukit.grading import registry
from gpukit.grading.judge import judge
here = Path.cwd()
assert Path(gpukit.__file__).resolve().is_relative_to(here.resolve()), gpukit.__file__
ids = [e for concept in sys.argv[1:] for e in registry.named(concept)]
print(json.dumps({e: judge(e, root=here, seed=1).state for e in ids}))
"""


def states(copy: Path, concepts: list[str], jobs: int = 1) -> dict[str, str]:
    """By exercise, the state of what lies in the copy's exercises/."""
    environment = {name: value for name, value in os.environ.items() if name != "GPUKIT_IMPL"}

    def judged(some: list[str]) -> dict[str, str]:
        call = [sys.executable, "-c", "import sys; sys.path.insert(0, '')\n" + _JUDGE, *some]
        done = subprocess.run(call, cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{some}: {done.stderr}")
        return json.loads(done.stdout)

    with ThreadPoolExecutor(jobs) as pool:
        shares = [concepts[i::jobs] for i in range(jobs)]
        return {name: state for found in pool.map(judged, shares) for name, state in found.items()}


def starts_wrong(copy: Path, exercise_id: str) -> bool:
    """Whether the stub of an exercise holds code to begin with, which fails, instead of a line that raises."""
    text = (copy / "exercises" / f"{exercise_id.partition('.')[0]}.py").read_text()
    return f'NotImplementedError("{exercise_id}")' not in text


def problems(copy: Path, root: Path, concepts: list[str], jobs: int = 1) -> list[str]:
    """What is not as it must be: stubs are todo, those that start from wrong code fail, solutions pass."""
    found = []
    for exercise_id, state in states(copy, concepts, jobs).items():
        wanted = "fail" if starts_wrong(copy, exercise_id) else "todo"
        if state != wanted:
            found.append(f"{exercise_id}: the stub is {state}, expected {wanted}")
    for concept in concepts:
        shutil.copy(root / "solutions" / f"{concept}.py", copy / "exercises")
    for exercise_id, state in states(copy, concepts, jobs).items():
        if state not in ("pass", "skipped"):
            found.append(f"{exercise_id}: the solution is {state}, expected pass")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="concepts at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy, root = Path(folder) / "copy", course.root()
        made, _ = release(copy, [], root)
        found = problems(copy, root, list(made.concepts), args.jobs)
    print("\n".join(found) or f"{made}: every stub is to be done, every solution passes in its place")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
