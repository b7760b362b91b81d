# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo compare --perturbations NAME,NAME ... [--seeds 0,1,2]
                     [--task NAME] [flags of ngrpo train ...]

Trains every arm with every seed under the same trainer, data order and
budget, evaluates each, and writes results.json, results.csv and report.html.
Finished runs are kept: the same command continues where it stopped.

  --perturbations A,B       perturbations, with options after colons:
                            none,neighbor:rate=0.2,gumbel
  --strategy 'A x=1 --f=2'  one arm: options, base=PRESET, advantage=NAME
                            (or of another kind: ngrpo new),
                            and flags of its own; repeatable
  --sweep KEY=V,W           one arm per value: perturbation.rate=0.05,0.1 for
                            each perturbation that has it, or any flag of ngrpo
                            train (rollout.temperature=0.8,1.2) for all;
                            repeatable
  --base P,Q                base algorithms: grpo, gspo, dapo
  --seeds 0,1,2             seeds [0]
  --baseline ID             the arm that all others are compared with
                            [none, or the first one]
  --threshold SCORE         count the runs that end with a higher Mean@n, and
                            test the counts: for tasks that a run either solves
                            or does not
  --config FILE             YAML with the same words as keys (see
                            examples/ablation.yaml). A flag overrides its key;
                            --strategy, and --sweep of another KEY, add to the
                            file's
  --out DIR                 the comparison's folder [runs/compare]
  --dry-run [SHAPE]         print the first run, check all of them, and start
                            nothing
  --discard-models          delete each trained model once it is evaluated:
                            many runs fill a disk
  --stock                   sample as stock OpenRLHF does: the same seed does
                            not repeat a run then

evaluation of each trained model (perturbation off)
  --eval.data SRC           problems [the task's held-out ones, or those of
                            --eval.dataset, read and scored as in training;
                            --eval.data none for no evaluation]
  --eval.n N                samples per problem [8]
  --eval.OPTION VALUE       any other option of ngrpo eval, e.g. --eval.k 1,4,8
                            --eval.temperature 0.6
  --eval.steps N            also every N training steps, on --eval.dataset [the
                            task's]: a learning curve that compares arms,
                            as rewards of their different rollouts do not
  --eval.at_start           also before the first step, where the curve begins

before training
  --diagnose.prompts N      prompts for the diversity-validity picture and the
                            sample responses [8; 0: leave it out]
  --diagnose.OPTION VALUE   any other option of ngrpo diagnose, e.g.
                            --diagnose.group 8 --diagnose.embedding-map

All other words go to ngrpo train, for all runs alike.

examples
  ngrpo compare --perturbations none,neighbor --seeds 0,1 --base grpo \\
      --model smollm2-135m --task arithmetic --rollout.batch_size 8 \\
      --rollout.n_samples_per_prompt 4 --train.batch_size 32 \\
      --rollout.max_new_tokens 12 --data.max_samples 96
  ngrpo compare --config examples/ablation.yaml --model Qwen/Qwen3-0.6B \\
      --data.prompt_dataset prompts.jsonl --data.label_key label --dry-run ...
"""

import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ngrpo.commands import diagnose, dry_run
from ngrpo.commands import eval as evaluation
from ngrpo.commands.command_parser import telling_what_is_kept
from ngrpo.config import parse, rules
from ngrpo.machine.console import Report
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare import results, runs
from ngrpo.workbench.compare.plan import Plan, read_plan
from perturbations.errors import UsageError


def run(argv: list[str], *, report: Report) -> int:
    """Compares."""
    plan, out = read_plan(argv)
    arm_notes = dict.fromkeys(f"{arm.id}: {note}" for arm in plan.arms for note in arm.notes)
    for note in (*plan.notes, *arm_notes):
        report(f"warning: {note}")
    shape = Flags(argv).value(parse.DRY_RUN)
    failed = check(plan, out, report, shape)
    if shape is not None:
        return failed
    with runs.ComparisonFolder.opened(out, report) as folder, telling_what_is_kept("compare", argv, out, report):
        folder.claim(plan.common())
        return _compare(plan, folder, ["ngrpo", "compare", *argv], report)


def check(plan: Plan, out: Path, report: Report, shape: str | None = None) -> int:
    """Checks every arm as `ngrpo train` would, so that the last run does not fail on a misspelt flag.

    A dry run, on the GPUs of ``shape``, also prints every arm, the first one in full. Returns 1 where a check of a dry
    run fails, else 0.
    """
    failed = 0
    if shape is not None:
        print(f"{len(plan.runs())} runs: {len(plan.arms)} arms × {len(plan.seeds)} seeds")
    for number, run in enumerate(plan.runs()[: len(plan.arms)]):  # each arm with the first seed
        if shape is not None:
            print(f"\narm {run.arm.id}\n  {shlex.join(run.arm.flags)}\n")
        with _named(f"arm {run.arm.id!r}"):
            config = runs.run_config(plan, run, out / "runs" / run.id)
            if shape is None:
                rules.checked(config)
            else:
                failed |= dry_run.dry_run(config, shape or "true", checks_only=number > 0)
    if plan.evaluation is not None:
        with _named("evaluation", " (--eval.OPTION sets it, --eval.data none leaves it out)"):
            evaluation.check(runs.eval_argv(plan, plan.model, Path("out")), report)
    if plan.diagnosis is not None:
        with _named("diagnosis", " (--diagnose.OPTION sets it, --diagnose.prompts 0 leaves it out)"):
            diagnose.check(["--model", plan.model, *plan.diagnosis])
    return failed


@contextmanager
def _named(subject: str, fix: str = "") -> Iterator[None]:
    """Names the subject in an error."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{subject}: {error}{fix}") from None


def _compare(plan: Plan, folder: runs.ComparisonFolder, command: list[str], report: Report) -> int:
    """Executes the runs that are not finished yet, and writes the results after each; 1 where one has failed."""
    created = (folder.read("results.json") or {}).get("created") or time.strftime("%Y-%m-%dT%H:%M:%S%z")
    all_runs = plan.runs()
    records = _checked_records(plan, folder)
    seconds = [record["seconds"] for record in records if record["status"] == "done"]
    screen = runs.Screen(len(all_runs), seconds)
    if seconds:
        print(f"{len(seconds)} of {len(all_runs)} runs are finished and kept", flush=True)
    model = packaged.resolve(plan.model, report=report)
    weights = Path(model).glob("*.safetensors") if Path(model).is_dir() else []
    needed = int(1.5 * sum(file.stat().st_size for file in weights)) + (1 << 29)  # bytes that a run writes
    _before_training(plan, folder, model)
    for number, (run, record_before) in enumerate(zip(all_runs, records), start=1):
        if record_before["status"] == "done":
            continue
        _checked_records(plan, folder)  # files and versions may have changed while the runs before it trained
        folder.need(needed)
        screen.begin(number, run)
        record = runs.execute(plan, run, folder, screen.step)
        evaluated = None
        if record["status"] == "done":
            evaluated = folder.read(f"runs/{run.id}/evaluation/evaluation.json")
        screen.end(record, evaluated)
        results.write(results.collect(plan, folder, command, created), folder)
    final = results.collect(plan, folder, command, created)
    results.write(final, folder)
    sys.stdout.flush()
    print(f"\n{results.table(final)}\n\nreport   {folder.path}/report.html\nresults  {folder.path}/results.json")
    failed = [run for run in final["runs"] if run["status"] == "failed"]
    for failed_run in failed:
        report(f"{failed_run['id']} failed: {failed_run['log']}")
    return 1 if failed else 0


def _checked_records(plan: Plan, folder: runs.ComparisonFolder) -> list[dict[str, Any]]:
    """How each run ended so far; ``UsageError`` where a finished one would differ now."""
    records = [runs.status(plan, run, folder) for run in plan.runs()]
    differing = [run.id for run, record in zip(plan.runs(), records) if record["status"] == "other"]
    if differing:
        named = ", ".join([*differing[:3], "..."] if len(differing) > 3 else differing)
        raise UsageError(
            f"{len(differing)} finished runs in {folder.path} are of other flags, other content of the files that they"
            f" name, or other versions than now: {named}. Give another --out, or delete their folders under"
            f" {folder.path / 'runs'} to have them repeated."
        )
    return records


def _before_training(plan: Plan, folder: runs.ComparisonFolder, model: str) -> None:
    """The untrained model's evaluation and the diagnosis; their failures are printed and stop nothing."""
    untrained = folder.path / "untrained"
    if plan.evaluation is not None and not runs.is_evaluated(plan, model, folder, untrained):
        print("before training: evaluating the untrained model", flush=True)
        _try(["eval", *runs.eval_argv(plan, model, untrained)], folder, untrained.name)
    if plan.diagnosis is None:
        return
    diagnosis = folder.path / "diagnosis"
    words = ["--model", model, *plan.diagnosis]
    state = diagnose.state(words, diagnosis)
    if state == "finished":
        return
    again = " again: its settings are others than before" if state == "other" else ""
    print(f"before training: diagnosing the arms{again}", flush=True)
    if state == "other":
        shutil.rmtree(diagnosis, ignore_errors=True)
    _try(["diagnose", *words, "--out", str(diagnosis)], folder, diagnosis.name)


def _try(argv: list[str], folder: runs.ComparisonFolder, name: str) -> None:
    """Runs a command; its failure is printed and stops nothing."""
    try:
        runs.command(argv, folder.path / f"{name}.log", folder.lock)
    except runs.CommandFailed as failure:
        print(f"  left out: {str(failure).splitlines()[0]} (log: {name}.log)", flush=True)
