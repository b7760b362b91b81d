# SPDX-License-Identifier: Apache-2.0
"""The script that reads another vLLM's sources tells the kinds of change apart, for every patched definition."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import surface
from ngrpo.machine.upstream.patch import definition
from ngrpo.patches import VLLM
from tests.conftest import ROOT

BEFORE = "class A:\n    def f(self, x):\n        return x\n"


def test_every_method_that_is_replaced_on_a_runner_has_a_row() -> None:
    tree = ast.parse((ROOT / "ngrpo" / "rollout" / "runners.py").read_text("utf-8"))
    assigned = {
        node.targets[0].attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("runner.")
    }
    assert assigned == {"_update_states", "_preprocess", "add_request", "add_requests", "prepare_inputs", "sample"}
    assert assigned <= {row.attribute.rpartition(".")[2] for row in VLLM}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's sources")
def test_the_installed_vllm_has_all_of_them() -> None:
    root = Path(find_spec("vllm").origin).parents[1]
    assert {line[:21].strip() for line in surface.lines(None, root)} == {"as it was"}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (BEFORE, "as it was"),
        (BEFORE.replace("return x", "return -x"), "another body"),
        (BEFORE.replace("self, x", "self, x, y"), "other parameters"),
        (BEFORE.replace("def f", "def g"), "gone"),
    ],
)
def test_kinds_of_change(after: str, told: str) -> None:
    definition_before = definition(ast.parse(BEFORE), "A.f")
    definition_after = definition(ast.parse(after), "A.f")
    assert surface.moved(definition_before, definition_after) == told
