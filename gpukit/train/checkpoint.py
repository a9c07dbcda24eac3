"""Checkpoints: everything that a run needs to go on as if it had not stopped.

A checkpoint is a folder, `step-00000200`, with two files. `state.pt` is PyTorch's format: model, optimizer, sampler, random
numbers. `info.json` says the step, the model's shape, and the size and SHA-256 of `state.pt`. The folder is written under
another name and renamed when it is complete, so a run that is killed leaves either the whole checkpoint or none; the
checksum finds what a disk has damaged later. The last two are kept, and the older one goes only when the new one is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpukit.course import CourseError

KEPT = 2
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


class CheckpointError(CourseError):
    """A checkpoint that cannot be used; one sentence says why."""


@dataclass(frozen=True)
class Checkpoint:
    """info: what info.json says, "step" and "model" among it; state: what was given to `save`, with tensors on the CPU."""

    path: Path
    info: dict[str, Any]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.info["step"]


def save(folder: Path, step: int, model: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove all but the last two. Returns its folder.

    model   the model's shape, plain values by name;  state: tensors, numbers, texts, and lists and dicts of them
    Raises OSError where it cannot be written, for instance because the disk is full: nothing of it is left then, and the
    checkpoints before it are as they were.
    """
    target = folder / f"step-{step:08d}"
    partial = target.with_name(target.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_state(partial / "state.pt", state)
        info = {"step": step, "model": model, "torch": torch.__version__, **_fingerprint(partial / "state.pt")}
        with open(partial / "info.json", "w", encoding="utf-8") as file:
            json.dump(info, file, indent=1)
            _to_disk(file)
        shutil.rmtree(target, ignore_errors=True)  # of an earlier run of this step
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write_state(path: Path, state: dict[str, Any]) -> None:
    """torch.save, whose own writer turns an error of the disk into one of its own: the first is what is raised here."""
    with open(path, "wb") as file:
        failed: list[OSError] = []

        class Writer:
            def write(self, data) -> int:
                try:
                    return file.write(data)
                except OSError as error:
                    failed.append(error)
                    raise

            def flush(self) -> None:
                pass

        try:
            torch.save(state, Writer())
        except Exception as error:
            raise (failed[0] if failed else error) from None
        _to_disk(file)


def _to_disk(file) -> None:
    """Wait until the file is on the disk and not only in memory; else a power cut could leave its name without its data."""
    file.flush()
    os.fsync(file.fileno())


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest last."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def newest(folder: Path, say: Callable[[str], None] = print) -> Checkpoint:
    """The newest checkpoint that is whole. `say` is told which ones are not, and why. Raises CheckpointError if none is."""
    for path in sorted(folder.glob(f"step-*{_PARTIAL}")):
        say(f"{path.name.removesuffix(_PARTIAL)} was not written to its end, so it is not used")
    for path in reversed(checkpoints(folder)):
        try:
            return load(path)
        except CheckpointError as error:
            say(f"{error}; the checkpoint before it is tried")
    raise CheckpointError(f"there is no checkpoint in {folder} that could be used: start a new run")


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`. Raises CheckpointError where it is damaged."""
    where = f"the checkpoint {path.name} is damaged"
    try:
        info = json.loads((path / "info.json").read_text(encoding="utf-8"))
        expected = {name: info[name] for name in ("bytes", "sha256", "step", "model")}
        found = _fingerprint(path / "state.pt")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: info.json or state.pt cannot be read ({type(error).__name__})") from None
    if found["bytes"] != expected["bytes"]:
        raise CheckpointError(f"{where}: state.pt has {found['bytes']:,} bytes, and {expected['bytes']:,} were written")
    if found["sha256"] != expected["sha256"]:
        raise CheckpointError(f"{where}: the bytes of state.pt are not those that were written (another SHA-256)")
    # weights_only: a checkpoint is data, and loading it must not be able to run code.
    return Checkpoint(path, info, torch.load(path / "state.pt", map_location="cpu", weights_only=True))


def check_shape(checkpoint: Checkpoint, model: dict[str, Any]) -> None:
    """Raises CheckpointError naming what differs if the checkpoint is of a model of another shape."""
    there = checkpoint.info["model"]
    differ = [
        f"{name} is {there.get(name)} there and {model.get(name)} here"
        for name in sorted(there.keys() | model.keys())
        if there.get(name) != model.get(name)
    ]
    if differ:
        raise CheckpointError(f"the checkpoint {checkpoint.path.name} is of another model: {'; '.join(differ)}")
