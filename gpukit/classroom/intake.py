"""From what a class has handed in to one Submission for each student: forgiving about form, strict about what is read.

A folder of folders, of zips or of .py files, or the zip that an LMS makes of them:

    Canvas   lovelaceada_90311_4455_exercises.zip, lovelaceada_LATE_90311_4455_softmax-1.py
    Moodle   Ada Lovelace_1234567_assignsubmission_file_/exercises.zip
    others   s1042/exercises/softmax.py, s1042.zip: the name is the student

Of a submission only the exercises' files are read. They may lie in exercises/, beside it, or folders deeper, and their names
may differ as downloads and copies make them differ; else a file is known by the functions that it defines. Nothing here raises
for what a student has done: it becomes a sentence, and a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from gpukit import course
from gpukit.classroom import packed
from gpukit.classroom.packed import Member, named
from gpukit.classroom.roster import Roster, Student
from gpukit.grading import registry

_CANVAS = re.compile(r"(?P<who>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_\d+_(?P<rest>.+)")
_MOODLE = re.compile(r"(?P<who>.+)_(?P<id>\d+)_assignsubmission_(?:file|onlinetext)(?:_(?P<rest>.*))?")
# What a second download, a copy or a habit adds to a name. A higher number is newer; a word without one counts as 1.
_ADDED = re.compile(r"(?:_*\((?P<a>\d+)\)|_+v?(?P<b>\d+)|_+(?P<word>copy|final|fixed|kopie|new))+$")
# Folders of the course itself, which a learner may have packed along with the exercises.
_NOT_THEIRS = frozenset({"gpukit", "solutions", "tests"})
_LISTED = 5
_SEARCHED = 50  # files whose functions are looked at where no name fits


@dataclass(frozen=True)
class Submission:
    """What a student has handed in.

    path       the folder or file that it came from, "" if there is none
    submitted  ISO 8601 with an offset, "" if the roster does not say
    files      by concept, the bytes of a file of text that may be judged
    refused    by concept, why there is no such file, as a sentence
    notes      what else is to be said: twins, names that were understood, an archive that was refused
    """

    student: str
    name: str = ""
    email: str = ""
    path: str = ""
    submitted: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """One folder or file of the class's: whose it may be, and what is in it. `members` raises CourseError."""

    shown: str
    who: str
    members: Callable[[], list[Member]]
    id: str = ""
    late: bool = False


def one(path: Path, concepts: Collection[str]) -> Submission:
    """A single submission, a folder or a zip. Raises CourseError if there is none, or it holds no exercise at all."""
    if not path.exists():
        raise course.CourseError(f"there is no folder {path}")
    files, problems = packed.unpacked(packed.members(path.resolve() if path.is_dir() else path))
    found = _filled(Submission("", path=named(path)), files, concepts, problems)
    if not found.files and all("the submission has no" in found.refused[concept] for concept in concepts):
        wanted = ", ".join(f"{concept}.py" for concept in sorted(concepts))
        raise course.CourseError(f"{path} holds none of the exercises ({wanted})")
    return found


def read(path: Path | str, concepts: Collection[str], roster: Roster | None = None) -> Iterator[Submission]:
    """A Submission for each student, in the roster's order or by name; those that belong to nobody on it come last. One at
    a time: the files of a class need not fit into memory.

    Raises CourseError if there is no such folder or zip, or nothing in it.
    """
    path = Path(path)
    if not path.exists():
        raise course.CourseError(f"there is no folder or zip {path}")
    sources = list(_of_zip(path) if path.is_file() else _of_folder(path))
    if not sources:
        raise course.CourseError(f"{path} holds no submission: neither folders, nor zips, nor .py files")
    return _sorted_out(sources, concepts, roster)


def _sorted_out(sources: list[_Source], concepts: Collection[str], roster: Roster | None) -> Iterator[Submission]:
    theirs: dict[str, list[_Source]] = {}
    problems: dict[str, str] = {}
    for source in sources:
        found = roster.find(*filter(None, (source.id, source.who))) if roster else []
        others = {each.id for each in sources if each.who == source.who}
        namesakes = len(others - {""}) > 1 and found and source.id.casefold() not in found[0].exact
        if len(found) == 1 and not namesakes:
            key = found[0].id
        else:  # of two students of one name each has a number
            key = f"{source.who} ({source.id})" if source.id and (found or len(others) > 1) else source.who
            if found:
                those = " and ".join(student.id for student in found[:3])
                why = ", and another submission bears the same name" if len(found) == 1 else ""
                problems[key] = (
                    f"{source.shown} may be {those}{why}: put the LMS's number of each into a column of the roster"
                )
            elif roster:
                problems[key] = f"{source.shown} belongs to nobody on {Path(roster.where).name}"
        theirs.setdefault(key, []).append(source)
    known = {student.id: student for student in roster.students} if roster else {}
    for key in [*known, *sorted(theirs.keys() - known.keys())]:
        student = known.get(key, Student(key, key if any(source.id for source in theirs.get(key, ())) else ""))
        yield _submission(student, theirs.get(key, []), concepts, problems.get(key, ""))


def _submission(student: Student, sources: list[_Source], concepts: Collection[str], note: str) -> Submission:
    start = Submission(student.id, student.name, student.email, "", student.submitted, notes=(note,) if note else ())
    if not sources:
        return replace(start, refused=dict.fromkeys(concepts, "nothing was handed in"))
    files: list[Member] = []
    problems: list[str] = []
    for source in sources:
        try:
            inside, refused = packed.unpacked(source.members())
        except course.CourseError as error:
            problems.append(str(error))
            continue
        problems += refused
        several = len(sources) > 1  # then each file's name begins with where it came from
        files += [
            replace(each, name=f"{source.shown}/{each.name}") if several and each.name != source.shown else each
            for each in inside
        ]
    late = [source.shown for source in sources if source.late and not student.submitted]
    problems += [
        f"the LMS calls {shown} late; when it came in belongs into the roster's column submitted" for shown in late
    ]
    return _filled(replace(start, path=", ".join(source.shown for source in sources)), files, concepts, problems)


# -- which file is which exercise's ------------------------------------------------------------------------------------


def _filled(start: Submission, files: list[Member], concepts: Collection[str], problems: Iterable[str]) -> Submission:
    """`start` with the files that are found for each concept, or why there is none."""
    problems = list(problems)
    notes = [*start.notes, *problems]
    if out := [file.name for file in files if packed.leads_out(file.name)]:
        notes.append(f"names that lead out of the submission were left out: {_listed(out)}")
    files = [file for file in files if not packed.leads_out(file.name) and not _NOT_THEIRS & {*file.path.parts[:-1]}]
    python = [file for file in files if file.path.suffix.lower() == ".py"]
    found: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for concept in concepts:
        candidates = sorted((f for f in python if _concept(f.path) == concept), key=_newer, reverse=True)
        if not candidates:
            candidates, why = _by_functions(python, concept, concepts)
            if not candidates:
                refused[concept] = problems[0] if problems and not python else why or _nothing(concept, files)
                continue
        taken, *others = candidates
        if others:
            rule = "files in exercises/ go first, then the highest number in a name"
            notes.append(
                f"{concept}.py is there {len(candidates)} times: {taken.name} was taken, not {_listed([o.name for o in others])} ({rule})"
            )
        elif taken.path.name != f"{concept}.py" and not _downloaded(taken.path.name, concept):
            notes.append(f"{taken.name} was read as {concept}.py")
        try:
            data = taken.read()
            if not course.text(data).strip():
                raise course.CourseError("is empty")
            found[concept] = data
        except course.CourseError as error:
            refused[concept] = f"{taken.path.name} {error}"
    return replace(start, files=found, refused=refused, notes=tuple(notes))


def _downloaded(name: str, concept: str) -> bool:
    """Whether a name is that which Canvas makes of a file of the concept: nothing that anybody must look at."""
    found = _CANVAS.fullmatch(name)
    return found is not None and found["rest"] == f"{concept}.py"


def _concept(path: PurePosixPath) -> str:
    """The concept whose exercises a file of this name would hold: "Flash-Attention (2).py" is flash_attention's."""
    return _plain(path.stem)[0]


def _plain(stem: str) -> tuple[str, int]:
    """A file's name without what copying adds to it, and the number of the copy."""
    if canvas := _CANVAS.fullmatch(stem):
        stem = canvas["rest"]
    stem = re.sub(r"[\s-]+", "_", stem.strip().lower())
    added = _ADDED.search(stem)
    if added is None:
        return stem, 0
    return stem[: added.start()].rstrip("_"), int((added["a"] or added["b"] or "1")[:9])


def _newer(file: Member) -> tuple:
    """What sorts twins of a file, the newest last: numbers in the names of archives say as much as those of the file."""
    *folders, _ = file.path.parts
    zips = tuple(_plain(PurePosixPath(part).stem)[1] for part in folders if part.lower().endswith(".zip"))
    return "exercises" in folders, zips, _plain(file.path.stem)[1], -len(folders), file.name


def _by_functions(python: list[Member], concept: str, concepts: Collection[str]) -> tuple[list[Member], str]:
    """The one file of another name that defines functions of the concept, or why none is taken."""
    functions = "|".join(re.escape(each.function) for each in registry.concept(concept).values())
    defines = re.compile(rf"^def ({functions})\(".encode(), re.MULTILINE)
    found = []
    for file in [file for file in python if _concept(file.path) not in concepts][:_SEARCHED]:
        try:
            if defines.search(file.read()):
                found.append(file)
        except course.CourseError:
            continue
    if len(found) > 1:
        return (
            [],
            f"the submission has no {concept}.py, and {_listed([f.name for f in found])} define its functions: name the right one {concept}.py",
        )
    return found, ""


def _nothing(concept: str, files: list[Member]) -> str:
    held = [file.name for file in files]
    if any(Path(name).suffix.lower() in packed.OTHER_ARCHIVES for name in held):
        other = next(name for name in held if Path(name).suffix.lower() in packed.OTHER_ARCHIVES)
        return f"the submission has no {concept}.py; {other} is an archive that is not read: hand in .py files or a zip"
    lessons = [file.name for file in files if file.path.suffix == ".ipynb" and concept in _plain(file.path.stem)[0]]
    if lessons:
        return (
            f"the submission has no {concept}.py; {lessons[0]} is the lesson: the answers are in exercises/{concept}.py"
        )
    return f"the submission has no {concept}.py" + ("" if held else "; it is empty")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


# -- where submissions lie ---------------------------------------------------------------------------------------------


def _of_folder(folder: Path) -> Iterator[_Source]:
    for path in sorted(folder.iterdir()):
        shown = named(path.name)
        if path.name.startswith((".", "__")) or not (path.is_dir() or _handed_in(shown)):
            continue
        yield _source(shown, path.is_dir(), lambda path=path: _members(path))


def _members(path: Path) -> list[Member]:
    if path.is_symlink() and path.is_dir():
        raise course.CourseError(f"{named(path.name)} is a symbolic link, not a folder")
    return packed.members(path)


def _of_zip(path: Path) -> Iterator[_Source]:
    """The submissions in an LMS's download: what lies at the top of the zip, or in its one folder."""
    if path.suffix.lower() != ".zip":
        raise course.CourseError(f"{path} is neither a folder nor a zip")
    files = packed.unzipped(named(path.name), path.stat().st_size, lambda: path, of_a_class=True)
    tops = {file.path.parts[0] for file in files}
    below = {file.path.parts[1:2] for file in files}
    if (
        len(tops) == 1
        and () not in below
        and not any(p[0].lower().endswith(".py") or p[0] == "exercises" for p in below)
    ):
        files = [replace(file, name="/".join(file.path.parts[1:])) for file in files]
    groups: dict[tuple[str, bool], list[Member]] = {}
    for file in files:
        top, *inside = file.path.parts
        groups.setdefault((top, bool(inside)), []).append(replace(file, name="/".join(inside) or top))
    for (top, is_folder), inside in sorted(groups.items()):
        if is_folder or _handed_in(top):
            yield _source(top, is_folder, lambda inside=inside: inside)


def _handed_in(name: str) -> bool:
    """Whether a file that lies beside folders is somebody's: a list or a read-me is not."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix in (".py", ".zip", *packed.OTHER_ARCHIVES) or bool(_CANVAS.fullmatch(name) or _MOODLE.fullmatch(name))


def _source(name: str, is_folder: bool, members: Callable[[], list[Member]]) -> _Source:
    stem = name if is_folder else PurePosixPath(name).stem
    found = _MOODLE.fullmatch(name) or _CANVAS.fullmatch(name)
    if found is None:
        return _Source(name, stem if is_folder else re.sub(r"\s*\(\d+\)$", "", stem), members)
    return _Source(name, found["who"], members, found["id"], bool(found.groupdict().get("late")))
