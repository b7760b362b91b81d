# SPDX-License-Identifier: Apache-2.0
"""``summary`` of results.json: an arm's means, its paired differences to the baseline, its costs and a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ngrpo.workbench import statistics
from ngrpo.workbench.evaluate.evaluation import UNSCORED, unscored
from ngrpo.workbench.report.values import failed_runs

COSTS = ("tokens_per_second", "step_seconds", "record_bytes_per_token")
"""The costs of a training step, by their names in summary.json."""
RunResult = Mapping[str, Any]
"""One of the runs of results.json."""
Runs = Mapping[int, RunResult]
"""The runs of one arm, as in results.json, by seed."""
SummaryRow = dict[str, Any]
"""The entry of one arm in ``summary``."""
Scores = Mapping[str, Mapping[str, float]]
"""Of one run: by measure, its value for each problem."""


def summarise(
    runs: Sequence[RunResult], arms: Sequence[str], baseline: str, threshold: float | None = None
) -> list[SummaryRow]:
    """One row per arm: means with intervals, paired differences to the baseline, costs, a verdict.

    Differences are of evaluations only: training rewards are of rollouts that each arm draws in its own way. For each
    measure Holm's correction counts all arms except the baseline, those too that have no finished run yet, so that an
    arm is called better by the same rule before and after the others have finished.

    Args:
        runs: as in ``results.json``.
        arms: their ids.
        baseline: the id of one of them.
        threshold: the Mean@n above which runs are counted; each row then has ``above``: ``threshold``, ``runs`` above
            it ``of`` the evaluated ones, and except for the baseline Fisher's exact ``p`` and ``p_corrected``.
            Counts are not paired. They say more than means where a run either finds the better way or does not.
    """
    done_runs: dict[str, dict[int, RunResult]] = {arm: {} for arm in arms}
    failed: dict[str, list[int]] = {arm: [] for arm in arms}
    for run in runs:
        if run["strategy"] not in done_runs:
            continue
        if run["status"] == "done":
            done_runs[run["strategy"]][run["seed"]] = run
        elif run["status"] == "failed":
            failed[run["strategy"]].append(run["seed"])

    rows = []
    for arm in arms:
        is_baseline = arm == baseline
        rows.append(_row(arm, done_runs[arm], done_runs[baseline], is_baseline=is_baseline, failed_seeds=failed[arm]))
    _correct_differences(rows, comparisons=len(arms) - 1)
    for row in rows:
        arm = row["strategy"]
        if arm == baseline:
            row["verdict"] = "the baseline"
        else:
            shared_seeds = done_runs[arm].keys() & done_runs[baseline].keys()
            failed_of_both = {arm: failed[arm], baseline: failed[baseline]}
            row["verdict"] = _verdict_of_row(row, baseline, seeds=len(shared_seeds), failed=failed_of_both)
    if threshold is not None:
        for row in rows:
            row["above"] = _above(done_runs[row["strategy"]], threshold)
            row["verdict"] += f"; {row['above']['runs']} of {row['above']['of']} runs end above {threshold:g}"
        _compare_counts(rows, baseline)
    return rows


def _correct_differences(rows: Sequence[SummaryRow], *, comparisons: int) -> None:
    """Corrects the p-values of each measure, Mean@n and every Pass@k, for the number of comparisons."""
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    means = [difference["mean_at_n"] for difference in differences if difference["mean_at_n"] is not None]
    statistics.correct(means, comparisons)
    for k in {k for difference in differences for k in difference["pass_at_k"]}:
        of_k = [difference["pass_at_k"][k] for difference in differences if k in difference["pass_at_k"]]
        statistics.correct(of_k, comparisons)


def _verdict_of_row(row: SummaryRow, baseline: str, *, seeds: int, failed: Mapping[str, Sequence[int]]) -> str:
    """The verdict on an arm's Mean@n, with the failed runs of the arm and of the baseline, by their seeds."""
    difference = None if row["difference"] is None else row["difference"]["mean_at_n"]
    text = verdict(difference, f"Mean@{row['n']}", baseline, seeds)
    left_out = failed_runs(failed)
    if left_out:  # after failures the luckier runs may remain
        text += f"; failed runs are left out: {left_out}"
    return text


def _above(runs: Runs, threshold: float) -> dict[str, Any]:
    """``above`` of an arm: how many of its evaluated runs end above the threshold."""
    scores = []
    for run in runs.values():
        if run["evaluation"]:
            problems = run["evaluation"]["problems"]
            # Not the mean of the problems' fractions, which is rounded: 0.8 may be 0.8 + 2e-16, which is not above 0.8.
            scores.append(sum(problem["correct"] for problem in problems) / sum(problem["n"] for problem in problems))
    return {"threshold": threshold, "runs": sum(score > threshold for score in scores), "of": len(scores)}


def _compare_counts(rows: Sequence[SummaryRow], baseline: str) -> None:
    """Adds Fisher's exact test against the baseline to the counts ``above`` a threshold, and to the verdicts."""
    from scipy.stats import fisher_exact

    base = next(row["above"] for row in rows if row["strategy"] == baseline)
    tested = [row for row in rows if row["strategy"] != baseline]
    p_values = []
    for row in tested:
        table = [[above["runs"], above["of"] - above["runs"]] for above in (row["above"], base)]
        p_values.append(float(fisher_exact(table).pvalue))
    for row, p, corrected in zip(tested, p_values, statistics.holm(p_values)):
        row["above"] |= {"p": p, "p_corrected": corrected}
        correction = "" if len(tested) == 1 else f", {corrected:.2g} corrected for {len(tested)} comparisons"
        row["verdict"] += f", of {baseline} {base['runs']} of {base['of']} (Fisher's exact p {p:.2g}{correction})"


def _row(arm: str, runs: Runs, baseline_runs: Runs, *, is_baseline: bool, failed_seeds: Sequence[int]) -> SummaryRow:
    """An arm in ``summary`` of results.json, from its finished runs and the baseline's."""
    seeds = sorted(runs)
    shared_seeds = sorted(runs.keys() & baseline_runs.keys())
    evaluations = [run["evaluation"] for run in runs.values() if run["evaluation"]]
    problems = evaluations[0]["problems"] if evaluations else None
    row = {
        "strategy": arm,
        "seeds": seeds,
        "failed": failed_seeds,
        "n": problems[0]["n"] if problems else None,
        "difference": None,
        "reward_first": None,
        "reward_last": None,
        "reward_change": None,
        **_means([{**_rewards(runs[seed]), **_scores(runs[seed])} for seed in seeds]),
    }
    if not is_baseline and shared_seeds:
        own_scores = [_scores(runs[seed]) for seed in shared_seeds]
        baseline_scores = [_scores(baseline_runs[seed]) for seed in shared_seeds]
        row["difference"] = _differences(own_scores, baseline_scores)
    row["cost"] = _cost(runs, baseline_runs, shared_seeds)
    row["unscored"] = mean_unscored(runs.values())
    return row


def mean_unscored(runs: Iterable[RunResult]) -> dict[str, float | None]:
    """The shares of responses of which a score may say little: the mean over the runs of an arm."""
    shares_by_run = [unscored(run["evaluation"] or {}) for run in runs]
    return {key: statistics.mean_of_known(run_shares[key] for run_shares in shares_by_run) for key in UNSCORED}


def _rewards(run: RunResult) -> dict[str, dict[str, float]]:
    """The mean reward of a run's first and last quarter of steps, and its change; each for one unnamed problem."""
    rewards = [step["reward"] for step in run["steps"]]
    if not rewards:
        return {}
    count = max(1, len(rewards) // 4)
    first = float(np.mean(rewards[:count]))
    last = float(np.mean(rewards[-count:]))
    return {"reward_first": {"": first}, "reward_last": {"": last}, "reward_change": {"": last - first}}


def _scores(run: RunResult) -> dict[str, dict[str, float]]:
    """Mean@n and each Pass@k of a run's evaluation, for each problem."""
    evaluation = run["evaluation"]
    if not evaluation or not evaluation["problems"]:
        return {}
    problems = evaluation["problems"]
    scores = {"mean_at_n": {problem["id"]: problem["correct"] / problem["n"] for problem in problems}}
    for k in evaluation["pass_at_k"]:
        scores[k] = {
            problem["id"]: statistics.pass_at_k(problem["n"], problem["correct"], int(k)) for problem in problems
        }
    return scores


def _means(runs: Sequence[Scores]) -> dict[str, Any]:
    """The mean of each measure over those runs that have it, with its interval."""
    intervals = {}
    for measure in _measures_of(runs):
        runs_with_it = [run[measure] for run in runs if measure in run]
        tables = _tables(runs_with_it)
        if tables:
            is_share = not measure.startswith("reward")
            intervals[measure] = statistics.interval(tables[0], share=is_share)
    return _with_pass_at_k(intervals)


def _differences(ours: Sequence[Scores], baseline: Sequence[Scores]) -> dict[str, Any]:
    """The paired difference of each measure that all runs have, with its interval and test.

    Both are in the order of the seeds that they share.
    """
    differences = {}
    runs = [*ours, *baseline]
    for measure in _measures_of(runs):
        if not all(measure in run for run in runs):
            continue  # a pair lacks one of its runs
        tables = _tables([run[measure] for run in ours], [run[measure] for run in baseline])
        if tables:
            differences[measure] = statistics.paired(*tables)
    return _with_pass_at_k(differences)


def _measures_of(runs: Sequence[Scores]) -> list[str]:
    return list(dict.fromkeys(measure for run in runs for measure in run))


def _tables(*arms: Sequence[Mapping[str, float]]) -> list[np.ndarray]:
    """For each arm a table, runs × the problems that all runs of all arms have; empty where there are none."""
    runs = [run for arm in arms for run in arm]
    problems = [problem for problem in runs[0] if all(problem in run for run in runs)]
    if not problems:
        return []
    return [np.array([[run[problem] for problem in problems] for run in arm]) for arm in arms]


def _with_pass_at_k(intervals: Mapping[str, Any]) -> dict[str, Any]:
    """Measures as in results.json: those of a number k are Pass@k, and under ``pass_at_k``."""
    row: dict[str, Any] = {"mean_at_n": None, "pass_at_k": {}}
    for measure, interval in intervals.items():
        if measure.isdecimal():
            row["pass_at_k"][measure] = interval
        else:
            row[measure] = interval
    return row


def _cost(mine: Runs, theirs: Runs, shared_seeds: list[int]) -> dict[str, Any]:
    """Medians over steps and seeds; ratios are of runs with the same seed. The first step warms up and is left out."""

    def spent(run: RunResult, key: str) -> float | None:
        if key == "memory_bytes":
            return run["peak_memory_bytes"]
        steps = run["steps"][1:] or run["steps"]
        return statistics.mean_of_known((step.get(key) for step in steps), np.median)

    cost: dict[str, Any] = {}
    for key in (*COSTS, "memory_bytes"):
        own = {seed: spent(run, key) for seed, run in mine.items()}
        base = {seed: spent(run, key) for seed, run in theirs.items()}
        ratios = []
        for seed in shared_seeds:
            own_cost = own[seed]
            base_cost = base[seed]
            if own_cost is not None and base_cost:
                ratios.append(own_cost / base_cost)
        cost[key] = {
            "value": statistics.mean_of_known(own.values(), np.median),
            "ratio": statistics.mean_of_known(ratios, np.median),
        }
    return cost


def verdict(difference: Mapping[str, Any] | None, measure: str, baseline: str, seeds: int) -> str:
    """One sentence on a corrected difference in ``Mean@8``; ``seeds`` is how many both arms have."""
    if seeds == 0:
        return f"could not be compared with {baseline}: no seed has finished for both"
    if difference is None:
        return f"was not compared with {baseline}: there is no evaluation, and rewards are of rollouts drawn otherwise"
    value = difference["value"]
    all_equal = difference["low"] is None  # the units, seeds or problems, differ from the baseline by the same
    if abs(value) <= statistics.TIE and all_equal:
        return f"equal to {baseline} in {measure} with every seed"
    unit = " over problems" if difference["over"] == "problems" and not all_equal else ""
    text = f"{measure} {statistics.in_words(difference, '+.3f')}{unit} against {baseline}"
    p = _p_in_words(difference)
    if seeds == 1:
        if difference["within_noise"]:
            return f"{text} {p}, within noise even of its problems; one seed gives no interval over seeds"
        return f"{text} {p}, the problems agree, but one seed is too few to tell a method from luck"

    how = "with each of" if all_equal else "over"
    text += f" {how} {seeds} seeds {p}"
    if difference["within_noise"]:
        detectable = difference["detectable"]
        if detectable is None:
            return f"within noise: {text}"
        return f"within noise: {text}; below about {detectable:.3f} a difference would often have been missed"
    if seeds < statistics.ENOUGH_SEEDS:
        return f"{text}; {seeds} seeds are too few to tell a method from luck"
    return f"{'better' if value > 0 else 'worse'}: {text}"


def _p_in_words(difference: Mapping[str, Any]) -> str:
    """``(p 0.012, 0.036 corrected for 3 comparisons)``, of a corrected difference."""
    tested = " over problems" if "tested" in difference else ""
    count = difference["comparisons"]
    corrected = "" if count == 1 else f", {difference['p_corrected']:.2g} corrected for {count} comparisons"
    return f"(p {difference['p']:.2g}{tested}{corrected})"
