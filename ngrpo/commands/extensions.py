# SPDX-License-Identifier: Apache-2.0
"""`ngrpo list`, `ngrpo check` and `ngrpo new`: the registered extensions, and a user's own."""

import inspect
import keyword
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ngrpo.commands import method_texts
from ngrpo.config.compatibility import page
from ngrpo.config.kinds import KINDS, Kind
from ngrpo.machine.colors import state_column
from ngrpo.machine.console import Report, docstring, hanging, help_entry
from ngrpo.machine.storage.result_folder import writing
from perturbations import user_files
from perturbations.errors import UsageError, nearest


def usage(command: str, argv: Sequence[str]) -> str:
    """The docstring of a command, with the kinds."""
    lines: list[str] = []
    for kind in KINDS.values():
        lines += help_entry(f"  {kind.name}", kind.about, column=21)
    text = inspect.cleandoc(docstring(globals()[f"run_{command}"]))
    return text.replace("{kinds}", "\n".join(lines)) + "\n"


def run_list(argv: Sequence[str], *, report: Report) -> int:
    """usage: ngrpo list [NAME | compatibility]

    Lists all perturbations, gates, advantages and the other kinds of `ngrpo new`,
    from the tree and from installed packages, with their papers. With a name: its
    options with ranges and defaults. compatibility: the table of refused
    combinations (docs/compatibility.md).

    examples
      ngrpo list
      ngrpo list neighbor
      ngrpo list compatibility
      ngrpo list ./mine.py:Mine
    """
    if len(argv) > 1:
        raise UsageError(f"ngrpo list takes one name at most, got {' '.join(argv)!r}.")
    if not argv:
        print(method_texts.listing(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    elif argv[0] == "compatibility":
        print(page())
    else:
        print(method_texts.described(argv[0]))
    return 0


def run_check(argv: Sequence[str], *, report: Report) -> int:
    """usage: ngrpo check [KIND] NAME [option=value ...]

    Runs the conformance suite on a small synthetic model: no engine, no download,
    seconds. KIND [perturbation]: one of

    {kinds}

    examples
      ngrpo check ./mine.py:Mine               a class in a file; :Name may be left
                                               out where there is one
      ngrpo check ./mine.py:Mine share=0.5     with options of its own
      ngrpo check my_package.module:Mine       a class in an importable module
      ngrpo check neighbor k=4                 a registered name
      ngrpo check gate ./my_gate.py:MyGate     a gate
      ngrpo check advantage ./mine.py:Mine     an advantage
      ngrpo check credit ./mine.py:Mine        a credit
    """
    kind = KINDS["perturbation"]
    words = list(argv)
    if len(words) > 1 and words[0] in KINDS:
        kind = KINDS[words.pop(0)]
    name, *arguments = words
    if arguments and user_files.split(name) is None and user_files.split(arguments[0]) is not None:
        raise UsageError(f"ngrpo check: unknown kind {name!r}.{nearest(name, KINDS)} Kinds: {', '.join(KINDS)}.")
    options = {}
    for word in arguments:
        option, equals, value = word.partition("=")
        if not (option and equals):
            kind_hint = nearest(name, KINDS)  # a misspelt kind is taken for the name, and the name for an option
            raise UsageError(f"ngrpo check: {word!r} must be option=value, for example rate=0.2.{kind_hint}")
        options[option] = value
    from perturbations.testing import NotRun

    hidden_note = kind.registry.hidden_note(name)
    if hidden_note:
        report(f"warning: {hidden_note}")
    failed_checks = 0
    printed_problems = set()
    for title, error in kind.inspect(name, **options):
        if error is None:
            print(f"{state_column('ok', 9)}{title}")
            continue
        if isinstance(error, NotRun):
            print(f"{state_column('not run', 9)}{title}")
            continue
        print(f"{state_column('WRONG', 9)}{title}")
        failed_checks += 1
        # Several checks may find the same problem. A message names its check, so the check's name is taken out of it.
        checked = re.sub("^(proposals for|open rows for|advantages of) ", "", title)
        before, _, after = error.what.partition(f"{checked}: ")
        problem = (after or before, error.fix)
        if problem in printed_problems:
            print(f"{' ' * 9}as above")
            continue
        printed_problems.add(problem)
        print(f"{' ' * 9}what: {hanging(error.what, ' ' * 15)}")
        print(f"{' ' * 9}fix:  {hanging(error.fix, ' ' * 15)}")
    if failed_checks:
        report(f"{name} breaks {kind.contract} ({failed_checks} of the checks).")
        return 1
    prefix = "--perturbation NAME " if kind.part_of_perturbation else ""
    report(f"{name} keeps the contract. Use it: ngrpo train {prefix}{kind.flag} {name} ...")
    return 0


def run_new(argv: Sequence[str], *, report: Report) -> int:
    """usage: ngrpo new KIND NAME [FOLDER]

    Writes NAME.py, a small working example of its KIND, and test_NAME.py into the
    folder [the current one]. Change the formula in the first and the numbers in the
    second.

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
    name = rest[0]
    folder = Path(rest[1] if len(rest) == 2 else ".").expanduser()
    _check_new_name(kind, name)
    file = folder / f"{name}.py"
    test_file = folder / f"test_{name}.py"
    for path in (file, test_file):
        if path.exists():
            raise UsageError(f"ngrpo new {word} {name}: {path} exists. Give another name or folder, or remove it.")
    class_name = "".join(syllable.capitalize() for syllable in name.split("_"))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in ((file, kind.template()), (test_file, kind.template("test_"))):
            path.write_text(Template(template).substitute(name=name, Class=class_name), encoding="utf-8")
    report(f"wrote {file} and {test_file}")
    address = str(file) if file.is_absolute() else f"./{file}"
    is_perturbation = word == "perturbation"
    kind_word = "" if is_perturbation else f"{word} "
    report(f"check it:  ngrpo check {kind_word}{address}")
    report(f"test it:   pytest {test_file}")
    needed_perturbation = "--perturbation neighbor " if kind.part_of_perturbation else ""
    report(f"use it:    ngrpo train {needed_perturbation}{kind.flag} {address} ...")
    if is_perturbation:
        report(f"try it:    ngrpo compare --model sandbox --task shortcut:late --perturbations none,{address}")
        report("           ten minutes on two cores: does it get away from a shortcut on which plain GRPO settles?")
    return 0


def _check_new_name(kind: Kind, name: str) -> None:
    """Raises ``UsageError`` for a name that an extension of this kind cannot have."""
    if not _is_name(name):
        with_underscores = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        better = re.sub(r"\W+", "_", with_underscores).strip("_").lower()
        hint = f" Write {better!r}?" if _is_name(better) else ""
        raise UsageError(
            f"ngrpo new: the name {name!r} must be lower-case letters, digits and underscores, begin with a letter, and"
            f" be no word of Python's.{hint}"
        )
    if name.startswith("test_"):
        raise UsageError(f"ngrpo new: the name {name!r} begins as a test's file does. Leave 'test_' out.")
    if name in kind.registry.available():
        raise UsageError(
            f"ngrpo new: the name {name!r} is taken: there is a {kind.registry.kind} of this name (ngrpo list {name})."
        )
    if find_spec(name) is not None:
        raise UsageError(
            f"ngrpo new: the name {name!r} is that of a Python module, which a file {name}.py would hide. Give another"
            " one."
        )


def _is_name(name: str) -> bool:
    """Whether a name can be a file's, a module's and a flag's value alike."""
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None and not keyword.iskeyword(name)
