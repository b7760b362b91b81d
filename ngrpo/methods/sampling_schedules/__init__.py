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
registry = Registry(
    "sampling schedule", f"{__name__}:SamplingSchedule", __name__, "ngrpo.sampling_schedules", _FAMILIES
)
register = registry.register
available = registry.available
create = registry.create
__getattr__ = registry.base_of_package
