# SPDX-License-Identifier: Apache-2.0
"""Extensions that DeepSpeed compiles on first use, and what a run that was killed meanwhile leaves."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# A build that starts right now has its lock before any process works in the folder.
_YOUNG_SECONDS = 60.0


def ready_to_compile(began: float) -> None:
    """Makes DeepSpeed's compilation possible in this process, and says which locks had to go.

    Args:
        began: when the run was started, in seconds since 1970.
    """
    # DeepSpeed builds with the ninja of this Python environment, which need not be activated.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # as torch 2.13 finds its default folder
    for lock in remove_stale_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"), began):
        print(f"removed {lock}: an earlier run was killed while it compiled {lock.parent.name}", flush=True)


def remove_stale_locks(folder: Path, began: float) -> list[Path]:
    """Removes the locks of builds that ended before a run began.

    torch 2.13 waits for such a lock for good and without a word, so a run killed during the first minute would make
    every later one hang.

    Args:
        folder: torch's extension folder, in which each extension has a folder, or its default, where Python's and
            CUDA's release stand between.
        began: when the run was started.

    Returns:
        The locks removed.
    """
    import psutil

    old = []
    for lock in folder.glob("**/lock"):
        with contextlib.suppress(FileNotFoundError):  # another process of the run was faster
            old += [lock] if began - lock.stat().st_mtime > _YOUNG_SECONDS else []
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
