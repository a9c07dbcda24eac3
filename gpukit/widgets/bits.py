"""A number's bits, each of which can be flipped: what it means, and what lies beside it.

from gpukit.widgets.bits import bit_viewer

bit_viewer("fp16", 0.1)
"""

from __future__ import annotations

import html
import math
from fractions import Fraction

import ipywidgets as widgets
import traitlets

from gpukit.accounting.dtypes import FORMATS, Format, format_named

# Okabe and Ito's colours again: here they name the fields of a number, not what they mean in the course's figures.
SIGN, EXPONENT, MANTISSA = "#D55E00", "#009E73", "#0072B2"
_COLOURS = {"sign": SIGN, "exponent": EXPONENT, "mantissa": MANTISSA}

# A bit is a toggle button: Tab reaches it, Space flips it. A one is filled, a zero is an outline: no colour is needed.
_CSS = "<style>" + (
    ".gpukit-bit.jupyter-button{width:22px;height:28px;padding:0;margin:1px;line-height:24px;border-radius:3px;"
    "font-family:var(--jp-code-font-family,monospace);font-weight:600;background:transparent;"
    "color:var(--jp-ui-font-color1,#333);border:2px solid var(--gpukit-field);box-shadow:none}"
    ".gpukit-bit.jupyter-button.mod-active{background:var(--gpukit-field);color:white;box-shadow:none}"
    ".gpukit-bit.jupyter-button:focus-visible{outline-offset:1px;"
    "outline:3px solid var(--jp-brand-color1,#1976d2)!important}"
    + "".join(f".gpukit-{name}{{--gpukit-field:{colour}}}" for name, colour in _COLOURS.items())
) + "</style>"  # fmt: skip


class BitViewer(widgets.VBox):
    """`value`, `format` (a name) and `bits` (the pattern) are traits: set one and the others follow.

    A value that the format cannot hold becomes the nearest one that it can. A new format starts again from the number
    that was asked for, so going through fp4 and back loses nothing.
    """

    value = traitlets.CFloat(1.0)
    format = traitlets.Unicode("fp32")
    bits = traitlets.Int(0)

    def __init__(self, format: str | Format = "fp32", value: float = 1.0):
        self._start = format_named(format).name, value
        self._format = format_named(format)
        self._wanted: float | Fraction = value
        self._busy = False
        self._message = ""
        self._formats = FORMATS | {self._format.name: self._format}

        self.format_menu = widgets.Dropdown(
            options=[
                (f"{f.name}   1 + {f.exponent_bits} + {f.mantissa_bits} bits", f.name) for f in self._formats.values()
            ],
            value=self._format.name,
            description="format",
            style={"description_width": "initial"},
            layout={"width": "250px"},
        )
        self.value_field = widgets.Text(
            description="value",
            continuous_update=False,
            tooltip="a number, 1/3, inf or nan; Enter",
            style={"description_width": "initial"},
            layout={"width": "280px"},
        )
        self.down_button = widgets.Button(description="next below", layout={"width": "100px"})
        self.up_button = widgets.Button(description="next above", layout={"width": "100px"})
        self.reset_button = widgets.Button(description="reset", layout={"width": "80px"})
        self._pool = [self._new_button(place) for place in range(64)]
        self._captions = {name: widgets.HTML() for name in _COLOURS}
        self._rows = {name: widgets.HBox(layout={"flex_flow": "row wrap"}) for name in _COLOURS}
        self.readout = widgets.HTML()
        groups = [widgets.VBox([self._captions[name], self._rows[name]]) for name in _COLOURS]
        for group in groups[:2]:
            group.layout.margin = "0 10px 0 0"
        super().__init__(
            [
                widgets.HTML(_CSS, layout={"display": "none"}),
                widgets.HBox([self.format_menu, self.value_field, self.down_button, self.up_button, self.reset_button],
                             layout={"flex_flow": "row wrap"}),
                widgets.HBox(groups, layout={"flex_flow": "row wrap"}),
                self.readout,
            ]
        )  # fmt: skip
        self.format_menu.observe(lambda change: self.set_trait("format", change["new"]), "value")
        self.value_field.observe(lambda change: self._typed(change["new"]), "value")
        self.down_button.on_click(lambda _: self._step(0))
        self.up_button.on_click(lambda _: self._step(1))
        self.reset_button.on_click(lambda _: self.reset())
        self._lay_out()
        self._ask(value)

    def _new_button(self, place: int) -> widgets.ToggleButton:
        button = widgets.ToggleButton(description="0")
        button.add_class("gpukit-bit")
        button.observe(lambda _: self._flipped(), "value")
        return button

    # ---- what changes what

    @traitlets.observe("value")
    def _value_set(self, change) -> None:
        if not self._busy:
            self._ask(change["new"])

    @traitlets.observe("bits")
    def _bits_set(self, change) -> None:
        if not self._busy:
            self._wanted = self._format.decode(change["new"])
            self._show(change["new"])

    @traitlets.validate("bits")
    def _bits_valid(self, proposal) -> int:
        self._format.split(proposal["value"])
        return proposal["value"]

    @traitlets.validate("format")
    def _format_valid(self, proposal) -> str:
        name = proposal["value"]
        return name if name in self._formats else format_named(name).name

    @traitlets.observe("format")
    def _format_set(self, change) -> None:
        if not self._busy:
            self._format = self._formats[change["new"]]
            self._lay_out()
            self._ask(self._wanted)

    def reset(self) -> None:
        """Back to the format and the value that the viewer started with."""
        name, value = self._start
        self._wanted = value
        self.format = name
        self._ask(value)

    def _typed(self, text: str) -> None:
        if self._busy:
            return
        try:
            self._ask(_number(text))
        except ValueError:
            self._show(self.bits, f"{text!r} is not a number; 0.1, 1/3, 1e-8, inf and nan are")

    def _flipped(self) -> None:
        if not self._busy:
            pattern = sum(button.value << place for place, button in enumerate(reversed(self.buttons)))
            self._wanted = self._format.decode(pattern)
            self._show(pattern)

    def _step(self, side: int) -> None:
        neighbour = self._format.neighbours(self.bits)[side]
        if neighbour == neighbour:
            self._ask(neighbour)

    def _ask(self, number: float | Fraction) -> None:
        """Show the number of the format that is nearest to `number`."""
        if number != number and not self._format.has_nan:
            self._wanted = 0.0
            return self._show(0, f"{self._format.name} has no NaN")
        self._wanted = number
        self._show(self._format.encode(number))

    # ---- what is seen

    @property
    def buttons(self) -> list[widgets.ToggleButton]:
        """One a bit, the sign first."""
        return self._pool[: self._format.bits]

    def _lay_out(self) -> None:
        """Give every bit of the format its button, and every button the field it stands for."""
        places = iter(zip(range(self._format.bits), self._pool, strict=False))
        for name, width in _fields(self._format):
            row = []
            for place, button in (next(places) for _ in range(width)):
                for other in _COLOURS:
                    button.remove_class(f"gpukit-{other}")
                button.add_class(f"gpukit-{name}")
                button.tooltip = self._tooltip(name, place)
                row.append(button)
            self._rows[name].children = row

    def _tooltip(self, name: str, place: int) -> str:
        if name == "sign":
            return "sign: 1 is negative"
        return f"{name} bit, worth 2^{self._format.exponent_bits - place}"

    def _show(self, pattern: int, message: str = "") -> None:
        self._busy = True
        try:
            with self.hold_trait_notifications():
                self.format, self.bits, self.value = self._format.name, pattern, self._format.decode(pattern)
            self.format_menu.value = self._format.name
            self.value_field.value = repr(self.value)
            for place, button in enumerate(reversed(self.buttons)):
                button.value = bool(pattern >> place & 1)
                button.description = str(pattern >> place & 1)
            for name, caption in zip(_COLOURS, _captions(self._format, pattern), strict=True):
                self._captions[name].value = caption
            self._message = message
            self.readout.value = _readout(self._format, pattern, self._wanted, message)
        finally:
            self._busy = False

    def __repr__(self) -> str:
        return f"bit viewer: {self._format.name} {self._format.hex(self.bits)} = {self.value!r}"

    def _repr_html_(self) -> str:  # where no kernel runs, on a repository's page for instance
        return _static(self._format, self.bits, self._wanted)


def bit_viewer(format: str | Format = "fp32", value: float = 1.0) -> BitViewer:
    """The bits of the number of `format` nearest to `value`, to flip one by one. Raises ValueError."""
    return BitViewer(format, value)


def _fields(fmt: Format) -> list[tuple[str, int]]:
    return [("sign", 1), ("exponent", fmt.exponent_bits), ("mantissa", fmt.mantissa_bits)]


def _number(text: str) -> float | Fraction:
    """Exactly what is written: a float would already have rounded 0.1 once. Raises ValueError."""
    text = text.strip().replace(",", "")
    try:
        if "/" in text:
            return Fraction(text)
        number = float(text)
        return Fraction(text) if math.isfinite(number) and number else number
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _captions(fmt: Format, pattern: int) -> list[str]:
    _, exponent, mantissa = fmt.split(pattern)
    texts = ["sign", f"exponent {exponent}", f"mantissa {mantissa} of {2**fmt.mantissa_bits}"]
    return [
        f'<span style="border-bottom:3px solid {colour}">{text}</span>'
        for colour, text in zip(_COLOURS.values(), texts, strict=True)
    ]


def _formula(fmt: Format, pattern: int) -> str:
    """The value formula with the three fields in their colors, and the value; or why there is none."""
    sign, exponent, mantissa = fmt.split(pattern)
    value = fmt.decode(pattern)
    if not math.isfinite(value):
        return html.escape(fmt.formula(pattern))
    paint = dict(zip(_COLOURS, map(_chip, _COLOURS.values(), (sign, exponent, mantissa)), strict=True))
    power = f"{paint['exponent']} &minus; {fmt.bias}" if exponent else f"1 &minus; {fmt.bias}"
    lead = "1" if exponent else "0"
    return (
        f"(&minus;1)<sup>{paint['sign']}</sup> &times; 2<sup>{power}</sup> &times; "
        f"({lead} + {paint['mantissa']} / {2**fmt.mantissa_bits}) = <b>{_text(value)}</b> &nbsp; {fmt.kind(pattern)}"
    )


def _chip(colour: str, number: int) -> str:
    """White on the field's colour: readable on light and dark pages."""
    return f'<b style="background:{colour};color:white;padding:0 4px;border-radius:3px">{number}</b>'


def _readout(fmt: Format, pattern: int, wanted: float | Fraction, message: str = "") -> str:
    value = fmt.decode(pattern)
    below, above = fmt.neighbours(pattern)
    lines = [f"{_formula(fmt, pattern)}, {fmt.hex(pattern)}"]
    rows = (("next below", below), ("this number", value), ("next above", above), ("spacing", fmt.spacing(value)))
    left = ' style="text-align:left;padding:0 2em 0 0"'
    head = "".join(f"<th{left}>{name}</th>" for name, _ in rows)
    cells = "".join(f"<td{left}>{_text(number)}</td>" for _, number in rows)
    lines.append(f"<table><thead><tr>{head}</tr></thead><tbody><tr>{cells}</tr></tbody></table>")
    lines.append(html.escape(message) if message else _rounded(fmt, value, wanted))
    return "".join(f'<div style="margin:4px 0">{line}</div>' for line in lines if line)


def _rounded(fmt: Format, value: float, wanted: float | Fraction) -> str:
    """What rounding did to the number that was asked for."""
    if wanted != wanted or wanted == value:
        return ""
    asked = f"asked for {_text(wanted)}"
    if math.isinf(value) or math.isinf(wanted) or math.isnan(value) or abs(wanted) > fmt.max + fmt.spacing(fmt.max):
        return f"{asked}: too large, the largest finite number is {_text(fmt.max)}"
    if value == 0:
        return f"{asked}: nearer to 0 than to the smallest number, {_text(fmt.smallest_subnormal)}"
    error = float(Fraction(value) - Fraction(wanted))
    relative = abs(error / float(wanted)) if float(wanted) else math.inf
    return f"{asked}: off by {error:.2g}, or {relative:.2g} of it (normal numbers: at most {fmt.eps / 2:.2g})"


def _text(number: float | Fraction) -> str:
    if number != number:
        return "none"
    return repr(float(number)).replace("-", "&minus;").removesuffix(".0")


def _static(fmt: Format, pattern: int, wanted: float | Fraction) -> str:
    """The viewer as a picture in HTML."""
    digits, groups = iter(f"{pattern:0{fmt.bits}b}"), []
    for (name, width), caption in zip(_fields(fmt), _captions(fmt, pattern), strict=True):
        colour = _COLOURS[name]
        boxes = "".join(
            f'<span style="display:inline-block;width:1.3em;margin:1px;text-align:center;border:2px solid {colour};'
            f"border-radius:3px;font-family:monospace;"
            + (f'background:{colour};color:white">1</span>' if next(digits) == "1" else '">0</span>')
            for _ in range(width)
        )
        groups.append(f'<td style="text-align:left;vertical-align:top">{caption}<br>{boxes}</td>')
    head = f"<div><b>{fmt.name}</b>. Run this cell to flip bits.</div>"
    return f"{head}<table><tr>{''.join(groups)}</tr></table>{_readout(fmt, pattern, wanted)}"
