# SPDX-License-Identifier: Apache-2.0
"""The problems of test_policy_gradient.py, and the gradient that the product estimates for them."""

import sys
import types
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.trainers.common.log_probs import densities, with_overrides
from perturbations import streams
from perturbations.base import Perturbation, Step
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.parameters import attach, attached
from perturbations.replay import ReplayRecord
from perturbations.replay.scope import LastHidden, ReplayScope

V = 4
D = 2
PROMPTS = 2
TEMPERATURE = 0.8
BATCHES = 32
EPISODES = 3000  # of a batch
SEED = 20000
EMBEDDING = torch.tensor([[0.9, -0.4], [-0.7, 0.8], [0.2, 1.1], [-1.0, -0.6]])
HEAD = torch.tensor([[0.8, 0.5], [-0.5, 0.9], [0.3, -1.1], [-0.6, -0.3]])
BANDIT = torch.tensor([1.0, -0.8, 0.3, -0.5])
"""Rewards of the problem of one step, by token."""
TWO_STEPS = torch.tensor(
    [
        [1.0, -0.7, 0.2, -0.6],
        [-0.4, 0.9, -0.8, 0.5],
        [0.3, -1.0, 0.6, 0.1],
        [-0.9, 0.4, -0.2, 0.8],
    ]
)
"""Rewards of the problem of two steps, by first and second token."""


class Model(nn.Module):
    """Logits of a row follow from that row's input alone, so one sequence holds many independent episodes."""

    def __init__(self, perturbation: Perturbation) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(EMBEDDING.clone(), freeze=False)
        self.head = nn.Parameter(HEAD.clone())
        self.last = nn.Identity()  # what the output layer is given goes through it
        module = attach(self, perturbation)
        if module is not None:
            generator = torch.Generator().manual_seed(1)
            for parameter in module.parameters():
                parameter.data = 0.8 * torch.randn(parameter.shape, generator=generator)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def logits(self, inputs: Tensor) -> Tensor:
        """z̃ of the tokens after inputs (…, D)."""
        return self.last(torch.tanh(inputs)) @ self.head.T / TEMPERATURE

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.embedding(tokens))


@cache
def policy_loss(level: str = "off", mode: str = "mask", threshold: tuple[float, float] = (0.5, 5.0)) -> Any:
    """OpenRLHF's policy loss, with its ``is_correction_*``.

    From its own file: importing the package loads PEFT and transformers, for many seconds.
    """
    openrlhf_folder = Path(find_spec("openrlhf").submodule_search_locations[0])
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(openrlhf_folder / "models")]
    sys.modules[package.__name__] = package
    loss_module = import_module("openrlhf_models.loss")
    return loss_module.PolicyLoss(
        token_level_loss=True,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_threshold=[*threshold],
    )


@with_overrides
def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def rollout(model: Model, perturbation: Perturbation, steps: int, seed: int) -> tuple[Tensor, ReplayRecord, Tensor]:
    """One sequence of EPISODES × (prompt, token, …), its record, and each action's advantage, (1, T − 1)."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = matrix_embeddings(model.embedding.weight.detach(), model.head.detach())
    start = torch.arange(EPISODES) * (steps + 1)
    seeds = torch.full((EPISODES,), seed)
    tokens = torch.zeros(EPISODES, steps + 1, dtype=torch.int64)
    tokens[:, 0] = torch.arange(EPISODES) % PROMPTS
    inputs = model.embedding(tokens[:, 0])
    edits = []
    agreed = []
    for number in range(1, steps + 1):
        logits = model.logits(inputs)
        sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).squeeze(-1)
        positions = start + number
        step = Step(
            logits=logits,
            sampled=sampled,
            temperature=torch.full((EPISODES,), TEMPERATURE),
            seeds=seeds,
            positions=positions,
            embeddings=embeddings,
        )
        if perturbation.reads_hidden:
            step = replace(step, hidden=torch.tanh(inputs), module=attached(model))
        proposal = perturbation.propose(step)
        keys = streams.keys(seeds, positions, streams.Stream.NOISE)
        inputs = realise(proposal.edit, model.embedding, keys, attached(model))
        tokens[:, number] = proposal.tokens
        edits.append(proposal.edit)
        agreed.append(sampled == proposal.tokens)
    record = _record(start, tokens, edits, agreed, seed)
    reward = BANDIT[tokens[:, 1]] if steps == 1 else TWO_STEPS[tokens[:, 1], tokens[:, 2]]
    advantages = torch.zeros(tokens.shape)
    advantages[:, 1:] = reward.unsqueeze(-1)
    return tokens.view(1, -1), ReplayRecord.from_bytes(record.to_bytes()), advantages.view(1, -1)[:, 1:]


def _record(start: Tensor, tokens: Tensor, edits: list[Any], agreed: list[Tensor], seed: int) -> ReplayRecord:
    """The record of all episodes as one sequence.

    Args:
        start: the position of each episode's prompt, (EPISODES,).
        tokens: (EPISODES, 1 + steps).
        edits: of each step, with EPISODES rows.
        agreed: for each step, whether the sampled token is the proposed one, (EPISODES,).
        seed: of the trajectory.
    """

    def by_position(name: str) -> np.ndarray | None:
        of_steps = [getattr(edit, name) for edit in edits]
        return None if of_steps[0] is None else torch.stack(of_steps, dim=1).flatten(0, 1).numpy()

    positions = start.unsqueeze(-1) + torch.arange(1, tokens.shape[1])
    return ReplayRecord(
        seed=seed,
        prompt_tokens=0,
        num_tokens=tokens.numel(),
        positions=positions.flatten().int().numpy(),
        ids=by_position("ids").astype(np.int32),
        weights=by_position("weights"),
        sigma=by_position("sigma"),
        agreed=torch.stack(agreed, dim=1).flatten().numpy(),
        normalizer=by_position("normalizer"),
    )


@cache
def estimate(perturbation: Perturbation, steps: int) -> dict[str, Tensor]:
    """Gradients of J by name, (BATCHES, …): of independent batches.

    Args:
        perturbation: any.
        steps: 1 for the bandit, 2 for the problem of two steps.
    """
    model = Model(perturbation)
    mask = torch.ones(1, EPISODES * (steps + 1), dtype=torch.int64)
    is_action = (torch.arange(1, mask.shape[1]) % (steps + 1) > 0).unsqueeze(0)

    def log_probs(tokens: Tensor, record: ReplayRecord) -> Tensor:
        hidden = LastHidden(model.last, "a test") if perturbation.reads_hidden else None
        scope = ReplayScope(model.embedding, module=attached(model), perturbation=perturbation, hidden=hidden)
        labels = torch.roll(tokens, -1, 1)
        with scope([record], mask), densities(scope, TEMPERATURE) as overrides:
            token_log_probs = log_probs_from_logits(model(tokens), labels)[:, :-1] * is_action
            return token_log_probs if overrides is None else overrides.for_policy_loss(token_log_probs)

    gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for batch in range(BATCHES):
        tokens, record, advantages = rollout(model, perturbation, steps, SEED + 1000 * steps + batch)
        with torch.no_grad():
            old_log_probs = log_probs(tokens, record)
        loss, *_ = policy_loss()(
            log_probs(tokens, record),
            old_log_probs,
            advantages,
            action_mask=is_action,
            batch_num_tokens=float(EPISODES),
        )
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name].append(-gradient.double())
    return {name: torch.stack(batches) for name, batches in gradients.items()}
