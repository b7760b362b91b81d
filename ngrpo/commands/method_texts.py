# SPDX-License-Identifier: Apache-2.0
"""Registered methods as text: the tables of `ngrpo list`, and the help of `ngrpo train`."""

import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import takewhile
from typing import NamedTuple

from ngrpo.config.kinds import FLAGS, run_level_kinds
from ngrpo.machine.console import docstring, help_entry, text_table
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import Perturbation, registry
from perturbations.errors import UsageError, nearest
from perturbations.options import allowed, kinds


class _ListRow(NamedTuple):
    """A row of ``ngrpo list``."""

    name: str = ""
    rate: str = ""
    source: str = ""
    paper: str = ""
    description: str = ""


def listing(width: int | None = None) -> str:
    """One table of everything registered: perturbations, gates, replay buffers, advantages, credits and so on.

    Descriptions are below their rows where a line would be longer than ``width``; None: a line for each, for `grep`.
    """
    rows: list[_ListRow] = []
    for kind_registry in FLAGS:
        has_rate = kind_registry is registry.perturbations
        has_paper = hasattr(kind_registry.base_class(), "paper")
        if rows:
            rows.append(_ListRow())
        rows.append(
            _ListRow(
                name=kind_registry.kind,
                rate="rate" if has_rate else "",
                source="source",
                paper="paper" if has_paper else "",
            )
        )
        for name, address in kind_registry.available().items():
            source = _source(kind_registry, name, address)
            try:
                cls = kind_registry.get(name)
            except UsageError as error:
                rows.append(_ListRow(name=name, source=source, paper="cannot be loaded", description=str(error)))
                continue
            rows.append(
                _ListRow(
                    name=name,
                    rate=f"{cls.rate:g}" if has_rate else "",
                    source=source,
                    paper=getattr(cls, "paper", ""),
                    description=_first_line(cls),
                )
            )
        for name, point in kind_registry.hidden.items():
            source = _source(kind_registry, name, point.value)
            description = f"hidden by the in-tree method; use {point.value}"
            rows.append(_ListRow(name=name, source=source, paper="hidden", description=description))
    lines = text_table(rows, left=5)
    if width is not None and max(map(len, lines)) > width:
        wrap = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        lines = []
        for row, line in zip(rows, text_table([row[:4] for row in rows], left=4)):
            lines.append(line)
            if row.description:
                lines.append(wrap.fill(row.description))
    return "\n".join(lines) + "\n\nOne of them in full: ngrpo list NAME"


def described(name: str) -> str:
    """Paper, description, and options of one name as on the command line, for each kind that has it.

    Raises ``UsageError`` where no kind has the name, or it cannot be loaded.
    """
    texts = []
    for kind_registry in _kinds_of(name, f"ngrpo list {name}"):
        cls = kind_registry.get(name)
        own = own_options(kind_registry, cls)
        texts.append(f"{_heading(kind_registry, name, [kind_registry.kind])}\n{inspect.cleandoc(docstring(cls))}")
        if own:
            texts.append(_table(cls, own, FLAGS[kind_registry]).rstrip())
        if kind_registry is registry.perturbations:
            own_names = {field.name for field in own}
            gate_options = [field.name for field in dataclasses.fields(Perturbation) if field.name not in own_names]
            texts.append(
                f"options of the gate, which every perturbation has: {', '.join(gate_options)} (ngrpo train --help)"
            )
            kind_registry.check_complete(cls, name)
    return "\n\n".join(texts)


def _kinds_of(name: str, command: str) -> list[registry.Registry]:
    """The registries that have a name, or the first one that takes a user's file or module.

    Where none takes the file, the result is the perturbations' registry, whose ``get`` then raises its error.

    Raises:
        UsageError: for a name that none has; it begins with ``command``.
    """
    homes = [kind_registry for kind_registry in FLAGS if name in kind_registry.available()]
    if homes:
        return homes
    if ":" not in name and not name.endswith(".py"):
        names = [registered for kind_registry in FLAGS for registered in kind_registry.available()]
        raise UsageError(f"{command}: no method has this name.{nearest(name, names)} All of them: ngrpo list.")
    for kind_registry in FLAGS:
        with suppress(UsageError):
            kind_registry.get(name)
            return [kind_registry]
    return [registry.perturbations]


def _heading(kind_registry: registry.Registry, name: str, notes: list[str]) -> str:
    """A name with its notes, paper and source in parentheses."""
    cls = kind_registry.get(name)
    address = kind_registry.available().get(name) or kind_registry.address(cls)
    remarks = [*notes]
    if hasattr(cls, "paper"):
        remarks.append(cls.paper)
    remarks.append(_source(kind_registry, name, address))
    return f"{name}  ({'; '.join(remarks)})"


def own_options(kind_registry: registry.Registry, cls: type) -> list[dataclasses.Field]:
    """The options of a class that its kind does not share, or for which it has another default."""
    shared_defaults = {}
    if kind_registry is registry.perturbations:
        shared_defaults = {field.name: field.default for field in dataclasses.fields(Perturbation)}
    return [
        field
        for field in dataclasses.fields(cls)
        if field.name not in shared_defaults or field.default != shared_defaults[field.name]
    ]


def train_help(usage: str, argv: Sequence[str] = ()) -> str:
    """The help of ``ngrpo train``.

    Our flags, the options of the methods that the command line names, and the names of all methods. After ``--help``
    names of methods may follow, for their options alone, or ``all``, for our flags and the options of all methods.

    Args:
        usage: our flags; ``{kinds}`` in it becomes the flags of each kind.
        argv: the words of the command line.

    Raises:
        UsageError: for a name after ``--help`` that no method has, and for a method of another flag that cannot be
            loaded. A file or module after ``--help`` that cannot be loaded is printed as such.
    """
    names = _words_after_help(argv)
    if names and _ALL not in names:
        return "\n".join(section for name in names for section in _sections_of_name(name))
    flags = []
    for kind in run_level_kinds():
        flags += help_entry(f"  {kind.flag} NAME", f"{kind.about}, see below [none]", column=28)
        flags += help_entry(f"  {kind.flag}.<option> VALUE", f"an option of the {kind.registry.kind}", column=28)
    sections = [usage.replace("{kinds}", "\n".join(flags))]
    gate_options = _table(Perturbation, dataclasses.fields(Perturbation))
    sections.append(f"options of every perturbation (the gate)\n{gate_options}")
    for kind_registry, root in FLAGS.items():
        listed = list(kind_registry.available()) if _ALL in names else []
        value = Flags(argv).value(root)
        if value and value not in listed and value.lower() != "none":
            own_name = kind_registry.get(value).name
            # The one that the command line names is last, next to the prompt.
            listed = [*(name for name in listed if name != own_name), value]
        sections += [_method_section(kind_registry, root, name) for name in listed]
    if _ALL not in names:
        sections.append(_all_names())
    return "\n".join(sections)


_ALL = "all"


def _words_after_help(argv: Sequence[str]) -> list[str]:
    """The words that follow ``--help`` or ``-h``, up to the next flag."""
    up_to_help = list(takewhile(lambda word: word not in ("-h", "--help"), argv))
    after_help = argv[len(up_to_help) + 1 :]
    return list(takewhile(lambda word: not word.startswith("-"), after_help))


def _sections_of_name(name: str) -> list[str]:
    """The section of each method of this name, of whichever kind."""
    kinds_with_it = _kinds_of(name, f"ngrpo train --help {name}")
    return [_method_section(kind_registry, FLAGS[kind_registry], name) for kind_registry in kinds_with_it]


def _method_section(kind_registry: registry.Registry, root: str, name: str) -> str:
    """A method's heading, the first line of its description, and its options; ``root`` is the flag of its kind."""
    try:
        cls = kind_registry.get(name)
    except UsageError as error:
        return f"{name}: cannot be loaded: {error}\n"
    notes = [] if kind_registry is registry.perturbations else [kind_registry.kind]
    heading = textwrap.fill(_heading(kind_registry, name, notes), 80, subsequent_indent="    ")
    description = textwrap.fill(_first_line(cls), 80, initial_indent="  ", subsequent_indent="  ")
    return f"{heading}\n{description}\n{_table(cls, own_options(kind_registry, cls), root)}"


def _all_names() -> str:
    """The names of all methods, by the flag of their kind."""
    lines = ["names of methods, and the options of one: ngrpo train --help NAME; of all: --help all"]
    for kind_registry, root in FLAGS.items():
        lines += help_entry(f"  {root}", ", ".join(kind_registry.available()), column=28)
    return "\n".join(lines) + "\n"


class OptionRow(NamedTuple):
    """An option as help and docs show it."""

    name: str
    about: str
    limits: str
    default: str


_TYPES_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def option_row(cls: type, field: dataclasses.Field) -> OptionRow:
    """An option's name, description, allowed values, and default."""
    accepted_types = kinds(cls, field.name)
    value_type = next(accepted for accepted in accepted_types if accepted is not type(None))
    limits = allowed(field) or _TYPES_IN_WORDS.get(value_type, "text")
    if type(None) in accepted_types:
        limits += ", or none"
    if field.default is None:
        default = "none"
    elif value_type is bool:
        default = str(field.default).lower()
    else:
        default = str(field.default)
    return OptionRow(name=field.name, about=field.metadata.get("help", ""), limits=limits, default=default)


def _table(cls: type, fields: Sequence[dataclasses.Field], root: str = "--perturbation") -> str:
    """The options as lines of help."""
    lines = []
    for field in fields:
        row = option_row(cls, field)
        lines += help_entry(f"  {root}.{row.name}", f"{row.about}; {row.limits} [{row.default}]", column=32)
    return "".join(f"{line}\n" for line in lines)


def _source(kind_registry: registry.Registry, name: str, address: str) -> str:
    """Where a name comes from: ``in-tree``, an installed package, or its address."""
    if address.startswith(kind_registry.tree + "."):
        return "in-tree"
    for point in entry_points(group=kind_registry.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return docstring(cls).strip().split("\n", 1)[0]
