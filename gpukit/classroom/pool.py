"""What judges a class's work: several processes of this machine, or the workers of a Dask cluster.

Both take Work and give Answers, in the order in which these are found. A judge is trusted code in a process that lives as long
as the run, so that what is slow to load is loaded once; a stranger's code runs where every check runs it, behind the fence.
Where such a process dies, its work comes back as an Answer with a fault, and another process takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection, wait
from typing import Protocol

import gpukit
from gpukit import course
from gpukit.grading import registry
from gpukit.grading.registry import Added
from gpukit.grading.server import IMPORT_GPUKIT
from gpukit.grading.verdict import Verdict, printable

_one_at_a_time = threading.Lock()  # a Dask worker has several threads; torch and the judge's servers are one each


@dataclass(frozen=True)
class Work:
    """A file to be judged on one exercise. `check_version`: as the process that asks has it; `own`: the exercise's concept,
    where it is not the course's."""

    exercise: str
    source: bytes
    file_hash: str
    check_version: str
    seed: int
    own: Added | None = None


@dataclass(frozen=True)
class Answer:
    """A verdict and the fence that stood around it, or why there is none: the grader's `fault`, or the `other` version of the
    checks than was asked for."""

    verdict: Verdict | None = None
    fence: str = ""
    torch: str = ""
    triton: str = ""
    seconds: float = 0.0
    fault: str = ""
    other: str = ""


class Pool(Protocol):
    """`capacity` works are judged at the same time; no more than twice as many should be submitted ahead."""

    capacity: int

    def submit(self, work: Work) -> None: ...

    def next(self) -> tuple[Work, Answer]:
        """Waits. Raises CourseError if nothing more can be judged."""

    def close(self) -> None: ...


def judged(work: Work) -> Answer:
    """Judge one file in this process."""
    from gpukit.classroom.versions import check_version
    from gpukit.grading import fence
    from gpukit.grading.judge import judge_source

    start = time.perf_counter()
    with _one_at_a_time:
        try:
            if work.own:
                registry.add(work.own)
            concept = work.exercise.partition(".")[0]
            if work.check_version != (here := check_version(concept)):
                return Answer(other=f"{here}, gpukit {gpukit.__version__} on {socket.gethostname()}")
            verdict = judge_source(
                registry.exercise(work.exercise), course.text(work.source), seed=work.seed, terminal=True
            )
        except Exception as error:
            return Answer(fault=printable(f"{type(error).__name__}: {error}".partition("\n")[0]))
    seconds = time.perf_counter() - start
    if (verdict.state, verdict.diagnosis) == ("error", "grader"):
        return Answer(fault=verdict.lines[0].removeprefix(f"{work.exercise}: "), seconds=seconds)
    return Answer(verdict, fence.active(), version_of("torch"), version_of("triton"), seconds)


def version_of(package: str) -> str:
    """The installed version of a package, without importing it; "" where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# ---- processes of this machine ------------------------------------------------------------------------------------------


class _Process:
    """One judge, its end of the socket and what it writes to stderr."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.said = tempfile.TemporaryFile()
        start = f"{IMPORT_GPUKIT}from gpukit.classroom.pool import serve; serve({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            pass_fds=(theirs.fileno(),),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            start_new_session=True,  # Ctrl-C in a terminal belongs to the run
        )
        theirs.close()
        self.work: Work | None = None

    def end(self, wait_s: float = 0.0) -> str:
        """End the process and those that it started; how it ended, and the last line that it wrote."""
        self.connection.close()
        if wait_s:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it sees the end of its socket, unless it is judging
                self.process.wait(wait_s)
        self.process.kill()  # its servers see the end of theirs
        code = self.process.wait()
        self.said.seek(0)
        lines = self.said.read()[-2000:].decode(errors="replace").split("\n")
        self.said.close()
        last = next((line for line in reversed(lines) if line.strip()), "")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{how}{f': {printable(last)}' if last else ''}"


class Local:
    """`jobs` processes of this machine."""

    def __init__(self, jobs: int):
        self.capacity = jobs
        self._queue: deque[Work] = deque()
        self._processes: list[_Process] = []
        self._deaths = 0  # in a row

    def submit(self, work: Work) -> None:
        self._queue.append(work)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue:
            free = next((each for each in self._processes if each.work is None), None)
            if free is None:
                if len(self._processes) == self.capacity:
                    return
                self._processes.append(free := _Process())
            free.work = self._queue.popleft()
            with contextlib.suppress(OSError):  # it has died: `next` will see that
                free.connection.send(free.work)

    def next(self) -> tuple[Work, Answer]:
        ready = wait([each.connection for each in self._processes if each.work])[0]
        process = next(each for each in self._processes if each.connection is ready)
        work = process.work
        try:
            answer = process.connection.recv()
        except (EOFError, OSError):
            answer = None
        if answer is None or answer.fault:  # what failed once may have left something behind
            self._processes.remove(process)
            how = process.end()
        if answer is None:
            self._deaths += 1
            if self._deaths > 2 * self.capacity + 1:
                raise course.CourseError(f"the processes that grade end without an answer; the last one {how}")
            answer = Answer(fault=f"the process that graded it {how}")
        else:
            self._deaths = 0
            process.work = None
        self._hand_out()
        return work, answer

    def close(self) -> None:
        for process in self._processes:
            process.end(0.0 if process.work else 10.0)
        self._processes.clear()


def serve(descriptor: int) -> None:
    """The main loop of a process that judges: it ends with the run that it belongs to."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(judged(connection.recv()))


# ---- a Dask cluster --------------------------------------------------------------------------------------------------------
_ADDRESS = re.compile(r"(\w+://)?[^\s:/]+:\d+")
_CONNECT_S, _WORKERS_S = 20, 60


class Cluster:
    """The workers of the Dask scheduler at `address`, where the same gpukit must be installed. What a lost worker had is done
    again by another one: that is Dask's part. Raises CourseError."""

    def __init__(self, address: str):
        if not _ADDRESS.fullmatch(address):
            raise course.CourseError(f"--scheduler must be like tcp://10.0.0.5:8786, got {address!r}")
        try:
            import distributed
        except ImportError:
            raise course.CourseError("--scheduler needs the package distributed: pip install 'gpukit[dask]'") from None
        for name in ("distributed", "distributed.client", "distributed.core"):  # what it logs is said below, once
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self.address = address
        self._work: dict = {}  # by future
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        try:
            self._client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise course.CourseError(f"there is no Dask scheduler at {address}: {_line(error)}") from None
        try:
            self._client.wait_for_workers(1, timeout=_WORKERS_S)
            self.capacity = len(self._client.scheduler_info(n_workers=-1)["workers"])
        except Exception as error:
            self.close()
            raise course.CourseError(f"the Dask scheduler at {address} has no worker: {_line(error)}") from None

    def submit(self, work: Work) -> None:
        with self._plainly():
            future = self._client.submit(judged, work, pure=False)
            self._work[future] = work
            future.add_done_callback(self._done.put)

    def next(self) -> tuple[Work, Answer]:
        with self._plainly():
            while True:
                with contextlib.suppress(queue.Empty):
                    future = self._done.get(timeout=1)
                    if future.status != "lost":
                        break
                    self.submit(self._work.pop(future))  # the worker that had the answer is gone
                if self._client.status not in ("running", "connecting"):
                    raise ConnectionError("it is gone")
            if future.status == "cancelled":
                raise ConnectionError("it is gone, and has forgotten what it was to do")
            work = self._work.pop(future)
            if future.status == "finished":
                return work, future.result()
            error = future.exception()
            if isinstance(error, ImportError):
                raise course.CourseError(f"the cluster at {self.address} lacks a package: {_line(error)}")
            return work, Answer(fault=f"on the cluster: {_line(error)}")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.cancel(list(self._work))
        with contextlib.suppress(Exception):
            self._client.close(timeout=5)

    @contextlib.contextmanager
    def _plainly(self):
        try:
            yield
        except (course.CourseError, KeyboardInterrupt):
            raise
        except Exception as error:
            text = f"the Dask scheduler at {self.address} does not answer any more: {_line(error)}"
            raise course.CourseError(f"{text}; what is graded is kept: run the same command again to go on") from None


def _line(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}".partition("\n")[0])[:300]


def pool(jobs: int, scheduler: str = "") -> Local | Cluster:
    """Raises CourseError."""
    return Cluster(scheduler) if scheduler else Local(jobs)
