# SPDX-License-Identifier: Apache-2.0
"""``--sampling.correct_mask``: log-probabilities among the tokens left, in every layout, and the gradient they give."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngrpo.config import parse
from ngrpo.config.run import Sampling
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.common import log_probs
from ngrpo.trainers.common.log_probs import densities, with_overrides
from ngrpo.trainers.common.sample_records import Conversation, unpack
from perturbations import FinishedTrajectory, ReplayRecord, UsageError, create
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.scope import ReplayScope
from tests.support.density_model import Model, log_probs_of, record_of
from tests.support.density_steps import V, a_step, likely
from tests.support.replay_examples import a_record
from tests.support.run import check_flags, run_of

hooked = with_overrides(log_probs_of)


def corrected(side_inputs: list[Any] | None, mask: Tensor) -> AbstractContextManager[None]:
    """The correction by what the samples carry."""
    return log_probs.corrected(unpack(side_inputs), mask)


def carried(left: dict[int, list[int]] | None, length: int = 12, replay: ReplayRecord | None = None) -> dict[str, Any]:
    """What a sample of ``length`` tokens carries.

    Args:
        left: by position, the tokens that sampling left there; None for a sample without a sampling mask.
        length: number of tokens of the sample.
        replay: its record; None for one without a perturbed position.
    """
    if replay is None:
        replay = a_record(0, 1, prompt_tokens=2, num_tokens=length)
    mask = None
    if left is not None:
        mask = SamplingMask.of(V, {position: shorter_list(ids) for position, ids in left.items()})
    return FinishedTrajectory(replay, np.zeros(length, np.float32), mask).pack()


def shorter_list(left: list[int]) -> tuple[bool, np.ndarray]:
    """The tokens that were cut and True where they are fewer than those left, else those left and False."""
    cut = [token for token in range(V) if token not in left]
    if len(cut) < len(left):
        return True, np.array(cut)
    return False, np.array(left)


def batch() -> tuple[Tensor, Tensor, list[dict[int, list[int]]]]:
    """Three samples of 12, 9 and 7 tokens; tokens were cut at some positions, one of them beyond the sample's end."""
    tokens = torch.randint(0, V, (3, 12), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([12, 9, 7])
    mask = (torch.arange(12) < lengths[:, None]).long()
    first, _, third = tokens.tolist()
    left_of_first = {
        4: sorted({first[4], 1, 5}),
        5: [first[5]],  # the token alone
        11: [token for token in range(V) if token != (first[11] + 1) % V],  # all but one
    }
    left_of_third = {
        2: sorted({third[2], *range(0, V, 3)}),
        6: sorted({third[6], 0}),
        8: [7],  # beyond the end
    }
    return tokens, mask, [left_of_first, {}, left_of_third]


def expected_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor, left: list[dict[int, list[int]]]) -> Tensor:
    """log π_S of each token by position (B, T), by a dense formula, for right-padded rows; NaN where there is none."""
    result = torch.full(tokens.shape, torch.nan)
    for sample, row in enumerate(tokens):
        length = int(mask[sample].sum())
        for position in range(1, length):
            before = logits[sample, position - 1]
            allowed = left[sample].get(position, list(range(V)))
            result[sample, position] = before[row[position]] - torch.logsumexp(before[allowed], dim=-1)
    return result


def right_aligned(rows: Tensor, mask: Tensor) -> Tensor:
    """Right-padded rows (B, T, ...) moved to the end of their row, as left-padded ones."""
    padding = mask.shape[1] - mask.sum(dim=1)
    return torch.stack([row.roll(int(shift), 0) for row, shift in zip(rows, padding)])


def assert_log_probs(found: Tensor, expected: Tensor) -> None:
    """Entry t - 1 of ``found`` is of the token at t, as in ``expected``; all but the first tokens are compared."""
    has_value = ~expected[:, 1:].isnan()
    assert has_value.sum() == 11 + 8 + 6
    torch.testing.assert_close(found[:, :-1][has_value], expected[:, 1:][has_value], rtol=0, atol=1e-6)


def test_right_padded_rows() -> None:
    tokens, mask, left = batch()
    logits = Model()(tokens)
    with corrected([carried(allowed) for allowed in left], mask):
        found = hooked(logits, torch.roll(tokens, -1, 1))
    assert_log_probs(found, expected_log_probs(logits, tokens, mask, left))


def test_left_padded_rows() -> None:
    tokens, mask, left = batch()
    logits = Model()(tokens)
    labels = torch.roll(right_aligned(tokens, mask), -1, 1)
    with corrected([carried(allowed) for allowed in left], right_aligned(mask, mask)):
        found = hooked(right_aligned(logits, mask), labels)
    expected = expected_log_probs(logits, tokens, mask, left)
    assert_log_probs(found, right_aligned(expected, mask))


def test_packed_rows() -> None:
    tokens, mask, left = batch()
    logits = Model()(tokens)
    inside = mask.bool()
    packed_logits = logits[inside].unsqueeze(0)
    packed_labels = torch.roll(tokens, -1, 1)[inside].unsqueeze(0)
    with corrected([carried(allowed) for allowed in left], mask):
        packed = hooked(packed_logits, packed_labels)
    found = torch.zeros(mask.shape).masked_scatter(inside, packed.flatten())
    assert_log_probs(found, expected_log_probs(logits, tokens, mask, left))


def test_gradient_by_hand() -> None:
    """d log π_S(x) / dz_v = 1[v = x] − 1[v ∈ S] π_S(v); nothing flows to a token that was cut."""
    logits = torch.randn(1, 3, V, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[5, 7, 9]])
    allowed = [3, 7, 9, 11]

    with corrected([carried({1: allowed}, 3)], torch.ones(1, 3)):
        hooked(logits, torch.roll(tokens, -1, 1))[0, 0].backward()

    by_hand = torch.zeros(3, V, dtype=torch.float64)
    by_hand[0, allowed] = -torch.softmax(logits[0, 0, allowed].detach(), dim=0)
    by_hand[0, 7] += 1.0
    torch.testing.assert_close(logits.grad[0], by_hand)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.full((1, 2, V), -1e4)
    logits[0, 0, [1, 2]] = torch.tensor([3e4, -3e4])
    with corrected([carried({1: [1, 2]}, 2)], torch.ones(1, 2)):
        assert hooked(logits, torch.tensor([[1, 1]]))[0, 0] == 0.0
        assert hooked(logits, torch.tensor([[2, 1]]))[0, 0] == -6e4


def policy_gradient(correct: bool, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """The estimator's expectation over all draws of a bandit with top-k 4, and the true gradient of its value."""
    theta = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    allowed = theta.topk(4).indices.sort().values
    probabilities = torch.softmax(theta[allowed], dim=0)
    value = (probabilities * advantages[allowed]).sum()
    (true_gradient,) = torch.autograd.grad(value, theta, retain_graph=True)

    left = {1: allowed.tolist()} if correct else {}
    expectation = torch.zeros(())
    for token, probability in zip(allowed.tolist(), probabilities.detach()):
        with corrected([carried(left, 2)], torch.ones(1, 2)):
            log_prob = hooked(theta.expand(1, 2, V), torch.tensor([[token, 0]]))[0, 0]
        expectation = expectation + probability * advantages[token] * log_prob
    (estimated_gradient,) = torch.autograd.grad(expectation, theta)
    return estimated_gradient, true_gradient


def test_the_policy_gradient_of_a_truncated_bandit() -> None:
    advantages = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    corrected_gradient, true_gradient = policy_gradient(True, advantages)
    torch.testing.assert_close(corrected_gradient, true_gradient)
    uncorrected_gradient, _ = policy_gradient(False, advantages)
    assert (uncorrected_gradient - true_gradient).norm() > 0.1 * true_gradient.norm()


def test_a_baseline_is_free_with_the_correction_alone() -> None:
    """The true gradient of a constant is zero."""
    constant = torch.ones(V, dtype=torch.float64)
    corrected_gradient, true_gradient = policy_gradient(True, constant)
    assert true_gradient.abs().max() < 1e-12
    assert corrected_gradient.abs().max() < 1e-12
    uncorrected_gradient, _ = policy_gradient(False, constant)
    assert uncorrected_gradient.abs().max() > 0.01


@pytest.mark.parametrize(("name", "options"), [("gumbel", {}), ("gaussian", {"base": "token"})])
def test_together_with_a_density(name: str, options: dict[str, str]) -> None:
    """A density of the input stands as it is; where the token was drawn too, its log π is the one among those left."""
    perturbation = create(name, density=name, **options)
    model = Model()
    tokens, mask, _ = batch()
    record = record_of(perturbation, a_step(likely(4)))  # perturbed positions of the first sample
    position = int(record.positions[0])
    allowed = sorted({int(tokens[0, position]), 0, 1, 2})

    def entry_and_logits(left: dict[int, list[int]]) -> tuple[Tensor, Tensor]:
        """The entry of ``position`` in the first sample, and the logits before it; as for old log-probabilities."""
        sides = [carried(left, replay=record), carried({}), carried({})]
        scope = ReplayScope(model.embedding, perturbation=perturbation)
        with torch.no_grad(), corrected(sides, mask), scope([record, None, None], mask), densities(scope, 1.0):
            logits = model(tokens)
            entries = hooked(logits, torch.roll(tokens, -1, 1))
        return entries[0, position - 1], logits[0, position - 1]

    with_mask, logits = entry_and_logits({position: allowed})
    without_mask, _ = entry_and_logits({})

    of_the_token = torch.logsumexp(logits, -1) - torch.logsumexp(logits[allowed], -1)
    assert of_the_token > 0.1
    difference = of_the_token if perturbation.draws_token else torch.zeros(())
    torch.testing.assert_close(with_mask - without_mask, difference)


@pytest.mark.parametrize("side_inputs", [None, [None], [carried(None)]], ids=["none", "no sample", "no mask"])
def test_a_sample_without_a_mask_is_an_error(side_inputs: list[Any] | None) -> None:
    with pytest.raises(RuntimeError, match="1 of 1 samples came without"), corrected(side_inputs, torch.ones(1, 3)):
        pass


def test_log_probabilities_that_were_not_asked_for_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="fused loss"), corrected([carried({})], torch.ones(1, 3)):
        pass


def test_a_token_that_was_cut_is_an_error() -> None:
    logits = torch.randn(1, 3, V)
    labels = torch.tensor([[4, 5, 6]])
    only_first_is_allowed = carried({1: [4], 2: [3]}, 3)
    with pytest.raises(RuntimeError, match="1 of 2 tokens"), corrected([only_first_is_allowed], torch.ones(1, 3)):
        hooked(logits, labels)
    assert torch.equal(hooked(logits, labels), log_probs_of(logits, labels)), "the hook is off after the error"


def test_the_turns_of_a_trajectory_are_joined() -> None:
    """The masks of earlier turns stay, also where the last turn cut nothing."""
    conversation = Conversation({})

    def add_turn(prompt: list[int], response: list[int], left: dict[int, list[int]]) -> None:
        trajectory = FinishedTrajectory.unpack(carried(left, len(prompt) + len(response)))
        record = dataclasses.replace(trajectory.record, prompt_tokens=len(prompt))
        log_probs = np.zeros(len(response), np.float32)
        turn = dataclasses.replace(trajectory, record=record, log_probs=log_probs)
        conversation.drop_changed(prompt)
        conversation.add(turn.pack(), prompt, response)

    add_turn([1, 2], [3, 4], {2: [3, 8], 3: [4]})
    add_turn([1, 2, 3, 4, 9], [5], {})

    mask = conversation.trajectory.sampling_mask
    assert mask.positions.tolist() == [2, 3]
    assert [ids.tolist() for ids in mask.left()] == [[3, 8], [4]]


class TestFlags:
    def test_on_by_the_flag_alone(self) -> None:
        on = parse.run_config(["--sampling.correct_mask", "--sampling.top_k", "5"])
        assert on.sampling.given() == {"top_k": 5, "correct_mask": True}
        assert on.conditions == ("sampling", "sampling_mask")
        off = parse.run_config(["--sampling.correct_mask", "false"])
        assert off.sampling.given() == {}
        assert off.conditions == ()

    @pytest.mark.parametrize(
        ("options", "args", "named"),
        [
            ({"top_k": 20}, [], "top_k 20"),
            ({"min_p": 0.1}, [], "min_p 0.1"),
            ({}, ["--rollout.top_p", "0.9"], "top_p 0.9"),
        ],
    )
    def test_truncated_sampling_is_warned_of_unless_it_is_corrected(
        self, options: dict[str, Any], args: list[str], named: str
    ) -> None:
        (note,) = Sampling(**options).notes(Flags(args))
        assert named in note
        assert Sampling(**options, correct_mask=True).notes(Flags(args)) == []

    def test_a_top_p_of_1_truncates_nothing(self) -> None:
        assert Sampling().notes(Flags(["--rollout.top_p", "1.0"])) == []

    def test_it_cannot_be_used_with_ring_attention(self) -> None:
        ring = ["--actor.model_name_or_path", "m", "--ds.ring_attn_size", "2"]
        check_flags(ring, run_of())
        with pytest.raises(UsageError, match=r"ring_attn_size 2 cannot be used with --sampling\.correct_mask"):
            check_flags(ring, run_of(sampling={"correct_mask": True}))
