# SPDX-License-Identifier: Apache-2.0
"""From which step a run with ``--ckpt.load_enable`` continues; OpenRLHF 0.11.2 starts at zero without a word."""

from __future__ import annotations

import os
from pathlib import Path

from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

LOAD = "--ckpt.load_enable"


def check_loaded(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` where no checkpoint in the folder is complete: OpenRLHF fails once all is loaded."""
    folder = _folder(flags)
    if flags.has(LOAD) and folder.is_dir() and not (folder / "latest").is_file():
        raise UsageError(
            f"{LOAD}: no checkpoint in {folder} is complete (a run ended while it saved its first). Remove that folder"
            f" to start at step 0, or leave {LOAD} out."
        )


def first_step(flags: Flags) -> str | None:
    """A line on where the run starts; None where no checkpoint is asked for."""
    if not flags.has(LOAD):
        return None
    latest = _folder(flags) / "latest"
    if not latest.is_file():
        return f"warning: {LOAD}: there is no checkpoint in {latest.parent}, so the run starts at step 0"
    return f"continues after {latest.read_text().strip()} of {latest.parent} ({LOAD})"


def _folder(flags: Flags) -> Path:
    # OpenRLHF's actor and DeepSpeed give these names.
    return Path(os.path.abspath(flags.value("--ckpt.path") or "."), "_actor")
