# SPDX-License-Identifier: Apache-2.0
"""All rules on a run, one table for a dry run, a start and every strategy of a comparison, and all warnings."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ngrpo import patches
from ngrpo.config import batch_check, compatibility, flag_values, model_check
from ngrpo.config.complete_flags import UNPREPARED, machine_of, on_hardware, prepared, with_stand_ins, with_task
from ngrpo.config.dataset_check import DATASETS, check_files, is_checked, label_note
from ngrpo.config.features import ASYNC, CORRECTION, ESTIMATOR, MODEL, SIZES, Combination
from ngrpo.config.run import GROUP_BASELINES, RunConfig
from ngrpo.machine.hardware import gpu_plan, stand_ins
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.scoring import reward_files
from perturbations.errors import UsageError

Stage = Literal["start", "data", "model"]
"""When a start comes to a rule: at once; once a task is prepared; once the model is in its folder."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    ``about`` is its line in a dry run. ``check`` raises ``UsageError`` where it is broken, and returns why it could not
    look, or None.
    """

    stage: Stage
    about: str | Callable[[Flags, RunConfig], str]
    check: Callable[[Flags, RunConfig], str | None]


def check_hardware(flags: Flags, run: RunConfig) -> str | None:
    """The profile's own check, and what does not go with it or without flash-attn."""
    asked = Combination(run=run, flags=flags, hardware=run.profile.name, missing=stand_ins.missing())
    compatibility.check(compatibility.HARDWARE, asked)
    return run.profile.check(flags)


def check_parsed(flags: Flags) -> None:
    """Raises ``UsageError`` for complete flags that OpenRLHF's parser would refuse or fail over."""
    # OpenRLHF takes its critic from the reward model, and fails without words where there is no reward at all.
    if flags.or_default(ESTIMATOR) == "gae" and not flags.value("--critic.model_name_or_path"):
        reward_files.check_any(flags)
    _ = flags.args


def about_gpus(flags: Flags, run: RunConfig) -> str:
    """The number of GPUs that a run needs, and the GPUs that are there."""
    machine = machine_of(run)
    if machine is None:
        return "no GPU is needed"
    return f"GPUs: {sum(group.gpus for group in placement.groups(flags.args))} needed; {machine}"


def check_patches(flags: Flags, run: RunConfig) -> None:
    """The patches of the training, and vLLM's where the run needs what OpenRLHF lacks."""
    conditions = run.training_conditions
    patches.check(patches.active((*conditions, *patches.VLLM_CONDITIONS) if run.conditions else conditions))


def check_data(flags: Flags, run: RunConfig) -> str | None:
    """The dataset and where rewards come from, and why not all rows were looked at."""
    if run.task is not None and flags.value("--data.prompt_dataset") == UNPREPARED["--data.prompt_dataset"]:
        prepared(run.task)  # it could not be
    check_files(flags)
    reward_files.check_rewards(flags)
    for name in DATASETS:
        value = flags.value(name)
        if value and not is_checked(name, value):
            return f"not checked: the rows of {name} {value}; OpenRLHF loads what is no file from a folder or the hub."
    addresses = [part for part in (flags.value("--reward.remote_url") or "").split(",") if part.startswith("http")]
    return f"not checked: whether a reward server runs at {', '.join(addresses)}." if addresses else None


RULES = (
    Rule(
        "start",
        lambda *_: f"OpenRLHF {versions.OPENRLHF} and vLLM {versions.installed_vllm()} are there",
        lambda *_: versions.check_stack(),
    ),
    Rule("start", lambda _, run: f"hardware {run.profile.name} can do it", check_hardware),
    Rule("start", "OpenRLHF's parser and its conditions accept the flags", lambda flags, _: check_parsed(flags)),
    Rule("start", "engines and models that share GPUs agree", lambda flags, _: gpu_plan.check(flags.args)),
    Rule("start", about_gpus, lambda flags, run: gpu_plan.check_machine(flags.args, machine_of(run))),
    Rule("start", "the batches divide over the ranks", lambda flags, _: batch_check.check(flags.args)),
    Rule("start", "the upstream patches match the installed packages", check_patches),
    Rule("start", lambda flags, _: flag_values.first_step(flags), flag_values.check_checkpoint),
    Rule("start", lambda _, run: f"{run.run_dir} can be written", flag_values.check_output),
    Rule("data", "dataset and reward", check_data),
    Rule("data", "the last step of a pass", lambda flags, _: batch_check.check_rows(flags)),
    Rule("data", "evaluation", flag_values.check_evaluated),
    Rule(
        "model",
        lambda flags, _: architecture.in_words(model_check.name_of(flags)),
        lambda flags, run: architecture.check_perturbed(model_check.name_of(flags), run.spec),
    ),
    Rule("model", "the model's files and context", model_check.check_folder),
    Rule("model", "the prompts can be rendered", model_check.check_template),
    Rule("model", lambda flags, _: f"the options fit the model {flags.value(MODEL) or ''}", model_check.check_options),
)


def check(stage: Stage, flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for the first rule of a stage that is broken."""
    for rule in RULES:
        if rule.stage == stage:
            rule.check(flags, run)


def outcomes(flags: Flags, run: RunConfig) -> list[tuple[str, Callable[[], str | None]]]:
    """The line of each rule in a dry run, and its check."""
    return [
        (rule.about if isinstance(rule.about, str) else rule.about(flags, run), partial(rule.check, flags, run))
        for rule in RULES
    ]


def started(run: RunConfig) -> Flags:
    """The complete flags of a run after the rules of a start, which come before the files of its task are written."""
    flags = on_hardware(run)
    check("start", with_stand_ins(flags, run), run)
    return with_task(flags, run)


def checked(run: RunConfig) -> Flags:
    """The complete flags of a run that is not started, after all checks; ``UsageError`` for the first broken rule."""
    flags = started(run)
    for stage in ("data", "model"):
        check(stage, flags, run)
    return flags


def notes(flags: Flags, run: RunConfig) -> list[str]:
    """All warnings about a run that may start, for complete flags."""
    return [note for warnings in NOTES for note in warnings(flags, run)]


def label_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings about labels that only some rewards read, and a reward function without labels."""
    given = Flags(run.openrlhf)
    for looked in (*(partial(label_note, name, given) for name in DATASETS), partial(reward_files.label_note, flags)):
        with suppress(UsageError):  # which a rule raises
            if (note := looked()) is not None:
                yield note


def flag_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings of the advantage and the sampling about flags, and about flags without an effect."""
    for part in (run.advantage, run.sampling):
        yield from part.notes(Flags(run.openrlhf)) if part is not None else ()
    if not flags.value("--eval.dataset") and (steps := flags.value("--eval.steps") or "-1") != "-1":
        yield f"--eval.steps {steps} has no effect without problems: give --eval.dataset FILE."
    if run.reproducible and flags.has("--algo.dynamic_filtering_enable"):
        why = "OpenRLHF requests more prompts in the order in which responses finish"
        yield f"--reproducible does not repeat the rollouts with --algo.dynamic_filtering_enable: {why}."


def batch_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """A warning about responses of a step that fill no batch."""
    prompts, responses, batch, epochs = (int(flags.or_default(name)) for name in SIZES)
    dynamic = flags.has("--train.dynamic_batch_enable")
    trained = prompts * responses * (1 if dynamic else epochs)
    if trained % batch:
        rest = "what is left " + ("is never trained" if dynamic else "goes into the next step's first update")
        yield f"--train.batch_size {batch} does not divide the {trained} responses that a step trains: {rest}."


def gap_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """A warning about a run in which the gap does not measure the replay (`experience_maker.judge`)."""
    if run.perturbation is not None and run.sampling_schedule is not None:
        strict = ", and --perturbation.strict does nothing" if run.strict else ""
        drawn = f"{run.sampling_schedule.name}: rollouts are drawn at other temperatures than the trainer's"
        yield f"--sampling.schedule {drawn}, so their gap is logged and not judged{strict}."


def loss_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings about a perturbation's entry in the loss: a score with another mean than 0, an off-policy density."""
    perturbation, unbalanced = run.perturbation, None
    if perturbation is None:
        return
    subject = f"--perturbation {perturbation.name}"
    if run.advantage is not None:
        unbalanced = None if run.advantage.sums_to_zero else f"--advantage {run.advantage.name}"
    elif flags.or_default(ESTIMATOR) not in GROUP_BASELINES:
        unbalanced = f"{ESTIMATOR} {flags.or_default(ESTIMATOR)}"
    if run.credit is not None and not run.credit.keeps_sums:
        unbalanced = f"--credit {run.credit.name}"
    if unbalanced is not None and not perturbation.zero_mean_score:
        density = f" with --perturbation.density {perturbation.spec()['density']}" if perturbation.has_density else ""
        yield (
            f"{subject}{density}: the mean of its score is not 0. The advantages of {unbalanced} do not sum to zero"
            " in a group, which pushes the policy along that mean for any reward. docs/methods.md says which entries"
            " have mean 0, and which --perturbation.density is exact."
        )
    stale = ASYNC if flags.has(ASYNC) else None
    if run.policy_noise is not None:
        stale = f"--policy_noise {run.policy_noise.name}"
    if perturbation.has_density and stale is not None:
        yield (
            f"{stale} with the density of {subject}: the rollouts are of another policy than the one that is trained,"
            f" and nothing corrects densities of draws. Use --perturbation.density token with {CORRECTION}."
        )


NOTES: tuple[Callable[[Flags, RunConfig], Iterable[str]], ...] = (
    flag_notes,
    label_notes,
    batch_notes,
    gap_notes,
    loss_notes,
    batch_check.notes,
    model_check.cut_notes,
    lambda flags, run: gpu_plan.notes(flags.args, machine_of(run)),
)
