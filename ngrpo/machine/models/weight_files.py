# SPDX-License-Identifier: Apache-2.0
"""The files of a local model's weights, and the names and shapes of the tensors in them; no weights are loaded."""

from collections.abc import Mapping
from pathlib import Path

from ngrpo.machine.storage.result_folder import read_json
from perturbations.errors import UsageError


def weight_files(folder: Path, *, subject: str) -> list[Path]:
    """The files of weights that transformers and vLLM would load; raises ``UsageError`` for a missing or empty one.

    ``subject`` is the model as the message calls it.
    """
    ending = "safetensors" if any(folder.glob("*.safetensors*")) else "bin"
    files = [file for file in folder.glob(f"*.{ending}") if file.exists()]
    present = {file.name for file in files}
    for index in folder.glob(f"*.{ending}.index.json"):
        absent = sorted(set(_weight_map(index).values()) - present)
        if absent:
            raise UsageError(f"{subject}: {index.name} names {absent[0]}, which is missing. Download it again.")
    for file in files:
        with file.open("rb") as opened:
            if opened.read(16) in (b"", b"version https://"):  # a pointer of Git LFS begins so
                raise UsageError(f"{subject}: {file.name} holds no weights. Download it again, with Git LFS.")
    return files


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...] | None] | None:
    """The shape of each tensor in the files that transformers loads, by its name; None where only loading them tells.

    The index of .bin files has names alone, so that their shapes are None.
    """
    # In this order transformers 5.15 looks for the weights (`_get_resolved_checkpoint_files`).
    single_file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single_file.is_file():
        return _shapes_in(single_file)
    if index.is_file():
        shapes: dict[str, tuple[int, ...] | None] = {}
        for name in sorted(set(_weight_map(index).values())):
            of_file = _shapes_in(folder / name)
            if of_file is None:
                return None
            shapes |= of_file
        return shapes
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file() and not (folder / "pytorch_model.bin").is_file():
        return dict.fromkeys(_weight_map(index))
    return None


def _shapes_in(file: Path) -> dict[str, tuple[int, ...] | None] | None:
    """The shape of each tensor in a safetensors file, from its header; None for a file that loading will report."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def _weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor, by the tensor's name, as the index of a model's files has it."""
    return (read_json(index) or {}).get("weight_map", {})
