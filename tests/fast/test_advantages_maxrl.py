# SPDX-License-Identifier: Apache-2.0
"""MaxRL: its update on a policy of two answers, and its largest advantage."""

from math import comb

import pytest
import torch

from ngrpo.methods import advantages
from tests.fast.run import clip_range


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("logit", [-3.0, 0.2, 2.0])
def test_the_update_is_the_gradient_of_truncated_maximum_likelihood(size: int, logit: float) -> None:
    """The expectation over all groups of a right answer's probability p = σ(logit), exactly."""
    z = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(z)
    update = torch.zeros((), dtype=torch.float64)
    for right in range(size + 1):
        rewards = torch.tensor([[1.0] * right + [0.0] * (size - right)], dtype=torch.float64)
        log_probs = torch.where(rewards[0] > 0.5, p.log(), (1 - p).log())
        weight = comb(size, right) * (p**right * (1 - p) ** (size - right)).item()
        update = update + weight * (advantages.compute("maxrl", rewards)[0] * log_probs).mean()
    found = torch.autograd.grad(update, z)[0]
    objective = -sum((1 - torch.sigmoid(z)) ** k / k for k in range(1, size))
    torch.testing.assert_close(found, torch.autograd.grad(objective, z)[0], atol=1e-12, rtol=0.0)


def test_the_clip_leaves_a_rare_right_answer_alone() -> None:
    made, spec = advantages.create("maxrl"), {"name": "maxrl"}
    assert made.compute(torch.eye(64)[:1]).max().item() == pytest.approx(63.0)
    assert clip_range("--rollout.n_samples_per_prompt 64", spec) == ("-63", "63")
    assert clip_range("--rollout.n_samples_per_prompt 11", spec) is None, "OpenRLHF's own clip, 10, is enough"


def test_the_clip_is_for_all_responses_that_are_compared() -> None:
    """8 responses and 3 × 4 of a second round: the only right one of 20 has 19."""
    words, both = "--rollout.n_samples_per_prompt 8", {"name": "repeat", "prompts": 3, "answers": 4}
    assert clip_range(words, {"name": "maxrl"}, second_round=both) == ("-19", "19")
    assert clip_range(words, {"name": "rs_grpo", "beta": 1}, second_round=both) == ("-20", "20")
    for alone in ({**both, "group": "kept"}, {"name": "igrpo"}):
        assert clip_range(words, {"name": "maxrl"}, second_round=alone) is None
