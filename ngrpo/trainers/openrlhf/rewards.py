# SPDX-License-Identifier: Apache-2.0
"""Rewards: every response has one finite reward and one finite score, wherever they come from.

A reward function or server that fails, hangs or gives something else ends the run with its prompt and response.
OpenRLHF 0.11.2 logs such an error in one line, continues with None for a reward and fails later. It waits for a
function that hangs, and makes a reward of shape (1, 1) of a list or an array.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import cycle
from typing import Any

import torch

from ngrpo.machine.upstream.types import Experience, PreTrainedTokenizerBase
from ngrpo.methods.scoring import reward_calls
from ngrpo.methods.scoring.reward_calls import short
from perturbations.errors import UsageError


class RewardFailed(RuntimeError):
    """A response has no reward that can be trained on; the message names prompt and response."""


class CheckedExecutor:
    """Wraps OpenRLHF's agent executor: in its responses ``reward`` and ``scores`` are finite floats.

    Both stay None where a reward model scores the responses.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self._source: CheckedReward | CheckedServers | None = None
        addresses = getattr(executor, "reward_endpoints", None)
        if getattr(executor, "reward_func", None) is not None:
            self._source = CheckedReward(executor.reward_func)
            executor.reward_func = self._source
        elif addresses:
            self._source = CheckedServers(addresses)
            executor._fetch_rewards_via_http = self._source

    async def execute(self, **kwargs: object) -> dict[str, Any]:
        """As the wrapped executor's.

        Raises:
            RewardFailed: if a call of the reward function or server has failed, or an agent's reward is no number.
        """
        # OpenRLHF's executor of agents sets max_tokens by the observation, and gives one object to a whole group.
        own_params = deepcopy(kwargs["sampling_params"])
        response = await self.executor.execute(**{**kwargs, "sampling_params": own_params})
        if self._source is not None:
            self._source.raise_failure()  # which OpenRLHF has swallowed
        return {**response, **_numbers_of_agent(self.executor, response)}


class _Source:
    """Where rewards come from. OpenRLHF swallows its errors: :meth:`raise_failure` raises them later."""

    _failure: str | None = None

    def raise_failure(self) -> None:
        """Raises :class:`RewardFailed` if any call has failed."""
        if self._failure is not None:
            raise RewardFailed(self._failure)

    def _fail(self, fault: str, query: str, prompt: str) -> RewardFailed:
        """Keeps the failure and returns it; ``fault`` is a sentence without its full stop."""
        self._failure = (
            f"{fault}.\n  prompt: {short(prompt)}\n  response: {short(query.removeprefix(prompt))}\n"
            "It must return {'rewards': a finite number} for each response, such as 0 for one that it cannot read."
        )
        return RewardFailed(self._failure)


class CheckedReward(_Source):
    """OpenRLHF's ``reward_func``, watched. OpenRLHF calls it from a thread for each response."""

    def __init__(self, reward_func: Callable[..., Any]) -> None:
        self._reward_func = reward_func
        self._seconds = reward_calls.seconds_allowed()

    def __call__(self, queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
        """The reward function's result for one response, with floats."""
        try:
            return reward_calls.call(self._reward_func, queries[0], prompts[0], labels[0], self._seconds)
        except reward_calls.RewardFault as fault:
            raise self._fail(f"the reward function {fault}", queries[0], prompts[0]) from None


class CheckedServers(_Source):
    """OpenRLHF's requests to reward servers, in turns. A server's answer is checked like a reward function's result."""

    def __init__(self, addresses: Sequence[str]) -> None:
        from openrlhf.utils.agent import SingleTurnAgentExecutor

        # An executor for each address, so that a failure can name it.
        self._clients = cycle([(address, SingleTurnAgentExecutor(address)) for address in addresses])

    async def __call__(self, queries: list[str], prompts: list[str], labels: list[Any]) -> list[dict[str, Any]]:
        """The next server's answer to one query, with floats."""
        address, client = next(self._clients)
        try:
            results = await client._fetch_rewards_via_http(queries, prompts, labels)
            return [reward_calls.with_floats(result) for result in results]
        except ValueError as error:
            fault = f"answered {error}"
        except Exception as error:
            fault = f"gave no answer ({type(error).__name__}: {error})"
        raise self._fail(f"the reward server {address} {fault}", queries[0], prompts[0])


def _numbers_of_agent(executor: object, response: Mapping[str, Any]) -> dict[str, float]:
    """The reward and the score of a response as floats, where it has them.

    Raises:
        RewardFailed: for an agent's reward or score that is not one finite number.
    """
    numbers = {}
    try:
        for name in ("reward", "scores"):
            if response.get(name) is not None:
                numbers[name] = reward_calls.one_number(name, response[name])
    except ValueError as error:
        raise RewardFailed(
            f"{type(executor).__name__} returned {error}.\n  prompt: {short(str(response.get('prompt')))}\n"
            "An agent must give each response one finite number, such as 0 for one that it cannot read."
        ) from None
    return numbers


def responses(tokenizer: PreTrainedTokenizerBase, experience: Experience) -> list[str]:
    """The generated texts of a batch of OpenRLHF's experiences."""
    # Entry t of the mask is of token t + 1.
    samples = zip(experience.sequences[:, 1:], experience.action_mask.bool())
    return [str(tokenizer.decode(tokens[mask], skip_special_tokens=True)) for tokens, mask in samples]


def check_step(tokenizer: PreTrainedTokenizerBase, experiences: Sequence[Experience]) -> None:
    """Makes a step's rewards one number for each response, (B,) in each micro-batch, in-place.

    Raises:
        UsageError: for the first reward that is NaN or infinite, since all advantages of its group would be NaN, and
            for another number of rewards than responses.
    """
    for experience in experiences:
        rewards = experience.rewards
        count = len(experience.prompts)
        if rewards.numel() != count:
            raise UsageError(
                f"{count} responses have rewards of shape {tuple(rewards.shape)}; one number for each is needed. Use a"
                " reward model with one output."
            )
        experience.rewards = rewards.reshape(count)
        for row in (~experience.rewards.isfinite()).nonzero().flatten().tolist():
            response = responses(tokenizer, experience)[row]
            raise UsageError(
                f"this response has the reward {experience.rewards[row].item()}; a finite number is needed.\n"
                f"  prompt: {short(experience.prompts[row])}\n  response: {short(response)}\n"
                "Let the reward function, server or model give a finite number for every response, such as 0 for one"
                " that it cannot read."
            )


def refuse_untrained(samples: Sequence[Experience]) -> None:
    """Raises ``UsageError`` for the first response without a token to train on: its mean log-probability is 0 / 0."""
    for sample in samples:
        for row in (sample.action_mask.sum(dim=-1) == 0).nonzero().flatten().tolist():
            raise UsageError(
                "a response has no token to train on: its prompt is as long as --data.max_len, or an agent masked all"
                f" of it (action_ranges).\n  prompt: {short(sample.prompts[row])}\nRaise --data.max_len, leave that"
                " prompt out, or let the agent keep a token."
            )


def take_partial_metrics(samples: Sequence[Experience]) -> dict[str, float]:
    """Takes the metrics that some of a step's responses lack out of the others' ``info``; the mean of each.

    A reward function, server or agent may give ``extra_logs`` for some responses only. OpenRLHF 0.11.2 stacks each
    metric over a micro-batch: it fails, or loses the metric, where a response has none.
    """
    counts = Counter(name for sample in samples for name in sample.info)
    means = {}
    for name, count in counts.items():
        if count < len(samples):
            values = [sample.info.pop(name).float() for sample in samples if name in sample.info]
            means[name] = torch.cat(values).mean().item()
    return means


def cut_prompts(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Experience], longest: int) -> int:
    """How many of a step's prompts lost their first tokens: those of more than ``longest`` tokens.

    OpenRLHF 0.11.2 keeps the last tokens of such a prompt, and says so in a rollout worker's log alone.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal model's processor counts texts, not tokens
    full_prompts = set()
    for sample in samples:
        # Entry t of the mask is of token t + 1, so the first trained token has as many tokens before it.
        prompt_tokens = int(sample.action_mask[0].argmax()) + 1
        if prompt_tokens == longest:
            full_prompts.add(sample.prompts[0])
    # A prompt that was cut fills its room, and so does one of exactly this length: only the former is longer as text.
    lengths = [len(tokenizer(text=prompt, add_special_tokens=False)["input_ids"]) for prompt in full_prompts]
    return sum(length > longest for length in lengths)


def cut_turns(samples: Sequence[Experience], longest: int) -> int:
    """How many of a step's conversations an agent's next message fills up to ``longest`` tokens, or beyond.

    OpenRLHF 0.11.2 asks for no further turn then, cuts the message, and says nothing.
    """
    cut = 0
    for sample in samples:
        # Entry t of the mask is of token t + 1; an agent's message is not trained.
        length = sample.action_mask.shape[1] + 1
        ends_untrained = not sample.action_mask[0, -1]
        cut += length >= longest and ends_untrained
    return cut
