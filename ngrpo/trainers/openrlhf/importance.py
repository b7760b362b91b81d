# SPDX-License-Identifier: Apache-2.0
"""The policy that rolled out, beside the trainer's: what importance sampling makes of a step, and its entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import argparse

    from openrlhf.trainer.ppo_utils.experience import Experience


def importance_measures(experiences: Sequence[Experience], args: argparse.Namespace) -> dict[str, float]:
    """How far the policy that rolled out is from the trainer's, and what that weighs.

    Args:
        experiences: with the log-probabilities of rollout and trainer, (B, A) each.
        args: OpenRLHF's arguments.

    Returns:
        ``divergence``: the mean of log π_rollout − log π_trainer over the tokens. With the correction by the token's
        ratio also ``weight``: the mean weight of the loss, π_trainer / π_rollout within the bounds; and ``cut``: the
        share of tokens at which it is beyond them; GSPO's loss has no such weights. Empty where the rollouts'
        log-probabilities are not asked for.
    """
    loss, args = args.actor.policy_loss_type, args.algo.advantage
    if args.is_correction_level == "off" or any(e.rollout_log_probs is None for e in experiences):
        return {}
    parts = [(e.action_log_probs - e.rollout_log_probs)[e.action_mask.bool()].float().cpu() for e in experiences]
    ratio = torch.cat(parts)
    measures = {"divergence": -ratio.mean().item()}
    if loss == "ppo" and args.is_correction_level == "token" and args.is_correction_gating == "ratio":
        low, high = (float(bound) for bound in args.is_correction_threshold)
        weight = ratio.clamp(-20.0, 20.0).exp()
        beyond = (weight < low) | (weight > high)
        bounded = weight.clamp(low, high) if args.is_correction_mode == "clip" else weight.masked_fill(beyond, 0.0)
        measures |= {"weight": bounded.mean().item(), "cut": beyond.float().mean().item()}
    return {f"importance/{name}": value for name, value in measures.items()}


def rollout_entropy(experiences: Sequence[Experience]) -> float | None:
    """The mean entropy of the policy that rolled out, at the temperatures it drew with, in nats.

    Estimated without bias by the mean of −log π_rollout over the tokens, where all of them were drawn from it.

    Args:
        experiences: with the log-probabilities of the rollout, (B, A) each.

    Returns:
        None where these are not asked for.
    """
    if any(e.rollout_log_probs is None for e in experiences):
        return None
    parts = [e.rollout_log_probs[e.action_mask.bool()].float().cpu() for e in experiences]
    return -torch.cat(parts).mean().item()
