# SPDX-License-Identifier: Apache-2.0
"""`ngrpo eval --rescore` generates nothing, so it takes flags of generating only as the samples were generated."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from ngrpo.workbench.evaluate.rollout_policy import RolloutPolicy

_USED = ("--rescore", "--scorer", "--k")
_MODEL = ("--model", "--actor.model_name_or_path")
# All flags that begin so make one setting.
_BEGINNINGS = ("--perturbation", "--sampling.schedule", "--policy_noise")
_STEPS = ("--at-step", "--of-steps")


def check(
    argv: Sequence[str],
    args: argparse.Namespace,
    engine: Mapping[str, object],
    spec: Mapping[str, object] | None,
    policy: RolloutPolicy,
    settings: Mapping[str, object],
) -> None:
    """Raises ``UsageError`` for a flag that has no effect on scores, unless it says what the samples were drawn with.

    Args:
        argv: everything after ``ngrpo eval``.
        args: our own options, read from it.
        engine: the engine's options, read from it.
        spec: the perturbation's, or None.
        policy: the sampling schedule and the noise on the weights.
        settings: of the folder.
    """
    before, now = _drawn_with(settings), _asked_for(args, engine, spec, policy)
    for flag in Flags(argv):
        if flag.name in _USED:
            continue
        name = _setting(flag.name)
        if name in before and before[name] == now.get(name):
            continue
        kept = f" The samples there were drawn with {before[name]}." if before.get(name) not in (None, {}) else ""
        raise UsageError(
            f"{' '.join(flag.argv)} has no effect on --rescore {args.rescore}, which scores the samples that are"
            f" there.{kept} Leave it out, or evaluate into another folder without --rescore."
        )


def _setting(flag: str) -> str:
    """The name under which a flag's setting is compared."""
    if flag in _MODEL:
        return "--model"
    if flag in _STEPS or flag.startswith(_BEGINNINGS[1:]):
        return "rollouts"
    if flag.startswith("--vllm."):
        return f"--vllm.{flag.removeprefix('--vllm.').replace('-', '_')}"
    return _BEGINNINGS[0] if flag.startswith(_BEGINNINGS[0]) else flag


def _drawn_with(settings: Mapping[str, object]) -> dict[str, object]:
    """What a folder knows of how its samples were drawn, by flag."""
    described = ("sampling_schedule", "policy_noise", "training_step", "sigma")
    return {
        "--model": settings["model"],
        "--data": settings["dataset"],
        "--task": settings["dataset"],
        "--limit": settings["problems"],
        "--n": settings["n"],
        "--perturbation": settings["perturbation"],
        "rollouts": {name: settings[name] for name in described if name in settings},
        **{f"--{name.replace('_', '-')}": value for name, value in _part(settings, "sampling").items()},
        **_of_engine(_part(settings, "engine")),
    }


def _asked_for(
    args: argparse.Namespace,
    engine: Mapping[str, object],
    spec: Mapping[str, object] | None,
    policy: RolloutPolicy,
) -> dict[str, object]:
    """The same settings as a command line gives them."""
    model = str(packaged.folder_of(args.model)) if args.model in packaged.PACKAGED else args.model
    return {
        "--model": str(Path(model).expanduser()) if model and model.startswith("~") else model,
        "--data": args.data,
        "--task": f"task {args.task}",
        "--limit": args.limit,
        "--n": args.n,
        "--perturbation": spec,
        "rollouts": policy.described(),
        "--temperature": args.temperature,
        "--top-p": args.top_p,
        "--max-tokens": args.max_tokens,
        "--seed": args.seed,
        **_of_engine(engine),
    }


def _part(settings: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The settings under a name; none where the folder has none."""
    part = settings.get(name)
    return {str(key): value for key, value in part.items()} if isinstance(part, Mapping) else {}


def _of_engine(options: Mapping[str, object]) -> dict[str, object]:
    return {f"--vllm.{name}": value for name, value in options.items()}
