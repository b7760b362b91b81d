# SPDX-License-Identifier: Apache-2.0
"""What a perturbation's entry in the loss, and what it freezes, can go with in a run: part of the preflight."""

from __future__ import annotations

from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import defaults
from perturbations.errors import UsageError

_CORRECTION = "--algo.advantage.is_correction_level"
_KL = "--algo.kl.init_coef"
_ESTIMATOR = "--algo.advantage.estimator"

WHY_ONE_UPDATE = "its noise is too narrow, or of too many dimensions, for a policy ratio"

# OpenRLHF's estimators that subtract a mean over the answers to each prompt.
_BALANCED = ("group_norm", "rloo", "reinforce_baseline", "dr_grpo")


def estimator(flags: Flags) -> str:
    """OpenRLHF's advantage estimator, or its default."""
    return flags.value(_ESTIMATOR) or defaults()[_ESTIMATOR]


def check_frozen(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where nothing would train, since no input of a checkpointed layer has a gradient."""
    flag, perturbation = "--actor.gradient_checkpointing_reentrant", run.perturbation
    if perturbation is not None and perturbation.freeze in ("embedding", "both") and flags.has(flag):
        raise UsageError(
            f"{flag} cannot be used with --perturbation.freeze {perturbation.freeze}: reentrant checkpointing gives no"
            " gradient to layers whose input has none. Leave it out, or add --perturbation.freeze none."
        )


def check_kl(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where a KL term is asked for at positions at which no token is drawn.

    Args:
        flags: OpenRLHF's flags with those of presets and advantage.
        run: what is asked for.
    """
    perturbation, value = run.perturbation, flags.value(_KL) or defaults()[_KL]
    if perturbation is None or not perturbation.has_density or not perturbation.score_only:
        return
    if not perturbation.draws_token and float(value) > 0.0:
        raise UsageError(
            f"{_KL} {value} cannot be used with the density of --perturbation {perturbation.name}: no token is drawn at"
            f" its positions, so none has a KL term. Set {_KL} 0, or add --perturbation.density token."
        )


def notes(flags: Flags, run: RunConfig) -> list[str]:
    """Warnings about a perturbation's entry in the loss.

    Args:
        flags: OpenRLHF's flags with those of presets and advantage.
        run: what is asked for.

    Returns:
        One where advantages that do not sum to zero meet a score whose mean is not zero, and one where rollouts of
        another policy are weighed by a density.
    """
    perturbation, lines = run.perturbation, []
    if perturbation is None:
        return lines
    subject = f"--perturbation {perturbation.name}"
    unbalanced = None
    if run.advantage is not None:
        unbalanced = None if run.advantage.sums_to_zero else f"--advantage {run.advantage.name}"
    elif estimator(flags) not in _BALANCED:
        unbalanced = f"{_ESTIMATOR} {estimator(flags)}"
    if run.credit is not None and not run.credit.keeps_sums:
        unbalanced = f"--credit {run.credit.name}"
    if unbalanced is not None and not perturbation.zero_mean_score:
        density = f" with --perturbation.density {perturbation.spec()['density']}" if perturbation.has_density else ""
        lines.append(
            f"{subject}{density}: the mean of its score is not 0, so {unbalanced}, whose advantages do not sum to zero"
            " in a group, pushes the policy along that mean, whatever the reward. docs/methods.md says which entries"
            " have mean 0, and which --perturbation.density is exact."
        )
    if perturbation.has_density:
        stale = "--train.async_enable" if flags.has("--train.async_enable") else None
        if run.policy_noise is not None:
            stale = f"--policy_noise {run.policy_noise.name}"
        if stale is not None:
            lines.append(
                f"{stale} with the density of {subject}: the rollouts are of another policy than the one that is"
                " trained, and for densities of draws nothing corrects that. --perturbation.density token has"
                f" importance weights ({_CORRECTION})."
            )
    return lines
