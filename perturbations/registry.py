# SPDX-License-Identifier: Apache-2.0
"""Registries: classes of one kind by name, from the tree, from installed packages, from a module or a file."""

import dataclasses
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import isroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from perturbations import user_files
from perturbations.errors import UsageError, nearest
from perturbations.options import Options

_Class = TypeVar("_Class", bound=Options)
GATE_OPTION = "gate."
"""What an option of the gate begins with, among the options of its perturbation."""
_NOT_NAMES = ("base", "default")  # files of a tree package that hold no class with a name of its kind


class Registry:
    """The classes of one kind, which derive from :class:`perturbations.options.Options`.

    A name is looked up in this order: registered in this process; ``./file.py:Name``; ``package.module:Name``; in the
    tree; entry points of installed packages.
    """

    instances: ClassVar[list["Registry"]] = []

    def __init__(
        self, kind: str, base: str, tree: str, group: str, families: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """``kind``: the word for one, in messages. ``base``: ``package:Name`` of the base class for users.

        ``tree``: the package with one module per name, or one of ``families`` with several. ``group``: entry point
        group of installed packages.
        """
        self.kind, self.base, self.tree, self.group, self.families = kind, base, tree, group, families or {}
        self.registered: dict[str, type[Options]] = {}
        Registry.instances.append(self)

    def register(self, name: str) -> Callable[[type[_Class]], type[_Class]]:
        """Class decorator that gives a class its name, the value of its flag; ``UsageError`` where another has it."""

        def decorate(cls: type[_Class]) -> type[_Class]:
            other, home = self.registered.get(name), self.in_tree().get(name)
            taken = home if home != cls.__module__ else None
            if taken is None and other is not None and not _same(other, cls):
                taken = f"{other.__module__}.{other.__qualname__}"
            if taken is not None:
                raise UsageError(f"{self.kind} {name!r} is the name of {taken}; give {self.address(cls)} another name.")
            cls.name = name
            self.registered[name] = cls
            return cls

        return decorate

    def in_tree(self) -> dict[str, str]:
        """Names in the tree, and their modules."""
        package = importlib.import_module(self.tree)
        modules = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in _NOT_NAMES]
        homes = {name: f"{self.tree}.{module}" for module in modules for name in self.families.get(module, (module,))}
        return dict(sorted(homes.items()))

    def installed(self) -> dict[str, EntryPoint]:
        """Names from installed packages, and their entry points."""
        return {point.name: point for point in entry_points(group=self.group)}

    def available(self) -> dict[str, str]:
        """All names and the module, file or entry point of each."""
        origins = {name: (cls.__module__, user_files.origin(cls.__module__)) for name, cls in self.registered.items()}
        here = {name: module if file is None else file.filename for name, (module, file) in origins.items()}
        points = {name: point.value for name, point in self.installed().items()}
        return dict(sorted((here | points | self.in_tree()).items()))

    def get(self, name: str, source: str | None = None) -> type:
        """The class of a registered name, ``./file.py:Name`` (or ``./file.py``), or ``package.module:Name``.

        ``source``: the file's text as :meth:`source` packs it. ``UsageError`` for an unknown name or a wrong target.
        """
        if name in self.registered and source is None:
            return self.registered[name]
        file = user_files.split(name)
        if file is not None:
            return self._from_file(name, *file, source)
        if source is not None:
            raise UsageError(f"{self.kind} {name!r}: 'source' belongs to a name such as file.py:Name. Leave it out.")
        if ":" in name:
            return self._from_module(name, name)
        tree = self.in_tree()
        if name in tree:
            importlib.import_module(tree[name])
            return self.registered[name]
        installed = self.installed()
        if name in installed:
            return self._from_module(name, installed[name].value)
        known = self.available()
        hint = f" Did you mean the file './{name}.py'?" if f"{name}.py" in os.listdir() else nearest(name, known)
        if re.fullmatch("n[-_]?grpo", name.lower()):
            hint = " N-GRPO is --perturbation neighbor, and NGRPO is --advantage ngrpo."
        own = "or ./file.py:Name or package.module:Name for your own"
        raise UsageError(f"unknown {self.kind} {name!r}.{hint} Available: {', '.join(known)}; {own}.")

    def create(self, name: str, **options: object) -> Any:
        """Makes an object of this kind; ``UsageError`` for an unknown name or option, or a value out of range.

        ``name``: as in :meth:`get`. ``gate.margin`` is an option of the option ``gate``, ``source`` the text of a file.
        """
        source = options.pop("source", None)
        cls = self.get(name, None if source is None else str(source))
        for field in dataclasses.fields(cls):
            nested, prefix = field.metadata.get("registry"), f"{field.name}."
            own = [key for key in options if key.startswith(prefix)]
            if nested is not None and own:
                chosen = options.get(field.name, field.default)
                if not isinstance(chosen, str) or chosen.lower() == "none":
                    fix = f"Name one as option {field.name!r} (available: {', '.join(nested.available())})"
                    raise UsageError(f"option {own[0]!r} is given, but no {nested.kind}'s name. {fix}.")
                options[field.name] = nested.create(chosen, **{key[len(prefix) :]: options.pop(key) for key in own})
        for unknown in (key for key in options if key not in cls.option_names()):
            owners = [other for other in self.in_tree() if unknown in self.get(other).option_names()]
            if owners:
                home = f"{self.kind} {' and '.join(owners)}, not to {name!r}"
                raise UsageError(f"option {unknown!r} belongs to {home}. Leave it out, or choose {owners[0]!r}.")
        cls.check_option_names(options)
        self.check_complete(cls, name, options)
        return cls(**options)

    def check_complete(self, cls: type, name: str, options: Iterable[str] = ()) -> None:
        """Raises ``UsageError`` for a user's class, given as ``name`` with ``options``, that cannot be made."""
        label, written = f"{self.kind} {name!r}: {cls.__qualname__}", "@dataclass(frozen=True, kw_only=True)"
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        if missing:
            fix = "Write it; `ngrpo new` writes a file with every method"
            raise UsageError(f"{label} does not define {missing}, which {self._base_name} leaves to it. {fix}.")
        own = vars(cls)
        declared = [hint for hint in own.get("__annotations__", {}).values() if "ClassVar" not in str(hint)]
        if "__dataclass_fields__" not in own and ("__init__" in own or declared):
            fix = f'Write {written} above the class, and each option as a field: share: float = option(0.5, "help")'
            raise UsageError(f"{label} is not a dataclass, so its options are not seen. {fix}.")
        for field in dataclasses.fields(cls):
            owner = next((base for base in cls.__mro__[1:] if isroutine(vars(base).get(field.name))), None)
            if owner is not None:
                hidden = f"{owner.__name__}.{field.name}, a method that is called"
                raise UsageError(f"{label}: its option {field.name!r} hides {hidden}. Give it another name.")
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            if field.init and not has_default and field.name not in options:
                raise UsageError(f"{label} has no default for its option {field.name!r}. Give it one.")

    def address(self, cls: type) -> str:
        """The name by which another process finds the class, with :meth:`source` where there is one."""
        source = user_files.origin(cls.__module__)
        if source is not None:
            return f"{source.filename}:{cls.__qualname__}"
        target = f"{cls.__module__}:{cls.__qualname__}"
        own = vars(cls).get("name")  # its own: an inherited name is another one's
        if own in self.in_tree():
            return own
        return next((name for name, point in self.installed().items() if point.value == target), target)

    def source(self, cls: type) -> str | None:
        """The packed text of a class's file; None for a class of an importable module."""
        source = user_files.origin(cls.__module__)
        return None if source is None else source.packed

    def _from_file(self, name: str, path: str, attribute: str, source: str | None) -> type:
        label = f"{self.kind} {name!r}"
        before = [(r, dict(r.registered)) for r in Registry.instances]
        try:
            module = user_files.from_file(path, label) if source is None else user_files.from_text(path, source, label)
        except ValueError:
            for registry, registered in before:  # a file may register something and then fail
                registry.registered = registered
            raise
        base, file = self.base_class(), Path(path).name
        classes = {k: v for k, v in vars(module).items() if isinstance(v, type)}
        own = {k: v for k, v in classes.items() if issubclass(v, base) and v.__module__ == module.__name__}
        if not attribute:
            named = {k: v for k, v in own.items() if v in self.registered.values()} or own
            if len(named) > 1:
                choice = ", ".join(f"{path}:{k}" for k in named)
                raise UsageError(f"{label}: {file} holds several {self.kind}s. Name one of them: {choice}.")
            attribute = next(iter(named), "")
        cls = getattr(module, attribute, None) if attribute else None
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            return _named(cls, self.address(cls))
        if not own:
            others = [k for k, v in classes.items() if v.__module__ == module.__name__]
            seen = f" It defines {', '.join(others)}." if others else " It defines no class."
            raise UsageError(f"{label}: {file} holds no {self.kind}.{seen} Derive one from {self._base_name}.")
        hint = f"{nearest(attribute, own)} It holds: {', '.join(own)}"
        raise UsageError(f"{label}: {file} has no {self.kind} {attribute!r}.{hint}.")

    def _from_module(self, name: str, target: str) -> type:
        try:
            cls = pkgutil.resolve_name(target)
        except Exception as error:  # a stranger's module may raise anything
            fix = "Install its package, put its folder on PYTHONPATH, or name its file: ./file.py:Name"
            raise UsageError(f"{self.kind} {name!r}: cannot load {target!r} ({error}). {fix}.") from error
        if not (isinstance(cls, type) and issubclass(cls, self.base_class())):
            raise UsageError(f"{self.kind} {name!r}: {target!r} is not a subclass of {self._base_name}.")
        return _named(cls, name)

    def base_class(self) -> type:
        """The class that all of this kind derive from."""
        return pkgutil.resolve_name(self.base)

    def base_of_package(self, name: str) -> type:
        """The ``__getattr__`` of a tree package with the base class, loaded on first use."""
        package, _, base = self.base.partition(":")
        if name != base:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return pkgutil.resolve_name(f"{package}.base:{base}")

    @property
    def _base_name(self) -> str:
        return self.base.replace(":", ".")


def _named(cls: type, name: str) -> type:
    if "name" not in vars(cls):  # its own: an inherited name is another one's
        cls.name = name
    return cls


def _same(one: type, two: type) -> bool:
    """Whether two classes are one: the same module imported again, or a file that was edited or run as a script."""
    if one.__qualname__ != two.__qualname__:
        return False
    first, second = (user_files.origin(cls.__module__) for cls in (one, two))
    if first is None and second is None:
        return one.__module__ == two.__module__
    stems = [cls.__module__.rpartition(".")[2] for cls in (one, two)]
    names = [stem if source is None else source.filename[:-3] for stem, source in zip(stems, (first, second))]
    return names[0] == names[1]


_METHODS = {
    "latent": ("latent", "lepo"),
    "learned": ("hrpo", "tarpo"),
    "neighbor": ("neighbor", "orthogonal"),
    "soft": ("moi", "selar", "soft"),
    "soft_grpo": ("dirichlet", "gumbel", "normal"),
    "token_draws": ("cuts", "multiplex", "none"),
}
_GATES = {"further": ("bursts", "confidence", "first", "swi", "top_margin")}
perturbations = Registry(
    "perturbation", "perturbations:Perturbation", "perturbations.methods", "ngrpo.perturbations", _METHODS
)
gates = Registry("gate", "perturbations:Gate", "perturbations.gates", "ngrpo.gates", _GATES)
buffers = Registry(
    "replay buffer", "perturbations:ReplayBuffer", "perturbations.replay.buffers", "ngrpo.replay_buffers"
)

available, get, address = perturbations.available, perturbations.get, perturbations.address
register, create = perturbations.register, perturbations.create
register_gate, create_gate, register_buffer = gates.register, gates.create, buffers.register
