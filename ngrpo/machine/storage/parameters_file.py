# SPDX-License-Identifier: Apache-2.0
"""A perturbation's learned parameters on disk: ``perturbation/module.safetensors`` in the model's folder.

A file of its own, in a folder of its own: transformers and vLLM refuse names in the model's files that they do not
know, and vLLM reads every ``*.safetensors`` at the top of a model folder. Neither looks into subfolders, so the model
stays an ordinary one that runs without us.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from perturbations import parameters
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from perturbations.base import Perturbation

FILE = "perturbation/module.safetensors"


def save(folder: str | os.PathLike[str], perturbation: Perturbation, tensors: dict[str, Tensor]) -> None:
    """Writes a module's parameters, by their names in the module, with the perturbation's spec."""
    from safetensors.torch import save_file

    path = os.path.join(folder, FILE)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"name": perturbation.name, "spec": perturbation.fingerprint()})


def load_saved(module: nn.Module, perturbation: Perturbation, model: str, revision: str | None = None) -> bool:
    """Loads what :func:`save` wrote beside a model.

    Args:
        module: the perturbation's module.
        perturbation: its perturbation.
        model: a model folder or hub name.
        revision: of a hub name.

    Returns:
        Whether there was anything; where not, the module stays as it started.

    Raises:
        UsageError: for the parameters of another perturbation, or another model.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = _find(model, revision)
    if path is None:
        return False
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    # The registry name, and not the spec's: that may be a path, or hold a file's text.
    theirs = {**json.loads(metadata.get("spec", "{}")), "name": metadata.get("name")}
    ours = {**perturbation.spec(), "name": perturbation.name}
    for name in ("name", *perturbation.module_options):
        if theirs.get(name) != ours[name]:
            raise UsageError(
                f"{path} was trained with {name}={theirs.get(name)!r}, this run has {name}={ours[name]!r}. Give it the"
                f" saved value, or remove the file to start with new parameters."
            )
    try:
        parameters.load(module, load_file(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return True


def _find(model: str, revision: str | None) -> str | None:
    if os.path.isdir(model):
        path = os.path.join(model, FILE)
        return path if os.path.isfile(path) else None
    from transformers.utils.hub import cached_file

    return cached_file(
        model,
        FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def attach(model: PreTrainedModel, perturbation: Perturbation, folder: str) -> None:
    """Puts the perturbation's module beside a Hugging Face model: with what is saved, and saved with the model.

    Args:
        model: a causal model.
        perturbation: any perturbation; one without parameters changes nothing.
        folder: where the model came from.
    """
    module = parameters.attach(model, perturbation)
    if module is None:
        return
    load_saved(module, perturbation, folder)
    model.save_pretrained = _saving_both(model, module, perturbation)


def _saving_both(model: PreTrainedModel, module: nn.Module, perturbation: Perturbation) -> Callable[..., Any]:
    """``save_pretrained`` that keeps the module's parameters out of the model's files and writes them to their own."""
    original: Callable[..., Any] = model.save_pretrained

    def save_pretrained(
        save_directory: str | PathLike[str], *args: object, state_dict: dict[str, Any] | None = None, **kwargs: object
    ) -> Any:
        own: dict[str, Tensor] = {}
        tensors = model.state_dict() if state_dict is None else state_dict
        subset = dict(parameters.split(tensors.items(), own))
        result = original(save_directory, *args, state_dict=subset, **kwargs)
        save(save_directory, perturbation, own)
        return result

    return save_pretrained
