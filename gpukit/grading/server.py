"""A process with torch and Triton loaded that forks a fresh worker for every check, in about 20 ms.

Why not multiprocessing's forkserver: it imports the caller's __main__ and sys.path into the child (so a learner's torch.py
would shadow the real one), hands down the caller's environment (so learner code could tell that it is being graded) and
leaves behind what a worker has started. This server starts with a clean environment, keeps the working directory off
sys.path, and kills every descendant of a worker when its check is over.

The judge holds one end of a control socket. `P` loads torch and Triton, without an answer; checks of plain functions do
without. `F` plus two descriptors (the worker's socket, its stdout) forks; the answer is the worker's pid, or
minus the length of the reason that follows. `R` plus a pid ends that worker and whatever it left behind; the answer is its
exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_KEEP = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CC", "CXX")
_KEEP_PREFIX = ("LC_", "CUDA_", "NVIDIA_", "TRITON_", "XDG_")
_PR_SET_CHILD_SUBREAPER = 36
_MEMORY_BYTES = 16 << 30  # a worker that asks for more gets MemoryError, and the machine stays usable


class ServerFailed(RuntimeError):
    """The grading process did not start; the message says why."""


class Worker:
    """One forked process: `sock` speaks gpukit.grading.wire, `stdout` is what the learner's code prints."""

    def __init__(self, server: Server, pid: int, sock: socket.socket, stdout: int):
        self.server, self.pid, self.sock, self.stdout = server, pid, sock, stdout
        self._code: int | None = None

    def end(self) -> int:
        """Kill the worker and everything it started. Its exit code, negative for a signal."""
        if self._code is None:
            self.sock.close()
            self._code = self.server._request(b"R" + struct.pack("<i", self.pid))
        return self._code


class Server:
    """The judge's handle. `device` "cpu" runs kernels in Triton's interpreter, "cuda" on the GPU; "compile" runs none."""

    def __init__(self, device: str):
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k in _KEEP or k.startswith(_KEEP_PREFIX)}
        environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
        start = (
            f"import sys; sys.path.append({_PACKAGE_PARENT!r}); "
            f"from gpukit.grading.server import serve; serve({theirs.fileno()}, {device!r})"
        )
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

    def fork(self) -> Worker:
        """A fresh worker. Raises ServerFailed with the reason if the server could not load what it needs."""
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            pid = self._request(b"F", [theirs.fileno(), write_end])
        except ServerFailed:
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
        if self.alive:
            self._process.kill()
            self._process.wait()

    def _request(self, message: bytes, descriptors: list[int] | None = None) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [message], descriptors or [])
                answer = self._control.recv(4)
                if len(answer) != 4:
                    raise ServerFailed("the grading process is gone")
                (number,) = struct.unpack("<i", answer)
                if message == b"F" and number < 0:
                    reason = self._control.recv(-number).decode()
                    raise ServerFailed(f"the grading process could not load what it needs: {reason}")
            except OSError as error:
                raise ServerFailed(f"the grading process is gone: {error}") from None
            return number


def serve(control_fd: int, device: str) -> None:
    """The server's main loop."""
    import gpukit.grading.worker as worker

    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    if sys.platform == "linux":  # orphans of a worker become our children, so that we can end them
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.dont_write_bytecode = True
    loaded, failed = False, ""
    control.settimeout(2.0)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 8, 2)
        except TimeoutError:
            if os.getppid() != parent:
                break
            continue
        except OSError:
            break
        if not message:
            break
        if message[:1] == b"P":
            if not loaded:
                loaded = True
                try:
                    worker.preload(device)
                except Exception as error:
                    failed = f"{type(error).__name__}: {error}"[:400]
            message = message[1:]
        if message[:1] == b"F":
            if failed:
                reason = failed.encode()
                control.sendall(struct.pack("<i", -len(reason)) + reason)
            else:
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _become_worker(worker.run, *descriptors)
                control.sendall(struct.pack("<i", pid))
            for descriptor in descriptors:
                os.close(descriptor)
        elif message[:1] == b"R":
            control.sendall(struct.pack("<i", _end(struct.unpack("<i", message[1:5])[0])))
    _kill_children()


def _become_worker(run, sock_fd: int, stdout_fd: int) -> None:
    """Turn this forked process into a worker; never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(stdout_fd, 1)
        os.dup2(stdout_fd, 2)
        os.close(stdout_fd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.environ["TRITON_INTERPRET"] == "1":  # CUDA maps far more address space than it uses
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        run(socket.socket(fileno=sock_fd))
        code = 0
    finally:
        os._exit(code)


def _end(pid: int) -> int:
    """Reap worker `pid` (after a moment to end by itself) and kill whatever it left behind."""
    status = _wait(pid, 0.3)
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = _wait(pid, 5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _kill_children()
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


def _kill_children() -> None:
    """Kill all descendants: the death of a child hands us its children, so look again until none is left."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(100):
        children = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
