# SPDX-License-Identifier: Apache-2.0
"""Warnings about a run that may start: what its flags do that a user would not expect."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from ngrpo.config import flag_checks, input_checks, stretches
from ngrpo.config.features import ASYNC, CORRECTION, ESTIMATOR
from ngrpo.config.input_checks import DATASETS, label_note
from ngrpo.config.rules import machine_of
from ngrpo.config.run import GROUP_BASELINES, RunConfig
from ngrpo.machine.hardware import gpu_plan
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import SIZES, Flags
from ngrpo.methods.scoring import reward_alarms, reward_files
from perturbations.errors import UsageError


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


def alarm_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings about files for rewards with signals, which raise outside of the main thread."""
    for name in ("--reward.remote_url", "--train.agent_func_path"):
        if (path := flags.value(name) or "").endswith(".py"):
            yield from reward_alarms.alarm_notes(name, path)


def flag_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings of the advantage, the sampling and the credit about flags, and about flags without an effect."""
    for part in (run.advantage, run.sampling):
        yield from part.notes(Flags(run.openrlhf)) if part is not None else ()
    yield from run.credit.notes(flags) if run.credit is not None else ()
    if not flags.value("--eval.dataset") and (steps := flags.value("--eval.steps") or "-1") != "-1":
        yield f"--eval.steps {steps} has no effect without problems: give --eval.dataset FILE."
    if run.reproducible and flags.has("--algo.dynamic_filtering_enable"):
        why = "OpenRLHF requests more prompts in the order in which responses finish"
        yield f"--reproducible does not repeat the rollouts with --algo.dynamic_filtering_enable: {why}."


def batch_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings about responses of a step that fill no micro-batch, or no batch."""
    prompts, responses, batch, epochs = (int(flags.or_default(name)) for name in SIZES)
    dynamic, total, args = flags.has("--train.dynamic_batch_enable"), prompts * responses, flags.args
    filled = args["train.micro_batch_size"] * placement.rank_groups(args)["actor"]
    if lost := (0 if dynamic else total % filled):
        untrained = f"{lost} of the {total} responses of a step fill no --train.micro_batch_size and are never trained."
        yield f"{untrained} Have a multiple of {filled} responses, or add --train.dynamic_batch_enable."
    trained = (total - lost) * (1 if dynamic else epochs)
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
    alarm_notes,
    batch_notes,
    gap_notes,
    loss_notes,
    flag_checks.last_step_notes,
    stretches.notes,
    input_checks.template_notes,
    input_checks.cut_notes,
    lambda flags, run: gpu_plan.notes(flags.args, machine_of(run)),
    lambda flags, run: run.profile.notes(flags),
)
