# SPDX-License-Identifier: Apache-2.0
"""The features of trainings by verl and by TRL that rows of `ngrpo.config.compatibility` combine."""

from types import SimpleNamespace
from typing import Any

from ngrpo.config.feature_kinds import Combination, Feature, both, none_of, verl, when
from ngrpo.machine.upstream.sampling import logit_changes

IN_VERL = when("verl", lambda combination: True)
_CORRECTION = "algorithm.rollout_correction"
VERL_CORRECTIONS = (verl(f"{_CORRECTION}.rollout_is"), verl(f"{_CORRECTION}.rollout_rs"))
"""verl's weights, and its rejections: both compare old log-probabilities with the rollout's."""
VERL_UNCORRECTED = when(
    "no +perturbation.correct_mask=true", lambda combination: not combination.arguments.get("correct_mask")
)
VERL_FILTERS = (
    verl("actor_rollout_ref.rollout.top_p", none_of(None, 1)),
    verl("actor_rollout_ref.rollout.top_k", none_of(None, 0, -1)),
)


def _verl_several_updates(combination: Combination) -> str:
    settings = combination.settings
    prompts = settings.data.train_batch_size
    of_update = settings.actor_rollout_ref.actor.ppo_mini_batch_size
    return f"ppo_mini_batch_size={of_update} with data.train_batch_size={prompts}" if of_update < prompts else ""


VERL_SEVERAL_UPDATES = Feature(
    "actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size", _verl_several_updates
)


def _verl_adapters(combination: Combination) -> str:
    model = combination.settings.actor_rollout_ref.model
    rank = model.lora.get("rank") or model.lora_rank
    return f"actor_rollout_ref.model.lora_rank={rank}" if rank and not model.lora.get("merge") else ""


VERL_ADAPTERS = Feature("actor_rollout_ref.model.lora_rank without lora.merge", _verl_adapters)
VERL_MASK = when("+perturbation.correct_mask=true", lambda combination: combination.arguments.get("correct_mask"))
IN_TRL = when("TRL", lambda combination: True)
WITHOUT_VLLM = when("use_vllm=False", lambda combination: not getattr(combination.settings, "use_vllm", False))
VLLM_SERVER = when(
    "a vLLM server", lambda combination: getattr(combination.settings, "vllm_mode", "colocate") != "colocate"
)


def _trl_kernels(combination: Combination) -> str:
    if getattr(combination.settings, "use_liger_kernel", False):
        return "use_liger_kernel"
    model_arguments = getattr(combination.settings, "model_init_kwargs", None) or {}
    return "model_init_kwargs['use_kernels']" if model_arguments.get("use_kernels") else ""


TRL_KERNELS = Feature("use_liger_kernel, or model_init_kwargs['use_kernels']", _trl_kernels)


def _trl_pictures(combination: Combination) -> str:
    for name in ("train_dataset", "eval_dataset"):
        dataset = combination.arguments.get(name)
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        for part_of_dataset in parts:
            columns = getattr(part_of_dataset, "column_names", None) or ()
            if {"image", "images"} & set(columns):
                return f"{name} with pictures"
    return ""


TRL_PICTURES = Feature("a dataset with a column image or images", _trl_pictures)


def _trl_requests(combination: Combination) -> str:
    given = getattr(combination.settings, "generation_kwargs", None) or {}
    extra_args = given.get("extra_args") or {}
    unchanged = {"seed": (None,), "n": (None, 1), "logprobs": (None, 0)}
    changed = {name: given[name] for name, values in unchanged.items() if given.get(name) not in values}
    if "perturbation" in extra_args:
        changed["extra_args"] = extra_args
    words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"generation_kwargs with {words}" if words else ""


TRL_REQUESTS = Feature("seed, n, logprobs or extra_args['perturbation'] in generation_kwargs", _trl_requests)
TRL_TENSOR_PARALLEL = when(
    "vllm_tensor_parallel_size above 1",
    lambda combination: getattr(combination.settings, "vllm_tensor_parallel_size", 1) > 1,
)
# TRL's comparisons of the rollout's probabilities with the trainer's, each with the values that turn it off.
_COMPARISONS_OFF: dict[str, tuple[object, ...]] = {
    "vllm_importance_sampling_correction": (None, False),
    "off_policy_mask_threshold": (None,),
}
# The filters of sampling, each with the values that turn it off.
_FILTERS_OFF: dict[str, tuple[object, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
}


def _filtered_weights(combination: Combination) -> str:
    """What TRL's sampling changes of the probabilities that it compares with the trainer's.

    With ``correct_mask=True`` the trainer's log-probabilities are of the filtered distribution too.
    """
    changes = _changes_of_sampling(combination.settings, correct_mask=combination.arguments.get("correct_mask", False))
    comparisons = []
    for name, off in _COMPARISONS_OFF.items():
        if getattr(combination.settings, name, None) not in off:
            comparisons.append(name)
    if not (changes and comparisons):
        return ""
    words = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return f"{words} with {' and '.join(comparisons)}"


def _changes_of_sampling(settings: object, *, correct_mask: bool) -> dict[str, Any]:
    """The settings of TRL's sampling that make its distribution another one than the trainer's, with their values."""
    generation_kwargs = getattr(settings, "generation_kwargs", None) or {}
    params = SimpleNamespace(**{**getattr(settings, "__dict__", {}), **generation_kwargs})
    changes = logit_changes(params)
    unchanged: dict[str, tuple[object, ...]] = {"vllm_structured_outputs_regex": (None,)}
    if not correct_mask:
        unchanged |= _FILTERS_OFF
    if "temperature" in generation_kwargs:  # the trainer divides its logits by TRL's own temperature
        unchanged["temperature"] = (getattr(settings, "temperature", 1.0),)
    for name, values in unchanged.items():
        value = getattr(params, name, None)
        if value not in values:
            changes[name] = value
    return changes


FILTERED_WEIGHTS = Feature(
    "top_p, top_k, min_p, a penalty, bias or grammar, or a temperature in generation_kwargs, with"
    " vllm_importance_sampling_correction or off_policy_mask_threshold",
    _filtered_weights,
)

_CRITIC = verl("critic.enable")
_CRITIC_OF_ESTIMATOR = both(
    verl("critic.enable", lambda value: value is None),
    verl("algorithm.adv_estimator", lambda name: name == "gae"),
)


def _verl_critic(combination: Combination) -> str:
    if _CRITIC.shown(combination):
        return "a critic (critic.enable=True)"
    return "a critic (algorithm.adv_estimator=gae)" if _CRITIC_OF_ESTIMATOR.shown(combination) else ""


VERL_CRITIC = Feature("a critic", _verl_critic)
VERL_ENGINES = tuple(
    f"actor_rollout_ref.{role}{config}" for role in ("actor", "ref") for config in (".fsdp_config", "")
)
