# SPDX-License-Identifier: Apache-2.0
"""A perturbation of your own, in one file: swap in the runner-up's embedding, as strongly as you like.

ngrpo check ./examples/custom_perturbation.py share=0.3                   # does it keep the contract? seconds
ngrpo train --perturbation ./examples/custom_perturbation.py:RunnerUp --perturbation.share 0.3 ...
"""

from dataclasses import dataclass

import torch

from perturbations import InputEdit, Perturbation, Proposal, Step, check_perturbation, option, register


@register("runner_up")
@dataclass(frozen=True, kw_only=True)
class RunnerUp(Perturbation):
    """Feeds (1 - share) · E[sampled] + share · E[most likely other token]; the text keeps the sampled token."""

    paper = "an example"
    samples_text = True  # the text keeps step.sampled

    rate: float = option(0.1, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    share: float = option(0.2, "weight of the other token", low=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        best = step.logits.topk(2, dim=-1).indices
        other = torch.where(best[:, 0] == step.sampled, best[:, 1], best[:, 0])
        ids = torch.stack([step.sampled, other], dim=-1)
        weights = torch.tensor([1 - self.share, self.share], device=ids.device).expand(len(ids), 2)
        return Proposal(InputEdit(ids, weights), step.sampled)


if __name__ == "__main__":
    check_perturbation(RunnerUp, share=0.3)
    print("runner_up keeps the contract of a perturbation")
