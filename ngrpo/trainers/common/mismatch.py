# SPDX-License-Identifier: Apache-2.0
"""Rollout against trainer: the gap |log π_trainer − log π_rollout| of a step's tokens, and importance weights.

A gap after perturbed inputs is judged by the gap at plain positions, and both by the gap of unperturbed responses. So a
broken replay is seen on the first step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from perturbations import FinishedTrajectory, Perturbation, Positions

_FLOOR = 1e-5  # the mean gap of an exact replay in float32: smaller plain gaps say nothing about perturbed positions
_COARSE = 2.0**-5  # that of bfloat16; tokens before the first perturbed input may be few, and smaller by chance
_HALF = 2.0**-7  # the least scale in half precision: the first tokens of a response may all be certain
_PLAIN = 5.0  # how many times the scale plain positions may be; a smaller limit wins
# By half precision: beyond it, engine and trainer have different weights or models.
_DIFFERENT = {False: 1e-2, True: 0.25}

_warned: list[str] = []

_CONFIG_CAUSE = (
    "Engine and trainer read the model's config.json differently: rotary settings, a window or a scale of logits (ngrpo"
    " doctor --model NAME compares the keys)."
)
_MODEL_CAUSES = (
    "They have not the same weights: an engine that loaded another checkpoint, or a weight sync that was not taken.",
    _CONFIG_CAUSE,
    "Random weights alone differ so much in bfloat16: the first step of the same run with --perturbation none decides"
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
_CAUSES = (
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


class ReplayGap(RuntimeError):
    """The trainer's log-probabilities after perturbed inputs are not the rollout's."""


def step_metrics(
    records: Sequence[FinishedTrajectory | None],
    log_probs: Sequence[np.ndarray],
    perturbation: Perturbation | None = None,
) -> dict[str, float]:
    """The metrics ``perturbation/…`` of a batch before the update (docs/metrics.md); one without a token is left out.

    Args:
        records: one per sample; samples without one are left out.
        log_probs: log π of the trainer by position, (T,) each, NaN at untrained tokens. What a record has beyond T was
            cut off.
        perturbation: of the rollouts, for the planned rate.
    """
    totals: Counter[str] = Counter()
    gaps: dict[str, list[np.ndarray]] = {name: [] for name in _PLACES}
    for trajectory, trainer in zip(records, log_probs):
        if trajectory is None:
            continue
        record, rollout = trajectory.record.truncate(len(trainer)), trajectory.log_probs[: len(trainer)]
        drawn = ~np.isnan(rollout)
        tokens = np.flatnonzero(drawn & ~np.isnan(trainer[: len(rollout)]))
        gap, follows = np.abs(trainer[tokens] - rollout[tokens]), np.isin(tokens - 1, record.positions)
        before = tokens <= record.positions[0] if len(record) else np.ones_like(follows)
        for name, where in {"perturbed": follows, "plain": ~follows, "before": before}.items():
            gaps[name].append(gap[where])
        if perturbation is not None:
            # The position at which each token's turn began: in a conversation tools speak too.
            starts = np.where(drawn & ~np.concatenate([[False], drawn[:-1]]), np.arange(len(rollout)), 0)
            turns = np.maximum.accumulate(starts)[tokens]
            at = Positions(np.full(len(tokens), record.seed, np.int64), turns, tokens)
            totals["planned"] += int(perturbation.selects(at).sum())
        counted = np.isin(record.positions, tokens)
        totals.update(
            generated=len(tokens),
            perturbed=int(counted.sum()),
            agreed=int(record.agreed[counted].sum()),
            bytes=len(record.to_bytes()),
            **{name: getattr(trajectory, name) for name in ("dropped", "prompted", "cached")},
        )
    if not totals["generated"]:
        return {}
    quotients = {
        "rate": ("perturbed", "generated"),
        "record_bytes_per_token": ("bytes", "generated"),
        "prefix_hit_rate": ("cached", "prompted"),
        "anchor_agreement": ("agreed", "perturbed"),
        **({} if perturbation is None else {"planned_rate": ("planned", "generated")}),
    }
    metrics = {name: totals[part] / totals[of] for name, (part, of) in quotients.items() if totals[of]}
    if totals["dropped"]:
        metrics["dropped_edits"] = float(totals["dropped"])
    for name, parts in gaps.items():
        if len(gap := np.concatenate(parts)):
            metrics[f"gap_{name}_mean"], metrics[f"gap_{name}_max"] = float(gap.mean()), float(gap.max())
    return {f"perturbation/{name}": value for name, value in metrics.items()}


class GapScale:
    """The gap of engines and trainer where nothing is perturbed, which judges all other gaps of the run."""

    def __init__(self, half_precision: bool, drifts: bool = False, noisy: bool = False) -> None:
        """``drifts``: engines may have older weights, as in asynchronous training; ``noisy``: other ones by design."""
        self._half, self._drifts, self._noisy = half_precision, drifts or noisy, noisy
        self._start: float | None = None

    @property
    def is_needed(self) -> bool:
        """Whether this step's unperturbed responses are measured."""
        return self._start is None or self._drifts

    def of(self, unperturbed: float | None) -> float | None:
        """The scale of a step in nats: the run's first gap, or the larger one of this step if weights drift."""
        if self._start is None:
            self._start = unperturbed
        gaps = [part for part in (self._start, unperturbed if self._drifts else None) if part is not None]
        return max([*gaps, _HALF if self._half else _FLOOR]) if gaps else None

    def check(self, measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
        """Compares all gaps of a step with the scale; ratios among them show nothing if all are wrong.

        Each may be ``limit`` times the scale, plain positions at most 5 times.

        Raises ``ReplayGap`` if a gap is larger and ``strict`` is set.
        """
        unperturbed = measures.get("perturbation/gap_unperturbed_mean")
        scale = self.of(unperturbed)
        if scale is None:
            return
        if unperturbed is not None and unperturbed > _DIFFERENT[self._half] and not self._noisy:
            _report(
                f"log-probabilities of rollout and trainer differ by {unperturbed:.2g} on average where nothing is"
                f" perturbed; at most {_DIFFERENT[self._half]:g} is expected of one model on two sides.",
                strict,
                _MODEL_CAUSES,
            )
        # Plain tokens are many, and each is the same kind of token as an unperturbed response's.
        parts = []
        for name, place in _PLACES.items():
            gap = measures.get(f"perturbation/gap_{name}_mean", 0.0)
            allowed = scale * (min(limit, _PLAIN) if name == "plain" else limit)
            if gap > allowed:
                parts.append(f"{place} by {gap:.2g} (at most {allowed:.2g})")
        if parts:
            measured = f"log-probabilities of rollout and trainer differ {', '.join(parts)} on average"
            _report(f"{measured}; where nothing is perturbed they differ by {scale:.2g}.", strict, _SCALE_CAUSES)


def check_gap(measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
    """Compares a step's mean gap after perturbed inputs with ``limit`` times the one at plain positions.

    A wrong replay widens the gap at plain positions too, since they see wrong inputs before them. So the gap before any
    perturbed input, or 2^-5 if it is smaller, takes its place if that is less, or if there are no other plain tokens.
    A plain gap below 1e-5 counts as 1e-5. A warning is printed once per process.

    Raises ``ReplayGap`` if the gap is larger and ``strict`` is set.
    """
    perturbed, plain, before = (measures.get(f"perturbation/gap_{name}_mean") for name in _PLACES)
    expected = max(plain or 0.0, _FLOOR)
    if before is not None:
        first = max(before, _COARSE)
        expected = first if before == plain else min(expected, first)
    if perturbed is None or perturbed <= limit * expected:
        return
    compared = "there is no plain one" if plain is None else f"at plain ones it is {plain:.2g}"
    if before is not None:
        compared += f", at tokens before the first perturbed input {before:.2g}"
    measured = f"log-probabilities of rollout and trainer differ by {perturbed:.2g} on average"
    allowed = f"At most {limit:g} times {expected:.2g} is expected of a replay that works."
    _report(f"{measured} right after perturbed inputs; {compared}. {allowed}", strict, _CAUSES)


def _report(message: str, strict: bool, causes: Sequence[str] = ()) -> None:
    if causes:
        lines = (f"  {number}. {cause}" for number, cause in enumerate(causes, start=1))
        message = "\n".join([f"{message} Likely causes, the likeliest first:", *lines])
    if strict:
        raise ReplayGap(message)
    if not _warned:
        _warned.append(message)
        print(f"ngrpo: warning: {message}\n  --perturbation.strict makes this an error.", flush=True)


def importance_measures(log_ratio: Tensor, bounds: tuple[float, float] | None, clip: bool) -> dict[str, float]:
    """The metrics ``importance/…`` of log π_trainer − log π_rollout, (N,); without bounds there are no weights.

    ``bounds`` are the least and the largest token-level weight; beyond, it is the bound with ``clip``, otherwise 0.
    """
    result = {"divergence": -log_ratio.mean().item()}
    if bounds is not None:
        weight = log_ratio.clamp(-20.0, 20.0).exp()
        beyond = (weight < bounds[0]) | (weight > bounds[1])
        bounded = weight.clamp(*bounds) if clip else weight.masked_fill(beyond, 0.0)
        result |= {"weight": bounded.mean().item(), "cut": beyond.float().mean().item()}
    return {f"importance/{name}": value for name, value in result.items()}


def with_strength(trainer: Tensor, rollout: Tensor, strength: float, bounds: tuple[float, float]) -> Tensor:
    """Log-probabilities of the rollout (B, A) with the importance weight 1 + α (w − 1), w = π_trainer / π_rollout.

    A loss forms w from two log-probabilities, so ``--sampling.correction_warmup`` replaces the rollout's. α is
    ``strength``, in [0, 1), and w is within ``bounds``; at 1 the rollout's own are right.
    """
    weight = (trainer - rollout).clamp(-20.0, 20.0).exp().clamp(*bounds)
    return trainer - (strength * (weight - 1.0)).log1p()
