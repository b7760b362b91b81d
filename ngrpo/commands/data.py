# SPDX-License-Identifier: Apache-2.0
"""Writes problems with their answers, one JSON object per line: "input", a list of
chat messages, and "label", the answer. ngrpo train and ngrpo eval read that.

NAME is deepscaler, aime2024, aime2025, amc23, math500 or gpqa_diamond, which
are loaded from the hub (gpqa_diamond is gated: HF_TOKEN); or a file or hub
dataset, as ngrpo eval --data takes it. --from reads a named set from a file.

examples
  ngrpo data deepscaler
  ngrpo data aime2025 --from downloads/aime2025.parquet
  ngrpo data my_problems.csv --out data/mine.jsonl --plain
  ngrpo train --data.prompt_dataset data/deepscaler.jsonl \\
      --data.label_key label --data.apply_chat_template \\
      --reward.remote_url examples/recipes/math_reward.py ...
"""

from pathlib import Path

from ngrpo.commands.command_parser import CommandParser
from ngrpo.machine.console import Report
from ngrpo.machine.storage.result_folder import json_lines, write_text, writing
from ngrpo.workbench import evaluate
from perturbations.errors import UsageError


def run(argv: list[str], *, report: Report) -> int:
    """Writes a dataset."""
    args = parser().read(argv)
    source = args.source or args.name
    out = Path(args.out or _default_file(args.name, plain=args.plain)).expanduser()
    if out.exists():
        raise UsageError(f"{out} exists. Remove it, or give another file with --out.")
    problems = evaluate.load_problems(
        source,
        limit=args.limit,
        split=args.split,
        instruction=args.instruction,
        skip_unanswered=True,
        report=report,
    )
    rows = []
    for problem in problems:
        prompt: object = _plain_text(problem) if args.plain else [dict(message) for message in problem.messages]
        # A problem of reasoning-gym has a label with all that its scorer needs.
        label = problem.meta.get("label", problem.answer)
        rows.append({"input": prompt, "label": label, **problem.template})
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json_lines(rows))
    report(f"{len(rows)} problems of {source}: {out}")
    return 0


def _default_file(name: str, *, plain: bool) -> str:
    """The file of a dataset for which ``--out`` names none."""
    stem = Path(name).stem.lower().replace("-", "_")
    if plain:
        return f"data/{stem}_plain.jsonl"
    return f"data/{stem}.jsonl"


def _plain_text(problem: evaluate.Problem) -> str:
    """The texts of a problem's messages, with blank lines between them."""
    has_tools = problem.template or any(message["content"] is None for message in problem.messages)
    if has_tools:
        raise UsageError(f"--plain: {problem.id} has tools, which no text shows. Leave --plain out.")
    return "\n\n".join(message["content"] or "" for message in problem.messages)


def parser() -> CommandParser:
    """The command's flags and its help."""
    command_parser = CommandParser("data")
    add = command_parser.add_argument
    add("name", metavar="NAME", help="the problems, see below")
    add("--from", dest="source", metavar="SRC", help="a file or hub dataset with them")
    add("--out", metavar="FILE", help="where to [data/NAME.jsonl]")
    add("--plain", action="store_true", help="texts instead of messages, for models without a chat template")
    add("--instruction", metavar="TEXT", help="appended to each question [the answer's form, for bare questions]")
    add("--split", help="of a hub dataset")
    add("--limit", type=int, help="only the first N")
    return command_parser
