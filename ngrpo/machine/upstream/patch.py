# SPDX-License-Identifier: Apache-2.0
"""Patches of upstream code: the state that they expect, read from sources, and how they are applied.

Importing OpenRLHF takes seconds and needs flash_attn, so nothing is imported early. A finder in front of
`sys.meta_path` applies a module's patches right after the module has been executed, before a name is copied from it.
"""

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from perturbations.errors import require

IMPORT = "<import>"
"""Instead of a definition's name: the import of the module itself."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_MISSING = "nothing of that name"


def state_of(module: str, attribute: str, expected: str, root: Path | None = None) -> str:
    """``expected`` where an upstream definition (or `IMPORT`) fits it, otherwise what was found.

    Expected is ``"sha:…"`` of the definition's source; its parameter names ``"(self, x)"``, with ``...`` for others;
    ``"class"``; or ``"import"`` for a name that the module merely imports. ``root`` has another release's sources.
    """
    source = source_of(module, root)
    if source is None:
        return f"no module {module}"
    return _state_in(source, attribute, expected)


@cache  # a comparison checks the same rows for each of its arms
def _state_in(source: str, attribute: str, expected: str) -> str:
    """As :func:`state_of`, of a module's source."""
    tree = _parsed(source)
    if expected == "import":
        return "import" if attribute == IMPORT or attribute in _imported_names(tree) else _MISSING
    node = definition(tree, attribute)
    if node is None:
        return _MISSING
    if expected.startswith("sha:"):
        return _digest(source, node)
    if isinstance(node, ast.ClassDef):
        return "class"
    signature = _signature(node)
    return expected if fnmatchcase(signature, expected.replace("...", "*")) else signature


def _imported_names(tree: ast.Module) -> set[str]:
    """The names that a module, or a function in it, imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The parameters of a function, ``(self, x, y)``; starred ones are left out."""
    parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return f"({', '.join(parameter.arg for parameter in parameters)})"


def _digest(source: str, node: Definition) -> str:
    """``sha:`` and a hash of a definition's text, and not of its tree: ast.dump differs between Python versions."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = [line.rstrip() for line in source.splitlines()[start - 1 : node.end_lineno]]
    return "sha:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@cache
def source_of(module: str, root: Path | None = None) -> str | None:
    """The source of a module, installed or below a folder; None where there is no such module."""
    if root is None:
        spec = find_spec(module.partition(".")[0])
        if spec is None or not spec.origin:
            return None
        origin = Path(spec.origin)
        root = origin.parents[1] if origin.name == "__init__.py" else origin.parent
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def definition(tree: ast.Module, dotted: str) -> Definition | None:
    """The last definition of a dotted name in a module."""
    node: ast.Module | Definition = tree
    for name in dotted.split("."):
        matches = [child for child in node.body if isinstance(child, Definition) and child.name == name]
        if not matches:
            return None
        node = matches[-1]
    return node if isinstance(node, Definition) else None


_parsed = cache(ast.parse)


@dataclass(frozen=True)
class Patch:
    """One piece of upstream code that is replaced, relied upon or called.

    Attributes:
        module: upstream module.
        attribute: dotted name inside it, or `IMPORT` for a context that holds while it is imported.
        ours: ``"module:function"`` that takes the original, of a ``@ray.remote`` class the plain class, and returns its
            replacement. Patches of one attribute apply in order, each onto the one before. None: upstream stays.
        when: the condition under which the patch is active, e.g. ``"cpu"``, or several with "or" between them.
        upstream: the expected state, in a form of :func:`state_of`.
        checked: distribution and release that the patch was checked with.
        why: the reason, as a whole sentence; the table is on a page of the docs.
    """

    module: str
    attribute: str
    ours: str | None
    when: str
    upstream: str
    checked: str
    why: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"

    def state(self, root: Path | None = None) -> str:
        """The state that is found, installed or in a folder with another release's sources."""
        return state_of(self.module, self.attribute, self.upstream, root)

    def replacement(self) -> Any:
        """The function that makes the replacement."""
        module, _, name = require(self.ours, "ours").partition(":")
        return getattr(import_module(module), name)


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for :attr:`Patch.ours`: a function of the original and its arguments becomes one that takes the
    original and returns its replacement.
    """

    def replacing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: object, **kwargs: object) -> Any:
            return replacement(original, *args, **kwargs)

        return replaced

    return replacing


_placed: set[Patch] = set()
_pending: dict[str, list[Patch]] = {}  # by module


def place(patches: Iterable[Patch]) -> None:
    """Applies patches that replace something; patches of an earlier call stay, and are not applied again."""
    for patch in patches:
        if patch.ours is None or patch in _placed:
            continue
        _placed.add(patch)
        # A module that is loaded and pending is being executed: the finder applies its patches afterwards.
        if patch.module in sys.modules and patch.module not in _pending:
            _apply(sys.modules[patch.module], patch)
        else:
            _pending.setdefault(patch.module, []).append(patch)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _apply(module: ModuleType, patch: Patch) -> None:
    """Puts the replacement in the place of the original, in a module that has been executed."""
    if patch.attribute == IMPORT:
        return
    owner: Any = module
    *path, name = patch.attribute.split(".")
    for owner_name in path:
        owner = getattr(owner, owner_name)
    original = getattr(owner, name)
    make_replacement = patch.replacement()
    if hasattr(original, "__ray_metadata__"):
        replacement = _remote(original, make_replacement)
    else:
        replacement = make_replacement(original)
    if isinstance(original, type):  # pickled by its name, under which every process finds its own
        replacement.__module__ = original.__module__
        replacement.__qualname__ = original.__qualname__
        replacement.__name__ = original.__name__
    setattr(owner, name, replacement)


def _remote(actor_class: Any, make_replacement: Callable[[Any], Any]) -> Any:
    """Replaces the plain class behind a ``@ray.remote`` class, which Ray pickles by value from the driver."""
    import ray

    plain = actor_class.__ray_metadata__.modified_class.__ray_actor_class__
    subclass = make_replacement(plain)
    subclass.__name__ = subclass.__qualname__ = plain.__name__  # The name in Ray's logs and errors.
    options = dict(actor_class._default_options)
    if options:
        return ray.remote(**options)(subclass)
    return ray.remote(subclass)  # `ray.remote()` without options is an error


class _Finder(MetaPathFinder):
    """Runs a module's own loader, with the patches applied after (or, for `IMPORT`, around) execution."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        patches = _pending.pop(name, None)  # without the entry, find_spec() below does not come back to this finder
        if patches is None:
            return None
        try:
            spec = find_spec(name)
        finally:
            _pending[name] = patches
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # a new one for each search
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with ExitStack() as contexts:
                for patch in patches:
                    if patch.attribute == IMPORT:
                        contexts.enter_context(patch.replacement()())
                execute(module)
            _pending.pop(name, None)
            for patch in patches:  # also those that place() has added during the execution
                _apply(module, patch)

        loader.exec_module = exec_module
        return spec
