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
from ngrpo.workbench.compare import runs
from ngrpo.workbench.compare.runs import ComparisonFolder
from ngrpo.workbench.diagnose import diagnosis, group_sampling, policy_of
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample
from ngrpo.workbench.evaluate import load_task
from perturbations.errors import UsageError
from tests.support.compare_example import plan

SAMPLING = GroupSampling(group=2, max_tokens=4)


class MadeUp:
    """Stands for a vllm.LLM: member 0 of each group is right."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_tokenizer(self) -> MadeUp:
        return self

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def sample(
        self, llm: Any, strategy: Any, problems: Any, sampling: GroupSampling, *_: Any
    ) -> tuple[list[Sample], Any]:
        self.asked.append(strategy.id)
        samples = [
            Sample(strategy.id, p.id, i, j, "text", [1, 2 + j], True, 1.0 - j, j == 0, str(j), True, 2.0, None)
            for i, p in enumerate(problems)
            for j in range(sampling.group)
        ]
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
    result = run(llm, tmp_path / "out")
    assert read_json(tmp_path / "out" / "diagnosis.json") == result
    assert "neighbor" in (tmp_path / "out" / "diagnosis.html").read_text()
    assert [row["name"] for row in result["strategies"]] == ["none", "neighbor"] and result["baseline"] == "none"
    assert [row["pass_at_k"] for row in result["strategies"]] == [{"1": 0.5, "2": 1.0}] * 2
    assert (result["group"], result["prompts"], result["dataset"]) == (2, 2, "sums")
    assert result["sampling"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "seed": 0, "dtype": "float32"}
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 8


def test_the_baseline_has_no_schedule(llm: MadeUp, tmp_path: Path) -> None:
    strategies = parse_arms(None, (), ["none sampling.schedule=ead", "none"], rollouts=True)
    policies = [policy_of(strategy) for strategy in strategies]
    settings: dict[str, Any] = {"policies": policies, "out": tmp_path, "sampling": SAMPLING, "llm": llm}
    result = diagnosis.diagnose("made-up", load_task("arithmetic", limit=2), strategies, **settings)
    assert result["baseline"] == "none"
    assert [row["difference"] is None for row in result["strategies"]] == [False, True]


def test_other_settings_and_options_are_refused(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(llm, tmp_path)
    with pytest.raises(UsageError, match=r"other settings.*weights was"), monkeypatch.context() as trained:
        trained.setattr(diagnosis.packaged, "fingerprint", lambda model: "1")
        run(llm, tmp_path)
    with pytest.raises(UsageError, match=r"other settings.*dataset was"):
        run(llm, tmp_path, dataset="others")
    finished = tmp_path / "finished.jsonl"
    finished.write_text(re.sub(r', "checksum": "\w+"', "", finished.read_text()).replace('"rate": 0.1', '"rate": 0.2'))
    with pytest.raises(UsageError, match="'neighbor' was sampled there with other options"):
        run(llm, tmp_path)


def test_a_comparison_that_continues_diagnoses_what_is_new(
    llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison before its training, again and again in one folder, its diagnoses made with made-up samples."""
    folder, made = ComparisonFolder(tmp_path), []

    def diagnose(words: list[str], *_: Any) -> None:
        args, sampling, strategies = command._read(words[1:])
        problems = load_task("arithmetic", limit=args.prompts)
        settings = {"sampling": sampling, "policies": [policy_of(each) for each in strategies]}
        settings |= {"out": args.out, "dataset": "task arithmetic", "llm": llm}
        diagnosis.diagnose(args.model, problems, strategies, **settings)
        made.append(words)

    def rows(*words: str) -> list[str]:
        asked = ("--eval.data", "none", "--diagnose.prompts", "2", "--diagnose.group", "2", *words)
        compare._before_training(plan(*asked), folder, "model")
        return [row["name"] for row in folder.read("diagnosis/diagnosis.json")["strategies"]]

    monkeypatch.setattr(runs, "command", diagnose)
    ead = ("--perturbations", "none,gumbel", "--strategy", "none sampling.schedule=ead")
    assert rows("--perturbations", "none") == ["none"] and len(made) == 1
    assert rows("--perturbations", "none", "--seeds", "0,1") == ["none"] and len(made) == 1
    assert rows("--perturbations", "none,gumbel") == ["none", "gumbel"]
    assert rows(*ead) == ["none", "gumbel", "none sampling.schedule=ead"] and len(made) == 3
    assert llm.asked == ["none", "gumbel", "none sampling.schedule=ead"]
    assert rows(*ead) and len(made) == 3
    assert rows("--perturbations", "gumbel") == ["gumbel"] and len(made) == 4


@pytest.mark.parametrize("finished", [1, 2], ids=["interrupted", "finished"])
def test_a_strategy_whose_last_line_was_cut_is_sampled_again(llm: MadeUp, tmp_path: Path, finished: int) -> None:
    whole, samples, told = run(llm, tmp_path), tmp_path / "samples.jsonl", []
    samples.write_text(samples.read_text()[:-10])
    lines = (tmp_path / "finished.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "finished.jsonl").write_text("".join(lines[:finished]))
    assert run(llm, tmp_path, report=told.append)["strategies"] == whole["strategies"]
    assert llm.asked == ["none", "neighbor", "neighbor"] and len(samples.read_text().splitlines()) == 8
    assert any("cut off half-way" in line for line in told)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ("--task", "arithmetic")
    (tmp_path / "empty.jsonl").write_text("")
    for words, said in (
        (task, "no model"),
        ((*task, "--gruop", "4"), "Did you mean '--group'"),
        ((*task, "--top-p", "0"), "in (0, 1]"),
        ((*task, "--tokens", "sum"), "--embedding-map"),
        (("--model", "smollm2-135m", "--data", str(tmp_path / "empty.jsonl")), "empty"),
    ):
        assert main(["diagnose", *words]) == 2
        assert said in capsys.readouterr().err


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
def test_a_strategy_that_is_given_twice_has_one_row(words: list[str], ids: list[str]) -> None:
    assert [strategy.id for strategy in command._read(words)[2]] == ids
