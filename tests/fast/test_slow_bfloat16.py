# SPDX-License-Identifier: Apache-2.0
"""Linear layers in bfloat16 where the processor is slow at it: which processors, and that only rounding differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ngrpo.hardware.slow_bfloat16 import is_slow, linear_in_float32

FORWARD = linear_in_float32(nn.Linear.forward)


@pytest.mark.parametrize(
    ("machine", "flags", "slow"),
    [
        ("x86_64", "flags\t\t: fpu avx avx2 bmi1", True),
        ("x86_64", "flags\t\t: fpu avx avx2 avx512f avx512_bf16", False),
        ("x86_64", "processor\t: 0", False),
        ("aarch64", "flags\t\t: fp asimd", False),
    ],
)
def test_processors(machine: str, flags: str, slow: bool, tmp_path: Path) -> None:
    described = tmp_path / "cpuinfo"
    described.write_text(f"vendor_id\t: X\n{flags}\n")
    assert is_slow(machine, described) is slow
    assert not is_slow(machine, tmp_path / "none")


@pytest.mark.parametrize("rows", [(3, 5), ()])
def test_products_are_float32_sums_rounded_once(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40).bfloat16()
    x = torch.randn(*rows, 96).bfloat16().requires_grad_()
    gradient = torch.randn(*rows, 40).bfloat16()
    y = FORWARD(layer, x)
    y.backward(gradient)
    exact = nn.Linear(96, 40)
    exact.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    z = x.detach().float().requires_grad_()
    exact(z).backward(gradient.float())
    assert torch.equal(y, exact(z).bfloat16())
    for ours, theirs in ((x, z), (layer.weight, exact.weight), (layer.bias, exact.bias)):
        assert ours.grad.dtype == torch.bfloat16 and torch.equal(ours.grad, theirs.grad.bfloat16())


def test_only_what_is_asked_for_has_a_gradient() -> None:
    layer = nn.Linear(4, 3, bias=False).bfloat16()
    layer.weight.requires_grad_(False)
    x = torch.ones(2, 4).bfloat16().requires_grad_()
    FORWARD(layer, x).sum().backward()
    assert layer.weight.grad is None and torch.equal(x.grad[0].float(), layer.weight.float().sum(0).bfloat16().float())


def test_other_types_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = linear_in_float32(lambda layer, x: calls.append(x.dtype))
    forward(nn.Linear(4, 3), torch.ones(2, 4))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: None)  # as DeepSpeed does under ZeRO-3
    forward(nn.Linear(4, 3).bfloat16(), torch.ones(2, 4).bfloat16())
    assert calls == [torch.float32, torch.bfloat16]
