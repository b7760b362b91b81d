"""The examples that need no engine; the others run in tests/pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo.compare import arguments


@pytest.mark.parametrize("name", ["custom_perturbation", "custom_gate"])
def test_custom_examples_check_themselves(name: str) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "keeps the contract" in result.stdout


def test_each_row_of_the_ablation_is_a_strategy() -> None:
    file = Path(__file__).resolve().parents[2] / "examples" / "ablation.yaml"
    plan, _ = arguments.parse(["--config", str(file), "--model", "smollm2-135m", "--task", "arithmetic"])
    ids = [arm.id for arm in plan.arms]
    assert len(set(ids)) == len(ids) == sum(line.lstrip().startswith("- ") for line in file.read_text().splitlines())
    assert plan.baseline == "none base=grpo" and plan.seeds == (0, 1, 2)
    assert plan.evaluation is not None and plan.evaluation[plan.evaluation.index("--n") + 1] == "32"
    assert not any(arm.notes for arm in plan.arms), "a row of the ablation would be greedy decoding"
