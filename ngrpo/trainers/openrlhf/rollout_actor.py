# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``RolloutRayActor``: a vLLM engine that perturbs, and hands each response's record over with it."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from typing import Any
from uuid import uuid4

import numpy as np

from ngrpo.config.run import current_run
from ngrpo.machine.hardware import cpu, processes
from ngrpo.machine.upstream.types import SamplingParams
from ngrpo.rollout import records, settings
from ngrpo.rollout.request_arguments import LOGITS_UNCHANGED, in_words, logit_changes
from ngrpo.trainers.common import sample_records, weights_file
from ngrpo.trainers.openrlhf import rewards, second_round
from perturbations import registry, seeds
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer

CONTROLS, _CONTROL_TOKENS = 4, 16
"""Unperturbed responses, the controls, of each engine in each round and of the trainer's forward; tokens of each."""
_FILTERS = ("temperature", "top_p", "top_k", "min_p")
_SHOWN = 200
_LONGEST_CONTROL_PROMPT = 512  # the trainer's forward has logits for the whole vocabulary at each token
# Each trajectory of OpenRLHF runs as its own asyncio task, so a context variable keeps them apart.
_conversation: ContextVar[sample_records.Conversation | None] = ContextVar("conversation", default=None)


def rollout_actor(plain: Any) -> type:
    """A subclass of `RolloutRayActor`; a run without a feature skips its line.

    Ray pickles the class by value, which a context variable does not allow: its methods call functions below.
    """

    class PerturbedRolloutRayActor(plain):  # type: ignore[misc, valid-type]
        async def __init__(self, *args: object, **kwargs: Any) -> None:
            run = current_run()
            kwargs |= run.engine_limits
            if run.second_round is not None:
                kwargs["max_model_len"] += run.second_round.room
                # Otherwise vLLM's log-probabilities are those before temperature and top-p: not of what was drawn.
                kwargs = {"logprobs_mode": "processed_logprobs", "max_logprobs": 1, **kwargs}
                self.second_rounds_asked: Counter[str] = Counter()
            spec = engine_spec(kwargs.get("seed", 0)) if run.changes_rollouts else None
            if spec is not None:
                kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), **engine_settings(spec)}
            if run.hardware == "cpu":
                kwargs |= cpu.engine_arguments(run.openrlhf, kwargs.get("tensor_parallel_size", 1))
            with processes.own_children():
                await plain.__init__(self, *args, **kwargs)
            name = type(self.executor).__name__
            self.executor = rewards.CheckedExecutor(self.executor)
            if spec is not None:
                perturbation = registry.create(**spec)
                await records.confirm(self.llm, settings.fingerprint(perturbation, run.sampling_schedule))
                self.engine_check = sample_records.EngineCheck(self.llm, perturbation.active, again=run.strict)
                await self.engine_check.passed()
                self.pick_ups = sample_records.PickUps(self.llm)
                self.executor = RecordingExecutor(self.executor, name)

        async def generate(
            self,
            prompt_token_ids: list[int],
            sampling_params: SamplingParams,
            multi_modal_data: Mapping[str, Any] | None = None,
        ) -> Any:
            if not current_run().changes_rollouts:
                return await plain.generate(self, prompt_token_ids, sampling_params, multi_modal_data)
            await self.engine_check.passed()
            return await generate(self, prompt_token_ids, sampling_params, multi_modal_data)

        async def generate_in_two_rounds(self, **kwargs: Any) -> Any:
            return await second_round.in_two_rounds(self, **kwargs)

        async def update_weight(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
            result = await plain.update_weight(self, *args, empty_cache=empty_cache, **kwargs)
            await self.weights_updated(empty_cache)
            return result

        async def update_weight_cuda_ipc(self, *args: object, empty_cache: bool = False, **kwargs: object) -> Any:
            result = await plain.update_weight_cuda_ipc(self, *args, empty_cache=empty_cache, **kwargs)
            await self.weights_updated(empty_cache)
            return result

        async def weights_updated(self, is_last: bool) -> None:
            """After a sync's last parameter neighbors are computed, so that a hybrid engine's KV cache still sleeps."""
            if current_run().changes_rollouts and is_last:
                await self.llm.collective_rpc("perturbation_prepare")
                self.engine_check.weights_synced()

        async def load_weights_file(self, path: str) -> None:
            """A weight sync without NCCL."""
            # A function and not a method name: vLLM ships it to its workers by reference (OpenRLHF sets
            # VLLM_ALLOW_INSECURE_SERIALIZATION), so worker_extension_cls stays OpenRLHF's.
            await self.llm.collective_rpc(weights_file.load_weights_file, args=(path,))
            if current_run().changes_rollouts:
                self.engine_check.weights_synced()

        async def perturbation_drift(self) -> Any:
            """How many neighbor sets the latest weight sync changed; tensor-parallel ranks agree."""
            return (await self.llm.collective_rpc("perturbation_drift"))[0]

    return PerturbedRolloutRayActor


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
        settings.SAMPLING_MASKS: run.sampling.correct_mask,
        settings.SAMPLING_MASK_GIB: run.sampling.mask_gib,
        settings.ROUTED_EXPERTS: run.replay_routing,
        settings.SAMPLING_SCHEDULE: run.specs.get("sampling_schedule"),
        settings.REPLAY_BUFFER: run.specs.get("replay_buffer"),
        settings.DEFERRED_CHECK: True,
    }


class RecordingExecutor:
    """Wraps OpenRLHF's agent executor: puts a trajectory's record into its response."""

    def __init__(self, executor: rewards.CheckedExecutor, name: str | None = None) -> None:
        self._executor = executor
        self._name = name or type(executor).__name__  # for messages
        self._numbers = seeds.AnswerNumbers()
        self._round, self._controls = 0, 0

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        """As the wrapped executor's, with the record in ``mm_train_inputs``."""
        # Numbered before anything is awaited: response i of a group has the same draws in every run.
        run, arguments = current_run(), dict(settings.request_arguments(kwargs.get("sampling_params")))
        round_ = arguments.pop("round", 0)
        key = f"{kwargs.get('prompt')}{pictures_key(kwargs.get('images')).hex()}"
        number = self._numbers.next(key, round_)
        perturbed = run.perturbation is not None and run.perturbation.active
        replayed = (perturbed or run.replay_routing) and arguments.get("enabled", True)
        if "answers" in arguments:
            # A prompt that is in the batch twice has twice as many responses: two groups.
            arguments["answer"] = number % seeds.MOST_ANSWERS % arguments["answers"]
        if round_ != self._round:
            self._round, self._controls = round_, 0
        # By a control; round 0 is no training round, and a draft's record may not reach the trainer.
        followed = replayed and round_ >= 1 and not second_round.drafting.get() and self._controls < CONTROLS
        self._controls += followed
        conversation = sample_records.Conversation({"sample": number, **arguments}, followed)
        conversation.redrawn = run.perturbation is not None and run.perturbation.has_density
        conversation.sampling = sampling_of(kwargs.get("sampling_params"))
        token = _conversation.set(conversation)
        where = f"{self._name}, for the prompt {str(kwargs.get('prompt'))[:_SHOWN]!r}"
        try:
            response = await self._executor.execute(**kwargs)
        except rewards.RewardFailed:
            raise
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            _conversation.reset(token)
        if replayed and conversation.trajectory is None:
            raise RuntimeError(
                f"{where}: it returned a response without a call of generate(), so that nothing was recorded. Let the"
                " agent generate at least once, and hand on what generate() returns."
            )
        if conversation.trajectory is None or not (run.perturbation is not None or run.has_side_records):
            return response
        record = conversation.finished(response["observation_tokens"]).pack()
        return {**response, "mm_train_inputs": {**(response.get("mm_train_inputs") or {}), **record}}


def sampling_of(params: SamplingParams | None) -> dict[str, Any]:
    """The sampling parameters that decide with which probabilities tokens are drawn."""
    return {name: getattr(params, name, None) for name in (*_FILTERS, *LOGITS_UNCHANGED)}


def check_sampling(requested: SamplingParams, of_the_run: Mapping[str, Any]) -> None:
    """Raises RuntimeError if an agent draws tokens with other probabilities than the trainer scores them with."""
    changed = {name: value for name in _FILTERS if (value := getattr(requested, name)) != of_the_run[name]}
    # A parameter may also be left at the value that changes nothing: OpenRLHF's own min_tokens is 1.
    changed |= {name: value for name, value in logit_changes(requested).items() if value != of_the_run[name]}
    if changed:
        raise RuntimeError(
            f"an agent requested {in_words(changed)} where the run samples with"
            f" {in_words({name: of_the_run[name] for name in changed})}, so the trainer would score its tokens with"
            " other probabilities than they were drawn with. Hand on the sampling parameters that execute() was given."
        )


async def generate(
    actor: Any, prompt: list[int], sampling_params: SamplingParams, pictures: Mapping[str, Any] | None = None
) -> Any:
    """One request, and its record. (If it is cancelled, vLLM aborts it, and the record is dropped.)

    In ``prompt`` a picture has all of its places; ``pictures`` are vLLM's ``multi_modal_data``.
    """
    conversation = _conversation.get()
    params, arguments = deepcopy(sampling_params), dict(settings.request_arguments(sampling_params))
    arguments.pop("round", None)
    if conversation is not None:
        check_sampling(sampling_params, conversation.sampling)
        # An agent may have made its own sampling parameters: the trajectory's arguments win.
        seed = seeds.of_prompt(prompt, pictures_key((pictures or {}).get("image")))
        arguments = {"seed": seed, **arguments, **conversation.arguments}
        conversation.go_on(prompt)
        earlier = conversation.earlier(prompt)
        if earlier is not None:
            arguments["record"] = earlier.to_bytes()
        elif conversation.again:  # an evaluation has no records
            arguments["seed"] = seeds.trajectory_seed(arguments["seed"], conversation.again)
    params.extra_args = {**(params.extra_args or {}), settings.KEY: arguments}
    request: dict[str, Any] = {"prompt_token_ids": prompt}
    if pictures:
        token_ids = unexpanded(prompt, require(actor._mm_pad_token_ids, "the placeholders of pictures"))
        request = {"prompt_token_ids": token_ids, "multi_modal_data": pictures}
    output, parts = await _asked(actor, request, params)
    if pictures:
        check_places(prompt, require(output.prompt_token_ids, "the prompt's tokens"))
    if conversation is not None and arguments.get("enabled", True):
        conversation.add(parts, prompt, output.outputs[0].token_ids, output.num_cached_tokens or 0)
        if conversation.followed:
            conversation.followed = False
            # Without its pictures: the scale is both sides' rounding, and pictures that they read differently exceed
            # it.
            text = [token for token in prompt if token not in (actor._mm_pad_token_ids or ())] if pictures else prompt
            control = seeds.trajectory_seed(arguments["seed"], arguments["sample"])
            conversation.unperturbed = await unperturbed_response(actor, text, sampling_params, control)
    return output


async def unperturbed_response(
    actor: Any, prompt: list[int], sampling_params: SamplingParams, seed: int
) -> UnperturbedAnswer | None:
    """A short response to a prompt as all rollouts have, unperturbed; None for a prompt too long to be worth its
    forward.

    It is drawn without the rollout's filters and penalties, so that log π is the model's over all tokens.
    """
    if len(prompt) > _LONGEST_CONTROL_PROMPT:
        return None
    short = deepcopy(sampling_params)
    short.max_tokens = min(short.max_tokens or _CONTROL_TOKENS, _CONTROL_TOKENS)
    short.top_p, short.top_k, short.min_p = 1.0, 0, 0.0
    for name, neutral in LOGITS_UNCHANGED.items():
        if name != "min_tokens":
            setattr(short, name, neutral)
    # OpenRLHF gives all responses a min_tokens of 1, which takes the end's probability from the first token. That is a
    # part of every response's gap, and so of the scale.
    short.min_tokens = min(short.min_tokens or 0, short.max_tokens)
    short.extra_args = {**(short.extra_args or {}), settings.KEY: {"enabled": False, "scheduled": False, "seed": seed}}
    output, parts = await _asked(actor, {"prompt_token_ids": prompt}, short)
    tokens = list(output.outputs[0].token_ids)
    taken = records.cut_to_response(FinishedTrajectory.unpack(parts), len(tokens))
    return UnperturbedAnswer(np.array([*prompt, *tokens], dtype=np.int32), taken.log_probs, taken.experts)


async def _asked(actor: Any, request: Mapping[str, Any], params: SamplingParams) -> tuple[Any, Any]:
    """A request's final output, and the parts of its record."""
    name, output = uuid4().hex, None
    async for latest in actor.llm.generate(request, params, request_id=name):
        output = latest
    return require(output, "a response"), await actor.pick_ups.take(name)


# ---- pictures in a prompt ----------------------------------------------------------------------------------------


def pictures_key(pictures: object) -> bytes:
    """A key of a prompt's pictures, the same in every run, 16 bytes; empty without pictures.

    These are one or a list of paths, addresses, bytes or PIL images, as datasets and vLLM's ``multi_modal_data`` have.
    """
    each = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    each = [picture for picture in each if picture is not None]
    if not each:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for picture in each:
        if isinstance(picture, bytes):
            data = picture
        elif hasattr(picture, "tobytes") and hasattr(picture, "size"):
            data = f"{getattr(picture, 'mode', '')} {picture.size} ".encode() + picture.tobytes()
        else:
            data = str(picture).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def unexpanded(prompt: list[int], placeholders: Collection[int]) -> list[int]:
    """A prompt for vLLM, which itself expands a picture's one placeholder into the picture's places."""
    from openrlhf.utils.vlm_utils import dedup_media_tokens

    return dedup_media_tokens(prompt, set(placeholders)) if placeholders else prompt


def check_places(trainer: Sequence[int], engine: Sequence[int]) -> None:
    """Raises RuntimeError if the trainer's processor and vLLM expanded a prompt's pictures into different tokens.

    Positions in a record are the expanded prompt's.
    """
    if list(trainer) != list(engine):
        first = next((i for i, pair in enumerate(zip(trainer, engine)) if pair[0] != pair[1]), "the end")
        raise RuntimeError(
            f"a prompt with pictures has {len(trainer)} tokens for the trainer and {len(engine)} for vLLM, and they"
            f" differ from position {first} on: the records would be replayed at other positions. Use a model with"
            " pictures that OpenRLHF and vLLM expand alike, such as Qwen3-VL, or prompts without pictures."
        )
