"""Which check gave a verdict: a change of what a verdict rests on makes it a verdict of another check."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import gpukit
from gpukit.grading import registry

_PACKAGE = Path(gpukit.__file__).parent
# What decides whether an answer is right, beside the concept's own check and texts.
_SHARED = ("grading", "simulator", "reference", "accounting", "testing.py", "course.py", "hardware.py")


def check_version(concept: str) -> str:
    """16 hexadecimal digits, which a change of the concept's check or its texts changes, or of the code that all checks
    share. A new PyTorch or Triton does not: their versions stand beside each verdict."""
    if own := registry.added.get(concept):
        return _version(own.check.encode(), own.prose.encode())
    return _of_course(concept)


@cache
def _of_course(concept: str) -> str:
    return _version(*((_PACKAGE / "checks" / f"{concept}{suffix}").read_bytes() for suffix in (".py", ".md")))


def _version(*texts: bytes) -> str:
    digest = hashlib.sha256(_shared())
    for text in texts:
        digest.update(text)
    return digest.hexdigest()[:16]


@cache
def _shared() -> bytes:
    digest = hashlib.sha256()
    for name in _SHARED:
        path = _PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0".encode() + file.read_bytes())
    return digest.digest()
