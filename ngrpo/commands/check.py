# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo check [gate|advantage] NAME [option=value ...]

Runs the conformance suite on a small synthetic model: no engine, no download,
a second or so.

examples
  ngrpo check ./mine.py:Mine               a class in a file; :Name may be left
                                           out where there is one
  ngrpo check ./mine.py:Mine share=0.5     with options of its own
  ngrpo check my_package.module:Mine       a class in an importable module
  ngrpo check neighbor k=4                 a registered name
  ngrpo check gate ./my_gate.py:MyGate     a gate
  ngrpo check advantage ./mine.py:Mine     an advantage
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from ngrpo.config.kinds import KINDS
from perturbations.errors import UsageError

# What a title says before the name of the step that it is about.
_STEP = re.compile("^(proposals for|open rows for|advantages of) ")


def run(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Prints one line per check, and what is wrong and how to fix it where one fails."""
    kind = KINDS.get(argv[0]) if len(argv) > 1 else None
    if kind is not None and not kind.suite:
        raise UsageError(
            f"ngrpo check {kind.name}: there is no conformance suite for this kind, but for"
            f" {', '.join(name for name, known in KINDS.items() if known.suite)}. Run the test that ngrpo new wrote"
            " beside the file."
        )
    name, *arguments = argv if kind is None else argv[1:]
    kind = kind or KINDS["perturbation"]
    broken, problems = 0, set()
    for title, error in kind.inspect(name, **_options(arguments)):
        print(f"{'ok   ' if error is None else 'WRONG'}  {title}")
        if error is None:
            continue
        broken += 1
        what = error.what.partition(f"{_STEP.sub('', title)}: ")
        if (what[2] or what[0], error.fix) in problems:
            print("       as above")
            continue
        problems.add((what[2] or what[0], error.fix))
        _tell("what", error.what)
        _tell("fix", error.fix)
    if broken:
        report(f"{name} breaks the contract that {kind.error_context} on ({broken} of the checks).")
        return 1
    prefix = "--perturbation NAME " if kind.part_of_perturbation else ""
    report(f"{name} keeps the contract. Use it: ngrpo train {prefix}{kind.flag} {name} ...")
    return 0


def _tell(label: str, text: str) -> None:
    indent = " " * 13
    print(
        textwrap.fill(text, 110, initial_indent=f"       {label}: ", subsequent_indent=indent, break_long_words=False)
    )


def _options(argv: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"ngrpo check: {word!r} must be option=value, for example rate=0.2.")
        options[name] = value
    return options
