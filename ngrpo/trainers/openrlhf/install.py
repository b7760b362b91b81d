# SPDX-License-Identifier: Apache-2.0
"""Puts the rows of `seams.py` in place, in the driver and in every Ray worker process.

Nothing is imported early. A finder in front of `sys.meta_path` applies a module's rows right after that
module has been executed, before anybody can copy a name out of it. So a Ray worker that never imports
OpenRLHF pays nothing, and the order of imports does not matter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.hardware.processes import add_programs_to_path
from ngrpo.machine.hardware.stand_ins import WITHOUT_FLASH_ATTN, has_flash_attn
from ngrpo.trainers.openrlhf.seams import IMPORT, Seam, active
from perturbations.errors import require


def setup_hook(conditions: Sequence[str], run: RunConfig) -> Callable[[], None]:
    """Ray's `worker_process_setup_hook`: runs in every worker before any of its tasks or actors.

    Ray keeps the function, and with it the run, in its own store: no disk need be shared, and none of it stands in an
    environment variable, of which Linux allows 131,072 bytes. Relative paths mean in a worker what they mean here, also
    on a cluster that was started in another folder.
    """
    here = os.getcwd()

    def in_worker() -> None:
        with suppress(OSError):  # another node need not have the folder
            os.chdir(here)
        add_programs_to_path()
        begin(run)
        install_in_worker(conditions)

    return in_worker


def install_in_worker(conditions: Sequence[str]) -> None:
    """As :func:`install`; nodes of a cluster may differ, and the driver found out about its own only."""
    install(conditions if has_flash_attn() else [*conditions, WITHOUT_FLASH_ATTN])


def install(conditions: Iterable[str]) -> None:
    """Puts the active rows in place."""
    place(active(conditions))


def place(seams: Iterable[Seam]) -> None:
    """Puts rows in place, now for modules already imported and on import for the others."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        raise RuntimeError("The seams are already in place in this process; install() runs once.")
    by_module: dict[str, list[Seam]] = {}
    for seam in seams:
        if seam.ours is not None:
            by_module.setdefault(seam.module, []).append(seam)
    for name, rows in by_module.items():
        if name in sys.modules:
            _apply(sys.modules[name], rows)
    pending = {name: rows for name, rows in by_module.items() if name not in sys.modules}
    sys.meta_path.insert(0, _Finder(pending))


def _ours(seam: Seam) -> Any:
    module, name = require(seam.ours, "ours").split(":")
    return getattr(import_module(module), name)


def _apply(module: ModuleType, rows: Sequence[Seam]) -> None:
    for seam in rows:
        if seam.attribute == IMPORT:
            continue
        owner: Any = module
        *path, name = seam.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        ours = _ours(seam)
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
    def __init__(self, pending: dict[str, list[Seam]]) -> None:
        self._pending = pending

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        rows = self._pending.pop(name, None)  # Gone first, so that the search below passes us by.
        if rows is None:
            return None
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, rows)
        return spec


class _Loader(Loader):
    """The module's own loader, with the rows applied after (or, for `IMPORT`, around) execution."""

    def __init__(self, loader: Loader, rows: list[Seam]) -> None:
        self._loader, self._rows = loader, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        require(module.__spec__, "the module's spec").loader = module.__loader__ = self._loader
        with ExitStack() as contexts:
            for seam in self._rows:
                if seam.attribute == IMPORT:
                    contexts.enter_context(_ours(seam)())
            self._loader.exec_module(module)
        _apply(module, self._rows)
