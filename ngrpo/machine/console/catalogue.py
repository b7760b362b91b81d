# SPDX-License-Identifier: Apache-2.0
"""What the registries hold, as text: `ngrpo list` and `ngrpo train --help`."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points

from ngrpo.config.kinds import FLAGS, Kind, of_registry, run_level_kinds
from ngrpo.machine.console.text_table import aligned, defined
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.options import allowed, kinds, nearest
from perturbations.registry import Registry


def listing(width: int | None = None) -> str:
    """One table of all perturbations, gates, replay buffers, advantages, credits and so on.

    Args:
        width: columns of the terminal; where a line would be longer, what each one does stands below it. None: a line
            for each, as `grep` likes it.
    """
    rows: list[tuple[str, ...]] = []
    about: list[str] = []
    heads: list[int] = []
    for kind_registry in FLAGS:
        heads.append(len(rows))
        paper = "paper" if hasattr(kind_registry.base_class(), "paper") else ""
        rate = "rate" if kind_registry is registry.perturbations else ""
        rows.append((kind_registry.kind, rate, "source", paper))
        about.append("")
        for name, address in kind_registry.available().items():
            source = _source(kind_registry, name, address)
            try:
                cls = kind_registry.get(name)
            except UsageError as error:
                rows.append((name, "", source, "cannot be loaded"))
                about.append(str(error))
                continue
            rate = f"{cls.rate:g}" if kind_registry is registry.perturbations else ""
            rows.append((name, rate, source, getattr(cls, "paper", "")))
            about.append(_first_line(cls))
    lines = aligned([(*row, text) for row, text in zip(rows, about)], left=5)
    if width is not None and max(map(len, lines)) > width:
        wrap = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        below = [wrap.fill(text) for text in about]
        lines = [f"{line}\n{text}" if text else line for line, text in zip(aligned(rows, left=4), below)]
    parts = [f"\n{line}" if i in heads[1:] else line for i, line in enumerate(lines)]
    return "\n".join(parts) + "\n\nOne of them in full: ngrpo list NAME"


def described(name: str) -> str:
    """What one name stands for: paper, options with their ranges and defaults, and a picture of what it does.

    Args:
        name: as on the command line; where several kinds have it, each is described.

    Raises:
        UsageError: where no kind has the name, or it cannot be loaded.
    """
    homes = [kind_registry for kind_registry in FLAGS if name in kind_registry.available()]
    if not homes and ":" not in name and not name.endswith(".py"):
        names = [each for kind_registry in FLAGS for each in kind_registry.available()]
        raise UsageError(f"ngrpo list {name}: nothing has this name.{nearest(name, names)} All of them: ngrpo list.")
    return "\n\n".join(_described(kind_registry, name) for kind_registry in homes or _homes_of_own(name))


def _homes_of_own(name: str) -> list[Registry]:
    """The registry that takes a user's file or module."""
    refusals = []
    for kind_registry in FLAGS:
        try:
            kind_registry.get(name)
        except UsageError as error:
            refusals.append(error)
        else:
            return [kind_registry]
    raise refusals[0]


def _described(kind_registry: Registry, name: str) -> str:
    cls = kind_registry.get(name)
    address = kind_registry.available().get(name, name)
    shared = dataclasses.fields(Perturbation) if kind_registry is registry.perturbations else ()
    own = own_options(kind_registry, cls)
    about = "; ".join(
        [kind_registry.kind, *([cls.paper] if hasattr(cls, "paper") else []), _source(kind_registry, name, address)]
    )
    parts = [
        f"{name}  ({about})\n{inspect.cleandoc(cls.__doc__ or '')}",
        _table(cls, own, FLAGS[kind_registry]).rstrip(),
    ]
    if shared:
        rest = ", ".join(each.name for each in shared if each.name not in {f.name for f in own})
        parts.append(f"and of the gate, as every perturbation: {rest} (ngrpo train --help)")
        kind_registry.check_complete(cls, name)
        parts.append(_mean_of_score(cls))
    parts.append("\n".join(picture(kind_registry, cls)))
    return "\n\n".join(part for part in parts if part)


def _mean_of_score(cls: type[Perturbation]) -> str:
    """With which of its densities a perturbation's score has mean 0."""
    densities = next((f.metadata["choices"] for f in dataclasses.fields(cls) if f.name == "density"), ("token",))
    centred: dict[bool, list[str]] = {True: [], False: []}
    make: Callable[..., Perturbation] = cls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for density in densities:
            with suppress(UsageError):  # a density that needs another option than its default
                perturbation = make(density=density) if len(densities) > 1 else cls()
                centred[perturbation.zero_mean_score].append(density)
    phrases = {True: "0 with density", False: "not 0 with density"}
    parts = [f"{phrases[zero]} {', '.join(names)}" for zero, names in centred.items() if names]
    return f"mean of the score of its entry in the loss (docs/methods.md): {'; '.join(parts)}"


def own_options(kind_registry: Registry, cls: type) -> list[dataclasses.Field]:
    """The options of a class that its kind does not share, or for which it has another default."""
    shared = {f.name: f for f in dataclasses.fields(Perturbation)} if kind_registry is registry.perturbations else {}
    return [f for f in dataclasses.fields(cls) if f.name not in shared or f.default != shared[f.name].default]


def picture(kind_registry: Registry, cls: type) -> list[str]:
    """Lines of text that show what a class does with its defaults, computed by the class; none for a replay buffer."""
    drawing = of_registry(kind_registry).picture
    if not drawing:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        kind_registry.check_complete(cls, cls.name)
        return pkgutil.resolve_name(drawing)(cls())


def train_help(usage: str, argv: Sequence[str] = ()) -> str:
    """The help of ``ngrpo train``: our flags, then everything that is registered, with its options.

    Args:
        usage: what stands above them; ``{kinds}`` in it becomes the flags of each kind.
        argv: the rest of the command line; a perturbation or gate that it names by file or module is listed too.

    Raises:
        UsageError: where that cannot be loaded.
    """
    beside = (line for kind in run_level_kinds() for line in _of_kind(kind))
    parts = [usage.replace("{kinds}", "\n".join(beside))]
    parts.append("options of every perturbation (the gate)\n" + _table(Perturbation, dataclasses.fields(Perturbation)))
    for kind_registry, root in FLAGS.items():
        for name, address in _with_named(kind_registry, Flags(argv).value(root)).items():
            try:
                cls = kind_registry.get(name)
            except UsageError as error:
                parts.append(f"{name}: cannot be loaded: {error}\n")
                continue
            own = own_options(kind_registry, cls)
            notes = [] if kind_registry is registry.perturbations else [kind_registry.kind]
            notes += [cls.paper] if hasattr(cls, "paper") else []
            head = f"{name}  ({'; '.join([*notes, _source(kind_registry, name, address)])})"
            lines = [textwrap.fill(head, 80, subsequent_indent="    ")]
            lines.append(textwrap.fill(_first_line(cls), 80, initial_indent="  ", subsequent_indent="  "))
            parts.append("\n".join([*lines, _table(cls, own, root)]))
    return "\n".join(parts)


def _of_kind(kind: Kind) -> list[str]:
    """The flags of one kind, as a help has them."""
    about = f"{kind.about}, see below [none]"
    lines = defined(f"  {kind.flag} NAME", about, column=28)
    return [*lines, *defined(f"  {kind.flag}.<option> VALUE", f"an option of the {kind.registry.kind}", column=28)]


def _with_named(kind_registry: Registry, value: str | None) -> dict[str, str]:
    """All that is registered; what the user names by file or module stands last, next to the prompt."""
    addresses = kind_registry.available()
    if not value or value in addresses or value.lower() == "none":
        return addresses
    cls = kind_registry.get(value)
    return {
        **{name: address for name, address in addresses.items() if name != cls.name},
        value: kind_registry.address(cls),
    }


def option_row(cls: type, field: dataclasses.Field) -> tuple[str, str, str, str]:
    """An option's name, what it is, the values that it takes, and its default."""
    accepted = kinds(cls, field.name)
    kind = next(k for k in accepted if k is not type(None))
    limits = allowed(field) or {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
    if type(None) in accepted:
        limits += ", or none"
    default = "none" if field.default is None else str(field.default).lower() if kind is bool else str(field.default)
    return field.name, field.metadata.get("help", ""), limits, default


def _table(cls: type, fields: Sequence[dataclasses.Field], root: str = "--perturbation") -> str:
    rows = (option_row(cls, field) for field in fields)
    lines = [
        defined(f"  {root}.{name}", f"{about}; {limits} [{default}]", column=32)
        for name, about, limits, default in rows
    ]
    return "".join(f"{line}\n" for each in lines for line in each)


def _source(kind_registry: Registry, name: str, address: str) -> str:
    if address.startswith(kind_registry.tree + "."):
        return "in-tree"
    for point in entry_points(group=kind_registry.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]
