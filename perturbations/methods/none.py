# SPDX-License-Identifier: Apache-2.0
"""No perturbation: stock rollouts and stock training."""

from dataclasses import dataclass

from perturbations import Perturbation, Proposal, Step, option, register
from perturbations.edit import one_hot


@register("none")
@dataclass(frozen=True, kw_only=True)
class NoPerturbation(Perturbation):
    """Feeds every token as it is. Nothing is installed in vLLM or OpenRLHF."""

    paper = "the unperturbed baseline"
    samples_text = True

    rate: float = option(0.0, "always 0: nothing is perturbed", low=0.0, high=0.0)

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        return Proposal(one_hot(step.sampled), step.sampled)
