# SPDX-License-Identifier: Apache-2.0
"""`ngrpo new`: what it writes keeps the contract and passes its own test, and nothing is ever overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config.kinds import KINDS
from tests.conftest import ROOT
from tests.support.own_files import clean
from tests.support.run import refused

__all__ = ["clean"]  # each test in a folder of its own, and what it registers is gone after it


@pytest.mark.more
def test_what_it_writes_passes_its_own_tests_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        assert cli.main(["new", kind, f"their_{kind}", "made"]) == 0
        said = capsys.readouterr().err
        assert f"made/their_{kind}.py and made/test_their_{kind}.py" in said
        assert "ngrpo check" in said
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "made"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line for line in done.stdout.splitlines() if "passed" in line]
    assert ran and int(ran[0].split()[0]) >= 2 * (len(KINDS) - 1), done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_keeps_the_contract(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", kind, "their_own"]) == 0
    assert cli.main(["check", *([] if kind == "perturbation" else [kind]), "./their_own.py"]) == 0
    assert "keeps the contract" in capsys.readouterr().err
    flag = KINDS[kind].flag
    perturbation = ["--perturbation", "soft"] if flag.startswith("--perturbation.") else []
    assert cli.main(["train", *perturbation, flag, "./their_own.py", "--help"]) == 0
    assert "their_own.py" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), refused("new"))
def test_bad_words_are_refused_and_nothing_is_written(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(existing: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(existing).write_text("mine")
    assert cli.main(["new", "gate", "mine"]) == 2
    assert f"{existing} exists" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in Path().iterdir()] == [(existing, "mine")]
