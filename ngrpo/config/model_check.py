# SPDX-License-Identifier: Apache-2.0
"""Checks of a local model before a run: its files, its context, its chat template, and the options of the methods."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ngrpo.config.dataset_check import IMAGES, TEMPLATE, prompts
from ngrpo.config.features import MODEL
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture, conversation, packaged
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.gates.default import protected_ids

_LENGTH = "--data.max_len"
# Where a config.json has the longest context, by vLLM 0.26 to 0.31.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_TOKENIZERS = ("tokenizer*", "tekken*", "*.model", "vocab*", "*.tiktoken")


def name_of(flags: Flags) -> str:
    """The model's folder, or its name on the hub."""
    model = flags.value(MODEL) or ""
    return str(packaged.folder_of(model)) if model in packaged.PACKAGED else model


def check_options(flags: Flags, run: RunConfig) -> str | None:
    """The options of perturbation and policy noise and a local model, or why they were not compared."""
    model = flags.value(MODEL) or ""
    if Path(name_of(flags)).expanduser().is_dir():
        return check_model(name_of(flags), run.perturbation, run.policy_noise)
    if model in packaged.PACKAGED:
        return f"not checked: the folder of {model} is made when it is first used."
    taken = f"there is no folder {model!r}, so it is taken for a model of the hub"
    return f"not checked: {taken}; whether the hub has it is asked when the run starts."


def check_model(folder: str, perturbation: Perturbation | None, noise: PolicyNoise | None = None) -> str | None:
    """Checks a perturbation's and a noise's options against a local model; returns why it could not look, or None.

    Raises:
        UsageError: where an option, such as k, does not fit the vocabulary, or no weight gets noise.
    """
    config = Path(folder) / "config.json"
    if perturbation is not None and config.is_file():
        values = architecture.read_config(config)
        vocabulary = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
        if isinstance(vocabulary, int):
            protected_ids(perturbation.protect, vocabulary)
            perturbation.check_model(vocabulary)
    if noise is not None:
        names = architecture.parameter_names(folder)
        if names is None:
            return f"not checked: which weights get noise; --policy_noise {noise.name} looks once the model has loaded."
        noise.selected(names)
    return None


def check_folder(flags: Flags, run: RunConfig) -> str | None:
    """Raises ``UsageError`` for a local model without usable weights and a tokenizer, or too short for the run.

    A run that is only planned needs the config.json alone; then the result says what was not checked.
    """
    name = name_of(flags)
    path = architecture.find_config(name)
    if path is None:
        return None  # another rule says so
    config = architecture.read_config(path)
    text = nested if isinstance(nested := config.get("text_config"), Mapping) else config
    longest, limits = int(flags.or_default(_LENGTH)), [text[key] for key in _CONTEXT if isinstance(text.get(key), int)]
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    # A scaling of the positions makes the context longer than config.json says.
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    stretched = kind not in ("default", "llama3") or any(isinstance(part, Mapping) for part in scaling.values())
    if limits and longest > min(limits) and not stretched and not allowed:
        subject = f"{_LENGTH} {longest}: the model {name}"
        raise UsageError(f"{subject} has a context of {min(limits)} tokens. Give {_LENGTH} {min(limits)} or less.")
    if flags.value(IMAGES) not in (None, "0") and "vision_config" not in config:
        raise UsageError(f"{IMAGES}: the model {name} reads no pictures. Leave the flag out, or give an image model.")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    ending = "safetensors" if any(folder.glob("*.safetensors*")) else "bin"  # which transformers and vLLM load
    weights = [file for file in folder.glob(f"*.{ending}") if file.exists()]
    for index in folder.glob(f"*.{ending}.index.json"):
        named = set((read_json(index) or {}).get("weight_map", {}).values())
        if absent := sorted(named - {file.name for file in weights}):
            raise UsageError(f"model {name}: {index.name} names {absent[0]}, which is missing. Download it again.")
    for file in weights:
        with file.open("rb") as opened:
            if opened.read(16) in (b"", b"version https://"):
                raise UsageError(f"model {name}: {file.name} holds no weights. Download it again, with Git LFS.")
    missing = [] if weights else ["weights (*.safetensors)"]
    missing += [] if any(any(folder.glob(pattern)) for pattern in _TOKENIZERS) else ["tokenizer"]
    if missing and run.machine is None:
        raise UsageError(f"model folder {name} has no {' and no '.join(missing)}. Download the whole model.")
    return f"not checked: the folder has no {' and no '.join(missing)}, which a run needs." if missing else None


def check_template(flags: Flags, run: RunConfig) -> str | None:
    """Raises ``UsageError`` where a local tokenizer cannot render the prompts; returns why it could not look, or None.

    Of each form of conversation in a file one row is rendered.
    """
    arguments = conversation.template_arguments(run.chat_template_kwargs)
    if arguments and not flags.has(TEMPLATE):
        raise UsageError(f"{conversation.FLAG} has no effect without {TEMPLATE}. Add that flag.")
    folder = Path(name_of(flags)).expanduser()
    config = folder / "tokenizer_config.json"
    if not flags.has(TEMPLATE) or not config.is_file():
        return None
    if not any(folder.glob("chat_template*")) and "chat_template" not in (read_json(config) or {}):
        fix = "Use a model that has one, or leave the flag out and give prompts as texts."
        raise UsageError(f"{TEMPLATE}: the tokenizer in {folder} has no chat template. {fix}")
    try:
        tokenizer = _tokenizer(str(folder))
        plain = conversation.rendered(tokenizer, "x")
    except Exception as error:  # of any library or template: the run loads it again
        return f"not checked: the tokenizer in {folder} could not be used ({error})."
    conversation.rendered(tokenizer, "x", arguments)
    for where, prompt, tools in prompts(flags):
        try:
            conversation.rendered(tokenizer, prompt, {**arguments, **tools})
        except UsageError as error:
            raise UsageError(f"{where}: {error} (model {folder})") from None
        marks = [mark for mark in tokenizer.all_special_tokens if mark in plain and mark in str(prompt)]
        if isinstance(prompt, str) and marks:
            fix = f"Leave {TEMPLATE} out, or give the bare text."
            raise UsageError(f"{where}: the prompt has {marks[0]} of the chat template already. {fix}")
    return None


def cut_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """A warning for each file with a prompt that leaves no room for its response: its first tokens are left out."""
    folder, room = Path(name_of(flags)).expanduser(), int(flags.or_default(_LENGTH))
    room -= int(flags.value("--rollout.max_new_tokens") or 1)
    if not (folder / "tokenizer_config.json").is_file():
        return
    with suppress(Exception):  # of any tokenizer or file, which a rule reports
        for where, prompt, tools in prompts(flags, longest=True):
            if tools or len(str(prompt).encode()) > room:
                tokenizer = _tokenizer(str(folder))
                text = conversation.rendered(tokenizer, prompt, tools) if flags.has(TEMPLATE) else str(prompt)
                if (tokens := len(tokenizer(text, add_special_tokens=False)["input_ids"])) > room:
                    too_long = f"the prompt has {tokens} tokens. {_LENGTH} leaves room for {room}"
                    cut = f"its first {tokens - room} are left out, and those of other long prompts"
                    yield f"{where}: {too_long}, so that {cut}."


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Any:
    return packaged.load_tokenizer(folder, trust_remote_code=False)
