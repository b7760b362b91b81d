# SPDX-License-Identifier: Apache-2.0
"""The trainer's part on a pretended GPU: each replay, density, credit and mask correction, forward and backward.

Results are those of a CPU, and no tensor of the host takes part in an operation of the device.
"""

import dataclasses
import heapq
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu.pretended import Pretended, pretended_cuda
from benchmarks.cuda_without_gpu.simulated import each_alone
from benchmarks.cuda_without_gpu.simulated_engine import HIDDEN, Plan
from ngrpo.methods.credits import registry as credits
from ngrpo.methods.credits.base import StepTokens
from ngrpo.trainers.common.log_probs import corrected, densities, override_log_probs, with_overrides
from ngrpo.trainers.common.policy_loss import CreditInLoss
from perturbations import FinishedTrajectory, Perturbation, create
from perturbations.compilation import Compiled
from perturbations.replay.scope import LastHidden, ReplayScope
from tests.support.token_log_probs import log_probs_of

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")

PLAN = Plan(seed=3, masked=True, sampling="filtered")
TEMPERATURE = 0.7
hooked = with_overrides(log_probs_of)


def densities_of(name: str) -> list[str | None]:
    """The choices of a perturbation's option, None where it has no such option."""
    fields = {field.name: field for field in dataclasses.fields(create(name))}
    return list(fields["density"].metadata["choices"]) if "density" in fields else [None]


EVERY = [(name, density) for name in sorted(in_tree()) for density in densities_of(name)]


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: self.plain(*args))


class Model(nn.Module):
    """An embedding, a mixture over the past, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(PLAN.vocabulary, HIDDEN), nn.Linear(HIDDEN, PLAN.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).cumsum(dim=1).tanh())


class Batch:
    """A model and what a rollout recorded, on a CPU or on the pretended device, and a training step's forward."""

    def __init__(self, perturbation: Perturbation, recorded: tuple, on_device: bool, packed: bool = False) -> None:
        self.up: Any = Pretended if on_device else lambda part: part
        requests, parts, _ = recorded
        self.side_inputs = [parts[request.name] for request in requests]
        longest = max(len(request.tokens) for request in requests)
        rows = [request.tokens + [0] * (longest - len(request.tokens)) for request in requests]
        lengths = torch.tensor([[len(request.tokens)] for request in requests])
        prompts = torch.tensor([[len(request.prompt)] for request in requests])
        places = torch.arange(longest)[None]
        self.tokens, self.mask = self.up(torch.tensor(rows)), self.up((places < lengths).long())
        self.actions = self.up(((places >= prompts) & (places < lengths))[:, 1:].long())
        draws = torch.randn(len(rows), longest - 1, generator=torch.Generator().manual_seed(5))
        self.advantages = self.up(draws)
        self.perturbation, self.packed = perturbation, packed
        self.model, self.module = Model(), perturbation.module(HIDDEN)
        for owner in (*self.model.modules(), *(self.module.modules() if self.module is not None else ())):
            for name, part in list(owner._parameters.items()):
                owner._parameters[name] = nn.Parameter(self.up(part.data.clone()), part.requires_grad)
        if hasattr(self.module, "lambda_start"):
            self.module.lambda_start = self.up(self.module.lambda_start)

    def scope(self) -> ReplayScope:
        hidden = LastHidden(self.model.head, "a test") if self.perturbation.reads_hidden else None
        return ReplayScope(self.model.embedding, True, self.module, self.perturbation, 4, hidden=hidden)

    def forward(self) -> Tensor:
        """Log-probabilities of the tokens after the first, as they come from the hook, (B, T - 1)."""
        tokens, labels = self.tokens, self.tokens.roll(-1, 1)
        if not self.packed:
            return hooked(self.model(tokens) / TEMPERATURE, labels)[:, :-1]
        kept = self.mask.bool()
        own = hooked(self.model(tokens[kept].unsqueeze(0)) / TEMPERATURE, labels[kept].unsqueeze(0))
        return torch.zeros_like(self.tokens, dtype=own.dtype).masked_scatter(kept, own[0])[:, :-1]

    def outcome(self, log_probs: Tensor, *more: Tensor) -> list[Tensor]:
        """Log-probabilities, gradients of all parameters, and more, on the host."""
        loss = (log_probs * self.advantages * self.actions).sum()
        found = backward(loss, self.up(torch.ones(())))
        owners = (self.model, self.module) if self.module is not None else (self.model,)
        parameters = [part for owner in owners for part in owner.parameters()]
        grads = [found.get(id(part), torch.zeros(())) for part in parameters]
        return [part.values if isinstance(part, Pretended) else part for part in (log_probs.detach(), *grads, *more)]


def backward(loss: Tensor, one: Tensor) -> dict[int, Tensor]:
    """Gradients by ``id`` of their leaves. PyTorch's own nodes are called one by one: its engine wants a real GPU."""
    given_to, queue, leaves = {loss.grad_fn: [one]}, [], {}

    def entered(node: Any) -> None:
        heapq.heappush(queue, (-node._sequence_nr(), id(node), node))

    entered(loss.grad_fn)
    while queue:
        node = heapq.heappop(queue)[-1]
        gave = getattr(node, "apply", node)(*given_to.pop(node))  # a function written in Python has `apply`
        for (following, at), part in zip(node.next_functions, gave if isinstance(gave, tuple) else (gave,)):
            if following is None or part is None:
                continue
            leaf = getattr(following, "variable", None)
            shape = (following._input_metadata[at] if leaf is None else leaf).shape
            part = part.to_dense() if part.is_sparse else part
            part = part if part.shape == shape else part.sum_to_size(shape)
            if leaf is not None:
                key = id(leaf)
                leaves[key] = leaves[key] + part if key in leaves else part
                continue
            if following not in given_to:
                given_to[following] = [None] * len(following._input_metadata)
                entered(following)
            before = given_to[following][at]
            given_to[following][at] = part if before is None else before + part
    return leaves


def replayed(batch: Batch, masked: bool) -> list[Tensor]:
    """A training step's forward and backward under a replay, its densities and its mask correction."""
    scope = batch.scope()
    trajectories = [FinishedTrajectory.unpack(parts) for parts in batch.side_inputs]
    records = [trajectory.record for trajectory in trajectories]
    correction = corrected(trajectories, batch.mask) if masked else nullcontext()
    with scope(records, batch.mask) as stats, correction, densities(scope, TEMPERATURE, batch.advantages) as ours:
        log_probs = batch.forward()
        score = log_probs if ours is None else ours.for_policy_loss(log_probs)
        return batch.outcome(score, torch.cat(stats.shifts).detach(), stats.left_anchor[0])


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def on_both(perturbation: Perturbation, packed: bool = False, masked: bool = False) -> None:
    """The same step on a CPU and on the pretended device."""
    recorded = each_alone(perturbation, PLAN, count=3)
    expected = replayed(Batch(perturbation, recorded, False, packed), masked)
    with pretended_cuda():
        found = replayed(Batch(perturbation, recorded, True, packed), masked)
    compare(found, expected)
    assert any(part.any() for part in expected[1:3]), "nothing has a gradient"


@pytest.mark.parametrize(
    ("name", "density"),
    [pytest.param(*each, marks=[] if each[0] in ("neighbor", "gumbel") else pytest.mark.more) for each in EVERY],
    ids=str,
)
def test_replay_and_density(name: str, density: str | None) -> None:
    on_both(create(name, rate=0.7, **({} if density is None else {"density": density})))


def test_mask_correction() -> None:
    on_both(create("gumbel", rate=0.7), masked=True)


@pytest.mark.more
def test_packed_batch_with_mask_correction() -> None:
    on_both(create("latent", density="exact", rate=0.7), packed=True, masked=True)


@pytest.mark.parametrize("name", sorted(credits.available()))
def test_credits(name: str) -> None:
    """The formula, and what has a part in the loss."""
    credit, perturbation = credits.create(name), create("neighbor", rate=0.7)
    recorded = each_alone(perturbation, PLAN, count=3)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(12, generator=generator) for _ in range(3)]
    numbers = [torch.arange(12) // size for size in (3, 6, 3)]

    def outcome(on_device: bool) -> list[Tensor]:
        batch = Batch(perturbation, recorded, on_device)
        given: list[Any] = []

        def loss(*args: Tensor) -> tuple[Tensor]:
            given.extend(args)
            return (args[0].sum(),)

        step = StepTokens(*map(batch.up, values), *map(batch.up, numbers))
        formula, marks = credit.formula(step), credit.marks(step)
        marks = None if marks is None else batch.actions.bool()
        ours = CreditInLoss(
            credit,
            loss,
            advantages=batch.advantages,
            action_mask=batch.actions,
            attention_mask=batch.mask,
            marks=marks,
        )
        with override_log_probs(ours.look, "the credit was not asked", ""):
            log_probs = batch.forward()
        ours(log_probs, log_probs.detach(), batch.advantages)
        score, _, advantages, *of_penalty = given
        return batch.outcome(score + sum(of_penalty[:1]), advantages, formula)

    expected = outcome(False)
    with pretended_cuda():
        found = outcome(True)
    compare(found, expected)
