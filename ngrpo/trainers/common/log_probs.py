# SPDX-License-Identifier: Apache-2.0
"""Overrides of the log-probabilities that a trainer takes from logits: densities, and the sampling mask's correction.

The function that :func:`with_overrides` wraps gives the old, new and reference log-probabilities, so an override
reaches the ratio, the clip and the KL term.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.trainers.common.sample_records import part_of_each
from perturbations.errors import require
from perturbations.replay.flat_records import flat_rows
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.scope import ReplayScope
from perturbations.replay.trajectory import FinishedTrajectory
from perturbations.token_log_probs import log_probs_at

NO_VISIBLE_LOGITS = (
    "no forward took its log-probabilities from the function that shows its logits (in OpenRLHF 0.11.2"
    " openrlhf.models.actor.log_probs_from_logits), as with a fused loss."
)
"""The end of a message: why something of a forward did not come into effect."""

Override = Callable[[Tensor, Tensor, Tensor], Tensor]
_active: ContextVar[tuple[Override, ...]] = ContextVar("log_prob_overrides", default=())


def without_flash_attn(_original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """OpenRLHF's ``log_probs_from_logits`` where flash-attn's kernel is missing: equal to the bit, with less memory.

    OpenRLHF's own sums slices of 1,024 rows, and for each of them autograd makes a gradient as large as all logits.
    """

    def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
        rows = torch.arange(labels.numel(), device=labels.device)
        return log_probs_at(logits.flatten(0, -2), rows, labels.reshape(-1, 1)).view_as(labels)

    return log_probs_from_logits


def with_overrides(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A trainer's function from logits and labels to log-probabilities, with the overrides of the context."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
        # All that reads the logits reads this one view of them. Autograd adds gradients of a tensor in place, except
        # those that come through different views: their sum would take as much memory again as the logits.
        rows_of_logits = logits.flatten(0, -2)
        log_probs = original(rows_of_logits, labels.flatten()).view_as(labels)
        for override in _active.get():
            log_probs = override(rows_of_logits, labels, log_probs)
        return log_probs

    return log_probs_from_logits


@contextmanager
def override_log_probs(override: Override, failed: str, fix: str) -> Iterator[None]:
    """Overrides the log-probabilities of the forward in this context, after the overrides of outer contexts.

    Args:
        override: from logits (R, V), labels (…) and log-probabilities (…), of R elements each, to
            log-probabilities.
        failed: the beginning of the RuntimeError if the override was never called.
        fix: its end.
    """
    was_called = False

    def noting_override(logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        nonlocal was_called
        was_called = True
        return override(logits, labels, log_probs)

    token = _active.set((*_active.get(), noting_override))
    try:
        yield
    finally:
        _active.reset(token)
    if not was_called:
        raise RuntimeError(f"{failed}: {NO_VISIBLE_LOGITS} {fix}")


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
    are the token's. The gradient is right for one update per rollout, and runs with more are refused.
    """

    def __init__(self, scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> None:
        """
        Args:
            scope: of the replay, already entered.
            temperature: of the rollout.
            advantages: of the actions, (B, A), for the forward of a loss.
        """
        self._perturbation = require(scope.perturbation, "the scope's perturbation")
        self._scope = scope
        self._temperature = temperature
        self._advantages = advantages
        # The density that counts by its score, until the policy loss takes it.
        self._score_density: Tensor | None = None
        # The tokens' own log π at the replayed positions, without gradient; None before the forward.
        self.replayed_log_probs: Tensor | None = None

    def override(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities (…) with the density, of logits (…, V); RuntimeError if a shape is wrong."""
        perturbation = self._perturbation
        flat = log_probs.reshape(-1)
        replayed, inside = self._scope.replayed(logits.flatten(0, -2), flat, self._temperature, self._advantages)
        token_log_probs = replayed.token_log_probs
        self.replayed_log_probs = token_log_probs.detach()
        action = token_log_probs if perturbation.draws_token else torch.zeros_like(token_log_probs)
        # What counts by its score alone is worth 0 in old and reference log-probabilities.
        if not perturbation.score_only or torch.is_grad_enabled():
            density = perturbation.log_density(replayed)
            if density.shape != token_log_probs.shape:
                raise RuntimeError(
                    f"perturbation {perturbation.name!r}: log_density returns {tuple(density.shape)} for"
                    f" {len(token_log_probs)} positions: one number for each is needed."
                )
            if perturbation.score_only:
                self._score_density = torch.where(inside, density, 0.0)
            else:
                action = action + density
        # Positions that were cut off are written to one more entry, which is dropped.
        target = torch.where(inside, replayed.rows, len(flat))
        padded = torch.cat([flat, flat.new_zeros(1)])
        return padded.index_copy(0, target, action.to(flat.dtype))[:-1].view_as(log_probs)

    def for_policy_loss(self, log_probs: Float[Tensor, "batch actions"]) -> Float[Tensor, "batch actions"]:
        """Log-probabilities of the last A tokens of each row, (B, A), with the density that counts by its score."""
        density = self._score_density
        if density is None:
            return log_probs
        self._score_density = None
        score = density - density.detach()
        shape = (log_probs.shape[0], log_probs.shape[1])
        return log_probs + self._scope.to_tokens(score, shape).to(log_probs.dtype)

    def token_log_probs(self, log_probs: Tensor) -> Tensor:
        """The tokens' own log π for a forward's log-probabilities, (B, A) on the CPU, while the scope replays."""
        if self.replayed_log_probs is None:
            return log_probs.cpu()
        shape = (log_probs.shape[0], log_probs.shape[1])
        replayed_by_token = self._scope.to_tokens(self.replayed_log_probs.float(), shape).cpu()
        is_replayed = self._scope.to_tokens(torch.ones_like(self.replayed_log_probs), shape).cpu() > 0
        return torch.where(is_replayed, replayed_by_token, log_probs.cpu())

    @property
    def is_untaken(self) -> bool:
        """Whether no loss has taken a density that counts by its score."""
        return self._score_density is not None


@contextmanager
def densities(scope: ReplayScope, temperature: float, advantages: Tensor | None = None) -> Iterator[Densities | None]:
    """Overrides the log-probabilities of the forward in this context by densities, if the perturbation has one.

    Raises ``RuntimeError`` at the end, if no log-probabilities came through, or no loss took a density's gradient.
    """
    perturbation = scope.perturbation
    # A density is computed without a perturbed position too: all ranks must gather the same parameters.
    if perturbation is None or not perturbation.has_density:
        yield None
        return
    action_densities = Densities(scope, temperature, advantages)
    with override_log_probs(
        action_densities.override,
        f"the density of perturbation {perturbation.name!r} was not computed",
        "Training on the tokens' log-probabilities is another method: take that path out, or add"
        " --perturbation.density token.",
    ):
        yield action_densities
    if action_densities.is_untaken:
        raise RuntimeError(
            f"the density of perturbation {perturbation.name!r} reached no policy loss: Densities.for_policy_loss was"
            " not called. Take out what replaces the actor's loss function, or add --perturbation.density token."
        )


# ---- the sampling mask -------------------------------------------------------------------------------------------


@contextmanager
def corrected(trajectories: Sequence[FinishedTrajectory | None], attention_mask: Tensor) -> Iterator[None]:
    """Overrides the forward's log-probabilities by log π_S, of the policy renormalised over the tokens S left by
    sampling.

    log π_S(x) = z_x − log Σ_{v ∈ S} exp z_v, with gradient to every z_v in S.

    Args:
        trajectories: of the batch, as `sample_records.unpack` returns them.
        attention_mask: (B, T), padded on either side.

    Raises:
        RuntimeError: if a sample has no mask, a token is not in its set, or no log-probabilities came through.
    """
    correction = MaskCorrection(
        sampling_masks(trajectories, len(attention_mask), "--sampling.correct_mask"), attention_mask
    )
    failed = "--sampling.correct_mask did not come into effect"
    with override_log_probs(correction.override, failed, fix="Take that path out."):
        yield


def sampling_masks(
    trajectories: Sequence[FinishedTrajectory | None], batch: int, flag: str = "--sampling.correct_mask"
) -> list[SamplingMask]:
    """The sampling mask of each sample of a batch; RuntimeError if a sample has none. ``flag`` is what needs them."""
    return part_of_each(
        trajectories,
        batch,
        part="sampling_mask",
        missing=f"came without their sampling mask ({flag}): the rollout's engine does not record them,"
        " or an agent drops mm_train_inputs from its response.",
    )


class MaskCorrection:
    """The override of :func:`corrected`. A position is a drawn token's; its set has the tokens left by sampling."""

    def __init__(self, masks: Sequence[SamplingMask], attention_mask: Tensor) -> None:
        sizes = torch.tensor([len(mask) for mask in masks])
        self._samples = torch.arange(len(masks)).repeat_interleave(sizes)
        self._positions = torch.cat([torch.from_numpy(mask.positions) for mask in masks])
        self._sets = [token_set for mask in masks for token_set in mask.left()]
        self._attention_mask = attention_mask.cpu()

    def override(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities (…) over the sets. Logits are (B, T, V) of a padded forward, (1, N, V) of a packed one."""
        rows, sets = self.rows_and_sets(tuple(labels.shape))
        if not sets:
            return log_probs
        rows = rows.to(logits.device)
        corrected_log_probs = log_probs_in_sets(logits.flatten(0, -2), rows, labels.flatten()[rows], sets)
        corrected_log_probs = corrected_log_probs.to(log_probs.dtype)
        return log_probs.flatten().index_copy(0, rows, corrected_log_probs).view_as(log_probs)

    def rows_and_sets(self, shape: tuple[int, ...]) -> tuple[Tensor, list[np.ndarray]]:
        """The rows that chose a token of which some were cut, (n,) int64, and the tokens left at each.

        Args:
            shape: of the forward's tokens, (B, T) padded or (1, N) packed, in which rows are counted.
        """
        token_rows, inside = flat_rows(self._samples, self._positions, shape, self._attention_mask)
        sets = [self._sets[place] for place in inside.nonzero().flatten().tolist()]
        # The row before a position chose its token.
        return token_rows[inside] - 1, sets


def log_probs_in_sets(logits: Tensor, rows: Tensor, tokens: Tensor, sets: Sequence[np.ndarray]) -> Tensor:
    """log π_S of drawn tokens, (n,): of the policy renormalised over each token's set.

    Args:
        logits: (R, V), divided by the temperature.
        rows: the row of each token among them, (n,) int64.
        tokens: those drawn, (n,) int64.
        sets: the tokens left by sampling, n arrays.

    Raises:
        RuntimeError: if a token is not in its set.
    """
    sizes = [len(token_set) for token_set in sets]
    # All sets one after the other: a member is a token of a set, and has the number of its set.
    set_of_member = torch.from_numpy(np.repeat(np.arange(len(sets)), sizes)).to(logits.device)
    ids = torch.from_numpy(np.concatenate(sets)).to(logits.device)

    scores = logits[rows[set_of_member], ids]
    is_drawn = ids == tokens[set_of_member]
    drawn = int(is_drawn.sum())
    if drawn != len(rows):
        raise RuntimeError(
            f"{len(rows) - drawn} of {len(rows)} tokens to be trained on are not among the tokens that the"
            " rollout's sampling left: the sampling masks are not those of these samples."
        )
    no_scores = scores.new_full(rows.shape, -torch.inf)
    highest = no_scores.scatter_reduce(0, set_of_member, scores.detach(), "amax")
    exponentials = (scores - highest[set_of_member]).exp()
    total = scores.new_zeros(rows.shape).index_add(0, set_of_member, exponentials)
    # The sets are in the order of the rows, so the drawn members are too.
    return scores[is_drawn] - highest - total.log()
