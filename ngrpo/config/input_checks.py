# SPDX-License-Identifier: Apache-2.0
"""Checks of what a run reads, OpenRLHF's datasets and the model, before any model loads."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import Any

from ngrpo.config import dataset_file, lora_check, second_round_check
from ngrpo.config.dataset_file import CHECKED_ROWS, ColumnNames, DatasetFile, Example
from ngrpo.config.feature_kinds import MODEL
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import architecture, context, conversation, packaged
from ngrpo.machine.models.conversation import TOOLS, ValueKind
from ngrpo.machine.models.weight_files import weight_files
from ngrpo.machine.storage.datafiles import ENDINGS, is_saved_dataset, label_of, read_rows
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, Flags
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from ngrpo.methods.policy_noises.base import PolicyNoise
from perturbations.base import Perturbation
from perturbations.errors import UsageError, nearest
from perturbations.gates.default import protected_ids
from perturbations.testing import PerturbationError

# --- datasets: files, columns and values ------------------------------------------------------------

_, _EVALUATED = DATASETS
TEMPLATE = conversation.APPLY
IMAGES = "--data.max_images_per_prompt"


def check_files(flags: Flags) -> None:
    """Checks the datasets that OpenRLHF would open only after every model has loaded; hub names are left to it.

    Raises:
        UsageError: for a missing, empty or unreadable file; a column missing in it or in one of its first 100,000
            rows; an input that the run cannot render; a tool or picture that no prompt shows.
    """
    if not flags.value("--data.prompt_dataset"):
        raise UsageError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    for flag, split_flag in DATASETS.items():
        split = flags.value(split_flag) or "train"
        for name in local_files(flag, flags.value(flag)):
            if split != "train":
                raise UsageError(
                    f"{split_flag} {split}: a file such as {name} has the split train alone. Leave it out."
                )
            _check_file(flag, name, flags)


def check_home(flag: str, name: str) -> None:
    """Raises ``UsageError`` for a path that begins with "~"."""
    if name.startswith("~"):
        raise UsageError(f"{flag} {name}: OpenRLHF does not expand '~'. Write {Path(name).expanduser()}.")


def _check_file(flag: str, name: str, flags: Flags) -> None:
    """Raises ``UsageError`` as :func:`check_files`."""
    content = dataset_file.read(flag, name, flags)
    subject = f"{flag} {name}"
    names = ColumnNames.of(flags)
    check_home(flag, name)
    if names.prompt == names.label:
        raise UsageError(
            f"--data.label_key {names.label}: is the column of the prompts too. Name the column of answers."
        )
    columns = {"--data.input_key": names.prompt, "--data.label_key": names.label}
    for column_flag, column in columns.items():
        if column:
            fix = f"Name the right one with {column_flag}."
            if flag == _EVALUATED:
                fix = f"Rename the right one: {column_flag} names the column of both datasets."
            _check_column(content, column, column_flag=column_flag, subject=subject, fix=fix)
    _check_prompts(content, flags, subject=subject)
    for column, fix in _unused_columns(flags):
        _check_unused(content, column, subject=subject, fix=fix)


def check_row(row: Mapping[str, Any], flags: Flags, *, subject: str) -> None:
    """As :func:`check_files`, for the prompt, pictures and tools of one row that ``subject`` names."""
    names = ColumnNames.of(flags)
    kind = dataset_file.kind_in(row, names.prompt, names)
    fix = _prompt_fix(kind, flags)
    if fix:
        raise UsageError(f"{subject}: the input {names.prompt!r} is {kind}. {fix}")
    for column, fix in _unused_columns(flags):
        if dataset_file.kind_in(row, column, names) is not ValueKind.MISSING:
            raise UsageError(f"{subject} has {column}, which no prompt shows. {fix}")


def _unused_columns(flags: Flags) -> Iterator[tuple[str, str]]:
    """The columns of pictures and tools that no prompt of the run shows, each with what to do about its values."""
    names = ColumnNames.of(flags)
    if names.images not in (names.prompt, names.label) and not _accepts_pictures(flags):
        yield names.images, _NO_PICTURES
    if TOOLS not in (names.prompt, names.label) and not flags.has(TEMPLATE):
        yield TOOLS, f"Add {TEMPLATE}, or leave the column out."


def _check_column(content: DatasetFile, name: str, *, column_flag: str, subject: str, fix: str) -> None:
    """Raises ``UsageError`` for a column that the file lacks, which ``fix`` mends, or one of its rows."""
    column = content.columns.get(name)
    if column is None:
        raise UsageError(
            f"{subject} has no column {name!r} ({column_flag}).{nearest(name, content.columns)} Its columns:"
            f" {', '.join(content.columns)}. {fix}"
        )
    row = column.first_rows.get(ValueKind.MISSING)
    if row is not None:
        raise UsageError(f"{subject}: row {row} has no {name!r} ({column_flag}). Give it one, or leave it out.")


_NO_PICTURES = f"Add {IMAGES} N with a model that reads pictures, or leave the pictures out."


def _accepts_pictures(flags: Flags) -> bool:
    return flags.value(IMAGES) not in (None, "0")


def _check_prompts(content: DatasetFile, flags: Flags, *, subject: str) -> None:
    """Raises ``UsageError`` for the first kind of prompt that the run cannot render."""
    prompt_column = ColumnNames.of(flags).prompt
    for kind, row in content.columns[prompt_column].first_rows.items():
        fix = _prompt_fix(kind, flags)
        if fix:
            raise UsageError(f"{subject}: the input {prompt_column!r} is {kind} in row {row}. {fix}")


def _prompt_fix(kind: ValueKind, flags: Flags) -> str:
    """What to do about prompts of a kind; empty for one that the run can render."""
    has_template = flags.has(TEMPLATE)
    if kind is ValueKind.TEXT:
        return ""
    if kind is ValueKind.MESSAGES:
        return "" if has_template else f"Add {TEMPLATE}, or write the prompts as texts."
    if kind is ValueKind.TEXT_WITH_IMAGE and not has_template:
        return ""  # without a template the mark is text like any other
    if kind in (ValueKind.TEXT_WITH_IMAGE, ValueKind.MESSAGES_WITH_PICTURES) and has_template:
        return "" if _accepts_pictures(flags) else _NO_PICTURES
    return kind.fix


def _check_unused(content: DatasetFile, name: str, *, subject: str, fix: str) -> None:
    """Raises ``UsageError`` for the first value of a column that no prompt shows."""
    if name not in content.columns:
        return
    for kind, row in content.columns[name].first_rows.items():
        if kind is not ValueKind.MISSING:
            raise UsageError(f"{subject}: row {row} has {name}, which no prompt shows. {fix}")


def label_note(flag: str, flags: Flags) -> str | None:
    """A warning about labels that are empty, or neither texts nor numbers, which only some rewards can read."""
    label = flags.value("--data.label_key")
    if not label:
        return None
    for name in local_files(flag, flags.value(flag)):
        column = dataset_file.read(flag, name, flags).columns.get(label)
        if column is None:
            continue
        for kind in (*_KEPT_LABELS, ValueKind.BOOLEAN, ValueKind.OTHER):
            row = column.first_rows.get(kind)
            note = None if row is None else label_note_of(label, read_rows(flag, name, row)[-1][label], row)
            if note:
                return f"{flag} {name}: {note}"
    return None


_KEPT_LABELS = (ValueKind.EMPTY, ValueKind.LIST, ValueKind.MESSAGES, ValueKind.OBJECT)


def label_note_of(column: str, value: object, row: int) -> str | None:
    """A warning about the label in a row, as of :func:`label_note`; None for a label that any reward can read."""
    kind = dataset_file.kind_of(value)
    if kind in (*_KEPT_LABELS, ValueKind.ANSWERED_MESSAGES):
        return f"the label {column!r} is {kind} in row {row}; the reward is given it as it is."
    # Parquet and Arrow have dates, and decimals and bytes that need no note.
    if isinstance(value, (bool, date, time)):
        return (
            f"the label {column!r} is a {type(value).__name__} in row {row}; the reward is given the text"
            f" {label_of(value)!r}."
        )
    return None


def rows_of(flag: str, flags: Flags) -> list[int] | None:
    """Rows of each of the named datasets; None where one is no file, is missing, or has more than are looked at."""
    value = flags.value(flag) or ""
    try:
        counts = [dataset_file.read(flag, name, flags).row_count for name in local_files(flag, value)]
    except UsageError:
        return None
    all_are_files = len(counts) == len(value.split(","))
    if not all_are_files or max(counts, default=CHECKED_ROWS) >= CHECKED_ROWS:
        return None
    return counts


def examples(flags: Flags) -> Iterator[tuple[str, Example]]:
    """A row of each form of conversation in the files, each with its place."""
    for subject, content in _contents(flags):
        for example in content.examples:
            yield f"{subject}: row {example.row}", example


def longest_examples(flags: Flags) -> Iterator[tuple[str, Example]]:
    """The row with the longest prompt of each file, with its place."""
    for subject, content in _contents(flags):
        yield f"{subject}: row {content.longest.row}", content.longest


def _contents(flags: Flags) -> Iterator[tuple[str, DatasetFile]]:
    """What each file of the datasets holds, with the flag and the file as messages name them."""
    for flag in DATASETS:
        for name in local_files(flag, flags.value(flag)):
            yield f"{flag} {name}", dataset_file.read(flag, name, flags)


def is_checked(flag: str, value: str) -> bool:
    """Whether :func:`check_files` looks into all named datasets: it skips saved ones and those of the hub."""
    return len(list(local_files(flag, value))) == len(value.split(","))


def local_files(flag: str, value: str | None) -> Iterator[str]:
    """The files with checked rows among the names of a flag.

    Raises:
        UsageError: for a name that OpenRLHF could not load, such as a file of another kind, and for a folder of files.
    """
    if not value:
        return
    for word in value.split(","):
        word = word.strip()
        name, at, part = word.partition("@")
        name = name.strip()
        path = Path(name).expanduser()
        if not name:
            raise UsageError(f"{flag} {value}: a name is missing before or after a comma. Leave the comma out.")
        if at and path.is_file():
            raise UsageError(f"{flag} {word}: a file has no part {part!r}. Leave it out: {name}.")
        if path.is_dir() and not is_saved_dataset(path):
            raise _folder_error(f"{flag} {word}", flag, path / part.strip())
        # OpenRLHF 0.11.2 (datasets/utils.py) loads files of our endings and .arrow; all else is a folder or a hub name.
        if path.suffix in ENDINGS or (path.suffix == ".arrow" and not path.exists()):
            yield name  # reading a missing file raises an error with a name that is like it
        elif path.exists() and not path.is_dir() and path.suffix != ".arrow":
            raise UsageError(
                f"{flag} {name}: is no dataset; OpenRLHF reads files that end in {', '.join((*ENDINGS, '.arrow'))}."
                " Give one of these, a folder or a hub dataset."
            )
        elif not path.exists() and name.startswith(("/", ".", "~")):
            raise UsageError(f"{flag} {name}: there is no such folder. Give an existing file or a hub dataset.")


def _folder_error(subject: str, flag: str, folder: Path) -> UsageError:
    """The error for a folder of files: `datasets` would leave some of them out, and guess the types of labels."""
    files = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)  # such as a cache of the hub
        if file.suffix in ENDINGS and not is_hidden:
            files.append(str(file))
    if not files:
        return UsageError(
            f"{subject}: the folder holds no data files ({', '.join(ENDINGS)}). Give such a file, or a folder that"
            " `Dataset.save_to_disk` of the package `datasets` wrote."
        )
    return UsageError(
        f"{subject}: is a folder, from which `datasets` would load some files only and change labels such as 007."
        f" Name the files that you want: {flag} {','.join(files)}"
    )


# --- models -----------------------------------------------------------------------------------------

_LENGTH = "--data.max_len"
_TOKENIZERS = ("tokenizer*", "tekken*", "*.model", "vocab*", "*.tiktoken")


def name_of(flags: Flags) -> str:
    """The model's folder, or its name on the hub."""
    model = flags.value(MODEL) or ""
    return str(packaged.folder_of(model)) if model in packaged.PACKAGED else model


def check_options(flags: Flags, run: RunConfig) -> str | None:
    """Checks the run's options against its model; returns why it could not look, or None.

    Raises:
        UsageError: where an option of LoRA, the second round, the perturbation or the noise does not fit the model.
    """
    lora_check.check_target_modules(flags, architecture.find_config(name_of(flags)))
    _check_second_round(flags, run)
    model = flags.value(MODEL) or ""
    if Path(name_of(flags)).expanduser().is_dir():
        return check_model(name_of(flags), run.perturbation, run.policy_noise)
    if model in packaged.PACKAGED:
        return f"not checked: the folder of {model} is made when it is first used."
    return (
        f"not checked: there is no folder {model!r}, so it is taken for a model of the hub; whether the hub has it is"
        " asked when the run starts."
    )


def _check_second_round(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where a local tokenizer finds a prompt of the second round longer than its room.

    From each file the longest prompt is taken.
    """
    folder = _tokenizer_folder(flags)
    if run.second_round is None or folder is None:
        return
    try:
        tokenizer = tokenizer_in(folder)
        texts = {place: _rendered(tokenizer, example, flags) for place, example in longest_examples(flags)}
    except Exception:  # of any tokenizer or file: `check_template` and `check_files` report those
        return
    for place, text in texts.items():
        try:
            second_round_check.check_prompts(run.second_round, place, text, tokenizer)
        except PerturbationError as error:
            raise UsageError(f"--second_round {error}") from error


def check_model(folder: str, perturbation: Perturbation | None, noise: PolicyNoise | None = None) -> str | None:
    """Checks a perturbation's and a noise's options against a local model; returns why it could not look, or None.

    Raises:
        UsageError: where an option, such as k, does not fit the vocabulary, or no weight gets noise.
    """
    config_path = Path(folder) / "config.json"
    if perturbation is not None and config_path.is_file():
        config = architecture.read_config(config_path)
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
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
    config_path = architecture.find_config(name)
    if config_path is None:
        return None  # `rules` has a check of its own for a model that is not there
    config = architecture.read_config(config_path)
    _check_context(name, config, int(flags.or_default(_LENGTH)))
    _check_generation_config(config_path.with_name("generation_config.json"))
    if _accepts_pictures(flags) and "vision_config" not in config:
        raise UsageError(f"{IMAGES}: the model {name} reads no pictures. Leave the flag out, or give an image model.")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    weights = weight_files(folder, subject=f"model {name}")
    missing = []
    if not weights:
        missing.append("weights (*.safetensors)")
    if not has_tokenizer(folder):
        missing.append("tokenizer")
    if not missing:
        return None
    if run.machine is None:
        raise UsageError(f"model folder {name} has no {' and no '.join(missing)}. Download the whole model.")
    return f"not checked: the folder has no {' and no '.join(missing)}, which a run needs."


def _check_generation_config(path: Path) -> None:
    """Raises ``UsageError`` for a file that transformers loads and refuses to save: the trained model would be lost."""
    if not path.is_file():
        return
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(path.parent).validate(strict=True)
    except OSError:  # not JSON: transformers leaves the file out
        return
    except ValueError as error:
        lines = str(error).splitlines()
        reason = lines[1] if len(lines) > 1 else lines[0]  # the first is a title of several faults
        raise UsageError(
            f"{path}: transformers loads it and refuses to save it, after the training: {reason} Correct the file (with"
            ' a temperature, top_p or top_k: add "do_sample": true).'
        ) from None


def _check_context(model: str, config: Mapping[str, Any], longest: int) -> None:
    """Raises ``UsageError`` where the longest sequence of the run exceeds the model's context."""
    limit = context.context_of(config)
    if limit is not None and longest > limit:
        raise UsageError(
            f"{_LENGTH} {longest}: the model {model} has a context of {limit} tokens. Give {_LENGTH} {limit} or less."
        )


def check_template(flags: Flags, run: RunConfig) -> str | None:
    """Raises ``UsageError`` where a local tokenizer cannot render the prompts; returns why it could not look, or None.

    Of each form of conversation in a file one row is rendered.
    """
    arguments = conversation.template_arguments(run.chat_template_kwargs)
    if arguments and not flags.has(TEMPLATE):
        raise UsageError(f"{conversation.FLAG} has no effect without {TEMPLATE}. Add that flag.")
    folder = _tokenizer_folder(flags)
    if not flags.has(TEMPLATE) or folder is None:
        return None
    if not _has_template(folder):
        raise UsageError(
            f"{TEMPLATE}: the tokenizer in {folder} has no chat template. Use a model that has one, or leave the flag"
            " out and give prompts as texts."
        )
    try:
        tokenizer = tokenizer_in(folder)
        conversation.rendered(tokenizer, "x")
    except Exception as error:  # of any library or template: the run loads it again
        return f"not checked: the tokenizer in {folder} could not be used ({error})."
    conversation.rendered(tokenizer, "x", arguments)
    for place, example in examples(flags):
        try:
            conversation.rendered(tokenizer, example.prompt, {**arguments, **example.tools})
        except UsageError as error:
            raise UsageError(f"{place}: {error} (model {folder})") from None
    return None


def template_notes(flags: Flags) -> Iterator[str]:
    """A warning about a training without the chat template that a local tokenizer has."""
    folder = Path(name_of(flags)).expanduser()
    if not flags.has(TEMPLATE) and _has_template(folder):
        like_training = conversation.flags_like(flags)
        in_words = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in like_training.items())
        yield (
            f"prompts reach the model without its chat template, which ngrpo eval and diagnose use. Add {TEMPLATE}, or"
            f" evaluate with {in_words}."
        )


def _has_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template; False where there is no tokenizer."""
    config = read_json(folder / "tokenizer_config.json")
    return config is not None and ("chat_template" in config or any(folder.glob("chat_template*")))


def cut_notes(flags: Flags) -> Iterator[str]:
    """A warning for each file with a prompt that leaves no room for its response: its first tokens are left out."""
    folder = _tokenizer_folder(flags)
    if folder is None:
        return
    room = int(flags.or_default(_LENGTH)) - int(flags.value("--rollout.max_new_tokens") or 1)
    with suppress(Exception):  # of any tokenizer or file: `check_template` and `check_files` report those
        for place, example in longest_examples(flags):
            # A token has at least a byte, so a shorter text fits without being tokenized.
            if not example.tools and len(str(example.prompt).encode()) <= room:
                continue
            tokenizer = tokenizer_in(folder)
            text = _rendered(tokenizer, example, flags)
            tokens = conversation.count_tokens(tokenizer, text)
            if tokens > room:
                yield (
                    f"{place}: the prompt has {tokens} tokens. {_LENGTH} leaves room for {room}, so that its first"
                    f" {tokens - room} are left out, and those of other long prompts."
                )


def _rendered(tokenizer: PreTrainedTokenizerBase, example: Example, flags: Flags) -> str:
    """The text of a prompt, by the chat template where the run has one."""
    if flags.has(TEMPLATE):
        return conversation.rendered(tokenizer, example.prompt, example.tools)
    return str(example.prompt)


def _tokenizer_folder(flags: Flags) -> Path | None:
    """The folder of the model's tokenizer; None where it is not local."""
    folder = Path(name_of(flags)).expanduser()
    return folder if (folder / "tokenizer_config.json").is_file() else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


@lru_cache(maxsize=3)  # of the policy, the reward model and the critic
def tokenizer_in(folder: Path) -> Any:
    """The tokenizer in a folder, without code of its own."""
    return packaged.load_tokenizer(str(folder), trust_remote_code=False)
