# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's own parser and assertions, asked before anything starts."""

import pytest

from ngrpo.machine.upstream import openrlhf_parser
from perturbations.errors import UsageError

LEAST = ["--actor.model_name_or_path", "m", "--reward.remote_url", "reward.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout.temperature abc", "--rollout.temperature 'abc': must be a number"),
        ("--train.batch_size 1.5", "--train.batch_size '1.5': must be a whole number"),
        ("--rollout.temprature 1", "unknown flag '--rollout.temprature'. Did you mean '--rollout.temperature'?"),
        ("--pertubation neighbor", "Did you mean '--perturbation'?"),
        ("--rollout.temp 1", "unknown flag '--rollout.temp'"),
        ("--algo.kl.estimator k9", "invalid choice: 'k9'"),
        ("--actor.eps_clip_low_high 1", "--actor.eps_clip_low_high: expected 2 arguments"),
        ("--train.seed 1 2", "unknown word '2'"),
        ("--algo.advantage.estimator group_norm", "group_norm requires n_samples_per_prompt > 1"),
        ("--train.partial_rollout_enable", "--train.partial_rollout_enable requires --train.async_enable"),
        ("--algo.dynamic_filtering_enable", "n_samples_per_prompt must be greater than 1"),
        ("--ds.ring_attn_size 0", "ZeroDivisionError"),
    ],
)
def test_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        openrlhf_parser.check([*LEAST, *words.split()])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = ["--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4"]
    openrlhf_parser.check([*LEAST, *grouped, "--algo.kl.use_loss", "--actor.adam.betas", "0.9", "0.95"])
    assert capsys.readouterr().out == "", "what OpenRLHF prints, it prints when the training starts"


def test_help_is_openrlhfs(capsys: pytest.CaptureFixture[str]) -> None:
    openrlhf_parser.print_help()
    text = capsys.readouterr().out
    assert "--rollout.temperature" in text and "--ds.zero_stage" in text


def test_defaults_are_openrlhfs() -> None:
    found = openrlhf_parser.defaults()
    assert (found["--rollout.batch_size"], found["--train.seed"], found["--actor.adam.lr"]) == ("1024", "42", "1e-06")
    assert "--actor.model_name_or_path" not in found
