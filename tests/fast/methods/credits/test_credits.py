# SPDX-License-Identifier: Apache-2.0
"""Credits: their formulas by hand, and how a step's tokens get them in OpenRLHF's experiences."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.config import run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import credits
from ngrpo.methods.credits.base import StepTokens
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed
from tests.support import openrlhf_doubles
from tests.support.run import run_of, run_with


def step(advantages: list[float], **given: list[float]) -> StepTokens:
    """Tokens of a step; of one answer where nothing else is said."""
    zeros = torch.zeros(len(advantages))
    made = StepTokens(torch.tensor(advantages), zeros, zeros, zeros.long(), zeros.long())
    return replace(made, **{name: torch.tensor(values) for name, values in given.items()})


def credited(name: str, tokens: StepTokens, **options: Any) -> list[float]:
    return credits.create(name, **options).formula(tokens).tolist()


A = [1.5, 1.5, -0.5, -0.5, -0.5, 0.0]
H = [0.1, 2.0, 0.3, 1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.5, [0.0, 1.5, 0.0, -0.5, 0.0, 0.0]),  # the three largest entropies: 3, 2, 1
        (0.2, [0.0, 1.5, 0.0, 0.0, 0.0, 0.0]),  # ⌈0.2 · 6⌉ = 2 of six tokens
        (1.0, A),
        (1e-9, [0.0] * 6),  # at least one, which here has no advantage
    ],
)
def test_top_entropy(fraction: float, expected: list[float]) -> None:
    assert credited("top_entropy", step(A, entropies=H), fraction=fraction) == expected


def test_top_entropy_keeps_all_of_an_equal_entropy() -> None:
    tokens = step([1.0] * 5, entropies=[0.0, 2.0, 1.0, 2.0, 2.0])
    assert credited("top_entropy", tokens) == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_entropy_bonus() -> None:
    """min(.4 H, |A| / 2): .04; .75 of .8; .12; .25 of .4; 0; 0 of 1.2."""
    tokens = step(A, entropies=H)
    found = credited("entropy_bonus", tokens)
    assert found == pytest.approx([1.54, 2.25, -0.38, -0.25, -0.5, 0.0], abs=1e-6)
    found = credited("entropy_bonus", tokens, alpha=1.0, kappa=4.0)
    assert found == pytest.approx([1.6, 1.875, -0.375, -0.375, -0.5, 0.0], abs=1e-6)
    with pytest.raises(UsageError, match="kappa=1: must be greater than 1"):
        credits.create("entropy_bonus", kappa=1)


@pytest.mark.parametrize("name", credits.available())
def test_a_step_without_a_token(name: str) -> None:
    credit, nothing = credits.create(name), step([])
    marks = credit.marks(nothing)
    assert credit.formula(nothing).shape == (0,) and (marks is None or marks.shape == (0,))


def test_first_token() -> None:
    """Four answers of 1, 2, 3 and 2 tokens to one prompt, and two of 1 and 2 to another.

    Mean log-probabilities −1.5, −1, −2, −.1, −.1, −.2: of those with A > 0 the second answer is the likeliest, though
    its sum is not. It keeps its first token's advantage; a prompt without A > 0 keeps all.
    """
    advantages = [0.5, 0.5, 0.5, 0.7, 0.7, 0.7, -1.7, -1.7, -1.0, -0.5, -0.5]
    log_probs = [-1.5, -1.5, -0.5, -2.0, -3.0, -1.0, -0.1, -0.1, -0.1, -0.1, -0.3]
    answers, groups = [0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5], [0] * 8 + [1] * 3
    made = step(advantages, log_probs=log_probs, answers=answers, groups=groups)
    assert made.first.nonzero().flatten().tolist() == [0, 1, 3, 6, 8, 9]
    others_lose = [0.0 if place in (0, 3, 6) else each for place, each in enumerate(made.advantages.tolist())]
    assert credited("first_token", made) == others_lose
    others_lose[6] = made.advantages[6].item()  # a wrong answer's
    assert credited("first_token", made, wrong="keep") == others_lose


def test_first_token_of_equal_means_is_the_first_answers() -> None:
    """Groups need not stand in their order, and answers and groups without a token have a number too."""
    tokens = step([1.0, 2.0, 3.0, 4.0], log_probs=[-1.0, -1.0, -1.0, -2.0], answers=[0, 1, 2, 3], groups=[1, 0, 1, 0])
    assert credited("first_token", tokens) == [1.0, 2.0, 0.0, 0.0]
    gaps = step([1.0, 1.0], log_probs=[-1.0, -1.0], answers=[0, 2], groups=[0, 2])
    assert credited("first_token", gaps) == [1.0, 1.0]


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


def three_answers() -> list[SimpleNamespace]:
    """Three answers; the second and the third of them are to the prompt that was asked first."""

    def experience(advantages: Tensor, mask: list[list[int]], index: list[int]) -> SimpleNamespace:
        masks = {"action_mask": torch.tensor(mask), "index": index}
        scored = {"rewards": torch.zeros(len(index)), "prompts": ["p"] * len(index)}
        return SimpleNamespace(advantages=advantages, action_log_probs=-advantages.abs(), **masks, **scored)

    two, one = torch.tensor([[1.0, 7.0], [2.0, 2.0]]), torch.tensor([[-1.0, -1.0]])
    return [experience(two, [[1, 0], [1, 1]], [2, 1]), experience(one, [[1, 1]], [0])]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two actors of a tensor-parallel pair each: every second one's answer counts."""
    kept = [[torch.tensor([[5.0, 9.0], [1.0, 2.0]])], [], [torch.tensor([[4.0, 8.0]])], []]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))
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
    found = maker.compute_advantages_and_returns(three_answers())
    assert [e.advantages.tolist() for e in found] == [[[1.0, 7.0], [0.0, 0.0]], [[0.0, -1.0]]]
    assert maker.step_measures == {
        "credit/entropy": pytest.approx(4.0),
        "credit/trained": pytest.approx(0.4),
        "credit/size": pytest.approx(2 / 7),
    }


def test_a_credit_knows_answers_and_prompts(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "top_entropy"})
    given: list[StepTokens] = []

    def formula(self: credits.Credit, tokens: StepTokens) -> Tensor:
        given.append(tokens)
        return tokens.advantages

    monkeypatch.setattr(type(credits.create("top_entropy")), "formula", formula)
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
    with pytest.raises(RuntimeError, match=rf"{method} returns \(1,\) for 5 tokens"):
        maker.compute_advantages_and_returns(three_answers())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --train.batch_size 32", True),
        ("--rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --train.batch_size 64", True),
        ("--rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --train.batch_size 16", False),
        ("--rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --train.batch_size 32 --train.max_epochs 2", False),
    ],
)
def test_a_start_says_that_kl_cov_needs_several_updates(words: str, said: bool) -> None:
    """The gradient of |log π − log π_old| is exactly 0 where both are equal."""
    flags = Flags(words.split())

    def notes(credit: str) -> list[str]:
        complete = CompleteRun(run=run_of(credit={"name": credit}), flags=flags)
        return [note for note in run_notes.flag_notes(complete) if credit in note]

    expected = ["--credit kl_cov has no effect with one update a rollout"] if said else []
    assert [note.partition(":")[0] for note in notes("kl_cov")] == expected
    assert not notes("lp_reg")
