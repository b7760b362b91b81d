# SPDX-License-Identifier: Apache-2.0
"""The examples that need no engine; the others run in tests/pipeline."""

import dataclasses
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config import parse, rules
from ngrpo.config.kinds import FLAGS
from ngrpo.machine.hardware import gpu_plan
from ngrpo.machine.upstream import placement as gpus
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare.plan import Plan, read_plan
from ngrpo.workbench.compare.runs import run_config
from perturbations import registry
from perturbations.errors import UsageError
from tests.support.recipes import METHODS, PAPERS, PLACEMENTS, RECIPES, words_of

EXAMPLES = RECIPES.parent
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


def read(name: str) -> tuple[Plan, list[str]]:
    """The plan of an example, and its strategies."""
    plan, _ = read_plan(["--config", str(EXAMPLES / name), "--model", "smollm2-135m", "--task", "arithmetic"])
    return plan, [arm.id for arm in plan.arms]


def completed(words: list[str], given: Mapping[str, str] = GIVEN) -> list[str]:
    """A recipe of a method with model, task and sizes, as the index asks for."""
    return list(Flags(words).with_defaults(given).argv)


@pytest.mark.parametrize("name", ["custom_perturbation", pytest.param("custom_gate", marks=pytest.mark.more)])
def test_custom_examples_check_themselves(name: str) -> None:
    script = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "keeps the contract" in result.stdout


def test_each_row_of_the_ablation_is_a_strategy() -> None:
    plan, ids = read("ablation.yaml")
    rows = [line for line in (EXAMPLES / "ablation.yaml").read_text().splitlines() if line.lstrip().startswith("- ")]
    assert len(set(ids)) == len(ids) == len(rows)
    assert plan.baseline == "none base=grpo"
    assert plan.seeds == (0, 1, 2)
    assert plan.evaluation is not None
    assert plan.evaluation[plan.evaluation.index("--n") + 1] == "32"
    assert not any(arm.notes for arm in plan.arms), "a row of the ablation would be greedy decoding"


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_comparison_of_all_methods_has_all_of_them(tmp_path: Path) -> None:
    """Each row is a training that is accepted, and every method of the tree is in one."""
    plan, ids = read("all_methods.yaml")
    assert len(set(ids)) == len(ids)
    assert plan.baseline in ids
    for kept, flag in FLAGS.items():
        words = {"--perturbation": ""}.get(flag, f"{flag.removeprefix('--')}=")
        missing = {name for name in kept.in_tree() if not any(f"{words}{name}" in line.split() for line in ids)}
        assert kept.kind in ("gate", "replay buffer") or not missing, missing
    for run in plan.runs()[: len(plan.arms)]:
        asked = dataclasses.replace(run_config(plan, run, tmp_path), hardware="cpu")
        assert rules.checked(asked).flags.has("--algo.kl.init_coef")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_method_is_a_run_that_is_accepted(name: str) -> None:
    """Nothing loads or starts."""
    parsed = parse.run_config([*completed(words_of(f"methods/{name}")), "--hardware", "cpu"])
    assert rules.checked(parsed).flags.has("--algo.advantage.estimator")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_method_has_a_recipe() -> None:
    """Each perturbation that has a density has one with it."""
    recipes = {name: words_of(f"methods/{name}") for name in METHODS}
    text = "\n".join(" ".join(words) for words in recipes.values())
    for kept, flag in FLAGS.items():
        missing = {name for name in kept.in_tree() if f"{flag} {name}" not in text} - {"none", "group_norm"}
        assert kept.kind in ("gate", "replay buffer") or not missing, missing
    assert len({tuple(sorted(words)) for words in recipes.values()}) == len(recipes), "two files, one recipe"
    made = [registry.create(**spec) for words in recipes.values() if (spec := parse.run_config(words).spec)]
    options = {name: dataclasses.fields(registry.get(name)) for name in registry.perturbations.in_tree()}
    densities = {name for name, fields in options.items() if any(field.name == "density" for field in fields)}
    assert {perturbation.name for perturbation in made if perturbation.has_density} == densities


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
        assert f"{1 if '_1_gpu' in placement else 8} GPU" in text.out
        assert "actor: optimizer" in text.out


@pytest.mark.more
@pytest.mark.parametrize("shape", ["1x80", "8x80", "2x8x80"])
@pytest.mark.parametrize("placement", [None, *(name for name in PLACEMENTS if not name.startswith("rehearsal"))])
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("folder")
def test_every_recipe_is_planned_for_1_8_and_16_gpus(placement: str | None, shape: str) -> None:
    """All GPUs by default, else as many as the placement has; refused, with both numbers, where there are fewer."""
    planned = gpus.planned(shape, "--dry-run")
    needed = planned.total if placement is None else int(placement.split("_")[1])
    given = {**GIVEN, "--model": "Qwen/Qwen3-0.6B", "--rollout.batch_size": "8", "--train.batch_size": "32"}
    for name in (*PAPERS, *(f"methods/{method}" for method in METHODS)):
        words = completed(words_of(name), given) if "/" in name else words_of(name)
        words += ["--hardware", "cuda"] if placement is None else words_of(f"placements/{placement}")
        words += ["--ds.adam_offload"] * ("7b" in name and placement == "hybrid_1_gpu")
        words += ["--ds.zero_stage", "2"] * ("/" in name)  # under ZeRO-3 there is no noise on weights
        try:
            run = dataclasses.replace(parse.run_config(words), machine=planned, run_dir="runs/x")
            args = rules.checked(run).args
        except UsageError as error:
            # Densities and noise on weights, which do not go beside the training.
            beside = placement == "asynchronous_8_gpus" and "--train.async_enable cannot be used" in str(error)
            assert beside or f"this run needs {needed} GPUs and {planned.total} is there" in str(error), (name, error)
            assert beside or needed > planned.total
            continue
        assert sum(group.gpus for group in gpus.groups(args)) == needed, name
        assert gpu_plan.fits(args, planned.memory), name


def test_the_index_lists_every_recipe() -> None:
    text = (RECIPES / "README.md").read_text()
    files = [path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml")]
    assert len(files) > 50
    missing = [str(path) for path in files if f"[`{path.stem}`]({path})" not in text]
    assert not missing
    for path in (RECIPES / f"{name}.yaml" for name in PAPERS):
        assert f"ngrpo train --config examples/recipes/{path.name} \\\n" in path.read_text(), path


def test_verls_reward_reads_each_form_of_reference_and_refuses_none() -> None:
    pytest.importorskip("math_verify")
    compute_score = runpy.run_path(str(EXAMPLES / "verl" / "math_score.py"))["compute_score"]
    for reference in ("4", {"target": "4"}, ["4"], "2 + 2 = 4, so\n#### 4"):
        assert compute_score("set", r"\boxed{4}", reference) == 1.0
        assert compute_score("set", r"\boxed{5}", reference) == 0.0
    for reference in (None, "", {"inputs": ["1"]}):
        with pytest.raises(ValueError, match=r"set: reward_model\.ground_truth is .*math needs a reference"):
            compute_score("set", r"\boxed{4}", reference)
