# SPDX-License-Identifier: Apache-2.0
"""The perturbation of an engine, read from vLLM's ``additional_config``, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ngrpo.config import compatibility
from ngrpo.config.features import Combination
from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import SamplingSchedule
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.replay.buffers import ReplayBuffer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "perturbation"
REPLAY_BUFFER = "perturbation_replay_buffer"
"""Key of ``additional_config``: the replay buffer of each worker, by name or as a dictionary with name and options."""
SEEDED_DRAWS = "seeded_draws"
"""Key of ``additional_config``: draw every token from a counter-based stream, also where nothing is perturbed.

An engine that perturbs does so anyway. (vLLM 0.29's own seeds per request fail on a CPU with chunked prefills.)
"""

SAMPLING_MASKS = "sampling_masks"
"""Key of ``additional_config``: record which tokens sampling left at each position; implies seeded draws."""

DEFERRED_PROBE = "deferred_probe"
"""Key of ``additional_config``: the engine's probe waits for ``collective_rpc("perturbation_probe")``.

Whoever asks gets its error, which is lost to them where an engine in a process of its own ends at its start. Without
being asked, the engine proves itself before its first request.
"""

SAMPLING_MASK_GIB = "sampling_mask_gib"
"""Key of ``additional_config``: the memory in GiB that the sampling masks of a worker's running requests may take."""

SAMPLING_SCHEDULE = "sampling_schedule"
"""Key of ``additional_config``: how temperatures change, a dictionary with name and options; implies seeded draws."""


def read(additional_config: object) -> Perturbation | None:
    """The perturbation that ``additional_config={"perturbation": {...}}`` names; None where nothing is to be done.

    With ``"seeded_draws": True``, ``"sampling_masks": True`` or a ``"sampling_schedule"`` beside it, one that perturbs
    nothing is returned too.

    Raises:
        UsageError: for anything that is not a valid spec.
    """
    config = additional_config if isinstance(additional_config, dict) else {}
    spec, switches = config.get(KEY), {name: config.get(name, False) for name in (SEEDED_DRAWS, SAMPLING_MASKS)}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"additional_config[{name!r}]={value!r}: must be True or False.")
    read_mask_limit(config)
    seeded = any(switches.values()) or read_schedule(config) is not None
    if spec is None and seeded:
        spec = {"name": "none"}
    if spec is None:
        return None
    perturbation = registry.create(
        **_named(KEY, spec, "a dictionary with a 'name', for example {'name': 'neighbor', 'rate': 0.1, 'k': 3}")
    )
    return perturbation if perturbation.active or seeded else None


def read_mask_limit(additional_config: Mapping[str, Any]) -> int | None:
    """The bytes that ``additional_config={"sampling_mask_gib": 16}`` allows; None where it says nothing.

    Raises:
        UsageError: for anything that is not a positive number.
    """
    value = additional_config.get(SAMPLING_MASK_GIB)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"additional_config[{SAMPLING_MASK_GIB!r}]={value!r}: must be a positive number, such as 8.")
    return int(value * 2**30)


def read_schedule(additional_config: object) -> SamplingSchedule | None:
    """The sampling schedule that ``additional_config={"sampling_schedule": {...}}`` names; None for none.

    Raises:
        UsageError: for anything that is not a valid spec.
    """
    spec = additional_config.get(SAMPLING_SCHEDULE) if isinstance(additional_config, dict) else None
    if spec is None:
        return None
    needed = (
        f"a dictionary with a 'name' ({', '.join(sampling_schedules.available())} or ./file.py:Name) and options, for"
        " example {'name': 'ead', 'tau_max': 1.2}"
    )
    return sampling_schedules.create(**_named(SAMPLING_SCHEDULE, spec, needed))


def fingerprint(perturbation: Perturbation, schedule: SamplingSchedule | None) -> str:
    """What must be the same in all processes of a run, of a perturbation and of a sampling schedule."""
    return perturbation.fingerprint() + ("" if schedule is None else f" {schedule.fingerprint()}")


def without_seed(additional_config: object) -> object:
    """The ``additional_config`` of an engine that differs in nothing but the perturbation's seed."""
    config = additional_config if isinstance(additional_config, dict) else {}
    spec = config.get(KEY)
    if not isinstance(spec, dict):
        return additional_config
    return {**config, KEY: {name: value for name, value in spec.items() if name != "seed"}}


def read_buffer(additional_config: object) -> ReplayBuffer:
    """The replay buffer that ``additional_config`` names; one in the worker's memory where it names none.

    Raises:
        UsageError: for anything that is not a valid name or spec.
    """
    entry = additional_config.get(REPLAY_BUFFER) if isinstance(additional_config, dict) else None
    spec = {"name": entry or "memory"} if entry is None or isinstance(entry, str) else entry
    needed = (
        f"a name ({', '.join(registry.buffers.available())} or ./file.py:Name), or a dictionary with a 'name' and"
        " options"
    )
    return registry.buffers.create(**_named(REPLAY_BUFFER, spec, needed))


def _named(key: str, spec: object, needed: str) -> dict[str, Any]:
    """The spec of something with a name; UsageError for anything else."""
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise UsageError(f"additional_config[{key!r}]={spec!r}: must be {needed}.")
    return spec


def request_arguments(params: object) -> dict[str, Any]:
    """What a request says about its perturbation, in ``SamplingParams.extra_args["perturbation"]``.

    ``seed`` and ``sample`` name the trajectory, ``enabled: False`` leaves it unperturbed, ``record`` is the record of
    earlier turns; ``training_step`` is what a sampling schedule goes by, and ``scheduled: False`` leaves it out;
    ``answer`` says which answer to its prompt it is, from 0, and ``answers`` of how many.
    """
    return (getattr(params, "extra_args", None) or {}).get(KEY) or {}


def check_engine(config: VllmConfig, perturbation: Perturbation) -> None:
    """Refuses what would silently change the result. docs/compatibility.md has the list.

    Args:
        config: a ``vllm.config.VllmConfig``.
        perturbation: the engine's perturbation.

    Raises:
        UsageError: with the setting, the reason and the fix.
    """
    compatibility.check(compatibility.ENGINE, Combination(parts={"perturbation": perturbation}, settings=config))
    perturbation.check_model(config.model_config.get_vocab_size())
