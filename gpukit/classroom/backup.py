"""How files of a learner's copy are changed: after a backup, and all together or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

BACKUPS = ".gpukit/backups"
_SKIPPED = frozenset(("__pycache__", ".ipynb_checkpoints"))


def back_up(root: Path, more: Sequence[str] = ()) -> str:
    """Copy exercises/, notebooks/ and the files `more` below .gpukit/backups: the folder, from `root`. Raises OSError."""
    time = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    names = (time, *(f"{time}-{n}" for n in range(2, 10_000)))
    folder = root / next(f"{BACKUPS}/{name}" for name in names if not (root / BACKUPS / name).exists())
    folder.mkdir(parents=True)
    try:
        for top in ("exercises", "notebooks"):
            paths = [path for path in sorted((root / top).rglob("*")) if path.is_file()]
            for path in paths:
                if not _SKIPPED & set(path.parts):
                    _copy(path, folder / path.relative_to(root))
        for name in more:
            _copy(root / name, folder / name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder.relative_to(root).as_posix()


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, to)


def change_together(root: Path, files: Mapping[str, bytes | None]) -> None:
    """Write or remove (None) all `files` below `root`, or, where that fails in the middle, none of them. Raises OSError."""
    (root / ".gpukit").mkdir(exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix="update-", dir=root / ".gpukit"))
    begun: list[tuple[Path, Path]] = []
    try:
        for number, data in enumerate(files.values()):
            if data is not None:  # all content is on the disk before the first file is touched
                (stage / f"{number}.new").write_bytes(data)
        for number, (name, data) in enumerate(files.items()):
            target, old = root / name, stage / f"{number}.old"
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target):
                _keep(target, old)
            begun.append((target, old))
            if data is None:
                target.unlink(missing_ok=True)
            else:
                os.replace(stage / f"{number}.new", target)
    except BaseException:
        for target, old in reversed(begun):
            if os.path.lexists(old):
                os.replace(old, target)
            else:
                target.unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)  # not reached if the way back fails: then it holds what was there
        raise
    shutil.rmtree(stage, ignore_errors=True)


def _keep(target: Path, old: Path) -> None:
    """A second name for `target`, so that it stays in place until the new file takes its own; moved if it is no file."""
    if target.is_symlink() or not target.is_file():
        os.replace(target, old)
        return
    try:
        os.link(target, old)
    except OSError:  # a file system without links
        shutil.copy2(target, old)


def written(text: str, before: bytes) -> bytes:
    """`text` with the line ends of the file that it replaces."""
    return (text.replace("\n", "\r\n") if b"\r\n" in before else text).encode()
