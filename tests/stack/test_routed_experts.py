# SPDX-License-Identifier: Apache-2.0
"""Routing replay: an engine's experts reach the trainer's forward, exactly in float32, where a near tie parts them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

Answer = tuple[list[int], list[int], FinishedTrajectory]
NEIGHBOR: dict[str, Any] = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}


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
    """Prefix caching, chunked prefills, and unperturbed but for what a test sets."""
    options = {**DISTURBED, "block_size": 32, "max_num_seqs": 4}
    yield build_engine(tied, None, additional_config={"routed_experts": True}, **options)


def prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 500, (count, tokens)).tolist()


def answers(llm: Any, given: Sequence[list[int]], tokens: int = 32, record: bytes = b"") -> list[Answer]:
    earlier = {"record": record} if record else {}
    rollouts = sample(llm, given, [{"seed": i, **earlier} for i in range(len(given))], max_tokens=tokens)
    return [(rollout.prompt, rollout.tokens, rollout.finished) for rollout in rollouts]


@torch.no_grad()
def gap(model: Any, answer: Answer, replay: bool = True) -> float:
    """The largest |Δ log p| of an answer's tokens."""
    prompt, drawn, trajectory = answer
    tokens = torch.tensor([prompt + drawn])
    mask = torch.ones_like(tokens)
    experts = [trajectory.experts if replay else None]
    with replaying(model, [trajectory.record], mask), RoutingScope(model)(experts, mask):
        log_probs = model(tokens, attention_mask=mask).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    found = log_probs.gather(1, torch.tensor(drawn)[:, None])[:, 0].numpy()
    return float(np.abs(found - trajectory.log_probs[-len(drawn) :]).max())


@pytest.mark.parametrize("spec", [{"name": "none"}, NEIGHBOR], ids=lambda spec: spec["name"])
def test_a_near_tie_is_replayed_exactly(engine: Any, trainer: Any, spec: dict[str, Any]) -> None:
    """Prompts that share blocks of the prefix cache have all of their experts, too."""
    set_perturbation(engine, **spec)
    shared = prompts(1, 72, seed=1)[0]
    sharing = [[*shared, last] for last in (5, 6, 7, 8, 50, 51)]
    found = answers(engine, [*sharing[:4], *prompts(2, 40), *sharing[4:]])
    assert max(gap(trainer, each) for each in found) <= 1e-4
    assert max(gap(trainer, each, replay=False) for each in found) > 0.1, "the tie must part engine and trainer"
    for prompt, drawn, trajectory in found:
        shape = (len(prompt) + len(drawn) - 1, 2, 2)
        assert trajectory.experts.shape == shape and trajectory.experts.dtype == np.uint8


def test_further_turns(engine: Any, trainer: Any) -> None:
    set_perturbation(engine, **NEIGHBOR)
    (prompt,) = prompts(1, 40, seed=2)
    conversation = Conversation({})
    for turn in range(3):
        conversation.go_on(prompt)
        record = b"" if conversation.trajectory is None else conversation.trajectory.record.to_bytes()
        ((_, drawn, trajectory),) = answers(engine, [prompt], 16, record)
        before = conversation.trajectory
        conversation.add(trajectory.pack(), prompt, drawn)
        joined = conversation.trajectory
        if before is not None:
            assert (joined.experts[: len(before.experts)] == before.experts).all()
        assert len(joined.experts) == len(prompt) + len(drawn) - 1
        assert gap(trainer, (prompt, drawn, joined)) <= 1e-4
        prompt = [*prompt, *drawn, 7, 8, 9 + turn]


def test_a_weight_sync_reaches_the_experts(engine: Any, tied: str, tmp_path: Path) -> None:
    """vLLM 0.29 packs a CPU's experts when it first loads them, and reads them as packed ever after."""
    set_perturbation(engine, **NEIGHBOR)
    changed = load_in_float32(tied)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if ".experts." in name:
                parameter.mul_(-1.5)
    assert max(gap(changed, each) for each in answers(engine, prompts(2, 40, seed=3), 8)) > 0.1
    for model in (changed, load_in_float32(tied)):
        sync(engine, model, tmp_path)
        assert max(gap(model, each) for each in answers(engine, prompts(2, 40, seed=3), 8)) <= 1e-4


def test_after_preemptions(tied: str, trainer: Any) -> None:
    config = {"perturbation": NEIGHBOR, "routed_experts": True}
    options = {**CROWDED, "enable_prefix_caching": True, "max_num_seqs": 8}
    llm = build_engine(tied, None, additional_config=config, **options)
    preempted = note_preemptions(llm)
    found = answers(llm, prompts(6, 40, seed=4), 40)
    assert preempted
    assert max(gap(trainer, each) for each in found) <= 1e-4


def test_the_v2_runner(tied: str) -> None:
    """In a process of its own, with Triton's interpreter."""
    last = run_module("tests.stack.routed_v2", tied).splitlines()[-1].split()
    assert last[0] == "V2" and float(last[1]) <= 1e-4 and float(last[2]) > 0.1, last


def test_a_dense_model_is_refused(model: str) -> None:
    with pytest.raises(Exception, match="dense model"):
        build_engine(model, None, additional_config={"routed_experts": True})
