"""What `gpukit validate` prints: of each GPU with recorded measurements, what the model has never seen first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpukit.validation import halves, times, traffic, unseen

_TABLES = [table for kernels in (times.KERNELS, traffic.KERNELS) for _, table in kernels.values()]


def recorded() -> list[str]:
    """The GPUs that the simulator was compared with, the one with most tables first."""
    names = [path.parent.name for folder in {times.RESULTS, traffic.RESULTS} for path in folder.glob("*/*.csv")
             if path.name in _TABLES]  # fmt: skip
    return sorted(set(names), key=lambda name: (-names.count(name), name))


def show(gpus: list[str], everything: bool, missing: bool) -> int:
    """Print all tables of these GPUs; `missing`: name the tables that do not exist. Returns 1 if nothing was found, if the times held
    back are outside a bar, or if another row is outside its bar without a reason; the open half is only shown."""
    found, wrong = False, False
    for name in unseen.SETS:
        for line in unseen.state(gpus, name):
            print(f"{line}\n")
    for title, read, text, fails in _parts(gpus):
        try:
            rows = read()
        except FileNotFoundError as error:
            if missing and " SET, " not in title:  # of which unseen.state has spoken
                print(f"{title}\nnothing is recorded: {error}\n")
            continue
        found = True
        wrong |= fails(rows)
        print(f"{title}\n{text(rows, everything)}\n")
        if title.startswith(f"TIMES OF {halves.TITLES['held']}"):
            print(f"{halves.LOOKED_AT}\n")
    return int(wrong or not found)


def _parts(gpus: list[str]) -> Iterator[tuple[str, Callable, Callable, Callable]]:
    """Title, what reads the rows, what makes a text of them, and what says that they fail."""
    for name in unseen.SETS:
        for gpu in gpus:
            of = f"OF THE {name.upper()} SET, simulated and measured on {gpu}"
            path = traffic.RESULTS / gpu / traffic.KERNELS[name][1]
            yield (
                f"TIMES {of}",
                lambda gpu=gpu, name=name: times.read(gpu, name),
                halves.text,
                lambda rows: bool(halves.outside(rows)),
            )
            yield f"TRAFFIC {of}", lambda path=path: traffic.read(path), traffic.text, _unexplained
    for which in halves.HALVES:
        for gpu in gpus:
            on = f"simulated and measured on {gpu}"
            yield (
                f"TIMES OF {halves.TITLES[which]}, {on}",
                lambda gpu=gpu, which=which: halves.of(times.read(gpu, "new"), which),
                halves.text,
                lambda rows, which=which: which == "held" and bool(halves.outside(rows)),
            )
            yield (
                f"TRAFFIC OF {halves.TITLES[which]}, {on}",
                lambda gpu=gpu, which=which: halves.of(halves.traffic_rows(gpu), which),
                traffic.text,
                lambda rows, which=which: which == "held" and any(row.unexplained for row in rows),
            )
    for gpu in gpus:
        on = f"simulated and measured on {gpu}"
        path = traffic.RESULTS / gpu / "traffic.csv"
        yield f"TRAFFIC, {on}", lambda path=path: traffic.read(path), traffic.text, _unexplained
        yield f"TIMES, {on}", lambda gpu=gpu: times.read(gpu), times.text, _unexplained


def _unexplained(rows: list) -> bool:
    return any(row.unexplained for row in rows)
