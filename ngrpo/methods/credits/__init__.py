# SPDX-License-Identifier: Apache-2.0
"""Credit: how an answer's advantage is shared among its tokens: `ngrpo train --credit NAME`.

Works with any perturbation, any advantage, and OpenRLHF's own estimators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.credits.base import Credit

_FAMILIES = {"entropy": ("entropy_bonus", "top_entropy")}
registry = Registry("credit", f"{__name__}:Credit", __name__, "ngrpo.credits", _FAMILIES)
register, available, create = registry.register, registry.available, registry.create

__all__ = ["Credit", "available", "create", "register", "registry"]


__getattr__ = registry.base_of_package
