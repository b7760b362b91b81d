# SPDX-License-Identifier: Apache-2.0
"""QLoRA: frozen linear layers with 4-bit weights of bitsandbytes, below LoRA's adapters.

bitsandbytes stores a weight as 4-bit codes with a scale for each block of 64 weights. Its layer multiplies with the
dequantised weight, which is another one than the checkpoint's. Engines have to get the dequantised weight, or they roll
out another model than the one that is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perturbations.errors import UsageError

CONFIG = "quantization_config.json"
"""In the folder of an adapter that was trained on 4-bit weights: how transformers quantises the base model."""


def is_four_bit(parameter: Tensor) -> bool:
    """Whether a parameter is 4-bit codes of bitsandbytes, by the attribute that its `Params4bit` adds."""
    return getattr(parameter, "quant_state", None) is not None


@torch.no_grad()
def dequantised(parameter: Tensor) -> Tensor:
    """The weight that bitsandbytes' layer multiplies with, in the dtype that the weight had before it was quantised.

    A parameter that is not quantised is returned as it is.
    """
    if not is_four_bit(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

    return dequantize_4bit(parameter.data, vars(parameter)["quant_state"])


def prepare(model: nn.Module) -> None:
    """Makes the 4-bit layers of a model ones that can be trained on a CPU, and resumed from a checkpoint.

    A model without 4-bit layers stays as it is.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not is_four_bit(weight):
            continue
        # On CPUs with AVX-512 BF16, bitsandbytes 0.50 rearranges the weights in the first forward pass without
        # gradients, rounds their scales, and has no backward pass for them afterwards.
        vars(module)["support_avx512bf16_for_cpu"] = False
        module.register_load_state_dict_pre_hook(_without_scales)


def _without_scales(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Leaves a 4-bit layer's scales out of a state that it loads.

    bitsandbytes 0.50 writes the scales into a checkpoint and does not read them, so that a strict load, as
    DeepSpeed's, fails with unexpected keys. The layer has the same scales already: they are the frozen base model's.
    """
    for key in [key for key in state_dict if key.startswith(f"{prefix}weight.")]:
        del state_dict[key]


def write_config(model: nn.Module, folder: Path) -> None:
    """Writes how a model was quantised to an adapter's folder; nothing for a model that was not."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return
    options = config if isinstance(config, Mapping) else config.to_dict()
    (folder / CONFIG).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> Any:
    """The `BitsAndBytesConfig` with which an adapter's base model was loaded; None where it was not quantised.

    Raises ``UsageError`` where bitsandbytes is not installed.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise UsageError(
            f"{path}: this adapter was trained on 4-bit weights (--ds.load_in_4bit), and they are computed by"
            " bitsandbytes, which is not installed. Fix: pip install bitsandbytes."
        )
    return BitsAndBytesConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
