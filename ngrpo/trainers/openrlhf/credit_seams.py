# SPDX-License-Identifier: Apache-2.0
"""Advantages by token: the functions of the ``credit`` rows of `patches.py`.

The actor's forward over the rollouts, which gives PPO's old log-probabilities, also gives the entropy at each token.
Once OpenRLHF has its advantages, whatever the estimator, the credit shares them anew among all tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.methods.credits.base import StepTokens
from ngrpo.trainers.openrlhf.metrics import kept_by_actors, note_measures
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ExperienceMaker


def with_entropies(plain: type) -> type:
    """`PolicyModelActor`: its forward keeps the entropies beside the log-probabilities that it returns."""

    class EntropyKeepingActor(plain):  # type: ignore[misc, valid-type]
        def forward(self, *args: object, **kwargs: object) -> Any:
            original, entropies = self.actor.forward, []

            def forward(*inputs: object, **options: object) -> Any:
                log_probs, output = original(*inputs, return_output=True, return_entropy=True, **options)
                entropies.append(output.entropy[:, -log_probs.shape[1] :].float().cpu())
                return log_probs

            self.actor.forward = forward
            try:
                log_probs = super().forward(*args, **kwargs)
            finally:
                del self.actor.forward
            # The last forward is that of the batch; the proof of the replay comes before a run's first one.
            self._entropies = [*getattr(self, "_entropies", ()), entropies[-1]]
            return log_probs

        def token_entropies(self) -> list[Tensor]:
            """The entropies of each forward since the last call, (B, A) each."""
            entropies, self._entropies = getattr(self, "_entropies", []), []
            return entropies

    return EntropyKeepingActor


def shared(maker: ExperienceMaker, experiences: list[Experience]) -> None:
    """Gives the tokens of a step the advantages of the run's credit, in place."""
    tokens, masks = of_step(maker, experiences), [experience.action_mask.bool() for experience in experiences]
    before = tokens.advantages
    credit = present(current_run().credit, "--credit")
    after = credit.formula(tokens)
    if after.shape != before.shape:
        raise RuntimeError(
            f"credit {credit.name!r}: formula returns {tuple(after.shape)} for {len(before)} tokens: one"
            " number for each is needed."
        )
    for experience, mask, part in zip(experiences, masks, after.split([int(mask.sum()) for mask in masks])):
        experience.advantages = experience.advantages.masked_scatter(mask, part.to(experience.advantages.dtype))
    note_measures(maker, measures(before, after, tokens.entropies))


def of_step(maker: ExperienceMaker, experiences: list[Experience]) -> StepTokens:
    """What a credit is told of the tokens of a step."""
    masks = [experience.action_mask.bool() for experience in experiences]
    entropies = kept_by_actors(maker, "token_entropies", [e.action_log_probs for e in experiences])
    advantages = torch.cat([experience.advantages[mask] for experience, mask in zip(experiences, masks)])
    lengths = torch.cat([mask.sum(dim=-1) for mask in masks])
    # As in advantage_seams.py: where each answer stood when it was generated, a prompt's side by side.
    order = torch.tensor([place for experience in experiences for place in experience.index]).to(lengths)
    answers = torch.arange(len(lengths)).to(lengths).repeat_interleave(lengths)
    return StepTokens(
        advantages,
        torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)]).to(advantages),
        torch.cat([e.action_log_probs[mask] for e, mask in zip(experiences, masks)]).to(advantages),
        answers,
        (order // maker.args.rollout.n_samples_per_prompt)[answers],
    )


def measures(before: Tensor, after: Tensor, entropies: Tensor) -> dict[str, float]:
    """What a step reports of its credit, all (N,).

    Returns:
        ``entropy``: mean over the tokens; ``trained``: the share of tokens with an advantage other than 0, of those
        that had one; ``size``: the mean size of the advantages, over that of those before.
    """
    had = before != 0.0
    result = {"entropy": entropies.mean().item()}
    if had.any():
        result["trained"] = (after[had] != 0.0).float().mean().item()
        result["size"] = (after.abs().sum() / before.abs().sum()).item()
    return {f"credit/{name}": value for name, value in result.items()}


def own_credit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.compute_advantages_and_returns`, whose advantages are then shared among tokens anew."""

    def compute_advantages_and_returns(self: ExperienceMaker, experiences: list[Experience]) -> Any:
        result = original(self, experiences)
        shared(self, result)
        return result

    return compute_advantages_and_returns
