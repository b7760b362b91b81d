# SPDX-License-Identifier: Apache-2.0
"""How many seeds and steps the second study needs: the shortcut and the two peaks with tabular policies.

    python -m benchmarks.trap_power [--seeds 20] [--repeats 500]

The shortcut has two parameters, the logit of counting and the logit of counting right; the two peaks have 100 logits.
Both are trained with this package's own advantages on 8 prompts x 8 responses a step. Printed: where each arm ends, and
the chance that a paired t test over these seeds, with Holm's correction for all arms, finds the positive control.
Minutes on one core; numpy and torch.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from ngrpo.machine.models import sandbox
from ngrpo.methods import advantages
from ngrpo.methods.tasks import two_peaks as task
from ngrpo.workbench import statistics

PROMPTS, ANSWERS = 8, 8
EASY, COUNTED, SKILL = 0.6, 0.2, 0.1
ESCAPED = 0.8
ARMS = 20  # comparisons that Holm corrects for: the study's arms
Advantage = Callable[[np.ndarray], np.ndarray]


def advantage(name: str, **options: float) -> Advantage:
    """Rewards (prompts, responses) to advantages of that shape, by the package's own formula."""
    made = advantages.create(name, **options)

    def of(rewards: np.ndarray) -> np.ndarray:
        return made.formula(torch.from_numpy(rewards), None).numpy()

    return of


def shortcut(of: Advantage, seed: int, steps: int, rate: float = 0.3, easy: float = EASY) -> list[float]:
    """The mean reward after each step, for a policy that chooses a way and then counts right or not."""
    chance = np.random.default_rng(seed)
    way, skill = _logit(COUNTED), _logit(SKILL)
    curve = []
    for _ in range(steps):
        is_easy = chance.random((PROMPTS, 1)) < easy
        counts = chance.random((PROMPTS, ANSWERS)) < _share(way)
        right = chance.random((PROMPTS, ANSWERS)) < _share(skill)
        weight = of(np.where(counts, right, is_easy).astype(np.float64))
        push = (weight * (counts - _share(way))).sum() / PROMPTS
        lesson = (weight * counts * (right - _share(skill))).sum() / PROMPTS
        way, skill = np.clip([way + rate * push, skill + rate * lesson], -8.0, 8.0)
        curve.append(_share(way) * _share(skill) + (1 - _share(way)) * easy)
    return curve


def two_peaks(of: Advantage, seed: int, steps: int, rate: float = 1.0) -> list[float]:
    """The mean reward after each step, for a softmax over 100 numbers that starts at the sandbox model's habit."""
    chance = np.random.default_rng(seed)
    logits, rewards = np.log(sandbox.peak_habit()), np.array([task.reward(number) for number in sandbox.NUMBERS])
    curve = []
    for _ in range(steps):
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        chosen = chance.choice(len(shares), (PROMPTS, ANSWERS), p=shares)
        weight = of(rewards[chosen])
        gradient = np.bincount(chosen.ravel(), weight.ravel(), len(shares)) - weight.sum() * shares
        logits = logits + rate * gradient / weight.size
        curve.append(float(shares @ rewards))
    return curve


def power(ours: np.ndarray, baseline: np.ndarray, seeds: int, comparisons: int, repeats: int) -> float:
    """The chance that ours is found to be better with this many seeds, drawn from the simulated runs."""
    chance = np.random.default_rng(0)
    hits = 0
    for _ in range(repeats):
        pair = [chance.choice(runs, (seeds, 1)) for runs in (ours, baseline)]
        difference = statistics.paired(*pair)
        # Without a p: every seed differs by the same, and by more than nothing.
        hits += difference["value"] > 0 and (difference["p"] is None or difference["p"] * comparisons < 0.05)
    return hits / repeats


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="simulated runs of an arm")
    parser.add_argument("--repeats", type=int, default=500, help="simulated studies")
    arguments = parser.parse_args(argv)
    for trap, rivals, lengths in (
        (shortcut, {"group_norm": {}, "pass_at_k": {"k": 2}, "pkpo": {"k": 2}}, (25, 50, 100, 150, 200)),
        (two_peaks, {"group_norm": {}, "pkpo": {"k": 8}}, (50, 100, 200, 300)),
    ):
        runs = {
            name: np.array([trap(advantage(name, **options), seed, max(lengths)) for seed in range(arguments.seeds)])
            for name, options in rivals.items()
        }
        for name, curves in runs.items():
            for steps in lengths:
                now = curves[:, steps - 1]
                line = f"{trap.__name__:9s} {name:11s} {steps:4d} steps: {now.mean():.3f} +- {now.std(ddof=1):.3f}"
                line += f", {(now > ESCAPED).mean():.2f} above {ESCAPED}"
                if name != "group_norm":
                    chances = (
                        power(now, runs["group_norm"][:, steps - 1], n, ARMS, arguments.repeats) for n in (3, 5, 8)
                    )
                    line += ", power with 3, 5, 8 seeds: " + " ".join(f"{chance:.2f}" for chance in chances)
                print(line, flush=True)


def _logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


def _share(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


if __name__ == "__main__":
    main()
