# SPDX-License-Identifier: Apache-2.0
"""The training–inference mismatch: |log π_trainer − log π_rollout| of a step's tokens, measured and judged.

A gap after perturbed inputs is judged by the gap at plain positions, and both by the gap of responses that nothing
perturbed. So a broken replay is seen on the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perturbations.base import Perturbation
from perturbations.replay.trajectory import FinishedTrajectory
from perturbations.step import Positions

# The mean gap of an exact replay in float32: plain positions below it say nothing about perturbed ones.
FLOOR = 1e-5
# That of bfloat16. Tokens that no perturbed input comes before may be few: what they say below it is chance.
_COARSE = 2.0**-5

# The least scale of a run in half precision: the first tokens of an answer may all be certain ones.
_HALF = 2.0**-7
# How many times the scale plain positions may be, where no smaller limit is given.
_PLAIN = 5.0
# Beyond these, engine and trainer have not the same weights, or not the same model.
_DIFFERENT = {False: 1e-2, True: 0.25}

_warned: list[str] = []

_SCALE_CAUSES = (
    "Both sides are fed other inputs where only one of them should be: the engine's override or the trainer's replay"
    " misses its row (ngrpo doctor --model NAME tells).",
    "Engine and trainer have other weights: a weight sync that was not taken, or a resumed run's checkpoint on one"
    " side only.",
    "The record of another sample is replayed: an agent or a data step has changed the order of samples.",
    "Engine and trainer read pictures differently: config.json lacks the axes of their positions (mrope_section), or"
    " the processors differ.",
)

_CAUSES = (
    "The replay does not reach the model: its input embeddings are not what get_input_embeddings() gives, or another"
    " hook on them replaces their output.",
    "Records of other weights: the engine did not take the last weight sync, or the rollout is older than it"
    " (asynchronous training).",
    "Positions have moved: a chat template or an agent changed the tokens before a perturbed position.",
    "The perturbation is not the same on both sides: its file was edited during the run, or it draws outside of the"
    " step's streams (ngrpo check FILE.py:NAME tells).",
    "Precision: at these inputs the model is more sensitive to rounding than at plain ones. Then raise"
    " --perturbation.gap_limit.",
)


def step_metrics(
    records: Sequence[FinishedTrajectory | None],
    log_probs: Sequence[np.ndarray],
    perturbation: Perturbation | None = None,
) -> dict[str, float]:
    """Summarises a batch of trajectories before the update.

    Args:
        records: one per sample; samples without one are left out.
        log_probs: log π of the trainer by position of the token, (T,) each, NaN where no token is trained on. What a
            record has beyond these T positions was cut off, and is not counted.
        perturbation: of the rollouts, for the planned rate.

    Returns:
        ``rate``: perturbed positions per generated token. ``planned_rate``: positions per generated token that the
        gate's draw and schedule select; what looks at logits or tokens (``until``, entropy, ``protect``) and what the
        request's sampling excludes can make ``rate`` smaller, never larger. ``anchor_agreement``: share of perturbed
        positions whose token is the ordinarily sampled one. ``gap_perturbed_*``: |log π_trainer − log π_rollout| of
        tokens predicted right after a perturbed input; ``gap_plain_*``: of all others; ``gap_before_*``: of those
        that no perturbed input of their answer comes before, which a wrong replay leaves as they are.
        ``record_bytes_per_token``: serialised size. ``dropped_edits``: see `conversation.py`, where there were any.
        ``prefix_hit_rate``: share of the prompts' tokens that the engines found in their prefix caches.
        A value that has no token to speak of is left out.
    """
    generated = planned = perturbed = agreed = size = dropped = prompted = cached = 0
    after, elsewhere, before = [], [], []
    for trajectory, trainer in zip(records, log_probs):
        if trajectory is None:
            continue
        dropped += trajectory.dropped
        prompted += trajectory.prompted
        cached += trajectory.cached
        record, rollout = trajectory.record.truncate(len(trainer)), trajectory.log_probs[: len(trainer)]
        tokens = np.flatnonzero(~np.isnan(rollout) & ~np.isnan(trainer[: len(rollout)]))
        gap = np.abs(trainer[tokens] - rollout[tokens])
        follows = np.isin(tokens - 1, record.positions)
        after.append(gap[follows])
        elsewhere.append(gap[~follows])
        before.append(gap if not len(record) else gap[tokens <= record.positions[0]])
        generated += len(tokens)
        if perturbation is not None:
            at = Positions(np.full(len(tokens), record.seed, np.int64), _turn_starts(rollout)[tokens], tokens)
            planned += int(perturbation.selects(at).sum())
        counted = np.isin(record.positions, tokens)
        perturbed += int(counted.sum())
        agreed += int(record.agreed[counted].sum())
        size += len(record.to_bytes())
    if not generated:
        return {}
    metrics = {"rate": perturbed / generated, "record_bytes_per_token": size / generated}
    if perturbation is not None:
        metrics["planned_rate"] = planned / generated
    if prompted:
        metrics["prefix_hit_rate"] = cached / prompted
    if dropped:
        metrics["dropped_edits"] = float(dropped)
    if perturbed:
        metrics["anchor_agreement"] = agreed / perturbed
    for name, parts in (("gap_perturbed", after), ("gap_plain", elsewhere), ("gap_before", before)):
        gap = np.concatenate(parts)
        if len(gap):
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = float(gap.mean()), float(gap.max())
    return {f"perturbation/{name}": value for name, value in metrics.items()}


def _turn_starts(log_probs: np.ndarray) -> np.ndarray:
    """For each generated token the position at which its turn began, (T,) int64; in a conversation tools speak too.

    Args:
        log_probs: of the rollout by position, (T,), NaN where no token was generated.
    """
    generated = ~np.isnan(log_probs)
    starts = generated & ~np.concatenate([[False], generated[:-1]])
    return np.maximum.accumulate(np.where(starts, np.arange(len(log_probs)), 0))


class ReplayGap(RuntimeError):
    """The trainer's log-probabilities after perturbed inputs are not those of the rollout."""


class GapScale:
    """What this run's engines and trainer differ by where nothing is perturbed."""

    def __init__(self, half_precision: bool, drifts: bool = False, noisy: bool = False) -> None:
        """
        Args:
            half_precision: whether the trainer computes in bfloat16 or float16.
            drifts: whether engines may have older weights than the trainer, as in asynchronous training.
            noisy: whether they have other weights by design from the first step on, as under a policy noise.
        """
        self._half, self._drifts, self._noisy = half_precision, drifts or noisy, noisy
        self._start: float | None = None

    @property
    def is_needed(self) -> bool:
        """Whether this step's unperturbed answers are to be measured."""
        return self._start is None or self._drifts

    def of(self, unperturbed: float | None) -> float | None:
        """The scale of a step: that of the run's start, or this step's own where weights drift by design.

        Args:
            unperturbed: mean gap of the step's unperturbed answers, None where it was not measured.

        Returns:
            In nats; None until there was an unperturbed answer.
        """
        if self._start is None:
            self._start = unperturbed
        gaps = [part for part in (self._start, unperturbed if self._drifts else None) if part is not None]
        return max([*gaps, _HALF if self._half else FLOOR]) if gaps else None

    def check(self, measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
        """Judges all gaps of a step by the one of unperturbed answers: ratios among them are blind where all are wrong.

        Args:
            measures: of :func:`step_metrics`, with ``gap_unperturbed_mean`` where it was measured.
            limit: how many times the scale each may be; plain positions at most 5 times.
            strict: raise instead of warning.

        Raises:
            ReplayGap: where one is larger and ``strict`` is set.
        """
        unperturbed = measures.get("perturbation/gap_unperturbed_mean")
        scale = self.of(unperturbed)
        if scale is None:
            return
        if unperturbed is not None and unperturbed > _DIFFERENT[self._half] and not self._noisy:
            _report(
                f"log-probabilities of rollout and trainer differ by {unperturbed:.2g} on average where nothing is"
                f" perturbed; at most {_DIFFERENT[self._half]:g} is expected of one model on two sides. They have not"
                " the same weights: an engine that loaded another checkpoint, or a weight sync that was not taken.",
                strict,
            )
        # Plain tokens are many, and each is the same kind of token as an unperturbed answer's.
        allowed = {"perturbed": limit * scale, "plain": min(limit, _PLAIN) * scale, "before": limit * scale}
        gaps = {name: measures.get(f"perturbation/gap_{name}_mean", 0.0) for name in allowed}
        parts = [
            f"{_PLACES[name]} by {gap:.2g} (at most {allowed[name]:.2g})"
            for name, gap in gaps.items()
            if gap > allowed[name]
        ]
        if parts:
            _report(
                f"log-probabilities of rollout and trainer differ {', '.join(parts)} on average; where nothing is"
                f" perturbed they differ by {scale:.2g}. {_numbered(_SCALE_CAUSES)}",
                strict,
            )


_PLACES = {
    "perturbed": "right after perturbed inputs",
    "plain": "at plain positions",
    "before": "before the first perturbed input",
}


def check_gap(measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
    """Compares a step's mean gap after perturbed inputs with ``limit`` times the one at plain positions.

    A wrong replay widens the gap at plain positions too, since they see wrong inputs before them. So the gap at tokens
    that no perturbed input comes before, or 2^-5 where it is smaller, takes its place if that is less; and where these
    are the only plain tokens, as at rate 1, in any case.

    Args:
        measures: of :func:`step_metrics`.
        limit: how many times larger it may be; a plain gap below 1e-5 counts as 1e-5.
        strict: raise instead of warning; a warning is printed once per process.

    Raises:
        ReplayGap: where it is larger and ``strict`` is set. The likely causes stand in their order.
    """
    perturbed = measures.get("perturbation/gap_perturbed_mean")
    plain = measures.get("perturbation/gap_plain_mean")
    before = measures.get("perturbation/gap_before_mean")
    expected = max(plain or 0.0, FLOOR)
    if before is not None:
        first = max(before, _COARSE)
        expected = first if before == plain else min(expected, first)
    if perturbed is None or perturbed <= limit * expected:
        return
    compared = "there is no plain one" if plain is None else f"at plain ones it is {plain:.2g}"
    if before is not None:
        compared += f", at tokens before the first perturbed input {before:.2g}"
    message = (
        f"log-probabilities of rollout and trainer differ by {perturbed:.2g} on average right after perturbed inputs;"
        f" {compared}. At most {limit:g} times {expected:.2g} is expected of a replay that works. {_numbered(_CAUSES)}"
    )
    _report(message, strict)


def _numbered(causes: Sequence[str]) -> str:
    lines = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(causes, start=1))
    return f"Likely causes, the first ones first:\n{lines}"


def _report(message: str, strict: bool) -> None:
    if strict:
        raise ReplayGap(message)
    if not _warned:
        _warned.append(message)
        print(f"ngrpo warning: {message}\n  --perturbation.strict makes this an error.", flush=True)
