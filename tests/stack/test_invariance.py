# SPDX-License-Identifier: Apache-2.0
"""A trajectory depends on its seed and its prompt alone: not on its batch, on chunks, caches or preemptions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ngrpo.rollout import set_perturbation
from ngrpo.trainers.common.sample_records import Conversation
from perturbations import FinishedTrajectory
from tests.stack import harness

NUMBERS = ", ".join(str(number) for number in range(60))
LONG = f"Here are some numbers: {NUMBERS}. Which of them are prime?"
QUESTIONS = ["What is 7 plus 5?", "Explain why the sky is blue.", LONG]
# Gumbel at rate 1 is in test_exactness.py alone. Its weights are a continuous function of the logits with gain
# 1/τ = 10, fed back at every position: rounding of another batch's matrix product grows tenfold every few positions.
PERTURBATIONS = [
    ("neighbor", {"rate": 0.3, "mix_temperature": 3.0}),
    ("gumbel", {"rate": 0.3}),
    ("gaussian", {"rate": 0.5}),
]


@pytest.fixture(scope="module")
def plain_engine(model: str) -> Iterator[Any]:
    """The reference for every disturbance: one whole prefill per prompt, no prefix caching, and room for all."""
    yield harness.build_engine(model, {"name": "gumbel"}, enable_prefix_caching=False, max_num_batched_tokens=4096)


def seeded(llm: Any, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[harness.Rollout]:
    arguments = [{"seed": seed} for seed in seeds]
    return harness.sample(llm, prompts, arguments, max_tokens=48)


@pytest.mark.parametrize(("name", "options"), PERTURBATIONS, ids=[name for name, _ in PERTURBATIONS])
def test_batch_order_size_chunks_and_cache(
    engine: Any, plain_engine: Any, hf_model: Any, name: str, options: dict[str, Any]
) -> None:
    for llm in (engine, plain_engine):
        set_perturbation(llm, name, **options)
    prompts = harness.chat_prompts(engine, QUESTIONS, copies=3)
    seeds = list(range(len(prompts)))
    together = seeded(plain_engine, prompts, seeds)

    reversed_batch = seeded(plain_engine, prompts[::-1], seeds[::-1])
    harness.assert_same(together, reversed_batch[::-1])

    alone = []
    for prompt, seed in zip(prompts[::4], seeds[::4]):
        alone += seeded(plain_engine, [prompt], [seed])
    harness.assert_same(together[::4], alone)

    # The shared engine computes the long prompt in chunks of 64 tokens, and finds prompts in its prefix cache.
    chunked = seeded(engine, prompts, seeds)
    harness.assert_same(together, chunked)
    assert harness.gaps(hf_model, chunked).max() <= 1e-4


def test_preemption_with_recomputation(model: str, plain_engine: Any, hf_model: Any) -> None:
    """A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records.

    The second perturbation's gate counts positions, and must go on from its count after a preemption.
    """
    small = harness.build_engine(model, {"name": "gumbel", "rate": 0.5}, **harness.CROWDED)
    preempted = harness.note_preemptions(small)
    prompts = harness.chat_prompts(small, QUESTIONS[:2], copies=4)
    seeds = list(range(len(prompts)))
    perturbations = {
        "gumbel": {"rate": 0.5},
        "soft": {"until": None, "gate": "tests.stack.own_perturbations:Rationed"},
    }
    for name, options in perturbations.items():
        for llm in (plain_engine, small):
            set_perturbation(llm, name, **options)
        preempted.clear()
        disturbed = seeded(small, prompts, seeds)
        assert len(preempted) >= 3, "the cache is not small enough for this test to show anything"

        undisturbed = seeded(plain_engine, prompts, seeds)
        harness.assert_same(undisturbed, disturbed)
        assert harness.gaps(hf_model, disturbed).max() <= 1e-4


@pytest.mark.more
def test_compiled_model_gives_the_eager_records(model: str, plain_engine: Any, hf_model: Any) -> None:
    spec = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}
    set_perturbation(plain_engine, **spec)
    compiled_engine = harness.build_engine(model, spec, enforce_eager=False, enable_prefix_caching=False)
    prompts = harness.chat_prompts(compiled_engine, QUESTIONS[:2], copies=4)
    seeds = list(range(len(prompts)))
    compiled = seeded(compiled_engine, prompts, seeds)
    eager = seeded(plain_engine, prompts, seeds)
    harness.assert_same(eager, compiled)
    assert harness.gaps(hf_model, compiled).max() <= 1e-4


def test_members_of_a_group_differ_and_a_run_repeats(plain_engine: Any) -> None:
    prompts = harness.chat_prompts(plain_engine, QUESTIONS[:1], copies=4)

    def run() -> list[harness.Rollout]:
        set_perturbation(plain_engine, "neighbor", rate=0.3, seed=5)
        return harness.sample(plain_engine, prompts, max_tokens=24)

    first = run()
    second = run()
    assert len({tuple(rollout.tokens) for rollout in first}) == 4
    assert len({rollout.record.seed for rollout in first}) == 4
    assert [rollout.tokens for rollout in first] == [rollout.tokens for rollout in second]


def take_turn(llm: Any, conversation: Conversation, prompt: list[int]) -> harness.Rollout:
    """A turn as the trainer takes it: with the record of the turns before it, and added to the conversation."""
    conversation.drop_changed(prompt)
    arguments = None
    if conversation.trajectory is not None:
        arguments = [{"record": conversation.trajectory.record.to_bytes()}]
    (rollout,) = harness.sample(llm, [prompt], arguments, max_tokens=16)
    trajectory = FinishedTrajectory(rollout.record, rollout.log_probs)
    conversation.add(trajectory.pack(), prompt, rollout.tokens)
    return rollout


def test_three_turns_and_a_template_that_strips_the_first(plain_engine: Any, hf_model: Any) -> None:
    """Tool text stands between the turns; before the third, half of the first answer is taken out of the prompt.

    Edits behind the cut belong to other tokens now: they are dropped and counted, and what is left is exact.
    """
    set_perturbation(plain_engine, "neighbor", rate=0.5, mix_temperature=3.0)
    tool_text = plain_engine.get_tokenizer().encode("\nThe tool says 7. Go on.")
    (prompt,) = harness.chat_prompts(plain_engine, QUESTIONS[:1])
    answer_start = len(prompt)
    cut_start = answer_start + 8
    answer_end = answer_start + 16
    conversation = Conversation({})

    first = take_turn(plain_engine, conversation, prompt)
    assert harness.gaps(hf_model, [first]).max() <= 1e-4

    second = take_turn(plain_engine, conversation, first.sequence + tool_text)
    assert harness.gaps(hf_model, [second]).max() <= 1e-4
    assert second.record.seed == first.record.seed
    edits_of_first = second.record.truncate(answer_end)
    assert edits_of_first.positions.tolist() == first.record.positions.tolist()
    assert not conversation.trajectory.dropped
    with_first_record = replace(second, record=first.record)
    assert harness.gaps(hf_model, [with_first_record]).max() > 1e-3, "leaving the second turn's edits out must show"

    third_prompt = second.sequence + tool_text
    del third_prompt[cut_start:answer_end]
    third = take_turn(plain_engine, conversation, third_prompt)
    assert harness.gaps(hf_model, [third]).max() <= 1e-4
    trajectory = conversation.trajectory
    kept = second.record.truncate(cut_start)
    assert len(kept) > 0
    assert trajectory.dropped == len(second.record) - len(kept)
    assert trajectory.dropped > 0
    assert trajectory.record.positions[: len(kept)].tolist() == kept.positions.tolist()
    assert trajectory.record.positions[len(kept)] >= len(third.prompt)
    with_joined_record = replace(third, record=trajectory.record)
    assert harness.gaps(hf_model, [with_joined_record]).max() <= 1e-4


def test_no_perturbation_is_stock_vllm(model: str) -> None:
    """Tokens and log-probabilities are identical to those of an engine without our configuration."""
    stock = harness.build_engine(model, None)
    rate_0 = harness.build_engine(model, {"name": "neighbor", "rate": 0.0})
    prompts = harness.chat_prompts(stock, QUESTIONS[:2], copies=2)
    expected = harness.stock_answers(stock, prompts, max_tokens=24)
    assert harness.stock_answers(rate_0, prompts, max_tokens=24) == expected
