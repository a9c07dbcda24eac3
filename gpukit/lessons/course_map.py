"""The notebooks of the course in one picture, with the one that is being read marked."""

from __future__ import annotations

from gpukit import course
from gpukit.widgets import style
from gpukit.widgets.style import Picture

# The last notebook of each part.
_PARTS = ((4, "what things cost"), (8, "how a GPU works"), (16, "kernels"), (99, "all of it"))
_CAPITALS = {
    "kv cache": "KV cache",
    "gelu": "GELU",
    "adamw": "AdamW",
    "flops": "FLOPs",
    "triton basics": "Triton basics",
}


def course_map(here: str) -> Picture:
    """A row for each part of the course. here: a notebook by its name without the number, "capstone"."""
    stems = sorted(path.stem for path in (course.root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    parts: dict[str, list[str]] = {}
    for stem in stems:
        part = next(name for last, name in _PARTS if int(stem[:2]) <= last)
        parts.setdefault(part, []).append(stem)
    widest = max(map(len, parts.values()))
    with style.use():
        fig, ax = style.figure(width=10.0, height=0.75 * len(parts) + 0.3)
        for row, (part, lessons) in enumerate(parts.items()):
            ax.text(-0.15, row, part, ha="right", va="center", fontweight="bold")
            for column, stem in enumerate(lessons):
                chosen = stem[3:] == here
                colour = style.YOURS if chosen else "#E8E8E8"
                ax.add_patch(_box(column, row, colour))
                name = stem[3:].replace("_", " ")
                ax.text(
                    column + 0.46, row, f"{stem[:2]}\n{_CAPITALS.get(name, name)}", ha="center", va="center", fontsize=8,
                    color="white" if chosen else style.INK,
                )  # fmt: skip
                if chosen:
                    ax.text(
                        column + 0.46, row + 0.42, "you are here", ha="center", va="center", fontsize=8.5,
                        color=style.YOURS, fontweight="bold",
                    )  # fmt: skip
        ax.set_xlim(-1.9, widest)
        ax.set_ylim(len(parts) - 0.45, -0.55)
        ax.axis("off")
    number = next(stem[:2] for stem in stems if stem[3:] == here)
    numbers = {part: list(dict.fromkeys((lessons[0][:2], lessons[-1][:2]))) for part, lessons in parts.items()}
    rows = "; ".join(f"{part}: {' to '.join(ends)}" for part, ends in numbers.items())
    return style.picture(fig, alt=f"The notebooks of the course. {rows}. You are at {number}.")


def _box(column: int, row: int, colour: str):
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (column + 0.04, row - 0.3), 0.84, 0.6, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="none"
    )
