# SPDX-License-Identifier: Apache-2.0
"""LENS, RepExp and SPO against numbers derived by hand, and what a step gives them in addition to its rewards."""

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.config import complete_run
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import normalised
from ngrpo.trainers.openrlhf import step_advantages
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from ngrpo.trainers.openrlhf.step_advantages import Values, Visits
from ngrpo.trainers.openrlhf.trainer import trainer as our_trainer
from perturbations.errors import UsageError
from tests.fast.config.test_resume import Trainer
from tests.support.openrlhf_doubles import LOGGED, maker
from tests.support.run import run_of, run_with

HALF, QUARTER = torch.tensor([0.5, 0.25], dtype=torch.float64).log().tolist()


def of_group(name: str, rewards: list[float], further: list[Any], **options: float) -> Tensor:
    """The advantages of one group."""
    given = torch.tensor([further], dtype=torch.float64)
    return advantages.compute(name, torch.tensor([rewards], dtype=torch.float64), further=given, **options)[0]


def experience_maker(group: int, **attributes: Any) -> Any:
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=group), train=SimpleNamespace(seed=7))
    return maker(args=args, **attributes)


# --- LENS --------------------------------------------------------------------------------------------


def lens(rewards: list[float], answers: list[tuple[float, int]], **options: float) -> Tensor:
    """Of one group of answers, each with the log-probability of every token and the number of tokens."""
    return of_group("lens", rewards, [[each * tokens, tokens] for each, tokens in answers], **options)


def test_lens_of_wrong_answers() -> None:
    """π̄ = 1/2, 1/4, so D = 1; r̃ = −1/2 · (1/2)/(1/2) and −1/2 · (1/4)/(3/4), mean −1/3; a quarter of ∓1/6."""
    assert lens([0, 0], [(HALF, 2), (QUARTER, 3)]).tolist() == pytest.approx([-1 / 24, 1 / 24])
    assert lens([0, 0], [(HALF, 2), (QUARTER, 3)], alpha=1.0).tolist() == pytest.approx([-1 / 6, 1 / 6])


@pytest.mark.parametrize("name", ["lens", "reinforce_rej"])
def test_rewards_within_rounding_of_right_are_a_uniform_group(name: str) -> None:
    """A sum of float32 may be 0.9999996: its difference from 1 is no difference between responses."""
    assert not of_group(name, [0.9999996, 1.0, 0.9999998], [[HALF, 1], [QUARTER, 1], [HALF, 2]]).any()


@pytest.mark.parametrize(
    ("tokens", "calibrated"),
    [
        # The right answer's probability is 1/2, D_imp = 1 / (1/4 · 2) = 2; (1/2)/(3/2) and (1/4)/(7/4) of 1/4.
        (1, [1.0, -1 / 12, -1 / 28, -1 / 28]),
        # It is 1/2^40: D = 2 · 1/2; (1/2)/(1/2) and (1/4)/(3/4) of 1/4. Of 9,000 tokens it is 0 in float64.
        (40, [1.0, -1 / 4, -1 / 12, -1 / 12]),
        (9000, [1.0, -1 / 4, -1 / 12, -1 / 12]),
    ],
)
def test_lens_of_a_mixed_group(tokens: int, calibrated: list[float]) -> None:
    found = lens([1, 0, 0, 0], [(HALF, tokens), (HALF, tokens), (QUARTER, tokens), (QUARTER, tokens)])
    expected = advantages.compute("group_norm", torch.tensor([calibrated], dtype=torch.float64))[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("rewards", "confidences", "calibrated"),
    [
        # π 1/2 each, D 1: (1/2)/(1/2) of 1/3, of which a reward of 1/2 pays half.
        ([1.0, 0.5, 0.0], [HALF, HALF, HALF], [1.0, 1 / 3, -1 / 3]),
        # D_imp = 1 / ((2 + 1/4 · 2) / 3) = 6/5; (1/2)/(7/10) of 1/3 is 5/21, and 3/4 of it; (1/4)/(19/20) of 1/3.
        ([1.0, 0.25, 0.0], [HALF, HALF, QUARTER], [1.0, 1 / 14, -5 / 57]),
    ],
)
def test_lens_of_fractional_rewards(rewards: list[float], confidences: list[float], calibrated: list[float]) -> None:
    found = lens(rewards, [(value, 1) for value in confidences])
    expected = advantages.compute("group_norm", torch.tensor([calibrated], dtype=torch.float64))[0]
    torch.testing.assert_close(found, expected)


def test_lens_takes_no_estimate_of_d_from_a_group_without_a_right_answer() -> None:
    """π 1/2 each: D is 1, where Eq. 14 has 2. r̃ is 1/2 − 1/4 and −1/2, 3/8 from their mean, of which α takes 1/4."""
    found = lens([0.5, 0.0], [(HALF, 1), (HALF, 1)], alpha=0.25)
    assert found.tolist() == pytest.approx([3 / 32, -3 / 32])


def test_lens_s_penalty_is_the_gradient_of_the_likelihood() -> None:
    """Theorem 1: −π / (D − π) ∇ log π is the gradient of log(1 − π / D), for one token an answer."""
    log_probs = torch.tensor([-0.3, -1.2, -2.5], dtype=torch.float64, requires_grad=True)
    difficulty = 2.0 * log_probs.detach().exp().max()
    (1.0 - log_probs.exp() / difficulty).log().sum().backward()
    found = lens([0, 0, 0], [(value, 1) for value in log_probs.tolist()], alpha=1.0)
    torch.testing.assert_close(3.0 * found, log_probs.grad - log_probs.grad.mean())


def test_a_step_gives_sums_over_trained_tokens() -> None:
    """Two prompts of two answers, mixed; masked tokens hold NaN, as OpenRLHF's padding may hold anything."""
    nan, made = float("nan"), []
    rows = {0: [-1.0, -2.0, nan], 3: [nan, -4.0, nan], 1: [-1.0, nan, nan], 2: [-3.0, -3.0, -3.0]}
    for part in ([3, 0], [1, 2]):
        values = torch.tensor([rows[i] for i in part])
        mask = (~values.isnan()).float()
        made.append(SimpleNamespace(index=part, rewards=torch.zeros(2), action_log_probs=values, action_mask=mask))
    seen = []

    class Seeing(type(advantages.create("lens"))):
        def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
            seen.append(further)
            return rewards

    step_advantages.compute(experience_maker(2), made, Seeing())
    assert seen[0].tolist() == [[[-3.0, 2.0], [-1.0, 1.0]], [[-9.0, 3.0], [-4.0, 1.0]]]


# --- RepExp ------------------------------------------------------------------------------------------

STATES = [[5.0], [2.0], [2.0]]


def test_rep_exp() -> None:
    """States 5, 2, 2 less their mean are 2, −1, −1: Σ = 2 + 6, and bonuses 4/8, 1/8, 1/8, of which β takes 2."""
    found = of_group("rep_exp", [1, 1, 1], STATES, beta=2.0, ridge=2.0)
    expected = normalised(torch.tensor([[2.0, 1.25, 1.25]], dtype=torch.float64), least=1e-6)[0]
    torch.testing.assert_close(found, expected)
    assert not of_group("rep_exp", [0, 0.5, 0.5], STATES, beta=0.0)[1:].diff().any()
    assert not of_group("rep_exp", [0, 0, 0], STATES).any(), "a group without a right answer has no bonus"


def test_rep_exp_s_bonus_of_nearly_equal_states_stays_small() -> None:
    """States that differ by rounding: r̂ differs by about 4e-8, of which 1e-6 makes 0.04 and 1e-9 about 1."""
    states = [[1.0 + 1e-4 * place] for place in range(4)]
    assert 0.0 < of_group("rep_exp", [1, 1, 1, 1], states).abs().max() < 0.1


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("lens", [math.nan, 3.0], r"log_probs of prompt 0, response 1 are \[nan, 3\.0\]\. Finite numbers"),
        ("lens", [-1.0, 0.0], "prompt 0, response 1 has 0 tokens. At least one is needed"),
        ("rep_exp", [0.5, math.inf], r"hidden of prompt 0, response 1 are \[0\.5, inf\]"),
    ],
)
def test_what_else_they_read_is_checked(name: str, wrong: list[float], said: str) -> None:
    """One such number made its whole group NaN."""
    with pytest.raises(UsageError, match=f"advantage {name}: {said}"):
        advantages.compute(name, torch.tensor([[1.0, 0.0]]), further=torch.tensor([[[-1.0, 2.0], wrong]]))
    with pytest.raises(UsageError, match=r"counts of prompt 0, response 0 are nan"):
        advantages.compute("copo", torch.tensor([[1.0, 0.0]]), further=torch.tensor([[math.nan, 2.0]]))


@pytest.mark.parametrize("dim", [2, 9])
def test_rep_exp_s_bonus_is_the_leverage_in_the_states_own_space(dim: int) -> None:
    """h̄ᵀ Σ⁻¹ h̄ by the definition, where Σ is D × D, for D below and above G."""
    states = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    centered = states - states.mean(0)
    covariance = 0.3 * torch.eye(dim, dtype=torch.float64) + centered.T @ centered
    bonus = torch.stack([h @ torch.linalg.inv(covariance) @ h for h in centered])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    expected = normalised((rewards + 0.7 * bonus).unsqueeze(0), least=1e-6)[0]
    found = of_group("rep_exp", rewards.tolist(), states.tolist(), beta=0.7, ridge=0.3)
    torch.testing.assert_close(found, expected)


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
    action_mask = torch.tensor([[0, 0, 1, 1, 0], [1, 0, 1, 0, 0]])
    actor = policy_model_actor(ModelActor)(packing)
    assert torch.equal(actor.forward(sequences, action_mask, (sequences > 0).long()), -sequences[:, 1:].float())
    assert [kept.tolist() for kept in actor.hand_over("mean_hidden")] == [[[3.5, 35.0], [6.0, 60.0]]]


def test_a_step_projects_them_by_its_own_sparse_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 numbers, 1 in 20 enters a projection, as ±√(20 / 8); lengths stay on average."""
    means = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    asked: list[Any] = []
    monkeypatch.setattr(step_advantages, "kept_by_actors", lambda *what: asked.append(what[1]) or means.split([2, 4]))
    made = [SimpleNamespace(index=part, rewards=torch.zeros(len(part))) for part in ([5, 0], [1, 2, 3, 4])]
    advantage = advantages.create("rep_exp", dim=8)
    found = [step_advantages._hidden(experience_maker(3, training_step=step), made, advantage) for step in (0, 0, 1)]
    assert asked == ["mean_hidden"] * 3 and found[0].shape == (6, 8)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])

    monkeypatch.setattr(step_advantages, "kept_by_actors", lambda *what: [torch.eye(400)])
    projection = step_advantages._hidden(experience_maker(3, training_step=0), made, advantage)
    assert projection.abs().unique().tolist() == pytest.approx([0.0, (20 / 8) ** 0.5])
    assert (projection != 0.0).float().mean().item() == pytest.approx(1 / 20, abs=0.01)
    torch.testing.assert_close(means @ projection, found[0])


# --- SPO ---------------------------------------------------------------------------------------------


def test_spo_s_tracker() -> None:
    """ρ = 3/4, so α + β starts at 4. p: 1 0 0 0 is 1 of 4. q has one response: the step's mean, 0.4, is 1.6 of 4.

    p then sees 1, 1: before it 1/4; after it α = 3/4 + 2, β = 9/4, so 2.75/5. q had 1: (2.2, 1.8), 0.55. It sees 0:
    (1.65, 2.35) after, 1.65/4.
    """
    values = Values()
    assert values.visit("pqppp", [1, 1, 0, 0, 0], 0.75) == pytest.approx([0.25, 0.4, 0.25, 0.25, 0.25])
    assert values.visit("pqp", [1, 0, 1], 0.75) == pytest.approx([0.25, 0.55, 0.25])
    assert values.visit("qp", [0.5, 0.5], 0.75) == pytest.approx([0.4125, 0.55])


def test_spo_s_tracker_counts_each_wrong_answer() -> None:
    """ρ = 3/4 and a half at the start: (2, 2). Two wrong answers make it (1.5, 3.5), and 1.5/5 is 0.3."""
    values = Values()
    values.visit("pp", [1, 0], 0.75)
    assert values.visit("pp", [0, 0], 0.75) == pytest.approx([0.5, 0.5])
    assert values.visit("pp", [0, 0], 0.75) == pytest.approx([0.3, 0.3])


def step(at: Any, rewards: list[float], parts: list[list[int]], prompts: str) -> list[float]:
    """A step's advantages in the order of generation; its responses are dealt to micro-batches in any order."""
    given = torch.tensor(rewards, dtype=torch.float32)
    made = [SimpleNamespace(index=part, rewards=given[part], prompts=[prompts[i] for i in part]) for part in parts]
    ours = step_advantages.compute(at, made, advantages.create("spo", rho=0.75))
    found = torch.empty_like(given)
    for part, of_batch in zip(parts, ours.batches, strict=True):
        found[part] = of_batch
    return found.tolist()


def test_a_step_takes_off_the_value_before_it_and_goes_on_after_a_resume() -> None:
    first, second = our_trainer(Trainer)(), our_trainer(Trainer)()
    first.experience_maker, second.experience_maker = experience_maker(2), experience_maker(2)
    first.experience_maker.visits = Visits()  # of a checkpoint with another advantage
    # r − v̂ is ½, −½, 0, 0, of mean 0 and variance 1/6.
    wanted = pytest.approx([1.5**0.5, -(1.5**0.5), 0.0, 0.0])
    assert step(first.experience_maker, [1, 0, 1, 1], [[2], [0, 3, 1]], "ppqq") == wanted
    first.save_logs_and_checkpoints(1, LOGGED, {"global_step": 1, "data_loader_state_dict": {}})
    assert "Values of 2 prompts" in repr(pickle.loads(Trainer.saved)["ngrpo"]["visits"])
    second.init_checkpoint_states()
    # ½, ½, −1, 0, of mean 0 and variance ½.
    wanted = pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5), 0.0])
    assert step(second.experience_maker, [1, 1, 0, 1], [[1, 3, 2], [0]], "ppqq") == wanted


def test_openrlhf_s_estimator_needs_no_group_and_leaves_spo_s_numbers_alone() -> None:
    """It does not normalize them again, and clips beyond √128, the most of 128 responses."""
    run = run_of(preset="grpo", advantage={"name": "spo"})
    flags = Flags(["--rollout.n_samples_per_prompt", "1", "--rollout.batch_size", "128"])
    defaults = complete_run.of_preset(CompleteRun(run=run, flags=flags))
    assert defaults["--algo.advantage.estimator"] == "flash_reinforce"
    assert defaults["--reward.clip_range"] == ("-12", "12")
