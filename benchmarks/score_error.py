# SPDX-License-Identifier: Apache-2.0
"""How far is a density's score off where the logits of trainer and rollout differ, as they do in bfloat16?

    python -m benchmarks.score_error                        # random logits, every density, a minute
    python -m benchmarks.score_error --model smollm2-135m   # one bfloat16 step of STHT on a real model

Printed first: the root mean square of the error over that of the score, in the logits, of 256 positions with 4,000
tokens; logits of deviation 3; differences of 0.03 and 0.1 (their deviation), independent in each logit, or those of one
hidden state of 16 numbers that is off everywhere. The rows "as a difference" take the noise from what rollout and
trainer computed, and not from the draw. Printed with a model: the length of the gradient over that of its error, over
all parameters, with half of each prompt's responses weighed by 1 and half by −1; the reference is a float32 trainer.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from torch import Tensor

from benchmarks.machine import describe
from perturbations import create, density
from perturbations.base import Perturbation, Replayed
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.methods.gaussian import Gaussian
from perturbations.step import Step
from perturbations.testing.proposal import replayed

POSITIONS, VOCABULARY, HIDDEN = 256, 4000, 16
SIZES, MISMATCHES = (576, 2048), (0.03, 0.1)
KINDS = ("independent", "correlated")
DENSITIES = (
    ("gaussian", {"density": "gaussian", "base": "soft"}),
    ("gumbel", {"density": "gumbel"}),
    ("gumbel", {"density": "exact"}),
    ("dirichlet", {"density": "dirichlet"}),
    ("dirichlet", {"density": "exact"}),
    ("normal", {"density": "normal"}),
    ("multiplex", {"density": "joint"}),
    ("lepo", {"density": "lepo"}),
    ("lepo", {"density": "exact"}),
    ("latent", {"density": "latent"}),
    ("latent", {"density": "exact"}),
)
Entry = Callable[[Replayed], Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference(Gaussian):
    """STHT's density with e' rebuilt from the record, and its mean from the trainer's logits."""

    def log_density(self, replayed: Replayed) -> Tensor:
        """log N(e'; h(θ), σ² I)."""
        with torch.no_grad():
            fed = realise(replayed.edit, replayed.lookup, replayed.noise_keys).float()
        ids = replayed.top(self.k)
        weights = torch.softmax(replayed.at(ids) * (replayed.temperature / self.tau), dim=-1)
        mean = (replayed.lookup(ids) * weights.unsqueeze(-1)).sum(dim=-2)
        return density.gaussian(fed, mean, replayed.edit.sigma)


def differences(perturbation: Perturbation, step: Step) -> Entry | None:
    """The density by what rollout and trainer computed, of the perturbations that take the noise from its draw."""
    if perturbation.name == "gaussian":
        return Difference(base="soft", density="gaussian").log_density

    def shares(seen: Replayed) -> tuple[Tensor, Tensor]:
        distinct = density.distinct(seen.edit.ids)
        return density.renormalised(seen.at(seen.edit.ids), distinct), distinct

    if perturbation.name == "normal":
        ids, old = perturbation.top(step)
        draws = old + density.NORMAL_SIGMA * step.normal(ids)
        return lambda seen: density.normal(draws, *shares(seen))
    if perturbation.name == "gumbel" and perturbation.density == "gumbel":

        def as_before(seen: Replayed) -> Tensor:
            scores = perturbation.tau * seen.edit.weights.clamp_min(1e-38).log() + seen.edit.normalizer.unsqueeze(-1)
            return density.gumbel(scores, *shares(seen))

        return as_before
    return None


def steps(size: int) -> tuple[Step, Tensor]:
    """The positions of a rollout, with tokens drawn, and the matrix that makes logits of hidden states, (V, 16)."""
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5
    embeddings = matrix_embeddings(torch.randn(VOCABULARY, size, generator=generator))
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).squeeze(-1)
    seeds, positions = torch.full((POSITIONS,), 11), torch.arange(POSITIONS)
    return Step(logits, sampled, torch.ones(POSITIONS), seeds, positions, embeddings), head


def mismatch(kind: str, size: float, head: Tensor) -> Tensor:
    """What is added to the rollout's logits, (N, V): of the given deviation."""
    generator = torch.Generator().manual_seed(5)
    if kind == "independent":
        return size * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    return (size * head @ torch.randn(HIDDEN, generator=generator)).expand(POSITIONS, VOCABULARY)


def relative_error(perturbation: Perturbation, entry: Entry, step: Step, off: Tensor) -> float:
    """Root mean square of the score's error over that of the score, in the logits."""
    proposal = perturbation.propose(step)

    def score(logits: Tensor, of: Entry) -> Tensor:
        logits = logits.clone().requires_grad_()
        return torch.autograd.grad(of(replayed(step, proposal, logits)).sum(), logits)[0]

    true = score(step.logits, perturbation.log_density)
    return ((score(step.logits + off, entry) - true).norm() / true.norm()).item()


def rows(size: int, names: tuple[str, ...] = ()) -> Iterator[tuple[str, list[float]]]:
    """The table's rows for embeddings of ``size``: a density, and its error for each mismatch and kind."""
    step, head = steps(size)
    for name, options in DENSITIES:
        if names and name not in names:
            continue
        perturbation = create(name, **options)
        for label, entry in (("", perturbation.log_density), (" as a difference", differences(perturbation, step))):
            if entry is not None:
                parts = [(kind, of) for of in MISMATCHES for kind in KINDS]
                errors = [relative_error(perturbation, entry, step, mismatch(kind, of, head)) for kind, of in parts]
                yield f"{name} density={options['density']}{label}", errors


def table() -> None:
    """Prints the table."""
    print(f"{describe()}; {POSITIONS} positions, {VOCABULARY} tokens")
    print(f"{'':42s} {'D':>5s} " + " ".join(f"{f'{of:g} {kind}':>17s}" for of in MISMATCHES for kind in KINDS))
    for size in SIZES:
        for label, errors in rows(size, () if size == SIZES[0] else ("gaussian",)):
            print(f"{label:42s} {size:5d} " + " ".join(f"{each:17.3f}" for each in errors), flush=True)


def gradient(model: Any, perturbation: Perturbation, rollouts: list[Any], signs: Tensor) -> Tensor:
    """The gradient of Σ A · entry over the rollouts, all parameters in one vector, float64."""
    from ngrpo.trainers.common.log_probs import densities, with_overrides
    from perturbations.replay.scope import ReplayScope

    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    model.zero_grad()
    for rollout, sign in zip(rollouts, signs):
        tokens = torch.tensor([rollout.sequence])
        scope = ReplayScope(model.get_input_embeddings(), perturbation=perturbation)
        with scope([rollout.record], torch.ones_like(tokens)), densities(scope, 1.0) as ours:
            token_log_probs = with_overrides(log_probs)(model(tokens).logits.float(), tokens.roll(-1, dims=1))[:, :-1]
            (sign * ours.for_policy_loss(token_log_probs)[:, len(rollout.prompt) - 1 :].sum()).backward()
    # In float64: sums over 10^8 elements lose two digits of float32.
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def real_step(name: str, tokens: int) -> None:
    """Prints the signal to noise of one bfloat16 step's gradient."""
    from transformers import AutoModelForCausalLM

    from ngrpo.machine.models.packaged import resolve
    from tests.stack.harness import build_engine, chat_prompts, sample

    options = {"base": "soft", "density": "gaussian"}
    folder = resolve(name)
    llm = build_engine(folder, {"name": "gaussian", **options}, dtype="bfloat16")
    rollouts = sample(llm, chat_prompts(llm, copies=4), [{"seed": i} for i in range(16)], max_tokens=tokens)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(4)
    ours, before = create("gaussian", **options), Difference(**options)
    exact = gradient(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ours, rollouts, signs)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(f"{describe()}; {name}, bfloat16, 16 responses of {tokens} tokens")
    for label, each in (("as a difference", before), ("as drawn", ours)):
        estimate = gradient(model, each, rollouts, signs)
        cosine = torch.nn.functional.cosine_similarity(estimate, exact, dim=0)
        ratio = exact.norm() / (estimate - exact).norm()
        print(f"{label:16s} signal to noise {ratio:6.2f}, cosine with the float32 gradient {cosine:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="one step on this model, instead of the table")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.model is None:
        table()
    else:
        real_step(options.model, options.tokens)


if __name__ == "__main__":
    main()
