# SPDX-License-Identifier: Apache-2.0
"""Whether a model can be rolled out and trained with a perturbation, told from its config.json alone.

vLLM's table of classes is read from its source, without importing vLLM; transformers' classes by their names. What
these do not tell is said to be unknown: the engine proves the rest on the model itself, before its first request.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ngrpo.machine.models import config_file
from perturbations.errors import UsageError

BACKEND = "vLLM's Transformers backend"
_GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_OTHERS = {
    "_EMBEDDING_MODELS": "an embedding model",
    "_REWARD_MODELS": "a reward model",
    "_TOKEN_CLASSIFICATION_MODELS": "a classifier of tokens",
    "_SEQUENCE_CLASSIFICATION_MODELS": "a classifier",
    "_SPECULATIVE_DECODING_MODELS": "a draft model",
    "_LATE_INTERACTION_MODELS": "a retrieval model",
}
# Listed among vLLM's multimodal classes under a heading of its own.
_ENCODER_DECODERS = ("CohereAsrForConditionalGeneration", "NemotronParseForConditionalGeneration")
_ENCODER_DECODERS += ("WhisperForConditionalGeneration",)
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid")


@dataclass(frozen=True)
class Support:
    """What config.json tells of a model.

    Attributes:
        model_type, architecture: as it names them; "" where it does not.
        engine: the class that vLLM serves it with, and of whom it is.
        trainer: the class of transformers that OpenRLHF trains.
        refused: why it cannot be used; empty where nothing speaks against it.
        unknown: what config.json does not tell.
        notes: what is particular about it.
    """

    model_type: str
    architecture: str
    engine: str = ""
    trainer: str = ""
    refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def told(self) -> str:
        """All of it in a line."""
        name = f"{self.architecture or 'no architecture'} ({self.model_type or 'no model_type'})"
        if self.refused:
            return f"{name} is not supported"
        parts = [f"{name}: {self.engine} rolls out, transformers' {self.trainer} is trained"]
        parts += self.notes
        parts += [f"not known: {each}" for each in self.unknown]
        return "; ".join(parts)


def of_model(name: str, *, ask_hub: bool = False) -> Support | None:
    """What is told of a model by its name; None where its config.json is not here and cannot be asked for.

    Args:
        name: as ``--model`` takes it: a packaged model, a folder, or a hub name.
        ask_hub: load config.json, and nothing else, of a hub name that is not in the hub's cache.

    Raises:
        UsageError: for a config.json that is not JSON.
    """
    path = config_file.find(name, ask_hub=ask_hub)
    return None if path is None else of_config(config_file.read(path))


def of_config(config: Mapping[str, Any]) -> Support:
    """What a config.json tells.

    Args:
        config: its content.
    """
    architectures = config.get("architectures") or [""]
    architecture, model_type = str(architectures[0]), str(config.get("model_type") or "")
    remote = bool(config.get("auto_map"))
    refused, unknown, notes = [], [], []
    trainer = _trainer(config, model_type)
    if not architecture:
        unknown.append("by which class vLLM serves it, since config.json names no architecture")
    if config.get("is_encoder_decoder") or architecture in _ENCODER_DECODERS:
        refused.append("an encoder-decoder model. Use a decoder-only model")
    if trainer is None and remote:
        unknown.append("what the model's own code (auto_map) does")
        trainer = "AutoModelForCausalLM with the model's own code"
    elif trainer is None:
        refused.append(
            f"the installed transformers has no model of type {model_type!r} that generates text. Install the release"
            " that OpenRLHF pins, or use another model"
        )
    engine = _engine(architecture, remote, refused, unknown) if architecture else "vLLM"
    if config.get("quantization_config"):
        unknown.append("whether its quantization leaves the embedding alone, which the engine checks at start")
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    if text.get("hidden_size_per_layer_input"):
        notes.append("its per-layer embeddings follow the token in the text, its main embedding is perturbed")
    if _is_recurrent(text):
        notes.append("it has recurrent layers")
    _compare_formulas(model_type, text, refused, unknown)
    verdict, sentence = _measured(model_type)
    if verdict == "unknown" and not refused:
        unknown.append(f"the gap of this type: {sentence}")
    elif verdict == "wrong":
        refused.append(f"on a tiny model of this type {sentence} (docs/models.md)")
    elif verdict != "unknown":
        notes.append(f"a tiny model of this type: {sentence}" + " (docs/models.md)" * (verdict == "doubtful"))
    return Support(model_type, architecture, engine, trainer or "", tuple(refused), tuple(unknown), tuple(notes))


def _compare_formulas(model_type: str, text: Mapping[str, Any], refused: list[str], unknown: list[str]) -> None:
    """Where vLLM 0.29 and transformers 5.15 make different models of the same config.json."""
    if model_type == "cohere2_vision" and text.get("logit_scale", 0.0625) != 1.0:
        refused.append("vLLM multiplies logits by its logit_scale and transformers' class does not (docs/models.md)")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaled = "mscale" in rope and "mscale_all_dim" in rope and rope.get("apply_yarn_scaling", True)
    if text.get("model_type") == "ministral3" and scaled:
        unknown.append(
            "whether vLLM scales its rotary embedding as transformers does: from config.json it does not, and"
            ' "apply_yarn_scaling": false in rope_parameters corrects it (docs/models.md)'
        )


def check_perturbed(model: str, spec: Mapping[str, Any] | None) -> str | None:
    """Raises ``UsageError`` for a model that cannot be used, by its config.json; returns why it was not read, or None.

    Args:
        model: as ``--model`` takes it.
        spec: the run's perturbation; without one a model whose inputs cannot be replaced passes too.
    """
    support = of_model(model) if model else None
    if support is None:
        return "not checked: its config.json is not here."
    if spec is not None and support.refused:
        raise UsageError(f"model {model!r}, {support.architecture or 'no architecture'}: {'; '.join(support.refused)}.")
    return None


def told_of(model: str) -> str:
    """What config.json tells of a model, for the line of a check."""
    support = of_model(model) if model else None
    return f"model {model}{f': {support.told()}' if support else ''}"


def _engine(architecture: str, remote: bool, refused: list[str], unknown: list[str]) -> str:
    tables = _vllm_tables()
    if tables is None:
        unknown.append("by which class vLLM serves it, since vLLM is not installed here")
        return "vLLM"
    for table in _GENERATING:
        if architecture in tables.get(table, {}):
            kind = "vLLM's own" if table == _GENERATING[0] else "vLLM's own, multimodal"
            return f"{tables[table][architecture]} ({kind})"
    listed = tables.get("_TRANSFORMERS_SUPPORTED_MODELS", {}).get(architecture)
    if listed is not None:
        return f"{listed} ({BACKEND})"
    for table, kind in _OTHERS.items():
        if architecture in tables.get(table, {}):
            refused.append(f"{kind}, which generates nothing. Use a causal language model")
            return ""
    if remote or _known_to_transformers(architecture):
        unknown.append(f"whether {BACKEND} can take it, since vLLM has no class of its own for it")
        return f"TransformersForCausalLM ({BACKEND})"
    refused.append(
        f"neither vLLM nor the installed transformers has a class {architecture!r}. Use another model, or the releases"
        " that docs/install.md names"
    )
    return ""


@cache
def _vllm_tables() -> dict[str, dict[str, str]] | None:
    """The tables of vLLM's registry: architecture to class; None where vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    tables: dict[str, dict[str, str]] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        table = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(table, ast.Dict):
            pairs = zip(table.keys, table.values)
            # Tables that are merged of others have entries without a key.
            tables[target.id] = {
                str(ast.literal_eval(key)): str(ast.literal_eval(value)[1])
                for key, value in pairs
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
            }
    return tables


def _trainer(config: Mapping[str, Any], model_type: str) -> str | None:
    """OpenRLHF trains what has a vision_config as an image-text model, all else as a causal language model."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        return "model"
    text, pictures = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = pictures if "vision_config" in config else text
    return names.get(model_type)


def _known_to_transformers(architecture: str) -> bool:
    try:
        import transformers
    except ImportError:
        return False
    return hasattr(transformers, architecture)


def _is_recurrent(text: Mapping[str, Any]) -> bool:
    layers = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern") or ()
    listed = {str(layer) for layer in layers}
    return any(name in layer for layer in listed for name in _RECURRENT) or any(
        name in text for name in ("mamba_d_state", "ssm_state_size", "state_size")
    )


def _measured(model_type: str) -> tuple[str, str]:
    """The verdict on a tiny model of this type, as `make models` found it, and words for it."""
    table = json.loads(files("ngrpo.machine.models").joinpath("measured_models.json").read_text(encoding="utf-8"))
    unlisted = ("unknown", "docs/models.md does not list it; python -m benchmarks.models measures it")
    verdict, text = table.get(model_type, unlisted)
    return verdict, text
