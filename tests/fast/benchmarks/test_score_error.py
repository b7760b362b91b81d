# SPDX-License-Identifier: Apache-2.0
"""Scores of densities where the logits of trainer and rollout differ, and where a baseline is free."""

import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.score_error import KINDS, MISMATCHES, SIZES, mismatch, relative_error, rows, steps
from perturbations import available, create
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import get
from perturbations.step import Step
from perturbations.testing.proposal import replayed, with_hidden

# --- rounding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["soft", "token"])
def test_the_score_of_a_drawn_vector_is_not_drowned(base: str, kind: str) -> None:
    """At D = 2,048 and logits that differ by 0.1 what is left is that the trainer's own logits differ."""
    step, head = steps(SIZES[-1])
    perturbation = create("gaussian", density="gaussian", base=base)
    if base == "token":  # its score is in the embedding alone
        seen = replayed(step, perturbation.propose(step), step.logits + mismatch(kind, 0.1, head))
        assert not perturbation.log_density(seen).requires_grad
        return
    assert relative_error(perturbation, perturbation.log_density, step, mismatch(kind, 0.1, head)) <= 0.2


@pytest.mark.more
def test_no_density_is_drowned_and_differences_are() -> None:
    """At 0.1 a threshold on the policy's own probability moves a candidate in or out: at most a third of the score."""
    found = dict(rows(SIZES[0]))
    assert len(found) == 14
    small, large = (slice(2 * i, 2 * i + 2) for i in range(len(MISMATCHES)))
    for label, errors in found.items():
        if "difference" not in label:
            assert max(errors[small]) <= 0.2 and max(errors[large]) <= 0.35, (label, errors)
    assert min(found["gaussian density=gaussian as a difference"]) > 1.0
    assert min(found["normal density=normal as a difference"][large]) > 0.5
    assert min(found["gumbel density=gumbel as a difference"]) > 0.5


# --- the mean of the score --------------------------------------------------------------------------

_DRAWS, _VOCABULARY, _VECTORS = 3000, 12, 8
_BOUND = 0.02
"""Of the mean score over its root mean square. SofT-GRPO's clamp alone gives 0.003; what is no log-density, 0.04."""


def step_of(deviation: float) -> Step:
    """Each of a few distributions many times over, a token drawn from each."""
    drawn = torch.Generator().manual_seed(2)
    logits = (deviation * torch.randn(_VECTORS, _VOCABULARY, generator=drawn)).repeat_interleave(_DRAWS, dim=0)
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=drawn).squeeze(-1)
    matrix = torch.randn(_VOCABULARY, 4, generator=drawn)
    count, positions = len(logits), torch.arange(len(logits))
    return Step(logits, sampled, torch.ones(count), torch.full((count,), 5), positions, matrix_embeddings(matrix))


def mean_score(perturbation: Perturbation, deviation: float) -> float:
    """‖E[∇ entry]‖ over the root mean square of ∇ entry, both in the logits, without what the sample's size adds."""
    step = step_of(deviation)
    if perturbation.reads_hidden:
        step = with_hidden(step, perturbation.module(8))
    proposal = perturbation.propose(step)
    logits = step.logits.clone().requires_grad_()
    entry = torch.log_softmax(logits, dim=-1).gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
    if perturbation.has_density:
        density = perturbation.log_density(replayed(step, proposal, logits))
        entry = density + entry if perturbation.draws_token else density
    scores: Tensor = torch.autograd.grad(entry.sum(), logits, allow_unused=True)[0].view(_VECTORS, _DRAWS, -1)
    mean, square = scores.mean(1).square().sum(), scores.square().sum() / _DRAWS
    return (mean - square / _DRAWS).clamp_min(0.0).div(square).sqrt().item()


def cases() -> list[Any]:
    """Every perturbation of the tree with every density, and other texts of N-GRPO, its release and STHT."""
    made, others = [], [("neighbor", {"variant": "released", "space": "input"}), ("gaussian", {"base": "fuzzy"})]
    others += [("orthogonal", {"realization": "anchor"}), ("gumbel", {"density": "exact", "tau": 0.01, "top_p": 1.0})]
    for name, source in available().items():
        if source.startswith("perturbations.methods") and name not in ("none", "hrpo"):
            choices = next((f.metadata["choices"] for f in fields(get(name)) if f.name == "density"), ("token",))
            others += [(name, {} if density == "token" else {"density": density}) for density in choices]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, options in others:
            k = {"k": 3} if any(f.name == "k" for f in fields(get(name))) else {}
            label = "-".join([name, *map(str, options.values())])
            made.append(pytest.param(create(name, rate=1.0, **k, **options), id=label))
    return made


@pytest.mark.parametrize("perturbation", cases())
def test_which_scores_have_mean_0(perturbation: Perturbation) -> None:
    """What a perturbation says of its entry, measured for flat, ordinary and peaked distributions."""
    found = [mean_score(perturbation, deviation) for deviation in (0.7, 1.5, 3.0)]
    print([f"{each:.3f}" for each in found])
    assert (max(found) <= _BOUND) == perturbation.zero_mean_score, found
