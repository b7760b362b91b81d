# SPDX-License-Identifier: Apache-2.0
"""Scores of densities where the logits of trainer and rollout differ, and where a baseline is free."""

import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from perturbations import available, create
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import get
from perturbations.step import Step
from perturbations.testing.log_density import replayed
from perturbations.testing.proposal import with_hidden
from tests.support.score_error import KINDS, SIZES, mismatch, relative_error, rows, steps

# --- rounding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["soft", "token"])
def test_the_score_of_a_drawn_vector_is_not_drowned(base: str, kind: str) -> None:
    """At D = 2,048 and logits that differ by 0.1 what is left is that the trainer's own logits differ."""
    step, head = steps(SIZES[-1])
    difference = mismatch(kind, 0.1, head)
    perturbation = create("gaussian", density="gaussian", base=base)
    if base == "token":  # its score is in the embedding alone
        replayed_step = replayed(step, perturbation.propose(step), step.logits + difference)
        assert not perturbation.log_density(replayed_step).requires_grad
        return
    assert relative_error(perturbation, perturbation.log_density, step, difference) <= 0.2


@pytest.mark.more
def test_no_density_is_drowned_and_differences_are() -> None:
    """At 0.1 a threshold on the policy's own probability moves a candidate in or out: at most a third of the score."""
    errors_by_label = dict(rows(SIZES[0]))
    assert len(errors_by_label) == 14
    at_003 = slice(0, len(KINDS))
    at_01 = slice(len(KINDS), 2 * len(KINDS))
    for label, errors in errors_by_label.items():
        if "difference" not in label:
            assert max(errors[at_003]) <= 0.2, (label, errors)
            assert max(errors[at_01]) <= 0.35, (label, errors)
    assert min(errors_by_label["gaussian density=gaussian as a difference"]) > 1.0
    assert min(errors_by_label["normal density=normal as a difference"][at_01]) > 0.5
    assert min(errors_by_label["gumbel density=gumbel as a difference"]) > 0.5


# --- the mean of the score --------------------------------------------------------------------------

_DISTRIBUTIONS = 8
_DRAWS = 3000  # from each distribution
_VOCABULARY = 12
_BOUND = 0.02
"""Of the mean score over its root mean square. SofT-GRPO's clamp alone gives 0.003; what is no log-density, 0.04."""


def step_of(deviation: float) -> Step:
    """Each of a few distributions many times over, a token drawn from each."""
    generator = torch.Generator().manual_seed(2)
    distributions = deviation * torch.randn(_DISTRIBUTIONS, _VOCABULARY, generator=generator)
    logits = distributions.repeat_interleave(_DRAWS, dim=0)
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).squeeze(-1)
    matrix = torch.randn(_VOCABULARY, 4, generator=generator)
    rows = len(logits)
    return Step(
        logits=logits,
        sampled=sampled,
        temperature=torch.ones(rows),
        seeds=torch.full((rows,), 5),
        positions=torch.arange(rows),
        embeddings=matrix_embeddings(matrix),
    )


def mean_score(perturbation: Perturbation, deviation: float) -> float:
    """‖E[∇ entry]‖ over the root mean square of ∇ entry, both in the logits, without what the sample's size adds."""
    step = step_of(deviation)
    if perturbation.reads_hidden:
        step = with_hidden(step, perturbation.module(64))
    proposal = perturbation.propose(step)
    logits = step.logits.clone().requires_grad_()
    entry = torch.log_softmax(logits, dim=-1).gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
    if perturbation.has_density:
        density = perturbation.log_density(replayed(step, proposal, logits))
        entry = density + entry if perturbation.draws_token else density
    gradient = torch.autograd.grad(entry.sum(), logits, allow_unused=True)[0]
    scores: Tensor = gradient.view(_DISTRIBUTIONS, _DRAWS, -1)
    mean_square = scores.square().sum() / _DRAWS
    square_of_mean = scores.mean(1).square().sum()
    without_sampling_error = (square_of_mean - mean_square / _DRAWS).clamp_min(0.0)
    return without_sampling_error.div(mean_square).sqrt().item()


def cases() -> list[Any]:
    """Every perturbation of the tree with every density, and other texts of N-GRPO, its release and STHT."""
    arms: list[tuple[str, dict[str, Any]]] = [
        ("neighbor", {"variant": "released", "space": "input"}),
        ("gaussian", {"base": "fuzzy"}),
        ("orthogonal", {"realization": "anchor"}),
        ("gumbel", {"density": "exact", "tau": 0.01, "top_p": 1.0}),
    ]
    for name, source in available().items():
        if source.startswith("perturbations.methods") and name not in ("none", "hrpo"):
            for density in _densities(name):
                arms.append((name, {} if density == "token" else {"density": density}))
    parameters = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, options in arms:
            has_k = any(option.name == "k" for option in fields(get(name)))
            k = {"k": 3} if has_k else {}
            label = "-".join([name, *map(str, options.values())])
            parameters.append(pytest.param(create(name, rate=1.0, **k, **options), id=label))
    return parameters


def _densities(name: str) -> tuple[str, ...]:
    """The choices of a perturbation's option ``density``."""
    for option in fields(get(name)):
        if option.name == "density":
            return option.metadata["choices"]
    return ("token",)


@pytest.mark.parametrize("perturbation", cases())
def test_which_scores_have_mean_0(perturbation: Perturbation) -> None:
    """What a perturbation says of its entry, measured for flat, ordinary and peaked distributions."""
    means = [mean_score(perturbation, deviation) for deviation in (0.7, 1.5, 3.0)]
    print([f"{mean:.3f}" for mean in means])
    assert (max(means) <= _BOUND) == perturbation.zero_mean_score, means
