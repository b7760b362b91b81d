# SPDX-License-Identifier: Apache-2.0
"""A run as overrides of verl's command line, `ngrpo train … --print verl`, with the flags that have no translation."""

from collections.abc import Mapping

from ngrpo.config import compatibility, kinds
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.features import ESTIMATOR, KL, LOSS, Combination
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import UsageError, registry

MODE = "perturbed"
"""Name of our trainer among verl's (trainer.v1.trainer_mode)."""
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
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
_CLIP, _CLIPS, _BATCH = "--actor.eps_clip", "--actor.eps_clip_low_high", "--train.batch_size"
_KL_LOSS, _KL_KIND = "--algo.kl.use_loss", "--algo.kl.estimator"
_TRANSLATED = {*_SAME, ESTIMATOR, LOSS, KL, _KL_LOSS, _KL_KIND, _CLIP, _CLIPS, _BATCH}
_OWN = ("--ckpt.", "--logger.")  # of each trainer
_UNTRANSLATED = ("reproducible", "eval_at_start", "report_groups", "task")  # settings of a run that verl lacks


def of_run(complete: CompleteRun) -> tuple[list[str], list[str]]:
    """The overrides of a run with the flags of its algorithm's layers, and the flags without an override.

    Raises:
        UsageError: for methods, estimators and losses that verl lacks, and for flags that would change our advantage.
    """
    run, flags = complete.run, complete.flags
    of_openrlhf = [kind.flag for kind in kinds.run_level_kinds() if kind.name in run.specs and kind.name != "advantage"]
    of_openrlhf += [f"--sampling.{name}" for name in run.sampling.given() if name != "top_k"]
    if of_openrlhf:
        raise UsageError(f"--print verl: {of_openrlhf[0]} is of OpenRLHF's trainer. Leave it out.")
    overrides: dict[str, object] = {key: flags.value(flag) for flag, key in _SAME.items() if flags.has(flag)}
    overrides |= {f"{_ROLLOUT}.{name}": value for name, value in run.engine_limits.items()}
    for name, value in conversation.template_arguments(run.chat_template_kwargs).items():
        overrides[f"+data.apply_chat_template_kwargs.{name}"] = value
    if run.sampling.top_k:
        overrides[f"{_ROLLOUT}.top_k"] = run.sampling.top_k
    compatibility.check(compatibility.VERL_ADVANTAGE, Combination(run=run, flags=flags))
    if run.advantage is None:
        estimator = flags.or_default(ESTIMATOR)
        if estimator != "group_norm":
            default = "" if flags.has(ESTIMATOR) else " (OpenRLHF's default)"
            fix = "Set it, or take --preset grpo or an --advantage."
            raise UsageError(f"--print verl: {ESTIMATOR} {estimator}{default} is not translated; group_norm is. {fix}")
        overrides["algorithm.adv_estimator"] = "grpo"
    if _one_of(flags, LOSS, {"ppo": "vanilla", "gspo": "gspo"}) == "gspo":
        overrides[f"{_ACTOR}.policy_loss.loss_mode"] = "gspo"
    if flags.has(_BATCH):  # OpenRLHF counts responses, verl prompts
        responses, each = (int(flags.value(f) or 1) for f in (_BATCH, "--rollout.n_samples_per_prompt"))
        overrides[f"{_ACTOR}.ppo_mini_batch_size"] = max(responses // each, 1)
    clips = [(flags.value(_CLIP),) * 2, *(flag.values for flag in flags if flag.name == _CLIPS)][-1]
    if len(clips) != 2:
        raise UsageError(f"{_CLIPS} {' '.join(clips)}".rstrip() + ": must be two numbers, the lower one first.")
    if clips[0] is not None:
        overrides |= dict(zip((f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"), clips))
    if coefficient := float(flags.or_default(KL)):
        kind = _one_of(flags, _KL_KIND, {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}) or "kl"
        keys = (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
        if not flags.has(_KL_LOSS):
            keys = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        overrides |= dict(zip(keys, (True, coefficient, kind)))
    lines = [f"{key}={hydra(value)}" for key, value in overrides.items()]
    if run.advantage is not None:
        spec = dict(run.specs["advantage"])
        lines += [f"algorithm.adv_estimator={spec.pop('name')}"]
        lines += [f"+advantage.{name}={hydra(value)}" for name, value in spec.items()]
    if run.spec is not None:
        usual = registry.create(run.spec["name"]).spec()
        own = {name: value for name, value in run.spec.items() if name == "name" or usual.get(name) != value}
        settings = {"gap_limit": (run.gap_limit, RunConfig.gap_limit), "strict": (run.strict, RunConfig.strict)}
        own |= {name: value for name, (value, default) in settings.items() if value != default}
        lines += of_perturbation(own)
    left = [" ".join(flag.argv) for flag in flags if flag.name not in _TRANSLATED and not flag.name.startswith(_OWN)]
    ours = ((flag, entry) for flag, entry in SETTINGS.items() if entry.name in _UNTRANSLATED)
    left += [flag for flag, entry in ours if getattr(run, entry.name) != entry.default]
    return [f"{_ROLLOUT}.name=vllm", *lines], left


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
        return "{" + ",".join(f"{name}:{hydra(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(hydra, value))}]"
    text = str(value)
    plain = bool(text) and all(c.isalnum() or c in "_./-" for c in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _one_of(flags: Flags, name: str, allowed: Mapping[str, str]) -> str | None:
    """The translation of a flag's value; None where the flag is absent."""
    value = flags.value(name)
    if value is not None and value not in allowed:
        raise UsageError(f"--print verl: {name} {value} is not translated; {', '.join(allowed)} are.")
    return None if value is None else allowed[value]
