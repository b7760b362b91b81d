# SPDX-License-Identifier: Apache-2.0
"""The files of the second and the third study: their arms, and the scripts that run them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ngrpo.workbench.compare.plan import Plan, read_plan
from tests.conftest import ROOT

SECOND = ROOT / "examples" / "study2"
THIRD = ROOT / "examples" / "study3"
# In the place of `ngrpo`: keeps its words.
STUB = f"""#!{sys.executable}
import json, os, sys
print(json.dumps(sys.argv[2:]), file=open(os.environ["CALLS"], "a"))
"""


def plan(file: Path, task: str = "shortcut:late") -> Plan:
    return read_plan(["--config", str(file), "--task", task])[0]


def calls_of(script: Path, folder: Path, **variables: str) -> list[list[str]]:
    """The words of every `ngrpo compare` that a script starts."""
    (folder / "ngrpo").write_text(STUB)
    (folder / "ngrpo").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "CALLS": str(folder / "calls"), **variables}
    subprocess.run(["bash", str(script), str(folder / "out")], env=env, capture_output=True, check=False)
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "file"), [("shortcut:late", "study"), ("shortcut", "shortcut"), ("two_peaks", "two_peaks")]
)
def test_groups_of_arms_are_taken_one_after_another(task: str, file: str, tmp_path: Path) -> None:
    """run.sh gives `ngrpo compare` the groups up to one, then up to the next: the arms of the whole file in the end."""
    calls = calls_of(SECOND / "run.sh", tmp_path, TASKS=task)
    configs = [Path(value_of(call, "--config")) for call in calls]
    arms_by_call = [[arm.id for arm in plan(config, task).arms] for config in configs]
    whole_file = SECOND / f"{file}.yaml"
    groups = whole_file.read_text().count("# group ")
    assert len(configs) == len(set(configs)) == groups
    assert arms_by_call[0][0] == "none"
    assert arms_by_call[-1] == [arm.id for arm in plan(whole_file, task).arms]
    for shorter, longer in itertools.pairwise(arms_by_call):
        assert longer[: len(shorter)] == shorter
        assert len(longer) > len(shorter)
    out = tmp_path / "out" / task.replace(":", "-")
    assert {value_of(call, "--out") for call in calls} == {str(out)}


def test_the_third_study_compares_and_publishes_both_of_its_tasks(tmp_path: Path) -> None:
    """`ngrpo compare` gets problems that were written before it; publishing fails here, as the stub trains nothing."""
    problems = str(tmp_path / "problems")
    calls = calls_of(THIRD / "run.sh", tmp_path, RESULTS=str(tmp_path / "published"), PROBLEMS=problems)
    assert [Path(value_of(call, "--out")).name for call in calls] == ["gcd", "products"]
    for call in calls:
        held_out = Path(value_of(call, "--eval.data")).read_text().splitlines()
        trained = Path(value_of(call, "--task").removeprefix("math:")).read_text().splitlines()
        assert len(held_out) == 32
        assert not set(held_out) & set(trained)
        assert len(trained) >= int(value_of(call, "--data.max_samples")) == 16 * 8


def test_the_third_study_asks_about_its_own_arms() -> None:
    arms = {arm.id for arm in plan(THIRD / "study.yaml", "arithmetic").arms}
    questions = yaml.safe_load((THIRD / "contrasts.yaml").read_text(encoding="utf-8"))
    asked = {arm for pair in questions.values() for arm in pair}
    assert asked == arms


def value_of(call: list[str], flag: str) -> str:
    return call[call.index(flag) + 1]
