# SPDX-License-Identifier: Apache-2.0
"""The child process of math_answers.py: reads references with responses, and writes a verdict for each."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import is_assignment_relation, take_last_relation
from sympy.core.relational import Relational

from ngrpo.scoring.answers import last_boxed
from ngrpo.scoring.math_text import SPACE, TEXT, prepared
from ngrpo.scoring.problem import TIMED_OUT, UNREADABLE, Verdict

CPU_SECONDS = 5
# Where sympy cannot be interrupted, the system ends the process.
_HARD_CPU_SECONDS = 8
_MEMORY = 8 << 30
# An expression with more operations is printed as it stands: sympy may take minutes over it.
_OPERATIONS = 80
# A decimal with fewer digits stands for its own value alone: 0.33 is not 1/3, 0.333333 is.
_DIGITS = 6
# math-verify takes letters such as the ab of 3ab for units.
_NORMALIZED = NormalizationConfig(units=False, basic_latex=True, malformed_operators=True, nits=True, boxed="all")
_EXPRESSIONS = (LatexExtractionConfig(normalization_config=_NORMALIZED), ExprExtractionConfig())
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)\s*(?:([ap])\.?\s*m\.?)?", re.I)
_DECIMAL = re.compile(r"-?(\d*)\.(\d+)(?:\s*\\(?:times|cdot)\s*10\^\{?(-?\d+)\}?)?")
_LABEL = re.compile(rf"(?:{TEXT}\{{\s*\(([A-Z])\)\s*\.?\s*\}}|\(([A-Z])\)(?={SPACE}|$))(?:{SPACE})*")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[*×·])\s*10\s*\^")
_OPERATION = re.compile(r"[+*×·÷]|\\(?:times|cdot|div|pm)(?![A-Za-z])|[\d)}]\s*[-−–]|/.*/")
_BASE = re.compile(r"\d_\{?(\d+)")
_CURRENCY = re.compile(r"(-?)\s*(\\?\$|€|£|¥|\\pounds|\\euro)(?:\{\})?\s*")
_UNIT = re.compile(
    rf"(?:(?<=[\S]){SPACE}*{TEXT}\{{(?P<a>[^{{}}]*)\}}|(?<=[\d}})\]]){SPACE}+(?P<b>[A-Za-z][A-Za-z. /]+)"
    rf"|(?<=[\d}}])(?P<d>[a-z]{{2,}})|(?P<c>\\?%))(?:\^\{{?(?P<power>\d)\}}?)?$"
)
_DEGREES = re.compile(r"\s*(?:\^\{?\s*\\circ\s*\}?|°|\\degree)$")
_UNITS = {
    alias: unit
    for unit, aliases in {
        "kg": "kg kilogram kilo", "g": "g gram gm", "mg": "mg milligram", "lb": "lb pound", "oz": "oz ounce",
        "km": "km kilometer kilometre", "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter",
        "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "year": "yr year",
        "l": "l liter litre", "ml": "ml milliliter", "mph": "mph mile/hour mi/h", "km/h": "km/h kmh kph kilometer/hour",
        "m/s": "m/s meter/second", "dollar": "dollar usd", "cent": "cent", "percent": "percent % percentage",
        "degree": "degree deg", "rad": "rad radian", "j": "j joule", "kj": "kj kilojoule", "n": "n newton", "w": "w watt",
    }.items()
    for alias in aliases.split()
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An answer in parts: items as LaTeX with sympy's form of each; words instead where it is no expression."""

    words: tuple[str, ...] | None = None
    clock: tuple[int, int, str] | None = None
    items: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    unit: tuple[str, int] | None = None
    label: str | None = None
    form: str | None = field(default=None, compare=False)


def read(text: str) -> Answer | None:
    """An answer that was prepared; None where it says nothing."""
    label = unit = None
    lead = _LABEL.match(text)
    if lead:
        label, text = lead[1] or lead[2], text[lead.end() :] or lead[1] or lead[2]
    money = _CURRENCY.match(text)
    if money:
        unit, text = (
            ({"€": "euro", "£": "pound", "¥": "yen"}.get(money[2][-1], "dollar"), 1),
            money[1] + text[money.end() :],
        )
    plain = " ".join(re.sub(rf"(?:{TEXT}|^)\{{([^{{}}]*)\}}", r" \1 ", text).split())
    clock = _CLOCK.fullmatch(plain)
    if clock:
        time = (int(clock[1]), int(clock[2]), (clock[3] or "").lower())
        return Answer(clock=time, form=f"{time[0]}:{clock[2]}")
    if _is_words(text, plain):
        parts = re.split(r"[,;&]|\band\b|\bor\b", re.sub(r"\\[{}]", "", plain.lower()))
        words = sorted(re.sub(r"^(?:the|an?)\s|[^a-z0-9]", "", part.strip()) for part in parts)
        return Answer(words=tuple(words), label=label, form=", ".join(words)) if any(words) else None
    text, unit = _without_unit(text, unit)
    items = _items(text)
    values = tuple(_value(item) for item in items)
    if not items or any(value is None for value in values):
        return None
    form = ", ".join(sorted(canonical(value) for value in values))
    return Answer(items=items, values=values, unit=unit, label=label, form=form)


def _is_words(text: str, plain: str) -> bool:
    """Whether an answer is a name, a word or labels such as ABC, which are no products of letters."""
    if re.search(r"\\(?![{}])|[=<>+*^_|/]", plain) or not re.match(r"\W*[A-Za-z]", plain):
        return False
    wrapped = bool(re.match(rf"\W*{TEXT}\{{", text))
    return wrapped or (bool(re.match(r"\W*(?:[A-Z]+\b|[A-Za-z]{4,})", plain)) and not re.search(r"\d[A-Za-z]", plain))


def _without_unit(text: str, unit: tuple[str, int] | None) -> tuple[str, tuple[str, int] | None]:
    if degrees := _DEGREES.search(text):
        return text[: degrees.start()], ("degree", 1)
    found = _UNIT.search(text)
    if not found or (re.search(r"\d", found["a"] or found["b"] or "") and not found["a"]):
        return text, unit
    name = next(filter(None, found.groups())).lower().strip(" .\\")
    power = int(found["power"] or 1)
    if match := re.fullmatch(r"(.*?)\s*\^\{?(\d)\}?", name):
        name, power = match[1], int(match[2])
    for word, its in (("square ", 2), ("sq ", 2), ("cubic ", 3)):
        if name.startswith(word):
            name, power = name.removeprefix(word), its
    name = "/".join(part if part in _UNITS else part.removesuffix("s") for part in re.split(r"\s*/\s*|\s+per\s+", name))
    if found["d"] and name not in _UNITS:
        return text, unit
    return text[: found.start()], (_UNITS[name], power) if name in _UNITS else unit


def _items(text: str) -> tuple[str, ...]:
    """The values of a list, which a comma, "and" or "or" separates; a tuple is one value, a ± b two."""
    text = re.sub(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*", "", text.strip())
    text = re.sub(rf"{TEXT}\{{\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b", ",", text)
    if re.fullmatch(r"\\\{.*\\\}", text) and text.count(r"\{") == 1:
        text = text[2:-2]
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    items = [re.sub(rf"^(?:{SPACE}|=|\\approx)+|(?:{SPACE})+$", "", part) for part in parts]
    return tuple(
        each
        for item in items
        if item
        for each in ([item.replace(r"\pm", sign, 1) for sign in "+-"] if item.count(r"\pm") == 1 else [item])
    )


def _value(item: str) -> Any:
    """Sympy's form of one value, its text where there is none, and None where it says nothing."""
    if re.match(r"\\(?:[lg]eq?|[lg]t|neq?)(?![a-z])|[<>]|\W*$", item):
        return None
    ratio = re.fullmatch(r"([^:]+):([^:]+)((?::[^:]+)*)", item)
    if ratio:
        parts = [_value(part) for part in item.split(":")]
        if any(not isinstance(part, sympy.Expr) or part.is_zero for part in parts):
            return None
        return sympy.Tuple(*(part / parts[0] for part in parts)) if ratio[3] else parts[0] / parts[1]
    parsed = parse(f"\\boxed{{{item}}}", _EXPRESSIONS, parsing_timeout=None)
    if not parsed:
        return None
    value = parsed[0]
    if isinstance(value, str):
        return value.strip() or None
    if value in (sympy.true, sympy.false) or value.has(sympy.zoo, sympy.nan):
        return None
    if isinstance(value, Relational) and value.lhs == value.rhs:
        return None
    return value


def same(gold: Answer, said: Answer) -> bool:
    """Whether an answer is the reference."""
    if gold.label and gold.label == said.label and not said.items and not said.words:
        return True
    if gold.words and len(gold.words) == 1 and said.label and gold.words[0] == said.label.lower():
        return True
    if gold.clock or said.clock:
        if gold.clock and said.clock:
            return gold.clock[:2] == said.clock[:2] and (
                gold.clock[2] == said.clock[2] or not (gold.clock[2] and said.clock[2])
            )
        gold, said = (_as_ratio(answer) for answer in (gold, said))
    if gold.words or said.words:
        return gold.words == (said.words or (_letters("".join(said.items)),))
    if len(gold.items) == 1 and len({item.partition("=")[0] for item in said.items}) == len(said.items) > 1:
        point = read(f"({','.join(item.rpartition('=')[2] for item in said.items)})")  # x = 2, y = 3
        return all(map(is_assignment_relation, said.values)) and point is not None and same(gold, point)
    if len(gold.items) != len(said.items):
        return False
    percents = [answer.unit == ("percent", 1) for answer in (gold, said)]
    if gold.unit and said.unit and gold.unit != said.unit:
        return False
    if percents[0] != percents[1] and len(gold.values) == 1:
        return _same_with_percent(gold, said, percents[1])
    left = list(zip(said.values, said.items))
    for value, item in zip(gold.values, gold.items):
        match = next((each for each in left if equal(value, each[0], item, each[1])), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _as_ratio(answer: Answer) -> Answer:
    if answer.clock is None:
        return answer
    hours, minutes, _ = answer.clock
    if not hours or not minutes:
        return Answer(words=("a time",))
    return Answer(items=(f"{hours}:{minutes}",), values=(sympy.Rational(hours, minutes),))


def _same_with_percent(gold: Answer, said: Answer, said_percent: bool) -> bool:
    """50% is 50, where percents are asked for, and 1/2; 5000% is not 50."""
    (one,), (other,) = gold.values, said.values
    if equal(one, other, gold.items[0], said.items[0]):
        return True
    part, whole = (one, other) if said_percent else (other, one)
    small = getattr(part, "is_number", False) and bool(abs(part) < 2)
    return small and bool(getattr(whole, "is_number", False)) and equal(part, whole / 100, "", "")


def equal(gold: Any, said: Any, gold_text: str, said_text: str) -> bool:
    """Whether two values are equal: exactly, but for decimals of many digits that stand for an exact value."""
    if isinstance(gold, str) or isinstance(said, str):
        return isinstance(gold, str) and isinstance(said, str) and _letters(gold_text) == _letters(said_text)
    relations = [isinstance(value, (Relational, And)) for value in (gold, said)]
    if all(relations):
        return _same_relations(gold, said)
    if relations[1] and _is_equation(said):
        return equal(gold, take_last_relation(said).rhs, gold_text, said_text.rpartition("=")[2])
    if relations[0] and is_assignment_relation(gold):
        return equal(take_last_relation(gold).rhs, said, gold_text.rpartition("=")[2], said_text)
    if any(relations):
        sets = (sympy.Set, Relational, And)
        return isinstance(gold, sets) and isinstance(said, sets) and _verified(gold, said)
    bases = [base[1] for base in map(_BASE.search, (gold_text, said_text)) if base]
    if len(set(bases)) > 1:
        return False
    if isinstance(gold, sympy.Expr) and isinstance(said, sympy.Expr):
        if gold.is_number and said.is_number:
            return _same_numbers(gold, said, gold_text, said_text)
        return _canonical_or_none(gold) == _canonical_or_none(said) or _verified(_exact(gold), _exact(said))
    if isinstance(gold, sympy.MatrixBase) and isinstance(said, sympy.MatrixBase):
        return gold.shape == said.shape and all(equal(*pair, "", "") for pair in zip(gold, said))
    if isinstance(gold, sympy.Interval) and isinstance(said, sympy.Interval):
        ends = gold.left_open == said.left_open and gold.right_open == said.right_open
        return ends and all(equal(*pair, "", "") for pair in ((gold.start, said.start), (gold.end, said.end)))
    if isinstance(gold, sympy.Tuple) and isinstance(said, sympy.Tuple):
        return len(gold) == len(said) and all(equal(*pair, "", "") for pair in zip(gold, said))
    return _verified(gold, said)


def _same_numbers(gold: Any, said: Any, gold_text: str, said_text: str) -> bool:
    exact, other = _exact(gold).doit(), _exact(said).doit()
    if exact == other:
        return True
    if exact.is_Rational and other.is_Rational and not (gold.has(sympy.Float) or said.has(sympy.Float)):
        return False
    if exact.is_infinite or other.is_infinite:
        return False
    sizes = [abs(value).evalf(40) for value in (exact, other, exact.evalf(40) - other.evalf(40))]
    if not all(size.is_comparable for size in sizes):
        return _verified(exact, other)
    *both, difference = sizes
    if difference <= max(both) * sympy.Float("1e-30"):
        return True
    for decimal, text, value in ((said, said_text, exact), (gold, gold_text, other)):
        digits = _DECIMAL.fullmatch(text.strip())
        if digits and not value.is_Integer and not (gold.has(sympy.Float) and said.has(sympy.Float)):
            many = len((digits[1] + digits[2]).lstrip("0")) >= _DIGITS
            return many and bool(difference <= sympy.Rational(10) ** (int(digits[3] or 0) - len(digits[2])))
    return False


def _same_relations(gold: Any, said: Any) -> bool:
    """Equations are equal up to a factor, inequalities up to a positive one."""
    ones, others = ([*_relations(value)] for value in (gold, said))
    if is_assignment_relation(gold) and is_assignment_relation(said):
        ones, others = ones[-1:], others[-1:]
    return len(ones) == len(others) and all(any(_same_relation(one, other) for other in others) for one in ones)


def _relations(value: Any) -> Sequence[tuple[str, Any]]:
    parts = value._unsorted_args if isinstance(value, And) else [value]
    found = []
    for part in parts:
        sides = _exact(part.lhs - part.rhs)
        name = type(part).__name__
        if name in ("LessThan", "StrictLessThan"):
            sides, name = -sides, name.replace("Less", "Greater")
        found.append((name, sides))
    return found


def _same_relation(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    if one[0] != other[0]:
        return False
    factor = sympy.cancel(sympy.together(one[1] / other[1]))
    if not factor.is_number:
        factor = sympy.simplify(factor)
    return bool(factor.is_number and factor.is_nonzero and ("Than" not in one[0] or factor.is_positive))


def _is_equation(value: Any) -> bool:
    return isinstance(take_last_relation(value), sympy.Eq)


def _verified(gold: Any, said: Any) -> bool:
    return verify(gold, said, float_rounding=30, timeout_seconds=None, allow_set_relation_comp=True)


def _letters(text: str) -> str:
    return "".join(re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r"\1", text).lower().split())


def _exact(value: Any) -> Any:
    return value.xreplace({number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)})


def canonical(value: Any) -> str:
    """One string for all forms of a value: exact numbers, expanded, roots out of denominators."""
    return _canonical_or_none(value) or str(value)


def _canonical_or_none(value: Any) -> str | None:
    if isinstance(value, str):
        return _letters(value)
    with suppress(Exception):
        return sympy.sstr(_normal(value), order="lex")
    return None


def _normal(item: Any) -> Any:
    if is_assignment_relation(item):
        item = take_last_relation(item).rhs
    if isinstance(item, (Relational, And)):
        return sympy.Tuple(*(sympy.Symbol(f"{name} {sympy.sstr(_normal(sides))}") for name, sides in _relations(item)))
    if isinstance(item, sympy.MatrixBase):
        return item.applyfunc(_normal)
    if isinstance(item, (FiniteSet, sympy.FiniteSet, sympy.Tuple, sympy.Interval, sympy.Union)):
        return item.func(*map(_normal, item.args))
    item = _exact(item.doit())
    if not isinstance(item, sympy.Expr) or (item.is_number and item.is_Rational) or item.count_ops() > _OPERATIONS:
        return item
    return sympy.expand(sympy.radsimp(sympy.cancel(item)))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> Answer | None:
    inner = last_boxed(answer) or answer
    return read(prepared(f"\\boxed{{{inner}}}")[0])


def compare(answer: str, text: str) -> Verdict:
    """The verdict on a response, and its final answer in canonical form."""
    gold = _reference(answer)
    found, settled = prepared(text)
    if not settled:
        parsed = parse(found, parsing_timeout=None) if found else []
        found = prepared(f"\\boxed{{{parsed[-1]}}}")[0] if parsed else ""
    said = read(found)
    if gold is None and found and _letters(found) == _letters(prepared(f"\\boxed{{{answer}}}")[0]):
        return Verdict.of(True, _letters(found))  # a damaged reference has its text alone
    if said is None:
        return Verdict(UNREADABLE)
    written_out = gold is not None and len(gold.values) == 1 and getattr(gold.values[0], "is_Rational", False)
    if written_out and not _unfinished(gold.items) and _unfinished(said.items):
        return Verdict(UNREADABLE)
    right = gold is not None and same(gold, said)
    # 1.2857142857 is right for 9/7 and then counts as the same answer.
    return Verdict.of(right, gold.form if gold and right else said.form)


def _unfinished(items: Sequence[str]) -> bool:
    """Whether an operation is left to be done, as where a text has the question's "2 + 3 * 4" and no answer to it."""
    return any(_OPERATION.search(_POWER_OF_TEN.sub("e", item).rpartition("=")[2]) for item in items)


class _Late(BaseException):
    """No ``Exception``, which sympy and math-verify would swallow."""


def _late(number: int, frame: object) -> None:
    raise _Late


def main() -> None:
    """Answers line by line until the other end closes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGVTALRM, _late)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _HARD_CPU_SECONDS)  # its signal ends the process
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            verdict = compare(*json.loads(line))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except _Late:
            verdict = Verdict(TIMED_OUT)
        except Exception:
            verdict = Verdict(UNREADABLE)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(asdict(verdict)), file=replies, flush=True)


if __name__ == "__main__":
    main()
