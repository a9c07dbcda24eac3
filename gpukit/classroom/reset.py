"""The stub of one exercise put back in a learner's file: `gpukit reset`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpukit import course
from gpukit.classroom import copies, release
from gpukit.classroom.backup import back_up, change_together, written
from gpukit.classroom.merge import section
from gpukit.course import CourseError
from gpukit.grading import registry, stubs


def reset(root: Path, name: str) -> list[str]:
    """Put the stub of an exercise back ("softmax.fused"), or those of a whole file ("softmax"). What was done, a line each.

    Raises UnknownExercise; CourseError where the exercise cannot be found in the learner's file.
    """
    ids = registry.named(name)
    concept = ids[0].partition(".")[0]
    path = course.exercise_file(concept, root, "exercises")
    shown = f"exercises/{path.name}"
    stub = _stub(root, concept)
    now = path.read_bytes() if path.is_file() else None
    if now is None or name == concept:
        text = stub
    else:
        try:
            mine = course.text(now)
        except CourseError as error:
            raise CourseError(f"{shown} {error}; gpukit reset {concept} makes the whole file anew") from None
        here, there = section(mine, name), section(stub, name)
        if here is None or there is None:
            raise CourseError(
                f"{shown} has no line '# ---- {name}', or several: nothing says where the exercise begins and ends. "
                f"gpukit reset {concept} makes the whole file anew"
            )
        text = mine[: here[0]] + stub[slice(*there)] + mine[here[1] :]
    data = written(text, now or b"")
    if data == now:
        return [f"{name if now else shown} is as it was handed out"]
    backup = back_up(root) if now is not None else None
    change_together(root, {shown: data})
    return [f"{name}: {shown} has its stub again", *([f"what you wrote: {backup}/{shown}"] if backup else [])]


def _stub(root: Path, concept: str) -> str:
    """exercises/<concept>.py as handed out: said by release.json, made from solutions/, or carried by the package."""
    had = copies.read(root)
    if had and concept in had.stubs:
        return had.stubs[concept]
    if (root / "solutions" / f"{concept}.py").is_file():
        return stubs.made(root)[concept]
    with contextlib.suppress(OSError):
        return (release.CARRIED / "exercises" / f"{concept}.py").read_text(encoding="utf-8")
    raise CourseError(
        f"what exercises/{concept}.py was handed out as is not known here: {copies.NAME} of this copy is gone. "
        "gpukit update RELEASE brings it back"
    )
