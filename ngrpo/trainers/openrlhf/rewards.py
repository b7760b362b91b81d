# SPDX-License-Identifier: Apache-2.0
"""Rewards: every response has one finite reward and one finite score, wherever they come from.

A reward function or server that fails, hangs or gives something else ends the run with its prompt and response.
OpenRLHF 0.11.2 logs such an error in one line, continues with None for a reward and fails later. It waits for a
function that hangs, and makes a reward of shape (1, 1) of a list or an array.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import cycle
from typing import Any

import torch

from ngrpo.config.run import current_run
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.types import Experience, PreTrainedTokenizerBase
from ngrpo.methods.scoring import reward_calls
from ngrpo.methods.scoring.reward_calls import short
from perturbations.errors import UsageError

_SERVER_FIX = (
    "It must answer a POST of {'query': […], 'prompts': […], 'labels': […]} with {'rewards': a finite number}, such as"
    " 0 for a response that it cannot read, as application/json."
)
_LABEL_FIX = "Store labels as texts, or give a Python file with reward_func, which gets each label as it is."
_AGENT_FIX = (
    "An agent must give each response one finite number as 'reward', such as 0 for one that it cannot read, and only"
    " such numbers in 'extra_logs'. The reward may be None only with --reward.model_name_or_path."
)
_NEEDED_OF_STEP = ("environment_feedback", "done")
# How OpenRLHF 0.11.2 asks a reward server.
_SERVER_TRIES = 5
_SERVER_SECONDS = 180.0
_SERVER_PAUSE = 1.0
_TEMPORARY = (408, 429)  # Request Timeout, Too Many Requests


class RewardFailed(RuntimeError):
    """A response has no reward that can be trained on; the message names prompt and response."""


class CheckedExecutor:
    """Wraps OpenRLHF's agent executor: in its responses ``reward`` and ``scores`` are finite floats.

    Both stay None where a reward model scores the responses. A reward function or server is called here, once OpenRLHF
    has generated the response. OpenRLHF 0.11.2 calls it itself, and then swallows its errors.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self._has_reward_model = bool(Flags(current_run().openrlhf).value("--reward.model_name_or_path"))
        self._source: CheckedReward | CheckedServers | None = None
        if getattr(executor, "reward_endpoints", None) and _is_single_turn(executor):
            if executor.reward_func is not None:
                self._source = CheckedReward(executor.reward_func)
            else:
                self._source = CheckedServers(executor.reward_endpoints)
            executor.reward_endpoints = []  # it generates, and asks for no reward
        if hasattr(executor, "agent_instance_cls"):
            executor.agent_instance_cls = with_checked_steps(executor.agent_instance_cls)

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        """As the wrapped executor's.

        Raises:
            RewardFailed: if the reward function or server fails, or an agent gives no reward, or a value that is not
                one finite number.
        """
        # OpenRLHF's executor of agents sets max_tokens by the observation, and gives one object to a whole group.
        own_params = deepcopy(kwargs["sampling_params"])
        response = await self.executor.execute(**{**kwargs, "sampling_params": own_params})
        if self._source is not None:
            query = query_of(kwargs["hf_tokenizer"], response)
            result = await self._source.reward_of(query, response["prompt"], response["label"])
            response = {**response, "extra_logs": {}, **result, "reward": result["rewards"]}
        return {**response, **self._numbers_of(response)}

    def _numbers_of(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """The response's ``reward`` and ``scores``, where it has them, and ``extra_logs``, with floats.

        A response without a score gets its reward as the score, as from OpenRLHF's own executor: dynamic filtering
        reads the score.

        Raises:
            RewardFailed: for an agent's value that is not one finite number, and for no reward without a reward model.
        """
        numbers: dict[str, Any] = {}
        try:
            if response.get("reward") is not None:
                numbers["reward"] = numbers["scores"] = reward_calls.one_number("reward", response["reward"])
            elif not self._has_reward_model:
                raise ValueError("no 'reward'")
            if response.get("scores") is not None:
                numbers["scores"] = reward_calls.one_number("scores", response["scores"])
            numbers["extra_logs"] = reward_calls.checked_logs(response.get("extra_logs"))
        except ValueError as error:
            raise _agent_failed(f"{type(self.executor).__name__} returned {error}", response.get("prompt")) from None
        return numbers


def _is_single_turn(executor: object) -> bool:
    """Whether OpenRLHF's executor of single turns generates, also in a subclass."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    return getattr(type(executor), "execute", None) is SingleTurnAgentExecutor.execute


def query_of(tokenizer: PreTrainedTokenizerBase, response: Mapping[str, Any]) -> str:
    """What a reward reads: the prompt's text, followed by the text of its one response with special tokens.

    OpenRLHF 0.11.2 decodes the prompt's tokens too. Their text is not the prompt where the prompt was cut or has
    pictures, or where the tokenizer normalises texts, as Qwen's does. ``query[len(prompt):]`` would then be another
    text than the response.
    """
    tokens = response["observation_tokens"]
    ((start, _),) = response["action_ranges"]
    # The response is decoded behind the prompt, since some tokenizers drop a space at the beginning of a text.
    whole = str(tokenizer.decode(tokens, skip_special_tokens=False))
    decoded_prompt = str(tokenizer.decode(tokens[:start], skip_special_tokens=False))
    if whole.startswith(decoded_prompt):
        return response["prompt"] + whole.removeprefix(decoded_prompt)
    return response["prompt"] + str(tokenizer.decode(tokens[start:], skip_special_tokens=False))


def with_checked_steps(agent: type) -> type:
    """A user's class of agents, in which ``rewards`` of a step is a tensor of one finite number.

    OpenRLHF 0.11.2 calls ``.item()`` of it, which ends in a bare AttributeError for a float or None. It keeps the
    ``extra_logs`` of the last step alone; here a step returns those of the steps before it too.
    """

    class CheckedAgent(agent):  # type: ignore[misc, valid-type]
        _logs_so_far: Mapping[str, float] = {}

        async def step(self, states: dict[str, object], **kwargs: object) -> dict[str, object]:
            result = await super().step(states, **kwargs)
            try:
                if not isinstance(result, Mapping):
                    raise ValueError(f"{short(str(result))} where a dictionary is needed")
                reward = reward_calls.one_number("rewards", result.get("rewards"))
                logs = {**self._logs_so_far, **reward_calls.checked_logs(result.get("extra_logs"))}
                for key in _NEEDED_OF_STEP:
                    if result.get(key) is None:
                        raise ValueError(f"a dictionary without {key!r}, which OpenRLHF reads after each step")
            except ValueError as error:
                raise _agent_failed(f"{agent.__name__}.step returned {error}", states["observation_text"]) from None
            self._logs_so_far = logs
            return {**result, "rewards": torch.tensor(reward, dtype=torch.float64), "extra_logs": logs}

    CheckedAgent.__name__ = agent.__name__
    return CheckedAgent


def _agent_failed(fault: str, prompt: object) -> RewardFailed:
    """``fault``: a sentence without its full stop."""
    return RewardFailed(f"{fault}.\n  prompt: {short(str(prompt))}\n{_AGENT_FIX}")


def _failed(fault: str, query: str, prompt: str, fix: str) -> RewardFailed:
    """``fault``: a sentence without its full stop; ``fix``: what the user can do."""
    response = query.removeprefix(prompt)
    return RewardFailed(f"{fault}.\n  prompt: {short(prompt)}\n  response: {short(response)}\n{fix}")


class CheckedReward:
    """A reward function, called from a thread for each response as OpenRLHF calls it."""

    def __init__(self, reward_func: Callable[..., Any]) -> None:
        self._reward_func = reward_func
        self._seconds = reward_calls.seconds_allowed()

    async def reward_of(self, query: str, prompt: str, label: object) -> dict[str, Any]:
        """The function's result for one response, with floats; :class:`RewardFailed` where it fails."""
        try:
            return await asyncio.to_thread(reward_calls.call, self._reward_func, query, prompt, label, self._seconds)
        except reward_calls.RewardFault as fault:
            raise _failed(f"the reward function {fault}", query, prompt, reward_calls.FIX) from None


class CheckedServers:
    """Reward servers, which are asked in turn. An answer is checked like a reward function's result.

    They are sent what OpenRLHF's `_fetch_rewards_via_http` sends, which does not say why a request has failed.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = cycle(addresses)

    async def reward_of(self, query: str, prompt: str, label: object) -> dict[str, Any]:
        """The next server's answer for one response, with floats; :class:`RewardFailed` where it gives none."""
        address = next(self._addresses)
        request = {"query": [query], "prompts": [prompt], "labels": [label]}
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            fault = f"the label cannot be sent as JSON: {error}, in {short(str(label))}"
            raise _failed(fault, query, prompt, _LABEL_FIX) from None
        try:
            return reward_calls.with_floats(await _answer_of(address, request))
        except reward_calls.RewardFault as error:
            fault = str(error)
        except ValueError as error:
            fault = f"answered {error}"
        raise _failed(f"the reward server {address} {fault}", query, prompt, _SERVER_FIX)


async def _answer_of(address: str, request: Mapping[str, Any]) -> Any:
    """A server's answer to a POST, which is repeated after a failure, as by OpenRLHF 0.11.2.

    A refused one (4xx) is not, unless the refusal is temporary: the server would refuse the same request again.

    Raises:
        RewardFault: with the status and the text of the last answer, or why there was none.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_SERVER_SECONDS)
    fault = ""
    for _ in range(_SERVER_TRIES):
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(address, json=request) as response,
            ):
                text = await response.text(errors="replace")
                fault = f"answered with status {response.status}, {response.content_type}: {short(text)}"
                if response.ok:
                    with suppress(ValueError, aiohttp.ContentTypeError):  # what is not JSON is asked for again
                        return await response.json()
                if 400 <= response.status < 500 and response.status not in _TEMPORARY:
                    break
        except Exception as error:  # OpenRLHF repeats a request after any error
            fault = f"gave no answer ({str(error) or type(error).__name__})"
        await asyncio.sleep(_SERVER_PAUSE)
    raise reward_calls.RewardFault(fault)


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
    full_prompts = set()
    for sample in samples:
        # Entry t of the mask is of token t + 1, so the first trained token has as many tokens before it.
        prompt_tokens = int(sample.action_mask[0].argmax()) + 1
        if prompt_tokens == longest:
            full_prompts.add(sample.prompts[0])
    # A prompt that was cut fills its room, and so does one of exactly this length: only the former is longer as text.
    lengths = [conversation.count_tokens(tokenizer, prompt) for prompt in full_prompts]
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
