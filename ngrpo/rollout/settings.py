# SPDX-License-Identifier: Apache-2.0
"""The perturbation of an engine, read from vLLM's ``additional_config``, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import SamplingSchedule
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.replay.buffers.base import ReplayBuffer

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, VllmConfig

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
    """Refuses what would silently change the result. docs/engines.md has the same list with the reasons.

    Args:
        config: a ``vllm.config.VllmConfig``.
        perturbation: the engine's perturbation.

    Raises:
        UsageError: with the setting, the reason and the fix.
    """
    problems = [problem for wrong, problem in _combinations(config) if wrong]
    if problems:
        raise UsageError(f"perturbation {perturbation.name!r} does not work with " + "; nor with ".join(problems) + ".")
    perturbation.check_model(config.model_config.get_vocab_size())


def _combinations(config: VllmConfig) -> Iterator[tuple[bool, str]]:
    """What is refused: whether this configuration asks for it, and the setting with the reason and the fix.

    A setting that only later releases of vLLM have counts as not asked for.
    """
    parallel, model = config.parallel_config, config.model_config

    def is_set(section: object, name: str) -> bool:
        return bool(getattr(section, name, False))

    yield (
        config.speculative_config is not None,
        "speculative decoding: the draft model would not see the perturbed inputs. Turn it off",
    )
    for name, reason in {
        "pipeline_parallel_size": "only the first stage embeds. Set it to 1 and use tensor parallelism",
        "decode_context_parallel_size": "the rows of a step are split over ranks. Set it to 1",
        "prefill_context_parallel_size": "the rows of a prefill are split over ranks. Set it to 1",
    }.items():
        size = getattr(parallel, name, 1)
        yield size > 1, f"{name}={size}: {reason}"
    yield (
        parallel.data_parallel_size > 1 and model.is_moe,
        f"data_parallel_size={parallel.data_parallel_size} for a mixture of experts: its ranks run in step, which was"
        " not tried. Set it to 1 and start an engine for each rank",
    )
    yield (
        getattr(config, "watermark_config", None) is not None,
        "watermarking: its draws of tokens would be replaced. Leave it out",
    )
    yield (
        is_set(parallel, "use_ubatching"),
        "dual-batch overlap: each half of a batch would read the override from its first row. Leave out enable_dbo and"
        " ubatch_size",
    )
    yield (
        is_set(parallel, "enable_batch_sharded_sampling"),
        "enable_batch_sharded_sampling: each rank would draw a part of the batch. Turn it off",
    )
    yield (
        is_set(config.compilation_config.pass_config, "enable_sp"),
        "the sequence-parallel pass: it rewrites what follows the embedding, across the override. Set"
        " compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}",
    )
    yield (
        _adapts_embedding(config.lora_config),
        "LoRA on the input embedding: its difference is added after the override. Give --lora-target-modules without"
        " embed_tokens",
    )
    yield model.enable_prompt_embeds, "enable_prompt_embeds: inputs without tokens cannot be replayed. Turn it off"
    yield (
        is_set(model, "enable_trace_replay"),
        "enable_trace_replay: it replaces tokens after they were drawn and recorded. Turn it off",
    )
    yield (
        is_set(model, "is_diffusion"),
        "a diffusion model: it draws many tokens in a step. Use an autoregressive model",
    )
    yield model.runner_type != "generate", f"runner={model.runner_type!r}: only generation is perturbed. Use 'generate'"
    yield model.is_encoder_decoder, "an encoder-decoder model. Use a decoder-only model"
    yield (
        config.kv_transfer_config is not None,
        "KV transfer between engines: perturbed blocks must not be shared. Leave it out",
    )


def _adapts_embedding(lora: LoRAConfig | None) -> bool:
    """Whether adapters may hold a part for the input embedding; without target modules they may hold any."""
    if lora is None:
        return False
    modules = getattr(lora, "target_modules", None)
    return modules is None or any(name.split(".")[-1] in ("embed_tokens", "wte", "embeddings") for name in modules)
