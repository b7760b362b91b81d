# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners (V1, V2) the engines of a training run have.

Each worker with the plugin writes its runner as the name of an empty file. An environment variable names the folder.
"""

import contextlib
import os
import shutil
from pathlib import Path

VARIABLE = "NGRPO_MODEL_RUNNERS"


def watch(folder: Path) -> None:
    """From here on, engines that processes of this one start leave their runners' names in a folder, emptied now."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ[VARIABLE] = str(folder.absolute())


def note(runner: str) -> None:
    """In a worker: what it has."""
    folder = os.environ.get(VARIABLE)
    if folder:
        # On another machine of a cluster the folder need not exist; a name is missing then, and nothing else.
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            Path(folder, runner).touch()


def read(folder: Path) -> str | None:
    """``V1`` or ``V2``, ``V1, V2`` where engines differ, None where none has written."""
    return ", ".join(sorted(path.name for path in folder.glob("V?"))) or None
