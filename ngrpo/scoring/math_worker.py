# SPDX-License-Identifier: Apache-2.0
"""The child process of math_answers.py: receives references with answers, and sends a verdict for each."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from ngrpo.scoring.answers import last_boxed, stated, visible
from ngrpo.scoring.problem import UNREADABLE, Verdict

# Seconds for math-verify's own alarms, each of parse and verify, and for making one answer canonical.
_SECONDS = 3
_MEMORY = 8 << 30
# An expression with more operations is printed as it stands: sympy may take minutes over it.
_OPERATIONS = 80
# math-verify searches text by expressions whose time grows faster than its length; an answer stands at the end.
_TAIL = 4000
_BARE = 120
_DELIMITED = re.compile(r"\$|\\\(|\\\[")
_PLAIN_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z{]*\})")
_WORD_BEFORE_NUMBER = re.compile(r"(?<!\S)(?!(?:pi|sin|cos|tan|log|ln|sqrt|exp|max|min)\b)[A-Za-z]{2,}[.,:]?\s.*\d")
# 3 \times 10^5, and all other operations but one fraction.
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[*×·])\s*10\s*\^")
_OPERATION = re.compile(r"[+*×·÷]|\\(?:times|cdot|div|pm)(?![A-Za-z])|[\d)}]\s*[-−–]|/.*/")
_BASE = re.compile(r"\d_\{?(\d+)")
# "x = 12,000": after an equals sign math-verify takes the comma for the next element of a list.
_THOUSANDS = re.compile(r"=\s*-?\d{1,3}(?:,\d{3})+(?![\d,])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")


def compare(answer: str, text: str) -> Verdict:
    """Whether a text's final answer equals the reference, and that answer in canonical form."""
    from math_verify import verify

    gold, gold_canonical = _reference(answer)
    expressions = _parse(text)
    if not expressions or (_is_number(gold) and _unfinished(expressions)):
        return UNREADABLE
    extracted = canonical(expressions)
    same = extracted is not None and extracted == gold_canonical
    correct = _same_base(answer, _source(expressions)) and bool(
        same or verify(gold, expressions, timeout_seconds=_SECONDS)
    )
    # 1.2857142857 is right for 9/7 and then counts as the same answer.
    extracted = gold_canonical if correct and gold_canonical else extracted
    return Verdict(float(correct), correct, extracted, extracted is not None)


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[list[Any], str | None]:
    inner = (last_boxed(answer) or answer).replace("\\mbox", "\\text").strip()
    parsed = _parse_boxed(inner)
    return parsed, canonical(parsed)


def _is_number(gold: list[Any]) -> bool:
    """Whether a reference is a number that is written out, such as 12, 0.5 or 3/4."""
    return bool(gold) and bool(getattr(gold[0], "is_Rational", False)) and not _unfinished(gold)


def _unfinished(parsed: list[Any]) -> bool:
    """Whether an operation is left to be done, as where a text has the question's "2 + 3 * 4" and no answer to it."""
    return bool(_OPERATION.search(_POWER_OF_TEN.sub("e", _source(parsed).rpartition("=")[2])))


def _same_base(answer: str, source: str) -> bool:
    """Whether two numbers such as 1011_2 have the same base, where both name one: math-verify does not look at it."""
    bases = [base[1] for base in (_BASE.search(answer), _BASE.search(source)) if base]
    return len(set(bases)) < 2


def _source(parsed: list[Any]) -> str:
    """What math-verify took an answer from."""
    return next((item for item in parsed if isinstance(item, str)), "")


def _parse(text: str) -> list[Any]:
    """Sympy's and the plain form of the final answer; empty where there is none."""
    from math_verify import parse

    text = visible(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return _parse_boxed(boxed) if boxed else []
    tail = text[-_TAIL:].strip()
    for candidate in (stated(tail), tail):
        if candidate and (bare := _bare(candidate)):
            return _parse_boxed(bare)
    return parse(_without_commas(tail), parsing_timeout=_SECONDS)


def _bare(candidate: str) -> str | None:
    """A candidate that is an answer and nothing else, trimmed; None where it is a sentence or has its own $...$."""
    candidate = re.sub(r"[*_]{2,}|<\|[^|<>]*\|>", "", candidate).strip()
    candidate = re.sub(r"(?:\\[,;:! ]|[.,;:!\s])+$", "", candidate)
    whole = re.fullmatch(r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]", candidate, re.DOTALL)
    if whole:
        candidate = next(group for group in whole.groups() if group).strip()
    # "$18.90" is money, "$x$ or $y$" is not bare.
    money = re.fullmatch(r"\$\s?[\d,.]+", candidate)
    words = _PLAIN_WORDS.findall(_TEXT.sub("", candidate))
    # A name may be an answer, and a number may have a unit: "Evelyn", "12 square inches".
    allowed = 2 if any(c.isdigit() for c in candidate) else 1
    if not candidate or "\n" in candidate or len(candidate) > _BARE or len(words) > allowed:
        return None
    if _WORD_BEFORE_NUMBER.search(candidate):  # "It is 12."
        return None
    if _DELIMITED.search(candidate.replace("\\$", "")) and not money:
        return None
    return candidate


def _parse_boxed(content: str) -> list[Any]:
    from math_verify import parse

    return parse("\\boxed{" + _without_commas(content) + "}", parsing_timeout=_SECONDS)


def _without_commas(text: str) -> str:
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def canonical(parsed: list[Any]) -> str | None:
    """One string for all forms of an answer: exact numbers, expanded, roots out of denominators."""
    import sympy
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    for item in parsed:
        if isinstance(item, str):
            return "".join(_TEXT.sub(r"\1", item).lower().split()) or None
        for form in (lambda item: sympy.sstr(_normal(item), order="lex"), str):
            with suppress(Exception, TimeoutException):
                return timeout(_SECONDS)(form)(item)
    return None


def _normal(item: Any) -> Any:
    import sympy
    from latex2sympy2_extended.sets import FiniteSet
    from math_verify.grader import get_pct_val, is_assignment_relation, take_last_relation

    if is_assignment_relation(item):
        item = take_last_relation(item).rhs
    percent: Any = get_pct_val
    item = percent(item, item)
    if isinstance(item, (FiniteSet, sympy.FiniteSet)):
        parts = {sympy.sstr(part): part for part in map(_normal, item.args)}
        return next(iter(parts.values())) if len(parts) == 1 else sympy.Tuple(*(parts[key] for key in sorted(parts)))
    if isinstance(item, sympy.MatrixBase):
        return item.applyfunc(_normal)
    if isinstance(item, (sympy.Tuple, sympy.Interval, sympy.Union)):
        return item.func(*map(_normal, item.args))
    item = item.doit()
    item = item.xreplace({number: sympy.Rational(str(number)) for number in item.atoms(sympy.Float)})
    if not isinstance(item, sympy.Expr) or (item.is_number and item.is_Rational) or item.count_ops() > _OPERATIONS:
        return item
    return sympy.expand(sympy.radsimp(sympy.cancel(item)))


def main(channel: int) -> None:
    """Answers over a connection, given by its file descriptor, until the other end closes."""
    import resource

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401  (its import must not count as the first question's time)

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    parent = Connection(channel)
    parent.send("ready")
    while True:
        question = parent.recv()
        try:
            verdict = compare(*question)
        except Exception:
            verdict = UNREADABLE
        parent.send(verdict)


if __name__ == "__main__":
    with suppress(EOFError):
        main(int(sys.argv[1]))
