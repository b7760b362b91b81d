# SPDX-License-Identifier: Apache-2.0
"""What the engines of a run leave behind: which of vLLM's model runners they had."""

import json
from pathlib import Path

import pytest

from ngrpo.rollout import runner_marker
from ngrpo.workbench.compare.runs import identity
from ngrpo.workbench.report import summary
from tests.fast.compare_example import plan
from tests.fast.run import run_of


def test_engines_answer_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner_marker.VARIABLE, "")
    folder = tmp_path / "run" / "model_runner"
    runner_marker.note("V1")
    runner_marker.watch(folder)
    assert runner_marker.read(folder) is None
    runner_marker.note("V2")
    assert runner_marker.read(folder) == "V2"
    runner_marker.note("V1")
    assert runner_marker.read(folder) == "V1, V2"
    runner_marker.watch(folder)
    assert runner_marker.read(folder) is None, "what an earlier run left does not count"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(runner_marker.VARIABLE, str(tmp_path / "file" / "model_runner"))
    runner_marker.note("V1")
    assert runner_marker.read(tmp_path / "file" / "model_runner") is None


def test_the_summary_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner_marker.VARIABLE, "")
    runner_marker.watch(tmp_path / summary.RUNNERS)
    runner_marker.note("V2")
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
