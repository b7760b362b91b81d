# SPDX-License-Identifier: Apache-2.0
"""``--second_round``: the rollouts. The functions at the end are rows of `ngrpo.patches`.

OpenRLHF's rollout actor draws all answers to one prompt in one call, with their rewards. So that is where a second
round belongs: right answers of it go on as answers to the prompt of the data, each with what the loss needs of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ngrpo.config.run import current_run
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.rollout.settings import KEY as REQUEST
from ngrpo.rollout.settings import request_arguments
from ngrpo.trainers.openrlhf.engine_handles import StandIn, knowing_evaluations, stood_in
from perturbations.errors import present
from perturbations.replay import packing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams

    from ngrpo.trainers.openrlhf.objects import RolloutActor

KEY = "second_round"
"""A sample's entry in ``mm_train_inputs``, beside those of `ngrpo.trainers.openrlhf.side_inputs`."""
_VERSION = 1


@dataclass(frozen=True)
class TwoRounds:
    """What a sample carries of the two rounds of its prompt.

    Attributes:
        rewards: of all answers, the first round's in front, (G + G',) float32.
        place: of this answer among them.
        log_probs: log π_old of its tokens given the prompt that was asked, (T,) float32; None in an answer of the first
            round, which was asked the prompt of the data.
    """

    rewards: np.ndarray
    place: int
    log_probs: np.ndarray | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, as records are."""
        parts = [packing.varint(len(self.rewards)), packing.floats(self.rewards), packing.varint(self.place)]
        parts.append(packing.varint(self.log_probs is not None))
        if self.log_probs is not None:
            parts.append(packing.floats(self.log_probs))
        return {KEY: packing.sealed(parts, _VERSION)}


def unpack(side_inputs: Sequence[Any] | None, batch: int) -> list[TwoRounds | None]:
    """What the samples of a batch carry, None where the first round was enough.

    Args:
        side_inputs: ``Experience.mm_train_inputs``.
        batch: the number of samples.
    """
    return [_unpack_one((entry or {}).get(KEY)) for entry in side_inputs or [None] * batch]


def _unpack_one(data: bytes | None) -> TwoRounds | None:
    if data is None:
        return None
    reader = packing.unsealed(data, _VERSION, "what a sample carries of its two rounds")
    rewards, place = reader.floats(reader.varint()), reader.varint()
    log_probs = reader.all_floats() if reader.varint() else None
    return TwoRounds(rewards, place, log_probs)


def reward_of(response: Mapping[str, Any]) -> float:
    """The reward in one of OpenRLHF's responses.

    Raises:
        RuntimeError: where it has none: a round cannot be told right from wrong.
    """
    reward = response.get("reward")
    if reward is None:
        raise RuntimeError("--second_round: a response came without a reward, so whether it is wrong is not known.")
    return float(torch.as_tensor(reward).flatten()[0])


def regrouped(
    first: Sequence[dict[str, Any]],
    second: Sequence[dict[str, Any]],
    method: SecondRound,
    random: Random,
    *,
    with_log_probs: bool,
) -> list[dict[str, Any]]:
    """The group of G answers that are trained: right answers of the second round in the place of the first ones.

    Args:
        first: OpenRLHF's responses to the prompt of the data, G.
        second: those of the second round, with their log-probabilities.
        method: the run's.
        random: chooses where more are right than there is place for.
        with_log_probs: whether responses hand on the rollout's log-probabilities.

    Returns:
        G responses to the prompt of the data.
    """
    own, others = ([reward_of(response) for response in responses] for responses in (first, second))
    rewards = np.asarray([*own, *others], np.float32)
    group = [(response, TwoRounds(rewards, place)) for place, response in enumerate(first)]
    for place, number in enumerate(method.kept(others, len(first), random)):
        response = second[number]
        (start, end), *_ = response["action_ranges"]
        log_probs = np.asarray(response["rollout_log_probs"][start:end], np.float32)
        moved = _moved(response, first[place], with_log_probs)
        group[place] = moved, TwoRounds(rewards, len(first) + number, log_probs)
    return [
        {**response, "mm_train_inputs": {**(response["mm_train_inputs"] or {}), **rounds.pack()}}
        for response, rounds in group
    ]


def _moved(response: Mapping[str, Any], onto: Mapping[str, Any], with_log_probs: bool) -> dict[str, Any]:
    """An answer as one to the prompt of another response, whose tokens stand in front of it."""
    (start, end), *_ = response["action_ranges"]
    prompt = list(onto["observation_tokens"][: onto["action_ranges"][0][0]])
    tokens, log_probs = (list(response[name][start:end]) for name in ("observation_tokens", "rollout_log_probs"))
    return {
        **response,
        "prompt": onto["prompt"],
        "observation_tokens": prompt + tokens,
        "action_ranges": [(len(prompt), len(prompt) + len(tokens))],
        "rollout_log_probs": [0.0] * len(prompt) + log_probs if with_log_probs else None,
    }


async def in_two_rounds(
    actor: RolloutActor,
    *,
    prompt: str,
    sampling_params: SamplingParams,
    max_length: int,
    hf_tokenizer: PreTrainedTokenizerBase,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """The answers to one prompt, with a second round where all of them are wrong.

    The arguments are those of ``RolloutRayActor.generate_responses``. A prompt that is too long for the run, and so was
    cut, has no second round: there is no room for another one.
    """

    async def answers(text: str, params: SamplingParams, length: int, **others: Any) -> list[dict[str, Any]]:
        shared: dict[str, Any] = {"sampling_params": params, "max_length": length, "hf_tokenizer": hf_tokenizer}
        return list(await actor.generate_responses(prompt=text, **shared, **{**kwargs, **others}))

    def tokens(text: str) -> int:
        return len(hf_tokenizer(text=text, add_special_tokens=False)["input_ids"])

    method, arguments = present(current_run().second_round, "--second_round"), request_arguments(sampling_params)
    first = await answers(prompt, sampling_params, max_length)
    length = tokens(prompt)
    if not method.is_needed([reward_of(response) for response in first]) or first[0]["action_ranges"][0][0] < length:
        return first
    actor.second_rounds_asked[prompt] += 1
    # A reproducible run numbers its rounds, resumed or not; without numbers each time differs from the one before.
    time = arguments.get("round", f"{actor.second_rounds_asked[prompt]} here")
    random = Random(f"{method.seed} {time} {prompt}")
    prompts = [method.prompt(prompt, hf_tokenizer, random) for _ in range(method.prompts)]
    longer = [tokens(text) - length for text in prompts]
    for text, extra in zip(prompts, longer):
        if extra > method.room:
            raise RuntimeError(
                f"--second_round {method.name}: a prompt is {extra} tokens longer than the given one; its room is"
                f" {method.room}: {text[:200]!r}"
            )
    params = deepcopy(sampling_params)
    params.logprobs = params.logprobs or 1
    if "answers" in arguments:  # a ladder of temperatures is over the answers to each prompt of the round at hand
        params.extra_args = {**(params.extra_args or {}), REQUEST: {**arguments, "answers": method.answers}}
    second = await asyncio.gather(
        *(answers(text, params, max_length + extra, num_samples=method.answers) for text, extra in zip(prompts, longer))
    )
    every = [response for responses in second for response in responses]
    return regrouped(first, every, method, random, with_log_probs=sampling_params.logprobs is not None)


class _InTwoRounds(StandIn):
    """Asks for each prompt's answers in two rounds."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.generate_responses = engine.generate_in_two_rounds


# Ray pickles the classes below by value: their methods only call functions above.


def engine_of_two_rounds(plain: Any) -> type:
    """`RolloutRayActor` that has room for the prompts of a second round, and the method that asks them."""

    class TwoRoundsRolloutRayActor(plain):
        async def __init__(self, *args: object, **kwargs: Any) -> None:
            kwargs["max_model_len"] += present(current_run().second_round, "--second_round").room
            # Otherwise vLLM's log-probabilities are those before temperature and top-p: not of what was drawn.
            kwargs = {"logprobs_mode": "processed_logprobs", "max_logprobs": 1, **kwargs}
            await plain.__init__(self, *args, **kwargs)
            self.second_rounds_asked: Counter[str] = Counter()

        async def generate_in_two_rounds(self, **kwargs: Any) -> Any:
            return await in_two_rounds(self, **kwargs)

    return TwoRoundsRolloutRayActor


def requests_of_two_rounds(plain: type) -> type:
    """`SamplesGenerator` whose training prompts, and not those of an evaluation, may have a second round."""

    class TwoRoundsSamplesGenerator(knowing_evaluations(plain)):  # type: ignore[misc, valid-type]
        def _dispatch_prompts_to_vllm(self, *args: object, **kwargs: object) -> Any:
            if self.evaluating:
                return super()._dispatch_prompts_to_vllm(*args, **kwargs)
            with stood_in(self, _InTwoRounds):
                return super()._dispatch_prompts_to_vllm(*args, **kwargs)

    return TwoRoundsSamplesGenerator
