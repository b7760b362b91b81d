# SPDX-License-Identifier: Apache-2.0
"""What the numbers of OpenRLHF's flags must be, where its parser accepts more than the training can use."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, isfinite, nan


@dataclass(frozen=True)
class NumberRule:
    """What the numbers of some flags must be.

    Attributes:
        must_be: the rule in words, which completes "FLAG VALUE: must be …".
        kind: int or float, as argparse reads the flag.
        fits: whether a number follows the rule; NaN, for a text that is no number, follows none.
        flags: the flags without dashes, with blanks between them and the shell's patterns.
    """

    must_be: str
    kind: type
    fits: Callable[[float], bool]
    flags: str


RULES = (
    NumberRule(
        must_be="a whole number of at least 1",
        kind=int,
        fits=lambda n: n >= 1,
        flags="*.num_nodes *.num_gpus_per_node *.num_engines *.tensor_parallel_size *batch_size *.n_samples_per_prompt"
        " *.max_new_tokens *.max_tokens_per_gpu *.max_epochs *.num_episodes *.async_queue_size *.max_len *.max_samples"
        " *.ring_attn_* *.zpg *.logging_steps *.max_num *.horizon *.lora.alpha *.ns_steps",
    ),
    NumberRule(
        must_be="a whole number of at least 0",
        kind=int,
        fits=lambda n: n >= 0,
        flags="*.dataloader_num_workers *.max_images_* *.lora.rank",
    ),
    NumberRule(
        must_be="a whole number of at least 1, or -1 for never",
        kind=int,
        fits=lambda n: n == -1 or n >= 1,
        flags="*.save_steps eval.steps",
    ),
    NumberRule(
        must_be="a whole number from 0 to 4294967295",
        kind=int,
        fits=lambda n: 0 <= n < 2**32,
        flags="train.seed",
    ),
    NumberRule(must_be="0, 1, 2 or 3", kind=int, fits=lambda n: 0 <= n <= 3, flags="ds.zero_stage"),
    NumberRule(
        must_be="-1, since Ray gives each process its own",
        kind=int,
        fits=lambda n: n == -1,
        flags="local_rank",
    ),
    NumberRule(
        must_be="a number greater than 0",
        kind=float,
        fits=lambda n: 0 < n < inf,
        flags="rollout.temperature *.adam.eps",
    ),
    NumberRule(must_be="a number of GiB greater than 0", kind=float, fits=lambda n: n > 0, flags="ckpt.max_mem"),
    NumberRule(must_be="a number greater than 1", kind=float, fits=lambda n: 1 < n < inf, flags="*.dual_clip"),
    NumberRule(
        must_be="a number of at least 0",
        kind=float,
        fits=lambda n: 0 <= n < inf,
        flags="eval.temperature *.lr *.weight_decay *.max_norm *.eps_clip* *.value_clip *.init_coef *.kl.target"
        " reward.overlong_*",
    ),
    NumberRule(
        must_be="a number of at least 0, or inf",
        kind=float,
        fits=lambda n: n >= 0,
        flags="*.is_correction_threshold",
    ),
    NumberRule(
        must_be="a number in (0, 1]",
        kind=float,
        fits=lambda n: 0 < n <= 1,
        flags="rollout.top_p *.gpu_memory_utilization",
    ),
    NumberRule(must_be="a number in [0, 1)", kind=float, fits=lambda n: 0 <= n < 1, flags="*.betas *.momentum"),
    NumberRule(
        must_be="a number in [0, 1]",
        kind=float,
        fits=lambda n: 0 <= n <= 1,
        flags="*.gamma *.lambd *.ema_beta *.lora.dropout *_ratio",
    ),
    NumberRule(must_be="a number of at most 1", kind=float, fits=lambda n: -inf < n <= 1, flags="*.stop_properly_*"),
    NumberRule(
        must_be="a number",
        kind=float,
        fits=isfinite,
        flags="*.clip_range *.dynamic_filtering_range *.entropy_coef *.aux_loss_coef",
    ),
)


def rule_of(name: str) -> NumberRule | None:
    """The first rule for a flag's numbers; None for a flag without one."""
    for rule in RULES:
        if any(fnmatchcase(name, f"--{pattern}") for pattern in rule.flags.split()):
            return rule
    return None


def number(text: str, kind: type) -> float:
    """The number that a text is, as argparse reads it; NaN, which no range holds, for any other text."""
    try:
        return kind(text)
    except ValueError:
        return nan
