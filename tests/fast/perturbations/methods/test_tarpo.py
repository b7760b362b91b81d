# SPDX-License-Identifier: Apache-2.0
"""TARPO's router by hand, how it starts, what it reads, and where it is refused."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.cuda_without_gpu.simulated import simulate
from benchmarks.cuda_without_gpu.simulated_engine import Plan
from ngrpo.trainers.common.log_probs import densities, with_overrides
from perturbations import ReplayRecord, create, parameters, streams
from perturbations.base import Replayed, Step
from perturbations.edit import InputEdit, realise
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError
from perturbations.methods import learned
from perturbations.methods.learned import Router
from perturbations.replay.scope import LastHidden, ReplayScope
from perturbations.testing.log_density import replayed
from tests.support.token_log_probs import log_probs_of

EMBEDDING = torch.tensor(
    [
        [1.0, 0.0],
        [0.0, 1.0],
        [2.0, 2.0],
        [-1.0, 1.0],
    ]
)
# p = (0.6, 0.3, 0.1, 0).
LOGITS = torch.tensor([0.6, 0.3, 0.1, 0.0]).log()
LN2 = math.log(2)
LN3 = math.log(3)


def router_of(weight: list[list[float]], shift: tuple[float, float] = (0.0, 0.0), bias: float = 0.0) -> Router:
    """A router of two hidden dimensions with this W, and b = (bias, 0) + shift."""
    router = Router(2, bias)
    state = {
        "head.weight": torch.tensor(weight),
        "head.bias_shift": torch.tensor(shift),
    }
    parameters.load(router, state)
    return router


def step_with_router(rows: int, router: Router, hidden: tuple[float, float] = (1.0, 2.0)) -> Step:
    """Positions of one trajectory with LOGITS; sampled is the third token."""
    return Step(
        logits=LOGITS.expand(rows, -1),
        sampled=torch.full((rows,), 2),
        temperature=torch.ones(rows),
        seeds=torch.full((rows,), 11),
        positions=torch.arange(rows),
        embeddings=matrix_embeddings(EMBEDDING),
        hidden=torch.tensor(hidden).expand(rows, -1),
        module=router,
    )


def test_decision_and_mixture_by_hand() -> None:
    """h = (1, 2), W = [[ln 3 − 2 ln 2, ln 2], [0, 0]], b = (ln 3 , 0) with start ln 2 and shift ln 3 − ln 2.

    W h + b = (ln 3 − 2 ln 2 + 2 ln 2 + ln 3, 0) = (ln 9, 0): π = (9/10, 1/10).
    Of the two likeliest tokens p = (2/3, 1/3), so that the mixture is (2/3)(1, 0) + (1/3)(0, 1).
    """
    weight = [[LN3 - 2 * LN2, LN2], [0.0, 0.0]]
    router = router_of(weight, shift=(LN3 - LN2, 0.0), bias=LN2)
    step = step_with_router(4000, router)
    probabilities = router.log_probs(step.hidden[:1]).exp()
    torch.testing.assert_close(probabilities, torch.tensor([[0.9, 0.1]]))

    proposal = create("tarpo", k=2).propose(step)
    assert (proposal.tokens == 2).all()
    assert proposal.acts is None
    assert (proposal.edit.ids == torch.tensor([2, 0, 1])).all()

    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    feeds_mixture = streams.uniform(keys, 1)[:, 0] < 0.1
    mixture_count = int(feeds_mixture.sum())
    assert 350 < mixture_count < 450
    weights_of_mixture = torch.tensor([0.0, 2 / 3, 1 / 3]).expand(mixture_count, -1)
    weights_of_token = torch.tensor([1.0, 0.0, 0.0]).expand(4000 - mixture_count, -1)
    torch.testing.assert_close(proposal.edit.weights[feeds_mixture], weights_of_mixture)
    torch.testing.assert_close(proposal.edit.weights[~feeds_mixture], weights_of_token)

    fed = realise(proposal.edit, step.embeddings.lookup, None, router)
    token_embedding = EMBEDDING[2].expand(4000 - mixture_count, -1)
    assert torch.equal(fed[~feeds_mixture], token_embedding), "the token's embedding itself"
    mixture = torch.tensor([2 / 3, 1 / 3]).expand(mixture_count, -1)
    torch.testing.assert_close(fed[feeds_mixture], mixture)


# --- the density -----------------------------------------------------------------------------------------


def replayed_decisions(router: Router, hidden: Tensor) -> Replayed:
    """Three positions: the router fed the token at the first, and mixtures at the second and third."""
    weights = torch.tensor(
        [
            [1.0, 0.0, 0.0],
            [0.0, 0.7, 0.3],
            [0.0, 0.5, 0.5],
        ]
    )
    ids = torch.tensor([[2, 0, 1]]).expand(3, -1)
    logits = LOGITS[:3].expand(3, -1)
    return Replayed(
        logits=logits,
        rows=torch.arange(3),
        token_log_probs=logits[:, 2],
        temperature=1.0,
        edit=InputEdit(ids, weights),
        noise_keys=None,
        lookup=lambda ids: EMBEDDING[ids],
        hidden=hidden,
        module=router,
    )


def test_density_by_hand() -> None:
    """π = (3/4, 1/4) at h = (1, 0) and (1/4, 3/4) at (−1, 0); λ = 0.1 by default."""
    router = router_of([[LN3, 0.0], [0.0, 0.0]])
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    decisions = replayed_decisions(router, hidden)
    log_density = create("tarpo").log_density(decisions)
    torch.testing.assert_close(log_density, 0.1 * torch.tensor([0.75, 0.25, 0.75]).log())
    twice = create("tarpo", decision_weight=0.2).log_density(decisions)
    torch.testing.assert_close(twice, 2.0 * log_density)

    log_density.sum().backward()
    # d log π(d) / d(W h) is 1 − π for the decision, −π for the other; h sees W: ln 3 times the first of them.
    to_first_score = torch.tensor([0.25, -0.75, -0.25])
    torch.testing.assert_close(hidden.grad[:, 0], 0.1 * LN3 * to_first_score)
    total = 0.1 * to_first_score.sum()
    torch.testing.assert_close(router.head.bias_shift.grad, torch.stack([total, -total]))


def test_what_the_density_is_of() -> None:
    by_default = create("tarpo")
    assert by_default.has_density
    assert by_default.draws_token
    assert by_default.zero_mean_score
    assert not by_default.score_only
    assert not by_default.density_of_vector

    of_token = create("tarpo", density="token")
    assert not of_token.has_density
    assert not of_token.draws_token
    assert of_token.reads_hidden


# --- the router at its start -----------------------------------------------------------------------------


def test_the_router_starts_the_same_in_every_process() -> None:
    """W ~ N(0, 0.001²)."""
    router = create("tarpo").module(4096)
    in_another_process = create("tarpo").module(4096)
    assert torch.equal(router.head.weight, in_another_process.head.weight)
    assert not router.head.bias_shift.any()
    assert router.head.weight.std().item() == pytest.approx(0.001, rel=0.05)
    correlation = torch.corrcoef(router.head.weight.detach())[0, 1].item()
    assert abs(correlation) < 0.1, "two rows, not one twice"


def test_the_router_s_bias_at_the_start() -> None:
    """b = (4.6, 0): π(mixture) = 1 / (1 + e^4.6)."""
    router = create("tarpo").module(4096)
    probability_of_mixture = router.log_probs(torch.zeros(1, 4096))[0, 1].exp().item()
    assert probability_of_mixture == pytest.approx(1.0 / (1.0 + math.exp(4.6)), rel=1e-5)


def test_the_router_s_bias_has_no_coarse_steps_in_bfloat16() -> None:
    hidden = torch.zeros(1, 4096)
    in_float32 = create("tarpo").module(4096)
    in_bfloat16 = create("tarpo").module(4096).to(torch.bfloat16)
    assert torch.equal(in_bfloat16.head(hidden), in_float32.head(hidden))


def test_the_router_computes_in_float32() -> None:
    router = create("tarpo").module(64)
    router.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = router.head(hidden)
    assert scores.dtype == torch.float32
    bias = torch.tensor([4.6, 0.0]).double()
    expected = hidden.double() @ router.head.weight.double().T + bias
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


# --- in a trainer ----------------------------------------------------------------------------------------


class Small(nn.Module):
    """Logits of a row follow from that row's input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def hidden_of(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.inner(inputs))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden_of(self.embedding(tokens)))


def record_of(decisions: dict[int, bool], length: int) -> ReplayRecord:
    """A record of decisions by position: True for 0.6 of token 1 and 0.4 of token 2, False for token 5."""
    count = len(decisions)
    weights = np.zeros((count, 3), np.float32)
    feeds_mixture = np.array(list(decisions.values()))
    weights[feeds_mixture] = [0.0, 0.6, 0.4]
    weights[~feeds_mixture] = [1.0, 0.0, 0.0]
    return ReplayRecord(
        seed=3,
        prompt_tokens=1,
        num_tokens=length,
        positions=np.array(list(decisions), np.int32),
        ids=np.tile(np.array([[5, 1, 2]], np.int32), (count, 1)),
        weights=weights,
        sigma=None,
        agreed=np.ones(count, bool),
    )


def replayed_log_probs(
    model: Small,
    tokens: Tensor,
    mask: Tensor,
    records: list[Any],
    packed: bool = False,
    output_layer: nn.Module | None = None,
) -> Tensor:
    """A trainer's log-probabilities of the next tokens with the decisions' densities, (B, T); λ = 0.5."""
    labels = tokens.roll(-1, 1)
    inputs = tokens
    if packed:
        inputs = tokens[mask.bool()].unsqueeze(0)
        labels = labels[mask.bool()].unsqueeze(0)
    scope = ReplayScope(
        model.embedding,
        module=parameters.attached(model),
        perturbation=create("tarpo", decision_weight=0.5),
        hidden=LastHidden(output_layer or model.head, "perturbation tarpo"),
    )
    with scope(records, mask), densities(scope, 1.0):
        log_probs = with_overrides(log_probs_of)(model(inputs), labels)
    if packed:
        return torch.zeros(tokens.shape).masked_scatter(mask.bool(), log_probs[0])
    return log_probs


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_position_reads_its_own_hidden_state(packed: bool) -> None:
    """Two samples, one of them shorter; entries are log π(token) + λ log π(decision) where the router was asked."""
    model = Small()
    router = parameters.attach(model, create("tarpo"))
    router.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    router.head.bias_shift.data.copy_(torch.tensor([-4.6, 0.2]))
    tokens = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0, 0],
        ]
    )
    decisions_by_row = [{2: True, 4: False}, {1: False, 3: True}]
    records = [record_of(decisions_by_row[0], length=6), record_of(decisions_by_row[1], length=4)]
    log_probs = replayed_log_probs(model, tokens, mask, records, packed)

    with torch.no_grad():
        embedding = model.embedding.weight
        inputs = model.embedding(tokens)
        for row, decisions in enumerate(decisions_by_row):
            for position, feeds_mixture in decisions.items():
                if feeds_mixture:
                    inputs[row, position] = 0.6 * embedding[1] + 0.4 * embedding[2]
                else:
                    inputs[row, position] = embedding[5]
        hidden = model.hidden_of(inputs)
        expected = log_probs_of(model.head(hidden), tokens.roll(-1, 1))
        log_decisions = torch.log_softmax(router.head(hidden.flatten(0, 1)), dim=-1).view(2, 6, 2)
        for row, decisions in enumerate(decisions_by_row):
            for position, feeds_mixture in decisions.items():
                expected[row, position - 1] += 0.5 * log_decisions[row, position - 1, int(feeds_mixture)]
    torch.testing.assert_close(log_probs[mask.bool()], expected[mask.bool()])

    log_probs[mask.bool()].sum().backward()
    for parameter in router.parameters():
        assert parameter.grad.abs().max() > 0.0


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_rank_without_records_has_a_gradient_of_zero(packed: bool) -> None:
    """Ranks reduce their gradients together: one without any would wait for ever."""
    model = Small()
    router = parameters.attach(model, create("tarpo"))
    tokens = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    replayed_log_probs(model, tokens, mask, [None, None], packed).sum().backward()
    for parameter in router.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_router_that_is_asked_nothing_has_a_gradient_of_zero() -> None:
    router = router_of([[1.0, 2.0], [3.0, 4.0]])
    no_rows = torch.zeros(0, 2)
    router(no_rows, no_rows).sum().backward()
    for parameter in router.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


# --- errors ----------------------------------------------------------------------------------------------


def test_an_output_layer_that_is_not_called() -> None:
    model = Small()
    parameters.attach(model, create("tarpo"))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    records = [record_of({1: True}, length=3)]
    message = (
        "which perturbation tarpo reads, are not known: "
        "Linear, the model's output layer, was not called in a forward of 3 rows"
    )
    with pytest.raises(RuntimeError, match=message):
        replayed_log_probs(model, tokens, torch.ones_like(tokens), records, output_layer=nn.Linear(1, 1))


def test_a_model_without_an_output_layer() -> None:
    with pytest.raises(UsageError, match=r"which advantage rep_exp reads, .* get_output_embeddings\(\) is None"):
        LastHidden(None, "advantage rep_exp")


MISSING = "the last hidden states that the router reads is missing"


def test_a_proposal_without_hidden_states_is_refused() -> None:
    step = step_with_router(1, router_of([[0.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=MISSING):
        create("tarpo", k=2).propose(dataclasses.replace(step, hidden=None))


def test_hidden_states_of_another_size_are_refused() -> None:
    step = step_with_router(1, router_of([[0.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(UsageError, match="has 3 dimensions, the input embedding 2"):
        create("tarpo", k=2).propose(dataclasses.replace(step, hidden=torch.zeros(1, 3)))


def test_a_density_without_hidden_states_is_refused() -> None:
    step = step_with_router(1, router_of([[0.0, 0.0], [0.0, 0.0]]))
    tarpo = create("tarpo", k=2)
    with_hidden = replayed(step, tarpo.propose(step), step.logits)
    with pytest.raises(ValueError, match=MISSING):
        tarpo.log_density(dataclasses.replace(with_hidden, hidden=None))


@pytest.mark.more
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")
def test_the_gated_rows_are_routed_by_their_own_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the positions of a batch on a pretended GPU, with a router that the hidden state moves: each as alone."""
    monkeypatch.setattr(learned, "_SPREAD", 0.3)
    plan = Plan(seed=2, lag=3, preempted=0.1, chunk=5, batch=5)
    simulate(create("tarpo", bias=0.0, rate=0.5), plan, count=5)
