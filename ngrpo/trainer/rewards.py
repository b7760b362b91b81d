"""Rewards that are not finite are refused where this project first sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturbations.errors import UsageError

_SHOWN = 200


def responses(tokenizer: Any, experience: Any) -> list[str]:
    """The generated texts of a batch of OpenRLHF's experiences."""
    # Entry t of the mask is of token t + 1.
    pairs = zip(experience.sequences[:, 1:], experience.action_mask.bool())
    return [tokenizer.decode(tokens[mask], skip_special_tokens=True) for tokens, mask in pairs]


def refuse_non_finite(tokenizer: Any, experiences: Sequence[Any]) -> None:
    """Raises ``UsageError`` for the first reward that is NaN or infinite, with its prompt and answer.

    Such a reward makes every advantage of its group NaN, and the weights with them.
    """
    for experience in experiences:
        rewards = experience.rewards
        for row in [] if rewards is None else (~rewards.isfinite()).nonzero().flatten().tolist():
            answer = responses(tokenizer, experience)[row]
            raise UsageError(
                f"the reward function gave {rewards[row].item()} to this answer; a finite number is needed.\n"
                f"  prompt: {_short(experience.prompts[row])}\n  answer: {_short(answer)}\n"
                "Let the reward function return a finite number for every answer, such as 0 for one it cannot read."
            )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
