# SPDX-License-Identifier: Apache-2.0
"""The command line: our flags and OpenRLHF's, and the message of each wrong word."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.commands import method_texts, train
from ngrpo.config import parse
from ngrpo.config.kinds import FLAGS
from ngrpo.config.run import PRESETS, RunConfig
from ngrpo.machine.models import packaged
from ngrpo.methods import credits, tasks
from perturbations import create, registry
from perturbations.errors import UsageError
from tests.support.own_files import install
from tests.support.run import refused


def parsed(line: str) -> RunConfig:
    return parse.run_config(line.split())


def test_our_flags_and_openrlhf_flags_are_sorted() -> None:
    command = parsed(
        "--perturbation neighbor --actor.adam.betas 0.9 0.95 --perturbation.rate=0.2 --future.flag --x=1"
        " --perturbation.k 4 --hardware cpu --task arithmetic --run-dir out --advantage w_reinforce"
        " --advantage.lam=0.2 --preset gspo --sampling.top_k 5 --sampling.min_p 0.1"
    )
    assert command.spec == create("neighbor", rate=0.2, k=4).spec()
    assert command.openrlhf == ("--actor.adam.betas", "0.9", "0.95", "--future.flag", "--x=1")
    assert command.hardware == "cpu"
    assert command.task == "arithmetic"
    assert command.run_dir == "out"
    assert command.preset == "gspo"
    assert command.specs["advantage"] == {"name": "w_reinforce", "lam": 0.2}
    assert command.sampling.given() == {"top_k": 5, "min_p": 0.1}


def test_openrlhfs_flags_are_no_near_misses_of_ours() -> None:
    near = "--actor.x 1 --train.partial_rollout_enable --local_rank 0 --use_ms --data.prompt_probs 1 --permute 2"
    assert parsed(near).openrlhf == tuple(near.split())


def test_model_is_short_for_openrlhfs_flag() -> None:
    assert parsed("--model m --train.seed 1").openrlhf == ("--actor.model_name_or_path", "m", "--train.seed", "1")


@pytest.mark.parametrize("line", ["", "--advantage none"])
def test_none_is_as_no_flag(line: str) -> None:
    assert parsed(line) == RunConfig()


@pytest.mark.parametrize("line", ["--perturbation none", "--perturbation neighbor --perturbation.rate 0"])
def test_runs_without_a_perturbation(line: str) -> None:
    assert not parsed(line).spec


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("", 100),
        (" --perturbation.replay_buffer.max_bytes 7", 7),
    ],
)
def test_replay_buffer_is_a_setting_of_the_run(words: str, size: int, tmp_path: Path) -> None:
    file = tmp_path / "soft.yaml"
    file.write_text("name: soft\nreplay_buffer: memory\nreplay_buffer.max_bytes: 100\n")
    command = parsed(f"--perturbation.config {file}{words}")
    assert command.specs.get("replay_buffer") == {"name": "memory", "max_bytes": size}
    assert command.spec == create("soft").spec()


def test_a_run_has_no_replay_buffer_unless_it_names_one() -> None:
    assert parsed("--perturbation soft").specs.get("replay_buffer") is None


@pytest.mark.parametrize(
    ("words", "value", "others"),
    [
        ("", True, ()),
        (" true", True, ()),
        ("=false", False, ()),
        (" --train.seed 3", True, ("--train.seed", "3")),
    ],
)
def test_switches(words: str, value: bool, others: tuple[str, ...]) -> None:
    command = parsed(f"--perturbation neighbor --perturbation.skip_special{words}")
    assert command.spec["skip_special"] is value
    assert command.openrlhf == others


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("p.yaml")


def test_a_file_has_the_same_options_and_flags_override_it(file: Path) -> None:
    file.write_text("name: neighbor\nrate: 0.3\nk: 5\n")
    line = f"--perturbation.config {file}"
    assert parsed(f"{line} --perturbation.rate 0.4").spec == create("neighbor", rate=0.4, k=5).spec()
    file.write_text("name: neighbor\nrate: 0.3\n")
    assert parsed(f"{line} --perturbation soft").spec["name"] == "soft"


BAD_LINES = [(None, line, messages) for line, *messages in refused("command_lines")]
BAD_FILES = [(text, "--perturbation.config p.yaml", messages) for text, *messages in refused("perturbation_files")]


@pytest.mark.parametrize(("text", "line", "messages"), BAD_LINES + BAD_FILES)
def test_bad_words(text: str | None, line: str, messages: list[str], file: Path) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError) as error:
        parsed(line)
    for message in messages:
        assert message in str(error.value)


def test_a_bug_shows_as_a_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a ValueError, of which ``UsageError`` is one."""

    def broken(words: list[str], report: object) -> int:
        raise ValueError("shapes (2, 3) and (4,) do not fit")

    monkeypatch.setattr(train, "run", broken)
    assert cli.main(["train"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "in broken" in error
    assert "shapes (2, 3)" in error
    assert error.rstrip().splitlines()[-2].startswith("ngrpo: This is an error of the program")
    assert "ngrpo: error:" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *refused("commands"),
        (f"train --model m --run-dir {__file__} --task arithmetic", "is a file"),
        (f"compare --config {__file__}", "--config"),
        ("report ~nosuchuser/run", "a path's ~ names no user of this machine"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("ngrpo: error: ")
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


def every_name() -> list[str]:
    """The names in all registries."""
    names: set[str] = set()
    for registered in FLAGS:
        names.update(registered.in_tree())
    return sorted(names)


def test_a_package_with_a_name_of_the_tree_is_told_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, credits.registry, "top_entropy = their_installed:Mine\n")
    assert cli.main(["list"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "their_dist" in line]
    assert row.startswith("top_entropy ")
    assert row.endswith(" hidden by the in-tree method; use their_installed:Mine")
    note = "credit 'top_entropy' is the in-tree method, which hides their_installed:Mine of an installed package."
    assert cli.main(["check", "credit", "top_entropy"]) == 0
    assert f"warning: {note}" in capsys.readouterr().err
    (run_note,) = parsed("--model m --credit top_entropy").notes
    assert run_note.startswith(note)


@pytest.mark.parametrize("name", every_name())
def test_list_describes_each_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", name]) == 0
    text = capsys.readouterr().out
    for registered, flag in FLAGS.items():
        if name not in registered.available():
            continue
        kind = registered.get(name)
        assert f"{name}  ({registered.kind}" in text
        assert kind.__doc__.split("\n")[0] in text
        if registered is not registry.perturbations:
            for option in fields(kind):
                assert f"{flag}.{option.name}" in text


def help_of_train(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The help of ``ngrpo train`` with single blanks; ``words`` follow ``--help``."""
    assert cli.main(["train", "--help", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    """The help of ``ngrpo train`` without a further word."""
    return help_of_train(capsys)


OPTIONS_OF_NEIGHBOR = ("neighbor (N-GRPO", "--perturbation.metric", "one of cosine, l2, l1, dot [cosine]")
OPTIONS_OF_EVERY_PERTURBATION = "options of every perturbation"


def test_help_is_short_and_names_every_method(help_text: str) -> None:
    assert OPTIONS_OF_EVERY_PERTURBATION in help_text
    assert all(name in help_text for name in every_name())
    assert not any(entry in help_text for entry in OPTIONS_OF_NEIGHBOR)


def test_help_of_methods_has_their_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of_train(capsys, "neighbor", "psn")
    assert all(entry in text for entry in OPTIONS_OF_NEIGHBOR)
    assert "--policy_noise.sigma" in text
    assert OPTIONS_OF_EVERY_PERTURBATION not in text
    assert "gumbel" not in text


def test_help_of_all_has_our_flags_and_the_options_of_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of_train(capsys, "all")
    assert OPTIONS_OF_EVERY_PERTURBATION in text
    assert all(entry in text for entry in OPTIONS_OF_NEIGHBOR)
    for registered, flag in FLAGS.items():
        for name in registered.in_tree():
            for field in method_texts.own_options(registered, registered.get(name)):
                assert f"{flag}.{field.name}" in text, name


def test_help_of_a_method_that_a_flag_names_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--perturbation", "neighbor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(entry in text for entry in OPTIONS_OF_NEIGHBOR)
    assert "--policy_noise.sigma" not in text


def test_help_of_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "neighbour"]) == 2
    assert "--help neighbour: no method has this name. Did you mean 'neighbor'?" in capsys.readouterr().err


@pytest.mark.parametrize("names", [PRESETS, packaged.PACKAGED, tasks.usage()], ids=["presets", "models", "tasks"])
def test_help_lists_every_name(names: Iterable[str], help_text: str) -> None:
    assert f": {', '.join(names)} " in help_text


def test_neither_help_nor_list_loads_the_stack() -> None:
    code = (
        "import sys; from ngrpo import cli; cli.main(['list']); cli.main(['train', '--help']);"
        "sys.exit([m for m in ('vllm', 'openrlhf', 'ray', 'transformers') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
