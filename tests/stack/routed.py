# SPDX-License-Identifier: Apache-2.0
"""What TARPO's router decided in an engine of this process, and what a replayed forward says of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
DECISION_WEIGHT = 0.1


@contextmanager
def decisions() -> Iterator[Decisions]:
    """Notes what the router says of each position that it is asked about; a position is asked about once."""
    noted: Decisions = {}
    original = TARPO.propose

    def propose(self: TARPO, step: Step) -> Any:
        seeds = step.seeds.tolist()
        positions = step.positions.tolist()
        log_probs = step.module.log_probs(step.hidden).tolist()
        for seed, position, pair in zip(seeds, positions, log_probs):
            # An engine rehearses a step at positions 0 and 1 before its first request.
            if position > 1:
                assert (seed, position) not in noted, "the router was asked twice about one position"
                noted[seed, position] = pair
        return original(self, step)

    TARPO.propose = propose
    try:
        yield noted
    finally:
        TARPO.propose = original


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Far from where the router starts: logits that the hidden state moves by several units, and no bias."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            draws = torch.randn(parameter.shape, generator=generator)
            size = 1.5 / parameter.shape[-1] ** 0.5
            parameter.data.copy_(size * draws)
        else:
            # The parameter is added to the bias of the start, (4.6, 0).
            parameter.data.copy_(torch.tensor([-4.6, 0.0]))
    return module


def replayed(model: Any, rollouts: Sequence[Rollout], weight: float) -> tuple[list[Tensor], list[Tensor]]:
    """Entries of the trainer's loss and the tokens' own log π, (generated,) of each rollout, with gradient.

    ``weight``: of log π of a decision beside log π of its token.
    """
    longest = max(len(rollout.sequence) for rollout in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        # Padded on the left.
        start = longest - len(rollout.sequence)
        tokens[row, start:] = torch.tensor(rollout.sequence)
        mask[row, start:] = 1
    records = [rollout.record for rollout in rollouts]
    scope = ReplayScope(
        model.get_input_embeddings(),
        module=parameters.attached(model),
        perturbation=create("tarpo", decision_weight=weight),
        hidden=LastHidden(model.get_output_embeddings(), "a test"),
    )
    with scope(records, mask), densities(scope, TEMPERATURE) as density:
        position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
        output = model(tokens, attention_mask=mask, position_ids=position_ids)
        logits = output.logits.float() / TEMPERATURE
        # The last label is the first token again, so its entry is left out.
        loss_entries = hooked(logits, tokens.roll(-1, dims=1))[:, :-1]
        own_log_probs = density.token_log_probs(loss_entries.detach())
    entries_of_rollouts = []
    own_of_rollouts = []
    for row, rollout in enumerate(rollouts):
        generated = len(rollout.tokens)
        entries_of_rollouts.append(loss_entries[row, -generated:])
        own_of_rollouts.append(own_log_probs[row, -generated:])
    return entries_of_rollouts, own_of_rollouts


class Comparison(NamedTuple):
    """Largest gaps between rollout and replay, and what they are the largest of."""

    token_gap: float
    decision_gap: float
    decisions: int
    latent: int  # decisions to feed the mixture


def compare(model: Any, rollouts: Sequence[Rollout], seen: Decisions) -> Comparison:
    """Compares tokens and decisions of rollouts with those of a replay; ``seen``: of :func:`decisions`."""
    token_gap = 0.0
    decision_gap = 0.0
    count = 0
    latent = 0
    with torch.no_grad():
        entries_of_rollouts, own_of_rollouts = replayed(model, rollouts, DECISION_WEIGHT)
    for rollout, entries, own_log_probs in zip(rollouts, entries_of_rollouts, own_of_rollouts):
        gap = (own_log_probs - torch.from_numpy(rollout.log_probs)).abs().max().item()
        token_gap = max(token_gap, gap)
        record = rollout.record
        for position, weights, ids in zip(record.positions.tolist(), record.weights, record.ids):
            if position >= len(rollout.sequence):
                continue
            generated = position - len(rollout.prompt)
            assert ids[0] == rollout.tokens[generated]
            # The sampled token stands first: its weight is 0 where the mixture is fed, and else 1.
            is_latent = int(weights[0] == 0.0)
            assert is_latent or weights[1:].sum() == 0.0
            decision_log_prob = (entries[generated] - own_log_probs[generated]).item() / DECISION_WEIGHT
            rollout_log_prob = seen[record.seed, position][is_latent]
            decision_gap = max(decision_gap, abs(decision_log_prob - rollout_log_prob))
            count += 1
            latent += is_latent
    return Comparison(token_gap, decision_gap, count, latent)
