# SPDX-License-Identifier: Apache-2.0
"""The model actors with a density, on a stand-in for OpenRLHF's classes: old, new and reference log-probabilities.

All at a temperature other than 1.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Tensor, list]:
    run_with(monkeypatch, perturbation=PERTURBATION.spec())
    tokens, mask, records = batch(PERTURBATION)
    records[1] = records[0].truncate(5)  # nothing was perturbed there
    action = mask.clone()[:, 1:]
    action[:, :4] = 0
    rides = [FinishedTrajectory(r, np.zeros(r.num_tokens, np.float32)).pack() for r in records]
    inputs = {"sequences": tokens, "action_mask": action, "attention_mask": mask, "mm_train_inputs_list": rides}
    return inputs, mask, records


def experience(kwargs: dict[str, Any], old: Tensor) -> SimpleNamespace:
    advantages = torch.ones(kwargs["action_mask"].shape)
    rides = kwargs["mm_train_inputs_list"]
    return SimpleNamespace(**kwargs, mm_train_inputs=rides, action_log_probs=old, advantages=advantages)


def test_old_and_reference_hold_densities_and_the_actor_keeps_the_tokens(inputs: tuple) -> None:
    kwargs, mask, records = inputs
    actor, reference = policy_model_actor(PolicyModelActor)(), reference_model_actor(PolicyModelActor)()
    old, base = actor.forward(**kwargs), reference.forward(**kwargs)
    want, _ = run(actor.actor.model, PERTURBATION, kwargs["sequences"], mask, records, temperature=TEMPERATURE)
    torch.testing.assert_close(old, (want[:, :-1] * kwargs["action_mask"]).detach())
    assert torch.equal(old, base)
    (own,) = actor.hand_over("token_log_probs")
    assert actor.hand_over("token_log_probs") == [], "each is handed over once"
    at = perturbed(records, mask)
    assert (old[at] != own[at]).all()
    own[at] = old[at]
    assert torch.equal(own, old), "plain positions are the same in both"


@pytest.mark.parametrize("missing", [None, [None] * 3, [0, None, 2], [0, 1]], ids=["all", "each", "one", "short"])
def test_a_sample_without_its_record_is_an_error(inputs: tuple, missing: list | None) -> None:
    kwargs, _, _ = inputs
    rides = kwargs["mm_train_inputs_list"]
    given = {**kwargs, "mm_train_inputs_list": missing and [i if i is None else rides[i] for i in missing]}
    for made in (policy_model_actor(PolicyModelActor)(), reference_model_actor(PolicyModelActor)()):
        with pytest.raises(RuntimeError, match="have no replay record"):
            made.forward(**given)
    with pytest.raises(RuntimeError, match="have no replay record"):
        our_training_step(Actor(), None, training_step, experience(given, torch.zeros(1)))


def test_what_the_actors_kept_is_one_tensor_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each in two copies that hold the same."""
    monkeypatch.setattr("ray.get", lambda refs: refs)
    parallel = SimpleNamespace(ring_attn_size=1, tensor_parallel_size=2)
    tensors = [torch.full((2, 3 + i), float(i)) for i in range(3)]

    def kept(*of_ranks: list[Tensor]) -> list[Tensor]:
        group = SimpleNamespace(async_run_method=lambda **_: [part for part in of_ranks for _ in range(2)])
        strategy = SimpleNamespace(args=SimpleNamespace(ds=parallel))
        maker = SimpleNamespace(strategy=strategy, actor_model_group=group)
        return kept_by_actors(maker, "token_log_probs", tensors)

    assert all(torch.equal(a, b) for a, b in zip(kept(tensors[:2], tensors[2:]), tensors))
    with pytest.raises(RuntimeError, match="2 batches, 3 were made"):
        kept(tensors[:1], tensors[2:])


class Bypassing(Language):
    """Looks its tokens up without the module that it names."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding.weight[tokens])


def test_a_replay_that_did_not_happen_is_an_error(inputs: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation=create("gumbel").spec())
    kwargs, _, _ = inputs
    for made in (policy_model_actor(PolicyModelActor)(), reference_model_actor(PolicyModelActor)()):
        made.actor.model = Bypassing()
        with pytest.raises(RuntimeError, match="did not happen"):
            made.forward(**kwargs)


def test_the_training_step_has_ratio_1_and_a_gradient_of_the_density(inputs: tuple) -> None:
    kwargs, mask, records = inputs
    actor = policy_model_actor(PolicyModelActor)()
    batch, given = experience(kwargs, actor.forward(**kwargs)), []

    def loss(log_probs: Tensor, old: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        given.append(log_probs.detach())
        return -((log_probs - old).exp() * action_mask).sum()

    result = our_training_step(actor.actor, loss, training_step, batch)
    assert result["metrics"]["perturbation/ratio_mean"].item() == 1.0
    got = actor.actor.model.head.weight.grad.clone()
    model = Language()
    new, _ = run(model, PERTURBATION, kwargs["sequences"], mask, records, temperature=TEMPERATURE)
    (-(new[:, :-1] * kwargs["action_mask"]).sum()).backward()
    torch.testing.assert_close(got, model.head.weight.grad)
    assert got.abs().max() > 1e-3
    torch.testing.assert_close(given[0], new[:, :-1].detach() * kwargs["action_mask"])
    with torch.no_grad():
        actor.actor.model.head.weight += 0.1 * torch.randn(got.shape, generator=generator())
    moved = our_training_step(actor.actor, loss, training_step, batch)
    assert abs(moved["metrics"]["perturbation/ratio_mean"].item() - 1.0) > 1e-4


@pytest.mark.parametrize("gap", [300.0, -300.0, 2e38])
def test_the_mean_ratio_is_finite(inputs: tuple, gap: float) -> None:
    kwargs, _, _ = inputs
    batch = experience(kwargs, torch.full(kwargs["action_mask"].shape, -gap))
    loss = lambda log_probs, *_, action_mask: log_probs.sum()  # noqa: E731
    result = our_training_step(Actor(), loss, training_step, batch)
    mean = result["metrics"]["perturbation/ratio_mean"]
    assert mean.isfinite() and (mean > 1e8 if gap > 0 else mean < 1e-8)
