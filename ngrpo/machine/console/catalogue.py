# SPDX-License-Identifier: Apache-2.0
"""The registries' content as text, for `ngrpo list` and `ngrpo train --help`."""

import dataclasses
import inspect
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points

from ngrpo.config.kinds import FLAGS, run_level_kinds
from ngrpo.machine.console.text import help_entry, text_table
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.options import allowed, kinds, nearest
from perturbations.registry import Registry


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
    return "\n\n".join(_described(kind_registry, name) for kind_registry in homes or [_registry_of_file(name)])


def _registry_of_file(name: str) -> Registry:
    """The registry that takes a user's file or module; without one the first, for its error."""
    for kind_registry in FLAGS:
        with suppress(UsageError):
            kind_registry.get(name)
            return kind_registry
    return registry.perturbations


def _described(kind_registry: Registry, name: str) -> str:
    cls = kind_registry.get(name)
    own = own_options(kind_registry, cls)
    parts = [
        f"{_heading(kind_registry, name, [kind_registry.kind])}\n{inspect.cleandoc(cls.__doc__ or '')}",
        _table(cls, own, FLAGS[kind_registry]).rstrip(),
    ]
    if kind_registry is registry.perturbations:
        own_names = {field.name for field in own}
        rest = ", ".join(field.name for field in dataclasses.fields(Perturbation) if field.name not in own_names)
        parts.append(f"and of the gate, as every perturbation: {rest} (ngrpo train --help)")
        kind_registry.check_complete(cls, name)
        parts.append(_mean_of_score(cls))
    return "\n\n".join(part for part in parts if part)


def _heading(kind_registry: Registry, name: str, notes: list[str]) -> str:
    """A name with its notes, paper and source in parentheses."""
    cls = kind_registry.get(name)
    paper = [cls.paper] if hasattr(cls, "paper") else []
    source = _source(kind_registry, name, kind_registry.available().get(name) or kind_registry.address(cls))
    return f"{name}  ({'; '.join([*notes, *paper, source])})"


def _mean_of_score(cls: type[Perturbation]) -> str:
    """The densities with which a perturbation's score has mean 0, and the others."""
    densities = next((f.metadata["choices"] for f in dataclasses.fields(cls) if f.name == "density"), None)
    centred: dict[bool, list[str]] = {True: [], False: []}
    make: Callable[..., Perturbation] = cls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for density in densities or ("token",):
            with suppress(UsageError):  # a density that needs another option than its default
                perturbation = make(density=density) if densities else make()
                centred[perturbation.zero_mean_score].append(density)
    phrases = {True: "0 with density", False: "not 0 with density"}
    parts = [f"{phrases[zero]} {', '.join(names)}" for zero, names in centred.items() if names]
    return f"mean of the score of its entry in the loss (docs/methods.md): {'; '.join(parts)}"


def own_options(kind_registry: Registry, cls: type) -> list[dataclasses.Field]:
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
        for name in _with_named(kind_registry, Flags(argv).value(root)):
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


def _with_named(kind_registry: Registry, value: str | None) -> list[str]:
    """All registered names; the user's file or module comes last, next to the prompt."""
    names = list(kind_registry.available())
    if not value or value in names or value.lower() == "none":
        return names
    cls = kind_registry.get(value)
    return [*(name for name in names if name != cls.name), value]


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


def _source(kind_registry: Registry, name: str, address: str) -> str:
    if address.startswith(kind_registry.tree + "."):
        return "in-tree"
    for point in entry_points(group=kind_registry.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]
