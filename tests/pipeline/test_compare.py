# SPDX-License-Identifier: Apache-2.0
"""`ngrpo compare` on the real stack: killed, gone on with, equal where equal, a failed run beside finished ones."""

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import ROOT, assert_nothing_runs, begun, small
from tests.support.own_process import UNCOMPILED

BROKEN = (
    "raise RuntimeError('no reward today')\n\n\ndef reward_func(queries, prompts, labels):\n    return {'rewards': 0}\n"
)
# Random answers are never right: a reward in which they differ shows whether two runs are equal.
LETTERS = ROOT / "tests" / "pipeline" / "user_files" / "first_letters.py"
EXTRA = [
    *["--reward.remote_url", str(LETTERS), "--actor.adam.lr", "1e-5", "--report.groups", "1"],
    *["--eval.n", "4", "--eval.k", "1,4", "--eval.limit", "8", "--eval.max-tokens", "12", "--eval.steps", "2"],
    *["--diagnose.prompts", "4", "--diagnose.group", "4"],
]


@dataclass(frozen=True)
class Compared:
    """A comparison that was killed after its first run, and then went on.

    Attributes:
        folder: of its output.
        results: the content of its results.json.
        output: what the second call printed.
        first_run_ended: the time of the first run's file, before the kill.
    """

    folder: Path
    results: dict[str, Any]
    output: str
    first_run_ended: float


def first_run_file(folder: Path) -> Path:
    return folder / "runs" / "none-seed0" / "run.json"


def start(folder: Path, tiny: str) -> subprocess.Popen[str]:
    """The example's script, made smaller by later words."""
    reward = folder.parent / "reward.py"
    reward.write_text(BROKEN)
    arms = ["--perturbations", "none,neighbor:rate=0", "--strategy", f"none --reward.remote_url={reward}"]
    command = small(folder, tiny, *arms, "--seeds", "0", *EXTRA, program=["bash", "examples/compare_cpu.sh"])
    # It has eight engines; the engine of test_training.py is compiled.
    return begun(command, {"PYTHONUNBUFFERED": "1", **UNCOMPILED})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Compared:
    folder = tmp_path_factory.mktemp("compare") / "out"
    first = start(folder, tiny)
    assert first.stdout is not None
    lines: list[str] = []
    for line in first.stdout:
        lines.append(line)
        if "neighbor rate=0, seed 0: starts" in line:
            break
    else:
        pytest.fail("the second run did not start:\n" + "".join(lines[-40:]))
    first_run_ended = first_run_file(folder).stat().st_mtime
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert_nothing_runs(folder)

    second = start(folder, tiny)
    output, _ = second.communicate(timeout=1500)
    assert second.returncode == 1, output[-4000:]  # by the strategy with the broken reward
    results = json.loads((folder / "results.json").read_text())
    return Compared(folder, results, output, first_run_ended)


def test_goes_on_where_it_was_killed(compared: Compared) -> None:
    assert "1 of 3 runs are finished and kept" in compared.output
    assert first_run_file(compared.folder).stat().st_mtime == compared.first_run_ended
    assert [run["status"] for run in compared.results["runs"]] == ["done", "done", "failed"]
    assert "step 2/2: reward" in compared.output

    failed = compared.results["runs"][2]
    assert "no reward today" in failed["error"]
    assert (compared.folder / failed["log"]).is_file()
    assert "FAILED" in compared.output
    assert compared.results["summary"][2]["failed"] == [0]


def test_the_same_strategy_twice_is_equal(compared: Compared) -> None:
    """The same seed gives the same rollouts, so the same rewards at each step, and equal evaluations at the end."""
    none, twin = compared.results["runs"][:2]
    rewards = [step["reward"] for step in none["steps"]]
    assert rewards == [step["reward"] for step in twin["steps"]]
    assert rewards[0] != rewards[1], "the same whatever was answered"

    none_answers, twin_answers = sorted(compared.folder.glob("runs/*/evaluation/samples.jsonl"))
    assert sorted(none_answers.read_text().splitlines()) == sorted(twin_answers.read_text().splitlines())
    assert none["evaluation"]["problems"] == twin["evaluation"]["problems"]

    row = compared.results["summary"][1]
    assert row["verdict"].startswith("equal to none")
    difference = row["difference"]["mean_at_n"]
    assert difference["value"] == 0.0
    assert difference["low"] is None
    assert difference["high"] is None
    assert difference["over"] == "problems"


def test_evaluation_costs_and_diagnosis_are_there(compared: Compared) -> None:
    results = compared.results
    none, twin = results["runs"][:2]
    assert none["evaluation"]["n"] == 4
    assert results["untrained"]["n"] == 4
    assert [point["step"] for point in none["evaluations"]] == [2]
    assert none["evaluations"] == twin["evaluations"]
    assert not list(compared.folder.glob("runs/*/**/best_*")), "each evaluation left a checkpoint"

    cost = results["summary"][1]["cost"]
    # Speeds of the second step, after the one that warms up. Other load of the machine decides how large the ratio is.
    plain = none["steps"][1]["tokens_per_second"]
    perturbed = twin["steps"][1]["tokens_per_second"]
    assert plain > 0
    assert cost["tokens_per_second"]["ratio"] == pytest.approx(perturbed / plain)
    assert cost["memory_bytes"]["value"] > 1 << 30

    strategies = [strategy["name"] for strategy in results["diagnosis"]["strategies"]]
    assert strategies[:2] == ["none", "neighbor rate=0"]
    assert results["versions"]["vllm"]
    assert results["machine"]["cores"]
    assert (compared.folder / "results.csv").read_text().count("\n") == 1 + 2 + 2 + 1


def test_the_report_has_groups_of_both_strategies(compared: Compared) -> None:
    rewards_by_run = []
    for file in sorted(compared.folder.glob("runs/*/groups.jsonl")):
        rewards_by_run.append([json.loads(line)["rewards"] for line in file.read_text().splitlines()])
    none, twin = rewards_by_run
    assert none == twin
    assert [len(rewards) for rewards in none] == [16, 16]

    report = (compared.folder / "report.html").read_text()
    section = report.partition('id="groups"')[2].partition("</section>")[0]
    assert section.count('<h3 class="who">') == 2
    assert "neighbor rate=0" in section
