# SPDX-License-Identifier: Apache-2.0
"""The second study's files: the seeds, groups of arms and steps of docs/studies/study2.md, and run.sh's cuts."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from ngrpo.workbench.compare.plan import Plan, read_plan
from perturbations import registry

FOLDER = Path(__file__).parents[2] / "examples" / "study2"


def plan(file: Path, task: str = "shortcut:late") -> Plan:
    return read_plan(["--config", str(file), "--task", task])[0]


def test_no_seed_of_the_pilot_is_the_studys() -> None:
    plans = {file.stem: plan(file) for file in FOLDER.glob("*.yaml")}
    piloted = {seed for name in ("pilot", "rate", "pilot_shortcut") for seed in plans[name].seeds}
    assert all(piloted.isdisjoint(plans[name].seeds) for name in plans.keys() - {"pilot", "rate", "pilot_shortcut"})
    assert all(one.baseline == "none" and not one.keep_models for one in plans.values())
    assert {name: one.threshold for name, one in plans.items() if one.threshold != 0.8} == {"rate": 0.9}


def calls_of_run_sh(tmp_path: Path, tasks: str) -> list[list[str]]:
    """The arguments of every `ngrpo compare` that run.sh starts, with a program in its place that writes them down."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "ngrpo"
    stand_in.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CALLS": str(tmp_path / "calls"), "TASKS": tasks}
    subprocess.run(["bash", str(FOLDER / "run.sh"), str(tmp_path / "study")], env=env, check=True)
    return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "file"), [("shortcut:late", "study"), ("shortcut", "shortcut"), ("two_peaks", "two_peaks")]
)
def test_groups_of_arms_are_taken_one_after_another(task: str, file: str, tmp_path: Path) -> None:
    """run.sh gives `ngrpo compare` the groups up to one, then up to the next: the arms of the whole file in the end."""
    calls = calls_of_run_sh(tmp_path, task)
    configs = [Path(call[call.index("--config") + 1]) for call in calls]
    arms = [[arm.id for arm in plan(config, task).arms] for config in configs]
    assert len(arms) == (FOLDER / f"{file}.yaml").read_text().count("# group ") == len(set(configs))
    assert arms[-1] == [arm.id for arm in plan(FOLDER / f"{file}.yaml", task).arms]
    assert arms[0][0] == "none" and all(
        shorter == longer[: len(shorter)] != longer for shorter, longer in itertools.pairwise(arms)
    )
    assert all(call[call.index("--out") + 1] == str(tmp_path / "study" / task.replace(":", "-")) for call in calls)


def test_the_first_task_is_finished_before_the_others_go_on(tmp_path: Path) -> None:
    """The order of docs/studies/study2.md: the first group of every task, the rest of the first task, then the rest."""
    calls = calls_of_run_sh(tmp_path, "shortcut:late two_peaks star_graph")
    order = [(call[call.index("--task") + 1], Path(call[call.index("--config") + 1]).stem[-1]) for call in calls]
    assert order == [
        ("shortcut:late", "1"), ("two_peaks", "1"), ("star_graph", "1"),
        ("shortcut:late", "2"), ("shortcut:late", "3"), ("shortcut:late", "4"),
        ("two_peaks", "2"), ("star_graph", "2"), ("star_graph", "3"), ("star_graph", "4"),
    ]  # fmt: skip


def test_every_perturbation_is_an_arm() -> None:
    arms = [arm.id.split()[0] for arm in plan(FOLDER / "study.yaml").arms]
    # Other tests register perturbations of their own.
    own = {name for name, module in registry.available().items() if module.startswith("perturbations.")}
    assert own == set(arms)
