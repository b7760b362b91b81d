# SPDX-License-Identifier: Apache-2.0
"""What a command started ends with it: on SIGTERM, and when the command itself is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

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


SCORER = """
import pathlib, time

def reward_func(queries, prompts, labels):
    pathlib.Path(__file__).with_suffix(".called").touch()
    time.sleep(60)
"""


PROBLEMS = "--data problems.jsonl --scorer scorer.py"
COMPARE = "--perturbations none --task arithmetic --base grpo --diagnose.prompts 0 --rollout.n_samples_per_prompt 2"
COMPARE += " --eval.data problems.jsonl --eval.scorer scorer.py"


@pytest.mark.parametrize(
    ("command", "words", "sign", "code"),
    [
        ("compare", COMPARE, signal.SIGTERM, 143),
        pytest.param("compare", COMPARE, signal.SIGKILL, -9, marks=pytest.mark.more),
        pytest.param("eval", PROBLEMS, signal.SIGTERM, 143, marks=pytest.mark.more),
        pytest.param("diagnose", f"{PROBLEMS} --prompts 1", signal.SIGINT, 130, marks=pytest.mark.more),
    ],
)
def test_a_command_ends_with_all_that_it_started(
    command: str, words: str, sign: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Each one waits in a scorer, before any engine is built: a comparison in its evaluation of the untrained model."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "scorer.py").write_text(SCORER)
    (tmp_path / "problems.jsonl").write_text('{"input": "1 + 1?", "label": "2"}\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "ngrpo.cli", command, *f"{words} --model model --hardware cpu --out out".split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background job ignores the interrupt, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "scorer.called").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout and process.stdout.read()
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert bool(children) == (command == "compare")
    process.send_signal(sign)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in output, output
    assert psutil.wait_procs(children, timeout=30)[1] == []
    if code > 0:
        assert f"what was finished is kept in out. Go on with: ngrpo {command} {words.split()[0]}" in output
