# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on perturbations whose learned parameters, or what they compute ahead, break a promise."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perturbations import InputEdit, Perturbation, Proposal, Step
from perturbations.testing import PerturbationError, check_perturbation, inspect
from perturbations.testing.report import NotRun


class LowRank(nn.Module):
    """The mixture plus a map of it of rank D / 16."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        assert hidden_size % 16 == 0
        self.down = nn.Parameter(torch.full((hidden_size // 16, hidden_size), 0.01))
        self.up = nn.Parameter(torch.full((hidden_size, hidden_size // 16), 0.01))

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return mixture + (mixture @ self.down.float().T) @ self.up.float().T


@dataclass(frozen=True, kw_only=True)
class Good(Perturbation):
    """Feeds two tokens, mixed and mapped."""

    name = "good"

    def propose(self, step: Step) -> Proposal:
        values, ids = step.top(2)
        return Proposal(InputEdit(ids, values.softmax(-1)), step.sampled)

    def module(self, hidden_size: int) -> nn.Module:
        return LowRank(hidden_size)


class Dropping(LowRank):
    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(token, mixture), 0.5, self.training)


class OfAnotherSize(LowRank):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size + 16)


class Waiting(LowRank):
    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        if (mixture > 1e4).any():
            mixture = mixture / 2.0
        return super().forward(token, mixture)


class WithAPlainConstant(LowRank):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.offset = torch.zeros(hidden_size)

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return super().forward(token, mixture) + self.offset


class ByTheBatch(LowRank):
    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return super().forward(token, mixture) - mixture.sum(dim=0)


class InBfloat16(LowRank):
    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return super().forward(token, mixture).to(self.up.dtype)


class DrawnAnew(LowRank):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        nn.init.normal_(self.up)


class Unused(LowRank):
    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return mixture + 0.0 * self.down.float().sum()


def module_of(module: type[nn.Module]) -> dict[str, Any]:
    return {"module": lambda self, hidden_size: module(hidden_size)}


def fails(self: Good, *args: object) -> None:
    raise KeyError("scale")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"module": fails}, r"module\(64\) raises KeyError: 'scale' It must accept the hidden size of any model"),
        ({"module": lambda self, hidden_size: LowRank}, r"module\(64\) returns type. Return a torch.nn.Module"),
        (module_of(Dropping), "gives two results for the same inputs. Take dropout and draws out"),
        (module_of(OfAnotherSize), r"forward\(\) of its module in torch.float32 raises RuntimeError"),
        (module_of(Waiting), r"forward\(\) of its module waits for the device \(item"),
        (module_of(WithAPlainConstant), "a tensor on the CPU: on a GPU .* Hold constants with self.register_buffer"),
        (module_of(ByTheBatch), "a row alone gives another result"),
        (module_of(InBfloat16), "in torch.bfloat16 gives torch.bfloat16"),
        (module_of(DrawnAnew), "'up' of its module starts differently in each process"),
        (module_of(Unused), "no finite gradient reaches up"),
        ({"learning_rate": fails}, r"learning_rate\('down'\) raises KeyError"),
        ({"learning_rate": lambda self, parameter: -1.0}, r"learning_rate\('down'\) gives -1.0"),
        ({"module_options": ("start",)}, "module_options names start, which is no option"),
        ({"prepare": lambda self, embeddings: embeddings.index("cosin")}, r"prepare\(\) raises UsageError: metric="),
    ],
)
def test_a_broken_module_is_said(attributes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_perturbation(Good)
    for name, value in attributes.items():
        monkeypatch.setattr(Good, name, value)
    with pytest.raises(PerturbationError, match=message):
        check_perturbation(Good)


def test_what_needs_the_module_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Good, "module", fails)
    errors = [error for _, error in inspect(Good) if error is not None]
    assert len(errors) > 5 and all(isinstance(error, NotRun) for error in errors[1:])


def test_a_module_whose_size_divides_the_hidden_size_is_one() -> None:
    assert Good().has_parameters
