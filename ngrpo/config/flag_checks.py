# SPDX-License-Identifier: Apache-2.0
"""What OpenRLHF 0.11.2 cannot use of what its parser takes; it fails, hangs or waits, once all has started.

Values are checked one by one. Sizes of a step must fit each other.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import pairwise
from math import ceil, inf, isclose, isfinite, nan
from pathlib import Path

from ngrpo.config.features import MODEL
from ngrpo.config.input_checks import rows_of
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Default, Flag, Flags
from perturbations.errors import UsageError, nearest

# --- values -----------------------------------------------------------------------------------------

LOAD = "--ckpt.load_enable"
_UNIVERSAL = "--ds.use_universal_ckpt"
_OF_A_RANK = "*zero_pp_rank_*_optim_states.pt"  # DeepSpeed 0.19: a rank's part of the optimizer
_OUTPUTS = ("--logger.tensorboard_dir", "--ckpt.path", "--ckpt.output_dir")
_READ = ("model_name_or_path", "dataset", "remote_url", "agent_func_path")  # ends of flags that name files
# What a number may be, in words: its type, whether it is one, and the flags, with patterns of the shell.
_NUMBERS: dict[str, tuple[type, Callable[[float], bool], str]] = {
    "a whole number of at least 1": (
        int,
        lambda n: n >= 1,
        "*.num_nodes *.num_gpus_per_node *.num_engines *.tensor_parallel_size *batch_size *.n_samples_per_prompt"
        " *.max_new_tokens *.max_tokens_per_gpu *.max_epochs *.num_episodes *.async_queue_size *.max_len *.max_samples"
        " *.ring_attn_* *.zpg *.logging_steps *.max_num *.horizon *.lora.alpha *.ns_steps",
    ),
    "a whole number of at least 0": (int, lambda n: n >= 0, "*.dataloader_num_workers *.max_images_* *.lora.rank"),
    "a whole number of at least 1, or -1 for never": (int, lambda n: n == -1 or n >= 1, "*.save_steps eval.steps"),
    "a whole number from 0 to 4294967295": (int, lambda n: 0 <= n < 2**32, "train.seed"),
    "0, 1, 2 or 3": (int, lambda n: 0 <= n <= 3, "ds.zero_stage"),
    "-1, since Ray gives each process its own": (int, lambda n: n == -1, "local_rank"),
    "a number greater than 0": (float, lambda n: 0 < n < inf, "rollout.temperature *.adam.eps"),
    "a number of GiB greater than 0": (float, lambda n: n > 0, "ckpt.max_mem"),
    "a number greater than 1": (float, lambda n: 1 < n < inf, "*.dual_clip"),
    "a number of at least 0": (
        float,
        lambda n: 0 <= n < inf,
        "eval.temperature *.lr *.weight_decay *.max_norm *.eps_clip* *.value_clip *.init_coef *.kl.target"
        " reward.overlong_*",
    ),
    "a number of at least 0, or inf": (float, lambda n: n >= 0, "*.is_correction_threshold"),
    "a number in (0, 1]": (float, lambda n: 0 < n <= 1, "rollout.top_p *.gpu_memory_utilization"),
    "a number in [0, 1)": (float, lambda n: 0 <= n < 1, "*.betas *.momentum"),
    "a number in [0, 1]": (float, lambda n: 0 <= n <= 1, "*.gamma *.lambd *.ema_beta *.lora.dropout *_ratio"),
    "a number of at most 1": (float, lambda n: -inf < n <= 1, "*.stop_properly_*"),
    "a number": (float, isfinite, "*.clip_range *.dynamic_filtering_range *.entropy_coef *.aux_loss_coef"),
}
_LIMITS = {
    f"--{pattern}": (words, kind, fits)
    for words, (kind, fits, patterns) in _NUMBERS.items()
    for pattern in patterns.split()
}
# Pairs of numbers of which the lower one comes first.
_BOUNDS = ("--reward.clip_range", "--algo.dynamic_filtering_range", "--algo.advantage.is_correction_threshold")
# transformers' schedules that need no further setting.
_SCHEDULES = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt"
_SCHEDULES += " cosine_with_min_lr cosine_warmup_with_min_lr"
_ATTENTION = "eager sdpa flex_attention flash_attention_2 flash_attention_3 flash_attention_4"
_WORDS = {
    "--actor.lr_scheduler": _SCHEDULES.split(),
    "--critic.lr_scheduler": _SCHEDULES.split(),
    "--ds.grad_accum_dtype": ["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"],
    "--ds.attn_implementation": _ATTENTION.split(),
    "--vllm.sync_backend": ["nccl", "gloo"],
}


def check(flags: Flags) -> None:
    """Raises ``UsageError`` for a value that OpenRLHF cannot use, and for no model."""
    packaged.check_name(flags.value(MODEL))
    for flag in flags:
        if allowed := _allowed(flag, flags):
            raise UsageError(f"{flag.name} {' '.join(flag.values)}".rstrip() + f": must be {allowed}.")


def _allowed(flag: Flag, flags: Flags) -> str:
    """What the value of a flag must be; empty where it may be what it is."""
    value = flag.values[0] if flag.values else ""
    if limits := next((each for pattern, each in _LIMITS.items() if fnmatchcase(flag.name, pattern)), None):
        words, kind, fits = limits
        numbers = [number(part, kind) for part in flag.values] or [nan]
        if not all(map(fits, numbers)):
            return words
        if flag.name in _BOUNDS and any(low > high for low, high in pairwise(numbers)):
            return "the lower bound, then the upper one"
    elif (words := _WORDS.get(flag.name)) is not None and value not in words:
        if flag.name != "--ds.attn_implementation" or "/" not in value:  # a kernel of the hub
            return f"one of {', '.join(words)}.{nearest(value, words)}".rstrip(".")
    elif flag.name == "--data.input_template":
        return "" if conversation.is_input_template(value) else conversation.INPUT_TEMPLATES
    elif flag.name == "--data.prompt_probs":
        shares = [number(part, float) for part in value.split(",")]
        names = (flags.value("--data.prompt_dataset") or "").split(",")
        if len(shares) != len(names) or not all(share >= 0 for share in shares) or not isclose(sum(shares), 1):
            return f"a number of at least 0 for each of {len(names)} datasets, with commas, which sum to 1"
    elif flag.name == "--ckpt.best_metric_key":
        group = flags.value("--eval.n_samples_per_prompt") or "4"
        named = value.startswith("eval_") and value.endswith(("_pass1", f"_pass{group}"))
        if value not in ("", "none") and not named:
            return f"eval_NAME_pass1 or eval_NAME_pass{group}, where NAME is a row's datasource or default; or none"
    return ""


def number(text: str, kind: type) -> float:
    """The number that a text is, as argparse reads it; NaN, which no range holds, for any other text."""
    try:
        return kind(text)
    except ValueError:
        return nan


def check_evaluated(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where an evaluation at the start is requested and there is nothing to evaluate on."""
    if run.eval_at_start and not flags.value("--eval.dataset"):
        raise UsageError("--eval.at_start needs problems: give --eval.dataset FILE, or a --task that holds some out.")


def check_checkpoint(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where no checkpoint in the folder is complete: OpenRLHF fails once all is loaded."""
    latest = _latest(flags)
    if not flags.has(LOAD) or not latest.parent.is_dir():
        return
    fix = f"Remove that folder to start at step 0, or leave {LOAD} out."
    if not latest.is_file():
        needed = f"{latest.name} (see DeepSpeed's ds_to_universal.py for {_UNIVERSAL})"
        why = "(a run ended while it saved its first)" if latest.name == "latest" else f"since it lacks {needed}"
        raise UsageError(f"{LOAD}: no checkpoint in {latest.parent} is complete {why}. {fix}")
    step = latest.read_text(encoding="utf-8").strip()
    if not step or not any((latest.parent / step).glob("*")):
        subject = f"{LOAD}: {latest} names the checkpoint {step!r}"
        fix = f"Write the name of a complete one into that file. {fix}"
        raise UsageError(f"{subject}, and there is no such folder with files. {fix}")
    if flags.has("--train.enable_ema"):
        raise UsageError(f"{LOAD}: a checkpoint lacks the moving average. Leave --train.enable_ema out. {fix}")
    ranks = len(list((latest.parent / step).glob(_OF_A_RANK)))
    if ranks and not flags.has(_UNIVERSAL):
        _check_ranks(latest.parent / step, ranks, flags.args)


def _check_ranks(checkpoint: Path, ranks: int, args: placement.Args) -> None:
    """Raises ``UsageError`` for a checkpoint of another number of ranks than the actor's: DeepSpeed refuses it."""
    world = placement.world_size(args, "actor")
    if ranks != world:
        nodes, gpus = args["actor.num_nodes"], args["actor.num_gpus_per_node"]
        raise UsageError(
            f"{LOAD}: the checkpoint {checkpoint} is of {ranks} ranks, and --actor.num_nodes {nodes} ×"
            f" --actor.num_gpus_per_node {gpus} are {world}. Train on {ranks} GPUs, or convert the checkpoint with"
            f" DeepSpeed's ds_to_universal.py and add {_UNIVERSAL}."
        )


def first_step(flags: Flags) -> str:
    """A line on where the run starts."""
    latest = _latest(flags)
    if not flags.has(LOAD):
        return "starts at step 0"
    if not latest.is_file():
        return f"warning: {LOAD}: there is no checkpoint in {latest.parent}, so the run starts at step 0"
    return f"continues after {latest.read_text().strip()} of {latest.parent} ({LOAD})"


def resumed_step(flags: Flags) -> int:
    """The step after which the run continues; 0 for a run that starts from the model."""
    latest = _latest(flags)
    if not flags.has(LOAD) or not latest.is_file():
        return 0
    step = re.search(r"\d+", latest.read_text(encoding="utf-8"))  # of OpenRLHF's global_step40
    return int(step[0]) if step else 0


def _latest(flags: Flags) -> Path:
    # OpenRLHF's actor and DeepSpeed give these names.
    name = "latest_universal" if flags.has(_UNIVERSAL) else "latest"
    return Path(os.path.abspath(flags.value("--ckpt.path") or "."), "_actor", name)


def check_output(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where a folder of the run or its log file can be neither made nor written, or is input."""
    outputs = {"--run-dir": run.run_dir, "--log-file": run.log_file, **{flag: flags.value(flag) for flag in _OUTPUTS}}
    inputs = {
        Path(value).expanduser().resolve(): flag.name
        for flag in flags
        if flag.name.endswith(_READ) and flag.values
        for value in flag.values[0].split(",")
        if value
    }
    for flag, name in outputs.items():
        if not name:
            continue
        path = Path(name).expanduser()
        if path.exists() and path.is_dir() == (flag == "--log-file"):
            raise UsageError(f"{flag} {path}: is a {'folder' if path.is_dir() else 'file'}. Give another path.")
        if path.resolve() in inputs:
            raise UsageError(f"{flag} {path}: is what {inputs[path.resolve()]} reads. Give another path.")
        base = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not (base.is_dir() or base == path) or not os.access(base, os.W_OK):
            raise UsageError(f"{flag} {path}: {base} is no folder that may be written. Give another path.")


# --- batches ----------------------------------------------------------------------------------------

_ROWS = "--data.max_samples"


def check_batches(args: placement.Args) -> None:
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
    for role, groups in placement.rank_groups(args).items():
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
            f" --rollout.n_samples_per_prompt {responses}) do not divide over {placement.rank_groups(args)['actor']}"
            f" ranks in micro-batches of {args['rollout.micro_batch_size']} (--rollout.micro_batch_size) and"
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
    for role, groups in placement.rank_groups(args).items():
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


def row_limit(flags: Flags) -> dict[str, Default]:
    """``--data.max_samples`` where the last step of a pass would hang."""
    with suppress(UsageError):  # a rule says it
        args = flags.args
        check_batches(args)
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
        last = f"the last step of {rows} rows has {rows % whole} prompts × {responses} responses, which do not divide"
        raise UsageError(f"{last} over {placement.rank_groups(args)['actor']} ranks: it would hang. Fix: {fix}.")
    return None


def last_step_notes(flags: Flags, run: RunConfig) -> list[str]:
    """Warnings about the last step of a pass: rows that are left out, or that it may hang."""
    args, told = flags.args, []
    with suppress(UsageError):
        told = [line] if (line := check_rows(flags)) else []
    if not told and _ROWS in flags.added:
        undivided = f"responses that do not divide over {placement.rank_groups(args)['actor']} ranks"
        why = f"since the last step of a pass would hang with {undivided}"
        told.append(f"{_ROWS} {flags.value(_ROWS)} is added, {why}; it bounds the rows of the evaluation too.")
    if args["algo.dynamic_filtering_enable"] and _may_hang(args):
        told.append(
            "--algo.dynamic_filtering_enable: the last step takes the remaining prompts, and hangs where their"
            " responses do not divide over the ranks. Add --train.dynamic_batch_enable, which prevents it."
        )
    return told
