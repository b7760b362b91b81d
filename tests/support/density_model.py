# SPDX-License-Identifier: Apache-2.0
"""A small model whose forward is replayed under every density."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.trainers.common.log_probs import densities, with_overrides
from perturbations.base import Perturbation, Step
from perturbations.registry import create
from perturbations.replay import ReplayRecord
from perturbations.replay.scope import ReplayScope
from tests.support.density_steps import PERTURBATIONS, D, V, a_step, generator, likely
from tests.support.token_log_probs import log_probs_of


def record_of(perturbation: Perturbation, step: Step, prompt: int = 5) -> ReplayRecord:
    edit = perturbation.propose(step).edit
    return ReplayRecord(
        int(step.seeds[0]),
        prompt,
        prompt + len(step.seeds),
        step.positions.numpy().astype(np.int32),
        edit.ids.numpy().astype(np.int32),
        edit.weights.numpy(),
        None if edit.sigma is None else edit.sigma.numpy(),
        np.ones(len(step.seeds), dtype=bool),
        normalizer=None if edit.normalizer is None else edit.normalizer.numpy(),
    )


class Model(nn.Module):
    """An embedding and a head; logits of a row depend on that row's input alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


hooked = with_overrides(log_probs_of)


def a_gaussian(base: str) -> Perturbation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the argmax
        return create("gaussian", density="gaussian", base=base)


EVERY = [*PERTURBATIONS, a_gaussian("token"), a_gaussian("fuzzy")]


def name_of(perturbation: Perturbation) -> str:
    return "-".join([perturbation.name, *([perturbation.base] if perturbation.name == "gaussian" else [])])


STEPS = {0: a_step(likely(4)), 2: a_step(likely(3), seed=5)}


def batch(perturbation: Perturbation) -> tuple[Tensor, Tensor, list[ReplayRecord | None]]:
    """Three right-padded samples of 12, 9 and 7 tokens with 4, none and 3 perturbed positions, one of them cut off."""
    tokens = torch.randint(0, V, (3, 12), generator=generator())
    mask = torch.ones_like(tokens)
    mask[1, 9:], mask[2, 7:] = 0, 0
    first, third = (record_of(perturbation, step) for step in STEPS.values())
    return tokens, mask, [first, None, third]


def perturbed(records: list[ReplayRecord | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and entries, t − 1 of a position t, of what the records hold within each row's length."""
    held = [(row, t) for row, record in enumerate(records) if record for t in record.positions.tolist()]
    rows, entries = torch.tensor([(row, t - 1) for row, t in held if t < int(mask[row].sum())]).T
    return rows, entries


def run(
    model: Model,
    perturbation: Perturbation,
    tokens: Tensor,
    mask: Tensor,
    records: list,
    packed: bool = False,
    temperature: float = 1.0,
    advantages: Tensor | None = None,
) -> tuple[Tensor, Any]:
    labels, shape = torch.roll(tokens, -1, 1), tokens.shape
    if packed:
        tokens, labels = tokens[mask.bool()].unsqueeze(0), labels[mask.bool()].unsqueeze(0)
    scope = ReplayScope(model.embedding, perturbation=perturbation)
    with scope(records, mask), densities(scope, temperature, advantages) as ours:
        result = hooked(model(tokens) / temperature, labels)
        if packed:
            result = torch.zeros(shape).masked_scatter(mask.bool(), result[0])
        result = torch.cat([ours.for_policy_loss(result[:, :-1]), result[:, -1:]], dim=1)
        seen = SimpleNamespace(tokens=ours.replayed_log_probs, own=ours.token_log_probs(result[:, 4:-1].detach()))
    return result, seen
