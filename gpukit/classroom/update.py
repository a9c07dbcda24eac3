"""A learner's copy brought to a newer release: `gpukit update FROM`.

Nothing of a learner's is ever lost: exercises/, notebooks/ and whatever else was changed are copied to .gpukit/backups/ first;
answers are merged into the new stubs (merge.py), and what cannot be merged is kept beside them as NAME.old.py, notebooks as
NAME.mine.ipynb. All files change together or not at all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpukit import course
from gpukit.classroom import copies
from gpukit.classroom.backup import back_up, change_together, written
from gpukit.classroom.merge import merge
from gpukit.course import CourseError
from gpukit.grading import registry


@dataclass
class _Plan:
    """What an update will do. `files`: path -> new content, or None for a file that goes."""

    root: Path
    had: copies.Release | None
    files: dict[str, bytes | None] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    at_risk: list[str] = field(default_factory=list)  # files outside exercises/ and notebooks/ that the learner changed

    def beside(self, name: str, data: bytes, kind: str) -> str:
        """Keep `data` beside the file called `name`: exercises/softmax.old.py. Returns the name that was free."""
        stem, dot, suffix = name.rpartition(".")
        same = (f"{stem}.{kind}{n}{dot}{suffix}" for n in ("", *(f"-{n}" for n in range(2, 10_000))))
        free = next(each for each in same if each not in self.files and self.now(each) in (None, data))
        if self.now(free) is None:
            self.files[free] = data
        return free

    def now(self, name: str) -> bytes | None:
        """What the copy holds under this name, None for nothing. Raises CourseError for what is no file."""
        path = self.root / name
        if path.is_file():
            return path.read_bytes()
        if os.path.lexists(path):
            raise CourseError(f"{name} is a folder, or a link that leads nowhere: move it away, then update again")
        return None

    def as_handed_out(self, name: str, data: bytes) -> bool:
        return self.had is not None and self.had.files.get(name) == copies.digest(data)


def update(root: Path, source: Path) -> list[str]:
    """Bring the learner's copy in `root` to the release in `source`, a folder or a zip. What was done, a line each.

    Raises CourseError, or OSError where a file cannot be written: then the copy is as it was.
    """
    if (root / "solutions").is_dir() and not (root / copies.NAME).exists():
        raise CourseError(f"{root} is the course itself, not a learners' copy: update it with git pull")
    new, contents = copies.load(source)
    plan = _Plan(root, copies.read(root))
    if plan.had and _version(new) < _version(plan.had):
        raise CourseError(f"{source} is {new}, which is older than this copy: {plan.had}")
    for name, data in contents.items():
        now = plan.now(name)
        if now == data:
            continue
        if now is None:
            plan.files[name] = data
            if copies.is_exercise(name) or copies.is_notebook(name):
                plan.said.append(f"{name}: new")
        elif copies.is_exercise(name):
            _exercise(plan, name, now, data, new)
        elif copies.is_notebook(name):
            _notebook(plan, name, now, data)
        else:
            plan.files[name] = data
            if not plan.as_handed_out(name, now):
                plan.at_risk.append(name)
                plan.said.append(f"{name}: replaced; yours is in the backup")
    _gone(plan, new)
    joined = _joined(plan.had, new).as_json().encode()
    if plan.now(copies.NAME) != joined:
        plan.files[copies.NAME] = joined
    if not plan.files:
        return [f"nothing to do: this copy is {new}"]
    if plan.had and (_version(new), new.released) < (_version(plan.had), plan.had.released):
        plan.said.insert(0, f"that is an older release than before, {plan.had.released}: FROM may be the wrong file")
    backup = back_up(root, plan.at_risk)
    change_together(root, plan.files)
    setup = [name for name in ("pyproject.toml", "constraints.txt") if name in plan.files]
    after = ["what the course needs may have changed: make lab installs it"] if setup else []
    if any(copies.is_notebook(name) for name in plan.files):
        after.append(
            "in each notebook that is open in JupyterLab choose File, Reload Notebook from Disk, before you save it"
        )
    return [f"this copy is now {new}", *plan.said, f"everything as it was: {backup}", *after]


def _exercise(plan: _Plan, name: str, now: bytes, data: bytes, new: copies.Release) -> None:
    """A file of exercises that is not what the new release holds."""
    concept = Path(name).stem
    old = plan.had.stubs.get(concept) if plan.had else None
    try:
        mine = course.text(now)
    except CourseError as error:
        kept = plan.beside(name, now, "old")
        plan.files[name] = data
        plan.said.append(f"{name} {error}: the new stub is in its place, yours is {kept}")
        return
    merged = merge(old, mine, new.stubs[concept])
    made = written(merged.text, now)
    if made != now:
        plan.files[name] = made
        if not merged.to_do and mine != old:
            plan.said.append(f"{name}: what you wrote is in the new stub")
    if merged.to_do:
        kept = plan.beside(name, now, "old")
        whys = "; ".join(f"{exercise}: {why}" if exercise else why for exercise, why in merged.to_do.items())
        plan.said.append(f"{name}: look at it, your file is kept as {kept} ({whys})")


def _notebook(plan: _Plan, name: str, now: bytes, data: bytes) -> None:
    """A notebook that is not what the new release holds: outputs are made again by running it, a learner's cells are kept."""
    released, cells = plan.had.cells.get(name) if plan.had else None, copies.cells(now)
    if cells == copies.cells(data) or (plan.had and plan.had.files.get(name) == copies.digest(data)):
        return  # the same text, with the outputs of this machine; or a notebook that only the learner has changed
    if cells != released:
        plan.said.append(f"{name}: new; yours, with what you changed, is {plan.beside(name, now, 'mine')}")
    plan.files[name] = data


def _gone(plan: _Plan, new: copies.Release) -> None:
    """What the release that the copy was made from held and the new one does not: of other concepts it stays."""
    if plan.had is None:
        return
    renumbered = {Path(name).stem[3:] for name in new.files if copies.is_notebook(name)}
    for name in plan.had.files.keys() - new.files.keys():
        now = plan.now(name)
        if now is None:
            continue
        top = name.split("/")[0]
        if copies.is_notebook(name):
            if Path(name).stem[3:] in renumbered:
                if copies.cells(now) != plan.had.cells.get(name):
                    plan.said.append(f"{name} has another number now; yours is {plan.beside(name, now, 'mine')}")
                plan.files[name] = None
        elif name in _own_checks(plan.had, new):
            continue
        elif top == "gpukit" and "gpukit/__init__.py" in new.files:
            plan.files[name] = None
            if not plan.as_handed_out(name, now):
                plan.at_risk.append(name)
                plan.said.append(f"{name}: removed; yours is in the backup")


def _own_checks(had: copies.Release, new: copies.Release) -> set[str]:
    """The checks of an instructor's own exercises that the copy has and the new release does not speak of: of the course's it
    holds all."""
    concepts = [concept for concept in had.concepts if concept not in new.concepts]
    names = {f"gpukit/checks/{concept}.{suffix}" for concept in concepts for suffix in ("py", "md")}
    return (names & had.files.keys()) - new.files.keys()


def _joined(had: copies.Release | None, new: copies.Release) -> copies.Release:
    """What the copy says of itself afterwards: it still has the concepts that the new release does not speak of."""
    if had is None:
        return new
    order = dict.fromkeys(item.concept for item in registry.catalog().values())
    kept = [concept for concept in had.concepts if concept not in new.concepts]
    paths = {name for name in had.files if Path(name).stem.lstrip("0123456789_") in kept and "/" in name}
    paths = {name for name in paths if copies.is_notebook(name) or copies.is_exercise(name)} | _own_checks(had, new)
    every = [
        *(c for c in order if c in kept or c in new.concepts),
        *(c for c in (*kept, *new.concepts) if c not in order),
    ]
    return replace(
        new,
        concepts=tuple(every),
        files={name: had.files[name] for name in sorted(paths)} | new.files,
        cells={name: had.cells[name] for name in sorted(paths & had.cells.keys())} | new.cells,
        stubs={concept: had.stubs[concept] for concept in kept if concept in had.stubs} | new.stubs,
    )


def _version(made: copies.Release) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", made.version)]
