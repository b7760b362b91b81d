# SPDX-License-Identifier: Apache-2.0
"""The command line of the workbench's commands: errors, the model, and the problems."""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ngrpo.machine.console import Report, docstring
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.openrlhf_flags import Flags, left_over
from ngrpo.workbench import evaluate
from perturbations.errors import UsageError

# How problems of --data are read: options with their defaults.
_OF_DATA = {
    "split": None,
    "scorer": "auto",
    "input_key": None,
    "label_key": None,
    "instruction": None,
    "skip_unanswered": False,
}


class CommandParser(argparse.ArgumentParser):
    """A parser with errors of class :class:`UsageError`, and with the nearest match for an unknown flag."""

    def __init__(self, command: str) -> None:
        """Makes the parser of ``ngrpo COMMAND``; its help is its module's docstring, the flags after the summary."""
        summary, _, more = docstring(sys.modules[f"ngrpo.commands.{command}"]).partition("\n\n")
        layout = partial(argparse.RawDescriptionHelpFormatter, width=80)
        super().__init__(prog=f"ngrpo {command}", epilog=more, formatter_class=layout, allow_abbrev=False)
        self.description = "\n".join(textwrap.fill(line, 80) for line in summary.splitlines())

    def error(self, message: str) -> NoReturn:
        """Raises a :class:`UsageError` instead of ending the process."""
        raise UsageError(f"{self.prog}: {message}. See {self.prog} --help.")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses; a word too many is an error that says which flag does not take it, or names the nearest flag."""
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown:
            raise UsageError(f"{self.prog}: {left_over(unknown[0], argv, self._actions)} See {self.prog} --help.")
        return namespace

    def add_problems(self, temperature: float, top_p: float, max_tokens: int) -> None:
        """Adds the flags of the model, the problems and the sampling; the arguments are the sampling's defaults."""
        add = self.add_argument
        add("--model", "--actor.model_name_or_path", metavar="NAME", help="packaged name, model folder or hub name")
        add("--data", metavar="SRC", help="the problems: benchmark, file or hub dataset, see below")
        add("--split", help="of a hub dataset")
        add("--task", metavar="NAME", help="the held-out problems of a task, as in ngrpo train --help")
        add(
            "--scorer",
            default=_OF_DATA["scorer"],
            help="auto, math, choice, reasoning_gym, or a file with reward_func [auto]",
        )
        add("--input-key", help="column of prompts [by the columns' names]")
        add("--label-key", help="column of references [by the columns' names]")
        add("--instruction", metavar="TEXT", help="appended to each question [the answer's form, for bare questions]")
        add("--chat_template_kwargs", metavar="NAME=VALUE", help="the chat template's own arguments, with commas")
        add("--input-template", metavar="TEXT", help="a text with {} for the prompt, in place of the chat template, as"
            " in a training without --data.apply_chat_template: '{}'")  # fmt: skip
        add("--skip-unanswered", action="store_true", help="leave problems without an answer out")
        add("--temperature", type=float, default=temperature, help=f"[{temperature:g}]")
        add("--top-p", type=float, default=top_p, help=f"[{top_p:g}]")
        add("--max-tokens", type=int, default=max_tokens, help=f"longest response [{max_tokens}]")
        add("--seed", type=int, default=0, help="the same seed draws the same samples [0]")
        add("--at-step", type=int, default=0, help="training step of schedules and noises, from 0 [0]")
        add("--of-steps", type=int, help="training steps of the run, which some noises need")


@contextmanager
def telling_what_is_kept(command: str, argv: Sequence[str], folder: Path, report: Report) -> Iterator[None]:
    """Where the block is interrupted, reports the folder of the kept results, and the command that continues."""
    try:
        yield
    except KeyboardInterrupt:
        continuing = ["ngrpo", command, *argv]
        if not Flags(argv).has("--out"):
            continuing += ["--out", str(folder)]
        report(f"ended early; what was finished is kept in {folder}. Go on with: {shlex.join(continuing)}")
        raise


def problems_of(args: argparse.Namespace, limit: int | None, report: Report) -> tuple[list[evaluate.Problem], str]:
    """The problems, and the dataset's name in the result; ``UsageError`` for an empty dataset or a missing answer."""
    if (args.data is None) == (args.task is None):
        raise UsageError("give the problems by --data SRC or by --task NAME, one of the two.")
    template = conversation.template_arguments(args.chat_template_kwargs)
    if args.input_template is not None:
        if template:
            raise UsageError(f"{conversation.FLAG} has no effect with --input-template. Leave one of them out.")
        if not conversation.is_input_template(args.input_template):
            raise UsageError(f"--input-template {args.input_template}: must be {conversation.INPUT_TEMPLATES}.")
        template = {conversation.INPUT_TEMPLATE: args.input_template}
    common = {"limit": limit, "template": template}
    if args.task is not None:
        for name, default in _OF_DATA.items():
            value = getattr(args, name)
            if value != default:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {value}: a task has its own. Leave {flag} out, or use --data.")
        return evaluate.load_task(args.task, **common), f"task {args.task}"
    options: dict[str, Any] = {name: getattr(args, name) for name in _OF_DATA}
    return evaluate.load_problems(args.data, report=report, **common, **options), args.data
