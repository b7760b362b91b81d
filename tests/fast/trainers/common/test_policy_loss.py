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
from ngrpo.config.run_notes import kl_notes, loss_notes
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


def perturbation_of(name: str, **options: Any) -> Perturbation:
    """A perturbation without the warnings that its options give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return create(name, **options)


def run_settings(perturbation: Perturbation, **settings: Any) -> RunConfig:
    return run_of(perturbation=perturbation.spec(), **settings)


# --- advantages and scores --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(advantages.available()))
def test_which_advantages_sum_to_zero(name: str) -> None:
    """What a class says of its advantages, for groups with none, one, some and all right."""
    advantage = advantages.create(name)
    rewards = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ]
    )
    counts = torch.arange(32.0).view(4, 8)
    pairs = torch.stack([-1.0 - counts, 1.0 + counts], dim=-1)
    further_inputs = {"counts": counts, "values": counts / 32.0, "log_probs": pairs, "hidden": pairs}

    computed = advantage.compute(rewards, further_inputs.get(advantage.needs))

    largest_sum = computed.sum(-1).abs().max().item()
    assert (largest_sum < 1e-4) == advantage.sums_to_zero


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ("--algo.kl.use_loss", True),
        ("--algo.kl.use_loss --algo.kl.estimator k3", False),
        ("--algo.kl.use_loss --algo.kl.unbiased_gradient", False),
        ("--algo.kl.use_loss --algo.kl.init_coef 0", False),
        ("--algo.kl.init_coef 0.01", False),
    ],
)
def test_a_kl_loss_whose_mean_gradient_is_0_is_warned_of(words: str, warns: bool) -> None:
    complete = CompleteRun(run=run_of(), flags=Flags([*MODEL, *words.split()]))
    assert len(list(kl_notes(complete))) == warns


def test_the_mean_gradient_of_k1_is_0_and_that_of_k3_is_not() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    log_probs = logits.log_softmax(-1)
    log_ratio = log_probs - torch.tensor([-1.0, 0.0, 1.0]).log_softmax(-1)
    estimates = {"k1": log_ratio, "k3": (-log_ratio).exp() - 1.0 + log_ratio}
    probabilities = log_probs.detach().exp()
    for name, values in estimates.items():
        (gradient,) = torch.autograd.grad((probabilities * values).sum(), logits, retain_graph=True)
        assert (gradient.abs().max() < 1e-6) == (name == "k1")


LATENT = perturbation_of("latent", density="latent")


def advantage_notes(perturbation: Perturbation, words: list[str], methods: dict[str, Any]) -> list[str]:
    """The notes on the loss of a run with this perturbation, OpenRLHF's flags ``words`` and these methods."""
    run = run_settings(perturbation, **methods)
    return list(loss_notes(CompleteRun(run=run, flags=Flags([*MODEL, *words]))))


@pytest.mark.parametrize(
    ("perturbation", "words", "methods", "named"),
    [
        (LATENT, GROUPS, {"advantage": {"name": "nsr"}}, "--advantage nsr"),
        (LATENT, GROUPS, {"credit": {"name": "first_token"}}, "--credit first_token"),
        (LATENT, ["--algo.advantage.estimator", "reinforce"], {}, "--algo.advantage.estimator reinforce"),
        (perturbation_of("neighbor"), GROUPS, {"advantage": {"name": "psr"}}, "--advantage psr"),
    ],
)
def test_a_score_with_a_mean_and_advantages_with_a_sum_are_warned_of(
    perturbation: Perturbation, words: list[str], methods: dict[str, Any], named: str
) -> None:
    (note,) = advantage_notes(perturbation, words, methods)
    assert note.startswith(f"--perturbation {perturbation.spec()['name']}")
    assert f"The advantages of {named} do not sum to zero" in note


@pytest.mark.parametrize(
    ("perturbation", "words", "methods"),
    [
        pytest.param(LATENT, GROUPS, {"advantage": {"name": "pass_at_k"}}, id="advantages that sum to zero"),
        pytest.param(LATENT, GROUPS, {"credit": {"name": "top_entropy"}}, id="a credit that keeps the sum"),
        pytest.param(
            perturbation_of("latent", density="exact"), GROUPS, {"advantage": {"name": "nsr"}}, id="an exact density"
        ),
        pytest.param(perturbation_of("soft"), [], {"advantage": {"name": "psr"}}, id="no score"),
    ],
)
def test_a_score_without_a_mean_or_advantages_without_a_sum_are_not_warned_of(
    perturbation: Perturbation, words: list[str], methods: dict[str, Any]
) -> None:
    assert advantage_notes(perturbation, words, methods) == []


# --- rollouts of another policy ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(policy_noises.available()))
def test_a_density_that_counts_by_its_score_refuses_noisy_rollouts(name: str) -> None:
    noise = {"policy_noise": {"name": name}}
    flags = [*MODEL, "--algo.advantage.is_correction_level", "token"]
    gaussian = perturbation_of("gaussian", base="soft", density="gaussian")
    normal = perturbation_of("normal", density="normal")
    for perturbation in (gaussian, normal):
        with pytest.raises(UsageError, match=r"cannot be used with the density.*too narrow"):
            check_pairs(flags, run_settings(perturbation, **noise))


@pytest.mark.parametrize("name", sorted(policy_noises.available()))
def test_noisy_rollouts_without_a_density_are_allowed(name: str) -> None:
    without_density = run_settings(perturbation_of("gaussian", base="soft"), policy_noise={"name": name})
    check_pairs([*MODEL, "--algo.advantage.is_correction_level", "off"], without_density)


# --- the KL term ------------------------------------------------------------------------------------


def test_the_kl_term_needs_a_token() -> None:
    fuzzy = run_settings(perturbation_of("gaussian", base="fuzzy", density="gaussian"))
    for words in ([], ["--algo.kl.init_coef", "0.001"]):
        with pytest.raises(UsageError, match=r"--algo\.kl\.init_coef 0\.0\d+.* cannot be used with the density"):
            check_pairs([*MODEL, *words, *ONE_UPDATE], fuzzy)
    check_pairs([*MODEL, "--algo.kl.init_coef", "0", *ONE_UPDATE], fuzzy)


@pytest.mark.parametrize(
    "perturbation",
    [
        perturbation_of("gaussian", base="soft", density="gaussian"),
        perturbation_of("gumbel", density="gumbel"),
    ],
    ids=["gaussian", "gumbel"],
)
def test_the_kl_term_goes_with_a_density_beside_a_token(perturbation: Perturbation) -> None:
    check_pairs([*MODEL, *ONE_UPDATE], run_settings(perturbation))


def head_gradients(monkeypatch: pytest.MonkeyPatch, perturbation: Perturbation) -> tuple[Tensor, Tensor]:
    """Gradients to the head of a k3 term, and of a policy loss with A = 1, in one training step."""
    run_with(monkeypatch, perturbation=perturbation.spec())
    tokens, mask, records = batch(perturbation)
    records[1] = records[0].truncate(5)
    action_mask = mask.clone()[:, 1:]
    action_mask[:, :4] = 0
    trajectories = [FinishedTrajectory(record, np.zeros(record.num_tokens, np.float32)) for record in records]
    experience = SimpleNamespace(
        sequences=tokens,
        action_mask=action_mask,
        attention_mask=mask,
        mm_train_inputs=[trajectory.pack() for trajectory in trajectories],
        advantages=torch.ones(action_mask.shape),
    )
    gradients: list[Tensor] = []

    def training_step(self: Any, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        weight = self.actor.model.head.weight
        log_probs = self.actor(experience.sequences, experience.action_mask, experience.attention_mask)
        difference = log_probs - 0.9 * log_probs.detach()
        k3 = ((-difference).exp() - 1.0 + difference) * experience.action_mask
        loss = self.actor_loss_fn(log_probs, log_probs.detach(), None, action_mask=experience.action_mask)
        gradients.extend(torch.autograd.grad(k3.sum(), weight, retain_graph=True))
        gradients.extend(torch.autograd.grad(loss, weight))
        return {"metrics": {}, "weights": {}}

    def policy_loss(log_probs: Tensor, *_: Any, action_mask: Tensor) -> Tensor:
        return -(log_probs * action_mask).sum()

    actor = policy_model_actor(PolicyModelActor)()
    openrlhf_doubles.training_step(actor.actor, policy_loss, training_step, experience)
    of_kl, of_policy = gradients
    return of_kl, of_policy


def test_the_kl_term_is_the_tokens_in_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a vector's density as without it; the policy loss has the density's score."""
    without_density = perturbation_of("gaussian", base="soft", k=5)
    with_density = perturbation_of("gaussian", base="soft", k=5, density="gaussian")
    kl_of_tokens, policy_of_tokens = head_gradients(monkeypatch, without_density)
    kl_beside_density, policy_with_density = head_gradients(monkeypatch, with_density)
    torch.testing.assert_close(kl_beside_density, kl_of_tokens)
    assert kl_of_tokens.abs().max() > 1e-3
    assert (policy_with_density - policy_of_tokens).abs().max() > 0.1


def test_a_score_that_no_loss_takes_is_an_error() -> None:
    perturbation = perturbation_of("gaussian", base="soft", density="gaussian", k=5)
    model = Model()
    tokens, mask, records = batch(perturbation)
    scope = ReplayScope(model.embedding, perturbation=perturbation)
    with pytest.raises(RuntimeError, match="reached no policy loss"), scope(records, mask), densities(scope, 1.0):
        hooked(model(tokens), torch.roll(tokens, -1, 1))


# --- frozen parts -----------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding, a layer and a head, which may share the embedding's matrix."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize(
    ("part", "tied", "frozen"),
    [
        ("none", False, set()),
        ("embedding", False, {"embedding"}),
        ("head", False, {"head"}),
        ("both", False, {"embedding", "head"}),
        ("none", True, set()),
        ("embedding", True, {"embedding", "head"}),
        ("head", True, {"embedding", "head"}),
        ("both", True, {"embedding", "head"}),
    ],
)
def test_freezing(part: str, tied: bool, frozen: set[str]) -> None:
    """A tied head is the embedding's matrix, and is frozen with it."""
    model = Tied(tied)
    freeze(model, perturbation_of("soft", freeze=part))
    assert model.embedding.weight.requires_grad == ("embedding" not in frozen)
    assert model.head.weight.requires_grad == ("head" not in frozen)
    assert model.layer.weight.requires_grad
