# SPDX-License-Identifier: Apache-2.0
"""QLoRA: engines get the dequantised weights; its folder is merged as it was trained."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from ngrpo.machine.models import adapters, four_bit, lora
from perturbations import UsageError
from tests.support import lora_models

TOKENS = torch.arange(3, 27).view(2, 12) % lora_models.VOCABULARY


def log_probs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float().log_softmax(-1)


def mismatch(model: Any, engine: Any) -> torch.Tensor:
    return (log_probs(model) - log_probs(engine)).abs()


# ---- with a bitsandbytes that is not installed: codes of one weight each ---------------------------------------------


class Codes(torch.nn.Parameter):
    """A parameter as bitsandbytes has it: integers, and a state with what the weights were."""

    quant_state: Any = None


def quantised(weight: torch.Tensor) -> Codes:
    """Codes in steps of 1/64, of which the weight is restored up to half a step."""
    codes = Codes((weight * 64).round().to(torch.int16).reshape(-1, 1), requires_grad=False)
    codes.quant_state = SimpleNamespace(shape=weight.shape, dtype=weight.dtype)
    return codes


def with_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `bitsandbytes.functional.dequantize_4bit` for :class:`Codes` in place; PEFT must have made its model."""
    functional = ModuleType("bitsandbytes.functional")
    functional.dequantize_4bit = lambda codes, state: codes.reshape(state.shape).to(state.dtype) / 64  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)


def test_the_update_is_added_to_the_dequantised_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_models.adapted(lora_models.base_model("untied"), target_modules=["q_proj"])
    with_stand_in(monkeypatch)
    attention = model.base_model.model.model.layers[0].self_attn
    plain = attention.q_proj.base_layer.weight.detach().clone()
    attention.q_proj.base_layer.weight = quantised(plain)
    attention.k_proj.weight = quantised(attention.k_proj.weight.detach())
    sent = {weight.name: weight.merged() for weight in lora.changed_weights(model)}
    dequantised = (plain * 64).round() / 64
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(sent[name], dequantised + lora.update_of(attention.q_proj))
    assert not torch.equal(dequantised, plain)
    unadapted = sent[name.replace("q_proj", "k_proj")]
    assert unadapted.shape == (16, 16) and unadapted.dtype == torch.float32, "no codes reach an engine"


def test_layers_are_trained_on_a_cpu_and_load_their_own_checkpoint() -> None:
    layer: Any = torch.nn.Linear(4, 4, bias=False)
    layer.weight = quantised(layer.weight.detach())
    layer.support_avx512bf16_for_cpu = True
    other = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(layer, other)
    four_bit.prepare(model)
    assert not layer.support_avx512bf16_for_cpu
    state = {**model.state_dict(), "0.weight.absmax": torch.zeros(1), "0.weight.quant_state.bitsandbytes__nf4": None}
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"1\.weight\.absmax"):
        model.load_state_dict({**state, "1.weight.absmax": torch.zeros(1)})


def test_a_quantised_adapter_names_the_package_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert four_bit.read_config(tmp_path) is None
    four_bit.write_config(lora_models.base_model("untied"), tmp_path)
    assert not (tmp_path / four_bit.CONFIG).exists(), "a model in whole numbers of bytes"
    (tmp_path / four_bit.CONFIG).write_text(json.dumps({"load_in_4bit": True}))
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(UsageError, match=r"was trained on 4-bit weights .* Fix: pip install bitsandbytes"):
        four_bit.read_config(tmp_path)


# ---- with bitsandbytes ----------------------------------------------------------------------------------------------


def options(compute: torch.dtype) -> Any:
    """As OpenRLHF has them, but for the dtype."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose matrices are whole blocks of 64 weights."""
    lora_models.base_model("untied").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def qlora(folder: Path, dtype: torch.dtype) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=options(dtype))
    four_bit.prepare(base)
    model = lora_models.adapted(base)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # as DeepSpeed does
    return model


def engine_of(folder: Path, dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> Any:
    from transformers import AutoModelForCausalLM

    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine.load_state_dict(weights, strict=False)
    return engine.eval()


def test_engines_have_the_weights_that_are_trained(folder: Path) -> None:
    """To 1e-4 in float32; the checkpoint's own weights with the same adapters are another model."""
    model = qlora(folder, torch.float32)
    lora.check_adapters(model, perturbed=True)
    weights = lora.engine_weights(model)
    engine = engine_of(folder, torch.float32, {weight.name: weight.merged() for weight in weights})
    assert mismatch(model, engine).max() < 1e-4
    whole = dict(lora_models.base_model("untied").named_parameters())
    updates = {w.name: whole[w.name].detach() + lora.update_of(w.adapter) for w in weights if w.adapter is not None}
    assert mismatch(model, engine_of(folder, torch.float32, updates)).max() > 0.1


def test_adapters_alone_are_trained_also_after_a_forward_without_gradients(folder: Path) -> None:
    model = qlora(folder, torch.bfloat16)
    log_probs(model)
    model.train()
    model(TOKENS).logits.float().log_softmax(-1)[..., 5].sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if lora.is_factor(name)}
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in model.named_parameters() if name in trained)


def test_its_own_state_is_loaded_to_the_bit(folder: Path) -> None:
    model = qlora(folder, torch.bfloat16)
    wanted = log_probs(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("weight.absmax") for name in state)
    lora_models.train(model, seed=9)
    assert not torch.equal(log_probs(model), wanted)
    model.load_state_dict(state)
    assert torch.equal(log_probs(model), wanted)


def test_a_folder_is_merged_as_it_was_trained(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = qlora(folder, torch.bfloat16)
    model.save_pretrained(tmp_path / "adapter")
    four_bit.write_config(model, tmp_path / "adapter")
    tokenizer = SimpleNamespace(save_pretrained=lambda target: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    adapters.merge(str(folder), tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert getattr(merged.config, "quantization_config", None) is None
    parameters = dict(merged.named_parameters())
    for weight in lora.engine_weights(model):
        assert torch.equal(parameters[weight.name], weight.merged()), weight.name
