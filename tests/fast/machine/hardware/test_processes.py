# SPDX-License-Identifier: Apache-2.0
"""What a command started ends with it: on SIGTERM and SIGHUP, and when the command itself is killed."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ngrpo import patches
from ngrpo.machine.hardware import processes

# A command with a child that has started a child of its own; the innermost waits as an engine's process does.
COMMAND = """
import subprocess, sys, time
from ngrpo import cli
from ngrpo.commands import train
from ngrpo.machine.hardware import processes

ENGINE = "from ngrpo.machine.hardware import processes; processes.end_with_owner(); print('ready', flush=True)"
ENGINE += "; import time; time.sleep(60)"
MIDDLE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ENGINE!r}])"

def run(words, report):
    with processes.own_children():
        subprocess.Popen([sys.executable, "-c", MIDDLE])
    time.sleep(60)

train.run = run
sys.modules["vllm"] = sys  # as if an engine had been loaded here
sys.argv = ["ngrpo", "train"]
cli.console()
"""


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Processes that a test starts inherit that SIGHUP is ignored where `nohup make test` runs them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_stays(sign: signal.Signals) -> None:
    command = [sys.executable, "-c", COMMAND]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    engine = max(children, key=lambda child: child.create_time())
    process.send_signal(sign)
    _, error = process.communicate(timeout=30)
    assert psutil.wait_procs([engine], timeout=10)[1] == []
    if sign != signal.SIGKILL:
        assert process.returncode == 128 + sign
        assert error == "ngrpo: terminated\n"
        assert psutil.wait_procs(children, timeout=1)[1] == []


WAITING = """
import sys, time
from ngrpo.machine.hardware import processes

processes.raise_on_ending_signals()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("the terminal is closed", flush=True)
    print("and so is this", file=sys.stderr, flush=True)
    with open(sys.argv[1], "w") as file:
        file.write(str(processes.ending_signal()))
"""


def test_a_hangup_that_nohup_ignores_ends_nothing(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", WAITING, str(tmp_path / "came")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert (tmp_path / "came").read_text() == str(int(signal.SIGTERM))


def test_a_command_finishes_after_its_terminal_is_closed(tmp_path: Path) -> None:
    """Each write to a closed terminal fails."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", WAITING, str(tmp_path / "came")])
    while b"ready" not in os.read(terminal, 100):
        pass
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "came").read_text() == str(int(signal.SIGHUP))


def test_ports_are_below_those_of_outgoing_connections_on_any_hardware() -> None:
    rows = [row for row in patches.OPENRLHF if row.attribute == "BaseDistributedActor._get_free_port"]
    assert [row.when for row in rows] == [patches.TRAINING]
    ports = {processes.port_below_outgoing(lambda: 0).__func__() for _ in range(8)}
    assert len(ports) > 1
    assert all(20000 <= port < 32768 for port in ports)
