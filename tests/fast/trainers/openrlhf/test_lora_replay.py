# SPDX-License-Identifier: Apache-2.0
"""A rollout on merged weights is replayed through PEFT's model: padded or packed, with the rollout's experts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("peft")
pytest.importorskip("openrlhf")

from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in
from ngrpo.machine.models import lora
from perturbations import ReplayRecord, replaying
from perturbations.replay.routing import RoutingScope, routers
from tests.support.lora_models import adapted, base_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LENGTHS = (12, 9, 7)
TOKENS = torch.arange(3, 39).view(3, 12)
MASK = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()


def a_record(positions: list[int], length: int) -> ReplayRecord:
    """Mixtures of three tokens at these positions, which become the model's inputs."""
    count = len(positions)
    ids = np.array([[11, 12, 13], [44, 45, 46], [57, 58, 59]][:count], np.int32)
    weights = np.tile(np.array([[0.5, 0.3, 0.2]], np.float32), (count, 1))
    return ReplayRecord(5, 2, length, np.array(positions, np.int32), ids, weights, None, np.ones(count, dtype=bool))


RECORDS = [a_record([3, 4, 9], 12), None, a_record([2, 5], 7)]


def experts_of(model: Any) -> list[np.ndarray | None]:
    """Experts of each sample that its own routers would not choose at most positions; the second sample has none."""
    layers = len(routers(model))
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(4), (3, 12, layers, 1)), axis=-1)[..., :2]
    return [drawn[0], None, drawn[2][:7]]


@contextmanager
def replayed(model: Any, samples: list[int], mask: Tensor) -> Iterator[None]:
    """The records of samples and, in a mixture, their experts."""
    with ExitStack() as stack:
        stack.enter_context(replaying(model, [RECORDS[sample] for sample in samples], attention_mask=mask))
        if model.config.model_type == "qwen3_moe":
            experts = experts_of(model)
            stack.enter_context(RoutingScope(model)([experts[sample] for sample in samples], mask))
        yield


def engine_of(model: Any, name: str) -> Any:
    """The base model with the merged weights."""
    engine = base_model(name)
    engine.load_state_dict({weight.name: weight.merged() for weight in lora.engine_weights(model)}, strict=False)
    return engine


def rolled_out(engine: Any) -> list[Tensor]:
    """Log-probabilities of each sample's tokens, of the sample alone, as an engine computes them."""
    log_probs = []
    for sample, length in enumerate(LENGTHS):
        tokens = TOKENS[sample : sample + 1, :length]
        with torch.no_grad(), replayed(engine, [sample], torch.ones_like(tokens)):
            logits = engine(tokens).logits[0, :-1]
        log_probs.append(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0])
    return log_probs


def scored(model: Any, *, packed: bool, replay: bool = True) -> Tensor:
    """Log-probabilities of a batch by OpenRLHF's `Actor`, (3, 11)."""
    with flash_attn_stand_in():
        from openrlhf.models import Actor
    actor = Actor(model)
    actor.packing_samples = packed
    model.config.use_cache = False  # as OpenRLHF does; with a cache, packed samples see each other
    with replayed(model, [0, 1, 2], MASK) if replay else ExitStack():
        return actor(TOKENS, MASK[:, 1:], attention_mask=MASK)


def gradients(model: Any, *, packed: bool) -> dict[str, Tensor]:
    model.zero_grad()
    scored(model, packed=packed).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("name", "targets"), [("untied", "all-linear"), ("mixture", ATTENTION)], ids=["dense", "mixture"]
)
def test_the_replay_is_the_rollout(name: str, targets: Any, packed: bool) -> None:
    model = adapted(base_model(name), target_modules=targets)
    engine = rolled_out(engine_of(model, name))
    with torch.no_grad():
        trainer = scored(model, packed=packed)
        unreplayed = scored(model, packed=packed, replay=False)
    for sample, wanted in enumerate(engine):
        torch.testing.assert_close(trainer[sample, : len(wanted)], wanted, rtol=1e-4, atol=1e-4)
    for sample in (0, 2):
        difference = unreplayed[sample, : len(engine[sample])] - engine[sample]
        assert difference.abs().max() > 0.01, "the replay must show"


@pytest.mark.parametrize(
    ("name", "targets"), [("untied", "all-linear"), ("mixture", ATTENTION)], ids=["dense", "mixture"]
)
def test_adapters_alone_have_gradients_and_packing_changes_none(name: str, targets: Any) -> None:
    model = adapted(base_model(name), target_modules=targets)
    padded = {parameter: gradient.clone() for parameter, gradient in gradients(model, packed=False).items()}
    packed = gradients(model, packed=True)
    factors = {parameter for parameter, _ in model.named_parameters() if lora.is_factor(parameter)}
    assert set(padded) == set(packed) == factors, "neither the base model nor a router is trained"
    for parameter, gradient in padded.items():
        assert (packed[parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter
        assert gradient.norm() > 0.0, parameter
