# SPDX-License-Identifier: Apache-2.0
"""Gradients through a replayed position: checkpointed and packed, all equal to the plain one."""

from typing import Any

import numpy as np
import pytest
import torch

from perturbations import ReplayRecord, replaying
from perturbations.replay.scope import ReplayScope

NEIGHBORS = [[11, 12, 13], [14, 15, 16], [17, 18, 19]]


def a_record(positions: list[int], length: int, sigma: float | None = None) -> ReplayRecord:
    """A prompt of 2 tokens; each of the positions is fed a mixture of three tokens, plus noise of scale ``sigma``."""
    count = len(positions)
    weights = np.array([[0.5, 0.3, 0.2]], np.float32)
    sigmas = None
    if sigma is not None:
        sigmas = np.full(count, sigma, np.float32)
    return ReplayRecord(
        seed=5,
        prompt_tokens=2,
        num_tokens=length,
        positions=np.array(positions, np.int32),
        ids=np.array(NEIGHBORS[:count], np.int32),
        weights=np.tile(weights, (count, 1)),
        sigma=sigmas,
        agreed=np.ones(count, dtype=bool),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor, list[ReplayRecord | None]]:
    """Three right-padded samples of 12, 9 and 7 tokens; the second is not perturbed."""
    tokens = torch.arange(100, 136).view(3, 12) % 97 + 100
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    mask[2, 7:] = 0
    records = [a_record([3, 4, 9], length=12), None, a_record([2, 5], length=7, sigma=0.1)]
    return tokens, mask, records


def gradients(model: Any, replay: bool = True) -> dict[str, torch.Tensor]:
    """The gradient of the batch's negative log-likelihood, by the parameter's name."""
    tokens, mask, records = batch()
    if not replay:
        records = [None] * len(records)
    model.zero_grad()
    with replaying(model, records, attention_mask=mask):
        logits = model(tokens, attention_mask=mask).logits
        log_softmax = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        log_probs = log_softmax.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(log_probs * mask[:, 1:]).sum()
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(hf_model: Any) -> dict[str, torch.Tensor]:
    return gradients(hf_model)


def test_neighbors_receive_gradient(hf_model: Any) -> None:
    """Only the embedding is called, so that the gradient comes through the input alone."""
    embedding = hf_model.get_input_embeddings()
    tokens, mask, records = batch()
    embedding.weight.grad = None
    with ReplayScope(embedding)(records, mask) as stats:
        embedding(tokens).square().sum().backward()
    gradient_sizes = embedding.weight.grad.abs().sum(-1)
    with_gradient = set(gradient_sizes.nonzero().flatten().tolist())
    assert set(range(11, 20)) <= with_gradient, "all tokens of NEIGHBORS"
    assert stats.count() == 5

    is_fed = torch.ones_like(mask, dtype=torch.bool)
    is_fed[0, [3, 4, 9]] = False
    is_fed[2, [2, 5]] = False
    fed_tokens = set(tokens[is_fed].tolist())
    replaced_tokens = set(tokens[~is_fed].tolist()) - fed_tokens
    assert replaced_tokens
    assert not replaced_tokens & with_gradient, "a replaced token must receive no gradient"


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(hf_model: Any, plain: dict[str, torch.Tensor], reentrant: bool) -> None:
    hf_model.train()
    hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    try:
        if reentrant:
            hf_model.enable_input_require_grads()
        checkpointed = gradients(hf_model)
    finally:
        hf_model.gradient_checkpointing_disable()
        hf_model.eval()
        if reentrant:
            hf_model.disable_input_require_grads()

    unreplayed = gradients(hf_model, replay=False)
    effect = plain["model.embed_tokens.weight"] - unreplayed["model.embed_tokens.weight"]
    assert effect.abs().max() > 1e-2, "leaving the replay out must show, or this test shows nothing"
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_without_flash_attn(
    hf_model: Any, plain: dict[str, torch.Tensor], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF's Actor in PyTorch's own attention: samples that lie in one row do not see each other."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models import Actor
    actor = Actor(hf_model)
    actor.packing_samples = True
    # OpenRLHF switches the cache off, too: with one, the samples would see each other.
    monkeypatch.setattr(hf_model.config, "use_cache", False)
    monkeypatch.setattr(hf_model.config, "_attn_implementation", attention)

    tokens, mask, records = batch()
    hf_model.zero_grad()
    with ReplayScope(hf_model.get_input_embeddings())(records, mask):
        log_probs = actor(tokens, mask[:, 1:], attention_mask=mask)
    loss = -log_probs.sum()
    loss.backward()
    for name, parameter in hf_model.named_parameters():
        # The norms are compared and not the entries. A small entry of a large row is a difference of large terms, and
        # packed rows are summed in another order.
        error = (parameter.grad - plain[name]).norm()
        assert error <= 1e-4 * plain[name].norm(), name
