"""What the registries hold, as text: `ngrpo list` and `ngrpo train --help`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import entry_points

from ngrpo import advantages, credits
from ngrpo.openrlhf_flags import Flags
from ngrpo.text_table import aligned
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError
from perturbations.options import allowed, kinds
from perturbations.registry import Registry

# Each registry, and the flag that takes its names.
_KINDS = {
    registry.perturbations: "--perturbation",
    registry.gates: "--perturbation.gate",
    registry.buffers: "--perturbation.replay_buffer",
    advantages.registry: "--advantage",
    credits.registry: "--credit",
}


def listing() -> str:
    """One line for each perturbation, gate, replay buffer, advantage and credit: name, source, paper, purpose."""
    return "\n\n".join(map(_rows, _KINDS))


def _rows(kept: Registry) -> str:
    rows = [(kept.kind, "source", "paper" if hasattr(kept.base_class(), "paper") else "", "")]
    for name, address in kept.available().items():
        try:
            cls = kept.get(name)
        except UsageError as error:
            rows.append((name, _source(kept, name, address), "cannot be loaded", str(error)))
            continue
        rows.append((name, _source(kept, name, address), getattr(cls, "paper", ""), _first_line(cls)))
    return "\n".join(aligned(rows, left=4))


def train_help(words: Sequence[str] = ()) -> str:
    """The help of ``ngrpo train``: our flags, then every perturbation, gate, advantage and credit with its options.

    Args:
        words: the rest of the command line; a perturbation or gate that it names by file or module is listed too.

    Raises:
        UsageError: where that cannot be loaded.
    """
    from ngrpo import train

    parts = [train.__doc__ or ""]
    shared = {field.name: field for field in dataclasses.fields(Perturbation)}
    parts.append("options of every perturbation (the gate)\n" + _table(Perturbation, list(shared.values())))
    for kept, root in _KINDS.items():
        common = shared if kept is registry.perturbations else {}
        for name, address in _with_named(kept, Flags(words).value(root)).items():
            try:
                cls = kept.get(name)
            except UsageError as error:
                parts.append(f"{name}: cannot be loaded: {error}\n")
                continue
            own = [f for f in dataclasses.fields(cls) if f.name not in common or f.default != common[f.name].default]
            notes = [] if kept is registry.perturbations else [kept.kind]
            notes += [cls.paper] if hasattr(cls, "paper") else []
            head = f"{name}  ({'; '.join([*notes, _source(kept, name, address)])})"
            parts.append(f"{head}\n  {_first_line(cls)}\n{_table(cls, own, root)}")
    return "\n".join(parts)


def _with_named(kept: Registry, given: str | None) -> dict[str, str]:
    """All that is registered; what the user names by file or module stands last, next to the prompt."""
    known = kept.available()
    if not given or given in known or given.lower() == "none":
        return known
    cls = kept.get(given)
    return {**{name: address for name, address in known.items() if name != cls.name}, given: kept.address(cls)}


def _table(cls: type, fields: list[dataclasses.Field], root: str = "--perturbation") -> str:
    lines = []
    for field in fields:
        accepted = kinds(cls, field.name)
        kind = next(k for k in accepted if k is not type(None))
        limits = allowed(field) or {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        if type(None) in accepted:
            limits += ", or none"
        default = "none" if field.default is None else str(field.default).lower() if kind is bool else field.default
        flag = f"  {root}.{field.name}"
        lines.append(f"{flag:<33}{field.metadata.get('help', '')}; {limits} [{default}]")
    return "\n".join(lines) + "\n"


def _source(kept: Registry, name: str, address: str) -> str:
    if address.startswith(kept.tree + "."):
        return "in-tree"
    for point in entry_points(group=kept.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]
