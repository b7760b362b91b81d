# SPDX-License-Identifier: Apache-2.0
"""A second round for prompts whose answers are all wrong: `ngrpo train --second_round NAME`.

It says which prompts are asked then; right answers to these take the place of wrong
ones, and are trained as answers to the prompt of the data. It goes with any advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.second_rounds.base import SecondRound

_FAMILIES = {"lope": ("lope", "repeat")}
registry = Registry("second round", f"{__name__}:SecondRound", __name__, "ngrpo.second_rounds", _FAMILIES)
register, available, create = registry.register, registry.available, registry.create

__all__ = ["SecondRound", "available", "create", "register", "registry"]


__getattr__ = registry.base_of_package
