# SPDX-License-Identifier: Apache-2.0
"""Advantages on their way through OpenRLHF's micro batches, and at the maximum reward and the clip."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf.step_advantages import compute_reward as with_ours
from perturbations.errors import UsageError
from tests.fast.openrlhf_doubles import maker
from tests.fast.run import clip_range, run_with


def test_each_answer_gets_its_own_advantage_in_whatever_order_micro_batches_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts of four answers, dealt to micro batches of one to three as OpenRLHF balances them by length.

    Rewards 0, 1, 1, 1 and 0, 0, 0, 1 in the order of generation: ±.5 and ∓1.5 by group_norm.
    """
    run_with(monkeypatch, advantage={"name": "group_norm"})
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    expected = torch.tensor([-1.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5, 1.5])
    parts = [[6, 0], [7, 3, 4], [1], [5, 2]]
    taken: list[Tensor] = []
    compute_reward = with_ours(lambda r, *rest: taken.append(r))

    def original(experiences: list[Any]) -> None:
        for experience in experiences:
            compute_reward(torch.zeros_like(experience.rewards))

    made = [
        SimpleNamespace(index=part, rewards=rewards[part], prompts=["p"] * len(part), sequences=None) for part in parts
    ]
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4))
    maker(original, args=args).compute_advantages_and_returns(made)
    for part, found in zip(parts, taken, strict=True):
        torch.testing.assert_close(found, expected[part], atol=1e-6, rtol=0.0)


# --- NGRPO: the maximum reward in float32 ---------------------------------------------------------------------------


@pytest.mark.parametrize("highest", [0.7, 1.0, 0.1, 3.3, 1000.3, 0.0, -0.3])
@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_ngrpo_drops_prompts_that_are_all_correct_in_float32(highest: float, size: int) -> None:
    """As OpenRLHF filters: a prompt is kept where min < mean < max, of float32 scores in Python's numbers."""
    made = advantages.create("ngrpo", max_reward=highest)
    low, high = (float(word) for word in made.flags(Flags())["--algo.dynamic_filtering_range"])
    scores = [one.item() for one in torch.full((size,), highest)]
    step = max(abs(highest), 1.0) / 1000
    assert not low < sum(scores) / size < high
    assert low < (sum(scores[1:]) + highest - size * step) / size < high, "a wrong answer keeps it"


def test_the_filter_s_range_is_no_flag_to_argparse() -> None:
    """With an exponent a negative number would be one."""
    for highest, word in ((0.0, "-0.00001"), (-0.5, "-0.50001"), (1.0, "0.99999"), (100.0, "99.999"), (8.0, "7.99992")):
        flags = advantages.create("ngrpo", max_reward=highest).flags(Flags())
        assert flags["--algo.dynamic_filtering_range"] == ("-1000000", word)


def test_ngrpo_takes_sums_of_float32_for_the_maximum() -> None:
    """Seven times 0.1 is 0.70000005 in float32, and 0.7 is 0.69999999: exactly nothing, as an all-correct group."""
    seven = sum((torch.tensor(0.1) for _ in range(7)), torch.tensor(0.0))
    rewards = torch.stack([seven, torch.tensor(0.7), torch.tensor(0.7) - 1e-6]).view(1, 3)
    assert advantages.compute("ngrpo", rewards, max_reward=0.7).tolist() == [[0.0] * 3]
    large = torch.full((1, 4), 1000.3)  # 4e-5 above 1000.3 in float32
    assert advantages.compute("ngrpo", large, max_reward=1000.3).tolist() == [[0.0] * 4]
    with pytest.raises(UsageError, match="is above the maximum reward"):
        advantages.compute("ngrpo", rewards + 1e-4, max_reward=0.7)


# --- PKPO: nothing is clipped ----------------------------------------------------------------------------------------


def test_pkpo_s_rewards_of_any_size_are_not_clipped() -> None:
    """A reward of 100 at k = 2 is 200, where OpenRLHF clips at 10 and ours clipped at 20."""
    made = advantages.create("pkpo", k=2)
    bound = float(clip_range("--rollout.n_samples_per_prompt 8", {"name": "pkpo", "k": 2})[1])
    largest = made.compute(100.0 * torch.eye(8)[:1]).max().item()
    assert largest == pytest.approx(200.0) and bound > largest


@pytest.mark.parametrize("variant", ["s", "loo", "loo_minus_one"])
def test_pkpo_s_clip_is_beyond_all_that_its_rewards_come_to(variant: str) -> None:
    """All groups of up to five answers with rewards at either bound; a reward beyond them is refused."""
    for size, k in ((2, 1), (3, 2), (5, 1), (5, 2), (5, 4), (5, 5)):
        if k == size and variant == "loo":
            continue
        made = advantages.create("pkpo", k=k, variant=variant)
        bound = float(clip_range(f"--rollout.n_samples_per_prompt {size}", made.spec())[1])
        rewards = torch.tensor(list(product([-1e4, 1e4], repeat=size)))
        assert made.compute(rewards).abs().max().item() <= bound
        with pytest.raises(UsageError, match=r"a reward of 10001 is not in \[-10000, 10000\].* Divide"):
            made.compute(rewards + 1.0)
        with pytest.raises(UsageError, match="a reward of -10001 is"):
            made.compute(rewards - 1.0)
