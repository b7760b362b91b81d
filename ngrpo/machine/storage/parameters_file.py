# SPDX-License-Identifier: Apache-2.0
"""A perturbation's learned parameters on disk: ``perturbation/module.safetensors`` in the model's folder.

transformers and vLLM refuse unknown names in the model's files, and vLLM reads every ``*.safetensors`` at the top of a
model folder. Neither looks into subfolders, so a model with this file runs without this project too.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.types import PreTrainedModel
from perturbations import parameters
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from perturbations.base import Perturbation

FILE = "perturbation/module.safetensors"


def save(folder: str | os.PathLike[str], perturbation: Perturbation, tensors: dict[str, Tensor]) -> None:
    """Writes a module's parameters, by their names in the module, with the perturbation's spec."""
    from safetensors.torch import save_file

    path = os.path.join(folder, FILE)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path, metadata={"name": perturbation.name, "spec": perturbation.fingerprint()})


def load_saved(module: nn.Module, perturbation: Perturbation, model: str, revision: str | None = None) -> bool:
    """Loads the parameters that :func:`save` wrote into a model folder or hub name; returns whether there were any.

    Raises ``UsageError`` for the parameters of another perturbation, or another model.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers.utils.hub import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(model, FILE, revision=revision, **optional)
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
                f"{path} was trained with {name}={theirs.get(name)!r}, this run has {name}={ours[name]!r}. Give this"
                f" run the saved value, or remove the file to start with new parameters."
            )
    try:
        parameters.load(module, load_file(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return True


def attach(model: PreTrainedModel, perturbation: Perturbation, folder: str) -> None:
    """Adds the perturbation's module, if it has one, to a Hugging Face model, with the parameters saved in ``folder``.

    ``model.save_pretrained`` then writes the module's parameters to their own file.
    """
    module = parameters.attach(model, perturbation)
    if module is None:
        return
    load_saved(module, perturbation, folder)
    original: Any = model.save_pretrained

    def save_pretrained(
        save_directory: str | os.PathLike[str], *args: object, state_dict: dict | None = None, **kwargs: object
    ) -> Any:
        own: dict[str, Tensor] = {}
        tensors = model.state_dict() if state_dict is None else state_dict
        subset = dict(parameters.split(tensors.items(), own))
        result = original(save_directory, *args, state_dict=subset, **kwargs)
        save(save_directory, perturbation, own)
        return result

    model.save_pretrained = save_pretrained
