"""A process with torch and Triton loaded that forks a fresh worker for every check, in about 20 ms.

Why not multiprocessing's forkserver: it imports the caller's __main__ and sys.path into the child (so a learner's torch.py
would shadow the real one), hands down the caller's environment (so learner code could tell that it is being graded) and
leaves behind what a worker has started. This server starts with a clean environment, keeps the working directory off
sys.path, and kills every descendant of a worker when its check is over.

The judge holds one end of a control socket. `P` loads torch and Triton, without an answer; checks of plain functions do
without. `F` plus seconds of CPU, with two descriptors (the worker's socket, its stdout), forks; the answer is the worker's
pid, or minus the length of the reason that follows. `R` plus a pid ends that worker and whatever it left behind; the answer
is its exit status.

No process outlives the judge: when its socket closes the server ends with all its descendants (the kernel wakes it if it is
stopped), and when the server dies the kernel kills its workers. A server that is stopped, or does not answer, is killed, and
the next check starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from gpukit.grading import wire
from gpukit.grading.fence import Fence

# How a process of ours begins: with this gpukit, also where another one is installed; but no other file beside it may stand for
# a module of that name.
IMPORT_GPUKIT = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); import gpukit; "
    "sys.path.append(sys.path.pop(0)); "
)
_KEEP = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CC", "CXX")
_KEEP_PREFIX = ("LC_", "CUDA_", "NVIDIA_", "TRITON_", "XDG_")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


_ANSWER_S = 120.0  # for a request; loading torch on a busy machine is the longest
_LOOK_S = 0.5  # how often a process that is waited for is looked at


class ServerFailed(RuntimeError):
    """The grading process did not start; the message says why."""


class ServerGone(ServerFailed):
    """The grading process was killed, or stopped, or does not answer. Another one may do."""


class Stopped(TimeoutError):
    """A signal has stopped the worker."""


class Deadline:
    """When a worker has had its time: `seconds` of CPU, or as many asleep while the judge waits for it. What it spends in the
    queue for a CPU does not count, so a busy machine fails nobody. `with deadline:` stands around each wait."""

    def __init__(self, pid: int, seconds: float):
        self.pid, self.seconds = pid, seconds
        self._waited = self._next_look = 0.0
        self._since = time.monotonic()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_) -> None:
        self._waited += time.monotonic() - self._since

    def check(self) -> None:
        """Raises TimeoutError if the time is over, Stopped if the worker will not use what is left."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        waited = self._waited + now - self._since
        state, cpu, queued = _spent(self.pid)
        if state == "T":
            raise Stopped
        if cpu >= self.seconds or waited - cpu - queued >= self.seconds:
            raise TimeoutError


def _spent(pid: int) -> tuple[str, float, float]:
    """The state of a process ("T": stopped), its seconds of CPU and those that its first thread waited for a CPU; no more than
    "" and zeros where the system does not tell."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(rest[10]) + int(rest[11])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return "", 0.0, 0.0
    try:
        return state, cpu, int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return state, cpu, 0.0


class Worker:
    """One forked process: `sock` speaks gpukit.grading.wire, `stdout` is what the learner's code prints."""

    def __init__(self, server: Server, pid: int, sock: socket.socket, stdout: int):
        self.server, self.pid, self.sock, self.stdout = server, pid, sock, stdout
        self.allowance = wire.Allowance()
        self._code: int | None = None

    def end(self) -> int:
        """Kill the worker and everything it started. Its exit code, negative for a signal."""
        if self._code is None:
            self.sock.close()
            try:
                self._code = self.server._request(b"R", struct.pack("<i", self.pid))
            except ServerFailed:  # its death was the worker's; what the worker has started is in its group
                self._code = -signal.SIGKILL
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
        return self._code


class Server:
    """The judge's handle. `device` "cpu" runs kernels in Triton's interpreter, "cuda" on the GPU; "compile" runs none.
    `folder` is where the judge puts a learner's file, and the only one that a worker may use."""

    def __init__(self, device: str):
        self.device = device
        self.folder = tempfile.mkdtemp(prefix="gpukit-")
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_LOOK_S)
        environment = {k: v for k, v in os.environ.items() if k in _KEEP or k.startswith(_KEEP_PREFIX)}
        environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
        # NumPy's products of small blocks: two threads that wait for each other take many times the work's CPU.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        environment |= {"TMPDIR": self.folder, "TRITON_CACHE_DIR": self.folder, "CUDA_CACHE_PATH": self.folder}
        # torch.func looks for this folder, and would make it, which a worker may not.
        environment["TORCHINDUCTOR_CACHE_DIR"] = self.folder
        start = f"{IMPORT_GPUKIT}from gpukit.grading.server import serve; serve({theirs.fileno()}, {device!r}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            env=environment,
            pass_fds=(theirs.fileno(),),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal belongs to the judge
        )
        theirs.close()
        atexit.register(self.close)

    def prepare(self) -> None:
        """Have torch and Triton loaded, in the background."""
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(b"P")

    def fork(self, cpu_s: float) -> Worker:
        """A fresh worker, which the system kills if it uses much more than `cpu_s` of CPU. Raises ServerFailed with the reason
        if the server could not load what it needs, ServerGone if there is none any more."""
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            pid = self._request(b"F", struct.pack("<i", int(cpu_s) + 2), [theirs.fileno(), write_end])
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        return Worker(self, pid, ours, read_end)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        self._kill()

    def _kill(self) -> None:
        """Also where it is stopped; its workers die with it."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _request(self, kind: bytes, data: bytes, descriptors: list[int] | None = None) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [kind + data], descriptors or [])
                (number,) = struct.unpack("<i", self._answer(4))
                if kind == b"F" and number < 0:
                    reason = self._answer(-number).decode()
                    raise ServerFailed(f"the grading process could not load what it needs: {reason}")
            except OSError as error:
                self._kill()
                raise ServerGone(f"the grading process is gone: {error}") from None
            except BaseException as error:  # after Ctrl-C, its answer would be taken for that to the next request
                if not isinstance(error, ServerFailed):
                    self._kill()
                raise
            return number

    def _answer(self, size: int) -> bytes:
        data = b""
        end = time.monotonic() + _ANSWER_S
        while len(data) < size:
            try:
                part = self._control.recv(size - len(data))
            except TimeoutError:
                if _spent(self._process.pid)[0] == "T" or time.monotonic() > end:
                    raise
                continue
            if not part:
                raise ConnectionError("it ended")
            data += part
        return data


def serve(control_fd: int, device: str, judge: int) -> None:
    """The server's main loop. `judge` is the pid of the process that started it."""
    import gpukit.grading.worker as worker

    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # stopped or not, it will see the judge's end of the socket closed
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a worker become our children, so that we can end them
    control = socket.socket(fileno=control_fd)
    sys.dont_write_bytecode = True
    fence = Fence(device, tempfile.gettempdir())
    loaded, failed = False, ""
    workers: set[int] = set()
    control.settimeout(2.0)
    while os.getppid() == judge:
        try:
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            data = control.recv(4, socket.MSG_WAITALL) if kind in (b"F", b"R") else b""
        except TimeoutError:
            continue
        except OSError:
            break
        if not kind:
            break
        if kind == b"P" and not loaded:
            loaded = True
            try:
                worker.preload(device)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"[:400]
        elif kind == b"F":
            if failed:
                reason = failed.encode()
                control.sendall(struct.pack("<i", -len(reason)) + reason)
            else:
                sys.stdout.flush()
                gc.freeze()  # a collection in the worker would copy all that it looks at
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _become_worker(worker.run, fence, server, *struct.unpack("<i", data), *descriptors)
                workers.add(pid)
                control.sendall(struct.pack("<i", pid))
            for descriptor in descriptors:
                os.close(descriptor)
        elif kind == b"R":
            (pid,) = struct.unpack("<i", data)
            workers.discard(pid)
            control.sendall(struct.pack("<i", _end(pid, workers)))
    _kill_children(set())
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith("gpukit-"):  # ours, which a judge that was killed could not remove
        shutil.rmtree(folder, ignore_errors=True)


def _become_worker(run, fence: Fence, server: int, cpu_s: int, sock_fd: int, stdout_fd: int) -> None:
    """Turn this forked process into a worker; never returns."""
    code = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(code)
        os.dup2(stdout_fd, 1)
        os.dup2(stdout_fd, 2)
        os.close(stdout_fd)
        fence.enter(cpu_s)
        run(socket.socket(fileno=sock_fd))
        code = 0
    finally:
        os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(pid: int, others: set[int]) -> int:
    """Reap worker `pid` (after a moment to end by itself) and kill whatever it left behind."""
    try:
        status = _wait(pid, 0.3)
        if status is None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            status = _wait(pid, 5.0)
    except ChildProcessError:  # reaped before
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _kill_children(others)
    return -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def _kill_children(but: set[int]) -> None:
    """Kill all descendants but the workers `but` and theirs: the death of a child hands us its children, so look again until
    none is left."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        children = {int(pid) for pid in path.read_text().split()} - but if path.exists() else ()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
