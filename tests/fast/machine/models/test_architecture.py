# SPDX-License-Identifier: Apache-2.0
"""What is told of a model from its config.json alone: by which class it rolls out, and what cannot be used."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.machine.models import architecture
from ngrpo.workbench.evaluate import engine
from perturbations.errors import UsageError
from tests.support.run import check_pairs, run_of

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="reads vLLM's table of classes")


def config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **more}


BACKEND = "TransformersForCausalLM (vLLM's Transformers backend)"
GEMMA3 = "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("model_config", "engine"),
    [
        (config("LlamaForCausalLM", "llama"), "LlamaForCausalLM (vLLM's own)"),
        (config("SmolLM3ForCausalLM", "smollm3"), BACKEND),
        (config(GEMMA3, "gemma3", vision_config={}, text_config={}), f"{GEMMA3} (vLLM's own, multimodal)"),
        (config("XGLMForCausalLM", "xglm"), BACKEND),  # vLLM has no class of its own for it
    ],
)
def test_the_classes_of_engine_and_trainer(model_config: dict[str, Any], engine: str) -> None:
    support = architecture.support_from(model_config)
    (trainer,) = model_config["architectures"]
    assert support.engine == engine
    assert support.trainer == trainer
    assert support.refused == []
    assert engine in str(support)
    assert trainer in str(support)


@pytest.mark.parametrize(
    ("model_config", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no model of type ''"),
        (config("BertModel", "bert"), "an embedding model"),
        (config("T5ForConditionalGeneration", "t5", is_encoder_decoder=True), "encoder-decoder"),
        (config("FooForCausalLM", "foo"), "no model of type 'foo'"),
        (config("EagleLlamaForCausalLM", "llama"), "a draft model"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    model_config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    with pytest.raises(UsageError, match=reason):
        architecture.check_perturbed(str(tmp_path), {"name": "neighbor"})


def test_heads_that_vllm_s_cpu_attention_cannot_take(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A training's dry run and start, an evaluation, a diagnosis and doctor say so in one line."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}

    def refuses(hardware: str = "cpu", **more: int) -> bool:
        (tmp_path / "config.json").write_text(json.dumps(config("LlamaForCausalLM", "llama", **sizes, **more)))
        flags = ["--actor.model_name_or_path", str(tmp_path), "--ds.attn_implementation", "sdpa"]
        try:
            check_pairs(flags, run_of(), hardware=hardware)
        except UsageError as error:
            assert "heads of size 16 (vLLM has 32, 64, 80, " in str(error)
            assert "\n" not in str(error)
            return True
        return False

    assert not refuses(head_dim=32)
    assert not refuses("cuda")
    assert not refuses(kv_lora_rank=8)
    assert refuses()
    with pytest.raises(UsageError, match="heads of size 16"):
        engine.build(str(tmp_path), None, 32, hardware="cpu")
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert "heads of size 16" in capsys.readouterr().out


def test_what_config_json_does_not_tell_is_said() -> None:
    assert "names no architecture" in str(architecture.support_from({"model_type": "llama"}))
    remote = config("OwnForCausalLM", "own", auto_map={"AutoModelForCausalLM": "own.Own"})
    remote["quantization_config"] = {"quant_method": "awq"}
    told = str(architecture.support_from(remote))
    assert told.count("not known:") == 4
    assert "auto_map" in told
    assert "quantization" in told


@pytest.mark.parametrize(
    ("verdict", "remark", "place"),
    [
        ("right", "the replay is exact", "notes"),
        ("doubtful", "wrong by the rule on largest gaps", "notes"),
        ("unknown", "vLLM 0.29 did not run a tiny model of it on a CPU", "unknown"),
        ("wrong", "on a tiny model of this type the replay is wrong (docs/models.md)", "refused"),
    ],
)
def test_what_the_table_tells_of_a_type(monkeypatch: pytest.MonkeyPatch, verdict: str, remark: str, place: str) -> None:
    sentence = "the replay is wrong" if verdict == "wrong" else remark
    monkeypatch.setattr(architecture, "_packaged_table", lambda file: {"llama": (verdict, sentence)})
    support = architecture.support_from(config("LlamaForCausalLM", "llama"))
    for name in ("notes", "unknown", "refused"):
        assert any(remark in line for line in getattr(support, name)) == (name == place)
    assert (remark in str(support)) == (verdict != "wrong")


def test_a_type_of_which_engine_and_trainer_make_different_models() -> None:
    vision = config("Cohere2VisionForConditionalGeneration", "cohere2_vision", vision_config={})
    assert any("logit_scale" in reason for reason in architecture.support_from(vision).refused)
    assert not architecture.support_from({**vision, "text_config": {"logit_scale": 1.0}}).refused


@pytest.mark.parametrize(("count", "expected"), [(1, False), (8, True), ([64, 64], True), ([1, 1], False)])
def test_experts_of_several_kinds_are_listed(tmp_path: Path, count: object, expected: bool) -> None:
    """As in ERNIE 4.5 VL, which has experts of texts and of pictures."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_vl_moe", "moe_num_experts": count}))
    assert architecture.has_experts(str(tmp_path)) == expected
