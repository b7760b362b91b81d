"""The output folder of `ngrpo diagnose`: resuming, other settings, two runs at once, a full disk; and bad input."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ngrpo.cli import main
from ngrpo.diagnose import folder as folders
from ngrpo.diagnose.folder import SAMPLES, STATE, opened
from ngrpo.diagnose.sample import Sample

SETTINGS = {"model": "m", "sampling": {"group": 2}}


def sample(strategy: str, member: int) -> Sample:
    return Sample(strategy, "p", 0, member, "text", [1, 2], True, 1.0, True, "4", True, 2.5, None)


def test_finished_strategies_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "out", SETTINGS) as folder:
        folder.keep("none", [sample("none", 0), sample("none", 1)], {"perturbation": None})
    with opened(tmp_path / "out", SETTINGS) as folder:
        assert folder.finished == {"none": {"perturbation": None}}
        assert folder.samples("none") == [sample("none", 0), sample("none", 1)]


def test_what_an_interrupted_strategy_left_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, SETTINGS) as folder:
        folder.keep("none", [sample("none", 0)], {"perturbation": None})
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(json.dumps(sample("gumbel", 0).to_json()) + '\n{"strategy": "gumb')  # killed within a line
    with opened(tmp_path, SETTINGS) as folder:
        folder.keep("gumbel", [sample("gumbel", 1)], {"perturbation": None})
        assert folder.samples("gumbel") == [sample("gumbel", 1)]
    assert len((tmp_path / SAMPLES).read_text().splitlines()) == 2


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, SETTINGS):
        pass
    told = r"other settings \(sampling was {'group': 2}, now {'group': 4}\)"
    with pytest.raises(ValueError, match=told), opened(tmp_path, {**SETTINGS, "sampling": {"group": 4}}):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="holds something else"), opened(tmp_path, SETTINGS):
        pass
    (tmp_path / STATE).write_text("{}")
    with pytest.raises(ValueError, match="not one of ngrpo diagnose"), opened(tmp_path, SETTINGS):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match="another run is at work")
    with opened(tmp_path, SETTINGS), refused, opened(tmp_path, SETTINGS):
        pass


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path, SETTINGS) as folder:
        folder.keep("none", [sample("none", 0)], {"perturbation": None})
        monkeypatch.setattr(folders.os, "fsync", full)
        with pytest.raises(ValueError, match=r"No space left on device.*What was finished is kept"):
            folder.keep("gumbel", [sample("gumbel", 0)], {"perturbation": None})
        monkeypatch.undo()
    with opened(tmp_path, SETTINGS) as folder:
        assert folder.finished == {"none": {"perturbation": None}}
        assert folder.samples("none") == [sample("none", 0)] and folder.samples("gumbel") == []


def test_an_error_of_the_work_itself_is_not_blamed_on_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="weights"), opened(tmp_path, SETTINGS):
        raise FileNotFoundError("weights")


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> str:
        assert main(["diagnose", *words]) == 2
        return capsys.readouterr().err

    return run


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--help"]) == 0
    assert "--embedding-map" in capsys.readouterr().out


def test_bad_input(error: Any, tmp_path: Path) -> None:
    task = ("--task", "arithmetic")
    assert "no model" in error(*task)
    assert "one of the two" in error("--model", "smollm2-135m")
    assert "Did you mean '--group'" in error(*task, "--gruop", "4")
    assert "at least 2" in error(*task, "--group", "1")
    assert "at least 1" in error(*task, "--prompts", "0")
    assert "in (0, 1]" in error(*task, "--top-p", "0")
    assert "invalid int value" in error(*task, "--max-tokens", "many")
    assert "--embedding-map" in error(*task, "--tokens", "sum")
    assert "Did you mean 'neighbor'" in error(*task, "--perturbations", "nieghbor")
    assert "a task has its own" in error(*task, "--scorer", "math")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "empty" in error("--model", "smollm2-135m", "--data", str(empty))
