# SPDX-License-Identifier: Apache-2.0
"""A ladder of temperatures over the answers to a prompt: formula, gradient, and how an answer learns its number."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.methods.sampling_schedules.base import NextTokens
from ngrpo.rollout.request_arguments import checked
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.openrlhf import samples_generator
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor, _conversation
from perturbations.errors import UsageError
from tests.fast.run import run_with
from tests.fast.schedule_doubles import Generator, Step


def of_answers(logits: torch.Tensor, answers: list[int], counts: list[int]) -> NextTokens:
    none = torch.zeros(len(answers), dtype=torch.int64)
    return NextTokens(logits, torch.ones(len(answers)), none, none, torch.tensor(answers), torch.tensor(counts))


def test_by_hand() -> None:
    """From 0.5 to 2 over three answers: 0.5, √(0.5 · 2) = 1, 2; over four in ratios of ∛4; an only one is not moved."""
    ladder = sampling_schedules.create("ladder", least=0.5, most=2.0)
    found = ladder.factor(of_answers(torch.zeros(6, 4), [0, 1, 2, 1, 3, 0], [3, 3, 3, 4, 4, 1]))
    assert found.tolist() == pytest.approx([0.5, 1.0, 2.0, 0.5 * 4 ** (1 / 3), 2.0, 1.0], abs=1e-6)
    assert ladder.factor(NextTokens(torch.zeros(1, 4), torch.ones(1), *[torch.zeros(1).long()] * 2)) is None
    default = sampling_schedules.create("ladder")
    assert default.least * default.most == 1.0, "the mean of the logarithms is that of the temperature asked for"
    with pytest.raises(UsageError, match=r"least=2.0: must be at most most=1.25"):
        sampling_schedules.create("ladder", least=2.0)


# --- an answer's number -----------------------------------------------------------------------------------------


def test_the_rollout_takes_an_answers_temperature() -> None:
    """Whatever the batch and its order, and where slots were used before."""
    step = Step(name="ladder", least=0.5, most=2.0)
    for i in range(3):
        step.add(f"a{i}", 4, answer=i, answers=3)
    step.add("alone", 4)
    assert step.factor(["a2", "alone", "a0"], [4, 0, 9], [1, 4, 1]) == pytest.approx([2.0, 1.0, 0.5])
    assert step.factor(["a1", "a2"], [0, 0], [4, 7]) == pytest.approx([1.0, 2.0])
    step.requests.update(SimpleNamespace(finished_req_ids={"a2"}, scheduled_new_reqs=[]))
    step.add("b", 4)
    assert step.factor(["b", "a0"], [4, 10], [1, 1], [-1, 7]) == pytest.approx([1.0, 1.0]), "greedy ones keep theirs"


def test_requests_of_a_training_say_how_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling_schedule=sampling_schedules.create("ladder").spec())
    asked: list[Any] = []

    class Asking(Generator):
        def _dispatch_prompts_to_vllm(self, prompts: list[str], **kwargs: Any) -> None:
            params = SimpleNamespace(temperature=1.0, extra_args=None)
            self.vllm_engines[0].generate_responses.remote(sampling_params=params, num_samples=8)

    generator = samples_generator.samples_generator(Asking)(asked)
    generator.generate_samples(), generator.generate_eval_samples()
    assert [arguments.get("answers") for _, arguments in asked] == [8, None]


def test_answers_are_numbered_within_their_group() -> None:
    """Three answers to a prompt, the same prompt a second time in the batch, and in the next round."""
    seen: list[dict[str, Any]] = []

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            seen.append(_conversation.get().arguments)
            return {}

    executor = RecordingExecutor(Executor())
    for round_ in (1, 1, 2):
        params = SimpleNamespace(extra_args={KEY: {"round": round_, "training_step": 0, "answers": 3}})
        for _ in range(3):
            asyncio.run(executor.execute(prompt="p", sampling_params=params))
    assert [given["answer"] for given in seen] == [0, 1, 2] * 3
    assert len({given["sample"] for given in seen}) == 9
    plain = SimpleNamespace(extra_args={KEY: {"round": 2, "scheduled": False}})
    asyncio.run(executor.execute(prompt="p", sampling_params=plain))
    assert "answer" not in seen[-1]


@pytest.mark.parametrize("arguments", [{"answer": 1}, {"answer": 4, "answers": 4}, {"answers": 0}])
def test_a_number_that_no_answer_has(arguments: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"\['answer'\]=\d: must be"):
        checked(SimpleNamespace(extra_args={KEY: arguments}), None)
    fine = SimpleNamespace(extra_args={KEY: {"answer": 3, "answers": 4}})
    assert checked(fine, None) is fine
