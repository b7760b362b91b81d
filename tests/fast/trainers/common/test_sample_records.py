# SPDX-License-Identifier: Apache-2.0
"""Conversations: what was recorded of earlier turns stays where their tokens stayed, and nowhere else."""

import dataclasses

import numpy as np
import pytest

from ngrpo.trainers.common.mismatch import step_metrics
from ngrpo.trainers.common.sample_records import Conversation, unpack
from perturbations import FinishedTrajectory, ReplayRecord

FIRST, ANSWER, TOOL = [1, 2, 3], [10, 11, 12, 13], [7, 7]


def record(positions: list[int], prompt: int, tokens: int) -> ReplayRecord:
    count = len(positions)
    ids, weights = np.full((count, 1), 5, np.int32), np.ones((count, 1), np.float32)
    return ReplayRecord(9, prompt, tokens, np.array(positions, np.int32), ids, weights, None, np.ones(count, bool))


def taken(positions: list[int], prompt: int, log_probs: list[float]) -> dict[str, bytes]:
    kept = record(positions, prompt, prompt + len(log_probs))
    return FinishedTrajectory(kept, np.array(log_probs, np.float32)).pack()


def first_turn(*, redrawn: bool = False) -> Conversation:
    """Prompt of 3 tokens, answer of 4, edits at positions 3, 4 and 6."""
    conversation = Conversation({}, redrawn=redrawn)
    conversation.go_on(FIRST)
    conversation.add(taken([3, 4, 6], 3, [-0.1, -0.2, -0.3, -0.4]), FIRST, ANSWER)
    return conversation


@pytest.mark.parametrize(
    ("prompt", "positions", "dropped"),
    [
        (FIRST + ANSWER + TOOL, [3, 4, 6], 0),
        (FIRST + ANSWER, [3, 4, 6], 0),
        (FIRST + ANSWER[:3] + TOOL, [3, 4], 1),  # the last token was taken away
        ([*FIRST, 10, 99, 12, 13, *TOOL], [3], 2),  # token 4 was changed: its edit, and those behind it
        (FIRST + ANSWER[1:] + TOOL, [], 3),  # a stripped token moves all that follow
        ([8, *FIRST[1:], *ANSWER], [], 3),
    ],
)
def test_an_edit_stays_where_its_tokens_stayed(prompt: list[int], positions: list[int], dropped: int) -> None:
    conversation = first_turn()
    conversation.go_on(prompt)
    assert conversation.trajectory.record.positions.tolist() == positions
    assert conversation.trajectory.dropped == dropped


def test_a_prompt_that_is_asked_again_has_other_draws() -> None:
    """Also in a later turn, whose replayed edits keep their place; a template's next turn is no second attempt."""
    conversation = Conversation({})
    conversation.go_on(FIRST)
    assert conversation.earlier(FIRST) is None
    conversation.add(taken([3, 4, 6], 3, [-0.1, -0.2, -0.3, -0.4]), FIRST, ANSWER)
    seeds = []
    for prompt in (FIRST, FIRST, FIRST + ANSWER):
        conversation.go_on(prompt)
        seeds.append(conversation.earlier(prompt).seed)
    assert len({9, *seeds[:2]}) == 3, "the second and the third attempt"
    turns, prompt = first_turn(), FIRST + ANSWER + TOOL
    turns.go_on(prompt)
    once, again = turns.earlier(prompt), turns.earlier(prompt)
    assert once.seed == 9 != again.seed and again.positions.tolist() == [3, 4, 6]
    turns = first_turn()
    kept = turns.trajectory.record
    noisy = dataclasses.replace(kept, sigma=np.full(len(kept), 0.5, np.float32))  # drawn again from the record's seed
    turns.trajectory = dataclasses.replace(turns.trajectory, record=noisy)
    turns.go_on(prompt)
    assert turns.earlier(prompt).seed == turns.earlier(prompt).seed == 9, "the noise of earlier turns is the seed's"
    turns = first_turn(redrawn=True)
    turns.go_on(prompt)
    assert turns.earlier(prompt).seed == turns.earlier(prompt).seed == 9, "a density draws it again in the trainer"
    assert turns.repeats == 1, "by which an evaluation, without records, changes the request's seed"


def test_the_prefix_cache_is_counted_over_all_turns() -> None:
    """The second turn's prompt has nine tokens, of which the cache held four: 4 of 3 + 9, on both sides of the trip."""
    conversation, prompt = first_turn(), FIRST + ANSWER + TOOL
    conversation.go_on(prompt)
    conversation.add(taken([3], 9, [-0.5]), prompt, [14], cached=4)
    (kept,) = unpack([conversation.trajectory.pack()])
    assert (kept.prompted, kept.cached) == (12, 4)
    measures = step_metrics([kept], [np.full(10, -0.5)])
    assert measures["perturbation/prefix_hit_rate"] == pytest.approx(4 / 12)


def test_log_probabilities_of_changed_tokens_are_forgotten() -> None:
    conversation, prompt = first_turn(), [*FIRST, 10, 99, 12, 13, *TOOL]
    conversation.go_on(prompt)
    conversation.add(taken([3, 9], 9, [-0.5, -0.6]), prompt, [14, 15])
    log_probs = conversation.trajectory.log_probs
    assert np.isnan(log_probs[[0, 1, 2, 4, 5, 6, 7, 8]]).all()
    np.testing.assert_allclose(log_probs[[3, 9, 10]], [-0.1, -0.5, -0.6], rtol=1e-6)
    assert conversation.trajectory.record.positions.tolist() == [3, 9] and conversation.trajectory.dropped == 2


def test_the_response_carries_what_fits_its_tokens_and_the_log_counts_the_rest() -> None:
    ends = (FIRST + ANSWER + TOOL, [*FIRST, 10, 99, 12, 13])
    kept, fewer = unpack([first_turn().finished(tokens).pack() for tokens in ends])
    assert (len(kept.record), kept.dropped, len(fewer.record), fewer.dropped) == (3, 0, 1, 2)
    trainer = [np.full(7, -0.1)] * 2
    assert step_metrics([kept, fewer], trainer)["perturbation/dropped_edits"] == 2.0
    assert "perturbation/dropped_edits" not in step_metrics([kept], trainer[:1])
