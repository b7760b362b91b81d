# SPDX-License-Identifier: Apache-2.0
"""An asynchronous vLLM engine with a perturbation: its start-up check, and the records that it hands over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Mapping
from typing import TYPE_CHECKING, Any

from ngrpo.rollout.async_scheduling import taken_length
from ngrpo.rollout.records import of_all_workers
from ngrpo.rollout.requests import external_id
from perturbations.errors import require

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


async def final_output(outputs: AsyncIterable[RequestOutput]) -> RequestOutput:
    """A request's last output; vLLM yields each as the response grows."""
    last = None
    async for output in outputs:
        last = output
    return require(last, "a response")


class EngineCheck:
    """Has an engine check that its overrides land where they belong; requests wait for it.

    At the start, and in a strict run again before the first request after each weight sync: not at the sync's end, when
    a hybrid engine's KV cache is asleep.
    """

    def __init__(self, llm: AsyncLLM, perturbed: bool, again: bool = False) -> None:
        """
        Args:
            llm: the engine.
            perturbed: whether there is anything to check.
            again: whether it is repeated after each weight sync.
        """
        self._llm, self._perturbed, self._again = llm, perturbed, again
        self._asked: asyncio.Task[Any] | None = None

    def weights_synced(self) -> None:
        """New weights are loaded."""
        if self._again:
            self._asked = None

    async def passed(self) -> None:
        """Returns once the check has passed, or waits in an engine that is busy with earlier requests.

        Raises:
            Exception: vLLM's own, with the check's message.
        """
        if self._perturbed:
            if self._asked is None:
                self._asked = asyncio.create_task(self._llm.collective_rpc("perturbation_check"))
            await asyncio.shield(self._asked)


class PickUps:
    """Takes records from an engine in batches: requests during a call are served by the next call."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def take(self, name: str) -> Any:
        """The worker's parts of a finished request, by the id that the caller gave it.

        Raises:
            RuntimeError: where its record is no longer there.
        """
        self._asked[name] = asyncio.get_running_loop().create_future()
        answer = self._asked[name]
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        return await answer

    async def _call(self) -> None:
        while self._asked:
            pending, self._asked = self._asked, {}
            try:
                answers = await self._llm.collective_rpc("perturbation_take", args=(list(pending), None))
                by_name = self._by_name(of_all_workers(answers))
                results = {name: by_name.get(name, _gone(name)) for name in pending}
            except Exception as error:
                results = dict.fromkeys(pending, error)
            for name, answer in pending.items():
                if answer.done():  # its caller was cancelled meanwhile
                    continue
                if isinstance(results[name], Exception):
                    answer.set_exception(results[name])
                else:
                    answer.set_result(results[name])

    def _by_name(self, taken: Mapping[str, Mapping[str, bytes]]) -> dict[str, Any]:
        """The workers' parts, by the callers' ids."""
        for name in taken:
            # The front end keeps a response's length until its record is taken; our callers have the response.
            taken_length(self._llm.output_processor, name)
        return {external_id(name): parts for name, parts in taken.items()}


def _gone(name: str) -> RuntimeError:
    return RuntimeError(
        f"the record of request {name} is gone: the replay buffer dropped it. Raise the buffer's max_bytes."
    )
