# SPDX-License-Identifier: Apache-2.0
"""Does training see what the rollout saw? The gap at perturbed positions is judged by the one at plain positions."""

from __future__ import annotations

from collections.abc import Mapping

# The mean gap of an exact replay in float32: plain positions below it say nothing about perturbed ones.
FLOOR = 1e-5
# That of bfloat16. Tokens that no perturbed input comes before may be few: what they say below it is chance.
_COARSE = 2.0**-5

_warned: list[str] = []

_CAUSES = (
    "The replay does not reach the model: its input embeddings are not what get_input_embeddings() gives, or another"
    " hook on them replaces their output.",
    "Records of other weights: the engine did not take the last weight sync, or the rollout is older than it"
    " (asynchronous training).",
    "Positions have moved: a chat template or an agent changed the tokens before a perturbed position.",
    "The perturbation is not the same on both sides: its file was edited during the run, or it draws outside of the"
    " step's streams (ngrpo check FILE.py:NAME tells).",
    "Precision: at these inputs the model is more sensitive to bfloat16's rounding than at plain ones. Then raise"
    " --perturbation.gap_limit.",
)


class ReplayGap(RuntimeError):
    """The trainer's log-probabilities after perturbed inputs are not those of the rollout."""


def check_gap(measures: Mapping[str, float], limit: float, *, strict: bool) -> None:
    """Compares a step's mean gap after perturbed inputs with ``limit`` times the one at plain positions.

    A wrong replay widens the gap at plain positions too, since they see wrong inputs before them. So the gap at tokens
    that no perturbed input comes before, or 2^-5 where it is smaller, takes its place if that is less; and where these
    are the only plain tokens, as at rate 1, in any case.

    Args:
        measures: of `ngrpo.trainer.metrics.step_metrics`.
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
        f" {compared}. At most {limit:g} times {expected:.2g} is expected of a replay that works. Likely causes, the"
        " first ones first:\n" + "\n".join(f"  {number}. {cause}" for number, cause in enumerate(_CAUSES, start=1))
    )
    if strict:
        raise ReplayGap(message)
    _warn_once(message)


def _warn_once(message: str) -> None:
    if not _warned:
        _warned.append(message)
        print(f"ngrpo warning: {message}\n  --perturbation.strict makes this an error.", flush=True)
