# SPDX-License-Identifier: Apache-2.0
"""Rewards: a reward function that fails, hangs or gives no number ends the run with its prompt and response.

OpenRLHF 0.11.2 logs such an error in one line, continues with None for a reward and fails later; for one that hangs it
waits.
"""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngrpo.config.flag_checks import number
from ngrpo.machine.upstream.types import Experience, PreTrainedTokenizerBase
from perturbations.errors import UsageError

_SHOWN = 200
# A verifier may run a program, or ask a judge; beyond this it hangs.
SECONDS = "NGRPO_REWARD_SECONDS"
_DEFAULT_SECONDS = 600.0


class RewardFailed(RuntimeError):
    """The reward function gave nothing that can be trained on; the message names prompt and response."""


class CheckedReward:
    """OpenRLHF's ``reward_func``, watched.

    OpenRLHF calls it from a thread for each response, and swallows its errors: :meth:`raise_failure` raises them later.
    """

    def __init__(self, reward_func: Callable[..., Any]) -> None:
        text = os.environ.get(SECONDS, str(_DEFAULT_SECONDS))
        self._seconds = number(text, float)
        if not self._seconds > 0.0:
            raise UsageError(f"{SECONDS}={text}: a positive number of seconds is needed.")
        self._reward_func = reward_func
        self._failure: str | None = None

    def __call__(self, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
        """The reward function's result. It runs in its own thread: one that hangs is left behind."""
        returned: list[Any] = []

        def run() -> None:
            try:
                returned.append(self._reward_func(queries, prompts, labels))
            except BaseException as error:
                returned.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._seconds)
        if not returned:
            fault = f"did not return within {self._seconds:g} s (the environment variable {SECONDS} sets the limit)"
        elif isinstance(returned[0], BaseException):
            fault = f"raised {type(returned[0]).__name__}: {returned[0]}"
        else:
            fault = _fault(returned[0])
        if fault is None:
            return returned[0]
        response = queries[0].removeprefix(prompts[0])
        self._failure = (
            f"the reward function {fault}.\n  prompt: {_short(prompts[0])}\n  response: {_short(response)}\n"
            "It must return {'rewards': a finite number} for each response, such as 0 for one that it cannot read."
        )
        raise RewardFailed(self._failure)

    def raise_failure(self) -> None:
        """Raises :class:`RewardFailed` if any call has failed."""
        if self._failure is not None:
            raise RewardFailed(self._failure)


def _fault(result: object) -> str | None:
    """The fault of a reward function's result for one response; None if there is none."""
    if not isinstance(result, Mapping) or "rewards" not in result:
        return f"returned {_short(str(result))} where a dictionary with 'rewards' is needed"
    for name in ("rewards", "scores"):
        value = result.get(name)
        if value is None and name == "scores":
            continue
        flat = value.flatten().tolist() if hasattr(value, "flatten") else value
        values = list(flat) if isinstance(flat, (list, tuple)) else [flat]
        if len(values) != 1 or not isinstance(values[0], (int, float)) or not math.isfinite(values[0]):
            return f"returned {_short(str(value))} as {name!r} of one response"
    return None


def responses(tokenizer: PreTrainedTokenizerBase, experience: Experience) -> list[str]:
    """The generated texts of a batch of OpenRLHF's experiences."""
    # Entry t of the mask is of token t + 1.
    pairs = zip(experience.sequences[:, 1:], experience.action_mask.bool())
    return [str(tokenizer.decode(tokens[mask], skip_special_tokens=True)) for tokens, mask in pairs]


def refuse_non_finite(tokenizer: PreTrainedTokenizerBase, experiences: Sequence[Experience]) -> None:
    """Raises ``UsageError`` for the first reward that is NaN or infinite: all advantages of its group would be NaN."""
    for experience in experiences:
        rewards = experience.rewards
        for row in [] if rewards is None else (~rewards.isfinite()).nonzero().flatten().tolist():
            response = responses(tokenizer, experience)[row]
            raise UsageError(
                f"the reward function gave {rewards[row].item()} to this response; a finite number is needed.\n"
                f"  prompt: {_short(experience.prompts[row])}\n  response: {_short(response)}\n"
                "Let the reward function return a finite number for every response, such as 0 for one it cannot read."
            )


def refuse_untrained(samples: Sequence[Experience]) -> None:
    """Raises ``UsageError`` for the first response without a token to train on: its mean log-probability is 0 / 0."""
    for sample in samples:
        for row in (sample.action_mask.sum(dim=-1) == 0).nonzero().flatten().tolist():
            raise UsageError(
                "a response has no token to train on: its prompt is as long as --data.max_len, or an agent masked all"
                f" of it (action_ranges).\n  prompt: {_short(sample.prompts[row])}\nRaise --data.max_len, leave that"
                " prompt out, or let the agent keep a token."
            )


def cut_prompts(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Experience], longest: int) -> int:
    """How many of a step's prompts lost their first tokens: those of more than ``longest`` tokens.

    OpenRLHF 0.11.2 keeps the last ones, and says so in a rollout worker's log alone.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal model's processor counts texts, not tokens
    # Entry t of the mask is of token t + 1; a prompt that was cut fills its room, and so do a few others.
    filled = {s.prompts[0] for s in samples if int(s.action_mask[0].argmax()) + 1 == longest}
    return sum(len(tokenizer(text=text, add_special_tokens=False)["input_ids"]) > longest for text in filled)


def cut_turns(samples: Sequence[Experience], longest: int) -> int:
    """How many of a step's conversations an agent's next message fills up to ``longest`` tokens, or beyond.

    OpenRLHF 0.11.2 asks for no further turn then, cuts the message, and says nothing.
    """
    # Entry t of the mask is of token t + 1; an agent's message is not trained.
    return sum(s.action_mask.shape[1] + 1 >= longest and not s.action_mask[0, -1] for s in samples)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
