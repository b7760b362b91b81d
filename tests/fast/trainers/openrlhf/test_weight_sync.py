# SPDX-License-Identifier: Apache-2.0
"""Weight sync through a file: every engine takes it, rank 0 alone writes it, and nothing of it stays."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.trainers.common import weights_file
from ngrpo.trainers.openrlhf import actor_trainer
from tests.support.run import run_with

pytest.importorskip("ray")
pytest.importorskip("safetensors")


class Engine:
    """A Ray actor whose methods are called at once."""

    def __init__(self, fails: bool = False) -> None:
        self.loaded: list[tuple[str, float]] = []
        self.resets = 0
        self.fails = fails
        self.load_weights_file, self.reset_prefix_cache = (
            SimpleNamespace(remote=call) for call in (self._load, self._reset)
        )

    def _load(self, path: str) -> None:
        from safetensors.torch import load_file

        self.loaded.append((path, load_file(path)["weight"].item()))
        if self.fails:
            raise RuntimeError("the engine died")

    def _reset(self) -> None:
        self.resets += 1


def sync(monkeypatch: pytest.MonkeyPatch, rank: int, engines: list[Engine], caching: bool = False) -> list[bool]:
    """One sync of a rank; which of the calls that gathered weights were to keep them."""
    kept: list[bool] = []

    def gathered(trainer: Any, keep: bool) -> dict[str, torch.Tensor]:
        kept.append(keep)
        return {"weight": torch.tensor(3.0)} if keep else {}

    monkeypatch.setattr("ray.get", lambda refs: refs)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(actor_trainer, "gathered", gathered)
    args = SimpleNamespace(vllm=SimpleNamespace(enable_prefix_caching=caching))
    run_with(monkeypatch, hardware="cpu")
    trainer = actor_trainer.actor_trainer(object)()
    trainer.vllm_engines = engines
    trainer.strategy = SimpleNamespace(args=args)
    trainer.broadcast_to_vllm()
    return kept


@pytest.mark.parametrize("caching", [False, True])
def test_every_engine_takes_the_weights(monkeypatch: pytest.MonkeyPatch, caching: bool) -> None:
    engines = [Engine(), Engine(), Engine()]
    assert sync(monkeypatch, 0, engines, caching) == [True]
    (path,) = {path for engine in engines for path, _ in engine.loaded}
    assert [engine.loaded for engine in engines] == [[(path, 3.0)]] * 3
    assert [engine.resets for engine in engines] == [int(caching)] * 3
    assert not os.path.exists(path)


def test_other_ranks_help_to_gather_and_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    assert sync(monkeypatch, 1, [engine]) == [False]
    assert engine.loaded == []
    assert engine.resets == 0


def test_the_file_goes_where_an_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fails=True)
    with pytest.raises(RuntimeError, match="the engine died"):
        sync(monkeypatch, 0, [engine])
    ((path, _),) = engine.loaded
    assert not os.path.exists(path)


@pytest.mark.parametrize(("free", "folder"), [(120, "shm"), (109, "tmp")])
def test_a_small_shared_memory_is_not_used(
    free: int, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 bytes need 110."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(weights_file, "_SHARED_MEMORY", str(tmp_path / "shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(weights_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with weights_file.written({"w": torch.zeros(25)}) as path:
        assert Path(path).parent.name == folder
    assert not Path(path).exists()


def test_weights_that_an_engine_cannot_take(tmp_path: Path) -> None:
    worker = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    with pytest.raises(FileNotFoundError, match="must share one machine"):
        weights_file.load_weights_file(worker, str(tmp_path / "none"))
    with weights_file.written({"w": torch.zeros(2)}) as path, pytest.raises(TypeError, match="of one dtype"):
        weights_file.load_weights_file(worker, path)
