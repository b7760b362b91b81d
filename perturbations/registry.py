# SPDX-License-Identifier: Apache-2.0
"""Registries: classes of one kind by name, from the tree, from installed packages, from a module or a file."""

import dataclasses
import difflib
import importlib
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from inspect import get_annotations, isroutine
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from perturbations import user_files
from perturbations.errors import UsageError, nearest
from perturbations.options import Options

_Class = TypeVar("_Class", bound=Options)
GATE_OPTION = "gate."
"""What an option of the gate begins with, among the options of its perturbation."""
_NOT_NAMES = ("base", "default")  # modules of a tree package in which no class has a name


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
        self.kind = kind
        self.base = base
        self.tree = tree
        self.group = group
        self.families = families or {}
        self.registered: dict[str, type[Options]] = {}
        Registry.instances.append(self)

    def register(self, name: str) -> Callable[[type[_Class]], type[_Class]]:
        """Class decorator that gives a class its name, the value of its flag; ``UsageError`` where another has it."""

        if not isinstance(name, str):
            raise UsageError(f"@register needs the name of the {self.kind}: write @register('my_name').")
        if not re.fullmatch(r"\w[\w-]*", name):
            # A colon or .py would be read as package.module:Name or ./file.py, a comma or a blank as several names.
            raise UsageError(
                f"@register({name!r}): the name of a {self.kind} has letters, digits, '_' and '-' alone:"
                f" write @register({re.sub('[^a-zA-Z0-9]+', '_', name).strip('_') or 'my_name'!r})."
            )

        def decorate(cls: type[_Class]) -> type[_Class]:
            owner = self._other_owner(name, cls)
            if owner is not None:
                raise UsageError(f"{self.kind} {name!r} is the name of {owner}; give {self.address(cls)} another name.")
            cls.name = name
            self.registered[name] = cls
            return cls

        return decorate

    def _other_owner(self, name: str, cls: type) -> str | None:
        """What has the name already, other than the class: a module of the tree, or a registered class."""
        module_in_tree = self.in_tree().get(name)
        if module_in_tree is not None and module_in_tree != cls.__module__:
            return module_in_tree
        registered = self.registered.get(name)
        if registered is not None and not _same(registered, cls):
            return f"{registered.__module__}.{registered.__qualname__}"
        return None

    def in_tree(self) -> dict[str, str]:
        """Names in the tree, and their modules."""
        package = importlib.import_module(self.tree)
        module_of_name: dict[str, str] = {}
        for module in pkgutil.iter_modules(package.__path__):
            if module.name in _NOT_NAMES:
                continue
            for name in self.families.get(module.name, (module.name,)):
                module_of_name[name] = f"{self.tree}.{module.name}"
        return dict(sorted(module_of_name.items()))

    def installed(self) -> dict[str, EntryPoint]:
        """Names from installed packages, and their entry points, without those that are :attr:`hidden`."""
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self.hidden}

    @cached_property  # `create` looks here each time, and reading the entry points takes 20 ms
    def hidden(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages whose names the tree has too: a name is the tree's method."""
        in_tree = self.in_tree()
        return {point.name: point for point in entry_points(group=self.group) if point.name in in_tree}

    def hidden_note(self, name: str) -> str:
        """A warning where a name hides the method of an installed package, else the empty string."""
        if name not in self.hidden:
            return ""
        target = self.hidden[name].value
        return (
            f"{self.kind} {name!r} is the in-tree method, which hides {target} of an installed package. Write {target}"
            " for the package's."
        )

    def available(self) -> dict[str, str]:
        """All names and the module, file or entry point of each."""
        homes = {name: point.value for name, point in self.installed().items()}
        homes.update(self.in_tree())
        for name, cls in self.registered.items():  # the last, as `get` prefers a registered class
            file = user_files.origin(cls.__module__)
            homes[name] = cls.__module__ if file is None else file.filename
        return dict(sorted(homes.items()))

    def get(self, name: str, source: str | None = None) -> type:
        """The class of a registered name, ``./file.py:Name`` (or ``./file.py``), or ``package.module:Name``.

        ``source``: the file's text as :meth:`source` packs it. ``UsageError`` for an unknown name or a wrong target.
        """
        if name in self.registered and source is None:
            return self.registered[name]
        file = user_files.split(name)
        if file is not None:
            path, attribute = file
            return self._from_file(name, path, attribute, source)
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
        names = self.available()
        if re.fullmatch("n[-_]?grpo", name.lower()):
            hint = " N-GRPO is --perturbation neighbor, and NGRPO is --advantage ngrpo."
        elif f"{name}.py" in os.listdir():
            hint = f" Did you mean the file './{name}.py'?"
        else:
            hint = nearest(name, names)
        raise UsageError(
            f"unknown {self.kind} {name!r}.{hint} Available: {', '.join(names)};"
            " or ./file.py:Name or package.module:Name for your own."
        )

    def create(self, name: str, **options: object) -> Any:
        """Makes an object of this kind; ``UsageError`` for an unknown name or option, or a value out of range.

        ``name``: as in :meth:`get`. ``gate.margin`` is an option of the option ``gate``, ``source`` the text of a file.
        """
        source = options.pop("source", None)
        hidden_note = self.hidden_note(name)
        if hidden_note:
            warnings.warn(hidden_note, stacklevel=2)
        cls = self.get(name, None if source is None else str(source))
        for field in dataclasses.fields(cls):
            self._make_nested(field, options)
        self._refuse_options_of_others(cls, name, options)
        cls.check_option_names(options)
        self.check_complete(cls, name, options)
        return cls(**options)

    def _make_nested(self, field: dataclasses.Field, options: dict[str, object]) -> None:
        """Makes the object of a field that has options of its own, such as ``gate`` with ``gate.margin``.

        Changes ``options``: takes the nested ones out, and puts the object in place of its name.
        """
        nested = field.metadata.get("registry")
        prefix = f"{field.name}."
        nested_keys = [key for key in options if key.startswith(prefix)]
        if nested is None or not nested_keys:
            return
        name = options.get(field.name, field.default)
        if not isinstance(name, str) or name.lower() == "none":
            raise UsageError(
                f"option {nested_keys[0]!r} is given, but no {nested.kind}'s name."
                f" Name one as option {field.name!r} (available: {', '.join(nested.available())})."
            )
        nested_options = {key.removeprefix(prefix): options.pop(key) for key in nested_keys}
        options[field.name] = nested.create(name, **nested_options)

    def _refuse_options_of_others(self, cls: type[Options], name: str, options: Iterable[str]) -> None:
        """Raises ``UsageError`` for an option that the class lacks and others of the tree have."""
        for option_name in options:
            if option_name in cls.option_names():
                continue
            owners = [owner for owner in self.in_tree() if option_name in self.get(owner).option_names()]
            if owners:
                raise UsageError(
                    f"option {option_name!r} belongs to {self.kind} {' and '.join(owners)}, not to {name!r}."
                    f" Leave it out, or choose {owners[0]!r}."
                )

    def check_complete(self, cls: type, name: str, options: Iterable[str] = ()) -> None:
        """Raises ``UsageError`` for a user's class, given as ``name`` with ``options``, that cannot be made."""
        label = f"{self.kind} {name!r}: {cls.__qualname__}"
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        if missing:
            raise UsageError(
                f"{label} does not define {missing}, which {self._base_name} leaves to it."
                " Write it; `ngrpo new` writes a file with every method."
            )
        attributes = vars(cls)
        is_dataclass = "__dataclass_fields__" in attributes
        annotations = attributes.get("__annotations__", {}).values()
        has_fields = any("ClassVar" not in str(annotation) for annotation in annotations)
        if not is_dataclass and ("__init__" in attributes or has_fields):
            raise UsageError(
                f"{label} is not a dataclass, so its options are not seen."
                " Write @dataclass(frozen=True, kw_only=True) above the class,"
                ' and each option as a field: share: float = option(0.5, "help").'
            )
        _check_overrides(cls, label)
        for field in dataclasses.fields(cls):
            for base in cls.__mro__[1:]:
                if isroutine(vars(base).get(field.name)):
                    raise UsageError(
                        f"{label}: its option {field.name!r} hides {base.__name__}.{field.name}, a method that is"
                        " called. Give it another name."
                    )
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            if field.init and not has_default and field.name not in options:
                raise UsageError(f"{label} has no default for its option {field.name!r}. Give it one.")

    def address(self, cls: type) -> str:
        """The name by which another process finds the class, with :meth:`source` where there is one."""
        source = user_files.origin(cls.__module__)
        if source is not None:
            return f"{source.filename}:{cls.__qualname__}"
        target = f"{cls.__module__}:{cls.__qualname__}"
        name = vars(cls).get("name")  # not an inherited name, which belongs to the base class
        if name in self.in_tree():
            return name
        for installed_name, point in self.installed().items():
            if point.value == target:
                return installed_name
        return target

    def source(self, cls: type) -> str | None:
        """The packed text of a class's file; None for a class of an importable module."""
        source = user_files.origin(cls.__module__)
        return None if source is None else source.packed

    def _from_file(self, name: str, path: str, attribute: str, source: str | None) -> type:
        """The class ``attribute`` of a file; the file's only one of this kind where ``attribute`` is empty."""
        label = f"{self.kind} {name!r}"
        module = _run_file(path, source, label)
        base = self.base_class()
        file = Path(path).name
        defined = {
            class_name: value
            for class_name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        }
        of_kind = {class_name: value for class_name, value in defined.items() if issubclass(value, base)}
        if not attribute:
            in_registry = self.registered.values()
            registered = [class_name for class_name, value in of_kind.items() if value in in_registry]
            candidates = registered or list(of_kind)
            if len(candidates) > 1:
                choice = ", ".join(f"{path}:{candidate}" for candidate in candidates)
                raise UsageError(f"{label}: {file} holds several {self.kind}s. Name one of them: {choice}.")
            attribute = candidates[0] if candidates else ""
        cls = getattr(module, attribute, None) if attribute else None
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            return _named(cls, self.address(cls))
        raise self._no_such_class(f"{label}: {file}", path, attribute, defined, of_kind)

    def _no_such_class(
        self, file: str, path: str, attribute: str, defined: Mapping[str, type], of_kind: Mapping[str, type]
    ) -> UsageError:
        """The error for a file without a class of this kind, or without the one that was asked for.

        Args:
            file: the file, in words.
            path: the file, as the user gave it.
            attribute: the class that was asked for; empty for any.
            defined: all classes of the file, by name.
            of_kind: those of this kind.
        """
        if not of_kind:
            classes = []
            other_kinds = []
            for class_name, value in defined.items():
                if hasattr(value, "registry"):
                    other_kinds.append(value.registry.kind)
                    class_name = f"{class_name} ({value.registry.kind})"
                classes.append(class_name)
            contents = f"It defines {', '.join(classes)}." if classes else "It defines no class."
            fix = f"Derive one from {self._base_name}."
            if other_kinds:
                kind_word = other_kinds[0].replace(" ", "_")
                fix = f"Check it with: ngrpo check {kind_word} {path}; or derive a {self.kind} from {self._base_name}."
            return UsageError(f"{file} holds no {self.kind}. {contents} {fix}")
        return UsageError(
            f"{file} has no {self.kind} {attribute!r}.{nearest(attribute, of_kind)} It holds: {', '.join(of_kind)}."
        )

    def _from_module(self, name: str, target: str) -> type:
        """The class at ``package.module:Name``."""
        try:
            cls = pkgutil.resolve_name(target)
        except Exception as error:  # importing a user's module may raise anything
            raise UsageError(
                f"{self.kind} {name!r}: cannot load {target!r} ({error})."
                " Install its package, put its folder on PYTHONPATH, or name its file: ./file.py:Name."
            ) from error
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
        """The base class in messages, as ``package.Name``."""
        return self.base.replace(":", ".")


def _run_file(path: str, source: str | None, label: str) -> ModuleType:
    """The module of a file, or of its packed text; where it fails, what it has registered is taken back."""
    registered_before = [(registry, dict(registry.registered)) for registry in Registry.instances]
    try:
        if source is None:
            return user_files.from_file(path, label)
        return user_files.from_text(path, source, label)
    except ValueError:
        for registry, registered in registered_before:
            registry.registered = registered
        raise


def _check_overrides(cls: type, label: str) -> None:
    """Raises ``UsageError`` for what a class defines in vain, so that the base class's own value would be used."""
    of_bases = [name for base in cls.__mro__[1:] for name in (*vars(base), *get_annotations(base))]
    public_names = {name for name in of_bases if not name.startswith("_")}
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if name in cls.option_names():
            _check_annotated(cls, name, value, label)
        else:
            _check_overriding(cls, name, value, public_names, label)


def _check_annotated(cls: type, name: str, value: object, label: str) -> None:
    """Raises ``UsageError`` for another default without an annotation, which a dataclass does not see."""
    if name in get_annotations(cls):
        return
    kind = cls.__dataclass_fields__[name].type
    word = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    raise UsageError(
        f"{label}: its {name} = {value!r} has no annotation, so the option keeps the base class's default."
        f' Write {name}: {word} = option({value!r}, "what it is").'
    )


def _check_overriding(cls: type, name: str, value: object, public_names: set[str], label: str) -> None:
    """Raises ``UsageError`` for an attribute that is not what a base class reads: misspelled, or without @property.

    ``public_names``: of the base classes' attributes.
    """
    if name not in public_names:
        similar = difflib.get_close_matches(name, public_names, n=1, cutoff=0.88)
        if similar:
            raise UsageError(
                f"{label}: nothing reads its {name!r}. Did you mean {similar[0]!r}? Give a helper of your own"
                f" another name, such as '_{name}'."
            )
        return
    is_method_of_base = any(isroutine(vars(base).get(name)) for base in cls.__mro__[1:])
    if isroutine(value) and not is_method_of_base:
        raise UsageError(
            f"{label}: its {name!r} is a method, which is true without a call. It is read as a value:"
            " write @property above it."
        )


def _named(cls: type, name: str) -> type:
    """The class, with this name unless it has one; an inherited name belongs to its base class."""
    if "name" not in vars(cls):
        cls.name = name
    return cls


def _same(one: type, two: type) -> bool:
    """Whether two classes are one: the same module imported again, or a file that was edited or run as a script."""
    if one.__qualname__ != two.__qualname__:
        return False
    if user_files.origin(one.__module__) is None and user_files.origin(two.__module__) is None:
        return one.__module__ == two.__module__
    return _file_stem(one) == _file_stem(two)


def _file_stem(cls: type) -> str:
    """The name of the file that defines the class, without ``.py``."""
    source = user_files.origin(cls.__module__)
    if source is not None:
        return source.filename.removesuffix(".py")
    return cls.__module__.rpartition(".")[2]


# Modules that hold several classes, and the names of these.
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

available = perturbations.available
get = perturbations.get
address = perturbations.address
register = perturbations.register
create = perturbations.create
register_gate = gates.register
create_gate = gates.create
register_buffer = buffers.register
