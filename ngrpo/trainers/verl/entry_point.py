# SPDX-License-Identifier: Apache-2.0
"""verl's plugin entry point (group ``verl.plugins``): the trainer's mode ``perturbed``, and a platform for CPUs.

verl loads it at the end of ``import verl``, in each of its processes. So nothing heavy is imported here: the trainer is
registered when verl's own trainers have been. verl 0.9.1 swallows what fails here, so nothing is checked here either;
without this module verl does not know the mode ``perturbed`` and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ngrpo.trainers.verl import cpu_platform

MODE = "perturbed"
_TRAINERS = "verl.trainer.ppo.v1.trainer_sync"


class _AfterTrainers(MetaPathFinder):
    """Imports our trainer right after verl's synchronous one, which it is a subclass of."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _TRAINERS:
            return None
        sys.meta_path.remove(self)  # before the search below, which would come here again
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        from verl.trainer.ppo.v1.trainer_base import register_trainer

        from ngrpo.trainers.verl.perturbed_trainer import perturbed

        register_trainer(MODE)(perturbed(module.PPOTrainerSync))


def refuse_without_mode(words: Sequence[str]) -> None:
    """Ends a run that asks for a perturbation and for a trainer that knows none: verl would train unperturbed.

    Raises:
        SystemExit: which verl, unlike an error, does not swallow here.
    """
    asked = [word for word in words if word.lstrip("+").startswith("perturbation.")]
    if asked and f"trainer.v1.trainer_mode={MODE}" not in [word.lstrip("+") for word in words]:
        raise SystemExit(
            f"{asked[0]}: only the trainer {MODE!r} perturbs; verl's others would train without a perturbation. Add"
            f" trainer.v1.trainer_mode={MODE}."
        )


refuse_without_mode(sys.argv[1:])
cpu_platform.register()
sys.meta_path.insert(0, _AfterTrainers())
