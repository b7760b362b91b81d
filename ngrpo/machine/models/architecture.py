# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says: its sizes, its parameters' names, and whether it can be rolled out and trained.

No weights are loaded. vLLM's table of classes is read from its source, without importing vLLM.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.machine.models import packaged
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKEND = "vLLM's Transformers backend"
_NOT_GENERATING = {
    "_EMBEDDING_MODELS": "an embedding model",
    "_REWARD_MODELS": "a reward model",
    "_TOKEN_CLASSIFICATION_MODELS": "a classifier of tokens",
    "_SEQUENCE_CLASSIFICATION_MODELS": "a classifier",
    "_SPECULATIVE_DECODING_MODELS": "a draft model",
    "_LATE_INTERACTION_MODELS": "a retrieval model",
}
# Among vLLM's multimodal classes.
_ENCODER_DECODERS = ("CohereAsrForConditionalGeneration", "NemotronParseForConditionalGeneration")
_ENCODER_DECODERS += ("WhisperForConditionalGeneration",)
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid")


def find_config(name: str, *, ask_hub: bool = False) -> Path | None:
    """Where a model's config.json is; None where it is neither here nor, if asked, on the hub.

    Args:
        name: as ``--model`` takes it: a packaged model, a folder, or a hub name.
        ask_hub: load config.json, and nothing else, of a hub name that is not in the hub's cache.
    """
    folder = packaged.folder_of(name) if name in packaged.PACKAGED else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if name in packaged.PACKAGED or folder.exists():
        return None
    try:
        from huggingface_hub import hf_hub_download

        wait = packaged.HUB_SECONDS
        return Path(hf_hub_download(name, "config.json", etag_timeout=wait, local_files_only=not ask_hub))
    except Exception:  # of any library that sends the request: without a network the file stays unknown
        return None


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        UsageError: for a file that cannot be read or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Download the model again.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: must be a JSON object. Give the model's own config.json.")
    return config


def parameter_names(folder: str) -> tuple[str, ...] | None:
    """The names that the model's class in transformers gives its parameters.

    Args:
        folder: a local model.

    Returns:
        None without a config.json, or for one that transformers cannot make a model of without the folder's own code.
    """
    path = Path(folder).expanduser() / "config.json"
    config = read_config(path) if path.is_file() else {"auto_map": True}
    try:
        return None if config.get("auto_map") else tuple(name for name, _ in _on_meta(config).named_parameters())
    except Exception:  # of any model's code; loading the model reports it
        return None


def _on_meta(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model without memory, of the class that OpenRLHF chooses."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(**config))


# ---- sizes ----


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on.

    Attributes:
        parameters: all of them, a tied head counted once.
        layers: decoder layers.
        hidden: width h of the residual stream.
        intermediate: width m of the MLP, of all experts that a token goes through.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocabulary: V, rows of the embedding.
        head_norms: whether queries and keys are normalised, as in Qwen3.
        source: where the values come from.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norms: bool
    source: str

    @property
    def saved_bytes_per_token(self) -> int:
        """What a layer keeps of each token for the backward pass, with SDPA or flash attention.

        Two RMSNorms: input, float32 copy and output, 8h each; queries and attention output, 4q; keys and values, 4·kv;
        gate, up, activation and their product, 8m; and of normalised heads the float32 copy and the output, 6(q + kv).
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        head_norms = 6 * (queries + keys) if self.head_norms else 0
        return 16 * self.hidden + 4 * queries + 4 * keys + 8 * self.intermediate + head_norms


def size_table() -> dict[str, dict[str, Any]]:
    """config.json, and the number of parameters, of the models that README and recipes name."""
    return json.loads(files("ngrpo.machine.models").joinpath("models.json").read_text(encoding="utf-8"))


def size_of(name: str) -> ModelSize | None:
    """The sizes of a model, from its config.json or from :func:`size_table`; None where neither has them.

    Args:
        name: as ``--model`` takes it.

    Raises:
        UsageError: for a config.json that is not JSON.
    """
    path, table = find_config(name), size_table()
    if path is not None:
        return size_from(read_config(path), str(path))
    return size_from(table[name], "the table of this project") if name in table else None


def size_from(config: Mapping[str, Any], source: str) -> ModelSize | None:
    """The sizes that a config.json says; None for a model that the installed transformers cannot make of it."""
    try:
        return _size(json.dumps(config), source)
    except Exception:  # of the configuration's own class
        return None


@lru_cache
def _size(text: str, source: str) -> ModelSize:
    config = json.loads(text)
    parameters, head_norms = config.pop("parameters", None), config.get("model_type") == "qwen3"
    if parameters is None:
        model = _on_meta(config)
        named = dict(model.named_parameters())
        parameters = sum(parameter.numel() for parameter in named.values())
        head_norms = any("q_norm" in name for name in named)
        config = model.config.get_text_config().to_dict()
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_experts_per_tok") if config.get("moe_intermediate_size") else None
    return ModelSize(
        parameters=parameters,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["moe_intermediate_size"] * experts if experts else config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        head_norms=head_norms,
        source=source,
    )


# ---- support ----


@dataclass(frozen=True)
class Support:
    """Whether a model can be rolled out and trained with a perturbation, as far as config.json tells.

    The engine checks the rest on the model itself, before its first request.

    Attributes:
        model_type, architecture: as config.json names them; "" where it does not.
        engine: the class that vLLM serves it with, and whose class that is.
        trainer: the class of transformers that OpenRLHF trains.
        refused: why it cannot be used; empty if it can.
        unknown: what config.json does not tell.
        notes: what is particular about it.
    """

    model_type: str
    architecture: str
    engine: str = ""
    trainer: str = ""
    refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"{self.architecture or 'no architecture'} ({self.model_type or 'no model_type'})"
        if self.refused:
            return f"{name} is not supported"
        parts = [f"{name}: {self.engine} rolls out, transformers' {self.trainer} is trained", *self.notes]
        return "; ".join([*parts, *(f"not known: {each}" for each in self.unknown)])


def support_of(name: str, *, ask_hub: bool = False) -> Support | None:
    """:func:`support_from` a model's config.json; None if :func:`find_config` does not find it."""
    path = find_config(name, ask_hub=ask_hub)
    return None if path is None else support_from(read_config(path))


def check_perturbed(model: str, spec: Mapping[str, Any] | None) -> str | None:
    """Raises ``UsageError`` for a model that cannot be used, by its config.json; returns why it was not read, or None.

    Args:
        model: as ``--model`` takes it.
        spec: the run's perturbation; without one a model whose inputs cannot be replaced passes too.
    """
    support = support_of(model) if model else None
    if support is None:
        return "not checked: its config.json is not here."
    if spec is not None and support.refused:
        raise UsageError(f"model {model!r}, {support.architecture or 'no architecture'}: {'; '.join(support.refused)}.")
    return None


def told_of(model: str) -> str:
    """What config.json tells of a model, for the line of a check."""
    support = support_of(model) if model else None
    return f"model {model}{f': {support}' if support else ''}"


def support_from(config: Mapping[str, Any]) -> Support:
    """What a config.json tells."""
    from transformers.models.auto import modeling_auto as auto

    architecture, model_type = str((config.get("architectures") or [""])[0]), str(config.get("model_type") or "")
    remote, nested = bool(config.get("auto_map")), config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    refused: list[str] = []
    unknown: list[str] = []
    notes: list[str] = []
    if not architecture:
        unknown.append("by which class vLLM serves it, since config.json names no architecture")
    if config.get("is_encoder_decoder") or architecture in _ENCODER_DECODERS:
        refused.append("an encoder-decoder model. Use a decoder-only model")
    # OpenRLHF trains a model with a vision_config as an image-text model, any other as a causal language model.
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if "vision_config" in config:
        names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    trainer = names.get(model_type, "")
    if not trainer and remote:
        unknown.append("what the model's own code (auto_map) does")
        trainer = "AutoModelForCausalLM with the model's own code"
    elif not trainer:
        refused.append(
            f"the installed transformers has no model of type {model_type!r} that generates text. Install the release"
            " that OpenRLHF pins, or use another model"
        )
    engine = _engine(architecture, remote, refused, unknown) if architecture else "vLLM"
    if config.get("quantization_config"):
        unknown.append("whether its quantization leaves the embedding alone, which the engine checks at start")
    if text.get("hidden_size_per_layer_input"):
        notes.append("its per-layer embeddings follow the token in the text, its main embedding is perturbed")
    layers = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern") or ()
    is_recurrent = any(name in str(layer) for layer in set(layers) for name in _RECURRENT)
    if is_recurrent or any(name in text for name in ("mamba_d_state", "ssm_state_size", "state_size")):
        notes.append("it has recurrent layers")
    # Where vLLM 0.29 and transformers 5.15 make different models of the same config.json.
    if model_type == "cohere2_vision" and text.get("logit_scale", 0.0625) != 1.0:
        refused.append("vLLM multiplies logits by its logit_scale and transformers' class does not (docs/models.md)")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaled = "mscale" in rope and "mscale_all_dim" in rope and rope.get("apply_yarn_scaling", True)
    if text.get("model_type") == "ministral3" and scaled:
        unknown.append(
            "whether vLLM scales its rotary embedding as transformers does: from config.json it does not, and"
            ' "apply_yarn_scaling": false in rope_parameters corrects it (docs/models.md)'
        )
    verdict, sentence = _measured(model_type)
    if verdict == "unknown" and not refused:
        unknown.append(f"the gap of this type: {sentence}")
    elif verdict == "wrong":
        refused.append(f"on a tiny model of this type {sentence} (docs/models.md)")
    elif verdict != "unknown":
        notes.append(f"a tiny model of this type: {sentence}" + " (docs/models.md)" * (verdict == "doubtful"))
    return Support(model_type, architecture, engine, trainer, tuple(refused), tuple(unknown), tuple(notes))


def _engine(architecture: str, remote: bool, refused: list[str], unknown: list[str]) -> str:
    """The class that vLLM serves an architecture with; reasons are added to ``refused`` and ``unknown``."""
    import transformers

    tables = _vllm_tables()
    if tables is None:
        unknown.append("by which class vLLM serves it, since vLLM is not installed here")
        return "vLLM"
    for table, whose in (
        ("_TEXT_GENERATION_MODELS", "vLLM's own"),
        ("_MULTIMODAL_MODELS", "vLLM's own, multimodal"),
        ("_TRANSFORMERS_SUPPORTED_MODELS", BACKEND),
    ):
        if architecture in tables.get(table, {}):
            return f"{tables[table][architecture]} ({whose})"
    for table, kind in _NOT_GENERATING.items():
        if architecture in tables.get(table, {}):
            refused.append(f"{kind}, which generates nothing. Use a causal language model")
            return ""
    if remote or hasattr(transformers, architecture):
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
            # Entries of other tables that are merged into this one have no key.
            tables[target.id] = {
                str(ast.literal_eval(key)): str(ast.literal_eval(value)[1])
                for key, value in zip(table.keys, table.values)
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
            }
    return tables


def _measured(model_type: str) -> tuple[str, str]:
    """The verdict on a tiny model of this type, as `make models` measured it, and a sentence for it."""
    table = json.loads(files("ngrpo.machine.models").joinpath("measured_models.json").read_text(encoding="utf-8"))
    unlisted = ("unknown", "docs/models.md does not list it; python -m benchmarks.models measures it")
    verdict, sentence = table.get(model_type, unlisted)
    return verdict, sentence
