"""A class as large as a term's, made of known answers: `python -m tests.classroom.term FOLDER --students 300`, and then in FOLDER
`gpukit class grade class -a assignment.toml -o out --roster roster.csv -j 2`.

Each file is a solution, a known answer, a stub, or hostile or broken code; few are alike. `tests/classroom/synthetic.py` has the
class whose verdicts are known one by one; this one is for measuring.
"""

import argparse
from pathlib import Path
from random import Random

from gpukit import integrity
from gpukit.grading import registry, stubs
from tests.classroom.synthetic import ROOT, write, zipped

EXERCISES = (
    *("start.bytes_moved", "memory.gpt2", "flops.roofline", "triton_basics.row_sum", "softmax.fused", "softmax.online"),
    *("gelu.swiglu", "matmul.tiles", "flash_attention.forward", "losses.cross_entropy"),
)
# What stands in front of a file: it ends, kills, never ends, fills memory, reads what is not its own, is no Python.
HOSTILE = (
    "import os\nos._exit(0)\n",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "while True:\n    pass\n",
    "x = [0]\nwhile True:\n    x += x\n",
    "open('/etc/passwd').read()\n",
    "raise SystemExit(0)\n",
    "def broken(:\n",
    "1 / 0\n",
)


def make(folder: Path, students: int, exercises: tuple[str, ...] = EXERCISES) -> None:
    """Write `folder`/class, roster.csv and assignment.toml: the same ones for the same numbers."""
    rng = Random(students)
    concepts = {each.partition(".")[0]: None for each in exercises}
    right = {concept: integrity.solution(concept, ROOT) for concept in concepts}  # with its marks, which are comments
    stub = {concept: stubs.handed_out(concept, ROOT) for concept in concepts}
    known: dict[str, list[integrity.Answer]] = {concept: [] for concept in concepts}
    for concept in concepts:
        known[concept] += [each for each in integrity.answers(concept, ROOT) if each.exercise in exercises]
    for each in exercises:
        concept = each.partition(".")[0]
        known[concept] += integrity.generated(registry.exercise(each), right[concept])
    lines = ["student_id,name,email"]
    for n in range(students):
        files = {}
        for concept in concepts:
            how = rng.choices(("right", "known", "stub", "hostile"), (60, 30, 8, 2))[0]
            if how == "known":
                text = rng.choice(known[concept]).source
            elif how == "stub":
                text = stub[concept]
            else:
                text = (rng.choice(HOSTILE) if how == "hostile" else "") + right[concept]
            own = "" if rng.random() < 0.1 else f"\n# {n}\n"
            files[f"{concept}.py"] = (text + own).encode()
        name = f"u{n:03}"
        if n % 2:
            write(folder / "class" / f"{name}.zip", zipped({f"course/exercises/{k}": v for k, v in files.items()}))
        else:
            for k, data in files.items():
                write(folder / "class" / name / k, data)
        lines.append(f"{name},Student {n},{name}@uni.example")
    write(folder / "roster.csv", "\n".join([*lines, ""]))
    write(
        folder / "assignment.toml", f'title = "Term"\nexercises = {[*exercises]}\nseed = "student"\nsecret = "words"\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--students", type=int, default=300)
    parser.add_argument("--all", action="store_true", help="every exercise of the course")
    args = parser.parse_args()
    make(args.folder, args.students, tuple(registry.catalog()) if args.all else EXERCISES)


if __name__ == "__main__":
    main()
