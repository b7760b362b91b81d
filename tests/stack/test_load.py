# SPDX-License-Identifier: Apache-2.0
"""A rollout under load: a cache far too small, tiny prefill chunks, aborts, syncs and resets while requests run."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import set_perturbation, take_trajectories
from ngrpo.trainers.common.weights_file import reload_weights
from perturbations.neighbors.refresh import Neighborhood
from tests.stack import harness
from tests.stack.as_on_cuda import asynchronous

NEIGHBOR = {"name": "neighbor", "rate": 0.3, "mix_temperature": 3.0}
LENGTH = 512
STORY = "Once upon a time there was a fox who counted the stars, " * 40


@pytest.fixture(scope="module", params=["synchronous", pytest.param("asynchronous", marks=pytest.mark.slow)])
def crowded(model: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """17 blocks of 32 tokens for up to 16 sequences of up to 512, and 32 tokens a step."""
    cache = {"num_gpu_blocks_override": 17, "block_size": 32, "enable_prefix_caching": True}
    chunks = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    scheduling = contextlib.nullcontext()
    if request.param == "asynchronous":
        scheduling = asynchronous()
    with scheduling:
        llm = harness.build_engine(model, NEIGHBOR, max_model_len=LENGTH, **cache, **chunks)
    llm.preempted = harness.note_preemptions(llm)
    yield llm


def assert_nothing_is_left(llm: Any) -> None:
    llm.llm_engine.step()  # the scheduler names finished requests in the step after their last
    requests = harness.worker_of(llm).perturbation.requests
    assert not requests._store.live
    assert not requests._without_claim
    assert not requests._buffer.names()


def add(llm: Any, prompts: Sequence[list[int]], **params: Any) -> None:
    """Adds requests whose names are their numbers."""
    from vllm import SamplingParams

    settings = {"max_tokens": 24, "ignore_eos": True, **params}
    for number, prompt in enumerate(prompts):
        tokens = {"prompt_token_ids": list(prompt)}
        llm.llm_engine.add_request(str(number), tokens, SamplingParams(**settings))


def finish(llm: Any, after_step: Callable[[int, dict], object] | None = None) -> dict[str, Any]:
    """Runs the engine until no request is left.

    Args:
        llm: the engine.
        after_step: called after each step with the number of steps so far, and the final outputs so far.

    Returns:
        The final outputs, by the request's name.
    """
    finished: dict[str, Any] = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = output
        steps += 1
        if after_step is not None:
            after_step(steps, finished)
    return finished


def rollouts_of(llm: Any, finished: dict[str, Any]) -> list[harness.Rollout]:
    """The rollouts of final outputs. Exactly these requests, and no aborted one, must have left a trajectory."""
    trajectories = take_trajectories(llm)
    assert set(trajectories) == set(finished)
    rollouts = []
    for name, output in finished.items():
        record, log_probs = trajectories[name]
        rollout = harness.Rollout(
            prompt=list(output.prompt_token_ids),
            tokens=list(output.outputs[0].token_ids),
            record=record,
            log_probs=log_probs,
            engine_log_probs=[],
        )
        rollouts.append(rollout)
    return rollouts


@pytest.fixture(autouse=True)
def _a_test_that_failed_leaves_nothing(crowded: Any) -> Iterator[None]:
    yield
    names = [str(number) for number in range(64)]
    crowded.llm_engine.abort_request([*names, "parent"])
    finish(crowded)
    take_trajectories(crowded)


class Aborts:
    """Aborts one request after every eighth step, unless that request has finished by then."""

    def __init__(self, llm: Any, numbers: list[int]) -> None:
        self._llm = llm
        self._numbers = numbers

    def __call__(self, step: int, finished: dict[str, Any]) -> None:
        if not self._numbers or step % 8 != 0:
            return
        name = str(self._numbers.pop())
        if name not in finished:
            self._llm.llm_engine.abort_request([name])


@pytest.mark.parametrize(
    ("rounds", "requests", "longest", "preemptions"),
    [(1, 32, 60, 10), pytest.param(4, 64, 400, 100, marks=pytest.mark.slow)],
)
def test_mixed_lengths_preemptions_and_aborts(
    crowded: Any, hf_model: Any, rounds: int, requests: int, longest: int, preemptions: int
) -> None:
    """Prompts have 3 to ``longest`` tokens, and a quarter of the requests is aborted at random steps.

    The prompts are real text: on random tokens the two engines differ by 5e-4 without any perturbation.
    """
    set_perturbation(crowded, **NEIGHBOR)
    crowded.preempted.clear()
    (text,) = harness.chat_prompts(crowded, [STORY])
    lengths = np.geomspace(3, longest, requests).astype(int)
    for round_ in range(rounds):
        draws = np.random.default_rng(round_)
        prompts = [[*text[: length - 1], int(draws.integers(1000, 2000))] for length in lengths]
        aborted = draws.permutation(requests)[: requests // 4].tolist()

        add(crowded, prompts, max_tokens=48)
        finished = finish(crowded, Aborts(crowded, aborted))
        assert requests * 3 // 4 <= len(finished) < requests

        rollouts = rollouts_of(crowded, finished)
        assert sum(len(rollout.record) for rollout in rollouts) > requests
        rollouts.sort(key=lambda rollout: len(rollout.sequence))  # those of like lengths share a forward
        for start in range(0, len(rollouts), 8):
            assert harness.gaps(hf_model, rollouts[start : start + 8]).max() <= 1e-4
        assert_nothing_is_left(crowded)
    assert len(crowded.preempted) >= preemptions, "the cache is not small enough for this test to show anything"


def test_the_cache_is_hit_within_prompts_only(crowded: Any, hf_model: Any) -> None:
    """The prompt comes again, then with the first trajectory's answer behind it: only the prompt may be cached."""
    set_perturbation(crowded, "neighbor", rate=1.0, mix_temperature=3.0)
    (prompt,) = harness.chat_prompts(crowded, ["Name the planets, " * 12])
    (first,) = harness.sample(crowded, [prompt], max_tokens=40)
    in_full_blocks = len(prompt) // 32 * 32
    for tokens in (prompt, first.sequence):
        add(crowded, [tokens], max_tokens=8)
        finished = finish(crowded)
        (rollout,) = rollouts_of(crowded, finished)
        cached = finished["0"].num_cached_tokens
        assert 0 < cached <= in_full_blocks, "blocks with perturbed inputs belong to one trajectory"
        assert harness.gaps(hf_model, [rollout]).max() <= 1e-4


def test_prompts_in_chunks_of_one_token(crowded: Any, hf_model: Any) -> None:
    set_perturbation(crowded, "neighbor", rate=0.5, mix_temperature=3.0)
    reset(crowded)  # a prompt that is in the cache is not computed at all
    with harness.one_token_prefills(crowded) as scheduled_tokens:
        add(crowded, harness.chat_prompts(crowded), max_tokens=12)
        rollouts = rollouts_of(crowded, finish(crowded))
    assert max(scheduled_tokens) == 1
    assert len(scheduled_tokens) >= sum(len(rollout.prompt) for rollout in rollouts)
    assert sum(len(rollout.record) for rollout in rollouts) >= 10
    assert harness.gaps(hf_model, rollouts).max() <= 1e-4
    assert_nothing_is_left(crowded)


def test_aborting_a_parent_drops_the_records_of_its_samples(crowded: Any) -> None:
    from vllm import SamplingParams

    set_perturbation(crowded, "gumbel")
    (prompt,) = harness.chat_prompts(crowded)[:1]
    params = SamplingParams(n=4, max_tokens=30)
    crowded.llm_engine.add_request("parent", {"prompt_token_ids": prompt}, params)
    steps = 0
    # A step computes at most 32 tokens of their prompts, beyond those that are cached.
    while harness.worker_of(crowded).perturbation.requests.running < 4:
        crowded.llm_engine.step()
        steps += 1
        assert steps < 20, "the samples of a parent do not run together"
    crowded.llm_engine.abort_request(["parent"])
    finish(crowded)
    assert_nothing_is_left(crowded)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_length_limit_on_a_perturbed_position(crowded: Any, hf_model: Any, room: int) -> None:
    """The answer ends where the model's length does; the edit of a position beyond it is never recorded."""
    set_perturbation(crowded, "gumbel", rate=1.0)
    (text,) = harness.chat_prompts(crowded, ["Count to a thousand. " * 120])
    add(crowded, [text[: LENGTH - room]], max_tokens=64)
    (rollout,) = rollouts_of(crowded, finish(crowded))
    assert len(rollout.tokens) == room
    assert rollout.record.positions.tolist() == list(range(LENGTH - room, LENGTH))
    assert harness.gaps(hf_model, [rollout]).max() <= 1e-4


def sync(llm: Any, weights: dict[str, torch.Tensor]) -> None:
    """Loads weights as OpenRLHF does after an update, and empties the cache, which was computed with the old ones."""
    reload_weights(harness.worker_of(llm).model_runner, weights.items())
    reset(llm)


def reset(llm: Any) -> None:
    """Throws out all running requests and the cache: everything is computed again."""
    assert harness.scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)


def test_a_weight_sync_while_requests_run(crowded: Any, hf_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running requests are computed again: edits after the sync are of the new weights, and so is the replay."""
    set_perturbation(crowded, "neighbor", rate=0.5, mix_temperature=3.0, realization="sampled")
    add(crowded, harness.chat_prompts(crowded))
    for _ in range(12):
        crowded.llm_engine.step()
    old_weights = {name: parameter.detach().clone() for name, parameter in hf_model.named_parameters()}
    build_index = Neighborhood._built
    built = []

    def build_and_note(self: Neighborhood) -> Any:
        built.append(self)
        return build_index(self)

    monkeypatch.setattr(Neighborhood, "_built", build_and_note)
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.no_grad():
            for parameter in hf_model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.02 * parameter.std() * noise
        sync(crowded, dict(hf_model.named_parameters()))
        rollouts = rollouts_of(crowded, finish(crowded))
        assert len(built) == 1, "one sync is one new index"

        # The first tokens of each answer were drawn by the old weights, and its last ones by the new weights.
        gaps_by_answer = [harness.gaps(hf_model, [rollout]) for rollout in rollouts]
        of_old_weights = torch.cat([gaps[:8] for gaps in gaps_by_answer])
        of_new_weights = torch.cat([gaps[-8:] for gaps in gaps_by_answer])
        assert of_new_weights.max() <= 1e-4
        assert of_old_weights.max() > 1e-2
    finally:
        hf_model.load_state_dict(old_weights, strict=False)
        sync(crowded, old_weights)


def find(pattern: list[int], tokens: list[int]) -> int | None:
    """Where the pattern begins in the tokens for the first time; None if it does not occur."""
    for start in range(len(tokens) - len(pattern) + 1):
        if tokens[start : start + len(pattern)] == pattern:
            return start
    return None


def test_a_reset_while_the_end_of_thinking_is_matched(crowded: Any, hf_model: Any) -> None:
    """`until` has several tokens, and every third step is followed by a reset: a token that is computed again must not
    be matched twice.
    """
    text = "0 0 0"
    set_perturbation(crowded, "neighbor", rate=1.0, mix_temperature=3.0, until=text)
    end = crowded.get_tokenizer().encode(text, add_special_tokens=False)
    assert len(end) > 2
    allowed = sorted(set(end))
    add(crowded, harness.chat_prompts(crowded)[2:], max_tokens=16, allowed_token_ids=allowed)

    def reset_after_every_third(step: int, finished: dict[str, Any]) -> None:
        if step % 3 == 0:
            reset(crowded)

    finished = finish(crowded, reset_after_every_third)
    answers_with_text = 0
    for rollout in rollouts_of(crowded, finished):
        last_perturbed = len(rollout.sequence) - 1
        text_start = find(end, rollout.tokens)
        if text_start is not None:
            answers_with_text += 1
            last_perturbed = len(rollout.prompt) + text_start + len(end) - 1
        assert (rollout.record.positions <= last_perturbed).all()
        # The engine's log-probabilities are normalised over the allowed tokens.
        (replayed,) = harness.replay_log_probs(hf_model, [rollout], among=allowed)
        gap = replayed - torch.from_numpy(rollout.log_probs.copy())
        assert gap.abs().max() <= 1e-4
    assert answers_with_text, "no answer had the text, so this test shows nothing"
