# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF trains on an environment of the package verifiers. Slow: `make test-all`, which installs that package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.environment_files import SUMS
from tests.pipeline.harness import GAP, LOUD, assert_nothing_runs, train

# The package that 0.4 has no more.
pytest.importorskip("verifiers.rubrics", reason="needs verifiers 0.2 or 0.3: pip install 'verifiers<0.4'")
pytestmark = pytest.mark.slow


def test_two_steps_with_its_rubric(tmp_path: Path, smollm2: str) -> None:
    """The reward is the rubric's weighted sum, its functions are in the log, and the replay is exact."""
    (tmp_path / "sums_environment.py").write_text(SUMS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = ["--task", "verifiers:sums-environment", "--perturbation", "neighbor", *LOUD]
    result = train(tmp_path / "run", smollm2, *flags, env={"PYTHONPATH": path})
    assert result.returncode == 0, result.stdout[-6000:]
    assert_nothing_runs(tmp_path / "run")
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert len(steps) == 2
    for step in steps:
        by_function = step["rubric_right"] + 0.25 * step["rubric_brief"]
        assert step["reward"] == pytest.approx(by_function, abs=1e-4) and step["rubric_failed"] == 0.0
        assert 0.0 < step["rubric_fragile"] < 1.0
        assert max(step["gap_perturbed_mean"], step["gap_plain_mean"]) <= GAP
