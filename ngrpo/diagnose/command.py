"""`ngrpo diagnose`: words in, a folder and a table out."""

from __future__ import annotations

import argparse
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ngrpo.strategies import Strategy, parse_strategies
from perturbations.options import nearest

_EXAMPLES = """\
SRC is a benchmark's name, a JSONL, JSON, CSV or parquet file, or a hub dataset, as in ngrpo eval.

examples
  ngrpo diagnose --model smollm2-135m --task arithmetic --max-tokens 16
  ngrpo diagnose --model Qwen/Qwen3-0.6B --data math500 --perturbations none,neighbor --sweep perturbation.rate=0.1,0.3
  ngrpo diagnose --model smollm2-135m --task arithmetic --strategy none --strategy 'neighbor rate=1 variant=released'

What each number is: docs/diagnose.md."""
_DEFAULT = "none,neighbor,gaussian,gumbel"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"ngrpo diagnose: {message}. See ngrpo diagnose --help.")


def run(words: list[str], *, report: Callable[[str], None]) -> int:
    """Diagnoses.

    Args:
        words: everything after ``ngrpo diagnose``.
        report: called with each line for the user that is not the result.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: for bad input, before any model loads.
    """
    if "-h" in words or "--help" in words:
        print(_parser().format_help(), end="")
        return 0
    # Read once, when torch loads: threads that spin while they wait take a shared CPU from everybody.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = _parse(words)
    strategies = _strategies(given)
    problems, dataset = _problems(given)
    for note in {note for strategy in strategies for note in strategy.notes}:
        warnings.filterwarnings("ignore", re.escape(note))  # said once, below the table
    _check_model(given.model, strategies, report)

    from ngrpo.diagnose.diagnosis import diagnose
    from ngrpo.diagnose.diagnosis_folder import REPORT
    from ngrpo.diagnose.engine import Sampling
    from ngrpo.diagnose.table import differences, table

    if len(problems) < given.prompts:
        report(f"{dataset} has {len(problems)} prompts, fewer than the {given.prompts} of --prompts")
    out = Path(given.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-diagnose").expanduser()
    result = diagnose(
        given.model,
        problems,
        strategies,
        out=out,
        sampling=Sampling(given.group, given.max_tokens, given.temperature, given.top_p, given.seed),
        dataset=dataset,
        with_map=given.embedding_map,
        map_words=given.tokens,
        hardware=given.hardware,
        dtype=given.dtype,
        report=report,
    )
    print("", table(result), differences(result), sep="\n\n", end="\n\n", flush=True)
    for warning in result["warnings"]:
        report(f"warning: {warning}")
    report(f"written: {out} ({REPORT} opens in a browser)")
    return 0


def _strategies(given: argparse.Namespace) -> list[Strategy]:
    perturbations = given.perturbations
    if perturbations is None and not given.strategy:
        perturbations = _DEFAULT
    return parse_strategies(perturbations, given.sweep, given.strategy)


def _problems(given: argparse.Namespace) -> tuple[list[Any], str]:
    from ngrpo.evaluate import load_problems, load_task

    if (given.data is None) == (given.task is None):
        raise ValueError("give the prompts by --data SRC or by --task NAME, one of the two.")
    if given.task is not None:
        if given.scorer != "auto":
            raise ValueError(f"--scorer {given.scorer}: a task has its own. Leave --scorer out, or use --data.")
        return load_task(given.task, limit=given.prompts), f"task {given.task}"
    problems = load_problems(
        given.data,
        input_key=given.input_key,
        label_key=given.label_key,
        scorer=given.scorer,
        limit=given.prompts,
        split=given.split,
    )
    return problems, given.data


def _check_model(model: str | None, strategies: Sequence[Strategy], report: Callable[[str], None]) -> None:
    from ngrpo import models
    from ngrpo.preflight import check_model

    if not model:
        raise ValueError("no model: give --model NAME, for example --model smollm2-135m, or a model folder.")
    models.check_name(model)
    path = models.resolve(model, report=report)
    for strategy in strategies:
        if strategy.spec is not None:
            check_model(path, strategy.spec)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise ValueError(
            f"ngrpo diagnose: unknown word {unknown[0]!r}.{nearest(unknown[0], known)} See ngrpo diagnose --help."
        )
    for name, fine, allowed in (
        ("--prompts", given.prompts >= 1, "at least 1"),
        ("--group", given.group >= 2, "at least 2: diversity is between the answers of a group"),
        ("--max-tokens", given.max_tokens >= 1, "at least 1"),
        ("--temperature", given.temperature >= 0.0, "at least 0"),
        ("--top-p", 0.0 < given.top_p <= 1.0, "in (0, 1]"),
    ):
        if not fine:
            value = getattr(given, name.removeprefix("--").replace("-", "_"))
            raise ValueError(f"{name} {value}: must be {allowed}.")
    if given.tokens and not given.embedding_map:
        raise ValueError("--tokens goes with --embedding-map; add that, or leave --tokens out.")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ngrpo diagnose",
        description="Before any training: how different the answers of a group are under each strategy, and how valid.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", "--actor.model_name_or_path", metavar="NAME", help="packaged name, model folder or hub name")
    add("--perturbations", metavar="A,B:option=value", help=f"operators, with commas [{_DEFAULT}]")
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="perturbation.OPTION=V,V",
        help="one strategy per value, for each operator of --perturbations that has the option; may be repeated",
    )
    add(
        "--strategy",
        action="append",
        default=[],
        metavar="'NAME OPTION=V'",
        help="one more strategy, as it stands; may be repeated",
    )
    add("--task", metavar="NAME", help="the held-out problems of a task: arithmetic, reasoning_gym:DATASET")
    add("--data", metavar="SRC", help="the problems: benchmark, file or hub dataset")
    add("--split", help="of a hub dataset")
    add("--scorer", default="auto", help="auto, math, choice, reasoning_gym, or a file with reward_func [auto]")
    add("--input-key", default="input", help="column of prompts in OpenRLHF's layout [input]")
    add("--label-key", default="label", help="column of references in OpenRLHF's layout [label]")
    add("--prompts", type=int, default=32, help="only the first so many problems [32]")
    add("--group", type=int, default=8, help="answers per prompt [8]")
    add("--max-tokens", type=int, default=256, help="longest answer [256]")
    add("--temperature", type=float, default=1.0, help="[1]")
    add("--top-p", type=float, default=1.0, help="[1]")
    add("--seed", type=int, default=0, help="the same for all strategies; the same seed draws the same samples [0]")
    add("--embedding-map", action="store_true", help="where some tokens go when they are perturbed")
    add("--tokens", metavar="WORDS", help="words of the embedding map, with commas [ten common ones]")
    add("--hardware", default="auto", help="auto, cpu or cuda [auto]")
    add("--dtype", default="auto", help="of the model, as vLLM takes it [auto]")
    add("--out", metavar="DIR", help="the folder [runs/<time>-diagnose]; again: goes on there")
    return parser
