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

Responses = Sequence[dict[str, Any]]
drafting: ContextVar[bool] = ContextVar("drafting", default=False)
"""Whether responses are sampled that may not be trained."""


def reward_of(response: Mapping[str, Any]) -> float:
    """The reward in one of OpenRLHF's responses; RuntimeError if there is none."""
    reward = response.get("reward")
    if reward is None:
        raise RuntimeError("--second_round: a response came without a reward, so it is neither right nor wrong.")
    return float(reward)


def regrouped(
    first: Responses, second: Responses, method: SecondRound, random: Random, *, with_log_probs: bool
) -> list[dict[str, Any]]:
    """The trained group of G responses: right ones of the second round replace first ones, or refinements all of them.

    ``random`` chooses if there are too many right ones; ``with_log_probs`` says whether responses hand on the rollout's
    log-probabilities.
    """
    own, others = ([reward_of(response) for response in responses] for responses in (first, second))
    rewards = np.asarray([*own, *others], np.float32)
    trained, start = (second, len(first)) if method.refines else (first, 0)
    group = [(response, TwoRounds(rewards, place)) for place, response in enumerate(trained, start)]
    for place, number in enumerate([] if method.refines else method.kept(others, len(first), random)):
        response, onto = second[number], first[place]
        (start, end), *_ = response["action_ranges"]
        tokens, log_probs = (list(response[name][start:end]) for name in ("observation_tokens", "rollout_log_probs"))
        # As a response to the prompt of the data.
        prompt = list(onto["observation_tokens"][: onto["action_ranges"][0][0]])
        moved = {
            **response,
            "prompt": onto["prompt"],
            "observation_tokens": prompt + tokens,
            "action_ranges": [(len(prompt), len(prompt) + len(tokens))],
            "rollout_log_probs": [0.0] * len(prompt) + log_probs if with_log_probs else None,
        }
        group[place] = moved, TwoRounds(rewards, len(first) + number, np.asarray(log_probs, np.float32))
    return [
        {**response, "mm_train_inputs": {**(response["mm_train_inputs"] or {}), **rounds.pack()}}
        for response, rounds in group
    ]


async def in_two_rounds(
    actor: Any,
    *,
    prompt: str,
    sampling_params: SamplingParams,
    max_length: int,
    hf_tokenizer: PreTrainedTokenizerBase,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """The responses to one prompt, with a second round if the first one needs it.

    The arguments are those of ``RolloutRayActor.generate_responses``. A prompt that was cut, as too long for the run,
    has no second round: there is no room for one. Neither has one with too little room for its draft.
    """

    async def answers(text: str, params: SamplingParams, length: int, **others: Any) -> list[dict[str, Any]]:
        shared: dict[str, Any] = {"sampling_params": params, "max_length": length, "hf_tokenizer": hf_tokenizer}
        return list(await actor.generate_responses(prompt=text, **shared, **{**kwargs, **others}))

    tokenizer = getattr(hf_tokenizer, "tokenizer", hf_tokenizer)  # of a multimodal model's processor

    def tokens(text: str) -> int:
        return len(tokenizer(text=text, add_special_tokens=False)["input_ids"])

    method, arguments = require(current_run().second_round, "--second_round"), request_arguments(sampling_params)
    drafting.set(method.refines)
    first = await answers(prompt, sampling_params, max_length)
    drafting.set(False)
    length, rewards = tokens(prompt), [reward_of(response) for response in first]
    if not method.is_needed(rewards) or first[0]["action_ranges"][0][0] < length:
        return first
    actor.second_rounds_asked[prompt] += 1
    # A reproducible run numbers its rounds, resumed or not; without numbers each time differs from the last.
    time = arguments.get("round", f"{actor.second_rounds_asked[prompt]} here")
    random = Random(f"{method.seed} {time} {prompt}")
    if given := conversation.template_arguments(current_run().chat_template_kwargs):
        tokenizer = copy(tokenizer)
        tokenizer.apply_chat_template = partial(hf_tokenizer.apply_chat_template, **given)
    params, drafts = deepcopy(sampling_params), {}
    if method.refines:
        generated = [each["observation_tokens"][slice(*each["action_ranges"][0])] for each in first]
        texts = [hf_tokenizer.decode(each, skip_special_tokens=True) for each in generated]
        drafts = {"drafts": list(zip(texts, rewards))}
        room = max_length - length - require(sampling_params.max_tokens, "a response's length")
        count = kwargs["num_samples"]
    else:
        room, count = method.room, method.answers
        params.logprobs = params.logprobs or 1  # the denominator of their ratio
    prompts = [method.prompt(prompt, tokenizer, random, **drafts) for _ in range(method.prompts)]
    longer = [tokens(text) - length for text in prompts]
    for text, extra in zip(prompts, longer):
        if extra > room:
            if method.refines:
                return first
            subject = f"--second_round {method.name}: a prompt is {extra} tokens longer than the given one"
            raise RuntimeError(f"{subject}; its room is {room}: {text[:200]!r}")
    if "answers" in arguments:  # a ladder of temperatures is over the responses to each prompt of this round
        params.extra_args = {**(params.extra_args or {}), KEY: {**arguments, "answers": count}}
    lengths = [max_length if method.refines else max_length + extra for extra in longer]
    calls = (answers(text, params, longest, num_samples=count) for text, longest in zip(prompts, lengths))
    second = await asyncio.gather(*calls)
    every = [response for responses in second for response in responses]
    return regrouped(first, every, method, random, with_log_probs=sampling_params.logprobs is not None)
