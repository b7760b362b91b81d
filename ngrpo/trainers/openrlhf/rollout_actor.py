# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``RolloutRayActor``: a vLLM engine that perturbs, and hands each response's record over with it."""

from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from copy import deepcopy
from typing import Any
from uuid import uuid4

import numpy as np

from ngrpo.config.run import current_run
from ngrpo.machine.hardware import cpu, processes
from ngrpo.machine.upstream.sampling import LOGITS_UNCHANGED, logit_changes
from ngrpo.machine.upstream.types import SamplingParams, Upstream
from ngrpo.rollout import records, settings
from ngrpo.rollout.request_arguments import in_words
from ngrpo.trainers.common import sample_records, weights_file
from ngrpo.trainers.openrlhf import fresh_rollouts, pictures, rewards, second_round
from perturbations import registry, seeds
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedResponse

CONTROLS = 4
"""Unperturbed responses, the controls, that each engine generates in a round, and that the trainer's forward takes."""
_CONTROL_TOKENS = 16
"""The length of a control."""
_LONGEST_CONTROL_PROMPT = 512
"""A control has the beginning of a longer prompt: the trainer's forward has logits for the vocabulary at each token."""
_CHECKED_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""The parameters that an agent must request as the run has them, besides those that change logits."""
_SHOWN = 200
"""Characters of a prompt in a message."""

_conversation: ContextVar[sample_records.Conversation | None] = ContextVar("conversation", default=None)
"""The trajectory of the current task: OpenRLHF runs each as its own asyncio task, which has its own context."""


def rollout_actor(plain: type) -> type:
    """The subclass of `RolloutRayActor`."""
    return type(plain.__name__, (PerturbedRolloutRayActor, plain), {})


class PerturbedRolloutRayActor(Upstream):
    """What goes in front of `RolloutRayActor`; a run without a feature skips its line.

    Attributes:
        weight_version: of the engine's weights: the number of weight syncs that it has completed.
        engine_check: the engine's check of its overrides, which requests wait for; where ngrpo configures the engine.
        pick_ups: takes the records of finished requests from the engine; where ngrpo configures it.
        second_rounds_asked: how many second rounds each prompt has had; in a run with a second round.
    """

    weight_version = 0

    async def __init__(self, *args: object, **kwargs: Any) -> None:
        run = current_run()
        kwargs |= run.engine_limits
        if run.second_round is not None:
            kwargs["max_model_len"] += run.second_round.room
            # Otherwise vLLM's log-probabilities are those before temperature and top-p: not of what was drawn.
            kwargs.setdefault("logprobs_mode", "processed_logprobs")
            kwargs.setdefault("max_logprobs", 1)
            self.second_rounds_asked: Counter[str] = Counter()
        spec = engine_spec(kwargs.get("seed", 0)) if run.configures_engines else None
        if spec is not None:
            kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), **engine_settings(spec)}
        if run.hardware == "cpu":
            kwargs |= cpu.engine_arguments(run.openrlhf, kwargs.get("tensor_parallel_size", 1))
        with processes.own_children():
            await super().__init__(*args, **kwargs)
        agent = type(self.executor).__name__
        self.executor = rewards.CheckedExecutor(self.executor)
        if spec is not None:
            perturbation = registry.create(**spec)
            await records.confirm(self.llm, settings.fingerprint(perturbation, run.sampling_schedule))
            self.engine_check = sample_records.EngineCheck(self.llm, perturbation.active, again=run.strict)
            await self.engine_check.passed()
            self.pick_ups = sample_records.PickUps(self.llm)
            self.executor = RecordingExecutor(self.executor, agent)

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> Any:
        if not current_run().configures_engines:
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        await self.engine_check.passed()
        return await generate(self, prompt_token_ids, sampling_params, multi_modal_data)

    async def generate_responses(self, *args: object, **kwargs: object) -> Any:
        version = self.weight_version
        responses = await super().generate_responses(*args, **kwargs)
        if not current_run().has_weight_versions:
            return responses
        if self.weight_version != version:
            raise RuntimeError(
                f"weight sync {self.weight_version} came while responses of sync {version} were drawn, so their tokens"
                " are of several versions of the weights. OpenRLHF 0.11.2 locks the engines against it."
            )
        return [fresh_rollouts.with_version(response, version) for response in responses]

    async def generate_in_two_rounds(self, **kwargs: Any) -> Any:
        return await second_round.in_two_rounds(self, **kwargs)

    async def update_weight(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
        result = await super().update_weight(*args, empty_cache=empty_cache, **kwargs)
        await self.weights_updated(is_last=empty_cache)
        return result

    async def update_weight_cuda_ipc(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
        result = await super().update_weight_cuda_ipc(*args, empty_cache=empty_cache, **kwargs)
        await self.weights_updated(is_last=empty_cache)
        return result

    async def weights_updated(self, is_last: bool) -> None:
        """Has neighbors computed after a sync's last parameter, while a hybrid engine's KV cache still sleeps."""
        if not is_last:
            return
        self.weight_version += 1
        if current_run().configures_engines:
            await self.llm.collective_rpc("perturbation_prepare")
            self.engine_check.weights_synced()

    async def load_weights_file(self, path: str) -> None:
        """A weight sync without NCCL."""
        # A function and not a method name: vLLM ships it to its workers by reference (OpenRLHF sets
        # VLLM_ALLOW_INSECURE_SERIALIZATION), so worker_extension_cls stays OpenRLHF's.
        await self.llm.collective_rpc(weights_file.load_weights_file, args=(path,))
        self.weight_version += 1
        if current_run().configures_engines:
            self.engine_check.weights_synced()

    async def perturbation_drift(self) -> Any:
        """How many neighbor sets the latest weight sync changed; tensor-parallel ranks agree."""
        drift_by_rank = await self.llm.collective_rpc("perturbation_drift")
        return drift_by_rank[0]


def engine_spec(seed: int) -> dict[str, Any]:
    """The run's perturbation for the engine with this OpenRLHF seed: every engine has its own streams.

    Under ``--reproducible`` an unperturbed run has them too, for its token draws.
    """
    spec = current_run().spec or registry.create("none").spec()
    return {**spec, "seed": seeds.of_engine(spec.get("seed", 0), seed)}


def engine_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The run's part of vLLM's ``additional_config``."""
    run = current_run()
    return {
        settings.KEY: spec,
        settings.SEEDED_DRAWS: run.reproducible,
        settings.SAMPLING_MASKS: run.sampling.records_masks,
        settings.FULL_LOG_PROBS: run.sampling.score_centering and not run.sampling.correct_mask,
        settings.SAMPLING_MASK_GIB: run.sampling.mask_gib,
        settings.ROUTED_EXPERTS: run.replay_routing,
        settings.SAMPLING_SCHEDULE: run.specs.get("sampling_schedule"),
        settings.REPLAY_BUFFER: run.specs.get("replay_buffer"),
        settings.DEFERRED_CHECK: True,
    }


# ---- a trajectory: its requests, and the record in its response ----------------------------------------------------


class ControlQuota:
    """The controls that an engine may still request: :data:`CONTROLS` in each round of rollouts."""

    def __init__(self) -> None:
        self._round = 0
        self._left = CONTROLS

    def enter(self, round_number: int) -> None:
        """Renews the quota if this request's round is another one than that of the request before."""
        if round_number != self._round:
            self._round = round_number
            self._left = CONTROLS

    def take(self) -> bool:
        """Takes one of the round's controls; False if none is left."""
        if self._left == 0:
            return False
        self._left -= 1
        return True


class RecordingExecutor:
    """Wraps OpenRLHF's agent executor: puts a trajectory's record into its response."""

    def __init__(self, executor: rewards.CheckedExecutor, name: str | None = None) -> None:
        self._executor = executor
        self._name = name or type(executor).__name__  # for messages
        self._numbers = seeds.ResponseNumbers()
        self._controls = ControlQuota()

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        """As the wrapped executor's, with the record in ``mm_train_inputs``.

        Raises:
            RuntimeError: if the executor fails, or returns a response without a call of :func:`generate`.
        """
        run = current_run()
        # Before anything is awaited, so that response i of a group has the same number and draws in every run.
        conversation, is_replayed = self._begin(kwargs)
        where = f"{self._name}, for the prompt {str(kwargs.get('prompt'))[:_SHOWN]!r}"
        token = _conversation.set(conversation)
        try:
            response = await self._executor.execute(**kwargs)
        except rewards.RewardFailed:
            raise
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            _conversation.reset(token)
        if is_replayed and conversation.trajectory is None:
            raise RuntimeError(
                f"{where}: it returned a response without a call of generate(), so that nothing was recorded. Let the"
                " agent generate at least once, and hand on what generate() returns."
            )
        has_records = run.perturbation is not None or run.has_side_records
        if conversation.trajectory is None or not has_records:
            return response
        record = conversation.finished(response["observation_tokens"]).pack()
        if run.sampling.score_centering and run.sampling_schedule is not None:
            record |= requested_draws(conversation).pack()
        return {**response, "mm_train_inputs": {**(response.get("mm_train_inputs") or {}), **record}}

    def _begin(self, call: Mapping[str, Any]) -> tuple[sample_records.Conversation, bool]:
        """The trajectory of a call of :meth:`execute`, and whether the trainer replays it."""
        run = current_run()
        params = call.get("sampling_params")
        arguments = dict(settings.request_arguments(params))
        round_number = arguments.pop("round", 0)
        key = f"{call.get('prompt')}{pictures.key_of(call.get('images')).hex()}"
        number = self._numbers.next(key, round_number)
        if "answers" in arguments:
            number_in_round = number % seeds.MOST_RESPONSES  # the numbers of each round begin at a multiple of it
            # A prompt that is in the batch twice has two groups, each with responses from 0 on.
            arguments["answer"] = number_in_round % arguments["answers"]

        is_perturbed = run.perturbation is not None and run.perturbation.active
        is_replayed = (is_perturbed or run.replay_routing) and arguments.get("enabled", True)
        # Round 0 is an evaluation before the first round of training; a later evaluation finds its round's controls
        # taken. A draft's record may not reach the trainer.
        is_trained = is_replayed and round_number >= 1 and not second_round.drafting.get()
        self._controls.enter(round_number)
        conversation = sample_records.Conversation(
            {"sample": number, **arguments},
            sampling=sampling_of(params),
            needs_control=is_trained and self._controls.take(),
            redrawn=run.perturbation is not None and run.perturbation.has_density,
        )
        return conversation, is_replayed


def requested_draws(conversation: sample_records.Conversation) -> sample_records.RequestedDraws:
    """What the sampling schedule goes by in the requests of a trajectory."""
    arguments = conversation.arguments
    return sample_records.RequestedDraws(
        temperature=conversation.sampling["temperature"],
        training_step=arguments.get("training_step", 0),
        answer=arguments.get("answer", 0),
        answers=arguments.get("answers", 1),
    )


def sampling_of(params: SamplingParams | None) -> dict[str, Any]:
    """The sampling parameters that decide with which probabilities tokens are drawn."""
    return {name: getattr(params, name, None) for name in (*_CHECKED_SAMPLING, *LOGITS_UNCHANGED)}


def check_sampling(requested: SamplingParams, of_the_run: Mapping[str, Any]) -> None:
    """Raises RuntimeError if an agent draws tokens with other probabilities than the trainer scores them with."""
    parameters = {name: getattr(requested, name) for name in _CHECKED_SAMPLING}
    # A parameter may also be left at the value that changes nothing: OpenRLHF's own min_tokens is 1.
    parameters |= logit_changes(requested)
    changed = {name: value for name, value in parameters.items() if value != of_the_run[name]}
    if changed:
        expected = {name: of_the_run[name] for name in changed}
        raise RuntimeError(
            f"an agent requested {in_words(changed)} where the run samples with {in_words(expected)}, so the trainer"
            " would score its tokens with other probabilities than they were drawn with. Hand on the sampling"
            " parameters that execute() was given."
        )


async def generate(
    actor: Any, prompt: list[int], sampling_params: SamplingParams, images: Mapping[str, Any] | None = None
) -> Any:
    """One request, and its record. (If it is cancelled, vLLM aborts it, and the record is dropped.)

    Args:
        actor: of OpenRLHF, whose engine is asked.
        prompt: the tokens, in which a picture has all of its places.
        sampling_params: of the request.
        images: vLLM's ``multi_modal_data``.
    """
    conversation = _conversation.get()
    arguments = dict(settings.request_arguments(sampling_params))
    arguments.pop("round", None)
    if conversation is not None:
        check_sampling(sampling_params, conversation.sampling)
        seed = seeds.of_prompt(prompt, pictures.key_of((images or {}).get("image")))
        # The trajectory's arguments come last and win: an agent may have made its own sampling parameters.
        arguments = {"seed": seed, **arguments, **conversation.arguments}
        conversation.drop_changed(prompt)
        earlier = conversation.begin_request(prompt)
        if earlier is not None:
            arguments["record"] = earlier.to_bytes()
        elif conversation.repeats:
            # Without a record, as in an evaluation, a repeated prompt has its own draws by its seed.
            arguments["seed"] = seeds.trajectory_seed(arguments["seed"], conversation.repeats)
    params = deepcopy(sampling_params)
    params.extra_args = {**(params.extra_args or {}), settings.KEY: arguments}
    request: dict[str, Any] = {"prompt_token_ids": prompt}
    if images:
        placeholders = require(actor._mm_pad_token_ids, "the placeholders of pictures")
        request = {"prompt_token_ids": pictures.unexpanded(prompt, placeholders), "multi_modal_data": images}
    output, parts = await _response(actor, request, params)
    if images:
        pictures.check_places(prompt, require(output.prompt_token_ids, "the prompt's tokens"))
    if conversation is not None and arguments.get("enabled", True):
        conversation.add(parts, prompt, output.outputs[0].token_ids, output.num_cached_tokens or 0)
        if conversation.claim_control():
            control_prompt = prompt
            if images:
                # The scale of the mismatch is the rounding of engine and trainer. Pictures that these read differently
                # exceed it, so a control is without them.
                placeholders = actor._mm_pad_token_ids or ()
                control_prompt = [token for token in prompt if token not in placeholders]
            seed = seeds.trajectory_seed(arguments["seed"], arguments["sample"])
            conversation.add_control(await unperturbed_response(actor, control_prompt, sampling_params, seed))
    return output


async def unperturbed_response(
    actor: Any, prompt: list[int], sampling_params: SamplingParams, seed: int
) -> UnperturbedResponse:
    """A control: a short unperturbed response to a prompt as all rollouts have, or to the beginning of a long one.

    The response is drawn without the rollout's filters and penalties, so that log π is the model's over all tokens.
    """
    prompt = prompt[:_LONGEST_CONTROL_PROMPT]
    params = deepcopy(sampling_params)
    params.max_tokens = min(params.max_tokens or _CONTROL_TOKENS, _CONTROL_TOKENS)
    params.top_p = 1.0
    params.top_k = 0
    params.min_p = 0.0
    for name, unchanged in LOGITS_UNCHANGED.items():
        if name != "min_tokens":
            setattr(params, name, unchanged[0])
    # OpenRLHF gives all responses a min_tokens of 1, which takes the end's probability from the first token. That is a
    # part of every response's mismatch, and so of the scale.
    params.min_tokens = min(params.min_tokens or 0, params.max_tokens)
    arguments = {"enabled": False, "scheduled": False, "seed": seed}
    params.extra_args = {**(params.extra_args or {}), settings.KEY: arguments}
    output, parts = await _response(actor, {"prompt_token_ids": prompt}, params)
    tokens = list(output.outputs[0].token_ids)
    trajectory = records.cut_to_response(FinishedTrajectory.unpack(parts), len(tokens))
    return UnperturbedResponse(
        tokens=np.array([*prompt, *tokens], dtype=np.int32),
        log_probs=trajectory.log_probs,
        experts=trajectory.experts,
    )


async def _response(actor: Any, request: Mapping[str, Any], params: SamplingParams) -> tuple[Any, Any]:
    """A request's final output, and the parts of its record."""
    name = uuid4().hex
    output = None
    async for latest in actor.llm.generate(request, params, request_id=name):
        output = latest
    return require(output, "a response"), await actor.pick_ups.take(name)
