"""What the text of a kernel in CUDA C++ may say, told before it is compiled: a sentence comes sooner than the fence, which
keeps the compiler from every file that it has no business with (gpukit/grading/fence.py).

Only what could make this reader see another text than the compiler is refused beside that: texts in quotes, lines that go on
in the next one, and old spellings of #.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 20_000
_DIRECTIVES = ("pragma unroll", "define", "undef", "ifdef", "ifndef", "if", "else", "elif", "endif")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_WORDS = re.compile(r"\b(asm|__asm\w*|_Pragma|__has_\w+|printf|vprintf|import|module)\b|(##|\?\?|%:|[\"'])")
_HARMLESS = re.compile(r'extern\s+"C"|_Pragma\s*\(\s*"unroll[\w ()]*"\s*\)')  # quotes that C++ needs
_QUOTE = "a kernel's text is not handed to the system: C++ without texts in quotes is enough"
_INSTEAD = {
    "asm": "the exercise is in C++: write what the compiler shall turn into instructions",
    "printf": "nobody would see it: the check says where a result is wrong",
    "vprintf": "nobody would see it: the check says where a result is wrong",
    '"': _QUOTE,
    "'": _QUOTE,
}


def refused(text: str) -> tuple[int, str, str] | None:
    """The line of the text, from 1, what it says there that it may not, and what to do instead; None if all is well."""
    if len(text) > MOST_CHARACTERS:
        return (
            1,
            f"a text of {len(text):,} characters",
            f"a kernel takes a few hundred, and {MOST_CHARACTERS:,} are the limit",
        )
    if found := re.search(r"\\[ \t]*(\n|\Z)", text):
        return _line(text, found.start()), "a line that goes on in the next one", "write it in one line"
    bare = _HARMLESS.sub(_spaces, _blanked(text))
    for found in re.finditer(r"^[ \t]*#[ \t]*(.*)", bare, re.MULTILINE):
        if not re.match(rf"({'|'.join(_DIRECTIVES)})\b", " ".join(found[1].split())):
            what = f"#{found[1].partition(' ')[0][:20]}"
            return (
                _line(text, found.start(1)),
                what,
                "the built-in types and functions are enough: float4, expf, fmaxf, threadIdx",
            )
    if found := _WORDS.search(bare):
        what = found[0]
        return _line(text, found.start()), what, _INSTEAD.get("asm" if "asm" in what else what, "a kernel does without")
    return None


def _blanked(text: str) -> str:
    """With spaces in the place of comments. From a quote on, where a comment may be none, the text stays as it is: `refused` ends
    there."""
    kept, at = [], 0
    while found := _COMMENT.search(text, at):
        if re.search(r"[\"']", _HARMLESS.sub("", text[at : found.start()])):
            break
        kept += [text[at : found.start()], _spaces(found)]
        at = found.end()
    return "".join([*kept, text[at:]])


def _spaces(found: re.Match) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
