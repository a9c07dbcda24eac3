"""Notebooks as git should hold them: `gpukit nb clean` makes a file canonical, `gpukit nb run` fills in its outputs.

Canonical: the same text, however and wherever the notebook was run. Outputs are those of exercises/ as handed out, so
that nothing of a solution is saved. Cells keep their ids and count from 1; check cells are saved without output; widget
state, timings, addresses and kernel versions are left out, and a widget is saved as the text and picture that it
carries. Running a canonical notebook twice changes no line.
"""

from __future__ import annotations

import base64
import binascii
import copy
import io
import json
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import nbformat

from gpukit import course
from gpukit.grading.check_cells import check_ids, kernel_environment, without_noise
from gpukit.grading.report import plain

CELL_TIMEOUT_S = 120
FIGURE_BYTES = 100_000
NOTEBOOK_BYTES = 1_000_000
SHADE = 0.1  # of a channel's range: pixels that differ by less look the same
HARDWARE = "hardware"  # the tag of cells that show what a certain machine measured

_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}
_CELL_METADATA = ("tags", "jupyter", "slideshow", "editable", "deletable")
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OVERWRITTEN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)  # what a progress bar drew before its last state


class NotebookFailed(course.CourseError):
    """A notebook that cannot be read or did not run to its end as it should; the message says which cell and why."""


def read(path: Path) -> dict:
    """The notebook in `path` as plain data. Raises NotebookFailed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotebookFailed(f"{path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NotebookFailed(f"{path.name} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise NotebookFailed(f"{path.name} is not JSON: line {error.lineno}, {error.msg}") from None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list) or not all(isinstance(c, dict) and "cell_type" in c for c in cells):
        raise NotebookFailed(f"{path.name} has no list of cells")
    return content


def write(nb: dict) -> str:
    """The text of the file for `nb`, as nbformat and JupyterLab write it."""
    return nbformat.writes(nbformat.from_dict(nb)) + "\n"


def clean(nb: dict) -> dict:
    """`nb` in canonical form, as a copy. Cleaning twice is cleaning once."""
    taken: set[str] = {cell["id"] for cell in nb["cells"] if _valid_id(cell.get("id"))}
    seen: set[str] = set()
    cells = []
    count = 0
    for number, cell in enumerate(nb["cells"], 1):
        cell_id = cell.get("id")
        if not _valid_id(cell_id) or cell_id in seen:
            free = (f"cell-{number}" + "-again" * n for n in range(len(taken) + 1))
            cell_id = next(each for each in free if each not in taken)
            taken.add(cell_id)
        seen.add(cell_id)
        count += cell["cell_type"] == "code"
        cells.append(_clean_cell(cell, cell_id, count))
    return {"cells": cells, "metadata": copy.deepcopy(_METADATA), "nbformat": 4, "nbformat_minor": 5}


def problems(path: Path) -> list[str]:
    """What keeps the notebook in `path` out of git: a line for each thing, none for a canonical notebook."""
    try:
        nb = read(path)
    except NotebookFailed as error:
        return [str(error)]
    text = path.read_text(encoding="utf-8")
    found = [] if text == write(clean(nb)) else [f"{path.name} is not canonical: gpukit nb clean {path.name}"]
    if len(text.encode()) > NOTEBOOK_BYTES:
        found.append(f"{path.name} has {len(text.encode()):,} bytes, allowed are {NOTEBOOK_BYTES:,}")
    for cell in nb["cells"]:
        for mime, size in _figures(cell):
            if size > FIGURE_BYTES:
                found.append(
                    f"{path.name}, cell {cell.get('id')}: {mime} of {size:,} bytes, allowed are {FIGURE_BYTES:,}"
                )
    return found


def run(
    path: Path,
    *,
    refresh: bool = False,
    save: bool = True,
    timeout_s: float = CELL_TIMEOUT_S,
    leave_out: Collection[str] = (),
) -> list[str]:
    """Execute the notebook on exercises/ and save it in canonical form. The ids of the cells whose outputs changed.

    Check cells are not run, nor those whose ids are in `leave_out`; the latter keep what is saved. A cell tagged "hardware" shows what a certain machine measured: it keeps its saved output
    unless `refresh`. With save=False the file stays as it is. Raises NotebookFailed, and leaves the file alone, if a
    cell fails or writes to stderr (unless it is tagged so).
    """
    before = clean(read(path))
    after = clean(_execute(path, before, timeout_s, leave_out))
    changed = []
    for old, new in zip(before["cells"], after["cells"], strict=True):
        new["metadata"] = old["metadata"]
        if HARDWARE in _tags(old):
            if old["outputs"] and not refresh:
                new["outputs"] = old["outputs"]
        elif said := [o["text"] for o in new.get("outputs", ()) if o.get("name") == "stderr"]:
            first = plain("".join(said)).strip().partition("\n")[0]
            raise NotebookFailed(f"{path.name}, cell {new['id']} writes to stderr: {first}")
        _keep_pictures(old, new)
        if old.get("outputs") != new.get("outputs"):
            changed.append(new["id"])
    text = write(after)
    if save and text != path.read_text(encoding="utf-8"):
        path.write_text(text, encoding="utf-8")
    return changed


def find(files: Iterable[str], root: Path) -> list[Path]:
    """The notebooks named, or all of the course. Raises NotebookFailed for a name that is no file."""
    paths = [_named(name, root) for name in files]
    return paths or sorted((root / "notebooks").glob("*.ipynb"))


def _named(name: str, root: Path) -> Path:
    places = [Path(name), root / "notebooks" / name, root / "notebooks" / f"{name}.ipynb"]
    for path in places:
        if path.is_file():
            return path.resolve()
    raise NotebookFailed(f"there is no notebook {name}")


def _execute(path: Path, nb: dict, timeout_s: float, leave_out: Collection[str]) -> dict:
    import nbclient
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisPython(KernelSpecManager):
        """Every kernel is this Python: an installed kernelspec may start another one."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    class Manager(AsyncKernelManager):
        def _kernel_spec_manager_default(self):
            return ThisPython(parent=self)

    executed = nbformat.from_dict(copy.deepcopy(nb))
    for cell in executed["cells"]:
        if check_ids(cell["source"]) or cell["id"] in leave_out:
            cell["metadata"] = {"tags": ["nbval-skip"]}
    client = nbclient.NotebookClient(
        executed,
        timeout=timeout_s,
        kernel_name="python3",
        kernel_manager_class=Manager,
        skip_cells_with_tag="nbval-skip",  # nbval does not run them either
    )
    environment = kernel_environment("exercises")
    try:
        client.execute(cwd=str(path.parent), env=environment, stderr=subprocess.DEVNULL)  # the kernel's own chatter
    except CellExecutionError as error:
        said = f"{error.ename}: {plain(error.evalue)}".strip()
    except CellTimeoutError:
        said = f"no end after {timeout_s:g} s"
    except DeadKernelError:
        said = "the kernel died"
    else:
        return executed
    raise NotebookFailed(f"{path.name}, cell {_failed_cell(executed)}: {said}")


def _failed_cell(executed: dict) -> str:
    """The id of the last cell that was started: nbclient stops there."""
    started = [c for c in executed["cells"] if c["cell_type"] == "code" and "execution" in c["metadata"]]
    return started[-1]["id"] if started else "1"


def _clean_cell(cell: dict, cell_id: str, count: int) -> dict:
    metadata = {key: cell["metadata"][key] for key in _CELL_METADATA if cell.get("metadata", {}).get(key)}
    source = _joined(cell.get("source", ""))
    cleaned = {"cell_type": cell["cell_type"], "id": cell_id, "metadata": metadata, "source": _trimmed(source)}
    if cell["cell_type"] != "code":
        return cleaned | ({"attachments": cell["attachments"]} if cell.get("attachments") else {})
    outputs = [] if check_ids(source) else list(_clean_outputs(cell.get("outputs", []), count))
    return cleaned | {"execution_count": count, "outputs": outputs}


def _clean_outputs(outputs: list[dict], count: int) -> Iterator[dict]:
    streams: dict[str, dict] = {}  # as nbval compares them: one text for stdout, one for stderr
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            name = output.get("name", "stdout")
            if name not in streams:
                streams[name] = {"output_type": "stream", "name": name, "text": ""}
            streams[name]["text"] += _joined(output["text"])
    started: set[str] = set()
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            name = output.get("name", "stdout")
            if name not in started:
                started.add(name)
                yield streams[name] | {"text": without_noise(_OVERWRITTEN.sub("", streams[name]["text"]))}
        elif (
            kind == "error"
        ):  # the traceback has paths and process ids in it, and JupyterLab shows these two without it
            said = without_noise(plain(_joined(output["evalue"])))
            yield {"output_type": "error", "ename": output["ename"], "evalue": said, "traceback": []}
        else:
            data = {mime: _clean_data(mime, value) for mime, value in output["data"].items() if mime != _WIDGET_VIEW}
            if data:
                metadata = {mime: value for mime, value in output.get("metadata", {}).items() if mime in data and value}
                shown = {"output_type": kind, "data": data, "metadata": metadata}
                yield shown | ({"execution_count": count} if kind == "execute_result" else {})


def _clean_data(mime: str, value):
    if mime.startswith("text/") or mime == "image/svg+xml":
        return without_noise(_joined(value))
    if mime.startswith("image/"):
        return "".join(_joined(value).split())
    return value


def _keep_pictures(old: dict, new: dict) -> None:
    """Give `new` the pictures of `old` that a person cannot tell from its own: another version of Pillow packs the same
    pixels into other bytes, and another processor's last digit shades an edge differently."""
    for one, other in zip(old.get("outputs", ()), new.get("outputs", ()), strict=False):
        mine, theirs = (output.get("data", {}).get("image/png") for output in (one, other))
        if mine and theirs and mine != theirs and _look_alike(mine, theirs):
            other["data"]["image/png"] = mine


def _look_alike(*pngs: str) -> bool:
    import numpy as np
    from matplotlib.image import imread

    one, other = (imread(io.BytesIO(base64.b64decode(png)), format="png") for png in pngs)
    return one.shape == other.shape and float(np.abs(one - other).max()) < SHADE


def _figures(cell: dict) -> Iterator[tuple[str, int]]:
    """(type, bytes) of each picture in a cell's outputs and attachments."""
    bundles = [output.get("data", {}) for output in cell.get("outputs", ())]
    bundles += cell.get("attachments", {}).values()
    for bundle in bundles:
        for mime, value in bundle.items():
            if mime.startswith("image/"):
                text = _joined(value)
                try:
                    size = len(base64.b64decode(text, validate=False)) if mime != "image/svg+xml" else len(text)
                except binascii.Error:
                    size = len(text)
                yield mime, size


def _tags(cell: dict) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def _joined(text: str | list[str]) -> str:
    """nbformat stores text as one string or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


def _trimmed(source: str) -> str:
    return "\n".join(line.rstrip() for line in source.strip("\n").split("\n"))


def _valid_id(cell_id: object) -> bool:
    return isinstance(cell_id, str) and bool(_ID.fullmatch(cell_id))
