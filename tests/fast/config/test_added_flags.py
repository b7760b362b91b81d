# SPDX-License-Identifier: Apache-2.0
"""Each flag that a layer may add has a reason of its own."""

import pytest

from ngrpo.config import added_flags
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.hardware import gpu_plan, profile_for, stand_ins
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.placement import Machine
from tests.support.run import run_of

GIB = 2.0**30
WORDS = "--algo.advantage.estimator gae --actor.model_name_or_path Qwen/Qwen3-0.6B --reward.model_name_or_path r"


def complete(**settings: object) -> CompleteRun:
    return CompleteRun(run=run_of(hardware="cpu", **settings), flags=Flags(WORDS.split()))


@pytest.mark.parametrize("flag", [*profile_for("cpu").default_flags, *stand_ins.DEFAULT_FLAGS])
def test_flags_of_the_hardware(flag: str) -> None:
    assert "a default of the hardware profile" not in added_flags.of_hardware(flag, complete())


@pytest.mark.parametrize("memory", [22.0, 79.0])
def test_flags_of_a_placement(memory: float) -> None:
    """On one card of little memory, which takes the optimizer to the host, and on two nodes."""
    for machine in (Machine((1,), memory * GIB, "one card"), Machine((8, 8), memory * GIB, "two nodes")):
        flags = gpu_plan.default_flags(Flags(WORDS.split()), machine)
        assert len(flags) > 8
        for flag in flags:
            assert added_flags.of_placement(flag, complete()) != "the placement needs it"


def test_flags_of_a_preset_and_a_task() -> None:
    run = complete(preset="dapo", task="arithmetic")
    assert added_flags.of_preset("--algo.kl.init_coef", run) == "--preset dapo"
    assert added_flags.of_preset("--reward.clip_range", run) == "advantages can be larger than OpenRLHF's bound of 10"
    assert added_flags.of_task("--eval.dataset", run) == "--task arithmetic: its held-out problems"
