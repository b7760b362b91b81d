# SPDX-License-Identifier: Apache-2.0
"""What neighbors and scales take of the memory, and when: in blocks, at load and at the end of a weight sync."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ngrpo.rollout.attach import AttachedPerturbation, follow_weights
from ngrpo.trainers.common.sample_records import EngineCheck
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from perturbations import ExactIndex, create
from perturbations.embeddings import matrix_embeddings
from tests.fast.run import run_with


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives without its being a view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    with Largest() as seen:
        yield
    assert 0 < seen.bytes <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_scale_takes_a_block(dtype: torch.dtype) -> None:
    embedding = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    embeddings = matrix_embeddings(embedding)
    with at_most(1024 * 64 * 8):  # 10 MB would be the whole in float64
        rms = embeddings.rms()
    assert rms.dtype == torch.float32
    assert rms.item() == pytest.approx(embedding.double().square().mean().sqrt().item(), rel=1e-7)


@pytest.mark.parametrize("metric", ["cosine", "l2", "l1", "dot"])
def test_the_table_is_filled_in_blocks_of_bounded_memory(metric: str) -> None:
    """4,000² pairs are 61 MiB in float32; each of the four tensors over a block's pairs stays within a quarter."""
    embedding = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    index = ExactIndex(embedding, metric)
    index._scratch = 4 << 20
    with at_most(1 << 20):
        index.precompute(2)
    assert index._filled.all()


class Attached(AttachedPerturbation):
    """The part that follows weight syncs, on a plain matrix."""

    _routed = None

    def __init__(self, embedding: torch.Tensor) -> None:
        self.embeddings = matrix_embeddings(embedding)
        self.perturbation = create("neighbor", metric="l2")
        self.module, self._ahead = None, True
        self._runner = SimpleNamespace(reload_weights=self.load, get_model=lambda: self._runner)
        self._runner.load_weights, self._matrix = self.load, embedding

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, rows in weights:
            self._matrix.copy_(rows)

    def nearest(self) -> list[int]:
        return self.embeddings.index("l2", "input").query(torch.tensor([0]), 2)[0][0].tolist()


def test_on_a_gpu_the_table_is_computed_at_the_end_of_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after each parameter, of which OpenRLHF sends hundreds; and never while requests are running."""
    filled: list[int] = []
    fill = ExactIndex.search
    monkeypatch.setattr(ExactIndex, "search", lambda self, t, k: (filled.append(len(t)), fill(self, t, k))[1])
    start = torch.tensor([[0.0], [1.0], [3.0], [10.0], [12.0]])
    moved = torch.tensor([[0.0], [20.0], [3.0], [10.0], [12.0]])
    attached = Attached(start.clone())
    runner = attached._runner
    follow_weights(runner, attached)
    attached.prepare()
    assert sum(filled) == 5 and attached.nearest() == [1, 2] and sum(filled) == 5
    for _ in range(3):
        runner.load_weights([("embed_tokens.weight", moved)])
    assert sum(filled) == 5
    attached.prepare()  # OpenRLHF's last parameter
    assert sum(filled) == 10 and attached.nearest() == [2, 3] and sum(filled) == 10
    runner.reload_weights([("embed_tokens.weight", start)])
    assert sum(filled) == 15 and attached.nearest() == [1, 2] and sum(filled) == 15
    attached._ahead = False  # a CPU: rows as they are needed
    runner.reload_weights([("embed_tokens.weight", moved)])
    assert sum(filled) == 15 and attached.nearest() == [2, 3] and sum(filled) == 16


@pytest.mark.parametrize("method", ["update_weight", "update_weight_cuda_ipc"])
def test_openrlhf_s_last_parameter_ends_a_sync(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF 0.11.2 sends parameters one by one and marks the last with ``empty_cache``."""
    sent: list[Any] = []

    class Plain:
        async def update_weight(self, *args: Any, empty_cache: bool = False) -> None:
            sent.append((*args, empty_cache))

        update_weight_cuda_ipc = update_weight

    class Engine:
        async def collective_rpc(self, name: str) -> None:
            sent.append(name)

    actor = rollout_actor(Plain)
    actor = actor.__new__(actor)
    actor.llm = Engine()
    run_with(monkeypatch, perturbation={"name": "neighbor"})
    actor.engine_check = EngineCheck(actor.llm, perturbed=False)
    for name, last in (("a", False), ("b", True)):
        asyncio.run(getattr(actor, method)(name, torch.float32, empty_cache=last))
    assert sent == [("a", torch.float32, False), ("b", torch.float32, True), "perturbation_prepare"]
