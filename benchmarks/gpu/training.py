# SPDX-License-Identifier: Apache-2.0
"""Steps of ``ngrpo train`` on the whole stack, with a reference model and a checkpoint at the end.

The gap of rollout and trainer is that of the run's summary.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import SMOLLM2
from benchmarks.machine import ROOT

_REWARD = '''
def reward_func(queries, prompts, labels):
    """The share of even words, which random weights can learn."""
    answers = [query[len(prompt):].split() for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(word[-1] in "02468" for word in words) / max(len(words), 1) for words in answers]}
'''


def flags(arguments: dict[str, Any], folder: Path, model: str) -> list[str]:
    """Of ``ngrpo train``: no placement, so that the default is what is tried."""
    batch, samples = arguments["batch"], 4
    options = {
        "--hardware": arguments["hardware"],
        "--perturbation": "neighbor",
        "--perturbation.rate": 0.5,
        "--model": model,
        "--run-dir": folder / "run",
        "--log-file": folder / "run" / "train.log",
        "--algo.advantage.estimator": "group_norm",
        # Not 0, so that there is a reference model, which replays too.
        "--algo.kl.init_coef": 1e-3,
        "--data.max_samples": batch * arguments["steps"],
        "--data.max_len": 192,
        "--rollout.batch_size": batch,
        "--rollout.n_samples_per_prompt": samples,
        "--rollout.micro_batch_size": 8,
        "--rollout.max_new_tokens": arguments["tokens"],
        "--train.batch_size": batch * samples,
        "--train.micro_batch_size": 8,
        # Large, so that a tensor that misses the weight sync shows in the second step's gap.
        "--actor.adam.lr": 3e-5,
        "--actor.lr_scheduler": "constant",
        "--actor.lr_warmup_ratio": 0,
        "--train.seed": 42,
        "--ckpt.save_steps": arguments["steps"],
    }
    if model == SMOLLM2:
        options["--task"] = "arithmetic"
    else:
        options |= {"--data.prompt_dataset": folder / "prompts.jsonl", "--data.input_key": "input"}
        options["--reward.remote_url"] = folder / "reward.py"
    return [*(str(word) for pair in options.items() for word in pair), *arguments.get("flags", ())]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each step; the last one has the size of the checkpoint that was saved after it."""
    from benchmarks.gpu import models

    model = arguments["model"] if arguments["model"] == SMOLLM2 else models.made(arguments["model"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [{"input": " ".join(f"w{10 + (7 * i + j) % 400}" for j in range(12))} for i in range(256)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        (folder / "reward.py").write_text(_REWARD)
        # DeepSpeed looks for ninja. An interrupt reaches the training too, which ends its Ray; this waits for it.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        signal.signal(signal.SIGINT, lambda *_: None)
        command = [sys.executable, "-m", "ngrpo.cli", "train", *flags(arguments, folder, model)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False)
        if done.returncode != 0:
            log = folder / "run" / "train.log"
            print(log.read_text(errors="replace")[-6000:] if log.exists() else "", flush=True)
            raise RuntimeError(f"the training ended with status {done.returncode}")
        steps = json.loads((folder / "run" / "summary.json").read_text())["steps"]
        checkpoint = folder / "run" / "checkpoints" / "_actor" / f"global_step{arguments['steps']}"
        if not checkpoint.is_dir():
            raise RuntimeError(f"the training left no checkpoint {checkpoint.relative_to(folder)}")
        checkpoint_gib = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) / 2**30
    names = ["reward", "rate", "shift", "gap_perturbed_mean", "gap_perturbed_max", "gap_plain_mean", "step_seconds"]
    for step in steps:
        figures = {name: step.get(name) for name in names}
        last = {"checkpoint_gib": checkpoint_gib} if step is steps[-1] else {}
        yield {"step": step["step"], **figures, **last}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Exact: after perturbed inputs the gap is at most twice the gap elsewhere, in every step."""
    times = max(row["gap_perturbed_mean"] / max(row["gap_plain_mean"], 1e-5) for row in rows)
    good = times <= 2.0 and all(row["shift"] > 0 for row in rows)
    gap, seconds = (statistics.mean(row[name] for row in rows) for name in ("gap_perturbed_mean", "step_seconds"))
    rewards = f"reward {rows[0]['reward']:.3f} to {rows[-1]['reward']:.3f}"
    return good, (
        f"{'exact' if good else 'NOT EXACT'}; {len(rows)} steps, gap {gap:.1e}, at most {times:.2f} of the plain,"
        f" {rewards}, {seconds:.1f} s a step"
    )
