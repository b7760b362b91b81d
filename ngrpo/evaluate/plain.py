"""What an unperturbed evaluation installs in vLLM: nothing but this project's reproducible token draws."""

from __future__ import annotations

from dataclasses import dataclass

from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import one_hot

ADDRESS = f"{__name__}:Plain"


@dataclass(frozen=True, kw_only=True)
class Plain(Perturbation):
    """Feeds every token as it is.

    With it in place and switched off for each request, tokens are drawn from the request's seed by counter, alike in
    any batch, also on CPU, where vLLM 0.29 fails with a seed per request and chunked prefills.
    """

    paper = "none: the unperturbed model"

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        return Proposal(one_hot(step.sampled), step.sampled)

    @property
    def candidates(self) -> int:
        """One: the token itself."""
        return 1
