"""The command `gpukit`. Each subcommand is a function of its arguments that returns an exit status: 0, 1 for a failed
check, 2 for a mistake in how it was called."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import gpukit
from gpukit import benchmark, course, hardware, tables
from gpukit.accounting.commands import flops_command, memory_command
from gpukit.classroom import commands as classroom
from gpukit.nearest import did_you_mean
from gpukit.train import command as training


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence and not the whole usage, which names what was given and what may be."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}  (more: {self.prog} --help)\n")

    def parse_known_args(self, args=None, namespace=None):
        """A word too many is told by the subcommand that does not know it, which could not say so to the whole parser."""
        found, more = super().parse_known_args(args, namespace)
        if more:
            options = [name for action in self._actions for name in action.option_strings]
            flags = [word for word in more if word.startswith("-")]
            hint = did_you_mean(flags[0].partition("=")[0], options) if flags else ""
            self.error(f"unrecognized arguments: {' '.join(more)}{hint}")
        return found, more

    def _check_value(self, action, value):
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint, names = did_you_mean(value, action.choices), ", ".join(action.choices)
            self.exit(2, f"{self.prog}: no command is called {value!r}{hint}  (all of them: {names})\n")
        super()._check_value(action, value)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["lab"] and not {"-h", "--help"} & set(arguments[1:2]):  # the rest is JupyterLab's to read
        from gpukit.lab import lab

        return lab(arguments[1:])
    parser, names = _parser()
    if not arguments:
        parser.print_help()
        return 2
    if not arguments[0].startswith("-") and arguments[0] not in names:
        hint = did_you_mean(arguments[0], [*(f"class {name}" for name in classroom.NAMES), *names])
        if arguments[0] in classroom.NAMES:
            hint = f"; did you mean 'class {arguments[0]}'?"
        return _refuse(f"no command is called {arguments[0]!r}{hint}  (all of them: gpukit --help)")
    args = parser.parse_args(arguments)
    with contextlib.suppress(AttributeError, OSError):  # in a terminal that lacks a character it is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = args.run(args)
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()
        return status
    except course.CourseError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # gpukit progress | head
        _silence()
        return 1
    except OSError as error:  # a full disk, no temporary folder
        _silence()
        return _refuse(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
    except KeyboardInterrupt:
        return _refuse("interrupted", 130)


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of its commands."""
    parser = _Parser(
        prog="gpukit",
        description="A course on making language models fast on GPUs: notebooks, exercises and their checks.",
        epilog="Begin with: gpukit lab. What a command takes: gpukit COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"gpukit {gpukit.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        added.set_defaults(run=run)
        return added

    added = command("lab", None, "open the course in JupyterLab")
    added.usage = "gpukit lab [OPTION ...]"
    added.formatter_class = argparse.RawDescriptionHelpFormatter
    added.epilog = (
        "All options go to JupyterLab:\n  --no-browser          print the address and open no browser\n"
        "  --port=9000           the port; without it the first free one from 8888 up\n"
        "  --ip=0.0.0.0          let other machines in, as a container needs\n"
        "  (all of them: jupyter lab --help)"
    )

    added = command("check", _check, "check exercises, as gpukit.check does in a notebook")
    added.add_argument(
        "ids", nargs="*", metavar="ID", help="softmax.fused, softmax (all of a concept) or all (default)"
    )
    added.add_argument(
        "-v", "--verbose", action="store_true", help="show what your code printed and the whole traceback"
    )
    _add_impl(added)
    added.add_argument(
        "--seed", type=_seed, metavar="N", help="replay the inputs of an earlier run (default: fresh ones)"
    )

    added = command("hint", _hint, "show a hint for an exercise")
    added.add_argument("id", metavar="ID")
    added.add_argument(
        "number", nargs="?", type=int, default=1, metavar="N", help="1 to 3, each more explicit (default: 1)"
    )

    added = command("compare", _compare, "show your answer beside the course's, once yours passes")
    added.add_argument("id", metavar="ID")
    added.add_argument("--gpu", default="h200", help="any GPU of the table (default: %(default)s)")

    added = command("progress", _progress, "list the exercises and what the last check of each said")

    added = command("grade", _grade, "grade exercises and write reports; exit status 0 when all pass")
    added.add_argument(
        "ids",
        nargs="*",
        metavar="ID",
        help="softmax.fused, softmax (all of a concept) or all (default: what this copy holds)",
    )
    added.add_argument(
        "--submission", metavar="DIR", help="grade the exercises' files in a folder or a zip, and nothing else of it"
    )
    for kind in ("json", "markdown", "junit"):
        added.add_argument(f"--{kind}", metavar="FILE", help=f"write the report as {kind}")
    _add_impl(added)
    added.add_argument("--seed", type=_seed, metavar="N", help=argparse.SUPPRESS)

    added = command("update", _update, "bring this learners' copy to a newer release, and keep every answer")
    added.add_argument("source", metavar="FROM", help="the release, a folder or a zip")

    added = command("reset", _reset, "put the empty stub of an exercise back, after a backup")
    added.add_argument("id", metavar="ID", help="softmax.fused, or softmax for the whole file")

    added = command("release", _release, "make the learners' copy of the course, without solutions (for instructors)")
    added.add_argument("out", metavar="OUT", help="a folder that is not there or empty, or a name that ends in .zip")
    added.add_argument("--concepts", nargs="+", default=[], metavar="NAME", help="memory softmax ... (default: all)")
    added.add_argument("-a", "--assignment", metavar="FILE", help="the concepts of this assignment, also its own ones")
    added.add_argument(
        "--check", action="store_true", help="make nothing: search OUT, a folder, zip or wheel, for answers"
    )

    added = command("init", _init, "lay the course out in a folder, from an installed gpukit")
    added.add_argument("folder", metavar="DIR", help="a folder that is not there or empty")

    classroom.add_arguments(command("class", None, "grade a whole class, and repeat a verdict (for instructors)"))

    added = command("bench", _bench, "time operations side by side with PyTorch, or show what is recorded")
    benchmark.add_arguments(added)

    added = command("trace", _trace, "say what a kernel moves, compiles to and takes on any GPU, without that GPU")
    added.add_argument(
        "op",
        metavar="OP or FILE.py",
        nargs="?",
        help="an operation, such as softmax (a name that is none lists them), or a file that launches kernels of your own, on "
        "meta tensors or small ones",
    )
    added.add_argument("--shape", metavar="4096x4096", help="default: the operation's first benchmark shape")
    added.add_argument("--dtype", help="bf16, fp16, fp32 or fp64 (default: bf16)")
    added.add_argument(
        "--gpu", default="h200", help="any GPU of the table; a name that is none lists them (default: %(default)s)"
    )
    added.add_argument(
        "--html",
        metavar="FILE",
        help="also write one page with the tables and pictures of the accesses, to be opened in a browser",
    )
    added.add_argument(
        "--ncu",
        metavar="FILE.py",
        type=Path,
        help="on a machine with a GPU: run this file, and show what Nsight Compute measures of its kernels beside what gpukit counts and models",
    )

    added = command("cheatsheet", _cheatsheet, "print the course's formulas and GPUs, or write them as a page")
    added.add_argument("--html", metavar="FILE", help="write the page to be printed, on one sheet of paper")

    added = command(
        "validate",
        _validate,
        "compare the simulator's numbers with measured ones (for contributors); exit status 1 where one of the kernels that the "
        "model was not built with is too far off, or another one is and no reason is recorded",
    )
    added.add_argument("--gpu", help="a GPU with recorded measurements (default: all of them)")
    added.add_argument("--misses", action="store_true", help="only the rows outside their bars")
    once = added.add_mutually_exclusive_group()
    once.add_argument(
        "--measure",
        action="store_true",
        help="on a GPU: time and count the newest set of kernels, which are predicted only afterwards",
    )
    once.add_argument("--predict", action="store_true", help="predict what --measure has measured of it")
    added.add_argument("--set", metavar="NAME", help="an older set to measure or predict, such as seventh")

    memory_command(command("memory", _pencil, "say what a training step, or serving, holds on each GPU, and why"))
    flops_command(command("flops", _pencil, "say what a training run takes: FLOPs, days, GPU-hours, and why"))

    training.add_arguments(
        command("train", training.run, "train a GPT, on a CPU or a GPU; go on with a run that was stopped")
    )

    added = command("doctor", _doctor, "say what this machine has, what is missing and what to do about it")

    added = command("nb", None, "run notebooks, or put them in the form that git should hold (for contributors)")
    actions = added.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser("run", help="execute on the stubs and save the outputs in canonical form")
    action.add_argument("files", nargs="*", metavar="FILE", help="default: all notebooks")
    action.add_argument(
        "--refresh", action="store_true", help="replace what was saved on another machine (cells tagged hardware)"
    )
    action.add_argument(
        "--timeout", type=float, default=120, metavar="S", help="seconds a cell may take (default: 120)"
    )
    action.set_defaults(run=_nb_run)
    action = actions.add_parser("clean", help="put notebooks in canonical form, without running them")
    action.add_argument("files", nargs="*", metavar="FILE", help="default: all notebooks")
    action.add_argument(
        "--check", action="store_true", help="change nothing; list what is wrong and solutions that leak"
    )
    action.set_defaults(run=_nb_clean)

    added = command("integrity", _integrity, "judge answers whose verdict is known (for contributors)")
    added.add_argument(
        "ids", nargs="*", metavar="ID", help="softmax.fused, softmax (all of a concept) or all (default)"
    )
    added.add_argument(
        "-j", "--jobs", type=int, default=1, metavar="N", help="exercises at a time (default: %(default)s)"
    )
    added.add_argument(
        "--seeds",
        type=_seeds,
        default="1",
        metavar="N",
        help="inputs for each right answer: of seeds 1 to N, or A-B for those from A to B (default: %(default)s)",
    )
    added.add_argument("--right", action="store_true", help="try right answers alone")
    added.add_argument(
        "--mutants",
        nargs="?",
        const="all",
        choices=("functions", "some", "all"),
        help="try the solution with one thing changed, too: of plain functions alone, also every tenth of those of "
        "kernels (some), or of kernels all of them, which is slow (all: --mutants alone)",
    )

    added = command("stubs", _stubs, "make exercises/ from solutions/ (for contributors)")
    added.add_argument("--check", action="store_true", help="change nothing; list the files that differ")
    return parser, list(commands.choices)


def _add_impl(parser: argparse.ArgumentParser) -> None:
    choice = "exercises (default) or solutions; goes before GPUKIT_IMPL"
    parser.add_argument("--impl", choices=course.IMPLS, help=choice)


def _seed(text: str) -> int:
    if text.isdecimal() and (seed := int(text)) < 1 << 31:
        return seed
    raise argparse.ArgumentTypeError(f"must be a whole number, 0 to {(1 << 31) - 1}, got {text!r}")


def _check(args: argparse.Namespace) -> int:
    from gpukit.grading.example import offer
    from gpukit.grading.verdict import in_color

    root = _root()
    impl = args.impl or course.impl()
    verdicts = []
    ids = _chosen(args.ids)
    for exercise_id in ids:
        verdict = _judge(exercise_id, impl, root, args.seed)
        verdicts.append(verdict)
        more = offer(verdict, terminal=True) if len(ids) == 1 else ""
        print(in_color(verdict.state, tables.folded(f"{_in_paragraphs(str(verdict))}{more}")), flush=True)
        if args.verbose:
            print(f"  {verdict.seconds:.1f} s, --seed {verdict.seed}")
            if verdict.detail:
                print(_indented(verdict.detail))
    if len(verdicts) > 1:
        print(f"\n{sum(v.passed for v in verdicts)} of {len(verdicts)} exercises pass")
    return 0 if all(v.state in ("pass", "skipped") for v in verdicts) else 1


# What begins a line of its own in a verdict: the learner's code, the hint, a fact about a line or a case, a new sentence.
_BEGINS = re.compile(r"  (?:  |hint \d|line \d|in case |\w+ is (?:loaded|stored) )")
_NEW_SENTENCE = re.compile(r"  (?:[A-Z][a-z]+|A) ")


def _in_paragraphs(text: str) -> str:
    """A verdict, whose lines were broken for a page of diagnose.WIDTH letters. Where the terminal is narrower, those that make
    a paragraph are put together, so that they can be broken again without a rest of two words after each."""
    from gpukit.grading.diagnose import WIDTH

    if shutil.get_terminal_size((WIDTH, 0)).columns >= WIDTH:
        return text
    first, *rest = text.split("\n")
    lines, above = [first], first  # `above`: the line before, as it was broken
    for line in rest:
        word = (line.split() or [""])[0]
        full = len(above) + 1 + len(word) > WIDTH  # the first word had no room in the line above
        begins = _BEGINS.match(line) or (_NEW_SENTENCE.match(line) and above[-1:] not in ".?!")
        if line.startswith("  ") and full and not begins and not above.startswith("    "):
            lines[-1] += line[1:]
        else:
            lines.append(line)
        above = line
    return "\n".join(lines)


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a number, such as 3, or a range, such as 63-200, got {text!r}")
    chosen = range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)
    if not chosen or chosen[0] < 1:
        raise argparse.ArgumentTypeError(f"seeds count from 1 and upwards, got {text!r}")
    return chosen


def _integrity(args: argparse.Namespace) -> int:
    from gpukit import integrity

    if args.jobs < 1:
        raise course.CourseError(f"--jobs must be 1 or more, got {args.jobs}")
    root, chosen = _root(), _chosen(args.ids)
    print(integrity.heading())
    rows = integrity.integrity(
        chosen, root, args.jobs, args.seeds, args.mutants, args.right,
        show=lambda row: print(integrity.line(row), flush=True),
    )  # fmt: skip
    print(f"\n{integrity.summary(rows)}")
    return 0 if all(row.whole for row in rows) else 1


def _chosen(names: list[str]) -> list[str]:
    """The ids that a learner's words stand for, in the course's order. Raises UnknownExercise."""
    from gpukit.grading import registry

    known = registry.exercises()
    names = names or ["all"]
    if "all" in names:
        return [*registry.handed_out(course.root())]
    chosen = {exercise_id for name in names for exercise_id in registry.named(name)}
    return [exercise_id for exercise_id in known if exercise_id in chosen]


def _hint(args: argparse.Namespace) -> int:
    from gpukit.grading.registry import exercise, named

    ids = named(args.id)
    if len(ids) > 1:
        return _refuse(f"a hint is for one exercise; those of {args.id} are {', '.join(ids)}")
    (name,) = ids
    hints = exercise(name).hints
    if not 1 <= args.number <= len(hints):
        return _refuse(f"hint number must be 1 to {len(hints)}, got {args.number}")
    text = f"hint {args.number} of {len(hints)} for {name}: {hints[args.number - 1]}"
    print(tables.folded(text))
    if args.number < len(hints):
        print(f"next: gpukit hint {name} {args.number + 1}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from gpukit.grading.verdict import Shown
    from gpukit.side_by_side import beside

    _root()
    found = beside(args.id, args.gpu, terminal=True)
    refused = isinstance(found, Shown)
    print(tables.folded(_in_paragraphs(str(found))) if refused else found)
    return int(refused)


def _progress(args: argparse.Namespace) -> int:
    from gpukit.grading.registry import handed_out
    from gpukit.grading.report import recorded

    root = _root()
    done, exercises = recorded(root), handed_out(root)
    rows = [("exercise", "state", "checks", "level", "minutes", "notebook", "what it asks")]
    for e in exercises.values():
        last = done.get(e.id)
        state = "not tried" if last is None else last["state"] + (", edited since" if last["edited"] else "")
        checks = f"{last['checks_passed']}/{last['checks_total']}" if last else ""
        rows.append((e.id, state, checks, f"{e.label.difficulty}/5", f"{e.label.minutes}", e.notebook, e.title))
    print("\n".join(tables.narrowed(rows)))
    left = [e for e in exercises.values() if done.get(e.id, {}).get("state") != "pass"]
    print(f"\n{len(exercises) - len(left)} of {len(exercises)} exercises pass")
    if left:
        print(f"next: {left[0].id}, in notebooks/{left[0].notebook}.ipynb")
    return 0


def _grade(args: argparse.Namespace) -> int:
    from gpukit.grading import registry
    from gpukit.grading.ending import ending
    from gpukit.grading.report import Report, missing
    from gpukit.grading.verdict import not_graded

    known = registry.exercises()
    names = {each for name in args.ids if name != "all" for each in registry.named(name)}
    impl = args.impl or ("exercises" if args.submission else course.impl())
    if args.submission and impl == "solutions":
        return _refuse(
            "--submission grades a learner's files; --impl solutions grades the course's own: give one of them"
        )
    reports = {"json": args.json, "markdown": args.markdown, "junit": args.junit}
    for path in filter(None, reports.values()):
        if not Path(path).absolute().parent.is_dir():
            return _refuse(f"{path} cannot be written: there is no folder {Path(path).parent}")
    root = _root()
    chosen = known  # the whole course, whatever the copy of somebody else says that it holds
    if names and "all" not in args.ids:
        chosen = {name: e for name, e in known.items() if name in names}
    elif not args.ids and not args.submission:
        chosen = registry.handed_out(root)
    with tempfile.TemporaryDirectory(prefix="gpukit-", ignore_cleanup_errors=True) as folder, ending() as ended_by:
        refused: dict[str, str] = {}
        if args.submission:
            root = Path(folder).resolve()
            refused = _pristine_copy(Path(args.submission), root, {e.concept for e in chosen.values()})
        report = Report(impl, root, chosen)
        problems = []
        try:
            if impl == "solutions":
                _say("solutions: an instructor's run, not a grade\n", reports)
            for exercise_id, e in chosen.items():
                why = refused.get(e.concept)
                try:
                    verdict = missing(exercise_id, why) if why else _judge(exercise_id, impl, root, args.seed)
                    report.add(verdict)
                except Exception as error:
                    verdict = not_graded(exercise_id, impl, error)
                    report.add(verdict)
                _say(tables.folded(f"{verdict}\n" if verdict.lines else str(verdict)), reports)
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            problems = report.write(**reports)
    for problem in problems:
        _refuse(problem)
    for note in report.notes:
        _say(tables.folded(note), reports)
    _say(("interrupted: the report is incomplete\n" if report.interrupted else "") + report.summary, reports)
    if report.interrupted:
        return 128 + (ended_by[0] if ended_by else signal.SIGINT)
    return 2 if problems else 0 if report.all_passed else 1


def _say(text: str, reports: dict[str, str | None]) -> None:
    """Print a line. Where nobody reads it (`gpukit grade --json FILE | head -1`) the reports are still made."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not any(reports.values()):
            raise
        if not isinstance(error, BrokenPipeError):
            _refuse(f"the output cannot be written: {error.strerror}")
        _silence()


def _silence() -> None:
    """From here on nothing is printed, nor does Python complain about what could not be when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _pristine_copy(submission: Path, root: Path, concepts: set[str]) -> dict[str, str]:
    """Copy a submission's exercise files, and nothing else of it, into the empty folder `root`. By concept, why there
    is none. Raises CourseError if `submission` holds no exercise at all."""
    from gpukit.classroom import intake

    found = intake.one(submission, sorted(concepts))
    for name in ("exercises", "notebooks"):
        (root / name).mkdir()
    for concept, data in found.files.items():
        (root / "exercises" / f"{concept}.py").write_bytes(data)
    for note in found.notes:
        print(f"gpukit: {note}", file=sys.stderr)
    return found.refused


def _update(args: argparse.Namespace) -> int:
    from gpukit.classroom.update import update

    print("\n".join(update(_root(), Path(args.source))))
    return 0


def _reset(args: argparse.Namespace) -> int:
    from gpukit.classroom.reset import reset

    print("\n".join(reset(_root(), args.id)))
    return 0


def _release(args: argparse.Namespace) -> int:
    if args.assignment and args.concepts:
        return _refuse("--assignment and --concepts both say what is released: give one of them")
    from gpukit.classroom import assignment, leaks, own
    from gpukit.classroom.release import release

    root, out = _root(), Path(args.out)
    chosen = assignment.read(args.assignment) if args.assignment else None
    mine = chosen.own if chosen else ()
    if args.check:
        found = leaks.scan(out, root, own.solutions(folder for folder, _ in mine))
        print("\n".join(found) or f"no answer was found in {out}")
        return 1 if found else 0
    made, lacking = release(out, chosen.concepts if chosen else args.concepts, root, mine)
    print(f"{out}: {made}\nconcepts: {', '.join(made.concepts)}")
    if lacking:
        print(f"they build on notebooks that are not in it: {', '.join(lacking)}")
    return 0


def _init(args: argparse.Namespace) -> int:
    from gpukit.classroom.release import init

    print(f"{args.folder}: {init(Path(args.folder))}\nnext: cd {args.folder}, then gpukit lab")
    return 0


def _bench(args: argparse.Namespace) -> int:
    if not args.ops:
        return _refuse(f"bench needs an operation, or all: {', '.join(benchmark.names())}")
    if args.gpu and not args.show:
        return _refuse(f"--gpu {args.gpu} goes with --show: without it, bench measures the GPU of this machine")
    if not args.show:
        return benchmark.command(args)
    from gpukit.widgets.versus import show_recorded

    try:
        show_recorded(args.ops, args.gpu or "h200", args.mode, args.out)
    except (ValueError, FileNotFoundError) as error:
        return _refuse(str(error))
    return 0


def _trace(args: argparse.Namespace) -> int:
    if bool(args.op) == bool(args.ncu):
        return _refuse(
            "trace needs an operation, such as softmax, a file, such as mine.py, or --ncu FILE.py, and one of them alone"
        )
    if args.ncu:
        if args.html:
            return _refuse("--html goes with an operation or a file, and --ncu prints tables only")
        from gpukit.validation import own_file

        try:
            print(own_file.command(args.ncu))
        except (ValueError, RuntimeError) as error:
            return _refuse(str(error))
        return 0
    path = Path(args.op) if args.op.endswith(".py") or os.sep in args.op else None
    if args.html and not Path(args.html).absolute().parent.is_dir():
        return _refuse(f"{args.html} cannot be written: there is no folder {Path(args.html).parent}")
    try:  # before PyTorch and Triton, which take seconds to import
        gpu = hardware.gpu(args.gpu)
        if path is None:
            benchmark.refuse_unknown(args.op, args.shape, args.dtype or "bf16")
        elif args.shape or args.dtype:
            option = "--shape" if args.shape else "--dtype"
            return _refuse(f"{option} goes with an operation; a file says itself what it calls its kernels with")
        elif not path.is_file():
            return _refuse(f"trace needs an operation or a Python file that launches kernels; there is no file {path}")
    except ValueError as error:
        return _refuse(str(error))
    # Before Triton is imported, and also where there is a GPU: it has no part in this.
    os.environ["TRITON_INTERPRET"] = "1"
    with _Waiting("loading PyTorch and Triton") as waiting:
        from gpukit import trace_report

        try:
            if path is not None:
                found = trace_report.file(path, gpu, waiting.say)
            else:
                found = trace_report.operation(args.op, args.shape, args.dtype or "bf16", args.gpu, waiting.say)
            text = str(found)
            if args.html:
                waiting.say("drawing the page")
                from gpukit import trace_page

                trace_page.save(args.html, found)
        except (ValueError, TypeError) as error:
            waiting.end()
            return _refuse(str(error))
    print(text)
    if args.html:
        print(f"\nthe page: {args.html}")
    return _refuse(found.ended, 1) if found.ended else 0


class _Waiting:
    """One line on a terminal that says what is being done and since when; nothing where stderr is no terminal."""

    def __init__(self, what: str):
        self.what, self.started = what, time.monotonic()
        self.shown = sys.stderr is not None and sys.stderr.isatty()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> _Waiting:
        if self.shown:
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.end()

    def say(self, what: str) -> None:
        """From now on this is done."""
        self.what = what

    def end(self) -> None:
        """Take the line away; a second time does nothing."""
        if self.shown and not self._over.is_set():
            self._over.set()
            self._thread.join()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _tick(self) -> None:
        while not self._over.is_set():
            text = f"{time.monotonic() - self.started:3.0f} s  {self.what}"
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
            self._over.wait(0.25)


def _cheatsheet(args: argparse.Namespace) -> int:
    from gpukit import cheatsheet

    if args.html:
        if not Path(args.html).absolute().parent.is_dir():
            return _refuse(f"{args.html} cannot be written: there is no folder {Path(args.html).parent}")
        Path(args.html).write_text(cheatsheet.page(), encoding="utf-8")
    else:
        print(cheatsheet.text())
    return 0


def _validate(args: argparse.Namespace) -> int:
    from gpukit.validation import report, unseen

    if args.set is not None and not (args.measure or args.predict):
        return _refuse("--set goes with --measure or --predict")
    if args.set not in (None, *unseen.SETS):
        return _refuse(f"--set must be one of {', '.join(unseen.SETS)}, got {args.set!r}")
    if args.measure:
        return unseen.measure(args.set or unseen.NEWEST)
    if args.predict:
        return unseen.predict(args.set or unseen.NEWEST)
    if args.gpu is None:
        return report.show(report.recorded(), not args.misses, missing=False)
    try:
        gpu = hardware.gpu(args.gpu).key
    except ValueError as error:
        return _refuse(str(error))
    return report.show([gpu], not args.misses, missing=True)


def _pencil(args: argparse.Namespace) -> int:
    try:
        print(tables.folded("\n".join(args.lines(args))))
    except ValueError as error:
        return _refuse(str(error))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from gpukit import doctor

    rows = doctor.examine()
    print(tables.folded(doctor.as_text(rows)))
    return 1 if any(row.state == doctor.MISSING for row in rows) else 0


def _nb_run(args: argparse.Namespace) -> int:
    from gpukit import notebooks
    from gpukit.grading import stubs

    root = _root()
    if answered := stubs.drift(root):
        raise course.CourseError(f"{answered[0]}: notebooks are saved with exercises/ as `gpukit stubs` makes it")
    for path in notebooks.find(args.files, root):
        changed = notebooks.run(path, refresh=args.refresh, timeout_s=args.timeout)
        print(f"{path.name}: {'new outputs in ' + ', '.join(changed) if changed else 'outputs unchanged'}", flush=True)
    return 0


def _nb_clean(args: argparse.Namespace) -> int:
    from gpukit import notebooks
    from gpukit.grading import stubs

    root = _root()
    paths = notebooks.find(args.files, root)
    if args.check:
        found = [problem for path in paths for problem in notebooks.problems(path)]
        found += stubs.leaks(root)
        print("\n".join(found) or f"{len(paths)} notebooks are canonical")
        return 1 if found else 0
    for path in paths:
        text = notebooks.write(notebooks.clean(notebooks.read(path)))
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: cleaned")
    return 0


def _stubs(args: argparse.Namespace) -> int:
    from gpukit.grading import stubs

    lines = stubs.drift(_root()) if args.check else stubs.write(_root())
    print("\n".join(lines) or "exercises/ is what solutions/ makes it")
    return 1 if args.check and lines else 0


def _judge(exercise_id: str, impl: str, root: Path, seed: int | None):
    from gpukit.grading.judge import judge

    return judge(exercise_id, impl=impl, root=root, seed=seed, terminal=True)


def _root() -> Path:
    """The course's folder, with this process's imports protected from the files in it."""
    from gpukit.grading.check_cells import protect_imports

    root = course.root()
    protect_imports(root)
    return root


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())


def _refuse(sentence: str, status: int = 2) -> int:
    print(tables.folded(f"gpukit: {sentence}"), file=sys.stderr)
    return status
