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
from ngrpo.rollout.scheduled_temperatures import ScheduledTemperatures
from perturbations import create
from perturbations.errors import UsageError
from tests.support.gradient_problem import policy_loss

NAMES = sorted(sampling_schedules.available())


def next_tokens(
    generated: list[int],
    training_step: int = 0,
    logits: Tensor | None = None,
    temperature: float = 1.0,
) -> NextTokens:
    """The next tokens of responses of which this many tokens are generated; four equal logits by default."""
    count = len(generated)
    if logits is None:
        logits = torch.zeros(count, 4)
    return NextTokens(
        logits=logits,
        temperature=torch.full((count,), temperature),
        generated=torch.tensor(generated),
        step=torch.full((count,), training_step),
    )


# --- EAD --------------------------------------------------------------------------------------------------------


def test_ead_as_released() -> None:
    """Its steps count from 1, so the first has d = 30 and exp(t / 600): 2.2 − e^(1/60) at t = 10, 2.2 − e^.5 at 300,
    and below τ_min at 450."""
    ead = sampling_schedules.create("ead", variant="released")
    factors = ead.factor(next_tokens([0, 9, 10, 300, 450, 100_000])).tolist()
    assert factors == pytest.approx([1.0, 1.0, 1.183194, 0.551279, 0.1, 0.1], abs=1e-6)


def test_ead_as_released_in_a_later_step() -> None:
    """The 101st step: d = 25 + 505, e^(3000 / 10600)."""
    ead = sampling_schedules.create("ead", variant="released")
    factor = ead.factor(next_tokens([3000], training_step=100)).item()
    assert factor == pytest.approx(2.2 - math.exp(3000 / 10600), abs=1e-6)


def test_ead_as_written() -> None:
    """exp(t / d), d = d_0 + 5 s, s from 0: exp(t / 500) first, so 2.2 − e^.02 at t = 10 and 2.2 − e^.6 at 300."""
    ead = sampling_schedules.create("ead")
    factors = ead.factor(next_tokens([0, 9, 10, 300, 400])).tolist()
    assert factors == pytest.approx([1.0, 1.0, 1.179799, 0.377881, 0.1], abs=1e-6)


def test_ead_as_written_in_a_later_step() -> None:
    """d = 500 + 5 · 100 = 1000."""
    ead = sampling_schedules.create("ead")
    factor = ead.factor(next_tokens([300], training_step=100)).item()
    assert factor == pytest.approx(2.2 - math.exp(0.3), abs=1e-6)


OTHER_OPTIONS = {
    "d_0": 50,
    "growth": 10,
    "tau_max": 1.5,
    "tau_min": 0.4,
    "c": 2,
}


def test_ead_with_other_options() -> None:
    """c = 2 leaves the first two tokens alone; d = 50 + 10 · 5 = 100."""
    ead = sampling_schedules.create("ead", **OTHER_OPTIONS)
    factors = ead.factor(next_tokens([1, 2, 60], training_step=5)).tolist()
    expected = [1.0, 2.5 - math.exp(0.02), 2.5 - math.exp(0.6)]
    assert factors == pytest.approx(expected, abs=1e-6)


def test_ead_s_d_grows_no_further_than_40000() -> None:
    ead = sampling_schedules.create("ead", **OTHER_OPTIONS)
    factor = ead.factor(next_tokens([20_000], training_step=10**6)).item()
    assert factor == pytest.approx(2.5 - math.exp(0.5), abs=1e-6)


def test_ead_s_bounds_are_in_order() -> None:
    with pytest.raises(UsageError, match=r"tau_min=2\.0: must be at most tau_max=1\.2"):
        sampling_schedules.create("ead", tau_min=2)


# --- EDT --------------------------------------------------------------------------------------------------------

# Uniform over four: H = ln 4. (.7, .2, .1): H = .801819. The third is certain.
EDT_LOGITS = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0],
        [math.log(0.7), math.log(0.2), math.log(0.1), -math.inf],
        [90.0, 0.0, 0.0, 0.0],
    ]
)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_edt_by_hand(temperature: float) -> None:
    """0.8^(0.1 / H): the entropy is the model's own, whatever temperature the request asks for."""
    edt = sampling_schedules.create("edt")
    rows = next_tokens([0, 5, 9], logits=EDT_LOGITS / temperature, temperature=temperature)
    of_uniform = 0.8 ** (0.1 / math.log(4))
    of_three = 0.8 ** (0.1 / 0.801819)
    assert of_uniform == pytest.approx(0.984032, abs=1e-6)
    assert of_three == pytest.approx(0.972554, abs=1e-6)
    assert edt.factor(rows).tolist() == pytest.approx([of_uniform, of_three, 0.1], abs=1e-6)


def test_edt_with_other_options() -> None:
    """1.3 · 0.5^(0.4 / H), and at least 0.3."""
    edt = sampling_schedules.create("edt", t_0=1.3, base=0.5, theta=0.4, least=0.3)
    factors = edt.factor(next_tokens([0, 5, 9], logits=EDT_LOGITS)).tolist()
    of_uniform = 1.3 * 0.5 ** (0.4 / math.log(4))
    of_three = 1.3 * 0.5 ** (0.4 / 0.801819)
    assert factors == pytest.approx([of_uniform, of_three, 0.3], abs=1e-6)


@pytest.mark.parametrize("theta", [1e-3, 0.1, 5.0])
@pytest.mark.parametrize(
    "logits",
    [
        pytest.param([200.0, 0.0, -3.0, 1.0], id="the first by 200 nats"),
        pytest.param([1.0, -3.0, 0.0, 200.0], id="the last by 200 nats"),
        pytest.param([-math.inf, -math.inf, 7.0, -math.inf], id="one token allowed"),
        pytest.param([0.5], id="one token in the vocabulary"),
    ],
)
def test_edt_where_one_token_is_left(theta: float, logits: list[float]) -> None:
    """H = 0, which is no −0.0, gives the lowest temperature."""
    edt = sampling_schedules.create("edt", theta=theta)
    row = next_tokens([4], logits=torch.tensor([logits]))
    entropy = row.entropies().item()
    assert entropy == 0.0
    assert math.copysign(1.0, entropy) == 1.0
    factor = edt.factor(row)
    assert factor.tolist() == pytest.approx([0.1])
    assert torch.softmax(row.logits / factor, dim=-1).max().item() == 1.0


def test_edt_of_base_1_changes_nothing_even_where_one_token_is_left() -> None:
    edt = sampling_schedules.create("edt", base=1.0)
    row = next_tokens([4], logits=torch.tensor([[200.0, 0.0, -3.0, 1.0]]))
    assert edt.factor(row).tolist() == [1.0]


# --- e3 ---------------------------------------------------------------------------------------------------------

# ln V + ln ln V = 14.41016 for V = 151936.
RUN = Run(10, 1.0, 151936)


def test_e3_takes_the_first_step_s_entropy_as_its_target() -> None:
    e3 = sampling_schedules.create("e3", annealing=False)
    assert e3.factor_of_step([], RUN) == 1.0
    assert e3.factor_of_step([PastStep(1.0, 0.5)], RUN) == 1.0


def test_e3_heats_where_the_entropy_is_below_its_target() -> None:
    """τ = 1, H = .25, H* = .5: 1 + ln 2 / 14.41016 = 1.048101."""
    e3 = sampling_schedules.create("e3", annealing=False)
    past = [PastStep(1.0, 0.5), PastStep(1.0, 0.25)]
    assert e3.factor_of_step(past, RUN) == pytest.approx(1.048101, abs=1e-6)


def test_e3_cools_where_the_entropy_is_above_its_target() -> None:
    """At τ = 1.048101: τ (1 + τ ln(.5 / .8) / 14.4100)."""
    e3 = sampling_schedules.create("e3", annealing=False)
    past = [PastStep(1.0, 0.5), PastStep(1.0, 0.25), PastStep(1.048101, 0.8)]
    expected = 1.048101 * (1 + 1.048101 * math.log(0.625) / 14.41016)
    assert e3.factor_of_step(past, RUN) == pytest.approx(expected, abs=1e-6)


def test_e3_s_formula_has_the_temperature_itself_and_not_its_factor() -> None:
    """A run that asks for 0.5 moves half as fast."""
    e3 = sampling_schedules.create("e3", annealing=False)
    past = [PastStep(1.0, 0.5), PastStep(1.0, 0.25)]
    factor = e3.factor_of_step(past, Run(10, 0.5, 151936))
    assert factor == pytest.approx(1 + 0.5 * 0.048101, abs=1e-6)


@pytest.mark.parametrize(
    ("past", "factor"),
    [
        pytest.param([PastStep(1.0, 1.0), PastStep(1.9, 0.1)], 2.0, id="hot"),
        pytest.param([PastStep(1.0, 1e-9), PastStep(2.0, 9.0)], 0.1, id="cold"),
        pytest.param([PastStep(1.0, 0.0), PastStep(1.0, 0.0)], 1.0, id="no entropy"),
    ],
)
def test_e3_stays_within_bounds_where_the_entropy_does_not_follow(past: list[PastStep], factor: float) -> None:
    e3 = sampling_schedules.create("e3", annealing=False)
    assert e3.factor_of_step(past, RUN) == factor


@pytest.mark.parametrize(
    ("done", "share"),
    [
        (6, 1.0),
        (7, 1.0),
        # x = (7 − 6)/4: 0.1 · ½ (1 + cos π/4) + 0.9.
        (8, 0.985355339),
        # x = ½.
        (9, 0.95),
        (10, 0.914644661),
        (11, 0.9),
        # Beyond the run it stays.
        (12, 0.9),
        (15, 0.9),
        (19, 0.9),
    ],
)
def test_e3_lets_its_target_fall_in_the_last_two_fifths(done: int, share: float) -> None:
    """Of ten steps the target falls from the sixth on. The release sets it after a step, for the next comparison.

    A last entropy of H* = ``share`` of the first one's shows the target: it moves nothing.
    """
    past = [PastStep(1.0, 0.5)] * (done - 1) + [PastStep(1.0, 0.5 * share)]
    factor = sampling_schedules.create("e3").factor_of_step(past, Run(10, 1.0, 1000))
    assert factor == pytest.approx(1.0, abs=1e-9)


# --- ladder -----------------------------------------------------------------------------------------------------

# From 0.5 to 2 over four responses, in ratios of ∛4.
SECOND_OF_FOUR = 0.5 * 4 ** (1 / 3)
THIRD_OF_FOUR = 0.5 * 4 ** (2 / 3)


@pytest.mark.parametrize(
    ("responses", "factors"),
    [
        # 0.5, √(0.5 · 2) = 1, 2.
        pytest.param(3, [0.5, 1.0, 2.0], id="three"),
        pytest.param(4, [0.5, SECOND_OF_FOUR, THIRD_OF_FOUR, 2.0], id="four"),
        pytest.param(1, [1.0], id="an only one is not moved"),
    ],
)
def test_ladder_by_hand(responses: int, factors: list[float]) -> None:
    """From 0.5 to 2 over the responses of a prompt."""
    ladder = sampling_schedules.create("ladder", least=0.5, most=2.0)
    rows = replace(
        next_tokens([0] * responses),
        answer=torch.arange(responses),
        answers=torch.full((responses,), responses),
    )
    assert ladder.factor(rows).tolist() == pytest.approx(factors, abs=1e-6)


def test_ladder_of_rows_from_several_prompts() -> None:
    """The first of three, the second of four, and an only one."""
    ladder = sampling_schedules.create("ladder", least=0.5, most=2.0)
    rows = replace(
        next_tokens([0, 0, 0]),
        answer=torch.tensor([0, 1, 0]),
        answers=torch.tensor([3, 4, 1]),
    )
    assert ladder.factor(rows).tolist() == pytest.approx([0.5, SECOND_OF_FOUR, 1.0], abs=1e-6)


def test_ladder_moves_nothing_where_responses_have_no_number() -> None:
    ladder = sampling_schedules.create("ladder", least=0.5, most=2.0)
    assert ladder.factor(next_tokens([0])) is None


def test_ladder_s_default_keeps_the_mean_of_the_logarithms() -> None:
    """The mean of the logarithms is that of the temperature asked for."""
    default = sampling_schedules.create("ladder")
    assert default.least * default.most == 1.0


def test_ladder_s_bounds_are_in_order() -> None:
    with pytest.raises(UsageError, match=r"least=2.0: must be at most most=1.25"):
        sampling_schedules.create("ladder", least=2.0)


# --- in a batch -------------------------------------------------------------------------------------------------


def random_rows(count: int) -> NextTokens:
    """The next tokens of responses at any place of any group, at any step."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(count, 512, generator=generator)
    generated = torch.randint(0, 4000, (count,), generator=generator)
    steps = torch.randint(0, 300, (count,), generator=generator)
    answers = torch.randint(1, 9, (count,), generator=generator)
    return NextTokens(
        logits=logits,
        temperature=torch.full((count,), 0.7),
        generated=generated,
        step=steps,
        answer=torch.randint(0, 64, (count,), generator=generator) % answers,
        answers=answers,
    )


def row_of(rows: NextTokens, number: int) -> NextTokens:
    """One row as a batch of its own."""
    alone = slice(number, number + 1)
    return NextTokens(
        logits=rows.logits[alone],
        temperature=rows.temperature[alone],
        generated=rows.generated[alone],
        step=rows.step[alone],
        answer=rows.answer[alone],
        answers=rows.answers[alone],
    )


@pytest.mark.parametrize("name", NAMES)
def test_rows_on_their_own_have_the_factors_of_a_batch(name: str) -> None:
    """A schedule without a factor for rows has one for steps."""
    schedule = sampling_schedules.create(name)
    if schedule.follows_training and type(schedule).factor is SamplingSchedule.factor:
        assert type(schedule).factor_of_step is not SamplingSchedule.factor_of_step
        return
    rows = random_rows(64)
    factors = schedule.factor(rows)
    assert factors.shape == (64,)
    assert factors.dtype == torch.float32
    assert (factors > 0).all()
    assert factors.isfinite().all()
    factors_alone = [schedule.factor(row_of(rows, number)) for number in range(64)]
    torch.testing.assert_close(torch.cat(factors_alone), factors, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_temperature_waits_for_nothing(name: str) -> None:
    requests = 16
    decoding = Decoding(create("soft"), requests)
    perturber = decoding.perturber
    perturber._temperatures = ScheduledTemperatures(
        sampling_schedules.create(name), perturber._store, perturber._upload
    )
    perturber.begin(
        decoding.requests,
        np.full(requests, 99),
        np.ones(requests, np.int64),
        np.zeros(requests, bool),
    )
    counts = Counts()
    with OperationCounter(counts):
        perturber.temperature_factor(torch.randn(requests, 1024), torch.ones(requests), None)
    assert not counts.waits


# --- the objective ----------------------------------------------------------------------------------------------


BANDIT_LOGITS = torch.tensor([1.4, -0.3, 0.2, 0.9])
BANDIT_REWARD = torch.tensor([1.0, -0.5, 0.3, 0.2])


def scheduled_rollouts(name: str, **options: float) -> tuple[Flags, Tensor]:
    """A schedule's flags, and log π̂ of each token for four responses at the schedule's temperatures."""
    schedule = sampling_schedules.create(name, **options)
    places = torch.arange(4)
    rows = NextTokens(
        logits=BANDIT_LOGITS.expand(4, -1),
        temperature=torch.ones(4),
        generated=100 * places,
        step=torch.zeros(4, dtype=torch.int64),
        answer=places,
        answers=torch.full((4,), 4),
    )
    factors = schedule.factor(rows).unsqueeze(1)
    return schedule.flags(Flags()), torch.log_softmax(BANDIT_LOGITS / factors, -1)


def noisy_rollouts() -> tuple[Flags, Tensor]:
    """The flags of parameter noise, and log π̂ of each token for one response of a noisy policy."""
    noisy_logits = torch.tensor([[0.1, 0.2, -0.4, 1.0]])
    return policy_noises.create("psn").flags(Flags()), torch.log_softmax(noisy_logits, -1)


def expected_loss_gradient(logits: Tensor, rollouts: Tensor, *correction: object) -> Tensor:
    """Σ π̂(x) w(x) R(x) ∇ log π(x) in OpenRLHF's loss, averaged over the rollouts, by all tokens x."""
    loss = policy_loss(*correction)
    log_p = torch.log_softmax(logits, -1)
    objective = torch.zeros(())
    for rollout in rollouts:
        for token in range(4):
            own = log_p[token].view(1, 1)
            drawn = rollout[token].view(1, 1)
            reward = BANDIT_REWARD[token].view(1, 1)
            mask = torch.ones(1, 1)
            of_token, *_ = loss(own, own.detach(), reward, mask, drawn, batch_num_tokens=1.0)
            objective = objective - rollout[token].exp() * of_token / len(rollouts)
    (gradient,) = torch.autograd.grad(objective, logits)
    return gradient


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ead", {"tau_max": 1.8, "c": 0}, id="ead"),
        pytest.param("edt", {"t_0": 1.6, "base": 0.5, "theta": 0.5}, id="edt"),
        pytest.param("ladder", {"least": 1.0, "most": 4.0}, id="ladder"),
        pytest.param("psn", {}, id="psn"),
    ],
)
def test_the_gradient_on_another_policys_rollouts_is_the_clean_policys(name: str, options: dict[str, float]) -> None:
    """Over all tokens of a bandit, drawn by four responses at a schedule's temperatures or by a noisy policy.

    Σ π̂(x) w(x) R(x) ∇ log π(x) = ∇ E_π[R] in OpenRLHF's loss with the method's flags; without w it is another one.
    """
    if name == "psn":
        flags, rollouts = noisy_rollouts()
    else:
        flags, rollouts = scheduled_rollouts(name, **options)
    logits = BANDIT_LOGITS.clone().requires_grad_()
    expected_reward = (torch.softmax(logits, -1) * BANDIT_REWARD).sum()
    (true_gradient,) = torch.autograd.grad(expected_reward, logits)

    level, mode, bounds = flags.values()
    low, high = bounds
    corrected = expected_loss_gradient(logits, rollouts, level, mode, (float(low), float(high)))
    assert torch.allclose(corrected, true_gradient, rtol=1e-4, atol=1e-6)

    uncorrected = expected_loss_gradient(logits, rollouts)
    assert not torch.allclose(uncorrected, true_gradient, rtol=1e-4, atol=1e-6)
