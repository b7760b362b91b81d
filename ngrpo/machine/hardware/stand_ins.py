# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for flash-attn, and for torchvision's compiled part with a torch that it was not built for.

``python -m ngrpo.machine.hardware.stand_ins FOLDER`` installs torchvision into a folder for PYTHONPATH.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.patch import around

if TYPE_CHECKING:
    import argparse

# ---- flash-attn: OpenRLHF 0.11.2 pins 2.8.3, which PyPI has as source only. Without it training runs on PyTorch's own
# attention, for packed samples too. ----

WITHOUT_FLASH_ATTN = "without_flash_attn"
"""The condition of the stand-in's rows in the patch table."""

DEFAULT_FLAGS: dict[str, Default] = {"--ds.attn_implementation": "sdpa"}
"""OpenRLHF flags that are added without flash-attn; OpenRLHF's default is flash_attention_2."""


def is_flash_attn_installed() -> bool:
    """Whether flash-attn 2 is installed in this Python environment; it is not imported."""
    spec = find_spec("flash_attn")
    # FlashAttention 4 puts flash_attn.cute alone into a folder of that name, which has no __init__.py.
    return spec is not None and spec.origin is not None


@lru_cache
def flash_attn_failure() -> str | None:
    """Why what OpenRLHF imports of an installed flash-attn cannot be imported; None where it can.

    A build for another torch fails so. It is tried in a process of its own, since a failed import leaves modules there.
    """
    command = [sys.executable, "-c", "import flash_attn.bert_padding, flash_attn.utils.distributed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    error_lines = done.stderr.strip().splitlines()
    return error_lines[-1] if error_lines else f"status {done.returncode}"


def has_flash_attn() -> bool:
    """Whether flash-attn 2 can be used in this Python environment."""
    return is_flash_attn_installed() and flash_attn_failure() is None


def missing() -> list[str]:
    """Packages of attention kernels that are not installed here, or cannot be imported."""
    can_be_imported = {"flash-attn": has_flash_attn(), "kernels": find_spec("kernels") is not None}
    return [name for name, is_usable in can_be_imported.items() if not is_usable]


@around
def attention_as_given(original: Callable[..., Any], args: argparse.Namespace) -> Any:
    """`get_strategy`: the command line's attention also holds for packed samples, for which it sets flash_attention_2.

    transformers 5.15 makes the mask of PyTorch's own attention from their position ids.
    """

    implementation = Flags(sys.argv[1:]).value("--ds.attn_implementation")
    if implementation is not None:
        args.ds.attn_implementation = implementation
    return original(args)


def all_gather(*args: object, **kwargs: object) -> NoReturn:
    """Only ring attention calls it."""
    raise NotImplementedError("Ring attention needs flash-attn; use --ds.ring_attn_size 1.")


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Context in which ``import flash_attn...`` finds the five names that OpenRLHF 0.11.2 imports from it.

    The stand-ins are removed at its end, so that transformers and vLLM do not take them for an installed flash-attn.
    """
    from einops import rearrange
    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["flash_attn.bert_padding"]).update(
        index_first_axis=getitem, pad_input=_pad_input, rearrange=rearrange, unpad_input=_unpad_input
    )
    vars(modules["flash_attn.utils.distributed"]).update(all_gather=all_gather)
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


# ---- torchvision: vLLM and transformers import it for the image code of multimodal models. PyPI's build is for CUDA;
# with torch for CPUs its compiled part does not load, and its Python needs three operators of that part. ----

# torchvision's release by torch's.
_RELEASES = {"2.11": "0.26.0", "2.12": "0.27.1", "2.13": "0.28.0"}
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
)
_BEFORE_TORCHVISION = """from ngrpo.machine.hardware.stand_ins import declare_operators

declare_operators(__file__)
"""
# Kept: an operator lives as long as the library that declared it.
_libraries: list[Any] = []


def declare_operators(torchvision: str) -> None:
    """Declares torchvision's operators, which no model calls, where its compiled part next to this file fails."""
    import torch

    try:
        torch.ops.load_library(str(Path(torchvision).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for signature in _OPERATORS:
            library.define(signature)
        _libraries.append(library)


def install_torchvision(folder: Path) -> None:
    """Puts torchvision into a folder; its ``__init__.py`` calls :func:`declare_operators` first."""
    torch = ".".join(version("torch").split(".")[:2])
    if torch not in _RELEASES:
        raise ValueError(f"torch {torch}: torchvision is known for {', '.join(_RELEASES)}. Install one of these.")
    words = ["install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words, f"torchvision=={_RELEASES[torch]}"], check=True)
    package = folder / "torchvision" / "__init__.py"
    package.write_text(_BEFORE_TORCHVISION + package.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    install_torchvision(Path(sys.argv[1]))
