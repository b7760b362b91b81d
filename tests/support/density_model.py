# SPDX-License-Identifier: Apache-2.0
"""A small model whose forward is replayed under every density."""

import warnings
from typing import NamedTuple

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
    """The record of a trajectory whose positions after the prompt are the step's rows."""
    edit = perturbation.propose(step).edit
    rows = len(step.seeds)
    return ReplayRecord(
        seed=int(step.seeds[0]),
        prompt_tokens=prompt,
        num_tokens=prompt + rows,
        positions=step.positions.numpy().astype(np.int32),
        ids=edit.ids.numpy().astype(np.int32),
        weights=edit.weights.numpy(),
        sigma=None if edit.sigma is None else edit.sigma.numpy(),
        agreed=np.ones(rows, dtype=bool),
        normalizer=None if edit.normalizer is None else edit.normalizer.numpy(),
    )


class Model(nn.Module):
    """An embedding and a head; logits of a row depend on that row's input alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


hooked = with_overrides(log_probs_of)


def a_gaussian(base: str) -> Perturbation:
    """A Gaussian with a density."""
    with warnings.catch_warnings():
        # With base="fuzzy" it warns that the token of the text is never trained.
        warnings.simplefilter("ignore", UserWarning)
        return create("gaussian", density="gaussian", base=base)


EVERY = [*PERTURBATIONS, a_gaussian("token"), a_gaussian("fuzzy")]


def name_of(perturbation: Perturbation) -> str:
    """A test's id: the perturbation's name, and a Gaussian's base."""
    if perturbation.name == "gaussian":
        return f"gaussian-{perturbation.base}"
    return perturbation.name


STEPS = {0: a_step(likely(4)), 2: a_step(likely(3), seed=5)}


def batch(perturbation: Perturbation) -> tuple[Tensor, Tensor, list[ReplayRecord | None]]:
    """Three right-padded samples of 12, 9 and 7 tokens with 4, none and 3 perturbed positions, one of them cut off."""
    tokens = torch.randint(0, V, (3, 12), generator=generator())
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    mask[2, 7:] = 0
    first, third = (record_of(perturbation, step) for step in STEPS.values())
    return tokens, mask, [first, None, third]


def perturbed(records: list[ReplayRecord | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and entries, t − 1 of a position t, of what the records hold within each row's length."""
    rows = []
    entries = []
    for row, record in enumerate(records):
        if record is None:
            continue
        length = int(mask[row].sum())
        for position in record.positions.tolist():
            if position < length:
                rows.append(row)
                entries.append(position - 1)
    return torch.tensor(rows), torch.tensor(entries)


class Seen(NamedTuple):
    """What a trainer logs of a replayed forward.

    Attributes:
        tokens: log π of the tokens alone at the replayed positions, (N,); None where no forward was replayed.
        own: the same of every entry from the fifth on, (B, T − 5).
    """

    tokens: Tensor | None
    own: Tensor


def run(
    model: Model,
    perturbation: Perturbation,
    tokens: Tensor,
    mask: Tensor,
    records: list,
    packed: bool = False,
    temperature: float = 1.0,
    advantages: Tensor | None = None,
) -> tuple[Tensor, Seen]:
    """Entries of the policy's loss, (B, T), in a replayed forward; ``packed``: of one row without the padding."""
    labels = torch.roll(tokens, -1, 1)
    shape = tokens.shape
    held = mask.bool()
    if packed:
        tokens = tokens[held].unsqueeze(0)
        labels = labels[held].unsqueeze(0)
    scope = ReplayScope(model.embedding, perturbation=perturbation)
    with scope(records, mask), densities(scope, temperature, advantages) as overrides:
        log_probs = hooked(model(tokens) / temperature, labels)
        if packed:
            log_probs = torch.zeros(shape).masked_scatter(held, log_probs[0])
        # The last label is the first token again, which no trainer scores.
        loss_entries = overrides.for_policy_loss(log_probs[:, :-1])
        result = torch.cat([loss_entries, log_probs[:, -1:]], dim=1)
        own = overrides.token_log_probs(result[:, 4:-1].detach())
        seen = Seen(overrides.replayed_log_probs, own)
    return result, seen
