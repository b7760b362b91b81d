# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis with made-up samples in vLLM's place: what is written, kept, dropped after an interruption, and
refused. The folder under all commands: test_result_folder.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo.cli import main
from ngrpo.commands import compare
from ngrpo.commands import diagnose as command
from ngrpo.config.arms import parse_arms
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.machine.upstream import versions
from ngrpo.workbench.compare import runs
from ngrpo.workbench.compare.runs import ComparisonFolder
from ngrpo.workbench.diagnose import diagnosis, group_sampling, policy_of
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample
from ngrpo.workbench.evaluate import load_task
from perturbations.errors import UsageError
from tests.support.compare_example import plan

SAMPLING = GroupSampling(group=2, max_tokens=4)


class MadeUp:
    """Stands for a vllm.LLM: member 0 of each group is right. ``sampled_arms`` are those that it has sampled."""

    def __init__(self) -> None:
        self.sampled_arms: list[str] = []

    def get_tokenizer(self) -> MadeUp:
        return self

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def sample(self, llm: Any, arm: Any, problems: Any, sampling: GroupSampling, *_: Any) -> tuple[list[Sample], Any]:
        self.sampled_arms.append(arm.id)
        samples = []
        for group, problem in enumerate(problems):
            for member in range(sampling.group):
                sample = Sample(
                    strategy=arm.id,
                    problem=problem.id,
                    group=group,
                    member=member,
                    text="text",
                    tokens=[1, 2 + member],
                    ended=True,
                    reward=1.0 - member,
                    correct=member == 0,
                    extracted=str(member),
                    parsed=True,
                    nll=2.0,
                    record=None,
                )
                samples.append(sample)
        return samples, {"tokens_per_second": 5.0, "anchor_nearest": None, "text_nearest": None}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made_up = MadeUp()
    monkeypatch.setattr(group_sampling, "sample_arm", made_up.sample)
    return made_up


def run(llm: MadeUp, out: Path, names: str = "none,neighbor", **changes: Any) -> dict[str, Any]:
    settings = {"out": out, "sampling": SAMPLING, "dataset": "sums", "llm": llm, **changes}
    return diagnosis.diagnose("made-up", load_task("arithmetic", limit=2), parse_arms(names), **settings)


def test_what_is_written(llm: MadeUp, tmp_path: Path) -> None:
    out = tmp_path / "out"

    result = run(llm, out)

    assert read_json(out / "diagnosis.json") == result
    assert "neighbor" in (out / "diagnosis.html").read_text()
    assert len((out / "samples.jsonl").read_text().splitlines()) == 8
    assert [row["name"] for row in result["strategies"]] == ["none", "neighbor"]
    assert result["baseline"] == "none"
    # One of two right in each group.
    for row in result["strategies"]:
        assert row["pass_at_k"] == {"1": 0.5, "2": 1.0}
    assert result["group"] == 2
    assert result["prompts"] == 2
    assert result["dataset"] == "sums"
    assert result["sampling"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "seed": 0, "dtype": "float32"}


def test_the_baseline_has_no_schedule(llm: MadeUp, tmp_path: Path) -> None:
    arms = parse_arms(None, (), ["none sampling.schedule=ead", "none"], rollouts=True)
    result = diagnosis.diagnose(
        "made-up",
        load_task("arithmetic", limit=2),
        arms,
        policies=[policy_of(arm) for arm in arms],
        out=tmp_path,
        sampling=SAMPLING,
        llm=llm,
    )
    assert result["baseline"] == "none"
    scheduled, baseline = result["strategies"]
    assert scheduled["difference"] is not None
    assert baseline["difference"] is None


def test_other_weights_are_refused(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(llm, tmp_path)
    monkeypatch.setattr(diagnosis.packaged, "fingerprint", lambda model: "1")
    with pytest.raises(UsageError, match=r"other settings.*weights was"):
        run(llm, tmp_path)


def test_an_arm_of_other_software_gives_a_warning(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.28")
    assert not any("differ" in line for line in run(llm, tmp_path, "none")["warnings"])
    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.29")
    warnings = run(llm, tmp_path, "none,neighbor")["warnings"]
    assert any(
        line.startswith("the arms differ in vllm (0.28, 0.29), and not in the perturbation alone.") for line in warnings
    )


def test_another_dataset_is_refused(llm: MadeUp, tmp_path: Path) -> None:
    run(llm, tmp_path)
    with pytest.raises(UsageError, match=r"other settings.*dataset was"):
        run(llm, tmp_path, dataset="others")


def test_other_options_of_an_arm_are_refused(llm: MadeUp, tmp_path: Path) -> None:
    run(llm, tmp_path)
    finished = tmp_path / "finished.jsonl"
    without_checksums = re.sub(r', "checksum": "\w+"', "", finished.read_text())
    finished.write_text(without_checksums.replace('"rate": 0.1', '"rate": 0.2'))
    with pytest.raises(UsageError, match="'neighbor' was sampled there with other options"):
        run(llm, tmp_path)


def test_a_comparison_that_continues_diagnoses_what_is_new(
    llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison before its training, again and again in one folder, its diagnoses made with made-up samples."""
    folder = ComparisonFolder(tmp_path)
    diagnoses = []

    def diagnose(words: list[str], *_: Any) -> None:
        args, sampling, arms = command._read(words[1:])
        diagnosis.diagnose(
            args.model,
            load_task("arithmetic", limit=args.prompts),
            arms,
            sampling=sampling,
            policies=[policy_of(arm) for arm in arms],
            out=args.out,
            dataset="task arithmetic",
            llm=llm,
        )
        diagnoses.append(words)

    def diagnosed_arms(*words: str) -> list[str]:
        shared = ("--eval.data", "none", "--diagnose.prompts", "2", "--diagnose.group", "2")
        compare._before_training(plan(*shared, *words), folder, "model")
        return [row["name"] for row in folder.read("diagnosis/diagnosis.json")["strategies"]]

    monkeypatch.setattr(runs, "command", diagnose)
    with_schedule = ("--perturbations", "none,gumbel", "--strategy", "none sampling.schedule=ead")

    assert diagnosed_arms("--perturbations", "none") == ["none"]
    assert len(diagnoses) == 1
    # Another seed of the training needs no other diagnosis.
    assert diagnosed_arms("--perturbations", "none", "--seeds", "0,1") == ["none"]
    assert len(diagnoses) == 1
    assert diagnosed_arms("--perturbations", "none,gumbel") == ["none", "gumbel"]
    assert len(diagnoses) == 2
    assert diagnosed_arms(*with_schedule) == ["none", "gumbel", "none sampling.schedule=ead"]
    assert len(diagnoses) == 3
    assert llm.sampled_arms == ["none", "gumbel", "none sampling.schedule=ead"]
    assert diagnosed_arms(*with_schedule) == ["none", "gumbel", "none sampling.schedule=ead"]
    assert len(diagnoses) == 3
    assert diagnosed_arms("--perturbations", "gumbel") == ["gumbel"]
    assert len(diagnoses) == 4


@pytest.mark.parametrize("finished", [1, 2], ids=["interrupted", "finished"])
def test_an_arm_whose_last_line_was_cut_is_sampled_again(llm: MadeUp, tmp_path: Path, finished: int) -> None:
    uninterrupted = run(llm, tmp_path)
    samples_file = tmp_path / "samples.jsonl"
    samples_file.write_text(samples_file.read_text()[:-10])
    finished_file = tmp_path / "finished.jsonl"
    finished_lines = finished_file.read_text().splitlines(keepends=True)
    finished_file.write_text("".join(finished_lines[:finished]))

    messages: list[str] = []
    result = run(llm, tmp_path, report=messages.append)

    assert result["strategies"] == uninterrupted["strategies"]
    assert llm.sampled_arms == ["none", "neighbor", "neighbor"]
    assert len(samples_file.read_text().splitlines()) == 8
    assert any("cut off half-way" in message for message in messages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "arithmetic"], "no model"),
        (["--task", "arithmetic", "--gruop", "4"], "Did you mean '--group'"),
        (["--task", "arithmetic", "--top-p", "0"], "in (0, 1]"),
        (["--task", "arithmetic", "--tokens", "sum"], "--embedding-map"),
    ],
)
def test_bad_words(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["diagnose", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_file_of_problems_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("")
    assert main(["diagnose", "--model", "smollm2-135m", "--data", str(file)]) == 2
    assert "empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--perturbations", "none,none,neighbor"], ["none", "neighbor"]),
        (["--strategy", "none", "--strategy", "none sampling.schedule=none"], ["none"]),
        (
            ["--strategy", "none", "--strategy", "none sampling.schedule=ead", "--strategy", "neighbor rate=0"],
            ["none", "none sampling.schedule=ead", "neighbor rate=0"],
        ),
    ],
)
def test_an_arm_that_is_named_twice_has_one_row(words: list[str], ids: list[str]) -> None:
    _, _, arms = command._read(words)
    assert [arm.id for arm in arms] == ids
