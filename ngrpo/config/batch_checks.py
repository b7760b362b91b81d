# SPDX-License-Identifier: Apache-2.0
"""Whether the sizes of a step fit each other, the ranks and the rows of the data: checks, and warnings."""

from collections.abc import Iterator
from math import ceil

from ngrpo.config import datasources
from ngrpo.config.input_checks import rows_of
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, Flags
from ngrpo.machine.upstream.rollout_sizes import prompts_of_step
from perturbations.errors import UsageError, nearest

_ROWS = "--data.max_samples"
_TRAINED, _EVALUATED = DATASETS


def check_batches(args: placement.Args) -> None:
    """Raises ``UsageError`` for batches that do not divide over the ranks, and for no room for a prompt."""
    _check_lengths(args)
    for role, groups in placement.rank_groups(args).items():
        _check_role(args, role, groups)
    batch = args["train.batch_size"]
    prompts = _prompts_per_step(args)
    responses_per_prompt = args["rollout.n_samples_per_prompt"]
    responses = prompts * responses_per_prompt
    if args["train.dynamic_batch_enable"] and batch > responses:
        raise UsageError(
            f"--train.batch_size {batch} is more than the {responses} responses of a step, of which"
            " --train.dynamic_batch_enable trains none then. Give at most as many."
        )
    if not trains_on_all_ranks(args, prompts):
        raise UsageError(
            f"{responses} responses of a step (--rollout.batch_size {prompts} ×"
            f" --rollout.n_samples_per_prompt {responses_per_prompt}) do not divide over the ranks"
            f" ({_ranks(args)}) in"
            f" micro-batches of {args['rollout.micro_batch_size']} (--rollout.micro_batch_size) and"
            f" {args['train.micro_batch_size']} (--train.micro_batch_size), so ranks would wait forever. Change one."
        )


def _check_lengths(args: placement.Args) -> None:
    """Raises ``UsageError`` for a response, or its overlong buffer, that does not fit."""
    longest = args["data.max_len"]
    generated = args["rollout.max_new_tokens"]
    if generated is not None and generated >= longest:
        raise UsageError(
            f"--rollout.max_new_tokens {generated} leaves no room for a prompt in --data.max_len {longest}, the length"
            " of prompt and response together. Raise --data.max_len, or lower --rollout.max_new_tokens."
        )
    longest_response = generated or longest
    overlong_buffer = args["reward.overlong_buffer_len"] or 0
    if overlong_buffer > longest_response:
        raise UsageError(
            f"--reward.overlong_buffer_len {overlong_buffer:g} must be at most the longest response,"
            f" {longest_response} tokens (--rollout.max_new_tokens). Give a fifth of it."
        )


def _check_role(args: placement.Args, role: str, groups: int) -> None:
    """Raises ``UsageError`` where a role's ranks, or its batches, do not divide."""
    ranks = placement.world_size(args, role)
    ring = args["ds.ring_attn_size"]
    tensor_parallel = args["ds.tensor_parallel_size"]
    if ranks % (ring * tensor_parallel):
        raise UsageError(
            f"--ds.ring_attn_size {ring} × --ds.tensor_parallel_size {tensor_parallel} must divide the {ranks} ranks of"
            f" --{role}.num_nodes × --{role}.num_gpus_per_node."
        )
    is_trained = role in ("actor", "critic")
    if args["ds.zero_stage"] == 3 and is_trained and ranks % min(args["ds.zpg"], ranks):
        raise UsageError(f"--ds.zpg {args['ds.zpg']} must divide the {ranks} ranks of --{role}. Leave it out.")
    of_actor = placement.rank_groups(args)["actor"]
    if args["train.dynamic_batch_enable"] and of_actor % groups:
        raise UsageError(
            f"--train.dynamic_batch_enable makes its batches for the {of_actor} ranks of --actor, and the {groups} of"
            f" --{role} do not divide them, so some would get no batch. Fix: --{role}.num_gpus_per_node with a divisor"
            f" of {of_actor} ranks."
        )
    batch = args["train.batch_size"]
    micro_batch = 1 if is_trained and args["train.dynamic_batch_enable"] else args["train.micro_batch_size"]
    unit = groups * micro_batch
    if batch % unit:
        next_below = batch // unit * unit
        next_above = next_below + unit
        fitting = f"{next_below} or {next_above}" if next_below else f"{next_above}"
        raise UsageError(
            f"--train.batch_size {batch} must be a multiple of {unit}, {groups} ranks of --{role} ×"
            f" --train.micro_batch_size {micro_batch}. Fix: --train.batch_size {fitting}."
        )


def _prompts_per_step(args: placement.Args) -> int:
    """Prompts of a whole step."""
    return prompts_of_step(args["rollout.batch_size"], args["rollout.vllm_generate_batch_size"])


def trains_on_all_ranks(args: placement.Args, prompts: int) -> bool:
    """Whether all ranks train the same number of micro-batches in a step of this many prompts, and none has none.

    OpenRLHF 0.11.2 deals micro-batches of the rollout out in equal runs, the last ones shorter
    (``RayActorGroup.async_run_method_batch``), and reduces once for each micro-batch of the training.
    """
    responses = prompts * args["rollout.n_samples_per_prompt"]
    for role, groups in placement.rank_groups(args).items():
        if groups > 1 and not _has_equal_shares(args, role, groups, responses):
            return False
    return True


def _has_equal_shares(args: placement.Args, role: str, groups: int, responses: int) -> bool:
    """Whether each of a role's groups of ranks computes, and trains, the same number of micro-batches."""
    if args["train.dynamic_batch_enable"]:  # the ranks agree on a number of micro-batches
        return responses >= groups
    rollout_size = args["rollout.micro_batch_size"]
    rollout_batches = ceil(responses / rollout_size)
    if rollout_batches < groups:
        return False
    # Under ZeRO-3 each forward gathers weights from all ranks, so that all ranks need the same number of forwards.
    if args["ds.zero_stage"] == 3 and rollout_batches % groups:
        return False
    is_trained = role not in ("ref", "reward")
    if not is_trained:
        return True
    responses_per_group = ceil(rollout_batches / groups) * rollout_size
    trained_batches = set()
    for group in range(groups):
        remaining = max(responses - group * responses_per_group, 0)
        responses_of_group = min(remaining, responses_per_group)
        trained_batches.add(responses_of_group // args["train.micro_batch_size"])
    return len(trained_batches) == 1


def _may_leave_prompts_out(args: placement.Args) -> bool:
    """Whether the responses of a step of fewer prompts than a whole one may not divide over the ranks."""
    return not all(trains_on_all_ranks(args, prompts) for prompts in range(1, _prompts_per_step(args)))


def _row_count(flags: Flags, args: placement.Args) -> int | None:
    """Rows that a pass goes through; None where they are not known."""
    counts = rows_of("--data.prompt_dataset", flags)
    if counts is None or (len(counts) > 1 and args["data.prompt_probs"]):
        return None
    limit = args["data.max_samples"]
    return min(limit, sum(min(limit, count) for count in counts))


def fitting_prompts(flags: Flags, prompts: int) -> int:
    """The greatest number of prompts, at most ``prompts``, whose responses train on all ranks in one step."""
    args = flags.args
    return next((count for count in range(prompts, 0, -1) if trains_on_all_ranks(args, count)), 0)


def _left_out(flags: Flags, rows: int) -> int:
    """Rows that each pass leaves out, since its last step does not divide over the ranks (`samples_generator.py`)."""
    last_prompts = rows % _prompts_per_step(flags.args)
    return last_prompts - fitting_prompts(flags, last_prompts)


def check_rows(flags: Flags) -> None:
    """Raises ``UsageError`` for so few rows that no step would update the weights.

    OpenRLHF counts a run's steps in whole batches of a pass, and its learning rate ends with them.
    """
    args = flags.args
    responses_per_prompt = args["rollout.n_samples_per_prompt"]
    batch = args["train.batch_size"]
    rows = _row_count(flags, args)
    if rows is None:
        return
    passes = 1
    # A remainder goes into the next epoch or step (`run_notes.batch_notes`).
    if _prompts_per_step(args) * responses_per_prompt % batch:
        passes = args["train.max_epochs"] * args["train.num_episodes"]
    left_out = _left_out(flags, rows)
    responses = (rows - left_out) * responses_per_prompt
    if responses * passes >= batch:
        return
    too_few = f"are fewer responses than --train.batch_size {batch}, so no step would update the weights"
    if left_out:
        raise UsageError(
            f"{rows} rows, of which {left_out} do not divide over the ranks ({_ranks(args)}), ×"
            f" --rollout.n_samples_per_prompt {responses_per_prompt} {too_few}. Give more rows."
        )
    raise UsageError(
        f"{rows} rows × --rollout.n_samples_per_prompt {responses_per_prompt} {too_few}. Give more rows, or"
        f" --train.batch_size {responses}."
    )


def _ranks(args: placement.Args) -> str:
    """The number of ranks in each role, in words."""
    return ", ".join(f"{role} {groups}" for role, groups in placement.rank_groups(args).items())


def few_rows_notes(flags: Flags) -> list[str]:
    """A warning where a pass has fewer rows than a step takes, so that every step is smaller than the flags say."""
    args = flags.args
    rows = _row_count(flags, args)
    prompts = _prompts_per_step(args)
    if rows is None or rows >= prompts:
        return []
    responses = rows * args["rollout.n_samples_per_prompt"]
    return [
        f"{rows} rows are fewer than the {prompts} prompts of a step (--rollout.batch_size), so each pass is one step"
        f" of {responses} responses. Give more rows, or --rollout.batch_size {rows}."
    ]


def unread_rows_notes(flags: Flags) -> Iterator[str]:
    """A warning for each file of which ``--data.max_samples`` leaves rows out that its user may not expect.

    OpenRLHF reads that many rows of all files of a dataset together, and of the evaluation too.
    """
    args = flags.args
    for dataset in DATASETS:
        names = (flags.value(dataset) or "").split(",")
        is_expected = dataset == _TRAINED and len(names) == 1
        is_drawn = dataset == _TRAINED and args["data.prompt_probs"]
        counts = rows_of(dataset, flags)
        if is_expected or is_drawn or counts is None:
            continue
        left = args["data.max_samples"]
        for name, count in zip(names, counts, strict=True):
            read = min(count, left)
            left -= read
            if read < count:
                yield (
                    f"{_ROWS} {args['data.max_samples']} bounds the rows of {dataset} in all: of the {count} rows of"
                    f" {name.strip()}, {f'only the first {read} are' if read else 'none is'} read."
                )


def evaluation_notes(flags: Flags) -> Iterator[str]:
    """A warning where a run ends before its first evaluation."""
    args = flags.args
    rows = _row_count(flags, args)
    if not args["eval.dataset"] or rows is None:
        return
    last_step = ceil(rows / _prompts_per_step(args)) * args["train.num_episodes"]
    if args["eval.steps"] > last_step:
        yield (
            f"--eval.steps {args['eval.steps']}: the run ends with step {last_step}, so no step is evaluated. Give at"
            f" most {last_step}."
        )


def best_metric_notes(flags: Flags) -> Iterator[str]:
    """A warning where the best checkpoint is chosen by a metric that the evaluation lacks: OpenRLHF saves none then."""
    args = flags.args
    best = args["ckpt.best_metric_key"]
    if best in ("", "none", None) or rows_of(_EVALUATED, flags) is None:
        return
    responses = args["eval.n_samples_per_prompt"]
    metrics = []
    for datasource in dict.fromkeys(datasources.names(flags)[: args["data.max_samples"]]):
        metrics += [f"eval_{datasource}_pass1", f"eval_{datasource}_pass{responses}"]
    if best not in metrics:
        yield (
            f"--ckpt.best_metric_key {best}: the evaluation has no such metric, so no best checkpoint is saved."
            f"{nearest(best, metrics)} Give one of {', '.join(dict.fromkeys(metrics))}."
        )


def last_step_notes(flags: Flags) -> Iterator[str]:
    """A warning where the last step of a pass leaves out prompts (`samples_generator.py`)."""
    args = flags.args
    rows = _row_count(flags, args)
    # A step of dynamic batches needs one response for each rank, and no equal number of micro-batches.
    fix = "" if args["train.dynamic_batch_enable"] else " --train.dynamic_batch_enable leaves out fewer."
    if args["algo.dynamic_filtering_enable"]:
        if _may_leave_prompts_out(args):
            yield (
                "--algo.dynamic_filtering_enable: the last step takes the remaining prompts, and leaves those out whose"
                f" responses do not divide over the ranks ({_ranks(args)}).{fix}"
            )
    elif rows is not None and _left_out(flags, rows):
        yield (
            f"the last step of a pass leaves out {_left_out(flags, rows)} of its {rows % _prompts_per_step(args)}"
            f" prompts, whose responses do not divide over the ranks ({_ranks(args)}).{fix}"
        )
