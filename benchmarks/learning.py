# SPDX-License-Identifier: Apache-2.0
"""Does the reward rise? Trains with `neighbor` and with `none` under the same seeds and settings, and draws both.

    python -m benchmarks.learning [--steps 40] [--seeds 42] [--out docs]

Runs examples/train_neighbor_cpu.sh once per strategy and seed (about 7 minutes each on 2 cores), keeps the
TensorBoard logs under runs/learning/, and writes OUT/learning.json and OUT/learning.png. Finished runs are kept:
started again, it continues where it stopped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.command_line import integers, parser_of
from benchmarks.machine import ROOT

COLORS = {"none": "#777777", "neighbor": "#c2410c"}
"""The strategies and the colors of their curves."""
_ENDS = 5  # steps at each end of a run whose mean is printed


def train(strategy: str, seed: int, steps: int) -> dict[str, Any]:
    """One run; its summary.json."""
    folder = ROOT / "runs" / "learning" / f"{strategy}-{seed}-{steps}"
    summary = folder / "summary.json"
    if not summary.exists() or len(json.loads(summary.read_text())["steps"]) < steps:
        environment = {**os.environ, "PERTURBATION": strategy, "DEMO_STEPS": str(steps)}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        script = ROOT / "examples" / "train_neighbor_cpu.sh"
        # The demo's rate is three times as high, and its attention another one.
        flags = ["--train.seed", str(seed), "--actor.adam.lr", "1e-5", "--ds.attn_implementation", "sdpa"]
        subprocess.run(["bash", str(script), str(folder), *flags], cwd=ROOT, env=environment, check=True)
    return json.loads(summary.read_text())


def smoothed(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last ``window`` values at each step, of fewer at the first ones."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def draw(curves: dict[str, list[list[float]]], path: Path, title: str) -> None:
    """One line per strategy: thin for each seed's steps, thick for the mean of the last five."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, runs in curves.items():
        color = COLORS[name]
        for rewards in runs:
            axes.plot(range(1, len(rewards) + 1), rewards, color=color, alpha=0.25, linewidth=1)
        smoothed_runs = [smoothed(rewards) for rewards in runs]
        mean = [sum(step_rewards) / len(step_rewards) for step_rewards in zip(*smoothed_runs)]
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2.5, label=name)
    axes.set(xlabel="step", ylabel="reward (share of right sums)", ylim=(0, 1), title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=integers, default=[42], help="separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    runs = {name: [train(name, seed, options.steps) for seed in options.seeds] for name in COLORS}
    curves: dict[str, list[list[float]]] = {name: [] for name in COLORS}
    for name, summaries in runs.items():
        for summary in summaries:
            curves[name].append([step["reward"] for step in summary["steps"]])
    result = {
        "rewards": curves,
        "seeds": options.seeds,
        "perturbation": runs["neighbor"][0]["perturbation"],
        "machine": runs["none"][0].get("machine"),
        "versions": runs["none"][0].get("versions"),
    }
    (options.out / "learning.json").write_text(json.dumps(result, indent=1) + "\n")
    seeds = ",".join(map(str, options.seeds))
    draw(curves, options.out / "learning.png", f"SmolLM2-135M, sums of two digits, seed {seeds}")
    for name, seed_rewards in curves.items():
        for seed, rewards in zip(options.seeds, seed_rewards):
            first = sum(rewards[:_ENDS]) / _ENDS
            last = sum(rewards[-_ENDS:]) / _ENDS
            print(f"{name:9s} seed {seed}: first five steps {first:.3f}, last five {last:.3f}")


if __name__ == "__main__":
    main()
