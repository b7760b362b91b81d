# SPDX-License-Identifier: Apache-2.0
"""The summary, from a TensorBoard log as OpenRLHF writes it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.commands import dry_run, train
from ngrpo.config import parse
from ngrpo.config.run import FILE
from ngrpo.machine.storage.datafiles import event_files, read_texts
from ngrpo.methods import credits
from ngrpo.trainers.openrlhf import launch
from ngrpo.workbench.report import summary
from perturbations import create
from tests.support.file_limit import largest_file
from tests.support.run import run_of

TRAINED = {
    "trained_groups": 3.0,
    "trained_responses": 24.0,
    "optimizer_steps": 2.0,
    "cut_prompts": 1.0,
    "cut_turns": 2.0,
}
MEASURES = {
    "rate": 0.1,
    "sampled_token_kept": 0.75,
    "shift": 0.02,
    "record_bytes_per_token": 2.5,
    "gap_perturbed_mean": 0.001,
    "gap_perturbed_max": 0.01,
    "gap_plain_mean": 0.002,
    "gap_plain_max": 0.03,
}
PERTURBED = TRAINED | {f"perturbation/{name}": value for name, value in MEASURES.items()}


def write_log(folder: Path, rewards: list[float], extra: dict[str, float], first: int = 1) -> Path:
    """Writes a log as one start of a run does; returns its file."""
    from torch.utils.tensorboard import SummaryWriter

    before = set(folder.rglob("events*"))
    writer = SummaryWriter(log_dir=str(folder / "ppo_run"))
    for step, reward in enumerate(rewards, start=first):
        scalars = {
            "rollout/reward_mean": reward,
            "generated_tokens": 320.0,
            "rollout/num_samples": 32.0,
            "timing/generation": 4.0,
            "timing/step_total": 20.0,
            **extra,
        }
        for key, value in scalars.items():
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
    """Ends a run with OpenRLHF's flags ``more``; returns what is printed and the content of summary.json."""
    flags = ("--logger.tensorboard_dir", str(folder / "tb"), "--ckpt.output_dir", "m", "--train.seed", "7", *more)
    run = run_of(perturbation=spec, openrlhf=flags, hardware="cpu")
    text = summary.finish(folder, run, began=began)
    return text, json.loads((folder / "summary.json").read_text())


NEIGHBOR = create("neighbor", rate=0.1, k=4).spec()


def test_a_perturbed_run_as_json(tmp_path: Path) -> None:
    write_log(tmp_path / "tb", [0.25, 0.5, 0.75], PERTURBED)

    _, written = finish(tmp_path, spec=NEIGHBOR)

    row = written["steps"][1]
    assert row["step"] == 2
    assert row["reward"] == 0.5
    # 32 responses of 10 tokens on average, in 4 seconds.
    assert row["tokens_per_second"] == pytest.approx(10 * 32 / 4)
    assert row["sampled_token_replaced"] == pytest.approx(0.25)  # 1 - sampled_token_kept
    assert TRAINED.items() <= row.items()
    assert written["perturbation"] == NEIGHBOR
    assert written["seed"] == 7
    assert written["hardware"] == "cpu"
    assert written["versions"]["torch"]
    assert written["places"]["checkpoint"] == "m"
    assert written["scalars"]["eval/eval_default_pass1"] == {"3": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        "neighbor rate=0.1 k=4",
        "reward        0.250 → 0.750",
        "trained       9 groups, 72 responses, 6 optimizer steps",
        "cut prompts   3 lost their first tokens",
        "cut turns     6 conversations ended early",
        "evaluation    0.500 (step 3), eval_default_pass1",
        "replay        largest difference of rollout and trainer: 3.0e-02 in log π of a token",
        "2.50 bytes",
        "seed 7",
    ],
)
def test_a_perturbed_run_in_words(tmp_path: Path, line: str) -> None:
    """Three steps, each with the counts of ``TRAINED``."""
    write_log(tmp_path / "tb", [0.25, 0.5, 0.75], PERTURBED)
    text, _ = finish(tmp_path, spec=NEIGHBOR)
    assert line in text


CREDIT = """
from dataclasses import dataclass
from ngrpo.methods.credits import Credit
from perturbations import option


@dataclass(frozen=True, kw_only=True)
class Half(Credit):
    share: float = option(0.5, "what is left")

    def formula(self, tokens):
        return self.share * tokens.advantages
"""
GATE = """
from dataclasses import dataclass
from perturbations import Gate


@dataclass(frozen=True, kw_only=True)
class Late(Gate):
    def open(self, step):
        return step.generated > 9
"""


def test_the_packed_text_of_a_method_s_file_is_not_printed(tmp_path: Path) -> None:
    """It is in summary.json alone, for a perturbation's gate and for a run's credit."""
    write_log(tmp_path / "tb", [0.25], PERTURBED)
    (tmp_path / "half.py").write_text(CREDIT)
    (tmp_path / "late.py").write_text(GATE)
    credit = credits.registry.create(f"{tmp_path}/half.py").spec()
    perturbation = create("neighbor", gate=f"{tmp_path}/late.py").spec()
    log = ("--logger.tensorboard_dir", str(tmp_path / "tb"))
    run = run_of(perturbation=perturbation, credit=credit, openrlhf=log, hardware="cpu")
    text = summary.finish(tmp_path, run, began=0.0)
    planned = "\n".join(dry_run._with_options("--perturbation", perturbation))
    assert "half.py:Half share=0.5" in text and "gate=late.py:Late" in text and "gate=late.py:Late" in planned
    assert "source" not in text and "source" not in planned


def start(folder: Path, *more: str) -> None:
    summary.note_logs(folder, run_of(openrlhf=("--logger.tensorboard_dir", str(folder / "tb"), *more)))


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_logs_of_earlier_runs_are_left_out(hours: int, tmp_path: Path) -> None:
    """Whatever the clock of the node that writes the new one."""
    write_log(tmp_path / "tb", [0.9, 0.9, 0.9], {})
    start(tmp_path)
    make_other_time(write_log(tmp_path / "tb", [0.1], {}), hours)
    _, written = finish(tmp_path, time.time())
    assert [row["reward"] for row in written["steps"]] == [pytest.approx(0.1)]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_resumed_run_keeps_its_history(hours: int, tmp_path: Path) -> None:
    """Killed after step 3, resumed from the checkpoint of step 1; then resumed again when it was finished."""
    write_log(tmp_path / "tb", [0.9] * 9, {})
    start(tmp_path)
    make_other_time(write_log(tmp_path / "tb", [0.25, 0.5, 0.5], {}), -hours)
    start(tmp_path, "--ckpt.load_enable")
    make_other_time(write_log(tmp_path / "tb", [0.75, 1.0, 0.25], {}, first=2), hours)
    for _ in range(2):
        _, written = finish(tmp_path, time.time(), None, "--ckpt.load_enable")
        assert [row["step"] for row in written["steps"]] == [1, 2, 3, 4]
        assert [row["reward"] for row in written["steps"]] == [0.25, 0.75, 1.0, 0.25]
        start(tmp_path, "--ckpt.load_enable")


def test_steps_that_a_resumed_run_has_not_reached_again_are_left_out(tmp_path: Path) -> None:
    """Killed after step 6, resumed from the checkpoint of step 4, and stopped after step 5."""
    start(tmp_path)
    write_log(tmp_path / "tb", [0.25] * 6, {})  # evaluated after step 6
    start(tmp_path, "--ckpt.load_enable")
    write_log(tmp_path / "tb", [0.75], {}, first=5)
    text, written = finish(tmp_path, time.time(), None, "--ckpt.load_enable")
    assert [row["step"] for row in written["steps"]] == [1, 2, 3, 4, 5]
    assert "reward        0.250 → 0.750" in text
    assert list(written["evaluation"]["eval/eval_default_pass1"]) == ["1"]


def test_a_run_of_an_earlier_release_is_resumed_with_its_logs(tmp_path: Path) -> None:
    write_log(tmp_path / "tb", [0.25, 0.5], {})
    start(tmp_path, "--ckpt.load_enable")
    write_log(tmp_path / "tb", [0.75], {}, first=2)
    _, written = finish(tmp_path, time.time(), None, "--ckpt.load_enable")
    assert [row["reward"] for row in written["steps"]] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "the training's output says why"),
        (["--algo.dynamic_filtering_enable"], "all prompts were filtered out"),
    ],
)
def test_a_run_without_a_step_says_why(tmp_path: Path, flags: list[str], reason: str) -> None:
    text, written = finish(tmp_path, 0.0, None, *flags)
    assert f"no training step was logged: {reason}" in text
    assert written["steps"] == []


def test_a_disk_that_is_full_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --ckpt.load_enable the same command would start at step 0: `ngrpo report` writes what is missing."""
    words = "--model sandbox --preset grpo --perturbation neighbor --train.seed 7 --task arithmetic"
    run = parse.run_config([*words.split(), "--run-dir", str(tmp_path)])
    run.write(tmp_path / FILE)
    # A training that logs, in place of engines and models.
    monkeypatch.setattr(launch, "launch", lambda run: write_log(tmp_path / "tensorboard", [0.25, 0.5], {}))
    finish_on_free_disk = summary.finish

    def finish_on_full_disk(*args: Any, **kwargs: Any) -> str:
        with largest_file(100):
            return finish_on_free_disk(*args, **kwargs)

    messages: list[str] = []
    with monkeypatch.context() as full_disk:
        full_disk.setattr(summary, "finish", finish_on_full_disk)
        assert train._train(run, tmp_path, messages.append) == 1

    (message,) = messages
    assert "summary.json cannot be written: File too large" in message
    assert "run the same command again" not in message
    assert f"Make room, then write summary and report with: ngrpo report {tmp_path}" in message

    assert cli.main(["report", str(tmp_path)]) == 0

    written = json.loads((tmp_path / "summary.json").read_text())
    assert [row["reward"] for row in written["steps"]] == [0.25, 0.5]
    assert written["seed"] == 7
    assert written["hardware"] == "cpu"
    assert written["perturbation"]["name"] == "neighbor"
    assert written["places"]["checkpoint"] == str(tmp_path / "model")
    assert written["seconds"] < 60
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
