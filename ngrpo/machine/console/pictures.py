# SPDX-License-Identifier: Apache-2.0
"""Small pictures in text of what each registered thing does, computed by the thing itself: `ngrpo list NAME`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ngrpo.methods.credits.base import LossTokens, StepTokens
from ngrpo.methods.sampling_schedules.base import NextTokens, PastStep, Run
from perturbations.base import Perturbation
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.errors import require
from perturbations.step import GateStep, Positions, Step

if TYPE_CHECKING:
    from ngrpo.methods.advantages.base import Advantage
    from ngrpo.methods.credits.base import Credit
    from ngrpo.methods.policy_noises.base import PolicyNoise
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule
    from perturbations.gates import Gate

_WORDS = ("so", "thus", "but", "hence", "then", "therefore")
_SHARES = (0.40, 0.25, 0.15, 0.10, 0.05, 0.03)
_VOCABULARY, _DIMENSION, _BAR = 64, 8, 24


def of_perturbation(perturbation: Perturbation) -> list[str]:
    """What is fed at one position where the policy wavers, and what stands in the text."""
    step, module = _step(1), perturbation.module(_DIMENSION)
    if perturbation.reads_hidden:
        step = dataclasses.replace(step, hidden=torch.zeros(1, _DIMENSION), module=module)
    shares = ", ".join(f"{word} {share:.2f}" for word, share in zip(_WORDS, _SHARES))
    sampled_word = _word(int(step.sampled))
    proposal = perturbation.propose(step)
    edit = proposal.edit
    weights: dict[int, float] = {}
    for token, weight in zip(edit.ids[0].tolist(), edit.weights[0].tolist()):
        weights[token] = weights.get(token, 0.0) + weight
    largest = sorted((pair for pair in weights.items() if abs(pair[1]) >= 5e-3), key=lambda pair: -abs(pair[1]))[:8]
    lines = [f"one position: the policy has {shares}; sampling draws {sampled_word!r}. Fed is"]
    lines += [f"  {_word(token):<12}{weight:6.2f}  {_bar(weight)}".rstrip() for token, weight in largest]
    if edit.sigma is not None:
        lines.append(f"  + noise of {float(edit.sigma):.2f} in each element (the embeddings' own is 1)")
    if edit.vectors is not None:
        lines.append("  + a vector of its own")
    if module is not None and not perturbation.reads_hidden:
        lines.append("  through its learned parameters, together with the sampled token")
    elif module is not None:
        lines.append("  as its learned parameters say before training, of a last hidden state of 0")
    return [*lines, f"and in the text stands {_word(int(proposal.tokens))!r}."]


def of_gate(gate: Gate) -> list[str]:
    """Which of the first positions of three answers are open; the policy is sometimes sure and sometimes not."""
    count, lines = 72, []
    for seed in (3, 4, 5):
        at = Positions(np.full(count, seed), np.zeros(count, dtype=np.int64), np.arange(count))
        step = dataclasses.replace(_step(count), seeds=torch.full((count,), seed))
        opened = torch.from_numpy(gate.plan(at)) & gate.open(GateStep.of(step, torch.arange(count)))
        lines.append("  " + "".join("█" if each else "·" for each in opened.tolist()))
    return [f"the first {count} positions of three answers, █ open:", *lines]


def of_advantage(advantage: Advantage) -> list[str]:
    """Advantages of three groups of four answers."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    counts = torch.tensor([[0.0, 3.0, 3.0, 3.0]] * 3)
    fitting = {"k": 2} if hasattr(advantage, "k") else {}
    advantage = dataclasses.replace(advantage, **fitting)
    values = advantage.compute(rewards, counts)
    note = "".join(f", with {name}={value}" for name, value in fitting.items())
    note += ", the first answer new and the others seen three times before" if advantage.counted else ""
    lines = [f"rewards of four answers, and their advantages{note}:"]
    for row, advantages in zip(rewards.tolist(), values.tolist()):
        lines.append("  " + " ".join(f"{r:.0f}" for r in row) + "   →  " + " ".join(f"{a:6.2f}" for a in advantages))
    return lines


def of_credit(credit: Credit) -> list[str]:
    """Advantages of ten tokens of one answer, or what a credit of the loss raises and lowers at a token."""
    if credit.acts_in_loss:
        return _in_loss(credit)
    entropies = torch.tensor([0.0, 0.1, 2.1, 0.0, 0.3, 1.2, 0.0, 0.7, 0.1, 0.0])
    # Another answer to the same prompt, also right and with likelier tokens, is not shown.
    both, answers = entropies.repeat(2), torch.arange(2).repeat_interleave(10)
    log_probs = -both - 0.1 * (1 - answers)
    after = credit.formula(StepTokens(torch.ones(20), both, log_probs, answers, torch.zeros_like(answers)))[:10]
    lines = ["ten tokens of an answer with the advantage 1, of two such answers the one with less likely tokens:"]
    for name, values in (("entropy", entropies), ("advantage", after)):
        lines.append(f"  {name:<10}" + " ".join(f"{value:5.2f}" for value in values.tolist()))
    return lines


def _in_loss(credit: Credit) -> list[str]:
    """Whose log-probability carries the advantage of an answer's fifth token, where the policy wavers."""
    probabilities = torch.tensor([[0.97, 0.01, 0.01, 0.01]] * 4 + [[0.4, 0.3, 0.2, 0.1]])
    lines = ["an answer's only token at which the policy wavers; what its advantage moves, by token:"]
    lines.append("  p        " + " ".join(f"{p:7.3f}" for p in probabilities[-1].tolist()))
    for advantage, token in ((1.0, 3), (-1.0, 0)):
        logits = probabilities.log().requires_grad_()
        tokens = torch.tensor([0, 0, 0, 0, token])
        log_probs = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        number, advantages = torch.arange(5), torch.full((5,), advantage)
        changed, term = require(
            credit.in_loss(LossTokens(logits, number, tokens, log_probs, advantages, 0 * number)),
            "what a credit does in the loss",
        )
        (gradient,) = torch.autograd.grad(term.sum() + 0.0 * logits.sum(), logits)
        moved = changed[-1] * (torch.nn.functional.one_hot(tokens[-1], 4) + gradient[-1])
        lines.append(f"  A = {advantage:<4.0f} " + " ".join(f"{m:7.3f}" for m in moved.tolist()) + f"   token {token}")
    return lines


def of_policy_noise(noise: PolicyNoise) -> list[str]:
    """σ over a run."""
    scales: list[float] = []
    for step in range(100):
        scales.append(noise.scale(step, 100, scales[-1] if scales else None, 0.0))
    lines = ["σ of the rollouts' weights in a run of 100 steps:"]
    for step in range(0, 100, 10):
        bar = _bar(scales[step] / max(scales)) if scales[step] else ""
        lines.append(f"  step {step:<4}{scales[step]:<10.3g}{bar}".rstrip())
    return lines


def of_sampling_schedule(schedule: SamplingSchedule) -> list[str]:
    """Temperatures of one answer's tokens, or of a run's steps while the policy grows surer."""
    if schedule.follows_training:
        past: list[PastStep] = []
        for step in range(100):
            factor = schedule.factor_of_step(past, Run(100, 1.0, 50_000))
            past.append(PastStep(factor, (1.0 - 0.006 * step) * factor))
        lines = ["temperature in a run of 100 steps whose entropy falls by 0.006 a step at temperature 1:"]
        return [*lines, *_curve("step", {step: past[step].factor for step in range(0, 100, 10)})]
    rows, one = torch.arange(1000), torch.ones(1000)
    factors = schedule.factor(NextTokens(_step(1).logits.expand(1000, -1), one, rows, torch.zeros_like(rows)))
    if factors is None:
        eight, none = torch.arange(8), torch.zeros(8, dtype=torch.int64)
        at = NextTokens(_step(1).logits.expand(8, -1), torch.ones(8), none, none, eight, torch.full_like(eight, 8))
        lines = ["temperature of each of eight answers to a prompt, where 1 is asked for:"]
        return [*lines, *_curve("answer", dict(enumerate(require(schedule.factor(at), "factor").tolist())))]
    if factors.min() < factors.max():
        lines = ["temperature of an answer's tokens in the first training step, where 1 is asked for:"]
        return [*lines, *_curve("token", {t: float(factors[t]) for t in (0, 5, 10, 50, 100, 200, 300, 400, 600)})]
    sureness = torch.logspace(-1, 1, 8).unsqueeze(-1)
    same = torch.zeros(8, dtype=torch.int64)
    tokens = NextTokens(_step(1).logits * sureness, torch.ones(8), same, same)
    values = zip(tokens.entropies().tolist(), require(schedule.factor(tokens), "factor").tolist())
    lines = ["temperature by the entropy at a token, in nats, where 1 is asked for:"]
    return [*lines, *_curve("entropy", {f"{entropy:.2f}": factor for entropy, factor in values})]


def _curve(name: str, values: Mapping[Any, float]) -> list[str]:
    most = max(values.values())
    return [f"  {name} {at!s:<5}{value:<8.3g}{_bar(value / most)}" for at, value in values.items()]


def _step(rows: int) -> Step:
    """Positions of a made-up model, in the first of which the policy has ``_SHARES``; it grows surer and back again."""
    rest = (1.0 - sum(_SHARES)) / (_VOCABULARY - len(_SHARES))
    logits = torch.tensor([*_SHARES, *[rest] * (_VOCABULARY - len(_SHARES))]).log().expand(rows, -1)
    sureness = 1.0 + 4.0 * torch.sin(torch.arange(rows) * 0.3).square()
    positions = torch.arange(rows)
    seeds = torch.full((rows,), 7)
    sampled = torch.ones(rows, dtype=torch.int64)
    return Step(logits * sureness.unsqueeze(-1), sampled, torch.ones(rows), seeds, positions, _embeddings())


def _embeddings() -> ModelEmbeddings:
    """Random ones, with words that mean nearly the same near each other."""
    matrix = torch.randn(_VOCABULARY, _DIMENSION, generator=torch.Generator().manual_seed(0))
    for word in ("thus", "hence", "therefore"):
        matrix[_WORDS.index(word)] = matrix[0] + 0.5 * matrix[_WORDS.index(word)]
    return matrix_embeddings(matrix, texts=[_word(token) for token in range(_VOCABULARY)])


def _word(token: int) -> str:
    return _WORDS[token] if token < len(_WORDS) else f"token {token}"


def _bar(weight: float) -> str:
    return ("█" if weight > 0.0 else "░") * max(1, round(abs(weight) * _BAR))
