# SPDX-License-Identifier: Apache-2.0
"""Weight sync through a file: every engine takes it, and nothing of it stays."""

import os
from types import SimpleNamespace

import pytest
import torch

from ngrpo.trainers.openrlhf import actor_trainer
from tests.fast.run import run_with

pytest.importorskip("ray")
pytest.importorskip("safetensors")


class Engine:
    """A Ray actor whose methods are called at once."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, float]] = []
        self.resets = 0
        self.load_weights_file, self.reset_prefix_cache = (
            SimpleNamespace(remote=call) for call in (self._load, self._reset)
        )

    def _load(self, path: str) -> None:
        from safetensors.torch import load_file

        self.loaded.append((path, load_file(path)["weight"].item()))

    def _reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("caching", [False, True])
def test_every_engine_takes_the_weights(monkeypatch: pytest.MonkeyPatch, caching: bool) -> None:
    monkeypatch.setattr("ray.get", lambda refs: refs)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(actor_trainer, "gathered", lambda trainer, keep: {"weight": torch.tensor(3.0)})
    run_with(monkeypatch, hardware="cpu")
    trainer, engines = actor_trainer.actor_trainer(object)(), [Engine(), Engine(), Engine()]
    args = SimpleNamespace(vllm=SimpleNamespace(enable_prefix_caching=caching))
    trainer.vllm_engines, trainer.strategy = engines, SimpleNamespace(args=args)
    trainer.broadcast_to_vllm()
    (path,) = {path for engine in engines for path, _ in engine.loaded}
    assert [engine.loaded for engine in engines] == [[(path, 3.0)]] * 3
    assert [engine.resets for engine in engines] == [int(caching)] * 3
    assert not os.path.exists(path)
