# SPDX-License-Identifier: Apache-2.0
"""The examples that need no engine; the others run in tests/pipeline."""

import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config import parse, rules
from ngrpo.config.kinds import FLAGS
from ngrpo.machine.upstream.openrlhf_flags import Flags
from tests.fast.recipes import METHODS, PAPERS, PLACEMENTS, RECIPES, words_of

EXAMPLES = RECIPES.parent
# What a recipe of a method leaves to the command line.
GIVEN = {"--rollout.n_samples_per_prompt": "4", "--rollout.batch_size": "4", "--train.batch_size": "16"}
GIVEN |= {"--model": "smollm2-135m", "--task": "arithmetic"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples, and stand-ins for the data that the recipes name, in the layout of `ngrpo data`."""
    (tmp_path / "data").mkdir()
    for name in ("deepscaler", "deepscaler_plain", "aime2024", "aime2024_plain"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"input": "What is 1 + 1?", "label": "2"}\n' * 128)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["custom_perturbation", pytest.param("custom_gate", marks=pytest.mark.more)])
def test_custom_examples_check_themselves(name: str) -> None:
    script = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "keeps the contract" in result.stdout


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_method_is_a_run_that_is_accepted(name: str) -> None:
    """Nothing loads or starts."""
    words = Flags(words_of(f"methods/{name}")).with_defaults(GIVEN)
    parsed = parse.run_config([*words.argv, "--hardware", "cpu"])
    assert rules.checked(parsed).has("--algo.advantage.estimator")


def test_every_method_has_a_recipe() -> None:
    text = "\n".join(" ".join(words_of(f"methods/{name}")) for name in METHODS)
    for kept, flag in FLAGS.items():
        missing = {name for name in kept.in_tree() if f"{flag} {name}" not in text} - {"none", "group_norm"}
        assert kept.kind in ("gate", "replay buffer") or not missing, missing


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("folder")
def test_each_recipe_passes_a_dry_run(name: str, placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At every placement, on cards of 80 GB; but for STHT beside the training, whose density does not allow it."""
    pytest.importorskip("openrlhf")
    files = [f"examples/recipes/{name}.yaml", f"examples/recipes/placements/{placement}.yaml"]
    words = [word for file in files for word in ("--config", file)]
    words += ["--ds.adam_offload"] * ("7b" in name and placement == "hybrid_1_gpu")
    refused = name.startswith("stht") and placement.startswith("asynchronous")
    assert cli.main(["train", *words, "--dry-run", "80"]) == (2 if refused else 0)
    text = capsys.readouterr()
    if refused:
        assert "--train.async_enable cannot be used with" in text.err
        return
    assert "WRONG" not in text.out
    if placement != "rehearsal_cpu":
        assert f"{1 if placement.endswith('1_gpu') else 8} GPU" in text.out and "actor: optimizer" in text.out
