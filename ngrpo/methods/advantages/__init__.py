# SPDX-License-Identifier: Apache-2.0
"""Advantages of a group of responses to one prompt, as pure functions: `ngrpo train --advantage NAME`.

``ngrpo`` is NGRPO, negative-enhanced GRPO (Nan et al., arXiv 2509.18851). N-GRPO, the mixing of semantic neighbors
(Zhu et al., arXiv 2606.10768), is ``--perturbation neighbor``. The two can be combined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbations.errors import UsageError
from perturbations.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from ngrpo.methods.advantages.base import Advantage

# What OpenRLHF 0.11.2 computes itself (--algo.advantage.estimator) and is not repeated here.
OPENRLHF_ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce")

_FAMILIES = {
    "best_of_k": ("pass_at_k", "pkpo"),
    "groupwise": ("copo", "group_norm", "ngrpo", "rs_grpo"),
    "verified": ("lens", "maxrl", "nsr", "psr", "reinforce_rej", "rep_exp", "s_grpo", "spo", "w_reinforce"),
}
registry = Registry("advantage", f"{__name__}:Advantage", __name__, "ngrpo.advantages", _FAMILIES)
register, available = registry.register, registry.available


def create(name: str, **options: object) -> Advantage:
    """Makes an advantage, as :meth:`perturbations.registry.Registry.create`."""
    if name.lower() in ("n-grpo", "n_grpo"):
        n_grpo = "N-GRPO, the mixing of neighbors, is --perturbation neighbor"
        both = f"two methods have nearly this name. {n_grpo}; NGRPO, negative-enhanced GRPO, is --advantage ngrpo"
        raise UsageError(f"unknown advantage {name!r}: {both}.")
    if name in OPENRLHF_ESTIMATORS:
        fix = f"leave --advantage out and give --algo.advantage.estimator {name}. Ours: {', '.join(available())}"
        raise UsageError(f"unknown advantage {name!r}: OpenRLHF computes that one itself; {fix}.")
    return registry.create(name, **options)


def compute(name: str, rewards: Tensor, *, further: Tensor | None = None, **options: object) -> Tensor:
    """The advantages of P groups of G responses, (P, G) float32 or wider; ``UsageError`` for wrong input.

    ``rewards``: (P, G), one row for each prompt. ``further``: what the advantage's attribute ``needs`` names.
    ``name`` and ``options``: as of :func:`create`.
    """
    return create(name, **options).compute(rewards, further)


__getattr__ = registry.base_of_package
