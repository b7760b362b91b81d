# SPDX-License-Identifier: Apache-2.0
"""The flags with which a comparison calls ``ngrpo eval`` and ``ngrpo diagnose``, fitted to its training flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ngrpo.config.arms import Arm
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, Flags
from ngrpo.methods.scoring import reward_files
from ngrpo.workbench.diagnose import policy_of
from perturbations.errors import UsageError


def evaluation_flags(options: Flags, shared: Flags, model: str) -> tuple[str, ...] | None:
    """The flags of ``ngrpo eval`` for each trained model."""
    for flag in options:
        if flag.name in ("--model", "--out") or flag.name.startswith("--perturbation"):
            raise UsageError(f"--eval.{flag.name[2:]} is set by ngrpo compare for each run; leave it out.")
    options = options.with_defaults(_problems(options, shared, "--eval.dataset"))
    if not options.has("--data", "--task") or options.value("--data") == "none":
        return None
    return tuple(options.with_defaults({"--n": "8", **packaged.evaluation_flags(model)}).argv)


def diagnosis_flags(options: Flags, shared: Flags, arms: Sequence[Arm]) -> tuple[str, ...] | None:
    """The flags of ``ngrpo diagnose``, which draws as the rollouts of the training do."""
    rollout_settings = {
        "--max-tokens": "--rollout.max_new_tokens",
        "--temperature": "--rollout.temperature",
        "--top-p": "--rollout.top_p",
    }
    options = options.with_defaults(
        {
            **_problems(options, shared, "--data.prompt_dataset"),
            "--prompts": "8",
            **values_of(shared, rollout_settings),
            **({} if options.has(*conversation.EVALUATION_FLAGS) else conversation.flags_like(shared)),
        }
    )
    prompts = options.value("--prompts") or ""
    if not prompts.isdecimal():
        raise UsageError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    # A diagnosis has one chat template: an arm with its own is left out.
    lines = dict.fromkeys(_drawn_line(arm) for arm in arms if conversation.FLAG not in arm.training_flags)
    if not lines or int(prompts) == 0:
        return None
    argv = list(options.argv)
    for line in lines:
        argv += ["--strategy", line]
    return tuple(argv)


def _problems(options: Flags, shared: Flags, dataset: str) -> dict[str, str]:
    """The training's problems where options name none: its task, or a flag's dataset.

    A dataset is read with the columns, prompts and reward of the training; :func:`scorer_notes` warns of a reward that
    cannot be a scorer.
    """
    if options.has("--data", "--task"):
        return {}
    if not takes_dataset(options, shared, dataset):
        return values_of(shared, {"--task": "--task"})
    if shared.value("--data.image_key"):
        raise UsageError(
            f"--data.image_key {shared.value('--data.image_key')}: evaluation and diagnosis show no pictures. Give"
            " problems of texts with --eval.data and --diagnose.data, or leave both out with --eval.data none"
            " --diagnose.prompts 0."
        )
    same_settings = {
        "--data": dataset,
        "--split": DATASETS[dataset],
        "--input-key": "--data.input_key",
        "--label-key": "--data.label_key",
    }
    problems = {**values_of(shared, same_settings), "--instruction": ""}  # a training appends nothing to its prompts
    if Path(problems["--data"]).suffix not in datafiles.ENDINGS:
        problems.setdefault("--split", "train")  # OpenRLHF's default, where evaluation would prefer a test split
    scorer = reward_files.python_file(shared)
    if scorer is not None:
        problems["--scorer"] = scorer
    return problems


def takes_dataset(options: Flags, shared: Flags, dataset: str) -> bool:
    """Whether the problems are those of a flag's dataset: options name none, and the training has no task."""
    if options.has("--data", "--task") or shared.value("--task"):
        return False
    return bool(shared.value(dataset))


def scorer_notes(scorer: str, options: Flags, shared: Flags, dataset: str) -> list[str]:
    """A warning where problems of the training are not scored by its reward; ``scorer`` is the flag of another one."""
    if options.has("--scorer") or reward_files.python_file(shared) or not takes_dataset(options, shared, dataset):
        return []
    return [
        f"without {scorer} the problems of {dataset} {shared.value(dataset)} are scored by math, or by choice where a"
        f" question lists options, and not by the training's {flag} {shared.value(flag)}: only a Python file with"
        f" reward_func can be a scorer. Give {scorer} FILE.py for another."
        for flag in reward_files.REWARDS
        if shared.value(flag)
    ]


def values_of(flags: Flags, same_settings: Mapping[str, str]) -> dict[str, str]:
    """Values of flags under the names of the same settings in another command: ``{name there: name here}``."""
    values = {}
    for there, name in same_settings.items():
        value = flags.value(name)
        if value is not None:
            values[there] = value
    return values


def _drawn_line(arm: Arm) -> str:
    """The arm for ``ngrpo diagnose --strategy``, with every option that changes the rollouts of the first step."""
    with suppress(UsageError):  # its schedule follows a training, or its noise depends on the training's length
        policy = policy_of(arm)
        if policy.run.sampling_schedule is not None or policy.scale:
            further = [f"{key}={value}" if value else f"--{key}" for key, value in arm.rollouts.items()]
            return shlex.join([*shlex.split(arm.line), *further])
    return arm.line
