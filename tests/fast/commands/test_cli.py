# SPDX-License-Identifier: Apache-2.0
"""The command line: our flags and OpenRLHF's, and the message of each wrong word."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.commands import train
from ngrpo.config import parse
from ngrpo.config.kinds import FLAGS
from ngrpo.config.run import PRESETS, RunConfig
from ngrpo.machine.models import packaged
from ngrpo.methods import tasks
from perturbations import create, registry
from perturbations.errors import UsageError
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
    assert (command.hardware, command.task, command.run_dir, command.preset) == ("cpu", "arithmetic", "out", "gspo")
    assert command.specs["advantage"] == {"name": "w_reinforce", "lam": 0.2}
    assert command.sampling.given() == {"top_k": 5, "min_p": 0.1}
    near = "--actor.x 1 --train.partial_rollout_enable --local_rank 0 --use_ms --data.prompt_probs 1 --permute 2"
    assert parsed(near).openrlhf == tuple(near.split()), "no near misses of ours"
    assert parsed("") == parsed("--advantage none") == RunConfig()
    assert parsed("--model m --train.seed 1").openrlhf == ("--actor.model_name_or_path", "m", "--train.seed", "1")
    assert not any(parsed(f"--perturbation {name}").spec for name in ("none", "neighbor --perturbation.rate 0"))


def test_replay_buffer_is_a_setting_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "soft.yaml"
    file.write_text("name: soft\nreplay_buffer: memory\nreplay_buffer.max_bytes: 100\n")
    for words, size in (("", 100), (" --perturbation.replay_buffer.max_bytes 7", 7)):
        settings = parsed(f"--perturbation.config {file}{words}")
        assert settings.specs.get("replay_buffer") == {"name": "memory", "max_bytes": size}
        assert settings.spec == create("soft").spec()
    assert parsed("--perturbation soft").specs.get("replay_buffer") is None


@pytest.mark.parametrize(
    ("words", "value"), [("", True), (" true", True), ("=false", False), (" --train.seed 3", True)]
)
def test_switches(words: str, value: bool) -> None:
    command = parsed(f"--perturbation neighbor --perturbation.skip_special{words}")
    assert command.spec["skip_special"] is value
    assert command.openrlhf in ((), ("--train.seed", "3"))


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


BAD_LINES = [(None, line, parts) for line, *parts in refused("command_lines")]
BAD_FILES = [(text, "--perturbation.config p.yaml", parts) for text, *parts in refused("perturbation_files")]


@pytest.mark.parametrize(("text", "line", "parts"), BAD_LINES + BAD_FILES)
def test_bad_words(text: str | None, line: str, parts: list[str], file: Path) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError) as caught:
        parsed(line)
    for part in parts:
        assert part in str(caught.value)


def test_a_bug_shows_as_a_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a ValueError, of which ``UsageError`` is one."""

    def broken(words: list[str], report: object) -> int:
        raise ValueError("shapes (2, 3) and (4,) do not fit")

    monkeypatch.setattr(train, "run", broken)
    assert cli.main(["train"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "in broken" in error and "shapes (2, 3)" in error
    assert error.rstrip().splitlines()[-2].startswith("ngrpo: This is an error of the program")
    assert "ngrpo: error:" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *refused("commands"),
        (f"train --model m --run-dir {__file__} --task arithmetic", "is a file"),
        (f"compare --config {__file__}", "--config"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("ngrpo: error: ") and said in error
    assert "Traceback" not in error and error.count("\n") == 1


@pytest.mark.parametrize("name", sorted({each for kept in FLAGS for each in kept.in_tree()}))
def test_list_describes_each(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", name]) == 0
    text = capsys.readouterr().out
    for kept, flag in FLAGS.items():
        if name in kept.available():
            assert f"{name}  ({kept.kind}" in text and kept.get(name).__doc__.split("\n")[0] in text
            own = [f.name for f in fields(kept.get(name)) if kept is not registry.perturbations]
            assert all(f"{flag}.{option}" in text for option in own)


def test_help_lists_every_option_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("neighbor (N-GRPO", "--perturbation.metric", "one of cosine, l2, l1, dot [cosine]", "in [0, 1]"):
        assert part in text
    for names in (PRESETS, packaged.PACKAGED, tasks.usage()):
        assert f": {', '.join(names)} " in text


def test_neither_help_nor_list_loads_the_stack() -> None:
    code = (
        "import sys; from ngrpo import cli; cli.main(['list']); cli.main(['train', '--help']);"
        "sys.exit([m for m in ('vllm', 'openrlhf', 'ray', 'transformers') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
