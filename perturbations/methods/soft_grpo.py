# SPDX-License-Identifier: Apache-2.0
"""SofT-GRPO (Zheng and Lee, arXiv 2511.06411): Gumbel noise; Dirichlet and normal noise of its release."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Proposal, Step, UsageError, option, register
from perturbations import density as densities
from perturbations.base import Replayed, density_option, input_gradient_option
from perturbations.top_tokens import TopTokens, winners


@register("gumbel")
@dataclass(frozen=True, kw_only=True)
class Gumbel(TopTokens):
    """Adds Gumbel noise to the log-probabilities of the top-k tokens and feeds their softmax mixture."""

    paper = "SofT-GRPO, arXiv 2511.06411"
    draws_text = True

    tau: float = option(0.1, "temperature of the Gumbel-softmax, τ_g", above=0.0)
    clamp: bool = option(True, "clamp the noise to [-1.5, 3], as the paper does")
    density: str = density_option("SofT-GRPO's density of the noise, or its log-density", "gumbel", "exact")
    input_gradient: str = input_gradient_option("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density == "gumbel" and not self.clamp:
            raise UsageError("perturbation option clamp=False: density='gumbel' needs clamped noise. Take clamp=True.")
        if self.density == "gumbel" and self.tau < 0.1:
            raise UsageError(
                f"perturbation option tau={self.tau:g}: must be at least 0.1 (the default) with density='gumbel':"
                " below, float32 weights cannot hold the noise. Raise it, or take density='token'."
            )

    def propose(self, step: Step) -> Proposal:
        """y_i = log(p_i + 1e-6) + g_i; weights = softmax(y / τ_g); the text takes the largest weight."""
        ids, probabilities = self.top(step)  # (B, k) each
        noise = step.gumbel(ids)
        if self.clamp:
            noise = noise.clamp(*densities.GUMBEL_RANGE)
        noisy_log_p = (probabilities + densities.LOG_FLOOR).log() + noise
        scores = torch.where(probabilities > 0.0, noisy_log_p, -torch.inf)
        weights = torch.softmax(scores / self.tau, dim=-1)
        normalizer = self.tau * torch.logsumexp(scores / self.tau, dim=-1) if self.has_density else None
        return Proposal(InputEdit(ids, weights, normalizer=normalizer), winners(ids, scores))

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with log p_i(θ) > −3 of −g_i(θ) − exp(−g_i(θ)), g_i(θ) = clamp(y_i − log p_i(θ), −1.5, 3).

        A weight below float32's smallest number says only that y is below −5. Then g_i(θ) is −1.5 whatever y was, since
        log p_i(θ) > −3. ``exact`` is Σ_i log P(g_i). Of noise that was clamped, and of the noise of such a weight, only
        a bound is known, and P is then the probability of lying beyond it.
        """
        edit = replayed.edit
        kept = densities.distinct(edit.ids)
        scores = densities.unnormalised(edit.weights, edit.normalizer, self.tau)
        probabilities = densities.renormalised(replayed.at(edit.ids), kept)
        gumbels = replayed.gumbel(edit.ids)
        if self.density == "gumbel":
            return densities.gumbel(scores, probabilities, kept, gumbels)
        low, high = densities.GUMBEL_RANGE if self.clamp else (-math.inf, math.inf)
        noise = scores - (probabilities + densities.LOG_FLOOR).log()
        lost = edit.weights < densities.SMALLEST
        below = (gumbels <= low) | lost
        above = (gumbels >= high) & ~below
        # A lost weight's noise is below its bound. Where that is the upper bound of all noise, it says nothing.
        informative = kept & ~(lost & (noise.detach() >= high))
        return densities.censored_gumbel(noise, below, above, counted=informative)


@register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(TopTokens):
    """Feeds the top-k tokens mixed with weights drawn from Dirichlet(α p)."""

    paper = "SofT-GRPO (release), arXiv 2511.06411"
    draws_text = True

    alpha: float = option(1.0, "concentration α: the larger, the closer to the probabilities", above=0.0)
    density: str = density_option("the release's density of the draws, or that of the weights", "dirichlet", "exact")
    input_gradient: str = input_gradient_option("none")

    @property
    def zero_mean_score(self) -> bool:
        return self.density == "exact"  # the release's density is clamped, and leaves unlikely candidates out

    def propose(self, step: Step) -> Proposal:
        """γ_i ~ Gamma(α p_i, 1); weights = γ / Σγ; the text takes the largest weight."""
        ids, probabilities = self.top(step)
        shape = (self.alpha * probabilities).clamp_min(1e-20)
        log_draws = torch.where(probabilities > 0.0, step.log_gamma(ids, shape), -torch.inf)
        normalizer = torch.logsumexp(log_draws, dim=-1) if self.density == "dirichlet" else None
        weights = torch.softmax(log_draws, dim=-1)
        return Proposal(InputEdit(ids, weights, normalizer=normalizer), winners(ids, log_draws))

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with p_i(θ) > 0.05 of the Gamma(α p_i(θ), 1) log-density of γ_i, clamped to [−5, 3].

        A weight below float32's smallest number does not say what γ was, but γ was so small that its term is clamped.
        ``exact`` is log Dirichlet(w; α p(θ)), the log-density of the weights.
        """
        edit = replayed.edit
        kept = densities.distinct(edit.ids)
        probabilities = densities.renormalised(replayed.at(edit.ids), kept)
        if self.density == "exact":
            return densities.dirichlet_weights(edit.weights, probabilities, self.alpha, kept)
        log_draws = densities.unnormalised(edit.weights, edit.normalizer)
        return densities.dirichlet(log_draws, probabilities, self.alpha, kept)


@register("normal")
@dataclass(frozen=True, kw_only=True)
class Normal(TopTokens):
    """Feeds the top-k tokens mixed with their probabilities plus normal noise, renormalised.

    A weight may be negative, as in the release: p_i = 0.01 with noise of 0.05 often is.
    """

    paper = "SofT-GRPO (release), arXiv 2511.06411"
    mixture = "affine"
    draws_text = True

    # The weights are divided by the sum of the draws, which the noise of more than ten tokens may bring near 0.
    k: int = option(5, "number of tokens mixed at most", low=1, high=10)
    density: str = density_option("or the normal density of the draws", "normal")
    input_gradient: str = input_gradient_option("none")

    @property
    def score_only(self) -> bool:
        return self.has_density  # since the noise is narrow

    def propose(self, step: Step) -> Proposal:
        """y_i ~ N(p_i, 0.05²); weights = y / Σy; the text takes the largest weight."""
        ids, probabilities = self.top(step)
        draws = probabilities + densities.NORMAL_SIGMA * step.normal(ids)
        draws = torch.where(probabilities > 0.0, draws, 0.0)
        weights = draws / draws.sum(dim=-1, keepdim=True)
        return Proposal(InputEdit(ids, weights), winners(ids, draws))

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with p_i(θ) > 0.05 of log N(y_i; p_i(θ), 0.05²), y_i clamped to p_i(θ) ± 0.15."""
        # y_i − p_i is taken as the noise, drawn again. The difference of the rollout's y and the trainer's p would not
        # do: where their logits differ by 0.03, their p differ by a seventh of the noise's 0.05.
        edit = replayed.edit
        support = densities.distinct(edit.ids) & (edit.weights != 0.0)
        probabilities = densities.renormalised(replayed.at(edit.ids), support)
        draws = probabilities.detach() + densities.NORMAL_SIGMA * replayed.normal(edit.ids)
        return densities.normal(draws, probabilities, support)
