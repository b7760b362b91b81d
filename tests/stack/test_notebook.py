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
    for name, value in {"MPLBACKEND": "Agg", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    program = "\n".join("".join(cell["source"]) for cell in cells)
    assert program.count(MODEL) == 1
    names: dict[str, Any] = {}
    exec(compile(program.replace(MODEL, repr(random_model)), str(NOTEBOOK), "exec"), names)
    assert len(names["record"]) > 2
    assert names["replayed"] <= 1e-4 < 1e-3 < names["unreplayed"]
    printed = capfd.readouterr().out
    assert all(f"{name}: feeds " in printed for name in ("neighbor", "gumbel", "multiplex"))
