# SPDX-License-Identifier: Apache-2.0
"""The second study's files: its groups of arms, and the script that runs them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo.workbench.compare.plan import Plan, read_plan
from tests.conftest import ROOT

SECOND = ROOT / "examples" / "study2"
# In the place of `ngrpo`: keeps its words.
STUB = f"""#!{sys.executable}
import json, os, sys
print(json.dumps(sys.argv[2:]), file=open(os.environ["CALLS"], "a"))
"""


def plan(file: Path, task: str = "shortcut:late") -> Plan:
    return read_plan(["--config", str(file), "--task", task])[0]


def calls_of(script: Path, folder: Path, **given: str) -> list[list[str]]:
    """The words of every `ngrpo compare` that a script starts."""
    (folder / "ngrpo").write_text(STUB)
    (folder / "ngrpo").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "CALLS": str(folder / "calls"), **given}
    subprocess.run(["bash", str(script), str(folder / "out")], env=env, capture_output=True, check=False)
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "file"), [("shortcut:late", "study"), ("shortcut", "shortcut"), ("two_peaks", "two_peaks")]
)
def test_groups_of_arms_are_taken_one_after_another(task: str, file: str, tmp_path: Path) -> None:
    """run.sh gives `ngrpo compare` the groups up to one, then up to the next: the arms of the whole file in the end."""
    calls = calls_of(SECOND / "run.sh", tmp_path, TASKS=task)
    configs = [Path(call[call.index("--config") + 1]) for call in calls]
    arms = [[arm.id for arm in plan(config, task).arms] for config in configs]
    assert len(arms) == (SECOND / f"{file}.yaml").read_text().count("# group ") == len(set(configs))
    assert arms[-1] == [arm.id for arm in plan(SECOND / f"{file}.yaml", task).arms] and arms[0][0] == "none"
    assert all(shorter == longer[: len(shorter)] != longer for shorter, longer in itertools.pairwise(arms))
    assert all(call[call.index("--out") + 1] == str(tmp_path / "out" / task.replace(":", "-")) for call in calls)
