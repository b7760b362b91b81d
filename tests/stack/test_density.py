# SPDX-License-Identifier: Apache-2.0
"""Densities on real rollouts, through OpenRLHF's own Actor.forward on a real model, in float32."""

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    """OpenRLHF's Actor around the shared model; ngrpo's patch of its log-probabilities is applied."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models import actor as module
    original = module.log_probs_from_logits
    module.log_probs_from_logits = with_overrides(original)
    actor = module.Actor(hf_model, temperature=TEMPERATURE)
    actor.packing_samples = False
    yield actor
    module.log_probs_from_logits = original


class ActionLogProbs(NamedTuple):
    """Of B rollouts with up to A actions, (B, A) each."""

    loss_entries: Tensor  # what the trainer's loss reads
    own: Tensor  # log π of the tokens
    perturbed: Tensor  # whether the action's input is perturbed, bool


def forward(actor: Any, perturbation: Any, rollouts: list[Rollout]) -> ActionLogProbs:
    """The actor's forward of the rollouts, with the perturbation's density, as the trainer calls it."""
    longest = max(len(rollout.sequence) for rollout in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(tokens)
    action_mask = torch.zeros_like(tokens)
    perturbed = torch.zeros_like(tokens, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt)
        end = len(rollout.sequence)
        tokens[row, :end] = torch.tensor(rollout.sequence)
        attention_mask[row, :end] = 1
        action_mask[row, start:end] = 1
        perturbed[row, rollout.record.positions.tolist()] = True
    records = [rollout.record for rollout in rollouts]
    scope = ReplayScope(actor.model.get_input_embeddings(), perturbation=perturbation)
    with scope(records, attention_mask), densities(scope, actor.temperature) as density:
        log_probs = actor(tokens, action_mask[:, 1:], attention_mask=attention_mask)
        loss_entries = density.for_policy_loss(log_probs)
        own = density.token_log_probs(loss_entries.detach())
    return ActionLogProbs(loss_entries, own, perturbed[:, 1:])


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_density_on_real_rollouts(engine: Any, actor: Any, name: str, options: dict[str, str]) -> None:
    """Old and new are equal before an update; the tokens' own are the rollout's; gradient reaches the policy."""
    perturbation = create(name, rate=0.7, **options)
    set_perturbation(engine, name, rate=0.7, **options)
    rollouts = sample(engine, chat_prompts(engine)[:3], max_tokens=24, temperature=TEMPERATURE)
    with torch.no_grad():
        old, own, perturbed = forward(actor, perturbation, rollouts)
    assert 30 <= perturbed.sum() <= 70

    replayed = replay_log_probs(actor.model, rollouts, TEMPERATURE)
    for row, rollout in enumerate(rollouts):
        first_action = len(rollout.prompt) - 1
        end = len(rollout.sequence) - 1
        own_of_rollout = own[row, first_action:end]
        rolled_out = torch.from_numpy(rollout.log_probs)
        torch.testing.assert_close(own_of_rollout, rolled_out, rtol=0.0, atol=1e-4)
        torch.testing.assert_close(own_of_rollout, replayed[row], rtol=0.0, atol=1e-4)

    is_fuzzy = options.get("base") == "fuzzy"
    assert torch.equal(old[~perturbed], own[~perturbed]), "plain positions keep the token's log-probability"
    if is_fuzzy:
        assert (old[perturbed] == 0.0).all(), "nothing of a bounded ratio was drawn"
    elif name == "gaussian":
        assert torch.equal(old, own), "the token's: a vector's density enters as its gradient"
    else:
        # Several draws of one confident token, or a mixture of it alone, weigh nearly what the token does.
        least_share = 0.2 if name == "multiplex" else 0.9
        differs = (old - own)[perturbed].abs() > 1e-3
        assert differs.float().mean() > least_share

    actor.model.zero_grad()
    new, _, _ = forward(actor, perturbation, rollouts)
    assert torch.equal(new.detach(), old), "the ratio before an update is exactly 1"
    new[perturbed].sum().backward()
    if is_fuzzy:
        embedding = actor.model.get_input_embeddings().weight
        assert embedding.grad.abs().max() > 0.0
    else:
        last_layer = actor.model.model.layers[-1].mlp.down_proj.weight
        assert last_layer.grad.abs().max() > 1e-4
    actor.model.zero_grad()


def test_gumbel_density_is_that_of_the_rollout_s_noise(engine: Any, actor: Any) -> None:
    """Before an update g(θ) is the noise that the rollout drew, here drawn again from each trajectory's seed."""
    set_perturbation(engine, "gumbel", density="gumbel")
    rollouts = sample(engine, chat_prompts(engine)[:2], max_tokens=64, temperature=TEMPERATURE)
    with torch.no_grad():
        log_densities, _, _ = forward(actor, create("gumbel", density="gumbel"), rollouts)
    compared = 0
    for row, rollout in enumerate(rollouts):
        record = rollout.record
        positions = torch.from_numpy(record.positions).long()
        ids = torch.from_numpy(record.ids).long()
        seeds = torch.full_like(positions, record.seed)
        keys = streams.keys(seeds, positions, streams.Stream.WEIGHTS)
        g = streams.gumbel(keys, ids).clamp(-1.5, 3.0)[:, 0]
        expected = -g - torch.exp(-g)
        # One candidate (p = 1 after top-p) is the case without a doubt about the mask: log p > -3 for it alone.
        has_one_candidate = (ids == ids[:, :1]).all(dim=-1)
        actual = log_densities[row, positions - 1]
        torch.testing.assert_close(actual[has_one_candidate], expected[has_one_candidate], rtol=1e-4, atol=1e-4)
        compared += int(has_one_candidate.sum())
    assert compared >= 8


def test_density_with_gradient_checkpointing(engine: Any, actor: Any) -> None:
    set_perturbation(engine, "gaussian", density="gaussian", base="soft")
    perturbation = create("gaussian", density="gaussian", base="soft")
    rollouts = sample(engine, chat_prompts(engine)[:2], max_tokens=12, temperature=TEMPERATURE)

    def gradient() -> Tensor:
        actor.model.zero_grad()
        forward(actor, perturbation, rollouts).loss_entries.sum().backward()
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
    largest = plain.abs().max().item()
    torch.testing.assert_close(checkpointed, plain, rtol=1e-3, atol=1e-3 * largest)
