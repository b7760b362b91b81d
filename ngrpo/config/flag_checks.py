# SPDX-License-Identifier: Apache-2.0
"""Values of flags that OpenRLHF 0.11.2 parses, but with which the training later fails, hangs or waits.

The first part checks values one by one, the second the checkpoint and the output. `batch_checks.py` checks whether the
sizes of a step fit each other.
"""

import os
import re
from itertools import pairwise
from math import isclose, nan
from pathlib import Path

from ngrpo.config import number_rules
from ngrpo.config.feature_kinds import ESTIMATOR, MODEL
from ngrpo.config.input_checks import check_home
from ngrpo.config.number_rules import NumberRule
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flag, Flags, check_words
from perturbations.errors import UsageError, nearest

# --- values -----------------------------------------------------------------------------------------

# Flags with a lower and an upper bound.
_BOUNDS = ("--reward.clip_range", "--algo.dynamic_filtering_range", "--algo.advantage.is_correction_threshold")
# transformers' schedules that need no further setting.
_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
)
_ATTENTION = "--ds.attn_implementation"
_WORDS = {
    "--actor.lr_scheduler": _SCHEDULES,
    "--critic.lr_scheduler": _SCHEDULES,
    "--ds.grad_accum_dtype": ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    _ATTENTION: ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
    "--vllm.sync_backend": ("nccl", "gloo"),
}


def check(flags: Flags) -> None:
    """Raises ``UsageError`` for a flag or a value that OpenRLHF cannot use, and for no model."""
    packaged.check_name(flags.value(MODEL))
    check_words(flags)
    for flag in flags:
        must_be = _violated_rule(flag, flags)
        if must_be:
            as_written = f"{flag.name} {' '.join(flag.values)}".rstrip()
            end = "" if must_be.endswith("?") else "."
            raise UsageError(f"{as_written}: must be {must_be}{end}")


def _violated_rule(flag: Flag, flags: Flags) -> str:
    """What the value of a flag must be, in words; empty where the value is allowed."""
    value = flag.values[0] if flag.values else ""
    number_rule = number_rules.rule_of(flag.name)
    if number_rule is not None:
        return _violated_number_rule(flag, number_rule)
    if flag.name in _WORDS:
        return _violated_choice(flag.name, value)
    if flag.name == "--data.input_template":
        return "" if conversation.is_input_template(value) else conversation.INPUT_TEMPLATES
    if flag.name == "--data.prompt_probs":
        return _violated_shares(value, flags)
    if flag.name == "--ckpt.best_metric_key":
        return _violated_metric(value, flags)
    return ""


def _violated_number_rule(flag: Flag, rule: NumberRule) -> str:
    """What the numbers of a flag must be, in words; empty where they are so."""
    numbers = [number_rules.number(value, rule.kind) for value in flag.values] or [nan]
    if not all(rule.fits(value) for value in numbers):
        return rule.must_be
    if flag.name in _BOUNDS and any(low > high for low, high in pairwise(numbers)):
        return "the lower bound, then the upper one"
    return ""


def _violated_shares(value: str, flags: Flags) -> str:
    """What the shares of the prompt datasets must be, in words; empty where they are so."""
    names = (flags.value("--data.prompt_dataset") or "").split(",")
    shares = [number_rules.number(share, float) for share in value.split(",")]
    are_shares = all(share > 0 for share in shares) and isclose(sum(shares), 1)
    if are_shares and len(shares) == len(names):
        return ""
    return f"a number above 0 for each of {len(names)} datasets, with commas, which sum to 1"


def _violated_metric(value: str, flags: Flags) -> str:
    """What the metric of the best checkpoint must be, in words; empty where it is one of an evaluation."""
    responses = flags.value("--eval.n_samples_per_prompt") or "4"
    is_of_evaluation = value.startswith("eval_") and value.endswith(("_pass1", f"_pass{responses}"))
    if is_of_evaluation or value in ("", "none"):
        return ""
    return f"eval_NAME_pass1 or eval_NAME_pass{responses}, where NAME is a row's datasource or default; or none"


def _violated_choice(name: str, value: str) -> str:
    """The words that a flag takes; empty where its value is one of them."""
    choices = _WORDS[name]
    if value in choices:
        return ""
    if name == _ATTENTION and "/" in value:  # transformers loads OWNER/NAME, a kernel, from the hub
        return ""
    hint = nearest(value, choices)
    return f"one of {', '.join(choices)}" + (f".{hint}" if hint else "")


def check_evaluated(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where an evaluation at the start is requested and there is nothing to evaluate on."""
    if run.eval_at_start and not flags.value("--eval.dataset"):
        raise UsageError("--eval.at_start needs problems: give --eval.dataset FILE, or a --task that holds some out.")


# --- checkpoint and output --------------------------------------------------------------------------

LOAD = "--ckpt.load_enable"
_UNIVERSAL = "--ds.use_universal_ckpt"
_RANK_FILES = "*zero_pp_rank_*_optim_states.pt"  # DeepSpeed 0.19: a rank's part of the optimizer
_OUTPUTS = ("--logger.tensorboard_dir", "--ckpt.path", "--ckpt.output_dir")
# Flags whose names end so name files that are read.
_INPUT_ENDINGS = ("model_name_or_path", "dataset", "remote_url", "agent_func_path")


def check_checkpoint(flags: Flags) -> None:
    """Raises ``UsageError`` where no checkpoint in the folder is complete: OpenRLHF fails once all is loaded."""
    latest = _latest(flags)
    folder = latest.parent
    if not flags.has(LOAD) or not folder.is_dir():
        return
    fix = f"Remove that folder to start at step 0, or leave {LOAD} out."
    if not latest.is_file():
        if flags.has(_UNIVERSAL):
            raise UsageError(
                f"{LOAD}: no checkpoint in {folder} is complete since it lacks {latest.name} (see DeepSpeed's"
                f" ds_to_universal.py for {_UNIVERSAL}). {fix}"
            )
        raise UsageError(f"{LOAD}: no checkpoint in {folder} is complete (a run ended while it saved its first). {fix}")
    name = latest.read_text(encoding="utf-8").strip()
    checkpoint = folder / name
    if not name or not any(checkpoint.glob("*")):
        raise UsageError(
            f"{LOAD}: {latest} names the checkpoint {name!r}, and there is no such folder with files. Write the name of"
            f" a complete one into that file. {fix}"
        )
    if flags.has("--train.enable_ema"):
        raise UsageError(f"{LOAD}: a checkpoint lacks the moving average. Leave --train.enable_ema out. {fix}")
    if flags.or_default(ESTIMATOR) == "gae":
        _check_critic(name, folder.parent / "_critic" / latest.name, fix)
    saved_ranks = len(list(checkpoint.glob(_RANK_FILES)))
    if saved_ranks and not flags.has(_UNIVERSAL):
        _check_ranks(checkpoint, saved_ranks, flags.args)


def _check_critic(actor_checkpoint: str, latest: Path, fix: str) -> None:
    """Raises ``UsageError`` where the critic's latest checkpoint is of another step than the actor's.

    Both are saved at once. Of a run that ended meanwhile OpenRLHF 0.11.2 loads a critic of another step, or a new one.
    """
    if not latest.parent.is_dir():  # the run before had no critic
        return
    critic_checkpoint = latest.read_text(encoding="utf-8").strip() if latest.is_file() else "none"
    if critic_checkpoint != actor_checkpoint:
        raise UsageError(
            f"{LOAD}: the latest checkpoint of the actor is {actor_checkpoint}, and of the critic {critic_checkpoint}"
            f" ({latest}): a run ended while it saved them. Write the name of a checkpoint that _actor and _critic both"
            f" have into the files {latest.name} of both. {fix}"
        )


def _check_ranks(checkpoint: Path, saved_ranks: int, args: placement.Args) -> None:
    """Raises ``UsageError`` for a checkpoint of another number of ranks than the actor's: DeepSpeed refuses it."""
    ranks = placement.world_size(args, "actor")
    if saved_ranks != ranks:
        raise UsageError(
            f"{LOAD}: the checkpoint {checkpoint} is of {saved_ranks} ranks, and --actor.num_nodes"
            f" {args['actor.num_nodes']} × --actor.num_gpus_per_node {args['actor.num_gpus_per_node']} are {ranks}."
            f" Train on {saved_ranks} GPUs, or convert the checkpoint with DeepSpeed's ds_to_universal.py and add"
            f" {_UNIVERSAL}."
        )


def about_start(flags: Flags) -> str:
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
    """The file with the name of the latest checkpoint: OpenRLHF's actor names its folder, DeepSpeed the file."""
    name = "latest_universal" if flags.has(_UNIVERSAL) else "latest"
    return Path(os.path.abspath(flags.value("--ckpt.path") or "."), "_actor", name)


def check_output(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where a folder of the run or its log file can be neither made nor written, or is input."""
    outputs = {"--run-dir": run.run_dir, "--log-file": run.log_file}
    for flag_name in _OUTPUTS:
        outputs[flag_name] = flags.value(flag_name)
        check_home(flag_name, outputs[flag_name] or "")
    reader_of_path = _readers(flags)
    for flag_name, name in outputs.items():
        if name:
            path = Path(name).expanduser()
            _check_output_path(flag_name, path, reader=reader_of_path.get(path.resolve()))


def _readers(flags: Flags) -> dict[Path, str]:
    """The flag that reads each path which a run takes as input."""
    reader_of_path = {}
    for flag in flags:
        if flag.name.endswith(_INPUT_ENDINGS) and flag.values:
            for name in flag.values[0].split(","):
                if name:
                    reader_of_path[Path(name).expanduser().resolve()] = flag.name
    return reader_of_path


def _check_output_path(flag_name: str, path: Path, *, reader: str | None) -> None:
    """Raises ``UsageError`` for a path of the wrong kind, one that a flag reads, and one that cannot be written.

    ``reader``: the flag that reads the path; None for none.
    """
    must_be_file = flag_name == "--log-file"
    if path.is_dir() and must_be_file:
        raise UsageError(f"{flag_name} {path}: is a folder. Give another path.")
    if path.exists() and not path.is_dir() and not must_be_file:
        raise UsageError(f"{flag_name} {path}: is a file. Give another path.")
    if reader is not None:
        raise UsageError(f"{flag_name} {path}: is what {reader} reads. Give another path.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    can_hold_output = existing.is_dir() or existing == path
    if not can_hold_output or not os.access(existing, os.W_OK):
        raise UsageError(f"{flag_name} {path}: {existing} is no folder that may be written. Give another path.")
