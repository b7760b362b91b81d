# SPDX-License-Identifier: Apache-2.0
"""What docs/models.json says, and what `ngrpo doctor` makes of it: a verdict of the rule is not softened."""

import json
from importlib.resources import files
from typing import Any

import pytest

from benchmarks.models.table import PAGE, RESULT, summary, table, verdicts


def row(verdict: str, dtype: str = "bfloat16", under: str = "", means: tuple[float, ...] = (0.018, 0.019)) -> Any:
    figures = {"unperturbed": 0.47, "perturbed": {"neighbor": 0.2, "gumbel": 1.3}, "unreplayed": 7.0}
    return {"type": "t", "dtype": dtype, "under": under, "verdict": verdict, "means": list(means), **figures}


def test_the_page_and_the_packaged_copy_are_those_of_the_measured_rows() -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    packaged = files("ngrpo.machine.models").joinpath("measured_models.json").read_text(encoding="utf-8")
    assert json.loads(packaged) == verdicts(rows)
    page = PAGE.read_text(encoding="utf-8")
    assert table(rows) in page
    assert summary(rows) in page


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([row("right")], "right", ["the replay is exact"]),
        # One token's gap in bfloat16, with equal means: still what the rule says, with its figures.
        ([row("wrong")], "doubtful", ["wrong by the rule on largest gaps", "1.3", "0.47", "0.018", "0.019"]),
        ([row("wrong", under="preemption"), row("right")], "doubtful", ["with preemption"]),
        ([row("wrong", means=(0.018, 0.03))], "wrong", ["wrong", "0.03"]),
        ([row("wrong", dtype="float32")], "wrong", ["wrong in float32"]),
        ([row("right"), row("wrong", dtype="float32")], "wrong", ["wrong in float32"]),
        ([row("insensitive")], "unknown", ["without any perturbation"]),
        ([row("refused"), row("right")], "right", ["exact"]),
        ([row("refused")], "unknown", ["fails the proof"]),
        ([row("not run by vLLM")], "unknown", ["did not run"]),
    ],
)
def test_of_all_cases_of_a_type_the_worst_is_told(rows: list[Any], verdict: str, words: list[str]) -> None:
    found = verdicts(rows)["t"]
    assert found[0] == verdict
    assert all(word in found[1] for word in words), found[1]
