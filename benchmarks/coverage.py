# SPDX-License-Identifier: Apache-2.0
"""How often intervals over seeds hold the truth, by simulation of comparisons with a known truth.

    python -m benchmarks.coverage [--trials 2000]

A comparison trains two strategies with each of 3, 5 or 10 seeds; a trained model has a chance of solving each of 16
problems, of which 32 responses are counted. What differs from run to run is drawn on the logit scale: an effect of the
seed that both strategies share, one of the run, one of the run on each problem; in one world a run in ten collapses.
The truth is the mean difference over all seeds on these problems. Then: eight equal strategies held against one
baseline, and how often any of them is called different; and two tasks pooled. Then one seed of equal strategies, with
few problems. In all of these each response has a draw of its own. At last Student's t where strategies share them: of a
seed, as in `ngrpo compare`, or of all seeds, as in the studies that docs/ has published. Two responses with one draw
are both right wherever both models are sure enough, which is as much as draws can have in common.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from benchmarks import pooled
from benchmarks.command_line import parser_of
from benchmarks.machine import describe
from benchmarks.pooled import resampled
from ngrpo.workbench import statistics
from ngrpo.workbench.statistics import LEVEL, bounds

PROBLEMS = 16
RESPONSES = 32
FEW_PROBLEMS = (6, 8, 12, 16, 32)
RESPONSES_OF_FEW = 8  # to each of few problems
GAIN = 0.3  # of the better strategy, in logits
SEEDS = (3, 5, 10)
_REPLICATES = 2000
_TAILS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
_COLLAPSED = -3.0  # logit of a run that has collapsed
Draws = Literal["own", "of a seed", "of all seeds"]
"""Which responses to a problem have a draw in common: none, those of a seed's strategies, or of all seeds too."""


@dataclass(frozen=True)
class World:
    """How runs differ: standard deviations of logits, and the share of runs that collapse."""

    name: str
    shared: float
    run: float
    problem: float
    collapse: float = 0.0

    def scores(
        self, draw: np.random.Generator, trials: int, seeds: int, gains: tuple[float, ...], draws: Draws = "own"
    ) -> np.ndarray:
        """Shares of right responses, (trials, strategies, seeds, problems); a strategy for each of ``gains``."""
        shape = (trials, len(gains), seeds, PROBLEMS)
        run_shape = (trials, len(gains), seeds, 1)
        ease = np.random.default_rng(1).normal(0.5, 1.0, PROBLEMS)
        seed_effect = self.shared * draw.standard_normal((trials, 1, seeds, 1))
        run_effect = self.run * draw.standard_normal(run_shape)
        problem_effect = self.problem * draw.standard_normal(shape)
        logits = ease + np.reshape(gains, (1, -1, 1, 1)) + seed_effect + (run_effect + problem_effect)
        logits = np.where(draw.random(run_shape) < self.collapse, _COLLAPSED, logits)
        chances = 1 / (1 + np.exp(-logits))
        if draws == "own":
            return draw.binomial(RESPONSES, chances) / RESPONSES
        right = np.zeros(shape)
        for _ in range(RESPONSES):
            right += draw.random((trials, 1, seeds if draws == "of a seed" else 1, PROBLEMS)) < chances
        return right / RESPONSES

    def truth(self) -> float:
        """The mean difference between a gain of GAIN and none, of very many seeds."""
        scores = self.scores(np.random.default_rng(2), 1, 100_000, (GAIN, 0.0))
        return float((scores[0, 0] - scores[0, 1]).mean())

    def chance_of_improvement(self) -> float:
        """The probability that a run with a gain of GAIN scores higher than one without, of many seeds."""
        scores = self.scores(np.random.default_rng(3), 1, 4000, (GAIN, 0.0))[0].mean(axis=2)
        return float(pooled.wins(scores[0], scores[1]).mean())


WORLDS = (
    World("little spread", 0.1, 0.1, 0.2),
    World("spread as of effect", 0.3, 0.3, 0.3),
    World("large spread", 0.5, 0.8, 0.5),
    World("one run in ten collapses", 0.3, 0.3, 0.3, 0.1),
)


def percentile_of_both(tables: np.ndarray) -> np.ndarray:
    """Resamples seeds and problems, both with replacement. (trials, seeds, problems) -> (trials, 2)"""
    _, seeds, problems = tables.shape
    draw = np.random.default_rng(0)
    seed_weights = resampled(draw, seeds, _REPLICATES)
    problem_weights = resampled(draw, problems, _REPLICATES)
    intervals = []
    for table in tables:
        replicates = np.einsum("rs,sp,rp->r", seed_weights, table, problem_weights, optimize=True)
        intervals.append(bounds(replicates))
    return np.array(intervals)


def percentile(tables: np.ndarray) -> np.ndarray:
    """Resamples seeds."""
    weights = resampled(np.random.default_rng(0), tables.shape[1], _REPLICATES)
    return np.quantile(tables.mean(axis=2) @ weights.T, _TAILS, axis=1).T


def bca(tables: np.ndarray) -> np.ndarray:
    """Bias-corrected and accelerated, over seeds, by scipy."""
    from scipy import stats

    means = tables.mean(axis=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where all seeds agree there is no interval, and nan covers nothing
        result = stats.bootstrap((means,), np.mean, axis=-1, n_resamples=_REPLICATES, method="BCa", batch=100, rng=0)
    interval = result.confidence_interval
    return np.stack([interval.low, interval.high], axis=1)


def student(tables: np.ndarray) -> np.ndarray:
    """What `ngrpo compare` has: Student's t over seeds."""
    intervals = [statistics.interval(table) for table in tables]
    return np.array([[interval["low"], interval["high"]] for interval in intervals], dtype=np.float64)


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "percentile, seeds and problems": percentile_of_both,
    "percentile, seeds": percentile,
    "BCa, seeds": bca,
    "Student's t, seeds": student,
}


def coverage(
    world: World, seeds: int, trials: int, method: Callable[[np.ndarray], np.ndarray], draws: Draws = "own"
) -> float:
    """The fraction of trials in which the paired difference's interval holds the truth."""
    scores = world.scores(np.random.default_rng(seeds), trials, seeds, (GAIN, 0.0), draws)
    low, high = method(scores[:, 0] - scores[:, 1]).T
    truth = world.truth()
    return float(((low <= truth) & (truth <= high)).mean())


def false_findings(world: World, seeds: int, trials: int, strategies: int = 8) -> tuple[float, float]:
    """The share of comparisons of equal strategies that call one different: without and with Holm's correction."""
    scores = world.scores(np.random.default_rng(seeds), trials, seeds, (0.0,) * (strategies + 1))
    uncorrected = 0
    corrected = 0
    for trial in scores:
        differences = [statistics.paired(strategy, trial[0]) for strategy in trial[1:]]
        uncorrected += any(not difference["within_noise"] for difference in differences)
        statistics.correct(differences)
        corrected += any(not difference["within_noise"] for difference in differences)
    return uncorrected / trials, corrected / trials


def found_with_one_seed(problems: int, trials: int) -> tuple[float, float]:
    """How often intervals of a difference between equal strategies leave out 0: percentile, and expanded percentile."""
    draw = np.random.default_rng(problems)
    ease = draw.normal(0.0, 1.0, (trials, 1, problems))
    solved = draw.binomial(RESPONSES_OF_FEW, 1 / (1 + np.exp(-ease)), (trials, 2, problems)) / RESPONSES_OF_FEW
    weights = resampled(draw, problems, _REPLICATES)
    found = np.zeros(2)
    for ours, baseline in solved:
        replicates = weights @ (ours - baseline)
        for method, (low, high) in enumerate((bounds(replicates), bounds(replicates, problems))):
            found[method] += not low <= 0.0 <= high
    percentile_share, expanded_share = found / trials
    return float(percentile_share), float(expanded_share)


class PooledCoverage(NamedTuple):
    """How often intervals of two pooled tasks hold the truth.

    Attributes:
        welch: of the mean difference, by Welch's t.
        bootstrap: of the mean difference, by the stratified bootstrap.
        improvement: of the probability of improvement, by its bootstrap.
    """

    welch: float
    bootstrap: float
    improvement: float


def pooled_coverage(worlds: tuple[World, World], seeds: int, trials: int) -> PooledCoverage:
    """Coverage where each world is a task."""
    gains = (GAIN, 0.0)
    task_scores = []  # for each task (trials, 2, seeds)
    task_weights = []  # for each task (replicates, seeds)
    for task, world in enumerate(worlds):
        scores = world.scores(np.random.default_rng(task), trials, seeds, gains)
        task_scores.append(scores.mean(axis=3))
        task_weights.append(resampled(np.random.default_rng(task), seeds, _REPLICATES))
    true_mean = float(np.mean([world.truth() for world in worlds]))
    true_chance = float(np.mean([world.chance_of_improvement() for world in worlds]))
    held = np.zeros(3)
    for trial in range(trials):
        sides = [(scores[trial][0], scores[trial][1]) for scores in task_scores]
        differences = [ours - baseline for ours, baseline in sides]
        welch = pooled.mean_difference(differences)
        replicates = [weights @ difference for weights, difference in zip(task_weights, differences)]
        low, high = bounds(np.mean(replicates, axis=0))
        improvement = pooled.probability_of_improvement(sides)
        held += [
            welch["low"] <= true_mean <= welch["high"],
            low <= true_mean <= high,
            improvement["low"] <= true_chance <= improvement["high"],
        ]
    welch_share, bootstrap_share, improvement_share = held / trials
    return PooledCoverage(float(welch_share), float(bootstrap_share), float(improvement_share))


def main() -> None:
    """Prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    few_trials = trials // 4
    half_width = 1.96 * (0.95 * 0.05 / trials) ** 0.5
    print(f"{describe()}; {trials} trials, so ±{half_width:.3f} at 0.95")
    _print_intervals(trials)
    _print_false_findings(few_trials)
    _print_detectable()
    _print_pooled(few_trials)
    _print_one_seed(trials)
    _print_shared_draws(trials)


def _print_intervals(trials: int) -> None:
    headings = "".join(f"{f'{seeds} seeds':>10}" for seeds in SEEDS)
    print(f"\n{'interval of 95%':<31}{'runs differ':<27}{headings}")
    for name, method in METHODS.items():
        for world in WORLDS:
            cells = "".join(f"{coverage(world, seeds, trials, method):>10.3f}" for seeds in SEEDS)
            print(f"{name:<31}{world.name:<27}{cells}", flush=True)


def _print_false_findings(trials: int) -> None:
    print(f"\neight equal strategies against one baseline, any called different ({trials} trials)")
    for world in WORLDS:
        cells = ""
        for seeds in SEEDS:
            uncorrected, corrected = false_findings(world, seeds, trials)
            cells += f"  {seeds} seeds {uncorrected:.3f} -> {corrected:.3f}"
        print(f"{world.name:<27}without -> with Holm's correction:{cells}", flush=True)


def _print_detectable() -> None:
    print(
        "\nsmallest difference found with a chance of 80%, in standard deviations of the paired difference over seeds"
    )
    for seeds in SEEDS:
        cells = []
        for label, tests in {"one test": 1, "four": 4, "ten": 10}.items():
            cells.append(f"{label} {statistics.detectable(1.0, seeds, tests):.2f}")
        of_spread_one = np.arange(seeds) / np.arange(seeds).std(ddof=1)
        cells.append(f"four, two tasks pooled {pooled.detectable([of_spread_one, of_spread_one], 4):.2f}")
        print(f"{seeds:>2} seeds  " + "  ".join(cells))


def _print_pooled(trials: int) -> None:
    print(
        f"\ntwo tasks pooled ({trials} trials): Welch's t, stratified bootstrap; probability of improvement, bootstrap"
    )
    for seeds in SEEDS:
        shares = pooled_coverage((WORLDS[0], WORLDS[1]), seeds, trials)
        cells = f"{shares.welch:.3f}  {shares.bootstrap:.3f}  {shares.improvement:.3f}"
        print(f"{seeds:>2} seeds  {cells}", flush=True)


def _print_one_seed(trials: int) -> None:
    print(f"\nequal strategies with one seed, called different ({trials} trials): percentile -> expanded percentile")
    for problems in FEW_PROBLEMS:
        percentile_share, expanded_share = found_with_one_seed(problems, trials)
        print(f"{problems:>2} problems  {percentile_share:.3f} -> {expanded_share:.3f}", flush=True)


def _print_shared_draws(trials: int) -> None:
    shared: tuple[Draws, ...] = ("of a seed", "of all seeds")
    print(f"\nStudent's t, strategies with common draws ({trials} trials)")
    for draws in shared:
        for world in WORLDS:
            shares = [f"{coverage(world, seeds, trials, student, draws):>10.3f}" for seeds in SEEDS]
            print(f"{f'draws {draws}':<31}{world.name:<27}{''.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
