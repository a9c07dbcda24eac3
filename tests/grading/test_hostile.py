"""Learners' code that attacks the process it runs in, and processes of the grader that are killed or stopped: each costs one
verdict with a sentence, leaves no process behind, and the next exercise is graded. The lint is off here."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import gpukit
from gpukit import course
from gpukit.grading import judge as judging
from gpukit.grading import server
from tests.grading.test_fence import seccomp
from tests.grading.test_judge import ADD, DOUBLE, DOUBLE_SOURCE, fresh_server
from tests.waiting import until

RIGHT = "def add(a, b):\n    return a + b\n"
judge_source = partial(judging.judge_source, seed=1)


@pytest.fixture(autouse=True)
def lint_is_off(monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)


@pytest.fixture(scope="module", autouse=True)
def _close_servers():
    yield
    fresh_server()


def grading_processes(judge: int) -> set[int]:
    """The server that process `judge` has started, its workers and whatever they forked: all have one command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and re.search(rf"serve\(\d+, '\w+', {judge}\)", text):
            found.add(int(path.parent.name))
    return found


def add(body: str, **changes):
    source = f"import os, signal, sys, time\n\n\ndef add(a, b):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    return judge_source(replace(ADD, **changes), source)


def server_pid() -> int:
    return judging._server("cpu")._process.pid


def only_the_server_is_left() -> None:
    until(lambda: grading_processes(os.getpid()) <= {server._process.pid for server in judging._servers.values()})
    assert judge_source(ADD, RIGHT).passed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_a_server_that_is_killed_or_stopped_is_replaced(number):
    assert judge_source(ADD, RIGHT).passed
    before = server_pid()
    os.kill(before, number)
    assert judge_source(ADD, RIGHT).passed
    until(lambda: not os.path.exists(f"/proc/{before}"))
    only_the_server_is_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_compile_server_that_is_killed_or_stopped_is_replaced(number, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUKIT_CACHE", str(tmp_path))  # or nothing is compiled
    monkeypatch.setattr(judging.compiler, "_recent", {})
    before = judging._server("compile")._process.pid
    os.kill(before, number)
    assert judge_source(DOUBLE, DOUBLE_SOURCE).passed
    until(lambda: not os.path.exists(f"/proc/{before}"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_worker_that_somebody_kills_or_stops_costs_one_verdict(number):
    server = server_pid()

    def shoot() -> None:
        until(lambda: grading_processes(os.getpid()) - ours)
        os.kill((grading_processes(os.getpid()) - ours).pop(), number)

    ours = {each._process.pid for each in judging._servers.values()}
    thread = threading.Thread(target=shoot)
    thread.start()
    verdict = add("time.sleep(600)", timeout_s=5)
    thread.join()
    assert verdict.state == ("timeout" if number == signal.SIGSTOP else "crashed"), str(verdict)
    assert server_pid() == server
    only_the_server_is_left()


@pytest.mark.parametrize(
    ("body", "states"),
    [
        ("os.kill(os.getppid(), 9)\ntime.sleep(60)", {"crashed", "error"}),
        ("os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)", {"timeout", "crashed", "error"}),
        ("os.killpg(0, 9)", {"crashed", "error"}),
        ("os.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
        ("signal.alarm(1)\ntime.sleep(60)", {"crashed", "timeout"}),
        ("for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass", {"timeout"}),
        ("time.sleep(600)", {"timeout"}),
        ("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\nreturn a + b", {"pass", "error"}),
        pytest.param("while True: os.fork()", {"error"}, marks=seccomp),
        pytest.param("[os.fork() for _ in range(9)]\ntime.sleep(600)", {"error"}, marks=seccomp),
        ("import threading\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", {"error", "timeout", "crashed"}),
        ("files = [open('/dev/null') for _ in range(100_000)]", {"error"}),
        ("os.closerange(0, 1000)\nreturn 1", {"crashed", "error"}),
        ("for fd in range(3, 300):\n    try: os.write(fd, b'garbage' * 99)\n    except OSError: pass\nreturn 1", {"error"}),
        ("for fd in range(3, 300):\n    try: os.write(fd, b'\\1\\0\\0\\0' + b'\\xff' * 8)\n    except OSError: pass\nreturn 1", {"error"}),
        ("while True: print('x' * 100_000)", {"timeout"}),
        ("while True: os.write(2, b'\\x1b[2J' * 10_000)", {"timeout"}),
        ("sys.exit(0)", {"error"}),
        ("os._exit(0)", {"crashed"}),
        ("sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", {"crashed", "error", "timeout"}),
        ("return bytearray(1 << 45)", {"error"}),
        ("sys.stdout.close()\nsys.stdin.close()\nreturn a + b", {"pass"}),
        ("sys.settrace(None)\nsys.modules.clear()\nreturn a + b", {"pass", "error", "crashed"}),
    ],
)  # fmt: skip
def test_one_exercise_costs_one_verdict(body, states):
    verdict = add(body, timeout_s=2)
    assert verdict.state in states, str(verdict)
    assert verdict.passed or str(verdict).startswith("demo.add: "), str(verdict)
    only_the_server_is_left()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "time.sleep(600)",
        "try: os.fork() == 0 and os.setsid()\n    except OSError: pass\n    time.sleep(600)",
    ],
)
def test_a_killed_judge_leaves_no_process_and_no_folder(loop, stopped, tmp_path):
    """In the middle of a check, its server stopped or not."""
    script = (
        "from tests.grading.test_hostile import judging, replace, ADD\n"
        "judging.parts.lint = lambda *_, **__: None\n"
        f"judging.judge_source(ADD, '''import os, time\ndef add(a, b):\n    print(1)\n    {loop}''')\n"
    )
    root = str(Path(__file__).parents[2])
    judge = subprocess.Popen([sys.executable, "-c", script], cwd=root, env={**os.environ, "TMPDIR": str(tmp_path)})
    until(lambda: len(grading_processes(judge.pid)) > 1)
    assert any(tmp_path.glob("gpukit-*"))
    if stopped:
        os.kill(min(grading_processes(judge.pid)), signal.SIGSTOP)
    judge.kill()
    judge.wait()
    until(lambda: not grading_processes(judge.pid) and not any(tmp_path.glob("gpukit-*")))


def test_a_server_finds_what_has_left_its_workers_group():
    """Where a kernel has no fence that keeps a worker from starting processes."""
    script = """
import os, time
from gpukit.grading import server
server._prctl(server._PR_SET_CHILD_SUBREAPER, 1)
workers = []
for number in range(2):
    workers.append(os.fork())
    if workers[-1] == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()  # a daemon
            os.fork()
        time.sleep(600)
children = lambda: open(f"/proc/self/task/{os.getpid()}/children").read().split()
time.sleep(1)
assert server._end(workers[0], {workers[1]}) == -9
assert children() == [str(workers[1])], children()
assert server._end(workers[0], {workers[1]}) == -9, "once more is no error"
server._kill_children(set())
assert not children()
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_grading_process_runs_the_gpukit_that_judges(tmp_path):
    """Whatever other one is installed: its worker would speak another language, or believe other things. The server, like all
    that begin with IMPORT_GPUKIT."""
    (tmp_path / "gpukit").mkdir()
    (tmp_path / "gpukit" / "__init__.py").write_text("raise SystemExit('another gpukit')\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('a torch')\n")
    ours, theirs = socket.socketpair()
    serving = f"from gpukit.grading.server import serve; serve({theirs.fileno()}, 'cpu', 0)"
    start = f"{server.IMPORT_GPUKIT}print(gpukit.__file__); {serving}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start], env={"PYTHONPATH": str(tmp_path)}, cwd="/", pass_fds=(theirs.fileno(),), capture_output=True, text=True
    )  # fmt: skip
    ours.close(), theirs.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == gpukit.__file__


def test_a_kernel_without_a_grid_is_told_as_one():
    source = DOUBLE_SOURCE.replace("double_kernel[(triton.cdiv(x.numel(), 64),)](", "double_kernel(")
    assert source != DOUBLE_SOURCE
    verdict = judge_source(DOUBLE, source)
    assert "double_kernel is called without a grid: double_kernel[grid](...) launches it" in str(verdict), str(verdict)


def test_warnings_flip_no_verdict():
    """Neither the learner's nor those that a caller has turned into errors (here: all of them)."""
    source = 'import warnings\n\n\ndef add(a, b):\n    "\\d"\n    warnings.warn("careful")\n    return a + b\n'
    verdict = judge_source(ADD, source)
    assert verdict.passed and "careful" in verdict.detail


def test_what_a_learner_makes_of_an_exception_is_shown_as_text():
    verdict = add("raise ValueError('\\x1b[2J' + chr(0xd800) + '\\r' + 'x' * 9999)")
    assert verdict.diagnosis == "exception" and "\\x1b[2J\\ud800\\r" in str(verdict)
    assert all(len(line) <= 400 and line.isprintable() for line in verdict.lines)
    name = "type('E' * 9999 + chr(27) + chr(10) + 'second line', (Exception,), {})"
    verdict = add(f"raise {name}()")
    assert verdict.diagnosis == "exception"
    assert all(len(line) <= 400 and line.isprintable() for line in verdict.lines)


# ------------------------------------------------------------------------------------------- the text judged is the text run
@pytest.fixture
def start(tmp_path):
    """A course of one file, and what becomes of it as bytes."""
    for folder in ("notebooks", "exercises"):
        (tmp_path / folder).mkdir()

    def verdict(data: bytes, exercise_id: str = "start.bytes_moved"):
        (tmp_path / "exercises" / f"{exercise_id.partition('.')[0]}.py").write_bytes(data)
        return judging.judge(exercise_id, root=tmp_path, seed=1)

    return verdict


MOVED = "def bytes_moved(M, N, itemsize):\n    é = 2\n    return é * M * N * itemsize\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + MOVED.encode(),
        MOVED.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf# coding: utf-8\r\n" + MOVED.replace("\n", "\r\n").encode(),
        MOVED.replace("\n", "\r").encode(),
        b"# -*- coding: latin-1 -*-\n" + MOVED.encode("latin-1"),
        b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n" + MOVED.encode("cp1252"),
        b"\x0c" + MOVED.encode(),
    ],
)
def test_a_file_in_any_usual_encoding_is_welcome(start, data):
    verdict = start(data)
    assert verdict.passed, str(verdict)
    wrong = start(data.replace(b"    return", b"    return x +"))
    number = re.split(b"\r\n|\r|\n", data[: data.index(b"    return")]).__len__()
    assert f"exercises/start.py, line {number}" in str(wrong) and "return x +" in str(wrong)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"# coding: utf-7\n" + MOVED.encode("utf-7"), "is written in utf-7: save it as UTF-8"),
        (b"# coding: no-such\n", "not text in the encoding that it names"),
        (b"# coding: rot13\n", "is written in rot13"),
        (b"# coding: punycode\n" + b"a" * 1_000_000, "is written in punycode"),
        (MOVED.encode("utf-16"), "not text in the encoding"),
        (MOVED.encode("latin-1"), "not text in the encoding"),
        (b"\xef\xbb\xbf# coding: latin-1\n", "not text in the encoding"),
        (b"#" * (1 << 21), "is larger than 1 MiB"),
    ],
)
def test_a_file_that_hides_its_text_is_refused(start, data, said):
    verdict = start(data)
    assert verdict.state == "missing" and said in str(verdict)


def test_a_kernel_is_read_from_the_text_that_was_judged(start):
    """Triton reads a kernel's source from the file: with its encoding, its line ends and its line numbers."""
    source = (course.root(__file__) / "solutions" / "softmax.py").read_text(encoding="utf-8")
    source = source.replace("tl.exp(", "tl.exq(", 1).replace("import torch\n", "import torch\n\né = 1\n", 1)
    source = "# coding: latin-1\n" + source.replace("\n", "\r\n")
    verdict = start(source.encode("latin-1"), "softmax.fused")
    number = source[: source.index("tl.exq")].count("\n") + 1
    assert verdict.diagnosis == "does-not-compile" and f"line {number}" in str(verdict) and "tl.exq(" in str(verdict), (
        str(verdict)
    )
