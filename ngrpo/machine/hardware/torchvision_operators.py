# SPDX-License-Identifier: Apache-2.0
"""torchvision beside a torch that it was not built for.

``python -m ngrpo.machine.hardware.torchvision_operators FOLDER`` prepares a folder.

vLLM and transformers import torchvision for the image code of multimodal models. PyPI has its build for CUDA alone,
whose compiled part does not load beside torch for CPUs, and its Python asks for three operators of that part while it
is imported. They are declared here, without an implementation: no image code of these models calls them.

The command installs torchvision into a folder and puts a ``sitecustomize.py`` beside it, which declares them in every
process that has the folder in its PYTHONPATH; other processes know nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# torchvision's release by torch's.
_RELEASES = {"2.11": "0.26.0", "2.12": "0.27.1", "2.13": "0.28.0"}
_SITECUSTOMIZE = """from ngrpo.machine.hardware.torchvision_operators import declare_on_import

declare_on_import()
"""
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
)
# Kept: an operator lives as long as the library that declared it.
_libraries: list[Any] = []


def declare_on_import() -> None:
    """Has the operators declared when torchvision is imported, if it is; once per process, and free until then."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # first, since the search below comes here again
            _declare()
        return None


def _declare() -> None:
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for signature in _OPERATORS:
            library.define(signature)
        _libraries.append(library)


def install(folder: Path) -> None:
    """Puts torchvision and the declaration into a folder, which is to be in PYTHONPATH.

    Raises:
        ValueError: for a torch whose torchvision is not known here.
    """
    torch = ".".join(version("torch").split(".")[:2])
    if torch not in _RELEASES:
        raise ValueError(f"torch {torch}: torchvision is known for {', '.join(_RELEASES)}. Install one of these.")
    words = ["install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words, f"torchvision=={_RELEASES[torch]}"], check=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
