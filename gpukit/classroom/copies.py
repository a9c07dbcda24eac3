"""A learners' copy of the course, as data: its files, and release.json, which says what it was made from.

version, released, commit   of the course, when, and from which commit ("" where it came from the wheel)
concepts                    whose notebooks and exercises it has, in the course's order
files                       path -> SHA-256 of each file as handed out: what a learner has changed since can be told
cells                       notebook -> SHA-256 of its cells without outputs: running a notebook changes nothing in it
stubs                       concept -> the text of exercises/<concept>.py as handed out: for `gpukit reset` and merging
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from gpukit.course import CourseError

NAME = "release.json"
MAX_BYTES = 1 << 29  # of a release, unpacked


@dataclass(frozen=True)
class Release:
    version: str
    released: str
    commit: str
    concepts: tuple[str, ...]
    files: dict[str, str]
    cells: dict[str, str]
    stubs: dict[str, str]

    def __str__(self) -> str:
        commit = f", commit {self.commit}" if self.commit else ""
        return f"gpukit {self.version}, released {self.released}{commit}"

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def describe(
    files: Mapping[str, bytes], concepts: tuple[str, ...], version: str, released: str, commit: str
) -> Release:
    """The Release of what is handed out, without release.json itself."""
    exercises = {concept: f"exercises/{concept}.py" for concept in concepts}
    return Release(
        version,
        released,
        commit,
        concepts,
        files={name: digest(data) for name, data in sorted(files.items())},
        cells={name: cells(data) for name, data in sorted(files.items()) if is_notebook(name)},
        stubs={concept: files[name].decode() for concept, name in exercises.items()},
    )


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cells(data: bytes) -> str:
    """The digest of what a learner writes in a notebook: kind and source of each cell. Of any other text, its own."""
    try:
        found = [
            (cell["cell_type"], "".join(cell["source"]), cell.get("attachments")) for cell in json.loads(data)["cells"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return digest(data)
    return digest(json.dumps(found, sort_keys=True).encode())


def is_notebook(name: str) -> bool:
    return name.startswith("notebooks/") and name.endswith(".ipynb")


def is_exercise(name: str) -> bool:
    return name.startswith("exercises/") and name.endswith(".py")


def read(root: Path) -> Release | None:
    """What the copy in `root` says of itself; None where there is no release.json. Raises CourseError."""
    try:
        return _parsed((root / NAME).read_bytes(), str(root / NAME))
    except FileNotFoundError:
        return None


def load(source: Path) -> tuple[Release, dict[str, bytes]]:
    """A release in a folder or a zip, perhaps one folder deeper: what it says of itself and all its files.

    Raises CourseError if it is none, or if a file is missing or damaged.
    """
    contents = _folder(source) if source.is_dir() else _zip(source)
    release = _parsed(contents.pop(NAME), f"{source}, {NAME}")
    wrong = [name for name, wanted in release.files.items() if digest(contents.get(name, b"")) != wanted]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CourseError(f"{source} is damaged: {wrong[0]}{more} is missing or was changed; get the release again")
    return release, {name: contents[name] for name in release.files}


def _folder(source: Path) -> dict[str, bytes]:
    tops = [source, *sorted(path for path in source.iterdir() if path.is_dir())]
    top = next((path for path in tops if (path / NAME).is_file()), None)
    if top is None:
        raise CourseError(f"{source} is no release of the course: it has no {NAME}")
    named = _parsed((top / NAME).read_bytes(), str(top / NAME)).files
    found = [name for name in (NAME, *named) if (top / name).is_file()]
    return {name: (top / name).read_bytes() for name in found}


def _zip(source: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(source) as archive:
            names = sorted((name for name in archive.namelist() if PurePosixPath(name).name == NAME), key=len)
            if not names or names[0].count("/") > 1:
                raise CourseError(f"{source} is no release of the course: it has no {NAME}")
            top = names[0].removesuffix(NAME)
            infos = [info for info in archive.infolist() if info.filename.startswith(top) and not info.is_dir()]
            if sum(info.file_size for info in infos) > MAX_BYTES:
                raise CourseError(
                    f"{source} is larger than {MAX_BYTES >> 20} MiB, unpacked: no release of the course is"
                )
            return {info.filename.removeprefix(top): archive.read(info) for info in infos}
    except FileNotFoundError:
        raise CourseError(f"there is no {source}") from None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise CourseError(f"{source} is neither a folder nor a zip that can be read: {error}") from None


def _parsed(data: bytes, where: str) -> Release:
    """Raises CourseError, which says what is wrong with it."""
    try:
        found = json.loads(data)
        release = Release(**{**found, "concepts": tuple(found["concepts"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CourseError(f"{where} is damaged: it is not what `gpukit release` writes") from None
    texts = [release.version, release.released, release.commit, *release.concepts]
    for table in (release.files, release.cells, release.stubs):
        if not isinstance(table, dict):
            raise CourseError(f"{where} is damaged: files, cells and stubs must be tables")
        texts += [*table, *table.values()]
    if not all(isinstance(text, str) for text in texts):
        raise CourseError(f"{where} is damaged: a text is missing")
    for name in release.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or path.parts[:1] in ((), (".gpukit",)):
            raise CourseError(f"{where} names {name!r}, which is no place for a file of the course")
    if wrong := [concept for concept in release.concepts if not re.fullmatch(r"\w+", concept)]:
        raise CourseError(f"{where} names {wrong[0]!r}, which is no concept")
    return release
