# SPDX-License-Identifier: Apache-2.0
"""Prints docs/cli.md, the reference of the command line, from the help of each command.

    PYTHONPATH=. python docs/_site/cli_page.py > docs/cli.md

The help of ``ngrpo train`` also lists the options of every method. The page leaves them to the methods' own pages.
"""

from __future__ import annotations

import contextlib
import io
import re

from ngrpo import cli

INTRODUCTION = """\
# Command line

The help of each command of `ngrpo`, as `ngrpo COMMAND --help` prints it. Each command exits with 0 if it succeeded, \
with 1 after a failed run, with 2 for bad input, with 130 after Ctrl-C, with 143 after SIGTERM and with 129 if the \
terminal was closed.

This page is written by `python docs/_site/cli_page.py`."""
GATE = "options of every perturbation (the gate)"
"""The first of the sections of ``ngrpo train --help`` that list options of methods; this one stays on the page."""


def page() -> str:
    """The page in Markdown, commands in the order of ``ngrpo --help``."""
    parts = [INTRODUCTION, "## ngrpo", in_a_block(help_of())]
    for command in cli.COMMANDS:
        text = help_of(command)
        parts.append(f"## ngrpo {command}")
        if command == "train":
            parts.append(in_a_block(without_methods(text)))
            parts.append(
                "The help goes on with the options of each method. `ngrpo list NAME` prints those of one method; the"
                " tables of [perturbations](methods.md) and of [other methods](exploration.md) name all methods."
            )
        else:
            parts.append(in_a_block(text))
    return "\n\n".join(parts) + "\n"


def help_of(command: str | None = None) -> str:
    """What ``ngrpo COMMAND --help`` prints, or ``ngrpo --help``."""
    words = ["--help"] if command is None else [command, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(words)
    return printed.getvalue().strip("\n")


def without_methods(text: str) -> str:
    """The help of ``ngrpo train`` up to the gate's options and with them, without the sections that follow."""
    before, gate, after = text.partition(GATE)
    own_options = re.split(r"\n\n(?=\S)", after, maxsplit=1)[0]
    return f"{before}{gate}{own_options}"


def in_a_block(text: str) -> str:
    """The text as a fenced block."""
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    print(page(), end="")
