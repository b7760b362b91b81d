# SPDX-License-Identifier: Apache-2.0
"""Temperatures that change within an answer or over a run: `ngrpo train --sampling.schedule NAME`.

It is a property of the sampling, and goes with any perturbation: the
rollout draws at its temperatures, the trainer scores at the one that was asked for, and importance weights correct the
difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule

_FAMILIES = {"per_token": ("ead", "edt", "ladder")}
registry = Registry(
    "sampling schedule", f"{__name__}:SamplingSchedule", __name__, "ngrpo.sampling_schedules", _FAMILIES
)
register, available, create = registry.register, registry.available, registry.create

__all__ = ["SamplingSchedule", "available", "create", "register", "registry"]


__getattr__ = registry.base_of_package
