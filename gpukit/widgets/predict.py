"""Predict before measuring: the learner commits a number, a later cell puts the real one beside it.

    from gpukit.widgets.predict import predict, reveal

    predict("softmax-bytes", "How many bytes move?", {"five-line softmax": "bytes", "fused softmax": "bytes"})
    ...
    reveal("softmax-bytes", {"five-line softmax": traced.bytes, "fused softmax": cost.bytes})

Predictions live in the notebook's kernel and nowhere else.
"""

from __future__ import annotations

import ast
import html
import math
import operator
import re
import textwrap
from collections.abc import Iterable, Mapping

import ipywidgets as widgets

from gpukit.widgets.style import Picture, Table, number, table

_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGT", start=1)}
_QUANTITIES = {
    "bytes": {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()} | {"byte": 1, "bytes": 1},
    "FLOPs": {f"{prefix}FLOP{s}": size for prefix, size in _PREFIXES.items() for s in ("", "s")},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_TOKEN = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<unit>[A-Za-zµ]+)|.")

_units: dict[str, dict[str, str]] = {}  # of every prediction asked for in this kernel
_committed: dict[str, dict[str, float]] = {}


def parse(text: str, unit: str = "") -> float:
    """The number that `text` means in `unit`: "3.4e9", "134,217,728", "2 * 4096**2 * 4", "16 MiB", "21 µs", "3G".

    Raises ValueError with a sentence for the learner.
    """
    shown = repr(textwrap.shorten(text, 40, placeholder="..."))
    plain = text.replace(",", "").replace("^", "**").replace("\u00d7", "*")
    tokens = _TOKEN.finditer(plain)
    expression = "".join(f"*{_scale(token['unit'], unit)!r}" if token["unit"] else token[0] for token in tokens)
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError(f"{shown} is not a number; 3.4e9, 2 * 4096**2 and 16 MiB are") from None
    if isinstance(value, complex) or not 0 < value < math.inf:
        raise ValueError(f"{shown} is not a positive number")
    return value


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)  # floats, so that a power overflows at once and never computes for minutes
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(operand=operand, op=ast.USub()):
            return -_evaluate(operand)
    raise ValueError("only numbers and + - * / **")


def _scale(suffix: str, unit: str) -> float:
    for units in _QUANTITIES.values():
        if unit in units and suffix in units:
            return units[suffix] / units[unit]
    if suffix == unit:
        return 1.0
    if suffix in _PREFIXES | _BINARY:  # "3.4G" of whatever the field asks for
        return (_PREFIXES | _BINARY)[suffix]
    raise ValueError(
        f"{suffix!r} does not fit a number of {unit}" if unit else f"{suffix!r} does not fit a plain number"
    )


class Prediction(widgets.VBox):
    """A question, one field a number, a button that commits and one that starts again. Enter commits."""

    def __init__(self, key: str, question: str, fields: Mapping[str, str]):
        self.key, self.question, self.fields = key, question, dict(fields)
        _units[key] = self.fields
        width = max(26, *(0.5 * len(name) + 0.5 * len(unit) + 12 for name, unit in self.fields.items()))
        self.entries = {name: _entry(name, unit, width) for name, unit in self.fields.items()}
        self.echoes = {name: widgets.HTML() for name in self.fields}
        self.commit_button = widgets.Button(description="commit", button_style="primary", tooltip="or press Enter")
        self.reset_button = widgets.Button(description="reset", tooltip="forget the prediction and start again")
        self.status = widgets.HTML()
        rows = [widgets.HBox([entry, self.echoes[name]]) for name, entry in self.entries.items()]
        buttons = widgets.HBox([self.commit_button, self.reset_button, self.status])
        super().__init__([widgets.HTML(_prose(question)), *rows, buttons])
        self.layout.border_left = "3px solid var(--jp-brand-color1, #2196f3)"
        self.layout.padding = "4px 0 4px 12px"

        for entry in self.entries.values():
            entry.observe(lambda _: self._echo(), "value")
            entry.on_msg(lambda _, content, __: self.commit() if content.get("event") == "submit" else None)
        self.commit_button.on_click(lambda _: self.commit())
        self.reset_button.on_click(lambda _: self.reset())
        if self.fields.keys() == _committed.get(key, {}).keys():  # the cell was run again
            for name, value in _committed[key].items():
                self.entries[name].value = f"{value:.15g}"
            self._lock()
        else:
            self.reset()

    def commit(self) -> None:
        """Keep the numbers for `reveal`; where one cannot be read, say which and keep nothing."""
        values = {}
        for name, entry in self.entries.items():
            if not entry.value.strip():
                return self._say(f"still empty: {name}")
            try:
                values[name] = parse(entry.value, self.fields[name])
            except ValueError as error:
                return self._say(str(error))
        _committed[self.key] = values
        self._lock()

    def reset(self) -> None:
        """Forget the prediction."""
        _committed.pop(self.key, None)
        for entry in self.entries.values():
            entry.value, entry.disabled = "", False
        self.commit_button.disabled = False
        self._say("commit before you run the next cell")

    def _lock(self) -> None:
        for entry in self.entries.values():
            entry.disabled = True
        self.commit_button.disabled = True
        self._say("committed: now run the next cell")

    def _say(self, text: str) -> None:
        self.status.value = html.escape(text)

    def _echo(self) -> None:
        """Show how each field is understood while it is typed."""
        for name, entry in self.entries.items():
            try:
                self.echoes[name].value = f"= {number(parse(entry.value, self.fields[name]))} {self.fields[name]}"
            except ValueError:
                self.echoes[name].value = html.escape(self.fields[name])

    def __repr__(self) -> str:
        return f"prediction: {', '.join(f'{name} ({unit})' if unit else name for name, unit in self.fields.items())}"

    def _repr_html_(self) -> str:  # where no kernel runs, on a repository's page for instance
        return f"{_prose(self.question)}<p>{html.escape(repr(self))}. Run this cell to commit yours.</p>"


def _entry(name: str, unit: str, width: float) -> widgets.Text:
    """A field of `width` em, its name included."""
    return widgets.Text(
        description=name,
        placeholder=f"your number, {unit}" if unit else "your number",
        style={"description_width": "initial"},
        layout={"width": f"min({width:g}em, 70%)"},
    )


def _prose(text: str) -> str:
    """Paragraphs of text with `code`, **bold**, *emphasis* and [links](to) as HTML."""
    codes: list[str] = []

    def aside(code: re.Match) -> str:  # so that a star in it stays a star
        codes.append(f"<code>{code[1]}</code>")
        return f"`{len(codes) - 1}`"

    text = re.sub(r"`([^`]+)`", aside, html.escape(text, quote=False))
    text = re.sub(r"(?<![\w)])\*\*(\S|\S.*?\S)\*\*(?!\w)", r"<b>\1</b>", text)  # not of x**2 + y**2
    text = re.sub(r"(?<![\w)*])\*([^\s*]|[^\s*][^*]*[^\s*])\*(?![\w*])", r"<i>\1</i>", text)
    text = re.sub(r"(?<!\w)\[([^\]]+)\]\(([^()\s\"]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"`(\d+)`", lambda code: codes[int(code[1])], text)
    return "".join(f"<p>{part}</p>" for part in text.split("\n\n"))


def predict(key: str, question: str, fields: Mapping[str, str]) -> Prediction:
    """Ask for one or two numbers before they are known.

    key       names the prediction for `reveal`
    fields    what is asked for -> its unit ("" for none), for instance {"naive softmax": "bytes"}
    Raises ValueError where there are no fields or more than three.
    """
    if not 1 <= len(fields) <= 3:
        raise ValueError(f"predict: fields must hold one to three numbers, got {len(fields)}")
    return Prediction(key, question, fields)


class Reveal:
    """What was predicted beside what is so. Without a prediction the values are folded away: a saved notebook must not
    tell them to a reader who has not predicted yet."""

    def __init__(
        self,
        actual: Mapping[str, float],
        committed: Mapping[str, float],
        units: Mapping[str, str],
        how: str,
        also: Iterable[Table | Picture | str] = (),
        exact: bool = False,
    ):
        self.also = tuple(also)
        shared = set(units.values())
        unit = shared.pop() if len(shared) == 1 else ""
        columns = {"": "", how: unit}
        if committed:
            columns = {"": "", "yours": unit, how: unit} | ({"right?": ""} if exact else {f"yours / {how}": "x"})
        rows = []
        for field, value in actual.items():
            name = field if unit or not units[field] else f"{field} ({units[field]})"
            mine = committed.get(field)
            verdict = None if mine is None else ("no", "yes")[mine == value] if exact else _ratio(mine, value)
            rows.append((name, value) if mine is None else (name, mine, value, verdict))
        self.table = table(columns, rows)
        self.committed = bool(committed)
        self.sentence = _sentence(actual, committed, exact)

    def __repr__(self) -> str:
        return "\n".join(map(str, (self.table, self.sentence, *self.also)))

    def _repr_html_(self) -> str:
        sentence, numbers = f"<p>{html.escape(self.sentence)}</p>", self.table._repr_html_()
        also = "".join(_html(item) for item in self.also)
        if self.committed:
            return numbers + sentence + also
        return f"{sentence}<details><summary>show the answer anyway</summary>{numbers}{also}</details>"


def _ratio(mine: float, value: float) -> float:
    return mine / value if value else math.inf


def _sentence(actual: Mapping[str, float], committed: Mapping[str, float], exact: bool) -> str:
    if not committed:
        return "No prediction was committed. Commit one above and run this cell again: the comparison is the lesson."
    if exact:
        return f"{sum(committed[name] == value for name, value in actual.items())} of {len(actual)} right."
    ratios = {name: _ratio(committed[name], value) for name, value in actual.items()}
    worst = max(ratios, key=lambda name: max(ratios[name], 1 / ratios[name]))
    off = max(ratios[worst], 1 / ratios[worst])
    subject = f" for {worst}" if len(actual) > 1 else ""
    if off <= 1.1:
        return "Right, within 10%." if len(actual) == 1 else "Right, every one within 10%."
    if off <= 2.0 * (1 + 1e-9):
        return f"Within a factor of two{subject}. Which term is counted once too often, or once too few?"
    return f"Off by {number(off)}x{subject}. Being wrong here is the lesson: which term did you not see?"


def _html(item: Table | Picture | str) -> str:
    if isinstance(item, Picture):
        return item.html()
    return _prose(item) if isinstance(item, str) else item._repr_html_()


def reveal(
    key: str,
    actual: Mapping[str, float],
    how: str = "counted",
    *,
    also: Iterable[Table | Picture | str] = (),
    exact: bool = False,
) -> Reveal:
    """Show the prediction `key` beside `actual`, one value a field in its unit; without one, the values alone.

    how   where the values come from: "counted", "measured" or "modelled"
    also  tables, pictures, and sentences with `code`, **bold**, *emphasis* and [links](to), that would give the answer away:
          folded away with it
    exact the values are numbers of something, as a suspect's: a prediction is right or wrong, and not off by a factor
    Raises ValueError where `actual` does not name the fields of the prediction.
    """
    committed = _committed.get(key, {})
    if committed and committed.keys() != actual.keys():
        raise ValueError(
            f"reveal: actual must have the fields {list(committed)} of prediction {key!r}, got {list(actual)}"
        )
    return Reveal(actual, committed, _units.get(key, dict.fromkeys(actual, "")), how, also, exact)
