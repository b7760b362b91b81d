# SPDX-License-Identifier: Apache-2.0
"""`--log-file`: the log holds everything, the screen a few lines."""

import io
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.config import run as runs
from ngrpo.machine.console import token_texts
from ngrpo.machine.progress import follow, show_progress
from ngrpo.trainers.openrlhf.trainer import trainer

STEP = "ngrpo: step 3: reward 0.219, 17 s\n"


class Trainer:
    """As OpenRLHF's TrainingActor after a step of 8 of its 20 prompts, two episodes long."""

    args = Namespace(train=Namespace(num_episodes=2), rollout=Namespace(batch_size=8))
    experience_maker = SimpleNamespace(prompt_memory=None)
    kl_ctl = SimpleNamespace(value=0.01)
    tensorboard_logger = None

    def save_logs_and_checkpoints(self, *_: Any) -> None: ...


@pytest.mark.parametrize("own", [{"prompts_dataloader": range(20)}, {}], ids=["synchronous", "asynchronous"])
def test_a_step_is_a_line_for_people_and_one_for_a_comparison(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where asynchronous, the length of the generator's dataloader comes with its state."""
    monkeypatch.setattr(runs, "_current", runs.RunConfig(run_dir=str(tmp_path)))
    state = {"at": 8} if own else {"at": 8, "ngrpo_length": 20}
    status = {"rollout/reward_mean": 0.21875, "timing/step_total": 17.4}
    trainer(type("Half", (Trainer,), own))().save_logs_and_checkpoints(3, status, {"data_loader_state_dict": state})
    assert capsys.readouterr().out == STEP
    written = json.loads((tmp_path / runs.PROGRESS).read_text())
    assert written == {"step": 3, "steps": 6, "reward": 0.21875, "seconds": 17.4}


def test_texts_of_tokens_keep_blanks_that_a_decoder_strips_at_the_beginning() -> None:
    """As Llama 2's tokenizer, which begins each text with a blank and takes it away again."""
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel({"▁the": 0, "▁answer": 1, "▁4": 2, "2": 3}, unk_token="2"))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert words.decode([0, 1, 2, 3]) == "the answer 42"
    assert token_texts([0, 1, 2, 3], words) == ["the", " answer", " 4", "2"]


def test_the_screen_shows_what_is_for_the_user(tmp_path: Path) -> None:
    text = f"noise of ngrpo/x.py\nngrpo: starting\rbar 1/2\n\x1b[36m(PPOTrainer pid=1)\x1b[0m {STEP}"
    log = tmp_path / "log"
    log.write_text("")
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]  # a line arrives in pieces

    def ended() -> bool:
        with log.open("a") as file:
            file.write(pieces.pop(0))
        return not pieces

    screen = io.StringIO()
    seen = list(follow(log, ended, every=0.0))
    assert [line for line in seen if line] == text.replace("\r", "\n").splitlines()
    show_progress(seen, screen)
    assert [line.split("s  ", 1)[1] for line in screen.getvalue().splitlines()] == ["starting", STEP[7:-1]]


def test_file_gets_everything_and_the_screen_comes_back(tmp_path: Path) -> None:
    """Where the block fails, the screen has the log's last lines too."""
    log = tmp_path / "train.log"
    log.write_text("ngrpo: step 1: reward 0.700, 9 s\n")
    code = f"""
import os, subprocess
from pathlib import Path
from ngrpo.machine.progress import into_file
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
    assert written.startswith("ngrpo: step 1") and "step 1" not in done.stdout, "the log of an earlier run is continued"
    assert all(line in written for line in ("python line", "child line", "raw error line", STEP))
    out = done.stdout.splitlines()
    assert done.returncode == 2
    assert (out[0], out[-1]) == ("before", "after")
    assert "step 3: reward 0.219" in done.stdout
    assert "child line" not in done.stdout
    assert "child line" in done.stderr
    assert f"the whole log: {log}" in done.stderr
