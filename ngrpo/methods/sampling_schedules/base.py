# SPDX-License-Identifier: Apache-2.0
"""The contract of a sampling schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import TRUNCATED_WEIGHTS, Default, Flags
from ngrpo.methods.sampling_schedules import registry as _registry
from perturbations.options import Options, option


@dataclass(frozen=True)
class NextTokens:
    """The B tokens that one step of the rollout is about to draw: (B, V) or (B,) each, float32 or int64.

    ``logits`` are z divided by the request's ``temperature``. ``generated`` counts the earlier tokens of each response;
    ``step`` is its training step, from 0; ``answer`` its number, from 0, among the ``answers`` to its prompt. The last
    two are None where each response is the only one.
    """

    logits: Tensor
    temperature: Tensor
    generated: Tensor
    step: Tensor
    answer: Tensor | None = None
    answers: Tensor | None = None

    def entropies(self) -> Tensor:
        """Of the model's own distribution, softmax(z), in nats: (B,) float32, 0 or above and never -0."""
        log_p = torch.log_softmax(self.logits * self.temperature.unsqueeze(-1), dim=-1)
        # abs() and not a minus: where one token is possible the sum is 0, and x / -0.0 would be -inf.
        return (log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(dim=-1).abs()


@dataclass(frozen=True)
class PastStep:
    """The rollouts of one training step: the factor of their temperature, and their mean entropy in nats at it."""

    factor: float
    entropy: float


@dataclass(frozen=True)
class Run:
    """A run's training steps, its ``--rollout.temperature``, and V."""

    steps: int
    temperature: float
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class SamplingSchedule(Options):
    """A sampling schedule with its options. Subclasses are frozen dataclasses with fields from ``option``.

    It overrides :meth:`factor`, :meth:`factor_of_step`, or both; ``--rollout.temperature`` is multiplied by both.
    """

    kind: ClassVar[str] = "sampling schedule"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"

    evaluation: bool = option(False, "evaluations during the training follow it too")

    def factor(self, at: NextTokens) -> Tensor | None:
        """The temperature's factor at each position, (B,) float32, > 0; None where it is the same for a whole response.

        Each row is a function of its own row of ``at``, and no operation waits for the device.
        """
        return None

    def factor_of_step(self, past: Sequence[PastStep], run: Run) -> float:
        """The temperature's factor, > 0, of the rollouts for training step ``len(past)``; ``past``: earlier steps."""
        return 1.0

    @property
    def follows_training(self) -> bool:
        """Whether the rollouts of a step depend on those of the steps before."""
        return type(self).factor_of_step is not SamplingSchedule.factor_of_step

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method: the loss is weighted by min(π / π_rollout, 10)."""
        return dict(TRUNCATED_WEIGHTS)
