# SPDX-License-Identifier: Apache-2.0
"""A model's config.json, by the model's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ngrpo.machine.models import packaged
from perturbations.errors import UsageError


def find(name: str, *, ask_hub: bool = False) -> Path | None:
    """Where a model's config.json is; None where it is not here and cannot be asked for.

    Args:
        name: as ``--model`` takes it: a packaged model, a folder, or a hub name.
        ask_hub: load config.json, and nothing else, of a hub name that is not in the hub's cache.
    """
    folder = packaged.folder_of(name) if name in packaged.PACKAGED else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if name in packaged.PACKAGED or folder.exists():
        return None
    try:
        from huggingface_hub import hf_hub_download

        wait = packaged.HUB_SECONDS
        return Path(hf_hub_download(name, "config.json", etag_timeout=wait, local_files_only=not ask_hub))
    except Exception:  # of whatever library sends the request: without a network it stays unknown
        return None


def read(path: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        UsageError: for a file that cannot be read or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Download the model again.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: must be a JSON object. Give the model's own config.json.")
    return config
