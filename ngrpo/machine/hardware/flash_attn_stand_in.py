# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the five names that OpenRLHF 0.11.2 imports from flash_attn, needed or not.

Only `openrlhf.models.ring_attn_utils` sees them (the modules are in `sys.modules` while it is being
imported and gone afterwards), so no other library takes flash_attn for installed. The padding helpers
are real, so that packed samples can be computed on CPU in tests. The module can go when OpenRLHF
imports flash_attn only where packing is on.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from einops import rearrange


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
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cumulative = F.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    rows = rearrange(padded, "b s ... -> (b s) ...")[indices]
    return rows, indices, cumulative, int(lengths.max()), lengths


def pad_input(rows: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of `unpad_input`: (N, ...) -> (B, T, ...), zeros where masked; differentiable."""
    flat = torch.zeros(batch * seqlen, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    return rearrange(flat.index_copy(0, indices, rows), "(b s) ... -> b s ...", b=batch)


def all_gather(*args: object, **kwargs: object) -> torch.Tensor:
    """Only ring attention calls it."""
    raise NotImplementedError("Ring attention needs flash-attn; use --ds.ring_attn_size 1.")


def _modules() -> dict[str, ModuleType]:
    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    modules = {name: ModuleType(name) for name in names}
    for function in (index_first_axis, pad_input, rearrange, unpad_input):
        setattr(modules["flash_attn.bert_padding"], function.__name__, function)
    setattr(modules["flash_attn.utils.distributed"], all_gather.__name__, all_gather)
    return modules


class during_import:
    """Context in which `import flash_attn...` finds the stand-in."""

    def __enter__(self) -> None:
        stand_in = _modules()
        self._before = {name: sys.modules.get(name) for name in stand_in}
        sys.modules.update(stand_in)

    def __exit__(self, *exc: object) -> None:
        for name, module in self._before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
