# SPDX-License-Identifier: Apache-2.0
"""SimKO through OpenRLHF's own Actor, training step and policy loss, on a tiny random model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.trainers.common.log_probs import with_overrides
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from tests.fast.run import run_with
from tests.fast.simko_reference import ACTIONS, ADVANTAGES, LENGTHS, A, B, T, V, reference

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def openrlhf() -> Iterator[Any]:
    """Its modules, with the seam of the log-probabilities in place."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    model()  # transformers looks for flash-attn itself, and before the stand-in
    with flash_attn_stand_in():
        from openrlhf.models import actor, loss
        from openrlhf.trainer.ray import ppo_actor
    original = actor.log_probs_from_logits
    actor.log_probs_from_logits = with_overrides(original)
    yield SimpleNamespace(actor=actor, loss=loss, ppo_actor=ppo_actor)
    actor.log_probs_from_logits = original


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V, initializer_range=0.5, dtype="float32", use_cache=False, **sizes)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def batch(logits: Tensor) -> SimpleNamespace:
    mask = torch.zeros(B, T, dtype=torch.int64)
    for row, (first, last) in zip(mask, LENGTHS):
        row[first:last] = 1
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, V, (B, T), generator=generator)
    log_probs = logits.log_softmax(-1).gather(-1, ids.roll(-1, 1).unsqueeze(-1)).squeeze(-1)[:, :-1][:, -A:]
    return SimpleNamespace(
        sequences=ids,
        attention_mask=mask,
        action_mask=ACTIONS,
        advantages=ADVANTAGES,
        action_log_probs=log_probs.detach() + 0.3 * torch.randn(B, A, generator=generator),
    )


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step(openrlhf: Any, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of every weight against the paper's ratio on the same model's logits; temperature 0.8."""
    run_with(monkeypatch, credit={"name": "simko", "k": 4, "alpha": 0.3, "penalty": 1.7, "quantile": 0.4})
    ours, truth = model(), model()
    actor = openrlhf.actor.Actor(ours, temperature=0.8)
    actor.packing_samples = packed

    def logits_of(given: Any, ids: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return given(ids, attention_mask=mask, position_ids=positions).logits / 0.8

    made = batch(torch.zeros(B, T, V))
    made.action_log_probs = batch(logits_of(truth, made.sequences, made.attention_mask)).action_log_probs
    strategy = SimpleNamespace(
        ring_attn_group=None, backward=lambda loss, *_: loss.backward(), optimizer_step=lambda *_, **__: None
    )
    strategy.get_grad_norm = lambda *_: 0.0
    args = SimpleNamespace(
        actor=SimpleNamespace(entropy_coef=None),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    trainer = object.__new__(actor_trainer(openrlhf.ppo_actor.ActorPPOTrainer))
    vars(trainer).update(
        actor=actor,
        actor_loss_fn=openrlhf.loss.PolicyLoss(),
        strategy=strategy,
        args=args,
        aux_loss=False,
        ema_model=None,
        actor_optim=None,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
    )
    experience = openrlhf.ppo_actor.Experience(**vars(made), info={})
    result = trainer.training_step(experience, 0.0, 0, {})
    assert 0.1 < float(result["metrics"]["credit/in_loss"]) < 0.7
    logits = logits_of(truth, made.sequences, made.attention_mask)
    reference(logits, made.sequences, made.action_log_probs, 4, 0.3, 1.7, 0.4).backward()
    expected = dict(truth.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = expected[name].grad
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm(), name
