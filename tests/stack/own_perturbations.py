# SPDX-License-Identifier: Apache-2.0
"""Perturbations for the stack tests, found by their address."""

from dataclasses import dataclass

import torch

from perturbations import InputEdit, Perturbation, Proposal, Step, dense_edit, option, register


@register("dense-shake")
@dataclass(frozen=True, kw_only=True)
class DenseShake(Perturbation):
    """Feeds the sampled token's embedding with noise that no seed of the record gives again."""

    strength: float = option(0.3, "size of the noise relative to the embedding", low=0.0)

    def propose(self, step: Step) -> Proposal:
        own = step.embeddings.lookup(step.sampled).float()
        noise = step.normal(own.shape[-1])
        scale = self.strength * own.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        return Proposal(dense_edit(step.sampled, own + scale * noise), step.sampled)


@register("second-likeliest")
@dataclass(frozen=True, kw_only=True)
class RunnerUp(Perturbation):
    """Writes the second likeliest token, which a request's top-k, top-p or min-p may exclude."""

    def propose(self, step: Step) -> Proposal:
        tokens = step.logits.topk(2, dim=-1).indices[:, 1]
        return Proposal(InputEdit(tokens.unsqueeze(-1), torch.ones_like(step.logits[:, :1])), tokens)
