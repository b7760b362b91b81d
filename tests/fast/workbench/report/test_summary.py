# SPDX-License-Identifier: Apache-2.0
"""The summary, from a TensorBoard log as OpenRLHF writes it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.commands import train
from ngrpo.config import parse
from ngrpo.config.run import FILE
from ngrpo.machine.storage.datafiles import event_files, read_texts
from ngrpo.trainers.openrlhf import launch
from ngrpo.workbench.report import summary
from perturbations import create
from tests.support.file_limit import largest_file
from tests.support.run import run_of

TRAINED = {"trained_groups": 3.0, "trained_responses": 24.0, "optimizer_steps": 2.0}
TRAINED |= {"cut_prompts": 1.0, "cut_turns": 2.0}
MEASURES = {"rate": 0.1, "sampled_token_kept": 0.75, "shift": 0.02, "record_bytes_per_token": 2.5}
MEASURES |= {"gap_perturbed_mean": 0.001, "gap_perturbed_max": 0.01, "gap_plain_mean": 0.002, "gap_plain_max": 0.03}
PERTURBED = TRAINED | {f"perturbation/{name}": value for name, value in MEASURES.items()}


def write_log(folder: Path, rewards: list[float], extra: dict[str, float], first: int = 1) -> Path:
    """Writes a log as one start of a run does; returns its file."""
    from torch.utils.tensorboard import SummaryWriter

    before = set(folder.rglob("events*"))
    writer = SummaryWriter(log_dir=str(folder / "ppo_run"))
    for step, reward in enumerate(rewards, start=first):
        logged = {"rollout/reward_mean": reward, "rollout/response_length_mean": 10.0, "rollout/num_samples": 32.0}
        logged |= {"timing/generation": 4.0, "timing/step_total": 20.0}
        for key, value in {**logged, **extra}.items():
            writer.add_scalar(f"train/{key}", value, step)
    writer.add_scalar("eval/eval_default_pass1", 0.5, len(rewards))
    writer.add_text("train/generated_samples", "a sample", 1)
    writer.close()
    (file,) = set(folder.rglob("events*")) - before
    return file


def make_other_time(file: Path, hours: int) -> None:
    """As a node writes it that has another clock: the time is in a log's name, too."""
    written = int(file.name.split(".")[3])
    moved = written + 3600 * hours
    os.utime(file, (moved, moved))
    file.rename(file.with_name(file.name.replace(str(written), str(moved))))


def finish(folder: Path, began: float = 0.0, spec: dict | None = None, *more: str) -> tuple[str, dict]:
    args = ["--logger.tensorboard_dir", str(folder / "tb"), "--ckpt.output_dir", "m", "--train.seed", "7", *more]
    text = summary.finish(folder, run_of(perturbation=spec, openrlhf=tuple(args), hardware="cpu"), began=began)
    return text, json.loads((folder / "summary.json").read_text())


def test_perturbed_run(tmp_path: Path) -> None:
    write_log(tmp_path / "tb", [0.25, 0.5, 0.75], PERTURBED)
    spec = create("neighbor", rate=0.1, k=4).spec()
    text, found = finish(tmp_path, spec=spec)
    row = found["steps"][1]
    assert row["step"] == 2 and row["reward"] == 0.5
    assert row["tokens_per_second"] == pytest.approx(10 * 32 / 4)
    assert row["sampled_token_replaced"] == pytest.approx(0.25) and TRAINED.items() <= row.items()
    assert (found["perturbation"], found["seed"], found["hardware"]) == (spec, 7, "cpu")
    assert found["versions"]["torch"] and found["places"]["checkpoint"] == "m"
    assert found["scalars"]["eval/eval_default_pass1"] == {"3": 0.5}
    for part in (
        "neighbor rate=0.1 k=4",
        "reward        0.250 → 0.750",
        "trained       9 groups, 72 responses, 6 optimizer steps",
        "cut prompts   3 lost their first tokens",
        "cut turns     6 conversations ended early",
        "evaluation    0.500 (step 3), eval_default_pass1",
        "replay        largest difference of rollout and trainer: 3.0e-02 in log π of a token",
        "2.50 bytes",
        "seed 7",
    ):
        assert part in text


def start(folder: Path, *more: str) -> None:
    summary.note_logs(folder, run_of(openrlhf=("--logger.tensorboard_dir", str(folder / "tb"), *more)))


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_logs_of_earlier_runs_are_left_out(hours: int, tmp_path: Path) -> None:
    """Whatever the clock of the node that writes the new one."""
    write_log(tmp_path / "tb", [0.9, 0.9, 0.9], {})
    start(tmp_path)
    make_other_time(write_log(tmp_path / "tb", [0.1], {}), hours)
    assert [row["reward"] for row in finish(tmp_path, time.time())[1]["steps"]] == [pytest.approx(0.1)]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_resumed_run_keeps_its_history(hours: int, tmp_path: Path) -> None:
    """Killed after step 3, resumed from the checkpoint of step 1; then resumed again when it was finished."""
    write_log(tmp_path / "tb", [0.9] * 9, {})
    start(tmp_path)
    make_other_time(write_log(tmp_path / "tb", [0.25, 0.5, 0.5], {}), -hours)
    start(tmp_path, "--ckpt.load_enable")
    make_other_time(write_log(tmp_path / "tb", [0.75, 1.0, 0.25], {}, first=2), hours)
    for _ in range(2):
        _, found = finish(tmp_path, time.time(), None, "--ckpt.load_enable")
        assert [(row["step"], row["reward"]) for row in found["steps"]] == [(1, 0.25), (2, 0.75), (3, 1.0), (4, 0.25)]
        start(tmp_path, "--ckpt.load_enable")


def test_a_run_of_an_earlier_release_is_resumed_with_its_logs(tmp_path: Path) -> None:
    write_log(tmp_path / "tb", [0.25, 0.5], {})
    start(tmp_path, "--ckpt.load_enable")
    write_log(tmp_path / "tb", [0.75], {}, first=2)
    _, found = finish(tmp_path, time.time(), None, "--ckpt.load_enable")
    assert [row["reward"] for row in found["steps"]] == [0.25, 0.75]


def test_no_steps(tmp_path: Path) -> None:
    text, found = finish(tmp_path)
    assert "no training step was logged: are there fewer prompts" in text and found["steps"] == []
    text, _ = finish(tmp_path, 0.0, None, "--algo.dynamic_filtering_enable")
    assert "no training step was logged: all prompts were filtered out" in text


def test_a_disk_that_is_full_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --ckpt.load_enable the same command would start at step 0: `ngrpo report` writes what is missing."""
    told: list[str] = []
    words = "--model sandbox --preset grpo --perturbation neighbor --train.seed 7 --task arithmetic"
    run = parse.run_config([*words.split(), "--run-dir", str(tmp_path)])
    run.write(tmp_path / FILE)
    # A training that logs, in place of engines and models.
    monkeypatch.setattr(launch, "launch", lambda run: write_log(tmp_path / "tensorboard", [0.25, 0.5], {}))
    made = summary.finish

    def on_full_disk(*args: Any, **kwargs: Any) -> str:
        with largest_file(100):
            return made(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(summary, "finish", on_full_disk)
        assert train._train(run, tmp_path, told.append) == 1
    (line,) = told
    assert "summary.json cannot be written: File too large" in line and "run the same command again" not in line
    assert f"Make room, then write summary and report with: ngrpo report {tmp_path}" in line
    assert cli.main(["report", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [row["reward"] for row in written["steps"]] == [0.25, 0.5]
    assert (written["seed"], written["hardware"], written["perturbation"]["name"]) == (7, "cpu", "neighbor")
    assert written["places"]["checkpoint"] == str(tmp_path / "model") and written["seconds"] < 60
    assert "neighbor" in (tmp_path / "report.html").read_text()


def test_no_summary_of_a_run_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse.run_config(["--model", "sandbox", "--task", "arithmetic"]).write(tmp_path / FILE)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "logged no training step" in capsys.readouterr().err


def test_a_metric_of_an_earlier_release_is_read_by_its_name_of_today() -> None:
    logged = {"train/rollout/reward_mean": {1: 0.5}, "train/perturbation/anchor_agreement": {1: 0.75}}
    (row,) = summary.steps(logged)
    assert row["sampled_token_kept"] == 0.75 and row["sampled_token_replaced"] == 0.25
    assert "anchor_agreement" not in row


def test_samples_of_steps_are_read_from_the_log(tmp_path: Path) -> None:
    """As OpenRLHF's logger writes them, with a backslash and an n. Of ten steps six are kept; long texts are cut."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    for step in range(1, 11):
        text = "What is 1 + 2?\n" + "x" * (5000 if step == 10 else 3)
        writer.add_text("train/generated_samples", f"Sample:\\n{text}\\n\\nReward: {step / 10:.4f}", step)
    writer.close()
    logged = read_texts(tmp_path, event_files(tmp_path), "train/generated_samples")
    kept = summary.samples(logged)
    assert [(row["step"], row["reward"]) for row in kept] == [
        (1, 0.1),
        (3, 0.3),
        (5, 0.5),
        (6, 0.6),
        (8, 0.8),
        (10, 1.0),
    ]
    assert kept[0]["text"] == "What is 1 + 2?\nxxx"
    assert kept[-1]["text"].startswith("What is") and "\n[… 2,015 characters …]\n" in kept[-1]["text"]
    assert summary.samples({1: "another form"}) == []
