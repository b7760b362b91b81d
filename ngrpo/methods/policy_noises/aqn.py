# SPDX-License-Identifier: Apache-2.0
"""AQN, QeRL's adaptive quantisation noise: noise on the RMSNorm weights, smaller from stage to stage (2510.11696)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ngrpo.methods.policy_noises import register
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations import UsageError, option

_BEFORE_ATTENTION = {"input_layernorm", "attention_layernorm"}
_BEFORE_MLP = {
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "feedforward_layernorm",
}
# Before the MLP in most models; where a block has one of the above, or none before its attention, it is at the end of
# the attention.
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
        "paper", "the exponent: paper's, whose last stage is above σ_e, or released", choices=("paper", "released")
    )
    steps: int | None = option(None, "training steps that the stages divide; none for those of the run", low=1)

    def selects(self, name: str) -> bool:
        """The weights of norms whose name is that of one before attention or MLP in some model."""
        return _norm(name) in {*_BEFORE_ATTENTION, *_BEFORE_MLP, _AFTER_ATTENTION}

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The weights of the norms before attention and MLP, whatever their names are in the model.

        Gemma's norms multiply by 1 + w: noise on w is the same noise on what they multiply by.

        Raises:
            UsageError: where there is none, or a block has norms behind its attention and MLP only.
        """
        chosen = super().selected(names)
        blocks: defaultdict[str, set[str]] = defaultdict(set)
        for name in chosen:
            blocks[_block(name)].add(_norm(name))
        for block, norms in blocks.items():
            if not norms & _BEFORE_ATTENTION:
                raise UsageError(
                    f"--policy_noise {self.name}: {block} has {', '.join(sorted(norms))} and no norm before its"
                    f" attention, as {' or '.join(sorted(_BEFORE_ATTENTION))} is. The method is noise on what attention"
                    " and MLP are given. Use --policy_noise psn, or a model whose norms stand before them."
                )
        return tuple(
            name for name in chosen if _norm(name) != _AFTER_ATTENTION or not blocks[_block(name)] & _BEFORE_MLP
        )

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ_s (σ_e / σ_s)^((k−1)/(K−1)) in stage k ≥ 1 of 0 … K − 1, and 0 in stage 0; released: /(K−2)."""
        stage = min(step * self.stages // (self.steps or steps), self.stages - 1)
        if stage == 0:
            return 0.0
        last_exponent = self.stages - (1 if self.form == "paper" else 2)
        return self.start * (self.end / self.start) ** ((stage - 1) / last_exponent)


def _block(name: str) -> str:
    """``model.layers.0`` of ``model.layers.0.input_layernorm.weight``."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _norm(name: str) -> str:
    """``input_layernorm`` of ``model.layers.0.input_layernorm.weight``; "" for what is no weight."""
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""
