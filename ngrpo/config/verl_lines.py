# SPDX-License-Identifier: Apache-2.0
"""A run as overrides of verl's command line, `ngrpo train … --print verl`, with the flags that have no translation."""

import re
from collections.abc import Mapping

from ngrpo.config import compatibility, kinds
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import ESTIMATOR, KL, LOSS, Combination
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import UsageError, registry

MODE = "perturbed"
"""Name of our trainer among verl's (trainer.v1.trainer_mode)."""
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
# Flag of OpenRLHF to key of verl, where the value is the same.
_SAME = {
    "--actor.model_name_or_path": "actor_rollout_ref.model.path",
    "--rollout.n_samples_per_prompt": f"{_ROLLOUT}.n",
    "--rollout.batch_size": "data.train_batch_size",
    "--rollout.max_new_tokens": "data.max_response_length",
    "--rollout.temperature": f"{_ROLLOUT}.temperature",
    "--rollout.top_p": f"{_ROLLOUT}.top_p",
    "--actor.adam.lr": f"{_ACTOR}.optim.lr",
    "--train.max_epochs": f"{_ACTOR}.ppo_epochs",
    "--train.num_episodes": "trainer.total_epochs",
    "--actor.loss_agg_mode": f"{_ACTOR}.loss_agg_mode",
    "--vllm.tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
}
_CLIP = "--actor.eps_clip"
_CLIP_BOUNDS = "--actor.eps_clip_low_high"
_BATCH = "--train.batch_size"
_KL_LOSS = "--algo.kl.use_loss"
_KL_ESTIMATOR = "--algo.kl.estimator"
_TRANSLATED = {*_SAME, ESTIMATOR, LOSS, KL, _KL_LOSS, _KL_ESTIMATOR, _CLIP, _CLIP_BOUNDS, _BATCH}
# OpenRLHF's and verl's checkpoints and logs have settings of their own, so nothing is said about these flags.
_OF_EACH_TRAINER = ("--ckpt.", "--logger.")
# Settings of a run that verl lacks.
_UNTRANSLATED_SETTINGS = ("reproducible", "eval_at_start", "report_groups", "task")


def of_run(complete: CompleteRun) -> tuple[list[str], list[str]]:
    """The overrides of a run with the flags of its algorithm's layers, and the flags without an override.

    Raises:
        UsageError: for methods, estimators and losses that verl lacks, and for flags that would change our advantage.
    """
    run = complete.run
    flags = complete.flags
    _check_methods(run)
    compatibility.check(compatibility.VERL_ADVANTAGE, Combination(run=run, flags=flags))
    if run.advantage is None:
        _check_estimator(flags)

    overrides = _of_rollout(run, flags)
    if run.advantage is None:
        overrides["algorithm.adv_estimator"] = "grpo"
    overrides |= _of_loss(flags)
    overrides |= _of_clip(flags)
    overrides |= _of_kl(flags)
    # FSDP1, verl's default, is untested here.
    lines = [f"{_ROLLOUT}.name=vllm", f"{_ACTOR}.strategy=fsdp2"]
    lines += [f"{key}={hydra(value)}" for key, value in overrides.items()]
    if run.advantage is not None:
        lines += _of_advantage(run.specs["advantage"])
    if run.spec is not None:
        lines += of_perturbation(_changed_spec(run, run.spec))
    return lines, _untranslated(run, flags)


def _of_rollout(run: RunConfig, flags: Flags) -> dict[str, object]:
    """The overrides for flags whose value is the same in verl, the limits of engines, and the rendering of prompts."""
    overrides: dict[str, object] = {}
    for flag, key in _SAME.items():
        if flags.has(flag):
            overrides[key] = flags.value(flag)
    for name, limit in run.engine_limits.items():
        overrides[f"{_ROLLOUT}.{name}"] = limit
    for name, value in conversation.template_arguments(run.chat_template_kwargs).items():
        overrides[f"+data.apply_chat_template_kwargs.{name}"] = value
    if run.sampling.top_k:
        overrides[f"{_ROLLOUT}.top_k"] = run.sampling.top_k
    return overrides


def _of_loss(flags: Flags) -> dict[str, object]:
    """The overrides for the kind of loss and for the batch of an update."""
    overrides: dict[str, object] = {}
    if _translated(flags, LOSS, {"ppo": "vanilla", "gspo": "gspo"}) == "gspo":
        overrides[f"{_ACTOR}.policy_loss.loss_mode"] = "gspo"
    if flags.has(_BATCH):  # OpenRLHF counts responses, verl prompts
        batch = int(flags.value(_BATCH) or 1)
        responses_per_prompt = int(flags.value("--rollout.n_samples_per_prompt") or 1)
        overrides[f"{_ACTOR}.ppo_mini_batch_size"] = max(batch // responses_per_prompt, 1)
    return overrides


def _of_advantage(spec: Mapping[str, object]) -> list[str]:
    """The overrides for one of our advantages."""
    lines = [f"algorithm.adv_estimator={spec['name']}"]
    lines += [f"+advantage.{name}={hydra(value)}" for name, value in spec.items() if name != "name"]
    return lines


def _check_methods(run: RunConfig) -> None:
    """Raises ``UsageError`` for a method or a setting of sampling that only OpenRLHF's trainer has here."""
    for kind in kinds.run_level_kinds():
        if kind.name in run.specs and kind.name != "advantage":
            raise UsageError(f"--print verl: {kind.flag} is of OpenRLHF's trainer. Leave it out.")
    for name in run.sampling.given():
        if name != "top_k":
            raise UsageError(f"--print verl: --sampling.{name} is of OpenRLHF's trainer. Leave it out.")


def _check_estimator(flags: Flags) -> None:
    """Raises ``UsageError`` for an estimator of OpenRLHF other than that of GRPO."""
    estimator = flags.or_default(ESTIMATOR)
    if estimator != "group_norm":
        origin = "" if flags.has(ESTIMATOR) else " (OpenRLHF's default)"
        raise UsageError(
            f"--print verl: {ESTIMATOR} {estimator}{origin} is not translated; group_norm is. Set it, or take --preset"
            " grpo or an --advantage."
        )


def _of_clip(flags: Flags) -> dict[str, object]:
    """The overrides for the clip range; none for OpenRLHF's default, which is verl's too."""
    bounds = [flag.values for flag in flags if flag.name == _CLIP_BOUNDS]
    if not bounds:
        clip = flags.value(_CLIP)
        if clip is None:
            return {}
        return {f"{_ACTOR}.clip_ratio_low": clip, f"{_ACTOR}.clip_ratio_high": clip}
    last = bounds[-1]  # argparse takes the last one of several
    if len(last) != 2:
        as_written = f"{_CLIP_BOUNDS} {' '.join(last)}".rstrip()
        raise UsageError(f"{as_written}: must be two numbers, the lower one first.")
    low, high = last
    return {f"{_ACTOR}.clip_ratio_low": low, f"{_ACTOR}.clip_ratio_high": high}


def _of_kl(flags: Flags) -> dict[str, object]:
    """The overrides for the KL term, in the loss or in the reward; none without a coefficient."""
    coefficient = float(flags.or_default(KL))
    if not coefficient:
        return {}
    estimator = _translated(flags, _KL_ESTIMATOR, {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}) or "kl"
    if flags.has(_KL_LOSS):
        return {
            f"{_ACTOR}.use_kl_loss": True,
            f"{_ACTOR}.kl_loss_coef": coefficient,
            f"{_ACTOR}.kl_loss_type": estimator,
        }
    return {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": coefficient,
        "algorithm.kl_penalty": estimator,
    }


def _changed_spec(run: RunConfig, spec: Mapping[str, object]) -> dict[str, object]:
    """The perturbation's name, and what is not at its default."""
    defaults = registry.create(str(spec["name"])).spec()
    changed = {name: value for name, value in spec.items() if name == "name" or defaults.get(name) != value}
    if run.gap_limit != RunConfig.gap_limit:
        changed["gap_limit"] = run.gap_limit
    if run.strict != RunConfig.strict:
        changed["strict"] = run.strict
    return changed


def _untranslated(run: RunConfig, flags: Flags) -> list[str]:
    """The flags that have no override."""
    untranslated = []
    for flag in flags:
        if flag.name not in _TRANSLATED and not flag.name.startswith(_OF_EACH_TRAINER):
            untranslated.append(" ".join(flag.argv))
    for name, setting in SETTINGS.items():
        if setting.name in _UNTRANSLATED_SETTINGS and getattr(run, setting.name) != setting.default:
            untranslated.append(name)
    return untranslated


def of_perturbation(spec: Mapping[str, object]) -> list[str]:
    """The overrides for a perturbation.

    Args:
        spec: as :func:`perturbations.create` takes it, with ``gap_limit`` and ``strict`` where not default.
    """
    overrides = [f"+perturbation.{name}={hydra(value)}" for name, value in spec.items()]
    return [f"trainer.v1.trainer_mode={MODE}", *overrides]


def hydra(value: object) -> str:
    """A value in the grammar of Hydra's overrides, where a string may need quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{hydra(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(hydra, value))}]"
    text = str(value)
    is_other_value = text.lower() in ("true", "false", "null")
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text) and not is_other_value:
        return text
    # A backslash escapes a quote, and a backslash before a quote, and nothing else.
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"


def _translated(flags: Flags, name: str, translations: Mapping[str, str]) -> str | None:
    """The translation of a flag's value; None where the flag is absent."""
    value = flags.value(name)
    if value is None:
        return None
    if value not in translations:
        raise UsageError(f"--print verl: {name} {value} is not translated; {', '.join(translations)} are.")
    return translations[value]
