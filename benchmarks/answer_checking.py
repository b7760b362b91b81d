# SPDX-License-Identifier: Apache-2.0
"""How often the math scorer is wrong: reference answers of MATH in other forms, and against wrong answers.

    python -m benchmarks.answer_checking PROBLEMS.parquet [--answers 1000] [--show]

PROBLEMS are problems with math answers, as `ngrpo eval --data` takes them.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from benchmarks.command_line import parser_of
from benchmarks.machine import describe
from ngrpo.methods.scoring.answers import check_math
from ngrpo.workbench.evaluate import load_problems

_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"-?\d+|-?\d{1,3}(,\d{3})+")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_UNRELATED = "9876543210987"
_LAYOUT = re.compile(r"\\(?:left|right|[,!;: ])|\s")


@dataclass
class Rate:
    """Wrong verdicts among all, for one form."""

    total: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def add(self, wrong: bool, answer: str, text: str) -> None:
        self.total += 1
        if wrong:
            self.wrong.append((answer, text))


def value(answer: str) -> Fraction | None:
    """The number that a reference is, read without the scorer's help: integer, decimal or simple fraction."""
    answer = answer.strip().removeprefix("\\$")
    fraction = _FRACTION.fullmatch(answer)
    if fraction:
        return Fraction(int(fraction[1] + fraction[2]), int(fraction[3]))
    if _INTEGER.fullmatch(answer):
        return Fraction(int(answer.replace(",", "")))
    return Fraction(Decimal(answer)) if _DECIMAL.fullmatch(answer) else None


def right_forms(answer: str) -> Iterator[tuple[str, str]]:
    """The same answer in other words: (form, text)."""
    yield "bare", answer
    yield "boxed", f"We add the two sides, so the result is $\\boxed{{{answer}}}$."
    yield "boxed, after another", f"First $\\boxed{{17}}$ seems right. It is not: \\[\\boxed{{{answer}}}\\]"
    yield "in a sentence", f"Both cases give the same. Therefore, the answer is ${answer}$."
    yield "in a sentence, no dollars", f"Both cases give the same. The answer is {answer}."
    yield "after Answer:", f"We count them all.\n\n**Answer:** {answer}"
    yield "on lines of its own", f"Therefore, the final answer is:\n\n\\[\n{answer}\n\\]"
    yield "boxed, then verified", f"We get $\\boxed{{{answer}}}$.\n\nWait, let me check. Yes, the answer is correct."
    yield "stated, then verified", f"The answer is ${answer}$. I have verified that the answer is correct."
    yield "after thinking", f"<think>Is it $\\boxed{{3}}$? No.</think>The answer is $\\boxed{{{answer}}}$."
    if "\\frac" in answer:
        display_fractions = answer.replace("\\frac", "\\dfrac")
        text_fractions = answer.replace("\\frac", "\\tfrac")
        yield "dfrac", f"\\boxed{{{display_fractions}}}"
        yield "tfrac", f"The answer is ${text_fractions}$."
    if "(" in answer and "\\left" not in answer:
        spaced = answer.replace("(", "\\left( ").replace(")", " \\right)").replace(",", ", ")
        yield "left, right and spaces", f"\\boxed{{{spaced}}}"
    number = value(answer)
    if number is not None:
        yield from _right_forms_of_number(answer, number)


def _right_forms_of_number(answer: str, number: Fraction) -> Iterator[tuple[str, str]]:
    """Forms that only a number has."""
    if number.denominator > 1 and "\\frac" in answer:
        yield "a/b, boxed", f"\\boxed{{{number.numerator}/{number.denominator}}}"
        yield "a/b, bare", f"{number.numerator}/{number.denominator}"
    decimal = _decimal(number)
    if decimal is not None:
        yield "decimal, boxed", f"\\boxed{{{decimal}}}"
        yield "decimal, in a sentence", f"So the answer is {decimal}."
    if number.denominator == 1:
        yield "a number with .0", f"\\boxed{{{number.numerator}.0}}"
        yield "thousands with commas", f"The answer is $\\boxed{{{number.numerator:,}}}$."
    plain = answer.removeprefix("\\$")
    yield "with a unit", f"\\boxed{{{plain}\\text{{ cm}}}}"
    yield "with a dollar sign", f"\\boxed{{\\${plain}}}"
    yield "x =", f"Hence $x = {plain}$."
    if "\\" not in plain:
        yield "The sum is", f"The sum is {plain}."
        yield "It is", f"It is {plain}."
        yield "Result:", f"Result: {plain}"


def wrong_forms(answer: str, others: list[str], chance: random.Random) -> Iterator[tuple[str, str]]:
    """Answers that are not this one: (form, text)."""
    other = chance.choice(others)
    while _same(answer, other):
        other = chance.choice(others)
    yield "another's answer, boxed", f"So we get $\\boxed{{{other}}}$."
    yield "another's answer, in a sentence", f"The answer is {other}."
    yield "right one first, then another", f"At first $\\boxed{{{answer}}}$, but it is $\\boxed{{{other}}}$."
    yield "right one, then corrected", f"$\\boxed{{{answer}}}$\n\nWait, that's wrong. It should be ${other}$."
    yield "no answer", "I am not sure how to go on from here"
    pair = re.fullmatch(r"\(([^,()]+),([^,()]+)\)", answer)
    if pair and _LAYOUT.sub("", pair[1]) != _LAYOUT.sub("", pair[2]):
        yield "coordinates swapped", f"\\boxed{{({pair[2]},{pair[1]})}}"
    if answer.startswith(("\\frac", "\\sqrt")):
        yield "negated", f"\\boxed{{-{answer}}}"
    number = value(answer)
    if number is None:
        return
    yield "one more", f"\\boxed{{{_latex(number + 1)}}}"
    ten_times = number * 10 if number else Fraction(10)
    yield "ten times", f"The answer is ${_latex(ten_times)}$."
    if number:
        yield "negated", f"\\boxed{{{_latex(-number)}}}"
    if number.denominator == 1:
        yield "the question again", f"{number - 7} + 7"
        yield "the question again, in words", f"To calculate {number - 7} + 7, we take"
    if number.denominator > 1:
        yield "upside down", f"\\boxed{{{_latex(1 / number)}}}"


def measure(answers: list[str], seed: int = 0) -> tuple[dict[str, Rate], dict[str, Rate]]:
    """Checks every form of every answer.

    Args:
        answers: distinct references.
        seed: of the choice of other answers.

    Returns:
        Rates by form: right answers (wrong verdict: refused), wrong answers (wrong verdict: accepted).
    """
    chance = random.Random(seed)
    right: dict[str, Rate] = {}
    wrong: dict[str, Rate] = {}
    for answer in answers:
        for form, text in right_forms(answer):
            accepted = check_math(answer, text).correct
            right.setdefault(form, Rate()).add(not accepted, answer, text)
        for form, text in wrong_forms(answer, answers, chance):
            accepted = check_math(answer, text).correct
            wrong.setdefault(form, Rate()).add(accepted, answer, text)
    return right, wrong


def told_apart(answers: list[str]) -> dict[str, Rate]:
    """How often two forms of an answer to another problem count as two answers.

    Args:
        answers: distinct references.

    Returns:
        Rates by form; a wrong verdict is another canonical string than the boxed answer has.
    """
    rates: dict[str, Rate] = {}
    for answer in answers:
        boxed = check_math(_UNRELATED, f"\\boxed{{{answer}}}").extracted
        for form, text in right_forms(answer):
            extracted = check_math(_UNRELATED, text).extracted
            rates.setdefault(form, Rate()).add(extracted != boxed, answer, text)
    return rates


def total(rates: dict[str, Rate]) -> tuple[int, int]:
    """Wrong verdicts, and all."""
    return sum(len(rate.wrong) for rate in rates.values()), sum(rate.total for rate in rates.values())


def references(source: str, count: int, seed: int = 0) -> list[str]:
    """Distinct reference answers of a dataset, drawn at random."""
    answers = sorted({problem.answer for problem in load_problems(source, scorer="math", skip_unanswered=True)})
    return random.Random(seed).sample(answers, min(count, len(answers)))


def _same(first: str, second: str) -> bool:
    """Whether two references may be the same answer: by value, or by their letters and digits alone."""
    first_value = value(first)
    second_value = value(second)
    if first_value is not None and second_value is not None:
        return first_value == second_value
    return _letters_and_digits(first) == _letters_and_digits(second)


def _letters_and_digits(answer: str) -> str:
    without_layout = _LAYOUT.sub("", answer)
    return re.sub(r"\\(?:text|mathrm|mbox)|[^0-9A-Za-z.+-]", "", without_layout)


def _latex(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def _decimal(number: Fraction) -> str | None:
    """A fraction as a finite decimal of at most six places."""
    for places in range(1, 7):
        scaled = number * 10**places
        if number.denominator > 1 and scaled.denominator == 1:
            return f"{Decimal(int(scaled)).scaleb(-places):f}"
    return None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("source", help="problems with math answers, as ngrpo eval --data takes them")
    parser.add_argument("--answers", type=int, default=1000, help="distinct references [1000]")
    parser.add_argument("--show", action="store_true", help="print every wrong verdict")
    options = parser.parse_args()
    answers = references(options.source, options.answers)
    print(f"{describe()}\n{len(answers)} distinct reference answers\n")
    right, wrong = measure(answers)
    _print_rates("right answers refused", right, options.show)
    _print_rates("wrong answers accepted", wrong, options.show)
    _print_rates("equal answers told apart", told_apart(answers), options.show)


def _print_rates(title: str, rates: dict[str, Rate], show: bool) -> None:
    print(f"{title:<34}{'wrong':>7}{'of':>8}{'rate':>9}")
    for form, rate in rates.items():
        wrong = len(rate.wrong)
        print(f"  {form:<32}{wrong:>7}{rate.total:>8}{wrong / rate.total:>9.2%}")
    all_wrong, all_verdicts = total(rates)
    print(f"  {'all':<32}{all_wrong:>7}{all_verdicts:>8}{all_wrong / all_verdicts:>9.2%}\n")
    if show:
        for form, rate in rates.items():
            for answer, text in rate.wrong:
                print(f"    {form}: {answer!r} against {text!r}")


if __name__ == "__main__":
    main()
