# SPDX-License-Identifier: Apache-2.0
"""Stage e: the demo's training on the whole stack, hybrid engine with sleep."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import Case
from benchmarks.machine import ROOT

TITLE = "training: the demo's task, rollout and trainer on one GPU in turns (hybrid engine with sleep)"
_STACK = "docs/install.md"
_NEEDS = {name: _STACK for name in ("openrlhf", "ray", "deepspeed")}
# One GPU for all, and each side leaves its memory to the other.
_HYBRID = [
    *["--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep", "--vllm.gpu_memory_utilization", "0.4"],
    *["--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--vllm.num_engines", "1"],
    *["--vllm.tensor_parallel_size", "1"],
]


def cases(rehearse: bool) -> list[Case]:
    """One run for each perturbation; stock OpenRLHF first."""
    if rehearse:
        # A CPU has no sleep mode, and each role its own place.
        small = {"steps": 2, "flags": ["--rollout.max_new_tokens", "4"]}
        return [Case("neighbor", {"perturbation": "neighbor", **small}, needs=_NEEDS)]
    return [
        Case(name, {"perturbation": name, "steps": 20, "flags": _HYBRID}, needs=_NEEDS)
        for name in ("none", "neighbor", "gumbel")
    ]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: the reward's course, the gap between rollout and trainer, and the seconds of a step."""
    environment = {**os.environ, "PERTURBATION": arguments["perturbation"], "DEMO_STEPS": str(arguments["steps"])}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "examples" / "train_neighbor_cpu.sh")
        done = subprocess.run(["bash", script, folder, *arguments["flags"]], cwd=ROOT, env=environment, check=False)
        log = Path(folder) / "train.log"
        if done.returncode != 0:
            print(log.read_text(errors="replace")[-4000:] if log.exists() else "no log")
            raise RuntimeError(f"the training ended with status {done.returncode}")
        steps = json.loads((Path(folder) / "summary.json").read_text())["steps"]
    rewards = [step["reward"] for step in steps]
    yield {
        "perturbation": arguments["perturbation"],
        "steps": len(steps),
        "reward_first": statistics.mean(rewards[:5]),
        "reward_last": statistics.mean(rewards[-5:]),
        "gap_plain": _mean(steps, "gap_plain_mean"),
        "gap_perturbed": _mean(steps, "gap_perturbed_mean"),
        "step_s": _mean(steps, "step_seconds"),
        "rewards": rewards,
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.mean(values) if values else None
