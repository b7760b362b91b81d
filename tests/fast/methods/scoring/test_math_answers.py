# SPDX-License-Identifier: Apache-2.0
"""Math answers: pairs with a person's verdict, hundreds of MATH's references, time limits, threads."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ngrpo.methods.scoring import answers
from ngrpo.methods.scoring.answers import check_math
from ngrpo.workbench.evaluate import Verdict
from tests.support.scorer_pairs import FORMS, MATH, MATH_CASES

pytest.importorskip("math_verify")


def test_pairs() -> None:
    """No wrong response is accepted, at most five right ones of the pairs are refused, and none of the cases."""
    verdicts = [(pair, check_math(pair.gold, pair.response)) for pair in MATH]
    assert [pair for pair, verdict in verdicts if verdict.correct and not pair.right] == []
    assert len([pair for pair, verdict in verdicts if pair.right and not verdict.correct]) <= 5
    assert [case for case in MATH_CASES if check_math(case["gold"], case["response"]).correct != case["right"]] == []


def test_equal_answers_have_one_canonical_form() -> None:
    for forms in FORMS:
        (form,) = {check_math("y", text).extracted for text in forms["forms"]}
        assert form


def test_canonical_forms_that_differ_round_or_miss() -> None:
    assert check_math("7", r"\boxed{(1,2)}").extracted != check_math("7", r"\boxed{(2,1)}").extracted
    # Right up to rounding: the same answer as the reference.
    assert check_math(r"\frac{9}{7}", "1.285714286").extracted == "9/7"
    assert check_math("7", "").extracted is None and not check_math("7", "I cannot say").parsed


@pytest.mark.parametrize(
    ("reference", "boxed", "correct"),
    [
        ("(B) 5", "(B)", True),
        ("(A) 5", r"\text{(A)}", True),
        ("(B) red", "(B)", True),
        ("(B) 3:45", "(B)", True),
        ("(B)", "(B) 5", True),
        ("(B) 5", "(C)", False),
        ("(B) 5", "(B) 6", False),
        ("(B) red", "(B) blue", False),
        # A time of day has the label of its option too.
        ("(B) 3:45", "(B) 3:45", True),
        ("(B) 3:45", "3:45", True),
        ("3:45", r"\textbf{(B)}\ 3:45", True),
        ("B", "(B) 3:45", True),
        ("(B) 3:45", "(C) 3:45", False),
        ("(B) 3:45", "(B) 3:46", False),
        ("B", "(C) 3:45", False),
    ],
)
def test_the_label_of_an_option_stands_for_it(reference: str, boxed: str, correct: bool) -> None:
    assert check_math(reference, rf"\boxed{{{boxed}}}").correct == correct


@pytest.mark.more
def test_references_of_math(shared_data: Path) -> None:
    """The rates over all distinct references are in docs/evaluation.md.

    Wrong verdicts there are all on references whose braces do not close, which no form in a box can get right: two of
    these 300, with up to five such forms each.
    """
    from benchmarks.answer_checking import measure, references, told_apart, total

    answers = references(str(shared_data / "math_test.parquet"), 300)
    damaged = [a for a in answers if a.replace(r"\{", "").replace(r"\}", "").count("{") != a.count("}")]
    (refused, right), (accepted, wrong) = map(total, measure(answers))
    split, _ = total(told_apart(answers[:60]))
    assert len(answers) == 300 and len(damaged) <= 3
    assert right > 3000 and wrong > 1800
    assert refused <= 5 * len(damaged) and split <= 5 * len(damaged)
    assert accepted == 0


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
    """The limit counts the processor's seconds, and not those of a clock; a child that died is replaced."""
    assert check_math("12", "12").correct
    child = answers._child
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(check_math, "12", r"\boxed{12}")
        time.sleep(0.3)
        assert not verdict.done()
        os.kill(child.pid, signal.SIGCONT)
        assert verdict.result().correct
    child.kill()
    child.wait()
    assert check_math("12", "12").correct


def test_a_child_that_dies_over_an_answer_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([Verdict("timed_out"), Verdict("right", 1.0, "12"), Verdict("timed_out"), Verdict("timed_out")])
    monkeypatch.setattr(answers, "_ask", lambda answer, text: next(replies))
    assert check_math("12", "12").correct
    assert check_math("12", "12") == Verdict("timed_out")
