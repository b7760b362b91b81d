# SPDX-License-Identifier: Apache-2.0
"""Extensions that DeepSpeed compiles on first use, and what a run that was killed meanwhile leaves."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

# A build that starts right now has its lock before any process works in the folder.
_YOUNG_SECONDS = 60.0


def remove_stale_locks(folder: Path) -> list[Path]:
    """Removes the locks of builds that nobody works on any more.

    torch 2.13 waits for such a lock for good and without a word, so a run killed during the first minute would make
    every later one hang.

    Args:
        folder: torch's extension folder, with one subfolder for each extension.

    Returns:
        The locks removed.
    """
    import psutil

    old = [lock for lock in folder.glob("*/lock") if time.time() - lock.stat().st_mtime > _YOUNG_SECONDS]
    if not old:
        return []
    at_work = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            at_work.add(os.path.realpath(process.cwd()))
    stale = [lock for lock in old if os.path.realpath(lock.parent) not in at_work]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale
