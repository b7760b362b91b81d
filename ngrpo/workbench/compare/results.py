# SPDX-License-Identifier: Apache-2.0
"""`results.json` and `results.csv`: what the runs of a comparison left, and the table on the screen."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.config.arms import Arm
from ngrpo.config.kinds import of_a_run
from ngrpo.machine.console import text_table
from ngrpo.machine.storage.result_folder import write_text
from ngrpo.machine.upstream.versions import CODE, differing, machine, recorded_versions
from ngrpo.workbench import statistics
from ngrpo.workbench.compare.plan import Plan, Run
from ngrpo.workbench.compare.runs import ComparisonFolder, status
from ngrpo.workbench.compare.summaries import COSTS, summarise
from ngrpo.workbench.evaluate.evaluation import unscored, unscored_warnings
from ngrpo.workbench.report import write_report
from ngrpo.workbench.report.charts import evaluations
from ngrpo.workbench.report.headline import by_arm, evaluated, trained_otherwise
from ngrpo.workbench.report.responses import MOST_BYTES, fitting
from ngrpo.workbench.report.values import dig, format_number, shares

_CSV_STEP = ("reward", "rate", "shift", "gap_perturbed_mean", "gap_plain_mean", *COSTS)

Results = Mapping[str, Any]
"""The content of results.json."""


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
