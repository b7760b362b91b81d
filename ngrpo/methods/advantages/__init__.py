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

# The estimators of OpenRLHF 0.11.2 (--algo.advantage.estimator), which are not repeated here.
OPENRLHF_ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce")

_FAMILIES = {
    "best_of_k": ("pass_at_k", "pkpo"),
    "groupwise": ("copo", "group_norm", "ngrpo", "rs_grpo"),
    "verified": ("lens", "maxrl", "nsr", "psr", "reinforce_rej", "rep_exp", "s_grpo", "spo", "w_reinforce"),
}
registry = Registry("advantage", f"{__name__}:Advantage", __name__, "ngrpo.advantages", _FAMILIES)
register = registry.register
available = registry.available


def create(name: str, **options: object) -> Advantage:
    """Makes an advantage, as :meth:`perturbations.registry.Registry.create`."""
    if name.lower() in ("n-grpo", "n_grpo"):
        raise UsageError(
            f"unknown advantage {name!r}: two methods have nearly this name. N-GRPO, the mixing of neighbors, is"
            " --perturbation neighbor; NGRPO, negative-enhanced GRPO, is --advantage ngrpo."
        )
    if name in OPENRLHF_ESTIMATORS:
        raise UsageError(
            f"unknown advantage {name!r}: OpenRLHF computes that one itself; leave --advantage out and give"
            f" --algo.advantage.estimator {name}. Ours: {', '.join(available())}."
        )
    return registry.create(name, **options)


def compute(name: str, rewards: Tensor, *, further: Tensor | None = None, **options: object) -> Tensor:
    """The advantages of P groups of G responses, (P, G) float32 or wider; ``UsageError`` for wrong input.

    Args:
        name: of the advantage.
        rewards: (P, G), one row for each prompt.
        further: the numbers that the advantage's attribute ``needs`` names, (P, G, …).
        options: of the advantage.
    """
    return create(name, **options).compute(rewards, further)


__getattr__ = registry.base_of_package
