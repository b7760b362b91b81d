# SPDX-License-Identifier: Apache-2.0
"""HRPO: hybrid latent reasoning (Yue et al., arXiv 2505.18454): token and mixture through a learned gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perturbations import InputEdit, Proposal, Step, option, register, streams
from perturbations.top_tokens import LikeliestTokens

_C = 8.0
_LARGEST_START = 0.999


@register("hrpo")
@dataclass(frozen=True, kw_only=True)
class HRPO(LikeliestTokens):
    """Blends the sampled token's embedding with the mixture of likely tokens through a gate that trains."""

    paper = "HRPO, arXiv 2505.18454"
    samples_text = True
    module_options = ("start",)

    k: int = option(32, "likeliest tokens in the mixture; the paper takes all", low=1)
    start: float = option(0.99, "smallest a at the start, of open gates; the largest is 0.999", above=0.0, high=0.999)
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
        softplus = -(start + (_LARGEST_START - start) * draws).log() / _C
        # A plain attribute and not a buffer: it stays in float32 when the model is cast.
        self.lambda_start = softplus.expm1().log().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridGate:
        """Moves the start of Λ to its parameters' device; the dtype stays."""
        super()._apply(fn, recurse)
        if self.lambda_shift.device.type != "meta":
            self.lambda_start = self.lambda_start.to(self.lambda_shift.device)
        return self

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        """e' of e = ``token`` and r = ``mixture``, all (N, D) float32."""
        if self.lambda_start.device != token.device:  # where a parameter was moved alone
            self.lambda_start = self.lambda_start.to(token.device)
        rate = nn.functional.softplus(self.lambda_start + self.lambda_shift.float())
        log_a = -_C * rate * torch.sigmoid(nn.functional.linear(token, self.w_r.float()))
        # 1 − a² without cancellation; never 0, where the square root has no gradient.
        rest = (-torch.expm1(2.0 * log_a)).clamp_min(1e-12).sqrt()
        return log_a.exp() * token + rest * torch.sigmoid(nn.functional.linear(token, self.w_i.float())) * mixture
