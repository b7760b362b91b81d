# SPDX-License-Identifier: Apache-2.0
"""An advantage on the command line: presets, and the flags that are added."""

import pytest
import torch

from ngrpo.config import complete_run, parse, run
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.advantages import compute, create
from perturbations.errors import UsageError


def added(line: str) -> str:
    """The flags that a command line gets, each with a blank after it."""
    command = parse.run_config(line.split())
    complete = CompleteRun(run=command, flags=Flags(command.openrlhf))
    return "".join(f"{word} " for word in complete.with_layers(complete_run.PRESET).flags.added)


class TestPresets:
    def test_dapo_is_openrlhf_flags(self) -> None:
        flags = added("--preset dapo --rollout.max_new_tokens 20480")
        assert "--actor.eps_clip_low_high 0.2 0.28 " in flags
        assert "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 " in flags
        assert "--actor.loss_agg_mode token-mean " in flags
        assert "--reward.overlong_buffer_len 4096 " in flags
        assert "--algo.kl.init_coef 0 " in flags

    @pytest.mark.parametrize("line", [*(f"--preset {name}" for name in run.PRESETS), "--advantage ngrpo"])
    def test_openrlhf_takes_every_flag_and_choice(self, line: str) -> None:
        pytest.importorskip("openrlhf")
        least = "--actor.model_name_or_path m --reward.remote_url r.py --rollout.n_samples_per_prompt 4"
        assert Flags([*least.split(), *added(line).split()]).args

    def test_the_users_flags_win(self) -> None:
        flags = added("--preset dapo --actor.eps_clip 0.1 --algo.kl.init_coef=0.01")
        assert "--actor.eps_clip_low_high" not in flags
        assert "--algo.kl.init_coef" not in flags
        assert "--reward.overlong_buffer_len 409 " in flags, "a fifth of OpenRLHF's own 2,048"

    def test_grpo_and_gspo_differ_in_ratio_and_clip_only(self) -> None:
        of_gspo = added("--preset grpo").replace("policy_loss_type ppo", "policy_loss_type gspo")
        assert added("--preset gspo") == f"{of_gspo}--actor.eps_clip_low_high 0.0003 0.0004 "


class TestAddedFlags:
    def test_ngrpo_clips_asymmetrically_and_filters_the_all_correct(self) -> None:
        flags = added("--advantage ngrpo --advantage.max_reward 2.5")
        assert "--actor.eps_clip_low_high 0.16 0.24 " in flags
        assert "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range -1000000 2.499975 " in flags
        assert "--algo.advantage.estimator group_norm " in flags

    def test_the_users_clip_and_filter_win(self) -> None:
        flags = added("--advantage ngrpo --actor.eps_clip 0.2 --algo.dynamic_filtering_range 0 1")
        assert flags == "--algo.advantage.estimator group_norm --algo.dynamic_filtering_enable "

    def test_the_advantage_stands_before_the_preset(self) -> None:
        flags = added("--advantage ngrpo --preset dapo")
        assert flags.count("--algo.dynamic_filtering_range") == 1
        assert "_range -1000000 0.99999 " in flags
        assert "0.16 0.24 " in flags
        assert "0.28" not in flags
        assert "--reward.overlong_buffer_len" in flags

    def test_other_advantages_add_the_carrier_only(self) -> None:
        for line in ("--advantage ngrpo --preset gspo", "--advantage ngrpo --actor.policy_loss_type gspo"):
            assert "0.16" not in added(line), "GSPO keeps its own clip"
        assert added("--advantage psr") == "--algo.advantage.estimator group_norm "
        assert added("--train.seed 1") == ""


class TestMaximumRewardInFloat32:
    @pytest.mark.parametrize("highest", [0.7, 1.0, 0.1, 3.3, 1000.3, 0.0, -0.3])
    @pytest.mark.parametrize("size", [1, 3, 8, 64])
    def test_ngrpo_drops_prompts_that_are_all_correct(self, highest: float, size: int) -> None:
        """As OpenRLHF filters: a prompt is kept where min < mean < max, of float32 scores in Python's numbers."""
        advantage = create("ngrpo", max_reward=highest)
        low, high = (float(word) for word in advantage.flags(Flags())["--algo.dynamic_filtering_range"])
        scores = [score.item() for score in torch.full((size,), highest)]
        step = max(abs(highest), 1.0) / 1000
        assert not low < sum(scores) / size < high
        assert low < (sum(scores[1:]) + highest - size * step) / size < high, "a wrong answer keeps it"

    def test_the_filter_s_range_is_no_flag_to_argparse(self) -> None:
        """With an exponent a negative number would be one."""
        flags = create("ngrpo", max_reward=0.0).flags(Flags())
        assert flags["--algo.dynamic_filtering_range"] == ("-1000000", "-0.00001")

    def test_ngrpo_takes_sums_of_float32_for_the_maximum(self) -> None:
        """Seven times 0.1 is 0.70000005 in float32, and 0.7 is 0.69999999: exactly nothing, as an all-correct group."""
        seven = sum((torch.tensor(0.1) for _ in range(7)), torch.tensor(0.0))
        rewards = torch.stack([seven, torch.tensor(0.7), torch.tensor(0.7) - 1e-6]).view(1, 3)
        assert not compute("ngrpo", rewards, max_reward=0.7).any()
        assert not compute("ngrpo", torch.full((1, 4), 1000.3), max_reward=1000.3).any()  # 4e-5 above it in float32
        with pytest.raises(UsageError, match="is above the maximum reward"):
            compute("ngrpo", rewards + 1e-4, max_reward=0.7)
