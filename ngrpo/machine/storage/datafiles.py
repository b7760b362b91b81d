# SPDX-License-Identifier: Apache-2.0
"""Files that are read: rows of datasets (JSONL, JSON, CSV, parquet), options in YAML, scalars of TensorBoard logs.

The package `datasets` guesses types and makes 7.0 of the reference 007 in a CSV file. Training, evaluation, diagnosis
and the checks at a start therefore read rows here.
"""

import ast
import csv
import hashlib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from perturbations.errors import UsageError, nearest

if TYPE_CHECKING:
    from pyarrow import DataType
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Row = dict[str, Any]
Series = dict[str, dict[int, float]]
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
_FLOAT_DIGITS = 17  # with which every float can be written
_LONGEST_CELL = 2**31 - 1  # of a CSV file, in characters
_WHOLE_NUMBER = re.compile(r"[-+]?(?:0|[1-9]\d*)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON escapes one


def contents(argv: Iterable[str]) -> dict[str, str]:
    """Digests (SHA-256) of the local files that a command line names, by path as given.

    A word may name several files (``a.jsonl,b.jsonl``), or have a prefix (``math:FILE``), or a part behind it
    (``FOLDER@PART``). With a Python file come the modules and packages beside it that it imports, and for the folder of
    a saved dataset all of its files.
    """
    names = set()
    for word in argv:
        for name in word.split(","):
            names |= {name, name.partition(":")[2], name.partition("@")[0]}
    digests = {}
    for name in sorted(names - {""}):
        with suppress(OSError, ValueError):  # a word may be too long for a path, or hold a zero byte
            path = Path(name).expanduser()
            if path.is_file():
                digests[name] = _digest_now(path)
                for imported in sorted(_imported_beside(path)):
                    digests[str(Path(name).parent / imported.relative_to(path.parent))] = _digest_now(imported)
            elif is_saved_dataset(path):
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        digests[str(Path(name) / file.relative_to(path))] = _digest_now(file)
    return digests


def is_saved_dataset(folder: Path) -> bool:
    """Whether the package `datasets` wrote a folder: `Dataset.save_to_disk`, or `DatasetDict.save_to_disk`."""
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _imported_beside(path: Path) -> set[Path]:
    """The Python files in a Python file's folder that it imports, those of packages too, and those that they import."""
    found: set[Path] = set()
    unread = [path] if path.suffix == ".py" else []
    while unread:
        packages: list[str] = []
        with suppress(OSError, SyntaxError, ValueError):  # what is no Python fails where it is run
            for node in ast.walk(ast.parse(unread.pop().read_bytes())):
                packages += imported(node)
        for package in packages:
            module = path.with_name(f"{package}.py")
            files = [module] if module.is_file() else path.with_name(package).rglob("*.py")
            for file in files:
                if file not in found | {path}:
                    found.add(file)
                    unread.append(file)
    return found


def imported(statement: ast.AST) -> list[str]:
    """The packages that a statement imports by their full names; none for another statement."""
    modules: list[str] = []
    if isinstance(statement, ast.Import):
        modules = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom) and not statement.level:
        modules = [statement.module or ""]
    return [module.partition(".")[0] for module in modules]


def _digest_now(path: Path) -> str:
    """The digest of a file as it is now."""
    state = path.stat()
    return _digest(path.absolute(), state.st_mtime_ns, state.st_size)


@lru_cache
def _digest(path: Path, changed: int, size: int) -> str:
    """The SHA-256 of a file; cached, since a comparison asks for each of its runs."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def read_rows(flag: str, source: str, limit: int | None = None) -> list[Row]:
    """The rows, at most ``limit``, of a local file; ``flag`` names it in messages.

    ``source`` is JSONL, JSON (an array of objects, or one per line), CSV or parquet. Raises ``UsageError`` for a file
    that is missing, empty or not in the format that its suffix names.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        neighbors = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(
            f"{flag} {source}: there is no such file.{nearest(path.name, neighbors)} Give an existing file."
        )
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{flag} {source}: ends in {path.suffix!r}; files of {', '.join(ENDINGS)} can be read.")
    try:
        rows = list(islice(_rows(path), limit))
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {source}: is no UTF-8 ({error.reason}). Save it with that encoding.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {source} cannot be read as {path.suffix[1:]}: {error}") from None
    if not rows:
        raise UsageError(f"{flag} {source} is empty. Give a file with at least one row.")
    return rows


def is_nothing(value: object) -> bool:
    """Whether a row has no value in a column; a table of pandas has NaN there."""
    return value is None or value != value


def label_of(value: object) -> Any:
    """A label as a reward function gets it, in training and in evaluation: a text; a list or an object as it is.

    A number is its text, since a CSV file has texts alone and most rewards compare texts: 7.0 is ``7``, and 1e-7 is
    ``0.0000001``. A boolean is ``True`` or ``False``, and a date ``2024-01-01``. Some programs write texts into parquet
    as bytes; ``UsageError`` for bytes that are not UTF-8.
    """
    if is_nothing(value):
        return ""
    if isinstance(value, (str, list, tuple, dict)):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise UsageError(f"the label {value[:40]!r} is bytes and no text. Store it as a text.") from None
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(float(value)))  # the shortest of the numbers that are this float
    if isinstance(value, Decimal) and value.is_finite():
        return decimal_text(value)
    return str(value)


def decimal_text(value: Decimal) -> str:
    """A finite number in one form, without an exponent and trailing zeros: ``1200.50`` is ``1200.5``, ``-0`` is ``0``.

    All its digits stay: ``normalize()`` would round a number of more than 28.
    """
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by its suffix; raises ``ValueError`` for another format."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open(encoding="utf-8-sig", newline="") as file:  # Excel begins a CSV file with a byte order mark
        if suffix == ".csv":
            yield from _csv_rows(file)
            return
        is_array = suffix == ".json" and file.read(1024).lstrip().startswith("[")
        file.seek(0)
        yield from _json_rows(file.read()) if is_array else _json_line_rows(file)


def _csv_rows(file: TextIO) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.DictReader(file, strict=True)  # strict: a quote that is never closed is an error
    try:
        names = reader.fieldnames or []
        _check_columns(names)
        if len(names) == 1 and re.search(r"\w[;\t]\w", names[0]):
            raise ValueError(f"its first line has no comma: {names[0]!r}. Separate the columns by commas.")
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more values than the first line. Quote its commas.")
            yield row
    except csv.Error as error:
        fix = "Close every quote, and double those inside a quoted value."
        raise ValueError(f"the row after line {reader.line_num}: {error}. {fix}") from None


def _json_rows(text: str) -> list[Row]:
    """The rows of a JSON array."""
    rows = _parsed(text)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must be an array of JSON objects.")
    if _SURROGATE.search(text):
        for number, row in enumerate(rows, start=1):
            _check_characters(f"row {number}", row)
    return rows


def _json_line_rows(file: TextIO) -> Iterator[Row]:
    """The rows of JSON lines; empty lines are skipped."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = _parsed(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error}). Write one JSON object per line.") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object. Write one JSON object per line.")
        if _SURROGATE.search(line):
            _check_characters(f"line {number}", row)
        yield row


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    _check_columns(file.schema_arrow.names)
    decoded = None
    if b"huggingface" in (file.schema_arrow.metadata or {}):  # `datasets` wrote there which columns are pictures
        from datasets import Features

        decoded = Features.from_arrow_schema(file.schema_arrow).decode_example
    for batch in file.iter_batches(1024):
        for row in batch.to_pylist():
            for column in batch.schema:
                row[column.name] = with_shortest_floats(row[column.name], column.type)
            yield row if decoded is None else decoded(row)


def with_shortest_floats(value: object, kind: "DataType") -> object:
    """A value of an Arrow type with the shortest number for each float16 and float32: 0.1, and not 0.10000000149."""
    from pyarrow import types

    if isinstance(value, float) and (types.is_float16(kind) or types.is_float32(kind)):
        width = kind.to_pandas_dtype()
        return float(str(width(value)))
    if isinstance(value, dict) and types.is_struct(kind):
        return {field.name: with_shortest_floats(value[field.name], field.type) for field in kind}
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if isinstance(value, list) and is_list:
        return [with_shortest_floats(item, kind.value_type) for item in value]
    return value


def _check_columns(names: Sequence[str]) -> None:
    """Raises ``ValueError`` for a column that is there twice, of which a row would keep the last one silently."""
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise ValueError(f"the column {repeated[0]!r} is there twice. Rename one of them, or leave it out.")


def _check_characters(where: str, row: Row) -> None:
    """Raises ``ValueError`` for half of a surrogate pair, which JSON can write and no tokenizer takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        character = error.object[error.start].encode("unicode_escape").decode()
        raise ValueError(
            f"{where} has {character}, half of a surrogate pair, which is no character. Write both halves, or leave it"
            " out."
        ) from None


def _parsed(text: str) -> Any:
    """What a JSON text holds; ``ValueError`` for other texts."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_float=_unchanged)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def _unchanged(number: str) -> float | str:
    """A decimal of a JSON text as a float; as its text where a float would be another number, such as 1e400."""
    value = float(number)
    exact = Decimal(number)
    is_in_range = math.isfinite(value) and (value != 0.0 or exact == 0)
    return value if is_in_range and len(exact.as_tuple().digits) <= _FLOAT_DIGITS else number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ``ValueError`` for a key given twice, of which Python's reader keeps the last one silently."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"of the keys {', '.join(key for key, _ in pairs)} one is given twice")
    return row


def read_yaml(path: str, *, flag: str, example: str) -> dict[str, Any]:
    """The lines ``key: value`` of a YAML file.

    Raises:
        UsageError: for any other content, a key given twice, and a key or an item of a list without a value.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key given twice, and reads 010, 1:30 and 2_0 as texts.

        YAML's own loader keeps the last of two equal keys, and reads 8, 90 and 20.
        """

        def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
            return int(node.value) if _WHOLE_NUMBER.fullmatch(node.value) else node.value

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys: list[Any] = []
            for key, _ in node.value:
                if key.value in keys:
                    raise UsageError(f"{flag} {path}: the key {key.value!r} is given twice. Keep one of them.")
                keys.append(key.value)
            return super().construct_mapping(node, deep)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        loaded = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror}). Give an existing YAML file.") from None
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of bytes that are no text, and of a date such as 02-30
        raise UsageError(f"{flag} {path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{flag} {path}: must hold lines such as {example}.")
    for lines in (loaded, *(value for value in loaded.values() if isinstance(value, dict))):
        for key, value in lines.items():
            if value is None:
                raise UsageError(
                    f"{flag} {path}: the key {key!r} has no value. YAML takes what follows a # for a comment: quote a"
                    f' text that begins with one, {key}: "####". A switch is {key}: true.'
                )
            if isinstance(value, list) and None in value:
                raise UsageError(
                    f"{flag} {path}: item {value.index(None) + 1} of the key {key!r} has no value. YAML takes what"
                    ' follows a # for a comment, and null for nothing: quote the text, - "####", or leave the item out.'
                )
    return loaded


def words(values: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Lines ``flag: value`` of a YAML file as words of a command line; ``prefix`` goes before each flag's name.

    ``rollout.top_p: 0.9`` is ``--rollout.top_p 0.9``. A flag with several values has them with blanks:
    ``actor.eps_clip_low_high: 0.2 0.28``. A list means values with commas, ``true`` a switch. Quotes keep blanks in a
    value, and a backslash is an ordinary character.
    """
    argv: list[str] = []
    for flag, value in values.items():
        if isinstance(value, dict):
            inner = next(iter(value), "option")
            raise UsageError(f"{flag}: holds lines of its own. Write each in full: {flag}.{inner}: …")
        argv.append(f"--{prefix}{flag}")
        if value is True:
            continue
        try:
            argv += _shell_words(",".join(texts(value)))
        except ValueError as error:
            raise UsageError(
                f"{flag}: {value!r}: {error}. Quote it with '…' or \"…\"; a backslash is an ordinary character."
            ) from None
    return argv


def _shell_words(text: str) -> list[str]:
    r"""Splits a text at blanks outside of quotes. A backslash stays, as in an input template with ``\n``."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""
    return list(lexer)


def texts(value: object) -> list[str]:
    """A YAML value, or each of a list, in the form of a command line."""
    items = value if isinstance(value, list) else [value]
    return [str(item).lower() if isinstance(item, bool) else str(item) for item in items]


def has_boolean(value: object) -> bool:
    """Whether a YAML value, or one of a list, is true or false."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, bool) for item in items)


def event_files(folder: Path) -> list[str]:
    """The names of TensorBoard's logs under a folder, relative to it, in their own order."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("events.out.tfevents.*"))


def _tags(events: "EventAccumulator", kind: str) -> list[str]:
    """The tags of a kind in a log."""
    tags: Any = events.Tags()[kind]  # a list for the kinds that are asked for, and a bool for others
    return tags


def read_scalars(folder: Path, files: Iterable[str]) -> Series:
    """Every scalar of TensorBoard logs in a folder: ``{tag: {step: value}}``, steps ascending.

    ``files`` are the logs of a run's starts in their order: of a step that two have, the later one's value counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    series: Series = {}
    for file in files:
        events = EventAccumulator(str(folder / file), size_guidance={SCALARS: 0})
        events.Reload()
        logged = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in _tags(events, "scalars")}
        steps = {step for by_step in logged.values() for step in by_step}
        for values in series.values():
            _drop_after(values, steps)
        for tag, by_step in logged.items():
            series.setdefault(tag, {}).update(by_step)
    return {tag: dict(sorted(values.items())) for tag, values in sorted(series.items()) if values}


def _drop_after(values: dict[int, Any], logged: Collection[int]) -> None:
    """Removes the steps after the last one that a later start has ``logged``.

    It began at a checkpoint before them, so that they belong to weights that are gone.
    """
    if not logged:
        return
    last = max(logged)
    for step in [step for step in values if step > last]:
        del values[step]


def read_texts(folder: Path, files: Iterable[str], tag: str) -> dict[int, str]:
    """A tag's texts in TensorBoard logs in a folder, by step, steps ascending; as :func:`read_scalars`."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    by_step: dict[int, str] = {}
    name = f"{tag}/text_summary"  # torch's SummaryWriter.add_text adds this to the tag
    for file in files:
        events = EventAccumulator(str(folder / file), size_guidance={TENSORS: 0})
        events.Reload()
        if name in _tags(events, "tensors"):
            logged = {event.step: event.tensor_proto.string_val[0] for event in events.Tensors(name)}
            _drop_after(by_step, logged)
            by_step |= {step: text.decode(errors="replace") for step, text in logged.items()}
    return dict(sorted(by_step.items()))
