# SPDX-License-Identifier: Apache-2.0
"""The code that PyTorch's compiler writes for an H100, executed by Triton's interpreter, against eager PyTorch.

Every function that is compiled and every registered perturbation: benchmarks/cuda_without_gpu/interpreted.py has how.
"""

from typing import Any

import pytest

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu.interpreted import PLANS, TOLERANCE
from tests.support.own_process import result_of

# What each perturbation's decode step consists of; `_mixed_rows` reads rows of the embedding.
OF_EVERY_GRAPH = {"keyed", "draw", "proposed_everywhere", "realised", "packed"}
OF_EVERY_STEP_IN_PARTS = {"draw", "proposed", "realised"}


def interpreted(monkeypatch: pytest.MonkeyPatch, plan: str, names: str, *flags: str) -> dict[str, Any]:
    """What became of each compiled function, by perturbation."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = "benchmarks.cuda_without_gpu.interpreted"
    found = result_of(module, "--perturbations", names, "--plans", plan, "--json", *flags)
    return {name: found[f"{name} {plan}"] for name in names.split(",")}


def assert_covered(found: dict[str, Any], expected: set[str]) -> None:
    """Disagreement ends the process, so that here only what was run is looked at."""
    for name, parts in found.items():
        assert set(parts) >= expected, name
        for function, part in parts.items():
            assert part["versions"] >= 1 and part["calls"] >= 1, (name, function)
            assert part["late"] == 0, f"{name}: {function} is compiled after the warm-up"
            assert part["largest"].get("float32", 0.0) <= TOLERANCE, (name, function)


def test_two_perturbations_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_covered(interpreted(monkeypatch, "float32", "gaussian,neighbor"), OF_EVERY_GRAPH)


def test_a_step_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_covered(interpreted(monkeypatch, "float32", "gaussian", "--no-graphs"), OF_EVERY_STEP_IN_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_perturbation(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """Padding, filters, greedy rows, bfloat16, and rows of more blocks than one reduction has."""
    names = ("neighbor", "gumbel") if plan == "large" else sorted(in_tree())
    found = interpreted(monkeypatch, plan, ",".join(name for name in names if name != "none"))
    assert_covered(found, OF_EVERY_GRAPH)
