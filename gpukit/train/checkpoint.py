"""Checkpoints: everything that a run needs to go on as if it had not stopped.

A checkpoint is a folder, `step-00000200`, in the format of torch.distributed.checkpoint. Every process writes what it holds
into a file of its own (`__0_0.distcp`), and `.metadata` says which part of which tensor lies where. So any number of processes
can read what any other number of them has written, whether they hold copies (DDP) or shares (FSDP). `info.json` says the step, the
model's shape, and the size and SHA-256 of each file. The folder is written under another name and renamed when it is complete,
so a run that is killed leaves either the whole checkpoint or none; the checksums find what a disk has damaged later. The last
two are kept, and the older one goes only when the new one is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from gpukit.course import CourseError
from gpukit.train.ranks import ALONE, Ranks

KEPT = 2
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


class CheckpointError(CourseError):
    """A checkpoint that cannot be used; one sentence says why."""


@dataclass(frozen=True)
class Checkpoint:
    """info: what info.json says, with "step", "model" and "sampler" in it."""

    path: Path
    info: dict[str, Any]

    @property
    def step(self) -> int:
        return self.info["step"]

    def names(self) -> set[str]:
        """Of the tensors in it. Raises CheckpointError."""
        return set(_Reader(self.path).read_metadata().state_dict_metadata)

    def read(self, state: dict[str, Tensor], ranks: Ranks = ALONE) -> None:
        """Fill the tensors of `state`, or the shares of them that this process holds, with what was saved by those names. All
        processes must call it. Raises CheckpointError."""
        with _agreeing(self.path):
            dcp.load(state, storage_reader=_Reader(self.path), no_dist=ranks.world == 1)


def save(folder: Path, step: int, state: dict[str, Tensor], info: dict[str, Any], ranks: Ranks = ALONE) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove all but the last two. Returns its folder. All processes call it
    and return when it is complete.

    state   tensors by name; of a DTensor each process writes its share, of a tensor that all have one process writes it
    info    plain values by name for info.json: "model", its shape, and "sampler", where it is
    Raises OSError where it cannot be written, for instance because the disk is full: nothing of it is left then, and the
    checkpoints before it are as they were.
    """
    target = folder / f"step-{step:08d}"
    partial = target.with_name(target.name + _PARTIAL)

    def begin() -> None:
        if ranks.main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def finish() -> None:
        if not ranks.main:
            return
        with open(partial / "info.json", "w", encoding="utf-8") as file:
            json.dump({"step": step, "torch": torch.__version__, "files": files, **info}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the file's name without its data
        shutil.rmtree(target, ignore_errors=True)  # of an earlier run of this step
        partial.rename(target)
        for old in checkpoints(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        ranks.together(begin)
        with _agreeing(partial):
            dcp.save(state, storage_writer=_Writer(partial), no_dist=ranks.world == 1)
        names = sorted(path.name for path in partial.iterdir())
        shares = ranks.together(lambda: _fingerprints(partial, names[ranks.rank :: ranks.world]))
        files = {name: found for share in shares for name, found in share.items()}
        ranks.together(finish)
    except BaseException:
        if ranks.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _fingerprints(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}
    return found


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest last."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def newest(folder: Path, say: Callable[[str], None] = print, ranks: Ranks = ALONE) -> Checkpoint:
    """The newest checkpoint that is whole; all processes find the same. `say` is told which ones are not, and why. Raises
    CheckpointError if none is."""
    for path in sorted(folder.glob(f"step-*{_PARTIAL}")):
        say(f"{path.name.removesuffix(_PARTIAL)} was not written to its end, so it is not used")
    for path in reversed(checkpoints(folder)):
        try:
            return load(path, ranks)
        except CheckpointError as error:
            say(f"{error}; the checkpoint before it is tried")
    raise CheckpointError(f"there is no checkpoint in {folder} that could be used: start a new run")


def load(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """The checkpoint in the folder `path`, once its files are checked. Raises CheckpointError where it is damaged."""
    return ranks.together(lambda: _checked(path, ranks))[ranks.rank]


def _checked(path: Path, ranks: Ranks) -> Checkpoint:
    """With several processes each checks a part of the files."""
    where, name = f"the checkpoint {path.name} is damaged", "info.json"
    try:
        info = json.loads((path / name).read_text(encoding="utf-8"))
        written = {key: info[key] for key in ("step", "model", "sampler", "files")}["files"]
        for name in sorted(written)[ranks.rank :: ranks.world]:
            found, expected = _fingerprints(path, [name])[name], written[name]
            if found["bytes"] != expected["bytes"]:
                raise CheckpointError(
                    f"{where}: {name} has {found['bytes']:,} bytes, and {expected['bytes']:,} were written"
                )
            if found["sha256"] != expected["sha256"]:
                raise CheckpointError(f"{where}: the bytes of {name} are not those that were written (another SHA-256)")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: {name} cannot be read ({type(error).__name__})") from None
    return Checkpoint(path, info)


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


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _agreeing(path: Path) -> Iterator[None]:
    """In the block torch.distributed.checkpoint works: what failed in one process it raises in all, wrapped up. Here it is
    unwrapped: an error of the disk as OSError, everything else as CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone
            yield
    except dcp.api.CheckpointException as error:
        failed = [cause for cause, _ in error.failures.values()]
        of_the_disk = [cause for cause in failed if isinstance(cause, OSError)]
        if of_the_disk:
            raise of_the_disk[0] from None
        raise CheckpointError(f"the checkpoint {path.name}: {type(failed[0]).__name__}: {failed[0]}") from error


class _Disk(filesystem.FileSystem):
    """Notes the error of a disk, which torch.save turns into one of its own."""

    error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            write = stream.write

            def noting(data) -> int:
                try:
                    return write(data)
                except OSError as error:
                    self.error = error
                    raise

            yield _Stream(stream, noting)


class _Stream:
    """A file with another `write`."""

    def __init__(self, file, write: Callable):
        self.write, self._file = write, file

    def __getattr__(self, name: str):
        return getattr(self._file, name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path):
        super().__init__(path)
        self.fs = _Disk()

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise (self.fs.error or error) from None


class _Unpickler(pickle.Unpickler):
    """A checkpoint is data, and loading it must not be able to run code: only what describes tensors is made from `.metadata`.
    The tensors themselves PyTorch reads with weights_only."""

    def find_class(self, module: str, name: str):
        if name in _PARTS.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata asks for {module}.{name}, which no checkpoint of gpukit needs")


_PARTS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "float32", "uint8"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # the same in Python 3.13
}  # fmt: skip


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
