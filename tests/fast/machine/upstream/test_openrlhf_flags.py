# SPDX-License-Identifier: Apache-2.0
"""`Flags`: read as argparse reads them, completed without touching what was given, and parsed by OpenRLHF."""

import argparse

import pytest

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

LEAST = ["--actor.model_name_or_path", "m", "--reward.remote_url", "reward.py"]


@pytest.mark.parametrize(
    "words", [["--a", "1", "--a", "2"], ["--a=1"], ["--a=--b", "--b"], ["--a", "-1"], ["--b"], ["--a=x=y"], ["--a="]]
)
def test_values_are_those_of_argparse(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--a")
    parser.add_argument("--b", action="store_const", const="")
    given = parser.parse_args(words)
    assert Flags(words).value("--a") == given.a
    assert Flags(words).value("--b") == given.b


def test_defaults_are_added_only_where_absent_and_told() -> None:
    given = Flags(["--a=1", "--switch"])
    flags = given.with_defaults({"--a": "2", "--switch": None, "--b": "x y", "--other": None, "--c": ("0", "1")})
    assert flags.added == ("--b", "x y", "--other", "--c", "0", "1")
    assert flags.argv == [*flags.added, *given.given]
    assert given.added == ()
    assert flags.with_defaults({"--b": "z", "--d": "4"}).added == (*flags.added, "--d", "4"), "an addition stays"


def test_replaced_in_both_spellings_and_in_what_was_added() -> None:
    flags = Flags(["--x.name", "a", "--y.name=b, c", "--x", "a", "--z.name"]).with_defaults({"--w.name": "c"})
    replaced = flags.replaced("name", str.upper)
    assert replaced.argv == ["--w.name", "C", "--x.name", "A", "--y.name", "B,C", "--x", "a", "--z.name"]
    assert replaced.added == ["--w.name", "C"]


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
        ("--train.seed 1 2", "--train.seed 1 2: takes one value; quote one"),
        ("--train.seed 2 --ds.packing_samples 2", "--ds.packing_samples 2: takes no value; write the flag alone."),
        ("--actor.eps_clip_low_high 1 2 3", "--actor.eps_clip_low_high 1 2 3: takes 2 values."),
        ("--algo.advantage.estimator group_norm", "group_norm requires n_samples_per_prompt > 1"),
        ("--train.partial_rollout_enable", "--train.partial_rollout_enable requires --train.async_enable"),
        ("--algo.dynamic_filtering_enable", "n_samples_per_prompt must be greater than 1"),
        ("--ds.ring_attn_size 0", "ZeroDivisionError"),
    ],
)
def test_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        assert Flags([*LEAST, *words.split()]).args
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("value", ["-1e-05", "-1e1", "-2.5E+1", "-.5", "-5", "-5.", "-inf"])
def test_a_negative_number_is_a_value(value: str) -> None:
    """Python 3.11's argparse takes one with an exponent for a flag."""
    assert Flags([*LEAST, "--reward.clip_range", value, "1e1"]).args["reward.clip_range"] == [float(value), 10.0]


def test_a_word_before_the_first_flag_is_unknown() -> None:
    with pytest.raises(UsageError, match=r"unknown word 'perturbation'\. Did you mean '--perturbation'\?"):
        assert Flags(["perturbation", *LEAST]).args
