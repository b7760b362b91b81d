# SPDX-License-Identifier: Apache-2.0
"""TARPO: a learned router between token and latent input (Zhang et al., arXiv 2606.05859)."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbations import InputEdit, Proposal, Step, UsageError, option, register, streams
from perturbations.base import Replayed
from perturbations.errors import require
from perturbations.top_tokens import LikeliestTokens

_SPREAD = 0.001
_NO_HIDDEN = "the last hidden states that the router reads"


@register("tarpo")
@dataclass(frozen=True, kw_only=True)
class TARPO(LikeliestTokens):
    """Feeds the sampled token or the mixture of likely tokens, as a router draws from the last hidden state."""

    paper = "TARPO, arXiv 2606.05859"
    samples_text = True
    module_options = ("bias",)
    reads_hidden = True

    k: int = option(10, "likeliest tokens in the mixture", low=1)
    bias: float = option(4.6, "the router's logit of the token at the start; the mixture's is 0", low=-20.0, high=20.0)
    decision_weight: float = option(0.1, "weight of log π of the decision next to log π of the token", low=0.0)
    router_lr: float | None = option(1e-4, "learning rate of the router; none for the policy's", above=0.0)
    density: str = option(
        "decision", "what the loss weighs; token: without decision, so the router stays", choices=("decision", "token")
    )
    perturb_eval: bool = option(True, "route in evaluation too: the router is a part of what was trained")

    def propose(self, step: Step) -> Proposal:
        """Draws the decision d from softmax(W h + b); the token in the text is the sampled one.

        Fed is the token where d = 0, and Σ_v p_v E[v] / Σ_v p_v over the k likeliest tokens where d = 1. The sampled
        token goes first; its weight, 1 or 0, is the decision, which the density reads.
        """
        hidden = require(step.hidden, _NO_HIDDEN)
        router = cast(Router, require(step.module, "the router"))
        latent = router.log_probs(hidden)[:, 1:].exp() > step.uniform(1)
        values, ids = step.top(self.k)
        mixture = nn.functional.pad(torch.softmax(values, dim=-1), (1, 0))
        alone = nn.functional.pad(torch.ones_like(values[:, :1]), (0, self.k))
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)
        return Proposal(InputEdit(ids, torch.where(latent, mixture, alone)), step.sampled)

    def log_density(self, replayed: Replayed) -> Tensor:
        """λ log π of the decisions, (N,), with gradient to the router and, through the hidden state, to the policy."""
        hidden = require(replayed.hidden, _NO_HIDDEN)
        router = cast(Router, require(replayed.module, "the router"))
        decided = (replayed.edit.weights[:, :1] == 0.0).long()
        return self.decision_weight * router.log_probs(hidden).gather(-1, decided).squeeze(-1)

    def module(self, hidden_size: int) -> nn.Module:
        return Router(hidden_size, self.bias)

    def learning_rate(self, parameter: str) -> float | None:
        return self.router_lr

    @property
    def draws_token(self) -> bool:
        return self.has_density  # token and decision are drawn independently


class Router(nn.Module):
    """π(d) = softmax(W h + b) of the last hidden state h: d = 0 for the token, d = 1 for the mixture."""

    def __init__(self, hidden_size: int, bias: float) -> None:
        super().__init__()
        self.head = RouterHead(hidden_size, bias)

    def log_probs(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows 2"]:
        """log π of both decisions, float32."""
        return torch.log_softmax(self.head(hidden), dim=-1)

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        """The mixture as it is, (N, D): the decision is among its weights."""
        # The head of no rows: its parameters then have a gradient, of zero, in every forward on every rank.
        return mixture + self.head(mixture[:0]).sum()


class RouterHead(nn.Module):
    """W h + b. W starts with N(0, 0.001²); b is held as its start plus a shift, which in bfloat16 has small steps."""

    def __init__(self, hidden_size: int, bias: float) -> None:
        super().__init__()
        draws = streams.normal(torch.zeros(2, dtype=torch.int64) + torch.arange(2), hidden_size)
        self.weight = nn.Parameter(_SPREAD * draws)
        self.bias_shift = nn.Parameter(torch.zeros(2))
        self._bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the two decisions, (N, 2) float32; ``UsageError`` for hidden states of another size."""
        if hidden.shape[-1] != self.weight.shape[-1]:
            sizes = (
                f"the last hidden state has {hidden.shape[-1]} dimensions, the input embedding {self.weight.shape[-1]}"
            )
            raise UsageError(f"perturbation 'tarpo': {sizes}. The router needs a model in which both are the same.")
        logits = nn.functional.linear(hidden.float(), self.weight.float(), self.bias_shift.float())
        return logits + nn.functional.pad(logits.new_full((1,), self._bias), (0, 1))
