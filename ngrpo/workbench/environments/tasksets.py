# SPDX-License-Identifier: Apache-2.0
"""Environments as sets of tasks: ``verifiers.v1.Taskset`` (verifiers 0.3 and 0.4; all there is in 0.4).

Such a task is meant to be played by a harness in a sandbox. Those whose rewards need only the model's reply are served:
a task is made again from its data, and scores a trace that holds its prompt and the reply.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from ngrpo.workbench.environments import Row, Scored, Unfit, text_messages
from ngrpo.workbench.environments.classic import HELD_OUT_ROWS

ENDLESS_ROWS = 512
"""So many problems for training are taken of a set without an end."""


class TasksetEnvironment:
    """A taskset whose tasks are answered in one reply."""

    def __init__(self, taskset: type[Any], name: str) -> None:
        """
        Args:
            taskset: a subclass of ``verifiers.v1.Taskset``.
            name: its module, for its settings.

        Raises:
            Unfit: where its tasks need more than a reply.
        """
        from verifiers.v1 import Taskset, TasksetConfig
        from verifiers.v1.utils.generic import concrete_type

        config = concrete_type(taskset, TasksetConfig, origin=Taskset) or TasksetConfig
        self._taskset = taskset(config(id=name))
        self._task = taskset.task_type()
        if taskset.toolsets(self._taskset.config) or self._task.toolsets(self._taskset.config.task):
            raise Unfit("its model calls tools; tasksets without tools are served")

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Training and held-out problems: the last ones are held out, at most one in eight."""
        endless = ENDLESS_ROWS + HELD_OUT_ROWS if self._taskset.INFINITE else None
        tasks = list(islice(iter(self._taskset), endless))
        for task in tasks[:1]:
            _check(task)
        rows = [Row(_messages(task.data), task.data.model_dump(mode="json")) for task in tasks]
        held_out_count = min(HELD_OUT_ROWS, len(rows) // 8)
        return rows[: len(rows) - held_out_count], rows[len(rows) - held_out_count :]

    async def score(self, data: dict[str, Any], answer: str) -> Scored:
        """As `ClassicEnvironment.score`; an error of a reward is an error here too."""
        from verifiers.v1 import AgentConfig, AgentInfo, AssistantMessage, MessageNode, Trace, TraceTask
        from verifiers.v1.state import state_cls
        from verifiers.v1.types import SystemMessage, UserMessage

        task = self._task(self._task.data_type().model_validate(data), self._taskset.config.task)
        roles = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
        prompt = [roles[message["role"]](content=message["content"]) for message in _messages(task.data)]
        nodes = [
            MessageNode(parent=number - 1 if number else None, message=message, sampled=number == len(prompt))
            for number, message in enumerate([*prompt, AssistantMessage(content=answer)])
        ]
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        await task.score(trace)
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Scored(float(trace.reward), {**metrics, **rewards})


def _messages(data: Any) -> list[dict[str, str]]:
    prompt = data.prompt
    if isinstance(prompt, list):
        prompt = [message.model_dump(mode="json") for message in prompt]
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *text_messages(prompt)]


def _check(task: Any) -> None:
    """Refuses a task that more than the model's reply belongs to."""
    import inspect

    from verifiers.v1 import Task

    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(Task, hook):
            raise Unfit(f"its tasks have a {hook} for a sandbox; tasks that a reply alone answers are served")
    if task.NEEDS_CONTAINER:
        raise Unfit("its tasks need a container; tasks that a reply alone answers are served")
    scoring = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    for function in scoring:
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise Unfit(f"its reward {function.__name__} looks into a sandbox; rewards of the reply alone are served")
    if not scoring:
        raise Unfit("its tasks have no reward")
