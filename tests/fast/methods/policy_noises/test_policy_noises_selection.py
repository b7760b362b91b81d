# SPDX-License-Identifier: Apache-2.0
"""Which weights a policy noise is for, by the names that the installed transformers gives them."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ngrpo.config import input_checks, rules
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import policy_noises
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from perturbations.errors import UsageError
from tests.support.run import run_of, run_with


def parameter_names(model_type: str, **options: object) -> dict[str, torch.Size]:
    """Names and shapes of a model's parameters, as the installed transformers has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def of_last_block(names: Iterable[str]) -> set[str]:
    return {name.partition(".layers.1.")[2] for name in names} - {""}


EXPERTS = {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3_moe", {f"mlp.{name}" for name in EXPERTS}),
        ("mixtral", {f"mlp.{name}" for name in EXPERTS}),
        # Its experts have biases as well, which are none of a linear layer's weights.
        ("gpt_oss", {"mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("llama", {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}),
    ],
)
def test_psn_noises_the_matrices_of_all_experts(model_type: str, expected: set[str]) -> None:
    """In transformers 5 the matrices of all experts are one parameter, whose name does not end in "weight"."""
    psn = policy_noises.create("psn")
    shapes = parameter_names(model_type)
    selected = [name for name in shapes if psn.selects(name)]
    assert of_last_block(selected) == expected
    for name in selected:
        dimensions = 3 if ".experts." in name else 2
        assert len(shapes[name]) == dimensions, name


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {"input_layernorm", "post_attention_layernorm"}),
        # Its post_attention_layernorm is before the MLP, the norm at the end of attention has another name.
        ("glm4", {"input_layernorm", "post_attention_layernorm"}),
        # In these it is at the end of attention.
        ("gemma2", {"input_layernorm", "pre_feedforward_layernorm"}),
        ("afmoe", {"input_layernorm", "pre_mlp_layernorm"}),
        ("apertus", {"attention_layernorm", "feedforward_layernorm"}),
        ("cohere", {"input_layernorm"}),  # one for both
    ],
)
def test_aqn_noises_the_norms_before_attention_and_mlp(model_type: str, expected: set[str]) -> None:
    selected = policy_noises.create("aqn").selected(parameter_names(model_type))
    assert of_last_block(selected) == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("model_type", ["olmo2", "olmo3", "exaone4"])
def test_aqn_refuses_a_model_whose_norms_are_behind_attention_and_mlp(model_type: str) -> None:
    """Of these it noised the norm behind the attention, and none for the MLP."""
    with pytest.raises(UsageError, match=r"layers\.0 has post_attention_layernorm and no norm before its attention"):
        policy_noises.create("aqn").selected(parameter_names(model_type))


# --- before a run trains --------------------------------------------------------------------------------------


AQN = policy_noises.create("aqn").spec()


def test_a_start_and_a_dry_run_refuse_the_model(tmp_path: Path) -> None:
    """The first stage of aqn has no noise, so that the error came after the steps of it."""
    config = '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 24, "n_head": 2}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    model = str(tmp_path)
    words = ["--reward.remote_url", "r.py", "--algo.advantage.estimator", "group_norm"]
    words += ["--rollout.n_samples_per_prompt", "4", "--actor.model_name_or_path", model]
    complete = CompleteRun(run=run_of(policy_noise=AQN), flags=Flags(words))
    of_dry_run = dict(rules.dry_run_checks(complete))[f"the options fit the model {model}"]
    for check in (partial(rules.check, "model", complete), of_dry_run):
        with pytest.raises(UsageError, match="--policy_noise aqn: the model's parameters"):
            check()
    assert input_checks.check_model(model, None) is None
    assert input_checks.check_model(model, None, policy_noises.create("psn")) is None


def test_the_actor_looks_for_the_weights_once_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def init_model_from_pretrained(self, strategy: str, pretrain: str) -> None:
            self.actor = SimpleNamespace(model=SimpleNamespace(module=nn.ModuleDict({"ln_1": nn.LayerNorm(4)})))

    run_with(monkeypatch, policy_noise=AQN)
    with pytest.raises(UsageError, match=r"\(ln_1\.weight, ln_1\.bias, …\) are none of"):
        policy_model_actor(Plain)().init_model_from_pretrained("strategy", pretrain="m")
