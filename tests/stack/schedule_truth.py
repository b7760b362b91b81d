# SPDX-License-Identifier: Apache-2.0
"""What log π of a rollout's tokens must be under a sampling schedule: its formulas once more, in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from perturbations import replaying
from tests.stack.harness import Rollout


def temperatures(name: str, options: dict[str, Any], logits: torch.Tensor, answer: int, answers: int) -> torch.Tensor:
    """τ of each of the T tokens that these logits, (T, V), chose, at training step 0.

    ``answer``: the answer's number among the ``answers`` to its prompt, from 0; ``ladder`` alone reads it.
    """
    tokens = len(logits)
    if name == "ladder":
        low = math.log(options["least"])
        high = math.log(options["most"])
        rung = answer / (answers - 1)
        tau = math.exp(low + (high - low) * rung)
        return torch.full((tokens,), tau, dtype=torch.float64)
    if name == "ead":
        t = torch.arange(tokens, dtype=torch.float64)
        cooling = 2.2 - torch.exp(t / options["d_0"])
        return torch.where(t < options["c"], 1.0, cooling.clamp_min(0.1))
    # edt
    p = logits.double().softmax(dim=-1)
    entropy = torch.special.entr(p).sum(dim=-1)
    tau = 0.8 ** (options["theta"] / entropy)
    return tau.clamp_min(0.1)


@torch.no_grad()
def scheduled_gaps(
    model: Any,
    rollouts: Sequence[Rollout],
    name: str | None,
    options: dict[str, Any],
    temperature: float = 1.0,
) -> torch.Tensor:
    """|Δ log π| between a rollout and a Hugging Face forward of it at the schedule's temperatures; None: at τ = 1.

    Under ``ladder`` the rollouts are all answers to one prompt, in their order. The gap is in units of the logits: at
    τ = 0.1 their float32 rounding counts ten times in log π, so multiply a gap there by τ.
    """
    gaps = []
    for answer, rollout in enumerate(rollouts):
        tokens = torch.tensor([rollout.sequence])
        start = len(rollout.prompt)
        with replaying(model, [rollout.record], attention_mask=torch.ones_like(tokens)):
            logits = model(tokens).logits[0, start - 1 : -1].double()
        tau = torch.ones(len(logits))
        if name is not None:
            tau = temperatures(name, options, logits, answer, len(rollouts))
        scaled = logits / (temperature * tau).unsqueeze(-1)
        chosen = tokens[0, start:].unsqueeze(-1)
        log_probs = scaled.log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)
        gap = (log_probs - torch.from_numpy(rollout.log_probs)).abs()
        gaps.append(gap * tau.clamp_max(1.0))
    return torch.cat(gaps)
