# SPDX-License-Identifier: Apache-2.0
"""`ngrpo train` with a density in the loss: SofT-GRPO's and STHT's own objectives take real OpenRLHF steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.harness import GAP, LOUD, steps_of

KL = ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"]
SOFT_GRPO = ["--perturbation", "gumbel", "--perturbation.density", "gumbel"]
STHT = ["--perturbation", "gaussian", "--perturbation.base", "soft", "--perturbation.density", "gaussian"]
NO_KL = ["--algo.kl.init_coef", "0"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*KL, *SOFT_GRPO, "--actor.gradient_checkpointing_enable"], id="soft-grpo"),
        pytest.param([*NO_KL, *STHT], id="stht", marks=pytest.mark.slow),
    ],
)
def test_the_ratio_is_1_before_an_update_and_the_gap_is_of_tokens(tmp_path: Path, smollm2: str, flags: list) -> None:
    """Old and new are the same; rollout and trainer are compared by the tokens' own log-probabilities.

    A vector's density has the token's value. A density of draws in the gap would be off by a nat or more.
    """
    first, second = steps_of(tmp_path, smollm2, *LOUD, *flags)
    print({key: first[key] for key in ("ratio_mean", "gap_perturbed_mean", "gap_plain_mean", "shift")})
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["rate"] == pytest.approx(1.0, abs=0.12)
    for step in (first, second):
        assert 0.0 < step["gap_perturbed_mean"] <= GAP
