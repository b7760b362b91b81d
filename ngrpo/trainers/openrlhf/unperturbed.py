# SPDX-License-Identifier: Apache-2.0
"""By how much this run's engines and its trainer differ where nothing is perturbed: the scale of every other gap.

The first answers of each round are followed by a short one to the same prompt with the perturbation off. It comes to
the trainer with the sample, and there goes through the actor's forward without a replay.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from ngrpo.rollout.async_scheduling import cut_to_answer
from ngrpo.rollout.settings import KEY
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from ngrpo.trainers.openrlhf.objects import ExperienceMaker, RolloutActor

ANSWERS, _TOKENS = 4, 16  # of each engine in each round, and in the trainer's forward; tokens of each at most
_LONGEST_PROMPT = 512  # the forward has logits for the whole vocabulary at each token


class Turns:
    """Which answers are followed by an unperturbed one."""

    def __init__(self) -> None:
        self._round, self._asked = -1, 0

    def next(self, round_: int, perturbed: bool) -> bool:
        """Whether the answer that begins now is one of the first perturbed ones of its round; 0 is that of none."""
        if round_ != self._round:
            self._round, self._asked = round_, 0
        if not perturbed or round_ < 1 or self._asked >= ANSWERS:
            return False
        self._asked += 1
        return True


async def last_of(outputs: AsyncIterable[RequestOutput]) -> RequestOutput:
    """What a request has come to in the end; vLLM tells of it as it grows."""
    last = None
    async for output in outputs:
        last = output
    return require(last, "an answer")


async def ask(actor: RolloutActor, prompt: list[int], params: SamplingParams, seed: int) -> UnperturbedAnswer | None:
    """A short answer to a prompt, by the path of all rollouts, with the perturbation off.

    Args:
        actor: the rollout actor.
        prompt: token ids.
        params: the rollout's ``SamplingParams``; what filters tokens is left out, so that log π is over all of them.
        seed: of the answer.

    Returns:
        None for a prompt that is too long to be worth its forward.
    """
    from vllm.inputs import TokensPrompt
    from vllm.utils import random_uuid

    if len(prompt) > _LONGEST_PROMPT:
        return None
    short, name = deepcopy(params), random_uuid()
    short.max_tokens = min(short.max_tokens or _TOKENS, _TOKENS)
    short.min_tokens = min(short.min_tokens or 0, short.max_tokens)
    short.top_p, short.top_k, short.min_p = 1.0, 0, 0.0
    arguments = {"enabled": False, "scheduled": False, "seed": seed}
    short.extra_args = {**(short.extra_args or {}), KEY: arguments}
    output = await last_of(actor.llm.generate(TokensPrompt(prompt_token_ids=prompt), short, request_id=name))
    tokens = list(output.outputs[0].token_ids)
    trajectory = FinishedTrajectory.unpack(await actor.perturbation_pick_ups.take(name))
    log_probs = cut_to_answer(trajectory, len(tokens)).log_probs
    return UnperturbedAnswer(np.array([*prompt, *tokens], dtype=np.int32), log_probs)


def gap_of(maker: ExperienceMaker, answers: Sequence[UnperturbedAnswer]) -> float | None:
    """Mean |log π_trainer − log π_rollout| of the answers' tokens.

    Args:
        maker: OpenRLHF's experience maker, whose actors have ``unperturbed_log_probs``.
        answers: of the step at hand.

    Returns:
        None where there is no token.
    """
    import ray
    import torch

    answers = [answer for answer in answers if len(answer.log_probs)][:ANSWERS]
    if not answers:
        return None
    rows, longest = len(answers), max(len(answer.tokens) for answer in answers)
    width = max(len(answer.log_probs) for answer in answers)
    sequences = torch.zeros(rows, longest, dtype=torch.int64)
    attention_mask, action_mask = torch.zeros_like(sequences), torch.zeros(rows, width, dtype=torch.int64)
    for row, answer in enumerate(answers):
        # On the left, so that all answers end at the last column, where OpenRLHF looks for actions.
        sequences[row, longest - len(answer.tokens) :] = torch.from_numpy(answer.tokens.astype(np.int64))
        attention_mask[row, longest - len(answer.tokens) :] = 1
        action_mask[row, width - len(answer.log_probs) :] = 1
    group = maker.actor_model_group
    log_probs = ray.get(
        group.async_run_method(
            method_name="unperturbed_log_probs",
            sequences=sequences,
            action_mask=action_mask,
            attention_mask=attention_mask,
        )
    )[0]
    gaps = [
        np.abs(row[width - len(answer.log_probs) :] - answer.log_probs)
        for row, answer in zip(log_probs.float().numpy(), answers)
    ]
    return float(np.concatenate(gaps).mean())
