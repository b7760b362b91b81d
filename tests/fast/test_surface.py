# SPDX-License-Identifier: Apache-2.0
"""The script that reads another vLLM's sources tells the kinds of change apart, for every patched definition."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import surface
from ngrpo.machine.upstream.patch import definition
from ngrpo.patches import VLLM

ROLLOUT = Path(__file__).resolve().parents[2] / "ngrpo" / "rollout"


def test_every_method_that_is_replaced_on_a_runner_has_a_row() -> None:
    assigned = {
        node.targets[0].attr
        for node in ast.walk(ast.parse((ROLLOUT / "runners.py").read_text("utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("runner.")
    }
    assert assigned == {"_update_states", "_preprocess", "add_requests", "prepare_inputs", "sample"}
    assert assigned <= {row.attribute.rpartition(".")[2] for row in VLLM}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's sources")
def test_the_installed_vllm_has_all_of_them() -> None:
    root = Path(find_spec("vllm").origin).parents[1]
    assert {line[:21].strip() for line in surface.lines(None, root)} == {"as it was"}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("class A:\n    def f(self, x):\n        return x\n", "as it was"),
        ("class A:\n    def f(self, x):\n        return -x\n", "another body"),
        ("class A:\n    def f(self, x, y):\n        return x\n", "other parameters"),
        ("class A:\n    def g(self, x):\n        return x\n", "gone"),
    ],
)
def test_kinds_of_change(after: str, told: str) -> None:
    before = "class A:\n    def f(self, x):\n        return x\n"
    assert surface.moved(*(definition(ast.parse(source), "A.f") for source in (before, after))) == told
