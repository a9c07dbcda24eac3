"""The byte-pair tokenizer: what it encodes it decodes, and it agrees with a straightforward second implementation of every
part, and with tiktoken where that is installed."""

import itertools
import random
import re
import sys
import unicodedata
from collections import Counter

import pytest

from gpukit.train import tokenizer
from gpukit.train.tokenizer import END, Tokenizer

TEXT = """def mean(values):
    # What's the mean of 1234 values? It isn't their sum!
    total = sum(values)\n\n\n    return total / len(values)   \n
class Größe:  \t"é, ß, 漢字, ١٢٣, x² and Ⅷ, 🙂🙂"
    width_in_pixels = 10 ** 6\r\n    they'll we've I'd 'tis YOU'RE\n
"""
TEXTS = [TEXT * 3, "the then there these them theme " * 20, "aaaaaaaaa abababab bababa " * 10]


@pytest.fixture(scope="module")
def learned() -> Tokenizer:
    return tokenizer.train(TEXTS, 340)


# ---- the same again, as simply as it can be said


def kind(character: str) -> str:
    if character in "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" or "\u2000" <= character <= "\u200a":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def pieces_by_hand(text: str) -> list[str]:
    """GPT-2's splitting as a loop over characters."""
    found, i = [], 0
    while i < len(text):
        short = next((s for s in ("'s", "'d", "'m", "'t", "'ll", "'ve", "'re") if text.startswith(s, i)), None)
        if short:
            found.append(short)
            i += len(short)
            continue
        start = i + 1 if text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "space" else i
        end = start
        while end < len(text) and kind(text[end]) == kind(text[start]):
            end += 1
        if kind(text[start]) == "space" and end < len(text) and end - i > 1:
            end -= 1  # the last white space before a word is left to the word
        found.append(text[i:end])
        i = end
    return found


def encode_by_hand(text: str, tokens: list[bytes]) -> list[int]:
    """In each piece the pair with the lowest rank is merged, one at a time, until there is none."""
    ids = []
    for piece in pieces_by_hand(text):
        parts = [bytes([byte]) for byte in piece.encode("utf-8", "surrogateescape")]
        while True:
            ranks = [(tokens.index(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in tokens]
            if not ranks:
                break
            _, i = min(ranks)
            parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
        ids += [tokens.index(part) for part in parts]
    return ids


def train_by_hand(texts: list[str], vocab_size: int) -> list[bytes]:
    """All pairs are counted anew for each new token; tokens are bytes, so ties are broken by the tokens' places."""
    words = Counter(piece.encode() for text in texts for piece in pieces_by_hand(text))
    split = {word: [bytes([byte]) for byte in word] for word in words}
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < vocab_size - 1:
        pairs = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        a, b = min(pairs, key=lambda pair: (-pairs[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        if a + b not in tokens:
            tokens.append(a + b)
        for parts in split.values():
            i = 0
            while i + 1 < len(parts):
                if (parts[i], parts[i + 1]) == (a, b):
                    parts[i : i + 2] = [a + b]
                i += 1
    return tokens


# ---- pieces


def random_texts(number: int) -> list[str]:
    """Texts of all kinds of characters, many of them white space, apostrophes and letters of a few."""
    source = random.Random(1)
    alphabet = [*"abcst  \n\t'''_-.,0123é²Ⅷ漢🙂\u0301\x00\x1c\xa0\u2003\u3000", "'re", "'ll", "  ", " the"]
    texts = ["".join(source.choices(alphabet, k=source.randrange(40))) for _ in range(number)]
    codes = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    return [*texts, *("".join(map(chr, source.choices(codes, k=30))) for _ in range(number // 2))]


def test_every_character_is_of_the_kind_that_unicode_says():
    of_a_kind: dict[str, list[str]] = {"letter": [], "number": [], "other": [], "space": []}
    for character in map(chr, range(sys.maxunicode + 1)):
        of_a_kind[kind(character)].append(character)
    for characters in of_a_kind.values():  # all of a kind are one piece; pytest would take minutes to show a difference
        found = [len(piece) for piece in tokenizer._pieces().findall("".join(characters))]
        assert found == [len(characters)]


def test_pieces_are_those_of_a_loop_over_characters():
    for text in (*TEXTS, *random_texts(2000)):
        found = tokenizer._pieces().findall(text)
        assert found == pieces_by_hand(text) and "".join(found) == text


def test_pieces_are_those_of_gpt2s_own_pattern():
    regex = pytest.importorskip("regex")
    pattern = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for text in (TEXT, "they're   here\n\n  now 12ab_c", " 'tis", "x  ", "\u3000漢 字²"):
        assert tokenizer._pieces().findall(text) == pattern.findall(text)


# ---- encoding


def test_encoding_merges_the_lowest_rank_until_none_is_left(learned):
    for text in (*TEXTS, *random_texts(400)):
        assert learned.encode(text) == encode_by_hand(text, learned.tokens)


def test_encoding_joins_by_bytes_as_tiktoken_does():
    """A token counts wherever its bytes come together, also where training made it of two others."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"bc", b"abc", b"ab"]
    for text in ("abc", "abcabc", "aabcc", "abab", "xabcbcab"):
        assert Tokenizer(tokens).encode(text) == encode_by_hand(text, tokens)


def test_tiktoken_agrees(learned):
    tiktoken = pytest.importorskip("tiktoken")
    theirs = tiktoken.Encoding(
        "learned",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=learned.ranks,
        special_tokens={END: learned.end},
    )
    common = [text for text in random_texts(2000) if not set(map(unicodedata.category, text)) & {"Cn", "Co"}]
    for text in (*TEXTS, *common[:2000], "a" * 300):
        assert learned.encode(text) == theirs.encode(text, disallowed_special=())
    assert learned.encode(f"x{END}y", special=True) == theirs.encode(f"x{END}y", allowed_special="all")


def test_decoding_gives_back_any_text_and_any_bytes(learned):
    for text in (*TEXTS, *random_texts(2000), "", END, f"a{END}{END}b", "x" * 5000):
        for special in (False, True):
            assert learned.decode(learned.encode(text, special=special)) == text
    source = random.Random(2)
    for _ in range(300):
        data = source.randbytes(source.randrange(60))
        assert learned.decode_bytes(learned.encode(data)) == data
    assert all(learned.decode_bytes(learned.encode(bytes([byte]))) == bytes([byte]) for byte in range(256))


def test_the_special_token_is_made_on_request_only(learned):
    assert learned.end == learned.vocab_size - 1 == 339
    assert learned.encode(f"{END}the{END}", special=True) == [339, *learned.encode("the"), 339]
    assert 339 not in learned.encode(f"{END}the{END}")


def test_bytes_that_are_no_text_are_shown_as_such(learned):
    assert learned.decode([0xE6, 0x41]) == "\ufffdA" and learned.decode_bytes([0xE6, 0x41]) == b"\xe6A"


@pytest.mark.parametrize("number", [-1, 340])
def test_a_number_that_is_no_token_is_named(learned, number):
    with pytest.raises(ValueError, match=rf"a token must be a number from 0 to 339, got {number}"):
        learned.decode([1, number])


def test_half_a_surrogate_pair_is_named(learned):
    sentence = r"character 2 of the text is '\\ud800', half of a surrogate pair"
    with pytest.raises(ValueError, match=sentence):
        learned.encode("ab\ud800")
    with pytest.raises(ValueError, match=sentence):
        tokenizer.train(["ab\ud800"], 300)


# ---- training


def test_training_finds_what_counting_anew_each_time_finds():
    source = random.Random(3)
    for round in range(4):
        texts = ["".join(source.choices("abc ", k=400)), *TEXTS[round % 3 : round % 3 + 1]]
        assert tokenizer.train(texts, 320).tokens == train_by_hand(texts, 320)


def test_two_ways_to_the_same_bytes_are_one_token():
    source = random.Random(4)
    texts = ["".join(source.choices("aab", k=60)) for _ in range(30)]
    learned = tokenizer.train(texts, 400)
    assert len(set(learned.tokens)) == len(learned.tokens) == 399
    assert learned.tokens == train_by_hand(texts, 400)


def test_training_does_not_depend_on_how_the_text_is_divided():
    lines = TEXT.splitlines(keepends=True)
    whole = tokenizer.train(["".join(lines)], 290).tokens
    assert tokenizer.train(["".join(lines)], 290).tokens == whole
    assert tokenizer.train([TEXT, TEXT], 290).tokens == whole  # twice the counts, the same order


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="train: vocab_size must be a whole number from 257"):
        tokenizer.train([TEXT], 256)
    with pytest.raises(
        ValueError, match="vocab_size must be at most 259 for this text, which has no more pairs to join, got 300"
    ):
        tokenizer.train(["abc"], 300)


# ---- files


def test_a_saved_tokenizer_is_the_same(learned, tmp_path):
    learned.save(tmp_path / "x.tiktoken")
    assert tokenizer.load(tmp_path / "x.tiktoken").tokens == learned.tokens


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda lines: [*lines[:5], "!!! 5", *lines[6:]], "line 6: must be base64, a space and 5, got '!!! 5'"),
        (lambda lines: lines[:7] + lines[8:], "line 8: must be base64, a space and 7"),
        (lambda lines: lines[:100], "the first 256 tokens must be the single bytes"),
        (lambda lines: [*lines, f"{lines[300].split()[0]} {len(lines)}"], "every token must differ from the others"),
    ],
)
def test_a_damaged_file_is_refused(learned, tmp_path, change, sentence):
    learned.save(tmp_path / "x.tiktoken")
    lines = (tmp_path / "x.tiktoken").read_text().splitlines()
    (tmp_path / "x.tiktoken").write_text("\n".join(change(lines)) + "\n")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tokenizer.load(tmp_path / "x.tiktoken")
