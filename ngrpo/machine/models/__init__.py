# SPDX-License-Identifier: Apache-2.0
"""Models by name, and what their config.json says."""

from collections.abc import Mapping
from typing import Any


def auto_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers by which OpenRLHF loads a model with this config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
