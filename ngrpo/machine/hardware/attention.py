# SPDX-License-Identifier: Apache-2.0
"""Training with flash-attn and without it.

OpenRLHF 0.11.2 pins flash-attn 2.8.3, which PyPI has as source only, but can do without it. Where it is missing, two
rows of `seams.py` in `trainers/openrlhf` hold: five names that OpenRLHF imports have a stand-in, and the trainer's
attention is PyTorch's own, for packed samples too. Ring attention is refused. Where flash-attn is there, nothing of
this holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags

if TYPE_CHECKING:
    import argparse

WITHOUT_FLASH_ATTN = "without_flash_attn"
"""The condition of the stand-in's row in `ngrpo.trainers.openrlhf.seams`."""

DEFAULT_FLAGS: dict[str, Default] = {"--ds.attn_implementation": "sdpa"}
"""OpenRLHF flags that are added without flash-attn; OpenRLHF's default is flash_attention_2."""


def has_flash_attn() -> bool:
    """Whether flash-attn 2 is installed in this Python environment; nothing is imported to find out."""
    spec = find_spec("flash_attn")
    # FlashAttention 4 puts flash_attn.cute alone into a folder of that name, which has no __init__.py.
    return spec is not None and spec.origin is not None


def missing() -> list[str]:
    """Packages of attention kernels that are not installed here."""
    there = {"flash-attn": has_flash_attn(), "kernels": find_spec("kernels") is not None}
    return [name for name, found in there.items() if not found]


def attention_as_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """`get_strategy`: the command line's attention holds where samples are packed.

    OpenRLHF sets flash_attention_2 for them, since its position ids, which begin anew with each sample, were for long
    understood by flash-attn alone. transformers 5.15 makes the mask of PyTorch's own attention from them.
    """

    @wraps(original)
    def get_strategy(args: argparse.Namespace) -> Any:
        implementation = Flags(sys.argv[1:]).value("--ds.attn_implementation")
        if implementation is not None:
            args.ds.attn_implementation = implementation
        return original(args)

    return get_strategy
