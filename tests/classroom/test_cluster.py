"""A Dask cluster judges the same, loses nothing with a worker, and a scheduler that is not there is a sentence."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from gpukit import course
from gpukit.classroom import pool
from tests.classroom import synthetic
from tests.classroom.test_class import command, differing, ended, judges, marked
from tests.waiting import until

pytest.importorskip("distributed", reason="the extra dask is not installed: pip install 'gpukit[dask]'")


class Cluster:
    """A scheduler and two workers, in processes of their own."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.folder = folder
        port = self.address.rpartition(":")[2]
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        until(lambda: "Scheduler at" in (folder / "scheduler.log").read_text())
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(folder / "scratch"))
        self.workers = [self._start(f"worker{n}", self.address, *options) for n in range(2)]
        until(lambda: all("Registered to" in (folder / f"worker{n}.log").read_text() for n in range(2)))

    def _start(self, name: str, *words: str) -> subprocess.Popen:
        module = f"distributed.cli.dask_{name.rstrip('01')}"
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen([sys.executable, "-m", module, *words], cwd=self.folder, stdout=log, stderr=log)

    def close(self):
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster")
    yield cluster
    cluster.close()


def until_line(run: subprocess.Popen, pattern: str) -> str:
    said = []
    for line in run.stdout:
        said.append(line)
        if re.match(pattern, line):
            break
    return "".join(said)


def test_a_worker_that_is_killed_and_a_scheduler_that_goes_away_lose_nothing(cluster, tmp_path):
    expected = synthetic.make(tmp_path)
    first = command(tmp_path, "--scheduler", cluster.address)
    said = until_line(first, r"\[2\d/60\]")
    cluster.scheduler.kill()
    out, err = first.communicate()
    assert first.returncode == 2, said + out + err
    assert re.fullmatch(
        r"gpukit: the Dask scheduler at \S+ does not answer any more: .*; what is graded is kept: .*\n", err
    )
    before = {mark.graded for row in marked(tmp_path).values() for mark in row.marks if mark.graded}
    assert len(before) >= 30
    cluster.close()

    (tmp_path / "again").mkdir()
    other = Cluster(tmp_path / "again")
    try:
        second = command(tmp_path, "--scheduler", other.address)
        said = until_line(second, r"\[3\d/60\]")
        victim = other.workers[0]
        theirs = judges(victim.pid)
        os.kill(victim.pid, signal.SIGKILL)
        out, err = second.communicate()
        assert (second.returncode, err) == (0, ""), said + out + err
        until(lambda: all(map(ended, theirs)))
    finally:
        other.close()
    assert differing(tmp_path, expected) == {}
    assert before <= {mark.graded for row in marked(tmp_path).values() for mark in row.marks}
    assert "fence of the workers: limits on memory" in out


@pytest.mark.parametrize(
    ("address", "sentence"),
    (
        ("nonsense", r"--scheduler must be like tcp://10\.0\.0\.5:8786, got 'nonsense'"),
        ("tcp://127.0.0.1:1", r"there is no Dask scheduler at tcp://127\.0\.0\.1:1: "),
    ),
)
def test_a_scheduler_that_is_not_there_is_a_sentence(monkeypatch, address, sentence):
    monkeypatch.setattr(pool, "_CONNECT_S", 1)
    with pytest.raises(course.CourseError, match=sentence):
        pool.Cluster(address)


def test_a_scheduler_without_workers_is_a_sentence(cluster, monkeypatch):
    monkeypatch.setattr(pool, "_WORKERS_S", 1)
    for worker in cluster.workers:
        worker.kill()
        worker.wait()
    until(lambda: "Lost all workers" in (cluster.folder / "scheduler.log").read_text())
    with pytest.raises(course.CourseError, match=r"the Dask scheduler at \S+ has no worker"):
        pool.Cluster(cluster.address)


def test_an_answer_that_is_gone_with_its_worker_is_asked_for_again(cluster, monkeypatch):
    """Dask says of a future that was done that it is lost, and the grader submits its work once more."""
    grader = pool.Cluster(cluster.address)
    try:
        lost, done = (grader._client.submit(lambda answer: answer, answer, pure=False) for answer in ("lost", "answer"))
        until(lambda: lost.done() and done.done())
        lost._state.lose()
        grader._work = {lost: "work"}
        monkeypatch.setattr(grader, "submit", lambda work: (grader._work.update({done: work}), grader._done.put(done)))
        grader._done.put(lost)
        assert grader.next() == ("work", "answer") and not grader._work
    finally:
        grader.close()
