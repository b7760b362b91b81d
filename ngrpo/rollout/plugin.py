# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin entry point (group ``vllm.general_plugins``), which vLLM loads in each of its processes.

`register` puts the rows `VLLM` of `ngrpo.patches` in place, most of them functions of this file. They act only in an
engine that is built with ``additional_config={"perturbation": {...}}``; but the engines of `ngrpo eval` and `ngrpo
diagnose` end with the process that started them, and those of `ngrpo train` join its Ray.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ngrpo import patches
from ngrpo.machine.upstream import versions

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    from ngrpo.rollout.attach import AttachedPerturbation
    from ngrpo.rollout.vllm_objects import CoreClient, EngineFlags, FrontEnd, Worker

logger = logging.getLogger("ngrpo.rollout")


def register() -> None:
    """Puts the patches in place, in whichever process; an unsupported vLLM stays usable without a perturbation."""
    import vllm

    from ngrpo.machine.hardware import processes

    processes.end_with_owner()
    conditions = [patches.IN_VLLM]
    if versions.has_rollouts(vllm.__version__):
        conditions.append(patches.IN_SUPPORTED_VLLM)
    else:
        release, ours = vllm.__version__, versions.VLLM_OF_ROLLOUTS
        logger.warning("ngrpo: vLLM %s is not supported (%s is); perturbations are off.", release, ours)
    patches.install(conditions)


def checked_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the release, the spec and its combinations, in the caller's process, before any model loads."""

    @functools.wraps(original)
    def create_engine_config(self: EngineFlags, *args: object, **kwargs: object) -> Any:
        from ngrpo.rollout import settings

        perturbation = settings.read(self.additional_config)
        settings.read_buffer(self.additional_config)
        if perturbation is not None:
            _check_release()
        config = original(self, *args, **kwargs)
        without_setup_hook(config.parallel_config)
        if perturbation is not None:
            settings.check_engine(config, perturbation)
        return config

    return create_engine_config


def _check_release() -> None:
    """Refuses a vLLM in which a patch would be missing or land elsewhere: vLLM loads plugins, and asks nothing back."""
    import vllm

    if not versions.has_rollouts(vllm.__version__):
        needed = f"perturbations need vLLM {versions.VLLM_OF_ROLLOUTS}"
        raise RuntimeError(f"{needed}, not {vllm.__version__}: install one of these.")
    patches.check(patches.active(patches.VLLM_CONDITIONS))


def without_setup_hook(config: ParallelConfig) -> None:
    """Takes `ngrpo train`'s set-up hook out of what a tensor-parallel engine joins Ray with; vLLM loads this plugin.

    The engine's core is a driver of its own, and Ray 2.55 refuses a driver the hook of another one.
    """
    environment = getattr(config, "ray_runtime_env", None)
    if environment and environment.pop("worker_process_setup_hook", None):
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

        environment["env_vars"].pop(WORKER_PROCESS_SETUP_HOOK_ENV_VAR, None)


def hash_without_seed(original: Callable[..., str]) -> Callable[..., str]:
    """The key of vLLM's compile cache: engines whose perturbations differ in the seed alone share their graphs."""

    @functools.wraps(original)
    def compute_hash(self: EngineFlags, *args: object, **kwargs: object) -> str:
        from ngrpo.rollout import settings

        seedless = copy.copy(self)
        seedless.additional_config = settings.without_seed(self.additional_config)
        return original(seedless, *args, **kwargs)

    return compute_hash


def attached(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Worker, *args: object, **kwargs: object) -> None:
        from ngrpo.rollout import settings, used_runner

        original(self, *args, **kwargs)
        used_runner.note(_runner(self))
        perturbation = settings.read(self.vllm_config.additional_config)
        if perturbation is not None:
            from ngrpo.rollout.attach import AttachedPerturbation

            buffer = settings.read_buffer(self.vllm_config.additional_config)
            self.perturbation = AttachedPerturbation(self.model_runner, perturbation, buffer)
            # Of this instance: a worker for CPUs has a method of its own, in a module that must not be imported here.
            self.compile_or_warm_up_model = warmed_up(self.compile_or_warm_up_model, self.perturbation)
            logger.info(
                "perturbation %s is on, in the %s model runner: %s",
                perturbation.name,
                _runner(self),
                self.perturbation.fingerprint(),
            )

    return load_model


def warmed_up(original: Callable[[], Any], attached: AttachedPerturbation) -> Callable[[], Any]:
    def compile_or_warm_up_model() -> Any:
        attached.warm_up()  # first: vLLM's own ends with a monitor that reports every further compilation
        result = original()
        attached.forget_requests()
        return result

    return compile_or_warm_up_model


def checked_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """A bad argument is the caller's error, in the caller's process."""

    @functools.wraps(original)
    def process_inputs(
        self: InputProcessor, request_id: str, prompt: object, params: SamplingParams, *args: object, **kwargs: object
    ) -> Any:
        from ngrpo.rollout.request_check import checked
        from perturbations.errors import UsageError

        try:
            params = checked(params, self.model_config)
            if kwargs.get("resumable") and _perturbed(self):
                raise UsageError("a perturbed engine takes no prompts that arrive in parts. Give the whole prompt.")
        except UsageError as error:
            raise _request_error()(str(error)) from None
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


@functools.cache
def _request_error() -> type[Exception]:
    """An error of bad input that vLLM's server answers with status 400, as it does an error of its own kind alone."""
    from perturbations.errors import UsageError

    base = getattr(importlib.import_module("vllm.exceptions"), "VLLMValidationError", None)
    return UsageError if base is None else type("RequestError", (base, UsageError), {})


def numbered_children(original: Callable[..., Any]) -> Callable[..., Any]:
    """``SamplingParams(n=…)`` with a given seed: each child must be another trajectory."""

    @functools.wraps(original)
    def child_params(self: object, index: int) -> SamplingParams:
        from ngrpo.rollout.settings import KEY, request_arguments

        params = original(self, index)
        arguments = request_arguments(params)
        if arguments.get("seed") is not None:
            params = params.clone()
            params.extra_args = {**params.extra_args, KEY: {**arguments, "sample": index}}
        return params

    return child_params


def checked_core(original: Callable[..., None]) -> Callable[..., None]:
    """The scheduler hashes blocks in the engine core's process, which may be another than the worker's."""

    @functools.wraps(original)
    def init(self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        from ngrpo.rollout import engine_probe, settings

        if settings.read(vllm_config.additional_config) is not None:
            patches.install([patches.IN_PERTURBED_CORE])
        original(self, vllm_config, *args, **kwargs)
        engine_probe.engine_started(self)

    return init


def checked_first(original: Callable[..., None]) -> Callable[..., None]:
    """The first request after a weight sync comes after the probe that is due, where one is."""

    @functools.wraps(original)
    def add_request(self: EngineCore, *args: object, **kwargs: object) -> None:
        from ngrpo.rollout import engine_probe

        engine_probe.before_request(self)
        original(self, *args, **kwargs)

    return add_request


def with_calls_of_core(original: Callable[..., Any]) -> Callable[..., Any]:
    """What concerns the engine's core among the remote procedures, all others of which are of its workers."""

    @functools.wraps(original)
    def collective_rpc(self: EngineCore, method: object, *args: object, **kwargs: object) -> Any:
        from ngrpo.rollout import engine_probe

        if method == "perturbation_probe":
            return [engine_probe.prove_when_idle(self)]
        if method == "perturbation_replace":
            engine_probe.tell_of_finished(self)
        result = original(self, method, *args, **kwargs)
        if method == "perturbation_replace":
            engine_probe.perturbation_replaced(self)
        return result

    return collective_rpc


def with_lengths(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: FrontEnd, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if _perturbed(self):
            from ngrpo.rollout.async_scheduling import keep_lengths_in

            keep_lengths_in(self.output_processor)

    return __init__


def drop_aborted(original: Callable[..., None]) -> Callable[..., None]:
    """A caller's abort. (Requests that end at a stop string are aborted further inside; they keep their records.)"""

    @functools.wraps(original)
    def abort_request(self: FrontEnd, request_ids: Iterable[str], *args: object, **kwargs: object) -> None:
        names = list(request_ids)
        dropped = _with_internal_ids(self, names)
        original(self, names, *args, **kwargs)
        if _perturbed(self):
            self.collective_rpc("perturbation_drop", args=(dropped,))

    return abort_request


def drop_aborted_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def abort(self: FrontEnd, request_id: str | Iterable[str], *args: object, **kwargs: object) -> None:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        dropped = _with_internal_ids(self, names)
        await original(self, names, *args, **kwargs)
        if _perturbed(self):
            await self.collective_rpc("perturbation_drop", args=(dropped,))

    return abort


def answers_of_every_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM asks every data-parallel rank, and hands over the first one's answers only."""

    @functools.wraps(original)
    async def call_utility_async(self: CoreClient, method: str, *args: object) -> Any:
        procedure = args[0] if method == "collective_rpc" else None
        if not isinstance(procedure, str) or not procedure.startswith("perturbation_"):
            return await original(self, method, *args)
        calls = [self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    return call_utility_async


def _with_internal_ids(engine: FrontEnd, names: list[str]) -> list[str]:
    """The names, and what the engine calls those of them that are not finished: the samples of a parent have its name.

    To be asked before the abort, which forgets them.
    """
    ids = engine.output_processor.external_req_ids
    return [*names, *(internal for name in names for internal in ids.get(name, ()))]


def _perturbed(engine: FrontEnd | InputProcessor) -> bool:
    from ngrpo.rollout import settings

    return settings.read(engine.vllm_config.additional_config) is not None


def _runner(worker: Worker) -> str:
    return "V2" if worker.use_v2_model_runner else "V1"


def with_procedures(worker: type) -> type:
    """vLLM's ``WorkerBase`` with the remote procedures of every worker, called with ``collective_rpc`` by name."""

    def fingerprint(self: Worker) -> str:
        attached = getattr(self, "perturbation", None)
        return attached.fingerprint() if attached else ""

    def runner(self: Worker) -> str:
        return _runner(self)

    def take(self: Worker, names: list[str] | None = None, unfinished: list[str] | None = None) -> dict[str, Any]:
        return self.perturbation.requests.take(names, unfinished)

    def drop(self: Worker, names: list[str]) -> None:
        self.perturbation.requests.drop(names)

    def drift(self: Worker) -> tuple[int, int, int, int] | None:
        counts = self.perturbation.drift()
        return None if counts is None else dataclasses.astuple(counts)

    def prepare(self: Worker) -> None:
        self.perturbation.prepare()

    def reads_tokens(self: Worker) -> bool:
        return self.perturbation.reads_tokens

    def replace(self: Worker, spec: dict[str, Any]) -> None:
        from perturbations import registry

        self.perturbation.replace(registry.create(**spec))

    for method in (fingerprint, runner, take, drop, drift, prepare, reads_tokens, replace):
        setattr(worker, f"perturbation_{method.__name__}", method)
    return worker
