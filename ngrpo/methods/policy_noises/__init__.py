# SPDX-License-Identifier: Apache-2.0
"""Noise on the weights of the engines, with any perturbation: `ngrpo train --policy_noise NAME`.

The trainer's own weights and those of an evaluation are clean.
"""

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.policy_noises.base import PolicyNoise as PolicyNoise

_FAMILIES = {"weight_noises": ("aqn", "psn")}
registry = Registry("policy noise", f"{__name__}:PolicyNoise", __name__, "ngrpo.policy_noises", _FAMILIES)
register = registry.register
available = registry.available
create = registry.create
__getattr__ = registry.base_of_package
