# SPDX-License-Identifier: Apache-2.0
"""Named sets of OpenRLHF's flags, `ngrpo train --preset grpo|gspo|dapo`, printed before the start; your flags win."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.openrlhf_parser import value_of
from perturbations.errors import UsageError
from perturbations.options import nearest

if TYPE_CHECKING:
    from ngrpo.methods.advantages.base import Advantage

# Another flag that sets the same thing: where it is given, ours would override it without a word.
_SAME_SETTING = {"--actor.eps_clip_low_high": "--actor.eps_clip"}
_BUFFER = "--reward.overlong_buffer_len"
_GRPO: dict[str, Default] = {
    "--algo.advantage.estimator": "group_norm",
    "--actor.policy_loss_type": "ppo",
    "--actor.loss_agg_mode": "seq-mean-token-mean",
    "--algo.kl.use_loss": None,
    "--algo.kl.estimator": "k3",
}
PRESETS: dict[str, dict[str, Default]] = {
    # Shao et al., arXiv 2402.03300: the mean over an answer's tokens, then over answers; k3 as a loss.
    "grpo": _GRPO,
    # Zheng et al., arXiv 2507.18071: the ratio is of the sequence, so its clip range is far narrower.
    "gspo": {**_GRPO, "--actor.policy_loss_type": "gspo", "--actor.eps_clip_low_high": ("0.0003", "0.0004")},
    # Yu et al., arXiv 2503.14476: clip-higher, dynamic sampling, token-mean loss, overlong penalty, no KL.
    "dapo": {
        "--algo.advantage.estimator": "group_norm",
        "--actor.policy_loss_type": "ppo",
        "--actor.loss_agg_mode": "token-mean",
        "--actor.eps_clip_low_high": ("0.2", "0.28"),
        "--algo.dynamic_filtering_enable": None,
        "--algo.dynamic_filtering_range": ("0", "1"),
        _BUFFER: None,  # follows from the longest answer
        "--reward.overlong_penalty_factor": "1",
        "--algo.kl.init_coef": "0",
    },
}


def check_name(name: str) -> None:
    """Raises ``UsageError`` for an unknown preset, with the nearest name."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}.{nearest(name, PRESETS)} Available: {', '.join(PRESETS)}.")


def applied(flags: Flags, name: str | None, advantage: Advantage | None = None) -> Flags:
    """Adds the flags of ``--preset`` and ``--advantage``; where both set one, the advantage's wins.

    Args:
        flags: OpenRLHF's flags so far, which win over both.
        name: a preset, or None.
        advantage: that of ``--advantage``, or None.

    Raises:
        UsageError: for an unknown preset, or flags that it or the advantage cannot go with.
    """

    def added() -> Flags:
        return flags.with_defaults({k: v for k, v in defaults.items() if not flags.has(_SAME_SETTING.get(k, k))})

    defaults: dict[str, Default] = {}
    if name is not None:
        check_name(name)
        defaults |= PRESETS[name]
    if _BUFFER in defaults and not flags.has(_BUFFER):
        # Where --rollout.max_new_tokens is not given, --data.max_len bounds an answer.
        longest = flags.value("--rollout.max_new_tokens") or value_of(flags, "--data.max_len")
        if not longest.isdecimal() or int(longest) < 1:
            raise UsageError(
                f"--preset dapo: the longest answer is {longest!r}, not a whole number of tokens of at least 1. Give"
                " --rollout.max_new_tokens, from which the buffer of the overlong penalty follows."
            )
        # A fifth of the longest answer, as in DAPO's own setting (4,096 of 20,480 tokens).
        defaults[_BUFFER] = str(max(1, int(longest) // 5))
    if advantage is not None:
        defaults |= advantage.flags(added())
    return added()
