"""A class of four in a store, graded without a judge: what gradebooks and pages are made of."""

from dataclasses import replace
from pathlib import Path

from gpukit.classroom import roster
from gpukit.classroom.store import NAME, Expected, Graded, HandedIn, Store

ASSIGNMENT = """title = "Week 2: bytes, FLOPs"
exercises = ["start.bytes_moved", "memory.gpt2"]
points = {"start.bytes_moved" = 10, memory = 2.5}
deadline = 2026-10-12T12:00:00+02:00
late = {per_day = 0.1, at_most = 2}
seed = 7
secret = "rosebud"
"""
ROSTER = """student_id,first_name,last_name,email,canvas_id,sis_user_id,section,submitted
s1,Ada,Lovelace,ada@uni.example,90311,,A,2026-10-13T12:30:00+02:00
s2,Grace,"Hopper, jr.",grace@uni.example,,u2,B,
s3,Emmy,Noether,emmy@uni.example,,,B,
s4,Alan,Turing,,90314,,A,
"""
RIGHT, WRONG, OTHER = "a" * 64, "b" * 64, "c" * 64
_FILES = {RIGHT: b"right = 1\n", WRONG: b"wrong = 1\n", OTHER: b"other = 1\n"}
_PASS = Graded(
    *("s1", "start.bytes_moved", RIGHT, "v1", 7, "pass", "", "How many bytes must a kernel move?", 7, 7, (), 0.25),
    *("2026-10-14T08:00:00.000+00:00", "0.1.0", "2.13.0", "3.7.1"),
)
LINES = ("start.bytes_moved: values differ (0 of 7 cases pass)", "  x <script>alert(1)</script>: expected 8, yours 4")


def make(folder: Path, text: str = ROSTER) -> Store:
    """s1 passes both, a day late, at the second try; s2 fails one and handed in nothing for the other; s3 is not graded
    completely; s4 handed in nothing. The store is open."""
    store = Store(folder / NAME)
    people = {each.id: each for each in roster.parse(text).students}
    at = {"s1": "s1.zip", "s2": "s2.zip", "s3": "s3.zip", "s4": ""}
    notes = {
        "s1": ("start.py is there 2 times: start-1.py was taken, not start.py",),
        "s2": ("s2.zip may be s2 and s3",),
    }
    handed_in = [
        HandedIn(name, people[name].name, people[name].email, path, people[name].submitted, notes.get(name, ()))
        for name, path in at.items()
    ]
    files = {"s1": (RIGHT, RIGHT), "s2": (WRONG, ""), "s3": (RIGHT, OTHER), "s4": ("", "")}
    why = {"s2": "the submission has no memory.py", "s4": "nothing was handed in"}
    expected = [
        Expected(name, exercise, file_hash, "v1", 7, "" if file_hash else why[name])
        for name, hashes in files.items()
        for exercise, file_hash in zip(("start.bytes_moved", "memory.gpt2"), hashes, strict=True)
    ]
    store.replace(handed_in, expected)
    store.keep_files(_FILES)
    wrong = replace(_PASS, file_hash=WRONG, state="fail", diagnosis="one-way", checks_passed=0, lines=LINES)
    store.add(
        replace(wrong, when="2026-10-11T08:00:00.000+00:00"),  # the first try of s1
        _PASS,
        replace(_PASS, exercise="memory.gpt2", title="A formula that is 786,432 short"),
        replace(wrong, student="s2"),
        replace(_PASS, student="s3"),
    )
    store.set(assignment=ASSIGNMENT, roster=text, fence="landlock", started="then", finished="now")
    return store
