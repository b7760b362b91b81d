# SPDX-License-Identifier: Apache-2.0
"""The moving average of weights in bfloat16, which OpenRLHF's own leaves at the initial model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ngrpo.trainers.openrlhf.moving_average import moving_average

BETA = 0.992
UPDATES = 500
STEP = 1e-6  # of each weight in each update, a usual learning rate


def strategy(accumulated: int = 1) -> SimpleNamespace:
    return SimpleNamespace(time_steps={"ema": 0}, accumulated_gradient=accumulated, use_dynamic_batch=False, stage=2)


def in_its_dtype(_strategy: object, model: nn.Module, average: nn.Module, beta: float, _device: str) -> None:
    """The formula of OpenRLHF 0.11.2, in the dtype of the weights."""
    for weight, averaged in zip(model.parameters(), average.parameters()):
        averaged.copy_((1 - beta) * weight + beta * averaged)


def way_of_the_average(update: object, dtype: torch.dtype) -> float:
    """The part of the weights' way that their average has gone after all updates."""
    initial = 0.02 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(1, 1000, bias=False, dtype=dtype)
    average = nn.Linear(1, 1000, bias=False, dtype=dtype)
    of_run = strategy()
    with torch.no_grad():
        average.weight[:, 0] = initial
        for number in range(1, UPDATES + 1):
            model.weight[:, 0] = initial + number * STEP
            update(of_run, model, average, BETA, "cpu")  # type: ignore[operator]
    return float((average.weight[:, 0].detach().float() - initial.to(dtype).float()).mean()) / (UPDATES * STEP)


def test_an_average_in_bfloat16_follows_the_weights() -> None:
    ours = moving_average(in_its_dtype)
    exact = way_of_the_average(in_its_dtype, torch.float32)
    assert way_of_the_average(ours, torch.float32) == pytest.approx(exact, rel=1e-3)
    assert way_of_the_average(ours, torch.bfloat16) == pytest.approx(exact, rel=0.05)
    assert way_of_the_average(in_its_dtype, torch.bfloat16) < 0.2 * exact


def test_an_average_by_hand() -> None:
    """Once for each update of two micro-batches: 0.5 · 2 + 0.5 · 4 = 3. A frozen weight has none."""
    model = nn.Linear(1, 1, dtype=torch.bfloat16)
    average = nn.Linear(1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter, value in ((model.weight, 4.0), (model.bias, 4.0), (average.weight, 2.0), (average.bias, 2.0)):
            parameter.fill_(value)
    model.bias.requires_grad_(False)
    of_run = strategy(accumulated=2)
    ours = moving_average(in_its_dtype)
    ours(of_run, model, average, 0.5, "cuda")
    assert average.weight.item() == 2.0
    ours(of_run, model, average, 0.5, "cuda")
    assert average.weight.item() == 3.0
    assert average.bias.item() == 2.0


def test_with_dynamic_batches_each_call_is_an_update() -> None:
    """OpenRLHF calls it once for each update then."""
    model, average = (nn.Linear(1, 1, bias=False) for _ in range(2))
    with torch.no_grad():
        model.weight.fill_(4.0)
        average.weight.fill_(2.0)
    of_run = strategy(accumulated=2)
    of_run.use_dynamic_batch = True
    moving_average(in_its_dtype)(of_run, model, average, 0.5, "cuda")
    assert average.weight.item() == 3.0
