# SPDX-License-Identifier: Apache-2.0
"""The studies' files: tasks, seeds, groups of arms and steps of docs/studies/, and the scripts that run them."""

import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo.workbench.compare.plan import Plan, read_plan
from perturbations import registry
from tests.conftest import ROOT

FIRST, SECOND = ROOT / "examples" / "study", ROOT / "examples" / "study2"
# In the place of `ngrpo`: keeps its words, and fails as with a failed run.
STUB = f"""#!{sys.executable}
import json, os, sys
print(json.dumps(sys.argv[2:]), file=open(os.environ["CALLS"], "a"))
sys.exit(int(os.environ.get("FAILS", 0)))
"""


def plan(file: Path, task: str = "shortcut:late") -> Plan:
    return read_plan(["--config", str(file), "--task", task])[0]


def calls_of(script: Path, folder: Path, *words: str, **given: str) -> tuple[list[list[str]], str]:
    """The words of every `ngrpo compare` that a script starts, and what it says of errors."""
    (folder / "ngrpo").write_text(STUB)
    (folder / "ngrpo").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "CALLS": str(folder / "calls"), **given}
    command = ["bash", str(script), str(folder / "out"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()], done.stderr


@pytest.mark.more
def test_the_script_compares_both_tasks_and_publishes(tmp_path: Path) -> None:
    """The second task runs although the first one had a failed run."""
    calls, said = calls_of(FIRST / "run.sh", tmp_path, "--seeds", "0,1", FAILS="1")
    plans = [read_plan(words) for words in calls]
    assert [out.name for _, out in plans] == ["sums", "basic"]
    design = (ROOT / "docs" / "studies" / "study.md").read_text()
    for (made, _), steps, count in zip(plans, (8, 12), (11, 4)):
        assert made.seeds == (0, 1) and made.evaluation is not None and not made.keep_models
        assert ("--data.max_samples", str(8 * steps)) in zip(made.shared, made.shared[1:])
        ids = [arm.id for arm in made.arms]
        assert len(ids) == count and all(f"| `{arm}` |" in design or "temperature" in arm for arm in ids)
    assert "holds no comparison" in said, "the last step is the publication"


def test_problems_are_the_same_every_time_and_none_is_in_both_parts() -> None:
    problems = runpy.run_path(str(FIRST / "problems.py"))["problems"]
    name = re.findall(r"SECOND:-(\w+)", (FIRST / "run.sh").read_text())[0]
    train, held_out = problems(name)
    assert (train, held_out) == problems(name) and (len(train), len(held_out)) == (1024, 16)
    assert not {row["input"] for row in train} & {row["input"] for row in held_out}


@pytest.mark.parametrize(
    ("task", "file"), [("shortcut:late", "study"), ("shortcut", "shortcut"), ("two_peaks", "two_peaks")]
)
def test_groups_of_arms_are_taken_one_after_another(task: str, file: str, tmp_path: Path) -> None:
    """run.sh gives `ngrpo compare` the groups up to one, then up to the next: the arms of the whole file in the end."""
    calls, _ = calls_of(SECOND / "run.sh", tmp_path, TASKS=task)
    configs = [Path(call[call.index("--config") + 1]) for call in calls]
    arms = [[arm.id for arm in plan(config, task).arms] for config in configs]
    assert len(arms) == (SECOND / f"{file}.yaml").read_text().count("# group ") == len(set(configs))
    assert arms[-1] == [arm.id for arm in plan(SECOND / f"{file}.yaml", task).arms] and arms[0][0] == "none"
    assert all(shorter == longer[: len(shorter)] != longer for shorter, longer in itertools.pairwise(arms))
    assert all(call[call.index("--out") + 1] == str(tmp_path / "out" / task.replace(":", "-")) for call in calls)


def test_every_perturbation_is_an_arm() -> None:
    arms = [arm.id.split()[0] for arm in plan(SECOND / "study.yaml").arms]
    assert set(registry.perturbations.in_tree()) == set(arms)
