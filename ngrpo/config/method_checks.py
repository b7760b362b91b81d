# SPDX-License-Identifier: Apache-2.0
"""``ngrpo check KIND`` for credits, policy noises, sampling schedules and second rounds: is the contract kept?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngrpo.config import second_round_check
from ngrpo.config.kinds import KINDS
from ngrpo.methods.credits.base import Credit, LossTokens, StepTokens
from ngrpo.methods.policy_noises.base import PolicyNoise
from ngrpo.methods.sampling_schedules.base import NextTokens, PastStep, Run, SamplingSchedule
from perturbations.testing import Check, PerturbationError, outcomes
from perturbations.testing.report import answered, check_answers, check_repeatable, check_tensor, expect
from perturbations.testing.waits import check_without_values

_STEPS = 100  # training steps of the synthetic run
_VOCABULARY = 32  # of the logits of a synthetic forward
_CREDIT_DRAWS = "Draw with perturbations.streams, from streams.keys(tokens.seeds, …)."
_NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")


def inspect(target: object, kind: str, **options: object) -> Iterator[tuple[str, PerturbationError | None]]:
    """Checks an object, or a class or name with options, as :func:`perturbations.testing.inspect`."""
    return outcomes(target, KINDS[kind].registry, _CHECKS[kind], options)  # type: ignore[bad-argument-type]


# ---- credits -------------------------------------------------------------------------------------------------------


def _credit_checks(credit: Credit) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(5)
    responses = torch.arange(6).repeat_interleave(torch.tensor([1, 4, 7, 3, 9, 2]))
    count = len(responses)
    tokens = StepTokens(
        advantages=torch.randn(6, generator=generator)[responses],
        entropies=torch.rand(count, generator=generator),
        log_probs=-5.0 * torch.rand(count, generator=generator),
        responses=responses,
        groups=responses // 3,
        seeds=responses + 1,
    )
    zero = torch.zeros(count)
    nothing_to_share = replace(tokens, advantages=zero, entropies=zero, log_probs=zero)
    yield Check("credit of ordinary tokens", partial(_check_credit, credit, "ordinary tokens", tokens))
    yield Check(
        "credit of certain tokens without advantage", partial(_check_credit, credit, "certain tokens", nothing_to_share)
    )
    if credit.acts_in_loss:
        forward = _loss_tokens(tokens, generator)
        yield Check("advantages and term in the loss", partial(_check_in_loss, credit, forward))
        yield Check("marks, and the loss of marked tokens", partial(_check_marks, credit, tokens, forward))


def _check_credit(credit: Credit, label: str, tokens: StepTokens) -> None:
    where = f"{credit.name}, {label}:"

    def formula(tokens: StepTokens) -> Tensor:
        advantages = answered(f"{where} formula()", lambda: credit.formula(tokens), "It must accept any tokens.")
        _check_numbers(where, "formula()", advantages, len(tokens.responses))
        return advantages

    advantages = check_repeatable(
        where, "formula()", formula, tokens, prefix="tokens.", draws=_CREDIT_DRAWS, what="tokens"
    )
    keeps_or_drops = (advantages == tokens.advantages) | (advantages == 0.0)
    expect(
        not credit.keeps_sums or keeps_or_drops.all(),
        f"{where} keeps_sums is True, and a token's advantage is neither its response's nor 0.",
        "Leave keeps_sums at False.",
    )


def _check_numbers(where: str, method: str, numbers: Tensor, count: int, part: str = "") -> None:
    """Raises :class:`PerturbationError` unless a method's result, or a part of it, is ``count`` finite numbers."""
    check_tensor(f"{where} what {method} returns{part}", numbers, (count,), torch.float32, torch.device("cpu"))
    not_finite = numbers[~numbers.isfinite()].tolist()
    expect(not not_finite, f"{where} {method} gives {not_finite[:1]}{part}.", "Clamp before divisions and logarithms.")


def _loss_tokens(tokens: StepTokens, generator: torch.Generator) -> LossTokens:
    """The tokens of a step in a forward that is differentiated; its first row of logits is of no token."""
    count = len(tokens.responses)
    logits = torch.randn(1, count + 1, _VOCABULARY, generator=generator).requires_grad_()
    rows = torch.arange(count) + 1
    ids = torch.randint(_VOCABULARY, (count,), generator=generator)
    return LossTokens(
        logits=logits,
        rows=rows,
        tokens=ids,
        log_probs=logits.log_softmax(dim=-1)[0, rows, ids],
        advantages=tokens.advantages,
        responses=tokens.responses,
    )


def _check_in_loss(credit: Credit, forward: LossTokens) -> None:
    where = f"{credit.name}:"
    count = len(forward.responses)

    def in_loss(forward: LossTokens) -> dict[str, Tensor] | None:
        result = answered(f"{where} in_loss()", lambda: credit.in_loss(forward), "It must accept any tokens.")
        if result is None:
            return None
        expect(
            isinstance(result, tuple) and len(result) == 2,
            f"{where} in_loss() gives {result!r:.100}.",
            "It must be two tensors, advantages and a term, or None.",
        )
        advantages, term = result
        _check_numbers(where, "in_loss()", advantages, count, part=" as advantages")
        _check_numbers(where, "in_loss()", term, count, part=" as the term")
        expect(
            not advantages.requires_grad,
            f"{where} in_loss() gives advantages with a gradient.",
            "Detach them: only the term has a gradient.",
        )
        return {"advantages": advantages, "term": term}

    draws = "Draw in formula() or marks(), whose tokens have seeds."
    check_repeatable(where, "in_loss()", in_loss, forward, prefix="tokens.", draws=draws, what="tokens")

    def results(forward: LossTokens) -> dict[str, Tensor]:
        return dict(zip(("advantages", "term"), credit.in_loss(forward) or ()))

    fix = "Make tensors where the logits are: torch.zeros(n, device=tokens.logits.device)."
    check_without_values(where, "in_loss()", results, forward, fix=fix, in_training=True)


def _check_marks(credit: Credit, tokens: StepTokens, forward: LossTokens) -> None:
    where = f"{credit.name}:"

    def marks(tokens: StepTokens) -> Tensor | None:
        is_marked = answered(f"{where} marks()", lambda: credit.marks(tokens), "It must accept any tokens.")
        if is_marked is not None:
            shape = (len(tokens.responses),)
            check_tensor(f"{where} what marks() returns", is_marked, shape, torch.bool, torch.device("cpu"))
        return is_marked

    is_marked = check_repeatable(where, "marks()", marks, tokens, prefix="tokens.", draws=_CREDIT_DRAWS, what="tokens")
    if is_marked is None:
        return
    log_ratio = forward.log_probs - tokens.log_probs
    for marked in (is_marked.nonzero().flatten(), torch.arange(0)):  # a micro-batch may have no marked token
        method = f"marked_loss() of {len(marked)} tokens"
        call = partial(credit.marked_loss, forward, marked, log_ratio[marked])
        loss = answered(f"{where} {method}", call, "It must accept any number of marked tokens, also none.")
        _check_numbers(where, method, loss, len(marked))
        expect(
            loss.requires_grad,
            f"{where} {method} has no gradient, so it trains nothing.",
            "Compute it from log_ratio or tokens.log_probs.",
        )


# ---- sampling schedules --------------------------------------------------------------------------------------------


def _schedule_checks(schedule: SamplingSchedule) -> Iterator[Check]:
    yield Check("it changes temperatures", partial(_check_changes, schedule))
    yield Check("factors within a response", partial(_check_factor, schedule))
    yield Check("factors of training steps", partial(_check_factors_of_steps, schedule))


def _check_changes(schedule: SamplingSchedule) -> None:
    own = type(schedule)
    expect(
        own.factor is not SamplingSchedule.factor or own.factor_of_step is not SamplingSchedule.factor_of_step,
        f"{schedule.name}: it has neither factor() nor factor_of_step(), so it changes no temperature.",
        "Write factor(self, at) -> (B,) for positions, factor_of_step(self, past, run) for training steps.",
    )


def _check_factor(schedule: SamplingSchedule) -> None:
    generated = torch.tensor([0, 1, 5, 40, 300, 4_000, 100_000])
    rows = torch.arange(len(generated))
    logits = 3.0 * torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(6))
    logits[1, 1:] = -torch.inf  # one possible token, as grammars leave
    at = NextTokens(
        logits=logits,
        temperature=torch.ones(len(rows)),
        generated=generated,
        step=rows,
        answer=rows % 4,
        answers=torch.full_like(rows, 4),
    )

    def answer(at: NextTokens) -> Any:
        return answered(f"{schedule.name}: factor()", lambda: schedule.factor(at), "It must accept any positions.")

    def factor(at: NextTokens) -> Tensor:
        factors = answer(at)
        shape = (len(at.logits),)
        check_tensor(f"{schedule.name}: what factor() returns", factors, shape, torch.float32, at.logits.device)
        wrong = ~(factors.isfinite() & (factors > 0.0))
        expect(
            not wrong.any(),
            f"{schedule.name}: factor() gives {factors[wrong][:1].tolist()} after {at.generated[wrong][:1].tolist()}"
            " tokens.",
            "It must be finite and above 0 at every position: clamp it.",
        )
        return factors

    if answer(at) is not None:  # a schedule of training steps alone has no factors of positions
        check_answers(f"{schedule.name}:", "factor()", factor, at, prefix="at.", draws="A schedule draws nothing.")
        # A schedule runs in vLLM's workers, where a look at a value would wait for the device at every token.
        fix = "Make tensors where the logits are: torch.ones(n, device=at.logits.device)."
        check_without_values(f"{schedule.name}:", "factor()", schedule.factor, at, fix=fix)


def _check_factors_of_steps(schedule: SamplingSchedule) -> None:
    run = Run(steps=_STEPS, temperature=1.0, vocabulary=64)
    past: Sequence[PastStep] = ()
    for step in range(_STEPS):
        where = f"{schedule.name}: factor_of_step()"
        factor = answered(where, partial(schedule.factor_of_step, past, run), "It must accept any earlier steps.")
        expect(
            isinstance(factor, int | float) and math.isfinite(factor) and factor > 0.0,
            f"{where} gives {factor!r} for training step {step}.",
            "It must be a finite number above 0.",
        )
        past = (*past, PastStep(factor=factor, entropy=1.0 - step / _STEPS))


# ---- policy noises -------------------------------------------------------------------------------------------------


def _noise_checks(noise: PolicyNoise) -> Iterator[Check]:
    yield Check("the parameters that it selects", partial(_check_selects, noise))
    yield Check("σ of training steps", partial(_check_scales, noise))


def _check_selects(noise: PolicyNoise) -> None:
    for name in _NAMES:
        where = f"{noise.name}: selects({name!r})"
        selected = answered(where, partial(noise.selects, name), "It must accept any parameter's name.")
        expect(isinstance(selected, bool), f"{where} gives {selected!r}.", "Return True or False.")


def _check_scales(noise: PolicyNoise) -> None:
    last: float | None = None
    for step in range(_STEPS):
        where = f"{noise.name}: scale()"
        # A run whose noise does not follow the divergence may have no log-probabilities, and so no divergence.
        divergence = 0.01 if noise.follows_divergence and step > 0 else None
        fix = "It must accept any step, and the divergence None, unless follows_divergence is True."
        sigma = answered(where, partial(noise.scale, step, _STEPS, last, divergence), fix)
        expect(
            isinstance(sigma, int | float) and math.isfinite(sigma) and sigma >= 0.0,
            f"{where} gives {sigma!r} for training step {step} of {_STEPS}.",
            "It must be a finite number, 0 or above.",
        )
        last = sigma


_CHECKS = {
    "credit": _credit_checks,
    "sampling_schedule": _schedule_checks,
    "policy_noise": _noise_checks,
    "second_round": second_round_check.checks,
}
