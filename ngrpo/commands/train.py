# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo train [--perturbation NAME] [--perturbation.<option> VALUE ...]
                   [--advantage NAME] [--preset NAME] [flags of OpenRLHF ...]

Runs OpenRLHF's train_ppo_ray with perturbed rollouts. Our flags are below;
every other word goes to OpenRLHF untouched. Further help:
  ngrpo train --help NAME [NAME ...]  the options of methods; all: of every one
  ngrpo train --openrlhf-help         OpenRLHF's own flags

perturbation of the rollouts
  --perturbation NAME       see below; your own: ./file.py:Name,
                            package.module:Name [none: stock OpenRLHF]
  --perturbation.<option> VALUE
                            an option of the perturbation, see below; a switch
                            needs no value
  --perturbation.gate NAME  a further gate, named in the same ways; its options:
                            --perturbation.gate.<option>
  --perturbation.replay_buffer NAME
                            where finished trajectories wait for the trainer,
                            named in the same ways; its options:
                            --perturbation.replay_buffer.<option> [memory]
  --perturbation.config FILE
                            YAML with the same options and 'name'; a flag
                            overrides the file
  --perturbation.gap_limit X
                            warn once where log-probabilities of rollout and
                            trainer differ more than X times as much as
                            expected [10]; docs/troubleshooting.md has what
                            is expected at which positions
  --perturbation.strict     end the run there instead

algorithm
  --preset NAME             a set of OpenRLHF flags, printed; your flags win:
                            grpo, gspo, dapo
{kinds}
                            your own: named as a perturbation; ngrpo is NGRPO,
                            negative-enhanced GRPO; N-GRPO is --perturbation
                            neighbor

sampling of the rollouts; evaluation is unchanged
  --sampling.top_k K        draw from the K likeliest tokens
  --sampling.min_p P        draw from tokens with at least P times the likeliest
                            one's probability
  --sampling.correct_mask   take log-probabilities among the tokens that top-p,
                            top-k and min-p left (temperature and top-p:
                            --rollout.temperature, --rollout.top_p)
  --sampling.score_centering
                            subtract the mean of the loss's score over the draws
                            of each token: of top-p, top-k and min-p, of
                            --sampling.schedule, and of --perturbation cuts
  --sampling.mask_gib N     memory that a rollout worker may take for the tokens
                            that these two flags record [8]
  --sampling.correction_warmup N
                            importance weights of the loss (OpenRLHF's
                            --algo.advantage.is_correction_*) grow from 1 to
                            full strength over the first N steps
  --sampling.max_staleness N
                            asynchronous training: leave out responses that are
                            more than N weight syncs old
  --replay.routing          mixtures of experts: train on the experts that the
                            rollouts chose, weighed by the trained router
  --reproducible            the same seed gives the same rollouts from run to
                            run: whole batches in a fixed order

the run
  --eval.at_start           evaluate before the first step too, in
                            addition to --eval.steps
  --engine.max_num_seqs N, --engine.max_num_batched_tokens N
                            how many responses an engine draws at once [128],
                            and how many tokens a step of it reads [2048]
  --model NAME              = --actor.model_name_or_path; packaged models:
                            sandbox, smollm2-135m
  --chat_template_kwargs NAME=VALUE,...
                            the chat template's own arguments, such as
                            enable_thinking=false; also in eval, diagnose and
                            compare, which also evaluates with them
  --task NAME               dataset and reward where you give none: arithmetic,
                            math:FILE, minimum_sum, reasoning_gym:DATASET,
                            shortcut[:FORM], star_graph, two_peaks
  --reward.remote_url FILE  OpenRLHF's: your reward_func. It is called with one
                            response, from as many threads at once as there are
                            cores + 4, at most 32: lock what calls share
  --config FILE             YAML with any of these flags as keys, without dashes
                            (examples/recipes); repeatable; a later one
                            overrides an earlier one, and a flag both; 'false'
                            takes a flag of OpenRLHF out, a preset's too. Each
                            run leaves such a file, run.yaml, which repeats it
  --report.groups N         keep all responses to N prompts of a few steps, for
                            a look into groups in report.html [0]
  --dry-run [[[NODES x] GPUS x] GB]
                            print each added flag with its reason, configuration,
                            placement and memory, check, and start nothing;
                            2x8x80: on two nodes with eight GPUs of 80 GB [this
                            machine or cluster]
  --print verl              print the run as overrides of verl's main_ppo, and
                            start nothing (docs/integrations.md)
  --hardware auto|cpu|cuda  hardware profile [auto: CUDA if present]
  --run-dir DIR             model, checkpoints, TensorBoard log, summary.json
                            [runs/<time>-<perturbation>]
  --log-file FILE           what the engines print goes there; the screen shows
                            each phase of the run (loading the actor, evaluating
                            64 problems: 40) and each step

examples
  ngrpo train --perturbation neighbor --perturbation.rate 0.1 \\
      --model smollm2-135m --task arithmetic --preset grpo \\
      --rollout.n_samples_per_prompt 4 --rollout.batch_size 8 \\
      --train.batch_size 32 --rollout.max_new_tokens 12
  ngrpo train --perturbation.config neighbor.yaml --perturbation.rate 0.15 ...
  ngrpo train --config examples/recipes/n_grpo_r1_distill_qwen_1.5b.yaml \\
      --config examples/recipes/placements/hybrid_8_gpus.yaml --dry-run
"""

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ngrpo.commands import dry_run, method_texts
from ngrpo.config import complete_run, parse, rules, run_notes, stretches, verl_lines
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine import console, progress
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import CannotWrite, read_json, reserved_folder
from ngrpo.machine.upstream import versions
from ngrpo.machine.upstream.openrlhf_flags import Flags, parsed
from ngrpo.trainers.openrlhf import launch
from ngrpo.workbench.report import summary, write_report
from perturbations.errors import UsageError


def usage(command: str, argv: Sequence[str]) -> str:
    """Our flags and the names of all methods, or what the words after ``--help`` ask for."""
    return method_texts.train_help(console.docstring(sys.modules[__name__]), argv) + "\n"


def run(argv: Sequence[str], *, report: console.Report) -> int:
    """Trains; 1 where the training itself failed."""
    if "--openrlhf-help" in argv:
        versions.check_stack()
        with suppress(SystemExit):
            parsed(["--help"])
        return 0
    words = parse.with_files(argv)
    config = parse.run_config(words)
    flags = Flags(words)
    trainer = flags.value(parse.PRINT)
    if trainer is not None:
        return _print_for(trainer, config)
    shape = flags.value(parse.DRY_RUN)
    if shape is not None:
        return dry_run.dry_run(config, shape or "true")
    for note in config.notes:
        report(f"warning: {note}")
    name = "none" if config.spec is None else config.spec["name"].rpartition(":")[2]
    with reserved_folder(config.run_dir, name) as folder:
        complete = _prepare(replace(config, run_dir=str(folder)), report)
        return _train(_write_start(complete, folder), folder, report)


def _print_for(trainer: str, config: RunConfig) -> int:
    """Prints a run as the command line of another trainer."""
    if trainer != "verl":
        raise UsageError(f"{parse.PRINT} {trainer}: must be verl. Give {parse.PRINT} verl, or leave it out.")
    lines, untranslated = verl_lines.of_run(complete_run.make_algorithm(config))
    print("python -m verl.trainer.main_ppo \\\n    " + " \\\n    ".join(map(shlex.quote, lines)))
    if untranslated:
        print(f"not translated, verl's default holds: {', '.join(untranslated)}", file=sys.stderr)
    return 0


def _prepare(run: RunConfig, report: console.Report) -> CompleteRun:
    """Completes a run, reports what a user should know of it, and checks it; nothing is written to its folder yet."""
    complete = rules.started(run)
    for note in run_notes.all_notes(complete):
        report(f"warning: {note}")
    for reason in rules.check("data", complete):
        report(reason)
    for line in run_notes.start_lines(complete):
        report(line)
    complete = complete.with_models(partial(_local_model, flags=complete.flags, report=report))
    for reason in rules.check("model", complete):
        report(reason)
    return complete


def _local_model(name: str, *, flags: Flags, report: console.Report) -> str:
    """The folder of a model, made or downloaded if it is not there; with ``--use_ms`` OpenRLHF downloads it."""
    if flags.has("--use_ms") and name not in packaged.PACKAGED:  # ModelScope has models that the hub does not have
        return name
    return packaged.resolve(name, report=report)


def _write_start(complete: CompleteRun, folder: Path) -> RunConfig:
    """Writes the files of a start to the run's folder; returns the run with its complete flags."""
    settings = stretches.of_start(complete)
    if complete.run.task is not None:
        complete_run.copy_task(complete.run.task, folder / "task")
    stretches.write(folder, settings)
    complete.run.write(folder / FILE)
    return replace(complete.with_task_in_run_folder().to_run(), run_dir=str(folder.absolute()))


def _train(run: RunConfig, folder: Path, report: console.Report) -> int:
    """Launches a complete run. One that was stopped or failed leaves its summary and report too."""
    summary.note_logs(folder, run)
    began = time.time()
    end: BaseException | None = None
    try:
        with progress.into_file(Path(run.log_file).expanduser()) if run.log_file else nullcontext():
            launch.launch(run)
    except (launch.TrainingFailed, KeyboardInterrupt) as error:
        end = error
    if isinstance(end, launch.TrainingFailed):
        report(f"training failed: {end}")
    updates: list[float] = []
    try:
        updates = _write_results(run, folder, began=began, stopped=end is not None)
    except CannotWrite as error:
        logs = summary.log_folder(folder, Flags(run.openrlhf))
        report(
            f"{error.path} cannot be written: {error.why}. The training has ended; its steps are logged in {logs}. Make"
            f" room, then write summary and report with: ngrpo report {shlex.quote(str(folder))}"
        )
        if not isinstance(end, KeyboardInterrupt):
            return 1
    if isinstance(end, KeyboardInterrupt):
        report(f"stopped; {folder} has the finished steps. --ckpt.load_enable continues from the last checkpoint.")
        raise end
    if end is not None:
        return 1
    if updates and not any(updates):
        report("training failed: no step updated the weights; the warnings above say why.")
        return 1
    return 0


def _write_results(run: RunConfig, folder: Path, *, began: float, stopped: bool) -> list[float]:
    """Writes summary and report, and prints the summary; nothing for a run that ended before its first step.

    Returns:
        The number of optimizer steps of each training step.
    """
    table = summary.finish(folder, run, began=began, stopped=stopped)
    if not table:
        return []
    written = read_json(folder / "summary.json")
    write_report(written, folder / "report.html")
    print(table, flush=True)
    return [step.get("optimizer_steps", 1.0) for step in written["steps"]]
