# SPDX-License-Identifier: Apache-2.0
"""Credits: their formulas by hand, and how a step's tokens get them in OpenRLHF's experiences."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.config import parse, rules
from ngrpo.methods import credits
from ngrpo.methods.credits.base import StepTokens
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed
from tests.fast import openrlhf_doubles
from tests.fast.run import run_with


def step(
    advantages: Tensor,
    entropies: Tensor | None = None,
    log_probs: list[float] | None = None,
    answers: list[int] | None = None,
    groups: list[int] | None = None,
) -> StepTokens:
    """Tokens of a step; of one answer where nothing else is said."""
    zeros = torch.zeros(len(advantages))
    return StepTokens(
        advantages,
        zeros if entropies is None else entropies,
        zeros if log_probs is None else torch.tensor(log_probs),
        zeros.long() if answers is None else torch.tensor(answers),
        zeros.long() if groups is None else torch.tensor(groups),
    )


A = torch.tensor([1.5, 1.5, -0.5, -0.5, -0.5, 0.0])
H = torch.tensor([0.1, 2.0, 0.3, 1.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.5, [0.0, 1.5, 0.0, -0.5, 0.0, 0.0]),  # the three largest entropies: 3, 2, 1
        (0.2, [0.0, 1.5, 0.0, 0.0, 0.0, 0.0]),  # ⌈0.2 · 6⌉ = 2 of six tokens
        (1.0, A.tolist()),
        (1e-9, [0.0] * 6),  # at least one, which here has no advantage
    ],
)
def test_top_entropy(fraction: float, expected: list[float]) -> None:
    assert credits.create("top_entropy", fraction=fraction).formula(step(A, H)).tolist() == expected


def test_top_entropy_keeps_all_of_an_equal_entropy() -> None:
    found = credits.create("top_entropy").formula(step(torch.ones(5), torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])))
    assert found.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert credits.create("top_entropy").formula(step(torch.zeros(0))).tolist() == []


def test_entropy_bonus() -> None:
    """min(.4 H, |A| / 2): .04; .75 of .8; .12; .25 of .4; 0; 0 of 1.2."""
    found = credits.create("entropy_bonus").formula(step(A, H))
    assert found.tolist() == pytest.approx([1.54, 2.25, -0.38, -0.25, -0.5, 0.0], abs=1e-6)
    found = credits.create("entropy_bonus", alpha=1.0, kappa=4.0).formula(step(A, H))
    assert found.tolist() == pytest.approx([1.6, 1.875, -0.375, -0.375, -0.5, 0.0], abs=1e-6)


# Four answers of 1, 2, 3 and 2 tokens to one prompt, and two of 1 and 2 to another.
ANSWERS, GROUPS = [0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5], [0] * 8 + [1] * 3
OF_ANSWERS = torch.tensor([0.5, 0.5, 0.5, 0.7, 0.7, 0.7, -1.7, -1.7, -1.0, -0.5, -0.5])
# Means −1.5, −1, −2, −.1, −.1, −.2: of those with A > 0 the second answer is the likeliest, though its sum is not.
LOG_PROBS = [-1.5, -1.5, -0.5, -2.0, -3.0, -1.0, -0.1, -0.1, -0.1, -0.1, -0.3]


def test_first_token() -> None:
    """The second answer keeps its first token's advantage; a prompt without A > 0 keeps all."""
    made = step(OF_ANSWERS, None, LOG_PROBS, ANSWERS, GROUPS)
    assert made.first.tolist() == [True, True, False, True, False, False, True, False, True, True, False]
    expected = OF_ANSWERS.clone()
    expected[[0, 3, 6]] = 0.0
    assert torch.equal(credits.create("first_token").formula(made), expected)
    expected[6] = -1.7  # a wrong answer's
    assert torch.equal(credits.create("first_token", wrong="keep").formula(made), expected)
    # Of equal means the first answer; groups need not stand in their order.
    both = step(torch.tensor([1.0, 2.0, 3.0, 4.0]), None, [-1.0, -1.0, -1.0, -2.0], [0, 1, 2, 3], [1, 0, 1, 0])
    assert credits.create("first_token").formula(both).tolist() == [1.0, 2.0, 0.0, 0.0]
    assert credits.create("first_token").formula(step(torch.zeros(0))).tolist() == []
    # Answers and groups without a token have a number too.
    one = torch.ones(2)
    gaps = StepTokens(one, one, -one, torch.tensor([0, 2]), torch.tensor([0, 2]))
    assert credits.create("first_token").formula(gaps).tolist() == [1.0, 1.0]


def test_the_command_line() -> None:
    words = ["--model", "m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4", "--credit", "top_entropy"]
    settings = parse.run_config([*words, "--credit.fraction", "0.3"])
    assert settings.specs.get("credit") == {"name": "top_entropy", "fraction": 0.3}
    assert settings.conditions == ("credit",)
    with pytest.raises(UsageError, match="kappa='1': must be greater than 1"):
        parse.run_config(["--credit", "entropy_bonus", "--credit.kappa", "1"])
    rules.checked(parse.run_config([*words, "--preset", "grpo"]))
    with pytest.raises(UsageError, match="the ratio is of the whole response"):
        rules.checked(parse.run_config([*words, "--preset", "gspo"]))


# --- in OpenRLHF -----------------------------------------------------------------------------------


class Actor(nn.Module):
    """As OpenRLHF's: log-probabilities of the last tokens, and the entropy of all but the last row when asked."""

    def forward(
        self, sequences: Tensor, action_mask: Tensor, return_output: bool = False, return_entropy: bool = False
    ) -> Any:
        log_probs = -sequences[:, -action_mask.shape[1] :].float()
        output = SimpleNamespace(entropy=10.0 * sequences[:, 1:].float()) if return_entropy else SimpleNamespace()
        return (log_probs, output) if return_output else log_probs


class ModelActor:
    def __init__(self) -> None:
        self.actor = Actor()

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.actor(sequences, action_mask)


def test_the_actor_keeps_entropies_and_returns_what_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "top_entropy"})
    actor, plain = policy_model_actor(ModelActor)(), ModelActor()
    batches = [torch.arange(8).view(2, 4), torch.arange(3).view(1, 3)]
    masks = [torch.ones(2, 2), torch.ones(1, 1)]
    for sequences, mask in zip(batches, masks):
        assert torch.equal(actor.forward(sequences, mask, mask), plain.forward(sequences, mask))
    assert [h.tolist() for h in actor.hand_over("token_entropies")] == [[[20.0, 30.0], [60.0, 70.0]], [[20.0]]]
    assert actor.hand_over("token_entropies") == []
    assert "forward" not in vars(actor.actor), "the model's own forward is back in its place"


def experience(advantages: list[list[float]], mask: list[list[int]], index: list[int]) -> SimpleNamespace:
    made = torch.tensor(advantages)
    return SimpleNamespace(advantages=made, action_mask=torch.tensor(mask), action_log_probs=-made.abs(), index=index)


def three_answers() -> list[SimpleNamespace]:
    """Three answers; the second and the third of them are to the prompt that was asked first."""
    return [experience([[1.0, 7.0], [2.0, 2.0]], [[1, 0], [1, 1]], [2, 1]), experience([[-1.0, -1.0]], [[1, 1]], [0])]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two actors of a tensor-parallel pair each: every second one's answer counts."""
    kept = [[torch.tensor([[5.0, 9.0], [1.0, 2.0]])], [], [torch.tensor([[4.0, 8.0]])], []]
    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(get=lambda value: value))
    args = SimpleNamespace(
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=2),
        rollout=SimpleNamespace(n_samples_per_prompt=2),
        train=SimpleNamespace(seed=7),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="reinforce")),
    )
    return openrlhf_doubles.maker(
        strategy=SimpleNamespace(args=args),
        args=args,
        actor_model_group=SimpleNamespace(async_run_method=lambda method_name, what: kept),
    )


def test_the_threshold_is_that_of_the_whole_step(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    """Padding counts for nothing: the entropy of 9 is beyond its answer, so the two largest of five are 8 and 5."""
    run_with(monkeypatch, credit={"name": "top_entropy", "fraction": 0.4})
    experiences = three_answers()
    found = maker.compute_advantages_and_returns(experiences)
    assert [e.advantages.tolist() for e in found] == [[[1.0, 7.0], [0.0, 0.0]], [[0.0, -1.0]]]
    assert maker.step_measures == {
        "credit/entropy": pytest.approx(4.0),
        "credit/trained": pytest.approx(0.4),
        "credit/size": pytest.approx(2 / 7),
    }


def test_a_credit_knows_answers_and_prompts(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "top_entropy"})
    given: list[StepTokens] = []
    monkeypatch.setattr(
        type(credits.create("top_entropy")),
        "formula",
        lambda self, tokens: (given.append(tokens), tokens.advantages)[1],
    )
    maker.compute_advantages_and_returns(three_answers())
    (tokens,) = given
    assert tokens.answers.tolist() == [0, 1, 1, 2, 2] and tokens.groups.tolist() == [1, 0, 0, 0, 0]
    assert tokens.log_probs.tolist() == [-1.0, -2.0, -2.0, -1.0, -1.0]
    assert tokens.entropies.tolist() == [5.0, 1.0, 2.0, 4.0, 8.0]
    assert tokens.first.tolist() == [True, True, False, True, False]
    assert tokens.positions.tolist() == [0, 0, 1, 0, 1]
    # By its number in the step, in whatever batch it is; of the run's seed and the step.
    assert tokens.seeds.tolist() == [trajectory_seed(7, 0, place) for place in (2, 1, 1, 0, 0)]


def test_marks_ride_with_the_samples(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    """A = (1, 2, 2, −1, −1) and log p = −|A|: covariances .16, −.84, −.84, −.64, −.64."""
    run_with(monkeypatch, credit={"name": "kl_cov", "share": 0.6})
    found = maker.compute_advantages_and_returns(three_answers())
    assert [e.advantages.tolist() for e in found] == [e.advantages.tolist() for e in three_answers()]
    assert [e.kl.tolist() for e in found] == [[[True, False], [False, False]], [[True, True]]]
    run_with(monkeypatch, credit={"name": "clip_cov"})
    assert not hasattr(maker.compute_advantages_and_returns(three_answers())[0], "kl")


@pytest.mark.parametrize("method", ["formula", "marks"])
def test_a_credit_that_answers_in_another_shape(method: str, monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "kl_cov"})
    monkeypatch.setattr(type(credits.create("kl_cov")), method, lambda self, tokens: tokens.advantages[:1])
    experiences = three_answers()
    with pytest.raises(RuntimeError, match=rf"{method} returns \(1,\) for 5 tokens"):
        maker.compute_advantages_and_returns(experiences)
