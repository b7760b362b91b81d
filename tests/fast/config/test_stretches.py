# SPDX-License-Identifier: Apache-2.0
"""A run that is resumed with other settings: which are refused, which are named, and whose steps are whose."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ngrpo.config import run_notes, stretches
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.report import summary, write_report
from perturbations import create
from perturbations.errors import UsageError
from tests.fast.workbench.report.test_summary import write_log
from tests.support.run import run_of

NEIGHBOR = create("neighbor", rate=0.1).spec()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint after step 4."""
    saved = tmp_path / "checkpoints" / "_actor"
    (saved / "global_step4").mkdir(parents=True)
    (saved / "global_step4" / "mp_rank_00_model_states.pt").touch()
    (saved / "latest").write_text("global_step4")
    (tmp_path / "data.jsonl").write_text('{"input": "Q", "label": "1"}\n')
    return tmp_path


def words(folder: Path, *more: str) -> list[str]:
    """OpenRLHF's flags of a run in ``folder``; those of ``more`` win."""
    usual = ["--actor.model_name_or_path", "m", "--rollout.n_samples_per_prompt", "4"]
    usual += ["--data.prompt_dataset", str(folder / "data.jsonl"), "--ckpt.path", str(folder / "checkpoints")]
    names = [flag.name for flag in Flags(more)]
    return [*Flags(usual).without(*names).argv, *more]


class Start(NamedTuple):
    """What a start of a run finds: its stretches, which it leaves in the folder, and its warnings."""

    stretches: list[stretches.Stretch]
    warnings: list[str]


def start(folder: Path, *more: str, spec: Any = NEIGHBOR, **values: Any) -> Start:
    flags = Flags(words(folder, *more))
    run = run_of(perturbation=spec, openrlhf=tuple(flags.argv), run_dir=str(folder), **values)
    complete = CompleteRun(run=run, flags=flags)
    result = Start(stretches.of_start(complete), list(stretches.notes(complete)))
    stretches.write(folder, result.stretches)
    return result


def first_steps(start: Start) -> list[int]:
    return [stretch["first_step"] for stretch in start.stretches]


RESUMED = "--ckpt.load_enable"


def test_the_same_settings_are_one_stretch(folder: Path) -> None:
    first = start(folder)
    assert first_steps(first) == [1]
    assert first.warnings == []
    resumed = start(folder, RESUMED, "--ckpt.save_steps", "1", "--logger.wandb.project", "x")
    assert resumed == first


@pytest.mark.parametrize(
    ("flags", "values", "change"),
    [
        (["--rollout.n_samples_per_prompt", "8"], {}, "rollout.n_samples_per_prompt 4 → 8"),
        (["--train.seed", "7"], {}, "train.seed not given → 7"),
        ([], {"spec": create("neighbor", rate=0.2).spec()}, "perturbation.rate 0.1 → 0.2"),
        ([], {"spec": create("neighbor", rate=0.1, seed=3).spec()}, "perturbation.seed 0 → 3"),
        ([], {"sampling": {"top_k": 5}}, "sampling.top_k not given → 5"),
        ([], {"reproducible": True}, "reproducible not given → true"),
    ],
)
def test_other_settings_are_named_and_begin_a_stretch(
    folder: Path, flags: list[str], values: dict[str, Any], change: str
) -> None:
    start(folder)
    resumed = start(folder, RESUMED, *flags, **values)
    assert first_steps(resumed) == [1, 5]
    (warning,) = resumed.warnings
    assert warning.startswith(f"from step 5 on other settings hold: {change}.")
    assert start(folder, RESUMED, *flags, **values) == resumed, "resumed once more from the same checkpoint"


def test_a_file_with_other_content_is_named(folder: Path) -> None:
    start(folder)
    (folder / "data.jsonl").write_text('{"input": "P", "label": "2"}\n')
    (warning,) = start(folder, RESUMED).warnings
    assert f"content of {folder / 'data.jsonl'} " in warning


def test_another_file_is_named_without_its_content(folder: Path) -> None:
    start(folder)
    other = folder / "other.jsonl"
    other.write_text("")
    (warning,) = start(folder, RESUMED, "--data.prompt_dataset", str(other)).warnings
    assert "data.prompt_dataset" in warning
    assert "content of" not in warning


@pytest.mark.parametrize(
    ("flags", "values", "message"),
    [
        (
            ["--actor.model_name_or_path", "n"],
            {},
            "with model m, and this run has model n. Give --actor.model_name",
        ),
        (
            [],
            {"spec": create("soft").spec()},
            "with perturbation neighbor, and this run has perturbation soft. Give --pert",
        ),
        ([], {"spec": None}, "with perturbation neighbor, and this run has perturbation none"),
        ([], {"advantage": {"name": "maxrl"}}, "with advantage none, and this run has advantage maxrl"),
    ],
)
def test_another_model_or_method_is_refused(
    folder: Path, flags: list[str], values: dict[str, Any], message: str
) -> None:
    start(folder)
    with pytest.raises(UsageError, match=f"checkpoint after step 4 is of a run {message}"):
        start(folder, RESUMED, *flags, **values)
    started_anew = start(folder, *flags, **values)
    assert started_anew.stretches[0]["first_step"] == 1, "a start at step 0 may have any"


@pytest.mark.parametrize(
    ("refresh", "flags", "warns"),
    [("10", [RESUMED], True), ("10", [], False), *((same, [RESUMED], False) for same in ("1", "every_sync", "never"))],
)
def test_a_resumed_run_without_its_neighbor_sets_is_warned_of(
    refresh: str, flags: list[str], warns: bool, folder: Path
) -> None:
    run = run_of(perturbation=create("neighbor", refresh=refresh).spec())
    notes = list(run_notes.neighbor_notes(CompleteRun(run=run, flags=Flags(words(folder, *flags)))))
    assert len(notes) == warns
    assert all("--perturbation.refresh 10: a checkpoint lacks the neighbor sets" in note for note in notes)


def test_a_checkpoint_from_before_a_change_drops_its_stretch(folder: Path) -> None:
    start(folder)
    start(folder, RESUMED, "--train.seed", "7")
    (folder / "checkpoints/_actor/latest").write_text("global_step2")
    resumed = start(folder, RESUMED, "--train.seed", "8")
    assert first_steps(resumed) == [1, 3]
    (warning,) = resumed.warnings
    assert "train.seed not given → 8" in warning


def test_a_stretch_of_a_single_step_stays(folder: Path) -> None:
    start(folder)
    second_stretch = start(folder, RESUMED, "--train.seed", "7").stretches
    saved = folder / "checkpoints/_actor"
    (saved / "global_step4").rename(saved / "global_step5")
    (saved / "latest").write_text("global_step5")
    resumed = start(folder, RESUMED, "--train.seed", "7")
    assert resumed.stretches == second_stretch, "step 5 was the first of the second stretch"
    assert resumed.warnings == []


def test_a_models_folder_is_the_same_by_any_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model").mkdir()
    start(folder, "--actor.model_name_or_path", str(folder / "model"))
    monkeypatch.chdir(folder)
    resumed = start(folder, RESUMED, "--actor.model_name_or_path", "model")
    assert resumed.stretches[-1]["settings"]["actor.model_name_or_path"] == "model"


def run_yaml(folder: Path, where: Path, more: Sequence[str] = ()) -> RunConfig:
    run = run_of(perturbation=NEIGHBOR, openrlhf=tuple(words(folder, *more)))
    run.write(where / FILE)
    return run


def test_the_file_of_the_run_counts_where_an_older_release_ran(folder: Path) -> None:
    run_yaml(folder, folder)
    resumed = start(folder, RESUMED)
    assert len(resumed.stretches) == 1
    assert resumed.warnings == []

    (folder / stretches.STRETCHES).unlink()
    (warning,) = start(folder, RESUMED, "--rollout.n_samples_per_prompt", "8").warnings
    assert "n_samples_per_prompt 4 → 8" in warning
    assert "content of" not in warning


def test_checkpoints_of_another_folder_have_its_settings(folder: Path, tmp_path: Path) -> None:
    run_yaml(folder, folder)
    other = tmp_path / "new"
    flags = Flags(words(folder, RESUMED, "--train.seed", "7"))
    run = run_of(perturbation=NEIGHBOR, openrlhf=tuple(flags.argv), run_dir=str(other))
    assert "train.seed not given → 7" in next(iter(stretches.notes(CompleteRun(run=run, flags=flags))))


def test_summary_and_report_have_the_settings_of_each_stretch(folder: Path) -> None:
    start(folder)
    start(folder, RESUMED, "--rollout.n_samples_per_prompt", "8")
    write_log(folder / "tb", [0.25, 0.5, 0.5, 0.5, 1.0], {})
    flags = ("--logger.tensorboard_dir", str(folder / "tb"), RESUMED)

    text = summary.finish(folder, run_of(perturbation=NEIGHBOR, openrlhf=flags, hardware="cpu"), began=0.0)
    written = json.loads((folder / "summary.json").read_text())
    write_report(written, folder / "report.html")

    samples = [stretch["settings"]["rollout.n_samples_per_prompt"] for stretch in written["stretches"]]
    assert samples == ["4", "8"]
    line = "from step 5 on other settings hold: rollout.n_samples_per_prompt 4 → 8"
    assert f"settings      {line}" in text
    assert line in (folder / "report.html").read_text()


def test_the_report_of_an_older_release_has_no_settings(folder: Path) -> None:
    start(folder)
    start(folder, RESUMED, "--rollout.n_samples_per_prompt", "8")
    write_log(folder / "tb", [0.25, 0.5, 0.5, 0.5, 1.0], {})
    flags = ("--logger.tensorboard_dir", str(folder / "tb"), RESUMED)
    summary.finish(folder, run_of(perturbation=NEIGHBOR, openrlhf=flags, hardware="cpu"), began=0.0)
    written = json.loads((folder / "summary.json").read_text())
    del written["stretches"]
    write_report(written, folder / "report.html")
    assert "Settings</dt>" not in (folder / "report.html").read_text()
