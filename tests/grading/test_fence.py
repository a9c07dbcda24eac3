"""The fence around a worker, wall by wall, with the lint off. A wall that this machine's kernel lacks is skipped."""

import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from gpukit import doctor
from gpukit.grading import fence
from gpukit.grading import judge as judging
from gpukit.grading.report import Report
from tests.grading.test_judge import ADD, fresh_server

judge_source = partial(judging.judge_source, seed=1)
ROOT = Path(__file__).resolve().parents[2]
landlock = pytest.mark.skipif(not fence._landlock_abi(), reason="this kernel has no Landlock")
seccomp = pytest.mark.skipif(not fence._has_seccomp(), reason="this kernel has no seccomp filters")


@pytest.fixture(autouse=True)
def lint_is_off(monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)


@pytest.fixture(scope="module", autouse=True)
def _close_servers():
    yield
    fresh_server()


def refused(statement: str) -> str:
    """What the learner reads whose function begins with `statement`; it must not get past it."""
    body = textwrap.indent(f"{statement}\nprint('GOT THROUGH')\nreturn a + b", "    ")
    verdict = judge_source(ADD, f"import ctypes, os, signal, socket, subprocess, sys\n\n\ndef add(a, b):\n{body}\n")
    assert verdict.state == "error" and "GOT THROUGH" not in verdict.detail, f"{verdict}\n{verdict.detail}"
    return str(verdict)


def call(name: str, *arguments: object) -> str:
    """A system call as a statement; it raises the OSError that the call ends with."""
    number = fence._SYSTEM_CALLS[name]
    values = ", ".join(["number", *(f"ctypes.c_long({value})" for value in arguments)])
    return (
        f"number = {number}\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"if libc.syscall({values}) == -1:\n    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
    )


# -------------------------------------------------------------------------------------------------------------- files
@landlock
@pytest.mark.parametrize(
    "path",
    [
        *(str(folder / "__init__.py") for folder in fence.HIDDEN if folder.name != "results"),
        str(ROOT / "solutions" / "softmax.py"),
        str(ROOT / "solutions" / "answers" / "softmax.txt"),
        str(ROOT / "exercises" / "softmax.py"),
        str(ROOT / "notebooks" / "09_softmax.ipynb"),
        str(ROOT / "tests" / "conftest.py"),
        str(Path.home()),
        "/etc/passwd",
        "/etc/hostname",
        "/",
        "/tmp",
        "/proc",
        "/proc/1/cmdline",
    ],
)
def test_what_a_worker_cannot_read(path):
    read = "os.listdir" if os.path.isdir(path) else "open"
    assert "PermissionError" in refused(f"{read}({path!r})")


@landlock
@pytest.mark.parametrize("name", ["mem", "maps", "environ", "cmdline", "fd", "root"])
def test_what_a_worker_cannot_read_of_other_processes(name, tmp_path):
    """Of its server and of the judge, which holds the seed and the references."""
    for pid in ("os.getppid()", os.getpid()):
        assert "PermissionError" in refused(
            f"os.listdir(f'/proc/{{{pid}}}/fd')" if name in ("fd", "root") else f"open(f'/proc/{{{pid}}}/{name}', 'rb')"
        )


@landlock
def test_the_exercises_of_others_cannot_be_read(tmp_path):
    other = tmp_path / "exercises" / "add.py"
    other.parent.mkdir()
    other.write_text("def add(a, b): return a + b")
    assert "PermissionError" in refused(f"exec(open({str(other)!r}).read())")
    (tmp_path / "link").symlink_to(other)
    assert "PermissionError" in refused(f"open({str(tmp_path / 'link')!r})")


@pytest.mark.parametrize(
    "statement",
    [
        "open(__file__, 'a')",
        "open(os.path.dirname(__file__) + '/x', 'w')",
        "open('/tmp/gpukit-x', 'w')",
        "open('/dev/shm/gpukit-x', 'w')",
        "os.mkdir(os.path.dirname(__file__) + '/x')",
        "os.unlink(__file__)",
        "os.rename(__file__, __file__ + '2')",
        "os.symlink('/', os.path.dirname(__file__) + '/x')",
        "os.mkfifo(os.path.dirname(__file__) + '/x')",
        "os.chmod(__file__, 0)",
        "os.utime(__file__)",
        "os.truncate(__file__, 0)",
        "os.memfd_create('x')",
    ],
)
@seccomp
def test_a_worker_writes_nothing(statement):
    assert "PermissionError" in refused(statement)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("files = [os.open('/dev/null', os.O_RDONLY) for _ in range(9999)]", "Too many open files"),
        ("held = [bytes(1 << 30) for _ in range(9999)]", "MemoryError"),
        ("import torch\nheld = [torch.empty(1 << 28) for _ in range(9999)]", "RuntimeError"),
        ("import mmap\nheld = [mmap.mmap(-1, 1 << 30) for _ in range(9999)]", "Cannot allocate memory"),
    ],
)
def test_limits(statement, error):
    assert error in refused(statement)


# --------------------------------------------------------------------------------------- processes, signals, the network
@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['/bin/sh', '-c', 'true'])",
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.kill(0, 0)",
        "os.killpg(os.getpgid(0), 0)",
        "os.kill(PID_OF_THE_TESTS, 0)",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.pidfd_open(os.getppid())",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', 80))",
        "socket.socketpair()",
    ],
)
@seccomp
def test_a_worker_is_alone(statement):
    assert "Error" in refused(statement.replace("PID_OF_THE_TESTS", str(os.getpid())))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ptrace", (16, "os.getppid()", 0, 0)),
        ("process_vm_readv", ("os.getppid()", 0, 0, 0, 0, 0)),
        ("process_vm_writev", ("os.getppid()", 0, 0, 0, 0, 0)),
        ("kill", ("os.getppid()", 0)),
        ("tgkill", ("os.getppid()", "os.getppid()", 0)),
        ("rt_sigqueueinfo", ("os.getppid()", 0, 0)),
        ("prctl", (1, 0)),
        ("unshare", (0x10000000,)),
        ("mount", (0, 0, 0, 0, 0)),
        ("bpf", (0, 0, 0)),
        ("keyctl", (0, 0)),
        ("userfaultfd", (0,)),
        ("perf_event_open", (0, 0, 0, 0, 0)),
        ("io_uring_setup", (8, 0)),
        ("shmget", (0, 4096, 0o1600)),
        ("mq_open", (0, 0)),
        ("clone", (17, 0, 0, 0, 0)),
        ("open_by_handle_at", (0, 0, 0)),
        ("execveat", (0, 0, 0, 0, 0)),
    ],
)
@seccomp
def test_system_calls_that_are_refused(name, arguments):
    assert "PermissionError" in refused(call(name, *arguments))


@pytest.mark.parametrize("name", ["clone3", "openat2"])
@seccomp
def test_calls_that_the_c_library_does_without(name):
    assert "Function not implemented" in refused(call(name, 0, 0))


@seccomp
def test_there_is_no_second_name_for_a_call():
    """x86-64 has one for each, and may have calls that are newer than the table."""
    for number in (0x40000000 + 39, 1000):
        statement = call("kill", 0).replace(str(fence._SYSTEM_CALLS["kill"]), str(number), 1)
        assert "Function not implemented" in refused(statement)


@pytest.mark.skipif(os.getuid() != 0, reason="only root has rights to lose")
def test_root_has_no_rights_left():
    read = "with open('/proc/self/status') as file:\n    raise ValueError([line for line in file if line.startswith('CapEff')])"
    assert "CapEff:\\t0000000000000000" in refused(read)


def test_what_a_worker_may_do():
    """What honest answers do: threads, modules that are loaded late, numpy, autograd."""
    source = (
        "import threading, statistics, fractions, torch, numpy\n\n\ndef add(a, b):\n"
        "    got = []\n    thread = threading.Thread(target=lambda: got.append(a + b))\n    thread.start()\n    thread.join()\n"
        "    x = torch.ones(3, requires_grad=True)\n    (x @ x).backward()\n    torch.linalg.inv(torch.eye(3))\n"
        "    numpy.linalg.inv(numpy.eye(3))\n    torch.randn(3).sort()\n    return got[0]\n"
    )
    verdict = judge_source(ADD, source)
    assert verdict.passed, f"{verdict}\n{verdict.detail}"


# ------------------------------------------------------------------------------------------------- a worker that compiles
def in_fence(device: str, folder: Path, code: str) -> str:
    """What a process prints that runs `code` behind the fence of `device`."""
    script = f"import os, subprocess\nfrom gpukit.grading.fence import Fence\nFence({device!r}, {str(folder)!r}).enter(60)\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    return done.stdout + done.stderr


@landlock
@seccomp
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(subprocess.run(['/bin/sh', '-c', 'echo hello'], capture_output=True, text=True).stdout)", r"^hello"),
        ("open(FOLDER + '/x', 'w').write('x'); os.rename(FOLDER + '/x', FOLDER + '/y'); print(os.listdir(FOLDER))", r"^\['y'\]"),
        ("open(FOLDER + '/x', 'wb').truncate(10 << 30)", "File too large"),
        ("open('/tmp/gpukit-x', 'w')", "PermissionError"),
        ("open(ROOT + '/gpukit/checks/softmax.py')", "PermissionError"),
        ("open(ROOT + '/exercises/softmax.py')", "PermissionError"),
        ("print(subprocess.run(['/bin/sh', '-c', 'cat /etc/passwd; kill -0 ' + str(os.getppid())], capture_output=True, text=True))", r"(?s)stdout=''.*ermi"),
        ("import socket; socket.socket()", "PermissionError"),
    ],
)  # fmt: skip
def test_a_worker_that_compiles_starts_programs_and_writes_into_its_folder(tmp_path, code, said):
    text = in_fence("compile", tmp_path, f"FOLDER, ROOT = {str(tmp_path)!r}, {str(ROOT)!r}\n{code}")
    assert re.search(said, text), text


# ------------------------------------------------------------------------------------------------------------ the tables
@pytest.mark.parametrize(
    ("column", "header", "prefix"),
    [
        (1, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
        (2, "/usr/include/asm-generic/unistd.h", "__NR(?:3264)?_"),
    ],
)
def test_numbers_of_system_calls(column, header, prefix):
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    known = dict(re.findall(rf"#define {prefix}(\w+) (\d+)", Path(header).read_text()))
    rows = [entry.split() for entry in fence._NUMBERS.replace("\n", " ").split(",")]
    assert len({row[0] for row in rows}) == len(rows)
    for row in rows:
        if row[0] in known:
            assert row[column] in (known[row[0]], "-"), row[0]
    assert set(fence._CONDITIONAL.split()) <= {row[0] for row in rows} >= {*fence._WRITING, *fence._STARTING}


# ------------------------------------------------------------------------------------------------------- what is active
def test_doctor_and_reports_say_what_is_active():
    line = fence.active()
    assert any(row.name == "fence" and row.found == line for row in doctor.examine())
    report = Report("exercises", Path("/course"))
    assert f'"fence": "{line}"' in report.as_json()
    assert line in report.as_markdown() and line in report.as_text() and line in report.as_junit()


def test_what_a_kernel_lacks_is_said(monkeypatch):
    monkeypatch.setattr(fence, "_landlock_abi", lambda: 0)
    fence.active.cache_clear()
    assert "lacks Landlock" in fence.active() and "files" in fence.active()
    monkeypatch.setattr(fence, "_landlock_abi", lambda: 1)
    fence.active.cache_clear()
    assert "Landlock 1 (files)" in fence.active()
    fence.active.cache_clear()
