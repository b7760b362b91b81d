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
from tests.support.run import check_flags, run_of

hooked = with_overrides(log_probs_of)


def corrected(side_inputs: list[Any] | None, mask: Tensor) -> AbstractContextManager[None]:
    """The correction by what the samples carry."""
    return log_probs.corrected(unpack(side_inputs), mask)


def carried(left: dict[int, list[int]] | None, length: int = 12, replay: ReplayRecord | None = None) -> dict[str, Any]:
    """What a sample carries whose sampling left these tokens at these positions."""
    none = np.zeros(0, dtype=np.int32)
    empty = ReplayRecord(1, 2, length, none, none.reshape(0, 1), none.reshape(0, 1).astype("f4"), None, none > 0)
    entries = {}
    for t, ids in (left or {}).items():
        others = [v for v in range(V) if v not in ids]
        entries[t] = (len(others) < len(ids), np.array(others if len(others) < len(ids) else ids))
    mask = None if left is None else SamplingMask.of(V, entries)
    return FinishedTrajectory(replay or empty, np.zeros(length, np.float32), mask).pack()


def batch() -> tuple[Tensor, Tensor, list[dict[int, list[int]]]]:
    """Three samples of 12, 9 and 7 tokens; tokens were cut at some positions, one of them beyond the sample's end."""
    tokens = torch.randint(0, V, (3, 12), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([12, 9, 7])
    mask = (torch.arange(12) < lengths[:, None]).long()
    own = tokens.tolist()
    left = [
        {4: sorted({own[0][4], 1, 5}), 5: [own[0][5]], 11: [v for v in range(V) if v != (own[0][11] + 1) % V]},
        {},
        {2: sorted({own[2][2], *range(0, V, 3)}), 6: sorted({own[2][6], 0}), 8: [7]},
    ]
    return tokens, mask, left


def expected(logits: Tensor, tokens: Tensor, mask: Tensor, left: list[dict[int, list[int]]]) -> Tensor:
    """log π_S of each token by position, by a dense formula, for right-padded rows."""
    result = torch.full(tokens.shape, torch.nan)
    for i, row in enumerate(tokens):
        for t in range(1, int(mask[i].sum())):
            among = left[i].get(t, list(range(V)))
            result[i, t] = logits[i, t - 1, row[t]] - torch.logsumexp(logits[i, t - 1, among], dim=-1)
    return result


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_every_layout(layout: str) -> None:
    model, (tokens, mask, left) = Model(), batch()
    logits = model(tokens)
    wanted = expected(logits, tokens, mask, left)
    labels, side, rows = torch.roll(tokens, -1, 1), mask, logits
    if layout == "left":
        shift = [12 - int(row.sum()) for row in mask]
        tokens, side, rows, wanted = (
            torch.stack([row.roll(s, 0) for row, s in zip(part, shift)]) for part in (tokens, mask, logits, wanted)
        )
        labels = torch.roll(tokens, -1, 1)
    if layout == "packed":
        labels, rows = labels[mask.bool()].unsqueeze(0), logits[mask.bool()].unsqueeze(0)
    with corrected([carried(one) for one in left], side):
        found = hooked(rows, labels)
    if layout == "packed":
        found = torch.zeros(mask.shape).masked_scatter(mask.bool(), found.flatten())
    known = ~wanted[:, 1:].isnan()
    assert known.sum() == 11 + 8 + 6
    torch.testing.assert_close(found[:, :-1][known], wanted[:, 1:][known], rtol=0, atol=1e-6)


def test_gradient_by_hand() -> None:
    """d log π_S(x) / dz_v = 1[v = x] − 1[v ∈ S] π_S(v); nothing flows to a token that was cut."""
    logits = torch.randn(1, 3, V, dtype=torch.float64, requires_grad=True)
    tokens, among = torch.tensor([[5, 7, 9]]), [3, 7, 9, 11]
    with corrected([carried({1: among}, 3)], torch.ones(1, 3)):
        hooked(logits, torch.roll(tokens, -1, 1))[0, 0].backward()
    share = torch.softmax(logits[0, 0, among].detach(), dim=0)
    by_hand = torch.zeros(3, V, dtype=torch.float64)
    by_hand[0, among] = -share
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
    among = theta.topk(4).indices.sort().values
    share = torch.softmax(theta[among], dim=0)
    (true,) = torch.autograd.grad((share * advantages[among]).sum(), theta, retain_graph=True)
    total = torch.zeros(())
    for x, p in zip(among.tolist(), share.detach()):
        with corrected([carried({1: among.tolist()} if correct else {}, 2)], torch.ones(1, 2)):
            log_prob = hooked(theta.expand(1, 2, V), torch.tensor([[x, 0]]))[0, 0]
        total = total + p * advantages[x] * log_prob
    return torch.autograd.grad(total, theta)[0], true


def test_the_policy_gradient_of_a_truncated_bandit() -> None:
    advantages = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    right, true = policy_gradient(True, advantages)
    torch.testing.assert_close(right, true)
    wrong, _ = policy_gradient(False, advantages)
    assert (wrong - true).norm() > 0.1 * true.norm()
    # The true gradient of a constant is zero; without the correction a baseline is not free.
    constant, zero = policy_gradient(True, torch.ones(V, dtype=torch.float64))
    assert constant.abs().max() < 1e-12 and zero.abs().max() < 1e-12
    assert policy_gradient(False, torch.ones(V, dtype=torch.float64))[0].abs().max() > 0.01


@pytest.mark.parametrize(("name", "options"), [("gumbel", {}), ("gaussian", {"base": "token"})])
def test_together_with_a_density(name: str, options: dict[str, str]) -> None:
    """A density of the input stands as it is; where the token was drawn too, its log π is the one among those left."""
    perturbation = create(name, density=name, **options)
    model, (tokens, mask, _) = Model(), batch()
    record = record_of(perturbation, a_step(likely(4)))  # perturbed positions of the first sample
    at = int(record.positions[0])
    among = sorted({int(tokens[0, at]), 0, 1, 2})
    found = []
    for left in ({at: among}, {}):
        sides = [carried(left, replay=record), carried({}), carried({})]
        scope = ReplayScope(model.embedding, perturbation=perturbation)
        # Without a gradient, as old log-probabilities are.
        with torch.no_grad(), corrected(sides, mask), scope([record, None, None], mask), densities(scope, 1.0):
            logits = model(tokens)
            found.append(hooked(logits, torch.roll(tokens, -1, 1))[0, at - 1])
    difference = torch.logsumexp(logits[0, at - 1], -1) - torch.logsumexp(logits[0, at - 1, among], -1)
    assert difference > 0.1
    torch.testing.assert_close(found[0] - found[1], difference if perturbation.draws_token else torch.zeros(()))


def test_what_cannot_be_corrected_is_an_error() -> None:
    logits, labels, mask = torch.randn(1, 3, V), torch.tensor([[4, 5, 6]]), torch.ones(1, 3)
    for missing in (None, [None], [carried(None)]):
        with pytest.raises(RuntimeError, match="1 of 1 samples came without"), corrected(missing, mask):
            pass
    with pytest.raises(RuntimeError, match="fused loss"), corrected([carried({})], mask):
        pass
    with pytest.raises(RuntimeError, match="1 of 2 tokens"), corrected([carried({1: [4], 2: [3]}, 3)], mask):
        hooked(logits, labels)
    assert torch.equal(hooked(logits, labels), log_probs_of(logits, labels))  # outside: untouched


def test_the_turns_of_a_trajectory_are_joined() -> None:
    """The masks of earlier turns stay, also where the last turn cut nothing."""
    conversation = Conversation({})
    for prompt, answer, left in (([1, 2], [3, 4], {2: [3, 8], 3: [4]}), ([1, 2, 3, 4, 9], [5], {})):
        found = FinishedTrajectory.unpack(carried(left, len(prompt) + len(answer)))
        record = dataclasses.replace(found.record, prompt_tokens=len(prompt))
        turn = dataclasses.replace(found, record=record, log_probs=np.zeros(len(answer), np.float32))
        conversation.go_on(prompt)
        conversation.add(turn.pack(), prompt, answer)
    mask = conversation.trajectory.sampling_mask
    assert mask.positions.tolist() == [2, 3] and [ids.tolist() for ids in mask.left()] == [[3, 8], [4]]


class TestFlags:
    def test_on_by_the_flag_alone(self) -> None:
        on = parse.run_config(["--sampling.correct_mask", "--sampling.top_k", "5"])
        assert on.sampling.given() == {"top_k": 5, "correct_mask": True}
        assert on.conditions == ("sampling", "sampling_mask")
        off = parse.run_config(["--sampling.correct_mask", "false"])
        assert off.sampling.given() == {} and off.conditions == ()

    def test_a_warning_where_sampling_is_truncated(self) -> None:
        for options, args, named in (
            ({"top_k": 20}, [], "top_k 20"),
            ({"min_p": 0.1}, [], "min_p 0.1"),
            ({}, ["--rollout.top_p", "0.9"], "top_p 0.9"),
        ):
            (note,) = Sampling(**options).notes(Flags(args))
            assert named in note
            assert Sampling(**options, correct_mask=True).notes(Flags(args)) == []
        assert Sampling().notes(Flags(["--rollout.top_p", "1.0"])) == []

    def test_what_it_does_not_go_with(self) -> None:
        model = ["--actor.model_name_or_path", "m"]
        check_flags([*model, "--ds.ring_attn_size", "2"], run_of())
        with pytest.raises(UsageError, match=r"ring_attn_size 2 cannot be used with --sampling\.correct_mask"):
            check_flags([*model, "--ds.ring_attn_size", "2"], run_of(sampling={"correct_mask": True}))
