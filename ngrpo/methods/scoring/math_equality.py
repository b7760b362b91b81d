# SPDX-License-Identifier: Apache-2.0
"""Whether a math response equals its reference; as a program, the child process of `answers.check_math`."""

import json
import logging
import os
import re
import resource
import signal
import sys
import warnings
from dataclasses import asdict

import sympy
from latex2sympy2_extended.logic import And
from math_verify import parse, verify
from math_verify.grader import is_assignment_relation, take_first_relation, take_last_relation
from sympy.core.relational import Relational

from ngrpo.methods.scoring import UNREADABLE, Verdict
from ngrpo.methods.scoring.answers import last_boxed
from ngrpo.methods.scoring.math_reading import (
    Answer,
    Value,
    canonical,
    exactly,
    letters,
    read,
    relations_of,
    unfinished,
)
from ngrpo.methods.scoring.math_response import prepared, rewritten

CPU_SECONDS = 5
_MEMORY = 8 << 30
# A decimal with fewer digits has its own value only: 0.33 is not 1/3, 0.333333 is.
_DIGITS = 6
_DECIMAL = re.compile(r"-?(\d*)\.(\d+)(?:\s*\\(?:times|cdot)\s*10\^\{?(-?\d+)\}?)?")
_BASE = re.compile(r"\d_\{?(\d+)")


def same(gold: Answer, said: Answer) -> bool:
    """Whether an answer is the reference."""
    if gold.label and said.label and (gold.label != said.label or not (said.items or said.words)):
        return gold.label == said.label
    if gold.words and len(gold.words) == 1 and said.label and gold.words[0] == said.label.lower():
        return True
    if gold.clock and said.clock:
        halves = {gold.clock[2], said.clock[2]} - {""}
        return gold.clock[:2] == said.clock[:2] and len(halves) < 2
    gold, said = (_as_ratio(answer) for answer in (gold, said))
    if gold.words or said.words:
        return gold.words == (said.words or (letters("".join(said.items)),))
    for one, other in ((gold, said), (said, gold)):
        if len(one.items) == 1 and len({item.partition("=")[0] for item in other.items}) == len(other.items) > 1:
            point = read(f"({','.join(item.rpartition('=')[2] for item in other.items)})")  # x = 2, y = 3
            return all(map(is_assignment_relation, other.values)) and point is not None and same(one, point)
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
    """50% is 50, where the question is in percent, and 1/2; 5000% is not 50."""
    (one,), (other,) = gold.values, said.values
    if equal(one, other, gold.items[0], said.items[0]):
        return True
    part, whole = (one, other) if said_percent else (other, one)
    small = getattr(part, "is_number", False) and bool(abs(part) < 2)
    return small and bool(getattr(whole, "is_number", False)) and equal(part, whole / 100, "", "")


def equal(gold: Value, said: Value, gold_text: str, said_text: str) -> bool:
    """Whether two values are equal: exactly, but for decimals of many digits, which mean an exact value."""
    if isinstance(gold, str) or isinstance(said, str):
        return isinstance(gold, str) and isinstance(said, str) and letters(gold_text) == letters(said_text)
    relations = [isinstance(value, (Relational, And)) for value in (gold, said)]
    if all(relations):
        return _same_relations(gold, said)
    if relations[1] and isinstance(take_last_relation(said), sympy.Eq) and not _is_multiple(take_first_relation(said)):
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
        if canonical(gold) == canonical(said):
            return True
        return not (gold.is_number or said.is_number) and _verified(exactly(gold), exactly(said))
    if isinstance(gold, sympy.MatrixBase) and isinstance(said, sympy.MatrixBase):
        return gold.shape == said.shape and all(equal(*pair, "", "") for pair in zip(gold.flat(), said.flat()))
    if isinstance(gold, sympy.Interval) and isinstance(said, sympy.Interval):
        ends = gold.left_open == said.left_open and gold.right_open == said.right_open
        return ends and all(equal(*pair, "", "") for pair in ((gold.start, said.start), (gold.end, said.end)))
    if isinstance(gold, sympy.Tuple) and isinstance(said, sympy.Tuple):
        return len(gold) == len(said) and all(equal(*pair, "", "") for pair in zip(gold, said))
    return _verified(gold, said)


def _is_multiple(equation: Value) -> bool:
    """Whether an equation is one such as 2x = 7, which is not solved."""
    factors = equation.lhs.args if isinstance(equation.lhs, sympy.Mul) else ()
    return len(factors) == 2 and any(one.is_number for one in factors) and any(one.is_Symbol for one in factors)


def _same_numbers(gold: Value, said: Value, gold_text: str, said_text: str) -> bool:
    exact, other = exactly(gold).doit(), exactly(said).doit()
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
    for text, value in ((said_text, exact), (gold_text, other)):
        digits = _DECIMAL.fullmatch(text.strip())
        if digits and not value.is_Integer and not (gold.has(sympy.Float) and said.has(sympy.Float)):
            many = len((digits[1] + digits[2]).lstrip("0")) >= _DIGITS
            return many and bool(difference <= sympy.Rational(10) ** (int(digits[3] or 0) - len(digits[2])))
    return False


def _same_relations(gold: Value, said: Value) -> bool:
    """Equations are equal up to a factor, inequalities up to a positive one."""
    ones, others = ([*relations_of(value)] for value in (gold, said))
    if is_assignment_relation(gold) and is_assignment_relation(said):
        ones, others = ones[-1:], others[-1:]
    return len(ones) == len(others) and all(any(_same_relation(one, other) for other in others) for one in ones)


def _same_relation(one: tuple[str, Value], other: tuple[str, Value]) -> bool:
    if one[0] != other[0]:
        return False
    factor = sympy.cancel(sympy.together(one[1] / other[1]))
    if not factor.is_number:
        factor = sympy.simplify(factor)
    return bool(factor.is_number and factor.is_nonzero and ("Than" not in one[0] or factor.is_positive))


def _verified(gold: Value, said: Value) -> bool:
    return verify(gold, said, float_rounding=30, timeout_seconds=0, allow_set_relation_comp=True)


def compare(answer: str, text: str) -> Verdict:
    """The verdict on a response, and its final answer in canonical form."""
    found, settled = prepared(text)
    if not settled:
        parsed = parse(found, parsing_timeout=0, extraction_mode="first_match") if found else []
        found = rewritten(str(parsed[-1])) if parsed else ""
    if not found:
        return Verdict(UNREADABLE)
    gold = read(rewritten(last_boxed(answer) or answer))
    # An open operation, as in the question's "2 + 3 * 4", is no answer to a question for a number.
    rational = gold is not None and [bool(getattr(value, "is_Rational", False)) for value in gold.values] == [True]
    finished = rational and not unfinished(gold.items)
    said = read(found, finished=finished)
    if gold is None and letters(found) == letters(rewritten(answer)):
        return Verdict.of(True, letters(found))  # a damaged reference has its text alone
    if said is None:
        return Verdict(UNREADABLE)
    if gold is None:
        return Verdict.of(False, said.form)
    right = same(gold, said)
    # 1.2857142857 is right for 9/7 and then counts as the same answer.
    return Verdict.of(right, gold.form if right else said.form)


def main() -> None:
    """Writes a verdict for each line of standard input, a reference and a response as JSON, until it closes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # the system ends the process: sympy catches exceptions
        try:
            verdict = compare(*json.loads(line))
        except Exception:
            verdict = Verdict(UNREADABLE)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(asdict(verdict)), file=replies, flush=True)


if __name__ == "__main__":
    main()
