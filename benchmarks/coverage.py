# SPDX-License-Identifier: Apache-2.0
"""How often intervals over seeds hold the truth, by simulation of comparisons with a known truth.

    python -m benchmarks.coverage [--trials 2000]

A comparison trains two strategies with each of 3, 5 or 10 seeds; a trained model has a chance of solving each of 16
problems, of which 32 responses are counted. What differs from run to run is drawn on the logit scale: an effect of the
seed that both strategies share, one of the run, one of the run on each problem; in one world a run in ten collapses.
The truth is the mean difference over all seeds on these problems. Then: eight equal strategies held against one
baseline, and how often any of them is called different; and two tasks pooled.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks import pooled
from benchmarks.machine import describe
from ngrpo.workbench import statistics
from ngrpo.workbench.statistics import LEVEL, bounds

PROBLEMS, ANSWERS, GAIN = 16, 32, 0.3
SEEDS = (3, 5, 10)
_REPLICATES = 2000
_TAILS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]


@dataclass(frozen=True)
class World:
    """How runs differ: standard deviations of logits, and the share of runs that collapse."""

    name: str
    shared: float
    run: float
    problem: float
    collapse: float = 0.0

    def scores(self, draw: np.random.Generator, trials: int, seeds: int, gains: tuple[float, ...]) -> np.ndarray:
        """Shares of right responses, (trials, strategies, seeds, problems); a strategy for each of ``gains``."""
        ease = np.random.default_rng(1).normal(0.5, 1.0, PROBLEMS)
        shape = (trials, len(gains), seeds, PROBLEMS)
        shared = self.shared * draw.standard_normal((trials, 1, seeds, 1))
        run = self.run * draw.standard_normal((*shape[:3], 1)) + self.problem * draw.standard_normal(shape)
        logits = ease + np.reshape(gains, (1, -1, 1, 1)) + shared + run
        logits = np.where(draw.random((*shape[:3], 1)) < self.collapse, -3.0, logits)
        return draw.binomial(ANSWERS, 1 / (1 + np.exp(-logits))) / ANSWERS

    def truth(self) -> float:
        """The mean difference between a gain of GAIN and none, of very many seeds."""
        scores = self.scores(np.random.default_rng(2), 1, 100_000, (GAIN, 0.0))
        return float((scores[0, 0] - scores[0, 1]).mean())


WORLDS = (
    World("little spread", 0.1, 0.1, 0.2),
    World("spread as of effect", 0.3, 0.3, 0.3),
    World("large spread", 0.5, 0.8, 0.5),
    World("one run in ten collapses", 0.3, 0.3, 0.3, 0.1),
)


def percentile_of_both(tables: np.ndarray) -> np.ndarray:
    """Resamples seeds and problems, both with replacement. (trials, seeds, problems) -> (trials, 2)"""
    draw = np.random.default_rng(0)
    rows, columns = (draw.multinomial(n, np.full(n, 1 / n), size=_REPLICATES) / n for n in tables.shape[1:])
    return np.array([bounds(np.einsum("rs,sp,rp->r", rows, table, columns, optimize=True)) for table in tables])


def percentile(tables: np.ndarray) -> np.ndarray:
    """Resamples seeds."""
    seeds = tables.shape[1]
    rows = np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1 / seeds), size=_REPLICATES) / seeds
    return np.quantile(tables.mean(axis=2) @ rows.T, _TAILS, axis=1).T


def bca(tables: np.ndarray) -> np.ndarray:
    """Bias-corrected and accelerated, over seeds, by scipy."""
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where all seeds agree there is no interval, and nan covers nothing
        interval = stats.bootstrap(
            (tables.mean(axis=2),), np.mean, axis=-1, n_resamples=_REPLICATES, method="BCa", batch=100, rng=0
        ).confidence_interval
    return np.stack([interval.low, interval.high], axis=1)


def student(tables: np.ndarray) -> np.ndarray:
    """What `ngrpo compare` has: Student's t over seeds."""
    intervals = [statistics.interval(table) for table in tables]
    return np.array([[each["low"], each["high"]] for each in intervals], dtype=np.float64)


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "percentile, seeds and problems": percentile_of_both,
    "percentile, seeds": percentile,
    "BCa, seeds": bca,
    "Student's t, seeds": student,
}


def coverage(world: World, seeds: int, trials: int, method: Callable[[np.ndarray], np.ndarray]) -> float:
    """The fraction of trials in which the paired difference's interval holds the truth."""
    scores = world.scores(np.random.default_rng(seeds), trials, seeds, (GAIN, 0.0))
    low, high = method(scores[:, 0] - scores[:, 1]).T
    truth = world.truth()
    return float(((low <= truth) & (truth <= high)).mean())


def false_findings(world: World, seeds: int, trials: int, strategies: int = 8) -> tuple[float, float]:
    """The share of comparisons of equal strategies that call one different: without and with Holm's correction."""
    scores = world.scores(np.random.default_rng(seeds), trials, seeds, (0.0,) * (strategies + 1))
    plain = corrected = 0
    for trial in scores:
        differences = [statistics.paired(ours, trial[0]) for ours in trial[1:]]
        plain += any(not each["within_noise"] for each in differences)
        statistics.correct(differences)
        corrected += any(not each["within_noise"] for each in differences)
    return plain / trials, corrected / trials


def pooled_coverage(worlds: tuple[World, World], seeds: int, trials: int) -> tuple[float, float, float]:
    """Of two tasks: the mean difference by Welch's t and by the bootstrap; the probability of improvement."""
    sides = [world.scores(np.random.default_rng(i), trials, seeds, (GAIN, 0.0)) for i, world in enumerate(worlds)]
    scores = [side.mean(axis=3) for side in sides]  # (trials, 2, seeds) each
    mean = float(np.mean([world.truth() for world in worlds]))
    many = [w.scores(np.random.default_rng(3), 1, 4000, (GAIN, 0.0))[0].mean(axis=2) for w in worlds]
    chance = float(np.mean([pooled.wins(*both).mean() for both in many]))
    draws = [
        np.random.default_rng(i).multinomial(seeds, np.full(seeds, 1 / seeds), size=_REPLICATES) / seeds for i in (0, 1)
    ]
    held = np.zeros(3)
    for trial in range(trials):
        tasks = [side[trial] for side in scores]
        welch = pooled.mean_difference([task[0] - task[1] for task in tasks])
        interval = bounds(np.mean([rows @ (task[0] - task[1]) for rows, task in zip(draws, tasks)], axis=0))
        better = pooled.probability_of_improvement([(task[0], task[1]) for task in tasks])
        held += [
            welch["low"] <= mean <= welch["high"],
            interval[0] <= mean <= interval[1],
            better["low"] <= chance <= better["high"],
        ]
    one, two, three = held / trials
    return float(one), float(two), float(three)


def main() -> None:
    """Prints three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    print(f"{describe()}; {trials} trials, so ±{1.96 * (0.95 * 0.05 / trials) ** 0.5:.3f} at 0.95")
    print(f"\n{'interval of 95%':<31}{'runs differ':<27}" + "".join(f"{f'{n} seeds':>10}" for n in SEEDS))
    for name, method in METHODS.items():
        for world in WORLDS:
            cells = "".join(f"{coverage(world, n, trials, method):>10.3f}" for n in SEEDS)
            print(f"{name:<31}{world.name:<27}{cells}", flush=True)
    few = trials // 4
    print(f"\neight equal strategies against one baseline, any called different ({few} trials)")
    for world in WORLDS:
        cells = [false_findings(world, n, few) for n in SEEDS]
        entries = "".join(f"  {n} seeds {plain:.3f} -> {held:.3f}" for n, (plain, held) in zip(SEEDS, cells))
        print(f"{world.name:<27}without -> with Holm's correction:{entries}", flush=True)
    print(
        "\nsmallest difference found with a chance of 80%, in standard deviations of the paired difference over seeds"
    )
    for n in SEEDS:
        least = [statistics.detectable(1.0, n, *of) for of in ((1, 1), (4, 1), (10, 1), (4, 2))]
        entries = zip(("one test", "four", "ten", "four, two tasks pooled"), least)
        print(f"{n:>2} seeds  " + "  ".join(f"{what} {value:.2f}" for what, value in entries))
    print(f"\ntwo tasks pooled ({few} trials): Welch's t, stratified bootstrap; probability of improvement, bootstrap")
    for n in SEEDS:
        welch, resampling, chance = pooled_coverage((WORLDS[0], WORLDS[1]), n, few)
        print(f"{n:>2} seeds  {welch:.3f}  {resampling:.3f}  {chance:.3f}", flush=True)


if __name__ == "__main__":
    main()
