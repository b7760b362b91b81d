# SPDX-License-Identifier: Apache-2.0
"""PSN-RLVR: parameter-space noise on the MLP weights, with importance weights (arXiv 2602.02555)."""

import re
from dataclasses import dataclass

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.policy_noises import register
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations import UsageError, option

_LEVEL = "--algo.advantage.is_correction_level"
_LEAST, _MOST = 1e-6, 0.5
# As transformers 5 names them; Gemma 4's experts stand beside the MLP of their block.
_MLP = re.compile(r"\.(mlp|feed_forward|block_sparse_moe|shared_mlp|\d+\.experts)\.")
# The matrices of all experts are one parameter (experts, rows, columns), whose name does not end in "weight".
_MATRIX = re.compile(r"(weight|\.experts\.(gate_up_proj|up_proj|down_proj))$")


@register("psn")
@dataclass(frozen=True, kw_only=True)
class PSN(PolicyNoise):
    """PSN-RLVR: fresh noise on the MLP weights for each rollout, and truncated importance sampling in the loss."""

    paper = "PSN-RLVR, arXiv 2602.02555"
    noised = "the weights of the MLPs (such as layers.0.mlp.up_proj.weight)"

    sigma: float = option(0.001, "σ; the first one where it is adaptive", low=_LEAST, high=_MOST)
    adaptive: bool = option(False, "let σ follow the divergence between the rollout's and the trainer's policy")
    target: float = option(0.003, "the divergence that an adaptive σ aims at, in nats a token", above=0.0)
    factor: float = option(1.01, "by which an adaptive σ changes at each step", above=1.0)

    def selects(self, name: str) -> bool:
        """The weights of the MLPs; of a mixture of experts, those of its router and of every expert."""
        return bool(_MLP.search(name) and _MATRIX.search(name))

    @property
    def follows_divergence(self) -> bool:
        """Where σ is adaptive."""
        return self.adaptive

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ; adaptive: the last one times the factor below the target and divided by it above, in [1e-6, 0.5]."""
        if not self.adaptive or last is None:
            return self.sigma
        if divergence is None:
            raise UsageError(
                "--policy_noise.adaptive needs the rollout's log-probabilities: leave"
                f" {_LEVEL} at token, which --policy_noise psn sets."
            )
        sigma = last * self.factor if divergence < self.target else last / self.factor
        return min(max(sigma, _LEAST), _MOST)

    def flags(self, flags: Flags) -> dict[str, Default]:
        """The loss is weighted by min(π / π_rollout, 10)."""
        return {
            _LEVEL: "token",
            "--algo.advantage.is_correction_mode": "clip",
            "--algo.advantage.is_correction_threshold": ("0", "10"),
        }
