# SPDX-License-Identifier: Apache-2.0
"""``--sampling.correction_warmup``: weights by hand, and over the steps of a run."""

from math import log
from types import SimpleNamespace

import pytest
import torch

from ngrpo.config import parse, rules
from ngrpo.trainers.common.mismatch import with_strength
from tests.support.openrlhf_doubles import maker
from tests.support.run import run_with

BOUNDS = (0.0, 10.0)


@pytest.mark.parametrize(
    ("ratio", "strength", "weight"),
    [
        (2.0, 0.0, 1.0),
        (2.0, 0.5, 1.5),
        (0.5, 0.5, 0.75),
        (40.0, 0.25, 3.25),  # 1 + 0.25 · (10 − 1): the bound comes first
        (1e-12, 0.5, 0.5),
    ],
)
def test_weights_by_hand(ratio: float, strength: float, weight: float) -> None:
    trainer = torch.tensor([[log(0.3)]])
    rollout = with_strength(trainer, trainer - log(ratio), strength, BOUNDS)
    assert (trainer - rollout).exp().item() == pytest.approx(weight, rel=1e-5)


def test_the_strength_follows_the_steps_and_measures_are_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling={"correction_warmup": 4})
    correction = {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_gating": "ratio"}
    advantage = SimpleNamespace(**correction, is_correction_threshold=[*BOUNDS])
    args = SimpleNamespace(algo=SimpleNamespace(advantage=advantage), actor=SimpleNamespace(policy_loss_type="ppo"))
    made = maker(strategy=SimpleNamespace(args=args))
    old = torch.tensor([[-1.0]])
    own = torch.tensor([[-1.0 - log(3.0)]])
    mask = torch.ones(1, 1)
    for step, strength in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)):
        made.training_step = step
        log_probs = {"action_log_probs": old, "rollout_log_probs": own}
        given = SimpleNamespace(**log_probs, action_mask=mask, mm_train_inputs=None, info={})
        [experience] = made.make_experience_batch([given])
        assert made.step_measures == {
            "generated_tokens": 1.0,
            "importance/divergence": pytest.approx(-log(3.0)),
            "importance/weight": pytest.approx(3.0),
            "importance/cut": 0.0,
            "importance/strength": strength,
        }
        assert (old - experience.rollout_log_probs).exp().item() == pytest.approx(1 + 2 * strength, rel=1e-5)
    assert experience.rollout_log_probs is own, "the whole weight is OpenRLHF's own"


def test_a_schedule_s_own_weights_can_grow() -> None:
    words = ["--model", "m", "--task", "arithmetic", "--sampling.schedule", "ladder"]
    run = parse.run_config([*words, "--sampling.correction_warmup", "50"])
    assert rules.checked(run).flags.value("--algo.advantage.is_correction_level") == "token"
    assert "correction_warmup" in run.conditions
    assert run.flags()["sampling.correction_warmup"] == 50
