# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin entry point (group ``vllm.general_plugins``), which vLLM loads in each of its processes.

`register` applies the rows `VLLM` of the table in `ngrpo.patches`. A function with an argument ``original`` is a row of
the table. Most rows act only in an engine for which `settings.read` returns a perturbation; ``none`` counts, since such
an engine draws seeded tokens or records masks or experts. Little is imported at the top: where a plugin fails, vLLM
logs the error and continues without it.
"""

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ngrpo import patches
from ngrpo.machine.upstream import patch_check, versions
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import ParallelConfig

Worker = Any  # of vLLM

logger = logging.getLogger("ngrpo.rollout")


def register() -> None:
    """Applies the patches, in whichever process; an unsupported vLLM stays usable without a perturbation."""
    import vllm

    from ngrpo.machine.hardware import processes

    processes.end_with_owner()
    conditions = [patches.IN_VLLM]
    if versions.has_rollouts(vllm.__version__):
        conditions.append(patches.IN_SUPPORTED_VLLM)
    else:
        logger.warning(
            "ngrpo: vLLM %s is not supported (%s is); perturbations are off.",
            vllm.__version__,
            versions.VLLM_OF_ROLLOUTS,
        )
    patches.install(conditions)


@around
def checked_config(original: Callable[..., Any], self: Any, *args: object, **kwargs: object) -> Any:
    """vLLM's ``EngineArgs.create_engine_config``, in the caller's process before any model loads.

    Checks the release of vLLM, the perturbation's spec, and what it cannot be combined with.
    """
    import vllm

    from ngrpo.rollout import settings

    perturbation = settings.read(self.additional_config)
    settings.read_buffer(self.additional_config)
    if perturbation is not None:
        # An error in `register` would only be logged by vLLM, and the engine would draw unperturbed.
        if not versions.has_rollouts(vllm.__version__):
            raise RuntimeError(
                f"perturbations need vLLM {versions.VLLM_OF_ROLLOUTS}, not {vllm.__version__}: install one of these."
            )
        patch_check.check(patches.active(patches.VLLM_CONDITIONS))
    config = original(self, *args, **kwargs)
    without_setup_hook(config.parallel_config)
    if perturbation is not None:
        settings.check_engine(config, perturbation)
    return config


def without_setup_hook(config: ParallelConfig) -> None:
    """Removes `ngrpo train`'s set-up hook of Ray's workers from the environment of a tensor-parallel engine.

    Ray 2.55 takes the core of such an engine for a new driver, and would run the hook in it.
    """
    environment = getattr(config, "ray_runtime_env", None)
    if environment and environment.pop("worker_process_setup_hook", None):
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

        environment["env_vars"].pop(WORKER_PROCESS_SETUP_HOOK_ENV_VAR, None)


@around
def hash_without_seed(original: Callable[..., str], self: Any, *args: object, **kwargs: object) -> str:
    """vLLM's key of its compile cache, without the seed: perturbations that differ in nothing else share graphs."""
    from ngrpo.rollout import settings

    seedless = copy.copy(self)
    seedless.additional_config = settings.without_seed(self.additional_config)
    return original(seedless, *args, **kwargs)


@around
def attached(original: Callable[..., None], self: Worker, *args: object, **kwargs: object) -> None:
    """A worker's ``load_model``: the perturbation is attached before anything is compiled."""
    from ngrpo.rollout import settings

    original(self, *args, **kwargs)
    config = self.vllm_config.additional_config
    perturbation = settings.read(config)
    if perturbation is not None:
        from ngrpo.rollout import runners
        from ngrpo.rollout.attach import AttachedPerturbation

        self.perturbation = AttachedPerturbation(self.model_runner, perturbation, settings.read_buffer(config))
        version = runner_version(self)
        if version == "V2":
            runners.attach_v2(self.model_runner, self.perturbation)
        else:
            runners.attach_v1(self.model_runner, self.perturbation)
        # Of this instance and not of its class: vLLM's worker for CPUs has a method of its own, in a module that must
        # not be imported in other processes.
        self.compile_or_warm_up_model = warmed_up(self.compile_or_warm_up_model, self.perturbation)
        fingerprint = self.perturbation.fingerprint()
        logger.info("perturbation %s is on, in the %s model runner: %s", perturbation.name, version, fingerprint)


def warmed_up(original: Callable[[], Any], attached: Any) -> Callable[[], Any]:
    """vLLM's warm-up of a worker with a perturbation."""

    def compile_or_warm_up_model() -> Any:
        attached.warm_up()  # first: vLLM's own ends with a monitor that reports every further compilation
        result = original()
        attached.requests.take(None)  # drops the records of vLLM's own warm-up
        return result

    return compile_or_warm_up_model


@around
async def results_of_every_rank(original: Callable[..., Any], self: Any, method: str, *args: object) -> Any:
    """The results of every data-parallel rank for our procedures: vLLM returns those of the first rank only."""
    procedure = args[0] if method == "collective_rpc" else None
    if not isinstance(procedure, str) or not procedure.startswith("perturbation_"):
        return await original(self, method, *args)
    calls = [self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines]
    return [answer for answers in await asyncio.gather(*calls) for answer in answers]


class _Procedures:
    """Remote procedures of a worker with a perturbation, called with ``collective_rpc`` by name."""

    def perturbation_fingerprint(self: Worker) -> str:
        """Of the worker's perturbation; empty where it has none."""
        perturbation = getattr(self, "perturbation", None)
        return perturbation.fingerprint() if perturbation else ""

    def perturbation_runner(self: Worker) -> str:
        """As :func:`runner_version`."""
        return runner_version(self)

    def perturbation_take(
        self: Worker, names: list[str] | None = None, unfinished: list[str] | None = None
    ) -> dict[str, dict[str, bytes]]:
        """As :meth:`~ngrpo.rollout.requests.RunningRequests.take`."""
        return self.perturbation.requests.take(names, unfinished)

    def perturbation_drop(self: Worker, names: list[str]) -> None:
        """As :meth:`~ngrpo.rollout.requests.RunningRequests.drop`."""
        self.perturbation.requests.drop(names)

    def perturbation_drift(self: Worker) -> tuple[int, ...] | None:
        """The fields of :class:`~perturbations.neighbors.Drift`; None where there is none."""
        drift = self.perturbation.drift()
        return None if drift is None else dataclasses.astuple(drift)

    def perturbation_prepare(self: Worker) -> None:
        """Computes what the perturbation needs of the weights."""
        self.perturbation.prepare()

    def perturbation_reads_tokens(self: Worker) -> bool:
        """Whether the model also reads the token in the text, whatever is fed instead."""
        return self.perturbation.reads_tokens

    def perturbation_replace(self: Worker, spec: dict[str, Any]) -> None:
        """Exchanges the perturbation; ``spec``: its name and options."""
        from perturbations import registry

        self.perturbation.replace(registry.create(**spec))


def with_procedures(worker: type) -> type:
    """vLLM's ``WorkerBase``, which every worker inherits, with the remote procedures."""
    for name, procedure in vars(_Procedures).items():
        if name.startswith("perturbation_"):
            setattr(worker, name, procedure)
    return worker


@around
def after_update(original: Callable[..., Any], self: Worker, *args: object, **kwargs: object) -> Any:
    """A worker's ``finish_weight_update``: sparse and sharded transfers write parameters past ``load_weights``."""
    result = original(self, *args, **kwargs)
    perturbation = getattr(self, "perturbation", None)
    if perturbation is not None:
        perturbation.weights_changed()
    return result


@around
def after_sleep(original: Callable[..., Any], self: Worker, *args: object, **kwargs: object) -> Any:
    """A worker's ``sleep``: its weights leave the memory. A worker for CPUs has its own method, which does nothing."""
    result = original(self, *args, **kwargs)
    perturbation = getattr(self, "perturbation", None)
    if perturbation is not None:
        perturbation.asleep = True
    return result


@around
def after_wake_up(original: Callable[..., Any], self: Worker, tags: list[str] | None = None) -> Any:
    """A worker's ``wake_up``, in parts or as a whole; as for :func:`after_sleep`, a worker for CPUs has its own."""
    result = original(self, tags)
    perturbation = getattr(self, "perturbation", None)
    if perturbation is not None:
        perturbation.wake(tags)
    return result


def runner_version(worker: Worker) -> str:
    """Which of vLLM's model runners a worker has."""
    return "V2" if worker.use_v2_model_runner else "V1"
