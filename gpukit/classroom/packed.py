"""The files in a folder or a zip that a stranger has packed, listed without unpacking anything and read one by one.

Nothing is written to a disk, so a name cannot lead anywhere; no file is read beyond `course.MAX_SOURCE_BYTES`, so nothing
grows. What an archive is refused for all the same is said in a sentence: its maker should know, and so should the teacher.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpukit import course
from gpukit.grading.verdict import printable

MAX_ZIP_BYTES = 100 << 20  # of one student's zip
MAX_UNPACKED_BYTES = 1 << 30
MAX_RATIO, RATIO_FROM = 200, 16 << 20  # source code and pictures shrink to a tenth; the bombs' zeros to a thousandth
MAX_ENTRIES = 20_000
MAX_DEPTH = 8
OTHER_ARCHIVES = (".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".txz", ".xz", ".zst")
# Not a learner's work: what systems and tools leave beside it.
_SKIPPED = frozenset({"__MACOSX", "__pycache__", "node_modules", "site-packages", "venv"})
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,
    RuntimeError,  # a password
    EOFError,
    ValueError,
    OSError,
)


@dataclass(frozen=True)
class Member:
    """A file of a submission.

    name  its path in the submission, with forward slashes
    size  bytes, as the folder or the archive says
    read  its bytes, at most course.MAX_SOURCE_BYTES. Raises CourseError, which says of the file why it is refused
    """

    name: str
    size: int
    read: Callable[[], bytes]

    @property
    def path(self) -> PurePosixPath:
        return PurePosixPath(self.name)


def named(name: str | os.PathLike) -> str:
    """A name as it may be shown and stored, whatever its bytes are."""
    return printable(os.fspath(name))


def members(path: Path) -> list[Member]:
    """The files in a folder, in a zip, or the file itself. Raises CourseError where a zip is refused as a whole."""
    if path.is_dir():
        return sorted(_of_folder(path), key=lambda member: member.name)
    if path.suffix.lower() != ".zip":
        return [_of_file(path, path.parent)]
    if path.is_symlink():
        raise course.CourseError(f"{named(path.name)} is a symbolic link, not a file")
    if not path.is_file():  # a pipe would never end
        raise course.CourseError(f"{named(path.name)} is not a file")
    try:
        return unzipped(named(path.name), path.stat().st_size, lambda: path)
    except OSError as error:
        raise course.CourseError(f"{named(path.name)} cannot be read: {error.strerror or error}") from None


def unzipped(name: str, size: int, source: Callable[[], Path | bytes], of_a_class: bool = False) -> list[Member]:
    """The files in a zip of `size` bytes, which `source` gives as a path or as bytes. That of a whole class may be of any
    size. Raises CourseError."""
    most = size if of_a_class else MAX_ZIP_BYTES
    if size > most:
        raise course.CourseError(
            f"{name} is {_bytes(size)}; at most {_bytes(most)} are read: hand in the .py files alone"
        )
    try:
        given = source()
        with zipfile.ZipFile(io.BytesIO(given) if isinstance(given, bytes) else given) as archive:
            entries = archive.infolist()
    except _BROKEN as error:
        raise course.CourseError(f"{name} is not a zip that can be read: {_reason(error)}") from None
    total = sum(entry.file_size for entry in entries)
    if len(entries) > MAX_ENTRIES:
        raise course.CourseError(f"{name} holds {len(entries):,} files; at most {MAX_ENTRIES:,} are read")
    bomb = next((e for e in entries if e.file_size > max(RATIO_FROM, MAX_RATIO * e.compress_size)), None)
    if bomb or (total > MAX_UNPACKED_BYTES and not of_a_class):
        raise course.CourseError(f"{name} is a zip bomb: its {_bytes(size)} unpack to {_bytes(total)}")
    found = {}
    for entry in entries:
        inside = entry.filename.replace("\\", "/")
        if not inside.endswith("/") and _wanted(PurePosixPath(inside)):
            found[inside] = Member(named(inside), entry.file_size, _from_zip(given, entry, inside))  # the last of two
    return [found[inside] for inside in sorted(found)]


def unpacked(files: list[Member]) -> tuple[list[Member], list[str]]:
    """`files` with those in the zips among them, and a sentence for each zip that is refused."""
    found, problems = [], []
    for file in files:
        if file.path.suffix.lower() != ".zip":
            found.append(file)
            continue
        try:
            inside = unzipped(file.name, file.size, lambda file=file: _whole(file))
        except course.CourseError as error:
            problems.append(str(error) if str(error).startswith(file.name) else f"{file.name} {error}")
        else:
            found += [Member(f"{file.name}/{each.name}", each.size, each.read) for each in inside]
    return found, problems


def _whole(file: Member) -> bytes:
    """The bytes of a zip among the files, whose size is known to be allowed."""
    return file.read.whole() if hasattr(file.read, "whole") else file.read()


class _from_zip:
    """Reads one entry of a zip, anew each time: an open archive for each of 300 students would be too many."""

    def __init__(self, archive: Path | bytes, entry: zipfile.ZipInfo, name: str):
        self.archive, self.entry, self.name = archive, entry, name

    def __call__(self) -> bytes:
        return self._read(course.MAX_SOURCE_BYTES, "1 MiB")

    def whole(self) -> bytes:
        return self._read(MAX_ZIP_BYTES, _bytes(MAX_ZIP_BYTES))

    def _read(self, most: int, allowed: str) -> bytes:
        kind = stat.S_IFMT(self.entry.external_attr >> 16)
        if kind == stat.S_IFLNK:
            raise course.CourseError("is a symbolic link, not a file")
        if leads_out(self.name):
            raise course.CourseError(
                f"is packed under the name {named(self.name)!r}, which leads out of the submission"
            )
        try:
            archive = io.BytesIO(self.archive) if isinstance(self.archive, bytes) else self.archive
            with zipfile.ZipFile(archive) as opened, opened.open(self.entry) as file:
                data = file.read(most + 1)
        except _BROKEN as error:
            raise course.CourseError(f"cannot be read from its zip: {_reason(error)}") from None
        if len(data) > most:
            raise course.CourseError(f"is larger than {allowed}")
        return data


class _from_disk:
    def __init__(self, path: Path, within: Path):
        self.path, self.within = path, within

    def __call__(self) -> bytes:
        # A link could point at anything on the machine that grades, the solutions among them.
        if self.path.is_symlink():
            raise course.CourseError("is a symbolic link, not a file")
        return course.read_bytes(self.path, self.within)

    def whole(self) -> bytes:
        if self.path.is_symlink() or not self.path.is_file():
            raise course.CourseError("is not a file")
        with self.path.open("rb") as file:
            return file.read(MAX_ZIP_BYTES + 1)


def leads_out(name: str) -> bool:
    """Whether a name in an archive is absolute or climbs out: nothing honest packs so."""
    return name.startswith("/") or ".." in PurePosixPath(name).parts or bool(re.match(r"[A-Za-z]:", name))


def _of_folder(folder: Path) -> Iterator[Member]:
    count = 0
    for at, folders, files in os.walk(folder):
        inside = Path(at).relative_to(folder)
        linked = [name for name in folders if (Path(at) / name).is_symlink()]
        if "exercises" in linked:
            raise course.CourseError(f"{named(folder / inside / 'exercises')} is a symbolic link, not a folder")
        folders[:] = sorted(
            name for name in folders if name not in linked and _wanted(Path(name)) and len(inside.parts) < MAX_DEPTH
        )
        count += len(files) + len(folders)
        if count > MAX_ENTRIES:
            raise course.CourseError(f"{named(folder.name)} holds more than {MAX_ENTRIES:,} files")
        for name in files:
            if _wanted(Path(name)):
                yield _of_file(Path(at) / name, folder)


def _of_file(path: Path, within: Path) -> Member:
    size = 0
    with contextlib.suppress(OSError):
        size = path.lstat().st_size
    return Member(named(path.relative_to(within).as_posix()), size, _from_disk(path, within))


def _wanted(path: PurePosixPath | Path) -> bool:
    return not any(part in _SKIPPED or (part.startswith(".") and part.strip(".")) for part in path.parts)


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and "encrypted" in str(error):
        return "it asks for a password"
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def _bytes(size: int) -> str:
    for unit, step in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size} bytes"
