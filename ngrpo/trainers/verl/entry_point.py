# SPDX-License-Identifier: Apache-2.0
"""verl's plugin entry point (group ``verl.plugins``): the trainer's mode ``perturbed``, and a platform for CPUs.

verl loads it at the end of ``import verl``, in each of its processes. So nothing heavy is imported here: the trainer is
registered when verl's own trainers have been. verl 0.9.1 swallows what fails here, so nothing is checked here either;
without this module verl does not know the mode ``perturbed`` and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ngrpo import patches
from ngrpo.config.verl_lines import MODE
from ngrpo.trainers.verl import cpu_platform


def registered(plain: type) -> type:
    """Registers our subclass of verl's ``PPOTrainerSync``, which stays as it is."""
    from verl.trainer.ppo.v1.trainer_base import register_trainer

    from ngrpo.trainers.verl.perturbed_trainer import perturbed

    register_trainer(MODE)(perturbed(plain))
    return plain


def refuse_without_mode(argv: Sequence[str]) -> None:
    """Ends a run that asks for a perturbation and for a trainer that knows none: verl would train unperturbed.

    Raises:
        SystemExit: which verl, unlike an error, does not swallow here.
    """
    overrides = [word for word in argv if word.lstrip("+").startswith("perturbation.")]
    if overrides and f"trainer.v1.trainer_mode={MODE}" not in [word.lstrip("+") for word in argv]:
        raise SystemExit(
            f"{overrides[0]}: only the trainer {MODE!r} perturbs; verl's others would train without a perturbation. Add"
            f" trainer.v1.trainer_mode={MODE}."
        )


refuse_without_mode(sys.argv[1:])
cpu_platform.register()
patches.install(["verl"])
