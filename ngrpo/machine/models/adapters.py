# SPDX-License-Identifier: Apache-2.0
"""Folders with a LoRA adapter, as PEFT saves them and trainings leave them, merged into whole models."""

import json
import os
import shutil
from pathlib import Path

from perturbations.errors import UsageError, require

CONFIG = "adapter_config.json"


def is_adapter(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether this is a folder with an adapter and no whole model."""
    folder = Path(name_or_path).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(adapter: Path) -> str:
    """The model that an adapter was trained on: a folder or a hub name, as PEFT has written it down."""
    path = adapter / CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as an adapter's configuration: {error}") from None
    if not base:
        raise UsageError(f"{path} names no base_model_name_or_path. Give the base model: --model BASE --adapter DIR.")
    return base


def merge(base: str, adapter: Path, target: Path) -> None:
    """Writes the whole model W + s · B A to a folder, in the base model's dtype, with the adapter's tokenizer.

    The merged weights are those that engines have in a training: of an adapter that was trained on 4-bit weights, W is
    the dequantised weight. A perturbation's own parameters come along.
    Raises ``UsageError`` for an adapter of another model, or one that cannot be merged.
    """
    import torch
    from peft import PeftModel
    from peft.utils import load_peft_weights
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    from ngrpo.machine.models import auto_class, four_bit, lora
    from ngrpo.machine.storage import parameters_file

    quantization = four_bit.read_config(adapter)
    # OpenRLHF quantises weights in bfloat16.
    dtype = "auto" if quantization is None else torch.bfloat16
    base_config = AutoConfig.from_pretrained(base).to_dict()
    model_class = auto_class(base_config)
    base_model = model_class.from_pretrained(base, dtype=dtype, quantization_config=quantization)
    try:
        model = PeftModel.from_pretrained(base_model, str(adapter))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"adapter {str(adapter)!r} does not fit the model {base!r}: {error}") from None
    # PEFT loads what it finds a module for, and only warns about the rest.
    saved = sum(lora.is_factor(name) for name in load_peft_weights(str(adapter), device="cpu"))
    loaded = sum(lora.is_factor(name) for name, _ in model.named_parameters())
    if saved != loaded:
        raise UsageError(
            f"adapter {str(adapter)!r} does not fit the model {base!r}: the adapter has {saved} matrices, and the model"
            f" has modules for {loaded}. Give its own base model."
        )
    lora.check_adapters(model, perturbed=False)
    if quantization is None:
        for weight in lora.engine_weights(model):
            if weight.adapter is not None:
                weight.base.data.copy_(weight.merged())
        merged_model = model.unload()
    else:
        # A 4-bit parameter cannot hold the merged weight.
        merged_model = model_class.from_pretrained(base, dtype=dtype)
        parameters = dict(merged_model.named_parameters())
        for weight in lora.engine_weights(model):
            parameters[weight.name].data.copy_(weight.merged())
    merged_model.save_pretrained(target)
    if "vision_config" in base_config:
        AutoProcessor.from_pretrained(base).save_pretrained(target)
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else base)
    require(tokenizer, "the model's tokenizer").save_pretrained(target)
    own_parameters = adapter / parameters_file.FILE
    if own_parameters.is_file():
        (target / parameters_file.FILE).parent.mkdir(exist_ok=True)
        shutil.copyfile(own_parameters, target / parameters_file.FILE)
