# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the engines' handles while OpenRLHF's `SamplesGenerator` requests samples, and when it evaluates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class StandIn:
    """Stands for an engine's handle: what it does not do itself, the handle does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextlib.contextmanager
def stood_in(generator: Any, stand_in: Callable[[Any], StandIn]) -> Iterator[None]:
    """A stand-in for each engine of a `SamplesGenerator`, for as long as requests are sent."""
    engines = generator.vllm_engines
    generator.vllm_engines = [stand_in(engine) for engine in engines]
    try:
        yield
    finally:
        generator.vllm_engines = engines


def knowing_evaluations(plain: Any) -> Any:
    """`SamplesGenerator` whose ``evaluating`` says whether the samples at hand are those of an evaluation."""
    if hasattr(plain, "evaluating"):
        return plain

    class EvaluatingSamplesGenerator(plain):
        evaluating = False

        def generate_eval_samples(self, **kwargs: object) -> Any:
            self.evaluating = True
            try:
                return super().generate_eval_samples(**kwargs)
            finally:
                self.evaluating = False

    return EvaluatingSamplesGenerator
