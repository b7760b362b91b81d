# SPDX-License-Identifier: Apache-2.0
"""`ngrpo compare` on the real stack: killed, gone on with, equal where equal, a failed run beside finished ones."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import ROOT, assert_nothing_runs, begun, small
from tests.support.own_process import UNCOMPILED

BROKEN = "raise RuntimeError('no reward today')\n\n\ndef reward_func(queries, prompts, labels):\n    return 0\n"
# Random answers are never right: a reward in which they differ shows whether two runs are equal.
LETTERS = ROOT / "tests" / "pipeline" / "user_files" / "first_letters.py"
EXTRA = ["--reward.remote_url", str(LETTERS), "--eval.n", "4", "--eval.k", "1,4", "--eval.limit", "8"]
EXTRA += ["--eval.max-tokens", "12", "--diagnose.prompts", "4", "--diagnose.group", "4", "--actor.adam.lr", "1e-5"]
EXTRA += ["--eval.steps", "2", "--report.groups", "1"]


# The folder, its results, what the second call printed, and when the first run had ended.
Compared = tuple[Path, dict[str, Any], str, float]


def start(folder: Path, tiny: str) -> subprocess.Popen[str]:
    """The example's script, made smaller by later words."""
    reward = folder.parent / "reward.py"
    reward.write_text(BROKEN)
    arms = ["--perturbations", "none,neighbor:rate=0", "--strategy", f"none --reward.remote_url={reward}"]
    command = small(folder, tiny, *arms, "--seeds", "0", *EXTRA, program=["bash", "examples/compare_cpu.sh"])
    # It has eight engines; that of test_training.py is compiled.
    return begun(command, {"PYTHONUNBUFFERED": "1", **UNCOMPILED})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Compared:
    folder = tmp_path_factory.mktemp("compare") / "out"
    first = start(folder, tiny)
    assert first.stdout is not None
    said: list[str] = []
    while "neighbor rate=0, seed 0: starts" not in "".join(said[-1:]):
        said.append(first.stdout.readline())
        assert said[-1], "".join(said[-40:])
    finished = (folder / "runs" / "none-seed0" / "run.json").stat().st_mtime
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert_nothing_runs(folder)
    second = start(folder, tiny)
    output, _ = second.communicate(timeout=1500)
    assert second.returncode == 1, output[-4000:]  # the broken strategy
    return folder, json.loads((folder / "results.json").read_text()), output, finished


def test_goes_on_where_it_was_killed(compared: Compared) -> None:
    folder, results, output, finished = compared
    assert "1 of 3 runs are finished and kept" in output
    assert (folder / "runs" / "none-seed0" / "run.json").stat().st_mtime == finished
    assert [run["status"] for run in results["runs"]] == ["done", "done", "failed"]
    assert "step 2/2: reward" in output

    failed = results["runs"][2]
    assert "no reward today" in failed["error"]
    assert (folder / failed["log"]).is_file()
    assert "FAILED" in output and results["summary"][2]["failed"] == [0]


def test_the_same_strategy_twice_is_equal(compared: Compared) -> None:
    """The same seed gives the same rollouts, so the same rewards at each step, and equal evaluations at the end."""
    folder, results, _, _ = compared
    none, twin = results["runs"][:2]
    rewards = [step["reward"] for step in none["steps"]]
    assert rewards == [step["reward"] for step in twin["steps"]]
    assert rewards[0] != rewards[1], "the same whatever was answered"
    answers = [sorted(file.read_text().splitlines()) for file in sorted(folder.glob("runs/*/evaluation/samples.jsonl"))]
    assert len(answers) == 2 and answers[0] == answers[1]
    assert none["evaluation"]["problems"] == twin["evaluation"]["problems"]
    row = results["summary"][1]
    assert row["verdict"].startswith("equal to none")
    difference = row["difference"]["mean_at_n"]
    assert [difference[key] for key in ("value", "low", "high", "over")] == [0.0, None, None, "problems"]


def test_evaluation_costs_and_diagnosis_are_there(compared: Compared) -> None:
    folder, results, _, _ = compared
    assert results["runs"][0]["evaluation"]["n"] == 4 and results["untrained"]["n"] == 4
    curves = [run["evaluations"] for run in results["runs"][:2]]
    assert [[point["step"] for point in curve] for curve in curves] == [[2], [2]] and curves[0] == curves[1]
    assert not list(folder.glob("runs/*/**/best_*")), "each evaluation left a checkpoint"
    cost = results["summary"][1]["cost"]
    # Of the second step, after the one that warms up. What else the machine does decides how large the ratio is.
    plain, perturbed = (run["steps"][1]["tokens_per_second"] for run in results["runs"][:2])
    assert plain > 0 and cost["tokens_per_second"]["ratio"] == pytest.approx(perturbed / plain)
    assert cost["memory_bytes"]["value"] > 1 << 30
    assert [s["name"] for s in results["diagnosis"]["strategies"]][:2] == ["none", "neighbor rate=0"]
    assert results["versions"]["vllm"] and results["machine"]["cores"]
    assert (folder / "results.csv").read_text().count("\n") == 1 + 2 + 2 + 1


def test_the_report_has_groups_of_both_strategies(compared: Compared) -> None:
    folder, _, _, _ = compared
    kept = [path.read_text().splitlines() for path in sorted(folder.glob("runs/*/groups.jsonl"))]
    none, twin = ([json.loads(line)["rewards"] for line in lines] for lines in kept)
    assert none == twin and [len(rewards) for rewards in none] == [16, 16]
    section = (folder / "report.html").read_text().partition('id="groups"')[2].partition("</section>")[0]
    assert section.count('<h3 class="who">') == 2 and "neighbor rate=0" in section
