# SPDX-License-Identifier: Apache-2.0
"""What a user is told when a training ends, and that nothing of it stays."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngrpo.trainers.openrlhf import launch
from ngrpo.trainers.openrlhf.launch import RUN_ID, end_processes, engine_error, explanation, root_cause
from tests.support.own_process import alive, ends


class TaskError(Exception):
    cause: BaseException
    function_name = "fit"


NO_PACKAGE = "FlashAttention2 has been toggled on, but it cannot be used due to the following error: no such package"
KNOWN = {
    "Memory on the node (IP: 10.0.0.7, ID: 5c9e0f) was 22.41GB / 23.53GB (0.952401)": "the machine ran out of memory",
    "No module named 'flash_attn'": "no working flash-attn",
    "No module named 'flash_attn.bert_padding'": "no working flash-attn",
    NO_PACKAGE: "no working flash-attn",
    "No module named 'ngrpo.trainers.openrlhf'": "a node of the cluster is without ngrpo",
    "[enforce fail at inline_container.cc:672] . unexpected pos 76800 vs 76694": "a checkpoint could not be written",
    "OSError: [Errno 28] No space left on device: '/tb/events.out'": "a file could not be written",
    "CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of": "a GPU ran out of memory",
    "Free memory on device cuda:0 (21.4/79.11 GiB) on startup is less than desired": "other processes hold memory",
    "No available memory for the cache blocks. Try increasing": "no room for one response",
    "Call to wake_up method failed: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:146": (
        "an engine could not wake up"
    ),
    "Error while creating shared memory segment /dev/shm/nccl-ab12 (size 33030528), No space left on device": (
        "the shared memory of this machine is used up"
    ),
}


@pytest.mark.parametrize("words", KNOWN)
def test_a_known_error_is_explained(words: str) -> None:
    outer = RuntimeError("the actor died")
    outer.__cause__ = ImportError(words)
    explained = explanation(outer)
    assert explained is not None
    assert KNOWN[words] in explained
    assert explained.endswith(words)


@pytest.mark.parametrize(
    "error", [MemoryError("cannot allocate"), ValueError(""), ImportError("No module named 'ngrpolite'")], ids=str
)
def test_any_other_error_is_not(error: Exception) -> None:
    assert explanation(error) is None


def test_root_cause_of_nested_ray_errors() -> None:
    outer = TaskError("300 lines")
    inner = TaskError("200 lines")
    outer.cause = inner
    inner.cause = ValueError("the reward file is empty")
    assert root_cause(outer) == "ValueError: the reward file is empty\n  in fit"
    died = RuntimeError('The actor died\n  File "x.py", line 1, in f\nImportError: cannot import name y')
    assert root_cause(died).startswith("ImportError: cannot import name y")


TRACEBACK = """
  File "/x/ngrpo/rollout/perturber.py", line 80, in finish
  File "<late.py, from the spec>", line 18, in propose
    table["late"]
"""


def test_root_cause_in_a_user_s_file_has_its_line() -> None:
    outer = TaskError(f"ray::fit() {TRACEBACK}KeyError: 'late'")
    outer.cause = KeyError("late")
    assert root_cause(outer) == "KeyError: 'late'\n  at line 18 of late.py, in propose()\n  in fit"


def test_an_engine_that_fails_in_a_user_s_file_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["EngineCore encountered a fatal error.", *TRACEBACK.splitlines(), "KeyError: 'late'"]
    prefix = "(EngineCore pid=7) ERROR 11-26 23:19:21 [core.py:1374] "
    (tmp_path / "worker-1.out").write_text("".join(f"{prefix}{line}\n" for line in lines))
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(pytest.importorskip("ray")._private.worker, "_global_node", node)
    dead = RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    told = str(launch._as_training_failed(dead))
    assert told.startswith("an engine failed: KeyError: 'late'\n  at line 18 of late.py, in propose()")


def test_what_an_engine_process_failed_with(tmp_path: Path) -> None:
    line = "(EngineCore pid=2189) ERROR 11-26 23:19:21 [core.py:1374] {}\n".format
    text = "".join(map(line, ("EngineCore failed to start.", "  raise ValueError(", "ValueError: small", "")))
    (tmp_path / "worker-1.out").write_text(text)
    assert engine_error(tmp_path) == "ValueError: small"
    assert engine_error(tmp_path / "none") is None


def test_an_engine_that_does_not_start_is_explained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs the reason, and raises an error without it."""
    said = "ValueError: Free memory on device cuda:0 (21.4/79.11 GiB) on startup is less than desired"
    (tmp_path / "worker-1.out").write_text(f"(EngineCore pid=7) ERROR 11-26 23:19:21 [core.py:1374] {said}\n")
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(pytest.importorskip("ray")._private.worker, "_global_node", node)
    told = str(launch._as_training_failed(RuntimeError("Engine core initialization failed. See root cause above.")))
    assert told.startswith("an engine did not start: other processes hold memory of the GPU")
    assert said[12:] in told


# A process that starts another and is then gone, as a killed worker leaves its compiler processes.
PARENT = """
import subprocess, sys
nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **nothing).pid)
"""


@pytest.fixture
def orphan() -> Iterator[int]:
    env = {**os.environ, RUN_ID: "run-of-this-test"}
    done = subprocess.run([sys.executable, "-c", PARENT], env=env, capture_output=True, text=True, check=True)
    process = int(done.stdout)
    yield process
    if alive(process):
        os.kill(process, 9)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_processes_that_a_killed_worker_left_are_ended(orphan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.2)
    end_processes("another run")
    assert alive(orphan)
    end_processes("run-of-this-test")
    assert ends(orphan, within=5.0)
