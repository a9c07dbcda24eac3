"""What judge and worker say to each other: it arrives as it was sent, and a worker that lies gets a verdict."""

import json
import resource
import socket
import struct
from dataclasses import dataclass, replace

import pytest
import torch

from gpukit.grading import judge as judging
from gpukit.grading import messages, wire
from gpukit.grading.messages import AccessFacts, Failure, Fault, Job, LaunchFacts, Reply
from tests.grading.test_judge import ADD, DOUBLE, DOUBLE_SOURCE, judge_source

ACCESS = AccessFacts("load", "x_ptr", 11, 400, 13)
LAUNCH = LaunchFacts("double_kernel", (2, 1, 1), 2, 400, 300, 50, 0, (ACCESS,), {"x_ptr": 400}, 3)
FAILURE = Failure("ValueError", "no", 3, "x = y", False, Fault("race", "two", "store", "y_ptr", 12), "Traceback")


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture(scope="module", autouse=True)
def _close_server():
    yield
    if server := judging._servers.pop("cpu", None):
        server.close()


@pytest.mark.parametrize(
    "message",
    (
        Job("/tmp/f.py", "f", "cpu", 2, (0, 3), "gpukit.op:Op", (2, 1 << 20), True),
        Job("/tmp/f.py", "f", "function"),
        Reply(),
        Reply(error=FAILURE),
        Reply(error=replace(FAILURE, fault=None)),
        Reply(missing=True),
        Reply(output=(1, [2.5, None], "é"), counts={"calls": 3}, peak_bytes=1 << 40, largest_bytes=1 << 39),
        Reply(launches=(LAUNCH, LAUNCH), host_ops=(("add", 3),), changed=("x",), aliases=("y",), devices=("cpu",)),
    ),
)
def test_messages_arrive_as_they_were_sent(message, sockets):
    messages.send(sockets[0], message)
    assert messages.receive(sockets[1], type(message)) == message


def test_a_reply_adds_up_what_its_launches_moved():
    reply = Reply(launches=(LAUNCH, LAUNCH), copied_read_bytes=7, copied_write_bytes=9)
    assert (reply.read_bytes, reply.written_bytes, reply.loaded, reply.stored) == (807, 709, True, True)
    idle = replace(LAUNCH, load_bytes=0, store_bytes=0, atomic_bytes=0)
    assert not Reply(launches=(idle,)).loaded and not Reply(launches=(idle,)).stored
    assert Reply(launches=(replace(idle, atomic_bytes=4),)).stored


def test_a_learners_own_dataclass_is_no_message(sockets):
    @dataclass
    class Mine:
        y: int = 3

    messages.send(sockets[0], Reply(output=(Mine(), 2)))
    assert messages.receive(sockets[1], Reply).output[0].type == "Mine"


def lies():
    """Replies that no worker of ours sends, as plain data, each with the field that the error names."""
    true = messages._plain(Reply(error=FAILURE, launches=(LAUNCH,), host_ops=(("add", 3),), devices=("cpu",)))
    yield "Reply", None
    yield "Reply", 7
    yield "Reply", list(true.values())
    yield "Reply", {**true, "grade": "pass"}
    yield "Reply", {key: value for key, value in true.items() if key != "agree"}
    for field, values in {
        "agree": (1, None, "yes"),
        "missing": (0, "no"),
        "peak_bytes": (-1, True, 1.5, 1 << 63, None, "1"),
        "counts": ([1], {3: 4}, None),
        "outputs": ([torch.ones(1)], {0: torch.ones(1)}, torch.ones(1)),
        "devices": ("cpu", ["cpu"], (1,)),
        "host_ops": ((("add",),), (("add", 3, 4),), (("add", -3),), ("add",)),
        "launches": (3, ({},), (None,), [messages._plain(LAUNCH)]),
        "error": (3, "no", {}),
    }.items():
        for value in values:
            yield f"Reply.{field}", {**true, field: value}
    yield "Reply.error.line", {**true, "error": {**true["error"], "line": "3"}}
    yield "Reply.error.fault", {**true, "error": {**true["error"], "fault": {"what": "race"}}}
    for field, value in (("flops", -1), ("grid", (1, "2")), ("sizes", {"x": "large"}), ("accesses", ((1, 2),))):
        yield f"Reply.launches.{field}", {**true, "launches": ({**true["launches"][0], field: value},)}


@pytest.mark.parametrize(("name", "lie"), list(lies()))
def test_what_is_no_reply_is_malformed(name, lie, sockets):
    wire.send(sockets[0], lie)
    with pytest.raises(wire.Malformed, match=f"{name} is not what it should be"):
        messages.receive(sockets[1], Reply)


@pytest.mark.parametrize(
    "head",
    (
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"int": "ten"}',
        b'{"int": "0x1", "float": "1.0"}',
        b'{"float": 3}',
        b'{"what": 3}',
        b'{"foreign": [1, 2, 3]}',
        b'{"dict": [[{"list": []}, 1]]}',
        b'{"tensor": [0, "float32", [4], [1], 0]}',
        b'{"tensor": [1, "float32", [1000], [1], 0]}',
        b'{"tensor": [1, "float32", [2], [-1], 0]}',
        b'{"tensor": [1, "nn", [2], [1], 0]}',
        b'{"tensor": [1, "load", [2], [1], 0]}',
        b'{"tensor": [0.5, "float32", [2], [1], 0]}',
        b'{"list": [{"tensor": [1, "float32", [2], [1], 0]}, {"tensor": [1, "float32", [2], [1], 0]}]}',
    ),
)
def test_bytes_that_are_no_message_are_malformed(head, sockets):
    sizes = [len(head), 0, 8] if b"tensor" not in head else [len(head), 8]
    blobs = bytes(sum(sizes[1:]))
    if b'"tensor": [0,' in head:
        sizes, blobs = [len(head)], b""  # a tensor without its bytes
    sockets[0].sendall(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + head + blobs)
    with pytest.raises(wire.Malformed):
        wire.receive(sockets[1])


@pytest.mark.parametrize("start", (struct.pack("<I", 0), b"\xff" * 4, struct.pack("<IQ", 1, 1 << 40)))
def test_sizes_that_no_message_has_are_refused_before_they_are_read(start, sockets):
    sockets[0].sendall(start)
    with pytest.raises(wire.Malformed):
        wire.receive(sockets[1])


SENDS = (
    "next(x for x in gc.get_objects() if type(x) is socket.socket).sendall"  # what a worker says is said through one
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x" * 3000, "beside the numbers in tensors"),
        (torch.zeros(3000, dtype=torch.int8), "the tensors in its answers"),
    ],
)
def test_what_is_said_in_a_check_has_a_limit_in_all(message, said, sockets):
    allowance = wire.Allowance(text=8192, numbers=8192)
    for _ in range(2):
        wire.send(sockets[0], message)
        wire.receive(sockets[1], allowance=allowance)
    wire.send(sockets[0], message)
    with pytest.raises(wire.Malformed, match=said):
        wire.receive(sockets[1], allowance=allowance)


HOSTILE = """
from gpukit.grading import messages, wire
tell = wire.send

def lie(sock, reply):
    if reply["tape"] or reply["output"]:
        {lie}
    tell(sock, reply)

wire.send = lie
"""


@pytest.mark.parametrize(
    ("exercise", "source", "lie", "diagnosis"),
    (
        (ADD, "def add(a, b):\n    return a + b\n", "reply = 3", "malformed"),
        (ADD, "def add(a, b):\n    return a + b\n", "reply['peak_bytes'] = -1", "malformed"),
        (ADD, "def add(a, b):\n    return a + b\n", "reply['error'] = {'type': 'E'}", "malformed"),
        (ADD, "def add(a, b):\n    return a + b\n", "sock.sendall(b'GET / HTTP/1.1' * 100)", "malformed"),
        (ADD, "def add(a, b):\n    return a + b\n", "sock.close()", "crashed"),
        (ADD, "def add(a, b):\n    return a + b\n", "import os, signal; os.kill(os.getpid(), 40)", "crashed"),
        (DOUBLE, DOUBLE_SOURCE, "del reply['launches']", "malformed"),
        (DOUBLE, DOUBLE_SOURCE, "reply['outputs'] = list(reply['outputs'])", "malformed"),
        (DOUBLE, DOUBLE_SOURCE, "reply['tape'] = 3", "malformed"),
        (DOUBLE, DOUBLE_SOURCE, "reply['tape'] = '['", "not-your-kernel"),
    ),
)
def test_a_worker_that_lies_gets_a_verdict(exercise, source, lie, diagnosis, monkeypatch):
    """Past the fence the learner's code may change what the worker says; the judge has a sentence for it and no traceback."""
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    verdict = judge_source(exercise, HOSTILE.format(lie=lie) + source)
    assert (verdict.passed, verdict.diagnosis) == (False, diagnosis), str(verdict)
    assert "Traceback" not in str(verdict) and str(verdict).startswith(exercise.id)
    assert judge_source(ADD, "def add(a, b):\n    return a + b\n").passed


def test_a_well_formed_lie_that_breaks_a_rule_of_an_exercise_is_one_verdict(monkeypatch):
    def rule(case, peak_bytes):
        return 1 // peak_bytes and None

    exercise = replace(ADD, memory_rule=rule)
    source = "import torch\n\n\ndef add(a, b):\n    return int(torch.tensor(a) + b)\n"
    assert judge_source(exercise, source).passed
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    verdict = judge_source(exercise, HOSTILE.format(lie="reply['peak_bytes'] = 0") + source)
    assert (verdict.state, verdict.diagnosis) == ("error", "grader"), str(verdict)
    assert "the check itself failed" in str(verdict) and "in rule" in verdict.detail


@pytest.mark.parametrize(
    ("body", "text"),
    (
        ("return 10**5000", "an integer of 16,610 bits"),
        ("return -10**400", "an integer of 1,329 bits"),
        ("return type('', (), {})()", "returned a , expected an int"),
        ("return [[]] * 10**4", "returned a list"),
    ),
)
@pytest.mark.parametrize("tolerance", (0.0, 1e-9))
def test_results_that_are_hard_to_show(body, text, tolerance, monkeypatch):
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    verdict = judge_source(replace(ADD, tolerance=tolerance), f"def add(a, b):\n    {body}\n")
    assert verdict.state == "fail" and text in str(verdict), f"{verdict}\n{verdict.detail}"


def test_a_long_string_is_shown_in_part():
    exercise = replace(ADD, expected=lambda a, b: "sum")
    verdict = judge_source(exercise, "def add(a, b):\n    return 'ab' * 10**6\n")
    assert verdict.diagnosis == "values" and len(str(verdict)) < 1000


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return 'x' * (1 << 27)", "8 MiB beside the numbers in tensors"),
        ("return torch.zeros(1 << 25)", "the tensors in its answers have more than 64 MiB"),
        (
            "import struct; sock.sendall(struct.pack('<IQ', 1, 3 << 24) + b'[],' * (1 << 24))",
            "8 MiB beside the numbers in tensors",
        ),
    ],
)
def test_an_answer_without_measure_is_not_read(body, what, monkeypatch):
    """The judge needs no memory for it."""
    monkeypatch.setattr(judging.parts, "lint", lambda *_, **__: None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = f"import torch\n\n\ndef add(a, b):\n    {body if 'return' in body else 'return 1'}\n"
    verdict = judge_source(ADD, (HOSTILE.format(lie=body) if "sock" in body else "") + source)
    assert verdict.diagnosis == "malformed" and what in " ".join(str(verdict).split()), str(verdict)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10), "KiB"


def test_a_tensor_comes_without_the_memory_around_it():
    source = "import torch\n\nBUFFER = torch.zeros(1 << 25)\n\n\ndef add(a, b):\n    return BUFFER[7:9]\n"
    verdict = judge_source(replace(ADD, expected=lambda a, b: torch.zeros(2)), source)
    assert verdict.passed, f"{verdict}\n{verdict.detail}"


def test_the_wire_carries_json():
    """Nothing that is sent can run code where it is read."""
    blobs = []
    assert json.dumps(wire._encode(messages._plain(Reply(output=torch.ones(2))), blobs)) and len(blobs) == 1
