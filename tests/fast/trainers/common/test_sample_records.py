# SPDX-License-Identifier: Apache-2.0
"""Conversations: what was recorded of earlier turns stays where their tokens stayed, and nowhere else."""

import dataclasses

import numpy as np
import pytest

from ngrpo.trainers.common.mismatch import step_metrics
from ngrpo.trainers.common.sample_records import Conversation, unpack
from perturbations import FinishedTrajectory, ReplayRecord

FIRST = [1, 2, 3]
RESPONSE = [10, 11, 12, 13]
TOOL = [7, 7]


def record(positions: list[int], prompt: int, tokens: int) -> ReplayRecord:
    """A record whose inputs at ``positions`` are token 5."""
    shape = (len(positions), 1)
    return ReplayRecord(
        seed=9,
        prompt_tokens=prompt,
        num_tokens=tokens,
        positions=np.array(positions, np.int32),
        ids=np.full(shape, 5, np.int32),
        weights=np.ones(shape, np.float32),
        sigma=None,
        agreed=np.ones(len(positions), bool),
    )


def packed(positions: list[int], prompt: int, log_probs: list[float]) -> dict[str, bytes]:
    """What a turn's request hands over: the record, and the log-probabilities of its response."""
    own_record = record(positions, prompt, prompt + len(log_probs))
    return FinishedTrajectory(own_record, np.array(log_probs, np.float32)).pack()


def first_turn(*, redrawn: bool = False) -> Conversation:
    """Prompt of 3 tokens, response of 4, edits at positions 3, 4 and 6."""
    conversation = Conversation({}, redrawn=redrawn)
    conversation.drop_changed(FIRST)
    conversation.add(packed([3, 4, 6], 3, [-0.1, -0.2, -0.3, -0.4]), FIRST, RESPONSE)
    return conversation


@pytest.mark.parametrize(
    ("prompt", "positions", "dropped"),
    [
        pytest.param(FIRST + RESPONSE + TOOL, [3, 4, 6], 0, id="the next turn"),
        pytest.param(FIRST + RESPONSE, [3, 4, 6], 0, id="nothing added"),
        pytest.param(FIRST + RESPONSE[:3] + TOOL, [3, 4], 1, id="the last token is gone"),
        pytest.param(
            [*FIRST, 10, 99, 12, 13, *TOOL], [3], 2, id="token 4 is another: its edit goes, and those behind it"
        ),
        pytest.param(FIRST + RESPONSE[1:] + TOOL, [], 3, id="a stripped token moves all that follow"),
        pytest.param([8, *FIRST[1:], *RESPONSE], [], 3, id="another first token"),
    ],
)
def test_an_edit_stays_where_its_tokens_stayed(prompt: list[int], positions: list[int], dropped: int) -> None:
    conversation = first_turn()
    conversation.drop_changed(prompt)
    assert conversation.trajectory.record.positions.tolist() == positions
    assert conversation.trajectory.dropped == dropped


def test_a_prompt_that_is_sampled_again_has_other_draws() -> None:
    """The second and the third attempt at the first prompt; a template's next turn is no second attempt."""
    conversation = Conversation({})
    conversation.drop_changed(FIRST)
    assert conversation.begin_request(FIRST) is None
    conversation.add(packed([3, 4, 6], 3, [-0.1, -0.2, -0.3, -0.4]), FIRST, RESPONSE)

    attempts = []
    for prompt in (FIRST, FIRST, FIRST + RESPONSE):
        conversation.drop_changed(prompt)
        attempts.append(conversation.begin_request(prompt).seed)

    second, third, _ = attempts
    assert len({9, second, third}) == 3


NEXT_PROMPT = FIRST + RESPONSE + TOOL


def test_a_later_turn_that_is_sampled_again_keeps_its_replayed_edits() -> None:
    conversation = first_turn()
    conversation.drop_changed(NEXT_PROMPT)
    first_attempt = conversation.begin_request(NEXT_PROMPT)
    second_attempt = conversation.begin_request(NEXT_PROMPT)
    assert first_attempt.seed == 9
    assert second_attempt.seed != 9
    assert second_attempt.positions.tolist() == [3, 4, 6]


def test_noise_of_earlier_turns_keeps_the_seed() -> None:
    """The noise is drawn again from the record's seed."""
    conversation = first_turn()
    earlier = conversation.trajectory.record
    noisy = dataclasses.replace(earlier, sigma=np.full(len(earlier), 0.5, np.float32))
    conversation.trajectory = dataclasses.replace(conversation.trajectory, record=noisy)
    conversation.drop_changed(NEXT_PROMPT)
    assert conversation.begin_request(NEXT_PROMPT).seed == 9
    assert conversation.begin_request(NEXT_PROMPT).seed == 9


def test_a_density_that_is_drawn_again_in_the_trainer_keeps_the_seed() -> None:
    conversation = first_turn(redrawn=True)
    conversation.drop_changed(NEXT_PROMPT)
    assert conversation.begin_request(NEXT_PROMPT).seed == 9
    assert conversation.begin_request(NEXT_PROMPT).seed == 9
    assert conversation.repeats == 1, "by which an evaluation, without records, changes the request's seed"


def test_the_prefix_cache_is_counted_over_all_turns() -> None:
    """The second turn's prompt has nine tokens, of which the cache held four: 4 of 3 + 9, on both sides of the trip."""
    conversation = first_turn()
    conversation.drop_changed(NEXT_PROMPT)
    conversation.add(packed([3], 9, [-0.5]), NEXT_PROMPT, [14], cached=4)

    (received,) = unpack([conversation.trajectory.pack()])

    assert received.prompted == 12
    assert received.cached == 4
    measures = step_metrics([received], [np.full(10, -0.5)])
    assert measures["perturbation/prefix_hit_rate"] == pytest.approx(4 / 12)


def test_log_probabilities_of_changed_tokens_are_forgotten() -> None:
    """Token 4 has become 99; the second response is at positions 9 and 10."""
    conversation = first_turn()
    prompt = [*FIRST, 10, 99, 12, 13, *TOOL]
    conversation.drop_changed(prompt)
    conversation.add(packed([3, 9], 9, [-0.5, -0.6]), prompt, [14, 15])

    log_probs = conversation.trajectory.log_probs
    assert np.isnan(log_probs[[0, 1, 2, 4, 5, 6, 7, 8]]).all()
    np.testing.assert_allclose(log_probs[[3, 9, 10]], [-0.1, -0.5, -0.6], rtol=1e-6)
    assert conversation.trajectory.record.positions.tolist() == [3, 9]
    assert conversation.trajectory.dropped == 2


def test_the_response_carries_what_fits_its_tokens_and_the_log_counts_the_rest() -> None:
    same_tokens = first_turn().finished(NEXT_PROMPT)
    other_tokens = first_turn().finished([*FIRST, 10, 99, 12, 13])
    complete, fewer = unpack([same_tokens.pack(), other_tokens.pack()])
    assert len(complete.record) == 3
    assert complete.dropped == 0
    assert len(fewer.record) == 1
    assert fewer.dropped == 2

    trainer = np.full(7, -0.1)
    assert step_metrics([complete, fewer], [trainer, trainer])["perturbation/dropped_edits"] == 2.0
    assert "perturbation/dropped_edits" not in step_metrics([complete], [trainer])
