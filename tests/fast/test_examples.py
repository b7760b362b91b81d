# SPDX-License-Identifier: Apache-2.0
"""The examples that need no engine; the others run in tests/pipeline."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo import catalogue, flags
from ngrpo.compare import arguments
from ngrpo.train import checked_flags


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


RECIPES = [
    line
    for file in sorted((Path(__file__).resolve().parents[2] / "examples/recipes").glob("*.txt"))
    for line in file.read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("line", RECIPES, ids=lambda line: line.removeprefix("ngrpo train --preset "))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_recipe_is_a_command_that_is_accepted(line: str, tmp_path: Path) -> None:
    """With sizes as the first line of each file asks for; nothing loads or starts."""
    program, command, *words = shlex.split(line)
    assert (program, command) == ("ngrpo", "train")
    sizes = ["--rollout.n_samples_per_prompt", "4", "--rollout.batch_size", "4", "--train.batch_size", "16"]
    given = [word for pair in zip(sizes[::2], sizes[1::2]) if pair[0] not in words for word in pair]
    parsed = flags.parse([*words, *given, "--model", "smollm2-135m", "--task", "arithmetic", "--hardware", "cpu"])
    assert checked_flags(parsed, tmp_path).has("--algo.advantage.estimator")


def test_every_method_has_a_recipe() -> None:
    text = (
        "\n".join(RECIPES) + Path(__file__).resolve().parents[2].joinpath("examples/train_neighbor_cpu.sh").read_text()
    )
    for kept, flag in catalogue.KINDS.items():
        missing = {name for name in kept.in_tree() if f"{flag} {name}" not in text} - {"none", "group_norm"}
        assert kept.kind in ("gate", "replay buffer") or not missing, missing
