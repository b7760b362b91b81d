# SPDX-License-Identifier: Apache-2.0
"""Does the reward rise? Trains with `neighbor` and with `none` under the same seeds and settings, and draws both.

    python -m benchmarks.learning [--steps 40] [--seeds 42] [--out docs]

Runs examples/train_neighbor_cpu.sh once per strategy and seed (about 7 minutes each on 2 cores), keeps the
TensorBoard logs under runs/learning/, and writes OUT/learning.json and OUT/learning.png. Finished runs are kept:
started again, it continues where it stopped.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("none", "neighbor")


def train(strategy: str, seed: int, steps: int) -> dict[str, Any]:
    """One run; its summary.json."""
    folder = ROOT / "runs" / "learning" / f"{strategy}-{seed}-{steps}"
    summary = folder / "summary.json"
    if not summary.exists() or len(json.loads(summary.read_text())["steps"]) < steps:
        env = {**os.environ, "PERTURBATION": strategy, "DEMO_STEPS": str(steps)}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        script = ROOT / "examples" / "train_neighbor_cpu.sh"
        # The demo's rate is three times as high, and its attention another one.
        flags = ["--train.seed", str(seed), "--actor.adam.lr", "1e-5", "--ds.attn_implementation", "sdpa"]
        subprocess.run(["bash", str(script), str(folder), *flags], cwd=ROOT, env=env, check=True)
    return json.loads(summary.read_text())


def smoothed(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last ``window`` values at each step."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw(curves: dict[str, list[list[float]]], path: Path, title: str) -> None:
    """One line per strategy: thin for each seed's steps, thick for the mean of the last five."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, runs), color in zip(curves.items(), ("#777777", "#c2410c")):
        for rewards in runs:
            axes.plot(range(1, len(rewards) + 1), rewards, color=color, alpha=0.25, linewidth=1)
        mean = [sum(step) / len(step) for step in zip(*(smoothed(r) for r in runs))]
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2.5, label=name)
    axes.set(xlabel="step", ylabel="reward (share of right sums)", ylim=(0, 1), title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", default="42", help="separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = {name: [train(name, seed, options.steps) for seed in seeds] for name in STRATEGIES}
    curves = {name: [[step["reward"] for step in run["steps"]] for run in each] for name, each in runs.items()}
    first = runs[STRATEGIES[0]][0]
    result = {
        "rewards": curves,
        "seeds": seeds,
        "perturbation": runs["neighbor"][0]["perturbation"],
        "machine": first.get("machine"),
        "versions": first.get("versions"),
    }
    (options.out / "learning.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(curves, options.out / "learning.png", f"SmolLM2-135M, sums of two digits, seed {options.seeds}")
    for name, each in curves.items():
        for seed, rewards in zip(seeds, each):
            head, tail = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
            print(f"{name:9s} seed {seed}: first five steps {head:.3f}, last five {tail:.3f}")


if __name__ == "__main__":
    main()
