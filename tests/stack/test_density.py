# SPDX-License-Identifier: Apache-2.0
"""Densities on real rollouts, through OpenRLHF's own Actor.forward on a real model, in float32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.rollout import set_perturbation
from ngrpo.trainers.common.log_probs import densities, with_overrides
from perturbations import create, streams
from perturbations.replay.scope import ReplayScope
from tests.stack.harness import Rollout, chat_prompts, replay_log_probs, sample

CASES = [
    ("gumbel", {"density": "gumbel"}),
    ("latent", {"density": "exact"}),
    ("multiplex", {"density": "joint"}),
    ("latent", {"density": "latent"}),
    ("gaussian", {"density": "gaussian", "base": "soft"}),
    ("gaussian", {"density": "gaussian", "base": "fuzzy"}),
    ("gaussian", {"density": "gaussian"}),
]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def actor(hf_model: Any) -> Iterator[Any]:
    """OpenRLHF's Actor around the shared model, with the seam of the density in place."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models import actor as module
    original = module.log_probs_from_logits
    module.log_probs_from_logits = with_overrides(original)
    made = module.Actor(hf_model, temperature=TEMPERATURE)
    made.packing_samples = False
    yield made
    module.log_probs_from_logits = original


def forward(actor: Any, perturbation: Any, rollouts: list[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Action log-probabilities as the trainer's, the tokens' own, and which actions are perturbed, (B, A) each."""
    longest = max(len(r.sequence) for r in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    mask, action, perturbed = torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, r in enumerate(rollouts):
        tokens[row, : len(r.sequence)], mask[row, : len(r.sequence)] = torch.tensor(r.sequence), 1
        action[row, len(r.prompt) : len(r.sequence)] = 1
        perturbed[row, r.record.positions.tolist()] = 1
    records = [r.record for r in rollouts]
    scope = ReplayScope(actor.model.get_input_embeddings(), perturbation=perturbation)
    with scope(records, mask), densities(scope, actor.temperature) as ours:
        log_probs = ours.for_policy_loss(actor(tokens, action[:, 1:], attention_mask=mask))
        own = ours.token_log_probs(log_probs.detach())
    return log_probs, own, perturbed[:, 1:].bool()


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_density_on_real_rollouts(engine: Any, actor: Any, name: str, options: dict[str, str]) -> None:
    """Old and new are equal before an update; the tokens' own are the rollout's; gradient reaches the policy."""
    perturbation = create(name, rate=0.7, **options)
    set_perturbation(engine, name, rate=0.7, **options)
    rollouts = sample(engine, chat_prompts(engine)[:3], max_tokens=24, temperature=TEMPERATURE)
    with torch.no_grad():
        old, own, perturbed = forward(actor, perturbation, rollouts)
    assert 30 <= perturbed.sum() <= 70
    rolled = replay_log_probs(actor.model, rollouts, TEMPERATURE)
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt) - 1, len(rollout.sequence) - 1
        assert (own[row, start:end] - torch.from_numpy(rollout.log_probs.copy())).abs().max() <= 1e-4
        assert (own[row, start:end] - rolled[row]).abs().max() <= 1e-4
    assert torch.equal(old[~perturbed], own[~perturbed]), "plain positions keep the token's log-probability"
    if options.get("base") == "fuzzy":
        assert (old[perturbed] == 0.0).all(), "nothing of a bounded ratio was drawn"
    elif name == "gaussian":
        assert torch.equal(old, own), "the token's: a vector's density enters as its gradient"
    else:
        # Several draws of one confident token, or a mixture of it alone, weigh nearly what the token does.
        often = 0.2 if name == "multiplex" else 0.9
        assert ((old - own)[perturbed].abs() > 1e-3).float().mean() > often
    actor.model.zero_grad()
    new, _, _ = forward(actor, perturbation, rollouts)
    assert torch.equal(new.detach(), old), "the ratio before an update is exactly 1"
    new[perturbed].sum().backward()
    inner = actor.model.model.layers[-1].mlp.down_proj.weight.grad
    if options.get("base") == "fuzzy":
        assert actor.model.get_input_embeddings().weight.grad.abs().max() > 0.0
    else:
        assert inner.abs().max() > 1e-4
    actor.model.zero_grad()


def test_gumbel_density_is_that_of_the_rollout_s_noise(engine: Any, actor: Any) -> None:
    """Before an update g(θ) is the noise that the rollout drew, here drawn again from each trajectory's seed."""
    set_perturbation(engine, "gumbel", density="gumbel")
    rollouts = sample(engine, chat_prompts(engine)[:2], max_tokens=64, temperature=TEMPERATURE)
    with torch.no_grad():
        got, _, _ = forward(actor, create("gumbel", density="gumbel"), rollouts)
    compared = 0
    for row, rollout in enumerate(rollouts):
        record = rollout.record
        positions, ids = torch.from_numpy(record.positions).long(), torch.from_numpy(record.ids).long()
        keys = streams.keys(torch.full_like(positions, record.seed), positions, streams.Stream.WEIGHTS)
        g = streams.gumbel(keys, ids).clamp(-1.5, 3.0)
        # One candidate (p = 1 after top-p) is the case without a doubt about the mask: log p > -3 for it alone.
        alone = (ids == ids[:, :1]).all(dim=-1)
        want = -g[:, 0] - torch.exp(-g[:, 0])
        torch.testing.assert_close(got[row, positions - 1][alone], want[alone], rtol=1e-4, atol=1e-4)
        compared += int(alone.sum())
    assert compared >= 8


def test_density_with_gradient_checkpointing(engine: Any, actor: Any) -> None:
    set_perturbation(engine, "gaussian", density="gaussian", base="soft")
    perturbation = create("gaussian", density="gaussian", base="soft")
    rollouts = sample(engine, chat_prompts(engine)[:2], max_tokens=12, temperature=TEMPERATURE)

    def gradient() -> Tensor:
        actor.model.zero_grad()
        forward(actor, perturbation, rollouts)[0].sum().backward()
        return actor.model.get_input_embeddings().weight.grad.clone()

    plain = gradient()
    actor.train()
    actor.gradient_checkpointing_enable()
    try:
        checkpointed = gradient()
    finally:
        actor.gradient_checkpointing_disable()
        actor.eval()
        actor.model.zero_grad()
    torch.testing.assert_close(checkpointed, plain, rtol=1e-3, atol=1e-3 * plain.abs().max().item())
