# SPDX-License-Identifier: Apache-2.0
"""Advantages against numbers derived by hand, and what a wrong reward or option says."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.config import parse
from ngrpo.config.run import current_run
from ngrpo.methods import credits
from ngrpo.methods.advantages import compute, create
from ngrpo.methods.scoring.answers import outcome
from ngrpo.trainers.openrlhf import step_advantages
from ngrpo.trainers.openrlhf.rewards import check_step
from ngrpo.trainers.openrlhf.step_advantages import Visits, advantage_measures
from ngrpo.trainers.verl.overrides import estimator
from perturbations.errors import UsageError
from tests.conftest import ROOT
from tests.support.run import run_with

# One answer of four right; all wrong; all right.
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4])


def close(found: torch.Tensor, expected: list[list[float]], tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=tolerance, rtol=0.0)


# Derived by hand; (P, G) each.
ONE, NONE = REWARDS[:1], REWARDS[1:2]
FORMULAS = {
    # Mean 1/4; squares (3/4)² + 3 (1/4)² = 3/4; sample variance (3/4)/3 = 1/4, std 1/2; (r - 1/4)/(1/2).
    "group_norm": ({}, REWARDS, None, [[1.5, -0.5, -0.5, -0.5], [0.0] * 4, [0.0] * 4]),
    # A 1 is appended. 1 0 0 0 1: mean 2/5; squares 2 (3/5)² + 3 (2/5)² = 30/25; variance 30/25/4 = 0.3.
    "ngrpo": ({}, ONE, None, [[0.6 / math.sqrt(0.3)] + [-0.4 / math.sqrt(0.3)] * 3]),
    # 0 0 0 0 1 1: mean 1/3; squares 4/9 + 2 · 4/9 = 12/9; variance 12/9/5 = 4/15; -1/3 over its root.
    "ngrpo of two virtual answers": ({"n": 2}, NONE, None, [[-1 / 3 / math.sqrt(4 / 15)] * 4]),
    "psr": ({}, REWARDS, None, REWARDS.tolist()),
    "nsr": ({}, REWARDS, None, [[0.0, -1.0, -1.0, -1.0], [-1.0] * 4, [0.0] * 4]),
    "w_reinforce": ({}, REWARDS, None, [[0.1, -1.0, -1.0, -1.0], [-1.0] * 4, [0.1] * 4]),
    "w_reinforce of other weights": ({"lam": 0.5}, torch.tensor([[1.0, 0.25]]), None, [[0.5, -0.75]]),
    # Mean 1/4: (1 − 1/4) / (1/4) and (0 − 1/4) / (1/4).
    "maxrl": ({}, REWARDS, None, [[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4]),
    # Mean 1/2: (1/2, −1/4, 1/4, −1/2) / (1/2).
    "maxrl of fractions": ({}, torch.tensor([[1.0, 0.25, 0.75, 0.0]]), None, [[1.0, -0.5, 0.5, -1.0]]),
    "reinforce_rej": ({}, REWARDS, None, [[1.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4]),
    "reinforce_rej of fractions": ({}, torch.tensor([[1.0, 0.25], [0.25, 0.25]]), None, [[1.0, -0.5], [0.0, 0.0]]),
    # p = 1/10, mean 1/4: t = (0.25 − 0.1) / 0.8 = 3/16; w = 0.8 √(3/16 · 13/16) / √(1/4 · 3/4).
    "s_grpo": ({"p": 0.1}, ONE, None, [[x * 0.8 * math.sqrt(39 / 48) for x in (1.5, -0.5, -0.5, -0.5)]]),
    # A mean of 1/4 is explained by errors of p = 1/4, one of 3/4 as well; half right keeps 1 − 2p of ±√3/2.
    "s_grpo of many errors": (
        {"p": 0.25},
        torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]),
        None,
        [[0.0] * 4, [0.0] * 4, [math.sqrt(3) / 4] * 2 + [-math.sqrt(3) / 4] * 2],
    ),
    "s_grpo without errors": ({"p": 0.0}, REWARDS, None, [[1.5, -0.5, -0.5, -0.5], [0.0] * 4, [0.0] * 4]),
    # Bonuses 1, 1/2, 1/2; mean 2/3; squares 1/9 + 2/36 = 1/6; sample variance 1/12, std 1/√12.
    "copo": ({"beta": 1.0}, NONE[:, :3], [[0, 3, 3]], [[2 / math.sqrt(3)] + [-1 / math.sqrt(3)] * 2]),
    # 3/2, 1/2, 1/4; mean 3/4; differences 3/4, -1/4, -1/2; squares 14/16; sample variance 7/16; over √7/4.
    "copo of half a bonus": ({"beta": 0.5}, ONE[:, :3], [[0, 0, 3]], [[x / math.sqrt(7) for x in (3, -1, -2)]]),
    # 1 + 1/2, 1, 1/3; mean 17/18; differences 10/18, 1/18, -11/18; squares 222/324; sample variance 111/324.
    "copo of two visits": ({"beta": 1.0}, ONE[:, :3], [[3, 0, 8]], [[x / math.sqrt(111) for x in (10, 1, -11)]]),
}


class TestFormulas:
    @pytest.mark.parametrize("case", FORMULAS)
    def test_by_hand(self, case: str) -> None:
        options, rewards, counts, expected = FORMULAS[case]
        found = compute(case.split()[0], rewards, further=counts and torch.tensor(counts), **options)
        close(found, expected, 0.0 if case in ("psr", "nsr") else 3e-6 if "ngrpo" in case else 2e-6)

    def test_overlong_answers_are_out_of_their_groups(self) -> None:
        """1 0 0 is left of the first row: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. One answer alone gets 0."""
        rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0] * 4])
        overlong = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
        left_out = create("group_norm", overlong="exclude")
        third = 1 / math.sqrt(3)
        expected = [[2 * third, -third, -third, 0.0], [math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0], [0.0] * 4, [0.0] * 4]
        close(left_out.compute(rewards, overlong=overlong), expected)
        kept = create("group_norm").compute(rewards)
        assert torch.equal(left_out.compute(rewards), kept)
        assert torch.equal(left_out.compute(rewards, overlong=torch.zeros_like(overlong)), kept)
        assert torch.equal(create("group_norm").compute(rewards, overlong=overlong), kept)

    def test_ngrpo_epsilon_is_added_to_the_deviation(self) -> None:
        """Rewards 1 - 1e-4 and 1, and the virtual 1; below 1 by -1e-4, 0, 0, with the mean -1e-4/3. Differences
        -2/3, 1/3, 1/3 of 1e-4; squares 6/9 e-8; sample variance 3/9 e-8. The deviation is 5.77e-5, and ε a fiftieth."""
        rewards = torch.tensor([[1.0 - 1e-4, 1.0]], dtype=torch.float64)
        scale = 1e-4 / 3 / (math.sqrt(3 / 9 * 1e-8) + 1e-6)
        assert compute("ngrpo", rewards)[0].tolist() == pytest.approx([-2 * scale, scale], rel=1e-6)


VALUES = [0.0, 1.0, 0.3, 0.1, 1e-3, 1e6, -0.3, -1.0, -1e6, 1 / 3, 7.3, 1e-30, 123456.789, 3e38]
EQUAL = [
    ("group_norm", {}, [*VALUES, *torch.linspace(-3.0, 3.0, 50).tolist()]),
    ("copo", {}, VALUES),  # all correct with the same answer, or all wrong with different ones
    *(("rs_grpo", {"beta": beta}, VALUES) for beta in (0.0, 1e-6, 2.0, 1e3)),
    *((name, {}, [0.0, 0.1, 0.3, 1 / 3, 1.0]) for name in ("maxrl", "reinforce_rej", "s_grpo")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "options", "values"), EQUAL)
def test_equal_rewards_give_exactly_nothing(name: str, options: dict, values: list[float], dtype: torch.dtype) -> None:
    """The float32 mean of eight times 0.3 is off by one unit in the last place; over 1e-9 that was 0.9."""
    for size in range(1, 65):
        rewards = torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(-1).expand(-1, size)
        assert not compute(name, rewards, further=torch.full(rewards.shape, 6.0), **options).any(), size


def test_a_users_own_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of docs/exploration.md: (1 - 1/4) and (0 - 1/4), halved."""
    text = (ROOT / "docs" / "exploration.md").read_text(encoding="utf-8").partition("```python\n")[2]
    monkeypatch.chdir(tmp_path)
    Path("centered.py").write_text(text.partition("```")[0], encoding="utf-8")
    command = parse.run_config(["--advantage", "./centered.py:Centered", "--advantage.scale", "0.5"])
    Path("centered.py").unlink()  # a Ray worker on another machine has no such file
    run_with(monkeypatch, advantage=command.specs.get("advantage"))
    close(current_run().advantage.compute(REWARDS[:1]), [[0.375, -0.125, -0.125, -0.125]])


def test_equal_rewards_are_a_uniform_group_where_their_float32_mean_is_another_number() -> None:
    rewards = torch.full((1, 7), 0.3)
    assert (rewards.mean(-1, keepdim=True) != rewards).any()
    assert advantage_measures(rewards, torch.zeros(1, 7))["advantage/uniform_groups"] == 1.0


def test_a_step_computes_with_the_options_of_its_time() -> None:
    """PKPO's k is 4, and 1 from step 10 on: then it is the reward, less nothing, of each of four responses."""
    made = create("pkpo", k=4, k_end=1, k_steps=10)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    batch = [SimpleNamespace(index=[0, 1, 2, 3], rewards=rewards, prompts=["p"] * 4)]
    for at, k in ((9, 4), (10, 1)):
        args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4))
        (found,) = step_advantages.compute(SimpleNamespace(args=args, training_step=at), batch, made).batches
        assert torch.equal(found, create("pkpo", k=k).compute(rewards.unsqueeze(0))[0])


def test_openrlhf_continues_with_our_rows_and_takes_each_once() -> None:
    rewarded = step_advantages.compute_reward(lambda r, scale: r * scale)
    estimated, ours = torch.tensor([4.0, 5.0]), [torch.tensor([1.0, 2.0]), torch.tensor([True, False])]
    with step_advantages.replacing_estimates(ours):
        assert rewarded(estimated, 2.0).tolist() == [2.0, 4.0]
        assert rewarded(estimated, scale=1.0).tolist() == [0.0, 5.0], "a row of bool sets estimates to 0"
        with pytest.raises(RuntimeError, match="more micro-batches than the step has"):
            rewarded(estimated, 1.0)
    assert rewarded(estimated, 1.0) is not None, "outside of a step nothing is replaced"
    replacing, said = step_advantages.replacing_estimates, "did not take our advantages for 2 micro-batches"
    with pytest.raises(RuntimeError, match=said), replacing(ours):
        pass
    said = r"\(3,\) estimates of a micro-batch, the run's advantages are \(2,\)"
    with pytest.raises(RuntimeError, match=said), replacing(ours):
        rewarded(torch.zeros(3), 1.0)


def test_the_only_response_that_is_not_overlong_is_a_group_of_one() -> None:
    """GRPO gives it 0 in any case; a user's advantage need not."""

    class Plain(type(create("psr"))):
        leaves_out_overlong = True

    overlong = torch.tensor([[False, True, True], [True, True, True]])
    found = Plain().compute(torch.ones(2, 3), overlong=overlong)
    assert found.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("made", "option", "default"),
    [
        (create("rep_exp"), "ridge", 0.01),
        (create("s_grpo"), "p", 0.15),
        (create("spo"), "rho", 0.875),
        (credits.create("kl_cov"), "share", 2e-3),
        (credits.create("clip_cov"), "low", 1.0),
        (credits.create("lp_reg"), "kappa", 0.02),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_defaults_are_the_papers(made: Any, option: str, default: float) -> None:
    assert getattr(made, option) == default


class TestErrors:
    @pytest.mark.parametrize("p", [0.5, 0.495])
    def test_a_verifier_that_is_wrong_half_the_time_says_nothing(self, p: float) -> None:
        with pytest.raises(UsageError, match=r"p=0\.\d+: must be in \[0, 0\.49\]"):
            create("s_grpo", p=p)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_not_finite_names_prompt_answer_and_value(self, bad: float) -> None:
        """Two batches of two answers, of tokens 1 and 2 after a prompt of one token."""
        tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"It is {int(tokens[0])}.")
        batch = {
            "sequences": torch.tensor([[9, 1, 1], [9, 2, 2]]),
            "action_mask": torch.ones(2, 2),
            "prompts": ["what is 1 + 1?", "and 2 + 2?"],
        }
        fine, broken = (SimpleNamespace(rewards=torch.tensor([1.0, value]), **batch) for value in (-1e30, bad))
        with pytest.raises(UsageError) as caught:
            check_step(tokenizer, [fine, broken])
        assert all(part in str(caught.value) for part in (str(bad), "and 2 + 2?", "It is 2."))
        assert "1 + 1" not in str(caught.value)
        check_step(tokenizer, [fine])

    def test_a_step_has_one_reward_for_each_response(self) -> None:
        column = SimpleNamespace(rewards=torch.tensor([[1.0], [0.0]]), prompts=["p", "p"])
        check_step(SimpleNamespace(), [column])
        assert column.rewards.tolist() == [1.0, 0.0]
        two = SimpleNamespace(rewards=torch.zeros(2, 2), prompts=["p", "p"])
        with pytest.raises(UsageError, match=r"2 responses have rewards of shape \(2, 2\); one number"):
            check_step(SimpleNamespace(), [two])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_rewards_that_are_not_finite(self, bad: float) -> None:
        rewards = torch.zeros(3, 4)
        rewards[1, 2] = bad
        with pytest.raises(UsageError, match=rf"prompt 1, response 2 is {bad}"):
            compute("group_norm", rewards)

    @pytest.mark.parametrize(
        ("name", "options", "said"),
        [
            ("n-grpo", {}, "is --perturbation neighbor; NGRPO, .*, is --advantage ngrpo"),
            ("rloo", {}, "OpenRLHF computes that one itself; .* --algo.advantage.estimator rloo"),
            ("psr", {"lam": 1}, "'lam' belongs to advantage w_reinforce"),
        ],
    )
    def test_bad_names_and_options(self, name: str, options: dict, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            create(name, **options)

    @pytest.mark.parametrize("name", ["maxrl", "psr", "nsr", "reinforce_rej", "s_grpo", "w_reinforce"])
    @pytest.mark.parametrize("reward", [-0.5, 1.5])
    def test_rewards_that_are_not_of_a_verifier(self, name: str, reward: float) -> None:
        with pytest.raises(ValueError, match=rf"a reward of {reward:g} is not in \[0, 1\]"):
            compute(name, torch.tensor([[reward, 0.0]]))

    def test_a_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(4,\); \(P, G\)"):
            compute("ngrpo", torch.zeros(4))


class TestVisits:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("7 + 5 = 12.", "12"),
            ("It is 1,234.5 in all", "1234.5"),
            ("so \\boxed{1} or rather \\boxed{\\frac{1}{ 2}}", "\\frac{1}{2}"),
            ("<think>40</think> The answer: 41", "41"),
            ("  I do  NOT know ", "i do not know"),
        ],
    )
    def test_answers(self, text: str, answer: str) -> None:
        assert outcome(text) == answer

    def test_counts_are_of_the_run_and_of_the_others_in_the_batch(self) -> None:
        visits = Visits()
        assert visits.visit(["p", "p", "p", "q"], ["= 3", "3!", "4", "3"]) == [1, 1, 0, 0]
        assert visits.visit(["p", "q"], ["so 3", "4"]) == [2, 0]
        assert len(visits) == 4


def test_measures() -> None:
    """The uniform groups are the second, which is 0 0 0 0 1, of mean 1/5 and variance 20/25/4, and the third, of 0."""
    found = advantage_measures(REWARDS, compute("ngrpo", REWARDS))
    assert found["advantage/uniform_groups"] == pytest.approx(2 / 3)
    assert found["advantage/uniform_mean"] == pytest.approx(-0.2 / math.sqrt(0.2) / 2, abs=1e-5)
    assert found["advantage/min"] == pytest.approx(-0.4 / math.sqrt(0.3), abs=1e-5)
    assert found["advantage/max"] == pytest.approx(0.6 / math.sqrt(0.3), abs=1e-5)
    mixed = advantage_measures(REWARDS[:1], compute("psr", REWARDS[:1]), torch.tensor([[1.0, 3.0, 0.0, 0.0]]))
    assert "advantage/uniform_mean" not in mixed and mixed["advantage/count_mean"] == 1.0


def test_a_reward_of_verl_stands_at_any_token() -> None:
    """verl puts it at the last token of an answer, which is seldom the last column; half of ±1 over √½ is ±.7071."""
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0], [0.0] * 3]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    found, _ = estimator(create("group_norm"))(rewards, mask, np.array(["a", "a"]))
    close(found, [[math.sqrt(0.5), math.sqrt(0.5), 0.0], [-math.sqrt(0.5)] * 3])
