# SPDX-License-Identifier: Apache-2.0
"""The perturbation of an engine, read from vLLM's ``additional_config``, and what it cannot be combined with.

The functions raise ``UsageError`` for invalid entries.
"""

import math
from collections.abc import Mapping
from typing import Any

from ngrpo.config import compatibility
from ngrpo.config.feature_kinds import Combination
from ngrpo.machine.upstream.types import VllmConfig
from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import SamplingSchedule
from perturbations import Perturbation, ReplayBuffer, UsageError, registry

# --- keys of ``additional_config``

# The perturbation, a dictionary with name and options. Also the key of a request's ``extra_args``.
KEY = "perturbation"
# The replay buffer of each worker, by name or as a dictionary with name and options.
REPLAY_BUFFER = "perturbation_replay_buffer"
# Draw every token from a counter-based stream, also where nothing is perturbed. An engine that perturbs does so anyway.
# (vLLM 0.29's own seeds per request fail on a CPU with chunked prefills.)
SEEDED_DRAWS = "seeded_draws"
# Record which tokens sampling left at each position; implies seeded draws.
SAMPLING_MASKS = "sampling_masks"
# Record log π over the whole vocabulary. Otherwise it is over the tokens that sampling left, where these are recorded.
FULL_LOG_PROBS = "full_log_probs"
# Record which experts each token was sent to; implies seeded draws.
ROUTED_EXPERTS = "routed_experts"
# The memory in GiB that the sampling masks of a worker's running requests may take.
SAMPLING_MASK_GIB = "sampling_mask_gib"
# How temperatures change, a dictionary with name and options; implies seeded draws.
SAMPLING_SCHEDULE = "sampling_schedule"
# The start-up check waits for ``collective_rpc("perturbation_check")``, or else for the first request. Its error then
# reaches the caller; it would be lost where an engine in a process of its own ends during its start.
DEFERRED_CHECK = "deferred_check"

_PERTURBATION = "a dictionary with a 'name', for example {'name': 'neighbor', 'rate': 0.1, 'k': 3}"


def read(additional_config: object) -> Perturbation | None:
    """The engine's perturbation; ``none`` if only seeded draws are requested; None for an engine that stays vLLM's."""
    config = _dictionary(additional_config)
    switches = {name: config.get(name, False) for name in (SEEDED_DRAWS, SAMPLING_MASKS, ROUTED_EXPERTS)}
    for name, value in {**switches, FULL_LOG_PROBS: config.get(FULL_LOG_PROBS, False)}.items():
        if not isinstance(value, bool):
            raise UsageError(f"additional_config[{name!r}]={value!r}: must be True or False.")
    read_mask_limit(config)
    seeded = any(switches.values()) or read_schedule(config) is not None
    spec = config.get(KEY)
    if spec is None:
        return registry.create("none") if seeded else None
    perturbation = registry.create(**named(f"additional_config[{KEY!r}]", spec))
    return perturbation if perturbation.active or seeded else None


def read_mask_limit(additional_config: Mapping[str, Any]) -> int | None:
    """The bytes that ``additional_config={"sampling_mask_gib": 16}`` allows; None without this key."""
    value = additional_config.get(SAMPLING_MASK_GIB)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"additional_config[{SAMPLING_MASK_GIB!r}]={value!r}: must be a positive number, such as 8.")
    return int(value * 2**30)


def read_schedule(additional_config: object) -> SamplingSchedule | None:
    """The sampling schedule that ``additional_config={"sampling_schedule": {...}}`` names; None for none."""
    spec = _dictionary(additional_config).get(SAMPLING_SCHEDULE)
    if spec is None:
        return None
    names = ", ".join(sampling_schedules.available())
    expected = (
        f"a dictionary with a 'name' ({names} or ./file.py:Name) and options, for example"
        " {'name': 'ead', 'tau_max': 1.2}"
    )
    return sampling_schedules.create(**named(f"additional_config[{SAMPLING_SCHEDULE!r}]", spec, expected))


def read_buffer(additional_config: object) -> ReplayBuffer:
    """The replay buffer that ``additional_config`` names; one in the worker's memory where it names none."""
    spec = _dictionary(additional_config).get(REPLAY_BUFFER)
    if spec is None or isinstance(spec, str):
        spec = {"name": spec or "memory"}
    names = ", ".join(registry.buffers.available())
    expected = f"a name ({names} or ./file.py:Name), or a dictionary with a 'name' and options"
    return registry.buffers.create(**named(f"additional_config[{REPLAY_BUFFER!r}]", spec, expected))


def _dictionary(additional_config: object) -> dict[str, Any]:
    """vLLM's ``additional_config``; empty where it is an object of another plugin."""
    return additional_config if isinstance(additional_config, dict) else {}


def named(where: str, spec: object, expected: str = _PERTURBATION) -> Mapping[str, Any]:
    """A spec, a dictionary with a name; UsageError for another value, with its place and what is expected there."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise UsageError(f"{where}={spec!r}: must be {expected}.")
    return spec


def fingerprint(perturbation: Perturbation, schedule: SamplingSchedule | None) -> str:
    """Of a perturbation and a sampling schedule: equal in all processes of a run."""
    if schedule is None:
        return perturbation.fingerprint()
    return f"{perturbation.fingerprint()} {schedule.fingerprint()}"


def without_seed(additional_config: object) -> object:
    """The ``additional_config`` without the perturbation's seed."""
    config = _dictionary(additional_config)
    spec = config.get(KEY)
    if not isinstance(spec, dict):
        return additional_config
    seedless = {name: value for name, value in spec.items() if name != "seed"}
    return {**config, KEY: seedless}


def request_arguments(params: object) -> dict[str, Any]:
    """A request's ``SamplingParams.extra_args["perturbation"]``.

    - ``seed`` and ``sample`` name the trajectory. Without a seed, the prompt and the number of the response to it do;
      ``round`` numbers the responses afresh, so that a resumed training draws as one that was not interrupted.
    - ``enabled: False`` leaves it unperturbed.
    - ``record`` is the record of earlier turns. ``ahead: True`` replays it on generated positions too; only the
      start-up check sets this.
    - ``training_step`` is what a sampling schedule goes by; ``scheduled: False`` leaves the schedule out.
    - ``answer`` is the number of the response among those to its prompt, from 0, and ``answers`` how many these are.
    """
    return (getattr(params, "extra_args", None) or {}).get(KEY) or {}


def check_engine(config: VllmConfig, perturbation: Perturbation) -> None:
    """Refuses, with a ``UsageError``, settings that would silently change the result (docs/compatibility.md)."""
    compatibility.check(compatibility.ENGINE, Combination(parts={"perturbation": perturbation}, settings=config))
    perturbation.check_model(config.model_config.get_vocab_size())
