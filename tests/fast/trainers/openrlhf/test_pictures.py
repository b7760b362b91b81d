# SPDX-License-Identifier: Apache-2.0
"""Pictures and records in one channel: neither gets lost, and positions are the same on both sides."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.trainers.common.sample_records import Conversation, unpack
from ngrpo.trainers.openrlhf import rollout_actor
from ngrpo.trainers.openrlhf.model_actors import merge_mm_train_inputs
from perturbations import FinishedTrajectory, ReplayRecord
from tests.support.run import run_with

PAD = 7


def record(length: int) -> FinishedTrajectory:
    ids, weights = np.array([[3, 4]], np.int32), np.array([[0.25, 0.75]], np.float32)
    replay = ReplayRecord(5, 1, length, np.array([length - 1], np.int32), ids, weights, None, np.array([True]))
    return FinishedTrajectory(replay, np.zeros(length, np.float32))


def test_a_models_forward_gets_its_pictures_and_not_our_records() -> None:
    given: list[Any] = []
    merge = merge_mm_train_inputs(lambda entries, device: given.append(entries))
    pixels = torch.ones(2, 3)
    merge([{"pixel_values": pixels, **record(4).pack()}, record(4).pack(), None], "cpu")
    merge([[{"pixel_values": pixels, **record(4).pack()}, None]], "cpu")
    assert given == [[{"pixel_values": pixels}, None, None], [[{"pixel_values": pixels}, None]]]


def test_a_response_keeps_its_pictures_beside_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            conversation = rollout_actor._conversation.get()
            conversation.trajectory, conversation._tokens = record(4), np.arange(4)
            return {"observation_tokens": [0, 1, 2, 3], "mm_train_inputs": {"pixel_values": torch.ones(1)}}

    kept = asyncio.run(rollout_actor.RecordingExecutor(Executor()).execute(prompt="p"))["mm_train_inputs"]
    assert "pixel_values" in kept and unpack([kept])[0].record.positions.tolist() == [3]


class Engine:
    """Answers as vLLM does: one placeholder becomes as many as a picture has places."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.given: list[Any] = []
        self.params: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.given.append(prompt)
        self.params.append(params)
        tokens = [t for token in prompt["prompt_token_ids"] for t in [token] * (self.places if token == PAD else 1)]
        yield SimpleNamespace(prompt_token_ids=tokens, outputs=[SimpleNamespace(token_ids=[9])], num_cached_tokens=0)


async def take(name: str) -> Any:
    return None


async def ask(engine: Engine, prompt: list[int], pictures: Any) -> None:
    sampling = pytest.importorskip("vllm").SamplingParams()
    actor = SimpleNamespace(llm=engine, _mm_pad_token_ids={PAD}, pick_ups=SimpleNamespace(take=take))
    await rollout_actor.generate(actor, prompt, sampling, pictures)


def test_a_picture_reaches_the_engine_with_one_placeholder_and_text_is_not_touched() -> None:
    engine, expanded = Engine(3), [1, PAD, PAD, PAD, 2]
    asyncio.run(ask(engine, expanded, {"image": ["picture"]}))
    given = engine.given[0]
    assert given["prompt_token_ids"] == [1, PAD, 2] and given["multi_modal_data"] == {"image": ["picture"]}
    engine = Engine(1)
    asyncio.run(ask(engine, expanded, None))
    given = engine.given[0]
    assert list(given["prompt_token_ids"]) == expanded and "multi_modal_data" not in given


def test_a_picture_of_other_places_in_the_engine_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="5 tokens for the trainer and 6 for vLLM, and they differ from position 4"):
        asyncio.run(ask(Engine(4), [1, PAD, PAD, PAD, 2], {"image": ["picture"]}))


def test_one_question_about_two_pictures_has_draws_of_its_own_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers are numbered apart, from 0 on, whatever order they come in; and their seeds differ."""
    run_with(monkeypatch)
    monkeypatch.setattr(Conversation, "add", lambda *args: None)
    engine = Engine(1)

    class Executor:
        async def execute(self, images: Any, **kwargs: Any) -> dict[str, Any]:
            await ask(engine, [1, PAD, 2], {"image": images} if images else None)
            return {}

    executor, sampling = rollout_actor.RecordingExecutor(Executor()), pytest.importorskip("vllm").SamplingParams()
    for images in (["red.png"], ["blue.png"], ["red.png"], None):
        asyncio.run(executor.execute(prompt="Which color?", images=images, sampling_params=sampling))
    given = [params.extra_args["perturbation"] for params in engine.params]
    assert [arguments["sample"] for arguments in given] == [0, 0, 1, 0]
    red, blue, again, text = (arguments["seed"] for arguments in given)
    assert red == again and len({red, blue, text}) == 3
