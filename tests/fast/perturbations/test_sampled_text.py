# SPDX-License-Identifier: Apache-2.0
"""Whether a perturbation's text is drawn from softmax(z / τ), which importance weights of a schedule need."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import NextTokens
from perturbations import InputEdit, Perturbation, Proposal, Step, available, check_perturbation, streams
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError
from perturbations.registry import create
from perturbations.testing import PerturbationError
from perturbations.testing.proposal import with_hidden
from tests.support.run import check_pairs, run_of

# Every perturbation, with both values of the options that decide.
SAMPLED: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "soft"},
    {"name": "moi"},
    {"name": "selar"},
    {"name": "hrpo"},
    {"name": "tarpo", "density": "token"},
    {"name": "multiplex"},
    {"name": "gaussian"},
    {"name": "gaussian", "base": "soft"},
    {"name": "orthogonal"},
    {"name": "neighbor", "variant": "released"},
]
NOT_SAMPLED: list[dict[str, Any]] = [
    {"name": "gaussian", "base": "fuzzy"},
    {"name": "orthogonal", "realization": "anchor"},
    {"name": "neighbor"},
    {"name": "gumbel"},
    {"name": "gumbel", "clamp": False},
    {"name": "cuts"},
    {"name": "dirichlet"},
    {"name": "normal"},
    {"name": "lepo"},
    {"name": "latent"},
]

N = 40_000
V = 48
TEMPERATURE = 1.5


def spec_id(spec: dict[str, Any]) -> str:
    return "-".join(map(str, spec.values()))


def create_quietly(spec: dict[str, Any]) -> Perturbation:
    """A perturbation without the warning about a greedy text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return create(**spec)


def test_every_perturbation_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    assert {spec["name"] for spec in [*SAMPLED, *NOT_SAMPLED]} == in_tree


def schedule_factor(logits: Tensor) -> Tensor:
    """A sampling schedule's factor, 1.5 at every position."""
    ead = sampling_schedules.create("ead", c=0, tau_max=TEMPERATURE, d_0=1e6)
    zeros = torch.zeros(len(logits), dtype=torch.int64)
    rows = NextTokens(logits=logits, temperature=torch.ones(len(logits)), generated=zeros, step=zeros)
    return ead.factor(rows)


def standard_errors_from_1(perturbation: Perturbation) -> float:
    """How far the mean of π / π_rollout over the tokens in the text is from 1, at a temperature of 1.5.

    The text is as `propose` writes it from logits at that temperature, and log-probabilities as they are recorded.
    """
    generator = torch.Generator().manual_seed(4)
    embeddings = matrix_embeddings(torch.randn(V, 8, generator=generator))
    logits = (1.5 * torch.randn(V, generator=generator)).expand(N, V).contiguous()
    factor = schedule_factor(logits)
    assert factor[0].item() == pytest.approx(TEMPERATURE)

    tempered = logits / factor.unsqueeze(-1)
    rollout_log_probs = torch.log_softmax(tempered, dim=-1)
    seeds = torch.full((N,), 11)
    positions = torch.arange(N)
    keys = streams.keys(seeds, positions, streams.Stream.TOKEN)
    exponentials = streams.exponential(keys, torch.arange(V))
    step = Step(
        logits=tempered,
        sampled=(rollout_log_probs - exponentials.log()).argmax(dim=-1),
        temperature=factor,
        seeds=seeds,
        positions=positions,
        embeddings=embeddings,
    )
    if perturbation.reads_hidden:
        step = with_hidden(step, perturbation.module(64))
    tokens = perturbation.propose(step).tokens.unsqueeze(-1)

    log_probs = torch.log_softmax(logits, dim=-1)
    log_weights = log_probs.gather(-1, tokens) - rollout_log_probs.gather(-1, tokens)
    weights = log_weights.exp().double()
    standard_error = weights.std().item() / N**0.5 + 1e-9
    return abs(weights.mean().item() - 1.0) / standard_error


@pytest.mark.parametrize("spec", SAMPLED, ids=spec_id)
def test_weights_have_the_mean_1_where_the_text_is_sampled(spec: dict[str, Any]) -> None:
    """E[π / π_rollout] over tokens drawn from π_rollout is 1."""
    perturbation = create_quietly(spec)
    assert perturbation.samples_text
    assert standard_errors_from_1(perturbation) < 4.0


@pytest.mark.parametrize("spec", NOT_SAMPLED, ids=spec_id)
def test_weights_have_another_mean_where_the_text_is_not_sampled(spec: dict[str, Any]) -> None:
    perturbation = create_quietly(spec)
    assert not perturbation.samples_text
    assert standard_errors_from_1(perturbation) > 12.0


@dataclass(frozen=True, kw_only=True)
class Liar(Perturbation):
    """Writes the likeliest token and says that it is the sampled one."""

    name = "liar"

    def propose(self, step: Step) -> Proposal:
        likeliest = step.logits.argmax(dim=-1)
        edit = InputEdit(likeliest.unsqueeze(-1), torch.ones(len(likeliest), 1))
        return Proposal(edit, likeliest)

    @property
    def samples_text(self) -> bool:
        return True


def test_the_conformance_suite_sees_a_text_that_is_not_sampled() -> None:
    with pytest.raises(PerturbationError, match=r"samples_text is True, but another token .* Return step\.sampled"):
        check_perturbation(Liar)


# --- the rules -------------------------------------------------------------------------------------------------


def check_with_schedule(spec: dict[str, Any]) -> None:
    """Checks a run of this perturbation and a sampling schedule."""
    schedule = sampling_schedules.create("ead")
    run = run_of(sampling_schedule=schedule.spec(), perturbation=create_quietly(spec).spec())
    flags = Flags().with_defaults(schedule.flags(Flags()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check_pairs(flags.argv, run)


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ({"name": "neighbor"}, "realization sampled"),
        ({"name": "orthogonal", "realization": "anchor"}, "realization sampled"),
        ({"name": "gaussian", "base": "fuzzy"}, "base soft"),
    ],
)
def test_the_refusal_names_the_option_under_which_the_text_is_sampled(spec: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=rf"\(its text is sampled with .*--perturbation\.{option}"):
        check_with_schedule(spec)


def test_the_refusal_of_a_text_that_no_option_samples() -> None:
    with pytest.raises(UsageError, match=r"^((?!its text is sampled).)*sample the text \(a class of your own"):
        check_with_schedule({"name": "latent"})


def test_a_perturbation_that_never_acts_is_not_refused() -> None:
    check_with_schedule({"name": "latent", "rate": 0.0})
