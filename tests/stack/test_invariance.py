# SPDX-License-Identifier: Apache-2.0
"""A trajectory depends on its seed and its prompt alone: not on its batch, on chunks, caches or preemptions."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ngrpo.rollout import set_perturbation
from ngrpo.trainers.common.sample_records import Conversation
from perturbations import FinishedTrajectory
from tests.stack import harness

LONG = "Here are some numbers: " + ", ".join(str(n) for n in range(60)) + ". Which of them are prime?"
QUESTIONS = ["What is 7 plus 5?", "Explain why the sky is blue.", LONG]
# Gumbel at rate 1 is left to test_exactness: its weights are a continuous function of the logits with gain 1/τ = 10,
# fed back at every position, so the rounding of another batch's matrix product grows tenfold every few positions.
PERTURBATIONS = [
    ("neighbor", {"rate": 0.3, "mix_temperature": 3.0}),
    ("gumbel", {"rate": 0.3}),
    ("gaussian", {"rate": 0.5}),
]


@pytest.fixture(scope="module")
def plain_engine(model: str) -> Iterator[Any]:
    """One whole prefill per prompt, no prefix caching, room for all: the reference for every disturbance."""
    yield harness.build_engine(model, {"name": "gumbel"}, enable_prefix_caching=False, max_num_batched_tokens=4096)


def seeded(llm: Any, prompts: Sequence[list[int]], seeds: Sequence[int], **params: Any) -> list[harness.Rollout]:
    return harness.sample(llm, prompts, [{"seed": s} for s in seeds], max_tokens=48, **params)


@pytest.mark.parametrize(("name", "options"), PERTURBATIONS, ids=[name for name, _ in PERTURBATIONS])
def test_batch_order_size_chunks_and_cache(
    engine: Any, plain_engine: Any, hf_model: Any, name: str, options: dict[str, Any]
) -> None:
    for llm in (engine, plain_engine):
        set_perturbation(llm, name, **options)
    prompts = harness.chat_prompts(engine, QUESTIONS, copies=3)
    seeds = list(range(len(prompts)))
    together = seeded(plain_engine, prompts, seeds)
    harness.assert_same(together, seeded(plain_engine, prompts[::-1], seeds[::-1])[::-1])
    harness.assert_same(together[::4], [seeded(plain_engine, [prompts[i]], [seeds[i]])[0] for i in seeds[::4]])
    # The shared engine computes the long prompt in chunks of 64 tokens, and finds prompts in its prefix cache.
    chunked = seeded(engine, prompts, seeds)
    harness.assert_same(together, chunked)
    assert harness.gaps(hf_model, chunked).max() <= 1e-4


def test_preemption_with_recomputation(model: str, plain_engine: Any, hf_model: Any) -> None:
    """A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records.

    The second one has a gate that counts.
    """
    small = harness.build_engine(model, {"name": "gumbel", "rate": 0.5}, **harness.CROWDED)
    preempted = harness.note_preemptions(small)
    prompts = harness.chat_prompts(small, QUESTIONS[:2], copies=4)
    seeds = list(range(len(prompts)))
    counting = {"until": None, "gate": "tests.stack.own_perturbations:Rationed"}
    for name, options in (("gumbel", {"rate": 0.5}), ("soft", counting)):
        for llm in (plain_engine, small):
            set_perturbation(llm, name, **options)
        preempted.clear()
        disturbed = seeded(small, prompts, seeds)
        assert len(preempted) >= 3, "the cache is not small enough for this test to show anything"
        harness.assert_same(seeded(plain_engine, prompts, seeds), disturbed)
        assert harness.gaps(hf_model, disturbed).max() <= 1e-4


@pytest.mark.more
def test_compiled_model_gives_the_eager_records(model: str, plain_engine: Any, hf_model: Any) -> None:
    set_perturbation(plain_engine, "neighbor", rate=0.5, mix_temperature=3.0)
    spec = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}
    compiled = harness.build_engine(model, spec, enforce_eager=False, enable_prefix_caching=False)
    prompts = harness.chat_prompts(compiled, QUESTIONS[:2], copies=4)
    seeds = list(range(len(prompts)))
    rollouts = seeded(compiled, prompts, seeds)
    harness.assert_same(seeded(plain_engine, prompts, seeds), rollouts)
    assert harness.gaps(hf_model, rollouts).max() <= 1e-4


def test_members_of_a_group_differ_and_a_run_repeats(plain_engine: Any) -> None:
    prompts = harness.chat_prompts(plain_engine, QUESTIONS[:1], copies=4)
    runs = []
    for _ in range(2):
        set_perturbation(plain_engine, "neighbor", rate=0.3, seed=5)
        runs.append(harness.sample(plain_engine, prompts, max_tokens=24))
    assert len({tuple(r.tokens) for r in runs[0]}) == 4
    assert len({r.record.seed for r in runs[0]}) == 4
    assert [r.tokens for r in runs[0]] == [r.tokens for r in runs[1]]


def test_three_turns_and_a_template_that_strips_the_first(plain_engine: Any, hf_model: Any) -> None:
    """Tool text stands between the turns; before the third, half of the first answer is taken out of the prompt.

    Edits behind the cut belong to other tokens now: they are dropped and counted, and what is left is exact.
    """
    set_perturbation(plain_engine, "neighbor", rate=0.5, mix_temperature=3.0)
    encode = plain_engine.get_tokenizer().encode
    (prompt,) = harness.chat_prompts(plain_engine, QUESTIONS[:1])
    first_prompt, conversation = len(prompt), Conversation({})
    for turn in range(3):
        if turn == 2:
            del prompt[first_prompt + 8 : first_prompt + 16]
        conversation.go_on(prompt)
        before = None if conversation.trajectory is None else conversation.trajectory.record
        given = [{"record": before.to_bytes()}] if before is not None else None
        (rollout,) = harness.sample(plain_engine, [prompt], given, max_tokens=16)
        conversation.add(FinishedTrajectory(rollout.record, rollout.log_probs).pack(), prompt, rollout.tokens)
        assert harness.gaps(hf_model, [rollout]).max() <= 1e-4
        if turn == 0:
            first = rollout.record
        elif turn == 1:
            kept = rollout.record.truncate(first_prompt + 16)
            assert kept.positions.tolist() == first.positions.tolist() and not conversation.trajectory.dropped
            forgotten = harness.Rollout(rollout.prompt, rollout.tokens, first, rollout.log_probs, [])
            assert harness.gaps(hf_model, [forgotten]).max() > 1e-3 and rollout.record.seed == first.seed
            second = rollout.record
        prompt = rollout.sequence + encode("\nThe tool says 7. Go on.")
    record = conversation.trajectory.record
    early = second.truncate(first_prompt + 8)
    assert len(early) and conversation.trajectory.dropped == len(second) - len(early) > 0
    assert record.positions[: len(early)].tolist() == early.positions.tolist()
    assert record.positions[len(early)] >= len(rollout.prompt)
    everything = harness.Rollout(rollout.prompt, rollout.tokens, record, rollout.log_probs, [])
    assert harness.gaps(hf_model, [everything]).max() <= 1e-4


def test_no_perturbation_is_stock_vllm(model: str) -> None:
    """Tokens and log-probabilities identical to an engine that never heard of us."""
    stock, rate_0 = (harness.build_engine(model, spec) for spec in (None, {"name": "neighbor", "rate": 0.0}))
    prompts = harness.chat_prompts(stock, QUESTIONS[:2], copies=2)
    assert harness.stock_answers(stock, prompts, max_tokens=24) == harness.stock_answers(rate_0, prompts, max_tokens=24)
