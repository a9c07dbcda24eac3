"""Text that is on every machine, as one long row of token numbers, and batches drawn from it.

The text is the source code of Python's standard library: about 12 MB that need no download. A file belongs to the validation
part or to the training part by a hash of its name, so the parts stay the same when other files come or go. A Python of
another version has other files, and losses on them differ a little.

The text is tokenized once. The numbers of all files, with <|endoftext|> after each, are written as two NumPy arrays into the
user's cache (~/.cache/gpukit/train, or what GPUKIT_CACHE names), and read from there through a memory map: only what a batch
needs is loaded. Sequences are packed: a sequence may end in one file and go on in the next, and no token is padding.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpukit.accounting.arguments import whole
from gpukit.train import tokenizer
from gpukit.train.tokenizer import Tokenizer

# Tests are long lists of cases, and site-packages is not the same on two machines.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_SHARE = 1 / 20
_FORMAT = "1"  # of the cached files; a change makes all of them anew


def standard_library() -> Path:
    """The folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> list[Path]:
    """The Python files below `folder`, sorted by name, without tests and installed packages. Raises ValueError if there are
    none."""
    found = sorted(
        path
        for path in folder.rglob("*.py")
        if not _LEFT_OUT & set(path.relative_to(folder).parts)
        and not path.name.startswith("_sysconfigdata")  # how this Python was built, with this machine's paths
    )
    if not found:
        raise ValueError(f"data: there are no Python files in {folder}, and a text to train on is needed")
    return found


def is_validation(name: str) -> bool:
    """Whether the file of this name (relative to its folder, with "/") belongs to the validation part."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * VALIDATION_SHARE


def cache_folder() -> Path:
    """Where tokenized text is kept between runs."""
    base = os.environ.get("GPUKIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpukit")
    return Path(base) / "train"


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and the token numbers of the two parts of the text: arrays of uint16 or uint32, mapped from files."""

    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray


def prepare(
    vocab_size: int, folder: Path | None = None, cache: Path | None = None, say: Callable[[str], None] = print
) -> Corpus:
    """The text below `folder` (default: the standard library), tokenized with a vocabulary of `vocab_size` tokens, which is
    learned from the training part. The first call for a text takes some seconds, and the later ones read its result.

    Several processes may do this at the same time: each writes into a folder of its own, and the first to finish gives it
    its name. Raises ValueError for a folder without Python files, or with too little text.
    """
    folder, cache = folder or standard_library(), cache or cache_folder()
    documents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in source_files(folder)}
    key = hashlib.sha256(f"{_FORMAT} {vocab_size}".encode())
    for name, text in documents.items():
        key.update(f"\n{name} {len(text)} ".encode() + hashlib.sha256(text).digest())
    target = cache / key.hexdigest()[:24]
    if not target.is_dir():
        size = sum(map(len, documents.values()))
        say(f"tokenizing {len(documents):,} files, {size / 1e6:,.1f} MB, with a vocabulary of {vocab_size:,} (once)")
        _write({name: text.decode("utf-8", "replace") for name, text in documents.items()}, vocab_size, target)
    arrays = (np.load(target / f"{part}.npy", mmap_mode="r") for part in ("train", "validation"))
    return Corpus(tokenizer.load(target / "tokenizer.tiktoken"), *arrays)


def _write(documents: dict[str, str], vocab_size: int, target: Path) -> None:
    parts = {
        "train": [text for name, text in documents.items() if not is_validation(name)],
        "validation": [text for name, text in documents.items() if is_validation(name)],
    }
    for part, texts in parts.items():
        if not texts:
            raise ValueError(f"data: of {len(documents)} files none belongs to the {part} part; more files are needed")
    learned = tokenizer.train(parts["train"], vocab_size)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        learned.save(partial / "tokenizer.tiktoken")
        for part, texts in parts.items():
            np.save(partial / f"{part}.npy", tokenize(texts, learned))
        with contextlib.suppress(OSError):  # another process was faster, with the same result
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tokenize(texts: Iterable[str], learned: Tokenizer) -> np.ndarray:
    """The token numbers of all texts one after the other, each with <|endoftext|> after it: uint16 where the vocabulary
    fits, else uint32."""
    dtype = np.uint16 if learned.vocab_size <= 1 << 16 else np.uint32
    return np.concatenate([np.array([*learned.encode(text), learned.end], dtype=dtype) for text in texts])


class Batches:
    """Batches drawn at random, without end: `inputs, targets = next(batches)`, both int64 [batch, length]; the targets are
    the inputs one token later.

    The text is cut into windows of `length` tokens. An epoch takes every window once, in an order that depends on the seed;
    the next epoch cuts at other places. Where the sampler is in all this, two numbers say, `state()`: the seed, and how many
    sequences were drawn. A sampler made with them goes on exactly there.

    rank, world   of `world` processes, each draws its own part of the sequences. Together they draw in each round what one
                  process would draw in one batch, or in several, of the same size together
    Raises ValueError for a text that is shorter than two windows, and for numbers out of range.
    """

    def __init__(
        self, tokens: np.ndarray, batch: int, length: int, *, seed: int = 0, drawn: int = 0, rank: int = 0, world: int = 1
    ):  # fmt: skip
        self.tokens = tokens
        self.batch, self.length = whole("Batches", "batch", batch), whole("Batches", "length", length)
        self.seed = whole("Batches", "seed", seed, 0, 2**63 - 1)
        self.drawn = whole("Batches", "drawn", drawn, 0, 2**63 - 1)
        self.world = whole("Batches", "world", world)
        self.rank = whole("Batches", "rank", rank, 0, self.world - 1)
        self.windows = (len(tokens) - length) // length  # wherever below `length` the first one begins
        if self.windows < 1:
            raise ValueError(
                f"Batches: length must be at most {len(tokens) // 2:,}, half of the text's {len(tokens):,} tokens, got "
                f"{length:,}"
            )
        self._epoch = -1

    def state(self) -> tuple[int, int]:
        """The seed, and how many sequences all processes together have drawn."""
        return self.seed, self.drawn

    def _start(self, number: int) -> int:
        """Where in the text the sequence begins that is drawn as `number`, counted from 0."""
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._first = int(generator.integers(self.length))
            self._order = generator.permutation(self.windows)
            self._epoch = epoch
        return self._first + int(self._order[place]) * self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        first = self.drawn + self.rank * self.batch
        self.drawn += self.batch * self.world
        return _sequences(self.tokens, map(self._start, range(first, first + self.batch)), self.length)


def in_order(
    tokens: np.ndarray, batch: int, length: int, count: int, *, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` sequences, or as many as there are, spread evenly over the text and always the same, whatever `batch` and `world`
    are: for evaluation. They come in batches of at most `batch`, with shapes as those of `Batches`; of several processes each
    takes every world-th sequence. Raises ValueError for a text without a whole sequence."""
    there = (len(tokens) - 1) // length
    if there < 1:
        raise ValueError(f"in_order: length must be at most the text's {len(tokens) - 1:,} tokens, got {length:,}")
    taken = min(count, there)
    starts = [number * there // taken * length for number in range(rank, taken, world)]
    for first in range(0, len(starts), batch):
        yield _sequences(tokens, starts[first : first + batch], length)


def _sequences(tokens: np.ndarray, starts: Iterable[int], length: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    together = torch.from_numpy(rows)
    return together[:, :-1].contiguous(), together[:, 1:].contiguous()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. From pinned memory a GPU fetches it by itself while the CPU goes on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
