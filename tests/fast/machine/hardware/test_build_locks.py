# SPDX-License-Identifier: Apache-2.0
"""A build that was killed leaves its lock: the next run takes it away, and never one of a build that runs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ngrpo import patches
from ngrpo.machine.hardware import build_locks

HOLDS = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"


def acquires(lock: Path) -> bool:
    """Whether torch's own class, with ours around it, gets the lock."""
    baton = pytest.importorskip("torch.utils.file_baton").FileBaton(str(lock))
    taken = build_locks.without_stale_lock(type(baton).try_acquire)(baton)
    if taken:
        baton.release()
    return taken


def test_a_lock_is_taken_from_a_killed_build_alone(tmp_path: Path) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    assert acquires(lock), "without another build"
    command = [sys.executable, "-c", HOLDS, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == "held\n"
        hour_ago = time.time() - 3600
        os.utime(lock, (hour_ago, hour_ago))
        assert not acquires(lock)
        build.kill()
    assert acquires(lock)


def test_a_young_lock_on_a_shared_disk_may_be_another_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_LOCAL_FILE_SYSTEMS", ())
    lock = tmp_path / "lock"
    lock.touch()
    assert not acquires(lock)
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    assert acquires(lock)


def test_every_training_has_it() -> None:
    assert [row.when for row in patches.OPENRLHF if row.attribute == "FileBaton.try_acquire"] == [patches.TRAINING]
