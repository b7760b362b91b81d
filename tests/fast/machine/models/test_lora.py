# SPDX-License-Identifier: Apache-2.0
"""The merged weights of a model with adapters: as PEFT's forward has them, under the engine's names, or refused."""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from ngrpo.machine.models import lora
from perturbations import UsageError
from tests.support import lora_models
from tests.support.lora_models import VOCABULARY, adapted, base_model

TOKENS = torch.arange(3, 27).view(2, 12) % VOCABULARY
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def engine_of(model: Any, name: str) -> Any:
    """The base model with an engine's weights: it takes their names as the checkpoint has them."""
    return engine_with({weight.name: weight.merged() for weight in lora.engine_weights(model)}, name)


def engine_with(weights: dict[str, torch.Tensor], name: str) -> Any:
    """The base model with these weights."""
    engine = base_model(name)
    loaded = engine.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, "a tied head alone has no entry"
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("untied", {}),
        ("tied", {}),
        ("tied", {"target_modules": ATTENTION}),
        ("conv1d", {"fan_in_fan_out": True}),
        ("mixture", {"target_modules": ATTENTION}),
        ("untied", {"use_rslora": True}),
        ("untied", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("untied", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 32}}),
    ],
)
def test_an_engine_with_merged_weights_is_the_trainers_model(name: str, options: dict[str, Any]) -> None:
    model = adapted(base_model(name), **options)
    lora.check_adapters(model, perturbed=False)
    wanted = logits_of(model)
    assert (wanted - logits_of(base_model(name))).abs().max() > 0.1, "the adapters must show"
    torch.testing.assert_close(logits_of(engine_of(model, name)), wanted, rtol=1e-4, atol=1e-4)


def test_the_merge_by_hand() -> None:
    """s = 16 / 8, for rsLoRA 16 / sqrt(8); W + s · B A, and nothing of the trainer's model changes."""
    for options, scale in (({}, 2.0), ({"use_rslora": True}, 16.0 / math.sqrt(8))):
        model = adapted(base_model("untied"), **options)
        layer = model.base_model.model.model.layers[1].mlp.up_proj
        before = layer.base_layer.weight.clone()
        (weight,) = (w for w in lora.engine_weights(model) if w.name == "model.layers.1.mlp.up_proj.weight")
        expected = before + scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        torch.testing.assert_close(weight.merged(), expected.detach())
        assert torch.equal(layer.base_layer.weight, before)
        assert len(weight.parameters) == 3


def test_an_update_below_a_digit_of_bfloat16_is_rounded_once() -> None:
    """Three updates of 0.4 of a digit: their sum is a digit, and each of them rounded to the weight would be lost."""
    model = adapted(base_model("untied"), target_modules=["q_proj"]).bfloat16()
    (weight,) = (w for w in lora.engine_weights(model) if w.name == "model.layers.0.self_attn.q_proj.weight")
    digit = 2.0**-7
    weight.base.data.fill_(1.0)
    down, up = lora.factors(weight.adapter)
    down.data.fill_(0.0)
    down.data[0] = 1.0
    up.data.fill_(0.0)
    up.data[:, 0] = 0.6 * digit / weight.adapter.scaling["default"]
    assert weight.merged().dtype == torch.bfloat16
    assert torch.equal(weight.merged(), torch.full_like(weight.base, 1.0 + digit))


def test_names_are_those_of_the_checkpoint() -> None:
    model = adapted(base_model("tied"))
    names = [weight.name for weight in lora.engine_weights(model)]
    assert names == [name for name, _ in base_model("tied").named_parameters()]
    assert [w.name for w in lora.engine_weights(base_model("tied"))] == names, "a model without adapters is itself"


def test_a_sync_sends_what_training_changes() -> None:
    model = adapted(base_model("tied"), target_modules=["q_proj"])
    norm, own = "model.layers.0.input_layernorm.weight", torch.nn.Linear(2, 2, bias=False)
    adapters = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    assert [weight.name for weight in lora.changed_weights(model)] == adapters
    model.add_module("perturbation", own)  # of hrpo and tarpo, which are trained whole
    changed = [weight.name for weight in lora.changed_weights(model, noised=frozenset({norm}))]
    assert changed == [adapters[0], norm, adapters[1], "perturbation.weight"]


def engine_of_merged(model: Any, name: str) -> Any:
    """The base model with the weights of a model that PEFT has merged, under the names that TRL takes for vLLM."""
    weights = {}
    for parameter_name, parameter in model.named_parameters():
        if model.prefix not in parameter_name and ".original_module" not in parameter_name:
            weights[lora.engine_name(parameter_name).replace("modules_to_save.default.", "")] = parameter.detach()
    return engine_with(weights, name)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("untied", {"use_dora": True}, "self_attn.q_proj: DoraLinearVariant is no sum"),
        ("untied", {"modules_to_save": ["lm_head"]}, "lm_head: PEFT trains a copy"),
        ("tied", {"target_modules": ["lm_head"]}, "lm_head: its matrix is also another module's"),
        ("mixture", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, "PEFT's ParamWrapper"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as error:
        lora.check_adapters(adapted(base_model(name), **options), perturbed=False)
    assert "--ds.lora.target_modules" in str(error.value)


def test_adapters_of_the_input_embedding_are_refused_for_perturbations() -> None:
    model = adapted(base_model("untied"), target_modules=["embed_tokens", "q_proj"])
    lora.check_adapters(model, perturbed=False)
    with pytest.raises(UsageError, match="embed_tokens: it is the input embedding, of which a perturbation"):
        lora.check_adapters(model, perturbed=True)


def moved(name: str, options: dict[str, Any]) -> Any:
    """A model with adapters of which all that trains has moved: the matrices of embeddings and the copies too."""
    model = adapted(base_model(name), **options)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.weight: its matrix is also that of lm_head.weight"),
        ({"target_modules": ["lm_head"]}, "embed_tokens.weight: its matrix is also that of lm_head.weight"),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "also that of lm_head.weight"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "also that of lm_head.weight"),
    ],
)
def test_tied_matrices_that_would_be_merged_wrongly_are_refused(options: dict[str, Any], named: str) -> None:
    """And they are merged wrongly: the merged model is another one than that of PEFT's forward."""
    model = moved("tied", options)
    with pytest.raises(UsageError, match=named) as error:
        lora.check_merged_in_place(model, perturbed=False)
    assert "LoraConfig" in str(error.value)
    expected = logits_of(model)
    model.merge_adapter()
    assert (logits_of(engine_of_merged(model, "tied")) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {}),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("untied", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
        ("untied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("conv1d", {}),
    ],
)
def test_what_peft_merges_in_place_is_its_own_model(name: str, options: dict[str, Any]) -> None:
    """The base model has PEFT's merged weights under the names that TRL sends, as it has in vLLM."""
    model = moved(name, options)
    lora.check_merged_in_place(model, perturbed=False)
    expected = logits_of(model)
    model.merge_adapter()
    assert (logits_of(engine_of_merged(model, name)) - expected).abs().max() <= 1e-4


# ---- planted faults: merged weights that are not the trainer's model -----------------------------------------------


def mismatch(model: Any, engine: Any) -> float:
    """The largest difference of log-probabilities, as the first step of a training measures it."""
    trainer, engine_logits = logits_of(model).log_softmax(-1), logits_of(engine).log_softmax(-1)
    return (trainer - engine_logits).abs().max().item()


def test_a_wrong_scale_and_a_stale_adapter_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(base_model("untied"))
    stale = engine_of(model, "untied")
    assert mismatch(model, stale) < 1e-4
    lora_models.train(model, seed=6)
    assert mismatch(model, stale) > 0.01
    right = lora.update_of
    monkeypatch.setattr(lora, "update_of", lambda adapter: 1.1 * right(adapter))
    assert mismatch(model, engine_of(model, "untied")) > 0.01


def test_a_missing_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PEFT calls the module below an adapter otherwise, the adapter has no weight."""
    model = adapted(base_model("untied"), target_modules=["q_proj"])
    monkeypatch.setattr(lora, "_WRAPPED", ".original_layer")
    with pytest.raises(RuntimeError, match="no weight of the model lies below the adapters of base_model"):
        lora.engine_weights(model)
