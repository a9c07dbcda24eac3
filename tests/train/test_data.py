"""The text is tokenized once and divided the same everywhere, and batches can be drawn again from two numbers."""

import numpy as np
import pytest
import torch

from gpukit.train import data, tokenizer
from gpukit.train.data import Batches
from gpukit.train.tokenizer import Tokenizer
from tests.train import corpus

TOKENS = np.arange(1000, dtype=np.uint16)


def test_the_standard_library_is_there():
    files = data.source_files(data.standard_library())
    names = [path.name for path in files]
    assert "argparse.py" in names and files == sorted(files) and not any(name.startswith("test_") for name in names[:3])


def test_text_is_tokenized_once_and_anew_when_it_changes(tmp_path, monkeypatch):
    first = corpus.prepared(tmp_path)
    assert first.train.dtype == np.uint16 and len(first.train) > 10 * len(first.validation) > 0
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "train", lambda *_: pytest.fail("the text is tokenized a second time"))
        again = data.prepare(300, tmp_path / "text", tmp_path / "cache")
    assert isinstance(again.train, np.memmap) and np.array_equal(first.train, again.train)
    (tmp_path / "text" / "file00.py").write_text("another text")
    said = []
    data.prepare(300, tmp_path / "text", tmp_path / "cache", say=said.append)
    assert said and said[0].startswith("tokenizing 60 files") and len(list((tmp_path / "cache").iterdir())) == 2


def test_parts_hold_whole_files_with_an_end_after_each(tmp_path):
    found = corpus.prepared(tmp_path)
    texts = {path.name: path.read_text() for path in data.source_files(tmp_path / "text")}
    for part, wanted in ((found.train, False), (found.validation, True)):
        decoded = found.tokenizer.decode(part.tolist()).split(tokenizer.END)
        assert decoded == [*(text for name, text in texts.items() if data.is_validation(name) is wanted), ""]


def test_a_folder_without_files_is_named(tmp_path):
    with pytest.raises(ValueError, match="there are no Python files in"):
        data.prepare(300, tmp_path, tmp_path / "cache")


def test_large_vocabularies_take_four_bytes():
    tokens = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    assert data.tokenize(["a"], Tokenizer(tokens)).dtype == np.uint32


def test_an_epoch_takes_every_window_once_and_targets_are_one_later():
    batches = Batches(TOKENS, 3, 10, seed=7)
    assert batches.windows == 99
    for _ in range(2):
        firsts = []
        for _ in range(33):
            x, y = next(batches)
            assert x.shape == (3, 10) and x.dtype == torch.int64 and torch.equal(y, x + 1)
            firsts += x[:, 0].tolist()
        assert len({first // 10 for first in firsts}) == 99 and len({first % 10 for first in firsts}) == 1


def test_a_sampler_goes_on_from_two_numbers():
    batches = Batches(TOKENS, 4, 10, seed=3)
    for _ in range(30):
        next(batches)
    seed, drawn = batches.state()
    again = Batches(TOKENS, 4, 10, seed=seed, drawn=drawn)
    for _ in range(30):
        assert torch.equal(next(batches)[0], next(again)[0])


def test_processes_share_a_batch():
    alone = Batches(TOKENS, 4, 10, seed=3)
    two = [Batches(TOKENS, 2, 10, seed=3, rank=rank, world=2) for rank in range(2)]
    for _ in range(60):
        assert torch.equal(next(alone)[0], torch.cat([next(each)[0] for each in two]))
    assert alone.state() == two[0].state() == two[1].state()


def test_evaluation_takes_the_same_sequences_from_the_whole_text():
    """Whatever the size of a batch and the number of processes."""
    alone = torch.cat([x for x, _ in data.in_order(TOKENS, 2, 10, 5)])
    assert alone[:, 0].tolist() == [0, 190, 390, 590, 790]
    assert torch.equal(alone, torch.cat([x for x, _ in data.in_order(TOKENS, 4, 10, 5)]))
    shares = [torch.cat([x for x, _ in data.in_order(TOKENS, 2, 10, 5, rank=rank, world=2)]) for rank in range(2)]
    assert torch.equal(alone[::2], shares[0]) and torch.equal(alone[1::2], shares[1])


def test_a_text_that_is_too_short_is_named():
    with pytest.raises(ValueError, match="length must be at most 500, half of the text's 1,000 tokens, got 501"):
        Batches(TOKENS, 1, 501)
    with pytest.raises(ValueError, match="length must be at most the text's 999 tokens, got 1,000"):
        next(data.in_order(TOKENS, 1, 1000, 1))
