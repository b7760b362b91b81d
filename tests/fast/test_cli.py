# SPDX-License-Identifier: Apache-2.0
"""The command line: what is ours, what is OpenRLHF's, and what a wrong word says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.commands import train
from ngrpo.config import parse, preflight, presets
from ngrpo.config.kinds import FLAGS
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench import tasks
from perturbations import create, registry
from perturbations.errors import UsageError


def parsed(line: str) -> RunConfig:
    return parse.run_config(line.split())


def test_our_flags_and_openrlhf_flags_are_sorted() -> None:
    command = parsed(
        "--perturbation neighbor --actor.adam.betas 0.9 0.95 --perturbation.rate=0.2 --future.flag --x=1"
        " --perturbation.k 4 --hardware cpu --task arithmetic --run-dir out"
    )
    assert command.spec == create("neighbor", rate=0.2, k=4).spec()
    assert command.openrlhf == ("--actor.adam.betas", "0.9", "0.95", "--future.flag", "--x=1")
    assert (command.hardware, command.task, command.run_dir) == ("cpu", "arithmetic", "out")


@pytest.mark.parametrize(
    "line", ["--train.seed 1", "--perturbation none", "--perturbation neighbor --perturbation.rate 0"]
)
def test_no_perturbation_is_no_spec(line: str) -> None:
    assert parsed(line).spec is None


def test_replay_buffer_is_a_setting_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "soft.yaml"
    file.write_text("name: soft\nreplay_buffer: memory\nreplay_buffer.max_bytes: 100\n")
    for words, size in (("", 100), (" --perturbation.replay_buffer.max_bytes 7", 7)):
        settings = parsed(f"--perturbation.config {file}{words}")
        assert settings.specs.get("replay_buffer") == {"name": "memory", "max_bytes": size}
        assert settings.spec == create("soft").spec()
    assert parsed("--perturbation soft").specs.get("replay_buffer") is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--perturbation.skip_special", True),
        ("--perturbation.skip_special true", True),
        ("--perturbation.skip_special=false", False),
        ("--perturbation.skip_special --train.seed 3", True),
    ],
)
def test_switches(words: str, value: bool) -> None:
    command = parsed(f"--perturbation neighbor {words}")
    assert command.spec["skip_special"] is value
    assert command.openrlhf in ((), ("--train.seed", "3"))


def test_model_is_the_actor() -> None:
    assert parsed("--model m --train.seed 1").openrlhf == (
        "--actor.model_name_or_path",
        "m",
        "--train.seed",
        "1",
    )
    with pytest.raises(ValueError, match="the same setting"):
        parsed("--model a --actor.model_name_or_path b")


def test_model_names_are_replaced_everywhere() -> None:
    args = ["--actor.model_name_or_path", "a", "--reward.model_name_or_path=b,c", "--x", "a"]
    replaced = parse.replace_model_names(Flags(args), str.upper)
    assert replaced.argv == ["--actor.model_name_or_path", "A", "--reward.model_name_or_path=B,C", "--x", "a"]


def test_rate_one_with_anchor_is_noted() -> None:
    notes = parsed("--perturbation neighbor --perturbation.rate 1").notes
    assert len(notes) == 1 and "greedy decoding" in notes[0]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--perturbation nieghbor", ["'nieghbor'", "Did you mean 'neighbor'?"]),
        ("--perturbation neighbor --perturbation.rte 0.1", ["'rte'", "Did you mean 'rate'?"]),
        ("--perturbation neighbor --perturbation.rate 1.5", ["1.5", "[0, 1]"]),
        ("--perturbation neighbor --perturbation.rate -0.1", ["-0.1", "[0, 1]"]),
        ("--perturbation neighbor --perturbation.k 1", ["k='1'", "at least 2"]),
        ("--perturbation neighbor --perturbation.k", ["--perturbation.k needs a value"]),
        ("--perturbation gaussian --perturbation.metric l2", ["'metric'", "neighbor"]),
        ("--perturbation.rate 0.1", ["no perturbation", "--perturbation NAME"]),
        ("--perturbation --train.seed 1", ["perturbation's name", "ngrpo list"]),
        ("--pertubation neighbor", ["'--pertubation'", "Did you mean '--perturbation'?"]),
        ("--perturbation_rate 0.1", ["Did you mean '--perturbation.rate'?"]),
        ("--perturbations.k 3", ["Did you mean '--perturbation.k'?"]),
        ("--perturbation no.such:Thing", ["no.such:Thing", "PYTHONPATH"]),
        ("--perturbation ./:", ["'./:'", "./file.py:Name"]),
        ("--model", ["--model needs a value"]),
        ("--perturbation gumbel --perturbation neighbor", ["--perturbation is given twice"]),
        ("--perturbation soft --perturbation.rate 0.1 --perturbation.rate=0.2", ["--perturbation.rate", "twice"]),
        ("--reproducible --perturbation.reproducible false", ["--reproducible is given twice"]),
        ("--perturbation gumbel neighbor", ["--perturbation takes one value", "'neighbor'"]),
        ("neighbor --model m", ["unexpected word 'neighbor'"]),
        ("--perturbation.replay_buffer memory", ["nothing is recorded", "--perturbation NAME"]),
        ("--perturbation soft --perturbation.replay_buffer memry", ["Did you mean 'memory'?"]),
        ("--perturbation soft --perturbation.replay_buffer", ["replay_buffer needs a replay buffer's name"]),
        ("--perturbation soft --perturbation.replay_buffer.max_bytes 1", ["no replay buffer", "replay_buffer NAME"]),
        (
            "--perturbation soft --perturbation.replay_buffer memory --perturbation.replay_buffer.max_bytes 0",
            ["max_bytes"],
        ),
    ],
)
def test_bad_words(line: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(line)
    for part in parts:
        assert part in str(caught.value)


def test_flags_of_openrlhf_are_not_near_misses() -> None:
    line = "--actor.x 1 --train.partial_rollout_enable --local_rank 0 --use_ms --data.prompt_probs 1 --permute 2"
    assert parsed(line).openrlhf == tuple(line.split())


class TestConfigFile:
    def parsed(self, folder: Path, text: str, line: str = "") -> RunConfig:
        file = folder / "p.yaml"
        file.write_text(text)
        return parsed(f"--perturbation.config {file} {line}")

    def test_same_options_and_flags_override(self, tmp_path: Path) -> None:
        command = self.parsed(tmp_path, "name: neighbor\nrate: 0.3\nk: 5\n", "--perturbation.rate 0.4")
        assert command.spec == create("neighbor", rate=0.4, k=5).spec()

    def test_perturbation_flag_overrides_name(self, tmp_path: Path) -> None:
        assert self.parsed(tmp_path, "name: neighbor\nrate: 0.3\n", "--perturbation soft").spec["name"] == "soft"

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("name: neighbor\nmetrc: l2\n", ["'metrc'", "Did you mean 'metric'?", "p.yaml"]),
            ("nmae: neighbor\n", ["nmae", "Did you mean 'name'?", "p.yaml"]),
            ("name: neighbor\nrate: high\n", ["'high'", "a number"]),
            ("- neighbor\n", ["must hold lines", "name: neighbor"]),
            ("3: neighbor\n", ["must hold lines"]),
            ("name: neighbor\nrate: 0.1\nrate: 0.2\n", ["'rate'", "given twice"]),
            ("name: [neighbor\n", ["is not YAML"]),
            ("", ["must hold lines"]),
        ],
    )
    def test_bad_files(self, tmp_path: Path, text: str, parts: list[str]) -> None:
        with pytest.raises(ValueError) as caught:
            self.parsed(tmp_path, text)
        for part in parts:
            assert part in str(caught.value)

    def test_missing_file(self) -> None:
        with pytest.raises(ValueError, match=r"missing\.yaml: cannot be read"):
            parsed("--perturbation.config missing.yaml")


class TestMain:
    def test_bad_input_is_one_line_and_code_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["train", "--perturbation", "nieghbor"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("ngrpo: error: ")
        assert "Traceback" not in error
        assert error.count("\n") == 1

    def test_a_bug_shows_as_a_bug(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where it is a ValueError, which bad input was once told by."""

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

    def test_a_module_of_the_users_that_fails_is_no_bug_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "divides.py").write_text("1 / 0\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert cli.main(["train", "--perturbation", "divides:Mine"]) == 2
        assert "cannot load 'divides:Mine' (division by zero)" in capsys.readouterr().err

    @pytest.mark.more
    def test_output_that_nobody_reads_to_the_end_is_no_bug(self) -> None:
        line = f"{sys.executable} -m ngrpo.cli train --help | head -1"
        done = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert done.stdout.startswith("usage: ngrpo train") and not done.stderr

    @pytest.mark.parametrize(
        "words",
        [
            ["train", "--model", "no/such/folder", "--task", "arithmetic"],
            ["train", "--perturbation.config", "missing.yaml"],
            ["train", "--model", "m", "--run-dir", __file__, "--task", "arithmetic"],
            ["compare", "--perturbations", "none", "--seeds", "x"],
            ["compare", "--config", __file__],
            ["check", "neighbor", "k"],
            ["check", "nieghbor"],
            ["model", "smollm"],
            ["list", "x"],
        ],
    )
    def test_bad_input_never_shows_a_traceback(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("ngrpo: error: ") and "Traceback" not in error

    def test_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["trian"]) == 2
        assert "Did you mean 'train'?" in capsys.readouterr().err

    def test_list_names_source_and_paper(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("neighbor"))
        assert line.split()[:3] == ["neighbor", "0.1", "in-tree"] and "2606.10768" in line

    @pytest.mark.more
    def test_a_narrow_terminal_has_the_same_list_within_its_columns(self) -> None:
        """In a process of its own: other tests register names and sources of any length."""
        calls = "print(json.dumps([listing(None), listing(80), listing(400)]))"
        program = f"import json; from ngrpo.machine.console.catalogue import listing; {calls}"
        done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
        wide, narrow, huge = json.loads(done.stdout)
        assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
        assert narrow.split() == wide.split() and huge == wide

    @pytest.mark.parametrize("name", sorted({each for kept in FLAGS for each in kept.in_tree()}))
    def test_list_describes_each(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list", name]) == 0
        text = capsys.readouterr().out
        for kept, flag in FLAGS.items():
            if name in kept.available():
                assert f"{name}  ({kept.kind}" in text and kept.get(name).__doc__.split("\n")[0] in text
                own = [f.name for f in fields(kept.get(name)) if kept is not registry.perturbations]
                assert all(f"{flag}.{option}" in text for option in own)

    def test_list_suggests_the_nearest_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["list", "nieghbor"]) == 2
        assert "Did you mean 'neighbor'?" in capsys.readouterr().err

    def test_help_lists_every_perturbation_and_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["train", "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for part in (
            "neighbor (N-GRPO",
            "--perturbation.metric",
            "one of cosine, l2, l1, dot [cosine]",
            "in [0, 1]",
        ):
            assert part in text
        assert "--openrlhf-help" in text
        assert "smollm2-135m" in text
        assert "arithmetic" in text

    def test_help_names_every_command_and_preset(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--help"]) == 0
        text = capsys.readouterr().out
        for command in ("train", "compare", "eval", "diagnose", "report", "list", "check", "model"):
            assert f"\n  {command} " in text
        assert cli.main(["train", "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for names in (presets.available(), packaged.PACKAGED, tasks.usage()):
            assert f": {', '.join(names)} " in text
        assert cli.main(["compare", "--help"]) == 0
        assert f"base algorithms: {', '.join(presets.available())}\n" in capsys.readouterr().out

    def test_neither_help_nor_list_loads_the_stack(self) -> None:
        code = (
            "import sys; from ngrpo import cli; cli.main(['list']); cli.main(['train', '--help']);"
            "sys.exit([m for m in ('vllm', 'openrlhf', 'ray', 'transformers') if m in sys.modules] or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestRun:
    """`ngrpo train` up to the launch, which is recorded instead of run."""

    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
        calls: list = []

        def launch(started: RunConfig) -> None:
            calls.append(started)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("ngrpo.trainers.openrlhf.launch.launch", launch)
        monkeypatch.setattr(preflight, "check_stack", lambda: None)
        monkeypatch.setattr(packaged, "resolve", lambda name, report: f"/resolved/{name}")
        return calls

    def test_task_fills_in_what_is_not_given(self, launched: list, capsys: pytest.CaptureFixture[str]) -> None:
        line = "--perturbation soft --hardware cpu --model smollm2-135m --task arithmetic --run-dir r"
        line += " --eval.dataset e/f"
        assert train.run(line.split(), report=print) == 0
        (started,) = launched
        args = started.openrlhf
        assert [*started.specs] == ["perturbation"] and not started.conditions[1:]
        assert started.spec["name"] == "soft" and started.hardware == "cpu"
        assert Flags(args).value("--actor.model_name_or_path") == "/resolved/smollm2-135m"
        assert Flags(args).value("--data.prompt_dataset") == "r/task/train.jsonl"
        assert Flags(args).value("--data.label_key") == "label"
        assert Flags(args).value("--ckpt.output_dir") == "r/model"
        assert Flags(args).value("--eval.dataset") == "e/f" and args.count("--eval.dataset") == 1
        assert "added to OpenRLHF's flags" in capsys.readouterr().out
        assert Path("r/summary.json").is_file()

    def test_advantage_preset_and_sampling(self, launched: list, capsys: pytest.CaptureFixture[str]) -> None:
        line = "--advantage ngrpo --preset gspo --sampling.min_p 0.1 --rollout.temperature 0.8"
        line += " --rollout.n_samples_per_prompt 4"
        line += " --actor.loss_agg_mode token-mean --hardware cpu --model smollm2-135m --task arithmetic --run-dir r"
        assert train.run(line.split(), report=print) == 0
        (started,) = launched
        args = started.openrlhf
        advantage = {"name": "ngrpo", "n": 1, "max_reward": 1.0}
        assert started.specs == {"advantage": advantage} and started.sampling.given() == {"min_p": 0.1}
        assert Flags(args).value("--actor.policy_loss_type") == "gspo"
        assert args.count("--actor.loss_agg_mode") == 1
        assert "--algo.dynamic_filtering_range -1000000 0.99999" in capsys.readouterr().out
        written = json.loads(Path("r/summary.json").read_text())
        assert written["advantage"] == advantage
        sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": None, "min_p": 0.1, "correct_mask": False}
        assert written["sampling"] == sampling

    def test_nothing_is_launched_or_written_on_bad_input(self, launched: list, tmp_path: Path) -> None:
        for line in (
            "--hardware cpu --task arithmetic",
            "--hardware cpu --task arithmetc --model smollm2-135m",
            "--hardware cpu --task arithmetic --model smollm2-135m --preset dpao --run-dir r",
            "--hardware cpu --task arithmetic --model smollm2-135m --advantage nsr --preset dapo --run-dir r",
        ):
            with pytest.raises(ValueError):
                train.run(line.split(), report=print)
        assert launched == [] and list(tmp_path.iterdir()) == []

    def test_failed_training_is_code_1(self, launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
        from ngrpo.trainers.openrlhf import launch as module

        def fail(*_: object, **__: object) -> None:
            raise module.TrainingFailed("out of memory")

        monkeypatch.setattr(module, "launch", fail)
        line = "--hardware cpu --model smollm2-135m --task arithmetic --run-dir r"
        lines: list[str] = []
        assert train.run(line.split(), report=lines.append) == 1
        assert "training failed: out of memory" in lines
