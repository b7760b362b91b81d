# SPDX-License-Identifier: Apache-2.0
"""An advantage on the command line: presets, what is added and refused, and how its options are written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ngrpo import patches
from ngrpo.config import parse, presets, rules, run, sampling
from ngrpo.config.run import current_run
from ngrpo.machine.hardware.cpu import PROFILE as CPU
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.advantages import create
from ngrpo.trainers.openrlhf import launch, worker
from perturbations.errors import UsageError
from tests.fast.run import run_of


def applied(preset: str, *words: str) -> list[str]:
    return list(presets.applied(Flags(words), preset).added)


class TestPresets:
    def test_dapo_is_openrlhf_flags(self) -> None:
        added = applied("dapo", "--rollout.max_new_tokens", "20480")
        for flag, words in {
            "--actor.eps_clip_low_high": ["0.2", "0.28"],
            "--algo.dynamic_filtering_range": ["0", "1"],
            "--actor.loss_agg_mode": ["token-mean"],
            "--reward.overlong_buffer_len": ["4096"],
            "--algo.kl.init_coef": ["0"],
        }.items():
            place = added.index(flag)
            assert added[place + 1 : place + 1 + len(words)] == words
        assert "--algo.dynamic_filtering_enable" in added

    @pytest.mark.skipif(find_spec("openrlhf") is None, reason="needs openrlhf installed")
    def test_openrlhf_has_every_flag_and_choice(self) -> None:
        source = Path(find_spec("openrlhf").origin).with_name("cli").joinpath("train_ppo_ray.py").read_text()
        words = [word for name in presets.available() for word in applied(name)]
        words += presets.applied(Flags(), None, create("ngrpo")).added
        for word in words:
            assert f'"{word}"' in source or word.lstrip("-").replace(".", "").isdecimal(), word

    def test_grpo_and_gspo_differ_in_ratio_and_clip_only(self) -> None:
        grpo, gspo = applied("grpo"), applied("gspo")
        assert gspo[gspo.index("--actor.policy_loss_type") + 1] == "gspo"
        swapped = ["gspo" if word == "ppo" else word for word in grpo]
        assert gspo == [*swapped, "--actor.eps_clip_low_high", "0.0003", "0.0004"]

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match=r"'dpao'.*Did you mean 'dapo'.*grpo, gspo, dapo"):
            applied("dpao")
        with pytest.raises(ValueError, match="'long'"):
            applied("dapo", "--rollout.max_new_tokens", "long")


class TestAddedFlags:
    def added(self, line: str) -> list[str]:
        command = parse.run_config(line.split())
        return list(presets.applied(Flags(command.openrlhf), command.preset, command.advantage).added)

    def test_ngrpo_clips_asymmetrically_and_filters_the_all_correct(self) -> None:
        added = " ".join(self.added("--advantage ngrpo --advantage.max_reward 2.5"))
        assert "--actor.eps_clip_low_high 0.16 0.24" in added
        assert "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range -1000000 2.499975" in added
        assert "--algo.advantage.estimator group_norm" in added

    def test_the_users_clip_and_filter_win(self) -> None:
        line = "--advantage ngrpo --actor.eps_clip 0.2 --algo.dynamic_filtering_range 0 1"
        assert self.added(line) == ["--algo.advantage.estimator", "group_norm", "--algo.dynamic_filtering_enable"]

    def test_the_advantage_stands_before_the_preset(self) -> None:
        added = " ".join(self.added("--advantage ngrpo --preset dapo"))
        assert added.count("--algo.dynamic_filtering_range") == 1 and "_range -1000000 0.99999" in added
        assert "0.16 0.24" in added
        assert "0.28" not in added
        assert "--reward.overlong_buffer_len" in added

    def test_gspo_keeps_its_own_clip(self) -> None:
        for line in ("--advantage ngrpo --preset gspo", "--advantage ngrpo --actor.policy_loss_type gspo"):
            assert "0.16" not in self.added(line)

    @pytest.mark.parametrize(
        ("line", "parts"),
        [
            ("--advantage psr --algo.advantage.estimator rloo", ["--advantage psr", "estimator rloo", "one"]),
            ("--advantage nsr --preset dapo", ["--reward.overlong_buffer_len", "nsr", "[0, 1]"]),
            ("--advantage nsr --reward.stop_properly_penalty_coef -1", ["stop_properly"]),
        ],
    )
    def test_what_does_not_go_together(self, line: str, parts: list[str]) -> None:
        asked = parse.run_config(["--model", "m", *line.split()])
        with pytest.raises(UsageError) as caught:
            rules.completed(asked)
        for part in parts:
            assert part in str(caught.value)


class TestWords:
    def test_they_are_picked_out(self) -> None:
        line = "--advantage w_reinforce --x 1 --advantage.lam=0.2 --preset gspo --sampling.top_k 5"
        command = parse.run_config([*line.split(), "--sampling.min_p", "0.1", "--perturbation", "neighbor"])
        assert command.specs.get("advantage") == {"name": "w_reinforce", "lam": 0.2}
        assert command.preset == "gspo" and command.spec["name"] == "neighbor"
        assert command.sampling.given() == {"top_k": 5, "min_p": 0.1} and command.openrlhf == ("--x", "1")

    @pytest.mark.parametrize(
        ("line", "parts"),
        [
            ("--advantage", ["an advantage's name"]),
            ("--advantage.n 2", ["--advantage.n", "--advantage NAME"]),
            ("--advantage ngrpo --advantage.n", ["--advantage.n needs a value"]),
            ("--advantge ngrpo", ["'--advantge'", "Did you mean '--advantage'?"]),
            ("--preset.dapo", ["Did you mean '--preset'?"]),
            ("--sampling", ["--sampling.top_k K"]),
            ("--sampling.temperature 0.7", ["give --rollout.temperature"]),
            ("--sampling.top_k 0", ["top_k='0'", "at least 1"]),
            ("--sampling.min_p 1.5", ["min_p='1.5'", "[0, 1]"]),
        ],
    )
    def test_bad_words(self, line: str, parts: list[str]) -> None:
        with pytest.raises(ValueError) as caught:
            parse.run_config(line.split())
        for part in parts:
            assert part in str(caught.value)

    def test_sampling_for_the_results(self) -> None:
        args = ["--rollout.temperature", "0.7", "--eval.temperature", "0.6"]
        assert sampling.described(sampling.create(min_p="0.1"), Flags(args)) == {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": None,
            "min_p": 0.1,
            "correct_mask": False,
        }


def test_settings_reach_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    settings = run_of(advantage={"name": "ngrpo", "n": 2}, sampling={"top_k": 5})
    conditions = launch.conditions_for(CPU, settings)
    assert conditions == ("cpu", "without_flash_attn", "advantage", "sampling")
    assert launch.conditions_for(CPU, run_of()) == ("cpu", "without_flash_attn")
    monkeypatch.setattr(run, "_current", settings)  # put back after the test
    monkeypatch.setattr(patches, "install", lambda conditions: None)
    here, hook = Path.cwd(), cloudpickle.dumps(worker.setup_hook(conditions, settings))
    monkeypatch.chdir(tmp_path)  # as a worker of a cluster that was started elsewhere
    cloudpickle.loads(hook)()  # as Ray carries it
    assert Path.cwd() == here
    read = current_run()
    assert read == settings
    assert read is not settings
    assert read.advantage.n == 2
    assert read.perturbation is None
    assert current_run() is read and current_run().advantage is read.advantage, "nothing is made twice"
    targets = {row.attribute for row in patches.active(conditions)}
    assert {"RemoteExperienceMaker", "compute_reward", "SamplesGenerator"} <= targets
