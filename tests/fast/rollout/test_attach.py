# SPDX-License-Identifier: Apache-2.0
"""A perturbation of an engine that cannot change: it sleeps, without weights in memory, or the new one cannot load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ngrpo.machine.storage import parameters_file
from ngrpo.rollout import plugin
from ngrpo.rollout.attach import AttachedPerturbation
from perturbations import create
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError


class Worker:
    """vLLM's worker as far as sleeping goes, with a perturbation attached to it."""

    def __init__(self) -> None:
        self.perturbation = AttachedPerturbation.__new__(AttachedPerturbation)
        self.perturbation._prepares = True
        self.perturbation._runner = None
        self.perturbation._tokenizer = None
        self.perturbation.perturbation = create("neighbor", metric="l2")
        self.perturbation.requests = SimpleNamespace(running=0)
        self.perturbation.embeddings = matrix_embeddings(torch.tensor([[0.0], [1.0], [3.0], [10.0]]))

    def sleep(self, level: int = 1) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


def asleep() -> Worker:
    worker = Worker()
    plugin.after_sleep(Worker.sleep)(worker, level=1)
    return worker


def wake_up(worker: Worker, *args: Any, **kwargs: Any) -> None:
    plugin.after_wake_up(Worker.wake_up)(worker, *args, **kwargs)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("prepare", []),
        ("replace", [create("gumbel")]),
        ("drift", []),
    ],
)
def test_what_reads_weights_is_refused_while_the_engine_sleeps(method: str, arguments: list[Any]) -> None:
    worker = asleep()
    read_weights = getattr(worker.perturbation, method)
    with pytest.raises(UsageError, match=r"engine sleeps.*wake_up\(tags=\['weights'\]\)"):
        read_weights(*arguments)
    wake_up(worker, ["kv_cache"])
    with pytest.raises(UsageError, match=r"engine sleeps.*wake_up\(tags=\['weights'\]\)"):
        read_weights(*arguments)


@pytest.mark.parametrize("tags", [(), (None,), (["weights"],), (["kv_cache", "weights"],)], ids=str)
def test_an_engine_whose_weights_are_awake_again_takes_them(tags: tuple[Any, ...]) -> None:
    worker = asleep()
    wake_up(worker, *tags)
    worker.perturbation.prepare()
    assert worker.perturbation.drift() is None


def test_a_perturbation_that_cannot_load_leaves_the_old_one(tmp_path: Path) -> None:
    """With its module and its hooks: the engine continues as before."""
    other = create("hrpo", k=2, start=0.5)
    module: Any = other.module(4)
    parameters_file.save(tmp_path, other, dict(module.named_parameters()))
    model = SimpleNamespace(dtype=torch.float32, model=str(tmp_path), revision=None)
    attached: Any = Worker().perturbation
    attached._runner = SimpleNamespace(max_num_reqs=2, max_model_len=16, device=torch.device("cpu"), model_config=model)
    attached._vocabulary = 64
    attached._hidden = 4
    attached._tokenizer = SimpleNamespace(token_bytes=[b"a"] * 64)
    attached.perturber = SimpleNamespace(close=lambda: pytest.fail("the perturber is closed"))
    attached.module = nn.Linear(1, 1)
    attached._hooks = [SimpleNamespace(remove=lambda: pytest.fail("a hook is gone"))]
    before = dict(vars(attached))
    with pytest.raises(UsageError, match=r"was trained with start=0\.5"):
        attached.replace(create("hrpo", k=2, until=None))
    assert vars(attached) == before
