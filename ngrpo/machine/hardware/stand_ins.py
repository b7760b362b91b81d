# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for flash-attn, and for torchvision's compiled part beside a torch that it was not built for.

``python -m ngrpo.machine.hardware.stand_ins FOLDER`` installs torchvision into a folder for PYTHONPATH.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags

if TYPE_CHECKING:
    import argparse

    import torch

# ---- flash-attn: OpenRLHF 0.11.2 pins 2.8.3, which PyPI has as source only. Without it training runs on PyTorch's own
# attention, for packed samples too. ----

WITHOUT_FLASH_ATTN = "without_flash_attn"
"""The condition of the stand-in's rows in the patch table."""

DEFAULT_FLAGS: dict[str, Default] = {"--ds.attn_implementation": "sdpa"}
"""OpenRLHF flags that are added without flash-attn; OpenRLHF's default is flash_attention_2."""


def has_flash_attn() -> bool:
    """Whether flash-attn 2 is installed in this Python environment; it is not imported."""
    spec = find_spec("flash_attn")
    # FlashAttention 4 puts flash_attn.cute alone into a folder of that name, which has no __init__.py.
    return spec is not None and spec.origin is not None


def missing() -> list[str]:
    """Packages of attention kernels that are not installed here."""
    there = {"flash-attn": has_flash_attn(), "kernels": find_spec("kernels") is not None}
    return [name for name, found in there.items() if not found]


def attention_as_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """`get_strategy`: the command line's attention also holds for packed samples.

    OpenRLHF sets flash_attention_2 for them, once the only one that read their position ids, which restart with each
    sample. transformers 5.15 makes the mask of PyTorch's own attention from them.
    """

    @wraps(original)
    def get_strategy(args: argparse.Namespace) -> Any:
        implementation = Flags(sys.argv[1:]).value("--ds.attn_implementation")
        if implementation is not None:
            args.ds.attn_implementation = implementation
        return original(args)

    return get_strategy


def index_first_axis(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor: (N, ...), (M,) -> (M, ...)."""
    return rows[indices]


def unpad_input(
    padded: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Drops padding: (B, T, ...) and a mask (B, T) -> the total of N unmasked rows.

    Returns:
        rows (N, ...), their flat indices (N,), cumulative lengths (B + 1,) int32, the longest length,
        and the lengths (B,) int32.
    """
    import torch

    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cumulative = torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return padded.flatten(0, 1)[indices], indices, cumulative, int(lengths.max()), lengths


def pad_input(rows: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of `unpad_input`: (N, ...) -> (B, T, ...), zeros where masked; differentiable."""
    flat = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    return flat.index_copy(0, indices, rows).unflatten(0, (batch, seqlen))


def all_gather(*args: object, **kwargs: object) -> torch.Tensor:
    """Only ring attention calls it."""
    raise NotImplementedError("Ring attention needs flash-attn; use --ds.ring_attn_size 1.")


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Context in which ``import flash_attn...`` finds the five names that OpenRLHF 0.11.2 imports from it.

    Outside the context no library takes flash-attn for installed.
    """
    from einops import rearrange

    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["flash_attn.bert_padding"]).update(
        index_first_axis=index_first_axis, pad_input=pad_input, rearrange=rearrange, unpad_input=unpad_input
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
# beside torch for CPUs its compiled part does not load, and its Python asks for three operators of that part. ----

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
    """Declares torchvision's operators, without an implementation, where its compiled part does not load.

    No image code of the models that vLLM serves calls them.

    Args:
        torchvision: its ``__init__.py``.
    """
    import torch

    try:
        torch.ops.load_library(str(Path(torchvision).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for signature in _OPERATORS:
            library.define(signature)
        _libraries.append(library)


def install_torchvision(folder: Path) -> None:
    """Puts torchvision into a folder, with a call of :func:`declare_operators` in front of its ``__init__.py``.

    Raises:
        ValueError: for a torch whose torchvision is not known here.
    """
    torch = ".".join(version("torch").split(".")[:2])
    if torch not in _RELEASES:
        raise ValueError(f"torch {torch}: torchvision is known for {', '.join(_RELEASES)}. Install one of these.")
    words = ["install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words, f"torchvision=={_RELEASES[torch]}"], check=True)
    package = folder / "torchvision" / "__init__.py"
    package.write_text(_BEFORE_TORCHVISION + package.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    install_torchvision(Path(sys.argv[1]))
