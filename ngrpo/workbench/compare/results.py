# SPDX-License-Identifier: Apache-2.0
"""`results.json` and `results.csv`: what the runs of a comparison left, its statistics, and a verdict per strategy."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngrpo.config.arms import Arm
from ngrpo.config.kinds import of_a_run
from ngrpo.machine.console import text_table
from ngrpo.machine.storage.result_folder import write_text
from ngrpo.machine.upstream.versions import machine, versions
from ngrpo.workbench import statistics
from ngrpo.workbench.compare.plan import Plan, Run
from ngrpo.workbench.compare.runs import ComparisonFolder, status
from ngrpo.workbench.evaluate.evaluation import unscored, unscored_warnings
from ngrpo.workbench.report import write_report
from ngrpo.workbench.report.headline import by_arm, evaluated
from ngrpo.workbench.report.responses import MOST_BYTES, fitting
from ngrpo.workbench.report.values import dig, shares

_COSTS = ("tokens_per_second", "step_seconds", "record_bytes_per_token")
_CSV_STEP = ("reward", "rate", "shift", "gap_perturbed_mean", "gap_plain_mean", *_COSTS)
_OF_ONE_SEED = {
    True: "within noise even of its problems; one seed gives no interval over seeds",
    False: "the problems agree, but one seed is too few to tell a method from luck",
}

Runs = Mapping[int, Mapping[str, Any]]  # of one strategy, as in results.json, by seed


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
        "hardware": next((s["hardware"] for s in summaries if s), None),
        "machine": machine(),
        "versions": versions(),
        "openrlhf_args": list(plan.shared),
        "strategies": [
            {
                "id": arm.id,
                # The source of a user's file is long; its name and hash are in the run's own summary.
                "perturbation": arm.spec and {k: v for k, v in arm.spec.items() if not k.endswith("source")},
                "base": arm.training.get("base"),
                "settings": arm.settings,
                "flags": arm.flags,
                "paper": arm.paper,
            }
            for arm in plan.arms
        ],
        "runs": runs,
        "untrained": untrained and {**untrained, "unscored": unscored(untrained)},
        "summary": summarise(runs, [arm.id for arm in plan.arms], plan.baseline, plan.threshold),
        "diagnosis": _named(folder.read("diagnosis/diagnosis.json"), plan.arms),
    }
    lost = {row["strategy"]: row["unscored"] for row in result["summary"]}
    lost["before training"] = unscored(untrained or {})
    result["warnings"] = [line for name, parts in lost.items() for line in unscored_warnings(name, parts)]
    # NaN and infinity have no place in JSON.
    return json.loads(json.dumps(result), parse_constant=lambda name: None)


def write(results: Mapping[str, Any], folder: ComparisonFolder) -> None:
    """Writes ``results.json``, ``results.csv`` and ``report.html``."""
    folder.write("results.json", results)
    write_text(folder.path / "results.csv", as_csv(results))
    write_report(results, folder.path / "report.html")


def as_csv(results: Mapping[str, Any]) -> str:
    """One line per run and training step, for a spreadsheet or pandas; the last step has the evaluation."""
    text = io.StringIO()
    ks = sorted({k for run in results["runs"] for k in ((run["evaluation"] or {}).get("pass_at_k") or {})}, key=int)
    columns = ["run", "strategy", "seed", "status", "step", *_CSV_STEP, "mean_at_n", *(f"pass_at_{k}" for k in ks)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for run in results["runs"]:
        evaluation = run["evaluation"] or {}
        scores = {f"pass_at_{k}": value for k, value in (evaluation.get("pass_at_k") or {}).items()}
        *steps, last = run["steps"] or [{}]
        for step in (*steps, {**last, "mean_at_n": evaluation.get("mean_at_n"), **scores}):
            writer.writerow({**run, **step, "run": run["id"]})
    return text.getvalue()


def _run(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    state, path = status(plan, run, folder), f"runs/{run.id}"
    done = state["status"] == "done"
    summary = (folder.read(f"{path}/summary.json") if done else None) or {}
    # OpenRLHF's evaluations while training (--eval.steps), by step; of several datasets their mean.
    while_training = defaultdict[int, list[float]](list)
    for tag, values in (summary.get("evaluation") or {}).items():
        for step, value in values.items() if tag.endswith("_pass1") else ():
            while_training[int(step)].append(value)
    kept = summary.get("groups") if run.seed == plan.seeds[0] else None  # a report has no room for more
    return {
        "id": run.id,
        "strategy": run.arm.id,
        "seed": run.seed,
        **{key: state.get(key) for key in ("status", "error", "log", "seconds", "peak_memory_bytes")},
        **{kind.name: summary.get(kind.name) for kind in of_a_run()},
        "sampling": summary.get("sampling"),
        "steps": summary.get("steps", []),
        "evaluations": [{"step": s, "mean_at_n": float(np.mean(v))} for s, v in sorted(while_training.items())],
        "evaluation": folder.read(f"{path}/evaluation/evaluation.json") if done else None,
        "groups": fitting(kept or [], MOST_BYTES // len(plan.arms)),
    }


def _named(diagnosis: dict[str, Any] | None, arms: Sequence[Arm]) -> dict[str, Any] | None:
    """The diagnosis under the names of the arms that roll out as it did: another top-p or template was not."""
    if diagnosis is None:
        return None
    names: dict[str, str] = {}
    for arm in arms:
        others = arm.training.keys() - arm.rollouts.keys()
        if not any(key.startswith(("rollout.", "sampling.", "chat_template")) for key in others):
            names.setdefault(arm.rollout_id, arm.id)

    def renamed(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
        return [{**row, key: names.get(row[key], row[key])} for row in rows]

    picture = diagnosis.get("embedding_map")
    if picture is not None:
        picture = {**picture, "perturbations": renamed(picture["perturbations"], "strategy")}
    samples = [{**s, "by_strategy": renamed(s["by_strategy"], "strategy")} for s in diagnosis.get("samples", [])]
    strategies = renamed(diagnosis["strategies"], "name")
    return {**diagnosis, "strategies": strategies, "samples": samples, "embedding_map": picture}


def summarise(
    runs: Sequence[Mapping[str, Any]], arms: Sequence[str], baseline: str, threshold: float | None = None
) -> list[dict[str, Any]]:
    """One row per strategy: means with intervals, paired differences to the baseline, costs, a verdict.

    Differences are of evaluations only: training rewards are of rollouts that each strategy draws in its own way. For
    each measure Holm's correction counts all strategies except the baseline.

    Args:
        runs: as in ``results.json``.
        arms: ids of the strategies.
        baseline: the id of one of them.
        threshold: the Mean@n above which runs are counted; each row then has ``above``: ``threshold``, ``runs`` above
            it ``of`` the evaluated ones, and except for the baseline Fisher's exact ``p`` and ``p_corrected``.
            Counts are not paired. They say more than means where a run either finds the better way or does not.
    """
    done = {arm: {r["seed"]: r for r in runs if r["strategy"] == arm and r["status"] == "done"} for arm in arms}
    rows = [_row(arm, done[arm], done[baseline], baseline) for arm in arms]
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    statistics.correct([d["mean_at_n"] for d in differences if d["mean_at_n"] is not None])
    for k in {k for d in differences for k in d["pass_at_k"]}:
        statistics.correct([d["pass_at_k"][k] for d in differences if k in d["pass_at_k"]])
    for row in rows:
        name, main = row["strategy"], row["difference"] and row["difference"]["mean_at_n"]
        row["failed"] = [run["seed"] for run in runs if run["strategy"] == name and run["status"] == "failed"]
        said = verdict(main, f"Mean@{row['n']}", baseline, len(done[name].keys() & done[baseline].keys()))
        row["verdict"] = "the baseline" if name == baseline else said
        if threshold is not None:
            ended = [run["evaluation"]["problems"] for run in done[name].values() if run["evaluation"]]
            # A mean of fractions is rounded: 0.8 may be 0.8 + 2e-16, which is not above 0.8.
            scores = [sum(p["correct"] for p in of_run) / sum(p["n"] for p in of_run) for of_run in ended]
            above = sum(score > threshold for score in scores)
            row["above"] = {"threshold": threshold, "runs": above, "of": len(scores)}
            row["verdict"] += f"; {above} of {len(scores)} runs end above {threshold:g}"
    if threshold is not None:
        from scipy.stats import fisher_exact

        base = next(row["above"] for row in rows if row["strategy"] == baseline)
        tested = [row for row in rows if row["strategy"] != baseline]
        sides = ([[above["runs"], above["of"] - above["runs"]] for above in (row["above"], base)] for row in tested)
        p_values = [float(fisher_exact(counts).pvalue) for counts in sides]
        for row, p, corrected in zip(tested, p_values, statistics.holm(p_values)):
            row["above"] |= {"p": p, "p_corrected": corrected}
            more = "" if len(tested) == 1 else f", {corrected:.2g} corrected for {len(tested)} comparisons"
            row["verdict"] += f", of {baseline} {base['runs']} of {base['of']} (Fisher's exact p {p:.2g}{more})"
    return rows


def _row(arm: str, mine: Runs, theirs: Runs, baseline: str) -> dict[str, Any]:
    shared = sorted(mine.keys() & theirs.keys())
    problems = next((run["evaluation"]["problems"] for run in mine.values() if run["evaluation"]), None)
    n = problems[0]["n"] if problems else None
    row = {"strategy": arm, "seeds": sorted(mine), "failed": [], "n": n, "difference": None}
    row |= dict.fromkeys(("reward_first", "reward_last", "reward_change"))
    row |= _judged([{**_rewards(mine[seed]), **_scores(mine[seed])} for seed in sorted(mine)])
    if arm != baseline and shared:
        row["difference"] = _judged(*([_scores(side[seed]) for seed in shared] for side in (mine, theirs)))
    row["cost"] = _cost(mine, theirs, shared)
    lost = [unscored(run["evaluation"] or {}) for run in mine.values()]
    row["unscored"] = {key: statistics.mean_of_known(of_run[key] for of_run in lost) for key in unscored({})}
    return row


def _rewards(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The mean reward of a run's first and last quarter of steps, and its change; each for one unnamed problem."""
    rewards = [step["reward"] for step in run["steps"]]
    if not rewards:
        return {}
    count = max(1, len(rewards) // 4)
    first, last = float(np.mean(rewards[:count])), float(np.mean(rewards[-count:]))
    return {"reward_first": {"": first}, "reward_last": {"": last}, "reward_change": {"": last - first}}


def _scores(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Mean@n and each Pass@k of a run's evaluation, for each problem."""
    evaluation = run["evaluation"]
    if not evaluation or not evaluation["problems"]:
        return {}
    scores = {"mean_at_n": {p["id"]: p["correct"] / p["n"] for p in evaluation["problems"]}}
    for k in evaluation["pass_at_k"]:
        scores[k] = {p["id"]: statistics.pass_at_k(p["n"], p["correct"], int(k)) for p in evaluation["problems"]}
    return scores


def _judged(*sides: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """For one side's runs the mean of each measure, for two sides' the paired difference, each with its interval."""
    judged: dict[str, Any] = {"mean_at_n": None, "pass_at_k": {}}
    runs = [run for side in sides for run in side]
    for name in dict.fromkeys(name for run in runs for name in run):
        having = [[run[name] for run in side if name in run] for side in sides]
        if len(sides) == 2 and len(having[0] + having[1]) < len(runs):
            continue  # a pair lacks one of its runs
        problems = [problem for problem in having[0][0] if all(problem in run for side in having for run in side)]
        if not problems:
            continue
        tables = [np.array([[run[problem] for problem in problems] for run in side]) for side in having]
        share = not name.startswith("reward")
        value = statistics.paired(*tables) if len(sides) == 2 else statistics.interval(*tables, share=share)
        (judged["pass_at_k"] if name.isdecimal() else judged)[name] = value
    return judged


def _cost(mine: Runs, theirs: Runs, shared: list[int]) -> dict[str, Any]:
    """Medians over steps and seeds; ratios are of runs with the same seed. The first step warms up and is left out."""

    def spent(run: Mapping[str, Any], key: str) -> float | None:
        if key == "memory_bytes":
            return run["peak_memory_bytes"]
        return statistics.mean_of_known((step.get(key) for step in run["steps"][1:] or run["steps"]), np.median)

    cost: dict[str, Any] = {}
    for key in (*_COSTS, "memory_bytes"):
        own, base = ({seed: spent(run, key) for seed, run in side.items()} for side in (mine, theirs))
        pairs = [(own[seed], base[seed]) for seed in shared]
        ratio = statistics.mean_of_known((a / b for a, b in pairs if a is not None and b), np.median)
        cost[key] = {"value": statistics.mean_of_known(own.values(), np.median), "ratio": ratio}
    return cost


def verdict(difference: Mapping[str, Any] | None, measure: str, baseline: str, seeds: int) -> str:
    """One sentence on a corrected difference in ``Mean@8``; ``seeds`` is how many both strategies have."""
    if seeds == 0:
        return f"could not be compared with {baseline}: no seed has finished for both"
    if difference is None:
        return f"was not compared with {baseline}: there is no evaluation, and rewards are of rollouts drawn otherwise"
    value, alike = difference["value"], difference["low"] is None
    if value == 0.0 and alike:
        return f"equal to {baseline} in {measure} with every seed"
    over = " over problems" if difference["over"] == "problems" and not alike else ""
    text = f"{measure} {statistics.in_words(difference, '+.3f')}{over} against {baseline}"
    if seeds == 1:
        return f"{text}, {_OF_ONE_SEED[difference['within_noise']]}"
    count = difference["comparisons"]
    corrected = "" if count == 1 else f", {difference['p_corrected']:.2g} corrected for {count} comparisons"
    how = "with each of" if alike else "over"
    tested = " over problems" if "tested" in difference else ""
    text += f" {how} {seeds} seeds (p {difference['p']:.2g}{tested}{corrected})"
    if difference["within_noise"]:
        least = difference["detectable"]
        missed = "" if least is None else f"; below about {least:.3f} a difference would often have been missed"
        return f"within noise: {text}{missed}"
    if seeds < statistics.ENOUGH_SEEDS:
        return f"{text}; {seeds} seeds are too few to tell a method from luck"
    return f"{'better' if value > 0 else 'worse'}: {text}"


def table(results: Mapping[str, Any]) -> str:
    """The outcome in a few lines for the screen."""
    metrics = evaluated(results, by_arm(results))
    metrics = [*metrics[:1], *metrics[1:][-1:]]
    lost = ["cut / unreadable / timed out"] if metrics else []
    heads = [*(heading for heading, _ in metrics), *lost, "reward of own rollouts", "tokens/s", "s/step"]
    lines = [["strategy", "seeds", *heads]]
    for row in results["summary"]:
        cells = [statistics.in_words(dig(row, *keys)) for _, keys in metrics] + [shares(row["unscored"]) for _ in lost]
        began, ended = (row[key] and f"{row[key]['value']:.3f}" for key in ("reward_first", "reward_last"))
        ratios = (row["cost"][key]["ratio"] for key in ("tokens_per_second", "step_seconds"))
        cells += ["–" if ended is None else f"{began} → {ended}"]
        cells += ["–" if ratio is None else f"×{ratio:.2f}" for ratio in ratios]
        lines.append([row["strategy"], str(len(row["seeds"])), *cells])
    verdicts = [f"{row['strategy']}: {row['verdict']}" for row in results["summary"]]
    warnings = [f"warning: {line}" for line in results["warnings"]]
    return "\n".join([*text_table(lines, left=len(lines[0])), "", *verdicts, *warnings])
