# SPDX-License-Identifier: Apache-2.0
"""The start of a Ray worker process: the run, its folder and the upstream patches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from ngrpo import patches
from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.hardware.processes import add_programs_to_path
from ngrpo.machine.hardware.stand_ins import WITHOUT_FLASH_ATTN, has_flash_attn


def setup_hook(conditions: Sequence[str], run: RunConfig) -> Callable[[], None]:
    """Ray's `worker_process_setup_hook`: runs in every worker before any of its tasks or actors.

    Ray keeps the function, and with it the run, in its own store: no disk need be shared, and no environment variable,
    which Linux limits to 131,072 bytes, holds them. Relative paths mean in a worker what they mean here, also on a
    cluster that was started in another folder.
    """
    here = os.getcwd()

    def in_worker() -> None:
        with suppress(OSError):  # another node need not have the folder
            os.chdir(here)
        add_programs_to_path()
        begin(run)
        # Nodes of a cluster may differ, and the driver looked at its own only.
        patches.install(conditions if has_flash_attn() else [*conditions, WITHOUT_FLASH_ATTN])

    return in_worker
