# SPDX-License-Identifier: Apache-2.0
"""Functions compiled on a GPU: one mixing for rollout and replay, and what the compiler does not take."""

import logging

import pytest
import torch
from torch import Tensor

from perturbations import edit as edits
from perturbations.compilation import Compiled, twice
from perturbations.edit import InputEdit, mix, realise

TOKENS = 500
CANDIDATES = 33
HIDDEN = 256


def waiting(x: Tensor) -> Tensor:
    if x.sum().item() > 0:
        return x + 1
    return x - 1


def wrong(x: Tensor) -> Tensor:
    print("a line", end="")  # which the compiler does not take
    raise ValueError("k is too large")


def test_what_does_not_compile_runs_as_it_stands_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = Compiled(waiting, "the steps of perturbation mine")
    with caplog.at_level(logging.WARNING, "ngrpo.rollout"):
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    (record,) = [record for record in caplog.records if record.name == "ngrpo.rollout"]
    message = record.getMessage()
    assert message.startswith("the steps of perturbation mine: torch.compile does not take it (")
    assert "\n" not in message


def test_a_mistake_in_a_perturbation_stays_its_own_error() -> None:
    with pytest.raises(ValueError, match="k is too large"):
        Compiled(wrong, "mine")(torch.ones(2))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the path of a GPU, on a CPU."""
    monkeypatch.setattr(edits, "on_gpu", lambda device: True)


def random_edit(count: int, draws: torch.Generator) -> tuple[InputEdit, Tensor]:
    """An edit of ``count`` positions with noise, and the noise's keys."""
    edit = InputEdit(
        ids=torch.randint(0, TOKENS, (count, CANDIDATES), generator=draws),
        weights=torch.rand(count, CANDIDATES, generator=draws).softmax(-1),
        sigma=torch.rand(count, generator=draws),
    )
    return edit, torch.randint(0, 1 << 40, (count,), generator=draws)


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 70])
def test_rollout_and_replay_round_alike(gpu: None, count: int, dtype: torch.dtype) -> None:
    """A step's looking up and mixing, that of a recomputation and a trainer's: equal bit for bit."""
    draws = torch.Generator().manual_seed(count)
    matrix = torch.randn(TOKENS, HIDDEN, generator=draws).to(dtype)
    edit, keys = random_edit(count, draws)

    def lookup(ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, matrix)

    def step(ids: Tensor, weights: Tensor, sigma: Tensor, keys: Tensor) -> Tensor:
        return realise(InputEdit(ids.long(), weights, sigma), lookup, keys)

    compiled_step = Compiled(step, "a step")
    with torch.inference_mode():
        recomputed = realise(edit, lookup, keys)
        rolled_out = compiled_step(
            twice(edit.ids.int()),
            twice(edit.weights),
            twice(edit.sigma),
            twice(keys),
        )
    trained = matrix.clone().requires_grad_()
    replayed = mix(trained[edit.ids], edit, keys)
    assert torch.equal(replayed, recomputed)
    assert torch.equal(rolled_out[:count], recomputed)

    gradient = torch.randn(count, HIDDEN, generator=draws).to(dtype)
    replayed.backward(gradient)
    uncompiled = matrix.clone().requires_grad_()
    edits._mixed(uncompiled[edit.ids], edit.weights, edit.sigma, None, keys, None).backward(gradient)
    torch.testing.assert_close(trained.grad, uncompiled.grad)


def test_a_gpus_replay_is_compiled_and_a_cpus_is_not(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler specialises on a batch of 1, so one position is computed as two."""
    compiled_sizes: list[int] = []

    def noted(rows: Tensor, at: Tensor, *_: object) -> Tensor:
        compiled_sizes.append(len(at))
        return torch.zeros(len(at), 1)

    edit, keys = random_edit(1, torch.Generator())
    candidates = torch.randn(1, CANDIDATES, HIDDEN)
    monkeypatch.setattr(edits, "_mixed_rows", noted)
    mix(candidates, edit, keys)
    assert compiled_sizes == [2]

    monkeypatch.setattr(edits, "on_gpu", lambda device: False)
    mix(candidates, edit, keys)
    assert compiled_sizes == [2]
