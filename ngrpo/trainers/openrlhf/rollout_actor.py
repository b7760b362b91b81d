# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's rollout actor with a perturbed vLLM engine: each response carries its record.

The functions at the end are rows of `patches.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.rollout.async_scheduling import taken_length
from ngrpo.rollout.records import confirm, of_all_workers
from ngrpo.rollout.requests import external_id
from ngrpo.rollout.settings import (
    DEFERRED_PROBE,
    KEY,
    REPLAY_BUFFER,
    SAMPLING_MASK_GIB,
    SAMPLING_MASKS,
    SAMPLING_SCHEDULE,
    SEEDED_DRAWS,
    fingerprint,
    request_arguments,
)
from ngrpo.trainers.openrlhf import prompt_pictures, unperturbed
from ngrpo.trainers.openrlhf.rewards import CheckedReward
from ngrpo.trainers.openrlhf.turns import Conversation, finished
from ngrpo.trainers.openrlhf.weight_sync import prepared_engine
from perturbations import registry, seeds
from perturbations.errors import present

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ngrpo.trainers.openrlhf.objects import RolloutActor

# Each trajectory of OpenRLHF runs as an asyncio task of its own, so a context variable keeps them apart.
_conversation: ContextVar[Conversation | None] = ContextVar("conversation", default=None)


class RecordingExecutor:
    """Wraps OpenRLHF's agent executor: puts the record of a trajectory into its response."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._numbers, self._followed = seeds.AnswerNumbers(), unperturbed.Turns()
        self._reward: CheckedReward | None = None
        if getattr(executor, "reward_func", None) is not None:
            self._reward = executor.reward_func = CheckedReward(executor.reward_func)

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        """As the wrapped executor's, with the record in ``mm_train_inputs``."""
        # Numbered before anything is awaited: answer i of a group has the same draws in every run.
        arguments = dict(request_arguments(kwargs.get("sampling_params")))
        round_, perturbation = arguments.pop("round", 0), current_run().perturbation
        key = f"{kwargs.get('prompt')}{prompt_pictures.identity(kwargs.get('images')).hex()}"
        number = self._numbers.next(key, round_)
        perturbed = perturbation is not None and perturbation.active and arguments.get("enabled", True)
        if "answers" in arguments:
            # A prompt that stands in the batch twice is asked twice as often: each time it is a group of its own.
            arguments["answer"] = number % seeds.MOST_ANSWERS % arguments["answers"]
        conversation = Conversation({"sample": number, **arguments}, self._followed.next(round_, perturbed))
        token = _conversation.set(conversation)
        try:
            response = await self._executor.execute(**kwargs)
        finally:
            _conversation.reset(token)
        if self._reward is not None:
            self._reward.raise_failure()
        run = current_run()
        if conversation.trajectory is not None and (run.perturbation is not None or run.sampling.correct_mask):
            return finished(conversation, response)
        return response


def engine_spec(seed: int) -> dict[str, Any]:
    """The run's perturbation for the engine with this OpenRLHF seed: every engine has streams of its own.

    Under ``--reproducible`` an unperturbed run has them too, for its token draws.
    """
    spec = current_run().spec or registry.create("none").spec()
    return {**spec, "seed": seeds.of_engine(spec.get("seed", 0), seed)}


class EngineProof:
    """Has an engine prove that its overrides land where they belong; requests wait for it.

    At the start, and in a strict run again before the first request after each weight sync: not at its end, when a
    hybrid engine's KV cache is asleep.
    """

    def __init__(self, llm: AsyncLLM, perturbed: bool) -> None:
        self._llm, self._perturbed = llm, perturbed
        self._asked: asyncio.Task[Any] | None = None

    def weights_synced(self) -> None:
        """New weights are in place."""
        if current_run().strict:
            self._asked = None

    async def passed(self) -> None:
        """Returns once the engine has proven itself, or is busy with earlier requests and will as soon as it is not.

        Raises:
            Exception: vLLM's own, with the probe's message.
        """
        if self._perturbed:
            if self._asked is None:
                self._asked = asyncio.create_task(self._llm.collective_rpc("perturbation_probe"))
            await asyncio.shield(self._asked)


class PickUps:
    """Takes records from an engine in batches: what is asked for while a call is on its way goes with the next one."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def take(self, name: str) -> Any:
        """What the worker hands over for a finished request, by the id that the caller gave it.

        Raises:
            RuntimeError: where its record is no longer there.
        """
        self._asked[name] = asyncio.get_running_loop().create_future()
        answer = self._asked[name]
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        return await answer

    async def _call(self) -> None:
        while self._asked:
            pending, self._asked = self._asked, {}
            try:
                answers = await self._llm.collective_rpc("perturbation_take", args=(list(pending), None))
                by_name = self._by_name(of_all_workers(answers))
                results = {name: by_name.get(name, _gone(name)) for name in pending}
            except Exception as error:
                results = dict.fromkeys(pending, error)
            for name, answer in pending.items():
                if answer.done():  # its caller was cancelled meanwhile
                    continue
                if isinstance(results[name], Exception):
                    answer.set_exception(results[name])
                else:
                    answer.set_result(results[name])

    def _by_name(self, taken: Mapping[str, Mapping[str, bytes]]) -> dict[str, Any]:
        """What workers handed over, by the callers' ids.

        The front end keeps the length of an answer until its record is taken; our callers cut records by the answers
        that they have, so that the lengths only need to go.
        """
        for name in taken:
            taken_length(self._llm.output_processor, name)
        return {external_id(name): parts for name, parts in taken.items()}


def _gone(name: str) -> RuntimeError:
    return RuntimeError(
        f"the record of request {name} is gone: the replay buffer dropped it. Raise the buffer's max_bytes."
    )


async def generate(
    actor: RolloutActor, prompt: list[int], sampling_params: SamplingParams, pictures: Mapping[str, Any] | None = None
) -> Any:
    """One request, with its record picked up. (Where it is cancelled, vLLM aborts it, and the record is dropped.)

    Args:
        actor: OpenRLHF's rollout actor.
        prompt: token ids, in which a picture has all of its places.
        sampling_params: vLLM's.
        pictures: what the prompt shows, as vLLM's ``multi_modal_data``.
    """
    from vllm.inputs import TokensPrompt
    from vllm.utils import random_uuid

    conversation = _conversation.get()
    params, name = deepcopy(sampling_params), random_uuid()
    arguments = dict(request_arguments(params))
    arguments.pop("round", None)
    if conversation is not None:
        # An agent may have made sampling parameters of its own: what the trajectory was asked with holds.
        seed = seeds.of_prompt(prompt, prompt_pictures.identity((pictures or {}).get("image")))
        arguments = {"seed": seed, **arguments, **conversation.arguments}
        conversation.go_on(prompt)
        earlier = conversation.earlier(prompt)
        if earlier is not None:
            arguments["record"] = earlier.to_bytes()
    params.extra_args = {**(params.extra_args or {}), KEY: arguments}
    request = TokensPrompt(prompt_token_ids=prompt)
    if pictures:
        token_ids = prompt_pictures.unexpanded(prompt, present(actor._mm_pad_token_ids, "the placeholders of pictures"))
        request = TokensPrompt(prompt_token_ids=token_ids, multi_modal_data=pictures)
    output = await unperturbed.last_of(actor.llm.generate(request, params, request_id=name))
    if pictures:
        prompt_pictures.check_places(prompt, present(output.prompt_token_ids, "the prompt's tokens"))
    parts = await actor.perturbation_pick_ups.take(name)
    if conversation is not None and arguments.get("enabled", True):
        conversation.add(parts, prompt, output.outputs[0].token_ids, output.num_cached_tokens or 0)
        if conversation.followed:
            conversation.followed = False
            seed = seeds.of_unperturbed_answer(arguments["seed"], arguments["sample"])
            # Without its pictures: the scale is that of both sides' rounding, and pictures that they read differently
            # stand out from it.
            text = [token for token in prompt if token not in (actor._mm_pad_token_ids or ())] if pictures else prompt
            conversation.unperturbed = await unperturbed.ask(actor, text, sampling_params, seed)
    return output


def perturbed_engine(plain: Any) -> type:
    """`RolloutRayActor` whose engine perturbs, confirms that every worker does, and hands over records.

    Ray pickles this class by value, and a context variable cannot be: so its methods only call functions above.
    """

    class PerturbedRolloutRayActor(prepared_engine(plain)):  # type: ignore[misc, valid-type]
        async def __init__(self, *args: object, **kwargs: Any) -> None:
            run, spec = current_run(), engine_spec(kwargs.get("seed", 0))
            ours = {
                KEY: spec,
                SEEDED_DRAWS: run.reproducible,
                SAMPLING_MASKS: run.sampling.correct_mask,
                SAMPLING_MASK_GIB: run.sampling.mask_gib,
                SAMPLING_SCHEDULE: run.specs.get("sampling_schedule"),
                REPLAY_BUFFER: run.specs.get("replay_buffer"),
                DEFERRED_PROBE: True,
            }
            kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), **ours}
            await plain.__init__(self, *args, **kwargs)
            perturbation = registry.create(**spec)
            await confirm(self.llm, fingerprint(perturbation, run.sampling_schedule))
            self.perturbation_proof = EngineProof(self.llm, perturbation.active)
            await self.perturbation_proof.passed()
            self.perturbation_pick_ups = PickUps(self.llm)
            self.executor = RecordingExecutor(self.executor)

        async def generate(
            self,
            prompt_token_ids: list[int],
            sampling_params: SamplingParams,
            multi_modal_data: Mapping[str, Any] | None = None,
        ) -> Any:
            await self.perturbation_proof.passed()
            return await generate(self, prompt_token_ids, sampling_params, multi_modal_data)

        async def perturbation_drift(self) -> Any:
            """How many neighbor sets the latest weight sync changed; tensor-parallel ranks agree."""
            return (await self.llm.collective_rpc("perturbation_drift"))[0]

    return PerturbedRolloutRayActor


def limited_engine(plain: type) -> type:
    """`RolloutRayActor` whose engine has the limits of ``--engine.*``; it is pickled as the class above."""

    class LimitedRolloutRayActor(plain):  # type: ignore[misc, valid-type]
        async def __init__(self, *args: object, **kwargs: object) -> None:
            await plain.__init__(self, *args, **{**kwargs, **current_run().engine_limits})  # type: ignore[misc]

    return LimitedRolloutRayActor
