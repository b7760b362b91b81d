# SPDX-License-Identifier: Apache-2.0
"""The folder of `ngrpo diagnose`, beyond test_result_folder: going on, and what was interrupted; and bad input."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ngrpo.cli import main
from ngrpo.commands import diagnose
from ngrpo.workbench.compare.plan import read_plan
from ngrpo.workbench.diagnose.diagnosis import SAMPLES, DiagnosisFolder
from ngrpo.workbench.diagnose.group_sampling import Sample


def sample(strategy: str, member: int) -> Sample:
    return Sample(strategy, "p", 0, member, "text", [1, 2], True, 1.0, True, "4", True, 2.5, None)


@contextmanager
def opened(path: Path, told: list[str] | None = None) -> Iterator[DiagnosisFolder]:
    with DiagnosisFolder.opened(path, [].append if told is None else told.append) as folder:
        folder.claim({"model": "m"})
        yield folder


def test_a_finished_strategy_whose_last_line_was_cut_is_sampled_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.keep("none", [sample("none", 0)], {"perturbation": None})
        folder.keep("gumbel", [sample("gumbel", 0), sample("gumbel", 1)], {"perturbation": None})
    text = (tmp_path / SAMPLES).read_text()
    (tmp_path / SAMPLES).write_text(text[:-10])
    with opened(tmp_path) as folder:
        assert set(folder.finished) == {"none"}
        folder.keep("gumbel", [sample("gumbel", 2)], {"perturbation": None})
    with opened(tmp_path) as folder:
        assert folder.samples()["gumbel"] == [sample("gumbel", 2)]


def test_what_an_interrupted_strategy_left_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.keep("none", [sample("none", 0)], {"perturbation": None})
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(json.dumps(sample("gumbel", 0).to_json()) + '\n{"strategy": "gumb')  # killed within a line
    told: list[str] = []
    with opened(tmp_path, told) as folder:
        assert folder.finished == {"none": {"samples": 1, "perturbation": None}}
        folder.keep("gumbel", [sample("gumbel", 1)], {"perturbation": None})
        assert folder.samples() == {"none": [sample("none", 0)], "gumbel": [sample("gumbel", 1)]}
    assert len((tmp_path / SAMPLES).read_text().splitlines()) == 2
    assert len(told) == 1 and "cut off half-way" in told[0]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ("--task", "arithmetic")
    (tmp_path / "empty.jsonl").write_text("")
    for words, said in (
        (task, "no model"),
        (("--model", "smollm2-135m"), "one of the two"),
        ((*task, "--gruop", "4"), "Did you mean '--group'"),
        ((*task, "--group", "1"), "at least 2"),
        ((*task, "--prompts", "0"), "at least 1"),
        ((*task, "--top-p", "0"), "in (0, 1]"),
        ((*task, "--max-tokens", "many"), "invalid int value"),
        ((*task, "--tokens", "sum"), "--embedding-map"),
        ((*task, "--perturbations", "nieghbor"), "Did you mean 'neighbor'"),
        ((*task, "--scorer", "math"), "a task has its own"),
        (("--model", "smollm2-135m", "--data", str(tmp_path / "empty.jsonl")), "empty"),
    ):
        assert main(["diagnose", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--perturbations", "none,none,neighbor"], ["none", "neighbor"]),
        (["--perturbations", "none,neighbor", "--strategy", "none"], ["none", "neighbor"]),
        (["--strategy", "none", "--strategy", "none sampling.schedule=none"], ["none"]),
        (["--strategy", "neighbor k=3 rate=1", "--strategy", "neighbor rate=1 k=3"], ["neighbor k=3 rate=1"]),
        (
            ["--strategy", "none", "--strategy", "none sampling.schedule=ead", "--strategy", "neighbor rate=0"],
            ["none", "none sampling.schedule=ead", "neighbor rate=0"],
        ),
    ],
)
def test_a_strategy_that_is_given_twice_has_one_row(words: list[str], ids: list[str]) -> None:
    assert [strategy.id for strategy in diagnose._read(words)[2]] == ids


def test_a_comparison_s_diagnosis_has_one_row_of_the_baseline() -> None:
    words = "--diagnose.prompts 2 --diagnose.strategy none --model smollm2-135m --task arithmetic"
    plan = read_plan(["--perturbations", "none,neighbor", *words.split()])[0]
    assert plan.diagnosis is not None
    assert [strategy.id for strategy in diagnose._read(plan.diagnosis)[2]] == ["none", "neighbor"]
