# SPDX-License-Identifier: Apache-2.0
"""A final answer, as LaTeX, in parts with sympy's values."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from math_verify.grader import is_assignment_relation, take_last_relation
from sympy.core.relational import Relational

from ngrpo.methods.scoring.math_response import AMOUNT, AMOUNTS, SCALES, SPACE, TEXT

# An expression with more operations is printed unchanged: sympy may take minutes over it.
_OPERATIONS = 80
_EXPANDED = 20
# An object of sympy, or the text where sympy has none.
Value = Any
# math-verify takes letters such as the ab of 3ab for units.
_NORMALIZED = NormalizationConfig(units=False, basic_latex=True, malformed_operators=True, nits=True, boxed="all")
_EXPRESSIONS = (LatexExtractionConfig(normalization_config=_NORMALIZED), ExprExtractionConfig())
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)\s*(?:([ap])\.?\s*m\.?)?", re.I)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATE_OF_A_COUNTRY = re.compile(r"(\d{1,2})([/.])(\d{1,2})\2(\d{4})")  # 4/6/2024 and 6.4.2024
_LABEL = re.compile(
    rf"(?:{TEXT}\{{\s*\(([A-Z])\)\s*\.?\s*\}}|\(([A-Z])\)(?={SPACE}|$)|([A-J])[.):](?={SPACE}+\S))(?:{SPACE})*"
)
# Words after a number that make another number of it: 5 and a half, 5 tenths, 3 squared.
_CHANGES_NUMBER = re.compile(
    r"\d.*\b(?:half|halves|(?:third|fourth|fifth|sixth|eighth|tenth|hundredth)s?|squared|cubed|factorial|wrong|incorrect)\b"
)
# A scale that `math_response` did not multiply with, as in \frac{1}{2}\text{ million}.
_SCALE_LEFT = re.compile(rf"\b(?:{'|'.join(SCALES)})s?\s*\}}?$")
_CURRENCY = re.compile(r"(-?)\s*(\\?\$|€|£|¥|\\pounds|\\euro)(?:\{\})?\s*")
# A word in Cyrillic, Japanese, Chinese or Korean letters, but for the powers of ten: 12万 is 120,000.
_POWERS_OF_TEN = r"[十百千万萬亿億兆십백천만억조]|\w*[万萬亿億兆만억조]|сот|тыс|млн|млрд|милл"
_OTHER_LETTERS = rf"(?!{_POWERS_OF_TEN})[\u0400-\u04ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
_UNIT = re.compile(
    rf"(?:(?<=[\S]){SPACE}*{TEXT}\{{(?P<in_text>[^{{}}]*)\}}"
    rf"|(?<=[\d}})\]]){SPACE}+(?P<words>[A-Za-z][A-Za-z. /]+)"
    rf"|(?<=[\d}}])(?P<attached>[a-z]{{2,}})"
    rf"|(?P<percent>\\?%)"
    rf"|(?<=\d){SPACE}*(?P<other_letters>{_OTHER_LETTERS}))"
    rf"(?:\^\{{?(?P<power>\d)\}}?)?$"
)
# The xy of 3 xy are factors; the men of 5 men, and the pm of 5 pm, are not.
_PRODUCT = re.compile(r"(?!am|pm)[a-z]{2}|[abc]{3}|[xyz]{3}", re.I)
_DEGREES = re.compile(r"\s*(?:\^\{?\s*\\circ\s*\}?|°|\\degree)$")
# {x | 1 < x < 2}, and {x \in R : x < 2}: the condition.
_BUILDER = re.compile(r"^\\\{\s*[A-Za-z][^|:<>]*?(?:\\mid|\\vert|\||:)((?=.*(?:[<>]|\\[lg][et])).*)\\\}$")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[*×·])\s*10\s*\^")
_OPERATION = re.compile(r"[+*×·÷]|\\(?:times|cdot|div|pm)(?![A-Za-z])|[\d)}]\s*[-−–]|/.*/")
_UNITS = {
    alias: unit
    for unit, aliases in {
        "kg": "kg kilogram kilo", "g": "g gram gm", "mg": "mg milligram", "lb": "lb pound", "oz": "oz ounce",
        "km": "km kilometer kilometre", "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter",
        "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "year": "yr year",
        "l": "l liter litre", "ml": "ml milliliter", "mph": "mph mile/hour mi/h", "km/h": "km/h kmh kph kilometer/hour",
        "m/s": "m/s meter/second", "dollar": "dollar usd", "cent": "cent", "percent": "percent % percentage",
        "degree": "degree deg", "rad": "rad radian", "j": "j joule", "kj": "kj kilojoule", "n": "n newton",
        "dm": "dm decimeter decimetre", "nm": "nm nanometer nanometre", "ha": "ha hectare", "cl": "cl centiliter",
        "dl": "dl deciliter", "pt": "pt pint", "qt": "qt quart", "ms": "ms millisecond", "kw": "kw kilowatt",
        "hz": "hz hertz", "pa": "pa pascal", "ev": "ev", "kv": "kv kilovolt", "kb": "kb kilobyte",
        "mb": "mb megabyte", "gb": "gb gigabyte", "tb": "tb terabyte",
        "celsius": "c celsius", "fahrenheit": "f fahrenheit", "am": "am a.m", "pm": "pm p.m",
    }.items()
    for alias in aliases.split()
}  # fmt: skip


_CURRENCIES = {"€": "euro", "£": "pound", "¥": "yen"}
Unit = tuple[str, int]
"""A unit's name and its power: square meters are ``("m", 2)``."""


class Clock(NamedTuple):
    """A time of day; ``half`` is ``a``, ``p`` or empty."""

    hours: int
    minutes: int
    half: str


class Relation(NamedTuple):
    """An equation or inequality: sympy's name of it, and its left side less its right one."""

    name: str
    difference: Value


@dataclass(frozen=True)
class Answer:
    """An answer in parts: items as LaTeX with sympy's form of each; words instead where it is no expression."""

    words: tuple[str, ...] | None = None
    clock: Clock | None = None
    items: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    unit: Unit | None = None
    label: str | None = None
    form: str | None = field(default=None, compare=False)


@lru_cache(maxsize=4096)
def read(text: str, finished: bool = False) -> Answer | None:
    """An answer that was prepared; None where it says nothing, or with ``finished`` leaves an operation to be done.

    Kept, because responses to one problem often have the same answer.
    """
    label = None
    label_match = _LABEL.match(text)
    if label_match:
        label = next(filter(None, label_match.groups()))
        text = text[label_match.end() :] or label
    currency = None
    currency_match = _CURRENCY.match(text)
    if currency_match:
        sign, symbol = currency_match.groups()
        currency = (_CURRENCIES.get(symbol[-1], "dollar"), 1)
        text = sign + text[currency_match.end() :]

    plain = " ".join(re.sub(rf"(?:{TEXT}|^)\{{([^{{}}]*)\}}", r" \1 ", text).split())
    answer = _read_clock(plain) or _read_date(plain) or _read_amounts(plain)
    if answer is None and _is_words(text, plain):
        words = _words(plain)
        answer = Answer(words=words, form=", ".join(sorted(words))) if words else None
    elif answer is None and not (_SCALE_LEFT.search(text) or _CHANGES_NUMBER.search(plain)):
        answer = _read_values(text, currency, finished=finished)
    return None if answer is None else replace(answer, label=label)


def _read_clock(plain: str) -> Answer | None:
    """A time of day, such as ``3:05 p.m.``; None for anything else."""
    time = _CLOCK.fullmatch(plain)
    if time is None:
        return None
    hours, minutes, half = time.groups()
    clock = Clock(int(hours), int(minutes), (half or "").lower())
    return Answer(clock=clock, form=f"{int(hours)}:{minutes}")


def _read_date(plain: str) -> Answer | None:
    """A date such as ``04/06/2024``, without leading zeros; None for anything else."""
    date = _DATE_OF_A_COUNTRY.fullmatch(plain)
    if date is None:
        return None
    day, sign, month, year = date.groups()
    form = sign.join((str(int(day)), str(int(month)), year))
    return Answer(words=(form,), form=form)


def _read_amounts(plain: str) -> Answer | None:
    """An amount in several units, such as ``5 feet 6 inches``; None for anything else."""
    if not AMOUNTS.fullmatch(plain):
        return None
    amounts = []
    for number, unit_name in AMOUNT.findall(plain):
        singular = _singular(unit_name.lower())
        amounts.append(f"{number} {_UNITS.get(singular, singular)}")
    form = " ".join(amounts)
    return Answer(words=(form,), form=form)


def _read_values(text: str, currency: Unit | None, *, finished: bool) -> Answer | None:
    """One or several expressions with their unit; None as :func:`read`.

    ``currency``: the unit by a sign before the text, which a unit after the text replaces.
    """
    text, unit = _without_unit(text, currency)
    items = _items(text)
    if finished and unfinished(items):
        return None
    values = tuple(_value(item) for item in items)
    if not items or any(value is None for value in values):
        return None
    joined = _joined(text, values)
    if joined:
        items = (text,)
        values = (joined,)
    form = ", ".join(sorted(canonical(value) or str(value) for value in values))
    return Answer(items=items, values=values, unit=unit, form=form)


def _words(plain: str) -> tuple[str, ...]:
    """The words of a list, in its order, without articles and signs."""
    parts = re.split(r"[,;&]|\band\b|\bor\b", re.sub(r"\\[{}]", "", plain.lower()))
    words = [re.sub(r"^(?:the|an?)\s|[^a-z0-9]", "", part.strip()) for part in parts]
    return tuple(word for word in words if word)


def _is_words(text: str, plain: str) -> bool:
    """Whether an answer is a date, a name, a word or labels such as ABC, which are no products of letters."""
    if _DATE.fullmatch(plain):
        return True
    if re.search(r"\\(?![{}])|[=<>+*^_|/]", plain) or not re.match(r"\W*[A-Za-z]", plain):
        return False
    if re.match(rf"\W*{TEXT}\{{", text):
        return True
    begins_with_word = bool(re.match(r"\W*(?:[A-Z]+\b|[A-Za-z]{4,}|(?:[Yy]es|[Nn]o)\b)", plain))
    return begins_with_word and not re.search(r"\d[A-Za-z]", plain)


def _without_unit(text: str, unit: Unit | None) -> tuple[str, Unit | None]:
    """The text without a unit at its end, and the unit with its power; ``unit`` where the text has none."""
    degrees = _DEGREES.search(text)
    if degrees:
        return text[: degrees.start()], ("degree", 1)
    match = _UNIT.search(text)
    if not match:
        return text, unit
    name = next(filter(None, match.groups()), "").lower().strip(" .\\")
    power = int(match["power"] or 1)
    in_name = re.fullmatch(r"(.*?)\s*\^\{?(\d)\}?", name)
    if in_name:
        name = in_name[1]
        power = int(in_name[2])
    for word, its_power in (("square ", 2), ("sq ", 2), ("cubic ", 3)):
        if name.startswith(word):
            name = name.removeprefix(word)
            power = its_power
    parts = re.split(r"\s*/\s*|\s+per\s+", name)
    name = "/".join(map(_singular, parts))
    is_product = match["attached"] or (match["words"] and _PRODUCT.fullmatch(match["words"]))
    if is_product and name not in _UNITS:
        return text, unit
    if name in _UNITS:
        unit = (_UNITS[name], power)
    return text[: match.start()], unit  # a word that is no known unit is dropped


def _singular(name: str) -> str:
    """A unit's name without the s of the plural."""
    return name if name in _UNITS else name.removesuffix("s")


def _items(text: str) -> tuple[str, ...]:
    """The values of a list, which a comma, "and" or "or" separates; a tuple is one value, a ± b two."""
    text = re.sub(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*", "", text.strip())
    text = _BUILDER.sub(r"\1", text)
    text = re.sub(rf"{TEXT}\{{\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b", ",", text)
    # sympy would add the 21 and 49 of 21 \quad 49, as if it were a mixed number.
    text = re.sub(rf"(?<![\w.])(?<![A-Za-z] )(\d+(?:\.\d+)?){SPACE}+(?=\d)", r"\1,", text)
    if re.fullmatch(r"\\\{.*\\\}", text) and text.count(r"\{") == 1:
        text = text[2:-2]
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    items: list[str] = []
    for part in parts:
        item = re.sub(rf"^(?:{SPACE}|=|\\approx)+|(?:{SPACE})+$", "", part)
        if item.count(r"\pm") == 1:
            items += [item.replace(r"\pm", "+"), item.replace(r"\pm", "-")]
        elif item:
            items.append(item)
    return tuple(items)


def unfinished(items: Sequence[str]) -> bool:
    """Whether an item still has an operation to be done; a leading plus, as in ``+35`` and ``x = +2``, is a sign."""
    values = (_POWER_OF_TEN.sub("e", item).rpartition("=")[2] for item in items)
    return any(_OPERATION.search(value.lstrip().removeprefix("+")) for value in values)


# math-verify reads what is behind these signs alone: 42 of 41 \to 42, and of lines 41 \\ 42 outside of a matrix.
_SEVERAL_VALUES = re.compile(r"\\(?:implies|iff|mid|to|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])|\\\\(?!.*\\end\{)")


def _value(item: str) -> Value:
    """Sympy's form of one value, its text where there is none, and None where it says nothing."""
    if _SEVERAL_VALUES.search(item):
        return None
    if re.match(r"\\(?:[lg]eq?|[lg]t|neq?)(?![a-z])|[<>]|\W*$", item):
        return None
    ratio = re.fullmatch(r"([^:]+):([^:]+)((?::[^:]+)*)", item)
    if ratio:
        parts = [_value(part) for part in item.split(":")]
        if any(not isinstance(part, sympy.Expr) or part.is_zero for part in parts):
            return None
        return sympy.Tuple(*(part / parts[0] for part in parts)) if ratio[3] else parts[0] / parts[1]
    if re.fullmatch(r"[+-]?\d{1,1000}", item):  # Python refuses to read more than 4,300
        return sympy.Integer(item)
    parsed = parse(f"\\boxed{{{item}}}", _EXPRESSIONS, parsing_timeout=0)
    if not parsed:
        return None
    value = parsed[0]
    if isinstance(value, str):
        return value.strip() or None
    if value in (sympy.true, sympy.false) or value.has(sympy.zoo, sympy.nan):
        return None
    if isinstance(value, Relational) and value.lhs == value.rhs:
        says_something = len({*map(letters, item.split("="))}) > 1  # 6/8 = 3/4 does, 1 = 1 does not
        return value.rhs if says_something and isinstance(value, sympy.Eq) and value.rhs.is_number else None
    return value


def _joined(text: str, values: Sequence[Value]) -> Value:
    """Inequalities of one letter as one set; None for anything else.

    Without an "or" it is what all of them hold for, unless there is nothing: x < 2 and x > 3 are parts of a union.
    """
    if len(values) < 2:
        return None
    for value in values:
        if not isinstance(value, (Relational, And)) or value.has(sympy.Eq, sympy.Ne):
            return None
    with suppress(Exception):
        symbols = {symbol for value in values for symbol in value.free_symbols}
        if len(symbols) == 1:
            sets = [value.as_set() for value in values]
            intersection = sympy.Intersection(*sets)
            if intersection is sympy.S.EmptySet or re.search(r"\bor\b", text):
                return sympy.Union(*sets)
            return intersection
    return None


def relations_of(value: Value) -> list[Relation]:
    """The relations of a value, or of a chain such as 1 < x < 2; "less" is turned round to "greater"."""
    relations = []
    for part in getattr(value, "_unsorted_args", [value]):
        name = type(part).__name__
        difference = exactly(part.lhs - part.rhs)
        if name in ("LessThan", "StrictLessThan"):
            name = name.replace("Less", "Greater")
            difference = -difference
        relations.append(Relation(name, difference))
    return relations


def letters(text: str) -> str:
    """A text as it is compared: in lower case, without blanks and text commands."""
    return "".join(re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r"\1", text).lower().split())


def exactly(value: Value) -> Value:
    """A value with its decimals as fractions."""
    fractions = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    return value.xreplace(fractions)


def canonical(value: Value) -> str | None:
    """One string for all forms of a value: exact numbers, expanded, roots out of denominators; None where it fails."""
    if isinstance(value, str):
        return letters(value)
    with suppress(Exception):
        return sympy.sstr(_normal(value), order="lex")
    return None


def _normal(item: Value) -> Value:
    if is_assignment_relation(item):
        item = take_last_relation(item).rhs
    if isinstance(item, (Relational, And)):
        symbols = []
        for relation in relations_of(item):
            symbols.append(sympy.Symbol(f"{relation.name} {sympy.sstr(_normal(relation.difference))}"))
        return sympy.Tuple(*symbols)
    if isinstance(item, sympy.MatrixBase):
        return item.applyfunc(_normal)
    if isinstance(item, (FiniteSet, sympy.FiniteSet, sympy.Tuple, sympy.Interval, sympy.Union)):
        return item.func(*map(_normal, item.args))
    item = exactly(item.doit())
    if not isinstance(item, sympy.Expr) or (item.is_number and item.is_Rational) or item.count_ops() > _OPERATIONS:
        return item
    for power in item.atoms(sympy.Pow):
        if power.base.is_Add and power.exp.is_number and abs(power.exp) > _EXPANDED:
            return item
    return sympy.expand(sympy.radsimp(sympy.cancel(item)))
