"""`ngrpo eval`: words in, a folder of samples and a table out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from perturbations.options import nearest

if TYPE_CHECKING:
    from ngrpo.evaluate.engine import Sampling
    from ngrpo.evaluate.problem import Problem

_EXAMPLES = """\
  --perturbation NAME            perturb the rollouts; off unless asked for
  --perturbation.<option> VALUE  and --perturbation.config FILE, as in ngrpo train
  --hardware auto|cpu|cuda       hardware profile
  --vllm.<option> VALUE          any argument of vllm.LLM, for example --vllm.tensor_parallel_size 4

SRC is aime2025, amc23, math500, gpqa_diamond; a JSONL, JSON, CSV or parquet file (verl's and OpenRLHF's layouts,
question and answer columns); or a hub dataset owner/name[:config][@split].

examples
  ngrpo eval --model smollm2-135m --task arithmetic --n 8 --max-tokens 16
  ngrpo eval --model Qwen/Qwen3-0.6B --data aime2025 --n 32 --max-tokens 30000 --out runs/aime
  ngrpo eval --rescore runs/aime
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"ngrpo eval: {message}. See ngrpo eval --help.")


def run(words: list[str], *, report: Callable[[str], None]) -> int:
    """Evaluates, or scores again.

    Args:
        words: everything after ``ngrpo eval``.
        report: called with each line for the user that is not the result.

    Returns:
        The exit code: 0, or 1 where a folder to rescore lacks samples.

    Raises:
        ValueError: for bad input, before any model loads.
    """
    if "-h" in words or "--help" in words:
        print(_parser().format_help(), end="")
        return 0
    from ngrpo.evaluate.evaluation import rescore
    from ngrpo.evaluate.outcome import table

    given, command, engine_options = _read(words)
    for note in command.notes:
        report(f"warning: {note}")
    if given.rescore is not None:
        folder = Path(given.rescore).expanduser()
        result = rescore(folder, scorer=given.scorer, k=given.k, report=report)
        if result is None:
            return 1
    else:
        folder = Path(given.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-eval").expanduser()
        result = _evaluate(given, command, folder, engine_options, report)
    print(table(result, folder), flush=True)
    return 0


def check(words: Sequence[str]) -> None:
    """Reads words and problems as :func:`run` would, and samples nothing.

    Raises:
        ValueError: for bad input: an unknown option, an empty dataset, a problem without an answer.
    """
    given, command, _ = _read(words)
    _sampling(given)
    _problems(given, command, lambda line: None)


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """Our own options, the perturbation's, and the engine's."""
    from ngrpo import flags

    command = flags.parse(words)
    rest, engine_options = _engine_options(command.openrlhf_args)
    refused = {
        "--run-dir": (command.run_dir, "Give --out."),
        "--log-file": (command.log_file, "Redirect the output: 2> FILE."),
        "--preset": (command.preset, "Leave it out."),
        "--advantage": (command.advantage, "Leave it out."),
        "--sampling.*": (command.sampling, "Evaluation has --temperature and --top-p."),
    }
    for flag, (value, mend) in refused.items():
        if value:
            raise ValueError(f"{flag} belongs to ngrpo train. {mend}")
    return _parse(rest), command, engine_options


def _evaluate(
    given: argparse.Namespace, command: Any, folder: Path, engine_options: dict[str, Any], report: Callable[[str], None]
) -> dict[str, Any]:
    from ngrpo import models
    from ngrpo.evaluate.evaluation import evaluate

    sampling = _sampling(given)
    problems = _problems(given, command, report)
    model = models.resolve(given.model, report=report)
    if command.spec is not None:
        from ngrpo.preflight import check_model

        check_model(model, command.spec)
    return evaluate(
        model,
        problems,
        out=folder,
        n=given.n,
        k=given.k,
        sampling=sampling,
        perturbation=command.spec,
        dataset=given.data if command.task is None else f"task {command.task}",
        hardware=command.hardware,
        engine_options=engine_options,
        report=report,
    )


def _sampling(given: argparse.Namespace) -> Sampling:
    """How to draw, with every setting checked, and the model's name with it."""
    from ngrpo import models
    from ngrpo.evaluate.engine import Sampling
    from ngrpo.evaluate.outcome import checked_ks

    if not given.model:
        raise ValueError("no model: give --model NAME, for example --model smollm2-135m, or a model folder.")
    models.check_name(given.model)
    checked_ks(given.k, given.n)
    return Sampling(given.temperature, given.top_p, given.max_tokens, given.seed)


def _problems(given: argparse.Namespace, command: Any, report: Callable[[str], None]) -> list[Problem]:
    from ngrpo.evaluate.problems import load_problems, load_task

    if (given.data is None) == (command.task is None):
        raise ValueError("give the problems by --data SRC or by --task NAME, one of the two.")
    if command.task is not None:
        if given.scorer != "auto":
            raise ValueError(f"--scorer {given.scorer}: a task has its own. Leave --scorer out, or use --data.")
        return load_task(command.task, limit=given.limit)
    return load_problems(
        given.data,
        input_key=given.input_key,
        label_key=given.label_key,
        scorer=given.scorer,
        limit=given.limit,
        instruction=given.instruction,
        skip_unanswered=given.skip_unanswered,
        report=report,
    )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        # argparse keeps its own table of flags; format_usage would only repeat it.
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise ValueError(f"ngrpo eval: unknown word {unknown[0]!r}.{nearest(unknown[0], known)} See ngrpo eval --help.")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ngrpo eval",
        description="Samples n answers per problem through vLLM, checks them, and counts Mean@n and Pass@k.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", "--actor.model_name_or_path", metavar="NAME", help="packaged name, model folder or hub name")
    add("--data", metavar="SRC", help="the problems: benchmark, file or hub dataset, see below")
    add("--task", metavar="NAME", help="the held-out problems of a task: arithmetic, reasoning_gym:DATASET")
    add("--n", type=int, default=32, help="samples per problem [32]")
    add("--k", type=_ks, help="for Pass@k, with commas [those of 1,4,8,16,32 up to n]")
    add("--temperature", type=float, default=0.6, help="[0.6]")
    add("--top-p", type=float, default=0.95, help="[0.95]")
    add("--max-tokens", type=int, default=4096, help="longest answer [4096]")
    add("--seed", type=int, default=0, help="the same seed draws the same samples [0]")
    add("--limit", type=int, help="only the first so many problems")
    add("--scorer", default="auto", help="auto, math, choice, reasoning_gym, or a file with reward_func [auto]")
    add("--input-key", default="input", help="column of prompts in OpenRLHF's layout [input]")
    add("--label-key", default="label", help="column of references in OpenRLHF's layout [label]")
    add("--instruction", metavar="TEXT", help="appended to each question [the answer's form, for bare questions]")
    add("--skip-unanswered", action="store_true", help="leave problems without an answer out")
    add("--out", metavar="DIR", help="samples.jsonl and evaluation.json [runs/<time>-eval]; again: goes on there")
    add("--rescore", metavar="DIR", help="check the samples of a folder again, without generating")
    return parser


def _ks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas, such as 1,4,8") from None


def _engine_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes ``--vllm.<option> VALUE`` out of the words; a switch may stand alone."""
    import yaml

    rest: list[str] = []
    options: dict[str, Any] = {}
    i = 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        i += 1
        if not name.startswith("--vllm."):
            rest.append(words[i - 1])
            continue
        if not equals:
            value = "true"
            if i < len(words) and not words[i].startswith("--"):
                value, i = words[i], i + 1
        options[name.removeprefix("--vllm.").replace("-", "_")] = yaml.safe_load(value)
    return rest, options
