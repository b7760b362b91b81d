# SPDX-License-Identifier: Apache-2.0
"""Math answers: forms by hand, hundreds of MATH's references, time limits, threads."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ngrpo.workbench.evaluate import Verdict
from ngrpo.workbench.scoring import answers
from ngrpo.workbench.scoring.answers import check_math
from tests.fast.scorer_pairs import MATH

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"$\dfrac12$"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("50", r"\boxed{50\%}"),
        ("75,075", "So there are 75075 ways."),
        ("12000", "Hence $x = 12,000$."),
        (r"11\frac{2}{3}", r"\boxed{\frac{35}{3}}"),
        (r"(1,4\sqrt{3})", r"The point is $\left(1, 4\sqrt{3}\right)$."),
        ("x^2-1", r"\boxed{(x-1)(x+1)}"),
        (r"\frac{\sqrt{5}}{5}", r"\boxed{\frac{1}{\sqrt{5}}}"),
        (r"\text{Evelyn}", "The answer is Evelyn."),
        (r"\mbox{Saturday}", r"\boxed{\text{Saturday}}"),
        ("18.90", r"It costs \$18.90 in all. The answer is \$18.90."),
        ("5", r"\boxed{5\text{ inches}}"),
        ("5", "x = 5"),
        ("12", "The answer is **12**.<|im_end|>"),
        ("12", r"<think>Perhaps \boxed{3}</think>Therefore \boxed{12}"),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
        *(
            ("12", text)
            for text in (
                "The sum is 12.",
                "The result is 12",
                "It is 12.",
                "We get 12.",
                "Result: 12",
                "7 + 5 equals 12.",
                "7 + 5 is 12.",
                "7 + 5 = 12",
                "The answer is: The sum is 12",
                "So it is -3 + 15 = 12, that is 12.",
                "USD 12",
            )
        ),
        ("3/4", "The probability is 3/4."),
        *(("1011_2", text) for text in ("1011_2", r"\boxed{1011_{2}}", "1011")),
        ("-22", "2 - -3 * -8 = -22"),
        ("300000", r"\boxed{3\times 10^{5}}"),
        ("0.001", r"\boxed{10^{-3}}"),
        (r"\frac{3}{2}", r"\boxed{1\frac{1}{2}}"),
        ("x+1", "x + 1"),
        (r"2+3\sqrt{2}", r"\boxed{2 + 3\sqrt{2}}"),
    ],
)
def test_right(answer: str, text: str) -> None:
    assert check_math(answer, text).correct


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\frac{1}{2}", "2"),
        (r"\frac{1}{2}", r"\boxed{0.51}"),
        ("12", r"\boxed{12}, no: \boxed{13}"),
        ("12", r"\boxed{12}, or rather \boxed{1"),
        ("12", "112"),
        ("12", "-12"),
        ("(7,49)", r"\boxed{(49,7)}"),
        (r"\text{Evelyn}", "The answer is Angela."),
        ("12", "I do not know"),
        ("12", ""),
        ("12", r"\boxed{}"),
        ("1011_2", r"\boxed{1011_3}"),
        ("11_5", "11_6"),
        # The question once more is no answer, though its value is the reference.
        ("-22", "2 - -3 * -8"),
        ("-22", r"\boxed{2 - -3 \cdot -8}"),
        ("-15", "To calculate -5 * 9/3, follow these"),
        ("-16", "The expression -8 + -5 - 3 is actually"),
        ("21", "The product 3 × 7 is"),
        ("6", "10 - 4"),
        ("13", "It is 12."),
    ],
)
def test_wrong(answer: str, text: str) -> None:
    assert not check_math(answer, text).correct


def test_pairs() -> None:
    """No wrong response is accepted, and at most five right ones are refused."""
    verdicts = [(pair, check_math(pair.gold, pair.response)) for pair in MATH]
    assert [pair for pair, verdict in verdicts if verdict.correct and not pair.right] == []
    assert len([pair for pair, verdict in verdicts if pair.right and not verdict.correct]) <= 5


@pytest.mark.more
def test_agrees_with_math_verify_where_it_is_right() -> None:
    from math_verify import parse, verify

    plain = [pair.right == verify(parse(f"\\boxed{{{pair.gold}}}"), parse(pair.response)) for pair in MATH]
    assert sum(plain) > 250
    disagreed = [p for p, right in zip(MATH, plain) if right and check_math(p.gold, p.response).correct != p.right]
    assert disagreed == []


def test_equal_answers_have_one_canonical_form() -> None:
    forms = ["1/2", "0.5", r"\boxed{\frac{1}{2}}", r"The answer is $\tfrac{2}{4}$.", "Answer: 0.50", r"x=\frac12"]
    assert {check_math("7", text).extracted for text in forms} == {"1/2"}
    assert check_math("7", r"\boxed{x(x+1)}").extracted == check_math("7", r"\boxed{x+x^2}").extracted
    assert (
        check_math("7", r"\boxed{\frac{1}{\sqrt{2}}}").extracted
        == check_math("7", r"\boxed{\frac{\sqrt{2}}{2}}").extracted
    )
    assert check_math("7", r"\boxed{1,2}").extracted == check_math("7", r"\boxed{2,1}").extracted
    assert check_math("7", r"\boxed{(1,2)}").extracted != check_math("7", r"\boxed{(2,1)}").extracted
    # Right up to rounding: the same answer as the reference.
    assert check_math(r"\frac{9}{7}", "1.285714286").extracted == "9/7"
    assert check_math("7", "").extracted is None and not check_math("7", "I cannot say").parsed


@pytest.mark.more
def test_references_of_math(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rates over all distinct references are in docs/evaluation.md.

    Wrong verdicts there are all on references whose braces do not close, which no form in a box can get right: two of
    these 300, with up to five such forms each.
    """
    from benchmarks.answer_checking import measure, references, told_apart, total

    answers = references(str(shared_data / "math_test.parquet"), 300)
    damaged = [a for a in answers if a.replace(r"\{", "").replace(r"\}", "").count("{") != a.count("}")]
    (refused, right), (accepted, wrong) = map(total, measure(answers))
    split, pairs = total(told_apart(answers[:60]))
    with capsys.disabled():
        print(
            f"\n{len(answers)} references of MATH, {len(damaged)} damaged: {refused} of {right} right forms refused,"
            f" {accepted} of {wrong} wrong ones accepted, {split} of {pairs} equal ones told apart"
        )
    assert len(answers) == 300
    assert right > 3000
    assert wrong > 1800
    assert len(damaged) <= 3
    assert refused <= 5 * len(damaged)
    assert accepted == 0
    assert split <= 5 * len(damaged)


def test_from_threads() -> None:
    """math-verify alone raises there: its alarm needs the main thread."""
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda i: check_math(str(i), rf"\boxed{{{i + i % 2}}}"), range(40)))
    assert [v.correct for v in verdicts] == [i % 2 == 0 for i in range(40)]


@pytest.mark.slow
def test_a_time_out_is_a_verdict_of_its_own() -> None:
    """Tried twice; the next answer has a child of its own."""
    assert check_math("x", r"\boxed{9^{9^{9^{9}}}}") == Verdict("timed_out")
    assert check_math("12", "12").correct


def test_a_stopped_machine_is_no_time_out() -> None:
    """The limit counts the processor's seconds, and not those of a clock."""
    assert check_math("12", "12").correct
    child = answers._child.pid
    os.kill(child, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(check_math, "12", r"\boxed{12}")
        time.sleep(0.3)
        assert not verdict.done()
        os.kill(child, signal.SIGCONT)
        assert verdict.result().correct


def test_a_child_that_died_is_replaced() -> None:
    assert check_math("12", "12").correct
    answers._child.kill()
    answers._child.wait()
    assert check_math("12", "12").correct


def test_a_child_that_dies_over_an_answer_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([Verdict("timed_out"), Verdict("right", 1.0, "12"), Verdict("timed_out"), Verdict("timed_out")])
    monkeypatch.setattr(answers, "_ask", lambda answer, text: next(replies))
    assert check_math("12", "12").correct
    assert check_math("12", "12") == Verdict("timed_out")
