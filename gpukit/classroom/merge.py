"""A learner's file brought to a new stub: what the learner wrote and what the course changed, put together line by line.

A file of exercises is cut at the rules that name them (`# ---- softmax.fused`), and each section is merged for itself. Both
sides' changes are changes of the old stub; where they touch different lines, both are made. In a gap the learner's text wins.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

RULE = re.compile(r"^# -{4,} (\w+\.\w+)$", re.MULTILINE)  # above each exercise of a file
MARK = "# your code here"  # in the first line of a gap
MAX_LINES = 20_000  # of a file that is compared line by line
_Edit = tuple[int, int, list[str]]  # lines lo to hi of the old text become these


@dataclass(frozen=True)
class Merged:
    """The merged text, and by exercise (or "", the whole file) why the learner has to look: a part of a sentence."""

    text: str
    to_do: dict[str, str]


def merge(old: str | None, mine: str, new: str) -> Merged:
    """The new stub with everything that the learner's file `mine` adds to the old stub. `old` is None where it is not known.

    All three are texts with plain line ends. What could not be kept in place is named in `to_do`: the caller keeps `mine`.
    """
    if mine == new or old == new:
        return Merged(mine, {})
    if mine.count("\n") > MAX_LINES:
        return Merged(new, {"": f"it has more than {MAX_LINES:,} lines"})
    if old is None:
        if signatures(new).items() <= signatures(mine).items():
            return Merged(mine, {})
        return Merged(new, {"": "what it was handed out as is not known, and its functions have other arguments"})
    if _size(new, mine) < _size(old, mine):  # merged already, by an update that was interrupted, or by hand
        return Merged(mine, {})
    parts = [_sections(text) for text in (old, mine, new)]
    if parts[0] is None or parts[1] is None or parts[2] is None or [*parts[0]] != [*parts[1]]:
        parts = [{"": text} for text in (old, mine, new)]  # the learner took rules out: the file is one section
    olds, mines, news = parts
    made, to_do = [], {}
    for name, section in news.items():
        text, why = _merged(olds.get(name), mines.get(name), section)
        made.append(text)
        to_do |= {name: why} if why else {}
    for name in olds.keys() - news.keys():
        if mines[name] != olds[name]:
            to_do[name] = "the new release has no such exercise"
    text = "".join(made)
    if _parses(mine) and not _parses(text):
        return Merged(new, {"": "what you wrote does not fit into the new stub"})
    return Merged(text, to_do)


def section(text: str, name: str) -> tuple[int, int] | None:
    """Where the section of exercise `name` begins and ends in a file's text; None if no rule, or more than one, names it."""
    rules = list(RULE.finditer(text))
    found = [i for i, rule in enumerate(rules) if rule[1] == name]
    if len(found) != 1:
        return None
    (i,) = found
    return rules[i].start(), rules[i + 1].start() if i + 1 < len(rules) else len(text)


def signatures(source: str) -> dict[str, str]:
    """The parameters of each function in a text, without annotations; empty for a text that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def _sections(text: str) -> dict[str, str] | None:
    """What stands above the first rule, as "", and each exercise's section. None if two rules name one exercise."""
    starts = [(rule[1], rule.start()) for rule in RULE.finditer(text)]
    names = ["", *(name for name, _ in starts)]
    if len(set(names)) < len(names):
        return None
    places = [0, *(start for _, start in starts), len(text)]
    return {name: text[places[i] : places[i + 1]] for i, name in enumerate(names)}


def _merged(old: str | None, mine: str | None, new: str) -> tuple[str, str]:
    """One section, and why the learner has to look at it, or ""."""
    if old is None or mine is None or mine == old:
        return new, ""
    wanted, had = signatures(new), signatures(old)
    changed = [name for name in had if wanted.get(name) != had[name]]
    if changed:
        return new, f"{' and '.join(changed)} {'has' if len(changed) == 1 else 'have'} other arguments now"
    lines, clash = _combined(old.split("\n"), mine.split("\n"), new.split("\n"))
    return "\n".join(lines), "you and the new release changed the same lines" if clash else ""


def _combined(old: list[str], mine: list[str], new: list[str]) -> tuple[list[str], bool]:
    """`old` with the edits of both, and whether some of them met outside what the learner may fill in."""
    ours, theirs = _edits(old, mine), _edits(old, new)
    gaps = _gaps(old)
    clash = False
    for edit in list(ours):
        for other in [each for each in theirs if _meet(edit, each)]:
            answers = any(edit[0] < hi and lo < edit[1] for lo, hi in gaps)
            if other == edit or (answers and edit[0] <= other[0] and other[1] <= edit[1]):
                theirs.remove(other)
                clash |= other != edit and not any(lo <= other[0] and other[1] <= hi for lo, hi in gaps)
            else:
                ours.remove(edit)
                clash = True
                break
    for lo, hi in gaps:  # lines that one side left alone between lines that it changed may not fit together
        clash |= hi - lo > 1 and all(any(e[0] < hi and lo < e[1] for e in side) for side in (ours, theirs))
    result = list(old)
    for lo, hi, lines in sorted([*ours, *theirs], key=lambda edit: edit[:2], reverse=True):
        result[lo:hi] = lines
    return result, clash


def _edits(old: list[str], other: list[str]) -> list[_Edit]:
    found = difflib.SequenceMatcher(None, old, other, autojunk=False).get_opcodes()
    return [(lo, hi, other[start:end]) for kind, lo, hi, start, end in found if kind != "equal"]


def _meet(a: _Edit, b: _Edit) -> bool:
    """Whether two edits change the same lines, or insert at the same place."""
    return (a[0] < b[1] and b[0] < a[1]) or a[:2] == b[:2]


def _gaps(lines: list[str]) -> list[tuple[int, int]]:
    """The lines of each gap of a stub: the one that raises, or code to start from, which ends with its block at the latest."""
    found = []
    for number, line in enumerate(lines):
        if MARK in line:
            end = number + 1
            if "raise NotImplementedError" not in line:
                while end < len(lines) and lines[end].strip() and _indent(lines[end]) >= _indent(line):
                    end += 1
            found.append((number, end))
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _size(old: str, other: str) -> int:
    """How many lines lie in the edits that lead from one text to the other."""
    return sum(hi - lo + len(lines) for lo, hi, lines in _edits(old.split("\n"), other.split("\n")))


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
