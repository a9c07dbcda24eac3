"""A search for answers in everything that is about to be handed out: `gpukit release`, `gpukit release --check PLACE`.

Every file is read, whatever its name: text, notebooks with their outputs, reports, archives and wheels (unpacked), pickles
and other binary files (the text in them). What gives an answer away is a line of a solution or of a known right answer. The
course's library (gpukit/kernels, reference, accounting, simulator, validation) may hold such lines: the lessons import it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import html
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from gpukit import integrity
from gpukit.course import CourseError
from gpukit.grading import stubs

# Folders that no copy for learners holds, whatever is in them.
FORBIDDEN = frozenset((".git", "solutions", "__pycache__", ".ipynb_checkpoints", ".gpukit"))
_LONGEST = 1 << 28  # bytes of one file that is read
_PICTURE = re.compile(r"[\w+/=]{200,}")  # in base64
_DEPTH = 3  # archives in archives
_COMPRESSED = {b"\x1f\x8b\x08": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7z": lzma.decompress}
_BREAKS = re.compile(
    r"\\[nrt]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]"
)  # a line's end as JSON and Python write it; bytes that are no text


def scan(place: Path, root: Path, more: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """What of the solutions of the course in `root`, and of `more` of them by their names, can be read in `place`, a folder, a zip
    or a wheel: a sentence for each line of an answer, for each folder that belongs in no copy, and for each file that cannot
    be searched.

    Raises CourseError if the course in `root` has no solutions: then nothing could be found.
    """
    telling = integrity.secrets(root, more)
    if not telling:
        raise CourseError(
            f"{root} has no solutions/, so nothing can be compared with them: search from the course itself"
        )
    if not place.exists():
        raise CourseError(f"there is no {place}")
    found = []
    for name, data in _files(place):
        found += _of_file(name, data, telling, packed=place.is_file())
    return sorted(set(found))


def _files(place: Path) -> Iterator[tuple[str, bytes | str]]:
    """(name, content) of each file at `place`; a sentence instead of the content of one that is not read."""
    paths = [place] if place.is_file() else sorted(place.rglob("*"))
    for path in paths:
        name = path.relative_to(place).as_posix() if path != place else path.name
        if path.is_symlink():
            yield name, "is a symbolic link, which could lead to anything"
        elif path.is_file():
            yield name, path.read_bytes() if path.stat().st_size <= _LONGEST else "is too large to be searched"


def _of_file(
    name: str, data: bytes | str, telling: dict[str, str], depth: int = 0, packed: bool = False
) -> Iterator[str]:
    """`packed`: the file is all that is searched, so what is in it lies where it will be unpacked."""
    parts = PurePosixPath(name).parts
    forbidden = [part for part in parts[:-1] if part in FORBIDDEN]
    if forbidden:
        yield f"{name} lies in {forbidden[0]}/, which belongs in no copy"
        return
    if isinstance(data, str):
        yield f"{name} {data}"
        return
    members = _members(data) if depth < _DEPTH else "holds archives in archives in archives"
    if isinstance(members, str):
        yield f"{name} {members}"
        return
    for member, content in members or ():
        yield from _of_file(member if packed else f"{name}!{member}", content, telling, depth + 1)
    if members is None and not (len(parts) > 1 and integrity.in_library(_within_course(parts))):
        for line in sorted(_told(data, telling)):
            yield f"{name} repeats a line of {telling[line]}: {line}"


def _within_course(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The path below the course: a zip of a release has one folder around it."""
    return parts[1:] if len(parts) > 2 and parts[1] == "gpukit" else parts


def _members(data: bytes) -> list[tuple[str, bytes | str]] | str | None:
    """The files in an archive; None for a file that is none, a sentence for one that cannot be read."""
    try:
        if data[:2] == b"PK" and zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                infos = [info for info in archive.infolist() if not info.is_dir()]
                if sum(info.file_size for info in infos) > _LONGEST:
                    return "is too large to be searched"
                return [(info.filename, archive.read(info)) for info in infos]
        if (unpack := _COMPRESSED.get(data[:3])) and not _is_tar(plain := unpack(data)):
            return [("content", plain)]
        if unpack or _is_tar(data):
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = [member for member in archive if member.isfile()]
                if sum(member.size for member in members) > _LONGEST:
                    return "is too large to be searched"
                return [(member.name, archive.extractfile(member).read()) for member in members]
    except (OSError, zipfile.BadZipFile, tarfile.TarError, RuntimeError, EOFError, lzma.LZMAError, zlib.error) as error:
        return f"is an archive that cannot be searched: {error}"
    return None


def _is_tar(data: bytes) -> bool:
    return data[257:262] == b"ustar"


def _told(data: bytes, telling: dict[str, str]) -> set[str]:
    """The telling lines that can be read in a file, also as a part of a line, as in quotes or in a pickle."""
    text = data.decode("utf-8", errors="replace")
    texts = [_BREAKS.sub("\n", text)]
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            texts.append("\n".join(stubs.strings(json.loads(text))))
    texts += [html.unescape(re.sub(r"<[^<>\n]*>", "", each)) for each in texts if "<" in each or "&" in each]
    lines = (line for each in texts for line in stubs.normalised(_PICTURE.sub("", each)))
    squeezed = "\n".join(dict.fromkeys(line for line in lines if len(line) >= integrity.TELLING))
    return {line for line in telling if line in squeezed and _alone(line, squeezed)}


def _alone(line: str, text: str) -> bool:
    """Whether `line` occurs in `text` other than as the end or the beginning of longer names."""
    return re.search(rf"(?<!\w){re.escape(line)}(?!\w)", text) is not None
