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
from collections.abc import Iterable
from dataclasses import asdict, replace

import sympy
from latex2sympy2_extended.logic import And
from math_verify import parse, verify
from math_verify.grader import is_assignment_relation, take_first_relation, take_last_relation
from sympy.core.relational import Relational

from ngrpo.methods.scoring import UNREADABLE, Verdict
from ngrpo.methods.scoring.answers import last_boxed
from ngrpo.methods.scoring.math_reading import (
    Answer,
    Relation,
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
_PERCENT = ("percent", 1)
# A decimal with fewer digits has its own value only: 0.33 is not 1/3, 0.333333 is.
_DIGITS = 6
_DECIMAL = re.compile(r"-?(\d*)\.(\d+)(?:\s*\\(?:times|cdot)\s*10\^\{?(-?\d+)\}?)?")
_BASE = re.compile(r"\d_\{?(\d+)")


def same(gold: Answer, answer: Answer) -> bool:
    """Whether an answer is the reference."""
    if gold.label and answer.label:
        if gold.label != answer.label:
            return False
        if answer.words == (answer.label.lower(),):  # the answer is the label alone, which is read as its word too
            return True
    # One of both is a letter, and the other that option with its text: "(B) 12".
    for letter, option in ((gold, answer), (answer, gold)):
        if letter.words and len(letter.words) == 1 and option.label and letter.words[0] == option.label.lower():
            return True
    if gold.clock and answer.clock:
        halves = {gold.clock.half, answer.clock.half} - {""}
        return (gold.clock.hours, gold.clock.minutes) == (answer.clock.hours, answer.clock.minutes) and len(halves) < 2
    gold = _as_ratio(gold)
    answer = _as_ratio(answer)
    if gold.words or answer.words:
        return _as_words(gold) == _as_words(answer) or _are_same_letters(gold, answer)
    if len(gold.items) == 1 and _are_forms_of(gold, answer):
        answer = replace(answer, items=answer.items[:1], values=answer.values[:1])
    for point, assignments in ((gold, answer), (answer, gold)):
        if len(point.items) == 1 and _are_assignments(assignments):
            return _same_point(point, assignments)
    if len(gold.items) != len(answer.items):
        return False
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    gold_percent = gold.unit == _PERCENT
    answer_percent = answer.unit == _PERCENT
    if gold_percent != answer_percent and len(gold.values) == 1:
        return _same_with_percent(gold, answer, answer_percent)
    unmatched = list(zip(answer.values, answer.items))
    for gold_value, gold_item in zip(gold.values, gold.items):
        for pair in unmatched:
            answer_value, answer_item = pair
            if equal(gold_value, answer_value, gold_item, answer_item):
                unmatched.remove(pair)
                break
        else:
            return False
    return True


def _are_forms_of(gold: Answer, answer: Answer) -> bool:
    """Whether an answer gives the reference's one value in several forms, such as 1/2 and 0.5."""
    are_different = len(set(answer.items)) == len(answer.items) > 1
    return are_different and all(
        equal(gold.values[0], value, gold.items[0], item) for value, item in zip(answer.values, answer.items)
    )


def _are_assignments(answer: Answer) -> bool:
    """Whether an answer has several items with different left sides, such as ``x = 2, y = 3``."""
    left_sides = {item.partition("=")[0] for item in answer.items}
    return len(left_sides) == len(answer.items) > 1


def _same_point(point: Answer, assignments: Answer) -> bool:
    """Whether ``(2, 3)`` is the point of ``x = 2, y = 3``."""
    right_sides = ",".join(item.rpartition("=")[2] for item in assignments.items)
    as_point = read(f"({right_sides})")
    return all(map(is_assignment_relation, assignments.values)) and as_point is not None and same(point, as_point)


def _as_words(answer: Answer) -> tuple[str, ...]:
    """The words of an answer, sorted; a short word that was read as a product of letters, as in ``red``, is one too."""
    return tuple(sorted(answer.words or map(letters, answer.items)))


def _are_same_letters(gold: Answer, answer: Answer) -> bool:
    """Whether one side lists the letters of several options, and the other writes them as one word.

    The letters of a listed reference ``A, C`` may come in any order, ``CA`` too. Those of a reference ``CA`` may not:
    it can be a ranking.
    """
    listed, joined = (gold, answer) if len(_as_words(gold)) > 1 else (answer, gold)
    if not listed.words or not joined.words or len(joined.words) > 1 or any(len(word) > 1 for word in listed.words):
        return False
    if listed is gold:
        return sorted(joined.words[0]) == sorted(listed.words)
    return joined.words[0] == "".join(listed.words)


def _as_ratio(answer: Answer) -> Answer:
    """A time such as 3:2 as the ratio that it may be; other answers as they are."""
    if answer.clock is None:
        return answer
    hours = answer.clock.hours
    minutes = answer.clock.minutes
    if not hours or not minutes:
        return Answer(words=("a time",))
    return Answer(items=(f"{hours}:{minutes}",), values=(sympy.Rational(hours, minutes),))


def _same_with_percent(gold: Answer, answer: Answer, answer_percent: bool) -> bool:
    """50% is 50, where the question is in percent, and 1/2; 5000% is not 50."""
    (gold_value,) = gold.values
    (answer_value,) = answer.values
    if equal(gold_value, answer_value, gold.items[0], answer.items[0]):
        return True
    fraction, percent = (gold_value, answer_value) if answer_percent else (answer_value, gold_value)
    if not (getattr(fraction, "is_number", False) and getattr(percent, "is_number", False)):
        return False
    return bool(abs(fraction) < 2) and equal(fraction, percent / 100, "", "")


def equal(gold: Value, answer: Value, gold_text: str, answer_text: str) -> bool:
    """Whether two values are equal: exactly, but for decimals of many digits, which mean an exact value."""
    if isinstance(gold, str) or isinstance(answer, str):
        return isinstance(gold, str) and isinstance(answer, str) and letters(gold_text) == letters(answer_text)
    gold_relation = isinstance(gold, (Relational, And))
    answer_relation = isinstance(answer, (Relational, And))
    if gold_relation and answer_relation:
        return _same_relations(gold, answer)
    if answer_relation:
        last_relation = take_last_relation(answer)
        if isinstance(last_relation, sympy.Eq) and not _is_multiple(take_first_relation(answer)):
            return equal(gold, last_relation.rhs, gold_text, answer_text.rpartition("=")[2])
    if gold_relation and is_assignment_relation(gold):
        return equal(take_last_relation(gold).rhs, answer, gold_text.rpartition("=")[2], answer_text)
    if gold_relation or answer_relation:
        sets = (sympy.Set, Relational, And)
        return isinstance(gold, sets) and isinstance(answer, sets) and _verified(gold, answer)
    gold_base = _BASE.search(gold_text)
    answer_base = _BASE.search(answer_text)
    if gold_base and answer_base and gold_base[1] != answer_base[1]:
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        if gold.is_number and answer.is_number:
            return _same_numbers(gold, answer, gold_text, answer_text)
        if canonical(gold) == canonical(answer):
            return True
        return not (gold.is_number or answer.is_number) and _verified(exactly(gold), exactly(answer))
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and _all_equal(gold.flat(), answer.flat())
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        same_openness = gold.left_open == answer.left_open and gold.right_open == answer.right_open
        return same_openness and _all_equal((gold.start, gold.end), (answer.start, answer.end))
    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
        return len(gold) == len(answer) and _all_equal(gold, answer)
    return _verified(gold, answer)


def _all_equal(gold: Iterable[Value], answer: Iterable[Value]) -> bool:
    return all(equal(gold_value, answer_value, "", "") for gold_value, answer_value in zip(gold, answer))


def _is_multiple(equation: Value) -> bool:
    """Whether an equation is one such as 2x = 7, which is not solved."""
    factors = equation.lhs.args if isinstance(equation.lhs, sympy.Mul) else ()
    has_number = any(factor.is_number for factor in factors)
    has_symbol = any(factor.is_Symbol for factor in factors)
    return len(factors) == 2 and has_number and has_symbol


def _same_numbers(gold: Value, answer: Value, gold_text: str, answer_text: str) -> bool:
    """Whether two numbers are equal.

    A decimal with at least :data:`_DIGITS` digits also equals an exact number, other than a whole one, from which it
    differs by at most one unit of its last place: 1.2857142857 is 9/7, and 0.33 is not 1/3.
    """
    exact_gold = exactly(gold).doit()
    exact_answer = exactly(answer).doit()
    if exact_gold == exact_answer:
        return True
    has_decimals = gold.has(sympy.Float) or answer.has(sympy.Float)
    if exact_gold.is_Rational and exact_answer.is_Rational and not has_decimals:
        return False
    if exact_gold.is_infinite or exact_answer.is_infinite:
        return False
    gold_size = abs(exact_gold).evalf(40)
    answer_size = abs(exact_answer).evalf(40)
    difference = abs(exact_gold.evalf(40) - exact_answer.evalf(40)).evalf(40)
    if not (gold_size.is_comparable and answer_size.is_comparable and difference.is_comparable):
        return _verified(exact_gold, exact_answer)
    if difference <= max(gold_size, answer_size) * sympy.Float("1e-30"):
        return True
    if gold.has(sympy.Float) and answer.has(sympy.Float):
        return False
    # A text that is a decimal is compared with the exact value of the other side.
    for text, other_value in ((answer_text, exact_gold), (gold_text, exact_answer)):
        decimal = _DECIMAL.fullmatch(text.strip())
        if decimal is None or other_value.is_Integer:
            continue
        before_point, after_point, exponent = decimal.groups()
        digits = (before_point + after_point).lstrip("0")
        last_place = sympy.Rational(10) ** (int(exponent or 0) - len(after_point))
        return len(digits) >= _DIGITS and bool(difference <= last_place)
    return False


def _same_relations(gold: Value, answer: Value) -> bool:
    """Equations are equal up to a factor, inequalities up to a positive one."""
    gold_relations = list(relations_of(gold))
    answer_relations = list(relations_of(answer))
    if is_assignment_relation(gold) and is_assignment_relation(answer):
        gold_relations = gold_relations[-1:]
        answer_relations = answer_relations[-1:]
    if len(gold_relations) != len(answer_relations):
        return False
    for gold_relation in gold_relations:
        if not any(_same_relation(gold_relation, answer_relation) for answer_relation in answer_relations):
            return False
    return True


def _same_relation(gold: Relation, answer: Relation) -> bool:
    if gold.name != answer.name:
        return False
    factor = sympy.cancel(sympy.together(gold.difference / answer.difference))
    if not factor.is_number:
        factor = sympy.simplify(factor)
    is_inequality = "Than" in gold.name
    return bool(factor.is_number and factor.is_nonzero and (factor.is_positive or not is_inequality))


def _verified(gold: Value, answer: Value) -> bool:
    return verify(gold, answer, float_rounding=30, timeout_seconds=0, allow_set_relation_comp=True)


def compare(reference: str, text: str) -> Verdict:
    """The verdict on a response, and its final answer in canonical form."""
    answer_text, settled = prepared(text)
    if not settled:
        parsed = []
        if answer_text:
            parsed = parse(answer_text, parsing_timeout=0, extraction_mode="first_match")
        answer_text = rewritten(str(parsed[-1])) if parsed else ""
    if not answer_text:
        return Verdict(UNREADABLE)
    gold = read(rewritten(last_boxed(reference) or reference))
    answer = read(answer_text, finished=gold is not None and _is_finished_number(gold))
    if gold is None and letters(answer_text) == letters(rewritten(reference)):
        return Verdict.of(True, letters(answer_text))  # a damaged reference has its text alone
    if answer is None:
        return Verdict(UNREADABLE)
    if gold is None:
        return Verdict.of(False, answer.form)
    right = same(gold, answer)
    # 1.2857142857 is right for 9/7 and then counts as the same answer.
    return Verdict.of(right, gold.form if right else answer.form)


def _is_finished_number(gold: Answer) -> bool:
    """Whether the reference is one number without an operation to be done; then an answer 2 + 3 * 4 is refused."""
    is_number = len(gold.values) == 1 and bool(getattr(gold.values[0], "is_Rational", False))
    return is_number and not unfinished(gold.items)


def main() -> None:
    """Writes a verdict for each line of standard input, a reference and a response as JSON, until it closes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin:
        # After so many seconds of the processor SIGPROF ends this process, which has no handler for it: sympy might
        # catch an exception that a handler raises.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            verdict = compare(*json.loads(line))
        except Exception:
            verdict = Verdict(UNREADABLE)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(asdict(verdict)), file=replies, flush=True)


if __name__ == "__main__":
    main()
