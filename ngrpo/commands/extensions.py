# SPDX-License-Identifier: Apache-2.0
"""`ngrpo list`, `ngrpo check` and `ngrpo new`: the registered extensions, and a user's own."""

import inspect
import keyword
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ngrpo.config.compatibility import page
from ngrpo.config.kinds import KINDS
from ngrpo.machine.console.catalogue import described, listing
from ngrpo.machine.console.text import help_entry
from ngrpo.machine.storage.result_folder import writing
from perturbations.errors import UsageError, nearest


def usage(command: str, argv: Sequence[str]) -> str:
    """The docstring of a command, with the kinds."""
    lines = (line for kind in KINDS.values() for line in help_entry(f"  {kind.name}", kind.about, column=21))
    text = inspect.cleandoc(globals()[f"run_{command}"].__doc__)
    return text.replace("{kinds}", "\n".join(lines)) + "\n"


def run_list(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """usage: ngrpo list [NAME | compatibility]

    All perturbations, gates, advantages and the other kinds of `ngrpo new`: in the
    tree, of installed packages, and their papers. With a name: its options with
    ranges and defaults. compatibility: the table of refused combinations
    (docs/compatibility.md).

    examples
      ngrpo list
      ngrpo list neighbor
      ngrpo list compatibility
      ngrpo list ./mine.py:Mine
    """
    if len(argv) > 1:
        raise UsageError(f"ngrpo list takes one name at most, got {' '.join(argv)!r}.")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(page() if argv == ["compatibility"] else described(argv[0]) if argv else listing(width))
    return 0


def run_check(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
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
    kind = KINDS.get(argv[0]) if len(argv) > 1 else None
    if kind is not None and not kind.suite:
        raise UsageError(
            f"ngrpo check {kind.name}: there is no conformance suite for this kind, but for"
            f" {', '.join(name for name, known in KINDS.items() if known.suite)}. Run the test that ngrpo new wrote"
            "."
        )
    name, *arguments = argv if kind is None else argv[1:]
    kind = kind or KINDS["perturbation"]
    options = {option: value for option, _, value in (word.partition("=") for word in arguments)}
    for word in arguments:
        if not re.match("[^=]+=", word):
            raise UsageError(f"ngrpo check: {word!r} must be option=value, for example rate=0.2.")
    broken, problems = 0, set()
    for title, error in kind.inspect(name, **options):
        print(f"{'ok   ' if error is None else 'WRONG'}  {title}")
        if error is None:
            continue
        broken += 1
        # Several steps may have the same problem: a message names its step, which the title has behind these words.
        step = re.sub("^(proposals for|open rows for|advantages of) ", "", title)
        before, _, after = error.what.partition(f"{step}: ")
        if (after or before, error.fix) in problems:
            print("       as above")
            continue
        problems.add((after or before, error.fix))
        wrap = textwrap.TextWrapper(110, subsequent_indent=" " * 13, break_long_words=False)
        print(wrap.fill(f"       what: {error.what}"), wrap.fill(f"       fix: {error.fix}"), sep="\n")
    if broken:
        report(f"{name} breaks the contract that {kind.error_context} on ({broken} of the checks).")
        return 1
    prefix = "--perturbation NAME " if kind.part_of_perturbation else ""
    report(f"{name} keeps the contract. Use it: ngrpo train {prefix}{kind.flag} {name} ...")
    return 0


def run_new(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """usage: ngrpo new KIND NAME [FOLDER]

    Writes NAME.py, a small one that works, and test_NAME.py into the folder [the
    current one]. Change the formula in the first and the numbers in the second.

    {kinds}

    examples
      ngrpo new perturbation damp
      ngrpo new gate at_end my_gates/
      pytest test_damp.py
    """
    word, *rest = argv
    if word not in KINDS:
        raise UsageError(f"ngrpo new {word}: unknown kind.{nearest(word, KINDS)} Kinds: {', '.join(KINDS)}.")
    kind = KINDS[word]
    if not 1 <= len(rest) <= 2:
        raise UsageError(f"ngrpo new {word} takes a name and at most a folder, got {' '.join(rest)!r}.")
    name, folder = rest[0], Path(rest[1] if len(rest) == 2 else ".").expanduser()
    subject = f"ngrpo new: the name {name!r}"
    if not _is_name(name):
        better = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()
        hint = f" Write {better!r}?" if _is_name(better) else ""
        raise UsageError(
            f"{subject} must be lower-case letters, digits and underscores, begin with a letter, and be no word of"
            f" Python's.{hint}"
        )
    if name.startswith("test_"):
        raise UsageError(f"{subject} begins as a test's file does. Leave 'test_' out.")
    if name in kind.registry.available():
        raise UsageError(f"{subject} is taken: there is a {kind.registry.kind} of this name (ngrpo list {name}).")
    if find_spec(name) is not None:
        raise UsageError(f"{subject} is that of a Python module, which a file {name}.py would hide. Give another one.")
    file, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (file, test):
        if path.exists():
            raise UsageError(f"ngrpo new {word} {name}: {path} exists. Give another name or folder, or remove it.")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in ((file, kind.template()), (test, kind.template("test_"))):
            path.write_text(Template(template).substitute(name=name, Class=class_name), encoding="utf-8")
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


def _is_name(name: str) -> bool:
    """Whether a name can be a file's, a module's and a flag's value alike."""
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None and not keyword.iskeyword(name)
