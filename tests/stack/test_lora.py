# SPDX-License-Identifier: Apache-2.0
"""LoRA: an engine with merged weights is replayed through PEFT's model, under every perturbation."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from ngrpo.machine.models import lora
from ngrpo.rollout import set_perturbation
from perturbations import create, parameters, replaying
from tests.stack.harness import DISTURBED, Rollout, build_engine, feeds_its_text, gaps, load_in_float32, sample
from tests.stack.tiny_models import FORMS, tiny_model
from tests.stack.v2_rollout import PERTURBATIONS
from tests.support import lora_models
from tests.support.lora_models import adapted

EVERY = {**PERTURBATIONS, "tarpo": {"density": "token"}}
PROMPTS = [[40 + i, 77, 130, 201 + i, 350, 12] for i in range(4)]
GAP = 1e-4


def sync(engine: Any, model: Any, folder: Path) -> None:
    """The merged weights reach the engine through a file, as in a training on a CPU."""
    from safetensors.torch import save_file

    from ngrpo.trainers.common.weights_file import load_weights_file

    path = folder / "weights.safetensors"
    save_file({weight.name: weight.merged().contiguous() for weight in lora.engine_weights(model)}, path)
    engine.llm_engine.collective_rpc(load_weights_file, args=(str(path),))
    engine.reset_prefix_cache()


def gradients(model: Any, rollouts: list[Rollout]) -> dict[str, float]:
    """The size of each parameter's gradient of a replayed sum of log-probabilities; only parameters that have one."""
    tokens = torch.tensor([rollout.sequence for rollout in rollouts])
    model.zero_grad()
    with replaying(model, [rollout.record for rollout in rollouts], attention_mask=torch.ones_like(tokens)):
        log_probs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
        log_probs.sum().backward()
    return {name: p.grad.abs().sum().item() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["plain", "scaled"])
def test_every_perturbation_is_replayed_through_adapters(form: str, tmp_path: Path) -> None:
    """Rank 8 on all linear layers, B moved before each sync; the base model gets no gradient, its adapters all do."""
    folder = tiny_model(form, tmp_path)
    engine = build_engine(folder, {"name": "neighbor", "rate": 0.5}, **DISTURBED, **FORMS[form][2])
    model = adapted(load_in_float32(folder))
    for number, (name, options) in enumerate(EVERY.items()):
        lora_models.train(model, seed=number)
        perturbation = create(name, **options)
        set_perturbation(engine, name, **options)
        module = parameters.attach(model, perturbation)
        sync(engine, model, tmp_path)
        rollouts = sample(engine, PROMPTS, [{"seed": seed} for seed in range(len(PROMPTS))], max_tokens=24)
        assert sum(len(rollout.record) for rollout in rollouts) > 0, name
        assert gaps(model, rollouts).max() <= GAP, name
        if not feeds_its_text(rollouts):
            assert gaps(model, rollouts, replay=False).max() > 100 * GAP, f"{name}: the replay must show"
        with_gradient = gradients(model, rollouts)
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert set(with_gradient) == trainable
        assert all("lora_" in name or name.startswith(parameters.PREFIX) for name in trainable)
        assert all(size > 0.0 for name, size in with_gradient.items() if "lora_" in name)
        if module is not None:
            assert any(name.startswith(parameters.PREFIX) for name in trainable)
            del model._modules[parameters.NAME]


def test_planted_faults_show_in_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is wrong by a tenth, an adapter of the step before, and a module that is left out."""
    folder = tiny_model("plain", tmp_path)
    engine = build_engine(folder, {"name": "neighbor", "rate": 0.5}, **DISTURBED)
    model = adapted(load_in_float32(folder))

    def gap() -> float:
        return gaps(model, sample(engine, PROMPTS, max_tokens=24)).max().item()

    sync(engine, model, tmp_path)
    assert gap() <= GAP
    lora_models.train(model, seed=1)
    assert gap() > 100 * GAP, "a stale adapter"
    right = lora.update_of
    monkeypatch.setattr(lora, "update_of", lambda adapter: 1.1 * right(adapter))
    sync(engine, model, tmp_path)
    assert gap() > 100 * GAP, "a wrong scale"
    left_out = model.base_model.model.model.layers[1].mlp.down_proj
    monkeypatch.setattr(lora, "update_of", lambda adapter: right(adapter) * (adapter is not left_out))
    sync(engine, model, tmp_path)
    assert gap() > 100 * GAP, "a missing module"
    monkeypatch.undo()
    sync(engine, model, tmp_path)
    assert gap() <= GAP
