# SPDX-License-Identifier: Apache-2.0
"""The model actors with a density, on a stand-in for OpenRLHF's classes: old, new and reference log-probabilities.

All at a temperature other than 1.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ngrpo.trainers.openrlhf.model_actors import kept_by_actors, policy_model_actor, reference_model_actor
from perturbations.base import Replayed
from perturbations.methods.soft_grpo import Gumbel
from perturbations.registry import create
from perturbations.replay.trajectory import FinishedTrajectory
from tests.support.density_model import batch, perturbed, run
from tests.support.density_steps import generator
from tests.support.openrlhf_doubles import training_step as our_training_step
from tests.support.policy_actor import TEMPERATURE, Actor, Language, PolicyModelActor
from tests.support.run import run_with


@dataclass(frozen=True, kw_only=True)
class Warm(Gumbel):
    """SofT-GRPO's density plus a term that shows which temperature it was told."""

    name = "warm"
    density: str = "gumbel"

    def log_density(self, replayed: Replayed) -> Tensor:
        return super().log_density(replayed) + 3.0 * replayed.temperature


PERTURBATION = Warm()


def training_step(self: Any, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
    log_probs = self.actor(experience.sequences, experience.action_mask, experience.attention_mask)
    loss = self.actor_loss_fn(log_probs, experience.action_log_probs, None, action_mask=experience.action_mask)
    loss.backward()
    return {"metrics": {}, "weights": {}}


class Inputs(NamedTuple):
    """Three samples of which the second has no perturbed position.

    Attributes:
        forward: the keyword arguments of an actor's ``forward``.
        mask: attention mask (B, T).
        records: of each sample.
    """

    forward: dict[str, Any]
    mask: Tensor
    records: list


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Inputs:
    run_with(monkeypatch, perturbation=PERTURBATION.spec())
    tokens, mask, records = batch(PERTURBATION)
    records[1] = records[0].truncate(5)
    action_mask = mask.clone()[:, 1:]
    action_mask[:, :4] = 0
    trajectories = [FinishedTrajectory(record, np.zeros(record.num_tokens, np.float32)) for record in records]
    forward = {
        "sequences": tokens,
        "action_mask": action_mask,
        "attention_mask": mask,
        "mm_train_inputs_list": [trajectory.pack() for trajectory in trajectories],
    }
    return Inputs(forward, mask, records)


def experience(forward: dict[str, Any], old_log_probs: Tensor) -> SimpleNamespace:
    """The experience of a training step on the inputs of a ``forward``, with advantages of 1."""
    return SimpleNamespace(
        **forward,
        mm_train_inputs=forward["mm_train_inputs_list"],
        action_log_probs=old_log_probs,
        advantages=torch.ones(forward["action_mask"].shape),
    )


def test_old_and_reference_hold_densities(inputs: Inputs) -> None:
    actor = policy_model_actor(PolicyModelActor)()
    reference = reference_model_actor(PolicyModelActor)()
    old = actor.forward(**inputs.forward)
    of_reference = reference.forward(**inputs.forward)

    tokens = inputs.forward["sequences"]
    expected, _ = run(actor.actor.model, PERTURBATION, tokens, inputs.mask, inputs.records, temperature=TEMPERATURE)
    torch.testing.assert_close(old, (expected[:, :-1] * inputs.forward["action_mask"]).detach())
    assert torch.equal(old, of_reference)


def test_the_actor_keeps_the_log_probabilities_of_the_tokens(inputs: Inputs) -> None:
    actor = policy_model_actor(PolicyModelActor)()
    old = actor.forward(**inputs.forward)

    (of_tokens,) = actor.hand_over("token_log_probs")
    assert actor.hand_over("token_log_probs") == [], "they are handed over once"

    at_perturbed = perturbed(inputs.records, inputs.mask)
    assert (old[at_perturbed] != of_tokens[at_perturbed]).all()
    of_tokens[at_perturbed] = old[at_perturbed]
    assert torch.equal(of_tokens, old), "plain positions are the same in both"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(None, id="nothing for any sample"),
        pytest.param([None, None, None], id="no sample's"),
        pytest.param([0, None, 2], id="one is missing"),
        pytest.param([0, 1], id="too few"),
    ],
)
def test_a_sample_without_its_record_is_an_error(inputs: Inputs, sent: list | None) -> None:
    """``sent`` has the numbers of the samples whose trajectories the actors receive."""
    packed = inputs.forward["mm_train_inputs_list"]
    received = None
    if sent is not None:
        received = [None if number is None else packed[number] for number in sent]
    forward = {**inputs.forward, "mm_train_inputs_list": received}

    for actor in (policy_model_actor(PolicyModelActor)(), reference_model_actor(PolicyModelActor)()):
        with pytest.raises(RuntimeError, match="have no replay record"):
            actor.forward(**forward)
    with pytest.raises(RuntimeError, match="have no replay record"):
        our_training_step(Actor(), None, training_step, experience(forward, torch.zeros(1)))


def test_what_the_actors_kept_is_one_tensor_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each in two copies that hold the same."""
    monkeypatch.setattr("ray.get", lambda refs: refs)
    parallel = SimpleNamespace(ring_attn_size=1, tensor_parallel_size=2)
    batches = [torch.full((2, 3 + number), float(number)) for number in range(3)]

    def kept(first_rank: list[Tensor], second_rank: list[Tensor]) -> list[Tensor]:
        copies = [first_rank, first_rank, second_rank, second_rank]
        group = SimpleNamespace(async_run_method=lambda **_: copies)
        strategy = SimpleNamespace(args=SimpleNamespace(ds=parallel))
        maker = SimpleNamespace(strategy=strategy, actor_model_group=group)
        return kept_by_actors(maker, "token_log_probs", batches)

    received = kept(batches[:2], batches[2:])
    assert len(received) == 3
    for received_batch, sent_batch in zip(received, batches):
        assert torch.equal(received_batch, sent_batch)
    with pytest.raises(RuntimeError, match="2 batches, 3 were made"):
        kept(batches[:1], batches[2:])


class Bypassing(Language):
    """Looks its tokens up without the module that it names."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding.weight[tokens])


def test_a_replay_that_did_not_happen_is_an_error(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation=create("gumbel").spec())
    for actor in (policy_model_actor(PolicyModelActor)(), reference_model_actor(PolicyModelActor)()):
        actor.actor.model = Bypassing()
        with pytest.raises(RuntimeError, match="did not happen"):
            actor.forward(**inputs.forward)


def test_the_training_step_has_ratio_1_and_a_gradient_of_the_density(inputs: Inputs) -> None:
    action_mask = inputs.forward["action_mask"]
    actor = policy_model_actor(PolicyModelActor)()
    step = experience(inputs.forward, actor.forward(**inputs.forward))
    received_log_probs = []

    def loss(log_probs: Tensor, old: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        received_log_probs.append(log_probs.detach())
        return -((log_probs - old).exp() * action_mask).sum()

    result = our_training_step(actor.actor, loss, training_step, step)

    assert result["metrics"]["perturbation/ratio_mean"].item() == 1.0
    model = Language()
    tokens = inputs.forward["sequences"]
    log_probs, _ = run(model, PERTURBATION, tokens, inputs.mask, inputs.records, temperature=TEMPERATURE)
    torch.testing.assert_close(received_log_probs[0], log_probs[:, :-1].detach() * action_mask)
    # At the ratio 1 the loss has the gradient of the log-probabilities.
    (-(log_probs[:, :-1] * action_mask).sum()).backward()
    gradient = actor.actor.model.head.weight.grad.clone()
    torch.testing.assert_close(gradient, model.head.weight.grad)
    assert gradient.abs().max() > 1e-3

    with torch.no_grad():
        actor.actor.model.head.weight += 0.1 * torch.randn(gradient.shape, generator=generator())
    moved = our_training_step(actor.actor, loss, training_step, step)
    assert abs(moved["metrics"]["perturbation/ratio_mean"].item() - 1.0) > 1e-4


@pytest.mark.parametrize("difference", [300.0, -300.0, 2e38])
def test_the_mean_ratio_is_finite(inputs: Inputs, difference: float) -> None:
    """Old log-probabilities that are so much below the new ones."""
    old_log_probs = torch.full(inputs.forward["action_mask"].shape, -difference)

    def loss(log_probs: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        return log_probs.sum()

    result = our_training_step(Actor(), loss, training_step, experience(inputs.forward, old_log_probs))

    mean = result["metrics"]["perturbation/ratio_mean"]
    assert mean.isfinite()
    if difference > 0:
        assert mean > 1e8
    else:
        assert mean < 1e-8
