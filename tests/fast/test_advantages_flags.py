# SPDX-License-Identifier: Apache-2.0
"""An advantage on the command line: presets, what is added and refused, and how its options are written."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ngrpo import patches
from ngrpo.config import complete_flags, parse, run
from ngrpo.config.run import current_run
from ngrpo.machine.hardware.cpu import PROFILE as CPU
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.advantages import create
from ngrpo.trainers.openrlhf import launch
from tests.fast.run import run_of


def applied(preset: str | None, *words: str, **parts: Any) -> list[str]:
    flags = Flags(words)
    return list(flags.with_defaults(complete_flags.of_preset(flags, run_of(preset=preset, **parts))).added)


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
        words = [word for name in run.PRESETS for word in applied(name)]
        words += applied(None, advantage={"name": "ngrpo"})
        for word in words:
            assert f'"{word}"' in source or word.lstrip("-").replace(".", "").isdecimal(), word

    def test_the_users_flags_win(self) -> None:
        added = applied("dapo", "--actor.eps_clip", "0.1", "--algo.kl.init_coef=0.01")
        assert not {"--actor.eps_clip_low_high", "--algo.kl.init_coef"} & set(added)
        assert added[added.index("--reward.overlong_buffer_len") + 1] == "409"  # a fifth of OpenRLHF's own 2,048

    def test_grpo_and_gspo_differ_in_ratio_and_clip_only(self) -> None:
        grpo, gspo = applied("grpo"), applied("gspo")
        assert gspo[gspo.index("--actor.policy_loss_type") + 1] == "gspo"
        swapped = ["gspo" if word == "ppo" else word for word in grpo]
        assert gspo == [*swapped, "--actor.eps_clip_low_high", "0.0003", "0.0004"]

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match=r"--preset dpao: must be one of grpo, gspo, dapo\. Did you mean 'dapo'"):
            parse.run_config(["--preset", "dpao"])


class TestAddedFlags:
    def added(self, line: str) -> list[str]:
        command = parse.run_config(line.split())
        flags = Flags(command.openrlhf)
        return list(flags.with_defaults(complete_flags.of_preset(flags, command)).added)

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

    def test_other_advantages_add_the_carrier_only(self) -> None:
        for line in ("--advantage ngrpo --preset gspo", "--advantage ngrpo --actor.policy_loss_type gspo"):
            assert "0.16" not in self.added(line), "GSPO keeps its own clip"
        assert self.added("--advantage psr") == ["--algo.advantage.estimator", "group_norm"]
        assert self.added("--train.seed 1") == []

    def test_notes(self) -> None:
        assert "drops them" in create("ngrpo").notes(Flags(["--algo.dynamic_filtering_range", "0", "1"]))[0]
        assert create("ngrpo").notes(Flags(["--algo.dynamic_filtering_range", "-1", "1"])) == []
        assert create("copo").notes(Flags(["--ckpt.load_enable"])) == []
        assert create("copo").notes(Flags([])) == []


def test_settings_reach_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    settings = run_of(advantage={"name": "ngrpo", "n": 2}, sampling={"top_k": 5})
    conditions = launch.conditions_for(CPU, settings)
    assert conditions == ("training", "cpu", "without_flash_attn", "advantage", "sampling")
    assert launch.conditions_for(CPU, run_of()) == ("training", "cpu", "without_flash_attn")
    monkeypatch.setattr(run, "_current", settings)  # put back after the test
    monkeypatch.setattr(patches, "install", lambda conditions: None)
    here, hook = Path.cwd(), cloudpickle.dumps(launch.setup_hook(conditions, settings))
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
