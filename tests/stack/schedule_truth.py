# SPDX-License-Identifier: Apache-2.0
"""What log π of a rollout's tokens must be under a sampling schedule: its formulas once more, in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from perturbations import replaying
from tests.stack.harness import Rollout


def temperatures(name: str, options: dict[str, Any], logits: torch.Tensor, answer: int, answers: int) -> torch.Tensor:
    """τ of each of the T tokens that these logits, (T, V), chose; at training step 0; of answer i of n."""
    if name == "ladder":
        low, high = math.log(options["least"]), math.log(options["most"])
        return torch.full((len(logits),), math.exp(low + (high - low) * answer / (answers - 1)), dtype=torch.float64)
    if name == "ead":
        t = torch.arange(len(logits), dtype=torch.float64)
        cooling = (2.2 - (t / options["d_0"]).exp()).clamp_min(0.1)
        return torch.where(t < options["c"], 1.0, cooling)
    p = logits.double().softmax(dim=-1)
    return (0.8 ** (options["theta"] / torch.special.entr(p).sum(dim=-1))).clamp_min(0.1)


@torch.no_grad()
def scheduled_gaps(
    model: Any, rollouts: Sequence[Rollout], name: str | None, options: dict[str, Any], temperature: float = 1.0
) -> torch.Tensor:
    """|Δ log π| between a rollout and a Hugging Face forward of it at the schedule's temperatures; None: at one.
    Under a ladder these are all answers to one prompt, in their order.

    In units of the logits: at τ = 0.1 their float32 rounding counts ten times in log π, so that the gap there is
    multiplied with τ.
    """
    gaps = []
    for answer, rollout in enumerate(rollouts):
        tokens, start = torch.tensor([rollout.sequence]), len(rollout.prompt)
        with replaying(model, [rollout.record], attention_mask=torch.ones_like(tokens)):
            logits = model(tokens).logits[0, start - 1 : -1].double()
        tau = torch.ones(len(logits)) if name is None else temperatures(name, options, logits, answer, len(rollouts))
        scaled = logits / (temperature * tau).unsqueeze(-1)
        now = scaled.log_softmax(dim=-1).gather(-1, tokens[0, start:].unsqueeze(-1)).squeeze(-1)
        gaps.append((now - torch.from_numpy(rollout.log_probs.copy())).abs() * tau.clamp_max(1.0))
    return torch.cat(gaps)
