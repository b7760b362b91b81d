# SPDX-License-Identifier: Apache-2.0
"""How many seeds and steps the second study needs: the shortcut and the two peaks with tabular policies.

    python -m benchmarks.trap_power [--seeds 20] [--repeats 500]

The shortcut has two parameters, the logit of counting and the logit of counting right; the two peaks have 100 logits.
Both are trained with this package's own advantages on 8 prompts x 8 responses a step. Printed: where each arm ends, and
the chance that a paired t test over these seeds, with Bonferroni's correction for all arms, finds the positive control.
Minutes on one core; numpy and torch.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.command_line import parser_of
from ngrpo.machine.models import sandbox
from ngrpo.methods import advantages
from ngrpo.methods.tasks import two_peaks as task
from ngrpo.workbench import statistics

PROMPTS = 8
RESPONSES = 8
EASY = 0.6  # share of prompts whose shortcut is rewarded
COUNTED = 0.2  # probability of counting before training
SKILL = 0.1  # probability of counting right before training
ESCAPED = 0.8  # reward above which a run has left the local optimum
ARMS = 20  # comparisons that are corrected for: the study's arms
SEED_COUNTS = (3, 5, 8)
BASELINE = "group_norm"
Advantage = Callable[[np.ndarray], np.ndarray]


def advantage(name: str, **options: float) -> Advantage:
    """Rewards (prompts, responses) to advantages of that shape, by the package's own formula."""
    method = advantages.create(name, **options)

    def advantages_of(rewards: np.ndarray) -> np.ndarray:
        return method.formula(torch.from_numpy(rewards), None).numpy()

    return advantages_of


def shortcut(advantages_of: Advantage, seed: int, steps: int, rate: float = 0.3, easy: float = EASY) -> list[float]:
    """The mean reward after each step, for a policy that chooses a way and then counts right or not."""
    draws = np.random.default_rng(seed)
    way = _logit(COUNTED)
    skill = _logit(SKILL)
    curve = []
    for _ in range(steps):
        is_easy = draws.random((PROMPTS, 1)) < easy
        counts = draws.random((PROMPTS, RESPONSES)) < _share(way)
        right = draws.random((PROMPTS, RESPONSES)) < _share(skill)
        rewards = np.where(counts, right, is_easy).astype(np.float64)
        weights = advantages_of(rewards)
        way_gradient = (weights * (counts - _share(way))).sum() / PROMPTS
        skill_gradient = (weights * counts * (right - _share(skill))).sum() / PROMPTS
        way, skill = np.clip([way + rate * way_gradient, skill + rate * skill_gradient], -8.0, 8.0)
        curve.append(_share(way) * _share(skill) + (1 - _share(way)) * easy)
    return curve


def two_peaks(advantages_of: Advantage, seed: int, steps: int, rate: float = 1.0) -> list[float]:
    """The mean reward after each step, for a softmax over 100 numbers that starts at the sandbox model's habit."""
    draws = np.random.default_rng(seed)
    logits = np.log(sandbox.peak_habit())
    rewards = np.array([task.reward(number) for number in sandbox.NUMBERS])
    curve = []
    for _ in range(steps):
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        chosen = draws.choice(len(shares), (PROMPTS, RESPONSES), p=shares)
        weights = advantages_of(rewards[chosen])
        gradient = np.bincount(chosen.ravel(), weights.ravel(), len(shares)) - weights.sum() * shares
        logits = logits + rate * gradient / weights.size
        curve.append(float(shares @ rewards))
    return curve


class Trap(NamedTuple):
    """A simulated task.

    Attributes:
        simulate: a run's rewards, as :func:`shortcut` gives them.
        rivals: advantages with their options by name, the baseline first.
        lengths: steps after which runs are compared.
    """

    simulate: Callable[[Advantage, int, int], list[float]]
    rivals: dict[str, dict[str, float]]
    lengths: tuple[int, ...]


TRAPS = (
    Trap(shortcut, {BASELINE: {}, "pass_at_k": {"k": 2}, "pkpo": {"k": 2}}, (25, 50, 100, 150, 200)),
    Trap(two_peaks, {BASELINE: {}, "pkpo": {"k": 8}}, (50, 100, 200, 300)),
)


def power(ours: np.ndarray, baseline: np.ndarray, seeds: int, comparisons: int, repeats: int) -> float:
    """The chance that ours is found to be better with this many seeds, drawn from the simulated runs."""
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(repeats):
        our_scores = draws.choice(ours, (seeds, 1))
        baseline_scores = draws.choice(baseline, (seeds, 1))
        difference = statistics.paired(our_scores, baseline_scores)
        significant = difference["p"] * comparisons < 0.05
        hits += difference["value"] > 0 and significant
    return hits / repeats


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="simulated runs of an arm")
    parser.add_argument("--repeats", type=int, default=500, help="simulated studies")
    options = parser.parse_args(argv)
    for trap in TRAPS:
        _print_trap(trap, options.seeds, options.repeats)


def _print_trap(trap: Trap, seeds: int, repeats: int) -> None:
    curves: dict[str, np.ndarray] = {}  # by advantage, (seeds, steps)
    for name, options in trap.rivals.items():
        rival = advantage(name, **options)
        curves[name] = np.array([trap.simulate(rival, seed, max(trap.lengths)) for seed in range(seeds)])
    for name in trap.rivals:
        for steps in trap.lengths:
            rewards = curves[name][:, steps - 1]
            spread = f"{rewards.mean():.3f} +- {rewards.std(ddof=1):.3f}"
            escaped = f"{(rewards > ESCAPED).mean():.2f} above {ESCAPED}"
            line = f"{trap.simulate.__name__:9s} {name:11s} {steps:4d} steps: {spread}, {escaped}"
            if name != BASELINE:
                baseline = curves[BASELINE][:, steps - 1]
                chances = [power(rewards, baseline, count, ARMS, repeats) for count in SEED_COUNTS]
                line += ", power with 3, 5, 8 seeds: " + " ".join(f"{chance:.2f}" for chance in chances)
            print(line, flush=True)


def _logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


def _share(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


if __name__ == "__main__":
    main()
