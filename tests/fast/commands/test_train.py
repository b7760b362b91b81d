# SPDX-License-Identifier: Apache-2.0
"""`ngrpo train --config FILE`: the flags of a run in a file, and those of the command line in their place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.commands import train
from ngrpo.config import parse, rules, run_notes
from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from tests.support.run import refused, run_of


def parsed(tmp_path: Path, text: str, line: str = "") -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return parse.run_config(parse.with_files(["--config", str(file), *line.split()]))


TEXT = """
preset: grpo
model: some/model
perturbation: neighbor
perturbation.rate: 0.2
perturbation.skip_special: true
actor.eps_clip_low_high: 0.2 0.28
actor.adam.lr: 1e-6
train.colocate_all: true
data.prompt_dataset: "'my prompts.jsonl'"
"""


def test_each_line_is_a_flag(tmp_path: Path) -> None:
    command = parsed(tmp_path, TEXT)
    words = "--preset grpo --model some/model --perturbation neighbor --perturbation.rate 0.2"
    words += " --perturbation.skip_special --actor.eps_clip_low_high 0.2 0.28 --actor.adam.lr 1e-6"
    words += " --train.colocate_all --data.prompt_dataset"
    assert command == parse.run_config([*words.split(), "my prompts.jsonl"])


def test_the_command_line_stands_in_place_of_the_file(tmp_path: Path) -> None:
    line = "--perturbation.rate 0.3 --actor.eps_clip_low_high 0.1 0.1 --actor.model_name_or_path other"
    command = parsed(tmp_path, TEXT, line)
    given = Flags(command.openrlhf)
    assert command.spec["rate"] == 0.3
    assert command.spec["skip_special"] is True
    assert [flag.values for flag in given if flag.name == "--actor.eps_clip_low_high"] == [("0.1", "0.1")]
    assert [flag.values for flag in given if flag.name == "--actor.model_name_or_path"] == [("other",)]
    command = parsed(tmp_path, TEXT.replace("model: some", "actor.model_name_or_path: some"), "--model third")
    assert Flags(command.openrlhf).value("--actor.model_name_or_path") == "third"


def test_a_later_file_stands_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("model: other\nperturbation.skip_special: false\ntrain.colocate_all: false\n")
    command = parsed(tmp_path, TEXT, f"--config {later}")
    given = Flags(command.openrlhf).without_false().with_defaults({"--train.colocate_all": None})
    assert given.value("--actor.model_name_or_path") == "other"
    assert not given.has("--train.colocate_all")
    assert command.spec["rate"] == 0.2
    assert command.spec["skip_special"] is False
    command = parse.run_config(parse.with_files(["--config", str(later), "--config", str(tmp_path / "run.yaml")]))
    assert Flags(command.openrlhf).has("--train.colocate_all")
    assert command.spec["skip_special"] is True


def test_a_value_after_false_counts_and_false_after_a_value_too() -> None:
    words = "--actor.adam.lr false --actor.adam.lr 3e-5 --algo.kl.use_loss --algo.kl.use_loss false"
    flags = Flags(words.split())
    flags = flags.without_false().with_defaults({"--algo.kl.use_loss": None, "--actor.adam.lr": "1e-6"})
    assert flags.argv == ["--actor.adam.lr", "3e-5"]


def test_another_perturbation_takes_the_options_of_the_first_with_it(tmp_path: Path) -> None:
    text = TEXT + "perturbation.k: 4\nperturbation.strict: true\nadvantage: w_reinforce\nadvantage.lam: 0.2\n"
    assert parsed(tmp_path, text, "--perturbation none").spec is None
    command = parsed(tmp_path, text, "--perturbation soft --perturbation.k 7 --advantage psr")
    assert command.spec["name"] == "soft"
    assert command.spec["k"] == 7
    assert command.spec["rate"] == 1.0
    assert command.strict
    assert command.specs.get("advantage") == {"name": "psr"}
    command = parsed(tmp_path, text, "--perturbation neighbor --perturbation.k 2")
    assert (command.spec["k"], command.spec["rate"]) == (2, 0.2), "the same one keeps them"
    assert parsed(
        tmp_path, "perturbation: soft\nperturbation.reproducible: true\n", "--perturbation latent"
    ).reproducible


@pytest.mark.parametrize(("text", "said"), refused("config_files"))
def test_bad_files(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--config") as error:
        parsed(tmp_path, text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("perturbation: neighbor\nperturbation.until: no\n", "", r'until takes a text .*quote the text, .*until: "no"'),
        ("perturbation: neighbor\nperturbation.until: Off\n", "", "until takes a text"),
        ("perturbation.until: no\n", "--perturbation neighbor", "until takes a text"),
        ("perturbation: neighbor\nperturbation.rate: on\n", "", "rate takes a text or a number"),
        ("perturbation: neighbor\nperturbation.gate: no\n", "", "gate takes a text"),
        ("perturbation: neighbor\nperturbation.until: ####\n", "", r'.until. has no value\. .*until: "####"'),
        ("perturbation: neighbor\nperturbation.until:\n", "", "'perturbation.until' has no value"),
        ("rollout.batch_size:\n", "", "'rollout.batch_size' has no value"),
        ("perturbation: neighbor\nperturbation.until: [no, stop]\n", "", "until takes a text"),
        ("perturbation: neighbor\nadvantage: no\n", "", "advantage takes a name"),
        ("rollout.stop: [stop, null]\n", "", "item 2 of the key 'rollout.stop' has no value"),
        ("log-file: no\n", "", r'log-file takes a text .*quote the text, log-file: "no"; log-file: none is off'),
        ("run-dir: 2026-02-30\n", "", r"is not YAML: .*day"),
    ],
)
def test_texts_that_yaml_reads_otherwise(tmp_path: Path, text: str, line: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"--config \S+run\.yaml: .*{said}"):
        parsed(tmp_path, text, line)


def test_a_flag_overrides_the_other_name_of_its_setting_in_a_file(tmp_path: Path) -> None:
    text = "perturbation: soft\nperturbation.reproducible: true\n"
    assert parsed(tmp_path, text).reproducible
    assert not parsed(tmp_path, text, "--reproducible false").reproducible


def test_a_backslash_in_a_file_stays(tmp_path: Path) -> None:
    """YAML leaves it in quotes of this kind, and no shell comes after it."""
    command = parsed(tmp_path, "data.input_template: 'Q:\\n{}'\n")
    assert Flags(command.openrlhf).value("--data.input_template") == "Q:\\n{}"


def test_quoted_texts_and_switches_are_taken(tmp_path: Path) -> None:
    text = 'perturbation: neighbor\nperturbation.until: "no"\nperturbation.skip_special: yes\nreproducible: off\n'
    command = parsed(tmp_path, text)
    assert command.spec["until"] == "no"
    assert command.spec["skip_special"]
    assert not command.reproducible
    unquoted = "perturbation: neighbor\nperturbation.until: no\n"
    assert parsed(tmp_path, unquoted, "--perturbation.until END").spec["until"] == "END"
    assert parsed(tmp_path, 'perturbation: neighbor\nperturbation.until: "####"\n').spec["until"] == "####"


def test_a_boolean_that_a_later_file_replaces_is_not_refused(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.yaml"
    earlier.write_text("perturbation: neighbor\nperturbation.until: no\n")
    later = tmp_path / "later.yaml"
    later.write_text("perturbation.until: END\n")
    run = parse.run_config(parse.with_files(["--config", str(earlier), "--config", str(later)]))
    assert run.spec["until"] == "END"
    with pytest.raises(UsageError, match=r"earlier\.yaml: perturbation\.until takes a text"):
        parse.with_files(["--config", str(later), "--config", str(earlier)])


def test_the_file_of_a_perturbation_refuses_them_too(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    for value in ("no", "####"):
        file.write_text(f"name: neighbor\nuntil: {value}\n")
        with pytest.raises(UsageError, match=r"options\.yaml"):
            parse.run_config(["--perturbation.config", str(file)])


def test_a_start_says_what_it_did_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dry run does; a dataset of the hub is read once the models have loaded."""
    complete: Any = SimpleNamespace(flags=None, with_models=lambda local_model: complete)
    monkeypatch.setattr(rules, "started", lambda run: complete)
    monkeypatch.setattr(rules, "check", lambda stage, complete: [f"not checked: {stage}"])
    monkeypatch.setattr(run_notes, "all_notes", lambda complete: [])
    monkeypatch.setattr(run_notes, "start_lines", lambda complete: [])
    reports: list[str] = []
    train._prepare(run_of(), reports.append)
    assert reports == ["not checked: data", "not checked: model"]
