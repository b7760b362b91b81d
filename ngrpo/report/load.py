"""Reading a result file back, with errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["comparison", "diagnosis"]
FORMAT = 1
FILES: dict[Kind, str] = {"comparison": "results.json", "diagnosis": "diagnosis.json"}
_NEEDED: dict[Kind, tuple[str, ...]] = {"comparison": ("strategies", "runs"), "diagnosis": ("strategies",)}
_MADE_BY = {"comparison": "ngrpo compare", "diagnosis": "ngrpo diagnose"}


def load(place: Path) -> tuple[Kind, dict[str, Any], Path]:
    """Reads a result.

    Args:
        place: ``results.json``, ``diagnosis.json``, or a folder with one of them (``results.json`` goes first).

    Returns:
        What it is, its content, and the file it was read from.

    Raises:
        ValueError: for a file that is missing, cannot be read, is not JSON, is something else, or is of a newer format.
    """
    file = place
    if place.is_dir():
        found = [place / name for name in FILES.values() if (place / name).is_file()]
        if not found:
            raise ValueError(
                f"{place} has neither {' nor '.join(FILES.values())}. Give the folder that `ngrpo compare` or"
                " `ngrpo diagnose` wrote."
            )
        file = found[0]
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file or folder. Give a folder, results.json or diagnosis.json.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise ValueError(f"{file} is no result of ngrpo: it is nested too deeply.") from None
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        raise ValueError(f"{file} is broken: it is not JSON ({error}). Make it again.") from None
    kind: Kind = "comparison" if isinstance(data, dict) and "runs" in data else "diagnosis"
    try:
        check(data, kind)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return kind, data, file


def check(data: Any, kind: Kind) -> None:
    """Checks that data is a result of a kind, in a format known here; what is missing inside it is the report's matter.

    Raises:
        ValueError: where it is not.
    """
    what = f"not a {kind} of ngrpo"
    if not isinstance(data, Mapping):
        raise ValueError(f"{what}: a JSON object was expected, found {type(data).__name__}.")
    version = data.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"{what}: format is {version!r}, must be {FORMAT}. Give a file that `{_MADE_BY[kind]}` wrote.")
    if version > FORMAT:
        raise ValueError(f"format {version} is newer than this ngrpo knows ({FORMAT}). Update ngrpo.")
    for key in _NEEDED[kind]:
        if not isinstance(data.get(key), list):
            raise ValueError(
                f"{what}: {key!r} must be a list, found {type(data.get(key)).__name__}."
                f" Give a file that `{_MADE_BY[kind]}` wrote."
            )
