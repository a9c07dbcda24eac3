"""The subcommands of `gpukit class`. Each imports what it needs when it runs: `gpukit class --help` stays light."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from gpukit import course, tables

NAMES = ("grade", "report", "replay", "gradescope")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands, each with a function `run` that returns an exit status."""
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        added.set_defaults(run=run)
        return added

    added = command("grade", _grade, "grade what a class handed in; judges only what is new")
    added.add_argument("submissions", metavar="SUBMISSIONS", help="a folder of folders and zips, or an LMS's zip")
    added.add_argument("-a", "--assignment", metavar="FILE", required=True, help="the assignment, a TOML file")
    added.add_argument("-o", "--out", metavar="DIR", required=True, help="the folder for grades.sqlite and all reports")
    added.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one for each CPU)"
    )
    added.add_argument(
        "--roster", metavar="CSV", help="whose submissions these are: student_id, name, email and others"
    )
    added.add_argument("--scheduler", metavar="ADDRESS", help="let the workers of this Dask scheduler judge")

    added = command("report", _report, "write gradebooks and pages again, from what is graded")
    added.add_argument("out", metavar="OUT", help="the folder that gpukit class grade wrote")

    added = command("replay", _replay, "repeat a verdict, on the same file and the same inputs")
    added.add_argument("out", metavar="OUT", help="the folder that gpukit class grade wrote")
    added.add_argument("student", metavar="STUDENT")
    added.add_argument("id", metavar="ID", help="an exercise, such as softmax.fused")

    added = command("gradescope", _gradescope, "make the autograder of an assignment for Gradescope")
    added.add_argument("assignment", metavar="ASSIGNMENT", help="the assignment, a TOML file")
    added.add_argument("-o", "--out", metavar="ZIP", required=True, help="the zip to be uploaded")
    added.add_argument(
        "--visibility",
        choices=("visible", "hidden", "after_due_date", "after_published"),
        metavar="WHEN",
        default="visible",
        help="when students see the verdicts: %(choices)s (default: %(default)s)",
    )


def _grade(args: argparse.Namespace) -> int:
    from gpukit.classroom import assignment, grade, intake, marks, pool, roster, store
    from gpukit.grading import fence
    from gpukit.grading.check_cells import protect_imports
    from gpukit.grading.ending import ending

    if args.jobs < 1:
        raise course.CourseError(f"--jobs must be 1 or more, got {args.jobs}")
    chosen = assignment.read(args.assignment)
    people = roster.read(args.roster) if args.roster else None
    root = course.root()
    protect_imports(root)
    submissions = intake.read(args.submissions, chosen.concepts, people)
    if Path(args.out).resolve().is_relative_to(Path(args.submissions).resolve()):
        raise course.CourseError(
            f"--out {args.out} lies in {args.submissions}, where it would be taken for a submission: name a folder elsewhere"
        )
    out = _folder(args.out)
    print(f"{chosen.title}: {_worth(chosen)}")
    if not args.scheduler:
        print(tables.folded(f"fence around each exercise: {fence.active()}"), flush=True)
    with store.Store(out / store.NAME) as kept, ending() as ended_by:
        try:
            _refuse_another(chosen, kept, out)
            grade.enter(chosen, submissions, kept)
            kept.set(roster=people.text if people else "")
            before = len(kept.current())

            shown: list[str] = []

            def show(student: str, states: list[str], progress: grade.Progress) -> None:
                if not shown and progress.done > 1:
                    there = f"[{progress.done - 1}/{progress.students}]"
                    print(f"{there} have no file to judge, or only files that were judged before")
                shown.append(student)
                left = f"  {_duration(progress.left_s)} left" if progress.left else ""
                print(f"[{progress.done}/{progress.students}] {student}: {_counted(states)}{left}", flush=True)

            progress = grade.grade(kept, root, lambda: pool.pool(args.jobs, args.scheduler), show)
            if progress.fences:
                kept.set(fence=" / ".join(sorted(progress.fences)))
            if args.scheduler:
                print("\n".join(f"fence of the workers: {each}" for each in sorted(progress.fences)))
        except KeyboardInterrupt:
            count = len(kept.current())
            kept_ones = f"{_plural(count, 'verdict')} {'is' if count == 1 else 'are'} kept"
            print(f"interrupted: {kept_ones}; run the same command again to go on")
            return 128 + (ended_by[0] if ended_by else signal.SIGINT)
        rows = marks.marked(chosen, kept)
        _summary(rows, progress.judged, before)
        _write(kept, out, root)
        if not all(row.complete for row in rows):
            _not_graded(rows)
            return 1
    return 0


def _refuse_another(chosen, kept, out: Path) -> None:
    """Raises CourseError where `out` holds the grades of an assignment with which this one has nothing in common: a slip of the
    hand would replace its gradebooks."""
    before = {each.exercise for each in kept.expected()}
    if before and not before & set(chosen.exercises):
        raise course.CourseError(
            f"--out {out} holds the grades of {', '.join(sorted(before)[:3])}, none of which is an exercise of {chosen.title!r}: "
            "name another folder"
        )


def _summary(rows, judged: int, before: int) -> None:
    marks = [mark for row in rows for mark in row.marks]
    print(f"\n{_plural(len(rows), 'student')}, {_plural(len(marks), 'exercise')}: {_counted([m.state for m in marks])}")
    print(f"{_plural(before, 'verdict')} {'was' if before == 1 else 'were'} there, {_plural(judged, 'exercise')} run")
    noted = [(row.student, note) for row in rows for note in row.handed_in.notes]
    if noted:
        print(f"\nto be looked at ({len(noted)}):")
        print(tables.folded("\n".join(f"  {student}: {note}" for student, note in noted)))


def _not_graded(rows) -> None:
    """What the grader itself could not do: nobody has lost points by it."""
    print("\nnot graded:")
    for row in rows:
        for mark in row.marks:
            if mark.points is None:
                print(tables.folded(f"  {row.student}, {mark.exercise}: {mark.why}"))
    print("run the same command again to try these once more")


def _report(args: argparse.Namespace) -> int:
    from gpukit.classroom import store

    out, root = Path(args.out), course.root()
    with store.Store(out / store.NAME, create=False) as kept:
        _write(kept, out, root)
    return 0


def _write(kept, out: Path, root: Path) -> None:
    from gpukit.classroom import report

    if lacking := report.write(kept, out, root):
        print("\nnot in the gradebooks:")
        print(tables.folded("\n".join(f"  {sentence}" for sentence in lacking)))
    written = (
        f"written: {out / 'class.html'}, a page for each learner in {out / 'learners'}, gradebooks and reports in {out}"
    )
    print(f"\n{tables.folded(written)}")


def _replay(args: argparse.Namespace) -> int:
    from gpukit.classroom import replay, store
    from gpukit.grading.check_cells import protect_imports

    root = course.root()
    protect_imports(root)
    with store.Store(Path(args.out) / store.NAME, create=False) as kept:
        found = replay.replay(kept, args.student, args.id, root)
    print(found)
    return 0 if found.same else 1


def _gradescope(args: argparse.Namespace) -> int:
    from gpukit.classroom import gradescope

    made = gradescope.autograder(Path(args.assignment), Path(args.out), course.root(), args.visibility)
    print(f"{args.out}: {made.title}, {_worth(made)}")
    print("no solutions and no known answers are in it; the checks and the assignment's secret are")
    return 0


def _folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise course.CourseError(f"{folder} cannot be made: {error.strerror}") from None
    return folder


def _counted(states: list[str]) -> str:
    """ "14 pass, 2 fail, 1 todo" """
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states, key=_pass_first)))


def _pass_first(state: str) -> tuple[bool, str]:
    return state != "pass", state


def _worth(chosen) -> str:
    return (
        f"{_plural(len(chosen.exercises), 'exercise')}, {chosen.possible:g} point{'' if chosen.possible == 1 else 's'}"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
