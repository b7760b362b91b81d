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

# Log-probabilities of 1/2 and 1/4.
HALF = math.log(0.5)
QUARTER = math.log(0.25)


def float64(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_group(name: str, rewards: list[float], further: list[Any], **options: float) -> Tensor:
    """The advantages of one group, whose responses have these further numbers."""
    advantage = advantages.create(name, **options)
    return advantage.compute(float64([rewards]), float64([further]))[0]


def group_norm(rewards: list[float]) -> Tensor:
    """GRPO's advantages of one group."""
    return advantages.compute("group_norm", float64([rewards]))[0]


def experience_maker(group_size: int, **attributes: Any) -> Any:
    """An experience maker of a run with this many responses to a prompt."""
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        train=SimpleNamespace(seed=7),
    )
    return maker(args=args, **attributes)


# --- LENS --------------------------------------------------------------------------------------------


def lens(rewards: list[float], log_probs: list[float], token_counts: list[int], **options: float) -> Tensor:
    """LENS for one group, whose responses have this log-probability at every token, and this many tokens."""
    further = []
    for log_prob, token_count in zip(log_probs, token_counts, strict=True):
        further.append([log_prob * token_count, token_count])
    return of_group("lens", rewards, further, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # α is a quarter by default.
        pytest.param({}, [-1 / 24, 1 / 24], id="default"),
        pytest.param({"alpha": 1.0}, [-1 / 6, 1 / 6], id="alpha of one"),
    ],
)
def test_lens_of_wrong_responses(options: dict[str, float], expected: list[float]) -> None:
    """π̄ = 1/2, 1/4, so D = 1; r̃ = −1/2 · (1/2)/(1/2) and −1/2 · (1/4)/(3/4), mean −1/3; α of ∓1/6."""
    values = lens([0, 0], log_probs=[HALF, QUARTER], token_counts=[2, 3], **options)
    assert values.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["lens", "reinforce_rej"])
def test_rewards_within_rounding_of_right_are_a_uniform_group(name: str) -> None:
    """A sum of float32 may be 0.9999996: its difference from 1 is no difference between responses."""
    rewards = [0.9999996, 1.0, 0.9999998]
    log_probs_and_counts = [[HALF, 1], [QUARTER, 1], [HALF, 2]]
    assert not of_group(name, rewards, log_probs_and_counts).any()


@pytest.mark.parametrize(
    ("token_count", "calibrated"),
    [
        # The right response's probability is 1/2, D_imp = 1 / (1/4 · 2) = 2; (1/2)/(3/2) and (1/4)/(7/4) of 1/4.
        pytest.param(1, [1.0, -1 / 12, -1 / 28, -1 / 28], id="1 token"),
        # It is 1/2^40: D = 2 · 1/2; (1/2)/(1/2) and (1/4)/(3/4) of 1/4.
        pytest.param(40, [1.0, -1 / 4, -1 / 12, -1 / 12], id="40 tokens"),
        # Of 9,000 tokens it is 0 in float64.
        pytest.param(9000, [1.0, -1 / 4, -1 / 12, -1 / 12], id="9000 tokens"),
    ],
)
def test_lens_of_a_mixed_group(token_count: int, calibrated: list[float]) -> None:
    values = lens(
        [1, 0, 0, 0],
        log_probs=[HALF, HALF, QUARTER, QUARTER],
        token_counts=[token_count] * 4,
    )
    torch.testing.assert_close(values, group_norm(calibrated))


@pytest.mark.parametrize(
    ("rewards", "log_probs", "calibrated"),
    [
        # π 1/2 each, D 1: (1/2)/(1/2) of 1/3, of which a reward of 1/2 pays half.
        pytest.param(
            [1.0, 0.5, 0.0],
            [HALF, HALF, HALF],
            [1.0, 1 / 3, -1 / 3],
            id="a half",
        ),
        # D_imp = 1 / ((2 + 1/4 · 2) / 3) = 6/5; (1/2)/(7/10) of 1/3 is 5/21, and 3/4 of it; (1/4)/(19/20) of 1/3.
        pytest.param(
            [1.0, 0.25, 0.0],
            [HALF, HALF, QUARTER],
            [1.0, 1 / 14, -5 / 57],
            id="a quarter",
        ),
    ],
)
def test_lens_of_fractional_rewards(rewards: list[float], log_probs: list[float], calibrated: list[float]) -> None:
    values = lens(rewards, log_probs, token_counts=[1, 1, 1])
    torch.testing.assert_close(values, group_norm(calibrated))


def test_lens_takes_no_estimate_of_d_from_a_group_without_a_right_response() -> None:
    """π 1/2 each: D is 1, where Eq. 14 has 2. r̃ is 1/2 − 1/4 and −1/2, 3/8 from their mean, of which α takes 1/4."""
    values = lens([0.5, 0.0], log_probs=[HALF, HALF], token_counts=[1, 1], alpha=0.25)
    assert values.tolist() == pytest.approx([3 / 32, -3 / 32])


def test_lens_s_penalty_is_the_gradient_of_the_likelihood() -> None:
    """Theorem 1: −π / (D − π) ∇ log π is the gradient of log(1 − π / D), for one token a response."""
    log_probs = torch.tensor([-0.3, -1.2, -2.5], dtype=torch.float64, requires_grad=True)
    difficulty = 2.0 * log_probs.detach().exp().max()
    (1.0 - log_probs.exp() / difficulty).log().sum().backward()
    values = lens([0, 0, 0], log_probs.tolist(), token_counts=[1, 1, 1], alpha=1.0)
    torch.testing.assert_close(3.0 * values, log_probs.grad - log_probs.grad.mean())


def test_a_step_gives_lens_sums_over_trained_tokens() -> None:
    """Two prompts of two responses, mixed; masked tokens hold NaN, as OpenRLHF's padding may hold anything."""
    nan = float("nan")
    log_probs_by_index = {
        0: [-1.0, -2.0, nan],
        1: [-1.0, nan, nan],
        2: [-3.0, -3.0, -3.0],
        3: [nan, -4.0, nan],
    }
    experiences = []
    for indices in ([3, 0], [1, 2]):
        log_probs = torch.tensor([log_probs_by_index[index] for index in indices])
        experience = SimpleNamespace(
            index=indices,
            rewards=torch.zeros(2),
            action_log_probs=log_probs,
            action_mask=(~log_probs.isnan()).float(),
        )
        experiences.append(experience)
    further_of_calls = []

    class Noting(type(advantages.create("lens"))):
        def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
            further_of_calls.append(further)
            return rewards

    step_advantages.compute(experience_maker(2), experiences, Noting())
    (further,) = further_of_calls
    assert further.tolist() == [
        [[-3.0, 2.0], [-1.0, 1.0]],
        [[-9.0, 3.0], [-4.0, 1.0]],
    ]


# --- RepExp ------------------------------------------------------------------------------------------

STATES = [[5.0], [2.0], [2.0]]


def test_rep_exp_by_hand() -> None:
    """States 5, 2, 2 less their mean are 2, −1, −1: Σ = 2 + 6, and bonuses 4/8, 1/8, 1/8, of which β takes 2."""
    values = of_group("rep_exp", [1, 1, 1], STATES, beta=2.0, ridge=2.0)
    rewards_and_bonuses = float64([[2.0, 1.25, 1.25]])
    torch.testing.assert_close(values, normalised(rewards_and_bonuses, least=1e-6)[0])


def test_rep_exp_without_a_bonus_is_of_the_rewards_alone() -> None:
    """The last two responses have the same reward."""
    values = of_group("rep_exp", [0, 0.5, 0.5], STATES, beta=0.0)
    assert values[0] < 0.0
    assert values[1] == values[2]


def test_rep_exp_gives_no_bonus_to_a_group_without_a_right_response() -> None:
    assert not of_group("rep_exp", [0, 0, 0], STATES).any()


def test_rep_exp_s_bonus_of_nearly_equal_states_stays_small() -> None:
    """States that differ by rounding: r̂ differs by about 4e-8, of which 1e-6 makes 0.04 and 1e-9 about 1."""
    states = [[1.0 + 1e-4 * place] for place in range(4)]
    largest = of_group("rep_exp", [1, 1, 1, 1], states).abs().max()
    assert 0.0 < largest < 0.1


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "lens",
            [math.nan, 3.0],
            r"log_probs of prompt 0, response 1 are \[nan, 3\.0\]\. Finite numbers",
        ),
        (
            "lens",
            [-1.0, 0.0],
            "prompt 0, response 1 has 0 tokens. At least one is needed",
        ),
        (
            "rep_exp",
            [0.5, math.inf],
            r"hidden of prompt 0, response 1 are \[0\.5, inf\]",
        ),
    ],
)
def test_further_numbers_are_checked(name: str, wrong: list[float], message: str) -> None:
    """One such number made its whole group NaN."""
    further = torch.tensor([[[-1.0, 2.0], wrong]])
    with pytest.raises(UsageError, match=f"advantage {name}: {message}"):
        advantages.compute(name, torch.tensor([[1.0, 0.0]]), further=further)


def test_copo_s_counts_are_checked() -> None:
    counts = torch.tensor([[math.nan, 2.0]])
    with pytest.raises(UsageError, match=r"counts of prompt 0, response 0 are nan"):
        advantages.compute("copo", torch.tensor([[1.0, 0.0]]), further=counts)


@pytest.mark.parametrize("dim", [2, 9])
def test_rep_exp_s_bonus_is_the_leverage_in_the_states_own_space(dim: int) -> None:
    """h̄ᵀ Σ⁻¹ h̄ by the definition, where Σ is D × D, for D below and above G."""
    states = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0]
    values = of_group("rep_exp", rewards, states.tolist(), beta=0.7, ridge=0.3)

    centered = states - states.mean(0)
    covariance = 0.3 * torch.eye(dim, dtype=torch.float64) + centered.T @ centered
    inverse = torch.linalg.inv(covariance)
    bonus = torch.stack([state @ inverse @ state for state in centered])
    rewards_and_bonuses = float64(rewards) + 0.7 * bonus
    torch.testing.assert_close(values, normalised(rewards_and_bonuses.unsqueeze(0), least=1e-6)[0])


class Actor(nn.Module):
    """As OpenRLHF's ``Actor``: a model under it, whose last hidden state of a token is its id and that times ten."""

    def __init__(self, packing: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.packing_samples = packing
        self.temperature = 1.0
        self.head = nn.Linear(2, 3)
        self.model.get_output_embeddings = lambda: self.head

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        states = torch.stack([sequences, 10 * sequences], dim=-1).float()
        if self.packing_samples:
            states = states[attention_mask.bool()].unsqueeze(0)
        self.head(states)
        return -sequences[:, 1:].float()


class ModelActor:
    def __init__(self, packing: bool) -> None:
        self.actor = Actor(packing)

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        return self.actor(sequences, action_mask, attention_mask)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_actor_keeps_means_over_the_response_s_own_tokens(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 1 2 and 9, responses 3 4 and 5 6 7, the 6 untrained; padded on either side."""
    run_with(monkeypatch, advantage={"name": "rep_exp"})
    sequences = torch.tensor(
        [
            [0, 1, 2, 3, 4, 0],
            [9, 5, 6, 7, 0, 0],
        ]
    )
    action_mask = torch.tensor(
        [
            [0, 0, 1, 1, 0],
            [1, 0, 1, 0, 0],
        ]
    )
    actor = policy_model_actor(ModelActor)(packing)
    log_probs = actor.forward(sequences, action_mask, (sequences > 0).long())
    assert torch.equal(log_probs, -sequences[:, 1:].float())
    (means,) = actor.hand_over("mean_hidden")
    assert means.tolist() == [[3.5, 35.0], [6.0, 60.0]]


def experiences_of(*micro_batches: list[int]) -> list[SimpleNamespace]:
    """Micro-batches of responses with these indices."""
    return [SimpleNamespace(index=indices, rewards=torch.zeros(len(indices))) for indices in micro_batches]


def test_a_step_projects_means_by_its_own_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in a step, another in the next step."""
    means = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    names: list[str] = []

    def kept_by_actors(maker: Any, name: str, rewards: list[Tensor]) -> list[Tensor]:
        names.append(name)
        return list(means.split([2, 4]))

    monkeypatch.setattr(step_advantages, "kept_by_actors", kept_by_actors)
    experiences = experiences_of([5, 0], [1, 2, 3, 4])
    rep_exp = advantages.create("rep_exp", dim=8)

    first = step_advantages._hidden(experience_maker(3, training_step=0), experiences, rep_exp)
    again = step_advantages._hidden(experience_maker(3, training_step=0), experiences, rep_exp)
    next_step = step_advantages._hidden(experience_maker(3, training_step=1), experiences, rep_exp)
    assert names == ["mean_hidden"] * 3
    assert first.shape == (6, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, next_step)


def test_the_projection_is_a_sparse_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 numbers, 1 in 20 enters a projection, as ±√(20 / 8); lengths stay on average."""
    means = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    experiences = experiences_of([5, 0], [1, 2, 3, 4])
    rep_exp = advantages.create("rep_exp", dim=8)

    def projected(states: Tensor) -> Tensor:
        monkeypatch.setattr(step_advantages, "kept_by_actors", lambda *_: [states])
        return step_advantages._hidden(experience_maker(3, training_step=0), experiences, rep_exp)

    matrix = projected(torch.eye(400))
    assert matrix.abs().unique().tolist() == pytest.approx([0.0, (20 / 8) ** 0.5])
    assert (matrix != 0.0).float().mean().item() == pytest.approx(1 / 20, abs=0.01)
    torch.testing.assert_close(means @ matrix, projected(means))


# --- SPO ---------------------------------------------------------------------------------------------


def test_spo_s_tracker() -> None:
    """ρ = 3/4, so α + β starts at 4. p: 1 0 0 0 is 1 of 4. q has one response: the step's mean, 0.4, is 1.6 of 4.

    p then sees 1, 1: before it 1/4; after it α = 3/4 + 2, β = 9/4, so 2.75/5. q had 1: (2.2, 1.8), 0.55. It sees 0:
    (1.65, 2.35) after, 1.65/4.
    """
    values = Values()
    assert values.take_and_update("pqppp", [1, 1, 0, 0, 0], 0.75) == pytest.approx([0.25, 0.4, 0.25, 0.25, 0.25])
    assert values.take_and_update("pqp", [1, 0, 1], 0.75) == pytest.approx([0.25, 0.55, 0.25])
    assert values.take_and_update("qp", [0.5, 0.5], 0.75) == pytest.approx([0.4125, 0.55])


def test_spo_s_tracker_counts_each_wrong_response() -> None:
    """ρ = 3/4 and a half at the start: (2, 2). Two wrong responses make it (1.5, 3.5), and 1.5/5 is 0.3."""
    values = Values()
    values.take_and_update("pp", [1, 0], 0.75)
    assert values.take_and_update("pp", [0, 0], 0.75) == pytest.approx([0.5, 0.5])
    assert values.take_and_update("pp", [0, 0], 0.75) == pytest.approx([0.3, 0.3])


def spo_step(maker: Any, rewards: list[float], micro_batches: list[list[int]]) -> list[float]:
    """A step's advantages in the order of generation: two responses to p, then two to q.

    The responses are dealt to micro-batches in any order.
    """
    rewards_by_index = torch.tensor(rewards, dtype=torch.float32)
    prompts = "ppqq"
    experiences = []
    for indices in micro_batches:
        experience = SimpleNamespace(
            index=indices,
            rewards=rewards_by_index[indices],
            prompts=[prompts[index] for index in indices],
        )
        experiences.append(experience)
    spo = advantages.create("spo", rho=0.75)
    step = step_advantages.compute(maker, experiences, spo)
    by_index = torch.empty_like(rewards_by_index)
    for indices, values in zip(micro_batches, step.advantages, strict=True):
        by_index[indices] = values
    return by_index.tolist()


def test_a_step_takes_off_the_value_before_it_and_goes_on_after_a_resume() -> None:
    """First r − v̂ is ½, −½, 0, 0, of mean 0 and variance 1/6; then ½, ½, −1, 0, of mean 0 and variance ½."""
    before = our_trainer(Trainer)()
    before.experience_maker = experience_maker(2)
    before.experience_maker.prompt_memory = Visits()  # of a checkpoint with another advantage
    values = spo_step(before.experience_maker, [1, 0, 1, 1], micro_batches=[[2], [0, 3, 1]])
    assert values == pytest.approx([1.5**0.5, -(1.5**0.5), 0.0, 0.0])
    before.save_logs_and_checkpoints(1, LOGGED, {"global_step": 1, "data_loader_state_dict": {}})
    saved_values = pickle.loads(Trainer.saved)["ngrpo"]["prompt_memory"]
    assert "Values of 2 prompts" in repr(saved_values)

    resumed = our_trainer(Trainer)()
    resumed.experience_maker = experience_maker(2)
    resumed.init_checkpoint_states()
    values = spo_step(resumed.experience_maker, [1, 1, 0, 1], micro_batches=[[1, 3, 2], [0]])
    assert values == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5), 0.0])


def test_openrlhf_s_estimator_needs_no_group_and_leaves_spo_s_numbers_alone() -> None:
    """It does not normalize them again, and clips beyond √128, the most of 128 responses."""
    run = run_of(preset="grpo", advantage={"name": "spo"})
    flags = Flags(["--rollout.n_samples_per_prompt", "1", "--rollout.batch_size", "128"])
    defaults = complete_run.of_preset(CompleteRun(run=run, flags=flags))
    assert defaults["--algo.advantage.estimator"] == "flash_reinforce"
    assert defaults["--reward.clip_range"] == ("-12", "12")


@pytest.mark.parametrize("right", [0.9999998, 1.0, 1.0000002])
def test_a_reward_within_rounding_of_1_is_right(right: float) -> None:
    weighted = advantages.compute("w_reinforce", torch.tensor([[right, 0.0]]))
    assert weighted[0].tolist() == pytest.approx([0.1, -1.0], abs=1e-6)
    states = [[5.0], [2.0], [-1.0]]
    of_one = of_group("rep_exp", [1.0, 0.0, 0.0], states, beta=2.0)
    torch.testing.assert_close(of_group("rep_exp", [right, 0.0, 0.0], states, beta=2.0), of_one, rtol=1e-5, atol=1e-5)
