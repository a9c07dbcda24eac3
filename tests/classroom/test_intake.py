"""What a class hands in, in all the forms that it comes in: each gets a row and, where something is odd, a sentence."""

import io
import os
import stat
import zipfile
from pathlib import Path

import pytest

from gpukit import course
from gpukit.classroom import intake, packed, roster

SOFTMAX = b"def softmax_fused(x):\n    return x\n"
CONCEPTS = ("softmax", "memory")
LINK = stat.S_IFLNK | 0o777


def write(path: Path, data: bytes = SOFTMAX) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def zipped(files: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (LINK if name in links else stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def read(folder: Path, names: str = "", concepts=CONCEPTS) -> dict[str, intake.Submission]:
    people = None
    if names:
        people = roster.read(write(folder.parent / "roster.csv", names.encode()))
    return {each.student: each for each in intake.read(folder, concepts, people)}


def one(folder: Path, concepts=CONCEPTS) -> intake.Submission:
    (found,) = read(folder, concepts=concepts).values()
    return found


@pytest.fixture
def the_class(tmp_path) -> Path:
    (tmp_path / "class").mkdir()
    return tmp_path / "class"


@pytest.mark.parametrize(
    "name",
    (
        "softmax.py",
        "exercises/softmax.py",
        "my course/exercises/softmax.py",
        "a/b/softmax.py",
        "Softmax.py",
        "softmax-1.py",
        "softmax (2).py",
        "softmax - Copy.py",
        "softmax_final_v2.py",
        "exercises.zip/softmax.py",
        "answers.py",
    ),
)
def test_a_file_is_found_where_it_lies_and_under_the_names_that_downloads_make(the_class, name):
    if ".zip/" in name:
        write(the_class / "ada" / "exercises.zip", zipped({name.partition("/")[2]: SOFTMAX}))
    else:
        write(the_class / "ada" / name)
    found = one(the_class)
    assert found.student == "ada" and found.files == {"softmax": SOFTMAX}
    assert found.refused == {"memory": "the submission has no memory.py"}
    assert bool(found.notes) == (Path(name).name != "softmax.py")
    if name == "answers.py":
        return
    write(the_class / "ada.zip", zipped({name: SOFTMAX} if ".zip/" not in name else {"softmax.py": SOFTMAX}))
    assert one(the_class).files == {"softmax": SOFTMAX}  # a folder and a zip of one student are one submission


def test_what_is_not_the_learners_is_not_taken(the_class):
    for name in (
        "gpukit/checks/softmax.py",
        "solutions/softmax.py",
        "tests/kernels/softmax.py",
        "__MACOSX/._softmax.py",
    ):
        write(the_class / "ada" / "course" / name, b"def softmax_fused(x): pass\n")
    assert one(the_class).files == {}
    write(the_class / "ada" / "course" / "exercises" / "softmax.py")
    assert one(the_class).files == {"softmax": SOFTMAX}


def test_a_notebook_in_the_place_of_the_file_is_named(the_class):
    write(the_class / "ada" / "notebooks" / "09_softmax-1.ipynb", b"{}")
    assert one(the_class).refused == {
        "softmax": "the submission has no softmax.py; notebooks/09_softmax-1.ipynb is the lesson: the answers are in "
        "exercises/softmax.py",
        "memory": "the submission has no memory.py",
    }


def test_of_twins_the_newest_name_is_taken_and_the_others_are_named(the_class):
    for name in ("softmax.py", "softmax-1.py", "softmax-10.py", "softmax-9.py"):
        write(the_class / "ada" / name, name.encode())
    found = one(the_class)
    assert found.files == {"softmax": b"softmax-10.py"}
    assert found.notes == (
        "softmax.py is there 4 times: softmax-10.py was taken, not softmax-1.py, softmax-9.py, softmax.py "
        "(files in exercises/ go first, then the highest number in a name)",
    )
    write(the_class / "ada" / "exercises" / "softmax.py", b"here")
    assert one(the_class).files == {"softmax": b"here"}


def test_two_files_that_define_the_functions_are_not_guessed_between(the_class):
    write(the_class / "ada" / "a.py")
    write(the_class / "ada" / "b.py")
    assert one(the_class).refused["softmax"] == (
        "the submission has no softmax.py, and a.py, b.py define its functions: name the right one softmax.py"
    )


@pytest.mark.parametrize(
    ("data", "sentence"),
    (
        (b"", "softmax.py is empty"),
        (b" \r\n\n", "softmax.py is empty"),
        (b"x = '\xff'\n", "softmax.py is not text in the encoding that it names, or in UTF-8: save it as UTF-8"),
        (
            "x = 1\n".encode("utf-16"),
            "softmax.py is not text in the encoding that it names, or in UTF-8: save it as UTF-8",
        ),
        (b"#" * (course.MAX_SOURCE_BYTES + 1), "softmax.py is larger than 1 MiB"),
    ),
)
def test_a_file_that_cannot_be_judged_is_a_sentence(the_class, data, sentence):
    write(the_class / "ada" / "softmax.py", data)
    write(
        the_class / "bob.zip",
        zipped({"softmax.py": data}) if len(data) < 99 else zipped({"softmax.py": data[:-1] + b"x"}),
    )
    assert {each.refused["softmax"] for each in read(the_class).values()} == {sentence}


def test_windows_files_are_welcome(the_class):
    data = b"\xef\xbb\xbf" + SOFTMAX.replace(b"\n", b"\r\n")
    write(the_class / "ada" / "softmax.py", data)
    assert one(the_class).files == {"softmax": data}
    write(the_class / "ada" / "softmax.py", SOFTMAX)
    write(the_class / "bob.zip", zipped({"exercises\\softmax.py": SOFTMAX}))
    assert read(the_class)["bob"].files == {"softmax": SOFTMAX}


def test_links_and_pipes_are_refused(the_class, tmp_path):
    secret = write(tmp_path / "solutions" / "softmax.py")
    (the_class / "file").mkdir()
    (the_class / "file" / "softmax.py").symlink_to(secret)
    (the_class / "folder").symlink_to(secret.parent)
    (the_class / "inner").mkdir()
    (the_class / "inner" / "exercises").symlink_to(secret.parent)
    (the_class / "zip.zip").symlink_to(write(tmp_path / "a.zip", zipped({"softmax.py": SOFTMAX})))
    (the_class / "pipe").mkdir()
    os.mkfifo(the_class / "pipe" / "softmax.py")
    os.mkfifo(the_class / "pipe of zips.zip")
    write(the_class / "packed.zip", zipped({"softmax.py": b"/etc/passwd"}, links=("softmax.py",)))
    found = {student: each.refused["softmax"] for student, each in read(the_class).items()}
    assert found.pop("inner").endswith("inner/exercises is a symbolic link, not a folder")
    assert found == {
        "file": "softmax.py is a symbolic link, not a file",
        "folder": "folder is a symbolic link, not a folder",
        "zip": "zip.zip is a symbolic link, not a file",
        "pipe": "softmax.py is not a file",
        "pipe of zips": "pipe of zips.zip is not a file",
        "packed": "softmax.py is a symbolic link, not a file",
    }


@pytest.mark.parametrize(
    "name", ("/softmax.py", "../softmax.py", "a/../../softmax.py", "C:/softmax.py", "..\\softmax.py")
)
def test_names_that_lead_out_of_a_zip_are_left_out_and_named(the_class, name):
    write(the_class / "ada.zip", zipped({name: SOFTMAX}))
    found = one(the_class)
    assert found.files == {} and found.refused["softmax"] == "the submission has no softmax.py; it is empty"
    assert found.notes == (f"names that lead out of the submission were left out: {name.replace(chr(92), '/')}",)


def test_bombs_and_broken_archives_are_one_sentence_each(the_class, monkeypatch):
    monkeypatch.setattr(packed, "MAX_ZIP_BYTES", 1 << 20)
    write(the_class / "bomb.zip", zipped({"softmax.py": bytes(64 << 20)}))
    write(the_class / "nested" / "a.zip", zipped({"softmax.py": bytes(64 << 20)}))
    write(the_class / "big.zip", os.urandom((1 << 20) + 1))
    write(the_class / "text.zip", b"not a zip")
    cut = zipped({"softmax.py": SOFTMAX * 99})
    write(the_class / "cut.zip", cut[:-30])
    write(the_class / "hurt.zip", cut[:60] + bytes(20) + cut[80:])
    locked = bytearray(zipped({"softmax.py": SOFTMAX}))
    for header in (6, locked.find(b"PK\x01\x02") + 8):
        locked[header] |= 1
    write(the_class / "locked.zip", bytes(locked))
    write(the_class / "rar" / "work.rar")
    write(the_class / "tar.tar.gz")
    (the_class / "none").mkdir()
    found = {student: each.refused["softmax"] for student, each in read(the_class).items()}
    assert found.pop("hurt").startswith("softmax.py cannot be read from its zip: ")
    assert found.pop("bomb").endswith("unpack to 64 MB") and "a.zip is a zip bomb: its " in found.pop("nested")
    assert found == {
        "big": "big.zip is 1 MB; at most 1 MB are read: hand in the .py files alone",
        "text": "text.zip is not a zip that can be read: File is not a zip file",
        "cut": "cut.zip is not a zip that can be read: File is not a zip file",
        "locked": "softmax.py cannot be read from its zip: it asks for a password",
        "rar": "the submission has no softmax.py; work.rar is an archive that is not read: hand in .py files or a zip",
        "tar.tar": "the submission has no softmax.py; tar.tar.gz is an archive that is not read: hand in .py files or a zip",
        "none": "the submission has no softmax.py; it is empty",
    }


def test_a_header_that_lies_about_the_size_reads_no_more_than_is_allowed(the_class):
    data = bytearray(zipped({"softmax.py": b"#" * (4 << 20)}))
    for at in (22, data.find(b"PK\x01\x02") + 24):  # the sizes, in the entry and in the directory
        data[at : at + 4] = (1000).to_bytes(4, "little")
    write(the_class / "ada.zip", bytes(data))
    assert "softmax" not in one(the_class).files


def test_a_gigabyte_is_refused_without_being_read(the_class):
    for path in (the_class / "ada" / "softmax.py", the_class / "bob.zip"):
        os.truncate(write(path), 1 << 30)  # a hole: it takes no room
    found = read(the_class)
    assert found["ada"].refused["softmax"] == "softmax.py is larger than 1 MiB"
    assert found["bob"].refused["softmax"] == "bob.zip is 1 GB; at most 100 MB are read: hand in the .py files alone"


def test_names_that_are_no_text_are_shown_and_read(the_class):
    folder = os.fsencode(the_class) + b"/\xff\x1b[2J"
    os.mkdir(folder)
    with open(folder + b"/softmax.py", "wb") as file:
        file.write(SOFTMAX)
    found = one(the_class)
    assert found.files == {"softmax": SOFTMAX} and found.student == r"\udcff\x1b[2J" and found.student.isprintable()


# -- LMSs and rosters
ROSTER = "\ufeffStudent_ID;Name;Email;canvas_id\r\ns1;Ada King Lovelace;ada@x;90311\r\ns2;Bó Smith;bo@x;\r\ns3;Bo Smith;b3@x;\r\ns4;Cy;;\r\n"


def test_canvas_and_moodle_downloads_are_told_apart_and_mapped_by_the_roster(the_class):
    write(the_class / "lovelaceadaking_90311_4455_exercises.zip", zipped({"softmax.py": b"old"}))
    write(the_class / "lovelaceadaking_LATE_90311_4456_exercises-1.zip", zipped({"softmax.py": b"new"}))
    write(the_class / "Bo Smith_1234567_assignsubmission_file_" / "softmax.py")
    write(the_class / "zoe_7_8_report.pdf", b"%PDF")
    write(the_class / "index.html", b"<p>")
    found = read(the_class, ROSTER)
    assert list(found) == ["s1", "s2", "s3", "s4", "Bo Smith (1234567)", "zoe"]
    assert found["s1"].files == {"softmax": b"new"} and found["s1"].email == "ada@x"
    assert any("exercises-1.zip/softmax.py was taken" in note for note in found["s1"].notes)
    assert any("calls lovelaceadaking_LATE_90311_4456_exercises-1.zip late" in note for note in found["s1"].notes)
    assert found["s2"].refused["softmax"] == found["s4"].refused["memory"] == "nothing was handed in"
    assert "may be s2 and s3: put the LMS's number of each" in found["Bo Smith (1234567)"].notes[0]
    assert found["Bo Smith (1234567)"].files == {"softmax": SOFTMAX}
    assert "zoe_7_8_report.pdf belongs to nobody on" in found["zoe"].notes[0]
    assert found["zoe"].refused["softmax"] == "the submission has no softmax.py"

    by_number = ROSTER.replace("b3@x;", "b3@x;1234567")
    assert read(the_class, by_number)["s3"].files == {"softmax": SOFTMAX}
    without = read(the_class)
    assert set(without) == {"lovelaceadaking", "Bo Smith", "zoe"} and without["Bo Smith"].name == "Bo Smith"


def test_two_of_one_name_are_not_taken_for_the_only_one_on_the_roster(the_class):
    write(the_class / "Cy_1_assignsubmission_file_" / "softmax.py", b"one")
    write(the_class / "Cy_2_assignsubmission_file_" / "softmax.py", b"two")
    roster = "student_id,name,moodle\ns4,Cy,\n"
    found = read(the_class, roster)
    assert [found[name].files.get("softmax") for name in ("s4", "Cy (1)", "Cy (2)")] == [None, b"one", b"two"]
    assert (
        "Cy_1_assignsubmission_file_ may be s4, and another submission bears the same name: put"
        in found["Cy (1)"].notes[0]
    )
    found = read(the_class, roster.replace("Cy,", "Cy,2"))
    assert found["s4"].files == {"softmax": b"two"} and "Cy (1)" in found


def test_names_that_downloads_make_are_no_news(the_class):
    write(the_class / "kimjo_1_10_softmax.py", b"one")
    write(the_class / "kimjo_1_11_memory-1.py", b"two")
    found = read(the_class)["kimjo"]
    assert found.notes == ("kimjo_1_11_memory-1.py was read as memory.py",)


def test_single_files_of_canvas_are_gathered_by_student(the_class):
    write(the_class / "kimjo_1_10_softmax-2.py", b"two")
    write(the_class / "kimjo_1_11_memory.py", b"three")
    write(the_class / "kimjo_2_12_softmax.py", b"another of that name")
    found = read(the_class)
    assert found["kimjo (1)"].files == {"softmax": b"two", "memory": b"three"}
    assert found["kimjo (2)"].files == {"softmax": b"another of that name"}


@pytest.mark.parametrize("top", ("", "submissions/"))
def test_an_lms_download_is_read_from_its_zip(tmp_path, top):
    inner = zipped({"exercises/softmax.py": SOFTMAX})
    files = {
        f"{top}lovelaceada_90311_4455_exercises.zip": inner,
        f"{top}Bo Smith_12_assignsubmission_file_/exercises.zip": inner,
        f"{top}cy/softmax.py": SOFTMAX,
    }
    found = read(write(tmp_path / "all.zip", zipped(files)))
    assert list(found) == ["Bo Smith", "cy", "lovelaceada"]
    assert all(each.files == {"softmax": SOFTMAX} for each in found.values())


@pytest.mark.parametrize(
    ("text", "sentence"),
    (
        ("student_id,name\na,A\nb,B\na,C\n", "line 4: student_id 'a' is that of line 2, too"),
        ("student_id,email\na,x@y\nb,X@y\n", "line 3: email 'X@y' is that of line 2, too"),
        ("student_id,canvas_id\na,7\nb,7\n", "line 3: canvas_id '7' is that of line 2, too"),
        ("name\nA\n", "first line must name the column student_id, got 'name'"),
        ("", "first line must name the column student_id"),
        ("student_id,name\n", "the roster names no student"),
        ("student_id,name\n,A\n", "line 2: student_id is empty"),
        ("student_id,name,name\na,A,B\n", "two columns called 'name'"),
        ("student_id\na,b\n", "line 2: 2 cells, but there are 1 columns"),
        ("student_id,submitted\na,2026-10-12T10:00\n", "line 2: submitted must be a date and time with its offset"),
        ('student_id,name\na,"B\n', "this is not CSV"),
    ),
)
def test_a_mistake_in_the_roster_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(roster.BadRoster, match=sentence):
        roster.read(write(tmp_path / "r.csv", text.encode()))


def test_a_roster_of_a_spreadsheet_is_read_in_its_encodings(tmp_path):
    text = "Student ID\tFirst name\tLast name\tsubmitted\ns1\tÅsa\tBerg\t2026-10-12T10:00:00+02:00\n"
    for encoding in ("utf-8-sig", "utf-16"):
        (found,) = roster.read(write(tmp_path / "r.csv", text.encode(encoding))).students
        assert (found.id, found.name, found.submitted) == ("s1", "Åsa Berg", "2026-10-12T10:00:00+02:00")
    with pytest.raises(roster.BadRoster, match="is not UTF-8 text: save it as CSV UTF-8"):
        roster.read(write(tmp_path / "r.csv", "student_id\nÅ\n".encode("latin-1")))


def test_nothing_to_grade_is_one_sentence(tmp_path):
    with pytest.raises(course.CourseError, match="there is no folder or zip"):
        intake.read(tmp_path / "none", CONCEPTS)
    with pytest.raises(course.CourseError, match="holds no submission: neither folders, nor zips"):
        intake.read(tmp_path, CONCEPTS)
    with pytest.raises(course.CourseError, match="is neither a folder nor a zip"):
        intake.read(write(tmp_path / "a.txt"), CONCEPTS)
