# SPDX-License-Identifier: Apache-2.0
"""Prints docs/cli.md, the reference of the command line, from the help of each command.

    PYTHONPATH=. python docs/_site/cli_page.py > docs/cli.md

The options of methods are on the methods' own pages.
"""

from __future__ import annotations

import contextlib
import io

from ngrpo import cli

INTRODUCTION = """\
# Command line

The help of each command of `ngrpo`, as `ngrpo COMMAND --help` prints it. Each command exits with 0 if it succeeded, \
with 1 after a failed run, with 2 for bad input, with 130 after Ctrl-C, with 143 after SIGTERM and with 129 if the \
terminal was closed.

This page is written by `python docs/_site/cli_page.py`."""


def page() -> str:
    """The page in Markdown, commands in the order of ``ngrpo --help``."""
    paragraphs = [INTRODUCTION, "## ngrpo", in_a_block(help_of())]
    for command in cli.COMMANDS:
        paragraphs.append(f"## ngrpo {command}")
        paragraphs.append(in_a_block(help_of(command)))
        if command == "train":
            paragraphs.append(
                "`ngrpo train --help NAME` prints the options of a method, `ngrpo list NAME` its description too. The"
                " tables of [perturbations](methods.md) and of [other methods](exploration.md) say what each does."
            )
    return "\n\n".join(paragraphs) + "\n"


def help_of(command: str | None = None) -> str:
    """What ``ngrpo COMMAND --help`` prints, or ``ngrpo --help``."""
    words = ["--help"] if command is None else [command, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(words)
    return printed.getvalue().strip("\n")


def in_a_block(text: str) -> str:
    """The text as a fenced block."""
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    print(page(), end="")
