"""The folder of a run, which any tool can read.

config.json       the settings, complete: a run can be repeated from them
metrics.csv       one row per logged step (COLUMNS); empty where a value was not measured
samples.txt       what the model wrote after each evaluation
checkpoints/      gpukit.train.checkpoint
tensorboard/      the same numbers as events, where the package `tensorboard` is installed
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from gpukit.course import CourseError
from gpukit.train.presets import Settings

COLUMNS = (
    "step",  # optimizer steps done
    "tokens",  # trained on until then
    "loss",  # of this step's batch, nats per token
    "learning_rate",
    "gradient_norm",  # before clipping
    "validation_loss",  # nats per token
    "tokens_per_s",  # since the row before, without evaluations and checkpoints
    "mfu",  # 0 to 1
    "memory_bytes",  # the most until then: on a GPU what PyTorch had allocated, else the whole process
    "seconds",  # since the process began to train
)
TIMED = ("tokens_per_s", "mfu", "memory_bytes", "seconds")  # these differ between two runs of the same
_SAMPLE = re.compile(r"^=== step (\d+) ===$", re.MULTILINE)


class Record:
    """Writes the folder of a run. A disk that is full costs rows and not the run: `say` is told once, and training goes on."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None] = print):
        self.folder, self.say = folder, say
        self._failed = False
        self.metrics, self.samples = folder / "metrics.csv", folder / "samples.txt"
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "config.json", json.dumps(settings.as_json(), indent=1) + "\n")
        self._board = _tensorboard(folder / "tensorboard")

    def rewind(self, step: int) -> None:
        """Forget what was recorded after `step`: a run that goes on from there will write it again."""
        rows = [row for row in read_metrics(self.metrics) if int(row["step"]) <= step] if self.metrics.exists() else []
        lines = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
        _replace(self.metrics, "\n".join(lines) + "\n")
        text = self.samples.read_text(encoding="utf-8") if self.samples.exists() else ""
        later = [match.start() for match in _SAMPLE.finditer(text) if int(match[1]) > step]
        _replace(self.samples, text[: later[0]] if later else text)

    def row(self, values: Mapping[str, float | int | None]) -> None:
        """Add a row to metrics.csv; `values` by the names of COLUMNS. Numbers are written so that they read back exactly."""
        texts = ["" if values.get(name) is None else repr(values[name]) for name in COLUMNS]
        self._append(self.metrics, ",".join(texts) + "\n")
        if self._board is not None:
            for name in COLUMNS[2:]:
                if values.get(name) is not None:
                    self._board.add_scalar(name, values[name], values["step"])
            self._board.flush()

    def sample(self, step: int, text: str) -> None:
        """Add what the model wrote after `step`."""
        self._append(self.samples, f"=== step {step} ===\n{text}\n\n")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _append(self, path: Path, text: str) -> None:
        try:
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            if not self._failed:
                self.say(f"{path} cannot be written ({error.strerror}): training goes on, and rows will be missing")
            self._failed = True


def _tensorboard(folder: Path):
    """A writer of TensorBoard's events, None where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def _replace(path: Path, text: str) -> None:
    """Write a file so that there is always a whole one: the old one, then the new one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv as texts by column; a last row that was cut off in writing is left out. Raises CourseError for
    a file with other columns."""
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    if rows and tuple(rows[0]) != COLUMNS:
        raise CourseError(f"{path} has other columns than this version of gpukit writes")
    return rows


def read_settings(folder: Path) -> Settings:
    """The settings of the run in `folder`. Raises CourseError where there is none, or its config.json is damaged."""
    path = folder / "config.json"
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CourseError(f"there is no run in {folder} to go on with: it has no config.json") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CourseError(f"{path} is not what gpukit train writes: {error}") from None
