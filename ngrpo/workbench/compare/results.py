# SPDX-License-Identifier: Apache-2.0
"""`results.json` and `results.csv`: what the runs of a comparison left, its statistics, and a verdict per arm."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ngrpo.config.arms import Arm
from ngrpo.config.kinds import of_a_run
from ngrpo.machine.console import text_table
from ngrpo.machine.storage.result_folder import write_text
from ngrpo.machine.upstream.versions import CODE, differing, machine, recorded_versions
from ngrpo.workbench import statistics
from ngrpo.workbench.compare.plan import Plan, Run
from ngrpo.workbench.compare.runs import ComparisonFolder, status
from ngrpo.workbench.evaluate.evaluation import UNSCORED, unscored, unscored_warnings
from ngrpo.workbench.report import write_report
from ngrpo.workbench.report.charts import evaluations
from ngrpo.workbench.report.headline import by_arm, evaluated, trained_otherwise
from ngrpo.workbench.report.responses import MOST_BYTES, fitting
from ngrpo.workbench.report.values import dig, failed_runs, format_number, shares

_COSTS = ("tokens_per_second", "step_seconds", "record_bytes_per_token")
_CSV_STEP = ("reward", "rate", "shift", "gap_perturbed_mean", "gap_plain_mean", *_COSTS)

Results = Mapping[str, Any]
"""The content of results.json, or one of its runs."""
Runs = Mapping[int, Results]
"""The runs of one arm, as in results.json, by seed."""


def collect(plan: Plan, folder: ComparisonFolder, command: Sequence[str], created: str) -> dict[str, Any]:
    """The content of ``results.json``, from what the runs left; every number is finite or None.

    ``command`` started the comparison, for the first time at ``created``, ISO 8601.
    """
    runs = [_run(plan, run, folder) for run in plan.runs()]
    summaries = [folder.read(f"runs/{run['id']}/summary.json") for run in runs]
    untrained = folder.read("untrained/evaluation.json")
    result = {
        "format": 1,
        "created": created,
        "command": list(command),
        "baseline": plan.baseline,
        "model": plan.model,
        "task": plan.task,
        "hardware": next((summary["hardware"] for summary in summaries if summary), None),
        "machine": machine(),
        "versions": recorded_versions(),
        "openrlhf_args": list(plan.shared),
        "strategies": [_arm_row(arm) for arm in plan.arms],
        "runs": runs,
        "untrained": untrained and {**untrained, "unscored": unscored(untrained)},
        "summary": summarise(runs, [arm.id for arm in plan.arms], plan.baseline, plan.threshold),
        "diagnosis": _named(folder.read("diagnosis/diagnosis.json"), plan.arms),
    }
    result["warnings"] = warnings_of(result)
    # NaN and infinity have no place in JSON.
    return json.loads(json.dumps(result), parse_constant=lambda name: None)


def warnings_of(results: Results) -> list[str]:
    """Reasons to doubt the scores of a results.json: unscored responses, warnings of evaluations, unlike runs."""
    untrained = results["untrained"]
    warnings = []
    for row in results["summary"]:
        warnings += unscored_warnings(row["strategy"], row["unscored"])
    warnings += unscored_warnings("before training", unscored(untrained or {}))
    evaluations_by_name = {"before training": untrained}
    evaluations_by_name |= {run["id"]: run["evaluation"] for run in results["runs"]}
    for name, evaluation in evaluations_by_name.items():
        warnings += [f"{name}: {line}" for line in (evaluation or {}).get("warnings", ())]
    return warnings + unlike_conditions(results["runs"])


def _arm_row(arm: Arm) -> dict[str, Any]:
    """An arm in ``strategies`` of results.json."""
    spec = arm.spec
    if spec is not None:
        # The source of a user's file is long; its name and hash are in the run's own summary.
        spec = {key: value for key, value in spec.items() if not key.endswith("source")}
    return {
        "id": arm.id,
        "perturbation": spec,
        "base": arm.training.get("base"),
        "settings": arm.settings,
        "flags": arm.flags,
        "paper": arm.paper,
    }


def write(results: Results, folder: ComparisonFolder) -> None:
    """Writes ``results.json``, ``results.csv`` and ``report.html``."""
    folder.write("results.json", results)
    write_text(folder.path / "results.csv", as_csv(results))
    write_report(results, folder.path / "report.html")


def as_csv(results: Results) -> str:
    """One line per run and training step, for a spreadsheet or pandas; the last step has the evaluation."""
    evaluations = [run["evaluation"] or {} for run in results["runs"]]
    ks = sorted({k for evaluation in evaluations for k in evaluation.get("pass_at_k") or {}}, key=int)
    columns = ["run", "strategy", "seed", "status", "step", *_CSV_STEP, "mean_at_n", *(f"pass_at_{k}" for k in ks)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for run, evaluation in zip(results["runs"], evaluations):
        scores = {"mean_at_n": evaluation.get("mean_at_n")}
        for k, value in (evaluation.get("pass_at_k") or {}).items():
            scores[f"pass_at_{k}"] = value
        *steps, last = run["steps"] or [{}]
        for step in (*steps, {**last, **scores}):
            writer.writerow({**run, **step, "run": run["id"]})
    return text.getvalue()


def _run(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    """A run in ``runs`` of results.json."""
    path = f"runs/{run.id}"
    state = status(plan, run, folder)
    is_done = state["status"] == "done"
    summary = (folder.read(f"{path}/summary.json") if is_done else None) or {}
    # A report has no room for kept groups and samples of more than one seed.
    is_first_seed = run.seed == plan.seeds[0]
    groups = (summary.get("groups") if is_first_seed else None) or []
    shown_groups = fitting(groups, MOST_BYTES // len(plan.arms))
    return {
        "id": run.id,
        "strategy": run.arm.id,
        "seed": run.seed,
        **{key: state.get(key) for key in ("status", "error", "log", "seconds", "peak_memory_bytes")},
        **{kind.name: summary.get(kind.name) for kind in of_a_run()},
        "sampling": summary.get("sampling"),
        "code": dig(summary, "versions", CODE),
        "cpu": dig(summary, "machine", "cpu"),
        "gpu": dig(summary, "machine", "gpu"),
        "steps": summary.get("steps", []),
        "evaluations": evaluations(summary),
        "evaluation": folder.read(f"{path}/evaluation/evaluation.json") if is_done else None,
        "groups": shown_groups,
        "groups_left_out": len(groups) - len(shown_groups),
        "samples": summary.get("samples", []) if is_first_seed else [],
    }


def unlike_conditions(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings of seeds whose finished runs, one of each arm, differ in more than their arms."""
    by_seed: dict[int, list[dict[str, str | None]]] = {}
    for run in runs:
        if run["status"] == "done":
            conditions = {
                "code of this project": run.get("code"),
                "processor": run.get("cpu"),
                "GPU": run.get("gpu"),
            }
            by_seed.setdefault(run["seed"], []).append(conditions)
    return [
        f"seed {seed}: its runs differ in the {difference}, and not only in their arms. To run them alike, give --out"
        " another folder."
        for seed, conditions in by_seed.items()
        for difference in differing(conditions)
    ]


def _named(diagnosis: dict[str, Any] | None, arms: Sequence[Arm]) -> dict[str, Any] | None:
    """The diagnosis, with the ids of the comparison's arms in place of its own names (:attr:`Arm.rollout_id`).

    A name that fits no arm stays. An arm with its own top-p or chat template fits none: the diagnosis drew without.
    """
    if diagnosis is None:
        return None
    names: dict[str, str] = {}
    for arm in arms:
        further_flags = arm.training.keys() - arm.rollouts.keys()
        if not any(key.startswith(("rollout.", "sampling.", "chat_template")) for key in further_flags):
            names.setdefault(arm.rollout_id, arm.id)

    def renamed(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
        return [{**row, key: names.get(row[key], row[key])} for row in rows]

    samples = []
    for sample in diagnosis.get("samples", []):
        samples.append({**sample, "by_strategy": renamed(sample["by_strategy"], "strategy")})
    embedding_map = diagnosis.get("embedding_map")
    if embedding_map is not None:
        perturbations = renamed(embedding_map["perturbations"], "strategy")
        embedding_map = {**embedding_map, "perturbations": perturbations}
    return {
        **diagnosis,
        "strategies": renamed(diagnosis["strategies"], "name"),
        "samples": samples,
        "embedding_map": embedding_map,
    }


def summarise(
    runs: Sequence[Mapping[str, Any]], arms: Sequence[str], baseline: str, threshold: float | None = None
) -> list[dict[str, Any]]:
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
    done_runs: dict[str, dict[int, Mapping[str, Any]]] = {arm: {} for arm in arms}
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
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    comparisons = len(arms) - 1
    means = [difference["mean_at_n"] for difference in differences if difference["mean_at_n"] is not None]
    statistics.correct(means, comparisons)
    for k in {k for difference in differences for k in difference["pass_at_k"]}:
        of_k = [difference["pass_at_k"][k] for difference in differences if k in difference["pass_at_k"]]
        statistics.correct(of_k, comparisons)

    for row in rows:
        arm = row["strategy"]
        if arm == baseline:
            row["verdict"] = "the baseline"
        else:
            difference = row["difference"] and row["difference"]["mean_at_n"]
            shared_seeds = done_runs[arm].keys() & done_runs[baseline].keys()
            row["verdict"] = verdict(difference, f"Mean@{row['n']}", baseline, len(shared_seeds))
            left_out = failed_runs({arm: failed[arm], baseline: failed[baseline]})
            if left_out:  # after failures the luckier runs may remain
                row["verdict"] += f"; failed runs are left out: {left_out}"
        if threshold is not None:
            row["above"] = _above(done_runs[arm], threshold)
            row["verdict"] += f"; {row['above']['runs']} of {row['above']['of']} runs end above {threshold:g}"
    if threshold is not None:
        _compare_counts(rows, baseline)
    return rows


def _above(runs: Runs, threshold: float) -> dict[str, Any]:
    """``above`` of an arm: how many of its evaluated runs end above the threshold."""
    scores = []
    for run in runs.values():
        if run["evaluation"]:
            problems = run["evaluation"]["problems"]
            # Not the mean of the problems' fractions, which is rounded: 0.8 may be 0.8 + 2e-16, which is not above 0.8.
            scores.append(sum(problem["correct"] for problem in problems) / sum(problem["n"] for problem in problems))
    return {"threshold": threshold, "runs": sum(score > threshold for score in scores), "of": len(scores)}


def _compare_counts(rows: Sequence[dict[str, Any]], baseline: str) -> None:
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


def _row(
    arm: str, runs: Runs, baseline_runs: Runs, *, is_baseline: bool, failed_seeds: Sequence[int]
) -> dict[str, Any]:
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


def mean_unscored(runs: Iterable[Results]) -> dict[str, float | None]:
    """The shares of responses of which a score may say little: the mean over the runs of an arm."""
    shares_by_run = [unscored(run["evaluation"] or {}) for run in runs]
    return {key: statistics.mean_of_known(run_shares[key] for run_shares in shares_by_run) for key in UNSCORED}


Scores = Mapping[str, Mapping[str, float]]
"""Of one run: by measure, its value for each problem."""


def _rewards(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The mean reward of a run's first and last quarter of steps, and its change; each for one unnamed problem."""
    rewards = [step["reward"] for step in run["steps"]]
    if not rewards:
        return {}
    count = max(1, len(rewards) // 4)
    first = float(np.mean(rewards[:count]))
    last = float(np.mean(rewards[-count:]))
    return {"reward_first": {"": first}, "reward_last": {"": last}, "reward_change": {"": last - first}}


def _scores(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
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

    def spent(run: Mapping[str, Any], key: str) -> float | None:
        if key == "memory_bytes":
            return run["peak_memory_bytes"]
        steps = run["steps"][1:] or run["steps"]
        return statistics.mean_of_known((step.get(key) for step in steps), np.median)

    cost: dict[str, Any] = {}
    for key in (*_COSTS, "memory_bytes"):
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
    count = difference["comparisons"]
    corrected = "" if count == 1 else f", {difference['p_corrected']:.2g} corrected for {count} comparisons"
    tested = " over problems" if "tested" in difference else ""
    p = f"(p {difference['p']:.2g}{tested}{corrected})"
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


def table(results: Results) -> str:
    """The outcome in a few lines for the screen."""
    metrics = evaluated(results, by_arm(results))
    if len(metrics) > 2:
        metrics = [metrics[0], metrics[-1]]  # the screen is narrow: Mean@n, and Pass@k of the largest k
    header = ["strategy", "seeds", *(metric.heading for metric in metrics)]
    if metrics:
        header.append("cut / unreadable / timed out")
    header += ["reward of own rollouts", "tokens/s", "s/step"]
    lines = [header]
    for row in results["summary"]:
        failed = f" ({len(row['failed'])} failed)" if row["failed"] else ""
        cells = [row["strategy"], f"{len(row['seeds'])}{failed}"]
        cells += [statistics.in_words(dig(row, *metric.keys)) for metric in metrics]
        if metrics:
            cells.append(shares(row["unscored"]))
        cells.append(_reward_change(row))
        for key in ("tokens_per_second", "step_seconds"):
            ratio = row["cost"][key]["ratio"]
            cells.append("–" if ratio is None else f"×{ratio:.2f}")
        lines.append(cells)
    verdicts = [f"{row['strategy']}: {row['verdict']}" for row in results["summary"]]
    others = [f"not only another method: {line}" for line in trained_otherwise(results)]
    warnings = [f"warning: {line}" for line in results["warnings"]]
    return "\n".join([*text_table(lines, left=len(header)), "", *verdicts, *others, *warnings])


def _reward_change(row: Mapping[str, Any]) -> str:
    """``0.120 → 0.340``: the mean rewards of the first and the last quarter of steps."""
    first = row["reward_first"]
    last = row["reward_last"]
    return "–" if last is None else f"{format_number(first['value'])} → {format_number(last['value'])}"
