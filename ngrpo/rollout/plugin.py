# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin entry point (group ``vllm.general_plugins``), which vLLM loads in each of its processes.

`register` applies the rows `VLLM` of `ngrpo.patches`, some of which are here. They act only in an engine with
``additional_config={"perturbation": {...}}``. Little is imported at the top: vLLM logs an error there and continues.
"""

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ngrpo import patches
from ngrpo.machine.upstream import versions
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
        release, ours = vllm.__version__, versions.VLLM_OF_ROLLOUTS
        logger.warning("ngrpo: vLLM %s is not supported (%s is); perturbations are off.", release, ours)
    patches.install(conditions)


@around
def checked_config(original: Callable[..., Any], self: Any, *args: object, **kwargs: object) -> Any:
    """Checks the release, the spec and its combinations, in the caller's process, before any model loads."""
    import vllm

    from ngrpo.rollout import settings

    perturbation = settings.read(self.additional_config)
    settings.read_buffer(self.additional_config)
    if perturbation is not None:
        # Here, since vLLM logs an error in the import of a plugin and returns nothing.
        if not versions.has_rollouts(vllm.__version__):
            needed = f"perturbations need vLLM {versions.VLLM_OF_ROLLOUTS}"
            raise RuntimeError(f"{needed}, not {vllm.__version__}: install one of these.")
        patches.check(patches.active(patches.VLLM_CONDITIONS))
    config = original(self, *args, **kwargs)
    without_setup_hook(config.parallel_config)
    if perturbation is not None:
        settings.check_engine(config, perturbation)
    return config


def without_setup_hook(config: ParallelConfig) -> None:
    """Removes `ngrpo train`'s set-up hook from a tensor-parallel engine: Ray 2.55 takes its core for a new driver."""
    environment = getattr(config, "ray_runtime_env", None)
    if environment and environment.pop("worker_process_setup_hook", None):
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

        environment["env_vars"].pop(WORKER_PROCESS_SETUP_HOOK_ENV_VAR, None)


@around
def hash_without_seed(original: Callable[..., str], self: Any, *args: object, **kwargs: object) -> str:
    """The key of vLLM's compile cache: perturbations that differ only in the seed share their graphs."""
    from ngrpo.rollout import settings

    seedless = copy.copy(self)
    seedless.additional_config = settings.without_seed(self.additional_config)
    return original(seedless, *args, **kwargs)


@around
def attached(original: Callable[..., None], self: Worker, *args: object, **kwargs: object) -> None:
    """A worker's ``load_model``, which sets its perturbation."""
    from ngrpo.rollout import settings

    original(self, *args, **kwargs)
    config = self.vllm_config.additional_config
    perturbation = settings.read(config)
    if perturbation is not None:
        from ngrpo.rollout import runners
        from ngrpo.rollout.attach import AttachedPerturbation

        self.perturbation = AttachedPerturbation(self.model_runner, perturbation, settings.read_buffer(config))
        version = runner_version(self)
        (runners.attach_v2 if version == "V2" else runners.attach_v1)(self.model_runner, self.perturbation)
        # Of this instance: a worker for CPUs has a method of its own, in a module that must not be imported here.
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
    """vLLM asks every data-parallel rank, and returns the first one's results only."""
    procedure = args[0] if method == "collective_rpc" else None
    if not isinstance(procedure, str) or not procedure.startswith("perturbation_"):
        return await original(self, method, *args)
    calls = [self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines]
    return [answer for answers in await asyncio.gather(*calls) for answer in answers]


def with_procedures(worker: type) -> type:
    """vLLM's ``WorkerBase`` with the remote procedures of every worker, called with ``collective_rpc`` by name."""

    def fingerprint(self: Worker) -> str:
        found = getattr(self, "perturbation", None)
        return found.fingerprint() if found else ""

    def drift(self: Worker) -> tuple[int, ...] | None:
        counts = self.perturbation.drift()
        return None if counts is None else dataclasses.astuple(counts)

    def replace(self: Worker, spec: dict[str, Any]) -> None:
        from perturbations import registry

        self.perturbation.replace(registry.create(**spec))

    procedures: dict[str, Callable[..., Any]] = {
        "fingerprint": fingerprint,
        "runner": runner_version,
        "take": lambda self, names=None, unfinished=None: self.perturbation.requests.take(names, unfinished),
        "drop": lambda self, names: self.perturbation.requests.drop(names),
        "drift": drift,
        "prepare": lambda self: self.perturbation.prepare(),
        "reads_tokens": lambda self: self.perturbation.reads_tokens,
        "replace": replace,
    }
    for name, procedure in procedures.items():
        setattr(worker, f"perturbation_{name}", procedure)
    return worker


def _then(act: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """After a worker's method, its perturbation, if it has one, acts, given the same arguments."""

    @around
    def method(original: Callable[..., Any], self: Worker, *args: object, **kwargs: object) -> Any:
        result = original(self, *args, **kwargs)
        attached = getattr(self, "perturbation", None)
        if attached is not None:
            act(attached, *args, **kwargs)
        return result

    return method


# Weight transfer of the sparse and sharded kinds writes parameters directly, past ``load_weights``.
after_update = _then(lambda attached: attached.weights_changed())
# A worker for CPUs has its own of these two, which do nothing.
after_sleep = _then(lambda attached, *_, **__: setattr(attached, "asleep", True))
after_wake_up = _then(lambda attached, tags=None: attached.wake(tags))


def runner_version(worker: Worker) -> str:
    """Which of vLLM's model runners a worker has."""
    return "V2" if worker.use_v2_model_runner else "V1"
