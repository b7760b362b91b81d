# SPDX-License-Identifier: Apache-2.0
"""``ngrpo check KIND`` for credits, policy noises, sampling schedules and second rounds: do they keep their contracts?

A schedule runs in vLLM's workers, where a look at its values would wait for the device at every token.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngrpo.config import second_round_check
from ngrpo.config.kinds import KINDS
from ngrpo.methods.credits.base import Credit, StepTokens
from ngrpo.methods.policy_noises.base import PolicyNoise
from ngrpo.methods.sampling_schedules.base import NextTokens, PastStep, Run, SamplingSchedule
from perturbations.testing import Check, PerturbationError, outcomes
from perturbations.testing.report import answered, check_answers, check_repeatable, check_tensor, expect

_STEPS = 100  # training steps of the synthetic run
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
        answers=responses,
        groups=responses // 3,
        seeds=responses + 1,
    )
    zero = torch.zeros(count)
    nothing_to_share = StepTokens(zero, zero, zero, responses, responses // 3, responses + 1)
    yield Check("credit of ordinary tokens", partial(_check_credit, credit, "ordinary tokens", tokens))
    yield Check(
        "credit of certain tokens without advantage", partial(_check_credit, credit, "certain tokens", nothing_to_share)
    )


def _check_credit(credit: Credit, label: str, tokens: StepTokens) -> None:
    where = f"{credit.name}, {label}:"

    def formula(tokens: StepTokens) -> Tensor:
        advantages = answered(f"{where} formula()", lambda: credit.formula(tokens), "It must accept any tokens.")
        shape = (len(tokens.answers),)
        check_tensor(f"{where} what formula() returns", advantages, shape, torch.float32, torch.device("cpu"))
        not_finite = advantages[~advantages.isfinite()].tolist()
        expect(not not_finite, f"{where} formula() gives {not_finite[:1]}.", "Clamp before divisions and logarithms.")
        return advantages

    draws = "Draw with perturbations.streams, from streams.keys(tokens.seeds, …)."
    advantages = check_repeatable(where, "formula()", formula, tokens, prefix="tokens.", draws=draws, what="tokens")
    keeps_or_drops = (advantages == tokens.advantages) | (advantages == 0.0)
    expect(
        not credit.keeps_sums or keeps_or_drops.all(),
        f"{where} keeps_sums is True, and a token's advantage is neither its response's nor 0.",
        "Leave keeps_sums at False.",
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
        logits, torch.ones(len(rows)), generated, step=rows, answer=rows % 4, answers=torch.full_like(rows, 4)
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
        divergence = None if step == 0 else 0.01
        sigma = answered(where, partial(noise.scale, step, _STEPS, last, divergence), "It must accept any step.")
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
