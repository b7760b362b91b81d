# SPDX-License-Identifier: Apache-2.0
"""Warnings about a run that may start: its scores and advantages, batches, sampling, labels and gap."""

from collections.abc import Iterator
from contextlib import suppress

from ngrpo.config.dataset_check import label_note
from ngrpo.config.features import ASYNC, CORRECTION, ESTIMATOR, SIZES
from ngrpo.config.run import GROUP_BASELINES, RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import value_of
from ngrpo.workbench.scoring import reward_files
from perturbations.errors import UsageError


def notes(complete: Flags, run: RunConfig) -> list[str]:
    """All warnings, from OpenRLHF's flags with those of presets and methods, and the run."""
    given = Flags(run.openrlhf)
    told = [note for made in (run.advantage, run.sampling) if made is not None for note in made.notes(given)]
    for name in ("--data.prompt_dataset", "--eval.dataset"):
        with suppress(UsageError):  # which a rule raises
            told += [note] if (note := label_note(name, given)) is not None else []
    with suppress(UsageError):
        told += [note] if (note := reward_files.label_note(complete.argv)) is not None else []
    told += [*batch_notes(complete), *gap_notes(run), *loss_notes(complete, run)]
    if not complete.value("--eval.dataset") and (steps := complete.value("--eval.steps") or "-1") != "-1":
        told.append(f"--eval.steps {steps} has no effect without problems: give --eval.dataset FILE.")
    if run.reproducible and complete.has("--algo.dynamic_filtering_enable"):
        told.append(
            "--reproducible does not repeat the rollouts with --algo.dynamic_filtering_enable: OpenRLHF requests more"
            " prompts in the order in which responses finish."
        )
    return told


def batch_notes(flags: Flags) -> Iterator[str]:
    """A warning about responses of a step that fill no batch."""
    prompts, responses, batch, epochs = (int(value_of(flags, name)) for name in SIZES)
    trained = prompts * responses * epochs
    if trained % batch and not flags.has("--train.dynamic_batch_enable"):
        rest = "what is left goes into the next step's first update"
        yield f"--train.batch_size {batch} does not divide the {trained} responses that a step trains: {rest}."


def gap_notes(run: RunConfig) -> Iterator[str]:
    """A warning about a run in which the gap does not measure the replay (`experience_maker.judge`)."""
    if run.perturbation is not None and run.sampling_schedule is not None:
        strict = ", and --perturbation.strict does nothing" if run.strict else ""
        yield (
            f"--sampling.schedule {run.sampling_schedule.name}: rollouts are drawn at other temperatures than the"
            f" trainer's, so their gap is logged and not judged{strict}."
        )


def loss_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """Warnings about a perturbation's entry in the loss: a score with another mean than 0, an off-policy density."""
    perturbation, unbalanced = run.perturbation, None
    if perturbation is None:
        return
    subject = f"--perturbation {perturbation.name}"
    if run.advantage is not None:
        unbalanced = None if run.advantage.sums_to_zero else f"--advantage {run.advantage.name}"
    elif value_of(flags, ESTIMATOR) not in GROUP_BASELINES:
        unbalanced = f"{ESTIMATOR} {value_of(flags, ESTIMATOR)}"
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
            " and for densities of draws nothing corrects that. --perturbation.density token has importance weights"
            f" ({CORRECTION})."
        )
