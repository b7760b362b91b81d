# SPDX-License-Identifier: Apache-2.0
"""Features of a run, vLLM's engine, verl and TRL, which rows of `ngrpo.config.compatibility` combine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream.openrlhf_flags import SIZES, Flags
from ngrpo.methods.advantages.base import VerifiedAdvantage
from perturbations.errors import UsageError

ASYNC = "--train.async_enable"
CORRECTION = "--algo.advantage.is_correction_level"
BOUNDS = "--algo.advantage.is_correction_threshold"
ESTIMATOR = "--algo.advantage.estimator"
KL = "--algo.kl.init_coef"
LOSS = "--actor.policy_loss_type"
MODEL = "--actor.model_name_or_path"
LONGEST, GENERATED = "--data.max_len", "--rollout.max_new_tokens"


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What is combined; a field with its default is not known, or not given.

    Attributes:
        run: a run of ``ngrpo train``.
        flags: OpenRLHF's flags, those of presets and methods among them.
        hardware: ``cpu`` or ``cuda``.
        missing: packages that are not installed, of ``flash-attn`` and ``kernels``.
        parts: extensions by their kind, where there is no run: of an engine, verl or TRL.
        settings: the configuration of vLLM, verl or TRL.
        arguments: further arguments of TRL's trainer, or settings of verl.
    """

    run: RunConfig = field(default_factory=RunConfig)
    flags: Flags = field(default_factory=Flags)
    hardware: str = ""
    missing: Sequence[str] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def part(self, kind: str) -> Any:
        """The extension of a kind; None where there is none."""
        return self.parts[kind] if kind in self.parts else self.run.part(kind)

    def called(self, kind: str) -> str:
        """The extension of a kind as its user names it."""
        name = self.part(kind).name
        return f"{kind} {name!r}" if self.parts else f"{KINDS[kind].flag} {name}"

    def value(self, flag: str) -> str:
        """A flag's value, or OpenRLHF's default of it."""
        return self.flags.or_default(flag)


@dataclass(frozen=True)
class Feature:
    """One side of a row: its name in the table, and how it was given, ``--train.batch_size 4``; empty where not."""

    name: str
    given: Callable[[Combination], str]


def when(name: str, holds: Callable[[Combination], Any]) -> Feature:
    """A feature that messages call by its name in the table."""
    return Feature(name, lambda asked: name if holds(asked) else "")


def flag(name: str, *, off: str = "", only: str = "") -> Feature:
    """A flag of OpenRLHF's.

    Args:
        name: the flag, or without dashes a part of its name.
        off: the values that do not count, with blanks between them.
        only: the only value that counts; empty for all.
    """

    def given(asked: Combination) -> str:
        named = (each for each in reversed([*asked.flags]) if name == each.name or name in each.name.lstrip("-"))
        found = next(named, None)
        if found is None:
            return ""
        value = found.values[0] if found.values else ""
        plain = value.lower()
        with suppress(ValueError):
            plain = f"{float(value):g}"
        counts = plain == only if only else plain not in off.split()
        return f"{found.name} {value}".rstrip() if counts else ""

    values = only or (f"other than {off.split()[0]}" if off else "")
    return Feature(f"{name} {values}".rstrip(), given)


def other_than(name: str, needed: str) -> Feature:
    """A flag with another value, or another default in OpenRLHF."""
    return Feature(
        f"{name} other than {needed}", lambda asked: f"{name} {value}" if (value := asked.value(name)) != needed else ""
    )


def part(kind: str, about: str = "", counts: Callable[[Any], bool] = lambda made: True) -> Feature:
    """An extension of a kind: any, or the ones that count, which ``about`` describes."""

    def given(asked: Combination) -> str:
        made = asked.part(kind)
        return asked.called(kind) if made is not None and counts(made) else ""

    return Feature(f"{KINDS[kind].flag} NAME {about}".rstrip(), given)


def density(about: str = "", counts: Callable[[Any], bool] = lambda made: True) -> Feature:
    """The density of a perturbation: any, or the ones that count."""
    owner = part("perturbation", counts=lambda made: made.has_density and counts(made))
    return Feature(
        f"a density {about}".rstrip(), lambda asked: (name := owner.given(asked)) and f"the density of {name}"
    )


def sampling(name: str) -> Feature:
    """An option of ``--sampling``."""

    def given(asked: Combination) -> str:
        value = asked.run.sampling.given().get(name)
        return "" if value is None else f"--sampling.{name}" + ("" if value is True else f" {value:g}")

    return Feature(f"--sampling.{name}", given)


def without(package: str) -> Feature:
    """An environment without a package."""
    return when(f"an environment without {package}", lambda asked: find_spec(package.replace("-", "_")) is None)


def hardware(name: str) -> Feature:
    """A hardware profile."""
    return when(f"--hardware {name}", lambda asked: asked.hardware == name)


def engine(path: str, counts: Callable[[Any], Any] = bool, *, name: str = "") -> Feature:
    """A setting of vLLM's configuration; one that only later releases have counts as not given."""
    setting = path.rpartition(".")[2]

    def given(asked: Combination) -> str:
        value = asked.settings
        for step in path.split("."):
            value = getattr(value, step, None)
        return (name or f"{setting}={value!r}") if counts(value) else ""

    return Feature(name or setting, given)


def verl(key: str, counts: Callable[[Any], bool] = bool) -> Feature:
    """A setting of verl's configuration."""

    def given(asked: Combination) -> str:
        from omegaconf import OmegaConf

        value = OmegaConf.select(asked.settings, key)
        return f"{key}={value}" if counts(value) else ""

    return Feature(key, given)


def both(one: Feature, other: Feature) -> Feature:
    """Two features together."""

    def given(asked: Combination) -> str:
        first, second = one.given(asked), other.given(asked)
        return f"{first} with {second}" if first and second else ""

    return Feature(f"{one.name} with {other.name}", given)


def above_one(value: object) -> bool:
    """Whether a setting splits the work; one that is not there does not."""
    return isinstance(value, int) and value > 1


def none_of(*values: object) -> Callable[[object], bool]:
    """Whether a setting is none of these."""
    return lambda value: value not in values


_EMBEDDINGS = ("embed_tokens", "wte", "embeddings", "word_embeddings")


def adapts_embedding(lora: Any) -> bool:
    """Whether adapters may hold a part for the input embedding; without target modules they may hold any."""
    modules = getattr(lora, "target_modules", None)
    return lora is not None and (modules is None or any(name.split(".")[-1] in _EMBEDDINGS for name in modules))


def bounds(name: str, holds: Callable[[float, float], bool]) -> Feature:
    """Bounds of the importance weights for which a condition holds; words that the parser refuses have none."""

    def given(asked: Combination) -> str:
        words = next((each.values for each in reversed([*asked.flags]) if each.name == BOUNDS), ("0.5", "5.0"))
        with suppress(ValueError, IndexError):
            numbers = [float(word) for word in words]
            low, high = (0.0, *numbers)[-2], numbers[-1]
            return f"{BOUNDS} {low:g} {high:g}" if holds(low, high) else ""
        return ""

    return Feature(f"{BOUNDS} {name}", given)


PERTURBATION = part("perturbation", counts=lambda made: made.active)
MASK = sampling("correct_mask")
ROUTING = when("--replay.routing", lambda asked: asked.run.replay_routing)
_REPLAYED = "--perturbation NAME, --sampling.correct_mask or --replay.routing"
REPLAYED = Feature(_REPLAYED, lambda asked: PERTURBATION.given(asked) or MASK.given(asked) or ROUTING.given(asked))
DENSITY = density()
SCORE_ONLY = density("without a bounded ratio", lambda made: made.score_only)
TOKENLESS = density("without a drawn token at its positions", lambda made: not made.draws_token)
TOKENLESS_SCORE = density("without ratio and token", lambda made: made.score_only and not made.draws_token)
DRAWING = density("of the draws that choose the text", lambda made: made.draws_text)


@partial(Feature, "--perturbation NAME with text that is not drawn from the policy")
def unsampled(asked: Combination) -> str:
    made, ways = asked.part("perturbation"), []
    if made is None or not made.active or made.has_density or made.samples_text:
        return ""
    for entry in fields(made):
        for choice in entry.metadata.get("choices") or ():
            with suppress(UsageError):
                if replace(made, **{entry.name: choice}).samples_text:
                    ways.append(f"--perturbation.{entry.name} {choice}")
    return asked.called("perturbation") + (f" (its text is sampled with {' or '.join(ways)})" if ways else "")


FROZEN_INPUT = part("perturbation", "with freeze embedding or both", lambda made: made.freeze in ("embedding", "both"))
PARAMETERS = part("perturbation", "with parameters of its own", lambda made: made.has_parameters)

GSPO = flag(LOSS, only="gspo")
WEIGHTS = flag(CORRECTION, off="off")
NO_WEIGHTS = when(f"{CORRECTION} off", lambda asked: not WEIGHTS.given(asked))
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
DRAWN_AHEAD = when(
    f"--rollout.vllm_generate_batch_size above {SIZES[0]}",
    lambda asked: int(asked.value("--rollout.vllm_generate_batch_size") or 0) > int(asked.value(SIZES[0])),
)


@partial(Feature, "--train.batch_size that is no multiple of a rollout's samples")
def small_batch(asked: Combination) -> str:
    prompts, responses, batch, _ = (int(asked.value(name)) for name in SIZES)
    if batch % (prompts * responses) == 0:
        return ""
    samples = f"the {prompts * responses} samples of a rollout ({SIZES[0]} {prompts} × {SIZES[1]} {responses})"
    return f"--train.batch_size {batch}, no multiple of {samples},"


@partial(Feature, f"{LONGEST} of at most twice {GENERATED}")
def no_room_for_a_draft(asked: Combination) -> str:
    longest, generated = asked.value(LONGEST), asked.value(GENERATED)
    if generated and 2 * int(generated) < int(longest):
        return ""
    return f"{LONGEST} {longest} with {GENERATED} {generated}" if generated else f"no {GENERATED}"


@partial(Feature, f"{KL} above 0")
def kl_term(asked: Combination) -> str:
    coefficient = asked.value(KL)
    if not float(coefficient) > 0.0:
        return ""
    return f"{KL} {coefficient}" + ("" if asked.flags.has(KL) else " (OpenRLHF's default)")


ONE_ANSWER = when(f"{SIZES[1]} 1", lambda asked: asked.value(SIZES[1]) == "1")
LATE_REWARD = when("a reward model", lambda asked: not (asked.flags.value("--reward.remote_url") or asked.run.task))
EVAL_AT_START = when("--eval.at_start", lambda asked: asked.run.eval_at_start)

LORA = flag("--ds.lora.rank", off="0")


@partial(Feature, "--ds.lora.target_modules with the input embedding")
def lora_on_embedding(asked: Combination) -> str:
    named = next((each.values for each in reversed([*asked.flags]) if each.name == "--ds.lora.target_modules"), ())
    tables = [module for module in named if module.split(".")[-1] in _EMBEDDINGS]
    return f"--ds.lora.target_modules {' '.join(tables)}" if tables and LORA.given(asked) else ""


NOISE, SCHEDULE = part("policy_noise"), part("sampling_schedule")
NOISE_BY_WEIGHTS = part("policy_noise", "that follows the divergence", lambda made: made.follows_divergence)
SCHEDULE_BY_WEIGHTS = part("sampling_schedule", "that follows the training", lambda made: made.follows_training)
EVALUATED_SCHEDULE = part("sampling_schedule", "with evaluation", lambda made: made.evaluation)
CREDIT = part("credit")
CREDIT_IN_LOSS = part("credit", "that acts in the loss", lambda made: made.acts_in_loss)
_OF_TOKENS = "that reads log-probabilities or acts in the loss"
CREDIT_OF_TOKENS = part("credit", _OF_TOKENS, lambda made: made.reads_log_probs or made.acts_in_loss)
SECOND_ROUND = part("second_round")
REPLACED = part("second_round", "that trains responses to another prompt", lambda made: not made.refines)
REFINED = part("second_round", "that shows a draft", lambda made: made.refines)
FULL_GROUPS = part("second_round", "with group=all", lambda made: made.group == "all")

ADVANTAGE = part("advantage")
FOLLOWED = part("advantage", "that follows a prompt over the run", lambda made: made.needs in ("counts", "values"))
BY_VALUES = part("advantage", "that keeps a value of each prompt", lambda made: made.needs == "values")
NO_ADVANTAGE = when("no --advantage", lambda asked: asked.part("advantage") is None)
_OTHER = flag(ESTIMATOR, off="group_norm")
OTHER_ESTIMATOR = Feature(_OTHER.name, lambda asked: _OTHER.given(Combination(flags=Flags(asked.flags.given))))
VERIFIED = part("advantage", "of right and wrong responses", lambda made: isinstance(made, VerifiedAdvantage))
BEYOND_REWARDS = part("advantage", "that needs more than rewards", lambda made: made.needs or made.leaves_out_overlong)
BY_HIDDEN = part("advantage", "that compares hidden states", lambda made: made.needs == "hidden")
BY_LOG_PROBS = part("advantage", "that weighs responses by their probability", lambda made: made.needs == "log_probs")
CHANGING = part("advantage", "that changes over the run", lambda made: made.changes_over_run)

_ATTENTION = "--ds.attn_implementation"
FLASH_ATTENTION = Feature(
    f"{_ATTENTION} with flash", lambda asked: flag(_ATTENTION).given(asked) * ("flash" in asked.value(_ATTENTION))
)
# transformers 5.15 takes a kernel from the hub in the place of flash-attn where the package `kernels` is there.
_FLASH_2 = flag(_ATTENTION, only="flash_attention_2")
FLASH_ATTENTION_2 = Feature(_FLASH_2.name, lambda asked: _FLASH_2.given(asked) * ("kernels" in asked.missing))
WITHOUT_FLASH_ATTN = when(
    "an environment without flash-attn", lambda asked: asked.hardware == "cuda" and "flash-attn" in asked.missing
)


@partial(Feature, "a model without experts")
def dense(asked: Combination) -> str:
    path = architecture.find_config(asked.flags.value(MODEL) or "") if ROUTING.given(asked) else None
    if path is None:
        return ""
    config = architecture.read_config(path)
    text = config.get("text_config") or config
    experts = (value for name, value in text.items() if "expert" in name)
    return "" if any(experts) else f"the model {asked.flags.value(MODEL)}, which is dense,"


@partial(Feature, "a model with heads of a size that vLLM's CPU attention lacks")
def head_size(asked: Combination) -> str:
    model = asked.flags.value(MODEL) or ""
    unfit = architecture.unfit_for_cpu(model) if asked.hardware == "cpu" else ""  # it makes the model: not for CUDA
    return unfit and f"the model {model!r} with attention heads of size {unfit}"


IN_ENGINE = part("perturbation")
ROUTED_ENGINE = when(
    'additional_config["routed_experts"]',
    lambda asked: (getattr(asked.settings, "additional_config", None) or {}).get("routed_experts"),
)


@partial(Feature, "data_parallel_size above 1 for a mixture of experts")
def mixture_in_step(asked: Combination) -> str:
    ranks, moe = getattr(asked.settings.parallel_config, "data_parallel_size", 1), asked.settings.model_config.is_moe
    return f"data_parallel_size={ranks} for a mixture of experts" if ranks > 1 and moe else ""


IN_VERL, IN_TRL = when("verl", lambda asked: True), when("TRL", lambda asked: True)
WITHOUT_VLLM = when("use_vllm=False", lambda asked: not getattr(asked.settings, "use_vllm", False))
VLLM_SERVER = when("a vLLM server", lambda asked: getattr(asked.settings, "vllm_mode", "colocate") != "colocate")
LIGER = when("use_liger_kernel", lambda asked: getattr(asked.settings, "use_liger_kernel", False))


@partial(when, "top_p, top_k, min_p or repetition_penalty with vllm_importance_sampling_correction")
def filtered_weights(asked: Combination) -> bool:
    """Whether TRL weighs tokens by importance that filters of the rollout's sampling or a penalty have changed."""
    neutral = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
    filtered = any(getattr(asked.settings, name, None) not in values for name, values in neutral.items())
    return filtered and bool(getattr(asked.settings, "vllm_importance_sampling_correction", False))


@partial(Feature, "a KL term in the reward")
def kl_in_reward(asked: Combination) -> str:
    if asked.parts:
        return "algorithm.use_kl_in_reward=True" if asked.arguments.get("kl_in_reward") else ""
    return "" if asked.flags.has("--algo.kl.use_loss") else kl_term.given(asked)


@partial(Feature, "a critic")
def critic(asked: Combination) -> str:
    enabled, gae = verl("critic.enable"), verl("algorithm.adv_estimator", lambda name: name == "gae")
    default = verl("critic.enable", lambda value: value is None)
    return "a critic (algorithm.adv_estimator=gae)" if enabled.given(asked) or both(default, gae).given(asked) else ""


VERL_ENGINES = tuple(f"actor_rollout_ref.{role}{of}" for role in ("actor", "ref") for of in (".fsdp_config", ""))
