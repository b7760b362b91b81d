# SPDX-License-Identifier: Apache-2.0
"""Functions compiled on a GPU: one mixing for rollout and replay, and what the compiler does not take."""

import logging

import pytest
import torch

from perturbations import edit as edits
from perturbations.compilation import Compiled, twice
from perturbations.edit import InputEdit, mix, realise

CANDIDATES, HIDDEN = 33, 256


def waiting(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum().item() > 0 else x - 1


def wrong(x: torch.Tensor) -> torch.Tensor:
    print("a line", end="")  # which the compiler does not take
    raise ValueError("k is too large")


def test_what_does_not_compile_runs_as_it_stands_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    part = Compiled(waiting, "the steps of perturbation mine")
    with caplog.at_level(logging.WARNING, "ngrpo.rollout"):
        for _ in range(3):
            assert part(torch.ones(2)).tolist() == [2.0, 2.0]
    (record,) = [record for record in caplog.records if record.name == "ngrpo.rollout"]
    said = record.getMessage()
    assert said.startswith("the steps of perturbation mine: torch.compile does not take it (") and "\n" not in said


def test_a_mistake_in_a_perturbation_stays_its_own_error() -> None:
    with pytest.raises(ValueError, match="k is too large"):
        Compiled(wrong, "mine")(torch.ones(2))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "on_gpu", lambda device: True)


def edit_of(count: int, draws: torch.Generator) -> tuple[InputEdit, torch.Tensor]:
    ids = torch.randint(0, 500, (count, CANDIDATES), generator=draws)
    weights = torch.rand(count, CANDIDATES, generator=draws).softmax(-1)
    sigma = torch.rand(count, generator=draws)
    return InputEdit(ids, weights, sigma), torch.randint(0, 1 << 40, (count,), generator=draws)


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 70])
def test_rollout_and_replay_round_alike(gpu: None, count: int, dtype: torch.dtype) -> None:
    """A step's looking up and mixing, that of a recomputation and a trainer's: equal bit for bit."""
    draws = torch.Generator().manual_seed(count)
    matrix = torch.randn(500, HIDDEN, generator=draws).to(dtype)
    edit, keys = edit_of(count, draws)

    def lookup(ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, matrix)

    part = Compiled(lambda ids, *rest: realise(InputEdit(ids.long(), *rest[:2]), lookup, rest[2]), "a step")
    with torch.inference_mode():
        alone = realise(edit, lookup, keys)
        rollout = part(*(twice(x) for x in (edit.ids.int(), edit.weights, edit.sigma, keys)))[:count]
    leaf = matrix.clone().requires_grad_()
    replay = mix(leaf[edit.ids], edit, keys)
    assert torch.equal(replay, alone)
    assert torch.equal(rollout, alone)
    weights = torch.randn(count, HIDDEN, generator=draws).to(dtype)
    (replay * weights).sum().backward()
    plain = matrix.clone().requires_grad_()
    (edits._mixed(plain[edit.ids], edit.weights, edit.sigma, None, keys, None) * weights).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_a_gpus_replay_is_compiled_and_a_cpus_is_not(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(edits, "_mixed_rows", lambda rows, at, *_: seen.append(len(at)) or torch.zeros(len(at), 1))
    edit, keys = edit_of(1, torch.Generator())
    mix(torch.randn(1, CANDIDATES, HIDDEN), edit, keys)
    assert seen == [2], "one position is computed as two"
    monkeypatch.undo()
    mix(torch.randn(1, CANDIDATES, HIDDEN), edit, keys)
    assert seen == [2]
