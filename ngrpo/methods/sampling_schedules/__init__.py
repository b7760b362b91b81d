# SPDX-License-Identifier: Apache-2.0
"""Temperatures that change within a response or over a run: `ngrpo train --sampling.schedule NAME`.

The rollout draws at these temperatures, the trainer scores at the one of ``--rollout.temperature``, and importance
weights correct the difference.
"""

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule as SamplingSchedule

_FAMILIES = {"temperatures": ("e3", "ead", "edt", "ladder")}
_BASE = f"{__name__}:SamplingSchedule"
registry = Registry("sampling schedule", _BASE, __name__, "ngrpo.sampling_schedules", _FAMILIES)
register, available, create = registry.register, registry.available, registry.create
__getattr__ = registry.base_of_package
