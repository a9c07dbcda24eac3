"""The learners' copy of the course, without solutions: `gpukit release OUT`, and `gpukit init DIR` from an installed gpukit.

A release holds what the course's last commit holds, of what learners need: the notebooks and exercises of the chosen concepts,
the package with the checks, and what sets it up. It lacks solutions/, tests/ (they need the solutions, and some quote lines of
them), history and everything that git does not track. The course's library (gpukit/kernels, gpukit/reference) stays in: the
lessons import it, so a term that wants to keep its kernels from learners cannot. They are other, faster programs than the
exercises' answers, built from the same ideas.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import gpukit
from gpukit.classroom import copies, leaks
from gpukit.classroom import own as owned
from gpukit.course import CourseError
from gpukit.grading import registry, stubs
from gpukit.grading.registry import Added
from gpukit.nearest import did_you_mean

# What learners get of a checkout; everything else stays at home.
TAKEN = (
    *(
        "gpukit",
        "exercises",
        "notebooks",
        "docs",
        ".binder",
        ".devcontainer",
        "AGENTS.md",
        "CHANGELOG.md",
        "CITATION.cff",
    ),
    *("LICENSE", "Makefile", "constraints.txt", "pyproject.toml", ".gitignore"),
)
TARGETS = ("help", "lab", "grade", "clean")  # of the Makefile; the others need the tests
CARRIED = Path(gpukit.__file__).parent / "_course"  # the course's folders in a wheel: pyproject.toml puts them there


def release(
    out: Path, concepts: Sequence[str], root: Path, own: Sequence[tuple[Path, Added]] = ()
) -> tuple[copies.Release, list[str]]:
    """Make the learners' copy of the course in `root` at `out`, a folder that is empty or not there, or a name ending in .zip.
    `concepts` choose notebooks and exercises (none: all), also of those of an assignment's `own`. Returns what was released,
    and the notebooks that the chosen ones build on and the copy lacks.

    Nothing is written before a search of the whole copy found no answer. Raises CourseError.
    """
    _refuse_place(out, root)
    chosen = _chosen(concepts)
    files, commit = _committed(root) if (root / "solutions").is_dir() else (_carried(), "")
    if own and not commit:
        raise CourseError(
            "exercises of one's own are released from a checkout of the course: here it is installed as a package"
        )
    for folder, concept in own:
        files |= owned.files(folder, concept)
    files = _of_concepts(files, chosen)
    files["README.md"] = _readme(chosen, files).encode()
    secret = owned.solutions(folder for folder, _ in own)
    made = _put(out, files, chosen, commit, search=root if commit or secret else None, secret=secret)
    return made, prerequisites(files)


def init(folder: Path) -> copies.Release:
    """Lay the whole course out in `folder` from the installed package. Raises CourseError."""
    if not CARRIED.is_dir():
        here = CARRIED.parents[1]
        whole = (here / "solutions").is_dir()
        kind, more = (
            ("the course itself", f", or make a copy with gpukit release {folder}")
            if whole
            else ("a learners' copy", "")
        )
        raise CourseError(f"gpukit runs from {here}, which is {kind}: work there{more}")
    _refuse_place(folder, CARRIED)
    chosen = _chosen(())
    files = _of_concepts(_carried(), chosen)
    files["README.md"] = _readme(chosen, files).encode()
    return _put(folder, files, chosen, "", search=None)


def prerequisites(files: Mapping[str, bytes]) -> list[str]:
    """The notebooks that those in `files` name as what you need, and that are not among them: ["00_start"]."""
    needed = set()
    for name, data in files.items():
        if copies.is_notebook(name):
            for cell in json.loads(data)["cells"]:
                for paragraph in "".join(cell["source"]).split("\n"):
                    if paragraph.startswith("**You need**"):
                        needed |= set(re.findall(r"\((\d\d_\w+)\.ipynb", paragraph))
    return sorted(name for name in needed if f"notebooks/{name}.ipynb" not in files)


def _refuse_place(out: Path, root: Path) -> None:
    place, root = out.resolve(), root.resolve()
    if place.is_relative_to(root) or root.is_relative_to(place):
        raise CourseError(f"{out} lies in the course's own folder, or around it: name a place outside {root}")
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CourseError(f"{out} is there and not an empty folder: nothing is overwritten; name another place")
    if not place.parent.is_dir():
        raise CourseError(f"there is no folder {out.parent} to put {out.name} into")


def _chosen(concepts: Sequence[str]) -> tuple[str, ...]:
    """The concepts in the course's order. Raises UnknownExercise, or CourseError for an exercise's id."""
    known = dict.fromkeys(item.concept for item in registry.catalog().values())
    for name in concepts:
        if name not in known:
            if (whole := name.partition(".")[0]) in known:
                raise CourseError(f"--concepts takes whole concepts: {whole}, not {name}")
            raise CourseError(
                f"--concepts: no concept is called {name!r}{did_you_mean(name, known)}  (all of them: {', '.join(known)})"
            )
    return tuple(name for name in known if name in concepts or not concepts)


def _committed(root: Path) -> tuple[dict[str, bytes], str]:
    """What git's last commit holds of TAKEN, and the commit. Raises CourseError."""
    try:
        packed = _git(root, "archive", "--format=tar", "HEAD")
        commit = _git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError) as error:
        said = (
            error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else error
        )
        raise CourseError(f"{root} has no commit to release ({said}): a release holds what git holds") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        links = [m.name for m in archive if (m.issym() or m.islnk()) and m.name.split("/")[0] in TAKEN]
    if links:
        raise CourseError(f"{links[0]} is a symbolic link, which would lead nowhere in a copy")
    _refuse_answered(members)
    files = {name: data for name, data in members.items() if name.split("/")[0] in TAKEN}
    files["Makefile"] = _makefile(files["Makefile"].decode()).encode()
    if "AGENTS.md" in files:  # its last section is for contributors
        files["AGENTS.md"] = re.sub(rb"\n## As a contributor.*", b"", files["AGENTS.md"], flags=re.DOTALL)
    return files, commit


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True).stdout


def _refuse_answered(members: Mapping[str, bytes]) -> None:
    """Raises CourseError if an exercise was committed with somebody's answer in it."""
    with tempfile.TemporaryDirectory(prefix="gpukit-") as folder:
        for name, data in members.items():
            if re.fullmatch(r"(exercises|solutions)/\w+\.py", name):
                path = Path(folder) / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
        if answered := stubs.drift(Path(folder)):
            raise CourseError(f"in the last commit {answered[0]}: run gpukit stubs and commit what it makes")


def _carried() -> dict[str, bytes]:
    """The files that the installed package carries. Raises CourseError."""
    if not CARRIED.is_dir():
        raise CourseError("there are no solutions/ here: a release is made from the course, not from a learners' copy")
    return {path.relative_to(CARRIED).as_posix(): path.read_bytes() for path in _below(CARRIED)}


def _below(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not leaks.FORBIDDEN & set(path.relative_to(folder).parts)]


def _of_concepts(files: Mapping[str, bytes], concepts: tuple[str, ...]) -> dict[str, bytes]:
    """`files` without the notebooks and exercises of other concepts. Raises CourseError if one of these is missing."""
    notebooks = {item.concept: item.notebook for item in registry.catalog().values()}
    wanted = {f"exercises/{c}.py" for c in concepts} | {f"notebooks/{notebooks[c]}.ipynb" for c in concepts}
    if missing := sorted(wanted - files.keys()):
        raise CourseError(f"{missing[0]} is not in what would be released")
    return {n: data for n, data in files.items() if n in wanted or n.split("/")[0] not in ("exercises", "notebooks")}


def _makefile(text: str) -> str:
    """The course's Makefile with TARGETS alone."""
    paragraphs = re.split(r"\n\n+", text)
    targets = {p: found[1] for p in paragraphs if (found := re.match(r"(?:#.*\n)*([a-z][\w-]*):", p))}
    kept = [p for p in paragraphs if p not in targets or targets[p] in TARGETS]
    made = re.sub(r"^\.PHONY:.*$", f".PHONY: {' '.join(TARGETS)}", "\n\n".join(kept), flags=re.MULTILINE)
    for_tests = r"^# (Of plugins|Besides the version).*\n(#.*\n)*((PYTEST|TRITON).*\n)+"
    return re.sub(for_tests, "", made, flags=re.MULTILINE).rstrip("\n") + "\n"


def _put(
    out: Path,
    files: Mapping[str, bytes],
    concepts: tuple[str, ...],
    commit: str,
    search: Path | None,
    secret: Mapping[str, str] | None = None,
) -> copies.Release:
    """Write the copy beside `out`, search it for answers of the course in `search` and for those in the texts `secret`, then give
    it its name."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made = copies.describe(files, concepts, gpukit.__version__, now, commit)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.resolve().parent) as folder:
        top = Path(folder) / out.stem
        for name, data in {**files, copies.NAME: made.as_json().encode()}.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if search and (found := leaks.scan(top, search, secret or {})):
            raise CourseError("\n".join(["nothing is released: answers can be read in it", *found]))
        if out.suffix == ".zip":
            packed = Path(folder) / "release.zip"
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in _below(top):
                    archive.write(path, path.relative_to(folder).as_posix())
            os.replace(packed, out)
        elif out.is_dir():  # empty, and perhaps the place where somebody's shell is
            for path in sorted(top.iterdir()):
                shutil.move(path, out / path.name)
        else:
            os.replace(top, out)
    return made


def _readme(concepts: tuple[str, ...], files: Mapping[str, bytes]) -> str:
    """What a learner reads first."""
    whole = "Makefile" in files  # or the package is installed apart
    notebooks = sorted(name for name in files if copies.is_notebook(name))
    lacking = prerequisites(files)
    rows = "\n".join(f"- [{Path(name).stem.replace('_', ' ')}]({name})" for name in notebooks)
    named = f"\nThey build on notebooks that are not in this copy: {', '.join(lacking)}.\n" if lacking else ""
    return _README.format(
        version=gpukit.__version__,
        rows=rows,
        lacking=named,
        setup=_WITH_MAKE if whole else _WITH_PIP,
        lab="make lab" if whole else "gpukit lab",
        check=".venv/bin/gpukit check" if whole else "gpukit check",
        one=concepts[0],
    )


_README = """\
# gpukit: the learners' copy

A course in making language models fast on GPUs, in notebooks with exercises that are checked as you write them. This is a copy for learners of version {version}, without solutions. `release.json` says when it was made and what it holds.

{rows}
{lacking}
## Start

{setup}

```
{lab:<22}   # opens the notebooks in JupyterLab
{check:<22}   # checks all exercises of this copy and says what passes
```

A notebook says what to write into which file of `exercises/`. Fill the gap, save the file, and run the notebook's check cell, or in a terminal inside JupyterLab `gpukit check {one}`. `gpukit hint ID` gives a hint, and `gpukit progress` lists what passes.

## Hand in

Hand in the folder `exercises/` as it is, as a zip: `zip -r exercises.zip exercises`. Keep the names of its files. Nothing else of this folder is graded.

## A new release

Close the notebooks, then run `gpukit update FILE.zip` in this folder, in a terminal inside JupyterLab. What you wrote goes into the new files; a copy of everything as it was lies in `.gpukit/backups/`. `gpukit reset ID` puts the empty stub of an exercise back, also after a backup.
"""
_WITH_MAKE = """\
You need Linux, Python 3.11, 3.12 or 3.13, and make. A GPU is not needed. The first command below makes `.venv` and installs what the course needs, which takes some minutes and 8 GB.

### Without a GPU

pip would still fetch PyTorch with its CUDA libraries. To get the CPU build (2 GB), run `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make lab MIN_FREE_GB=3`.

### Commands"""
_WITH_PIP = """\
You need Linux and Python 3.11, 3.12 or 3.13 with gpukit installed. A GPU is not needed. The notebooks' links into `gpukit/` lead to the package where it is installed."""
