# SPDX-License-Identifier: Apache-2.0
"""How far a density's score is off where the logits of trainer and rollout differ, as they do in bfloat16.

The error is its root mean square over that of the score, in the logits, of 256 positions with 4,000 tokens and logits
of deviation 3. The logits differ by 0.03 or 0.1 (their deviation), independently in each logit, or as those of one
hidden state of 16 numbers that is off everywhere. The rows "as a difference" take the noise from what rollout and
trainer computed, and not from the draw.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import create, density
from perturbations.base import Perturbation, Replayed
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.methods.gaussian import Gaussian
from perturbations.step import Step
from perturbations.testing.log_density import replayed

POSITIONS = 256
VOCABULARY = 4000
HIDDEN = 16
SIZES = (576, 2048)  # of embeddings
MISMATCHES = (0.03, 0.1)
KINDS = ("independent", "correlated")
DENSITIES = (
    ("gaussian", {"density": "gaussian", "base": "soft"}),
    ("gumbel", {"density": "gumbel"}),
    ("gumbel", {"density": "exact"}),
    ("dirichlet", {"density": "dirichlet"}),
    ("dirichlet", {"density": "exact"}),
    ("normal", {"density": "normal"}),
    ("multiplex", {"density": "joint"}),
    ("lepo", {"density": "lepo"}),
    ("lepo", {"density": "exact"}),
    ("latent", {"density": "latent"}),
    ("latent", {"density": "exact"}),
)
LogDensity = Callable[[Replayed], Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference(Gaussian):
    """STHT's density with e' rebuilt from the record, and its mean from the trainer's logits."""

    def log_density(self, replayed: Replayed) -> Tensor:
        """log N(e'; h(θ), σ² I)."""
        with torch.no_grad():
            fed = realise(replayed.edit, replayed.lookup, replayed.noise_keys).float()
        ids = replayed.top(self.k)
        weights = torch.softmax(replayed.at(ids) * (replayed.temperature / self.tau), dim=-1)
        mean = (replayed.lookup(ids) * weights.unsqueeze(-1)).sum(dim=-2)
        return density.gaussian(fed, mean, replayed.edit.sigma)


def as_difference(perturbation: Perturbation, step: Step) -> LogDensity | None:
    """The density by what rollout and trainer computed, of the perturbations that take the noise from its draw."""
    if perturbation.name == "gaussian":
        return Difference(base="soft", density="gaussian").log_density

    def shares(replayed: Replayed) -> tuple[Tensor, Tensor]:
        distinct = density.distinct(replayed.edit.ids)
        return density.renormalised(replayed.at(replayed.edit.ids), distinct), distinct

    if perturbation.name == "normal":
        ids, rollout_shares = perturbation.top(step)
        draws = rollout_shares + density.NORMAL_SIGMA * step.normal(ids)
        return lambda replayed: density.normal(draws, *shares(replayed))
    if perturbation.name == "gumbel" and perturbation.density == "gumbel":

        def gumbel_of_scores(replayed: Replayed) -> Tensor:
            log_weights = replayed.edit.weights.clamp_min(1e-38).log()
            scores = perturbation.tau * log_weights + replayed.edit.normalizer.unsqueeze(-1)
            return density.gumbel(scores, *shares(replayed))

        return gumbel_of_scores
    return None


def steps(size: int) -> tuple[Step, Tensor]:
    """The positions of a rollout, with tokens drawn, and the matrix that makes logits of hidden states, (V, 16).

    Args:
        size: of the embeddings.
    """
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5
    embeddings = matrix_embeddings(torch.randn(VOCABULARY, size, generator=generator))
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).squeeze(-1)
    step = Step(
        logits=logits,
        sampled=sampled,
        temperature=torch.ones(POSITIONS),
        seeds=torch.full((POSITIONS,), 11),
        positions=torch.arange(POSITIONS),
        embeddings=embeddings,
    )
    return step, head


def mismatch(kind: str, size: float, head: Tensor) -> Tensor:
    """What is added to the rollout's logits, (N, V), with a deviation of ``size``."""
    generator = torch.Generator().manual_seed(5)
    if kind == "independent":
        return size * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    return (size * head @ torch.randn(HIDDEN, generator=generator)).expand(POSITIONS, VOCABULARY)


def relative_error(perturbation: Perturbation, log_density: LogDensity, step: Step, difference: Tensor) -> float:
    """Root mean square of the score's error over that of the score, in the logits.

    Args:
        perturbation: proposes, and has the true density.
        log_density: whose score is judged.
        step: of the rollout.
        difference: of the trainer's logits to the rollout's, (N, V).
    """
    proposal = perturbation.propose(step)

    def score(trainer_logits: Tensor, of_density: LogDensity) -> Tensor:
        leaf = trainer_logits.clone().requires_grad_()
        return torch.autograd.grad(of_density(replayed(step, proposal, leaf)).sum(), leaf)[0]

    true = score(step.logits, perturbation.log_density)
    error = score(step.logits + difference, log_density) - true
    return (error.norm() / true.norm()).item()


def rows(size: int) -> Iterator[tuple[str, list[float]]]:
    """For embeddings of ``size``: each density, and its error for each mismatch and kind."""
    step, head = steps(size)
    for name, options in DENSITIES:
        perturbation = create(name, **options)
        label = f"{name} density={options['density']}"
        log_densities = {label: perturbation.log_density}
        difference = as_difference(perturbation, step)
        if difference is not None:
            log_densities[f"{label} as a difference"] = difference
        for density_label, log_density in log_densities.items():
            errors = []
            for deviation in MISMATCHES:
                for kind in KINDS:
                    logit_difference = mismatch(kind, deviation, head)
                    errors.append(relative_error(perturbation, log_density, step, logit_difference))
            yield density_label, errors
