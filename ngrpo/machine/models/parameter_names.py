# SPDX-License-Identifier: Apache-2.0
"""Names of a model's parameters, from its config.json alone."""

from __future__ import annotations

from pathlib import Path

from ngrpo.machine.models import config_file


def of_folder(folder: str) -> tuple[str, ...] | None:
    """The names that the model's class in transformers gives its parameters; no weight is loaded.

    Args:
        folder: a local model.

    Returns:
        None where it has no config.json, or one of which transformers makes no model without the folder's own code.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    values = config_file.read(path)
    if values.get("auto_map"):
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    made_by = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(path.parent)
        with torch.device("meta"):
            model = made_by.from_config(config)
    except Exception:  # of whatever model's code; loading the model says what it is
        return None
    return tuple(name for name, _ in model.named_parameters())
