# SPDX-License-Identifier: Apache-2.0
"""Routing replay: a mixture whose experts nearly tie is routed in the trainer's forward as it was in the engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ngrpo.rollout import set_perturbation
from ngrpo.trainers.common.sample_records import Conversation
from perturbations import replaying
from perturbations.replay.routing import RoutingScope
from perturbations.replay.trajectory import FinishedTrajectory
from tests.stack.harness import CROWDED, DISTURBED, build_engine, load_in_float32, note_preemptions, sample, sync
from tests.stack.tiny_models import tie_experts, tiny_model
from tests.support.own_process import run_module

NEIGHBOR: dict[str, Any] = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    trajectory: FinishedTrajectory


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_model("mixture", tmp_path_factory.mktemp("tied"))
    tie_experts(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(tied: str) -> Any:
    return load_in_float32(tied)


@pytest.fixture(scope="module")
def engine(tied: str) -> Iterator[Any]:
    """An engine with prefix caching and chunked prefills, unperturbed until a test sets a perturbation."""
    options = {**DISTURBED, "block_size": 32, "max_num_seqs": 4}
    yield build_engine(tied, None, additional_config={"routed_experts": True}, **options)


def prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    return draws.integers(3, 500, (count, tokens)).tolist()


def answers(llm: Any, prompts: Sequence[list[int]], tokens: int = 32, record: bytes = b"") -> list[Answer]:
    """An answer to each prompt, of that many tokens; ``record``: that of the turns before, if there are any."""
    arguments: list[dict[str, Any]] = [{"seed": number} for number in range(len(prompts))]
    if record:
        for of_request in arguments:
            of_request["record"] = record
    rollouts = sample(llm, prompts, arguments, max_tokens=tokens)
    return [Answer(rollout.prompt, rollout.tokens, rollout.finished) for rollout in rollouts]


@torch.no_grad()
def gap(model: Any, answer: Answer, replay: bool = True) -> float:
    """The largest |Δ log p| of an answer's tokens; ``replay``: whether the engine's experts are used."""
    prompt, answer_tokens, trajectory = answer
    tokens = torch.tensor([prompt + answer_tokens])
    mask = torch.ones_like(tokens)
    experts = [trajectory.experts if replay else None]
    with replaying(model, [trajectory.record], mask), RoutingScope(model)(experts, mask):
        logits = model(tokens, attention_mask=mask).logits
    log_softmax = logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    chosen = torch.tensor(answer_tokens)[:, None]
    log_probs = log_softmax.gather(1, chosen)[:, 0].numpy()
    engine_log_probs = trajectory.log_probs[-len(answer_tokens) :]
    return float(np.abs(log_probs - engine_log_probs).max())


def largest_gap(model: Any, rolled_out: Sequence[Answer], replay: bool = True) -> float:
    return max(gap(model, answer, replay) for answer in rolled_out)


@pytest.mark.parametrize("spec", [{"name": "none"}, NEIGHBOR], ids=lambda spec: spec["name"])
def test_a_near_tie_is_replayed_exactly(engine: Any, trainer: Any, spec: dict[str, Any]) -> None:
    """Six of the prompts share blocks of the prefix cache: their answers have the experts of all prompt tokens, too."""
    set_perturbation(engine, **spec)
    (shared,) = prompts(1, 72, seed=1)
    sharing = [[*shared, last] for last in (5, 6, 7, 8, 50, 51)]
    rolled_out = answers(engine, [*sharing[:4], *prompts(2, 40), *sharing[4:]])
    assert largest_gap(trainer, rolled_out) <= 1e-4
    assert largest_gap(trainer, rolled_out, replay=False) > 0.1, "the tie must part engine and trainer"
    for prompt, tokens, trajectory in rolled_out:
        routed_tokens = len(prompt) + len(tokens) - 1
        assert trajectory.experts.shape == (routed_tokens, 2, 2)
        assert trajectory.experts.dtype == np.uint8


def test_further_turns(engine: Any, trainer: Any) -> None:
    set_perturbation(engine, **NEIGHBOR)
    (prompt,) = prompts(1, 40, seed=2)
    conversation = Conversation({})
    for turn in range(3):
        conversation.drop_changed(prompt)
        before = conversation.trajectory
        record = b""
        if before is not None:
            record = before.record.to_bytes()
        (answer,) = answers(engine, [prompt], 16, record)
        conversation.add(answer.trajectory.pack(), prompt, answer.tokens)

        joined = conversation.trajectory
        if before is not None:
            assert (joined.experts[: len(before.experts)] == before.experts).all()
        assert len(joined.experts) == len(prompt) + len(answer.tokens) - 1
        assert gap(trainer, answer._replace(trajectory=joined)) <= 1e-4
        prompt = [*prompt, *answer.tokens, 7, 8, 9 + turn]


def test_a_weight_sync_reaches_the_experts(engine: Any, tied: str, tmp_path: Path) -> None:
    """vLLM 0.29 packs experts for the CPU when it first loads them, and reads only the packed weights from then on."""
    set_perturbation(engine, **NEIGHBOR)
    changed = load_in_float32(tied)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if ".experts." in name:
                parameter.mul_(-1.5)
    before_sync = answers(engine, prompts(2, 40, seed=3), 8)
    assert largest_gap(changed, before_sync) > 0.1
    for model in (changed, load_in_float32(tied)):
        sync(engine, model, tmp_path)
        after_sync = answers(engine, prompts(2, 40, seed=3), 8)
        assert largest_gap(model, after_sync) <= 1e-4


def test_after_preemptions(tied: str, trainer: Any) -> None:
    config = {"perturbation": NEIGHBOR, "routed_experts": True}
    options = {**CROWDED, "enable_prefix_caching": True, "max_num_seqs": 8}
    llm = build_engine(tied, None, additional_config=config, **options)
    preempted = note_preemptions(llm)
    rolled_out = answers(llm, prompts(6, 40, seed=4), 40)
    assert preempted
    assert largest_gap(trainer, rolled_out) <= 1e-4


def test_the_v2_runner(tied: str) -> None:
    """The runner is in a process of its own, with Triton's interpreter."""
    output = run_module("tests.stack.routed_v2", tied).stdout
    last_line = output.splitlines()[-1]
    runner, replayed_gap, unreplayed_gap = last_line.split()
    assert runner == "V2", last_line
    assert float(replayed_gap) <= 1e-4, last_line
    assert float(unreplayed_gap) > 0.1, last_line


def test_a_dense_model_is_refused(model: str) -> None:
    with pytest.raises(Exception, match="dense model"):
        build_engine(model, None, additional_config={"routed_experts": True})
