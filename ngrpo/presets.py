"""Named sets of OpenRLHF flags: `ngrpo train --preset grpo|gspo|dapo`.

A preset is nothing but flags of OpenRLHF 0.11.2, printed before the start; a flag that you give yourself wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngrpo.hardware.profile import flag_value
from perturbations.options import nearest

# Another flag that sets the same thing: where it is given, ours would override it without a word.
_SAME_SETTING = {"--actor.eps_clip_low_high": ("--actor.eps_clip",)}

# OpenRLHF 0.11.2's default of --data.max_len, its bound on an answer where --rollout.max_new_tokens is not given.
_MAX_LEN = "2048"

# A flag's value: its words, () for a switch, or a function of the other flags.
Value = tuple[str, ...] | Callable[[Sequence[str]], tuple[str, ...]]


def _overlong_buffer(args: Sequence[str]) -> tuple[str, ...]:
    """A fifth of the longest answer, as in DAPO's own setting (4,096 of 20,480 tokens)."""
    longest = flag_value(args, "--rollout.max_new_tokens") or flag_value(args, "--data.max_len") or _MAX_LEN
    if not longest.isdecimal() or int(longest) < 1:
        raise ValueError(
            f"--preset dapo: the longest answer is {longest!r}, not a whole number of tokens of at least 1. Give"
            " --rollout.max_new_tokens, from which the buffer of the overlong penalty follows."
        )
    return (str(max(1, int(longest) // 5)),)


_GRPO: dict[str, Value] = {
    "--algo.advantage.estimator": ("group_norm",),
    "--actor.policy_loss_type": ("ppo",),
    "--actor.loss_agg_mode": ("seq-mean-token-mean",),
    "--algo.kl.use_loss": (),
    "--algo.kl.estimator": ("k3",),
}

_PRESETS: dict[str, dict[str, Value]] = {
    # Shao et al., arXiv 2402.03300: the mean over an answer's tokens, then over answers; k3 as a loss.
    "grpo": _GRPO,
    # Zheng et al., arXiv 2507.18071: the ratio is of the sequence, so its clip range is far narrower.
    "gspo": {
        **_GRPO,
        "--actor.policy_loss_type": ("gspo",),
        "--actor.eps_clip_low_high": ("0.0003", "0.0004"),
    },
    # Yu et al., arXiv 2503.14476: clip-higher, dynamic sampling, token-mean loss, overlong penalty, no KL.
    "dapo": {
        "--algo.advantage.estimator": ("group_norm",),
        "--actor.policy_loss_type": ("ppo",),
        "--actor.loss_agg_mode": ("token-mean",),
        "--actor.eps_clip_low_high": ("0.2", "0.28"),
        "--algo.dynamic_filtering_enable": (),
        "--algo.dynamic_filtering_range": ("0", "1"),
        "--reward.overlong_buffer_len": _overlong_buffer,
        "--reward.overlong_penalty_factor": ("1",),
        "--algo.kl.init_coef": ("0",),
    },
}


def available() -> tuple[str, ...]:
    """The presets' names."""
    return tuple(_PRESETS)


def flags_of(name: str) -> dict[str, Value]:
    """All flags of a preset; raises ``ValueError`` for an unknown one, with the nearest name."""
    if name not in _PRESETS:
        raise ValueError(f"unknown preset {name!r}.{nearest(name, _PRESETS)} Available: {', '.join(_PRESETS)}.")
    return dict(_PRESETS[name])


def expand(name: str, args: Sequence[str]) -> list[str]:
    """The flags that a preset adds to a command line.

    Args:
        name: one of :func:`available`.
        args: OpenRLHF's flags so far; what stands there is not added again.

    Returns:
        OpenRLHF flags with their values, to stand in front of ``args``.

    Raises:
        ValueError: for an unknown preset, with the nearest name.
    """
    return missing(flags_of(name), args)


def with_advantage(name: str | None, advantage: Mapping[str, Any] | None, args: Sequence[str]) -> list[str]:
    """The flags that ``--preset`` and ``--advantage`` add; where both set one, the advantage's stands.

    Args:
        name: a preset, or None.
        advantage: ``ngrpo.trainer.advantages.create(**advantage)``, or None.
        args: OpenRLHF's flags so far.

    Returns:
        OpenRLHF flags with their values, to stand in front of ``args``.

    Raises:
        ValueError: for an unknown name, or flags that the advantage cannot go with.
    """
    wanted = {} if name is None else flags_of(name)
    if advantage is not None:
        from ngrpo.trainer import advantages

        estimator = flag_value(args, "--algo.advantage.estimator")
        if estimator not in (None, "group_norm"):
            raise ValueError(
                f"--advantage {advantage['name']} takes the place of --algo.advantage.estimator {estimator}: give one"
                " of the two."
            )
        wanted |= advantages.create(**advantage).flags([*missing(wanted, args), *args])
    return missing(wanted, args)


def missing(flags: Mapping[str, Value], args: Sequence[str]) -> list[str]:
    """Those of some flags that a command line does not have, nor another flag for the same setting."""
    added: list[str] = []
    for flag, value in flags.items():
        if any(flag_value(args, given) is not None for given in (flag, *_SAME_SETTING.get(flag, ()))):
            continue
        added += [flag, *(value(args) if callable(value) else value)]
    return added
