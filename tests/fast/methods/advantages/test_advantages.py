# SPDX-License-Identifier: Apache-2.0
"""Advantages against numbers derived by hand, and what a wrong reward or option says."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngrpo.config import parse
from ngrpo.config.run import current_run
from ngrpo.methods import credits
from ngrpo.methods.advantages import compute, create
from ngrpo.trainers.openrlhf.rewards import check_step
from ngrpo.trainers.verl.overrides import estimator
from perturbations.errors import UsageError
from tests.conftest import ROOT
from tests.support.run import run_with

# One response of four right; all wrong; all right.
REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
)
ONE_RIGHT = [1.0, 0.0, 0.0, 0.0]
ALL_WRONG = [0.0, 0.0, 0.0, 0.0]


def assert_close(advantages: Tensor, expected: list[list[float]], tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=tolerance, rtol=0.0)


def scaled(factor: float, values: list[float]) -> list[float]:
    return [factor * value for value in values]


# --- formulas, for rewards (P, G) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Mean 1/4; squares (3/4)² + 3 (1/4)² = 3/4; sample variance (3/4)/3 = 1/4, std 1/2; (r - 1/4)/(1/2).
        pytest.param(
            "group_norm",
            [
                [1.5, -0.5, -0.5, -0.5],
                [0.0, 0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0],
            ],
            id="group_norm",
        ),
        pytest.param(
            "w_reinforce",
            [
                [0.1, -1.0, -1.0, -1.0],
                [-1.0, -1.0, -1.0, -1.0],
                [0.1, 0.1, 0.1, 0.1],
            ],
            id="w_reinforce",
        ),
        # Mean 1/4: (1 − 1/4) / (1/4) and (0 − 1/4) / (1/4).
        pytest.param(
            "maxrl",
            [
                [3.0, -1.0, -1.0, -1.0],
                [0.0, 0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0],
            ],
            id="maxrl",
        ),
        pytest.param(
            "reinforce_rej",
            [
                [1.0, -1.0, -1.0, -1.0],
                [0.0, 0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0],
            ],
            id="reinforce_rej",
        ),
    ],
)
def test_formulas_of_rewards_0_and_1(name: str, expected: list[list[float]]) -> None:
    assert_close(compute(name, REWARDS), expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "psr",
            [
                [1.0, 0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0, 0.0],
                [1.0, 1.0, 1.0, 1.0],
            ],
            id="psr",
        ),
        pytest.param(
            "nsr",
            [
                [0.0, -1.0, -1.0, -1.0],
                [-1.0, -1.0, -1.0, -1.0],
                [0.0, 0.0, 0.0, 0.0],
            ],
            id="nsr",
        ),
    ],
)
def test_psr_and_nsr_are_exact(name: str, expected: list[list[float]]) -> None:
    assert_close(compute(name, REWARDS), expected, tolerance=0.0)


@pytest.mark.parametrize(
    ("name", "options", "rewards", "expected"),
    [
        pytest.param(
            "w_reinforce",
            {"lam": 0.5},
            [[1.0, 0.25]],
            [[0.5, -0.75]],
            id="w_reinforce",
        ),
        # Mean 1/2: (1/2, −1/4, 1/4, −1/2) / (1/2).
        pytest.param(
            "maxrl",
            {},
            [[1.0, 0.25, 0.75, 0.0]],
            [[1.0, -0.5, 0.5, -1.0]],
            id="maxrl",
        ),
        pytest.param(
            "reinforce_rej",
            {},
            [[1.0, 0.25], [0.25, 0.25]],
            [[1.0, -0.5], [0.0, 0.0]],
            id="reinforce_rej",
        ),
    ],
)
def test_formulas_of_fractional_rewards(
    name: str, options: dict[str, float], rewards: list[list[float]], expected: list[list[float]]
) -> None:
    assert_close(compute(name, torch.tensor(rewards), **options), expected)


@pytest.mark.parametrize(
    ("n", "rewards", "expected"),
    [
        # A 1 is appended. 1 0 0 0 1: mean 2/5; squares 2 (3/5)² + 3 (2/5)² = 30/25; variance 30/25/4 = 0.3.
        pytest.param(
            1,
            ONE_RIGHT,
            scaled(1 / math.sqrt(0.3), [0.6, -0.4, -0.4, -0.4]),
            id="one virtual response",
        ),
        # 0 0 0 0 1 1: mean 1/3; squares 4/9 + 2 · 4/9 = 12/9; variance 12/9/5 = 4/15; -1/3 over its root.
        pytest.param(
            2,
            ALL_WRONG,
            scaled(1 / math.sqrt(4 / 15), [-1 / 3] * 4),
            id="two virtual responses",
        ),
    ],
)
def test_ngrpo_by_hand(n: int, rewards: list[float], expected: list[float]) -> None:
    advantages = compute("ngrpo", torch.tensor([rewards]), n=n)
    assert_close(advantages, [expected], tolerance=3e-6)


def test_ngrpo_appends_one_virtual_response_by_default() -> None:
    rewards = torch.tensor([ONE_RIGHT])
    assert torch.equal(compute("ngrpo", rewards), compute("ngrpo", rewards, n=1))


@pytest.mark.parametrize(
    ("p", "rewards", "expected"),
    [
        # p = 1/10, mean 1/4: t = (0.25 − 0.1) / 0.8 = 3/16; w = 0.8 √(3/16 · 13/16) / √(1/4 · 3/4).
        pytest.param(
            0.1,
            ONE_RIGHT,
            scaled(0.8 * math.sqrt(39 / 48), [1.5, -0.5, -0.5, -0.5]),
            id="some errors",
        ),
        # A mean of 1/4 is explained by errors of p = 1/4, one of 3/4 as well.
        pytest.param(0.25, ONE_RIGHT, [0.0] * 4, id="explained by errors, one right"),
        pytest.param(0.25, [1.0, 1.0, 1.0, 0.0], [0.0] * 4, id="explained by errors, one wrong"),
        # Half right keeps 1 − 2p of ±√3/2.
        pytest.param(
            0.25,
            [1.0, 1.0, 0.0, 0.0],
            scaled(math.sqrt(3) / 4, [1.0, 1.0, -1.0, -1.0]),
            id="not explained by errors",
        ),
        pytest.param(0.0, ONE_RIGHT, [1.5, -0.5, -0.5, -0.5], id="no errors"),
        pytest.param(0.0, ALL_WRONG, [0.0] * 4, id="no errors, all wrong"),
        pytest.param(0.0, [1.0] * 4, [0.0] * 4, id="no errors, all right"),
    ],
)
def test_s_grpo_by_hand(p: float, rewards: list[float], expected: list[float]) -> None:
    """``p``: how often the verifier errs."""
    assert_close(compute("s_grpo", torch.tensor([rewards]), p=p), [expected])


@pytest.mark.parametrize(
    ("beta", "rewards", "counts", "expected"),
    [
        # Bonuses 1, 1/2, 1/2; mean 2/3; squares 1/9 + 2/36 = 1/6; sample variance 1/12, std 1/√12.
        pytest.param(
            1.0,
            [0.0, 0.0, 0.0],
            [0, 3, 3],
            scaled(1 / math.sqrt(3), [2, -1, -1]),
            id="all wrong",
        ),
        # 3/2, 1/2, 1/4; mean 3/4; differences 3/4, -1/4, -1/2; squares 14/16; sample variance 7/16; over √7/4.
        pytest.param(
            0.5,
            [1.0, 0.0, 0.0],
            [0, 0, 3],
            scaled(1 / math.sqrt(7), [3, -1, -2]),
            id="half of a bonus",
        ),
        # 1 + 1/2, 1, 1/3; mean 17/18; differences 10/18, 1/18, -11/18; squares 222/324; sample variance 111/324.
        pytest.param(
            1.0,
            [1.0, 0.0, 0.0],
            [3, 0, 8],
            scaled(1 / math.sqrt(111), [10, 1, -11]),
            id="several visits",
        ),
    ],
)
def test_copo_by_hand(beta: float, rewards: list[float], counts: list[int], expected: list[float]) -> None:
    """The bonus of a response is 1 / √(1 + N), of which β counts."""
    copo = create("copo", beta=beta)
    advantages = copo.compute(torch.tensor([rewards]), torch.tensor([counts]))
    assert_close(advantages, [expected])


def test_ngrpo_epsilon_is_added_to_the_deviation() -> None:
    """Rewards 1 - 1e-4 and 1, and the virtual 1; below 1 by -1e-4, 0, 0, with the mean -1e-4/3. Differences
    -2/3, 1/3, 1/3 of 1e-4; squares 6/9 e-8; sample variance 3/9 e-8. The deviation is 5.77e-5, and ε a fiftieth."""
    rewards = torch.tensor([[1.0 - 1e-4, 1.0]], dtype=torch.float64)
    scale = 1e-4 / 3 / (math.sqrt(3 / 9 * 1e-8) + 1e-6)
    assert compute("ngrpo", rewards)[0].tolist() == pytest.approx([-2 * scale, scale], rel=1e-6)


# --- overlong responses --------------------------------------------------------------------------------------


OVERLONG_REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 1.0],
        [1.0, 0.0, 0.5, 0.0],
        [0.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
)
OVERLONG = torch.tensor(
    [
        [False, False, False, True],
        [False, False, True, True],
        [False, True, True, True],
        [True, True, True, True],
    ]
)


def test_overlong_responses_are_out_of_their_groups() -> None:
    """1 0 0 is left of the first row: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. A response alone gets 0."""
    advantages = create("group_norm", overlong="exclude").compute(OVERLONG_REWARDS, overlong=OVERLONG)
    third = 1 / math.sqrt(3)
    half = math.sqrt(0.5)
    expected = [
        [2 * third, -third, -third, 0.0],
        [half, -half, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert_close(advantages, expected)


@pytest.mark.parametrize(
    ("options", "overlong"),
    [
        pytest.param({"overlong": "exclude"}, None, id="no marks"),
        pytest.param({"overlong": "exclude"}, torch.zeros_like(OVERLONG), id="no response marked"),
        pytest.param({}, OVERLONG, id="not left out by default"),
    ],
)
def test_responses_are_kept_in_their_groups(options: dict[str, str], overlong: Tensor | None) -> None:
    kept = create("group_norm").compute(OVERLONG_REWARDS)
    advantages = create("group_norm", **options).compute(OVERLONG_REWARDS, overlong=overlong)
    assert torch.equal(advantages, kept)


def test_the_only_response_that_is_not_overlong_is_a_group_of_one() -> None:
    """GRPO gives it 0 in any case; a user's advantage need not."""

    class Plain(type(create("psr"))):
        leaves_out_overlong = True

    overlong = torch.tensor([[False, True, True], [True, True, True]])
    advantages = Plain().compute(torch.ones(2, 3), overlong=overlong)
    assert advantages.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


# --- equal rewards -------------------------------------------------------------------------------------------


REWARD_VALUES = [
    *(0.0, 1.0, 0.3, 0.1, 1e-3, 1e6),
    *(-0.3, -1.0, -1e6),
    *(1 / 3, 7.3, 1e-30, 123456.789, 3e38),
]
VERIFIER_VALUES = [0.0, 0.1, 0.3, 1 / 3, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        pytest.param(
            "group_norm",
            {},
            [*REWARD_VALUES, *torch.linspace(-3.0, 3.0, 50).tolist()],
            id="group_norm",
        ),
        # All correct with the same answer, or all wrong with different ones.
        pytest.param("copo", {}, REWARD_VALUES, id="copo"),
        pytest.param("rs_grpo", {"beta": 0.0}, REWARD_VALUES, id="rs_grpo, beta 0"),
        pytest.param("rs_grpo", {"beta": 1e-6}, REWARD_VALUES, id="rs_grpo, beta 1e-6"),
        pytest.param("rs_grpo", {"beta": 2.0}, REWARD_VALUES, id="rs_grpo, beta 2"),
        pytest.param("rs_grpo", {"beta": 1e3}, REWARD_VALUES, id="rs_grpo, beta 1000"),
        pytest.param("maxrl", {}, VERIFIER_VALUES, id="maxrl"),
        pytest.param("reinforce_rej", {}, VERIFIER_VALUES, id="reinforce_rej"),
        pytest.param("s_grpo", {}, VERIFIER_VALUES, id="s_grpo"),
    ],
)
def test_equal_rewards_give_exactly_nothing(name: str, options: dict, values: list[float], dtype: torch.dtype) -> None:
    """The float32 mean of eight times 0.3 is off by one unit in the last place; over 1e-9 that was 0.9."""
    column = torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(-1)
    for group_size in range(1, 65):
        rewards = column.expand(-1, group_size)
        counts = torch.full(rewards.shape, 6.0)
        assert not compute(name, rewards, further=counts, **options).any(), group_size


# --- a user's own, defaults, verl ----------------------------------------------------------------------------


def first_python_block(page: Path) -> str:
    _, _, after_fence = page.read_text(encoding="utf-8").partition("```python\n")
    block, _, _ = after_fence.partition("```")
    return block


def test_a_users_own_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of docs/exploration.md: (1 - 1/4) and (0 - 1/4), halved."""
    monkeypatch.chdir(tmp_path)
    Path("centered.py").write_text(first_python_block(ROOT / "docs" / "exploration.md"), encoding="utf-8")
    command = parse.run_config(["--advantage", "./centered.py:Centered", "--advantage.scale", "0.5"])
    Path("centered.py").unlink()  # a Ray worker on another machine has no such file
    run_with(monkeypatch, advantage=command.specs.get("advantage"))
    advantages = current_run().advantage.compute(REWARDS[:1])
    assert_close(advantages, [[0.375, -0.125, -0.125, -0.125]])


@pytest.mark.parametrize(
    ("method", "option", "default"),
    [
        pytest.param(create("rep_exp"), "ridge", 0.01, id="rep_exp"),
        pytest.param(create("s_grpo"), "p", 0.15, id="s_grpo"),
        pytest.param(create("spo"), "rho", 0.875, id="spo"),
        pytest.param(credits.create("kl_cov"), "share", 2e-3, id="kl_cov"),
        pytest.param(credits.create("clip_cov"), "low", 1.0, id="clip_cov"),
        pytest.param(credits.create("lp_reg"), "kappa", 0.02, id="lp_reg"),
    ],
)
def test_defaults_are_the_papers(method: Any, option: str, default: float) -> None:
    assert getattr(method, option) == default


def test_a_reward_of_verl_stands_at_any_token() -> None:
    """verl puts it at the last token of a response, which is seldom the last column; half of ±1 over √½ is ±.7071."""
    token_rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, _ = estimator(create("group_norm"))(token_rewards, mask, np.array(["a", "a"]))
    root = math.sqrt(0.5)
    assert_close(advantages, [[root, root, 0.0], [-root, -root, -root]])


# --- errors --------------------------------------------------------------------------------------------------


class TestErrors:
    @pytest.mark.parametrize("p", [0.5, 0.495])
    def test_a_verifier_that_is_wrong_half_the_time_says_nothing(self, p: float) -> None:
        with pytest.raises(UsageError, match=r"p=0\.\d+: must be in \[0, 0\.49\]"):
            create("s_grpo", p=p)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_not_finite_names_prompt_answer_and_value(self, bad: float) -> None:
        """Two batches of two responses, of tokens 1 and 2 after a prompt of one token."""
        tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"It is {int(tokens[0])}.")

        def batch(second_reward: float) -> SimpleNamespace:
            return SimpleNamespace(
                rewards=torch.tensor([1.0, second_reward]),
                sequences=torch.tensor([[9, 1, 1], [9, 2, 2]]),
                action_mask=torch.ones(2, 2),
                prompts=["what is 1 + 1?", "and 2 + 2?"],
            )

        check_step(tokenizer, [batch(-1e30)])
        with pytest.raises(UsageError) as caught:
            check_step(tokenizer, [batch(-1e30), batch(bad)])
        message = str(caught.value)
        assert str(bad) in message
        assert "and 2 + 2?" in message
        assert "It is 2." in message
        assert "1 + 1" not in message

    def test_a_step_has_one_reward_for_each_response(self) -> None:
        column = SimpleNamespace(rewards=torch.tensor([[1.0], [0.0]]), prompts=["p", "p"])
        check_step(SimpleNamespace(), [column])
        assert column.rewards.tolist() == [1.0, 0.0]
        two_columns = SimpleNamespace(rewards=torch.zeros(2, 2), prompts=["p", "p"])
        with pytest.raises(UsageError, match=r"2 responses have rewards of shape \(2, 2\); one number"):
            check_step(SimpleNamespace(), [two_columns])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_rewards_that_are_not_finite(self, bad: float) -> None:
        rewards = torch.zeros(3, 4)
        rewards[1, 2] = bad
        with pytest.raises(UsageError, match=rf"prompt 1, response 2 is {bad}"):
            compute("group_norm", rewards)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("n-grpo", {}, "is --perturbation neighbor; NGRPO, .*, is --advantage ngrpo"),
            ("rloo", {}, "OpenRLHF computes that one itself; .* --algo.advantage.estimator rloo"),
            ("psr", {"lam": 1}, "'lam' belongs to advantage w_reinforce"),
        ],
    )
    def test_bad_names_and_options(self, name: str, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            create(name, **options)

    @pytest.mark.parametrize("name", ["maxrl", "psr", "nsr", "reinforce_rej", "s_grpo", "w_reinforce"])
    @pytest.mark.parametrize("reward", [-0.5, 1.5])
    def test_rewards_that_are_not_of_a_verifier(self, name: str, reward: float) -> None:
        with pytest.raises(ValueError, match=rf"a reward of {reward:g} is not in \[0, 1\]"):
            compute(name, torch.tensor([[reward, 0.0]]))

    def test_a_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(4,\); \(P, G\)"):
            compute("ngrpo", torch.zeros(4))
