# SPDX-License-Identifier: Apache-2.0
"""The names in --ds.lora.target_modules: those of the model's modules, or an error before the model is loaded."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("openrlhf")

from ngrpo.config.lora_check import check_target_modules
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import UsageError
from tests.support import lora_models


@pytest.fixture
def config_of(tmp_path: Path):
    def write(name: str, **more: object) -> Path:
        model_type, options = lora_models.MODELS[name]
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **options, **more}))
        return path

    return write


def flags_of(*targets: str, rank: str = "8") -> Flags:
    return Flags(["--ds.lora.rank", rank, "--ds.lora.target_modules", *targets])


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("untied", ["q_proj", "v_proj", "lm_head", "embed_tokens"]),
        ("untied", ["self_attn.q_proj", "model.layers.0.mlp.up_proj"]),
        ("conv1d", ["c_attn", "c_proj"]),
        ("mixture", ["q_proj", "o_proj"]),
    ],
)
def test_names_of_modules_are_accepted_as_peft_finds_them(config_of, model: str, targets: list[str]) -> None:
    check_target_modules(flags_of(*targets), config_of(model))
    lora_models.adapted(lora_models.base_model(model), target_modules=targets, fan_in_fan_out=model == "conv1d")


def test_one_unknown_name_among_others_is_an_error_that_peft_does_not_raise(config_of) -> None:
    told = (
        r"^--ds\.lora\.target_modules qproj: the model has no such module that can get an adapter\. Did you mean q_proj\?"
        r" Give some of embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head, or leave"
    )
    with pytest.raises(UsageError, match=told):
        check_target_modules(flags_of("qproj", "v_proj"), config_of("untied"))
    model = lora_models.adapted(lora_models.base_model("untied"), target_modules=["qproj", "v_proj"])
    assert {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name} == {"v_proj"}


def test_what_a_mixture_or_another_type_lacks(config_of) -> None:
    with pytest.raises(UsageError, match="gate_proj: the model has no such module"):
        check_target_modules(flags_of("q_proj", "gate_proj"), config_of("mixture"))
    with pytest.raises(UsageError, match="Give some of wte, wpe, c_attn, c_proj, c_fc, lm_head"):
        check_target_modules(flags_of("q_proj"), config_of("conv1d"))


def test_the_default_s_word_is_no_name_of_a_module(config_of) -> None:
    with pytest.raises(UsageError, match="Leave the flag out: adapters on all linear layers"):
        check_target_modules(flags_of("all-linear"), config_of("untied"))


def test_nothing_is_compared_without_adapters_or_a_model_to_look_at(config_of) -> None:
    check_target_modules(flags_of("qproj", rank="0"), config_of("untied"))
    check_target_modules(flags_of("qproj"), None)
    own_code = config_of("untied", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert architecture.adaptable_modules(own_code) is None
    check_target_modules(flags_of("qproj"), own_code)
