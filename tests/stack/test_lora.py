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
PROMPTS = [[40 + number, 77, 130, 201 + number, 350, 12] for number in range(4)]
SEEDS = [{"seed": number} for number in range(4)]
GAP = 1e-4


def sync(engine: Any, model: Any, folder: Path) -> None:
    """Sends the merged weights to the engine through a file, as a training on a CPU does."""
    from safetensors.torch import save_file

    from ngrpo.trainers.common.weights_file import load_weights_file

    merged = {weight.name: weight.merged().contiguous() for weight in lora.engine_weights(model)}
    path = folder / "weights.safetensors"
    save_file(merged, path)
    engine.llm_engine.collective_rpc(load_weights_file, args=(str(path),))
    engine.reset_prefix_cache()


def gradients(model: Any, rollouts: list[Rollout]) -> dict[str, float]:
    """The size of each parameter's gradient of a replayed sum of log-probabilities; only parameters that have one."""
    tokens = torch.tensor([rollout.sequence for rollout in rollouts])
    records = [rollout.record for rollout in rollouts]
    model.zero_grad()
    with replaying(model, records, attention_mask=torch.ones_like(tokens)):
        log_softmax = model(tokens).logits[:, :-1].log_softmax(-1)
        log_probs = log_softmax.gather(-1, tokens[:, 1:, None])
        log_probs.sum().backward()
    sizes = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            sizes[name] = parameter.grad.abs().sum().item()
    return sizes


def trainable_names(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_base_has_no_gradient(model: Any, rollouts: list[Rollout]) -> None:
    """Asserts that adapters and a perturbation's own parameters are all that is trained, and each adapter is."""
    sizes = gradients(model, rollouts)
    assert set(sizes) == trainable_names(model)
    for name, size in sizes.items():
        if "lora_" in name:
            assert size > 0.0, name
        else:
            assert name.startswith(parameters.PREFIX), name


@pytest.mark.parametrize("form", ["plain", "scaled"])
def test_every_perturbation_is_replayed_through_adapters(form: str, tmp_path: Path) -> None:
    """All linear layers have adapters of rank 8, whose B is moved before each sync."""
    folder = tiny_model(form, tmp_path)
    _, _, engine_options = FORMS[form]
    engine = build_engine(folder, {"name": "neighbor", "rate": 0.5}, **DISTURBED, **engine_options)
    model = adapted(load_in_float32(folder))
    for number, (name, options) in enumerate(EVERY.items()):
        lora_models.train(model, seed=number)
        perturbation = create(name, **options)
        set_perturbation(engine, name, **options)
        module = parameters.attach(model, perturbation)
        sync(engine, model, tmp_path)

        rollouts = sample(engine, PROMPTS, SEEDS, max_tokens=24)
        assert sum(len(rollout.record) for rollout in rollouts) > 0, name
        assert gaps(model, rollouts).max() <= GAP, name
        if not feeds_its_text(rollouts):
            assert gaps(model, rollouts, replay=False).max() > 100 * GAP, f"{name}: the replay must show"
        assert_base_has_no_gradient(model, rollouts)
        if module is not None:
            assert any(trained.startswith(parameters.PREFIX) for trained in trainable_names(model)), name
            del model._modules[parameters.NAME]


def test_planted_faults_show_in_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults: an adapter of the step before, a scale that is wrong by a tenth, and a module that is left out."""
    folder = tiny_model("plain", tmp_path)
    engine = build_engine(folder, {"name": "neighbor", "rate": 0.5}, **DISTURBED)
    model = adapted(load_in_float32(folder))

    def largest_gap() -> float:
        rollouts = sample(engine, PROMPTS, max_tokens=24)
        return gaps(model, rollouts).max().item()

    sync(engine, model, tmp_path)
    assert largest_gap() <= GAP

    lora_models.train(model, seed=1)
    assert largest_gap() > 100 * GAP, "a stale adapter"

    right_update = lora.update_of
    monkeypatch.setattr(lora, "update_of", lambda adapter: 1.1 * right_update(adapter))
    sync(engine, model, tmp_path)
    assert largest_gap() > 100 * GAP, "a wrong scale"

    left_out = model.base_model.model.model.layers[1].mlp.down_proj

    def update_without_one(adapter: Any) -> torch.Tensor:
        update = right_update(adapter)
        if adapter is left_out:
            return torch.zeros_like(update)
        return update

    monkeypatch.setattr(lora, "update_of", update_without_one)
    sync(engine, model, tmp_path)
    assert largest_gap() > 100 * GAP, "a missing module"

    monkeypatch.undo()
    sync(engine, model, tmp_path)
    assert largest_gap() <= GAP
