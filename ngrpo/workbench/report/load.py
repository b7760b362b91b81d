# SPDX-License-Identifier: Apache-2.0
"""Reading a result file back, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import read_json
from perturbations.errors import UsageError

FORMAT = 1
# Kind of result: its file, the command that writes it, and the lists that it must hold.
KINDS = {
    "comparison": ("results.json", "ngrpo compare", ("strategies", "runs")),
    "diagnosis": ("diagnosis.json", "ngrpo diagnose", ("strategies",)),
    "training run": ("summary.json", "ngrpo train", ("steps",)),
}

# A key that only this kind of result has.
_TOLD_BY = {"comparison": "runs", "training run": "steps"}


def load(path: Path) -> tuple[str, dict[str, Any], Path]:
    """Reads a result.

    Args:
        path: ``results.json``, ``diagnosis.json``, ``summary.json``, or a folder with one of them, in this order.

    Returns:
        A key of :data:`KINDS`, the content, and the file it was read from.

    Raises:
        UsageError: for a file that is missing, cannot be read, is not JSON, is something else, or is of a newer format.
    """
    names = [name for name, _, _ in KINDS.values()]
    file = next((path / name for name in names if (path / name).is_file()), path)
    if file.is_dir():
        raise UsageError(
            f"{path} has neither {' nor '.join(names)}. Give the folder that `ngrpo compare`, `ngrpo diagnose` or"
            " `ngrpo train` wrote."
        )
    data = read_json(file)
    if data is None and not file.exists():
        raise UsageError(f"{file}: there is no such file or folder. Give a folder, {' or '.join(names)}.")
    kind = next((kind for kind, key in _TOLD_BY.items() if isinstance(data, dict) and key in data), "diagnosis")
    try:
        check(data, kind)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    return kind, data, file


def check(data: object, kind: str) -> None:
    """Checks that data is a result of a kind, in a format known here; what is missing inside it is the report's matter.

    Raises:
        UsageError: where it is not.
    """
    what, (_, made_by, needed) = f"not a {kind} of ngrpo", KINDS[kind]
    if not isinstance(data, Mapping):
        raise UsageError(f"{what}: a JSON object was expected, found {type(data).__name__}.")
    version = data.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UsageError(f"{what}: format is {version!r}, must be {FORMAT}. Give a file that `{made_by}` wrote.")
    if version > FORMAT:
        raise UsageError(f"format {version} is newer than this ngrpo knows ({FORMAT}). Update ngrpo.")
    for key in needed:
        if not isinstance(data.get(key), list):
            raise UsageError(
                f"{what}: {key!r} must be a list, found {type(data.get(key)).__name__}."
                f" Give a file that `{made_by}` wrote."
            )
