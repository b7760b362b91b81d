# SPDX-License-Identifier: Apache-2.0
"""What TARPO's router decided in an engine of this process, and what a replayed forward says of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ngrpo.trainers.common.log_probs import densities
from perturbations import create, parameters
from perturbations.methods.learned import TARPO
from perturbations.replay.scope import LastHidden, ReplayScope
from perturbations.step import Step
from tests.stack.harness import Rollout
from tests.support.density_model import hooked

Decisions = dict[tuple[int, int], list[float]]
"""log π of both decisions by (seed of the trajectory, position)."""
TEMPERATURE = 0.8


@contextmanager
def decisions() -> Iterator[Decisions]:
    """Notes what the router says of each position that it is asked about; a position is asked about once."""
    found: Decisions = {}
    plain = TARPO.propose

    def propose(self: TARPO, step: Step) -> Any:
        log_probs: Tensor = step.module.log_probs(step.hidden)
        for seed, position, pair in zip(step.seeds.tolist(), step.positions.tolist(), log_probs.tolist()):
            if position > 1:  # not of a rehearsal
                found[seed, position] = pair
        return plain(self, step)

    TARPO.propose = propose
    try:
        yield found
    finally:
        TARPO.propose = plain


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Far from where the router starts: logits that the hidden state moves by several units, and no bias."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        draws = torch.randn(parameter.shape, generator=generator)
        size = 1.5 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(size * draws if name.endswith("weight") else torch.tensor([-4.6, 0.0]))
    return module


def replayed(model: Any, rollouts: Sequence[Rollout], weight: float) -> tuple[list[Tensor], list[Tensor]]:
    """Entries of the trainer's loss and the tokens' own log π, (generated,) of each rollout, with gradient."""
    longest = max(len(r.sequence) for r in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        tokens[row, -len(rollout.sequence) :] = torch.tensor(rollout.sequence)  # padded on the left
        mask[row, -len(rollout.sequence) :] = 1
    hidden = LastHidden(model.get_output_embeddings(), "a test")
    scope = ReplayScope(
        model.get_input_embeddings(),
        module=parameters.attached(model),
        perturbation=create("tarpo", decision_weight=weight),
        hidden=hidden,
    )
    with scope([r.record for r in rollouts], mask), densities(scope, TEMPERATURE) as ours:
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = model(tokens, attention_mask=mask, position_ids=places).logits.float() / TEMPERATURE
        entries = hooked(logits, tokens.roll(-1, dims=1))
        own = ours.token_log_probs(entries[:, :-1].detach())
    counts = [len(r.tokens) for r in rollouts]
    return [e[-n - 1 : -1] for e, n in zip(entries, counts)], [o[-n:] for o, n in zip(own, counts)]


def compare(model: Any, rollouts: Sequence[Rollout], seen: Decisions) -> tuple[float, float, int, int]:
    """Largest gap of a token and of a decision between rollout and replay; how many decisions, and how many latent."""
    weight, token_gap, gap, count, latent = 0.1, 0.0, 0.0, 0, 0
    with torch.no_grad():
        entries, own = replayed(model, rollouts, weight)
    for rollout, entry, tokens in zip(rollouts, entries, own):
        token_gap = max(token_gap, (tokens - torch.from_numpy(rollout.log_probs.copy())).abs().max().item())
        record = rollout.record
        for position, row, ids in zip(record.positions.tolist(), record.weights, record.ids):
            if position >= len(rollout.sequence):
                continue
            decided = int(row[0] == 0.0)
            at = position - len(rollout.prompt)
            assert ids[0] == rollout.tokens[at] and (decided or row[1:].sum() == 0.0)
            given = (entry[at] - tokens[at]).item() / weight
            gap = max(gap, abs(given - seen[record.seed, position][decided]))
            count, latent = count + 1, latent + decided
    return token_gap, gap, count, latent
