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


def step_tokens(advantages: list[float], **fields: list[float]) -> StepTokens:
    """Tokens of a step; of one response where nothing else is said."""
    zeros = torch.zeros(len(advantages))
    tokens = StepTokens(
        advantages=torch.tensor(advantages),
        entropies=zeros,
        log_probs=zeros,
        responses=zeros.long(),
        groups=zeros.long(),
    )
    return replace(tokens, **{name: torch.tensor(values) for name, values in fields.items()})


def credited(name: str, tokens: StepTokens, **options: Any) -> list[float]:
    """The advantages that a credit gives the tokens."""
    return credits.create(name, **options).formula(tokens).tolist()


# --- top_entropy and entropy_bonus -----------------------------------------------------------------

ADVANTAGES = [1.5, 1.5, -0.5, -0.5, -0.5, 0.0]
ENTROPIES = [0.1, 2.0, 0.3, 1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        # The three largest entropies: 3, 2, 1.
        pytest.param(0.5, [0.0, 1.5, 0.0, -0.5, 0.0, 0.0], id="half"),
        # ⌈0.2 · 6⌉ = 2 of six tokens.
        pytest.param(0.2, [0.0, 1.5, 0.0, 0.0, 0.0, 0.0], id="a fifth"),
        pytest.param(1.0, ADVANTAGES, id="all"),
        # At least one, which here has no advantage.
        pytest.param(1e-9, [0.0] * 6, id="next to nothing"),
    ],
)
def test_top_entropy_by_hand(fraction: float, expected: list[float]) -> None:
    tokens = step_tokens(ADVANTAGES, entropies=ENTROPIES)
    assert credited("top_entropy", tokens, fraction=fraction) == expected


def test_top_entropy_keeps_all_of_an_equal_entropy() -> None:
    tokens = step_tokens([1.0] * 5, entropies=[0.0, 2.0, 1.0, 2.0, 2.0])
    assert credited("top_entropy", tokens) == [0.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # min(.4 H, |A| / 2): .04; .75 of .8; .12; .25 of .4; 0; 0 of 1.2.
        pytest.param({}, [1.54, 2.25, -0.38, -0.25, -0.5, 0.0], id="default"),
        # min(H, |A| / 4): .1; .375 of 2; .125 of .3; .125 of 1; 0; 0 of 3.
        pytest.param(
            {"alpha": 1.0, "kappa": 4.0},
            [1.6, 1.875, -0.375, -0.375, -0.5, 0.0],
            id="other options",
        ),
    ],
)
def test_entropy_bonus_by_hand(options: dict[str, float], expected: list[float]) -> None:
    tokens = step_tokens(ADVANTAGES, entropies=ENTROPIES)
    assert credited("entropy_bonus", tokens, **options) == pytest.approx(expected, abs=1e-6)


def test_the_entropy_bonus_never_turns_an_advantage() -> None:
    with pytest.raises(UsageError, match="kappa=1: must be greater than 1"):
        credits.create("entropy_bonus", kappa=1)


@pytest.mark.parametrize("name", credits.available())
def test_a_step_without_a_token(name: str) -> None:
    credit = credits.create(name)
    no_tokens = step_tokens([])
    assert credit.formula(no_tokens).shape == (0,)
    marks = credit.marks(no_tokens)
    assert marks is None or marks.shape == (0,)


@pytest.mark.parametrize(
    ("method", "words"),
    [("marks", "has marks and no marked_loss"), ("marked_loss", "has marked_loss and no marks, so nothing calls it")],
)
def test_marks_and_marked_loss_go_together(method: str, words: str) -> None:
    methods = {name: lambda self, *arguments: None for name in ("formula", method)}
    with pytest.raises(UsageError, match=f"credit 'half': Half {words}"):
        type("Half", (credits.Credit,), {"name": "half", **methods})()


# --- first_token -----------------------------------------------------------------------------------

# Four responses of 1, 2, 3 and 2 tokens to one prompt, and two of 1 and 2 to another.
TWO_GROUPS = step_tokens(
    [0.5, 0.5, 0.5, 0.7, 0.7, 0.7, -1.7, -1.7, -1.0, -0.5, -0.5],
    log_probs=[-1.5, -1.5, -0.5, -2.0, -3.0, -1.0, -0.1, -0.1, -0.1, -0.1, -0.3],
    responses=[0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5],
    groups=[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1],
)


def test_the_first_tokens_of_a_step() -> None:
    assert TWO_GROUPS.first.nonzero().flatten().tolist() == [0, 1, 3, 6, 8, 9]


@pytest.mark.parametrize(
    ("options", "tokens_without_advantage"),
    [
        pytest.param({}, [0, 3, 6], id="default"),
        pytest.param({"wrong": "keep"}, [0, 3], id="wrong responses keep theirs"),
    ],
)
def test_first_token_by_hand(options: dict[str, str], tokens_without_advantage: list[int]) -> None:
    """Mean log-probabilities −1.5, −1, −2, −.1, −.1, −.2: of those with A > 0 the second response is the likeliest.

    Its sum is not the likeliest. It keeps its first token's advantage, token 1; a prompt without A > 0 keeps all.
    """
    expected = TWO_GROUPS.advantages.clone()
    expected[tokens_without_advantage] = 0.0
    assert credited("first_token", TWO_GROUPS, **options) == expected.tolist()


def test_first_token_of_equal_means_is_the_first_responses() -> None:
    """Groups need not stand in their order."""
    tokens = step_tokens(
        [1.0, 2.0, 3.0, 4.0],
        log_probs=[-1.0, -1.0, -1.0, -2.0],
        responses=[0, 1, 2, 3],
        groups=[1, 0, 1, 0],
    )
    assert credited("first_token", tokens) == [1.0, 2.0, 0.0, 0.0]


def test_responses_and_groups_without_a_token_have_a_number_too() -> None:
    tokens = step_tokens([1.0, 1.0], log_probs=[-1.0, -1.0], responses=[0, 2], groups=[0, 2])
    assert credited("first_token", tokens) == [1.0, 1.0]


# --- in OpenRLHF -----------------------------------------------------------------------------------


class Actor(nn.Module):
    """As OpenRLHF's: log-probabilities of the last tokens, and the entropy of all but the last row when asked."""

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor,
        return_output: bool = False,
        return_entropy: bool = False,
    ) -> Any:
        log_probs = -sequences[:, -action_mask.shape[1] :].float()
        if not return_output:
            return log_probs
        output = SimpleNamespace()
        if return_entropy:
            output.entropy = 10.0 * sequences[:, 1:].float()
        return log_probs, output


class ModelActor:
    def __init__(self) -> None:
        self.actor = Actor()

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.actor(sequences, action_mask)


def test_the_actor_keeps_entropies_and_returns_what_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "top_entropy"})
    actor = policy_model_actor(ModelActor)()
    plain = ModelActor()
    two_sequences = torch.arange(8).view(2, 4)
    one_sequence = torch.arange(3).view(1, 3)
    mask_of_two = torch.ones(2, 2)
    mask_of_one = torch.ones(1, 1)
    for sequences, mask in ((two_sequences, mask_of_two), (one_sequence, mask_of_one)):
        log_probs = actor.forward(sequences, mask, mask)
        assert torch.equal(log_probs, plain.forward(sequences, mask))
    of_two, of_one = actor.hand_over("token_entropies")
    assert of_two.tolist() == [[20.0, 30.0], [60.0, 70.0]]
    assert of_one.tolist() == [[20.0]]
    assert actor.hand_over("token_entropies") == []
    assert "forward" not in vars(actor.actor), "the model's own forward is back in its place"


def experience(advantages: list[list[float]], mask: list[list[int]], index: list[int]) -> SimpleNamespace:
    """A micro-batch of responses with log p = −|A|."""
    values = torch.tensor(advantages)
    return SimpleNamespace(
        advantages=values,
        action_log_probs=-values.abs(),
        action_mask=torch.tensor(mask),
        index=index,
        rewards=torch.zeros(len(index)),
        prompts=["p"] * len(index),
    )


def three_responses() -> list[SimpleNamespace]:
    """Three responses of 1, 2 and 2 tokens; the second and the third are to the prompt that was asked first."""
    return [
        experience([[1.0, 7.0], [2.0, 2.0]], mask=[[1, 0], [1, 1]], index=[2, 1]),
        experience([[-1.0, -1.0]], mask=[[1, 1]], index=[0]),
    ]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two actors of a tensor-parallel pair each: every second one's answer counts."""
    entropies_of_actors = [
        [torch.tensor([[5.0, 9.0], [1.0, 2.0]])],
        [],
        [torch.tensor([[4.0, 8.0]])],
        [],
    ]
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
        actor_model_group=SimpleNamespace(async_run_method=lambda method_name, what: entropies_of_actors),
    )


def test_the_threshold_is_that_of_the_whole_step(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    """Padding counts for nothing: the entropy of 9 is beyond its response, so the two largest of five are 8 and 5."""
    run_with(monkeypatch, credit={"name": "top_entropy", "fraction": 0.4})
    first, second = maker.compute_advantages_and_returns(three_responses())
    assert first.advantages.tolist() == [[1.0, 7.0], [0.0, 0.0]]
    assert second.advantages.tolist() == [[0.0, -1.0]]
    assert maker.step_measures == {
        "credit/entropy": pytest.approx(4.0),
        "credit/trained": pytest.approx(0.4),
        "credit/size": pytest.approx(2 / 7),
    }


def test_a_credit_knows_responses_and_prompts(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "top_entropy"})
    tokens_of_calls: list[StepTokens] = []

    def formula(self: credits.Credit, tokens: StepTokens) -> Tensor:
        tokens_of_calls.append(tokens)
        return tokens.advantages

    monkeypatch.setattr(type(credits.create("top_entropy")), "formula", formula)
    maker.compute_advantages_and_returns(three_responses())
    (tokens,) = tokens_of_calls
    assert tokens.responses.tolist() == [0, 1, 1, 2, 2]
    assert tokens.groups.tolist() == [1, 0, 0, 0, 0]
    assert tokens.log_probs.tolist() == [-1.0, -2.0, -2.0, -1.0, -1.0]
    assert tokens.entropies.tolist() == [5.0, 1.0, 2.0, 4.0, 8.0]
    assert tokens.first.tolist() == [True, True, False, True, False]
    assert tokens.positions.tolist() == [0, 0, 1, 0, 1]
    # By the response's number in the step, in whatever batch it is; of the run's seed and the step.
    numbers = [2, 1, 1, 0, 0]
    assert tokens.seeds.tolist() == [trajectory_seed(7, 0, number) for number in numbers]


def test_marks_ride_with_the_samples(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    """A = (1, 2, 2, −1, −1) and log p = −|A|: covariances .16, −.84, −.84, −.64, −.64."""
    run_with(monkeypatch, credit={"name": "kl_cov", "share": 0.6})
    first, second = maker.compute_advantages_and_returns(three_responses())
    assert first.kl.tolist() == [[True, False], [False, False]]
    assert second.kl.tolist() == [[True, True]]
    plain_first, plain_second = three_responses()
    assert torch.equal(first.advantages, plain_first.advantages)
    assert torch.equal(second.advantages, plain_second.advantages)


def test_a_credit_without_marks_leaves_the_samples_field_alone(monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "clip_cov"})
    first, _ = maker.compute_advantages_and_returns(three_responses())
    assert not hasattr(first, "kl")


@pytest.mark.parametrize("method", ["formula", "marks"])
def test_a_credit_that_answers_in_another_shape(method: str, monkeypatch: pytest.MonkeyPatch, maker: Any) -> None:
    run_with(monkeypatch, credit={"name": "kl_cov"})
    monkeypatch.setattr(type(credits.create("kl_cov")), method, lambda self, tokens: tokens.advantages[:1])
    with pytest.raises(RuntimeError, match=rf"{method} returns \(1,\) for 5 tokens"):
        maker.compute_advantages_and_returns(three_responses())


# --- notes -----------------------------------------------------------------------------------------


def notes_of(credit: str, words: str) -> list[str]:
    """What a start with 4 · 8 responses in a rollout says of a credit."""
    flags = Flags(f"--rollout.batch_size 4 --rollout.n_samples_per_prompt 8 {words}".split())
    complete = CompleteRun(run=run_of(credit={"name": credit}), flags=flags)
    return [note for note in run_notes.flag_notes(complete) if credit in note]


ONE_UPDATE = ["--train.batch_size 32", "--train.batch_size 64"]
SEVERAL_UPDATES = ["--train.batch_size 16", "--train.batch_size 32 --train.max_epochs 2"]


@pytest.mark.parametrize("words", ONE_UPDATE)
def test_a_start_says_that_kl_cov_needs_several_updates(words: str) -> None:
    """The gradient of |log π − log π_old| is exactly 0 where both are equal."""
    (note,) = notes_of("kl_cov", words)
    assert note.startswith("--credit kl_cov has no effect with one update a rollout:")


@pytest.mark.parametrize("words", SEVERAL_UPDATES)
def test_a_start_says_nothing_of_kl_cov_with_several_updates(words: str) -> None:
    assert notes_of("kl_cov", words) == []


@pytest.mark.parametrize("words", [*ONE_UPDATE, *SEVERAL_UPDATES])
def test_a_start_says_nothing_of_lp_reg(words: str) -> None:
    assert notes_of("lp_reg", words) == []
