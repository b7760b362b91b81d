# SPDX-License-Identifier: Apache-2.0
"""`--log-file`: the log holds everything, the screen a few lines."""

import io
import subprocess
import sys
from pathlib import Path

from ngrpo.machine.console import Reporter, follow

STEP = (
    "(PPOTrainer pid=1) INFO ✨ Global step 3: {'act_loss': -0.1, 'rollout/reward_mean': 0.21875,"
    " 'timing/step_total': 17.4}\n"
)


def test_steps_and_milestones(tmp_path: Path) -> None:
    text = "noise\n2026 INFO Started a local Ray instance.\rbar 1/2\n" + STEP
    log = tmp_path / "log"
    log.write_text("")
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]  # a line arrives in pieces

    def ended() -> bool:
        with log.open("a") as file:
            file.write(pieces.pop(0))
        return not pieces

    screen = io.StringIO()
    reporter, seen = Reporter(screen), list(follow(log, ended, every=0.0))
    assert [line for line in seen if line] == text.replace("\r", "\n").splitlines()
    for line in seen:
        reporter.line(line)
    lines = [line.split("s  ", 1)[1] for line in screen.getvalue().splitlines()]
    assert lines == ["importing OpenRLHF and vLLM in Ray's workers", "step 3: reward 0.219, 17 s"]


def test_file_gets_everything_and_the_screen_comes_back(tmp_path: Path) -> None:
    """Where the block fails, the screen has the log's last lines too."""
    log = tmp_path / "train.log"
    log.write_text("Global step 1: {'rollout/reward_mean': 0.7}\n")
    code = f"""
import os, subprocess
from pathlib import Path
from ngrpo.machine.console import into_file
print("before", flush=True)
try:
    with into_file(Path({str(log)!r})):
        print("python line")
        subprocess.run(["echo", "child line"])
        os.write(2, b"raw error line\\n")
        print({STEP!r}, end="")
        raise SystemExit(2)
finally:
    print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    written = log.read_text()
    assert written.startswith("Global step 1") and "step 1" not in done.stdout, "the log of an earlier run goes on"
    assert all(line in written for line in ("python line", "child line", "raw error line", "Global step 3"))
    out = done.stdout.splitlines()
    assert done.returncode == 2 and (out[0], out[-1]) == ("before", "after")
    assert "step 3: reward 0.219" in done.stdout and "child line" not in done.stdout
    assert "child line" in done.stderr and f"the whole log: {log}" in done.stderr
