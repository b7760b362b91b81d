# SPDX-License-Identifier: Apache-2.0
"""No perturbation: stock rollouts and stock training."""

from __future__ import annotations

from dataclasses import dataclass

from perturbations.base import Perturbation, Proposal
from perturbations.edit import one_hot
from perturbations.options import option
from perturbations.registry import register
from perturbations.step import Step


@register("none")
@dataclass(frozen=True, kw_only=True)
class NoPerturbation(Perturbation):
    """Feeds every token as it is. Nothing is installed in vLLM or OpenRLHF."""

    paper = "the unperturbed baseline"

    rate: float = option(0.0, "always 0: nothing is perturbed", low=0.0, high=0.0)

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        return Proposal(one_hot(step.sampled), step.sampled)

    @property
    def samples_text(self) -> bool:
        """Nothing is changed."""
        return True
