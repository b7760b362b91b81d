# SPDX-License-Identifier: Apache-2.0
"""`ngrpo.config.arms`: the flags that name what is compared."""

from pathlib import Path

import pytest

from ngrpo.config.arms import parse_arms
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import create
from perturbations.errors import UsageError
from tests.support.run import refused

DAMP = """
from dataclasses import dataclass
from perturbations.methods.gaussian import Gaussian


@dataclass(frozen=True, kw_only=True)
class Damp(Gaussian):
    paper = "none"
"""


def ids(*args: object) -> list[str]:
    return [strategy.id for strategy in parse_arms(*args)]  # type: ignore[arg-type]


def test_names_and_their_specs() -> None:
    plain, neighbor = parse_arms("none,neighbor")
    assert plain.id == "none"
    assert plain.spec is None
    assert plain.settings == {}
    assert neighbor.id == "neighbor"
    assert neighbor.spec == create("neighbor").spec()
    assert "2606.10768" in neighbor.paper


def test_an_option_that_is_called_as_a_setting_of_a_training() -> None:
    """`gaussian` has an option `base`: bare where nothing is trained, with its prefix beside a training's base."""
    expected_spec = create("gaussian", base="soft").spec()
    (bare,) = parse_arms(None, (), ["gaussian base=soft"])
    assert bare.spec == expected_spec
    assert bare.training == {}
    for prefix in ("perturbation.", "--perturbation."):
        (with_base,) = parse_arms(None, (), [f"gaussian {prefix}base=soft base=gspo"], training=True)
        assert with_base.spec == expected_spec
        assert with_base.training == {"base": "gspo"}
        assert with_base.flags == ["--perturbation", "gaussian", "--perturbation.base", "soft", "--preset", "gspo"]


def test_options_after_colons_and_blanks() -> None:
    (arm,) = parse_arms("neighbor:rate=0.2:variant=released")
    assert arm.id == "neighbor rate=0.2 variant=released"
    assert arm.spec == create("neighbor", rate=0.2, variant="released").spec()
    assert arm.settings == {"perturbation.rate": "0.2", "perturbation.variant": "released"}
    assert parse_arms(None, (), ["neighbor rate=0.2 variant=released"]) == [arm]
    assert parse_arms("neighbor rate=0.2 variant=released") == [arm]
    (of_a_package,) = parse_arms("perturbations.methods.gaussian:Gaussian:sigma=0.5")
    assert of_a_package.spec is not None
    assert of_a_package.spec["sigma"] == 0.5


def test_a_sweep_applies_where_it_can_and_sweeps_are_combined() -> None:
    swept = ids("neighbor", ["perturbation.metric=cosine,l2", "perturbation.k=2,3"], ["none"])
    assert swept == [f"neighbor metric={m} k={k}" for m in ("cosine", "l2") for k in (2, 3)] + ["none"]
    assert ids("none,neighbor,gaussian", ["perturbation.rate=0.1,0.2"]) == [
        "none",
        "neighbor rate=0.1",
        "neighbor rate=0.2",
        "gaussian rate=0.1",
        "gaussian rate=0.2",
    ]
    assert ids("neighbor:rate=0.5,gaussian", ["perturbation.sigma=1", "perturbation.rate=0.1"]) == [
        "neighbor rate=0.5",
        "gaussian sigma=1 rate=0.1",
    ]


def test_options_of_a_gate_are_swept_where_the_gate_has_them() -> None:
    assert ids("none,neighbor:gate=bursts,gaussian:gate=top_margin", ["perturbation.gate.length=4,8"]) == [
        "none",
        "neighbor gate=bursts gate.length=4",
        "neighbor gate=bursts gate.length=8",
        "gaussian gate=top_margin",
    ]
    gate_and_option = ids("gumbel", ["perturbation.gate.margin=0.1,0.3", "perturbation.gate=bursts,top_margin"])
    assert gate_and_option == [
        "gumbel gate=bursts",
        "gumbel gate=top_margin gate.margin=0.1",
        "gumbel gate=top_margin gate.margin=0.3",
    ]
    (arm,) = parse_arms("neighbor:gate=bursts", ["perturbation.gate.length=4"])
    assert arm.spec is not None
    assert arm.spec["gate.length"] == 4
    assert arm.flags[-2:] == ["--perturbation.gate.length", "4"]


def test_the_same_twice_and_rate_zero() -> None:
    strategies = parse_arms("none,none,neighbor:rate=0")
    assert [s.id for s in strategies] == ["none", "none (2)", "neighbor rate=0"]
    assert [s.spec for s in strategies] == [None, None, None]


def test_only_arms_that_are_trained_alike_are_noted_as_the_same() -> None:
    arms = parse_arms(None, (), ["none base=grpo", "none base=gspo", "none base=grpo"], training=True)
    assert [arm.notes for arm in arms] == [(), (), ("the same arm as 'none base=grpo', run and counted twice",)]


@pytest.mark.parametrize(("names", "sweeps", "lines", "message"), refused("arms"))
def test_errors_say_what_to_do(names: str | None, sweeps: list[str], lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arms(names, sweeps, lines)


def test_a_perturbation_that_breaks_its_contract_is_refused_at_once(tmp_path: Path) -> None:
    """What `ngrpo check` says, where a worker would have failed after minutes of loading."""
    (tmp_path / "x.py").write_text(DAMP + "    def propose(self):\n        return None\n")
    with pytest.raises(UsageError, match=r"'x.py:Damp' breaks its contract: .*takes 1 positional argument but 2"):
        parse_arms(f"{tmp_path}/x.py:Damp")


def test_a_setting_is_swept_by_one_flag() -> None:
    with pytest.raises(UsageError, match="--base and --sweep base set the same"):
        parse_arms("none", ["base=grpo,gspo"], bases=["dapo"], training=True)


def test_blanks_part_values_of_a_flag_that_takes_several_alone() -> None:
    pytest.importorskip("openrlhf")
    line = (
        "none --data.input_template='Q: {} A:' --actor.eps_clip_low_high='0.2 0.28' --data.prompt_dataset='my a.jsonl'"
    )
    (arm,) = parse_arms(lines=[line], training=True)
    template, clip, dataset = Flags(arm.training_flags)
    assert template.values == ("Q: {} A:",) and clip.values == ("0.2", "0.28") and dataset.values == ("my a.jsonl",)


def test_a_sweep_over_what_every_arm_sets_is_refused() -> None:
    lines = ["none --rollout.temperature=0.7", "neighbor --rollout.temperature=0.8"]
    with pytest.raises(UsageError, match=r"the sweep over rollout\.temperature: every arm has its own value"):
        parse_arms(None, ["rollout.temperature=1,1.2"], lines, training=True)
    assert len(parse_arms("none", ["rollout.temperature=1,1.2"], lines[1:], training=True)) == 3
