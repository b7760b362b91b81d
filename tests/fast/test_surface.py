# SPDX-License-Identifier: Apache-2.0
"""The script that reads another vLLM's sources: it knows every hook, and tells the kinds of change apart."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import surface


def test_every_hook_is_there() -> None:
    found = surface.hooks()
    assert ("vllm.v1.worker.gpu_worker", "Worker.load_model") in found and len(found) > 20
    assigned = {
        node.targets[0].attr
        for name in ("runner_v1.py", "runner_v2.py")
        for node in ast.walk(ast.parse((surface.ROLLOUT / name).read_text("utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("runner.")
    }
    assert assigned == {"_update_states", "_preprocess", "add_requests", "prepare_inputs", "sample"}
    assert assigned <= {name.rpartition(".")[2] for _, name in surface.OF_RUNNERS}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's sources")
def test_the_installed_vllm_has_all_of_them() -> None:
    root = Path(find_spec("vllm").origin).parents[1]
    assert {line[:17].strip() for line in surface.lines(root, root)} == {"as it was"}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("class A:\n    def f(self, x):\n        return x\n", "as it was"),
        ("class A:\n    def f(self, x):\n        return -x\n", "another body"),
        ("class A:\n    def f(self, x, y):\n        return x\n", "other parameters"),
        ("class A:\n    def g(self, x):\n        return x\n", "gone"),
    ],
)
def test_kinds_of_change(after: str, told: str, tmp_path: Path) -> None:
    for name, text in (("before", "class A:\n    def f(self, x):\n        return x\n"), ("after", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.py").write_text(text)
    both = [surface.definition(tmp_path / name, "part", "A.f") for name in ("before", "after")]
    assert surface.moved(*both) == told
