# SPDX-License-Identifier: Apache-2.0
"""Locks that a killed build leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ngrpo.hardware.compiled import remove_stale_locks


def locked(folder: Path, age: float) -> Path:
    folder.mkdir()
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def test_only_a_lock_that_nobody_works_under_is_removed(tmp_path: Path) -> None:
    stale, young = locked(tmp_path / "stale", 600.0), locked(tmp_path / "young", 5.0)
    busy = locked(tmp_path / "busy", 600.0)
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=busy.parent, stdin=subprocess.PIPE)
    try:
        assert remove_stale_locks(tmp_path) == [stale]
    finally:
        compiler.kill()
        compiler.wait()
    assert not stale.exists()
    assert young.exists()
    assert busy.exists()
    assert remove_stale_locks(tmp_path) == [busy], "its build has ended without removing it"


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    assert remove_stale_locks(tmp_path / "missing") == []
