# SPDX-License-Identifier: Apache-2.0
"""Score centering (arXiv 2609.20807): a policy loss whose score has mean 0 over the draws of its tokens.

The score of a token y that was drawn from q is f(p_y / q_y) ∇ log p_y, where p is the policy of the loss, and f the
importance weight of OpenRLHF's loss, or 1. If q is another distribution than p, the score's mean is not 0, and an
advantage that does not depend on the token pushes the policy along that mean. The centered loss subtracts the mean (sg
stops gradients):

    L = −A [f(p_y / q_y) log p_y − Σ_v sg(q_v f(p_v / q_v)) log p_v]

The sum is over all v with q_v > 0. Nothing of q is recorded but the tokens that the filters left: the trainer computes
q from its own logits, which are those of the rollout's weights in the one update that a rollout is used for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from ngrpo.trainers.common import sample_records
from ngrpo.trainers.common.log_probs import NO_VISIBLE_LOGITS, override_log_probs, sampling_masks
from ngrpo.trainers.common.policy_loss import Actions, Loss, positions_of_tokens, rows_of_tokens
from ngrpo.trainers.common.sample_records import RequestedDraws
from perturbations import Perturbation
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory

_BLOCK_ELEMENTS = 2**24  # logits that are looked at at once: 64 MiB in float32


class WeightedLoss(Protocol):
    """OpenRLHF's ``PolicyLoss``, as far as its importance weights go."""

    is_correction_level: str
    is_correction_mode: str
    is_correction_threshold: Sequence[float]


@dataclass(frozen=True)
class ImportanceWeight:
    """f of the ratio r = π / π_rollout, by which OpenRLHF's loss weighs a token (``is_correction_*``).

    Attributes:
        low, high: the bounds of r.
        drops: whether f is 0 beyond the bounds (mode ``mask``), and not the bound (mode ``clip``).
    """

    low: float
    high: float
    drops: bool = False

    @classmethod
    def of(cls, policy_loss: WeightedLoss) -> "ImportanceWeight | None":
        """The weight of OpenRLHF's ``PolicyLoss``; None where it has none, f = 1."""
        if policy_loss.is_correction_level == "off":
            return None
        low, high = policy_loss.is_correction_threshold
        return cls(low, high, drops=policy_loss.is_correction_mode == "mask")

    def __call__(self, ratio: Tensor) -> Tensor:
        if self.drops:
            return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)
        return ratio.clamp(self.low, self.high)


@dataclass(frozen=True)
class Sampler:
    """How the run draws tokens, and what its loss makes of them.

    Attributes:
        temperature: of the run, by which the trainer divides its logits.
        perturbation: the run's; None where it has none.
        schedule: changes the temperature of each draw; None where it is one temperature.
        corrects_mask: whether the policy of the loss is the one over the tokens left (``--sampling.correct_mask``).
        weight: of the loss; None where it has none.
    """

    temperature: float = 1.0
    perturbation: Perturbation | None = None
    schedule: SamplingSchedule | None = None
    corrects_mask: bool = False
    weight: ImportanceWeight | None = None


@dataclass(frozen=True)
class TokenDraws:
    """How N generated tokens of a forward were drawn: those with q other than p, since the others' scores have mean 0.

    Attributes:
        places: their numbers among all generated tokens of the forward, response by response, ascending.
        ids_left: the tokens that the filters left, None where they cut none, a list of N.
        perturbed: whether the perturbation drew the token itself, (N,) bool.
        generated: the number of earlier tokens of the response, (N,) int64.
        requests: what the schedule goes by, a list of N; empty without a schedule.
    """

    places: Sequence[int]
    ids_left: Sequence[np.ndarray | None]
    perturbed: np.ndarray
    generated: np.ndarray
    requests: Sequence[RequestedDraws]

    def __len__(self) -> int:
        return len(self.places)

    def block(self, rows: slice) -> "TokenDraws":
        """Some of the draws."""
        return TokenDraws(
            places=self.places[rows],
            ids_left=self.ids_left[rows],
            perturbed=self.perturbed[rows],
            generated=self.generated[rows],
            requests=self.requests[rows],
        )

    def left(self, vocabulary: int, device: torch.device) -> Tensor:
        """Which tokens the filters left, (N, V) bool. Only ids are copied to the device: the matrix would take long."""
        left = torch.ones(len(self), vocabulary, dtype=torch.bool, device=device)
        filtered = {row: ids for row, ids in enumerate(self.ids_left) if ids is not None}
        if not filtered:
            return left
        rows = np.fromiter(filtered, dtype=np.int64)
        row_of_id = rows.repeat([len(ids) for ids in filtered.values()])
        ids = np.concatenate([*filtered.values()]).astype(np.int64)
        left[torch.from_numpy(rows).to(device)] = False
        left[torch.from_numpy(row_of_id).to(device), torch.from_numpy(ids).to(device)] = True
        return left


def mean_scores(sampler: Sampler, draws: TokenDraws, logits: Tensor) -> Tensor:
    """The mean score of each of N tokens, E_q[f(p / q) ∇ log p], as a gradient to the logits it was drawn by: (N, V).

    With c_v = q_v f(p_v / q_v) the sum Σ_v c_v ∇ log p_v is c − (Σ_v c_v) p.

    ``logits``: z / temperature, (N, V), float32 or wider.
    """
    left = draws.left(logits.shape[-1], logits.device)
    sampling_logits = _scheduled(sampler, draws, logits).masked_fill(~left, -torch.inf)
    policy_logits = logits.masked_fill(~left, -torch.inf) if sampler.corrects_mask else logits
    policy = torch.softmax(policy_logits, dim=-1)  # p
    sampled = torch.softmax(sampling_logits, dim=-1)  # q
    if sampler.perturbation is not None and draws.perturbed.any():
        rows = torch.from_numpy(draws.perturbed.nonzero()[0]).to(logits.device)
        drawn = sampler.perturbation.text_probabilities(logits[rows], sampler.temperature, left[rows])
        sampled = sampled.index_copy(0, rows, drawn.to(sampled))
    if sampler.weight is None:
        return sampled - policy  # c = q, which sums to 1

    # OpenRLHF's weight compares with the probability that the engine reports, which is that of sampling, also where the
    # perturbation drew the token.
    log_ratio = torch.log_softmax(policy_logits, dim=-1) - torch.log_softmax(sampling_logits, dim=-1)
    ratio = torch.where(sampled > 0.0, log_ratio, 0.0).exp()
    weighted = sampled * sampler.weight(ratio)  # c
    return weighted - weighted.sum(dim=-1, keepdim=True) * policy


def _scheduled(sampler: Sampler, draws: TokenDraws, logits: Tensor) -> Tensor:
    """The logits of N tokens at the temperatures that they were drawn at, (N, V)."""
    if sampler.schedule is None:
        return logits

    def column(values: Sequence[float] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values), device=logits.device)

    requests = draws.requests
    temperature = column([request.temperature for request in requests]).to(logits.dtype)  # (N,)
    request_logits = logits * (sampler.temperature / temperature).unsqueeze(-1)
    next_tokens = NextTokens(
        logits=request_logits,
        temperature=temperature,
        generated=column(draws.generated),
        step=column([request.training_step for request in requests]),
        answer=column([request.answer for request in requests]),
        answers=column([request.answers for request in requests]),
    )
    factor = sampler.schedule.factor(next_tokens)
    return request_logits if factor is None else request_logits / factor.unsqueeze(-1)


class _Context(Protocol):
    """What :class:`_MeanScore` keeps between forward and backward."""

    saved_tensors: tuple[Tensor, Tensor]
    gradient: Callable[[Tensor, slice], Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps ``saved_tensors``."""


class _MeanScore(torch.autograd.Function):
    """Σ_v c_v log p_v of N rows of logits (R, V), (N,): of value 0, since its gradient alone counts.

    The backward computes the gradient block by block. Kept from the forward, it would take the logits' memory again.
    """

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, rows: Tensor, gradient: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """``gradient``: of the logits of a part of the rows, and which part that is, (n, V) to (n, V)."""
        ctx.save_for_backward(logits, rows)
        ctx.gradient = gradient
        return torch.zeros(len(rows), dtype=logits.dtype, device=logits.device)

    @staticmethod
    def backward(ctx: _Context, *output_gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, rows = ctx.saved_tensors
        (score_gradients,) = output_gradients
        total = torch.zeros_like(logits)
        size = max(1, _BLOCK_ELEMENTS // logits.shape[-1])
        for start in range(0, len(rows), size):
            part = slice(start, min(start + size, len(rows)))
            gradient = score_gradients[part].unsqueeze(-1) * ctx.gradient(logits[rows[part]], part)
            total[rows[part]] = gradient.to(total.dtype)
        return total, None, None


class ScoreCentering:
    """A policy loss with its score centered: :meth:`watching` sees the forward's logits, a call is the loss.

    Attributes:
        removed: ½ Σ_v |mean score|_v, in the logits, averaged over the tokens of the forward: the total variation
            distance of p and q where f is 1. It is known after the backward, which computes the mean scores.
    """

    def __init__(self, loss: Loss, sampler: Sampler, *, action_mask: Tensor, attention_mask: Tensor) -> None:
        """
        Args:
            loss: OpenRLHF's, which is centered.
            sampler: the run's.
            action_mask: (B, A), 1 at generated tokens.
            attention_mask: (B, T).
        """
        self._loss = loss
        self._sampler = sampler
        self._action_mask = action_mask
        self._attention_mask = attention_mask
        # The differentiable mean score of each token of the latest forward, (B, A), of value 0.
        self._mean_scores: Tensor | None = None
        self.removed = torch.tensor(0.0)

    @contextmanager
    def watching(
        self, trajectories: Sequence[FinishedTrajectory | None], requests: Sequence[RequestedDraws | None]
    ) -> Iterator[None]:
        """The forward in this context is of these trajectories, with what the schedule of each goes by.

        Raises:
            RuntimeError: if a sample lacks what its draws follow from, or no log-probabilities came through.
        """
        draws = self._draws(trajectories, requests)

        def look(logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
            self._look(draws, logits, tuple(labels.shape))
            return log_probs

        failed = "--sampling.score_centering did not come into effect"
        with override_log_probs(look, failed, fix="Take that path out."):
            yield

    def _draws(
        self, trajectories: Sequence[FinishedTrajectory | None], requests: Sequence[RequestedDraws | None]
    ) -> TokenDraws:
        """The draws of the batch's generated tokens."""
        sampler = self._sampler
        batch = len(self._action_mask)
        records = sample_records.records(trajectories, batch)
        masks = sampling_masks(trajectories, batch, "--sampling.score_centering")
        left_by_sample = [dict(zip(mask.positions.tolist(), mask.left())) for mask in masks]
        draws_own_text = sampler.perturbation is not None and not sampler.perturbation.samples_text
        perturbed_by_sample = [set(record.positions.tolist()) if draws_own_text else set() for record in records]

        places: list[int] = []
        ids_left: list[np.ndarray | None] = []
        perturbed: list[bool] = []
        generated: list[int] = []
        requested_draws: list[RequestedDraws] = []
        samples, positions = positions_of_tokens(self._action_mask.cpu(), self._attention_mask.cpu())
        for place, (sample, position) in enumerate(zip(samples.tolist(), positions.tolist())):
            ids = left_by_sample[sample].get(position)
            is_perturbed = position in perturbed_by_sample[sample]
            is_filtered = ids is not None and not sampler.corrects_mask
            if sampler.schedule is None and not is_perturbed and not is_filtered:
                continue  # q = p
            places.append(place)
            ids_left.append(ids)
            perturbed.append(is_perturbed)
            generated.append(position - records[sample].prompt_tokens)
            if sampler.schedule is not None:
                requested_draws.append(require(requests[sample], "what the sampling schedule goes by"))
        return TokenDraws(
            places=places,
            ids_left=ids_left,
            perturbed=np.array(perturbed, dtype=bool),
            generated=np.array(generated, dtype=np.int64),
            requests=requested_draws,
        )

    def _look(self, draws: TokenDraws, logits: Tensor, shape: tuple[int, ...]) -> None:
        """Takes in the logits of a forward, (…, V), for the loss that follows it."""
        mask = self._action_mask.to(logits.device).bool()
        rows, _ = rows_of_tokens(mask, self._attention_mask.to(logits.device), shape)
        places = torch.tensor(draws.places, dtype=torch.int64, device=logits.device)
        token_count = max(len(rows), 1)
        self.removed = torch.zeros((), device=logits.device)

        def gradient(block: Tensor, part: slice) -> Tensor:
            wide = block.to(torch.promote_types(block.dtype, torch.float32))
            scores = mean_scores(self._sampler, draws.block(part), wide)
            self.removed = self.removed + scores.abs().sum() / (2 * token_count)
            return scores

        scores = _MeanScore.apply(logits.flatten(0, -2), rows[places], gradient)
        token_scores = scores.new_zeros(len(rows)).index_copy(0, places, scores)
        no_scores = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
        self._mean_scores = no_scores.masked_scatter(mask, token_scores)

    def __call__(
        self,
        log_probs: Actions,
        old_log_probs: Actions,
        advantages: Actions,
        rollout_log_probs: Actions | None = None,
        **kwargs: object,
    ) -> Any:
        """The policy loss, centered; RuntimeError without a forward before it."""
        mean_of_scores = self._mean_scores
        if mean_of_scores is None:
            raise RuntimeError(
                f"--sampling.score_centering did not come into effect: {NO_VISIBLE_LOGITS} Take that path out."
            )
        self._mean_scores = None
        result = self._loss(log_probs, old_log_probs, advantages, rollout_log_probs=rollout_log_probs, **kwargs)
        # The sum over v is a loss of its own, with ratio and weight 1: it is not clipped, and f is in its coefficients.
        centering_loss, *_ = self._loss(
            old_log_probs - mean_of_scores.to(old_log_probs.dtype),
            old_log_probs,
            advantages,
            rollout_log_probs=old_log_probs,
            **kwargs,
        )
        total, *measures = result
        return total + (centering_loss - centering_loss.detach()), *measures
