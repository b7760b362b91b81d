# SPDX-License-Identifier: Apache-2.0
"""The features by name that rows of `ngrpo.config.compatibility` combine."""

from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from ngrpo.config.feature_kinds import (
    ASYNC,
    CORRECTION,
    ESTIMATOR,
    GENERATED,
    KL,
    LONGEST,
    LOSS,
    MODEL,
    Combination,
    Feature,
    bounds,
    density,
    flag,
    other_than,
    part,
    sampling,
    when,
)
from ngrpo.config.lora_check import TARGET_MODULES
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream.openrlhf_flags import SIZES, Flags
from ngrpo.machine.upstream.rollout_sizes import prompts_drawn_at_once
from ngrpo.methods.advantages.base import VerifiedAdvantage
from perturbations.base import Perturbation
from perturbations.errors import UsageError

# --- what a run perturbs and replays ----------------------------------------------------------------

PERTURBATION = part("perturbation", counts=lambda perturbation: perturbation.active)
MASK = sampling("correct_mask")
CENTERING = sampling("score_centering")
ROUTING = when("--replay.routing", lambda combination: combination.run.replay_routing)


def _first_replayed(combination: Combination) -> str:
    for feature in (PERTURBATION, MASK, CENTERING, ROUTING):
        shown = feature.shown(combination)
        if shown:
            return shown
    return ""


REPLAYED = Feature(
    "--perturbation NAME, --sampling.correct_mask, --sampling.score_centering or --replay.routing", _first_replayed
)
DENSITY = density()
SCORE_ONLY = density("without a bounded ratio", lambda perturbation: perturbation.score_only)
TOKENLESS = density("without a drawn token at its positions", lambda perturbation: not perturbation.draws_token)
TOKENLESS_SCORE = density(
    "without ratio and token",
    lambda perturbation: perturbation.score_only and not perturbation.draws_token,
)
DRAWING = density("of the draws that choose the text", lambda perturbation: perturbation.draws_text)


def _unsampled(combination: Combination) -> str:
    """Shows the options with which the perturbation's text would be sampled, too."""
    perturbation = combination.part("perturbation")
    if perturbation is None or not perturbation.active or perturbation.has_density or perturbation.samples_text:
        return ""
    name = combination.called("perturbation")
    ways = [f"--perturbation.{option} {choice}" for option, choice in _sampling_choices(perturbation)]
    return f"{name} (its text is sampled with {' or '.join(ways)})" if ways else name


UNSAMPLED = Feature("--perturbation NAME with text that is not drawn from the policy", _unsampled)


def _sampling_choices(perturbation: Perturbation) -> list[tuple[str, object]]:
    """The options of a perturbation, each with a choice of theirs, with one of which its text is sampled."""
    options = []
    for entry in fields(perturbation):
        for choice in entry.metadata.get("choices") or ():
            with suppress(UsageError):  # the choice does not go with the other options
                if replace(perturbation, **{entry.name: choice}).samples_text:
                    options.append((entry.name, choice))
    return options


def _draws_by_formula(perturbation: Perturbation) -> bool:
    """Whether the probabilities of the perturbation's text are known, or no token of the text is weighed."""
    return perturbation.samples_text or perturbation.has_text_probabilities or perturbation.has_density


UNDRAWN = part(
    "perturbation",
    "with text that is not drawn",
    lambda perturbation: perturbation.active and not _draws_by_formula(perturbation) and not perturbation.draws_text,
)
UNKNOWN_DRAWS = part(
    "perturbation",
    "with text chosen by noise",
    lambda perturbation: perturbation.active and not _draws_by_formula(perturbation) and perturbation.draws_text,
)
UNRECORDED_DRAWS = part(
    "perturbation",
    "that draws the text, with until or protect",
    lambda perturbation: (
        perturbation.active
        and not perturbation.samples_text
        and perturbation.has_text_probabilities
        and (perturbation.until is not None or perturbation.protect is not None)
    ),
)
FROZEN_INPUT = part(
    "perturbation",
    "with freeze embedding or both",
    lambda perturbation: perturbation.freeze in ("embedding", "both"),
)
PARAMETERS = part("perturbation", "with parameters of its own", lambda perturbation: perturbation.has_parameters)

# --- OpenRLHF's loss and batches --------------------------------------------------------------------

GSPO = flag(LOSS, only="gspo")
WEIGHTS = flag(CORRECTION, off="off")
NO_WEIGHTS = when(f"{CORRECTION} off", lambda combination: not WEIGHTS.shown(combination))
BOUNDS_WITHOUT_ONE = bounds("that excludes 1", lambda low, high: not low <= 1.0 <= high)
LOWER_BOUND = bounds("with a lower bound", lambda low, high: low > 0.0)
DIVERGENCE = other_than("--algo.advantage.is_correction_gating", "ratio")
# The settings under which OpenRLHF 0.11.2 weighs each token's loss by a bounded π / π_rollout.
TOKEN_WEIGHTS = {
    CORRECTION: "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_gating": "ratio",
    LOSS: "ppo",
}


SYNCHRONOUS = when(f"no {ASYNC}", lambda combination: not combination.flags.has(ASYNC))


def _draws_ahead(combination: Combination) -> bool:
    batch_size = int(combination.value(SIZES[0]))
    generate_batch_size = int(combination.value("--rollout.vllm_generate_batch_size") or 0)
    return prompts_drawn_at_once(batch_size, generate_batch_size) > batch_size


DRAWN_AHEAD = when(f"--rollout.vllm_generate_batch_size above {SIZES[0]}", _draws_ahead)


def _small_batch(combination: Combination) -> str:
    prompts, responses, batch, _ = (int(combination.value(size)) for size in SIZES)
    samples = prompts * responses
    if batch % samples == 0:
        return ""
    sizes = f"{SIZES[0]} {prompts} × {SIZES[1]} {responses}"
    return f"--train.batch_size {batch}, no multiple of the {samples} samples of a rollout ({sizes}),"


SMALL_BATCH = Feature("--train.batch_size that is no multiple of a rollout's samples", _small_batch)


def _no_room_for_a_draft(combination: Combination) -> str:
    longest = combination.value(LONGEST)
    generated = combination.value(GENERATED)
    if not generated:
        return f"no {GENERATED}"
    return "" if 2 * int(generated) < int(longest) else f"{LONGEST} {longest} with {GENERATED} {generated}"


NO_ROOM_FOR_A_DRAFT = Feature(f"{LONGEST} of at most twice {GENERATED}", _no_room_for_a_draft)


def _kl_term(combination: Combination) -> str:
    coefficient = combination.value(KL)
    if not float(coefficient) > 0.0:
        return ""
    return f"{KL} {coefficient}" if combination.flags.has(KL) else f"{KL} {coefficient} (OpenRLHF's default)"


KL_TERM = Feature(f"{KL} above 0", _kl_term)


def _kl_in_reward(combination: Combination) -> str:
    if combination.parts:  # verl
        return "algorithm.use_kl_in_reward=True" if combination.arguments.get("kl_in_reward") else ""
    return "" if combination.flags.has("--algo.kl.use_loss") else KL_TERM.shown(combination)


KL_IN_REWARD = Feature("a KL term in the reward", _kl_in_reward)


def _has_late_reward(combination: Combination) -> bool:
    """Whether a reward model scores the responses, in place of a file, a server or a task."""
    flags = combination.flags
    if flags.has("--reward.model_name_or_path"):
        return True
    return not flags.value("--reward.remote_url") and not combination.run.task


def _shown_reward_model(combination: Combination) -> str:
    """The reward model that scores the responses: OpenRLHF loads none beside a file, a server or an agent."""
    flags = combination.flags
    name = flags.value("--reward.model_name_or_path")
    if not name or flags.has("--reward.remote_url", "--train.agent_func_path"):
        return ""
    return f"--reward.model_name_or_path {name}"


CRITIC = when(f"{ESTIMATOR} gae", lambda combination: combination.value(ESTIMATOR) == "gae")
NO_CRITIC = other_than(ESTIMATOR, "gae")
ONE_ANSWER = when(f"{SIZES[1]} 1", lambda combination: combination.value(SIZES[1]) == "1")
LATE_REWARD = when("a reward model", _has_late_reward)
REWARD_MODEL = Feature("--reward.model_name_or_path", _shown_reward_model)
REPRODUCIBLE = when("--reproducible", lambda combination: combination.run.reproducible)

# --- LoRA -------------------------------------------------------------------------------------------

LORA = flag("--ds.lora.rank", off="0")
WITHOUT_LORA = when("no --ds.lora.rank", lambda combination: not LORA.shown(combination))
_EMBEDDINGS = ("embed_tokens", "wte", "embeddings", "word_embeddings")


def adapts_embedding(lora: object) -> bool:
    """Whether adapters may hold a part for the input embedding; without target modules they may hold any."""
    if lora is None:
        return False
    modules = getattr(lora, "target_modules", None)
    return modules is None or any(_is_embedding(module) for module in modules)


def _is_embedding(module: str) -> bool:
    """Whether the last part of a module's name is that of a model's input embedding."""
    return module.split(".")[-1] in _EMBEDDINGS


def _lora_on_embedding(combination: Combination) -> str:
    if not LORA.shown(combination):
        return ""
    last_flag = combination.last(lambda candidate: candidate.name == TARGET_MODULES)
    modules = () if last_flag is None else last_flag.values
    embeddings = [module for module in modules if _is_embedding(module)]
    return f"{TARGET_MODULES} {' '.join(embeddings)}" if embeddings else ""


LORA_ON_EMBEDDING = Feature(f"{TARGET_MODULES} with the input embedding", _lora_on_embedding)

# --- methods ----------------------------------------------------------------------------------------

NOISE = part("policy_noise")
NOISE_BY_DIVERGENCE = part("policy_noise", "that follows the divergence", lambda noise: noise.follows_divergence)
SCHEDULE = part("sampling_schedule")
SCHEDULE_BY_TRAINING = part(
    "sampling_schedule", "that follows the training", lambda schedule: schedule.follows_training
)
EVALUATED_SCHEDULE = part("sampling_schedule", "with evaluation", lambda schedule: schedule.evaluation)
CREDIT = part("credit")
CREDIT_IN_LOSS = part("credit", "that acts in the loss", lambda credit: credit.acts_in_loss)
CREDIT_OF_TOKENS = part(
    "credit",
    "that reads log-probabilities or acts in the loss",
    lambda credit: credit.reads_log_probs or credit.acts_in_loss,
)
SECOND_ROUND = part("second_round")
REPLACED = part("second_round", "that trains responses to another prompt", lambda second: not second.refines)
REFINED = part("second_round", "that shows a draft", lambda second: second.refines)
FULL_GROUPS = part("second_round", "with group=all", lambda second: second.group == "all")

ADVANTAGE = part("advantage")
FOLLOWED = part(
    "advantage",
    "that follows a prompt over the run",
    lambda advantage: advantage.needs in ("counts", "values"),
)
BY_VALUES = part("advantage", "that keeps a value of each prompt", lambda advantage: advantage.needs == "values")
NO_ADVANTAGE = when("no --advantage", lambda combination: combination.part("advantage") is None)
_ESTIMATOR_OF_FLAGS = flag(ESTIMATOR, off="group_norm")
OTHER_ESTIMATOR = Feature(
    _ESTIMATOR_OF_FLAGS.name,
    # Only the user's own flags count: a preset or the advantage may add another estimator.
    lambda combination: _ESTIMATOR_OF_FLAGS.shown(Combination(flags=Flags(combination.flags.given))),
)
VERIFIED = part(
    "advantage",
    "of right and wrong responses",
    lambda advantage: isinstance(advantage, VerifiedAdvantage),
)
BEYOND_REWARDS = part(
    "advantage",
    "that needs more than rewards",
    lambda advantage: advantage.needs or advantage.leaves_out_overlong,
)
BY_HIDDEN = part("advantage", "that compares hidden states", lambda advantage: advantage.needs == "hidden")
BY_LOG_PROBS = part(
    "advantage",
    "that weighs responses by their probability",
    lambda advantage: advantage.needs == "log_probs",
)
CHANGING = part("advantage", "that changes over the run", lambda advantage: advantage.changes_over_run)

# --- attention and models ---------------------------------------------------------------------------

_ATTENTION = "--ds.attn_implementation"
_FLASH_2 = flag(_ATTENTION, only="flash_attention_2")


def _flash_attention(combination: Combination) -> str:
    return flag(_ATTENTION).shown(combination) if "flash" in combination.value(_ATTENTION) else ""


def _flash_attention_2(combination: Combination) -> str:
    # transformers 5.15 takes a kernel from the hub in the place of flash-attn where the package `kernels` is there.
    return _FLASH_2.shown(combination) if "kernels" in combination.missing else ""


FLASH_ATTENTION = Feature(f"{_ATTENTION} with flash", _flash_attention)
FLASH_ATTENTION_2 = Feature(_FLASH_2.name, _flash_attention_2)
WITHOUT_FLASH_ATTN = when(
    "an environment without flash-attn",
    lambda combination: combination.hardware == "cuda" and "flash-attn" in combination.missing,
)


AUXILIARY_LOSS = flag("--actor.aux_loss_coef", off="0")


def _dense(combination: Combination) -> str:
    if not (ROUTING.shown(combination) or AUXILIARY_LOSS.shown(combination)):  # the config is read for these alone
        return ""
    model = combination.flags.value(MODEL)
    path = architecture.find_config(model or "")
    if path is None:
        return ""
    config = architecture.read_config(path)
    text_config = config.get("text_config") or config
    has_experts = any(value for name, value in text_config.items() if "expert" in name)
    return "" if has_experts else f"the model {model}, which is dense,"


DENSE = Feature("a model without experts", _dense)


def _head_size(combination: Combination) -> str:
    if combination.hardware != "cpu":  # looking makes the model, which takes seconds
        return ""
    model = combination.flags.value(MODEL) or ""
    size = architecture.unfit_for_cpu(model)
    return f"the model {model!r} with attention heads of size {size}" if size else ""


HEAD_SIZE = Feature("a model with heads of a size that vLLM's CPU attention lacks", _head_size)

# --- engines of vLLM (verl and TRL: `trainer_features.py`) ------------------------------------------

IN_ENGINE = part("perturbation")


def _records_experts(combination: Combination) -> Any:
    additional_config = getattr(combination.settings, "additional_config", None) or {}
    return additional_config.get("routed_experts")


ROUTED_ENGINE = when('additional_config["routed_experts"]', _records_experts)


def _mixture_in_step(combination: Combination) -> str:
    ranks = getattr(combination.settings.parallel_config, "data_parallel_size", 1)
    is_mixture = combination.settings.model_config.is_moe
    return f"data_parallel_size={ranks} for a mixture of experts" if ranks > 1 and is_mixture else ""


MIXTURE_IN_STEP = Feature("data_parallel_size above 1 for a mixture of experts", _mixture_in_step)
