# SPDX-License-Identifier: Apache-2.0
"""The plan of a comparison, arms times seeds with all else equal, read from the command line and its YAML file."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngrpo.config.arms import Arm, parse_arms
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare import measurements, plan_words
from perturbations.errors import UsageError, nearest
from perturbations.options import coerce

# Flags with which a training evaluates.
_EVALUATING = ("--eval.steps", "--eval.at_start")


@dataclass(frozen=True)
class Run:
    """One arm with one seed; ``id`` is also the name of its folder."""

    id: str
    arm: Arm
    seed: int


@dataclass(frozen=True)
class Plan:
    """A comparison; every arm has every seed.

    Attributes:
        baseline: the id of the arm that the others are compared with.
        shared: flags for ``ngrpo train`` that all runs have.
        task: task or dataset, for people.
        reproducible: whether a run with the same seed repeats its rollouts.
        keep_models: whether a run's trained model stays after its evaluation.
        evaluation: flags for ``ngrpo eval`` except model and folder; None without problems to evaluate on.
        diagnosis: flags for ``ngrpo diagnose``, or None.
        threshold: the score above which the report counts each arm's runs, or None.
        notes: warnings.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    shared: tuple[str, ...]
    model: str
    task: str
    reproducible: bool = True
    keep_models: bool = True
    evaluation: tuple[str, ...] | None = None
    diagnosis: tuple[str, ...] | None = None
    threshold: float | None = None
    notes: tuple[str, ...] = ()

    def runs(self) -> list[Run]:
        """Seed by seed, so that a comparison cut short has whole seeds."""
        return [Run(f"{folder_name(arm.id)}-seed{seed}", arm, seed) for seed in self.seeds for arm in self.arms]

    def common(self) -> dict[str, Any]:
        """What all runs of one folder must share; arms and seeds may be added later."""
        return {name: getattr(self, name) for name in ("model", "task", "shared", "evaluation", "reproducible")}


def folder_name(label: str) -> str:
    """A folder's name for an arm, not hidden; a hash separates labels that differ only in odd characters."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-").lstrip(".-")
    if plain == label.replace(" ", "-") and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def read_plan(argv: Sequence[str]) -> tuple[Plan, Path]:
    """Reads everything after ``ngrpo compare``: the plan, and the comparison's folder.

    Raises:
        UsageError: for anything that could not be run.
    """
    file = Flags(argv).value("--config")
    lines = plan_words.file_lines(file) if file else {}
    words = plan_words.split_words(argv)
    if file:
        file_words = plan_words.split_words(plan_words.file_argv(file, lines))
        words = words.over(file_words)
    shared = Flags(words.training)
    model = shared.value("--model") or shared.value("--actor.model_name_or_path") or ""
    # `ngrpo train` would add these flags itself; they are added here so that the diagnosis draws with them too.
    shared = shared.with_defaults(packaged.training_flags(model))

    arms = parse_arms(
        words.last("perturbations"),
        words.own.get("sweep", []),
        words.own.get("strategy", []),
        bases=words.listed("base"),
        training=True,
    )
    if file:
        plan_words.refuse_booleans(file, lines, command_line=Flags(argv), shared=shared, arms=arms)
    _refuse_arm_flags(arms)

    baseline = _baseline(words, arms)
    seeds = _seeds(words)
    effective = shared.without_false()
    evaluation_options = Flags(words.groups["eval"])
    evaluation = measurements.evaluation_flags(evaluation_options, effective, model)
    diagnosis_options = Flags(words.groups["diagnose"])
    diagnosis = measurements.diagnosis_flags(diagnosis_options, effective, arms)
    notes = measurements.scorer_notes("--eval.scorer", evaluation_options, effective, "--eval.dataset")
    if diagnosis is not None:
        notes += measurements.scorer_notes("--diagnose.scorer", diagnosis_options, effective, "--data.prompt_dataset")
    shared = _training_flags(shared, evaluation, evaluation_options, arms)
    plan = Plan(
        arms=tuple(arms),
        seeds=seeds,
        baseline=baseline,
        shared=tuple(shared.argv),
        model=model,
        task=shared.value("--task") or shared.value("--data.prompt_dataset") or "",
        reproducible=not words.switched_on("stock"),
        keep_models=not words.switched_on("discard-models"),
        evaluation=evaluation,
        diagnosis=diagnosis,
        threshold=_threshold(words, evaluation),
        notes=tuple(notes),
    )
    return plan, Path(words.last("out") or "runs/compare").expanduser()


def _refuse_arm_flags(arms: Sequence[Arm]) -> None:
    """Raises ``UsageError`` for a flag of an arm that is set by us or for another command, and for no known preset."""
    for arm in arms:
        for key in arm.training:
            plan_words.refuse_set_by_us(f"--{key}")
            command = plan_words.other_command(f"--{key}")
            if command:
                raise UsageError(
                    f"arm {arm.id!r}: --{key} is for ngrpo {command}, which has the same settings for all arms. Give"
                    f" --{key} once, outside of --strategy and --sweep."
                )
        if "base" in arm.training:
            coerce(RunConfig, SETTINGS["--preset"], arm.training["base"], label=f"base={arm.training['base']}")


def _training_flags(shared: Flags, evaluation: Sequence[str] | None, options: Flags, arms: Sequence[Arm]) -> Flags:
    """The shared flags, fitted to the ``evaluation`` of the trained models, whose ``options`` the user gave."""
    if shared.has(*_EVALUATING):
        # Evaluations while training have as many samples as those of the trained models, at the same temperature.
        same_settings = {"--eval.n_samples_per_prompt": "--n", "--eval.temperature": "--temperature"}
        defaults = measurements.values_of(Flags(evaluation or ()), same_settings)
        # OpenRLHF 0.11.2 would also save a checkpoint of the best evaluation, with the optimiser's states.
        defaults["--ckpt.best_metric_key"] = "none"
        return shared.with_defaults(defaults)
    arms_evaluate = any(Flags(arm.training_flags).has(*_EVALUATING) for arm in arms)
    if measurements.takes_dataset(options, shared.without_false(), "--eval.dataset") and not arms_evaluate:
        # Only `ngrpo eval` reads these problems: `ngrpo train` would warn that the flags have no effect.
        return shared.without("--eval.dataset", "--eval.split")
    return shared


def _baseline(words: plan_words.Words, arms: Sequence[Arm]) -> str:
    """The id of the arm that the others are compared with: as asked for, else the first ``none``, else the first."""
    ids = [arm.id for arm in arms]
    baseline = words.last("baseline")
    if baseline is None:
        unperturbed = [arm.id for arm in arms if arm.name == "none"]
        return unperturbed[0] if unperturbed else ids[0]
    if baseline not in ids:
        raise UsageError(f"--baseline {baseline!r} is none of the arms {ids}.{nearest(baseline, ids)}")
    return baseline


def _seeds(words: plan_words.Words) -> tuple[int, ...]:
    texts = words.listed("seeds") or ["0"]
    for text in texts:
        if not text.isdecimal():
            raise UsageError(f"--seeds {text!r} must be a whole number of at least 0; give several as 0,1,2.")
    seeds = tuple(map(int, texts))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {','.join(texts)}: a seed is given twice; give different ones.")
    return seeds


def _threshold(words: plan_words.Words, evaluation: tuple[str, ...] | None) -> float | None:
    text = words.last("threshold")
    if text is None:
        return None
    if evaluation is None:
        raise UsageError(f"--threshold {text} counts evaluated runs: give --eval.data or --task.")
    threshold = math.nan
    with suppress(ValueError):
        threshold = float(text)
    if not 0.0 <= threshold < 1.0:
        raise UsageError(f"--threshold {text}: the Mean@n that a run is to exceed, a number of at least 0 and below 1.")
    return threshold
