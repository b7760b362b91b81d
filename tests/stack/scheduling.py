# SPDX-License-Identifier: Apache-2.0
"""What tests make vLLM's scheduler do, and what they see of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def note_preemptions(llm: Any) -> list[str]:
    """The requests that are preempted from now on, once for each time."""
    scheduler, preempted = scheduler_of(llm), []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


@contextmanager
def one_token_prefills(llm: Any) -> Iterator[list[int]]:
    """Prompts are computed one token a step; yields how many tokens each request was given in each step."""
    scheduler, given = scheduler_of(llm), []
    config, schedule = scheduler.scheduler_config, scheduler.schedule
    before = config.long_prefill_token_threshold

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        given.extend(output.num_scheduled_tokens.values())
        return output

    config.long_prefill_token_threshold, scheduler.schedule = 1, noted
    try:
        yield given
    finally:
        config.long_prefill_token_threshold, scheduler.schedule = before, schedule
