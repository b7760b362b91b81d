# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo new KIND NAME [FOLDER]

Writes NAME.py, a small one that works, and test_NAME.py into the folder [the
current one]. Change the formula in the first and the numbers in the second.

  perturbation   what the model is fed in place of a sampled token
  gate           where a perturbation acts
  advantage      what the rewards of one prompt's answers become
  credit         how an answer's advantage is shared among its tokens
  policy_noise   noise on the weights that roll out
  sampling_schedule
                 temperatures that change within an answer or over a run
  replay_buffer  where finished trajectories wait for the trainer

examples
  ngrpo new perturbation damp
  ngrpo new gate at_end my_gates/
  pytest test_damp.py
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ngrpo.catalogue import KINDS
from ngrpo.result_folder import writing
from perturbations.errors import UsageError
from perturbations.options import nearest
from perturbations.registry import Registry

_REGISTRIES = {registry.kind.replace(" ", "_"): registry for registry in KINDS}
_CHECKED = ("perturbation", "gate", "advantage")  # the kinds that `ngrpo check` knows


def run(words: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Writes the two files.

    Args:
        words: everything after ``ngrpo new``.
        report: called with each line for the user.

    Returns:
        0, or 2 where no words are given.

    Raises:
        UsageError: for an unknown kind, a name that cannot be one, or a file that exists.
    """
    if not words or "-h" in words or "--help" in words:
        print(__doc__, end="")
        return 0 if words else 2
    kind, *rest = words
    if kind not in _REGISTRIES:
        raise UsageError(
            f"ngrpo new {kind}: unknown kind.{nearest(kind, _REGISTRIES)} Kinds: {', '.join(_REGISTRIES)}."
        )
    if not 1 <= len(rest) <= 2:
        raise UsageError(f"ngrpo new {kind} takes a name and at most a folder, got {' '.join(rest)!r}.")
    name, folder = rest[0], Path(rest[1] if len(rest) == 2 else ".").expanduser()
    _check_name(_REGISTRIES[kind], name)
    made = {folder / f"{name}.py": kind, folder / f"test_{name}.py": f"test_{kind}"}
    for path in made:
        if path.exists():
            raise UsageError(f"ngrpo new {kind} {name}: {path} exists. Give another name or folder, or remove it.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in made.items():
            path.write_text(_filled(template, name), encoding="utf-8")
    file, test = made
    report(f"wrote {file} and {test}")
    address = f"./{file}" if not file.is_absolute() else str(file)
    if kind in _CHECKED:
        report(f"check it:  ngrpo check {'' if kind == 'perturbation' else kind + ' '}{address}")
    report(f"test it:   pytest {test}")
    report(f"use it:    ngrpo train {_use(kind)} {address} ...")
    if kind == "perturbation":
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
    text = files("ngrpo.new").joinpath(f"templates/{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(name=name, Class="".join(part.capitalize() for part in name.split("_")))


def _use(kind: str) -> str:
    flag = KINDS[_REGISTRIES[kind]]
    return f"--perturbation neighbor {flag}" if flag.startswith("--perturbation.") else flag
