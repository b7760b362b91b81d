# SPDX-License-Identifier: Apache-2.0
"""A perturbation's entry in the loss: refusals, warnings, the KL term, and frozen parts."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.run import RunConfig
from ngrpo.config.run_notes import loss_notes
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages, policy_noises
from ngrpo.trainers.common.log_probs import densities
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from perturbations import FinishedTrajectory, Perturbation, UsageError, create
from perturbations.parameters import freeze
from perturbations.replay.scope import ReplayScope
from tests.support import openrlhf_doubles
from tests.support.density_model import Model, batch, hooked
from tests.support.policy_actor import PolicyModelActor
from tests.support.run import check_pairs, run_of, run_with

MODEL = ["--actor.model_name_or_path", "m"]
ONE_UPDATE = ["--rollout.batch_size", "4", "--train.batch_size", "32"]
GROUPS = ["--algo.advantage.estimator", "group_norm"]


def made(name: str, **options: Any) -> Perturbation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return create(name, **options)


def settings(perturbation: Perturbation, **parts: Any) -> RunConfig:
    return run_of(perturbation=perturbation.spec(), **parts)


# --- advantages and scores --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(advantages.available()))
def test_which_advantages_sum_to_zero(name: str) -> None:
    """What a class says of its advantages, for groups with none, one, some and all right."""
    advantage = advantages.create(name)
    rewards = torch.tensor([[0.0] * 8, [1.0] + [0.0] * 7, [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1.0] * 8])
    counts = torch.arange(32.0).view(4, 8)
    pairs = torch.stack([-1.0 - counts, 1.0 + counts], dim=-1)
    further = {"counts": counts, "values": counts / 32.0, "log_probs": pairs, "hidden": pairs}.get(advantage.needs)
    sums = advantage.compute(rewards, further).sum(-1).abs()
    assert (sums.max().item() < 1e-4) == advantage.sums_to_zero, sums


LATENT = made("latent", density="latent")


@pytest.mark.parametrize(
    ("perturbation", "words", "parts", "named"),
    [
        (LATENT, GROUPS, {"advantage": {"name": "nsr"}}, "--advantage nsr"),
        (LATENT, GROUPS, {"credit": {"name": "first_token"}}, "--credit first_token"),
        (LATENT, ["--algo.advantage.estimator", "reinforce"], {}, "--algo.advantage.estimator reinforce"),
        (made("neighbor"), GROUPS, {"advantage": {"name": "psr"}}, "--advantage psr"),
        (LATENT, GROUPS, {"advantage": {"name": "pass_at_k"}}, None),
        (LATENT, GROUPS, {"credit": {"name": "top_entropy"}}, None),
        (made("latent", density="exact"), GROUPS, {"advantage": {"name": "nsr"}}, None),
        (made("soft"), [], {"advantage": {"name": "psr"}}, None),
    ],
)
def test_a_score_with_a_mean_and_advantages_with_a_sum_are_warned_of(
    perturbation: Perturbation, words: list[str], parts: dict, named: str | None
) -> None:
    run = settings(perturbation, **parts)
    found = [*loss_notes(CompleteRun(run=run, flags=Flags([*MODEL, *words])))]
    assert len(found) == (named is not None)
    for note in found:
        assert note.startswith(f"--perturbation {run.spec['name']}")
        assert f"The advantages of {named} do not sum to zero" in note


# --- rollouts of another policy ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(policy_noises.available()))
def test_a_density_that_counts_by_its_score_refuses_noisy_rollouts(name: str) -> None:
    noisy = {"policy_noise": {"name": name}}
    for perturbation in (made("gaussian", base="soft", density="gaussian"), made("normal", density="normal")):
        with pytest.raises(UsageError, match=r"cannot be used with the density.*too narrow"):
            check_pairs([*MODEL, "--algo.advantage.is_correction_level", "token"], settings(perturbation, **noisy))
    plain = settings(made("gaussian", base="soft"), **noisy)
    check_pairs([*MODEL, "--algo.advantage.is_correction_level", "off"], plain)


# --- the KL term ------------------------------------------------------------------------------------


def test_kl_needs_a_token() -> None:
    fuzzy = settings(made("gaussian", base="fuzzy", density="gaussian"))
    for words in ([], ["--algo.kl.init_coef", "0.001"]):
        with pytest.raises(UsageError, match=r"--algo\.kl\.init_coef 0\.0\d+.* cannot be used with the density"):
            check_pairs([*MODEL, *words, *ONE_UPDATE], fuzzy)
    check_pairs([*MODEL, "--algo.kl.init_coef", "0", *ONE_UPDATE], fuzzy)
    for other in (made("gaussian", base="soft", density="gaussian"), made("gumbel", density="gumbel")):
        check_pairs([*MODEL, *ONE_UPDATE], settings(other))


def kl_gradient(monkeypatch: pytest.MonkeyPatch, perturbation: Perturbation) -> tuple[Tensor, Tensor]:
    """Gradients to the head of a k3 term, and of a policy loss with A = 1, in one training step."""
    run_with(monkeypatch, perturbation=perturbation.spec())
    tokens, mask, records = batch(perturbation)
    records[1] = records[0].truncate(5)
    action = mask.clone()[:, 1:]
    action[:, :4] = 0
    actor, found = policy_model_actor(PolicyModelActor)(), {}

    def training_step(self: Any, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        weight = self.actor.model.head.weight
        log_probs = self.actor(experience.sequences, experience.action_mask, experience.attention_mask)
        gap = log_probs - 0.9 * log_probs.detach()
        k3 = ((-gap).exp() - 1.0 + gap) * experience.action_mask
        loss = self.actor_loss_fn(log_probs, log_probs.detach(), None, action_mask=experience.action_mask)
        for name, part in (("kl", k3.sum()), ("policy", loss)):
            found[name] = torch.autograd.grad(part, weight, retain_graph=True)[0]
        return {"metrics": {}, "weights": {}}

    side = [FinishedTrajectory(r, np.zeros(r.num_tokens, np.float32)).pack() for r in records]
    experience = SimpleNamespace(sequences=tokens, action_mask=action, attention_mask=mask, mm_train_inputs=side)
    experience.advantages = torch.ones(action.shape)

    def policy_loss(log_probs: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        return -(log_probs * action_mask).sum()

    openrlhf_doubles.training_step(actor.actor, policy_loss, training_step, experience)
    return found["kl"], found["policy"]


def test_the_kl_term_is_the_tokens_in_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a vector's density as without it; the policy loss has the density's score."""
    tokens, plain = kl_gradient(monkeypatch, made("gaussian", base="soft", k=5))
    beside, scored = kl_gradient(monkeypatch, made("gaussian", base="soft", k=5, density="gaussian"))
    torch.testing.assert_close(beside, tokens)
    assert tokens.abs().max() > 1e-3 and (scored - plain).abs().max() > 0.1


def test_a_score_that_no_loss_takes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    perturbation, model = made("gaussian", base="soft", density="gaussian", k=5), Model()
    tokens, mask, records = batch(perturbation)
    scope = ReplayScope(model.embedding, perturbation=perturbation)
    with pytest.raises(RuntimeError, match="reached no policy loss"), scope(records, mask), densities(scope, 1.0):
        hooked(model(tokens), torch.roll(tokens, -1, 1))


# --- frozen parts -----------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding, a layer and a head, which may share the embedding's matrix."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("part", ["none", "embedding", "head", "both"])
def test_freezing(part: str, tied: bool) -> None:
    model = Tied(tied)
    freeze(model, made("soft", freeze=part))
    embedding = part in ("embedding", "both") or (tied and part == "head")
    head = part in ("head", "both") or (tied and part == "embedding")
    assert model.embedding.weight.requires_grad != embedding and model.head.weight.requires_grad != head
    assert model.layer.weight.requires_grad
