# SPDX-License-Identifier: Apache-2.0
"""`results.json` and `results.csv`: everything that the runs of a comparison left, and what follows from it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngrpo.config.arms import Arm
from ngrpo.config.kinds import of_a_run
from ngrpo.machine.storage.result_folder import write_text
from ngrpo.workbench import statistics
from ngrpo.workbench.compare import shares, verdicts
from ngrpo.workbench.compare.comparison_folder import ComparisonFolder
from ngrpo.workbench.compare.plan import Plan, Run
from ngrpo.workbench.compare.runs import status
from ngrpo.workbench.report.answers import MOST_BYTES, fitting
from ngrpo.workbench.statistics import pass_at_k

FORMAT = 1
_COSTS = ("tokens_per_second", "step_seconds", "record_bytes_per_token")
_CSV_STEP = ("reward", "rate", "shift", "gap_perturbed_mean", "gap_plain_mean", *_COSTS)


def collect(plan: Plan, folder: ComparisonFolder, command: Sequence[str], created: str) -> dict[str, Any]:
    """Reads what the runs left.

    Args:
        plan: the comparison.
        folder: its folder.
        command: the words that started it.
        created: when it was first started, ISO 8601.

    Returns:
        The content of ``results.json``; every number is finite or None.
    """
    from ngrpo.machine.upstream.versions import machine, versions

    runs = [_run(plan, run, folder) for run in plan.runs()]
    for run in runs:  # a report has no room for more
        run["groups"] = fitting(run["groups"], MOST_BYTES // len(plan.arms))
    summaries = [folder.read(f"runs/{run['id']}/summary.json") for run in runs]
    runners = [(s or {}).get("versions", {}).get("model runner") for s in summaries]
    result = {
        "format": FORMAT,
        "created": created,
        "command": list(command),
        "baseline": plan.baseline,
        "model": plan.model,
        "task": plan.task,
        "hardware": next((s["hardware"] for s in summaries if s), None),
        "machine": machine(),
        "versions": versions(", ".join(sorted(set(filter(None, runners))))),
        "openrlhf_args": list(plan.shared),
        "strategies": [_strategy(arm) for arm in plan.arms],
        "runs": runs,
        "untrained": folder.read("untrained/evaluation.json"),
        "summary": summarise(runs, [arm.id for arm in plan.arms], plan.baseline, plan.threshold),
        "diagnosis": _named(folder.read("diagnosis/diagnosis.json"), plan.arms),
    }
    # NaN and infinity have no place in JSON.
    return json.loads(json.dumps(result), parse_constant=lambda name: None)


def write(results: Mapping[str, Any], folder: ComparisonFolder) -> None:
    """Writes ``results.json``, ``results.csv`` and ``report.html``."""
    from ngrpo.workbench.report import write_report

    folder.write("results.json", results)
    write_text(folder.path / "results.csv", as_csv(results))
    write_report(dict(results), folder.path / "report.html")


def summarise(
    runs: Sequence[Mapping[str, Any]], arms: Sequence[str], baseline: str, threshold: float | None = None
) -> list[dict[str, Any]]:
    """One row per strategy: means with intervals, paired differences to the baseline, costs.

    Differences are of evaluations alone: rewards while training are of rollouts that each strategy draws in its own
    way. For each measure Holm's correction counts all strategies but the baseline.

    Args:
        runs: as in ``results.json``.
        arms: ids of the strategies.
        baseline: the id of one of them.
        threshold: the Mean@n above which runs are counted; see :mod:`ngrpo.workbench.compare.shares`.
    """
    done = {arm: {r["seed"]: r for r in runs if r["strategy"] == arm and r["status"] == "done"} for arm in arms}
    failed = {arm: [r["seed"] for r in runs if r["strategy"] == arm and r["status"] == "failed"] for arm in arms}
    rows = [_row(arm, done[arm], failed[arm], baseline, done[baseline]) for arm in arms]
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    statistics.correct([d["mean_at_n"] for d in differences if d["mean_at_n"] is not None])
    for k in {k for d in differences for k in d["pass_at_k"]}:
        statistics.correct([d["pass_at_k"][k] for d in differences if k in d["pass_at_k"]])
    for row in rows:
        main = row["difference"] and row["difference"]["mean_at_n"]
        shared = len(set(row["seeds"]) & set(done[baseline]))
        row["verdict"] = verdicts.verdict(main, f"Mean@{row['n']}", baseline, shared)
        if row["strategy"] == baseline:
            row["verdict"] = "the baseline"
    if threshold is not None:
        reached = {
            arm: {seed: run["evaluation"]["mean_at_n"] for seed, run in of.items() if run["evaluation"]}
            for arm, of in done.items()
        }
        shares.add(rows, reached, baseline, threshold)
    return rows


def as_csv(results: Mapping[str, Any]) -> str:
    """One line per run and training step, for a spreadsheet or pandas; the evaluation stands on the last step."""
    text = io.StringIO()
    ks = sorted({k for run in results["runs"] for k in ((run["evaluation"] or {}).get("pass_at_k") or {})}, key=int)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["run", "strategy", "seed", "status", "step", *_CSV_STEP, "mean_at_n", *(f"pass_at_{k}" for k in ks)]
    )
    for run in results["runs"]:
        head = [run["id"], run["strategy"], run["seed"], run["status"]]
        evaluation = run["evaluation"] or {}
        scores = [evaluation.get("mean_at_n"), *((evaluation.get("pass_at_k") or {}).get(k) for k in ks)]
        steps = run["steps"] or [{}]
        for i, step in enumerate(steps):
            last = scores if i == len(steps) - 1 else [None] * len(scores)
            writer.writerow([*head, step.get("step"), *(step.get(key) for key in _CSV_STEP), *last])
    return text.getvalue()


def _strategy(arm: Arm) -> dict[str, Any]:
    # The text of a perturbation from a file is code, and long; the file's name and hash are in the run's own summary.
    spec = None if arm.spec is None else {k: v for k, v in arm.spec.items() if not k.endswith("source")}
    return {
        "id": arm.id,
        "perturbation": spec,
        "base": arm.training.get("base"),
        "settings": arm.settings,
        "flags": arm.flags,
        "paper": arm.paper,
    }


def _named(diagnosis: dict[str, Any] | None, arms: Sequence[Arm]) -> dict[str, Any] | None:
    """The diagnosis under the arms' names: it knows how rollouts are drawn, an arm has a base algorithm and flags too.

    An arm whose rollouts differ in a way that a diagnosis does not know, such as another top-p, was not diagnosed.
    """
    if diagnosis is None:
        return None
    names: dict[str, list[str]] = {}
    for arm in arms:
        others = arm.training.keys() - arm.rollouts.keys()
        if not any(key.startswith(("rollout.", "sampling.")) for key in others):
            names.setdefault(arm.rollout_id, []).append(arm.id)

    def renamed(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
        return [{**row, key: names.get(row[key], [row[key]])[0]} for row in rows]

    picture = diagnosis.get("embedding_map")
    if picture is not None:
        picture = {**picture, "perturbations": renamed(picture["perturbations"], "strategy")}
    samples = [{**s, "by_strategy": renamed(s["by_strategy"], "strategy")} for s in diagnosis.get("samples", [])]
    strategies = renamed(diagnosis["strategies"], "name")
    return {**diagnosis, "strategies": strategies, "samples": samples, "embedding_map": picture}


def _run(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    state, path = status(plan, run, folder), f"runs/{run.id}"
    done = state["status"] == "done"
    summary = (folder.read(f"{path}/summary.json") if done else None) or {}
    return {
        "id": run.id,
        "strategy": run.arm.id,
        "seed": run.seed,
        "status": state["status"],
        "error": state.get("error"),
        "log": state.get("log"),
        "seconds": state.get("seconds"),
        "peak_memory_bytes": state.get("peak_memory_bytes"),
        **{kind.name: summary.get(kind.name) for kind in of_a_run()},
        "sampling": summary.get("sampling"),
        "steps": summary.get("steps", []),
        "evaluations": _evaluations(summary.get("evaluation") or {}),
        "evaluation": folder.read(f"{path}/evaluation/evaluation.json") if done else None,
        "groups": (summary.get("groups") or []) if run.seed == plan.seeds[0] else [],
    }


def _row(
    arm: str, mine: Mapping[int, Any], failed: list[int], baseline: str, theirs: Mapping[int, Any]
) -> dict[str, Any]:
    shared = sorted(set(mine) & set(theirs))
    problems = next((run["evaluation"]["problems"] for run in mine.values() if run["evaluation"]), None)
    n = problems[0]["n"] if problems else None
    row = {"strategy": arm, "seeds": sorted(mine), "failed": failed, "n": n, "difference": None}
    row |= {name: None for name in ("reward_first", "reward_last", "reward_change")}
    row |= _judged([{**_rewards(mine[seed]), **_scores(mine[seed])} for seed in sorted(mine)])
    if arm != baseline and shared:
        row["difference"] = _judged(*([_scores(side[seed]) for seed in shared] for side in (mine, theirs)))
    row["cost"] = _cost(mine, theirs, shared)
    return row


def _evaluations(scalars: Mapping[str, Mapping[str, float]]) -> list[dict[str, float]]:
    """OpenRLHF's evaluations while training (``--eval.steps``), by step; of several datasets their mean."""
    by_step: dict[int, list[float]] = {}
    for tag, values in scalars.items():
        if tag.endswith("_pass1"):
            for step, value in values.items():
                by_step.setdefault(int(step), []).append(value)
    return [{"step": step, "mean_at_n": float(np.mean(values))} for step, values in sorted(by_step.items())]


def _rewards(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The reward of a run's own rollouts, at its beginning, at its end, and how it changed: of no problem."""
    rewards = [step["reward"] for step in run["steps"]]
    if not rewards:
        return {}
    first, last = verdicts.first_quarter(rewards), verdicts.last_quarter(rewards)
    return {"reward_first": {"": first}, "reward_last": {"": last}, "reward_change": {"": last - first}}


def _scores(run: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What a run is judged by: Mean@n and each Pass@k of its evaluation, for each problem."""
    evaluation = run["evaluation"] or {"problems": [], "pass_at_k": {}}
    scores: dict[str, dict[str, float]] = {}
    if evaluation["problems"]:
        scores["mean_at_n"] = {p["id"]: p["correct"] / p["n"] for p in evaluation["problems"]}
        for k in evaluation["pass_at_k"]:
            scores[k] = {p["id"]: pass_at_k(p["n"], p["correct"], int(k)) for p in evaluation["problems"]}
    return scores


def _judged(*sides: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Of the measures of one side's runs the means, of two sides' the paired differences, each with its interval."""
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
        value = statistics.interval(*tables) if len(sides) == 1 else statistics.paired(*tables)
        (judged["pass_at_k"] if name.isdecimal() else judged)[name] = value
    return judged


def _cost(mine: Mapping[int, Any], theirs: Mapping[int, Any], shared: list[int]) -> dict[str, Any]:
    """Medians over steps and seeds; ratios are of runs with the same seed. The first step warms up and is left out."""
    cost: dict[str, Any] = {}
    for key in (*_COSTS, "memory_bytes"):
        own, base = ({seed: _spent(run, key) for seed, run in side.items()} for side in (mine, theirs))
        pairs = [(own[seed], base[seed]) for seed in shared]
        cost[key] = {
            "value": _median(list(own.values())),
            "ratio": _median([a / b for a, b in pairs if a is not None and b]),
        }
    return cost


def _spent(run: Mapping[str, Any], key: str) -> float | None:
    if key == "memory_bytes":
        return run["peak_memory_bytes"]
    return _median([step.get(key) for step in run["steps"][1:] or run["steps"]])


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return float(np.median(numbers)) if numbers else None
