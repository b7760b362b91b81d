# SPDX-License-Identifier: Apache-2.0
"""Overrides of the log-probabilities that a trainer takes from logits: densities, and the sampling mask's correction.

The function that :func:`with_overrides` wraps gives the old, new and reference log-probabilities, so an override
reaches the ratio, the clip and the KL term.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.trainers.common.sample_records import part_of_each
from perturbations.errors import require
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.scope import ReplayScope, flat_rows

Override = Callable[[Tensor, Tensor, Tensor], Tensor]
_active: ContextVar[tuple[Override, ...]] = ContextVar("log_prob_overrides", default=())


def with_overrides(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A trainer's function from logits and labels to log-probabilities, with the overrides of the context."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, *args: object, **kwargs: object) -> Tensor:
        log_probs = original(logits, labels, *args, **kwargs)
        for override in _active.get():
            log_probs = override(logits, labels, log_probs)
        return log_probs

    return log_probs_from_logits


@contextmanager
def override_log_probs(override: Override, failed: str, fix: str) -> Iterator[None]:
    """Overrides the log-probabilities of the forward in this context, after the overrides of outer contexts.

    Args:
        override: from logits (…, V), labels (…) and log-probabilities (…) to log-probabilities.
        failed: the beginning of the RuntimeError if the override was never called.
        fix: its end.
    """
    used = False

    def noted(*tensors: Tensor) -> Tensor:
        nonlocal used
        used = True
        return override(*tensors)

    token = _active.set((*_active.get(), noted))
    try:
        yield
    finally:
        _active.reset(token)
    if not used:
        source = "openrlhf.models.actor.log_probs_from_logits (0.11.2), as with a fused loss"
        raise RuntimeError(f"{failed}: the model's log-probabilities did not come from {source}. {fix}")


@contextmanager
def no_overrides() -> Iterator[None]:
    """A forward in this context has the plain log-probabilities, whatever outer contexts override."""
    token = _active.set(())
    try:
        yield
    finally:
        _active.reset(token)


# ---- densities ---------------------------------------------------------------------------------------------------


class Densities:
    """The densities of one replayed forward: the action's log-probability overrides the token's at perturbed positions.

    A density with noise that is too narrow, or of too many dimensions, for a ratio (`Perturbation.score_only`; rounding
    alone moves it by nats) enters only the policy loss, as density − stop_gradient(density). So ratio, clip and KL term
    are the token's, and its gradient is right on a rollout's first update, the only one.
    """

    def __init__(self, scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> None:
        """``scope`` is already entered; ``advantages`` of the actions, (B, A), are given for the loss's forward."""
        self._perturbation = require(scope.perturbation, "the scope's perturbation")
        self._scope, self._temperature, self._advantages = scope, temperature, advantages
        self._scored: Tensor | None = None
        self.tokens: Tensor | None = None

    def override(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities (…) with the density, of logits (…, V); RuntimeError if a shape is wrong."""
        flat = log_probs.reshape(-1)
        replayed, inside = self._scope.replayed(logits.flatten(0, -2), flat, self._temperature, self._advantages)
        perturbation, tokens = self._perturbation, replayed.token_log_probs
        self.tokens = tokens.detach()
        action = tokens if perturbation.draws_token else torch.zeros_like(tokens)
        # What counts by its score alone is worth 0 in old and reference log-probabilities.
        if not perturbation.score_only or torch.is_grad_enabled():
            density = perturbation.log_density(replayed)
            if density.shape != tokens.shape:
                shapes = f"{tuple(density.shape)} for {len(tokens)} positions: one number for each is needed."
                raise RuntimeError(f"perturbation {perturbation.name!r}: log_density returns {shapes}")
            if perturbation.score_only:
                self._scored = torch.where(inside, density, 0.0)
            else:
                action = action + density
        # Positions that were cut off are written to one more entry, which is dropped.
        target = torch.where(inside, replayed.rows, len(flat))
        padded = torch.cat([flat, flat.new_zeros(1)])
        return padded.index_copy(0, target, action.to(flat.dtype))[:-1].view_as(log_probs)

    def for_policy_loss(self, log_probs: Float[Tensor, "batch actions"]) -> Float[Tensor, "batch actions"]:
        """Log-probabilities of the last A tokens of each row, (B, A), with the density that counts by its score."""
        density, self._scored = self._scored, None
        if density is None:
            return log_probs
        score = density - density.detach()
        return log_probs + self._scope.to_tokens(score, (log_probs.shape[0], log_probs.shape[1])).to(log_probs.dtype)

    def token_log_probs(self, log_probs: Tensor) -> Tensor:
        """The tokens' own log π for a forward's log-probabilities, (B, A) on the CPU, while the scope replays."""
        if self.tokens is None:
            return log_probs.cpu()
        shape = (log_probs.shape[0], log_probs.shape[1])
        parts = self.tokens.float(), torch.ones_like(self.tokens)
        own, there = (self._scope.to_tokens(part, shape).cpu() for part in parts)
        return torch.where(there > 0, own, log_probs.cpu())

    @property
    def left(self) -> bool:
        """Whether no loss has taken a density that counts by its score."""
        return self._scored is not None


@contextmanager
def densities(scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> Iterator[Densities | None]:
    """Overrides the log-probabilities of the forward in this context by densities, if the perturbation has one.

    Raises ``RuntimeError`` at the end, if no log-probabilities came through, or no loss took a density's gradient.
    """
    perturbation = scope.perturbation
    # Without a perturbed position too: on several ranks every one must gather the same parameters.
    if perturbation is None or not perturbation.has_density:
        yield None
        return
    ours = Densities(scope, temperature, advantages)
    with override_log_probs(
        ours.override,
        f"the density of perturbation {perturbation.name!r} was not computed",
        "Training on the tokens' log-probabilities is another method: take that path out, or add"
        " --perturbation.density token.",
    ):
        yield ours
    if ours.left:
        raise RuntimeError(
            f"the density of perturbation {perturbation.name!r} reached no policy loss: Densities.for_policy_loss was"
            " not called. Take out what replaces the actor's loss function, or add --perturbation.density token."
        )


# ---- the sampling mask -------------------------------------------------------------------------------------------


@contextmanager
def corrected(side_inputs: Sequence[Any] | None, attention_mask: Tensor) -> Iterator[None]:
    """Overrides the forward's log-probabilities by log π_S, of the policy renormalised over the tokens S left by
    sampling.

    log π_S(x) = z_x − log Σ_{v ∈ S} exp z_v, with gradient to every z_v in S. ``attention_mask`` is (B, T), padded on
    either side.

    Raises ``RuntimeError`` if a sample has no mask, a token is not in its set, or no log-probabilities came through.
    """
    cause = "the rollout's engine does not record them, or an agent drops mm_train_inputs from its response"
    missing = f"came without their sampling mask (--sampling.correct_mask): {cause}."
    masks: list[SamplingMask] = part_of_each(side_inputs, len(attention_mask), "sampling_mask", missing)
    samples = torch.cat([torch.full((len(mask),), i) for i, mask in enumerate(masks)])
    positions = torch.cat([torch.from_numpy(mask.positions) for mask in masks])
    sets, on_host = [left for mask in masks for left in mask.left()], attention_mask.cpu()

    def override(logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        # Logits of a padded forward (B, T, V) or a packed one (1, total, V).
        at, inside = flat_rows(samples, positions, tuple(labels.shape), on_host)
        kept = inside.nonzero().flatten().tolist()
        if not kept:
            return log_probs
        left = [sets[i] for i in kept]
        which = np.repeat(np.arange(len(left)), [len(ids) for ids in left])
        # The row before a position chose its token.
        parts = at[inside] - 1, torch.from_numpy(which), torch.from_numpy(np.concatenate(left))
        rows, members, ids = (part.to(logits.device) for part in parts)
        scores = logits.flatten(0, -2)[rows[members], ids]
        is_label = ids == labels.flatten()[rows[members]]
        if int(is_label.sum()) != len(rows):
            raise RuntimeError(
                f"{len(rows) - int(is_label.sum())} of {len(rows)} tokens to be trained on are not among the tokens"
                " that the rollout's sampling left: the sampling masks are not those of these samples."
            )
        highest = scores.new_full(rows.shape, -torch.inf).scatter_reduce(0, members, scores.detach(), "amax")
        total = scores.new_zeros(rows.shape).index_add(0, members, (scores - highest[members]).exp())
        # The members ascend, so the drawn ones have the order of the rows.
        corrected = scores[is_label] - highest - total.log()
        return log_probs.flatten().index_copy(0, rows, corrected.to(log_probs.dtype)).view_as(log_probs)

    with override_log_probs(override, "--sampling.correct_mask did not come into effect", "Take that path out."):
        yield
