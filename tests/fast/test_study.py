# SPDX-License-Identifier: Apache-2.0
"""What is published of a study: contrasts pooled over tasks, and the tables, from results alone."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import pooled, study
from ngrpo.machine.storage import datafiles
from ngrpo.workbench import statistics
from ngrpo.workbench.compare.plan import read_plan
from tests.report_example import example

PAIRS = {"neighbor helps": ["neighbor rate=0.1", "none"], "noise helps": ["gaussian rate=0.1", "none"]}


def with_scores(ours: list[int], baseline: list[int]) -> dict[str, Any]:
    """A comparison in which each run has one problem, of which so many of 16 answers are right."""
    results = example(steps=2, seeds=len(ours))
    for run in results["runs"]:
        right = {"neighbor rate=0.1": ours, "none": baseline}.get(run["strategy"], baseline)[run["seed"]]
        run |= {"status": "done", "evaluation": {"problems": [{"id": "a", "n": 16, "correct": right}]}}
    return results


def test_contrasts_by_hand() -> None:
    """Differences of 2, 4, 6 sixteenths on one task and 1, 1, 4 on the other: means 4/16 and 2/16, pooled 3/16. The
    second contrast is of equal scores: its p is none, so the first one's is corrected for nothing."""
    tasks = {"one": with_scores([6, 8, 10], [4, 4, 4]), "other": with_scores([5, 5, 8], [4, 4, 4])}
    first, second = study.contrasts(tasks, PAIRS, None)
    whole = pooled.mean_difference([np.array([2, 4, 6]) / 16, np.array([1, 1, 4]) / 16])
    assert whole["value"] == pytest.approx(3 / 16)
    assert first[0] == "neighbor helps" and first[1].startswith("+0.250 [") and first[2].startswith("+0.125 [")
    # Spreads 2/16 and sqrt(3)/16: sqrt((4 + 3) / 2) / 16 = 0.1169 of both.
    least = statistics.detectable(0.11693, 3, 2, 2)
    assert first[3] == f"+0.188 [{whole['low']:+.3f}, {whole['high']:+.3f}], detectable {least:.3f}"
    assert first[4] == f"{whole['p']:.3g} ({whole['p']:.3g})"
    assert first[5].startswith("1.000") and second[3].startswith("+0.000") and second[4] == "–"


def test_seeds_without_a_partner_are_left_out_and_too_few_are_said() -> None:
    results = with_scores([6, 8, 10], [4, 4, 4])
    for run in results["runs"]:
        if run["strategy"] == "none" and run["seed"] > 0:
            run["status"] = "failed"
    ((_, cell, whole, p, chance), _) = study.contrasts({"one": results}, PAIRS, None)
    assert (cell, whole, p, chance) == ("– (1 seeds)", "–", "–", "–")


def test_a_study_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in ("sums", "products"):
        results = copy.deepcopy(example(steps=4, seeds=3))
        for run in results["runs"]:
            if run["strategy"] == "neighbor rate=0.1":
                run["steps"][-1][study._DRIFT] = 0.25
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(results))
    file = tmp_path / "contrasts.yaml"
    file.write_text("neighbor helps: ['neighbor rate=0.1', none]\n")
    words = ["study", str(tmp_path / "runs"), "--contrasts", str(file), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    study.main()
    text = (tmp_path / "out" / "tables.md").read_text()
    published = json.loads(gzip.decompress((tmp_path / "out" / "sums" / "results.json.gz").read_bytes()))
    assert published == json.loads((tmp_path / "runs" / "sums" / "results.json").read_text())
    assert "11 of 12 runs finished" in text and "ngrpo compare --perturbations" in text
    assert "## Contrasts in Mean@n" in text and "## Contrasts in Pass@8" in text
    row = next(line for line in text.splitlines() if line.startswith("| neighbor rate=0.1 |"))
    assert row.rstrip(" |").endswith("0.250")
    file.write_text("nobody: [neighbour, none]\n")
    with pytest.raises(SystemExit):
        study.main()
    assert "no strategy is called 'neighbour'" in capsys.readouterr().err


STUDY = Path(__file__).resolve().parents[2] / "examples" / "study"


def test_the_contrasts_name_strategies_that_are_run() -> None:
    plan, _ = read_plan(["--config", str(STUDY / "study.yaml"), "--task", "arithmetic"])
    pairs = datafiles.read_yaml(str(STUDY / "contrasts.yaml"), flag="--contrasts", example="")
    assert len(pairs) == 3 and {strategy for pair in pairs.values() for strategy in pair} <= {a.id for a in plan.arms}
    assert plan.baseline == "none" and len(plan.seeds) >= 5


@pytest.mark.more
def test_the_script_compares_both_tasks_and_publishes(tmp_path: Path) -> None:
    """With a stub of ngrpo that keeps its words and fails as with a failed run: the second task runs all the same."""
    stub = tmp_path / "ngrpo"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[2:]))\nsys.exit(1)\n")
    stub.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    words = ["bash", str(STUDY / "run.sh"), str(tmp_path / "out"), "--seeds", "0,1"]
    done = subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    plans = [read_plan(json.loads(line)) for line in done.stdout.splitlines()]
    assert [out.name for _, out in plans] == ["sums", "basic"]
    design = (STUDY.parents[1] / "docs" / "studies" / "study.md").read_text()
    for plan, out in plans:
        assert plan.seeds == (0, 1) and plan.evaluation is not None and not plan.keep_models
        steps = {"sums": 8, "basic": 12}[out.name]
        assert ("--data.max_samples", str(8 * steps)) in zip(plan.shared, plan.shared[1:])
        ids = [arm.id for arm in plan.arms]
        assert len(ids) == {"sums": 11, "basic": 4}[out.name]
        assert all(f"| `{arm}` |" in design or "temperature" in arm for arm in ids)
    assert "holds no comparison" in done.stderr, "the last step is the publication"


def test_problems_are_the_same_every_time_and_none_is_in_both_parts() -> None:
    problems = runpy.run_path(str(STUDY / "problems.py"))["problems"]
    name = re.findall(r"SECOND:-(\w+)", (STUDY / "run.sh").read_text())[0]
    train, held_out = problems(name)
    assert (train, held_out) == problems(name)
    assert (len(train), len(held_out)) == (1024, 16)
    assert not {row["input"] for row in train} & {row["input"] for row in held_out}
