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
    with asynchronous() if request.param == "asynchronous" else contextlib.nullcontext():
        llm = harness.build_engine(model, NEIGHBOR, max_model_len=LENGTH, **cache, **chunks)
    llm.preempted = harness.note_preemptions(llm)
    yield llm


def assert_nothing_is_left(llm: Any) -> None:
    llm.llm_engine.step()  # the scheduler tells of finished requests with the next step
    books = harness.worker_of(llm).perturbation.requests
    assert not books._store.live and not books._dropped and not books._buffer.names()


def add(llm: Any, prompts: Sequence[list[int]], **params: Any) -> None:
    """Requests that are named by their numbers."""
    from vllm import SamplingParams

    params = {"max_tokens": 24, "ignore_eos": True, **params}
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, SamplingParams(**params))


def finish(llm: Any, after_step: Callable[[int, dict], object] = lambda step, done: None) -> dict[str, Any]:
    """Runs what is left; final outputs by name."""
    done: dict[str, Any] = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        steps += 1
        after_step(steps, done)
    return done


def rollouts_of(llm: Any, done: dict[str, Any]) -> list[harness.Rollout]:
    taken = take_trajectories(llm)
    assert set(taken) == set(done)
    return [
        harness.Rollout(list(output.prompt_token_ids), list(output.outputs[0].token_ids), *taken[name], [])
        for name, output in done.items()
    ]


@pytest.fixture(autouse=True)
def _a_test_that_failed_leaves_nothing(crowded: Any) -> Iterator[None]:
    yield
    names = [str(number) for number in range(64)]
    crowded.llm_engine.abort_request([*names, "parent"])
    finish(crowded)
    take_trajectories(crowded)


@pytest.mark.parametrize(
    ("rounds", "requests", "longest", "least"), [(1, 32, 60, 10), pytest.param(4, 64, 400, 100, marks=pytest.mark.slow)]
)
def test_mixed_lengths_preemptions_and_aborts(
    crowded: Any, hf_model: Any, rounds: int, requests: int, longest: int, least: int
) -> None:
    """Prompts of 3 tokens and more, a quarter of them aborted at random steps.

    Of real text: on random tokens the two engines differ by 5e-4 without any perturbation.
    """
    set_perturbation(crowded, **NEIGHBOR)
    crowded.preempted.clear()
    (text,) = harness.chat_prompts(crowded, [STORY])
    for round_ in range(rounds):
        draws = np.random.default_rng(round_)
        lengths = np.geomspace(3, longest, requests).astype(int)
        prompts = [[*text[: n - 1], int(draws.integers(1000, 2000))] for n in lengths]
        aborted = draws.permutation(requests)[: requests // 4].tolist()

        def abort_one(step: int, done: dict[str, Any], waiting: list[int] = aborted) -> None:
            if waiting and step % 8 == 0 and (name := str(waiting.pop())) not in done:
                crowded.llm_engine.abort_request([name])

        add(crowded, prompts, max_tokens=48)
        done = finish(crowded, abort_one)
        assert requests * 3 // 4 <= len(done) < requests
        rollouts = rollouts_of(crowded, done)
        assert sum(len(r.record) for r in rollouts) > requests
        rollouts.sort(key=lambda r: len(r.sequence))  # alike lengths share a forward
        for i in range(0, len(rollouts), 8):
            assert harness.gaps(hf_model, rollouts[i : i + 8]).max() <= 1e-4
        assert_nothing_is_left(crowded)
    assert len(crowded.preempted) >= least, "the cache is not small enough for this test to show anything"


def test_the_cache_is_hit_within_prompts_only(crowded: Any, hf_model: Any) -> None:
    """The same prompt again, and a prompt that goes on with another trajectory's tokens."""
    set_perturbation(crowded, "neighbor", rate=1.0, mix_temperature=3.0)
    (prompt,) = harness.chat_prompts(crowded, ["Name the planets, " * 12])
    (first,) = harness.sample(crowded, [prompt], max_tokens=40)
    whole = len(prompt) // 32 * 32
    for again, hits in ((prompt, whole), (first.sequence, whole)):
        add(crowded, [again], max_tokens=8)
        done = finish(crowded)
        (rollout,) = rollouts_of(crowded, done)
        assert 0 < done["0"].num_cached_tokens <= hits, "blocks with perturbed inputs belong to one trajectory"
        assert harness.gaps(hf_model, [rollout]).max() <= 1e-4


def test_prompts_in_chunks_of_one_token(crowded: Any, hf_model: Any) -> None:
    set_perturbation(crowded, "neighbor", rate=0.5, mix_temperature=3.0)
    reset(crowded)  # a prompt that is in the cache is not computed at all
    with harness.one_token_prefills(crowded) as given:
        add(crowded, harness.chat_prompts(crowded), max_tokens=12)
        rollouts = rollouts_of(crowded, finish(crowded))
    assert max(given) == 1 and len(given) >= sum(len(r.prompt) for r in rollouts)
    assert sum(len(r.record) for r in rollouts) >= 10
    assert harness.gaps(hf_model, rollouts).max() <= 1e-4
    assert_nothing_is_left(crowded)


def test_aborting_a_parent_drops_the_records_of_its_samples(crowded: Any) -> None:
    from vllm import SamplingParams

    set_perturbation(crowded, "gumbel")
    (prompt,) = harness.chat_prompts(crowded)[:1]
    crowded.llm_engine.add_request("parent", {"prompt_token_ids": prompt}, SamplingParams(n=4, max_tokens=30))
    steps = 0
    # A step takes 32 tokens of their prompts, less what is cached.
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
    prompt = (harness.chat_prompts(crowded, ["Count to a thousand. " * 120])[0])[: LENGTH - room]
    add(crowded, [prompt], max_tokens=64)
    (rollout,) = rollouts_of(crowded, finish(crowded))
    assert len(rollout.tokens) == room
    assert rollout.record.positions.tolist() == list(range(LENGTH - room, LENGTH))
    assert harness.gaps(hf_model, [rollout]).max() <= 1e-4


def sync(llm: Any, weights: dict[str, torch.Tensor]) -> None:
    """As OpenRLHF does after an update: the weights, and a cache that holds nothing of the old ones."""
    reload_weights(harness.worker_of(llm).model_runner, weights.items())
    reset(llm)


def reset(llm: Any) -> None:
    """Throws out all running requests and the cache: everything is computed again."""
    assert harness.scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)


def test_a_weight_sync_while_requests_run(crowded: Any, hf_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it the requests are computed again: the edits are of the new weights, and so is the replay."""
    set_perturbation(crowded, "neighbor", rate=0.5, mix_temperature=3.0, realization="sampled")
    add(crowded, harness.chat_prompts(crowded))
    for _ in range(12):
        crowded.llm_engine.step()
    before = {name: p.detach().clone() for name, p in hf_model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    built, original = [], Neighborhood._built

    def build(self: Neighborhood) -> Any:
        built.append(self)
        return original(self)

    monkeypatch.setattr(Neighborhood, "_built", build)
    try:
        with torch.no_grad():
            for parameter in hf_model.parameters():
                parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        sync(crowded, dict(hf_model.named_parameters()))
        rollouts = rollouts_of(crowded, finish(crowded))
        assert len(built) == 1, "one sync is one new index"
        gap = [harness.gaps(hf_model, [rollout]) for rollout in rollouts]
        # The last tokens of each answer are drawn by the new weights, the first ones were by the old weights.
        assert torch.cat([of_answer[-8:] for of_answer in gap]).max() <= 1e-4
        assert torch.cat([of_answer[:8] for of_answer in gap]).max() > 1e-2
    finally:
        hf_model.load_state_dict(before, strict=False)
        sync(crowded, before)


def test_a_reset_while_the_end_of_thinking_is_matched(crowded: Any, hf_model: Any) -> None:
    """`until` of several tokens, and a reset at every third step: a token that comes again is not seen twice."""
    text = "0 0 0"
    set_perturbation(crowded, "neighbor", rate=1.0, mix_temperature=3.0, until=text)
    end = crowded.get_tokenizer().encode(text, add_special_tokens=False)
    assert len(end) > 2
    allowed = sorted(set(end))
    add(crowded, harness.chat_prompts(crowded)[2:], max_tokens=16, allowed_token_ids=allowed)
    done = finish(crowded, lambda step, _: step % 3 or reset(crowded))
    ended = 0
    for rollout in rollouts_of(crowded, done):
        tokens, start = rollout.tokens, len(rollout.prompt)
        places = [i for i in range(len(tokens)) if tokens[i : i + len(end)] == end]
        last = start + places[0] + len(end) if places else start + len(tokens)
        ended += bool(places)
        assert all(position < last for position in rollout.record.positions)
        # The engine's log-probabilities are among the allowed tokens.
        (whole,) = harness.replay_log_probs(hf_model, [rollout], among=allowed)
        assert (whole - torch.from_numpy(rollout.log_probs.copy())).abs().max() <= 1e-4
    assert ended, "no answer had the text: the test shows nothing"
