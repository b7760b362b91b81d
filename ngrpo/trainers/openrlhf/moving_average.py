# SPDX-License-Identifier: Apache-2.0
"""``--train.enable_ema``: the moving average of the actor's weights, kept in float32.

OpenRLHF 0.11.2 keeps it in the model's dtype. In bfloat16, whose steps are 0.4 to 0.8% of a weight, the change by one
update, (1 − β) times a small difference, is rounded away.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy

_AVERAGES = "float32_averages"


@around
def moving_average(
    _original: Callable[..., None],
    self: DeepspeedStrategy,
    model: nn.Module,
    model_ema: nn.Module,
    beta: float = 0.992,
    device: str = "cpu",
) -> None:
    """As `DeepspeedStrategy.moving_average`: average = β average + (1 − β) weight, once for each update.

    Averages of weights in half precision are on the CPU. ``device`` is not used: OpenRLHF passes "cuda" on any machine.
    """
    self.time_steps["ema"] += 1
    if self.time_steps["ema"] % self.accumulated_gradient and not self.use_dynamic_batch:
        return
    if not hasattr(model_ema, _AVERAGES):
        setattr(model_ema, _AVERAGES, [_in_float32(parameter) for parameter in model_ema.parameters()])
    averages: list[Tensor] = getattr(model_ema, _AVERAGES)
    with torch.no_grad():
        for average, weight, averaged in zip(averages, model.parameters(), model_ema.parameters(), strict=True):
            if weight.requires_grad:
                average.lerp_(weight.to(average.device, torch.float32), 1.0 - beta)
                averaged.copy_(average)


def _in_float32(parameter: nn.Parameter) -> Tensor:
    """A parameter's own values if they are float32, else a copy of them on the CPU."""
    return parameter.data if parameter.dtype == torch.float32 else parameter.data.to("cpu", torch.float32)
