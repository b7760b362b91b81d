# SPDX-License-Identifier: Apache-2.0
"""What a command started ends with it: on SIGTERM, and when the command itself is killed."""

import signal
import subprocess
import sys

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


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays(sign: signal.Signals) -> None:
    command = [sys.executable, "-c", COMMAND]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    engine = max(children, key=lambda child: child.create_time())
    process.send_signal(sign)
    _, error = process.communicate(timeout=30)
    assert psutil.wait_procs([engine], timeout=10)[1] == []
    if sign == signal.SIGTERM:
        assert process.returncode == 143 and error == "ngrpo: terminated\n"
        assert psutil.wait_procs(children, timeout=1)[1] == []


def test_ports_are_below_those_of_outgoing_connections_on_any_hardware() -> None:
    rows = [row for row in patches.OPENRLHF if row.attribute == "BaseDistributedActor._get_free_port"]
    assert [row.when for row in rows] == [patches.TRAINING]
    ports = {processes.port_below_outgoing(lambda: 0).__func__() for _ in range(8)}
    assert len(ports) > 1 and all(20000 <= port < 32768 for port in ports)
