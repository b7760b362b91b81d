# SPDX-License-Identifier: Apache-2.0
"""``--second_round``: OpenRLHF's rollout actor has all responses to a prompt in one call, so a second round follows
there.

Its right responses become responses to the prompt of the data, each with its part of the loss. Refinements of a draft
take the first round's place, with their own prompt, records and log-probabilities.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np

from ngrpo.config.run import current_run
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase, SamplingParams
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.rollout.settings import KEY, request_arguments
from ngrpo.trainers.common.sample_records import TwoRounds
from perturbations.errors import require

Response = dict[str, Any]
"""What OpenRLHF's executor returns for a response: tokens, ranges of generated ones (actions), reward, and others."""

drafting: ContextVar[bool] = ContextVar("drafting", default=False)
"""Whether responses are sampled that may not be trained."""


async def in_two_rounds(
    actor: Any,
    *,
    prompt: str,
    sampling_params: SamplingParams,
    max_length: int,
    hf_tokenizer: PreTrainedTokenizerBase,
    **passed_on: Any,
) -> list[Response]:
    """The responses to one prompt, with a second round if the first one needs it.

    The arguments are those of ``RolloutRayActor.generate_responses``. A prompt that was cut, as too long for the run,
    has no second round: there is no room for one. A prompt whose draft does not fit has none either.
    """
    method = require(current_run().second_round, "--second_round")
    call = _Call(actor, prompt, sampling_params, max_length, hf_tokenizer, passed_on)
    drafting.set(method.refines)
    first = await call.responses()
    drafting.set(False)

    rewards = [reward_of(response) for response in first]
    was_cut = _action_range(first[0])[0] < call.count_tokens(prompt)
    if not method.is_needed(rewards) or was_cut:
        return first
    random = _random_of_round(call, method)
    if method.refines:
        second = await _refine(call, method, random, first, rewards)
    else:
        second = await _ask_again(call, method, random)
    if second is None:
        return first
    return regrouped(first, second, method, random, with_log_probs=sampling_params.logprobs is not None)


@dataclass(frozen=True)
class _Call:
    """A call of ``RolloutRayActor.generate_responses``, with its arguments; ``passed_on`` has all others."""

    actor: Any
    prompt: str
    sampling_params: SamplingParams
    max_length: int
    hf_tokenizer: PreTrainedTokenizerBase
    passed_on: Mapping[str, Any]

    async def responses(self, **changed: object) -> list[Response]:
        """The responses, with some arguments changed."""
        arguments = {
            "prompt": self.prompt,
            "sampling_params": self.sampling_params,
            "max_length": self.max_length,
            "hf_tokenizer": self.hf_tokenizer,
            **self.passed_on,
            **changed,
        }
        return list(await self.actor.generate_responses(**arguments))

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a rendered prompt."""
        return conversation.count_tokens(self.hf_tokenizer, text)

    def prompt_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer for :meth:`SecondRound.prompt`: its chat template has the run's arguments."""
        tokenizer = conversation.text_tokenizer(self.hf_tokenizer)
        arguments = conversation.template_arguments(current_run().chat_template_kwargs)
        if arguments:
            tokenizer = copy(tokenizer)
            tokenizer.apply_chat_template = partial(self.hf_tokenizer.apply_chat_template, **arguments)
        return tokenizer

    def params_of_second_round(self, count: int) -> SamplingParams:
        """The sampling parameters for ``count`` responses to each prompt of the second round."""
        params = deepcopy(self.sampling_params)
        arguments = request_arguments(self.sampling_params)
        if "answers" in arguments:  # a ladder of temperatures is over the responses to each prompt of this round
            params.extra_args = {**(params.extra_args or {}), KEY: {**arguments, "answers": count}}
        return params


def _random_of_round(call: _Call, method: SecondRound) -> Random:
    """The source of the draws of this prompt's second round.

    Where requests carry the number of their round, the draws follow from it, so that a resumed run repeats them.
    Otherwise the engine counts the second rounds of each prompt, so that each one has draws of its own.
    """
    call.actor.second_rounds_asked[call.prompt] += 1
    counted_here = f"{call.actor.second_rounds_asked[call.prompt]} here"  # never equal to the number of a round
    round_label = request_arguments(call.sampling_params).get("round", counted_here)
    return Random(f"{method.seed} {round_label} {call.prompt}")


async def _refine(
    call: _Call, method: SecondRound, random: Random, first: Sequence[Response], rewards: Sequence[float]
) -> list[Response] | None:
    """As many refinements as the first round has responses; None where the prompt with a draft has no room."""
    drafts = []
    for response, reward in zip(first, rewards):
        start, end = _action_range(response)
        text = call.hf_tokenizer.decode(response["observation_tokens"][start:end], skip_special_tokens=True)
        drafts.append((text, reward))
    # Only methods that refine have the argument ``drafts``, so the contract is without it.
    prompt = method.prompt(call.prompt, call.prompt_tokenizer(), random, drafts=drafts)  # type: ignore[unexpected-keyword]
    prompt_length = call.count_tokens(call.prompt)
    extra = call.count_tokens(prompt) - prompt_length
    room = call.max_length - prompt_length - require(call.sampling_params.max_tokens, "a response's length")
    if extra > room:
        return None
    count = call.passed_on["num_samples"]
    return await call.responses(prompt=prompt, sampling_params=call.params_of_second_round(count), num_samples=count)


async def _ask_again(call: _Call, method: SecondRound, random: Random) -> list[Response]:
    """The responses to :attr:`SecondRound.prompts` other prompts; RuntimeError for a prompt that is too long."""
    params = call.params_of_second_round(method.answers)
    params.logprobs = params.logprobs or 1  # the denominator of their ratio
    tokenizer = call.prompt_tokenizer()
    prompts = [method.prompt(call.prompt, tokenizer, random) for _ in range(method.prompts)]
    prompt_length = call.count_tokens(call.prompt)
    requests = []
    for prompt in prompts:
        extra = call.count_tokens(prompt) - prompt_length
        if extra > method.room:
            raise RuntimeError(
                f"--second_round {method.name}: a prompt is {extra} tokens longer than the given one; its room is"
                f" {method.room}: {prompt[:200]!r}"
            )
        max_length = call.max_length + extra
        requests.append({"prompt": prompt, "max_length": max_length})
    responses_by_prompt = await asyncio.gather(
        *(call.responses(**request, sampling_params=params, num_samples=method.answers) for request in requests)
    )
    return [response for responses in responses_by_prompt for response in responses]


def regrouped(
    first: Sequence[Response],
    second: Sequence[Response],
    method: SecondRound,
    random: Random,
    *,
    with_log_probs: bool,
) -> list[Response]:
    """The trained group of G responses: right ones of the second round replace first ones, or refinements all of them.

    Args:
        first: the responses of the first round, G.
        second: those of the second round.
        method: of the run.
        random: chooses if there are too many right ones.
        with_log_probs: whether responses hand on the rollout's log-probabilities.
    """
    second_rewards = [reward_of(response) for response in second]
    rewards = np.asarray([*(reward_of(response) for response in first), *second_rewards], np.float32)
    if method.refines:
        return [_with_rounds(refinement, TwoRounds(rewards, len(first) + i)) for i, refinement in enumerate(second)]
    group = [_with_rounds(response, TwoRounds(rewards, place)) for place, response in enumerate(first)]
    for place, number in enumerate(method.kept(second_rewards, len(first), random)):
        group[place] = _moved(
            second[number], onto=first[place], rewards=rewards, place=len(first) + number, with_log_probs=with_log_probs
        )
    return group


def _moved(response: Response, onto: Response, rewards: np.ndarray, place: int, *, with_log_probs: bool) -> Response:
    """A response of the second round as one to the prompt of the data, which ``onto`` is a response to.

    Args:
        response: of the second round.
        onto: the response of the first round that it replaces.
        rewards: of all responses of both rounds.
        place: of the response among them.
        with_log_probs: whether it hands on the rollout's log-probabilities.
    """
    start, end = _action_range(response)
    tokens = list(response["observation_tokens"][start:end])
    log_probs = list(response["rollout_log_probs"][start:end])
    prompt = list(onto["observation_tokens"][: _action_range(onto)[0]])
    moved = {
        **response,
        "prompt": onto["prompt"],
        "observation_tokens": prompt + tokens,
        "action_ranges": [(len(prompt), len(prompt) + len(tokens))],
        "rollout_log_probs": [0.0] * len(prompt) + log_probs if with_log_probs else None,
    }
    return _with_rounds(moved, TwoRounds(rewards, place, log_probs=np.asarray(log_probs, np.float32)))


def _with_rounds(response: Response, rounds: TwoRounds) -> Response:
    return {**response, "mm_train_inputs": {**(response["mm_train_inputs"] or {}), **rounds.pack()}}


def _action_range(response: Response) -> tuple[int, int]:
    """Start and end of the first generated tokens among a response's ``observation_tokens``."""
    start, end = response["action_ranges"][0]
    return start, end


def reward_of(response: Mapping[str, Any]) -> float:
    """The reward in one of OpenRLHF's responses; RuntimeError if there is none."""
    reward = response.get("reward")
    if reward is None:
        raise RuntimeError("--second_round: a response came without a reward, so it is neither right nor wrong.")
    return float(reward)
