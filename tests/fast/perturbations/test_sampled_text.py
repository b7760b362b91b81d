# SPDX-License-Identifier: Apache-2.0
"""Whether a perturbation's text is drawn from softmax(z / τ), which importance weights of a schedule need."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

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

# Every perturbation, and both values of the options that decide.
CASES: list[tuple[dict[str, Any], bool]] = [
    ({"name": "none"}, True),
    ({"name": "soft"}, True),
    ({"name": "moi"}, True),
    ({"name": "selar"}, True),
    ({"name": "hrpo"}, True),
    ({"name": "tarpo", "density": "token"}, True),
    ({"name": "multiplex"}, True),
    ({"name": "gaussian"}, True),
    ({"name": "gaussian", "base": "soft"}, True),
    ({"name": "gaussian", "base": "fuzzy"}, False),
    ({"name": "orthogonal"}, True),
    ({"name": "orthogonal", "realization": "anchor"}, False),
    ({"name": "neighbor"}, False),
    ({"name": "neighbor", "variant": "released"}, True),
    ({"name": "gumbel"}, False),
    ({"name": "gumbel", "clamp": False}, False),
    ({"name": "cuts"}, False),
    ({"name": "dirichlet"}, False),
    ({"name": "normal"}, False),
    ({"name": "lepo"}, False),
    ({"name": "latent"}, False),
]
IDS = ["-".join(map(str, spec.values())) for spec, _ in CASES]
N, V = 40_000, 48


def made(spec: dict[str, Any]) -> Perturbation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return create(**spec)


def test_every_perturbation_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    assert {spec["name"] for spec, _ in CASES} == in_tree


@pytest.mark.parametrize(("spec", "sampled"), CASES, ids=IDS)
def test_weights_have_the_mean_1_where_the_text_is_sampled_and_nowhere_else(
    spec: dict[str, Any], sampled: bool
) -> None:
    """E[π / π_rollout] over tokens drawn from π_rollout is 1, by Monte Carlo at a temperature of 1.5.

    The text, as `propose` writes it from logits at that temperature, and log-probabilities as they are recorded.
    """
    perturbation = made(spec)
    assert perturbation.samples_text == sampled
    generator = torch.Generator().manual_seed(4)
    embeddings = matrix_embeddings(torch.randn(V, 8, generator=generator))
    z = (1.5 * torch.randn(V, generator=generator)).expand(N, V).contiguous()
    seeds, rows = torch.full((N,), 11), torch.arange(N)
    ead = sampling_schedules.create("ead", c=0, tau_max=1.5, d_0=1e6)
    factor = ead.factor(NextTokens(z, torch.ones(N), torch.zeros(N, dtype=torch.int64), torch.zeros_like(rows)))
    assert factor[0].item() == pytest.approx(1.5)
    scaled = z / factor.unsqueeze(-1)
    rollout = torch.log_softmax(scaled, dim=-1)
    keys = streams.keys(seeds, rows, streams.Stream.TOKEN)
    drawn = (rollout - streams.exponential(keys, torch.arange(V)).log()).argmax(dim=-1)
    step = Step(scaled, drawn, factor, seeds, rows, embeddings)
    if perturbation.reads_hidden:
        step = with_hidden(step, perturbation.module(8))
    tokens = perturbation.propose(step).tokens.unsqueeze(-1)
    weights = (torch.log_softmax(z, dim=-1).gather(-1, tokens) - rollout.gather(-1, tokens)).exp().double()
    away = abs(weights.mean().item() - 1.0) / (weights.std().item() / N**0.5 + 1e-9)
    print(spec, f"mean weight {weights.mean().item():.3f}, {away:.1f} standard errors from 1")
    assert away < 4.0 if sampled else away > 12.0


@dataclass(frozen=True, kw_only=True)
class Liar(Perturbation):
    """Writes the likeliest token and says that it is the sampled one."""

    name = "liar"

    def propose(self, step: Step) -> Proposal:
        likeliest = step.logits.argmax(dim=-1)
        return Proposal(InputEdit(likeliest.unsqueeze(-1), torch.ones(len(likeliest), 1)), likeliest)

    @property
    def samples_text(self) -> bool:
        return True


def test_the_conformance_suite_sees_a_text_that_is_not_sampled() -> None:
    with pytest.raises(PerturbationError, match=r"samples_text is True, but another token .* Return step\.sampled"):
        check_perturbation(Liar)


# --- the rules -------------------------------------------------------------------------------------------------


def check(spec: dict[str, Any]) -> None:
    asked = sampling_schedules.create("ead")
    settings = run_of(sampling_schedule=asked.spec(), perturbation=made(spec).spec())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check_pairs(Flags().with_defaults(asked.flags(Flags())).argv, settings)


def test_the_refusal_names_the_option_under_which_the_text_is_sampled() -> None:
    for spec, option in (
        ({"name": "neighbor"}, "realization sampled"),
        ({"name": "orthogonal", "realization": "anchor"}, "realization sampled"),
        ({"name": "gaussian", "base": "fuzzy"}, "base soft"),
    ):
        with pytest.raises(UsageError, match=rf"\(its text is sampled with .*--perturbation\.{option}"):
            check(spec)
    with pytest.raises(UsageError, match=r"^((?!its text is sampled).)*sample the text, leave one of them out"):
        check({"name": "latent"})
    check({"name": "latent", "rate": 0.0})
