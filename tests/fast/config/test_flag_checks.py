# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a training: their requests have `enabled: False`, and one may come before the first step, once."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ngrpo.config import batch_checks, flag_checks, parse, run_notes
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
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=1, n_samples_per_prompt=1))

    def generate_samples(self) -> tuple[list[Any], None, int, bool]:
        self._generate_vllm()
        return [], None, 1, False

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


SIZES = "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --train.batch_size 32 --reward.remote_url r.py"


class TestUnreadData:
    """Two files of 64 rows: a pass over one of them is 8 steps of 8 prompts."""

    @pytest.fixture(autouse=True)
    def files(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("openrlhf")
        monkeypatch.chdir(tmp_path)
        for name in ("a.jsonl", "b.jsonl"):
            Path(name).write_text('{"input": "x", "label": "1"}\n' * 64)
        rows = [{"input": source, "label": "1", "datasource": source} for source in ("gsm8k", "aime")]
        Path("e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @staticmethod
    def flags(words: str) -> Flags:
        return Flags(f"{SIZES} --eval.dataset a.jsonl --data.prompt_dataset a.jsonl {words}".split())

    @pytest.mark.parametrize(
        ("words", "last_step"), [("", 8), ("--train.num_episodes 2", 16), ("--train.async_enable", 8)]
    )
    def test_an_evaluation_after_the_last_step_is_said(self, words: str, last_step: int) -> None:
        (note,) = batch_checks.evaluation_notes(self.flags(f"{words} --eval.steps {last_step + 1}"))
        assert note.startswith(f"--eval.steps {last_step + 1}: the run ends with step {last_step}, so no step")
        for steps in (-1, last_step):
            assert not [*batch_checks.evaluation_notes(self.flags(f"{words} --eval.steps {steps}"))]

    def test_each_file_that_is_left_out_or_cut_is_said(self) -> None:
        several = "--data.prompt_dataset a.jsonl,b.jsonl --eval.dataset e.jsonl"
        (note,) = batch_checks.unread_rows_notes(self.flags(f"{several} --data.max_samples 64"))
        assert "--data.max_samples 64 bounds the rows of --data.prompt_dataset in all" in note
        assert "of the 64 rows of b.jsonl, none is read" in note
        (note,) = batch_checks.unread_rows_notes(self.flags(f"{several} --data.max_samples 80"))
        assert "of the 64 rows of b.jsonl, only the first 16 are read" in note
        for words in ("--data.max_samples 128", "", "--data.max_samples 64 --data.prompt_probs 0.5,0.5"):
            assert not [*batch_checks.unread_rows_notes(self.flags(f"{several} {words}"))]
        of_evaluation = self.flags("--eval.dataset a.jsonl,b.jsonl --data.max_samples 64")
        (note,) = batch_checks.unread_rows_notes(of_evaluation)
        assert "bounds the rows of --eval.dataset in all: of the 64 rows of b.jsonl, none is read" in note

    def test_an_evaluation_that_is_cut_is_said(self) -> None:
        (note,) = batch_checks.unread_rows_notes(self.flags("--data.max_samples 8"))
        assert "--data.max_samples 8 bounds the rows of --eval.dataset in all" in note
        assert "of the 64 rows of a.jsonl, only the first 8 are read" in note

    def test_a_metric_that_the_evaluation_lacks_is_said(self) -> None:
        metric = "--eval.dataset e.jsonl --ckpt.best_metric_key"
        (note,) = batch_checks.best_metric_notes(self.flags(f"{metric} eval_gsm8_pass1"))
        assert note.startswith("--ckpt.best_metric_key eval_gsm8_pass1: the evaluation has no such metric, so no best")
        assert "Did you mean 'eval_gsm8k_pass1'?" in note
        assert "eval_gsm8k_pass1, eval_gsm8k_pass4, eval_aime_pass1, eval_aime_pass4" in note
        (note,) = batch_checks.best_metric_notes(self.flags(f"{metric} eval_aime_pass1 --data.max_samples 1"))
        assert note.endswith("Give one of eval_gsm8k_pass1, eval_gsm8k_pass4.")
        (note,) = batch_checks.best_metric_notes(self.flags("--ckpt.best_metric_key eval_math_pass1"))
        assert note.endswith("Give one of eval_default_pass1, eval_default_pass4.")
        for right in ("eval_aime_pass1", "eval_gsm8k_pass4", "none"):
            assert not [*batch_checks.best_metric_notes(self.flags(f"{metric} {right}"))]
