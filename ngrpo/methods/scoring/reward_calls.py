# SPDX-License-Identifier: Apache-2.0
"""A user's reward function: loaded, called and checked in one way, in training and in evaluation."""

import importlib.util
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from perturbations.errors import UsageError, nearest, require

# A verifier may run a program, or ask a judge; beyond this it hangs.
SECONDS = "NGRPO_REWARD_SECONDS"
_DEFAULT_SECONDS = 600.0
_SHOWN = 200
FIX = "It must return {'rewards': a finite number} for each response, such as 0 for one that it cannot read."
"""What a user can do about a :class:`RewardFault` of a reward function."""
_OF_OPENRLHF = (
    *("reward", "score", "response_clip_ratio", "response_length", "truncated", "total_length"),
    *("kl", "logprobs_diff", "return", "group_reward_std"),
    *("policy_loss", "entropy_loss", "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"),
    *("actor_lr", "actor_grad_norm", "critic_loss", "values", "critic_lr", "critic_grad_norm"),
    *("dynamic_filtering_pass_rate", "generated_samples", "_num_samples", "_num_action_tokens", "_weights"),
)
"""The names of OpenRLHF 0.11.2's own metrics: of a response, of the actor and the critic, and of the step.

``extra_logs`` with such a name would replace the metric, or be replaced by it.
"""
_READ = ("rewards", "scores", "extra_logs")
"""The names that are read of what a reward function or server gives for a response."""
_PREFIXES_OF_OPENRLHF = ("rollout/", "timing/")
"""The beginnings of further names of OpenRLHF's own metrics of the step."""
_OF_NGRPO = (
    *("optimizer_steps", "zero_gradients", "trained_responses", "trained_groups", "generated_tokens"),
    *("left_out_responses", "cut_prompts", "cut_turns", "ngrpo_weight_version"),
)
_PREFIXES_OF_NGRPO = (
    *("perturbation/", "importance/", "staleness/", "advantage/", "credit/", "policy_noise/", "sampling/"),
    *("score_centering/", "second_round/"),
)
"""The beginnings of further names of ngrpo's own metrics (docs/metrics.md)."""


class RewardFault(Exception):
    """A call gave no reward; the message continues a sentence that begins with the function or server."""


def seconds_allowed() -> float:
    """How long a call may take; ``UsageError`` for an environment variable that is no positive number."""
    text = os.environ.get(SECONDS, str(_DEFAULT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0:
        raise UsageError(f"{SECONDS}={text}: a positive number of seconds is needed.")
    return seconds


@lru_cache(maxsize=8)
def load(path: str) -> Callable[..., Any]:
    """The ``reward_func`` of a file, which is run as OpenRLHF 0.11.2 runs it; the file may import its neighbors."""
    file = Path(path).expanduser().resolve()
    sys.path.append(str(file.parent))
    spec = require(importlib.util.spec_from_file_location("reward_func", file), f"a loader of {file}")
    module = importlib.util.module_from_spec(spec)
    require(spec.loader, f"a loader of {file}").exec_module(module)
    return module.reward_func


def call(reward_func: Callable[..., Any], query: str, prompt: str, label: object, seconds: float) -> dict[str, Any]:
    """The result for one response, with floats.

    The function runs in a thread of its own, as OpenRLHF calls it from threads: one that hangs is left behind, and an
    alarm raises everywhere or nowhere.

    Raises:
        RewardFault: if the function raises, takes longer, or returns anything else than a finite number.
    """
    returned: list[Any] = []
    own_label = deepcopy(label)  # all responses of a group have the same one, which the function might change

    def run() -> None:
        try:
            returned.append(reward_func([query], [prompt], [own_label]))
        except BaseException as error:
            returned.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if not returned:
        raise RewardFault(f"did not return within {seconds:g} s (the environment variable {SECONDS} sets the limit)")
    if isinstance(returned[0], BaseException):
        error = returned[0]
        raise RewardFault(f"raised {type(error).__name__}: {error}{_place(error, reward_func)}") from error
    try:
        return with_floats(returned[0])
    except ValueError as error:
        raise RewardFault(f"returned {error}") from None


def _place(error: BaseException, reward_func: Callable[..., Any]) -> str:
    """The innermost line of the reward's file that an error passed, for a message; empty where it passed none."""
    file = reward_func.__code__.co_filename if isinstance(reward_func, FunctionType) else None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    innermost = frames[-1]
    return f", in line {innermost.lineno} of {Path(innermost.filename).name}: {innermost.line}"


def with_floats(result: object) -> dict[str, Any]:
    """A reward function's result, or a server's answer, for one response.

    ``rewards``, ``scores`` and the values of ``extra_logs`` become floats.

    Raises:
        ValueError: for anything else than one finite number; the message says what there is.
    """
    if not isinstance(result, Mapping) or "rewards" not in result:
        raise ValueError(f"{short(str(result))} where a dictionary with 'rewards' is needed")
    for name in result:
        if name not in _READ:
            _warn_of_unread(str(name))
    checked: dict[str, Any] = {"rewards": one_number("rewards", result["rewards"])}
    if result.get("scores") is not None:
        checked["scores"] = one_number("scores", result["scores"])
    if "extra_logs" in result:
        checked["extra_logs"] = checked_logs(result["extra_logs"])
    return {**result, **checked}


@lru_cache
def _warn_of_unread(name: str) -> None:
    """Warns once of a value that a reward gives under a name that nothing reads."""
    print(
        f"ngrpo: warning: a reward gives {name!r}, which nothing reads.{nearest(name, _READ)} Read are"
        f" {', '.join(_READ)}; numbers in 'extra_logs' become metrics.",
        file=sys.stderr,
        flush=True,
    )


def checked_logs(logs: object) -> dict[str, float]:
    """The further metrics of one response, by name; ValueError unless they are numbers with names of their own."""
    logs = logs or {}  # OpenRLHF takes None for no metrics
    if not isinstance(logs, Mapping):
        raise ValueError(f"{short(str(logs))} as 'extra_logs' where a dictionary of numbers is needed")
    for name in logs:
        is_taken = name in _OF_OPENRLHF + _OF_NGRPO or str(name).startswith(_PREFIXES_OF_OPENRLHF + _PREFIXES_OF_NGRPO)
        if is_taken:
            raise ValueError(f"'extra_logs' with {name!r}, which is a metric of the training: give it another name")
    return {name: one_number(f"extra_logs[{name!r}]", value) for name, value in logs.items()}


def one_number(name: str, value: object) -> float:
    """The one finite number in a value, which may be a list, an array or a tensor of one; ValueError if it is none."""
    flat = value
    while True:
        if hasattr(flat, "flatten"):  # numpy's and torch's numbers, arrays and tensors have it; a list may hold one
            flat = flat.flatten().tolist()
        elif isinstance(flat, list | tuple) and len(flat) == 1:
            (flat,) = flat
        else:
            break
    try:
        number = float(flat) if isinstance(flat, int | float) else math.nan
    except OverflowError:  # of a whole number beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{short(str(value))} as {name!r} of one response")
    return number


def short(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
