# SPDX-License-Identifier: Apache-2.0
"""The user's choice of vLLM's model runner is a part of a compared run."""

import pytest

from ngrpo.workbench.compare.runs import identity
from tests.support.compare_example import plan


def test_each_choice_of_the_runner_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of_two = plan("--perturbations", "none,neighbor")
    first_run = plan_of_two.runs()[0]
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    unset = identity(plan_of_two, first_run)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    first_runner = identity(plan_of_two, first_run)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    second_runner = identity(plan_of_two, first_run)
    assert len({unset, first_runner, second_runner}) == 3
