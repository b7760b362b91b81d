# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a training: their requests have `enabled: False`, and one may come before the first step, once."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ngrpo.config import flag_checks, parse, run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf.samples_generator import samples_generator
from ngrpo.trainers.openrlhf.trainer import trainer
from perturbations.errors import UsageError
from perturbations.seeds import ResponseNumbers
from tests.support.run import run_with


class Engine:
    """The handle of a rollout actor: remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.get_num_unfinished_requests = SimpleNamespace(remote=lambda: 0)
        self.generate_responses = SimpleNamespace(remote=lambda **kwargs: self.asked.append(kwargs["sampling_params"]))


class Generator:
    """As OpenRLHF's SamplesGenerator as far as this matters: both kinds of samples go through one dispatch."""

    def __init__(self) -> None:
        self.vllm_engines = [Engine()]
        self.eval_dataloader = SimpleNamespace(dataset=["p"])

    def generate_samples(self) -> None:
        self._generate_vllm()

    def generate_eval_samples(self) -> None:
        self._generate_vllm()

    def _generate_vllm(self) -> None:
        self._dispatch_prompts_to_vllm(["p"], ["l"])

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> None:
        for engine in self.vllm_engines:
            engine.get_num_unfinished_requests.remote()
            params = SimpleNamespace(extra_args={"other": 1})
            engine.generate_responses.remote(prompt=prompts[0], label=labels[0], sampling_params=params)


@pytest.mark.parametrize(("spec", "perturbed"), [({}, False), ({"perturb_eval": True}, True)])
def test_evaluation_is_plain_unless_asked(spec: dict, perturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor", **spec})
    generator = samples_generator(Generator)()
    engine = generator.vllm_engines[0]
    generator.generate_samples()
    generator.generate_eval_samples()
    generator.generate_samples()
    first, second = ({"other": 1, "perturbation": {"round": number}} for number in (1, 2))
    off = {"other": 1, "perturbation": {"round": 1, "enabled": False}}
    assert [params.extra_args for params in engine.asked] == [first, first if perturbed else off, second]
    assert generator.vllm_engines == [engine], "the engines are back in place"


def test_answers_are_numbered_by_round_and_not_by_the_life_of_the_process() -> None:
    uninterrupted = ResponseNumbers()
    resumed = ResponseNumbers()
    asked = [(prompt, number) for number in (1, 2, 3) for prompt in ("a", "b", "a", "a")]
    numbers = [uninterrupted.next(*request) for request in asked]
    assert [number & 0xFFFFF for number in numbers] == [0, 0, 1, 2] * 3
    assert len({(prompt, number) for (prompt, _), number in zip(asked, numbers)}) == len(asked)
    assert [resumed.next(*request) for request in asked[8:]] == numbers[8:]


class Trainer:
    """OpenRLHF's trainer, as far as an evaluation needs it."""

    generate_kwargs: ClassVar[dict[str, Any]] = {"temperature": 1.0, "max_new_tokens": 12}
    args = SimpleNamespace(
        eval=SimpleNamespace(temperature=0.6, n_samples_per_prompt=4), ds=SimpleNamespace(load_in_4bit=False)
    )
    eval_dataloader: Any = ("problems",)

    def __init__(self, step: int) -> None:
        self.step = step
        self.evaluated = []

    def init_checkpoint_states(self) -> dict[str, int]:
        return {"global_step": self.step}

    def evaluate(self, step: int, **drawn: Any) -> None:
        self.evaluated.append((step, drawn))


def test_only_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, eval_at_start=True)
    first = trainer(Trainer)(0)
    resumed = trainer(Trainer)(7)
    assert first.init_checkpoint_states() == {"global_step": 0}
    assert resumed.init_checkpoint_states()
    drawn = {"temperature": 0.6, "max_new_tokens": 12, "n_samples_per_prompt": 4}
    assert first.evaluated == [(0, drawn)]
    assert resumed.evaluated == []


def test_the_flag() -> None:
    command = parse.run_config(["--eval.at_start", "--eval.steps", "4"])
    assert command.eval_at_start
    assert command.openrlhf == ("--eval.steps", "4")
    assert command.conditions == ("eval_at_start",)
    assert not parse.run_config(["--eval.at_start", "false"]).eval_at_start
    with pytest.raises(UsageError, match="needs problems"):
        flag_checks.check_evaluated(Flags(), command)
    notes = [*run_notes.flag_notes(CompleteRun(run=parse.run_config([]), flags=Flags(["--eval.steps", "4"])))]
    assert any(note.startswith("--eval.steps 4 has no effect") for note in notes)
    flag_checks.check_evaluated(Flags(["--eval.dataset", "e.jsonl"]), command)
