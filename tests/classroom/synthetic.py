"""A class of 60 made for the tests: right, wrong, hostile and broken answers, mixed submissions, and every bad form of handing in
that the term has seen, each with the verdicts that it must get."""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from pathlib import Path

from gpukit import course
from gpukit.grading import stubs

ROOT = course.root(__file__)
EXERCISES = ("start.bytes_moved", "memory.gpt2", "memory.llama")
ASSIGNMENT = f"""title = "Synthetic"
exercises = {[*EXERCISES]}
points = 10
deadline = 2026-10-12T12:00:00+00:00
late = {{per_day = 0.5, at_most = 1}}
seed = 7
"""
PASS = ("pass", "pass", "pass")
NOTHING = ("missing", "missing", "missing")

# What is in the two files of a student, and the verdict on each exercise: its state, or "fail:" and the diagnosis.
RIGHT = {name: (ROOT / "solutions" / f"{name}.py").read_text() for name in ("start", "memory")}
STUB = {name: stubs.handed_out(name, ROOT) for name in RIGHT}
_OF_STUB = ("fail:one-way", "fail:no-positions", "todo")


def started(body: str, signature: str = "M, N, itemsize") -> str:
    return f"def bytes_moved({signature}):\n    {body}\n"


def llama(old: str, new: str) -> str:
    head, section = RIGHT["memory"].split("memory.llama\n", 1)
    assert old in section
    return f"{head}memory.llama\n{section.replace(old, new, 1)}"


# (start.py, memory.py, verdicts)
ANSWERS: list[tuple[str, str, tuple[str, str, str]]] = [
    # wrong
    (started("return M * N * itemsize"), RIGHT["memory"], ("fail:one-way", "pass", "pass")),
    (started("return 2 * M * N"), RIGHT["memory"], ("fail:elements", "pass", "pass")),
    (started("return 2 * M * N * 4"), RIGHT["memory"], ("fail:fixed-itemsize", "pass", "pass")),
    (started("return float(2 * M * N * itemsize)"), RIGHT["memory"], ("fail:rounded", "pass", "pass")),
    (RIGHT["start"], llama("mlp + 2 * h", "mlp"), ("pass", "pass", "fail:no-norms")),
    (RIGHT["start"], STUB["memory"], ("pass", "fail:no-positions", "todo")),
    (started("return 3"), STUB["memory"], ("fail:values", "fail:no-positions", "todo")),
    (started("return None"), RIGHT["memory"], ("fail:type", "pass", "pass")),
    # hostile
    (f"import os\n\n\n{started('os._exit(0)')}", RIGHT["memory"], ("error:forbidden", "pass", "pass")),
    (started("return open('/etc/passwd').read()"), RIGHT["memory"], ("error:forbidden", "pass", "pass")),
    (started("raise SystemExit(0)"), RIGHT["memory"], ("error:exception", "pass", "pass")),
    (started("raise KeyboardInterrupt"), RIGHT["memory"], ("error:exception", "pass", "pass")),
    (started("return bytes_moved(M, N, itemsize)"), RIGHT["memory"], ("error:exception", "pass", "pass")),
    (started("return len(bytearray(1 << 45))"), RIGHT["memory"], ("error:exception", "pass", "pass")),
    (started("print('x' * (1 << 24)); return 2 * M * N * itemsize"), RIGHT["memory"], PASS),
    (f"__import__('os').kill(0, 9)\n{RIGHT['start']}", RIGHT["memory"], ("error:forbidden", "pass", "pass")),
    # broken
    ("def bytes_moved(M, N, itemsize)\n    return 2\n", RIGHT["memory"], ("error:syntax", "pass", "pass")),
    (started("return 2 * M * N", signature="M, N"), RIGHT["memory"], ("error:exception", "pass", "pass")),
    ("def moved():\n    pass\n", RIGHT["memory"], ("missing:missing-function", "pass", "pass")),
    ("1 / 0\n", RIGHT["memory"], ("error:exception", "pass", "pass")),
    # of an old release, which knew one exercise less
    (
        RIGHT["start"],
        re.sub(r"def llama\(", "def another(", RIGHT["memory"]),
        ("pass", "pass", "missing:missing-function"),
    ),
    ("\0", RIGHT["memory"], ("error:syntax", "pass", "pass")),
]


def zipped(files: dict[str, bytes], link: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = ((stat.S_IFLNK | 0o777) if name == link else (stat.S_IFREG | 0o644)) << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def make(folder: Path) -> dict[str, tuple[str, ...]]:
    """Write the class into `folder`/class and `folder`/roster.csv. By student, what each exercise must get: its state, with
    the diagnosis behind a colon where that matters."""
    at = folder / "class"
    expected: dict[str, tuple[str, ...]] = {}

    def student(name: str, verdicts: tuple[str, ...]) -> Path:
        expected[name] = verdicts
        return at / name

    own = {name: lambda n, text=text: f"{text}\n# {n}\n" for name, text in RIGHT.items()}  # no two files alike
    for n in range(10):
        path = student(f"right{n:02}", PASS)
        for name, text in own.items():
            write(path / "exercises" / f"{name}.py", text(n))
    for n in range(4):
        path = student(f"copied{n}", PASS)
        for name, text in RIGHT.items():
            write(path / f"{name}.py", text)
    for n in range(6):
        path = student(f"stub{n}", _OF_STUB)
        for name, text in STUB.items():
            write(path / "exercises" / f"{name}.py", text)
    for n, (start, memory, verdicts) in enumerate(ANSWERS):
        path = student(f"answer{n:02}", verdicts)
        write(path / "start.py", start)
        write(path / "memory.py", memory)

    both = {f"{name}.py": text.encode() for name, text in RIGHT.items()}
    (student("empty", NOTHING)).mkdir()
    path = student("linked", NOTHING)
    path.mkdir()
    for name in RIGHT:
        (path / f"{name}.py").symlink_to(ROOT / "solutions" / f"{name}.py")
    write(student("packed_link", ("missing", "pass", "pass")).with_suffix(".zip"), zipped(both, link="start.py"))
    write(student("bomb", NOTHING).with_suffix(".zip"), zipped({**both, "notes.txt": bytes(64 << 20)}))
    write(student("huge", ("missing", "pass", "pass")) / "memory.py", RIGHT["memory"])
    write(at / "huge" / "start.py", "")
    os.truncate(at / "huge" / "start.py", 1 << 30)  # a hole, which takes no room
    write(student("huge_zip", NOTHING).with_suffix(".zip"), "")
    os.truncate(at / "huge_zip.zip", 1 << 30)
    write(student("latin", ("missing", "pass", "pass")) / "start.py", "# \xe9\n".encode("latin-1") + both["start.py"])
    write(at / "latin" / "memory.py", RIGHT["memory"])
    write(student("renamed", PASS) / "Start - Copy.py", RIGHT["start"])
    write(at / "renamed" / "my answers.py", RIGHT["memory"])
    for name, text in both.items():
        write(student("deeper", PASS) / "gpu course" / "exercises" / name, text)
        write(student("windows", PASS) / name, b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
        write(
            student("outside", NOTHING).with_suffix(".zip"), zipped({f"../{name}": text for name, text in both.items()})
        )
    write(student("twins", ("pass", "pass", "pass")) / "start.py", started("return 0"))
    write(at / "twins" / "start-1.py", RIGHT["start"])
    write(at / "twins" / "memory.py", RIGHT["memory"])
    write(student("cut", NOTHING).with_suffix(".zip"), zipped(both)[:-40])
    write(student("rar", NOTHING) / "work.rar", "Rar!")
    write(
        student("course_and_all", PASS).with_suffix(".zip"),
        zipped(
            {f"gpukit-course/exercises/{k}": v for k, v in both.items()}
            | {"gpukit-course/gpukit/checks/start.py": b"1 / 0", "gpukit-course/solutions/start.py": b"1 / 0"}
        ),
    )
    write(student("half", ("pass", "missing", "missing")) / "start.py", RIGHT["start"])
    write(
        at / "half" / "release.json", '{"concepts": ["start"]}'
    )  # a learner's copy says what it holds, an assignment what counts
    write(student("late", PASS).with_suffix(".zip"), zipped(both))
    expected["absent"] = NOTHING
    rows = [f"{name},{name.title()},{'2026-10-12T13:00:00+00:00' if name == 'late' else ''}" for name in expected]
    write(folder / "roster.csv", "\n".join(["student_id,name,submitted", *rows, ""]))
    write(folder / "assignment.toml", ASSIGNMENT)
    return expected
