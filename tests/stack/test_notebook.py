# SPDX-License-Identifier: Apache-2.0
"""examples/explore.ipynb runs as it is, on a tiny random model: its replay is exact, and leaving it out shows."""

import json
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "examples" / "explore.ipynb"
MODEL = '"smollm2-135m"'


def test_the_notebook_replays_its_rollout(
    random_model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    program = "\n".join("".join(cell["source"]) for cell in code_cells)
    assert program.count(MODEL) == 1
    program = program.replace(MODEL, repr(random_model))
    names: dict[str, Any] = {}
    exec(compile(program, str(NOTEBOOK), "exec"), names)

    assert len(names["record"]) > 2
    assert names["replayed"] <= 1e-4
    assert names["unreplayed"] > 1e-3
    printed = capfd.readouterr().out
    for perturbation in ("neighbor", "gumbel", "multiplex"):
        assert f"{perturbation}: feeds " in printed
