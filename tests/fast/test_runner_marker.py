# SPDX-License-Identifier: Apache-2.0
"""What the engines of a run leave behind: which of vLLM's model runners they had."""

import json
from pathlib import Path

import pytest

from ngrpo.rollout import plugin
from ngrpo.workbench.compare.runs import identity
from ngrpo.workbench.report import summary
from tests.fast.compare_example import plan
from tests.fast.run import run_of


def test_engines_answer_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.RUNNERS, "")
    folder = tmp_path / "run" / "model_runner"
    plugin.note_runner("V1")
    plugin.watch_runners(folder)
    assert plugin.runners_of(folder) is None
    plugin.note_runner("V2")
    assert plugin.runners_of(folder) == "V2"
    plugin.note_runner("V1")
    assert plugin.runners_of(folder) == "V1, V2"
    plugin.watch_runners(folder)
    assert plugin.runners_of(folder) is None, "what an earlier run left does not count"


def test_the_summary_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.RUNNERS, "")
    plugin.watch_runners(tmp_path / summary.RUNNERS)
    plugin.note_runner("V2")
    summary.finish(tmp_path, run_of(hardware="cpu"), began=0.0)
    assert json.loads((tmp_path / "summary.json").read_text())["versions"]["model runner"] == "V2"


def test_a_comparison_has_no_runs_on_either_side_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--perturbations", "none,neighbor")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    seen = {identity(made, made.runs()[0])}
    for chosen in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
        seen.add(identity(made, made.runs()[0]))
    assert len(seen) == 3
