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
    """The B tokens that one step of the rollout is about to draw.

    Attributes:
        logits: z divided by the request's temperature, (B, V) float32.
        temperature: the request's temperature, (B,) float32.
        generated: the number of earlier tokens of each response, (B,) int64.
        step: the training step of each response, from 0, (B,) int64.
        answer: the number of each response among those to its prompt, from 0, (B,) int64; None where each is the only
            one.
        answers: how many responses there are to its prompt, (B,) int64; None where each is the only one.
    """

    logits: Tensor
    temperature: Tensor
    generated: Tensor
    step: Tensor
    answer: Tensor | None = None
    answers: Tensor | None = None

    def entropies(self) -> Tensor:
        """The entropy of the model's own distribution, softmax(z), in nats: (B,) float32, 0 or above and never -0."""
        log_p = torch.log_softmax(self.logits * self.temperature.unsqueeze(-1), dim=-1)
        finite_log_p = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # 0 · -inf would be NaN
        negative_entropy = (log_p.exp() * finite_log_p).sum(dim=-1)
        # abs() and not a minus: where one token is possible the sum is 0, and x / -0.0 would be -inf.
        return negative_entropy.abs()


@dataclass(frozen=True)
class PastStep:
    """The rollouts of one training step."""

    factor: float  # of their temperature
    entropy: float  # the mean over their tokens at that temperature, in nats


@dataclass(frozen=True)
class Run:
    """The constants of a run."""

    steps: int  # training steps
    temperature: float  # --rollout.temperature
    vocabulary: int  # V


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
        """The temperature's factor, > 0, of the rollouts for training step ``len(past)``.

        ``past``: the earlier steps, the first one at index 0.
        """
        return 1.0

    @property
    def follows_training(self) -> bool:
        """Whether the rollouts of a step depend on those of the steps before."""
        return type(self).factor_of_step is not SamplingSchedule.factor_of_step

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method: the loss is weighted by min(π / π_rollout, 10)."""
        return dict(TRUNCATED_WEIGHTS)
