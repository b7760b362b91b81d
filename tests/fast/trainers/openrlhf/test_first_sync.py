# SPDX-License-Identifier: Apache-2.0
"""Engines load the checkpoint; where rollouts need other weights, a weight sync precedes the first rollout."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from ngrpo.trainers.openrlhf.trainer import trainer
from tests.support.run import run_with


class Trainer:
    """As OpenRLHF's; it counts its weight syncs."""

    eval_dataloader: Any = ()

    def __init__(self, step: int, load_in_4bit: bool) -> None:
        self.step = step
        self.args = SimpleNamespace(ds=SimpleNamespace(load_in_4bit=load_in_4bit))
        self.syncs = 0

    def init_checkpoint_states(self) -> dict[str, int]:
        return {"global_step": self.step}

    def broadcast_to_vllm(self) -> None:
        self.syncs += 1


@pytest.mark.parametrize(("step", "load_in_4bit", "syncs"), [(0, True, 1), (0, False, 0), (7, True, 0)])
def test_dequantised_weights_are_sent_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch, step: int, load_in_4bit: bool, syncs: int
) -> None:
    """OpenRLHF itself sends the weights of a resumed run."""
    run_with(monkeypatch)
    made = trainer(Trainer)(step, load_in_4bit)
    made.init_checkpoint_states()
    assert made.syncs == syncs
