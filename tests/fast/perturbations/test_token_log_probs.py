# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens at rows of logits, and that their gradient is made once."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ngrpo.trainers.common.log_probs import without_flash_attn
from perturbations import token_log_probs
from perturbations.token_log_probs import log_probs_at


def random_logits(rows: int, vocabulary: int) -> Tensor:
    return 3.0 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_values_and_gradient_are_those_of_log_softmax(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_log_probs, "_SLICE", 2)
    rows = torch.tensor([3, 0, 0])  # a row twice, and others not at all
    ids = torch.tensor([[1, 6], [2, 2], [2, 5]])
    weights = torch.tensor([[0.5, -2.0], [3.0, 1.0], [1.5, 0.25]], dtype=torch.float64)
    logits = random_logits(5, 7).requires_grad_()
    expected_logits = logits.detach().clone().requires_grad_()

    log_probs = log_probs_at(logits, rows, ids, scale)
    (log_probs * weights).sum().backward()
    expected = (scale * expected_logits).log_softmax(dim=-1)[rows.unsqueeze(-1), ids]
    (expected * weights).sum().backward()
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(logits.grad, expected_logits.grad)


def test_a_second_derivative_is_refused() -> None:
    logits = random_logits(3, 7).requires_grad_()
    log_probs = log_probs_at(logits, torch.tensor([0]), torch.tensor([[1]]))
    (gradient,) = torch.autograd.grad(log_probs.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.more
def test_values_and_gradient_are_openrlhfs_own_to_the_bit() -> None:
    """Of 2,500 tokens, which OpenRLHF sums in three slices."""
    pytest.importorskip("deepspeed")
    package = find_spec("openrlhf")
    if package is None:
        pytest.skip("needs OpenRLHF")
    # The file alone, since its package needs flash-attn.
    spec = spec_from_file_location("openrlhf_utils", Path(package.origin).parent / "models" / "utils.py")
    utils = module_from_spec(spec)
    spec.loader.exec_module(utils)
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 300, (2, 1250), generator=draws)
    weights = torch.randn(2, 1250, generator=draws)
    results = []
    for function in (utils.log_probs_from_logits, without_flash_attn(utils.log_probs_from_logits)):
        logits = random_logits(2500, 300).float().view(2, 1250, 300).requires_grad_()
        log_probs = function(logits, labels)
        (log_probs * weights).sum().backward()
        results.append((log_probs.detach(), logits.grad))
    (values, gradient), (own_values, own_gradient) = results
    assert torch.equal(values, own_values)
    assert torch.equal(gradient, own_gradient)
