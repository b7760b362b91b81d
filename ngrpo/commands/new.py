# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo new KIND NAME [FOLDER]

Writes NAME.py, a small one that works, and test_NAME.py into the folder [the
current one]. Change the formula in the first and the numbers in the second.

{kinds}

examples
  ngrpo new perturbation damp
  ngrpo new gate at_end my_gates/
  pytest test_damp.py
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ngrpo.config.kinds import KINDS
from ngrpo.machine.console.text import help_entry
from ngrpo.machine.storage.result_folder import writing
from perturbations.errors import UsageError
from perturbations.options import nearest
from perturbations.registry import Registry


def usage(argv: Sequence[str]) -> str:
    """The docstring with the kinds."""
    lines = (line for kind in KINDS.values() for line in help_entry(f"  {kind.name}", kind.about, column=21))
    return (__doc__ or "").replace("{kinds}", "\n".join(lines))


def run(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Writes the two files."""
    word, *rest = argv
    if word not in KINDS:
        raise UsageError(f"ngrpo new {word}: unknown kind.{nearest(word, KINDS)} Kinds: {', '.join(KINDS)}.")
    kind = KINDS[word]
    if not 1 <= len(rest) <= 2:
        raise UsageError(f"ngrpo new {word} takes a name and at most a folder, got {' '.join(rest)!r}.")
    name, folder = rest[0], Path(rest[1] if len(rest) == 2 else ".").expanduser()
    _check_name(kind.registry, name)
    templates = {folder / f"{name}.py": kind.template(), folder / f"test_{name}.py": kind.template("test_")}
    for path in templates:
        if path.exists():
            raise UsageError(f"ngrpo new {word} {name}: {path} exists. Give another name or folder, or remove it.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in templates.items():
            path.write_text(_filled(template, name), encoding="utf-8")
    file, test = templates
    report(f"wrote {file} and {test}")
    address = f"./{file}" if not file.is_absolute() else str(file)
    if kind.suite:
        report(f"check it:  ngrpo check {'' if word == 'perturbation' else word + ' '}{address}")
    report(f"test it:   pytest {test}")
    beside = "--perturbation neighbor " if kind.part_of_perturbation else ""
    report(f"use it:    ngrpo train {beside}{kind.flag} {address} ...")
    if word == "perturbation":
        report(f"try it:    ngrpo compare --model sandbox --task shortcut:late --perturbations none,{address}")
        report("           ten minutes on two cores: does it get away from a shortcut on which plain GRPO settles?")
    return 0


def _check_name(registry: Registry, name: str) -> None:
    """Raises ``UsageError`` for a name that cannot be a file's, a module's and a flag's value alike."""
    subject = f"ngrpo new: the name {name!r}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        better = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()
        hint = (
            f" Write {better!r}?" if re.fullmatch(r"[a-z][a-z0-9_]*", better) and not keyword.iskeyword(better) else ""
        )
        raise UsageError(
            f"{subject} must be lower-case letters, digits and underscores, begin with a letter, and be no word of"
            f" Python's.{hint}"
        )
    if name.startswith("test_"):
        raise UsageError(f"{subject} begins as a test's file does. Leave 'test_' out.")
    if name in registry.available():
        raise UsageError(f"{subject} is taken: there is a {registry.kind} of this name (ngrpo list {name}).")
    if find_spec(name) is not None:
        raise UsageError(f"{subject} is that of a Python module, which a file {name}.py would hide. Give another one.")


def _filled(template: str, name: str) -> str:
    return Template(template).substitute(name=name, Class="".join(part.capitalize() for part in name.split("_")))
