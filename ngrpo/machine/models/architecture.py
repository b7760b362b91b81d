# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says: its sizes, its parameters' names, and whether it can be rolled out and trained.

No weights are loaded. vLLM's table of classes is read from its source, without importing vLLM.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ngrpo.machine import models
from ngrpo.machine.models import packaged, positions
from ngrpo.machine.upstream.patch import definition, source_of
from ngrpo.machine.upstream.types import PreTrainedModel
from perturbations.errors import UsageError

_BACKEND = "vLLM's Transformers backend"
# Tables of vLLM's registry.
_SERVING = {
    "_TEXT_GENERATION_MODELS": "vLLM's own",
    "_MULTIMODAL_MODELS": "vLLM's own, multimodal",
    "_TRANSFORMERS_SUPPORTED_MODELS": _BACKEND,
}
_NOT_GENERATING = {
    "_EMBEDDING_MODELS": "an embedding model",
    "_REWARD_MODELS": "a reward model",
    "_TOKEN_CLASSIFICATION_MODELS": "a classifier of tokens",
    "_SEQUENCE_CLASSIFICATION_MODELS": "a classifier",
    "_SPECULATIVE_DECODING_MODELS": "a draft model",
    "_LATE_INTERACTION_MODELS": "a retrieval model",
}
# Among vLLM's multimodal classes.
_ENCODER_DECODERS = (
    "CohereAsrForConditionalGeneration",
    "NemotronParseForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json with the number of experts of a layer; model types differ in the key."""
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid")


def find_config(name: str, *, ask_hub: bool = False) -> Path | None:
    """The config.json of a ``--model``, or None; ``ask_hub`` loads that file alone where the hub's cache has none."""
    folder = packaged.folder_of(name) if name in packaged.PACKAGED else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if name in packaged.PACKAGED or folder.exists():
        return None
    try:
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(name, "config.json", etag_timeout=packaged.HUB_SECONDS, local_files_only=not ask_hub)
        return Path(file)
    except Exception:  # of any library that sends the request: without a network the file stays unknown
        return None


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json; raises ``UsageError`` for a file that is damaged or no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Download the model again.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: must be a JSON object. Give the model's own config.json.")
    return config


def parameter_names(folder: str) -> tuple[str, ...] | None:
    """The names that transformers' class gives a local model's parameters; None where transformers cannot make one."""
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    config = read_config(path)
    if config.get("auto_map"):  # a model with code of its own
        return None
    try:
        return tuple(name for name, _ in on_meta(config).named_parameters())
    except Exception:  # of any model's code; loading the model reports it
        return None


def adaptable_modules(config_path: Path) -> tuple[str, ...] | None:
    """The modules of a model that can get LoRA's adapters, by name; None where transformers cannot make the model.

    They are linear layers, the convolutions that GPT-2 has in their place, and embeddings.
    """
    config = read_config(config_path)
    if config.get("auto_map"):  # a model with code of its own
        return None
    from torch.nn import Embedding, Linear
    from transformers.pytorch_utils import Conv1D

    try:
        modules = on_meta(config).named_modules()
    except Exception:  # of any model's code; loading the model reports it
        return None
    return tuple(name for name, module in modules if isinstance(module, Linear | Conv1D | Embedding))


def on_meta(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model on the meta device, of the class that OpenRLHF chooses."""
    import torch
    from transformers import AutoConfig

    with torch.device("meta"):
        return models.auto_class(config).from_config(AutoConfig.for_model(**config))


# ---- sizes ----


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on, and where the values come from.

    Attributes:
        parameters: all of them, a tied head counted once.
        hidden: width h of the residual stream.
        intermediate: width m of the MLP, of all experts that a token goes through.
        head_norms: whether queries and keys are normalised, as in Qwen3.
        has_experts: whether it is a mixture of experts.
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
    has_experts: bool = False

    @property
    def saved_bytes_per_token(self) -> int:
        """What a layer keeps of each token for the backward pass, with SDPA or flash attention.

        Two RMSNorms: input, float32 copy and output, 8h each; queries and attention output, 4q; keys and values, 4·kv;
        gate, up, activation and their product, 8m; and of normalised heads the float32 copy and the output, 6(q + kv).
        """
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        head_norms = 6 * (queries + keys) if self.head_norms else 0
        return 16 * self.hidden + 4 * queries + 4 * keys + 8 * self.intermediate + head_norms


def size_table() -> dict[str, dict[str, Any]]:
    """config.json, and the number of parameters, of the models that README and recipes name."""
    return _packaged_table("models.json")


def _packaged_table(file: str) -> dict[str, Any]:
    return json.loads(files("ngrpo.machine.models").joinpath(file).read_text(encoding="utf-8"))


def size_of(name: str | None) -> ModelSize | None:
    """The sizes of a ``--model``, from its config.json or from :func:`size_table`; None where neither has them."""
    if not name:
        return None
    path = find_config(name)
    if path is not None:
        return size_from(read_config(path), str(path))
    table = size_table()
    return size_from(table[name], "the table of this project") if name in table else None


def ask_hub_for_size(name: str) -> None:
    """Loads the config.json of a hub model of unknown size into the hub's cache, where :func:`size_of` looks.

    Raises ``UsageError`` for a model that neither the hub nor its cache has.
    """
    if size_of(name) is None:
        packaged.check_available(name)
        find_config(name, ask_hub=True)


def size_from(config: Mapping[str, Any], source: str) -> ModelSize | None:
    """The sizes in a config.json; None where the installed transformers cannot make a model from it."""
    try:
        return _size(json.dumps(config), source)
    except Exception:  # of the configuration's own class
        return None


@lru_cache
def _size(text: str, source: str) -> ModelSize:
    """The sizes in the text of a config.json, which in :func:`size_table` has the number of parameters too."""
    config = json.loads(text)
    parameter_count = config.pop("parameters", None)
    head_norms = config.get("model_type") == "qwen3"
    if parameter_count is None:
        model = on_meta(config)
        parameters = dict(model.named_parameters())
        parameter_count = sum(parameter.numel() for parameter in parameters.values())
        head_norms = any("q_norm" in name for name in parameters)
        config = model.config.get_text_config().to_dict()
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    experts = config.get("num_experts_per_tok") if config.get("moe_intermediate_size") else None
    return ModelSize(
        parameters=parameter_count,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["moe_intermediate_size"] * experts if experts else config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        head_norms=head_norms,
        source=source,
        has_experts=bool(experts),
    )


def unfit_for_cpu(name: str) -> str:
    """The size of a model's heads and the sizes of vLLM's CPU attention, by its source; empty where fit or unknown."""
    path = find_config(name)
    size = size_of(name)
    source = source_of("vllm.v1.attention.backends.cpu_attn")
    # Latent attention has another backend.
    if path is None or size is None or source is None or "kv_lora_rank" in path.read_text(encoding="utf-8"):
        return ""
    method = definition(ast.parse(source), "CPUAttentionBackend.get_supported_head_sizes")
    returned = method.body[-1] if method else None
    if not (isinstance(returned, ast.Return) and isinstance(returned.value, ast.List)):
        return ""
    supported_sizes = ast.literal_eval(returned.value)
    if size.head_dim in supported_sizes:
        return ""
    return f"{size.head_dim} (vLLM has {', '.join(map(str, supported_sizes))})"


def has_experts(name: str) -> bool:
    """Whether a model is a mixture of experts by its config.json; False where that is not here."""
    path = find_config(name)
    if path is None:
        return False
    config = read_config(path)
    text = config.get("text_config") or config
    counts = [text.get(key) or 0 for key in EXPERT_COUNTS]
    # Of several kinds of experts, some configurations list the number of each.
    return any(max(count) > 1 if isinstance(count, list) else count > 1 for count in counts)


# ---- support ----


@dataclass
class Support:
    """Whether a model can be rolled out and trained with a perturbation; the engine checks the rest on the model.

    Attributes:
        model_type: of the config.json.
        architecture: the first one of the config.json; empty where it names none.
        engine: the class that vLLM serves it with, and its package.
        trainer: the class of transformers that OpenRLHF trains.
        refused: why it cannot be used, each with a fix.
        unknown: what the config.json does not say.
        notes: what is special about it.
    """

    model_type: str
    architecture: str
    engine: str = "vLLM"
    trainer: str = ""
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        name = f"{self.architecture or 'no architecture'} ({self.model_type or 'no model_type'})"
        if self.refused:
            return f"{name} is not supported"
        classes = f"{name}: {self.engine} rolls out, transformers' {self.trainer} is trained"
        open_questions = [f"not known: {question}" for question in self.unknown]
        return "; ".join([classes, *self.notes, *open_questions])


def support_of(name: str, *, ask_hub: bool = False, longest: int | None = None) -> Support | None:
    """:func:`support_from` a model's config.json; None if :func:`find_config` does not find it."""
    path = find_config(name, ask_hub=ask_hub) if name else None
    return None if path is None else support_from(read_config(path), longest)


def check_perturbed(model: str, spec: Mapping[str, Any] | None, longest: int | None = None) -> str | None:
    """Raises ``UsageError`` for a model that a perturbation cannot use; returns why it was not read, or None.

    longest: the most tokens that a text of the run may have.
    """
    support = support_of(model, longest=longest)
    if support is None:
        return "not checked: its config.json is not here."
    if spec is not None and support.refused:
        raise UsageError(f"model {model!r}, {support.architecture or 'no architecture'}: {'; '.join(support.refused)}.")
    return None


def in_words(model: str) -> str:
    """A model and its support, for the line of a check."""
    support = support_of(model)
    return f"model {model}: {support}" if support else f"model {model}"


def support_from(config: Mapping[str, Any], longest: int | None = None) -> Support:
    """The support of a model by its config.json, for texts of at most ``longest`` tokens, None for any."""
    architectures = config.get("architectures") or [""]
    support = Support(model_type=str(config.get("model_type") or ""), architecture=str(architectures[0]))
    has_own_code = bool(config.get("auto_map"))
    _find_engine(support, has_own_code)
    if config.get("is_encoder_decoder") or support.architecture in _ENCODER_DECODERS:
        support.refused.append("an encoder-decoder model. Use a decoder-only model")
    _find_trainer(support, config, has_own_code)
    if config.get("quantization_config"):
        support.unknown.append("whether its quantization leaves the embedding alone, which the engine checks at start")
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, Mapping) else config
    _note_layers(support, text_config)
    # vLLM 0.29 and transformers 5.15 make different models of such a config.json.
    if support.model_type == "cohere2_vision" and text_config.get("logit_scale", 0.0625) != 1.0:
        support.refused.append(
            "vLLM multiplies logits by its logit_scale and transformers' class does not (docs/models.md)"
        )
    if not support.refused and not has_own_code:
        _compare_keys(support, config, longest)
    _add_measurement(support)
    return support


def _find_trainer(support: Support, config: Mapping[str, Any], has_own_code: bool) -> None:
    """Fills in the class of transformers that OpenRLHF trains, or why there is none.

    OpenRLHF trains a model with a vision_config as an image-text model, any other as a causal language model.
    """
    from transformers.models.auto import modeling_auto

    if "vision_config" in config:
        classes = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    else:
        classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    support.trainer = classes.get(support.model_type, "")
    if support.trainer:
        return
    if has_own_code:
        support.unknown.append("what the model's own code (auto_map) does")
        support.trainer = "AutoModelForCausalLM with the model's own code"
    else:
        support.refused.append(
            f"the installed transformers has no model of type {support.model_type!r} that generates text. Install the"
            " release that OpenRLHF pins, or use another model"
        )


def _note_layers(support: Support, text_config: Mapping[str, Any]) -> None:
    """Adds notes about further embeddings and recurrent layers."""
    if text_config.get("hidden_size_per_layer_input"):
        support.notes.append("its per-layer embeddings follow the token in the text, its main embedding is perturbed")
    layers: Sequence[Any] = ()
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        layers = layers or text_config.get(key) or ()
    layer_names = " ".join(str(layer) for layer in set(layers))
    has_recurrent_layers = any(name in layer_names for name in _RECURRENT)
    has_state = any(key in text_config for key in ("mamba_d_state", "ssm_state_size", "state_size"))
    if has_recurrent_layers or has_state:
        support.notes.append("it has recurrent layers")


def _add_measurement(support: Support) -> None:
    """Adds what `make models` measured on a tiny model of this type, which it writes into a packaged table."""
    unlisted = ("unknown", "docs/models.md does not list it; python -m benchmarks.models measures it")
    verdict, sentence = _packaged_table("measured_models.json").get(support.model_type, unlisted)
    if verdict == "wrong":
        support.refused.append(f"on a tiny model of this type {sentence} (docs/models.md)")
    elif verdict == "doubtful":
        support.notes.append(f"a tiny model of this type: {sentence} (docs/models.md)")
    elif verdict != "unknown":
        support.notes.append(f"a tiny model of this type: {sentence}")
    elif not support.refused:
        support.unknown.append(f"the mismatch of this type: {sentence}")


def _compare_keys(support: Support, config: Mapping[str, Any], longest: int | None) -> None:
    """Fills in the keys that vLLM and transformers read differently in texts of this length."""
    if support.engine.endswith(f"({_BACKEND})"):  # the backend computes with transformers' own classes
        return
    modules = _vllm_modules() or {}
    module = None
    for table in _SERVING:
        module = modules.get(table, {}).get(support.architecture, module)
    if module is None:
        return
    source = source_of(f"vllm.model_executor.models.{module}") or ""
    try:
        differences = positions.differences(config, source)
    except Exception:  # of any type's own class of a configuration; loading the model reports what is wrong
        support.unknown.append("whether vLLM and transformers read its rotary settings alike")
        return
    for difference in differences:
        if support.model_type == "ministral3":
            # vLLM may read Mistral's params.json in place of the config.json, and then scales as transformers does.
            support.unknown.append(f"whether vLLM reads this config.json: {difference.what}. {difference.fix}")
        elif difference.beyond and longest is None:
            support.notes.append(f"with more than {difference.beyond} tokens {difference.what}")
        elif longest is None or longest > difference.beyond:
            support.refused.append(f"{difference.what}. {difference.fix}")


def _find_engine(support: Support, has_own_code: bool) -> None:
    """Fills in the class that vLLM serves an architecture with, or why there is none."""
    import transformers

    architecture = support.architecture
    if not architecture:
        support.unknown.append("by which class vLLM serves it, since config.json names no architecture")
        return
    tables = _vllm_tables()
    if tables is None:
        support.unknown.append("by which class vLLM serves it, since vLLM is not installed here")
        return
    for table, package in _SERVING.items():
        if architecture in tables.get(table, {}):
            support.engine = f"{tables[table][architecture]} ({package})"
            return
    kind = None
    for table, kind_of_table in _NOT_GENERATING.items():
        if architecture in tables.get(table, {}):
            kind = kind_of_table
            break
    if kind is None and architecture.endswith("Classification"):
        kind = "a classifier"
    if kind is not None:
        support.refused.append(f"{kind}, which generates nothing. Use a causal language model")
    elif has_own_code or hasattr(transformers, architecture):
        support.unknown.append(f"whether {_BACKEND} can take it, since vLLM has no class of its own for it")
        support.engine = f"TransformersForCausalLM ({_BACKEND})"
    else:
        support.refused.append(
            f"neither vLLM nor the installed transformers has a class {architecture!r}. Use another model, or the"
            " releases that docs/install.md names"
        )


def _vllm_tables() -> dict[str, dict[str, str]] | None:
    """The tables of vLLM's registry: architecture to class; None where vLLM is not installed."""
    return _registry_column(1)


def _vllm_modules() -> dict[str, dict[str, str]] | None:
    """The tables of vLLM's registry: architecture to the module of its class; None where vLLM is not installed."""
    return _registry_column(0)


@cache
def _registry_column(column: int) -> dict[str, dict[str, str]] | None:
    """Of each table the architectures with a column of their entries: (module, class)."""
    source = source_of("vllm.model_executor.models.registry")
    if source is None:
        return None
    tables: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        table = node.value
        if isinstance(target, ast.Name) and isinstance(table, ast.Dict):
            # Entries of other tables that are merged into this one have no key.
            tables[target.id] = {
                str(ast.literal_eval(key)): str(ast.literal_eval(value)[column])
                for key, value in zip(table.keys, table.values)
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
            }
    return tables
