# SPDX-License-Identifier: Apache-2.0
"""Training–inference mismatch: |log π_trainer − log π_rollout| of a step's tokens, and importance weights.

:func:`check_gap` compares the mismatch right after perturbed inputs with the mismatch at plain positions.
:meth:`GapScale.check` compares every mismatch with that of unperturbed responses, the run's control. So a broken replay
is seen on the first step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from perturbations import FinishedTrajectory, Perturbation, Positions, ReplayRecord


class Limits:
    """Means of |log π_trainer − log π_rollout| over tokens, in nats, that separate rounding from a fault."""

    FLOAT32_MEAN = 1e-5
    """The mean of an exact replay in float32. A smaller mean at plain positions says nothing about perturbed ones."""
    BF16_MIN_GAP = 2.0**-5
    """Floor for the mean before the first perturbed input, which may come from a few tokens: bfloat16's rounding."""
    HALF_PRECISION_SCALE = 2.0**-7
    """Floor for the scale in half precision, because the first tokens of a response may all be certain."""
    PLAIN_TIMES = 5.0
    """How many times the scale the mean at plain positions may be; ``--perturbation.gap_limit`` may be smaller."""
    SUSPICIOUS_FLOAT32 = 1e-2
    """Above it, the two sides have different weights or models: the rounding of float32 is 1,000 times smaller."""
    SUSPICIOUS_HALF = 0.25
    """Above it, unperturbed responses in half precision deserve a warning. Random weights can exceed it without a fault
    (an H200 measured 0.33), so the run goes on."""
    UNUSABLE_HALF = 1.0
    """Above it, the mean importance weight is off by a factor of e, and no training is right, whatever the cause."""


# The lists of causes that a warning has been printed with. A warning about unperturbed responses in half precision may
# be harmless, and must not keep a later one about the replay from being printed.
_warned: list[Sequence[str]] = []
_STRICT_HINT = "--perturbation.strict makes this an error."

_CONFIG_CAUSE = (
    "Engine and trainer read the model's config.json differently: rotary settings, a window or a scale of logits (ngrpo"
    " doctor --model NAME compares the keys)."
)
_MODEL_CAUSES = (
    "They have not the same weights: an engine that loaded another checkpoint, or a weight sync that was not taken.",
    _CONFIG_CAUSE,
    "The weights are random: in bfloat16 these alone differ so much, where trained weights differ by about 0.02"
    " (docs/troubleshooting.md).",
)
_SCALE_CAUSES = (
    "Only one side is fed other inputs: the engine's override or the trainer's replay misses its row (run"
    " ngrpo doctor --model NAME).",
    "Engine and trainer have different weights: a weight sync that was not taken, or a resumed run's checkpoint on one"
    " side only.",
    "The record of another sample is replayed: an agent or a data step has changed the order of samples.",
    _CONFIG_CAUSE,
    "Engine and trainer read pictures differently: config.json lacks the axes of their positions (mrope_section), or"
    " the processors differ.",
)
_REPLAY_CAUSES = (
    "The replay does not reach the model: its input embeddings are not what get_input_embeddings() gives, or another"
    " hook on them replaces their output.",
    "Records of other weights: the engine did not take the last weight sync, or the rollout is older than it"
    " (asynchronous training).",
    "Positions have moved: a chat template or an agent changed the tokens before a perturbed position.",
    "The perturbation is not the same on both sides: its file was edited during the run, or it draws outside of the"
    " step's streams (run ngrpo check FILE.py:NAME).",
    "Precision: at these inputs the model is more sensitive to rounding than at plain ones. Then raise"
    " --perturbation.gap_limit.",
)
_PLACES = {
    "perturbed": "right after perturbed inputs",
    "plain": "at plain positions",
    "before": "before the first perturbed input",
}


class MismatchTooLarge(RuntimeError):
    """A step's training–inference mismatch is too large, in a run with ``--perturbation.strict``."""


def step_metrics(
    trajectories: Sequence[FinishedTrajectory | None],
    log_probs: Sequence[np.ndarray],
    perturbation: Perturbation | None = None,
) -> dict[str, float]:
    """The metrics ``perturbation/…`` of a batch before the update (docs/metrics.md); one without a token is left out.

    Args:
        trajectories: one per sample; samples without one are left out.
        log_probs: log π of the trainer by position, (T,) each, NaN at untrained tokens. What a record has beyond T was
            cut off.
        perturbation: of the rollouts, for the planned rate.
    """
    totals: Counter[str] = Counter()
    gaps_by_place: dict[str, list[np.ndarray]] = {place: [] for place in _PLACES}
    for trajectory, trainer_log_probs in zip(trajectories, log_probs):
        if trajectory is None:
            continue
        length = len(trainer_log_probs)
        record = trajectory.record.truncate(length)
        tokens, gaps = _gaps(trajectory, trainer_log_probs)
        for place, is_there in _places_of(tokens, record).items():
            gaps_by_place[place].append(gaps[is_there])
        if perturbation is not None:
            is_drawn = ~np.isnan(trajectory.log_probs[:length])
            totals["planned"] += _planned_count(perturbation, record.seed, tokens, is_drawn)
        is_counted = np.isin(record.positions, tokens)
        totals.update(
            generated=len(tokens),
            perturbed=int(is_counted.sum()),
            agreed=int(record.agreed[is_counted].sum()),
            bytes=len(record.to_bytes()),
            dropped=trajectory.dropped,
            prompted=trajectory.prompted,
            cached=trajectory.cached,
        )
    if not totals["generated"]:
        return {}
    metrics = _quotients(totals, with_planned=perturbation is not None)
    if totals["dropped"]:
        metrics["dropped_edits"] = float(totals["dropped"])
    for place, arrays in gaps_by_place.items():
        gaps = np.concatenate(arrays)
        if len(gaps):
            metrics[f"gap_{place}_mean"] = float(gaps.mean())
            metrics[f"gap_{place}_max"] = float(gaps.max())
    return {f"perturbation/{name}": value for name, value in metrics.items()}


def gaps_of_samples(
    trajectories: Sequence[FinishedTrajectory | None], log_probs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The gaps of each sample's trained tokens that were drawn; empty for a sample without a record.

    The arguments are those of :func:`step_metrics`.
    """
    gaps = []
    for trajectory, trainer_log_probs in zip(trajectories, log_probs):
        if trajectory is None:
            gaps.append(np.zeros(0))
        else:
            gaps.append(_gaps(trajectory, trainer_log_probs)[1])
    return gaps


def _gaps(trajectory: FinishedTrajectory, trainer_log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of a sample's trained tokens that were drawn, and their gaps, (N,) each."""
    length = min(len(trainer_log_probs), len(trajectory.log_probs))
    differences = np.abs(trainer_log_probs[:length] - trajectory.log_probs[:length])  # NaN elsewhere
    positions = np.flatnonzero(~np.isnan(differences))
    return positions, differences[positions]


def _places_of(tokens: np.ndarray, record: ReplayRecord) -> dict[str, np.ndarray]:
    """Masks over the positions ``tokens`` (N,), by the name of the place: which tokens are there, (N,) bool each."""
    follows_perturbed = np.isin(tokens - 1, record.positions)
    if len(record):
        before_first = tokens <= record.positions[0]
    else:
        before_first = np.ones(len(tokens), bool)
    return {"perturbed": follows_perturbed, "plain": ~follows_perturbed, "before": before_first}


def _planned_count(perturbation: Perturbation, seed: int, tokens: np.ndarray, is_drawn: np.ndarray) -> int:
    """How many of the positions ``tokens`` (N,) the perturbation's schedule selects; ``is_drawn`` is (T,) bool.

    A conversation has turns of the model and of tools. The schedule counts from the position where a turn begins.
    """
    follows_drawn = np.concatenate([[False], is_drawn[:-1]])
    turn_starts = np.where(is_drawn & ~follows_drawn, np.arange(len(is_drawn)), 0)
    turn_of_token = np.maximum.accumulate(turn_starts)[tokens]
    seeds = np.full(len(tokens), seed, np.int64)
    return int(perturbation.selects(Positions(seeds, turn_of_token, tokens)).sum())


def _quotients(totals: Mapping[str, int], with_planned: bool) -> dict[str, float]:
    """The metrics that divide two totals; a metric whose denominator is 0 is left out."""
    quotients = {
        "rate": ("perturbed", "generated"),
        "record_bytes_per_token": ("bytes", "generated"),
        "prefix_hit_rate": ("cached", "prompted"),
        "sampled_token_kept": ("agreed", "perturbed"),
    }
    if with_planned:
        quotients["planned_rate"] = ("planned", "generated")
    return {
        name: totals[numerator] / totals[denominator]
        for name, (numerator, denominator) in quotients.items()
        if totals[denominator]
    }


class GapScale:
    """The mismatch of the run's own unperturbed responses (its control), by which all other mismatches are judged."""

    def __init__(self, half_precision: bool, drifts: bool = False, noisy: bool = False) -> None:
        """Starts without a measurement.

        Args:
            half_precision: whether engine and trainer compute in float16 or bfloat16.
            drifts: whether engines may have older weights than the trainer, as in asynchronous training.
            noisy: whether engines have other weights than the trainer by design: a policy noise.
        """
        self._half = half_precision
        # Engines have other weights than the trainer, older or noisy ones, so that each step's mean may be larger.
        self._measures_each_step = drifts or noisy
        self._noisy = noisy
        self._first_mean: float | None = None

    @property
    def is_needed(self) -> bool:
        """Whether this step's unperturbed responses are measured."""
        return self._first_mean is None or self._measures_each_step

    def update(self, unperturbed: float | None) -> float | None:
        """Takes in this step's unperturbed mean (None if not measured) and returns the scale in nats.

        The scale is the run's first unperturbed mean; where weights drift, the mean of this step takes its place if it
        is larger. None before the first measurement.
        """
        if self._first_mean is None:
            self._first_mean = unperturbed
        if self._first_mean is None:
            return None
        floor = Limits.HALF_PRECISION_SCALE if self._half else Limits.FLOAT32_MEAN
        scale = max(self._first_mean, floor)
        if self._measures_each_step and unperturbed is not None:
            scale = max(scale, unperturbed)
        return scale

    def check(self, measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
        """Compares all means of a step with the scale. Ratios among them would show nothing if all are wrong.

        After perturbed inputs and before the first of them, a mean may be ``limit`` times the scale; at plain positions
        at most 5 times, because plain tokens are many, and each is of the same kind as an unperturbed response's.

        Args:
            measures: of :func:`step_metrics`, with ``perturbation/gap_unperturbed_mean`` where it was measured.
            limit: ``--perturbation.gap_limit``.
            strict: ``--perturbation.strict``; otherwise a warning is printed once per process.

        Raises:
            MismatchTooLarge: a mean is too large, and ``strict`` is set.
        """
        unperturbed = measures.get("perturbation/gap_unperturbed_mean")
        scale = self.update(unperturbed)
        if scale is None:
            return
        if unperturbed is not None and not self._noisy:
            self._check_unperturbed(unperturbed, strict)
        violations = []
        for place, description in _PLACES.items():
            mismatch = measures.get(f"perturbation/gap_{place}_mean", 0.0)
            times = min(limit, Limits.PLAIN_TIMES) if place == "plain" else limit
            allowed = times * scale
            if mismatch > allowed:
                violations.append(f"{description} by {mismatch:.2g} (at most {allowed:.2g})")
        if violations:
            _report(
                f"log-probabilities of rollout and trainer differ {', '.join(violations)} on average; where nothing is"
                f" perturbed they differ by {scale:.2g}.",
                _SCALE_CAUSES,
                is_error=strict,
            )

    def _check_unperturbed(self, unperturbed: float, strict: bool) -> None:
        """Warns of a large mean. A strict run ends if no rounding explains it.

        In half precision, rounding alone can exceed the mean that deserves a warning, so the run goes on and judges all
        other means by this one.
        """
        suspicious = Limits.SUSPICIOUS_HALF if self._half else Limits.SUSPICIOUS_FLOAT32
        unusable = Limits.UNUSABLE_HALF if self._half else Limits.SUSPICIOUS_FLOAT32
        if unperturbed <= suspicious:
            return
        message = (
            f"log-probabilities of rollout and trainer differ by {unperturbed:.2g} on average where nothing is"
            f" perturbed; at most {suspicious:g} is expected of one model on two sides."
        )
        hint = _STRICT_HINT
        if self._half:
            hint = f"In half precision, --perturbation.strict makes this an error above {unusable:g}."
        _report(message, _MODEL_CAUSES, is_error=strict and unperturbed > unusable, hint=hint)


def check_gap(measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
    """Compares a step's mean mismatch after perturbed inputs with ``limit`` times the expected one.

    A wrong replay widens the mismatch at plain positions too, because they see wrong inputs before them. Therefore
    ``expected = min(plain, max(before, 2**-5))``; without other plain tokens, ``expected = max(before, 2**-5)``.
    A plain mismatch below 1e-5 counts as 1e-5. A warning is printed once per process.

    Args:
        measures: of :func:`step_metrics`.
        limit: ``--perturbation.gap_limit``.
        strict: ``--perturbation.strict``.

    Raises:
        MismatchTooLarge: the mismatch is larger, and ``strict`` is set.
    """
    perturbed = measures.get("perturbation/gap_perturbed_mean")
    plain = measures.get("perturbation/gap_plain_mean")
    before = measures.get("perturbation/gap_before_mean")
    if perturbed is None:
        return
    expected = max(plain or 0.0, Limits.FLOAT32_MEAN)
    if before is not None:
        first = max(before, Limits.BF16_MIN_GAP)
        has_no_later_plain = before == plain  # both means are then over the same tokens
        expected = first if has_no_later_plain else min(expected, first)
    if perturbed <= limit * expected:
        return
    compared = "there is no plain position" if plain is None else f"at plain positions they differ by {plain:.2g}"
    if before is not None:
        compared += f", before the first perturbed input by {before:.2g}"
    _report(
        f"log-probabilities of rollout and trainer differ by {perturbed:.2g} on average right after perturbed inputs;"
        f" {compared}. At most {limit:g} times {expected:.2g} is expected of a replay that works.",
        _REPLAY_CAUSES,
        is_error=strict,
    )


def _report(message: str, causes: Sequence[str], *, is_error: bool, hint: str = _STRICT_HINT) -> None:
    """Raises ``MismatchTooLarge`` with the message and its likely causes, or prints both once per process.

    ``hint`` is a last line for the warning alone.
    """
    numbered = [f"  {number}. {cause}" for number, cause in enumerate(causes, start=1)]
    message = "\n".join([f"{message} Likely causes, the likeliest first:", *numbered])
    if is_error:
        raise MismatchTooLarge(message)
    if causes not in _warned:
        _warned.append(causes)
        print(f"ngrpo: warning: {message}\n  {hint}", flush=True)


def importance_measures(log_ratio: Tensor, bounds: tuple[float, float] | None, clip: bool) -> dict[str, float]:
    """The metrics ``importance/…`` of a step (docs/metrics.md).

    Args:
        log_ratio: log π_trainer − log π_rollout, (N,).
        bounds: the least and the largest importance weight of a token; without bounds there are no weights.
        clip: whether a weight beyond the bounds becomes the bound; otherwise it becomes 0.
    """
    measures = {"importance/divergence": -log_ratio.mean().item()}
    if bounds is None:
        return measures
    low, high = bounds
    weights = log_ratio.clamp(-20.0, 20.0).exp()
    is_beyond = (weights < low) | (weights > high)
    if clip:
        weights = weights.clamp(low, high)
    else:
        weights = weights.masked_fill(is_beyond, 0.0)
    measures["importance/weight"] = weights.mean().item()
    measures["importance/cut"] = is_beyond.float().mean().item()
    return measures


def with_strength(trainer: Tensor, rollout: Tensor, strength: float, bounds: tuple[float, float]) -> Tensor:
    """Log-probabilities to pass as the rollout's, so that a token's importance weight becomes 1 + α (w − 1).

    w = π_trainer / π_rollout is the full weight. A loss forms it from two log-probabilities, so
    ``--sampling.correction_warmup`` changes the rollout's.

    Args:
        trainer: log-probabilities of the trainer, (B, A).
        rollout: those of the rollout, (B, A).
        strength: α in [0, 1); at 1 the rollout's own log-probabilities are right.
        bounds: w is clamped to them.

    Returns:
        log π_trainer − log(1 + α (w − 1)), (B, A).
    """
    weight = (trainer - rollout).clamp(-20.0, 20.0).exp().clamp(*bounds)
    return trainer - (strength * (weight - 1.0)).log1p()
