# SPDX-License-Identifier: Apache-2.0
"""Sizes of a step that must fit each other; otherwise vLLM or DeepSpeed fails late, or ranks wait forever."""

from contextlib import suppress
from math import ceil

from ngrpo.config.dataset_check import rows_of
from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from perturbations.errors import UsageError

_ROWS = "--data.max_samples"
_ROLES = {placement.ACTOR: "actor", placement.REFERENCE: "ref", placement.CRITIC: "critic", placement.REWARD: "reward"}


def _groups(args: placement.Args) -> dict[str, int]:
    """For each role of the trainer, how many groups of its ranks train, or are asked, with responses of their own."""
    held = {model for group in placement.groups(args) for model in group.models}
    split = args["ds.ring_attn_size"] * args["ds.tensor_parallel_size"]
    return {role: max(placement.world_size(args, role) // split, 1) for model, role in _ROLES.items() if model in held}


def check(args: placement.Args) -> None:
    """Raises ``UsageError`` for batches that do not divide over the ranks, and for no room for a prompt."""
    longest, generated = args["data.max_len"], args["rollout.max_new_tokens"]
    if generated is not None and generated >= longest:
        raise UsageError(
            f"--rollout.max_new_tokens {generated} leaves no room for a prompt in --data.max_len {longest}, the length"
            " of prompt and response together. Raise --data.max_len, or lower --rollout.max_new_tokens."
        )
    if (args["reward.overlong_buffer_len"] or 0) > (generated or longest):
        raise UsageError(
            f"--reward.overlong_buffer_len {args['reward.overlong_buffer_len']:g} must be at most the longest response,"
            f" {generated or longest} tokens (--rollout.max_new_tokens). Give a fifth of it."
        )
    ring, tensor, batch = args["ds.ring_attn_size"], args["ds.tensor_parallel_size"], args["train.batch_size"]
    for role, groups in _groups(args).items():
        world = placement.world_size(args, role)
        if world % (ring * tensor):
            ranks = f"the {world} ranks of --{role}.num_nodes × --{role}.num_gpus_per_node"
            raise UsageError(f"--ds.ring_attn_size {ring} × --ds.tensor_parallel_size {tensor} must divide {ranks}.")
        trained = role in ("actor", "critic")
        if args["ds.zero_stage"] == 3 and trained and world % min(args["ds.zpg"], world):
            raise UsageError(f"--ds.zpg {args['ds.zpg']} must divide the {world} ranks of --{role}. Leave it out.")
        micro = 1 if trained and args["train.dynamic_batch_enable"] else args["train.micro_batch_size"]
        unit = groups * micro
        if batch % unit:
            below = f"{batch // unit * unit} or " if batch > unit else ""
            raise UsageError(
                f"--train.batch_size {batch} must be a multiple of {unit}, {groups} ranks of --{role} ×"
                f" --train.micro_batch_size {micro}. Fix: --train.batch_size {below}{ceil(batch / unit) * unit}."
            )
    prompts, responses = _step(args)
    if args["train.dynamic_batch_enable"] and batch > prompts * responses:
        whole = f"the {prompts * responses} responses of a step, of which --train.dynamic_batch_enable trains none then"
        raise UsageError(f"--train.batch_size {batch} is more than {whole}. Give at most as many.")
    if not trains_on_all_ranks(args, prompts):
        raise UsageError(
            f"{prompts * responses} responses of a step (--rollout.batch_size {prompts} ×"
            f" --rollout.n_samples_per_prompt {responses}) do not divide over {_groups(args)['actor']} ranks in"
            f" micro-batches of {args['rollout.micro_batch_size']} (--rollout.micro_batch_size) and"
            f" {args['train.micro_batch_size']} (--train.micro_batch_size), so ranks would wait forever. Change one."
        )


def _step(args: placement.Args) -> tuple[int, int]:
    """Prompts of a step, and responses to each."""
    prompts = min(args["rollout.batch_size"], args["rollout.vllm_generate_batch_size"])
    return prompts, args["rollout.n_samples_per_prompt"]


def trains_on_all_ranks(args: placement.Args, prompts: int) -> bool:
    """Whether all ranks train the same number of micro-batches in a step of this many prompts, and none has none.

    OpenRLHF 0.11.2 deals micro-batches of the rollout out in equal runs, the last ones shorter
    (``RayActorGroup.async_run_method_batch``), and reduces once for each micro-batch of the training.
    """
    responses, size, micro = prompts * _step(args)[1], args["rollout.micro_batch_size"], args["train.micro_batch_size"]
    for role, groups in _groups(args).items():
        if args["train.dynamic_batch_enable"]:  # which agrees on the number of micro-batches
            fits = responses >= groups
        else:
            batches = ceil(responses / size)
            each = ceil(batches / groups) * size
            trained = {max(min(responses - rank * each, each), 0) // micro for rank in range(groups)}
            fits = batches >= groups and (len(trained) == 1 or role in ("ref", "reward"))
        if not fits and groups > 1:
            return False
    return True


def _may_hang(args: placement.Args) -> bool:
    """Whether a step of fewer prompts than a whole one may hang."""
    return not all(trains_on_all_ranks(args, prompts) for prompts in range(1, _step(args)[0]))


def _rows(flags: Flags, args: placement.Args) -> int | None:
    """Rows that a pass goes through; None where they are not known."""
    counted = rows_of("--data.prompt_dataset", flags)
    if counted is None or (len(counted) > 1 and args["data.prompt_probs"]):
        return None
    most = args["data.max_samples"]
    return min(most, sum(min(most, rows) for rows in counted))


def _fitting(args: placement.Args, rows: int) -> int:
    """The largest number of rows, at most these, of which no step hangs."""
    whole, _ = _step(args)
    return next(n for n in range(rows, -1, -1) if n % whole == 0 or trains_on_all_ranks(args, n % whole))


def of_rows(flags: Flags) -> dict[str, Default]:
    """``--data.max_samples`` where the last step of a pass would hang."""
    with suppress(UsageError):  # a rule says it
        args = flags.args
        check(args)
        rows = _rows(flags, args) if _may_hang(args) and not flags.has(_ROWS) else None
        fitting = 0 if rows is None else _fitting(args, rows)
        return {_ROWS: str(fitting)} if fitting not in (0, rows) else {}
    return {}


def check_rows(flags: Flags) -> str | None:
    """Raises ``UsageError`` for rows that fill no batch or let the last step hang; returns why it could not look.

    OpenRLHF counts a run's steps in whole batches of a pass, and its learning rate ends with them.
    """
    args = flags.args
    whole, responses = _step(args)
    rows, batch = _rows(flags, args), args["train.batch_size"]
    epochs = args["train.num_episodes"] * args["train.max_epochs"]  # over which DeepSpeed accumulates
    if rows is not None and rows * responses * epochs < batch:
        raise UsageError(
            f"{rows} rows × --rollout.n_samples_per_prompt {responses} are fewer responses than --train.batch_size"
            f" {batch}, so no step would update the weights. Give more rows, or --train.batch_size {rows * responses}."
        )
    if not _may_hang(args):
        return None
    if rows is None:
        hangs = "A last step hangs if its responses do not divide over the ranks"
        return f"not checked: how many rows the data has. {hangs}; {_ROWS} with a multiple of {whole} prevents it."
    fitting = _fitting(args, rows)
    if fitting != rows:
        fix = f"{_ROWS} {fitting}" if fitting else f"a smaller --rollout.batch_size than {whole}, or more rows"
        last = f"the last step of {rows} rows has {rows % whole} prompts × {responses} responses"
        raise UsageError(f"{last}, which do not divide over {_groups(args)['actor']} ranks: it would hang. Fix: {fix}.")
    return None


def notes(flags: Flags, run: RunConfig) -> list[str]:
    """Warnings about the last step of a pass: rows that are left out, or that it may hang."""
    args, told = flags.args, []
    with suppress(UsageError):
        told = [line] if (line := check_rows(flags)) else []
    if not told and _ROWS in flags.added:
        undivided = f"responses that do not divide over {_groups(args)['actor']} ranks"
        why = f"since the last step of a pass would hang with {undivided}"
        told.append(f"{_ROWS} {flags.value(_ROWS)} is added, {why}; it bounds the rows of the evaluation too.")
    if args["algo.dynamic_filtering_enable"] and _may_hang(args):
        told.append(
            "--algo.dynamic_filtering_enable: the last step takes the remaining prompts, and hangs where their"
            " responses do not divide over the ranks. Add --train.dynamic_batch_enable, which prevents it."
        )
    return told
