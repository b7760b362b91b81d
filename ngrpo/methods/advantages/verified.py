# SPDX-License-Identifier: Apache-2.0
"""Advantages for rewards in [0, 1], where 1 is right: `maxrl`, `s_grpo`, NGRPO's baselines and their kind."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, VerifiedAdvantage, normalised
from perturbations import option
from perturbations.errors import UsageError, require


@register("maxrl")
@dataclass(frozen=True, kw_only=True)
class MaximumLikelihood(VerifiedAdvantage):
    """MaxRL: maximum likelihood of right responses, up to the order that a group can estimate."""

    paper = "MaxRL, arXiv 2602.02710"
    sums_to_zero = True

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(r − r̄) / r̄ with the group's mean r̄, 0 where r̄ = 0; as the paper's release has it.

        For rewards 0 and 1 and a right response's probability p, the update of a group of G is the gradient of
        −Σ_{k<G} (1 − p)^k / k, the first terms of log p. The term k = G would need the baseline of all-wrong groups.
        """
        differences = rewards - rewards[:, :1]  # so that equal rewards give exactly 0
        centered = differences - differences.mean(-1, keepdim=True)
        mean = rewards.mean(-1, keepdim=True)
        return torch.where(mean > 0.0, centered / mean, 0.0)

    def largest(self, size: int) -> float:
        """The advantage of an only right response."""
        return size - 1.0


@register("lens")
@dataclass(frozen=True, kw_only=True)
class ConfidentMistakes(VerifiedAdvantage):
    """LENS: a wrong response costs more the likelier it was, so that all-wrong groups teach too."""

    paper = "LENS, arXiv 2510.08696"
    sums_to_zero = True
    needs = "log_probs"

    alpha: float = option(0.25, "α, the weight of groups without a right response", low=0.0)

    def check_further(self, further: Tensor) -> None:
        """Also: a response without a token has no mean log-probability."""
        super().check_further(further)
        for row, column in (further[..., 1] < 1.0).nonzero().tolist():
            raise UsageError(
                f"advantage {self.name}: prompt {row}, response {column} has {further[row, column, 1].item():g} tokens."
                " At least one is needed: leave that response out."
            )

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """group_norm of r̃ = r − (1 − r) / G · π̄ / (D − π̄); in a group without a right response α (r̃ − mean r̃).

        Section 5.1: π̄ = π(o)^(1/|o|), D = max(2 max_j π̄_j, D_imp) with D_imp = 1 / mean_j(r_j / π(o_j)), Eq. 14, where
        a response is right. So r̃ of wrong responses is in [−1/G, 0].
        """
        rewards = torch.where(rewards >= 1.0 - ROUNDING, 1.0, rewards)
        has_right = rewards.amax(-1, keepdim=True) >= 1.0 - ROUNDING  # (P, 1)
        log_prob, tokens = require(further, self.needs).to(torch.float64).unbind(-1)  # (P, G) each
        confidence = (log_prob / tokens).exp()  # π̄
        difficulty = 2.0 * confidence.amax(-1, keepdim=True)  # D, (P, 1)
        importance_weighted = torch.where(rewards > 0.0, rewards * (-log_prob).exp(), 0.0)  # r / π(o)
        difficulty_by_sampling = importance_weighted.mean(-1, keepdim=True).reciprocal()  # D_imp
        difficulty = torch.where(has_right, torch.maximum(difficulty, difficulty_by_sampling), difficulty)
        penalty = confidence / (difficulty - confidence) / rewards.shape[1]
        calibrated = (rewards - (1.0 - rewards) * penalty).to(rewards.dtype)  # r̃
        centered = calibrated - calibrated.mean(-1, keepdim=True)
        return torch.where(has_right, normalised(calibrated), self.alpha * centered)


@register("rep_exp")
@dataclass(frozen=True, kw_only=True)
class NovelRepresentation(VerifiedAdvantage):
    """RepExp: a bonus for mean hidden states that are new within the group, then as group_norm."""

    paper = "RepExp, arXiv 2510.11686"
    sums_to_zero = True
    needs = "hidden"

    beta: float = option(0.01, "β, the weight of the bonus, which is in [0, 1]", low=0.0)
    ridge: float = option(0.01, "λ, added to the diagonal of the covariance", above=0.0)
    dim: int = option(32, "numbers that a hidden state is projected to at random, drawn in each step", low=1)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(r̂ − mean r̂) / (std r̂ + 1e-6), r̂ = r + β h̄ᵀ Σ⁻¹ h̄, Σ = λ I + Σ_j h̄_j h̄_jᵀ; as the release has it.

        h̄ is a response's projected mean hidden state less the group's mean. Groups without a right one have no bonus.
        With a smaller ε than 1e-6 the noise of nearly equal states would give an all-right group large advantages.
        """
        states = require(further, self.needs).to(torch.float64)  # (P, G, dim)
        states = states - states.mean(1, keepdim=True)
        # h̄ᵀ Σ⁻¹ h̄ of response j is element (j, j) of (K + λ I)⁻¹ K with K = H Hᵀ. K is (G, G), Σ is (dim, dim).
        kernel = states @ states.mT  # (P, G, G)
        identity = torch.eye(rewards.shape[1], dtype=kernel.dtype, device=kernel.device)
        ridged = kernel + self.ridge * identity
        bonus = torch.linalg.solve(ridged, kernel).diagonal(dim1=-2, dim2=-1)  # (P, G)
        has_right = rewards.amax(-1, keepdim=True) >= 1.0 - ROUNDING
        with_bonus = rewards + self.beta * bonus.to(rewards.dtype)
        return normalised(torch.where(has_right, with_bonus, rewards), least=1e-6)


@register("s_grpo")
@dataclass(frozen=True, kw_only=True)
class NoiseAware(VerifiedAdvantage):
    """S-GRPO: group_norm, with less weight for groups that a verifier's errors distort most."""

    paper = "S-GRPO, arXiv 2508.05928"
    sums_to_zero = True

    p: float = option(0.15, "p, the probability that a reward is the wrong one of 0 and 1", low=0.0, high=0.49)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """w (r − mean) / (std + 1e-9), w = (1 − 2p) √(t (1 − t)) / √(r̄ (1 − r̄)), as in the release's ``group_weight``.

        r̄ is the group's mean and t = (r̄ − p) / (1 − 2p), within [0, 1], the mean without errors. The weight is 0 where
        errors explain the group: r̄ ≤ p or r̄ ≥ 1 − p.
        """
        mean = rewards.mean(-1, keepdim=True)  # r̄
        true_mean = ((mean - self.p) / (1.0 - 2.0 * self.p)).clamp(0.0, 1.0)  # t
        variance = (mean * (1.0 - mean)).clamp_min(torch.finfo(mean.dtype).tiny)
        weight = (1.0 - 2.0 * self.p) * (true_mean * (1.0 - true_mean) / variance).sqrt()
        return weight * normalised(rewards)


@register("psr")
@dataclass(frozen=True, kw_only=True)
class PositiveOnly(VerifiedAdvantage):
    """PSR, positive samples only: A = r. For rewards 0 and 1 it is RAFT++ (arXiv 2504.11343, Eq. 6)."""

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """r."""
        return rewards.clone()


@register("nsr")
@dataclass(frozen=True, kw_only=True)
class NegativeOnly(VerifiedAdvantage):
    """NSR, negative samples only: A = r - 1."""

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """r - 1."""
        return rewards - 1.0


@register("w_reinforce")
@dataclass(frozen=True, kw_only=True)
class WeightedReinforce(VerifiedAdvantage):
    """W-REINFORCE: lam * r for a correct response, r - 1 for a wrong one."""

    lam: float = option(0.1, "λ, the weight of the correct responses", low=0.0)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """λ r where r = 1, else r - 1."""
        return torch.where(rewards >= 1.0 - ROUNDING, self.lam * rewards, rewards - 1.0)


@register("reinforce_rej")
@dataclass(frozen=True, kw_only=True)
class RejectUniform(VerifiedAdvantage):
    """Reinforce-Rej: REINFORCE without the groups of equal rewards."""

    paper = "Reinforce-Rej, arXiv 2504.11343"

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """2r − 1, the reward ±1 of the paper's Eq. 5; 0 in all-right and all-wrong groups (section 5.1)."""
        has_both = rewards.amax(-1, keepdim=True) > rewards.amin(-1, keepdim=True) + ROUNDING
        return torch.where(has_both, 2.0 * rewards - 1.0, 0.0)


@register("spo")
@dataclass(frozen=True, kw_only=True)
class SingleStream(VerifiedAdvantage):
    """SPO: the reward less its prompt's value, of which a tracker keeps an estimate over the run."""

    paper = "SPO, arXiv 2509.13232"
    needs = "values"
    normalized_over_step = True  # Eq. 9

    rho: float = option(0.875, "ρ, the share of a prompt's earlier evidence that a step keeps", low=0.0, high=0.99)

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """r − v̂, Eq. 8, with the value before this step; :class:`Values` of step_advantages.py has the tracker."""
        return rewards - require(further, self.needs)

    def largest(self, size: int) -> float:
        """√n, which is above (n − 1) / √n, the advantage of an only right response."""
        return size**0.5

    def flags(self, flags: Flags) -> dict[str, Default]:
        """The estimator that takes one response to each prompt; its values are replaced by the formula's."""
        return {"--algo.advantage.estimator": "flash_reinforce"}
