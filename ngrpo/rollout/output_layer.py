# SPDX-License-Identifier: Apache-2.0
"""The last hidden states in a vLLM worker: what the output layer is given for the rows that are sampled.

`compute_logits` of a model ends in its `LogitsProcessor`, in both model runners and outside of what is compiled or
captured. What that is given is what Hugging Face's output embedding is given, also where a model scales it before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from perturbations.errors import UsageError


def follow(model: nn.Module, take: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Hands over what a model's output layer is given, each time that it computes logits.

    Args:
        model: of a vLLM worker.
        take: gets the last hidden states, (B, D), one row for each row of the logits.

    Returns:
        Hooks, to be removed when they are needed no more.

    Raises:
        UsageError: for a model that computes its logits otherwise.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def before(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(inputs[1] if len(inputs) > 1 else named["hidden_states"])

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise UsageError(
            f"perturbation: {type(model).__name__} has no LogitsProcessor, so the last hidden states that this"
            " perturbation reads are not known. Use another model, or a perturbation that reads logits alone."
        )
    return [module.register_forward_pre_hook(before, with_kwargs=True) for module in found]
