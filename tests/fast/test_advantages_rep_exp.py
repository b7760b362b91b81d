# SPDX-License-Identifier: Apache-2.0
"""RepExp against numbers derived by hand, and the hidden states on their way to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf import step_advantages
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from tests.fast.openrlhf_doubles import maker
from tests.fast.run import run_with


def rep_exp(rewards: list[float], states: list[list[float]], **options: float) -> Tensor:
    given = torch.tensor([states], dtype=torch.float64)
    return advantages.compute("rep_exp", torch.tensor([rewards], dtype=torch.float64), further=given, **options)[0]


def test_by_hand() -> None:
    """States 5, 2, 2 less their mean are 2, −1, −1: Σ = 2 + 6, and bonuses 4/8, 1/8, 1/8, of which β takes 2."""
    found = rep_exp([1, 1, 1], [[5.0], [2.0], [2.0]], beta=2.0, ridge=2.0)
    expected = advantages.compute("group_norm", torch.tensor([[2.0, 1.25, 1.25]], dtype=torch.float64))[0]
    torch.testing.assert_close(found, expected)
    assert not rep_exp([0, 0.5, 0.5], [[5.0], [2.0], [2.0]], beta=0.0)[1:].diff().any()


def test_a_group_without_a_right_answer_has_no_bonus() -> None:
    assert not rep_exp([0, 0, 0], [[5.0], [2.0], [2.0]]).any()


def test_the_bonus_is_the_leverage_in_the_states_own_space() -> None:
    """h̄ᵀ Σ⁻¹ h̄ by the definition, where Σ is D × D, for D below and above G."""
    for dim in (2, 9):
        states = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
        centered = states - states.mean(0)
        covariance = 0.3 * torch.eye(dim, dtype=torch.float64) + centered.T @ centered
        bonus = torch.stack([h @ torch.linalg.inv(covariance) @ h for h in centered])
        rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        expected = advantages.compute("group_norm", (rewards + 0.7 * bonus).unsqueeze(0))[0]
        torch.testing.assert_close(rep_exp(rewards.tolist(), states.tolist(), beta=0.7, ridge=0.3), expected)


class Actor(nn.Module):
    """As OpenRLHF's ``Actor``: a model under it, whose last hidden state of a token is its id and that times ten."""

    def __init__(self, packing: bool) -> None:
        super().__init__()
        self.model, self.packing_samples, self.temperature = nn.Module(), packing, 1.0
        self.head = nn.Linear(2, 3)
        self.model.get_output_embeddings = lambda: self.head

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        states = torch.stack([sequences, 10 * sequences], dim=-1).float()
        self.head(states[attention_mask.bool()].unsqueeze(0) if self.packing_samples else states)
        return -sequences[:, 1:].float()


class ModelActor:
    def __init__(self, packing: bool) -> None:
        self.actor = Actor(packing)

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        return self.actor(sequences, action_mask, attention_mask)


@pytest.mark.parametrize("packing", [False, True])
def test_the_actor_keeps_means_over_the_response_s_own_tokens(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 1 2 and 9, responses 3 4 and 5 6 7, the 6 untrained; padded on either side."""
    run_with(monkeypatch, advantage={"name": "rep_exp"})
    sequences = torch.tensor([[0, 1, 2, 3, 4, 0], [9, 5, 6, 7, 0, 0]])
    attention = (sequences > 0).long()
    action_mask = torch.tensor([[0, 0, 1, 1, 0], [1, 0, 1, 0, 0]])
    actor = policy_model_actor(ModelActor)(packing)
    assert torch.equal(actor.forward(sequences, action_mask, attention), -sequences[:, 1:].float())
    assert [kept.tolist() for kept in actor.hand_over("mean_hidden")] == [[[3.5, 35.0], [6.0, 60.0]]]


def test_a_step_projects_them_by_its_own_sparse_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 numbers, 1 in 20 enters a projection, as ±√(20 / 8); lengths stay on average."""
    means = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    asked: list[Any] = []
    monkeypatch.setattr(step_advantages, "kept_by_actors", lambda *what: asked.append(what[1]) or means.split([2, 4]))
    made = [SimpleNamespace(index=part, rewards=torch.zeros(len(part))) for part in ([5, 0], [1, 2, 3, 4])]
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=3), train=SimpleNamespace(seed=7))
    advantage = advantages.create("rep_exp", dim=8)
    found = [step_advantages._hidden(maker(args=args, training_step=step), made, advantage) for step in (0, 0, 1)]
    assert asked == ["mean_hidden"] * 3 and found[0].shape == (6, 8)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])

    monkeypatch.setattr(step_advantages, "kept_by_actors", lambda *what: [torch.eye(400)])
    projection = step_advantages._hidden(maker(args=args, training_step=0), made, advantage)
    assert projection.abs().unique().tolist() == pytest.approx([0.0, (20 / 8) ** 0.5])
    assert (projection != 0.0).float().mean().item() == pytest.approx(1 / 20, abs=0.01)
    torch.testing.assert_close(means @ projection, found[0])
