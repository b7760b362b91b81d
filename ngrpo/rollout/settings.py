"""The perturbation of an engine, read from vLLM's ``additional_config``, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.replay.buffers.base import ReplayBuffer

KEY = "perturbation"
REPLAY_BUFFER = "perturbation_replay_buffer"
"""Key of ``additional_config``: the replay buffer of each worker, by name or as a dictionary with name and options."""
SEEDED_DRAWS = "seeded_draws"
"""Key of ``additional_config``: draw every token from a counter-based stream, also where nothing is perturbed.

An engine that perturbs does so anyway. (vLLM 0.29's own seeds per request fail on a CPU with chunked prefills.)
"""

SAMPLING_MASKS = "sampling_masks"
"""Key of ``additional_config``: record which tokens sampling left at each position; implies seeded draws."""


def read(additional_config: Any) -> Perturbation | None:
    """The operator that ``additional_config={"perturbation": {...}}`` names; None where nothing is to be done.

    With ``"seeded_draws": True`` or ``"sampling_masks": True`` beside it, an operator that perturbs nothing is returned
    too.

    Raises:
        UsageError: for anything that is not a valid spec.
    """
    given = additional_config if isinstance(additional_config, dict) else {}
    spec, switches = given.get(KEY), {name: given.get(name, False) for name in (SEEDED_DRAWS, SAMPLING_MASKS)}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"additional_config[{name!r}]={value!r}: must be True or False.")
    seeded = any(switches.values())
    if spec is None and seeded:
        spec = {"name": "none"}
    if spec is None:
        return None
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise UsageError(
            f"additional_config[{KEY!r}]={spec!r}: must be a dictionary with a 'name', for example"
            " {'name': 'neighbor', 'rate': 0.1, 'k': 3}."
        )
    operator = registry.create(**spec)
    return operator if operator.active or seeded else None


def read_buffer(additional_config: Any) -> ReplayBuffer:
    """The replay buffer that ``additional_config`` names; one in the worker's memory where it names none.

    Raises:
        UsageError: for anything that is not a valid name or spec.
    """
    given = additional_config.get(REPLAY_BUFFER) if isinstance(additional_config, dict) else None
    spec = {"name": given or "memory"} if given is None or isinstance(given, str) else given
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise UsageError(
            f"additional_config[{REPLAY_BUFFER!r}]={given!r}: must be a name ({', '.join(registry.buffers.available())}"
            " or ./file.py:Name), or a dictionary with a 'name' and options."
        )
    return registry.buffers.create(**spec)


def request_arguments(params: Any) -> dict[str, Any]:
    """What a request says about its perturbation, in ``SamplingParams.extra_args["perturbation"]``.

    ``seed`` and ``sample`` name the trajectory, ``enabled: False`` leaves it unperturbed, ``record`` is the record of
    earlier turns.
    """
    return (getattr(params, "extra_args", None) or {}).get(KEY) or {}


def check_engine(config: Any, operator: Perturbation) -> None:
    """Refuses what would silently change the result.

    Args:
        config: a ``vllm.config.VllmConfig``.
        operator: the engine's perturbation.

    Raises:
        UsageError: with the setting and how to fix it.
    """
    problems = []
    if config.speculative_config is not None:
        problems.append("speculative decoding: the draft model would not see the perturbed inputs. Turn it off")
    if config.parallel_config.pipeline_parallel_size > 1:
        size = config.parallel_config.pipeline_parallel_size
        problems.append(
            f"pipeline_parallel_size={size}: only the first stage embeds. Set it to 1 and use tensor parallelism"
        )
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        problems.append("decode context parallelism. Set decode_context_parallel_size to 1")
    model = config.model_config
    if model.enable_prompt_embeds:
        problems.append("enable_prompt_embeds: inputs without tokens cannot be replayed. Turn it off")
    if model.is_multimodal_model:
        problems.append("a multimodal model: its inputs do not pass through one embedding. Use a text-only model")
    if model.runner_type != "generate":
        problems.append(f"runner={model.runner_type!r}: only generation is perturbed. Use runner='generate'")
    if model.is_encoder_decoder:
        problems.append("an encoder-decoder model. Use a decoder-only model")
    if config.kv_transfer_config is not None:
        problems.append("KV transfer between engines: perturbed blocks must not be shared. Leave it out")
    if problems:
        raise UsageError(f"perturbation {operator.name!r} does not work with " + "; nor with ".join(problems) + ".")
    operator.check_model(model.get_vocab_size())
