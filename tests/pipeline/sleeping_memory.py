# SPDX-License-Identifier: Apache-2.0
"""CUDA's memory pools of a sleeping engine, on a CPU: what was allocated within one loses its bytes in sleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ASLEEP, _RUBBISH = 255, 66  # bytes: NaN in any floating-point dtype; 48 or so. (vLLM's CPU kernels read whole blocks.)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    parts = (part for part in tree_leaves(tree) if isinstance(part, Tensor) and part.device.type == "cpu")
    return {part.untyped_storage()._cdata: part.untyped_storage() for part in parts}


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        self.made |= {key: StorageWeakRef(part) for key, part in _storages(out).items() if key not in given}
        return out


class Pools:
    """As vLLM's sleep at level 1 on CUDA: weights come back as they were, the KV cache as rubbish."""

    def __init__(self) -> None:
        self._pools: dict[str, _Allocations] = {}
        self._asleep: dict[str, list[tuple[Tensor, Tensor | None]]] = {}

    @contextmanager
    def open(self, tag: str) -> Iterator[None]:
        """What is allocated within, and lives longer, belongs to the pool."""
        with self._pools.setdefault(tag, _Allocations()):
            yield

    def _parts(self, tag: str) -> Iterator[Tensor]:
        for reference in self._pools[tag].made.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                yield torch.empty(0, dtype=torch.uint8).set_(storage)

    def addresses(self) -> set[int]:
        """Where the parts of all pools begin."""
        return {part.data_ptr() for tag in self._pools for part in self._parts(tag)}

    def suspend(self, level: int) -> None:
        """Takes the bytes of all pools away."""
        for tag in self._pools:
            parts = list(self._parts(tag))
            self._asleep[tag] = [(part, part.clone() if tag == "weights" else None) for part in parts]
            for part in parts:
                part.fill_(_ASLEEP)

    def resume(self, tags: list[str] | None) -> None:
        """Gives those of some pools back."""
        for tag in tags or list(self._asleep):
            for part, saved in self._asleep.pop(tag):
                part.fill_(_RUBBISH) if saved is None else part.copy_(saved)
