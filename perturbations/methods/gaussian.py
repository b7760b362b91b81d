# SPDX-License-Identifier: Apache-2.0
"""STHT: Gaussian noise on token or soft embeddings (Butt et al., "Soft Tokens, Hard Truths", arXiv 2509.19170)."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Perturbation, Proposal, Step, UsageError, option, register, streams
from perturbations import density as densities
from perturbations.base import Replayed, density_option
from perturbations.edit import one_hot, realise
from perturbations.errors import require
from perturbations.top_tokens import check_top_k


@register("gaussian")
@dataclass(frozen=True, kw_only=True)
class Gaussian(Perturbation):
    """Adds isotropic noise to the token's embedding, or to the soft mixture of the likely tokens."""

    paper = "STHT, arXiv 2509.19170"

    base: str = option("token", "what gets noise: sampled token, argmax or mixture", choices=("token", "fuzzy", "soft"))
    sigma: float = option(0.33, "noise scale, relative to the root-mean-square element of sigma_of", low=0.0)
    sigma_of: str = option("embedding", "sigma's scale: the matrix, or the vector", choices=("embedding", "vector"))
    tau: float = option(0.5, "temperature of the soft mixture (base=soft)", above=0.0)
    k: int = option(32, "tokens in the soft mixture (base=soft)", low=1)
    density: str = density_option("or the Gaussian density of the input", "gaussian")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density == "gaussian" and self.sigma == 0.0:
            raise UsageError("perturbation option sigma=0: density='gaussian' needs noise. The default is 0.33.")
        if self.density == "gaussian" and self.base == "fuzzy":
            why = "the token in the text is the argmax, which is never trained, and the embedding learns alone"
            fix = "base='soft' trains the probabilities too"
            warnings.warn(f"gaussian with base='fuzzy' and density='gaussian': {why}. {fix}.", stacklevel=3)

    def propose(self, step: Step) -> Proposal:
        """e' = h + σ ε with h = E[token], E[argmax z] or Σ_v softmax(z/τ)_v E[v] over the k likeliest tokens.

        τ divides the raw logits z, so the sampling temperature is multiplied back in.
        """
        tokens = step.top(1)[1].squeeze(-1) if self.base == "fuzzy" else step.sampled
        mean = one_hot(tokens)
        if self.base == "soft":
            values, ids = step.top(self.k)
            scale = step.temperature.unsqueeze(-1) / self.tau
            mean = InputEdit(ids, torch.softmax(values * scale, dim=-1))
        if self.sigma_of == "embedding":
            rms = step.embeddings.rms().expand(step.sampled.shape[0])
        else:
            rms = realise(mean, step.embeddings.lookup, None).float().square().mean(dim=-1).sqrt()
        return Proposal(InputEdit(mean.ids, mean.weights, self.sigma * rms), tokens)

    def log_density(self, replayed: Replayed) -> Tensor:
        """log N(e'; h(θ), σ² I) at the policy that drew e', with gradient to h(θ): its score is ε/σ · ∂h."""
        # e' − h is σ ε as it was drawn, not a difference of what rollout and trainer computed: in D dimensions that of
        # logits which differ by 0.03 is as long as the noise itself.
        edit, lookup = replayed.edit, replayed.lookup
        sigma, keys = require(edit.sigma, "edit.sigma"), require(replayed.noise_keys, "noise_keys")
        if self.base == "token":
            mean = lookup(edit.ids[:, 0])
        elif self.base == "fuzzy":
            mean = lookup(replayed.top(1)[:, 0])
        else:
            ids = replayed.top(self.k)
            weights = torch.softmax(replayed.at(ids) * (replayed.temperature / self.tau), dim=-1)
            mean = (lookup(ids) * weights.unsqueeze(-1)).sum(dim=-2)  # in the weights' float32
        mean = mean.float()
        with torch.no_grad():
            noise = sigma.unsqueeze(-1) * streams.normal(keys, mean.shape[-1])
        return densities.gaussian(noise, mean - mean.detach(), sigma)

    @property
    def density_of_vector(self) -> bool:
        return self.has_density

    @property
    def draws_token(self) -> bool:
        return self.base != "fuzzy"  # a fuzzy position's token is the argmax

    @property
    def samples_text(self) -> bool:
        return self.draws_token

    @property
    def zero_mean_score(self) -> bool:
        return self.has_density or self.draws_token

    def check_model(self, vocabulary: int) -> None:
        check_top_k(self.k if self.base == "soft" else 1, vocabulary)
