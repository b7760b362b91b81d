"""The model actors with a density, on a stand-in for OpenRLHF's classes: old, new and reference log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngrpo.trainer.model_actors import replaying_actor, replaying_reference, replaying_training_step
from ngrpo.trainer.trajectory_record import TrajectoryRecord
from perturbations.registry import create
from tests.fast.run import run_with
from tests.fast.test_density import generator
from tests.fast.test_density_loss import Model, batch, hooked, log_probs_of, perturbed, run

OPERATOR = create("gumbel", density="gumbel")


class Language(Model):
    """The small model with Hugging Face's name for its embedding."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class Actor(nn.Module):
    """What OpenRLHF's Actor does, without a transformer."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        log_probs = hooked(self.model(sequences), torch.roll(sequences, -1, 1))[:, :-1]
        return log_probs[:, -action_mask.shape[1] :] * action_mask


class PolicyModelActor:
    def __init__(self) -> None:
        self.actor = self.model = Actor()

    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any, mm_train_inputs_list: Any = None) -> Any:
        with torch.no_grad():
            return self.actor(sequences, action_mask, attention_mask)


def training_step(self: Any, experience: Any) -> dict[str, Any]:
    log_probs = self.actor(experience.sequences, experience.action_mask, experience.attention_mask)
    loss = self.actor_loss_fn(log_probs, experience.action_log_probs, None, action_mask=experience.action_mask)
    loss.backward()
    return {"metrics": {}, "weights": {}}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Tensor, list]:
    run_with(monkeypatch, perturbation_spec=OPERATOR.spec())
    tokens, mask, records = batch(OPERATOR)
    action = mask.clone()[:, 1:]
    action[:, :4] = 0
    rides = [r and TrajectoryRecord(r, np.zeros(r.num_tokens, np.float32)).pack() for r in records]
    inputs = {"sequences": tokens, "action_mask": action, "attention_mask": mask, "mm_train_inputs_list": rides}
    return inputs, mask, records


def test_old_and_reference_hold_densities_and_the_actor_keeps_the_tokens(inputs: tuple) -> None:
    kwargs, mask, records = inputs
    actor, reference = replaying_actor(PolicyModelActor)(), replaying_reference(PolicyModelActor)()
    old, base = actor.forward(**kwargs), reference.forward(**kwargs)
    want, _ = run(actor.actor.model, OPERATOR, kwargs["sequences"], mask, records)
    torch.testing.assert_close(old, (want[:, :-1] * kwargs["action_mask"]).detach())
    assert torch.equal(old, base)
    (own,) = actor.token_log_probs()
    assert actor.token_log_probs() == [], "each is handed over once"
    for sample, record in enumerate(records):
        for _, t in perturbed(record, mask[sample]):
            assert old[sample, t - 1] != own[sample, t - 1]
            own[sample, t - 1] = old[sample, t - 1]
    assert torch.equal(own, old), "plain positions are the same in both"


def test_a_batch_without_records_is_kept_too(inputs: tuple) -> None:
    """The driver counts batches: one that had nothing to replace must not be missing."""
    kwargs, _, _ = inputs
    actor = replaying_actor(PolicyModelActor)()
    old = actor.forward(**{**kwargs, "mm_train_inputs_list": [None] * 3})
    (own,) = actor.token_log_probs()
    assert torch.equal(own, old)
    plain = log_probs_of(actor.actor.model(kwargs["sequences"]), torch.roll(kwargs["sequences"], -1, 1))
    torch.testing.assert_close(old, (plain[:, :-1] * kwargs["action_mask"]).detach())


def test_the_training_step_has_ratio_1_and_a_gradient_of_the_density(inputs: tuple) -> None:
    kwargs, mask, records = inputs
    actor = replaying_actor(PolicyModelActor)()
    experience = SimpleNamespace(
        sequences=kwargs["sequences"],
        action_mask=kwargs["action_mask"],
        attention_mask=mask,
        mm_train_inputs=kwargs["mm_train_inputs_list"],
        action_log_probs=actor.forward(**kwargs),
    )

    def loss(log_probs: Tensor, old: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        return -((log_probs - old).exp() * action_mask).sum()

    trainer = SimpleNamespace(actor=actor.actor, actor_loss_fn=loss)
    result = replaying_training_step(training_step)(trainer, experience)
    assert result["metrics"]["perturbation/ratio_mean"].item() == 1.0
    got = actor.actor.model.head.weight.grad.clone()
    model = Language()
    new, _ = run(model, OPERATOR, kwargs["sequences"], mask, records)
    (-(new[:, :-1] * kwargs["action_mask"]).sum()).backward()
    torch.testing.assert_close(got, model.head.weight.grad)
    assert got.abs().max() > 1e-3
    with torch.no_grad():
        actor.actor.model.head.weight += 0.1 * torch.randn(got.shape, generator=generator())
    moved = replaying_training_step(training_step)(trainer, experience)
    assert abs(moved["metrics"]["perturbation/ratio_mean"].item() - 1.0) > 1e-4
