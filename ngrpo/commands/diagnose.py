# SPDX-License-Identifier: Apache-2.0
"""Measures how different and how valid a group's responses are under each arm, before any training.

SRC is a benchmark's name, a JSONL, JSON, CSV or parquet file, or a hub dataset,
as in ngrpo eval.

examples
  ngrpo diagnose --model smollm2-135m --task arithmetic --max-tokens 16
  ngrpo diagnose --model Qwen/Qwen3-0.6B --data math500 \\
      --perturbations none,neighbor --sweep perturbation.rate=0.1,0.3
  ngrpo diagnose --model smollm2-135m --task arithmetic \\
      --strategy none --strategy 'neighbor rate=1 variant=released'
  ngrpo diagnose --model smollm2-135m --task arithmetic --strategy none \\
      --strategy 'none sampling.schedule=ead' --strategy 'none policy_noise=psn'

What each number is: docs/compare.md.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ngrpo.commands.command_parser import CommandParser, problems_of, telling_what_is_kept
from ngrpo.config.arms import Arm, parse_arms
from ngrpo.machine.console import Report
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import folder_for
from ngrpo.workbench.diagnose import policy_of, without_repeats
from perturbations import UsageError, registry

if TYPE_CHECKING:
    from ngrpo.workbench.diagnose.group_sampling import GroupSampling

_DEFAULT = "none,neighbor,gaussian,gumbel"


def run(argv: list[str], *, report: Report) -> int:
    """Diagnoses."""
    # Read once, when torch loads: threads that spin while they wait take a shared CPU from everybody.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ngrpo.config.input_checks import check_model
    from ngrpo.workbench.diagnose.diagnosis import REPORT, diagnose, differences, table

    args, sampling, arms = _read(argv)
    if args.model:
        packaged.check_available(args.model)  # before problems are loaded, which may come from the hub as well
    problems, dataset = problems_of(args, args.prompts, report)
    for note in {note for arm in arms for note in arm.notes}:
        warnings.filterwarnings("ignore", re.escape(note))  # said once, below the table
    path = packaged.resolve(packaged.check_name(args.model), report=report)
    for arm in arms:
        if arm.spec is not None:
            check_model(path, registry.create(**arm.spec))
    if len(problems) < args.prompts:
        report(f"{dataset} has {len(problems)} prompts, fewer than the {args.prompts} of --prompts")
    out = folder_for(args.out, "diagnose")
    with telling_what_is_kept("diagnose", argv, out, report):
        result = diagnose(
            args.model,
            problems,
            arms,
            out=out,
            sampling=sampling,
            dataset=dataset,
            policies=[policy_of(arm, args.at_step, args.of_steps) for arm in arms],
            with_map=args.embedding_map,
            map_words=args.tokens,
            hardware=args.hardware,
            dtype=args.dtype,
            report=report,
        )
    print("", table(result), differences(result), sep="\n\n", end="\n\n", flush=True)
    for warning in result["warnings"]:
        report(f"warning: {warning}")
    report(f"written: {out} ({REPORT} opens in a browser)")
    return 0


def check(argv: Sequence[str]) -> None:
    """Reads words and problems as :func:`run` would; raises ``UsageError`` for bad input."""
    args, _, _ = _read(argv)
    problems_of(args, args.prompts, lambda line: None)
    packaged.check_name(args.model)


def state(argv: Sequence[str], path: Path) -> Literal["finished", "unfinished", "other"]:
    """The state of a folder for the diagnosis of these words: ``other`` where it has other settings.

    Raises:
        UsageError: for bad input, or a damaged file.
    """
    from ngrpo.workbench.diagnose.diagnosis import DiagnosisFolder, map_settings_of, settings_of

    args, sampling, arms = _read(argv)
    problems, dataset = problems_of(args, args.prompts, lambda line: None)
    settings = settings_of(args.model, dataset, problems, sampling, args.dtype)
    drawn = {}
    for arm in arms:
        policy = policy_of(arm, args.at_step, args.of_steps)
        drawn[arm.id] = (arm.spec, policy.described())
    map_settings = map_settings_of(arms, args.tokens) if args.embedding_map else None
    return DiagnosisFolder(path).state(settings, drawn, map_settings)


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, GroupSampling, list[Arm]]:
    """The options, how to sample, and the arms, all checked."""
    from ngrpo.workbench.diagnose.group_sampling import GroupSampling

    args = parser().read(argv)
    if args.tokens and not args.embedding_map:
        raise UsageError("--tokens goes with --embedding-map; add that, or leave --tokens out.")
    args.dtype = args.dtype or profile_for(args.hardware).engine_options.get("dtype", "auto")
    sampling = GroupSampling(args.temperature, args.top_p, args.max_tokens, args.seed, args.group)
    perturbations = _DEFAULT if args.perturbations is None and not args.strategy else args.perturbations
    arms = parse_arms(perturbations, args.sweep, args.strategy, rollouts=True)
    for arm in arms:
        policy_of(arm, args.at_step, args.of_steps).check_temperature(args.temperature)
    return args, sampling, without_repeats(arms, args.at_step, args.of_steps)


def parser() -> CommandParser:
    """The command's flags and its help."""
    command_parser = CommandParser("diagnose")
    command_parser.add_problems(temperature=1.0, top_p=1.0, max_tokens=256)
    add = command_parser.add_argument
    add("--perturbations", metavar="A,B:option=value", help=f"perturbations, with commas [{_DEFAULT}]")
    add("--sweep", action="append", default=[], metavar="perturbation.OPTION=V,V",
        help="one arm per value, for each of --perturbations that has the option; may be repeated",
    )  # fmt: skip
    add("--strategy", action="append", default=[], metavar="'NAME OPTION=V'",
        help="one more arm, taken literally; may be repeated; one that is there already has no second row",
    )  # fmt: skip
    add("--prompts", type=int, default=32, help="only the first N problems [32]")
    add("--group", type=int, default=8, help="responses per prompt [8]")
    add("--embedding-map", action="store_true", help="where some tokens go when they are perturbed")
    add("--tokens", metavar="WORDS", help="words of the embedding map, with commas [ten common ones]")
    add("--hardware", default="auto", help="auto, cpu or cuda [auto]")
    add("--dtype", help="of the model, as vLLM takes it [float32 on a CPU, else auto]")
    add("--out", metavar="DIR", help="the folder [runs/<time>-diagnose]; again: continues there")
    return command_parser
