# SPDX-License-Identifier: Apache-2.0
"""Samples n responses per problem through vLLM, checks them, and counts Mean@n and Pass@k.

  --perturbation NAME   perturb the rollouts [off]
  --perturbation.<option> VALUE
                        and --perturbation.config FILE, as in ngrpo train
  --sampling.schedule NAME, --policy_noise NAME
                        sample as in a training's rollouts, with options as
                        in ngrpo train [off]
  --hardware auto|cpu|cuda
                        hardware profile
  --vllm.<option> VALUE
                        any argument of vllm.LLM, for example
                        --vllm.tensor_parallel_size 4

SRC is aime2024, aime2025, amc23, math500, gpqa_diamond, deepscaler; a JSONL,
JSON, CSV or parquet file (verl's and OpenRLHF's layouts, question and answer
columns); or a hub dataset owner/name[:config][@split].

examples
  ngrpo eval --model smollm2-135m --task arithmetic --n 8 --max-tokens 16
  ngrpo eval --model Qwen/Qwen3-0.6B --data aime2025 --n 32 \\
      --max-tokens 30000 --out runs/aime
  ngrpo eval --rescore runs/aime
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.commands.command_parser import CommandParser, problems_of, telling_what_is_kept
from ngrpo.config import parse
from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from ngrpo.machine.console import Report
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import folder_for
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench import evaluate
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from ngrpo.workbench.evaluate.engine import RolloutPolicy

# Options of the perturbation that are about the trainer.
_OF_TRAINING = ("--perturbation.gap_limit", "--perturbation.strict")


def run(argv: list[str], *, report: Report) -> int:
    """Evaluates, or scores again."""
    from ngrpo.workbench.evaluate import evaluation

    args, run_config, engine_options = _read(argv)
    for note in run_config.notes:
        report(f"warning: {note}")
    if args.rescore is not None:
        folder = Path(args.rescore).expanduser()
        result = _rescore(argv, args, folder, report)
        if result is None:
            return 1
    else:
        folder = folder_for(args.out, "eval")
        with telling_what_is_kept("eval", argv, folder, report):
            result = _evaluate(args, run_config, engine_options, folder, report)
    print(evaluation.table(result, folder), flush=True)
    return 0


def _rescore(argv: Sequence[str], args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any] | None:
    """Scores the samples of a folder again; None where they cannot be scored."""
    for flag in Flags(argv).without("--rescore", "--scorer", "--k"):
        raise UsageError(
            f"{' '.join(flag.argv)} has no effect on --rescore, which scores the samples that are there. Leave it out,"
            " or evaluate into another folder."
        )
    return evaluate.rescore(folder, scorer=args.scorer, k=args.k, report=report)


def _evaluate(
    args: argparse.Namespace,
    run_config: RunConfig,
    engine_options: dict[str, Any],
    folder: Path,
    report: Report,
) -> dict[str, Any]:
    """Samples responses into a folder, scores them, and returns the result."""
    from ngrpo.config.input_checks import check_model

    sampling, policy = _sampling_and_policy(args, run_config, report)
    for note in policy.notes:
        report(f"warning: {note}")
    packaged.check_available(args.model)  # before problems are loaded, which may come from the hub as well
    problems, dataset = problems_of(args, args.limit, report)
    if args.adapter is None:
        model = packaged.resolve(args.model, report=report)
    else:
        model = packaged.merged_adapter(args.adapter, args.model, report=report)
    check_model(model, run_config.perturbation)
    return evaluate.evaluate(
        model,
        problems,
        out=folder,
        n=args.n,
        k=args.k,
        sampling=sampling,
        perturbation=run_config.spec,
        policy=policy,
        dataset=dataset,
        hardware=run_config.hardware,
        engine_options=engine_options,
        report=report,
    )


def check(argv: Sequence[str], report: Report = lambda line: None) -> None:
    """Reads words and problems as :func:`run` would; raises ``UsageError`` for bad input."""
    args, run_config, _ = _read(argv)
    _sampling_and_policy(args, run_config, report)
    problems_of(args, args.limit, lambda line: None)


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig, dict[str, Any]]:
    """This command's own options, the run's, and the engine's."""
    run_config = parse.run_config(argv)
    rest, engine_options = _engine_options(run_config.openrlhf)
    _refuse_flags_of_training(argv, run_config)
    profile_for(run_config.hardware)
    args = parser().read(rest)
    args.task = run_config.task
    args.chat_template_kwargs = run_config.chat_template_kwargs
    return args, run_config, engine_options


def _refuse_flags_of_training(argv: Sequence[str], run_config: RunConfig) -> None:
    """Raises ``UsageError`` for a flag that only a training takes."""
    flags = Flags(argv)
    refused: list[tuple[str, object, str]] = []  # a flag, its value, and what to do instead
    for kind in KINDS.values():
        if kind.name != "perturbation" and not kind.in_rollouts:
            refused.append((kind.flag, run_config.specs.get(kind.name), "Leave it out."))
    for flag in (parse.DRY_RUN, parse.PRINT, *_OF_TRAINING):
        refused.append((flag, flags.has(flag), "Leave it out."))
    refused += [
        ("--engine.max_num_seqs", run_config.max_num_seqs, "Give --vllm.max_num_seqs."),
        ("--engine.max_num_batched_tokens", run_config.max_num_batched_tokens, "Give --vllm.max_num_batched_tokens."),
        ("--run-dir", run_config.run_dir, "Give --out."),
        ("--log-file", run_config.log_file, "Redirect the output: 2> FILE."),
        ("--preset", run_config.preset, "Leave it out."),
        ("--report.groups", run_config.report_groups, "Leave it out."),
        ("--replay.routing", run_config.replay_routing, "Leave it out."),
        ("--eval.at_start", run_config.eval_at_start, "Leave it out."),
        ("--sampling.*", run_config.sampling.given(), "Evaluation has --temperature and --top-p."),
    ]
    for flag, value, fix in refused:
        if value:
            raise UsageError(f"{flag} belongs to ngrpo train. {fix}")


def _sampling_and_policy(
    args: argparse.Namespace, run_config: RunConfig, report: Report
) -> tuple[evaluate.Sampling, RolloutPolicy]:
    """The settings of sampling and the policy that samples, after a check of both and of the model's name."""
    from ngrpo.workbench.evaluate import engine, evaluation

    packaged.check_name(args.model)
    evaluation.checked_ks(args.k, args.n)
    policy = engine.RolloutPolicy.of(run_config, args.at_step, args.of_steps)
    policy.check_temperature(args.temperature)
    if args.temperature == 0 and args.n > 1 and run_config.spec is None and policy.run.sampling_schedule is None:
        report(f"warning: at temperature 0 the {args.n} samples of a problem are one response; --n 1 is enough")
    return evaluate.Sampling(args.temperature, args.top_p, args.max_tokens, args.seed), policy


def parser() -> CommandParser:
    """The command's flags and its help."""
    command_parser = CommandParser("eval")
    command_parser.add_problems(temperature=0.6, top_p=0.95, max_tokens=4096)
    add = command_parser.add_argument
    add("--adapter", metavar="DIR", help="a LoRA adapter on --model; a folder that names its base may be --model")
    add("--n", type=int, default=32, help="samples per problem [32]")
    add("--k", type=_ks, help="for Pass@k, with commas [those of 1,4,8,16,32 up to n]")
    add("--limit", type=int, help="only the first N problems")
    add("--out", metavar="DIR", help="samples.jsonl and evaluation.json [runs/<time>-eval]; again: continues there")
    add("--rescore", metavar="DIR", help="check the samples of a folder again, without generating; takes --scorer, --k")
    return command_parser


def _ks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas, such as 1,4,8") from None


def _engine_options(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes ``--vllm.<option> VALUE`` out of the words; a switch needs no value."""
    import yaml

    rest: list[str] = []
    options: dict[str, Any] = {}
    for flag in Flags(argv):
        if flag.name.startswith("--vllm."):
            value, *more = flag.values or ("true",)
            try:
                options[flag.name.removeprefix("--vllm.").replace("-", "_")] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise UsageError(f"{flag.name} {value!r}: must be a number, true, false, a word or YAML.") from None
            rest += more
        else:
            rest += flag.argv
    return rest, options
