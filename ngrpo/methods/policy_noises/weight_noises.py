# SPDX-License-Identifier: Apache-2.0
"""Noise on MLP weights with importance weights (`psn`), and on RMSNorm weights in stages (`aqn`)."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ngrpo.machine.upstream.openrlhf_flags import TRUNCATED_WEIGHTS, Default, Flags
from ngrpo.methods.policy_noises import register
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations import UsageError, option

_SMALLEST_SIGMA = 1e-6
_LARGEST_SIGMA = 0.5
# The names of transformers 5. Gemma 4's experts are siblings of their block's MLP.
_MLP = re.compile(r"\.(mlp|feed_forward|block_sparse_moe|shared_mlp|\d+\.experts)\.")
# The matrices of all experts are one parameter (experts, rows, columns); its name does not end in "weight".
_MATRIX = re.compile(r"(weight|\.experts\.(gate_up_proj|up_proj|down_proj))$")


@register("psn")
@dataclass(frozen=True, kw_only=True)
class PSN(PolicyNoise):
    """PSN-RLVR: fresh noise on the MLP weights for each rollout, and truncated importance sampling in the loss."""

    paper = "PSN-RLVR, arXiv 2602.02555"
    noised = "the weights of the MLPs (such as layers.0.mlp.up_proj.weight)"

    sigma: float = option(0.001, "σ; the first one where it is adaptive", low=_SMALLEST_SIGMA, high=_LARGEST_SIGMA)
    adaptive: bool = option(False, "let σ follow the divergence between the rollout's and the trainer's policy")
    target: float = option(0.003, "the divergence that an adaptive σ aims at, in nats a token", above=0.0)
    factor: float = option(1.01, "by which an adaptive σ changes at each step", above=1.0)

    def selects(self, name: str) -> bool:
        """The weights of the MLPs; of a mixture of experts, those of its router and of every expert."""
        return bool(_MLP.search(name) and _MATRIX.search(name))

    @property
    def follows_divergence(self) -> bool:
        return self.adaptive

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ; adaptive: the last one times the factor below the target and divided by it above, in [1e-6, 0.5]."""
        if not self.adaptive or last is None:
            return self.sigma
        if divergence is None:
            raise UsageError(
                "--policy_noise.adaptive needs log-probabilities of the rollout: leave"
                " --algo.advantage.is_correction_level at token."
            )
        sigma = last * self.factor if divergence < self.target else last / self.factor
        return min(max(sigma, _SMALLEST_SIGMA), _LARGEST_SIGMA)

    def flags(self, flags: Flags) -> dict[str, Default]:
        """The loss is weighted by min(π / π_rollout, 10)."""
        return dict(TRUNCATED_WEIGHTS)


_BEFORE_ATTENTION = {"input_layernorm", "attention_layernorm"}
_BEFORE_MLP = {
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "feedforward_layernorm",
}
# In most models the norm before the MLP. In a block that also has one of the above, the norm of the attention's output.
_AFTER_ATTENTION = "post_attention_layernorm"


@register("aqn")
@dataclass(frozen=True, kw_only=True)
class AQN(PolicyNoise):
    """QeRL's AQN: noise on the RMSNorms before attention and MLP, in stages from none over much to little."""

    paper = "QeRL, arXiv 2510.11696"
    noised = "the norms before attention and MLP (such as layers.0.input_layernorm.weight)"

    start: float = option(1e-2, "σ_s, of the first stage with noise", above=0.0)
    end: float = option(5e-4, "σ_e, towards which σ falls", above=0.0)
    stages: int = option(10, "K, equal parts of the run; the first is without noise", low=3)
    form: str = option(
        "paper",
        "the exponent: (k - 1) / (K - 1) as in the paper, so that the last stage is above σ_e, or as released",
        choices=("paper", "released"),
    )
    steps: int | None = option(None, "training steps that the stages divide; none for those of the run", low=1)

    def selects(self, name: str) -> bool:
        """The weights of norms with a name that some model gives to one before attention or MLP."""
        _, norm = _block_and_norm(name)
        return name.endswith(".weight") and norm in {*_BEFORE_ATTENTION, *_BEFORE_MLP, _AFTER_ATTENTION}

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The weights of the norms before attention and MLP, whatever their names are in the model.

        Gemma's norms multiply by 1 + w, so noise on w is the same noise on the factor.

        Raises ``UsageError`` where there is none, or a block has norms behind its attention and MLP only.
        """
        candidates = super().selected(names)
        norms_of_blocks: defaultdict[str, set[str]] = defaultdict(set)
        for name in candidates:
            block, norm = _block_and_norm(name)
            norms_of_blocks[block].add(norm)
        for block, norms in norms_of_blocks.items():
            if not norms & _BEFORE_ATTENTION:
                raise UsageError(
                    f"--policy_noise {self.name}: {block} has {', '.join(sorted(norms))} and no norm before its"
                    f" attention ({' or '.join(sorted(_BEFORE_ATTENTION))}). Use --policy_noise psn, or another model."
                )

        def is_before_attention_or_mlp(name: str) -> bool:
            block, norm = _block_and_norm(name)
            has_norm_before_mlp = bool(norms_of_blocks[block] & _BEFORE_MLP)
            return not (norm == _AFTER_ATTENTION and has_norm_before_mlp)

        return tuple(name for name in candidates if is_before_attention_or_mlp(name))

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ_s (σ_e / σ_s)^((k−1)/(K−1)) in stage k ≥ 1 of 0 … K − 1, and 0 in stage 0; released: /(K−2)."""
        all_steps = self.steps or steps
        stage = min(step * self.stages // all_steps, self.stages - 1)  # k
        if stage == 0:
            return 0.0
        divisor = self.stages - 1 if self.form == "paper" else self.stages - 2
        return self.start * (self.end / self.start) ** ((stage - 1) / divisor)


def _block_and_norm(name: str) -> tuple[str, str]:
    """(``model.layers.0``, ``input_layernorm``) of ``model.layers.0.input_layernorm.weight``."""
    block, _, norm = name.removesuffix(".weight").rpartition(".")
    return block, norm
