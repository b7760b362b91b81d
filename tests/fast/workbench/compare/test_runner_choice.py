# SPDX-License-Identifier: Apache-2.0
"""The user's choice of vLLM's model runner is a part of a compared run."""

import pytest

from ngrpo.workbench.compare.runs import identity
from tests.support.compare_example import plan


def test_a_comparison_has_no_runs_on_either_side_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--perturbations", "none,neighbor")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    seen = {identity(made, made.runs()[0])}
    for chosen in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
        seen.add(identity(made, made.runs()[0]))
    assert len(seen) == 3
