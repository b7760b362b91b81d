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
from perturbations.testing.proposal import replayed
from tests.support.token_log_probs import log_probs_of

EMBEDDING = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [-1.0, 1.0]])
LOGITS = torch.tensor([math.log(0.6), math.log(0.3), math.log(0.1), -math.inf])


def a_router(weight: list[list[float]], shift: tuple[float, float] = (0.0, 0.0), bias: float = 0.0) -> Router:
    router = Router(2, bias)
    parameters.load(router, {"head.weight": torch.tensor(weight), "head.bias_shift": torch.tensor(shift)})
    return router


def a_step(rows: int, router: Router, hidden: tuple[float, float] = (1.0, 2.0)) -> Step:
    """Positions of one trajectory whose policy is p = (0.6, 0.3, 0.1, 0); sampled is the third token."""
    logits, states = LOGITS.expand(rows, -1), torch.tensor(hidden).expand(rows, -1)
    sampled, seeds = torch.full((rows,), 2), torch.full((rows,), 11)
    given = (logits, sampled, torch.ones(rows), seeds, torch.arange(rows), matrix_embeddings(EMBEDDING))
    return Step(*given, hidden=states, module=router)


def test_decision_and_mixture_by_hand() -> None:
    """h = (1, 2), W = [[ln 3 − 2 ln 2, ln 2], [0, 0]], b = (ln 3 , 0) with start ln 2 and shift ln 3 − ln 2.

    W h + b = (ln 3 − 2 ln 2 + 2 ln 2 + ln 3, 0) = (ln 9, 0): π = (9/10, 1/10).
    Of the two likeliest tokens p = (2/3, 1/3), so that the mixture is (2/3)(1, 0) + (1/3)(0, 1).
    """
    ln2, ln3 = math.log(2), math.log(3)
    router = a_router([[ln3 - 2 * ln2, ln2], [0.0, 0.0]], (ln3 - ln2, 0.0), bias=ln2)
    step = a_step(4000, router)
    torch.testing.assert_close(router.log_probs(step.hidden[:1]).exp(), torch.tensor([[0.9, 0.1]]))
    proposal = create("tarpo", k=2).propose(step)
    assert (proposal.tokens == 2).all() and proposal.acts is None
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    latent = streams.uniform(keys, 1)[:, 0] < 0.1
    assert 350 < latent.sum() < 450
    assert (proposal.edit.ids == torch.tensor([2, 0, 1])).all()
    want = torch.where(latent.unsqueeze(-1), torch.tensor([0.0, 2 / 3, 1 / 3]), torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(proposal.edit.weights, want)
    fed = realise(proposal.edit, step.embeddings.lookup, None, router)
    assert torch.equal(fed[~latent], EMBEDDING[2].expand(int((~latent).sum()), -1)), "the token's embedding itself"
    torch.testing.assert_close(fed[latent], torch.tensor([2 / 3, 1 / 3]).expand(int(latent.sum()), -1))


def test_density_by_hand() -> None:
    """π = (3/4, 1/4) at h = (1, 0) and (1/4, 3/4) at (−1, 0); λ = 0.1 by default."""
    router = a_router([[math.log(3), 0.0], [0.0, 0.0]])
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3], [0.0, 0.5, 0.5]])
    edit = InputEdit(torch.tensor([[2, 0, 1]]).expand(3, -1), weights)
    logits, rows = LOGITS[:3].expand(3, -1), torch.arange(3)
    given = (logits, rows, logits[:, 2], 1.0, edit, None, lambda ids: EMBEDDING[ids])
    seen, perturbation = Replayed(*given, hidden=hidden, module=router), create("tarpo")
    got = perturbation.log_density(seen)
    torch.testing.assert_close(got, 0.1 * torch.tensor([0.75, 0.25, 0.75]).log())
    assert perturbation.has_density and perturbation.draws_token and perturbation.zero_mean_score
    assert not perturbation.score_only and not perturbation.density_of_vector
    got.sum().backward()
    # d log π(d) / d(W h) is 1 − π for the decision, −π for the other; h sees W: ln 3 times the first of them.
    firsts = torch.tensor([0.25, -0.75, -0.25])
    torch.testing.assert_close(hidden.grad[:, 0], 0.1 * math.log(3) * firsts)
    torch.testing.assert_close(router.head.bias_shift.grad, 0.1 * torch.stack([firsts.sum(), -firsts.sum()]))
    torch.testing.assert_close(2.0 * got, create("tarpo", decision_weight=0.2).log_density(seen))
    token = create("tarpo", density="token")
    assert not token.has_density and not token.draws_token and token.reads_hidden


def test_how_the_router_starts() -> None:
    """W ~ N(0, 0.001²), the same in every process; b = (4.6, 0): π(mixture) = 1 / (1 + e^4.6)."""
    first, second = (create("tarpo").module(4096) for _ in range(2))
    assert torch.equal(first.head.weight, second.head.weight) and not first.head.bias_shift.any()
    assert first.head.weight.std().item() == pytest.approx(0.001, rel=0.05)
    assert abs(torch.corrcoef(first.head.weight.detach())[0, 1].item()) < 0.1, "two rows, not one twice"
    hidden = torch.zeros(1, 4096)
    assert first.log_probs(hidden)[0, 1].exp().item() == pytest.approx(1.0 / (1.0 + math.exp(4.6)), rel=1e-5)
    assert torch.equal(first.to(torch.bfloat16).head(hidden), second.head(hidden)), "the bias has no coarse steps"
    states = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    assert first.head(states.bfloat16()).dtype == torch.float32
    router = create("tarpo").module(64)
    router.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    logits = states[:, :64].bfloat16().double() @ router.head.weight.double().T + torch.tensor([4.6, 0.0]).double()
    torch.testing.assert_close(router.head(states[:, :64].bfloat16()).double(), logits, rtol=1e-5, atol=1e-5)


class Small(nn.Module):
    """Logits of a row follow from that row's input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def record(positions: list[int], latent: list[bool], length: int) -> ReplayRecord:
    count = len(positions)
    weights = np.where(np.array(latent)[:, None], [[0.0, 0.6, 0.4]], [[1.0, 0.0, 0.0]]).astype(np.float32)
    ids = np.tile(np.array([[5, 1, 2]], np.int32), (count, 1))
    return ReplayRecord(3, 1, length, np.array(positions, np.int32), ids, weights, None, np.ones(count, bool))


def run(model: Small, tokens: Tensor, mask: Tensor, records: list[Any], packed: bool, head: nn.Module) -> Tensor:
    labels, shape = tokens.roll(-1, 1), tokens.shape
    if packed:
        tokens, labels = tokens[mask.bool()].unsqueeze(0), labels[mask.bool()].unsqueeze(0)
    module, hidden = parameters.attached(model), LastHidden(head, "perturbation tarpo")
    perturbation = create("tarpo", decision_weight=0.5)
    scope = ReplayScope(model.embedding, module=module, perturbation=perturbation, hidden=hidden)
    with scope(records, mask), densities(scope, 1.0):
        found = with_overrides(log_probs_of)(model(tokens), labels)
    return torch.zeros(shape).masked_scatter(mask.bool(), found[0]) if packed else found


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_position_reads_its_own_hidden_state(packed: bool) -> None:
    """Two samples, one of them shorter; entries are log π(token) + λ log π(decision) where the router was asked."""
    model = Small()
    router = parameters.attach(model, create("tarpo"))
    router.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    router.head.bias_shift.data.copy_(torch.tensor([-4.6, 0.2]))
    tokens = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    asked = [{2: True, 4: False}, {1: False, 3: True}]
    records = [record([*each], [*each.values()], n) for each, n in zip(asked, (6, 4))]
    got = run(model, tokens, mask, records, packed, model.head)
    with torch.no_grad():
        inputs = model.embedding(tokens)
        for row, each in enumerate(asked):
            for position, latent in each.items():
                mixed = 0.6 * model.embedding.weight[1] + 0.4 * model.embedding.weight[2]
                inputs[row, position] = mixed if latent else model.embedding.weight[5]
        hidden = torch.tanh(model.inner(inputs))
        want = log_probs_of(model.head(hidden), tokens.roll(-1, 1))
        decided = torch.log_softmax(router.head(hidden.flatten(0, 1)), dim=-1).view(2, 6, 2)
        for row, each in enumerate(asked):
            for position, latent in each.items():
                want[row, position - 1] += 0.5 * decided[row, position - 1, int(latent)]
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()])
    got[mask.bool()].sum().backward()
    assert all(p.grad.abs().max() > 0.0 for p in router.parameters())
    model.zero_grad()
    run(model, tokens, mask, [None, None], packed, model.head).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in router.parameters()), "ranks reduce alike"


def test_an_output_layer_that_is_not_called() -> None:
    model = Small()
    parameters.attach(model, create("tarpo"))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    told = "perturbation tarpo reads, are not known: Linear, the model's output layer, was not called in a forward"
    with pytest.raises(RuntimeError, match=f"which {told} of 3 rows"):
        run(model, tokens, torch.ones_like(tokens), [record([1], [True], 3)], False, nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"which advantage rep_exp reads, .* get_output_embeddings\(\) is None"):
        LastHidden(None, "advantage rep_exp")


def test_what_is_missing_or_does_not_fit_is_said() -> None:
    step, perturbation = a_step(1, a_router([[0.0, 0.0], [0.0, 0.0]])), create("tarpo", k=2)
    missing = "the last hidden states that the router reads is missing"
    with pytest.raises(ValueError, match=missing):
        perturbation.propose(dataclasses.replace(step, hidden=None))
    with pytest.raises(UsageError, match="has 3 dimensions, the input embedding 2"):
        perturbation.propose(dataclasses.replace(step, hidden=torch.zeros(1, 3)))
    given = replayed(step, perturbation.propose(step), step.logits)
    with pytest.raises(ValueError, match=missing):
        perturbation.log_density(dataclasses.replace(given, hidden=None))


def test_a_rank_that_asked_nothing_has_a_gradient_of_zero() -> None:
    """Ranks reduce their gradients together: one without any would wait for ever."""
    router = a_router([[1.0, 2.0], [3.0, 4.0]])
    none = torch.zeros(0, 2)
    router(none, none).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in router.parameters())


@pytest.mark.more
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")
def test_the_gated_rows_are_routed_by_their_own_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the positions of a batch on a pretended GPU, with a router that the hidden state moves: each as alone."""
    monkeypatch.setattr(learned, "_SPREAD", 0.3)
    simulate(create("tarpo", bias=0.0, rate=0.5), Plan(seed=2, lag=3, preempted=0.1, chunk=5, batch=5), count=5)
