# SPDX-License-Identifier: Apache-2.0
"""The trainer's part on a pretended GPU: each replay, density, credit and mask correction, forward and backward.

Results are those of a CPU, and no tensor of the host takes part in an operation of the device.
"""

import dataclasses
import heapq
from collections.abc import Iterator
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


def cases() -> Iterator[Any]:
    """Each perturbation with each of its densities; those of most perturbations are not in `make test`."""
    for name, density in EVERY:
        marks = [] if name in ("neighbor", "gumbel") else [pytest.mark.more]
        yield pytest.param(name, density, marks=marks)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: self.plain(*args))


class Model(nn.Module):
    """An embedding, a mixture over the past, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(PLAN.vocabulary, HIDDEN)
        self.head = nn.Linear(HIDDEN, PLAN.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).cumsum(dim=1).tanh())


class Batch:
    """A model and what a rollout recorded, on a CPU or on the pretended device, and a training step's forward."""

    def __init__(self, perturbation: Perturbation, recorded: tuple, on_device: bool, packed: bool = False) -> None:
        self.up: Any = Pretended if on_device else lambda tensor: tensor
        requests, packed_trajectories, _ = recorded
        self.side_inputs = [packed_trajectories[request.name] for request in requests]
        longest = max(len(request.tokens) for request in requests)
        rows = [request.tokens + [0] * (longest - len(request.tokens)) for request in requests]
        lengths = torch.tensor([[len(request.tokens)] for request in requests])
        prompt_lengths = torch.tensor([[len(request.prompt)] for request in requests])
        places = torch.arange(longest)[None]
        is_token = places < lengths
        is_generated = (places >= prompt_lengths) & is_token
        self.tokens = self.up(torch.tensor(rows))
        self.mask = self.up(is_token.long())
        self.actions = self.up(is_generated[:, 1:].long())
        draws = torch.randn(len(rows), longest - 1, generator=torch.Generator().manual_seed(5))
        self.advantages = self.up(draws)
        self.perturbation = perturbation
        self.packed = packed
        self.model = Model()
        self.module = perturbation.module(HIDDEN)
        for root in self.roots():
            for owner in root.modules():
                for name, parameter in list(owner._parameters.items()):
                    copy = self.up(parameter.data.clone())
                    owner._parameters[name] = nn.Parameter(copy, parameter.requires_grad)
        if hasattr(self.module, "lambda_start"):
            self.module.lambda_start = self.up(self.module.lambda_start)

    def roots(self) -> list[nn.Module]:
        """The model, and the perturbation's module where it has one."""
        return [self.model] if self.module is None else [self.model, self.module]

    def scope(self) -> ReplayScope:
        hidden = LastHidden(self.model.head, "a test") if self.perturbation.reads_hidden else None
        return ReplayScope(self.model.embedding, True, self.module, self.perturbation, 4, hidden=hidden)

    def forward(self) -> Tensor:
        """Log-probabilities of the tokens after the first, as they come from the hook, (B, T - 1)."""
        tokens = self.tokens
        labels = self.tokens.roll(-1, 1)
        if not self.packed:
            return hooked(self.model(tokens) / TEMPERATURE, labels)[:, :-1]
        inside = self.mask.bool()
        packed_logits = self.model(tokens[inside].unsqueeze(0)) / TEMPERATURE
        log_probs = hooked(packed_logits, labels[inside].unsqueeze(0))
        padded = torch.zeros_like(self.tokens, dtype=log_probs.dtype).masked_scatter(inside, log_probs[0])
        return padded[:, :-1]

    def outcome(self, log_probs: Tensor, *more: Tensor) -> list[Tensor]:
        """Log-probabilities, gradients of all parameters, and more, on the host."""
        loss = (log_probs * self.advantages * self.actions).sum()
        gradients = backward(loss, self.up(torch.ones(())))
        results = [log_probs.detach()]
        for root in self.roots():
            results += [gradients.get(id(parameter), torch.zeros(())) for parameter in root.parameters()]
        results += more
        return [result.values if isinstance(result, Pretended) else result for result in results]


def backward(loss: Tensor, one: Tensor) -> dict[int, Tensor]:
    """Gradients by ``id`` of their leaves. PyTorch's own nodes are called one by one: its engine wants a real GPU."""
    gradients_of_outputs = {loss.grad_fn: [one]}
    queue = []
    leaves = {}

    def enter(node: Any) -> None:
        heapq.heappush(queue, (-node._sequence_nr(), id(node), node))

    enter(loss.grad_fn)
    while queue:
        node = heapq.heappop(queue)[-1]
        call = getattr(node, "apply", node)  # a function written in Python has `apply`
        results = call(*gradients_of_outputs.pop(node))
        gradients = results if isinstance(results, tuple) else (results,)
        for (next_node, output), gradient in zip(node.next_functions, gradients):
            if next_node is None or gradient is None:
                continue
            leaf = getattr(next_node, "variable", None)
            shape = next_node._input_metadata[output].shape if leaf is None else leaf.shape
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient.shape != shape:
                gradient = gradient.sum_to_size(shape)
            if leaf is not None:
                key = id(leaf)
                leaves[key] = leaves[key] + gradient if key in leaves else gradient
                continue
            if next_node not in gradients_of_outputs:
                gradients_of_outputs[next_node] = [None] * len(next_node._input_metadata)
                enter(next_node)
            before = gradients_of_outputs[next_node][output]
            gradients_of_outputs[next_node][output] = gradient if before is None else before + gradient
    return leaves


def replayed(batch: Batch, masked: bool) -> list[Tensor]:
    """A training step's forward and backward under a replay, its densities and its mask correction."""
    scope = batch.scope()
    trajectories = [FinishedTrajectory.unpack(side_input) for side_input in batch.side_inputs]
    records = [trajectory.record for trajectory in trajectories]
    correction = corrected(trajectories, batch.mask) if masked else nullcontext()
    with scope(records, batch.mask) as stats, correction, densities(scope, TEMPERATURE, batch.advantages) as ours:
        log_probs = batch.forward()
        score = log_probs if ours is None else ours.for_policy_loss(log_probs)
        return batch.outcome(score, torch.cat(stats.shifts).detach(), stats.left_anchor[0])


def compare(on_device: list[Tensor], on_host: list[Tensor]) -> None:
    assert len(on_device) == len(on_host)
    for result, expected in zip(on_device, on_host):
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


def check_on_both(perturbation: Perturbation, packed: bool = False, masked: bool = False) -> None:
    """Asserts that the same step has the same results on a CPU and on the pretended device."""
    recorded = each_alone(perturbation, PLAN, count=3)
    on_host = replayed(Batch(perturbation, recorded, False, packed), masked)
    with pretended_cuda():
        on_device = replayed(Batch(perturbation, recorded, True, packed), masked)
    compare(on_device, on_host)
    _, of_embedding, of_head = on_host[:3]
    assert of_embedding.any() or of_head.any(), "nothing has a gradient"


@pytest.mark.parametrize(("name", "density"), cases(), ids=str)
def test_replay_and_density(name: str, density: str | None) -> None:
    options = {} if density is None else {"density": density}
    check_on_both(create(name, rate=0.7, **options))


def test_mask_correction() -> None:
    check_on_both(create("gumbel", rate=0.7), masked=True)


@pytest.mark.more
def test_packed_batch_with_mask_correction() -> None:
    check_on_both(create("latent", density="exact", rate=0.7), packed=True, masked=True)


@pytest.mark.parametrize("name", sorted(credits.available()))
def test_credits(name: str) -> None:
    """The formula, and what has a part in the loss."""
    credit = credits.create(name)
    perturbation = create("neighbor", rate=0.7)
    recorded = each_alone(perturbation, PLAN, count=3)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(12, generator=generator) for _ in range(3)]
    numbers = [torch.arange(12) // size for size in (3, 6, 3)]

    def outcome(on_device: bool) -> list[Tensor]:
        batch = Batch(perturbation, recorded, on_device)
        arguments_of_loss: list[Any] = []

        def loss(*args: Tensor) -> tuple[Tensor]:
            arguments_of_loss.extend(args)
            return (args[0].sum(),)

        step = StepTokens(*map(batch.up, values), *map(batch.up, numbers))
        formula = credit.formula(step)
        has_marks = credit.marks(step) is not None
        credit_in_loss = CreditInLoss(
            credit,
            loss,
            advantages=batch.advantages,
            action_mask=batch.actions,
            attention_mask=batch.mask,
            marks=batch.actions.bool() if has_marks else None,
        )
        with override_log_probs(credit_in_loss.look, "the credit was not asked", ""):
            log_probs = batch.forward()
        credit_in_loss(log_probs, log_probs.detach(), batch.advantages)
        score, _, advantages, *of_penalty = arguments_of_loss
        return batch.outcome(score + sum(of_penalty[:1]), advantages, formula)

    on_host = outcome(on_device=False)
    with pretended_cuda():
        on_device = outcome(on_device=True)
    compare(on_device, on_host)
