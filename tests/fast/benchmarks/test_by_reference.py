# SPDX-License-Identifier: Apache-2.0
"""Scores split by reference."""

from typing import Any

import pytest

from benchmarks.by_reference import report

REFERENCES = ["2", "2", "3", "2", "5"]


def evaluation(*correct: int) -> dict[str, Any]:
    return {"problems": [{"id": str(number), "n": 4, "correct": count} for number, count in enumerate(correct)]}


def test_scores_by_reference_by_hand() -> None:
    """A run that answers 2 to everything has the share of that reference, 3/5, and nothing elsewhere."""
    results = {
        "untrained": evaluation(1, 1, 1, 1, 1),
        "runs": [
            {"id": "collapsed", "evaluation": evaluation(4, 4, 0, 4, 0)},
            {"id": "solving", "evaluation": evaluation(2, 4, 4, 0, 3)},
            {"id": "failed", "evaluation": None},
        ],
    }
    assert report(results, REFERENCES, most=1).splitlines()[2:] == [
        "| 2 | 3 | 0.600 |",
        "",
        "| run | reference 2 | the rest | all |",
        "| --- | --- | --- | --- |",
        "| untrained | 0.250 | 0.250 | 0.250 |",
        "| collapsed | 1.000 | 0.000 | 0.600 |",
        "| solving | 0.500 | 0.875 | 0.650 |",
    ]


def test_another_problem_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"untrained was evaluated on 2 problems; the file has 5\."):
        report({"untrained": evaluation(1, 1), "runs": []}, REFERENCES, most=1)
