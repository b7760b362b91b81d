# SPDX-License-Identifier: Apache-2.0
"""Puts patches in place: in modules that are imported already, and in others when they are.

Nothing is imported early. A finder in front of `sys.meta_path` applies a module's patches right after that module has
been executed, before anybody can copy a name out of it. So a process that never imports OpenRLHF pays nothing, and the
order of imports does not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ngrpo.machine.upstream.sources import IMPORT, state_of
from perturbations.errors import require


@dataclass(frozen=True)
class Patch:
    """One piece of upstream code that is replaced, relied upon or called.

    Attributes:
        module: upstream module.
        attribute: dotted name inside it, or `IMPORT` for a context that holds while it is imported.
        ours: ``"module:function"``; the function takes the original and returns its replacement (for a
            ``@ray.remote`` class: takes the plain class, returns a subclass). Patches of one attribute apply in the
            order in which they are placed, each onto the one before. None: upstream stays as it is.
        when: the condition under which the patch is active, e.g. ``"cpu"``, or several with "or" between them.
        upstream: the expected state, in a form of `sources.state_of`.
        checked: distribution and release that the patch was checked with.
        why: the reason, in one line.
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


_placed: set[Patch] = set()
_pending: dict[str, list[Patch]] = {}  # by module


def place(patches: Iterable[Patch]) -> None:
    """Puts patches in place that replace something; those of an earlier call stay, and are not applied again."""
    for patch in patches:
        if patch.ours is None or patch in _placed:
            continue
        _placed.add(patch)
        if patch.module in sys.modules and patch.module not in _pending:
            _apply(sys.modules[patch.module], patch)
        else:
            _pending.setdefault(patch.module, []).append(patch)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _apply(module: ModuleType, patch: Patch) -> None:
    if patch.attribute == IMPORT:
        return
    owner: Any = module
    *path, name = patch.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, ours = getattr(owner, name), patch.replacement()
    replacement = _remote(original, ours) if hasattr(original, "__ray_metadata__") else ours(original)
    if isinstance(original, type):  # pickled by its name, under which every process finds its own
        replacement.__module__, replacement.__qualname__ = original.__module__, original.__qualname__
        replacement.__name__ = original.__name__
    setattr(owner, name, replacement)


def _remote(actor_class: Any, ours: Any) -> Any:
    """Replaces the plain class behind a ``@ray.remote`` class, with the same options.

    Ray pickles such a class by value from the driver (its module's attribute is an ActorClass, so it has
    no name to be found under): what the driver puts here is what runs in the actor's process.
    """
    import ray

    plain = actor_class.__ray_metadata__.modified_class.__ray_actor_class__
    subclass = ours(plain)
    subclass.__name__ = subclass.__qualname__ = plain.__name__  # The name in Ray's logs and errors.
    options = dict(actor_class._default_options)
    return ray.remote(**options)(subclass) if options else ray.remote(subclass)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        patches = _pending.pop(name, None)  # Gone first, so that the search below passes us by.
        if patches is None:
            return None
        try:
            spec = find_spec(name)
        finally:
            _pending[name] = patches
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, patches)
        return spec


class _Loader(Loader):
    """The module's own loader, with the patches applied after (or, for `IMPORT`, around) execution."""

    def __init__(self, loader: Loader, patches: Sequence[Patch]) -> None:
        self._loader, self._patches = loader, patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        require(module.__spec__, "the module's spec").loader = module.__loader__ = self._loader
        with ExitStack() as contexts:
            for patch in self._patches:
                if patch.attribute == IMPORT:
                    contexts.enter_context(patch.replacement()())
            self._loader.exec_module(module)
        _pending.pop(module.__name__, None)
        for patch in self._patches:
            _apply(module, patch)
