# SPDX-License-Identifier: Apache-2.0
"""A run as overrides of verl's command line: `ngrpo train … --print verl`.

What OpenRLHF and verl both have under another name is translated; what else OpenRLHF's flags say is named beside it and
has verl's default.
"""

from __future__ import annotations

from collections.abc import Mapping

from ngrpo.config import compatibility
from ngrpo.config.features import Combination
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import value_of
from perturbations import registry
from perturbations.errors import UsageError

MODE = "perturbed"
"""Name of our trainer among verl's (trainer.v1.trainer_mode)."""
_KEY = "perturbation"
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
_TRANSLATED = {
    *_SAME,
    "--algo.advantage.estimator",
    "--actor.policy_loss_type",
    "--algo.kl.init_coef",
    "--algo.kl.use_loss",
    "--algo.kl.estimator",
    "--actor.eps_clip",
    "--actor.eps_clip_low_high",
    "--train.batch_size",
}
_OWN = ("--ckpt.", "--logger.")  # of each trainer
_LOSSES = {"ppo": "vanilla", "gspo": "gspo"}
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_ESTIMATOR, _KL_COEFFICIENT = "--algo.advantage.estimator", "--algo.kl.init_coef"
_UNTRANSLATED = ("reproducible", "eval_at_start", "report_groups", "task")  # settings of a run that verl has not


def of_run(run: RunConfig, flags: Flags) -> tuple[list[str], list[str]]:
    """The overrides of a run, and the flags that have none. What OpenRLHF has as a default and verl has not is written.

    Args:
        run: what is asked for.
        flags: OpenRLHF's, the preset's among them.

    Raises:
        UsageError: for what only OpenRLHF's trainer has, for an estimator or a loss that verl has not, and for what
            would make another advantage of ours.
    """
    of_openrlhf = [kind.flag for kind in run_level_kinds() if kind.name in run.specs and kind.name != "advantage"]
    of_openrlhf += [f"--sampling.{name}" for name in run.sampling.given() if name != "top_k"]
    if of_openrlhf:
        raise UsageError(f"--print verl: {of_openrlhf[0]} is of OpenRLHF's trainer. Leave it out.")
    overrides: dict[str, object] = {key: flags.value(flag) for flag, key in _SAME.items() if flags.has(flag)}
    overrides |= {f"{_ROLLOUT}.{name}": value for name, value in run.engine_limits.items()}
    if run.sampling.top_k:
        overrides[f"{_ROLLOUT}.top_k"] = run.sampling.top_k
    compatibility.check(compatibility.VERL_ADVANTAGE, Combination(run=run, flags=flags))
    if run.advantage is None:
        estimator = value_of(flags, _ESTIMATOR)
        if estimator != "group_norm":
            default = "" if flags.has(_ESTIMATOR) else " (OpenRLHF's default)"
            raise UsageError(
                f"--print verl: {_ESTIMATOR} {estimator}{default} is not translated; group_norm is. Set it, or take"
                " --preset grpo or an --advantage."
            )
        overrides["algorithm.adv_estimator"] = "grpo"
    loss = _one_of(flags, "--actor.policy_loss_type", _LOSSES, "vanilla")
    if loss != "vanilla":
        overrides[f"{_ACTOR}.policy_loss.loss_mode"] = loss
    if flags.has("--train.batch_size"):  # OpenRLHF counts answers, verl prompts
        answers, each = (int(flags.value(f) or 1) for f in ("--train.batch_size", "--rollout.n_samples_per_prompt"))
        overrides[f"{_ACTOR}.ppo_mini_batch_size"] = max(answers // each, 1)
    low, high = _clip(flags)
    if low is not None:
        overrides |= {f"{_ACTOR}.clip_ratio_low": low, f"{_ACTOR}.clip_ratio_high": high}
    coefficient = float(value_of(flags, _KL_COEFFICIENT))
    if coefficient:
        kind = _one_of(flags, "--algo.kl.estimator", _KL, "kl")
        as_loss = flags.has("--algo.kl.use_loss")
        keys = (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
        in_reward = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        overrides |= dict(zip(keys if as_loss else in_reward, (True, coefficient, kind)))
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
    left += [
        flag
        for flag, entry in SETTINGS.items()
        if entry.name in _UNTRANSLATED and getattr(run, entry.name) != entry.default
    ]
    return [f"{_ROLLOUT}.name=vllm", *lines], left


def of_perturbation(spec: Mapping[str, object]) -> list[str]:
    """The overrides for a perturbation.

    Args:
        spec: as :func:`perturbations.create` takes it, with ``gap_limit`` and ``strict`` where not default.
    """
    overrides = [f"+{_KEY}.{name}={hydra(value)}" for name, value in spec.items()]
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


def _clip(flags: Flags) -> tuple[str | None, ...]:
    name = "--actor.eps_clip_low_high"
    if flags.has(name):
        values = [flag.values for flag in flags if flag.name == name][-1]
        if len(values) != 2:
            raise UsageError(f"{name} {' '.join(values)}".rstrip() + ": must be two numbers, the lower one first.")
        return values
    return (flags.value("--actor.eps_clip"),) * 2


def _one_of(flags: Flags, name: str, allowed: Mapping[str, str], default: str) -> str:
    value = flags.value(name)
    if value is None:
        return default
    if value not in allowed:
        raise UsageError(f"--print verl: {name} {value} is not translated; {', '.join(allowed)} are.")
    return allowed[value]
