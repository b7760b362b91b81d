# SPDX-License-Identifier: Apache-2.0
"""Noise on the weights that roll out: `ngrpo train --policy_noise NAME`.

One file for each, named as the noise is. It is no perturbation of inputs, and goes with any of these: the engines are
given noisy weights, while the trainer's own and those of an evaluation are clean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.policy_noises.base import PolicyNoise

registry = Registry("policy noise", f"{__name__}:PolicyNoise", __name__, "ngrpo.policy_noises")
register, available, create = registry.register, registry.available, registry.create

__all__ = ["PolicyNoise", "available", "create", "register", "registry"]


__getattr__ = registry.base_of_package
