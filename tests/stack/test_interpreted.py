# SPDX-License-Identifier: Apache-2.0
"""The code that PyTorch's compiler writes for an H100, executed by Triton's interpreter, against eager PyTorch.

It covers every compiled function and every registered perturbation.
benchmarks/cuda_without_gpu/interpreted.py says how.
"""

from typing import Any

import pytest

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu.interpreted import PLANS, TOLERANCE
from tests.support.own_process import result_of

# The compiled functions that each perturbation's decode step calls, with a graph for the step and without one.
OF_EVERY_GRAPH = {"keyed", "draw", "proposed_everywhere", "realised", "packed"}
OF_EVERY_STEP_IN_PARTS = {"draw", "proposed", "realised"}


def interpreted(monkeypatch: pytest.MonkeyPatch, plan: str, names: str, *flags: str) -> dict[str, Any]:
    """The report of each compiled function, by perturbation and by the function's name."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = "benchmarks.cuda_without_gpu.interpreted"
    reports = result_of(module, "--perturbations", names, "--plans", plan, "--json", *flags)
    return {name: reports[f"{name} {plan}"] for name in names.split(",")}


def assert_covered(reports: dict[str, Any], expected: set[str]) -> None:
    """Asserts that these functions ran. A disagreement would have ended the process that interpreted them."""
    for name, by_function in reports.items():
        assert set(by_function) >= expected, name
        for function, report in by_function.items():
            where = f"{name}: {function}"
            assert report["versions"] >= 1, where
            assert report["calls"] >= 1, where
            assert report["late"] == 0, f"{where} is compiled after the warm-up"
            assert report["largest"].get("float32", 0.0) <= TOLERANCE, where


def test_two_perturbations_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = interpreted(monkeypatch, "float32", "gaussian,neighbor")
    assert_covered(reports, OF_EVERY_GRAPH)


def test_a_step_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = interpreted(monkeypatch, "float32", "gaussian", "--no-graphs")
    assert_covered(reports, OF_EVERY_STEP_IN_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_perturbation(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """The plans cover padding, filters, greedy rows, bfloat16, and rows of more blocks than one reduction has."""
    names = sorted(in_tree())
    if plan == "large":
        names = ["neighbor", "gumbel"]
    reports = interpreted(monkeypatch, plan, ",".join(names))
    assert_covered(reports, OF_EVERY_GRAPH)
