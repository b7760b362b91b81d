# SPDX-License-Identifier: Apache-2.0
"""Options in a YAML file: the one reader of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perturbations.errors import UsageError


def read(path: str, *, flag: str, example: str) -> dict[str, Any]:
    """The lines ``key: value`` of a file.

    Args:
        path: the file.
        flag: the flag that named it, for messages.
        example: what such a file holds, for messages.

    Raises:
        UsageError: for a file that is missing, is not YAML, gives a key twice, or holds something else.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own loader keeps the last of two equal keys without a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
            if twice is not None:
                raise UsageError(f"{flag} {path}: the key {twice!r} is given twice. Keep one of them.")
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror}). Give an existing YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{flag} {path}: must hold lines such as {example}.")
    return loaded


def words(values: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Lines ``flag: value`` as words of a command line.

    ``rollout.top_p: 0.9`` is ``--rollout.top_p 0.9``. A flag with several values has them with blanks, as a shell
    would: ``actor.eps_clip_low_high: 0.2 0.28``. A list stands for values with commas, ``true`` for a switch.

    Args:
        values: the lines.
        prefix: what stands before each flag's name.

    Raises:
        UsageError: for a value that holds lines of its own, or a quotation mark without its other half.
    """
    argv: list[str] = []
    for flag, value in values.items():
        if isinstance(value, dict):
            inner = next(iter(value), "option")
            raise UsageError(f"{flag}: holds lines of its own. Write each in full: {flag}.{inner}: …")
        try:
            parts = [] if value is True or value is None else shlex.split(",".join(texts(value)))
        except ValueError as error:
            raise UsageError(f"{flag}: {value!r}: {error}. Quote it as in a shell.") from None
        argv += [f"--{prefix}{flag}", *parts]
    return argv


def texts(value: object) -> list[str]:
    """A value, or each of a list, as it would stand on a command line."""
    values = value if isinstance(value, list) else [value]
    return [str(part).lower() if isinstance(part, bool) else str(part) for part in values]
