# SPDX-License-Identifier: Apache-2.0
"""Perturbations and a gate for the stack tests, found by their address."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import (
    Gate,
    GateStep,
    InputEdit,
    Perturbation,
    Proposal,
    Step,
    dense_edit,
    option,
    register,
    register_gate,
)


@register("dense-shake")
@dataclass(frozen=True, kw_only=True)
class DenseShake(Perturbation):
    """Feeds the sampled token's embedding with noise that no seed of the record gives again."""

    strength: float = option(0.3, "size of the noise relative to the embedding", low=0.0)

    def propose(self, step: Step) -> Proposal:
        embedding = step.embeddings.lookup(step.sampled).float()
        noise = step.normal(embedding.shape[-1])
        direction = noise / noise.norm(dim=-1, keepdim=True)
        size = self.strength * embedding.norm(dim=-1, keepdim=True)
        return Proposal(dense_edit(step.sampled, embedding + size * direction), step.sampled)


@register("second-likeliest")
@dataclass(frozen=True, kw_only=True)
class RunnerUp(Perturbation):
    """Writes the second likeliest token, which a request's top-k, top-p or min-p may exclude."""

    def propose(self, step: Step) -> Proposal:
        second = step.logits.topk(2, dim=-1).indices[:, 1:]
        weights = torch.ones_like(second, dtype=step.logits.dtype)
        return Proposal(InputEdit(second, weights), second.squeeze(-1))


@register_gate("rationed")
@dataclass(frozen=True, kw_only=True)
class Rationed(Gate):
    """Open until 20 positions were perturbed, and closed for two positions after some tokens."""

    def initial_state(self) -> Mapping[str, float]:
        return {"spent": 0, "closed": 0}

    def open(self, step: GateStep) -> Tensor:
        return (step.state["spent"] < 20) & (step.state["closed"] == 0)

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        remaining = (step.state["closed"] - 1).clamp_min(0)
        closes = step.sampled % 5 == 0
        return {
            "spent": step.state["spent"] + fed,
            "closed": torch.where(closes, 2, remaining),
        }
