# SPDX-License-Identifier: Apache-2.0
"""The help of every command: its examples name the command, and flags that exist."""

import re
import shlex

import pytest

from ngrpo import cli

COMMANDS = cli.COMMANDS


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main([*command.split(), "--help"]) == 0
    return capsys.readouterr().out


def examples(text: str) -> list[list[str]]:
    """The words after ``ngrpo`` of each example, lines that go on put together."""
    section = re.search(r"^examples\n((?:  .*\n)+)", text, re.MULTILINE)
    assert section is not None, "no examples"
    commands = []
    for line in section[1].replace("\\\n", " ").splitlines():
        if "  ngrpo " not in f"  {line}":
            continue
        command, *_remark = line.split("  ngrpo ", 1)[-1].split("   ")
        commands.append(shlex.split(command))
    return commands


def test_the_first_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("", capsys)
    assert len(COMMANDS) >= 11
    assert sorted(re.findall(r"^  (\w+) ", text.split("examples")[0], re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_are_of_the_command_and_its_flags_are_in_its_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    found = examples(text)
    own = [words[1:] for words in found if words[0] == command]
    assert own, found
    named = {"--eval", "--diagnose", "--data", "--rollout", "--train", "--algo", "--actor", "--reward", "--vllm"}
    for words in own:
        for flag in (word for word in words if word.startswith("--")):
            root = flag.partition(".")[0]
            beyond = command in ("train", "compare") and (root in named or root in ("--model", "--task"))
            assert flag in text or f"{root}.<option>" in text or f"{root}.OPTION" in text or beyond, (command, flag)
