# SPDX-License-Identifier: Apache-2.0
"""The second study's files: what docs/study2.md promises of seeds, groups of arms and steps, and run.sh's cuts."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from ngrpo.compare import arguments
from ngrpo.upstream.openrlhf_flags import Flags

FOLDER = Path(__file__).parents[2] / "examples" / "study2"


def plan(file: Path, task: str = "shortcut:late") -> arguments.Plan:
    return arguments.parse(["--config", str(file), "--task", task])[0]


def test_no_seed_of_the_pilot_is_the_studys() -> None:
    plans = {name: plan(FOLDER / f"{name}.yaml") for name in ("pilot", "rate", "study", "two_peaks")}
    assert plans["study"].seeds == plans["two_peaks"].seeds == (0, 1, 2, 3, 4)
    assert plans["pilot"].seeds == (100, 101, 102, 103, 104) and plans["rate"].seeds == (100, 101)
    assert all(one.baseline == "none" and not one.keep_models for one in plans.values())
    assert [plans[name].threshold for name in plans] == [0.8, 0.9, 0.8, 0.8]
    shared = Flags(plans["two_peaks"].shared)
    assert int(shared.value("--data.max_samples") or 0) == 300 * int(shared.value("--rollout.batch_size") or 0) > 0


@pytest.mark.parametrize(("task", "file"), [("shortcut:late", "study"), ("two_peaks", "two_peaks")])
def test_groups_of_arms_are_taken_one_after_another(task: str, file: str, tmp_path: Path) -> None:
    """run.sh gives `ngrpo compare` the groups up to one, then up to the next: the arms of the whole file in the end."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "ngrpo"
    stand_in.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    stand_in.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"), "TASKS": task,
    }  # fmt: skip
    out = tmp_path / "study"
    subprocess.run(["bash", str(FOLDER / "run.sh"), str(out)], env=env, check=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    configs = [Path(call[call.index("--config") + 1]) for call in calls]
    arms = [[arm.id for arm in plan(config, task).arms] for config in configs]
    assert len(arms) == (FOLDER / f"{file}.yaml").read_text().count("# group ") == len(set(configs))
    assert arms[-1] == [arm.id for arm in plan(FOLDER / f"{file}.yaml", task).arms]
    assert arms[0][0] == "none" and all(
        shorter == longer[: len(shorter)] != longer for shorter, longer in itertools.pairwise(arms)
    )
    assert all(call[call.index("--out") + 1] == str(out / task.replace(":", "-")) for call in calls)
