# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules: their formulas by hand, their contract, and the gradient on their rollouts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decoding import Counts, Decoding, OperationCounter
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import policy_noises, sampling_schedules
from ngrpo.methods.sampling_schedules.base import NextTokens, PastStep, Run, SamplingSchedule
from perturbations import create
from perturbations.errors import UsageError
from tests.support.gradient_problem import policy_loss

NAMES = sorted(sampling_schedules.available())


def tokens(generated: list[int], step: int = 0, logits: Tensor | None = None, temperature: float = 1.0) -> NextTokens:
    rows = torch.tensor(generated)
    logits = torch.zeros(len(rows), 4) if logits is None else logits
    return NextTokens(logits, torch.full((len(rows),), temperature), rows, torch.full_like(rows, step))


# --- the formulas -----------------------------------------------------------------------------------------------


def test_ead_as_released() -> None:
    """Its steps count from 1, so the first has d = 30 and exp(t / 600): 2.2 − e^(1/60) at t = 10, 2.2 − e^.5 at 300,
    and below τ_min at 450."""
    ead = sampling_schedules.create("ead", variant="released")
    found = ead.factor(tokens([0, 9, 10, 300, 450, 100_000])).tolist()
    assert found == pytest.approx([1.0, 1.0, 1.183194, 0.551279, 0.1, 0.1], abs=1e-6)
    # The 101st step: d = 25 + 505, e^(3000 / 10600).
    assert ead.factor(tokens([3000], step=100)).item() == pytest.approx(2.2 - math.exp(3000 / 10600), abs=1e-6)


def test_ead_as_written() -> None:
    """exp(t / d), d = d_0 + 5 s, s from 0: exp(t / 500) first, so 2.2 − e^.02 at t = 10 and 2.2 − e^.6 at 300."""
    paper = sampling_schedules.create("ead")
    found = paper.factor(tokens([0, 9, 10, 300, 400])).tolist()
    assert found == pytest.approx([1.0, 1.0, 1.179799, 0.377881, 0.1], abs=1e-6)
    assert paper.factor(tokens([300], step=100)).item() == pytest.approx(2.2 - math.exp(0.3), abs=1e-6)
    own = sampling_schedules.create("ead", d_0=50, growth=10, tau_max=1.5, tau_min=0.4, c=2)
    found = own.factor(tokens([1, 2, 60], step=5)).tolist()
    assert found == pytest.approx([1.0, 2.5 - math.exp(0.02), 2.5 - math.exp(0.6)], abs=1e-6)
    # d grows no further than 40000.
    assert own.factor(tokens([20_000], step=10**6)).item() == pytest.approx(2.5 - math.exp(0.5), abs=1e-6)
    with pytest.raises(UsageError, match=r"tau_min=2\.0: must be at most tau_max=1\.2"):
        sampling_schedules.create("ead", tau_min=2)


def test_edt_by_hand() -> None:
    """Uniform over four: H = ln 4, so 0.8^(0.1 / 1.386294) = .984032; (.7, .2, .1): H = .801819."""
    z = torch.tensor([[0.0] * 4, [math.log(0.7), math.log(0.2), math.log(0.1), -math.inf], [90.0, 0.0, 0.0, 0.0]])
    edt = sampling_schedules.create("edt")
    expected = [0.8 ** (0.1 / math.log(4)), 0.8 ** (0.1 / 0.801819), 0.1]
    assert expected[:2] == pytest.approx([0.984032, 0.972554], abs=1e-6)
    assert edt.factor(tokens([0, 5, 9], logits=z)).tolist() == pytest.approx(expected, abs=1e-6)
    # The entropy is the model's own, whatever temperature the request asks for.
    assert edt.factor(tokens([0, 5, 9], logits=z / 0.5, temperature=0.5)).tolist() == pytest.approx(expected, abs=1e-6)
    own = sampling_schedules.create("edt", t_0=1.3, base=0.5, theta=0.4, least=0.3)
    expected = [1.3 * 0.5 ** (0.4 / math.log(4)), 1.3 * 0.5 ** (0.4 / 0.801819), 0.3]
    assert own.factor(tokens([0, 5, 9], logits=z)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("theta", [1e-3, 0.1, 5.0])
def test_edt_where_one_token_is_left(theta: float) -> None:
    """H = 0 gives the lowest temperature: a gap of 200 nats, one token allowed, one token in the vocabulary."""
    edt, gap = sampling_schedules.create("edt", theta=theta), [200.0, 0.0, -3.0, 1.0]
    for row in (gap, gap[::-1], [-math.inf, -math.inf, 7.0, -math.inf], [0.5]):
        at = tokens([4], logits=torch.tensor([row]))
        assert at.entropies().tolist() == [0.0] and math.copysign(1.0, at.entropies().item()) == 1.0
        factor = edt.factor(at)
        assert factor.tolist() == pytest.approx([0.1])
        assert torch.softmax(at.logits / factor, dim=-1).max().item() == 1.0
    # At N = 1 nothing changes, there as elsewhere.
    assert sampling_schedules.create("edt", base=1.0).factor(tokens([4], logits=torch.tensor([gap]))).tolist() == [1.0]


def test_e3_by_hand() -> None:
    """τ = 1, H = .25, H* = .5, V = 151936: 1 + ln 2 / (ln V + ln ln V) = 1.048101."""
    e3, run = sampling_schedules.create("e3", annealing=False), Run(10, 1.0, 151936)
    assert e3.factor_of_step([], run) == 1.0
    assert e3.factor_of_step([PastStep(1.0, 0.5)], run) == 1.0, "the first step's own entropy is the target"
    past = [PastStep(1.0, 0.5), PastStep(1.0, 0.25)]
    assert e3.factor_of_step(past, run) == pytest.approx(1.048101, abs=1e-6)
    # From there on, at τ = 1.048101, an entropy above the target cools: τ (1 + τ ln(.5 / .8) / 14.4100).
    past.append(PastStep(1.048101, 0.8))
    assert e3.factor_of_step(past, run) == pytest.approx(
        1.048101 * (1 + 1.048101 * math.log(0.625) / 14.41016), abs=1e-6
    )
    # τ is the temperature itself, and not its factor: asked for 0.5, it moves half as fast.
    half = e3.factor_of_step(past[:2], Run(10, 0.5, 151936))
    assert half == pytest.approx(1 + 0.5 * 0.048101, abs=1e-6)
    # Where the entropy does not follow, the temperature stays within bounds.
    assert e3.factor_of_step([PastStep(1.0, 1.0), PastStep(1.9, 0.1)], run) == 2.0
    assert e3.factor_of_step([PastStep(1.0, 1e-9), PastStep(2.0, 9.0)], run) == 0.1
    assert e3.factor_of_step([PastStep(1.0, 0.0), PastStep(1.0, 0.0)], run) == 1.0


@pytest.mark.parametrize(
    ("done", "share"),
    [(6, 1.0), (7, 1.0), (8, 0.985355339), (9, 0.95), (10, 0.914644661), (11, 0.9), (12, 0.9), (15, 0.9), (19, 0.9)],
)
def test_e3_lets_its_target_fall_in_the_last_two_fifths(done: int, share: float) -> None:
    """Of ten steps the target falls from the sixth on. The release sets it after a step, for the next comparison: after
    eight, H* is that of x = (7 − 6)/4, 0.1 · ½ (1 + cos π/4) + 0.9; after nine, x = ½. Beyond the run it stays."""
    past = [PastStep(1.0, 0.5)] * (done - 1) + [PastStep(1.0, 0.5 * share)]
    assert sampling_schedules.create("e3").factor_of_step(past, Run(10, 1.0, 1000)) == pytest.approx(1.0, abs=1e-9)


def test_ladder_by_hand() -> None:
    """From 0.5 to 2 over three answers: 0.5, √(0.5 · 2) = 1, 2; over four in ratios of ∛4; an only one is not moved."""
    ladder, rows = sampling_schedules.create("ladder", least=0.5, most=2.0), tokens([0] * 6)
    rows = replace(rows, answer=torch.tensor([0, 1, 2, 1, 3, 0]), answers=torch.tensor([3, 3, 3, 4, 4, 1]))
    assert ladder.factor(rows).tolist() == pytest.approx([0.5, 1.0, 2.0, 0.5 * 4 ** (1 / 3), 2.0, 1.0], abs=1e-6)
    assert ladder.factor(tokens([0])) is None
    default = sampling_schedules.create("ladder")
    assert default.least * default.most == 1.0, "the mean of the logarithms is that of the temperature asked for"
    with pytest.raises(UsageError, match=r"least=2.0: must be at most most=1.25"):
        sampling_schedules.create("ladder", least=2.0)


# --- in a batch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_on_their_own_have_the_factors_of_a_batch(name: str) -> None:
    schedule = sampling_schedules.create(name)
    assert type(schedule).factor is not SamplingSchedule.factor or schedule.follows_training
    drawn = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, 512, generator=drawn)
    rows = torch.randint(0, 4000, (64,), generator=drawn)
    steps = torch.randint(0, 300, (64,), generator=drawn)
    counts = torch.randint(1, 9, (64,), generator=drawn)
    answers = torch.randint(0, 64, (64,), generator=drawn) % counts
    given = NextTokens(logits, torch.full((64,), 0.7), rows, steps, answers, counts)
    found = schedule.factor(given)
    if found is not None:
        assert found.shape == (64,) and found.dtype == torch.float32
        assert (found > 0).all() and found.isfinite().all()
        single = [
            schedule.factor(
                NextTokens(logits[i], torch.tensor([0.7]), *(part[i] for part in (rows, steps, answers, counts)))
            )
            for i in torch.arange(64).unsqueeze(1)
        ]
        torch.testing.assert_close(torch.cat(single), found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_temperature_waits_for_nothing(name: str) -> None:
    decoding, counts = Decoding(create("soft"), 16), Counts()
    decoding.perturber._schedule = sampling_schedules.create(name)
    decoding.perturber.begin(decoding.requests, np.full(16, 99), np.ones(16, np.int64), np.zeros(16, bool))
    with OperationCounter(counts):
        decoding.perturber.temperature_factor(torch.randn(16, 1024), torch.ones(16), None)
    assert not counts.waits


# --- the objective ----------------------------------------------------------------------------------------------


ROLLOUTS = {
    "ead": {"tau_max": 1.8, "c": 0},
    "edt": {"t_0": 1.6, "base": 0.5, "theta": 0.5},
    "ladder": {"least": 1.0, "most": 4.0},
}


@pytest.mark.parametrize("name", [*ROLLOUTS, "psn"])
def test_the_gradient_on_another_policys_rollouts_is_the_clean_policys(name: str) -> None:
    """Over all tokens of a bandit, drawn by four answers at a schedule's temperatures or by a noisy policy.

    Σ π̂(x) w(x) R(x) ∇ log π(x) = ∇ E_π[R] in OpenRLHF's loss with the method's flags; without w it is another one.
    """
    z, reward = torch.tensor([1.4, -0.3, 0.2, 0.9]), torch.tensor([1.0, -0.5, 0.3, 0.2])
    if name == "psn":
        flags = policy_noises.create(name).flags(Flags())
        rollouts = torch.log_softmax(torch.tensor([[0.1, 0.2, -0.4, 1.0]]), -1)
    else:
        schedule, place = sampling_schedules.create(name, **ROLLOUTS[name]), torch.arange(4)
        flags, four = schedule.flags(Flags()), torch.full_like(place, 4)
        at = NextTokens(z.expand(4, -1), torch.ones(4), 100 * place, 0 * place, place, four)
        rollouts = torch.log_softmax(z / schedule.factor(at).unsqueeze(1), -1)
    z.requires_grad_()
    log_p = torch.log_softmax(z, -1)
    (true,) = torch.autograd.grad((log_p.exp() * reward).sum(), z, retain_graph=True)
    level, mode, bounds = flags.values()
    for given, same in (((level, mode, tuple(map(float, bounds))), True), ((), False)):
        loss, total = policy_loss(*given), torch.zeros(())
        for rollout in rollouts:
            for x in range(4):
                own, drawn = log_p[x].view(1, 1), rollout[x].view(1, 1)
                one = loss(own, own.detach(), reward[x].view(1, 1), torch.ones(1, 1), drawn, batch_num_tokens=1.0)[0]
                total = total + drawn.exp().squeeze() * one / len(rollouts)
        (found,) = torch.autograd.grad(-total, z, retain_graph=True)
        assert torch.allclose(found, true, rtol=1e-4, atol=1e-6) is same
