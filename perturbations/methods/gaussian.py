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
            warnings.warn(
                "gaussian with base='fuzzy' and density='gaussian': the token in the text is the argmax, which is never"
                " trained, and the embedding learns alone. base='soft' trains the probabilities too.",
                stacklevel=3,
            )

    def propose(self, step: Step) -> Proposal:
        """e' = h + σ ε with h = E[token], E[argmax z] or Σ_v softmax(z/τ)_v E[v] over the k likeliest tokens.

        τ divides the raw logits z, so the sampling temperature is multiplied back in.
        """
        tokens = step.sampled
        if self.base == "fuzzy":
            _, likeliest = step.top(1)  # (B, 1)
            tokens = likeliest.squeeze(-1)
        if self.base == "soft":
            values, ids = step.top(self.k)  # (B, k) each
            scale = step.temperature.unsqueeze(-1) / self.tau
            mean = InputEdit(ids, torch.softmax(values * scale, dim=-1))
        else:
            mean = one_hot(tokens)
        edit = InputEdit(mean.ids, mean.weights, sigma=self.sigma * self._unit_of_sigma(step, mean))
        return Proposal(edit, tokens)

    def _unit_of_sigma(self, step: Step, mean: InputEdit) -> Tensor:
        """The root-mean-square element that ``sigma`` is relative to: of the embedding matrix or of h, (B,)."""
        if self.sigma_of == "embedding":
            return step.embeddings.rms().expand(step.sampled.shape[0])
        vectors = realise(mean, step.embeddings.lookup, noise_keys=None)  # (B, D)
        return vectors.float().square().mean(dim=-1).sqrt()

    def log_density(self, replayed: Replayed) -> Tensor:
        """log N(e'; h(θ), σ² I) at the policy that drew e', with gradient to h(θ): its score is ε/σ · ∂h."""
        # e' − h is taken as σ ε, drawn again. The difference of the rollout's e' and the trainer's h would not do: if
        # their logits differ by 0.03, it is as long in D dimensions as the noise itself.
        edit = replayed.edit
        sigma = require(edit.sigma, "edit.sigma")
        noise_keys = require(replayed.noise_keys, "noise_keys")
        if self.base == "token":
            mean = replayed.lookup(edit.ids[:, 0])  # (N, D)
        elif self.base == "fuzzy":
            mean = replayed.lookup(replayed.top(1)[:, 0])
        else:
            ids = replayed.top(self.k)  # (N, k)
            scale = replayed.temperature / self.tau
            weights = torch.softmax(replayed.at(ids) * scale, dim=-1)  # (N, k)
            mean = (replayed.lookup(ids) * weights.unsqueeze(-1)).sum(dim=-2)  # in the weights' float32
        mean = mean.float()
        with torch.no_grad():
            noise = sigma.unsqueeze(-1) * streams.normal(noise_keys, mean.shape[-1])  # (N, D)
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
        mixed_tokens = self.k if self.base == "soft" else 1
        check_top_k(mixed_tokens, vocabulary)
