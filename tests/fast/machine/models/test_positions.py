# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json that vLLM and transformers read differently, against the rotary embeddings that both make."""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo import cli
from ngrpo.machine.models import architecture, positions
from perturbations.errors import UsageError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="reads vLLM's sources")

TRAINED, STRETCHED = 32, 128
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
STRETCHES = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0]


def config(model_type: str = "llama", rope: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    name = {"llama": "Llama", "phi3": "Phi3", "mistral": "Mistral", "qwen2": "Qwen2"}[model_type]
    values = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, **SIZES, **more}
    if model_type == "phi3":
        values |= {"pad_token_id": 0, "original_max_position_embeddings": TRAINED}
    values.setdefault("max_position_embeddings", STRETCHED)
    return values if rope is None else {**values, "rope_parameters": dict(rope)}


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """vLLM's `get_rope`, in an engine for texts of at most a number of tokens."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    def rotated(text: Any, longest: int) -> torch.Tensor:
        """The cosines and sines, (2, T, D / 2), of the positions of a text of that length."""
        current = VllmConfig()
        current.model_config = type("", (), {"max_model_len": longest, "dtype": torch.float32})()
        rotary_embedding._ROPE_DICT.clear()
        with set_current_vllm_config(current):
            made = rotary_embedding.get_rope(
                text.hidden_size // text.num_attention_heads,
                max_position=text.max_position_embeddings,
                rope_parameters=text.rope_parameters,
                dtype=torch.float32,
            )
        if hasattr(made, "long_short_cos_sin_cache"):
            table = made.long_short_cos_sin_cache[TRAINED if made.use_long_rope else 0 :]
        else:
            table = made.cos_sin_cache
        return torch.stack(table[:TRAINED].chunk(2, dim=-1))

    yield rotated
    rotary_embedding._ROPE_DICT.clear()


def of_trainer(text: Any) -> torch.Tensor:
    """As the engine's, of transformers' class."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    made = {"llama": LlamaRotaryEmbedding, "phi3": Phi3RotaryEmbedding}[text.model_type](text)
    parts = made(torch.zeros(1, 1, dtype=torch.float32), torch.arange(TRAINED)[None])
    return torch.stack([part[0, :, : part.shape[-1] // 2] for part in parts])


@pytest.mark.parametrize(
    ("model_type", "rope", "longest", "differs"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}, STRETCHED, False),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, STRETCHED, False),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, STRETCHED, False),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "max_trained_positions": 64}, 128, True),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "alpha": 8.0}, STRETCHED, True),
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, STRETCHED, True),
        ("phi3", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, STRETCHED, False),
        ("llama", YARN, STRETCHED, False),
        ("llama", {**YARN, "partial_rotary_factor": 0.5}, STRETCHED, False),
        ("llama", {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, STRETCHED, False),
        ("llama", {**YARN, "attention_factor": 1.0}, STRETCHED, True),
        ("llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, STRETCHED, True),
        ("llama", {**YARN, "mscale": 0.7}, STRETCHED, False),  # transformers reads mscale beside mscale_all_dim alone
        ("llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "apply_yarn_scaling": False}, STRETCHED, False),
        ("llama", {**YARN, "attn_factor": 2.0}, STRETCHED, True),
        ("llama", {**YARN, "extrapolation_factor": 0.5}, STRETCHED, True),
        ("phi3", LONG, STRETCHED, False),
        ("phi3", {**LONG, "long_factor": STRETCHES}, TRAINED, False),
        ("phi3", {**LONG, "long_factor": STRETCHES}, STRETCHED, True),
        ("phi3", {**LONG, "factor": 2.0 * STRETCHED / TRAINED}, TRAINED, True),  # which vLLM does not read
        ("phi3", {**LONG, "attention_factor": 1.0}, TRAINED, True),
        ("phi3", {**LONG, "short_mscale": 1.0, "long_mscale": 1.0}, TRAINED, True),
        ("phi3", {**LONG, "short_mscale": 1.0, "long_mscale": 1.0, "attention_factor": 1.0}, TRAINED, False),
    ],
)
def test_a_difference_is_told_where_the_embeddings_differ(
    model_type: str, rope: dict[str, Any], longest: int, differs: bool, engine: Any
) -> None:
    from transformers import AutoConfig

    def texts() -> Any:
        return AutoConfig.for_model(**config(model_type, rope))

    of_engine, trainer = engine(texts(), longest), of_trainer(texts())
    are_equal = of_engine.shape == trainer.shape and torch.allclose(of_engine, trainer, atol=1e-5)
    assert are_equal is not differs
    found = [one for one in positions.differences(config(model_type, rope), "") if longest > one.beyond]
    assert bool(found) is differs, found


@pytest.mark.parametrize("further", [{"attention_factor": 1.3}, {"mscale": 0.707, "mscale_all_dim": 0.3}])
def test_the_fix_of_yarn_makes_both_sides_equal(further: dict[str, float], engine: Any) -> None:
    from transformers import AutoConfig

    (difference,) = positions.differences(config(rope={**YARN, **further}), "")
    fixed = {**YARN, **further, "attn_factor": json.loads(difference.fix.split(": ")[1].split(" ")[0])}
    assert not positions.differences(config(rope=fixed), "")
    text = AutoConfig.for_model(**config(rope=fixed))
    assert torch.allclose(engine(text, STRETCHED), of_trainer(text), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "engine_source", "said", "beyond"),
    [
        (config(sliding_window=16), "", "vLLM's attention sees the last 16 tokens .* transformers' llama all", 16),
        (config(sliding_window=16, layer_types=["full_attention", "sliding_attention"]), "", "the last 16 tokens", 16),
        (config(sliding_window=16, layer_types=["full_attention"] * 2), "", None, 0),
        (config(sliding_window=0), "", None, 0),
        (config("mistral", sliding_window=16), "", None, 0),
        (config("mistral", sliding_window=16, layer_types=["full_attention"] * 2), "", "in all layers, and vLLM", 16),
        (config("mistral", sliding_window=16, layer_types=["full_attention", "sliding_attention"]), "", "in all", 16),
        (config("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=0), "", None, 0),
        (config(logit_scale=0.5), 'getattr(config, "logit_scale", 1.0)', "vLLM multiplies logits by logit_scale", 0),
        (config(logit_scale=0.5), "", None, 0),
        (config(logit_scale=1.0), 'getattr(config, "logit_scale", 1.0)', None, 0),
    ],
)
def test_windows_and_scales(given: dict[str, Any], engine_source: str, said: str | None, beyond: int) -> None:
    found = positions.differences(given, engine_source)
    assert [one.beyond for one in found] == [beyond] * (said is not None)
    if said is not None:
        assert re.search(said, found[0].what)


def test_a_start_and_doctor_refuse_such_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    yarn, longrope = tmp_path / "yarn", tmp_path / "longrope"
    for folder, values in {
        yarn: config(rope={**YARN, "attention_factor": 1.0}),
        longrope: config("phi3", {**LONG, "long_factor": STRETCHES}),
    }.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
    spec = {"name": "neighbor"}
    with pytest.raises(UsageError, match=r"YaRN multiplies .* by 1\.139 in vLLM.* by 1 in transformers.*attn_factor"):
        architecture.check_perturbed(str(yarn), spec, longest=TRAINED)
    architecture.check_perturbed(str(yarn), None, longest=TRAINED)
    architecture.check_perturbed(str(longrope), spec, longest=TRAINED)
    with pytest.raises(UsageError, match=f"LongRoPE's long_factor .* Give --data.max_len {TRAINED} or less"):
        architecture.check_perturbed(str(longrope), spec, longest=TRAINED + 1)
    found = architecture.support_of(str(longrope))
    assert found is not None and f"with more than {TRAINED} tokens LongRoPE" in str(found)
    line = f"train --model {longrope} --task arithmetic --perturbation neighbor --dry-run --data.max_len 64"
    assert cli.main(line.split()) == 1
    assert "LongRoPE's long_factor" in " ".join(capsys.readouterr().out.split())
