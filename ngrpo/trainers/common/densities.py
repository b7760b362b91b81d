# SPDX-License-Identifier: Apache-2.0
"""Densities: at perturbed positions the action's log-probability overrides the token's (`log_probs.py`).

A density whose noise is too narrow, or of too many dimensions, for a ratio (`Perturbation.score_only`; that of the fed
vector itself is unbounded, and rounding alone moves it by nats) enters in REINFORCE form, as density −
stop_gradient(density), and enters the policy loss alone: its value is 0 everywhere, so ratio and clip are the token's,
and its gradient is that of the policy on the first update of a rollout, the only one. The KL term is the token's in
value and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ngrpo.trainers.common.log_probs import override_log_probs
from perturbations.base import Replayed
from perturbations.errors import require
from perturbations.replay.scope import ReplayScope


class Densities:
    """The densities of one replayed forward.

    Attributes:
        tokens: the tokens' own log π at the replayed positions, (N,) float32, detached; None before the forward.
    """

    def __init__(self, scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> None:
        """
        Args:
            scope: the scope that replays this forward, already entered, whose perturbation has a density.
            temperature: by which the logits are divided.
            advantages: of the actions, (B, A), where this forward is for the loss.
        """
        self._perturbation = require(scope.perturbation, "the scope's perturbation")
        self._scope, self._temperature = scope, temperature
        self._advantages = advantages
        self._scored: Tensor | None = None
        self.tokens: Tensor | None = None

    def override(
        self,
        logits: Float[Tensor, "*forward vocabulary"],
        labels: Int64[Tensor, "*forward"],
        log_probs: Float[Tensor, "*forward"],
    ) -> Float[Tensor, "*forward"]:
        """Log-probabilities with the density at perturbed positions.

        Args:
            logits: z̃, (…, V), in the layout of the forward's input.
            labels: the token that follows each row, (…); not looked at.
            log_probs: of the tokens that follow each row, (…).

        Returns:
            As ``log_probs``.

        Raises:
            RuntimeError: where the logits are not those of the replayed forward, or the perturbation answers in a wrong
                shape.
        """
        flat = log_probs.reshape(-1)
        replayed, inside = self._scope.replayed(
            logits.reshape(-1, logits.shape[-1]), flat, self._temperature, self._advantages
        )
        self.tokens = replayed.token_log_probs.detach()
        action = self._action(replayed, inside)
        # Positions that were cut off are written to one more entry, which is dropped.
        target = torch.where(inside, replayed.rows, len(flat))
        padded = torch.cat([flat, flat.new_zeros(1)])
        return padded.index_copy(0, target, action.to(flat.dtype))[:-1].view_as(log_probs)

    def for_policy_loss(self, log_probs: Float[Tensor, "batch actions"]) -> Float[Tensor, "batch actions"]:
        """The forward's log-probabilities as the policy loss takes them, (B, A): of the last A tokens of each row.

        The same, except where a density counts by its score alone: then that is in them.
        """
        density, self._scored = self._scored, None
        if density is None:
            return log_probs
        score = density - density.detach()
        return log_probs + self._scope.to_tokens(score, (log_probs.shape[0], log_probs.shape[1])).to(log_probs.dtype)

    def token_log_probs(self, log_probs: Tensor) -> Tensor:
        """The tokens' own log-probabilities of the forward, while it is replayed: what the rollout's are compared with.

        Args:
            log_probs: what the forward returned, densities included, (B, A): of the last A tokens of each row.

        Returns:
            (B, A), on the CPU.
        """
        if self.tokens is None:
            return log_probs.cpu()
        shape = (log_probs.shape[0], log_probs.shape[1])
        parts = self.tokens.float(), torch.ones_like(self.tokens)
        own, there = (self._scope.to_tokens(part, shape).cpu() for part in parts)
        return torch.where(there > 0, own, log_probs.cpu())

    @property
    def left(self) -> bool:
        """Whether a density that counts by its score was computed and not taken: the score would be lost."""
        return self._scored is not None

    def _action(self, replayed: Replayed, inside: Tensor) -> Tensor:
        """log π of all that was drawn at each perturbed position, (N,), which exist where ``inside``."""
        tokens = replayed.token_log_probs
        own = tokens if self._perturbation.draws_token else torch.zeros_like(tokens)
        if self._perturbation.score_only and not torch.is_grad_enabled():
            return own  # old and reference: the value in REINFORCE form
        density = self._perturbation.log_density(replayed)
        if density.shape != tokens.shape:
            raise RuntimeError(
                f"perturbation {self._perturbation.name!r}: log_density returns {tuple(density.shape)} for"
                f" {len(tokens)} positions: one number for each is needed."
            )
        if self._perturbation.score_only:
            self._scored = torch.where(inside, density, 0.0)
            return own
        return own + density


@contextmanager
def densities(scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> Iterator[Densities | None]:
    """Puts the density of a scope's perturbation into the log-probabilities of the forward in this context.

    Args:
        scope: the scope of the replay, already entered. Where it holds no perturbed position the density is computed
            all the same, on no rows: on several ranks every one must gather the same parameters.
        temperature: the actor's.
        advantages: of the actions, (B, A), where the forward is for the loss.

    Yields:
        The densities, or None where the perturbation has none.

    Raises:
        RuntimeError: at the end, where no log-probabilities came through, or no loss took the gradient of a density.
    """
    perturbation = scope.perturbation
    if perturbation is None or not perturbation.has_density:
        yield None
        return
    ours = Densities(scope, temperature, advantages)
    with override_log_probs(
        ours.override,
        f"the density of perturbation {perturbation.name!r} was not computed",
        "Training on the tokens' log-probabilities instead would be another method: take that path out, or"
        " --perturbation.density token.",
    ):
        yield ours
    if ours.left:
        raise RuntimeError(
            f"the density of perturbation {perturbation.name!r} reached no policy loss: nothing asked for"
            " Densities.for_policy_loss. Take out what replaces the actor's loss function, or add"
            " --perturbation.density token."
        )
