# SPDX-License-Identifier: Apache-2.0
r"""A gate of your own, in one file: perturb early in the response, and ever less often later.

ngrpo check gate ./examples/custom_gate.py half_life=32                   # does it keep the contract? seconds
ngrpo train --perturbation neighbor --perturbation.rate 0.5 \
    --perturbation.gate ./examples/custom_gate.py:Fading --perturbation.gate.half_life 32 ...
"""

from dataclasses import dataclass

from torch import Tensor

from perturbations import Gate, GateStep, check_gate, option, register_gate


@register_gate("fading")
@dataclass(frozen=True, kw_only=True)
class Fading(Gate):
    """Open with probability 2^(-t / half_life) at generated position t; `rate` still applies on top of it."""

    half_life: float = option(64.0, "generated positions until the gate is open half as often", above=0.0)

    def open(self, step: GateStep) -> Tensor:
        chance = 0.5 ** (step.generated / self.half_life)
        return step.uniform(1)[:, 0] < chance


if __name__ == "__main__":
    check_gate(Fading, half_life=32)
    print("fading keeps the contract of a gate")
