# SPDX-License-Identifier: Apache-2.0
"""Warnings about a run that may start: what its flags do that a user would not expect."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import ceil

from ngrpo.config import batch_checks, flag_checks, idle_flags, input_checks, reward_and_critic, stretches
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import ASYNC, CORRECTION, ESTIMATOR, KL, MODEL
from ngrpo.config.run import GROUP_BASELINES, RunConfig
from ngrpo.machine.hardware import gpu_notes, host_plan
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, SIZES, Flags
from ngrpo.machine.upstream.rollout_sizes import prompts_drawn_at_once, prompts_of_step
from ngrpo.methods.scoring import reward_alarms, reward_files
from perturbations.errors import UsageError


def all_notes(complete: CompleteRun) -> list[str]:
    """All warnings about a run that may start."""
    return [note for warnings in NOTES for note in warnings(complete)]


def start_lines(complete: CompleteRun) -> list[str]:
    """What a start says of every run: where it continues, what its checkpoints take, and the flags that ngrpo adds."""
    lines = []
    if complete.flags.has(flag_checks.LOAD):
        lines.append(flag_checks.about_start(complete.flags))
    lines.append(host_plan.about_checkpoints(complete.args))
    added = complete.with_task_in_run_folder().flags.added
    if added:
        lines.append(f"added to OpenRLHF's flags: {shlex.join(added)}")
    return lines


def label_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about labels that only some rewards can read, and about a reward function without labels."""
    by_user = Flags(complete.run.openrlhf).without_false()
    for dataset in DATASETS:
        with suppress(UsageError):  # a rule reports it
            note = input_checks.label_note(dataset, by_user)
            if note is not None:
                yield note
    with suppress(UsageError):
        note = reward_files.label_note(complete.flags)
        if note is not None:
            yield note


def alarm_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about files for rewards that set signals, which Python allows in a process's main thread only."""
    for flag in ("--reward.remote_url", "--train.agent_func_path"):
        path = complete.flags.value(flag) or ""
        if path.endswith(".py"):
            yield from reward_alarms.alarm_notes(flag, path)


def flag_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings of the advantage, the sampling and the credit about flags, and about flags without an effect."""
    run, flags = complete.run, complete.flags
    by_user = Flags(run.openrlhf).without_false()
    if run.advantage is not None:
        yield from run.advantage.notes(by_user)
    yield from run.sampling.notes(by_user)
    if run.credit is not None:
        yield from run.credit.notes(flags)
    eval_steps = flags.value("--eval.steps") or "-1"
    if eval_steps != "-1" and not flags.value("--eval.dataset"):
        yield f"--eval.steps {eval_steps} has no effect without problems: give --eval.dataset FILE."
    if run.reproducible and flags.has("--algo.dynamic_filtering_enable"):
        yield (
            "--reproducible does not repeat the rollouts with --algo.dynamic_filtering_enable: OpenRLHF requests more"
            " prompts in the order in which responses finish."
        )


def batch_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about responses of a step that fill no micro-batch, or no batch."""
    flags, args = complete.flags, complete.args
    prompts, responses_per_prompt, batch = (int(flags.or_default(size)) for size in SIZES[:3])
    dynamic = flags.has("--train.dynamic_batch_enable")
    responses = prompts_of_step(prompts, args["rollout.vllm_generate_batch_size"]) * responses_per_prompt
    # The responses of one micro-batch on every rank.
    responses_at_once = args["train.micro_batch_size"] * placement.rank_groups(args)["actor"]
    lost = 0 if dynamic else responses % responses_at_once
    if lost:
        yield (
            f"{lost} of the {responses} responses of a step fill no --train.micro_batch_size and are never trained."
            f" Have a multiple of {responses_at_once} responses, or add --train.dynamic_batch_enable."
        )
    trained = responses - lost
    if trained % batch:
        fate = "is never trained"
        if not dynamic:
            fate = "goes into the next epoch's or step's first update, in which OpenRLHF weighs it up to twice"
        yield (
            f"--train.batch_size {batch} does not divide the {trained} responses that a step trains: what is left"
            f" {fate}."
        )


def gap_notes(complete: CompleteRun) -> Iterator[str]:
    """A warning about a setting of the mismatch where none is measured or judged (`experience_maker.judge`)."""
    run = complete.run
    if run.perturbation is None and not run.has_side_records:
        if run.strict or run.gap_limit != RunConfig.gap_limit:
            yield (
                "--perturbation.strict and --perturbation.gap_limit have no effect: nothing is perturbed or recorded,"
                " so no mismatch is measured."
            )
        return
    if run.perturbation is None or run.sampling_schedule is None:
        return
    strict = ", and --perturbation.strict does nothing" if run.strict else ""
    yield (
        f"--sampling.schedule {run.sampling_schedule.name}: rollouts are drawn at other temperatures than the"
        f" trainer's, so their mismatch is logged and not judged{strict}."
    )


def centering_notes(complete: CompleteRun) -> Iterator[str]:
    """A warning where tokens are drawn from the policy of the loss, so that their scores have mean 0 already."""
    run = complete.run
    perturbation = run.perturbation
    draws_own_text = perturbation is not None and perturbation.active and not perturbation.samples_text
    is_filtered = run.sampling.truncations(complete.flags) and not run.sampling.correct_mask
    if run.sampling.score_centering and not (draws_own_text or is_filtered or run.sampling_schedule is not None):
        yield (
            "--sampling.score_centering has nothing to center: tokens are drawn from the policy of the loss. It is for"
            " top-p, top-k, min-p, --sampling.schedule and --perturbation cuts, not for the engine's rounding."
        )


def staleness_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about a limit of staleness that leaves nothing out, or most of the rollouts."""
    limit = complete.run.sampling.max_staleness
    if limit is None:
        return
    greatest = greatest_staleness(complete.flags)
    if limit >= greatest:
        yield (
            f"--sampling.max_staleness {limit} leaves nothing out: with these flags a response is at most"
            f" {greatest} weight syncs older than the weights that train on it (--train.async_queue_size,"
            " --rollout.vllm_generate_batch_size)."
        )
    elif limit == 0:
        yield (
            "--sampling.max_staleness 0 leaves out every rollout that was drawn during a training step, which is"
            " about every second one, and in a longer queue more. A synchronous run draws none in vain."
        )


def greatest_staleness(flags: Flags) -> int:
    """The greatest age that OpenRLHF 0.11.2's asynchronous training gives a response, in weight syncs.

    With a queue of Q batches the generator begins batch n once the trainer has taken batch n − Q, after n − Q syncs;
    n syncs were made before batch n is trained. An engine that draws G prompts at once for batches of B keeps the last
    of them for ⌈G / B⌉ − 1 further steps.
    """
    queue = int(flags.or_default("--train.async_queue_size"))
    batch = int(flags.or_default(SIZES[0]))
    drawn_at_once = prompts_drawn_at_once(batch, int(flags.or_default("--rollout.vllm_generate_batch_size") or 0))
    return queue + ceil(drawn_at_once / batch) - 1


def neighbor_notes(complete: CompleteRun) -> Iterator[str]:
    """A warning of a resumed run whose engines keep neighbor sets over several weight syncs.

    Sets that are never recomputed are of the model's own weights, in a resumed run too.
    """
    period = str((complete.run.spec or {}).get("refresh", ""))
    if flag_checks.resumed_step(complete.flags) and period.isdecimal() and int(period) > 1:
        yield (
            f"--perturbation.refresh {period}: a checkpoint lacks the neighbor sets that engines keep. Until {period}"
            f" weight syncs have been made, this resumed run has those of the weights in {MODEL}. Use"
            " --perturbation.refresh every_sync."
        )


def loss_notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about a perturbation's entry in the loss: a score with another mean than 0, an off-policy density."""
    run, flags = complete.run, complete.flags
    perturbation = run.perturbation
    if perturbation is None:
        return
    subject = f"--perturbation {perturbation.name}"
    unbalanced = _unbalanced_advantages(complete)
    if unbalanced is not None and not perturbation.zero_mean_score and not run.sampling.score_centering:
        density = f" with --perturbation.density {perturbation.spec()['density']}" if perturbation.has_density else ""
        yield (
            f"{subject}{density}: the mean of its score is not 0. The advantages of {unbalanced} do not sum to zero"
            " in a group, which pushes the policy along that mean for any reward. docs/methods.md says which entries"
            " have mean 0, and which --perturbation.density is exact."
        )
    off_policy = ASYNC if flags.has(ASYNC) else None
    if run.policy_noise is not None:
        off_policy = f"--policy_noise {run.policy_noise.name}"
    if perturbation.has_density and off_policy is not None:
        yield (
            f"{off_policy} with the density of {subject}: the rollouts are of another policy than the one that is"
            " trained, and nothing corrects densities of draws. Use --perturbation.density token with"
            f" {CORRECTION}."
        )


def kl_notes(complete: CompleteRun) -> Iterator[str]:
    """A warning where the loss has a KL term that does not hold the policy at the reference model."""
    flags = complete.flags
    is_plain_loss = flags.has("--algo.kl.use_loss") and not flags.has("--algo.kl.unbiased_gradient")
    if is_plain_loss and flags.or_default("--algo.kl.estimator") == "k1" and float(flags.or_default(KL)) > 0.0:
        yield (
            "--algo.kl.use_loss with --algo.kl.estimator k1, which is OpenRLHF's default, adds noise alone: the"
            " gradient of k1 is that of log π, whose mean over the policy's own tokens is 0, so nothing holds the"
            " policy at the reference model. Add --algo.kl.estimator k3, or --algo.kl.unbiased_gradient."
        )


def _unbalanced_advantages(complete: CompleteRun) -> str | None:
    """The flag after which advantages do not sum to zero in a group; None where they do."""
    run, flags = complete.run, complete.flags
    if run.credit is not None and not run.credit.keeps_sums:
        return f"--credit {run.credit.name}"
    if run.advantage is not None:
        return None if run.advantage.sums_to_zero else f"--advantage {run.advantage.name}"
    estimator = flags.or_default(ESTIMATOR)
    return None if estimator in GROUP_BASELINES else f"{ESTIMATOR} {estimator}"


NOTES: tuple[Callable[[CompleteRun], Iterable[str]], ...] = (
    flag_notes,
    idle_flags.notes,
    label_notes,
    alarm_notes,
    batch_notes,
    gap_notes,
    centering_notes,
    staleness_notes,
    neighbor_notes,
    loss_notes,
    kl_notes,
    lambda complete: batch_checks.few_rows_notes(complete.flags),
    lambda complete: batch_checks.last_step_notes(complete.flags),
    lambda complete: batch_checks.unread_rows_notes(complete.flags),
    lambda complete: batch_checks.evaluation_notes(complete.flags),
    lambda complete: batch_checks.best_metric_notes(complete.flags),
    stretches.notes,
    lambda complete: input_checks.template_notes(complete.flags),
    lambda complete: input_checks.cut_notes(complete.flags),
    reward_and_critic.notes,
    lambda complete: gpu_notes.notes(complete.args, complete.machine),
    lambda complete: complete.run.profile.notes(complete.flags),
)
