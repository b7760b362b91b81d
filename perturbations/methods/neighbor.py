# SPDX-License-Identifier: Apache-2.0
"""N-GRPO (Zhu et al., Findings of ACL 2026, arXiv 2606.10768): neighbor mixing; its release's orthogonal noise."""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from perturbations import InputEdit, NeighborIndex, Proposal, Step, UsageError, option, register
from perturbations.embeddings import ModelEmbeddings
from perturbations.errors import require
from perturbations.neighbors import refresh_period
from perturbations.top_tokens import LikeliestTokens

_VARIANTS = {
    "paper": {"weights": "logits", "realization": "anchor", "space": "input"},
    "released": {"weights": "probs", "realization": "sampled", "space": "output"},
}


@register("neighbor")
@dataclass(frozen=True, kw_only=True)
class Neighbor(LikeliestTokens):
    """Mixes the most likely token (the anchor) with its k-1 nearest neighbors.

    ``variant`` sets ``weights``, ``realization`` and ``space`` together; each may also be set alone.
    """

    paper = "N-GRPO, arXiv 2606.10768"

    rate: float = option(0.1, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    k: int = option(3, "size of the mixed set, the anchor included", low=2)
    metric: str = option("cosine", "similarity of embeddings", choices=("cosine", "l2", "l1", "dot"))
    variant: str = option("paper", "the method as written or as released", choices=("paper", "released"))
    weights: str | None = option(None, "softmax of the set's logits or probabilities", choices=("logits", "probs"))
    realization: str | None = option(None, "the token in the text", choices=("anchor", "sampled"))
    space: str | None = option(None, "embeddings in which neighbors are near", choices=("input", "output"))
    mix_temperature: float = option(1.0, "divides the set's scores before the softmax", above=0.0)
    skip_special: bool = option(False, "leave special and never-trained tokens out of the neighbors")
    skip_same_word: bool = option(False, "leave out neighbors that differ in case, space or English inflection only")
    index: str = option("exact", "how neighbors are found; hnsw needs faiss", choices=("exact", "hnsw"))
    refresh: str = option("every_sync", "when neighbor sets are recomputed: every_sync, never, or each n weight syncs")

    def __post_init__(self) -> None:
        super().__post_init__()
        refresh_period(self.refresh)
        for name, value in _VARIANTS[self.variant].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen
        is_everywhere = self.rate == 1.0 and self.every == 1 and self.burn_in == 0
        passes_everywhere = self.gate is None and self.entropy_min is None
        if is_everywhere and passes_everywhere and self.realization == "anchor":
            warnings.warn(
                "neighbor with rate 1 and realization 'anchor' is greedy decoding: a group's responses are the same and"
                " every group-relative advantage is zero. Lower the rate, or take realization='sampled'.",
                stacklevel=3,
            )

    def propose(self, step: Step) -> Proposal:
        """e' = Σ_c α(c) E[c] over the anchor argmax z̃ and its k − 1 nearest tokens, α = softmax(z̃) within this set.

        Section 3 of the paper; ``mix_temperature`` divides z̃ there. The text takes the anchor, or the sampled token.
        """
        _, likeliest = step.top(1)  # (B, 1)
        anchor = likeliest.squeeze(-1)  # (B,)
        neighbors, _ = self._neighbors(step.embeddings).query(anchor, self.k - 1)  # (B, k − 1)
        ids = torch.cat([anchor.unsqueeze(-1), neighbors], dim=-1)  # (B, k)
        scores = step.logits.gather(-1, ids)
        if self.weights == "probs":
            # As in the release, where the logits were overwritten by probabilities, then divided by the temperature.
            probabilities = (scores - step.log_total().unsqueeze(-1)).exp()
            scores = probabilities / step.temperature.unsqueeze(-1)
        weights = torch.softmax(scores / self.mix_temperature, dim=-1)
        tokens = anchor if self.realization == "anchor" else step.sampled
        return Proposal(InputEdit(ids, weights), tokens)

    @property
    def samples_text(self) -> bool:
        return self.realization == "sampled"

    def _neighbors(self, embeddings: ModelEmbeddings) -> NeighborIndex:
        space = require(self.space, "space")  # set by __post_init__
        return embeddings.index(self.metric, space, self.skip_special, self.index, self.skip_same_word, self.refresh)

    def prepare(self, embeddings: ModelEmbeddings) -> None:
        self._neighbors(embeddings).precompute(self.k - 1)

    def check_model(self, vocabulary: int) -> None:
        if self.index == "hnsw" and self.metric != "l1" and find_spec("faiss") is None:
            raise UsageError("perturbation option index='hnsw': needs faiss; pip install 'ngrpo[hnsw]', or take exact.")
        super().check_model(vocabulary)


@register("orthogonal")
@dataclass(frozen=True, kw_only=True)
class Orthogonal(LikeliestTokens):
    """Moves the most likely token's embedding along the other likely ones, orthogonally to itself."""

    paper = "N-GRPO (release), arXiv 2606.10768"
    mixture = "free"

    rate: float = option(0.1, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    k: int = option(5, "number of likely tokens, the anchor included", low=2)
    realization: str = option("sampled", "the token in the text", choices=("sampled", "anchor"))

    def propose(self, step: Step) -> Proposal:
        """e' = E[a] + Σ_j n_j o_j/‖o_j‖ with n_j ~ N(0, (w_j ‖o_j‖)²), o_j = E[c_j] − ⟨E[c_j], E[a]⟩/‖E[a]‖² E[a].

        n_j = ε_j w_j ‖o_j‖ cancels the norm: e' = E[a] + Σ_j ε_j w_j o_j, which is a mixture of E[a] and the E[c_j].
        w is the softmax of z̃ over the candidates without the anchor.
        """
        values, ids = step.top(self.k)  # (B, k) each; the anchor first
        w = torch.nan_to_num(torch.softmax(values[:, 1:], dim=-1))  # NaN where only one token is possible
        noise = step.normal(ids[:, 1:]) * w  # ε_j w_j, (B, k − 1)
        vectors = step.embeddings.lookup(ids).float()  # (B, k, D)
        anchor = vectors[:, :1]  # E[a]
        candidates = vectors[:, 1:]  # E[c_j]
        squared_norm = anchor.square().sum(dim=-1).clamp_min(1e-12)  # (B, 1)
        along_anchor = (candidates * anchor).sum(dim=-1) / squared_norm  # (B, k − 1)
        anchor_weight = 1.0 - (noise * along_anchor).sum(dim=-1, keepdim=True)  # (B, 1)
        weights = torch.cat([anchor_weight, noise], dim=-1)
        tokens = step.sampled if self.samples_text else ids[:, 0]
        return Proposal(InputEdit(ids, weights), tokens)

    @property
    def samples_text(self) -> bool:
        return self.realization != "anchor"
