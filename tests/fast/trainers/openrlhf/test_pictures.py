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


def trajectory(length: int) -> FinishedTrajectory:
    """One whose last input was a mixture."""
    replay = ReplayRecord(
        seed=5,
        prompt_tokens=1,
        num_tokens=length,
        positions=np.array([length - 1], np.int32),
        ids=np.array([[3, 4]], np.int32),
        weights=np.array([[0.25, 0.75]], np.float32),
        sigma=None,
        agreed=np.array([True]),
    )
    return FinishedTrajectory(replay, np.zeros(length, np.float32))


def test_a_models_forward_gets_its_pictures_and_not_our_records() -> None:
    merged: list[Any] = []
    merge = merge_mm_train_inputs(lambda entries, device: merged.append(entries))
    pixels = torch.ones(2, 3)
    picture_and_record = {"pixel_values": pixels, **trajectory(4).pack()}

    merge([picture_and_record, trajectory(4).pack(), None], "cpu")
    merge([[picture_and_record, None]], "cpu")

    assert merged == [
        [{"pixel_values": pixels}, None, None],
        [[{"pixel_values": pixels}, None]],
    ]


def test_a_response_keeps_its_pictures_beside_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            conversation = rollout_actor._conversation.get()
            conversation.trajectory = trajectory(4)
            conversation._tokens = np.arange(4)
            return {"observation_tokens": [0, 1, 2, 3], "mm_train_inputs": {"pixel_values": torch.ones(1)}}

    response = asyncio.run(rollout_actor.RecordingExecutor(Executor()).execute(prompt="p"))

    inputs = response["mm_train_inputs"]
    assert "pixel_values" in inputs
    (unpacked,) = unpack([inputs])
    assert unpacked.record.positions.tolist() == [3]


class Engine:
    """Responds as vLLM does: one placeholder becomes as many as a picture has places.

    ``prompts`` and ``params`` are those of its requests.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.prompts: list[Any] = []
        self.params: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.prompts.append(prompt)
        self.params.append(params)
        tokens: list[int] = []
        for token in prompt["prompt_token_ids"]:
            tokens += [token] * (self.places if token == PAD else 1)
        yield SimpleNamespace(prompt_token_ids=tokens, outputs=[SimpleNamespace(token_ids=[9])], num_cached_tokens=0)


async def take(name: str) -> Any:
    return None


async def ask(engine: Engine, prompt: list[int], pictures: Any) -> None:
    sampling = pytest.importorskip("vllm").SamplingParams()
    actor = SimpleNamespace(llm=engine, _mm_pad_token_ids={PAD}, pick_ups=SimpleNamespace(take=take))
    await rollout_actor.generate(actor, prompt, sampling, pictures)


EXPANDED = [1, PAD, PAD, PAD, 2]


def test_a_picture_reaches_the_engine_with_one_placeholder() -> None:
    engine = Engine(3)
    asyncio.run(ask(engine, EXPANDED, {"image": ["picture"]}))
    (prompt,) = engine.prompts
    assert prompt["prompt_token_ids"] == [1, PAD, 2]
    assert prompt["multi_modal_data"] == {"image": ["picture"]}


def test_a_text_with_the_placeholders_token_is_not_touched() -> None:
    engine = Engine(1)
    asyncio.run(ask(engine, EXPANDED, None))
    (prompt,) = engine.prompts
    assert list(prompt["prompt_token_ids"]) == EXPANDED
    assert "multi_modal_data" not in prompt


def test_a_picture_of_other_places_in_the_engine_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="5 tokens for the trainer and 6 for vLLM, and they differ from position 4"):
        asyncio.run(ask(Engine(4), EXPANDED, {"image": ["picture"]}))


def test_one_question_about_two_pictures_has_draws_of_its_own_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their responses are numbered apart, from 0 on, whatever order they come in; and their seeds differ."""
    run_with(monkeypatch)
    monkeypatch.setattr(Conversation, "add", lambda *args: None)
    engine = Engine(1)

    class Executor:
        async def execute(self, images: Any, **kwargs: Any) -> dict[str, Any]:
            await ask(engine, [1, PAD, 2], {"image": images} if images else None)
            return {}

    executor = rollout_actor.RecordingExecutor(Executor())
    sampling = pytest.importorskip("vllm").SamplingParams()
    for images in (["red.png"], ["blue.png"], ["red.png"], None):
        asyncio.run(executor.execute(prompt="Which color?", images=images, sampling_params=sampling))

    red, blue, red_again, text = (params.extra_args["perturbation"] for params in engine.params)
    assert red["sample"] == 0
    assert blue["sample"] == 0
    assert red_again["sample"] == 1
    assert text["sample"] == 0
    assert red["seed"] == red_again["seed"]
    assert len({red["seed"], blue["seed"], text["seed"]}) == 3
