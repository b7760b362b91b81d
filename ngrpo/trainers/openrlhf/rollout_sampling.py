# SPDX-License-Identifier: Apache-2.0
"""The masks of ``--sampling.top_k|min_p`` in OpenRLHF: the ``sampling`` rows of `patches.py`.

Evaluation keeps its own sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.config.sampling import OURS

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

_masks: ContextVar[dict[str, Any] | None] = ContextVar("sampling_masks", default=None)


def with_masks(generate: Callable[..., Any], generator: SamplesGenerator, kwargs: dict[str, Any]) -> Any:
    """Calls a samples generator's method while the masks are on."""
    token = _masks.set({k: v for k, v in current_run().sampling.given().items() if k not in OURS})
    try:
        return generate(generator, **kwargs)
    finally:
        _masks.reset(token)


def masks() -> dict[str, Any]:
    """The masks that are on at the moment."""
    return _masks.get() or {}


# Ray pickles what these return by value, and a context variable cannot be: so they only call functions above.


def masked_rollouts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`SamplesGenerator.generate_samples`: the masks are on while training samples are requested."""

    def generate_samples(self: SamplesGenerator, **kwargs: object) -> Any:
        return with_masks(original, self, kwargs)

    return generate_samples


def masked_params(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `SamplingParams` as the samples generator makes them: with the masks, where these are on."""

    def sampling_params(**kwargs: object) -> Any:
        return original(**{**kwargs, **masks()})

    return sampling_params
