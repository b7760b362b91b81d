# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers as a user writes them, for the tests: modules, by name."""

SUMS = '''
import verifiers as vf
from datasets import Dataset


def said(completion):
    return completion[-1]["content"].strip()


async def right(completion, answer, info):
    assert info["tens"] == int(answer) // 10
    return 1.0 if said(completion).endswith(answer) else 0.0


def brief(completion, **kwargs):
    return 1.0 if len(said(completion)) < 8 else 0.0


def fragile(completion):
    return 1.0 / len(said(completion))


def rows(numbers):
    return Dataset.from_list(
        [{"question": f"What is {n} + 5?", "answer": str(n + 5), "info": {"tens": (n + 5) // 10}} for n in numbers]
    )


def load_environment(numbers=range(24), evaluation=None, **more):
    rubric = vf.Rubric(funcs=[right, brief, fragile], weights=[1.0, 0.25, 0.0])
    held_out = None if evaluation is None else rows(evaluation)
    return vf.SingleTurnEnv(dataset=rows(numbers), eval_dataset=held_out, rubric=rubric, **more)


def with_evaluation():
    return load_environment(evaluation=[100, 101, 3], system_prompt="Answer briefly.")


def slow_judge():
    import asyncio

    async def judged(completion):
        await asyncio.sleep(0.5)
        return 1.0

    return vf.SingleTurnEnv(dataset=rows(range(8)), rubric=vf.Rubric(funcs=[judged]))


def dies():
    import os

    return vf.SingleTurnEnv(dataset=rows(range(8)), rubric=vf.Rubric(funcs=[lambda completion: os._exit(3)]))


class Talking(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sure?"}]


def talking():
    return Talking(dataset=rows(range(8)), rubric=vf.Rubric(funcs=[right]), max_turns=3)


def tools():
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    return vf.ToolEnv(dataset=rows(range(8)), rubric=vf.Rubric(funcs=[right]), tools=[add])


def group():
    def longest(completions, **kwargs):
        return [float(len(said(each))) for each in completions]

    return vf.SingleTurnEnv(dataset=rows(range(8)), rubric=vf.Rubric(funcs=[longest]))


def mixed():
    return vf.EnvGroup([load_environment(), talking()], env_names=["sums", "talk"])


def pictures():
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    asked = [{"prompt": [{"role": "user", "content": parts}], "answer": "7"}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(asked * 8), rubric=vf.Rubric(funcs=[brief]))


def nothing():
    return {"dataset": "rows"}


def fails():
    raise OSError("the dataset cannot be reached")
'''

TASKS = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float([type(m).__name__ for m in trace.messages] == ["SystemMessage", "UserMessage", "AssistantMessage"])


class Sums(vf.Taskset[Sum]):
    def load(self):
        for n in range(20):
            data = Data(prompt=f"What is {n} + 5?", system_prompt="Answer briefly.", answer=str(n + 5))
            yield Sum(data, self.config.task)


class InSandbox(Sum):
    async def setup(self, trace, runtime):
        pass


class Sandboxed(vf.Taskset[InSandbox]):
    def load(self):
        yield InSandbox(Data(prompt="?", answer="1"), self.config.task)


class Looking(Sum):
    @vf.reward
    async def files(self, trace, runtime) -> float:
        return 1.0


class Looked(vf.Taskset[Looking]):
    def load(self):
        yield Looking(Data(prompt="?", answer="1"), self.config.task)


__all__ = ["Sums"]
"""
