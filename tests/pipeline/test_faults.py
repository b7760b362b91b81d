# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a real run: each ends it with a message that says what happened (docs/troubleshooting.md).

A run that was killed and resumed from its checkpoint equals, step by step, a run that was never killed.
"""

import json
import signal
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
import torch

from tests.pipeline.harness import LOUD, assert_nothing_runs, begun, small, summary_of, train

pytestmark = pytest.mark.slow

FLAGS = ["--perturbation", "gumbel", "--ckpt.save_steps", "1"]
REWARD = """
def reward_func(queries, prompts, labels, **_):
    raise KeyError("no such label")
"""


def wait_for_checkpoint(process: Popen[str], run: Path, step: int) -> None:
    """Returns once a run has saved this step's checkpoint whole: the file that names the newest one is written last."""
    latest = latest_checkpoint(run)
    deadline = time.monotonic() + 400
    while not latest.is_file() or latest.read_text() != f"global_step{step}":
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def latest_checkpoint(run: Path) -> Path:
    """The file that names a run's newest checkpoint."""
    return run / "checkpoints" / "_actor" / "latest"


def engines_of(run: Popen[str]) -> list[psutil.Process]:
    """The processes of a run's engines; other runs on this machine keep theirs."""
    engines = []
    for process in psutil.Process(run.pid).children(recursive=True):
        if "ray::RolloutRayActor" in " ".join(process.cmdline()):
            engines.append(process)
    return engines


def test_a_reward_function_that_fails(tmp_path: Path, smollm2: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    result = train(tmp_path / "run", smollm2, *FLAGS, "--reward.remote_url", str(file))
    assert result.returncode == 1
    for message in ("raised KeyError: 'no such label'", "prompt:", "response:"):
        assert message in result.stdout[-3000:]
    assert_nothing_runs(tmp_path)


def test_an_engine_that_is_killed(tmp_path: Path, smollm2: str) -> None:
    run = tmp_path / "run"
    with begun(small(run, smollm2, *FLAGS, "--log-file", str(tmp_path / "log"))) as process:
        wait_for_checkpoint(process, run, step=1)
        engines = engines_of(process)
        assert engines
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "training failed" in output
    assert "died" in output
    assert latest_checkpoint(run).is_file(), "the saved checkpoint is lost"
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize(
    ("end_signal", "code", "message"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGKILL, -9, "")],
)
def test_a_training_that_is_ended(
    tmp_path: Path, smollm2: str, end_signal: signal.Signals, code: int, message: str
) -> None:
    """SIGTERM, as Slurm and Kubernetes send it, leaves the summary and the report; no process outlives even SIGKILL."""
    run = tmp_path / "run"
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    flags = [*FLAGS, "--vllm.num_engines", "2", "--data.max_samples", "64", "--log-file", str(log)]
    with begun(small(run, smollm2, *flags)) as process:
        wait_for_checkpoint(process, run, step=1)
        # The signal comes in the middle of the second step.
        time.sleep(1.0)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(end_signal)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert_nothing_runs(tmp_path)
    # Unless they are ended too, Ray's agents look for their control store for 60 s.
    _, left = psutil.wait_procs(started, timeout=30)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert log.read_text(errors="replace").startswith("of an earlier run\n")
    assert latest_checkpoint(run).is_file()
    if message:
        assert message in output
        assert "--ckpt.load_enable continues from the last checkpoint" in output
        assert json.loads((run / "summary.json").read_text())["steps"][0]["step"] == 1
        assert (run / "report.html").is_file()


# --- resumed ---------------------------------------------------------------------------------------------------------

RESUMABLE = [
    *[*LOUD, "--perturbation", "neighbor", "--perturbation.rate", "0.5", "--advantage", "copo"],
    *["--ckpt.save_steps", "1", "--ckpt.max_num", "1", "--train.num_episodes", "2"],
]
# The ends of the names of what differs from run to run: wall-clock times, and sizes that depend on them. A resumed
# process measures its own scale of gaps, and the drift of neighbor sets from its own start on.
NOT_REPRODUCIBLE = (
    "seconds",
    "tokens_per_second",
    "gap_unperturbed_mean",
    "neighbors_changed",
    "neighbors_changed_since_start",
)


def later_steps(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a run after the second, without what differs from run to run."""
    steps = summary["steps"][-2:]
    assert [step["step"] for step in steps] == [3, 4]
    reproducible = []
    for step in steps:
        reproducible.append({name: value for name, value in step.items() if not name.endswith(NOT_REPRODUCIBLE)})
    return reproducible


def killed_and_resumed(folder: Path, smollm2: str, *flags: str) -> list[dict[str, Any]]:
    """The later steps of a run that is killed once its second step is saved, and then continues."""
    with begun(small(folder, smollm2, *flags, "--log-file", str(folder.with_suffix(".log")))) as process:
        wait_for_checkpoint(process, folder, step=2)
        # By then the next rollout has begun.
        time.sleep(1.0)
        process.kill()
    return later_steps(summary_of(folder, smollm2, *flags, "--ckpt.load_enable"))


def test_killed_in_a_step_and_resumed(tmp_path: Path, smollm2: str) -> None:
    """Four steps over two epochs, so that prompts come again."""
    whole = summary_of(tmp_path / "whole", smollm2, *RESUMABLE, "--reproducible")
    resumed = killed_and_resumed(tmp_path / "killed", smollm2, *RESUMABLE, "--reproducible")
    assert resumed == later_steps(whole)


def test_a_critic_and_frozen_steps_that_are_resumed_at_the_end_of_an_episode(tmp_path: Path, random_model: str) -> None:
    """Six prompts are a step of four and one of two, twice; the policy is trained in the last step alone."""
    flags = ["--reproducible", "--ckpt.save_steps", "1", "--train.num_episodes", "2", "--data.max_samples", "6"]
    flags += ["--train.batch_size", "8", "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "4"]
    flags += ["--algo.advantage.estimator", "gae", "--critic.freezing_steps", "2", "--algo.kl.init_coef", "0"]
    whole = summary_of(tmp_path / "whole", random_model, *LOUD, *flags)
    assert len(whole["steps"]) == 4
    third, fourth = later_steps(whole)
    assert "optimizer_steps" not in third and fourth["optimizer_steps"] == 1.0
    assert killed_and_resumed(tmp_path / "killed", random_model, *LOUD, *flags) == [third, fourth]


def test_where_asynchronous_the_round_and_the_counts_go_on(tmp_path: Path, smollm2: str) -> None:
    """Its rollouts are a step ahead of the training, so it does not equal a whole run, but its counts continue."""
    folder = tmp_path / "run"
    resumed = killed_and_resumed(folder, smollm2, *RESUMABLE, "--train.async_enable")
    third, fourth = [step["advantage_outcomes"] for step in resumed]
    assert 16 < third <= fourth, "a step has 16 answers, so more outcomes need the steps before the kill"
    (states,) = folder.glob("checkpoints/_actor/global_step4/mp_rank_*_model_states.pt")
    checkpoint = torch.load(states, weights_only=False)
    assert checkpoint["data_loader_state_dict"]["ngrpo_round"] == 4
    assert len(checkpoint["ngrpo"]["prompt_memory"]) == fourth
