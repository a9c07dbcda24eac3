"""A learner's copy through updates and resets, hostile ones among them: whatever happens, what was written is still there."""

import errno
import json
import os
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

from gpukit import cli, course
from gpukit.classroom import backup, copies, reset, update
from tests.classroom.test_merge import GAP, MINE, OLD

NOTEBOOK = "notebooks/00_start.ipynb"


def notebook(text: str, output: str = "") -> bytes:
    cell = {"cell_type": "code", "source": [text], "outputs": [output] if output else []}
    return json.dumps({"cells": [cell]}).encode()


def files(**changes: str | bytes) -> dict[str, bytes]:
    """The files of a small release; double underscores in a name stand for a slash."""
    found = {
        "exercises/start.py": OLD.replace("toy.", "start."),
        NOTEBOOK: notebook("1 + 1"),
        "gpukit/__init__.py": "version = 1\n",
        "gpukit/old.py": "old = 1\n",
        "README.md": "Read me.\n",
    }
    found |= {name.replace("__", "/"): text for name, text in changes.items()}
    return {name: text.encode() if isinstance(text, str) else text for name, text in found.items()}


def put(folder: Path, contents: dict[str, bytes], version: str = "1.0", concepts: tuple[str, ...] = ("start",)) -> Path:
    """A release as `gpukit release` lays it out."""
    made = copies.describe(contents, concepts, version, "2026-01-01T00:00:00+00:00", "")
    for name, data in {**contents, copies.NAME: made.as_json().encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


STUB = OLD.replace("toy.", "start.")
ANSWERED = MINE.replace("toy.", "start.")
NEW_STUB = STUB.replace("two exercises", "two short exercises")
NEW = {"exercises/start.py": NEW_STUB.encode(), NOTEBOOK: notebook("1 + 2"), "gpukit/__init__.py": b"version = 2\n"}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A learner's copy with an answer in it."""
    root = put(tmp_path / "copy", files())
    (root / "exercises" / "start.py").write_text(ANSWERED)
    return root


@pytest.fixture
def newer(tmp_path) -> Path:
    contents = files() | NEW
    del contents["gpukit/old.py"]
    return put(tmp_path / "newer", contents, "1.1")


def everything(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def visible(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(root).items() if not name.startswith(".gpukit")}


def kept(root: Path, data: bytes | str) -> bool:
    """Whether some file of the copy, its backups included, holds this."""
    return (data.encode() if isinstance(data, str) else data) in everything(root).values()


def test_update_merges_answers_and_replaces_the_rest(copy, newer):
    (copy / "mine.txt").write_text("my notes")
    said = update.update(copy, newer)
    assert (copy / "exercises" / "start.py").read_text() == ANSWERED.replace("two exercises", "two short exercises")
    assert (copy / "gpukit" / "__init__.py").read_text() == "version = 2\n" and not (
        copy / "gpukit" / "old.py"
    ).exists()
    assert (copy / NOTEBOOK).read_bytes() == notebook("1 + 2") and (copy / "mine.txt").read_text() == "my notes"
    assert copies.read(copy).version == "1.1" and copies.read(copy).stubs["start"] == NEW_STUB
    assert not list((copy / "exercises").glob("*.old*")) and not list((copy / "notebooks").glob("*.mine*"))
    assert "this copy is now gpukit 1.1" in said[0] and "exercises/start.py: what you wrote is in the new stub" in said
    (place,) = [line.removeprefix("everything as it was: ") for line in said if line.startswith("everything")]
    assert (copy / place / "exercises" / "start.py").read_text() == ANSWERED
    assert [path.name for path in (copy / ".gpukit").iterdir()] == ["backups"]


def test_update_run_twice_does_nothing_more(copy, newer):
    update.update(copy, newer)
    before = everything(copy)
    assert update.update(copy, newer) == [f"nothing to do: this copy is {copies.read(newer)}"]
    assert everything(copy) == before


@pytest.mark.parametrize("deeper", (False, True))
def test_update_from_a_zip(copy, newer, tmp_path, deeper):
    top = "week-2/" if deeper else ""
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        for name, data in everything(newer).items():
            archive.writestr(top + name, data)
        archive.writestr(f"{top}stray.py", "not named by release.json")
    update.update(copy, tmp_path / "new.zip")
    assert copies.read(copy).version == "1.1" and not (copy / "stray.py").exists()


def test_notebooks_that_the_learner_changed_are_kept_beside(copy, newer):
    changed = notebook("1 + 1  # my idea", "2")
    (copy / NOTEBOOK).write_bytes(changed)
    said = update.update(copy, newer)
    assert (copy / NOTEBOOK).read_bytes() == notebook("1 + 2")
    assert (copy / "notebooks" / "00_start.mine.ipynb").read_bytes() == changed
    assert any("00_start.mine.ipynb" in line for line in said)


def test_a_notebook_that_was_only_run_is_replaced_and_is_in_the_backup(copy, newer):
    run = notebook("1 + 1", "2")
    (copy / NOTEBOOK).write_bytes(run)
    update.update(copy, newer)
    assert not (copy / "notebooks" / "00_start.mine.ipynb").exists() and kept(copy, run)


def test_a_notebook_that_the_release_did_not_change_stays_as_the_learner_has_it(copy, newer, tmp_path):
    same = put(tmp_path / "same", files(README="x", **{"README.md": "New.\n"}), "1.1")
    for mine in (notebook("mine"), notebook("1 + 1", "2"), b"broken {"):
        (copy / NOTEBOOK).write_bytes(mine)
        update.update(copy, same)
        assert (copy / NOTEBOOK).read_bytes() == mine


def test_a_renumbered_notebook_leaves_no_double(copy, tmp_path):
    contents = files()
    contents["notebooks/03_start.ipynb"] = contents.pop(NOTEBOOK)
    newer = put(tmp_path / "newer", contents, "1.1")
    second = shutil.copytree(copy, tmp_path / "second")
    update.update(copy, newer)
    assert [path.name for path in (copy / "notebooks").iterdir()] == ["03_start.ipynb"]
    (second / NOTEBOOK).write_bytes(notebook("mine"))
    update.update(second, newer)
    assert {path.name for path in (second / "notebooks").iterdir()} == {"03_start.ipynb", "00_start.mine.ipynb"}


def test_a_release_of_other_concepts_adds_to_the_copy(copy, tmp_path):
    contents = files() | {"exercises/memory.py": b"# memory\n", "notebooks/02_memory.ipynb": notebook("3")}
    del contents["exercises/start.py"], contents[NOTEBOOK]
    said = update.update(copy, put(tmp_path / "week-2", contents, "1.0", ("memory",)))
    assert (copy / "exercises" / "start.py").read_text() == ANSWERED and (copy / NOTEBOOK).exists()
    assert "exercises/memory.py: new" in said
    had = copies.read(copy)
    assert had.concepts == ("start", "memory") and had.stubs.keys() == {"start", "memory"} and NOTEBOOK in had.cells


def test_another_signature_keeps_the_old_file_beside(copy, tmp_path):
    newer = put(
        tmp_path / "newer", files(**{"exercises/start.py": STUB.replace("x: int, n: int", "x: int, m: int")}), "2"
    )
    said = update.update(copy, newer)
    assert (copy / "exercises" / "start.old.py").read_text() == ANSWERED
    assert "m: int" in (copy / "exercises" / "start.py").read_text()
    assert any("start.old.py (start.first: first has other arguments now)" in line for line in said)
    (copy / "exercises" / "start.py").write_text(ANSWERED.replace("n: int", "m: int").replace("x * n", "x + m"))
    third = put(tmp_path / "third", files(**{"exercises/start.py": STUB.replace("x: int, n: int", "k: int")}), "3")
    update.update(copy, third)
    assert (copy / "exercises" / "start.old.py").read_text() == ANSWERED, "the first one is not overwritten"
    assert "x + m" in (copy / "exercises" / "start.old-2.py").read_text()


@pytest.mark.parametrize(
    "mine",
    (
        ANSWERED.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + ANSWERED.encode(),
        "\n".join(line for line in ANSWERED.split("\n") if "# ---" not in line and "your code" not in line).encode(),
        ANSWERED.replace("return total", "return (total").encode(),
        b"",
        b"\xff\xfe not utf-8 \x00",
        b"# -*- coding: utf-7 -*-\n",
        b"x" * (2 << 20),
        ("def second(x):\n    return 1\n" * 4).encode(),
    ),
    ids=("crlf", "bom", "no-markers", "syntax-error", "empty", "not-utf-8", "utf-7", "2-mib", "another-file"),
)
def test_hostile_files_lose_nothing(copy, newer, mine):
    path = copy / "exercises" / "start.py"
    path.write_bytes(mine)
    update.update(copy, newer)
    assert kept(copy, mine), "in the backup at least"
    beside = copy / "exercises" / "start.old.py"
    now = path.read_bytes()
    assert b"total = x * n" not in mine or b"total = x * n" in now
    assert (
        b"total = x * n" in mine or (beside.exists() and beside.read_bytes() == mine) or not mine or b"return 1" in now
    )
    assert b"\r\n" not in mine or now.count(b"\r\n") == now.count(b"\n")
    if b"total = x * n" in mine:
        assert b"two short exercises" in now
    before = visible(copy)
    update.update(copy, newer)
    assert visible(copy) == before


def test_a_renamed_file_stays_and_a_new_stub_comes(copy, newer):
    (copy / "exercises" / "start.py").rename(copy / "exercises" / "Start_mine.py")
    said = update.update(copy, newer)
    assert (copy / "exercises" / "Start_mine.py").read_text() == ANSWERED
    assert (copy / "exercises" / "start.py").read_text() == NEW_STUB and "exercises/start.py: new" in said


def test_a_folder_in_a_files_place_is_refused(copy, newer):
    path = copy / "exercises" / "start.py"
    path.unlink()
    path.mkdir()
    (path / "mine.py").write_text("mine")
    before = everything(copy)
    with pytest.raises(course.CourseError, match=r"exercises/start\.py is a folder"):
        update.update(copy, newer)
    assert everything(copy) == before


def test_a_link_is_replaced_and_what_it_leads_to_stays(copy, newer, tmp_path):
    path, elsewhere = copy / "exercises" / "start.py", tmp_path / "elsewhere.py"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    update.update(copy, newer)
    assert elsewhere.read_text() == ANSWERED and "total = x * n" in path.read_text() and kept(copy, ANSWERED)


def test_other_files_that_the_learner_changed_are_in_the_backup(copy, newer):
    (copy / "gpukit" / "__init__.py").write_text("mine")
    (copy / "gpukit" / "old.py").write_text("mine, too")
    said = update.update(copy, newer)
    assert kept(copy, "mine") and kept(copy, "mine, too")
    assert "gpukit/__init__.py: replaced; yours is in the backup" in said


@pytest.mark.parametrize("damage", ("gone", "broken"))
def test_a_copy_that_no_longer_knows_its_release(copy, newer, damage):
    if damage == "gone":
        (copy / copies.NAME).unlink()
        update.update(copy, newer)
        assert "total = x * n" in (copy / "exercises" / "start.py").read_text()
        assert copies.read(copy).version == "1.1" and kept(copy, notebook("1 + 1"))
    else:
        (copy / copies.NAME).write_text("{")
        with pytest.raises(course.CourseError, match=r"release\.json is damaged"):
            update.update(copy, newer)


# -------------------------------------------------------------------------------------------- when writing fails midway
def _fails_at(monkeypatch, name: str, call: int) -> None:
    """The function `name` of os raises at its call number `call`: the disk is full."""
    real, seen = getattr(os, name), []

    def failing(*args, **kwargs):
        seen.append(args)
        if len(seen) == call:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[-1]))
        return real(*args, **kwargs)

    monkeypatch.setattr(backup.os, name, failing)


@pytest.mark.parametrize(
    ("name", "call"), [*(("replace", n) for n in range(1, 5)), *(("link", n) for n in range(1, 6))]
)
def test_a_failure_in_the_middle_leaves_the_copy_as_it_was(copy, newer, monkeypatch, name, call):
    before = visible(copy)
    with monkeypatch.context() as patch:
        _fails_at(patch, name, call)
        if name == "link":
            patch.setattr(backup.shutil, "copy2", _full)
            patch.setattr(update, "back_up", lambda *_: "nowhere")
        with pytest.raises(OSError):
            update.update(copy, newer)
    assert visible(copy) == before and not list((copy / ".gpukit").glob("update-*"))
    update.update(copy, newer)
    assert "total = x * n" in (copy / "exercises" / "start.py").read_text() and copies.read(copy).version == "1.1"


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ("backup", "staging"))
def test_a_full_disk_before_the_first_change(copy, newer, monkeypatch, what, capsys):
    before = visible(copy)
    if what == "backup":
        monkeypatch.setattr(backup.shutil, "copy2", _full)
    else:
        monkeypatch.setattr(backup.Path, "write_bytes", _full)
    monkeypatch.chdir(copy)
    assert cli.main(["update", str(newer)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert visible(copy) == before


def test_interrupted_by_the_keyboard_and_killed(copy, newer, monkeypatch):
    """Ctrl-C goes back; a kill leaves a mixture, from which the next update goes on."""
    before, real = visible(copy), os.replace

    def interrupted(old, new):
        if Path(new) == copy / NOTEBOOK and str(old).endswith(".new"):
            raise KeyboardInterrupt
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(backup.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update.update(copy, newer)
    assert visible(copy) == before
    (copy / "exercises" / "start.py").write_text(ANSWERED.replace("two exercises", "two short exercises"))
    (copy / NOTEBOOK).write_bytes(notebook("1 + 2"))
    update.update(copy, newer)
    assert (copy / "exercises" / "start.py").read_text() == ANSWERED.replace("two exercises", "two short exercises")
    assert not list((copy / "exercises").glob("*.old*")) and not list((copy / "notebooks").glob("*.mine*"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(copy, newer):
    before = visible(copy)
    (copy / "exercises").chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(PermissionError):
            update.update(copy, newer)
    finally:
        (copy / "exercises").chmod(stat.S_IRWXU)
    assert visible(copy) == before


# ------------------------------------------------------------------------------------------------------- what is refused
def test_an_older_release_and_the_course_itself_are_refused(copy, newer, tmp_path):
    update.update(copy, newer)
    with pytest.raises(course.CourseError, match=r"gpukit 1\.0.* older than this copy: gpukit 1\.1"):
        update.update(copy, put(tmp_path / "older", files(), "1.0"))
    checkout = tmp_path / "checkout"
    (checkout / "solutions").mkdir(parents=True)
    with pytest.raises(course.CourseError, match="git pull"):
        update.update(checkout, newer)


def test_an_earlier_release_of_the_same_version_says_so(copy, newer, tmp_path):
    update.update(copy, newer)
    older = put(tmp_path / "older", files(README="Old.\n"), "1.1")
    said = json.loads((older / copies.NAME).read_text()) | {"released": "2025-01-01T00:00:00+00:00"}
    (older / copies.NAME).write_text(json.dumps(said))
    assert (
        "that is an older release than before, 2026-01-01T00:00:00+00:00: FROM may be" in update.update(copy, older)[1]
    )


def test_what_is_no_release_or_a_damaged_one_is_refused_before_anything_changes(copy, newer, tmp_path):
    before = everything(copy)

    def refused(source: Path, match: str) -> None:
        with pytest.raises(course.CourseError, match=match):
            update.update(copy, source)
        assert everything(copy) == before

    refused(tmp_path / "nothing.zip", "there is no ")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no release of the course")
    (tmp_path / "text.zip").write_text("text")
    refused(tmp_path / "text.zip", "neither a folder nor a zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/b/release.json", "{}")
    refused(tmp_path / "other.zip", "no release of the course")
    (newer / "exercises" / "start.py").write_text("changed")
    refused(newer, r"damaged: exercises/start\.py is missing or was changed")
    for name in ("/etc/passwd", "../outside.py", ".gpukit/progress.json", "a\\..\\b"):
        said = json.loads((newer / copies.NAME).read_text())
        said["files"] = {name: copies.digest(b"")}
        (newer / copies.NAME).write_text(json.dumps(said))
        refused(newer, "no place for a file of the course")
    for content in ("[]", "{}", '{"version": 1}', "[" * 100_000, "\xff"):
        (newer / copies.NAME).write_text(content, encoding="latin-1")
        refused(newer, "damaged")


# ---------------------------------------------------------------------------------------------------------------- reset
@pytest.fixture
def known(monkeypatch):
    """The exercises of the small release."""
    names = {"start": ["start.first", "start.second"], "start.first": ["start.first"], "start.second": ["start.second"]}
    monkeypatch.setattr(reset.registry, "named", names.__getitem__)


def test_reset_puts_one_stub_back_and_leaves_the_others(copy, known):
    mine = ANSWERED.replace("    return z", "    return 2 * z")
    (copy / "exercises" / "start.py").write_bytes(mine.replace("\n", "\r\n").encode())
    said = reset.reset(copy, "start.first")
    now = (copy / "exercises" / "start.py").read_bytes()
    expected = mine.replace("    total = x * n\n    return total\n", GAP.replace("toy.", "start."))
    assert now == expected.replace("\n", "\r\n").encode()
    (place,) = [line.removeprefix("what you wrote: ") for line in said if line.startswith("what")]
    assert (copy / place).read_bytes() == mine.replace("\n", "\r\n").encode()
    assert reset.reset(copy, "start.first") == ["start.first is as it was handed out"]
    reset.reset(copy, "start")
    assert (copy / "exercises" / "start.py").read_bytes() == STUB.replace("\n", "\r\n").encode()
    assert len(list((copy / ".gpukit" / "backups").iterdir())) == 2


def test_reset_where_the_exercise_cannot_be_found(copy, known):
    path = copy / "exercises" / "start.py"
    for text in (ANSWERED.replace("# -", "#-"), ANSWERED + ANSWERED, b"\xff\x00".decode("latin-1")):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(course.CourseError, match="gpukit reset start makes the whole file anew"):
            reset.reset(copy, "start.first")
    said = reset.reset(copy, "start")
    assert path.read_text() == STUB and kept(copy, text.encode("latin-1")) and ".gpukit/backups/" in said[1]
    path.unlink()
    assert reset.reset(copy, "start.first") == ["start.first: exercises/start.py has its stub again"]


def test_reset_without_release_json(copy, known, tmp_path, monkeypatch):
    (copy / copies.NAME).unlink()
    with pytest.raises(course.CourseError, match="gpukit update RELEASE brings it back"):
        reset.reset(copy, "start.first")
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "start.py").write_text(STUB)
    monkeypatch.setattr(reset.release, "CARRIED", tmp_path)
    reset.reset(copy, "start.first")
    assert (copy / "exercises" / "start.py").read_text().count("NotImplementedError") == 1


def test_the_commands(copy, newer, monkeypatch, capsys):
    monkeypatch.chdir(copy / "exercises")
    assert cli.main(["update", str(newer)]) == 0 and "this copy is now" in capsys.readouterr().out
    (copy / "exercises" / "start.py").write_text("x = 1\n")
    assert cli.main(["reset", "start"]) == 0
    assert (copy / "exercises" / "start.py").read_text() == NEW_STUB
    assert cli.main(["reset", "stat.bytes_moved"]) == 2 and "did you mean" in capsys.readouterr().err
