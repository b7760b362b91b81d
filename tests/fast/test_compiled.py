# SPDX-License-Identifier: Apache-2.0
"""Compilation on first use: its program, and locks that a killed build leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ngrpo import patches
from ngrpo.config import run
from ngrpo.machine.hardware.compiled import ready_to_compile, remove_stale_locks
from ngrpo.trainers.openrlhf import worker
from tests.fast.run import run_of


def locked(folder: Path, age: float) -> Path:
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def test_only_a_lock_that_nobody_works_under_is_removed(tmp_path: Path) -> None:
    stale, young = locked(tmp_path / "stale", 600.0), locked(tmp_path / "young", 5.0)
    busy = locked(tmp_path / "busy", 600.0)
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=busy.parent, stdin=subprocess.PIPE)
    try:
        assert remove_stale_locks(tmp_path, time.time()) == [stale]
    finally:
        compiler.kill()
        compiler.wait()
    assert not stale.exists()
    assert young.exists()
    assert busy.exists()
    assert remove_stale_locks(tmp_path, time.time()) == [busy], "its build has ended without removing it"


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    assert remove_stale_locks(tmp_path / "missing", time.time()) == []


@pytest.mark.parametrize("set_folder", [True, False])
@pytest.mark.parametrize("in_worker", [True, False])
def test_locks_go_wherever_torch_compiles_and_in_each_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, set_folder: bool, in_worker: bool
) -> None:
    """torch's own default folder has one for each release between, as py312_cu130."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if set_folder:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    lock = locked(tmp_path / "own" / "fused_adam" if set_folder else default_folder() / "fused_adam", 600.0)
    if in_worker:
        monkeypatch.setattr(patches, "install", lambda conditions: None)
        monkeypatch.setattr(run, "_current", run.current_run())  # put back after the test
        worker.setup_hook((), run_of())()
    else:
        ready_to_compile(time.time())
    assert not lock.exists()


def default_folder() -> Path:
    """Where torch compiles if nothing is set: asked of torch, and not of what is tested."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("any", verbose=False)).parent


def test_a_lock_of_the_running_build_stays_in_a_worker_that_starts_late(tmp_path: Path) -> None:
    lock = locked(tmp_path / "fused_adam", 100.0)
    assert remove_stale_locks(tmp_path, time.time() - 300.0) == []
    assert lock.exists()


def test_the_programs_of_this_python_are_found_without_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.venv/bin/ngrpo`, started by its path: DeepSpeed builds with ninja."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    ready_to_compile(time.time())
    assert os.environ["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"
