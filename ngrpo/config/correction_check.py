# SPDX-License-Identifier: Apache-2.0
"""What the importance weights of a run's loss, and their warm-up, can go with: part of the preflight."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from typing import NoReturn

from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import defaults
from perturbations.base import Perturbation
from perturbations.errors import UsageError

_CORRECTION = "--algo.advantage.is_correction_level"
_BOUNDS = "--algo.advantage.is_correction_threshold"
_LOSS = "--actor.policy_loss_type"
# Those under which OpenRLHF 0.11.2 weighs each token's loss by a bounded π / π_rollout.
_WEIGHTS = {
    _CORRECTION: "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_gating": "ratio",
    _LOSS: "ppo",
}


def check_weights(flags: Flags, subject: str, *, needed: bool) -> None:
    """Raises ``UsageError`` where the loss would not weigh answers by π / π_rollout, as the method asked for does.

    Args:
        flags: OpenRLHF's flags.
        subject: the method's flag.
        needed: whether it cannot do without, since it follows the rollouts' log-probabilities.
    """
    level = flags.value(_CORRECTION)
    if level in (None, "off"):
        if needed:
            raise UsageError(
                f"{subject} needs the rollouts' log-probabilities, which {_CORRECTION} off does without. Leave"
                f" {_CORRECTION} at token, which it sets."
            )
        return
    if flags.value(_LOSS) == "gspo":
        off = "" if needed else f", or add {_CORRECTION} off, which trains without the weights"
        raise UsageError(
            f"{subject} cannot be used with {_LOSS} gspo and {_CORRECTION} {level}: GSPO then puts the rollout's policy"
            " in the place of the old one, and its narrow clip would leave out nearly all answers with a negative"
            f" advantage. Leave one of them out{off}."
        )


def check_sampled_text(flags: Flags, subject: str, perturbation: Perturbation, *, needed: bool) -> None:
    """Raises ``UsageError`` where the loss would be weighed by π / π_rollout of tokens that were not drawn from it.

    Args:
        flags: OpenRLHF's flags.
        subject: the method's flag.
        perturbation: one whose text is not sampled.
        needed: whether the method cannot do without the weights.
    """
    level = flags.value(_CORRECTION)
    if level in (None, "off"):
        return
    ways = [] if needed else [f"add {_CORRECTION} off, which trains without the weights"]
    for field in fields(perturbation):
        for choice in field.metadata.get("choices") or ():
            with suppress(UsageError):
                if replace(perturbation, **{field.name: choice}).samples_text:
                    ways.append(f"take --perturbation.{field.name} {choice}, under which the text is sampled")
    raise UsageError(
        f"{subject} cannot be used with --perturbation {perturbation.name} and {_CORRECTION} {level}: its text is not"
        " drawn from the policy at the schedule's temperature, so that the importance weights π / π_rollout would be"
        f" those of another distribution. Leave one of them out{''.join(f', or {way}' for way in ways)}."
    )


def check_warmup(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where ``--sampling.correction_warmup`` has no weight of each token that it could change."""
    steps = run.sampling.correction_warmup
    if steps is None:
        return

    def refuse(flag: str, reason: str, fix: str) -> NoReturn:
        raise UsageError(f"--sampling.correction_warmup {steps} cannot be used with {flag}: {reason}. {fix}.")

    for flag, needed in _WEIGHTS.items():
        value = flags.value(flag) or defaults()[flag]
        if value != needed:
            weights = "it lets the loss's weight of each token, min(π / π_rollout, HIGH), grow to its whole"
            refuse(f"{flag} {value}", weights, f"Give {flag} {needed}, or leave the warm-up out")
    low, high = _bounds(flags)
    if not low <= 1.0 <= high:
        refuse(f"{_BOUNDS} {low:g} {high:g}", "its weights begin at 1, which is outside", f"Give {_BOUNDS} 0 10")
    if run.second_round is not None:
        ratios = "whose answers have a ratio to their own prompt's policy, which a changed weight would change"
        refuse(f"--second_round {run.second_round.name}", ratios, "Leave one of them out")


def _bounds(flags: Flags) -> tuple[float, float]:
    """The least and the largest weight; what is no number, or none at all, is the parser's to refuse."""
    words = next((flag.values for flag in reversed([*flags]) if flag.name == _BOUNDS), ("0.5", "5.0"))
    with suppress(ValueError, IndexError):
        numbers = [float(word) for word in words]
        return (0.0, *numbers)[-2], numbers[-1]
    return 0.0, 1.0
