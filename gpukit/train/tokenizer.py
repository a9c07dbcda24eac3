"""A byte-pair tokenizer: text into numbers and back, and the training that decides which pieces of text get a number.

A token is a string of bytes. The first 256 tokens are the single bytes, so any text can be written. Training then looks for
the two neighboring tokens that occur together most often, makes one new token of them, and repeats this until the vocabulary is
as large as wanted. Encoding does the same joins on new text, the earliest learned first.

Text is first split into pieces (words with the space before them, numbers, punctuation, white space), and no token crosses
from one piece into the next. The pieces are those of GPT-2.

    tokenizer = train([text], vocab_size=1000)
    ids = tokenizer.encode("for i in range(10):")
    tokenizer.decode(ids)                               # "for i in range(10):"

Encoding gives what tiktoken gives with the same tokens, and `save` writes tiktoken's file format.
Sources: https://arxiv.org/abs/1508.07909 (byte-pair encoding of words), https://github.com/openai/tiktoken.
"""

from __future__ import annotations

import base64
import binascii
import functools
import heapq
import itertools
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpukit.accounting.arguments import whole

# The one special token: it stands between two documents, and no text is encoded to it by accident.
END = "<|endoftext|>"


@functools.cache
def _pieces() -> re.Pattern[str]:
    r"""GPT-2's pattern,  '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+  , for Python's own `re`.

    `re` has no \p{L} (letters) and \p{N} (numbers), so their characters are listed, as ranges, from Python's table of
    Unicode. Its \s has four control characters more than Unicode's white space, which is written out too."""
    letters, numbers = _ranges("L"), _ranges("N")
    space = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    return re.compile(
        rf"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{numbers}]+| ?[^{space}{letters}{numbers}]+"
        rf"|[{space}]+(?![^{space}])|[{space}]+"
    )


def _ranges(kind: str) -> str:
    """All characters whose Unicode category begins with `kind`, as "A-Za-z...", to be put between square brackets."""
    inside = [unicodedata.category(chr(code))[0] == kind for code in range(sys.maxunicode + 1)] + [False]
    edges = [code for code in range(len(inside)) if inside[code] != inside[code - 1]]
    return "".join(f"{chr(first)}-{chr(after - 1)}" for first, after in zip(edges[::2], edges[1::2], strict=True))


class Tokenizer:
    """tokens: the bytes of each token, in the order in which they were learned; the number of a token is its place.

    vocab_size   number of tokens, the special one included
    end          the number of the special token <|endoftext|>, the last one
    Raises ValueError where the first 256 tokens are not the single bytes, or a token is empty or there twice.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = list(tokens)
        self.ranks = {token: rank for rank, token in enumerate(self.tokens)}
        if self.tokens[:256] != [bytes([byte]) for byte in range(256)]:
            raise ValueError("Tokenizer: the first 256 tokens must be the single bytes, in their order")
        if b"" in self.ranks or len(self.ranks) < len(self.tokens):
            raise ValueError("Tokenizer: every token must differ from the others and have at least one byte")
        self.end = len(self.tokens)
        self.vocab_size = len(self.tokens) + 1
        # Pieces that were encoded before: most text is made of few different ones.
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str | bytes, *, special: bool = False) -> list[int]:
        """The numbers of the text's tokens. `special`: "<|endoftext|>" in the text becomes the special token; otherwise it is
        text like any other. Bytes need not be valid UTF-8. Raises ValueError for half of a surrogate pair in a str."""
        if isinstance(text, bytes):
            # A byte that is not UTF-8 goes through as a stand-in character.
            text = text.decode("utf-8", "surrogateescape")
        elif not text.isascii():
            _check_characters(text)
        if special and END in text:
            parts = text.split(END)
            return [i for part in parts[:-1] for i in (*self._ordinary(part), self.end)] + self._ordinary(parts[-1])
        return self._ordinary(text)

    def _ordinary(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _pieces().findall(text):
            known = self._known.get(piece)
            if known is None:
                known = self._join(piece.encode("utf-8", "surrogateescape"))
                if len(self._known) < 1_000_000:
                    self._known[piece] = known
            ids += known
        return ids

    def _join(self, piece: bytes) -> list[int]:
        """Begin with single bytes; of all neighbors that together are a token, join those whose token was learned first (the
        leftmost of equals), until none are left. The time grows with the square of the piece's length."""
        parts = [piece[i : i + 1] for i in range(len(piece))]
        none = len(self.tokens)
        joined = [self.ranks.get(a + b, none) for a, b in itertools.pairwise(parts)]
        while joined and (rank := min(joined)) < none:
            i = joined.index(rank)
            parts[i : i + 2] = [self.tokens[rank]]
            del joined[i]
            for j in (i - 1, i):  # the new part's neighbors on both sides
                if 0 <= j < len(joined):
                    joined[j] = self.ranks.get(parts[j] + parts[j + 1], none)
        return [self.ranks[part] for part in parts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the tokens stand for, one after the other. Raises ValueError for a number that is no token."""
        found = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"decode: a token must be a number from 0 to {self.vocab_size - 1:,}, got {i!r}")
            found.append(END.encode() if i == self.end else self.tokens[i])
        return b"".join(found)

    def decode(self, ids: Iterable[int]) -> str:
        """The text. A model may choose tokens that are not UTF-8 together; what is not becomes "\ufffd"."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, path: Path | str) -> None:
        """Write tiktoken's format: on each line a token's bytes in base64 and its number."""
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(self.tokens))
        Path(path).write_text("".join(lines), encoding="ascii")


def load(path: Path | str) -> Tokenizer:
    """The tokenizer that `save` wrote. Raises ValueError for a file of another kind, naming the line."""
    tokens = []
    for number, line in enumerate(Path(path).read_text(encoding="ascii", errors="replace").splitlines()):
        text, _, rank = line.partition(" ")
        try:
            tokens.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            rank = "?"
        if rank != str(number):
            raise ValueError(f"{path}, line {number + 1}: must be base64, a space and {number}, got {line[:60]!r}")
    return Tokenizer(tokens)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` tokens: 256 bytes, the joined ones, and <|endoftext|>.

    Of pairs that occur equally often the one with the smaller numbers is joined, so the result does not vary. Raises
    ValueError for fewer than 257 tokens, and for more than the texts have pairs to join.
    """
    vocab_size = whole("train", "vocab_size", vocab_size, 257)
    # Each different piece is kept once, with how often it occurs: of millions of words few are different.
    found: Counter[str] = Counter()
    for text in texts:
        _check_characters(text)
        found.update(_pieces().findall(text))
    pieces = [list(piece.encode()) for piece in found]
    times = list(found.values())

    counts: Counter[tuple[int, int]] = Counter()  # how often two tokens are neighbors
    where: dict[tuple[int, int], set[int]] = defaultdict(set)  # in which pieces they are, or were once
    for i, piece in enumerate(pieces):
        for pair in itertools.pairwise(piece):
            counts[pair] += times[i]
            where[pair].add(i)

    tokens = [bytes([byte]) for byte in range(256)]
    number = {token: i for i, token in enumerate(tokens)}
    heap = [(-count, pair) for pair, count in counts.items()]  # the most frequent pair comes out first
    heapq.heapify(heap)
    while len(tokens) < vocab_size - 1:
        if not heap:
            raise ValueError(
                f"train: vocab_size must be at most {len(tokens) + 1:,} for this text, which has no more pairs to join, "
                f"got {vocab_size:,}"
            )
        count, pair = heapq.heappop(heap)
        if -count != counts[pair]:  # joining other pairs has changed how often this one occurs
            if counts[pair] > 0:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        # Now and then two pairs give the same bytes, "a" + "bc" and "ab" + "c"; then the token is there already.
        token = tokens[pair[0]] + tokens[pair[1]]
        new = number.setdefault(token, len(tokens))
        if new == len(tokens):
            tokens.append(token)
        changed = set()
        for i in where.pop(pair):  # only the pieces that hold the pair are looked at again
            piece = pieces[i]
            for old in itertools.pairwise(piece):
                counts[old] -= times[i]
            pieces[i] = piece = _replace(piece, pair, new)
            for neighbors in itertools.pairwise(piece):
                counts[neighbors] += times[i]
                if new in neighbors:
                    where[neighbors].add(i)
                    changed.add(neighbors)
        for neighbors in changed:
            heapq.heappush(heap, (-counts[neighbors], neighbors))
    return Tokenizer(tokens)


def _replace(piece: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """`piece` with `new` in place of each occurrence of `pair`, from left to right."""
    out, i = [], 0
    while i < len(piece):
        if i + 1 < len(piece) and (piece[i], piece[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(piece[i])
            i += 1
    return out


def _check_characters(text: str) -> None:
    """Raises ValueError where UTF-8 has no bytes for a character of `text`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"encode: character {error.start:,} of the text is {text[error.start]!r}, half of a surrogate pair, which has no "
            "bytes in UTF-8; pass bytes instead"
        ) from None
