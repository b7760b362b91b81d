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

V, D, PROMPTS = 4, 2, 2
TEMPERATURE = 0.8
BATCHES, EPISODES, SEED = 32, 3000, 20000
EMBEDDING = torch.tensor([[0.9, -0.4], [-0.7, 0.8], [0.2, 1.1], [-1.0, -0.6]])
HEAD = torch.tensor([[0.8, 0.5], [-0.5, 0.9], [0.3, -1.1], [-0.6, -0.3]])
BANDIT = torch.tensor([1.0, -0.8, 0.3, -0.5])
TWO_STEPS = torch.tensor(
    [[1.0, -0.7, 0.2, -0.6], [-0.4, 0.9, -0.8, 0.5], [0.3, -1.0, 0.6, 0.1], [-0.9, 0.4, -0.2, 0.8]]
)


class Model(nn.Module):
    """Logits of a row follow from that row's input alone, so one sequence holds many independent episodes."""

    def __init__(self, perturbation: Perturbation) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(EMBEDDING.clone(), freeze=False)
        self.head = nn.Parameter(HEAD.clone())
        self.last = nn.Identity()  # what the output layer is given goes through it
        module = attach(self, perturbation)
        if module is not None:
            drawn = torch.Generator().manual_seed(1)
            for parameter in module.parameters():
                parameter.data = 0.8 * torch.randn(parameter.shape, generator=drawn)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def logits(self, inputs: Tensor) -> Tensor:
        """z̃ of the tokens after inputs (…, D)."""
        return self.last(torch.tanh(inputs)) @ self.head.T / TEMPERATURE

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.embedding(tokens))


@cache
def policy_loss(level: str = "off", mode: str = "mask", threshold: tuple[float, float] = (0.5, 5.0)) -> Any:
    """OpenRLHF's, with its ``is_correction_*``.

    From its own file: importing the package loads PEFT and transformers, for many seconds.
    """
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(Path(find_spec("openrlhf").submodule_search_locations[0]) / "models")]
    sys.modules[package.__name__] = package
    return import_module("openrlhf_models.loss").PolicyLoss(
        token_level_loss=True, is_correction_level=level, is_correction_mode=mode, is_correction_threshold=[*threshold]
    )


@with_overrides
def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def rollout(model: Model, perturbation: Perturbation, steps: int, seed: int) -> tuple[Tensor, ReplayRecord, Tensor]:
    """One sequence of EPISODES × (prompt, token, …), its record, and each action's advantage, (1, T − 1)."""
    drawn = torch.Generator().manual_seed(seed)
    embeddings = matrix_embeddings(model.embedding.weight.detach(), model.head.detach())
    start = torch.arange(EPISODES) * (steps + 1)
    tokens = torch.zeros(EPISODES, steps + 1, dtype=torch.int64)
    tokens[:, 0] = torch.arange(EPISODES) % PROMPTS
    inputs, edits, agreed = model.embedding(tokens[:, 0]), [], []
    seeds = torch.full((EPISODES,), seed)
    for step in range(1, steps + 1):
        logits = model.logits(inputs)
        sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=drawn).squeeze(-1)
        positions, temperature = start + step, torch.full((EPISODES,), TEMPERATURE)
        seen = Step(logits, sampled, temperature, seeds, positions, embeddings)
        if perturbation.reads_hidden:
            seen = replace(seen, hidden=torch.tanh(inputs), module=attached(model))
        proposal = perturbation.propose(seen)
        keys = streams.keys(seeds, positions, streams.Stream.NOISE)
        inputs = realise(proposal.edit, model.embedding, keys, attached(model))
        tokens[:, step] = proposal.tokens
        edits.append(proposal.edit)
        agreed.append(sampled == proposal.tokens)

    def rows(name: str) -> np.ndarray | None:
        parts = [getattr(edit, name) for edit in edits]
        return None if parts[0] is None else torch.stack(parts, dim=1).flatten(0, 1).numpy()

    record = ReplayRecord(
        seed,
        0,
        tokens.numel(),
        (start.unsqueeze(-1) + torch.arange(1, steps + 1)).flatten().int().numpy(),
        rows("ids").astype(np.int32),
        rows("weights"),
        rows("sigma"),
        torch.stack(agreed, dim=1).flatten().numpy(),
        normalizer=rows("normalizer"),
    )
    reward = BANDIT[tokens[:, 1]] if steps == 1 else TWO_STEPS[tokens[:, 1], tokens[:, 2]]
    advantages = torch.zeros(tokens.shape)
    advantages[:, 1:] = reward.unsqueeze(-1)
    return tokens.view(1, -1), ReplayRecord.from_bytes(record.to_bytes()), advantages.view(1, -1)[:, 1:]


@cache
def estimate(perturbation: Perturbation, steps: int) -> dict[str, Tensor]:
    """Gradients of J by name, (BATCHES, …): of independent batches.

    Args:
        perturbation: any.
        steps: 1 for the bandit, 2 for the problem of two steps.
    """
    model, found = Model(perturbation), {}
    mask = torch.ones(1, EPISODES * (steps + 1), dtype=torch.int64)
    action = (torch.arange(1, mask.shape[1]) % (steps + 1) > 0).unsqueeze(0)

    def log_probs(tokens: Tensor, record: ReplayRecord) -> Tensor:
        hidden = LastHidden(model.last, "a test") if perturbation.reads_hidden else None
        scope = ReplayScope(model.embedding, module=attached(model), perturbation=perturbation, hidden=hidden)
        with scope([record], mask), densities(scope, TEMPERATURE) as ours:
            found = log_probs_from_logits(model(tokens), torch.roll(tokens, -1, 1))[:, :-1] * action
            return found if ours is None else ours.for_policy_loss(found)

    for batch in range(BATCHES):
        tokens, record, advantages = rollout(model, perturbation, steps, SEED + 1000 * steps + batch)
        with torch.no_grad():
            old = log_probs(tokens, record)
        loss = policy_loss()(
            log_probs(tokens, record), old, advantages, action_mask=action, batch_num_tokens=float(EPISODES)
        )[0]
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.setdefault(name, []).append(-gradient.double())
    return {name: torch.stack(parts) for name, parts in found.items()}
