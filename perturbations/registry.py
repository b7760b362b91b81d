"""The registry: operators by name, from the tree, from installed packages, or from any importable module."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from perturbations.options import nearest

if TYPE_CHECKING:
    from perturbations.base import Perturbation

ENTRY_POINT_GROUP = "ngrpo.perturbations"
_Class = TypeVar("_Class", bound=type)
_registered: dict[str, type[Perturbation]] = {}


def register(name: str) -> Any:
    """Class decorator that names an operator.

    Args:
        name: the registry name, which is also its flag's value and, in the tree, its file's name.

    Raises:
        ValueError: where another class has the name.
    """

    def decorate(cls: _Class) -> _Class:
        other = _registered.get(name)
        home = _in_tree().get(name)
        if home is not None and home != cls.__module__:
            raise ValueError(
                f"perturbation {name!r} is already the name of {home};"
                f" give {cls.__module__}.{cls.__qualname__} another name."
            )
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"perturbation {name!r} is already registered by {other.__module__}.{other.__qualname__};"
                f" give {cls.__module__}.{cls.__qualname__} another name."
            )
        cls.name = name
        _registered[name] = cls
        return cls

    return decorate


def _in_tree() -> dict[str, str]:
    package = importlib.import_module("perturbations.strategies")
    return {m.name: f"perturbations.strategies.{m.name}" for m in pkgutil.iter_modules(package.__path__)}


def _installed() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def available() -> dict[str, str]:
    """Names of all operators and where each comes from: the tree, an installed package, or this process."""
    found = {name: cls.__module__ for name, cls in _registered.items()}
    found.update({name: point.value for name, point in _installed().items()})
    found.update(_in_tree())
    return dict(sorted(found.items()))


def get(name: str) -> type[Perturbation]:
    """The class of an operator.

    Args:
        name: a registered name, or ``package.module:Name`` of any importable operator.

    Raises:
        ValueError: for an unknown name, with the nearest match, or a target that is not an operator.
    """
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return _load(name, name)
    tree = _in_tree()
    if name in tree:
        importlib.import_module(tree[name])
        return _registered[name]
    installed = _installed()
    if name in installed:
        return _load(name, installed[name].value)
    known = available()
    raise ValueError(
        f"unknown perturbation {name!r}.{nearest(name, known)} Available: {', '.join(known)};"
        " or package.module:Name for your own."
    )


def _load(name: str, target: str) -> type[Perturbation]:
    from perturbations.base import Perturbation

    module_name, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"perturbation {name!r}: cannot load {target!r} ({error}). Install its package, or put its folder on"
            " PYTHONPATH."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Perturbation)):
        raise ValueError(f"perturbation {name!r}: {target!r} is not a subclass of perturbations.Perturbation.")
    if "name" not in vars(cls):  # its own: an inherited name is another operator's
        cls.name = name
    return cls


def address(cls: type[Perturbation]) -> str:
    """The name under which another process finds the class: its registry name, or ``package.module:Name``."""
    target = f"{cls.__module__}:{cls.__qualname__}"
    if "name" in vars(cls):  # its own: an inherited name is another operator's
        point = _installed().get(cls.name)
        if cls.name in _in_tree() or (point is not None and point.value == target):
            return cls.name
    return target


def create(name: str, **options: Any) -> Perturbation:
    """Makes an operator.

    Args:
        name: a registered name, or ``package.module:Name``.
        options: its options; the rest keep the defaults of its paper.

    Returns:
        The operator, with every option checked.

    Raises:
        ValueError: for an unknown name or option, or a value out of range; says what is allowed.
    """
    cls = get(name)
    owners = _option_owners(options, cls)
    if owners:
        option_name, names = owners[0]
        raise ValueError(
            f"option {option_name!r} belongs to perturbation {' and '.join(names)}, not to {name!r}. Leave it out,"
            f" or choose --perturbation {names[0]}."
        )
    cls.check_option_names(list(options))
    return cls(**options)


def _option_owners(options: dict[str, Any], cls: type[Perturbation]) -> list[tuple[str, list[str]]]:
    """Options that this operator lacks but others of the tree have, with those others' names."""
    own = {field.name for field in dataclasses.fields(cls)}
    result = []
    for option_name in options:
        if option_name in own:
            continue
        names = [n for n in _in_tree() if option_name in {f.name for f in dataclasses.fields(get(n))}]
        if names:
            result.append((option_name, names))
    return result
