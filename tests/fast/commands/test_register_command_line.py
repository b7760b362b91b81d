# SPDX-License-Identifier: Apache-2.0
"""A user's perturbations and gates on the command line: flags, YAML, help, list and check."""

from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.config import parse
from ngrpo.workbench.report import summary
from perturbations import create
from tests.conftest import ROOT
from tests.support.own_files import GATE, clean, message, write
from tests.support.run import refused

__all__ = ["clean"]  # a fixture of every test here


@pytest.fixture(autouse=True)
def files(clean: None) -> None:
    write("mine.py")
    Path("gate.py").write_text(GATE)


def test_flags_of_a_perturbation_and_a_gate_in_files() -> None:
    words = "--perturbation ./mine.py:Mine --perturbation.strength 0.25 --perturbation.loud --actor.x 1"
    words += " --perturbation.gate ./gate.py:Above --perturbation.gate.least=9 --perturbation.gate.strict"
    command = parse.run_config(words.split())
    perturbation = create(**command.spec)
    assert (perturbation.strength, perturbation.loud) == (0.25, True)
    assert (perturbation.gate.least, perturbation.gate.strict) == (9, True)
    assert command.openrlhf == ("--actor.x", "1")
    said = summary._describe(command.spec)
    assert said == "mine.py:Mine rate=1.0 gate=gate.py:Above strength=0.25 loud=True gate.least=9 gate.strict=True"


@pytest.mark.parametrize("text", ["gate: ./gate.py:Above\ngate.least: 9\n", "gate: {name: ./gate.py, least: 9}\n"])
def test_yaml_of_a_perturbation_and_a_gate_in_files(text: str) -> None:
    Path("p.yaml").write_text(f"name: ./mine.py\nstrength: 0.25\n{text}")
    perturbation = create(**parse.run_config(["--perturbation.config", "p.yaml"]).spec)
    assert perturbation.strength == 0.25
    assert perturbation.gate.least == 9


@pytest.mark.parametrize(("words", "parts"), [(words, parts) for words, *parts in refused("gates")])
def test_bad_gates(words: str, parts: list[str]) -> None:
    said = message(lambda: parse.run_config(["--perturbation", "soft", *words.split()]))
    for part in parts:
        assert part in said, said


def test_help_describes_the_file_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--perturbation", "./mine.py:Mine", "--perturbation.gate", "./gate.py", "--help"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "./mine.py:Mine  (a test; mine.py:Mine)" in text
    assert "--perturbation.strength" in text
    assert "./gate.py  (gate; gate.py:Above)" in text
    assert "--perturbation.gate.least" in text
    assert cli.main(["train", "--perturbation", "mien.py", "--help"]) == 2
    assert "Did you mean 'mine.py'?" in capsys.readouterr().err


class TestCheck:
    def test_good(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words in (["./mine.py:Mine", "strength=0.5"], ["gate", "./gate.py"], ["neighbor", "k=4"]):
            assert cli.main(["check", *words]) == 0
            said = capsys.readouterr()
            assert said.out.count("ok ") >= 9
            assert "WRONG" not in said.out
            assert "keeps the contract" in said.err
            assert "ngrpo train" in said.err

    def test_bad(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = Path("mine.py").read_text().replace("one_hot(step.sampled),", "one_hot(step.sampled + 99),")
        Path("mine.py").write_text(text)
        assert cli.main(["check", "./mine.py:Mine"]) == 1
        out = capsys.readouterr().out
        assert "ok       a small model that it fits" in out
        assert "WRONG    proposals for ordinary logits" in out
        assert "what: mine.py:Mine, ordinary logits: edit.ids holds" in out
        assert "fix:  Token ids must be in" in out

    @pytest.mark.parametrize(("words", "code", "says"), refused("check"))
    def test_words(self, words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["check", *words]) == code
        said = capsys.readouterr()
        assert says in said.out + said.err


def test_the_classes_in_the_docs_work() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/own_perturbation.md")]
    blocks = [block.split("```", 1)[0] for page in pages for block in page.split("```python\n")[1:]]
    files = {block.split("\n", 1)[0].removeprefix("# "): block for block in blocks}
    for name in ("damp.py", "fading.py"):
        Path(name).write_text(files[name])
    exec(next(block for block in blocks if "check_perturbation(" in block))
    spec = create("damp.py").spec()
    assert round(len(spec["source"]) / 1024, 1) == 0.5
    assert "0.5 KB for `damp.py`" in pages[1]
