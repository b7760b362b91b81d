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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import SMOLLM2
from benchmarks.machine import ROOT

_COLUMNS = ("reward", "rate", "shift", "gap_perturbed_mean", "gap_perturbed_max", "gap_plain_mean", "step_seconds")
_REWARD = '''
def reward_func(queries, prompts, labels):
    """The share of even words, which random weights can learn."""
    answers = [query[len(prompt):].split() for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(word[-1] in "02468" for word in words) / max(len(words), 1) for words in answers]}
'''


def flags(arguments: dict[str, Any], folder: Path, model: str) -> list[str]:
    """Of ``ngrpo train``: no placement, so that the default is what is tried."""
    batch = arguments["batch"]
    samples = 4  # of each prompt
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
        (folder / "prompts.jsonl").write_text(_prompts())
        (folder / "reward.py").write_text(_REWARD)
        _train(flags(arguments, folder, model), folder / "run" / "train.log")
        steps = json.loads((folder / "run" / "summary.json").read_text())["steps"]
        checkpoint = folder / "run" / "checkpoints" / "_actor" / f"global_step{arguments['steps']}"
        if not checkpoint.is_dir():
            raise RuntimeError(f"the training left no checkpoint {checkpoint.relative_to(folder)}")
        checkpoint_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    rows = [_row(step) for step in steps]
    rows[-1]["checkpoint_gib"] = checkpoint_bytes / 2**30
    yield from rows


def _prompts() -> str:
    """Lines of JSON with 256 prompts of twelve numbered words."""
    lines = []
    for prompt in range(256):
        words = [f"w{10 + (7 * prompt + place) % 400}" for place in range(12)]
        lines.append(json.dumps({"input": " ".join(words)}))
    return "\n".join(lines)


def _train(words: Sequence[str], log: Path) -> None:
    """Runs ``ngrpo train``; raises ``RuntimeError`` where it fails."""
    # DeepSpeed looks for ninja.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # An interrupt reaches the training too, which ends its Ray; this process waits for it.
    signal.signal(signal.SIGINT, lambda *_: None)
    command = [sys.executable, "-m", "ngrpo.cli", "train", *words]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False)
    if process.returncode != 0:
        if log.exists():
            print(log.read_text(errors="replace")[-6000:], flush=True)
        raise RuntimeError(f"the training ended with status {process.returncode}")


def _row(step: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": step["step"], **{name: step.get(name) for name in _COLUMNS}}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Exact: after perturbed inputs the gap is at most twice the gap elsewhere, in every step."""
    factors = [row["gap_perturbed_mean"] / max(row["gap_plain_mean"], 1e-5) for row in rows]
    largest_factor = max(factors)
    good = largest_factor <= 2.0 and all(row["shift"] > 0 for row in rows)
    gap = statistics.mean(row["gap_perturbed_mean"] for row in rows)
    seconds = statistics.mean(row["step_seconds"] for row in rows)
    verdict = "exact" if good else "NOT EXACT"
    return good, (
        f"{verdict}; {len(rows)} steps, gap {gap:.1e}, at most {largest_factor:.2f} of the plain,"
        f" reward {rows[0]['reward']:.3f} to {rows[-1]['reward']:.3f}, {seconds:.1f} s a step"
    )
