# SPDX-License-Identifier: Apache-2.0
"""`--eval.at_start`: an evaluation before the first step, and never twice."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ngrpo.config import flag_values, parse, rules
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf.trainer import trainer
from perturbations.errors import UsageError
from tests.fast.run import run_with


class Trainer:
    """OpenRLHF's trainer, as far as an evaluation needs it."""

    generate_kwargs: ClassVar[dict[str, Any]] = {"temperature": 1.0, "max_new_tokens": 12}
    args = SimpleNamespace(eval=SimpleNamespace(temperature=0.6, n_samples_per_prompt=4))
    eval_dataloader: Any = ("problems",)

    def __init__(self, step: int) -> None:
        self.step, self.evaluated = step, []

    def init_checkpoint_states(self) -> dict[str, int]:
        return {"global_step": self.step}

    def evaluate(self, step: int, **drawn: Any) -> None:
        self.evaluated.append((step, drawn))


def test_only_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, eval_at_start=True)
    first, resumed = trainer(Trainer)(0), trainer(Trainer)(7)
    assert first.init_checkpoint_states() == {"global_step": 0} and resumed.init_checkpoint_states()
    drawn = {"temperature": 0.6, "max_new_tokens": 12, "n_samples_per_prompt": 4}
    assert first.evaluated == [(0, drawn)] and resumed.evaluated == []


def test_the_flag() -> None:
    command = parse.run_config(["--eval.at_start", "--eval.steps", "4"])
    assert command.eval_at_start and command.openrlhf == ("--eval.steps", "4")
    assert command.conditions == ("eval_at_start",)
    assert not parse.run_config(["--eval.at_start", "false"]).eval_at_start
    with pytest.raises(UsageError, match="needs problems"):
        flag_values.check_evaluated(Flags(), command)
    notes = [*rules.flag_notes(Flags(["--eval.steps", "4"]), parse.run_config([]))]
    assert any(note.startswith("--eval.steps 4 has no effect") for note in notes)
    flag_values.check_evaluated(Flags(["--eval.dataset", "e.jsonl"]), command)
