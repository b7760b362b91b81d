# SPDX-License-Identifier: Apache-2.0
"""Checks of what a run reads, OpenRLHF's datasets and the model, before any model loads."""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.config.features import MODEL
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture, conversation, packaged
from ngrpo.machine.models.conversation import PICTURES, TOOLS
from ngrpo.machine.storage.datafiles import ENDINGS, is_nothing, read_rows
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations.base import Perturbation
from perturbations.errors import UsageError, nearest
from perturbations.gates.default import protected_ids

# --- datasets: files, columns and values ------------------------------------------------------------

DATASETS = {"--data.prompt_dataset": "--data.prompt_split", "--eval.dataset": "--eval.split"}
"""The flags of datasets, each with that of its split."""
_CHECKED = 100_000  # rows that are looked at before a run: a second or two
_SHAPES = 64  # prompts that are kept to be rendered
_IN_FOLDERS = (*ENDINGS, ".arrow", ".txt", ".gz", ".zst")
_NOTHING, _EMPTY, _TEXT, _MESSAGES, _MARKED = "nothing", "empty", "a text", "chat messages", "a text with <image>"
_WRITTEN = "chat messages written as a text"
TEMPLATE, IMAGES = conversation.APPLY, "--data.max_images_per_prompt"


class _Content(NamedTuple):
    """What a file holds.

    ``columns``: of each the first row of each kind of value. ``prompts``: a row, its prompt and its tools, of each form
    of conversation. ``longest``: the same of the row with the most characters.
    """

    columns: dict[str, dict[str, int]]
    rows: int
    prompts: dict[tuple[Any, ...], tuple[int, Any, dict[str, Any]]]
    longest: tuple[int, Any, dict[str, Any]]


def check_files(flags: Flags) -> None:
    """Checks the datasets that OpenRLHF would open only after every model has loaded; hub names are left to it.

    Raises:
        UsageError: for a missing, empty or unreadable file; a column missing in it or in one of its first 100,000
            rows; an input that the run cannot render; a tool or picture that no prompt shows.
    """
    if not flags.value("--data.prompt_dataset"):
        raise UsageError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    for flag, split in DATASETS.items():
        for name in local_files(flag, flags.value(flag)):
            if (given := flags.value(split) or "train") != "train":
                raise UsageError(f"{split} {given}: a file such as {name} has the split train alone. Leave it out.")
            _check_file(flag, name, flags)


def _check_file(flag: str, name: str, flags: Flags) -> None:
    """Raises ``UsageError`` as :func:`check_files`."""
    columns = _read(flag, name, flags).columns
    subject, (prompt, label, images) = f"{flag} {name}", _columns(flags)
    if name.startswith("~"):
        raise UsageError(f"{subject}: OpenRLHF does not expand '~'. Write {Path(name).expanduser()}.")
    if prompt == label:
        raise UsageError(f"--data.label_key {label}: is the column of the prompts too. Name the column of answers.")
    for column_flag, column in (("--data.input_key", prompt), ("--data.label_key", label)):
        if column and column not in columns:
            fix = f"Its columns: {', '.join(columns)}. Name the right one with {column_flag}."
            raise UsageError(f"{subject} has no column {column!r} ({column_flag}).{nearest(column, columns)} {fix}")
        if column and _NOTHING in columns[column]:
            row = columns[column][_NOTHING]
            raise UsageError(f"{subject}: row {row} has no {column!r} ({column_flag}). Give it one, or leave it out.")
    shown = flags.value(IMAGES) not in (None, "0")
    no_pictures = f"Add {IMAGES} N with a model that reads pictures, or leave the pictures out."
    fixes = {_TEXT: "", _MARKED: "", _MESSAGES: f"Add {TEMPLATE}, or write the prompts as texts.", **conversation.FIXES}
    if flags.has(TEMPLATE):
        fixes[_MESSAGES] = ""
        fixes[PICTURES] = fixes[_MARKED] = "" if shown else no_pictures
    for kind, row in columns[prompt].items():
        if fix := fixes.get(kind, conversation.PROMPT):
            raise UsageError(f"{subject}: the input {prompt!r} is {kind} in row {row}. {fix}")
    no_tools = "" if flags.has(TEMPLATE) else f"Add {TEMPLATE}, or leave the column out."
    for column, fix in {images: "" if shown else no_pictures, TOOLS: no_tools}.items():
        rows = [row for kind, row in columns.get(column, {}).items() if kind != _NOTHING]
        if fix and rows and column not in (prompt, label):
            raise UsageError(f"{subject}: row {rows[0]} has {column}, which no prompt shows. {fix}")


def label_note(flag: str, flags: Flags) -> str | None:
    """A warning about labels that are neither texts nor numbers, or empty, which only some rewards can read."""
    label = flags.value("--data.label_key")
    for name in local_files(flag, flags.value(flag)) if label else ():
        rows = _read(flag, name, flags).columns.get(label or "", {})
        for kind in (_EMPTY, "a list", _MESSAGES, "an object"):
            if kind in rows:
                subject = f"{flag} {name}: the label {label!r} is {kind} in row {rows[kind]}"
                return f"{subject}; the reward is given it as it is."
    return None


def rows_of(flag: str, flags: Flags) -> list[int] | None:
    """Rows of each of the named datasets; None where one is no file, is missing, or has more than are looked at."""
    value = flags.value(flag) or ""
    try:
        rows = [_read(flag, name, flags).rows for name in local_files(flag, value)]
    except UsageError:
        return None
    return rows if len(rows) == len(value.split(",")) and max(rows, default=_CHECKED) < _CHECKED else None


def prompts(flags: Flags, *, longest: bool = False) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Where a prompt is, a prompt and its tools: of each form of conversation in the files, or each file's longest."""
    for flag in DATASETS:
        for name in local_files(flag, flags.value(flag)):
            content = _read(flag, name, flags)
            for row, prompt, tools in [content.longest] if longest else content.prompts.values():
                yield f"{flag} {name}: row {row}", prompt, tools


def is_checked(flag: str, value: str) -> bool:
    """Whether :func:`check_files` looks into each of the named datasets; hub names and folders are OpenRLHF's."""
    return len(list(local_files(flag, value))) == len(value.split(","))


def local_files(flag: str, value: str | None) -> Iterator[str]:
    """The files with checked rows among the names of a flag.

    Raises:
        UsageError: for a name that OpenRLHF could not load: a folder without data, or a file of another kind.
    """
    for given in (part.strip() for part in value.split(",")) if value else ():
        name, at, part = given.partition("@")
        path = Path(name := name.strip()).expanduser()
        if not name:
            raise UsageError(f"{flag} {value}: a name is missing before or after a comma. Leave the comma out.")
        if at and path.is_file():
            raise UsageError(f"{flag} {given}: a file has no part {part!r}. Leave it out: {name}.")
        # OpenRLHF 0.11.2 (datasets/utils.py) loads files of our endings and .arrow; all else is a folder or a hub name.
        if path.is_dir() and not any(file.suffix in _IN_FOLDERS for file in path.rglob("*")):
            fix = "Give a file, or a folder that holds some."
            raise UsageError(f"{flag} {name}: the folder holds no data files ({', '.join(_IN_FOLDERS)}). {fix}")
        if path.suffix in ENDINGS or (path.suffix == ".arrow" and not path.exists()):
            yield name  # a missing file is told where it is read
        elif path.exists() and not path.is_dir() and path.suffix != ".arrow":
            raise UsageError(
                f"{flag} {name}: is no dataset; OpenRLHF reads files that end in {', '.join((*ENDINGS, '.arrow'))}."
                " Give one of these, a folder or a hub dataset."
            )
        elif not path.exists() and name.startswith(("/", ".", "~")):
            raise UsageError(f"{flag} {name}: there is no such folder. Give an existing file or a hub dataset.")


def _columns(flags: Flags) -> tuple[str, str, str]:
    """The columns of prompts, labels and pictures."""
    keys = ("--data.input_key", "--data.label_key", "--data.image_key")
    prompt, label, images = (flags.value(key) or "" for key in keys)
    return prompt or "input", label, images or "images"


def _read(flag: str, name: str, flags: Flags) -> _Content:
    path = Path(name).expanduser()
    return _read_once(flag, name, _columns(flags), path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache  # a comparison checks the same file for each of its strategies
def _read_once(flag: str, name: str, keys: tuple[str, str, str], mtime: int) -> _Content:
    rows, (prompt, label, images) = read_rows(flag, name, _CHECKED), keys
    columns: dict[str, dict[str, int]] = {column: {} for row in rows for column in row}
    kept: dict[tuple[Any, ...], tuple[int, Any, dict[str, Any]]] = {}
    longest, most = (0, None, {}), -1
    for number, row in enumerate(rows, start=1):
        try:
            tools = {} if TOOLS in (prompt, label) else conversation.tools_of(row)
        except UsageError as error:
            raise UsageError(f"{flag} {name}: row {number}: {error}") from None
        for column, kinds in columns.items():
            value = row.get(column)
            if column not in (prompt, label) and (value == [] or (column in (TOOLS, images) and not value)):
                value = None
            kind = _kind(value, of_prompt=column == prompt)
            kinds.setdefault(kind, number)
            if column == prompt and kind in (_TEXT, _MESSAGES) and len(kept) < _SHAPES:
                parts = value if isinstance(value, list) else ()
                form = (bool(tools), *((p["role"], type(p.get("content")), bool(p.get("tool_calls"))) for p in parts))
                kept.setdefault(form, (number, value, tools))
        if (size := len(str(row.get(prompt)))) > most:
            longest, most = (number, row.get(prompt), tools), size
    return _Content(columns, len(rows), kept, longest)


def _kind(value: object, *, of_prompt: bool) -> str:
    """A word for the kind of a value; of prompts there are more."""
    if isinstance(value, list):
        kind = conversation.fault(value) or _MESSAGES
        return kind if of_prompt or kind != conversation.ANSWERED else _MESSAGES
    if isinstance(value, str):
        if of_prompt and value.lstrip().startswith(('[{"role"', "[{'role'")):
            return _WRITTEN
        if of_prompt and "<image>" in value:
            return _MARKED
        return _TEXT if value.strip() else _EMPTY
    if isinstance(value, bool):
        return "true or false"
    if is_nothing(value):
        return _NOTHING
    kinds = ((dict, "an object"), ((int, float), "a number"))
    return next((word for kind, word in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


# --- models -----------------------------------------------------------------------------------------

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
    if not flags.has(TEMPLATE) or not (folder / "tokenizer_config.json").is_file():
        return None
    if not _has_template(folder):
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


def template_notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """A warning about a training without the chat template that a local tokenizer has."""
    folder = Path(name_of(flags)).expanduser()
    if not flags.has(TEMPLATE) and _has_template(folder):
        ((flag, text),) = conversation.flags_like(flags).items()
        yield (
            f"prompts reach the model without its chat template, which ngrpo eval and diagnose use. Add {TEMPLATE}, or"
            f" evaluate with {flag} {shlex.quote(text)}."
        )


def _has_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template; False where there is no tokenizer."""
    config = read_json(folder / "tokenizer_config.json")
    return config is not None and ("chat_template" in config or any(folder.glob("chat_template*")))


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
