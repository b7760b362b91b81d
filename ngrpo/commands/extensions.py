# SPDX-License-Identifier: Apache-2.0
"""`ngrpo list`, `ngrpo check` and `ngrpo new`: the registered extensions, and a user's own."""

import dataclasses
import inspect
import keyword
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ngrpo.config.compatibility import page
from ngrpo.config.kinds import FLAGS, KINDS, run_level_kinds
from ngrpo.machine.console import Report, docstring, help_entry, text_table
from ngrpo.machine.storage.result_folder import writing
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import Perturbation, registry
from perturbations.errors import UsageError, nearest
from perturbations.options import allowed, kinds


def usage(command: str, argv: Sequence[str]) -> str:
    """The docstring of a command, with the kinds."""
    lines = (line for kind in KINDS.values() for line in help_entry(f"  {kind.name}", kind.about, column=21))
    text = inspect.cleandoc(docstring(globals()[f"run_{command}"]))
    return text.replace("{kinds}", "\n".join(lines)) + "\n"


def run_list(argv: Sequence[str], *, report: Report) -> int:
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


def run_check(argv: Sequence[str], *, report: Report) -> int:
    """usage: ngrpo check [gate|advantage] NAME [option=value ...]

    Runs the conformance suite on a small synthetic model: no engine, no download,
    seconds.

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
        others = ", ".join(name for name, known in KINDS.items() if known.suite)
        absent = f"there is no conformance suite for this kind, but for {others}"
        raise UsageError(f"ngrpo check {kind.name}: {absent}. Run the test that ngrpo new wrote.")
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
        report(f"{name} breaks {kind.contract} ({broken} of the checks).")
        return 1
    prefix = "--perturbation NAME " if kind.part_of_perturbation else ""
    report(f"{name} keeps the contract. Use it: ngrpo train {prefix}{kind.flag} {name} ...")
    return 0


def run_new(argv: Sequence[str], *, report: Report) -> int:
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
        form = "lower-case letters, digits and underscores, begin with a letter, and be no word of Python's"
        raise UsageError(f"{subject} must be {form}.{hint}")
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


# ---- the registries as text, for `ngrpo list` and `ngrpo train --help` ----


def listing(width: int | None = None) -> str:
    """One table of everything registered: perturbations, gates, replay buffers, advantages, credits and so on.

    Descriptions are below their rows where a line would be longer than ``width``; None: a line for each, for `grep`.
    """
    rows: list[tuple[str, ...]] = []  # name, rate, source, paper, description
    for kind_registry in FLAGS:
        has_rate = kind_registry is registry.perturbations
        paper = "paper" if hasattr(kind_registry.base_class(), "paper") else ""
        rows += [("",) * 5, (kind_registry.kind, "rate" if has_rate else "", "source", paper, "")]
        for name, address in kind_registry.available().items():
            source = _source(kind_registry, name, address)
            try:
                cls = kind_registry.get(name)
            except UsageError as error:
                rows.append((name, "", source, "cannot be loaded", str(error)))
                continue
            rate = f"{cls.rate:g}" if has_rate else ""
            rows.append((name, rate, source, getattr(cls, "paper", ""), _first_line(cls)))
    del rows[0]
    lines = text_table(rows, left=5)
    if width is not None and max(map(len, lines)) > width:
        wrap = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        lines = text_table([row[:4] for row in rows], left=4)
        lines = [f"{line}\n{wrap.fill(row[4])}" if row[4] else line for line, row in zip(lines, rows)]
    return "\n".join(lines) + "\n\nOne of them in full: ngrpo list NAME"


def described(name: str) -> str:
    """Paper, description, and options of one name as on the command line, for each kind that has it.

    Raises ``UsageError`` where no kind has the name, or it cannot be loaded.
    """
    homes = [kind_registry for kind_registry in FLAGS if name in kind_registry.available()]
    if not homes and ":" not in name and not name.endswith(".py"):
        names = [each for kind_registry in FLAGS for each in kind_registry.available()]
        raise UsageError(f"ngrpo list {name}: nothing has this name.{nearest(name, names)} All of them: ngrpo list.")
    if not homes:  # a user's file or module; where no kind takes it, the error is that of the first one
        for kind_registry in FLAGS:
            with suppress(UsageError):
                kind_registry.get(name)
                homes = [kind_registry]
                break
    texts = []
    for kind_registry in homes or [registry.perturbations]:
        cls = kind_registry.get(name)
        own = own_options(kind_registry, cls)
        parts = [
            f"{_heading(kind_registry, name, [kind_registry.kind])}\n{inspect.cleandoc(docstring(cls))}",
            _table(cls, own, FLAGS[kind_registry]).rstrip(),
        ]
        if kind_registry is registry.perturbations:
            own_names = {field.name for field in own}
            rest = ", ".join(field.name for field in dataclasses.fields(Perturbation) if field.name not in own_names)
            parts.append(f"and of the gate, as every perturbation: {rest} (ngrpo train --help)")
            kind_registry.check_complete(cls, name)
        texts.append("\n\n".join(part for part in parts if part))
    return "\n\n".join(texts)


def _heading(kind_registry: registry.Registry, name: str, notes: list[str]) -> str:
    """A name with its notes, paper and source in parentheses."""
    cls = kind_registry.get(name)
    paper = [cls.paper] if hasattr(cls, "paper") else []
    source = _source(kind_registry, name, kind_registry.available().get(name) or kind_registry.address(cls))
    return f"{name}  ({'; '.join([*notes, *paper, source])})"


def own_options(kind_registry: registry.Registry, cls: type) -> list[dataclasses.Field]:
    """The options of a class that its kind does not share, or for which it has another default."""
    shared = {f.name: f for f in dataclasses.fields(Perturbation)} if kind_registry is registry.perturbations else {}
    return [f for f in dataclasses.fields(cls) if f.name not in shared or f.default != shared[f.name].default]


def train_help(usage: str, argv: Sequence[str] = ()) -> str:
    """The help of ``ngrpo train``: our flags, then everything that is registered, with its options.

    ``{kinds}`` in the usage becomes the flags of each kind. A user's method that the command line names is listed too;
    raises ``UsageError`` where it cannot be loaded.
    """
    flags = []
    for kind in run_level_kinds():
        flags += help_entry(f"  {kind.flag} NAME", f"{kind.about}, see below [none]", column=28)
        flags += help_entry(f"  {kind.flag}.<option> VALUE", f"an option of the {kind.registry.kind}", column=28)
    parts = [usage.replace("{kinds}", "\n".join(flags))]
    parts.append("options of every perturbation (the gate)\n" + _table(Perturbation, dataclasses.fields(Perturbation)))
    for kind_registry, root in FLAGS.items():
        names, value = list(kind_registry.available()), Flags(argv).value(root)
        if value and value not in names and value.lower() != "none":  # the user's own: last, next to the prompt
            own_name = kind_registry.get(value).name
            names = [*(name for name in names if name != own_name), value]
        for name in names:
            try:
                cls = kind_registry.get(name)
            except UsageError as error:
                parts.append(f"{name}: cannot be loaded: {error}\n")
                continue
            notes = [] if kind_registry is registry.perturbations else [kind_registry.kind]
            lines = [textwrap.fill(_heading(kind_registry, name, notes), 80, subsequent_indent="    ")]
            lines.append(textwrap.fill(_first_line(cls), 80, initial_indent="  ", subsequent_indent="  "))
            parts.append("\n".join([*lines, _table(cls, own_options(kind_registry, cls), root)]))
    return "\n".join(parts)


def option_row(cls: type, field: dataclasses.Field) -> tuple[str, str, str, str]:
    """An option's name, description, allowed values, and default."""
    accepted = kinds(cls, field.name)
    kind = next(k for k in accepted if k is not type(None))
    limits = allowed(field) or {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
    if type(None) in accepted:
        limits += ", or none"
    default = "none" if field.default is None else str(field.default).lower() if kind is bool else str(field.default)
    return field.name, field.metadata.get("help", ""), limits, default


def _table(cls: type, fields: Sequence[dataclasses.Field], root: str = "--perturbation") -> str:
    lines = []
    for name, about, limits, default in (option_row(cls, field) for field in fields):
        lines += help_entry(f"  {root}.{name}", f"{about}; {limits} [{default}]", column=32)
    return "".join(f"{line}\n" for line in lines)


def _source(kind_registry: registry.Registry, name: str, address: str) -> str:
    if address.startswith(kind_registry.tree + "."):
        return "in-tree"
    for point in entry_points(group=kind_registry.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return docstring(cls).strip().split("\n", 1)[0]
