"""A checkpoint is there whole or not at all; a damaged one is named, and the one before it is used."""

import errno
import json
import pickle
import resource

import pytest
import torch

from gpukit.train import checkpoint
from gpukit.train.checkpoint import CheckpointError

MODEL = {"layers": 2, "hidden": 16}


def write(folder, *steps):
    for step in steps:
        checkpoint.save(folder, step, {"w": torch.full((1000,), float(step))}, {"model": MODEL, "sampler": [1, step]})


def read(found):
    state = {"w": torch.empty(1000)}
    found.read(state)
    return state["w"].unique().tolist()


def test_what_is_saved_is_loaded_and_two_are_kept(tmp_path):
    write(tmp_path, 5, 10, 15)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000010", "step-00000015"]
    found = checkpoint.newest(tmp_path)
    assert found.step == 15 and found.info["sampler"] == [1, 15] and found.names() == {"w"} and read(found) == [15]


def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path):
    write(tmp_path, 5, 10)
    path = tmp_path / "step-00000010" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    for change, why in (
        (data[:-100], "bytes, and"),
        (data[:3000] + bytes([data[3000] ^ 1]) + data[3001:], "(another SHA-256)"),
        (None, "cannot be read"),
    ):
        path.write_bytes(change) if change is not None else path.unlink()
        said = []
        assert checkpoint.newest(tmp_path, said.append).step == 5
        assert len(said) == 1 and said[0].startswith("the checkpoint step-00000010 is damaged") and why in said[0]
    (tmp_path / "step-00000005" / "info.json").write_text("{")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.newest(tmp_path, said.append)


def test_one_that_was_not_finished_is_named(tmp_path):
    write(tmp_path, 5)
    (tmp_path / "step-00000010.partial").mkdir()
    said = []
    assert checkpoint.newest(tmp_path, said.append).step == 5
    assert said == ["step-00000010 was not written to its end, so it is not used"]


@pytest.mark.parametrize("limit", [100, 2000])
def test_a_file_that_cannot_grow_leaves_the_others(tmp_path, limit):
    write(tmp_path, 5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as error:
            write(tmp_path, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"] and checkpoint.newest(tmp_path).step == 5


def test_another_shape_is_named(tmp_path):
    write(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    checkpoint.check_shape(found, MODEL)
    with pytest.raises(CheckpointError, match=r"step-00000005 is of another model: hidden is 16 there and 32 here$"):
        checkpoint.check_shape(found, {**MODEL, "hidden": 32})


def test_info_is_plain(tmp_path):
    write(tmp_path, 5)
    info = json.loads((tmp_path / "step-00000005" / "info.json").read_text())
    assert info["step"] == 5 and info["model"] == MODEL and info["files"]["__0_0.distcp"]["bytes"] > 4000


@pytest.mark.parametrize("foreign", [print, [1, {"a": print}]])
def test_reading_runs_no_code_of_the_file(tmp_path, foreign):
    write(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    (found.path / ".metadata").write_bytes(pickle.dumps(foreign))
    for reading in (found.names, lambda: read(found)):
        with pytest.raises(CheckpointError, match=r"asks for builtins\.print, which no checkpoint of gpukit needs"):
            reading()


def test_only_tensors_are_read(tmp_path):
    checkpoint.save(tmp_path, 5, {"w": torch.zeros(2), "other": [1]}, {"model": MODEL, "sampler": [1, 5]})
    with pytest.raises(CheckpointError, match=r"asks for .*\.BytesStorageMetadata"):  # which PyTorch would unpickle
        checkpoint.newest(tmp_path).names()
