# SPDX-License-Identifier: Apache-2.0
"""Warnings about flags of the user's that OpenRLHF does not read."""

from fnmatch import filter as matching

import pytest

from ngrpo.config import idle_flags, parse
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream import versions
from ngrpo.machine.upstream.openrlhf_flags import Flags, actions

pytestmark = pytest.mark.skipif(versions.installed("openrlhf") is None, reason="needs OpenRLHF")

FILES = "--data.prompt_dataset p.jsonl --reward.remote_url r.py --vllm.num_engines 1 --rollout.n_samples_per_prompt 4"


def warnings_of(words: str, added: str = "--algo.advantage.estimator group_norm") -> list[str]:
    run = parse.run_config([*FILES.split(), *words.split()])
    flags = Flags(run.openrlhf, added.split()).without_false()
    return list(idle_flags.notes(CompleteRun(run=run, flags=flags)))


@pytest.mark.parametrize(
    ("idle", "needed"),
    [
        ("--algo.advantage.no_std_norm", "--algo.advantage.estimator reinforce"),
        ("--algo.advantage.gamma 0.9", "--algo.advantage.estimator gae"),
        ("--critic.adam.lr 1e-4", "--algo.advantage.estimator gae"),
        ("--critic.model_name_or_path m", "--algo.advantage.estimator gae"),
        ("--algo.advantage.is_correction_threshold 0.5 2", "--algo.advantage.is_correction_level token"),
        ("--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip", ""),
        ("--algo.kl.target 0.1 --algo.kl.init_coef 0", "--algo.kl.init_coef 0.01"),
        ("--data.prompt_split test", "--data.prompt_dataset OWNER/NAME"),
        ("--eval.dataset=e.jsonl", "--eval.steps 4"),
        ("--eval.dataset e.jsonl", "--eval.at_start"),
        ("--eval.temperature 1", "--eval.dataset e.jsonl --eval.steps 4"),
        ("--ckpt.save_hf", "--ckpt.save_steps 4"),
        ("--reward.overlong_penalty_factor 2", "--reward.overlong_buffer_len 8"),
        ("--ds.lora.alpha 32", "--ds.lora.rank 8"),
        ("--algo.kl.horizon 5", "--algo.kl.target 0.1"),
        ("--algo.kl.unbiased_gradient", "--algo.kl.use_loss"),
        ("--algo.dynamic_filtering_range 0.1 0.9", "--algo.dynamic_filtering_enable"),
        ("--train.ema_beta 0.9", "--train.enable_ema"),
        ("--ds.zpg 2", "--ds.zero_stage 3"),
        ("--actor.gradient_checkpointing_reentrant", "--actor.gradient_checkpointing_enable"),
    ],
)
def test_a_flag_is_idle_without_what_it_needs(idle: str, needed: str) -> None:
    if needed:
        (warning,) = warnings_of(idle)
        assert warning.startswith(f"{idle.replace('=', ' ').split()[0]} has no effect without ")
    assert warnings_of(f"{idle} {needed}") == []


def test_values_that_say_what_openrlhf_does_anyway_and_flags_that_ngrpo_adds_are_no_mistakes() -> None:
    assert warnings_of("--algo.advantage.gamma 1.0 --algo.advantage.lambd 1 --train.async_queue_size 1") == []
    added = "--algo.advantage.estimator group_norm --reward.overlong_penalty_factor 2 --eval.dataset e.jsonl"
    assert warnings_of("", added) == []
    assert warnings_of("--eval.dataset false --eval.temperature false") == []


@pytest.mark.parametrize("pattern", [pattern for need in idle_flags.NEEDS for pattern in need.flags.split()])
def test_openrlhf_has_the_flags(pattern: str) -> None:
    assert matching([name for action in actions() for name in action.option_strings], pattern)
