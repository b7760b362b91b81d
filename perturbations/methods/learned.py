# SPDX-License-Identifier: Apache-2.0
"""Perturbations with learned parameters: HRPO's gate (arXiv 2505.18454) and TARPO's router (arXiv 2606.05859)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbations import InputEdit, Proposal, Step, UsageError, option, register, streams
from perturbations.base import Replayed
from perturbations.errors import require
from perturbations.top_tokens import LikeliestTokens

_C = 8.0  # c of HRPO's gate
_LARGEST_START = 0.999  # the largest a at the start, of open gates


@register("hrpo")
@dataclass(frozen=True, kw_only=True)
class HRPO(LikeliestTokens):
    """Blends the sampled token's embedding with the mixture of likely tokens through a gate that trains."""

    paper = "HRPO, arXiv 2505.18454"
    samples_text = True
    module_options = ("start",)

    k: int = option(32, "likeliest tokens in the mixture; the paper takes all", low=1)
    start: float = option(
        0.99, "the token's factor a starts between this and 0.999 where σ(W_r e) = 1", above=0.0, high=0.999
    )
    gate_lr: float | None = option(1e-4, "learning rate of W_r and W_i; none for the policy's", above=0.0)
    lambda_lr: float | None = option(1e-3, "learning rate of Λ; none for the policy's", above=0.0)
    perturb_eval: bool = option(True, "blend in evaluation too: the gate is a part of what was trained")

    def propose(self, step: Step) -> Proposal:
        """r = Σ_v p_v E[v] / ‖p‖ over the k likeliest tokens; the token in the text is the sampled one.

        The sampled token goes first with weight 0: the module takes its embedding as e.
        """
        values, ids = step.top(self.k)
        probabilities = torch.softmax(values, dim=-1)
        weights = probabilities / probabilities.norm(dim=-1, keepdim=True)
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)
        return Proposal(InputEdit(ids, nn.functional.pad(weights, (1, 0))), step.sampled)

    def module(self, hidden_size: int) -> nn.Module:
        return HybridGate(hidden_size, self.start)

    def learning_rate(self, parameter: str) -> float | None:
        return self.lambda_lr if parameter == "lambda_shift" else self.gate_lr


class HybridGate(nn.Module):
    """a = exp(−c · softplus(Λ) · σ(W_r e)) with c = 8; e' = a ⊙ e + sqrt(1 − a²) ⊙ (σ(W_i e) ⊙ r)."""

    # W_r and W_i start at zero (σ = ½ for every token) and Λ such that exp(−c · softplus(Λ)), which is a where
    # σ(W_r e) = 1, lies between ``start`` and 0.999. Λ is held as its start plus a shift that begins at 0: near −7,
    # where Λ starts, bfloat16 has steps of 0.03.

    def __init__(self, hidden_size: int, start: float) -> None:
        super().__init__()
        self.w_r = nn.Parameter(torch.zeros(hidden_size, hidden_size))
        self.w_i = nn.Parameter(torch.zeros(hidden_size, hidden_size))
        self.lambda_shift = nn.Parameter(torch.zeros(hidden_size))
        draws = streams.uniform(torch.zeros(1, dtype=torch.int64), hidden_size)[0].double()
        start_of_a = start + (_LARGEST_START - start) * draws
        softplus = -start_of_a.log() / _C  # softplus(Λ) where exp(−c · softplus(Λ)) is the start of a
        # A plain attribute and not a buffer: it stays in float32 when the model is cast.
        self.lambda_start = softplus.expm1().log().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HybridGate":
        """Moves the start of Λ to its parameters' device; the dtype stays."""
        super()._apply(fn, recurse)
        if self.lambda_shift.device.type != "meta":
            self.lambda_start = self.lambda_start.to(self.lambda_shift.device)
        return self

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        """e' of e = ``token`` and r = ``mixture``, all (N, D) float32."""
        if self.lambda_start.device != token.device:  # parameters may be moved without a call of _apply()
            self.lambda_start = self.lambda_start.to(token.device)
        softplus = nn.functional.softplus(self.lambda_start + self.lambda_shift.float())  # (D,)
        open_gate = torch.sigmoid(nn.functional.linear(token, self.w_r.float()))  # σ(W_r e), (N, D)
        log_a = -_C * softplus * open_gate
        # √(1 − a²), by expm1 without cancellation, and never 0, where the square root has no gradient.
        share_of_mixture = (-torch.expm1(2.0 * log_a)).clamp_min(1e-12).sqrt()
        fed_token = log_a.exp() * token
        input_gate = torch.sigmoid(nn.functional.linear(token, self.w_i.float()))  # σ(W_i e), (N, D)
        return fed_token + share_of_mixture * input_gate * mixture


_SPREAD = 0.001  # standard deviation of the router's weights at the start
_HIDDEN_STATES = "the last hidden states that the router reads"  # for messages


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
        "decision",
        "what the loss weighs: token and decision, or the token alone, which leaves the router untrained",
        choices=("decision", "token"),
    )
    perturb_eval: bool = option(True, "route in evaluation too: the router is a part of what was trained")

    def propose(self, step: Step) -> Proposal:
        """Draws the decision d from softmax(W h + b); the token in the text is the sampled one.

        Fed is the token where d = 0, and Σ_v p_v E[v] / Σ_v p_v over the k likeliest tokens where d = 1. The sampled
        token goes first; its weight, 1 or 0, is the decision, which the density reads.
        """
        hidden = require(step.hidden, _HIDDEN_STATES)
        router = cast(Router, require(step.module, "the router"))
        probability_of_mixture = router.log_probs(hidden)[:, 1:].exp()  # (B, 1)
        feeds_mixture = probability_of_mixture > step.uniform(1)  # (B, 1)
        values, ids = step.top(self.k)  # (B, k) each
        mixture = nn.functional.pad(torch.softmax(values, dim=-1), (1, 0))  # (B, 1 + k)
        token_alone = nn.functional.pad(torch.ones_like(values[:, :1]), (0, self.k))  # (B, 1 + k)
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)
        weights = torch.where(feeds_mixture, mixture, token_alone)
        return Proposal(InputEdit(ids, weights), step.sampled)

    def log_density(self, replayed: Replayed) -> Tensor:
        """λ log π of the decisions, (N,), with gradient to the router and, through the hidden state, to the policy."""
        hidden = require(replayed.hidden, _HIDDEN_STATES)
        router = cast(Router, require(replayed.module, "the router"))
        decisions = (replayed.edit.weights[:, :1] == 0.0).long()  # (N, 1)
        log_probs = router.log_probs(hidden).gather(-1, decisions)  # (N, 1)
        return self.decision_weight * log_probs.squeeze(-1)

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
        # The head is applied to no rows, so that its parameters have a gradient, of zero, in every forward: on several
        # ranks all must reduce the same gradients.
        return mixture + self.head(mixture[:0]).sum()


class RouterHead(nn.Module):
    """W h + b. W starts with N(0, 0.001²); b is held as its start plus a shift, which in bfloat16 has small steps."""

    def __init__(self, hidden_size: int, bias: float) -> None:
        super().__init__()
        draws = streams.normal(torch.arange(2), hidden_size)  # (2, D)
        self.weight = nn.Parameter(_SPREAD * draws)
        self.bias_shift = nn.Parameter(torch.zeros(2))
        self._bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the two decisions, (N, 2) float32; ``UsageError`` for hidden states of another size."""
        hidden_size = hidden.shape[-1]
        embedding_size = self.weight.shape[-1]
        if hidden_size != embedding_size:
            raise UsageError(
                f"perturbation 'tarpo': the last hidden state has {hidden_size} dimensions, the input embedding"
                f" {embedding_size}. The router needs a model in which both are the same."
            )
        logits = nn.functional.linear(hidden.float(), self.weight.float(), self.bias_shift.float())
        start_of_b = nn.functional.pad(logits.new_full((1,), self._bias), (0, 1))  # (bias, 0)
        return logits + start_of_b
