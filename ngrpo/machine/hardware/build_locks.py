# SPDX-License-Identifier: Apache-2.0
"""Locks of compiled extensions: a build that was killed leaves its lock, and torch 2.13 then waits for it for ever."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path

import psutil

from ngrpo.machine.upstream.types import FileBaton

_LONGEST_BUILD = 900.0  # seconds
_LOCAL_FILE_SYSTEMS = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs")


def without_stale_lock(original: Callable[..., bool]) -> Callable[..., bool]:
    """`FileBaton.try_acquire`: a lock that no build holds any more is removed first."""

    @wraps(original)
    def try_acquire(self: FileBaton) -> bool:
        lock = Path(self.lock_file_path)
        if is_stale(lock):
            print(f"ngrpo: {lock} is of a build that was killed; it is removed", flush=True)
            lock.unlink(missing_ok=True)
        return original(self)

    return try_acquire


def is_stale(lock: Path) -> bool:
    """Whether a lock is there and its build has ended: torch keeps the file open while it builds.

    A process of another node may build in a shared folder, so a lock on a network's disk must be old too.
    """
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return False
    if _is_open(lock):
        return False
    return age > _LONGEST_BUILD or _file_system(lock) in _LOCAL_FILE_SYSTEMS


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has a file open; those of other users cannot be looked at."""
    path = str(file.resolve())
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            descriptors = Path("/proc", str(process.pid), "fd").iterdir()
            if any(os.readlink(descriptor) == path for descriptor in descriptors):
                return True
    return False


def _file_system(file: Path) -> str:
    """The type of the file system that a file is on; empty if unknown."""
    types_by_mount = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    for folder in file.resolve().parents:
        if folder in types_by_mount:
            return types_by_mount[folder]
    return ""
