"""What a command started ends with it: on SIGTERM, and when the command itself is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ngrpo.command_parser import telling_what_is_kept

# A command with a child that has started a child of its own; the innermost waits as an engine's process does.
COMMAND = """
import subprocess, sys, time
from ngrpo import cli, processes

ENGINE = "from ngrpo import processes; processes.end_with_owner(); print('ready', flush=True)"
ENGINE += "; import time; time.sleep(60)"
MIDDLE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ENGINE!r}])"

def run(words):
    with processes.own_children():
        subprocess.Popen([sys.executable, "-c", MIDDLE])
    time.sleep(60)

cli._train = run
sys.modules["vllm"] = sys  # as if an engine had been loaded here
sys.argv = ["ngrpo", "train"]
cli.console()
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays(sign: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    engine = max(children, key=lambda child: child.create_time())
    process.send_signal(sign)
    _, error = process.communicate(timeout=30)
    assert psutil.wait_procs([engine], timeout=10)[1] == []
    if sign == signal.SIGTERM:
        assert process.returncode == 143 and error == "ngrpo: terminated\n"
        assert psutil.wait_procs(children, timeout=1)[1] == []


@pytest.mark.parametrize(("words", "again"), [(["--n", "4"], "--n 4 --out here"), (["--out", "x"], "--out x")])
def test_what_is_kept_is_told(words: list[str], again: str) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), telling_what_is_kept("eval", words, Path("here"), said.append):
        raise KeyboardInterrupt
    assert said == [f"ended early; what was finished is kept in here. Go on with: ngrpo eval {again}"]
    with telling_what_is_kept("eval", words, Path("here"), said.append):
        assert len(said) == 1
