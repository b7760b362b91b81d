# SPDX-License-Identifier: Apache-2.0
"""``--credit``: the advantage of a response is shared among its tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.types import Experience
from ngrpo.methods.credits.base import StepTokens, check_results
from ngrpo.trainers.openrlhf.experiences import masked, set_marks
from ngrpo.trainers.openrlhf.model_actors import kept_by_actors
from perturbations.errors import require
from perturbations.seeds import trajectory_seed


def share_among_tokens(maker: Any, experiences: list[Experience]) -> dict[str, float]:
    """Replaces the tokens' advantages by those of the run's credit, in-place, for any estimator.

    Returns the metrics ``credit/…`` (docs/metrics.md): ``entropy``, the mean over all trained tokens; ``trained``, the
    share of tokens with an advantage other than 0 that still have one; ``size``, Σ |A| after the credit over Σ |A|
    before it.
    """
    credit = require(current_run().credit, "--credit")
    tokens = step_tokens(maker, experiences)
    before = tokens.advantages
    after = credit.formula(tokens)
    marks = credit.marks(tokens)
    check_results(credit, "formula", len(before), after)
    for experience, row_values in zip(experiences, _split(experiences, after)):
        mask = experience.action_mask.bool()
        row_values = row_values.to(experience.advantages.dtype)
        experience.advantages = experience.advantages.masked_scatter(mask, row_values)
    if marks is not None:
        check_results(credit, "marks", len(before), marks)
        for experience, row_values in zip(experiences, _split(experiences, marks)):
            mask = experience.action_mask.bool()
            set_marks(experience, torch.zeros_like(mask).masked_scatter(mask, row_values.bool()))

    had_advantage = before != 0.0
    measures = {"entropy": tokens.entropies.mean().item()}
    if had_advantage.any():
        measures["trained"] = (after[had_advantage] != 0.0).float().mean().item()
        measures["size"] = (after.abs().sum() / before.abs().sum()).item()
    return {f"credit/{name}": value for name, value in measures.items()}


def step_tokens(maker: Any, experiences: Sequence[Experience]) -> StepTokens:
    """The trained tokens of a step, for a credit."""
    advantages = masked(experiences, [experience.advantages for experience in experiences])
    log_probs = [experience.action_log_probs for experience in experiences]
    # The actor's forward, which gives PPO's old log-probabilities, kept the entropy at each token on the CPU.
    entropies = [
        of_batch.to(experience.action_mask.device)
        for experience, of_batch in zip(experiences, kept_by_actors(maker, "token_entropies", log_probs))
    ]
    lengths = torch.cat([experience.action_mask.bool().sum(dim=-1) for experience in experiences])
    responses = torch.arange(len(lengths)).to(lengths).repeat_interleave(lengths)
    # The numbers of the responses in the order of generation, in which a prompt's responses are side by side.
    numbers = torch.tensor([number for experience in experiences for number in experience.index]).to(lengths)
    groups = numbers // maker.args.rollout.n_samples_per_prompt
    seeds = [trajectory_seed(maker.args.train.seed, maker.training_step, number) for number in numbers.tolist()]
    return StepTokens(
        advantages=advantages,
        entropies=masked(experiences, entropies).to(advantages),
        log_probs=masked(experiences, log_probs).to(advantages),
        responses=responses,
        groups=groups[responses],
        seeds=torch.tensor(seeds, dtype=torch.int64).to(responses)[responses],
    )


def _split(experiences: Sequence[Experience], values: Tensor) -> tuple[Tensor, ...]:
    """A step's values of trained tokens, (N,), as one row for each micro-batch."""
    return values.split([int(experience.action_mask.bool().sum()) for experience in experiences])
