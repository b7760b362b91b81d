# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: a block that holds generated tokens belongs to its trajectory alone; prompt blocks are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ngrpo.rollout.settings import KEY, request_arguments
from perturbations.replay import ReplayRecord

if TYPE_CHECKING:
    from vllm.v1.request import Request

_FIRST_POSITION = "perturbation_first_position"


def with_trajectory_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's ``generate_block_hash_extra_keys`` (v1/core/kv_cache_utils.py, 0.26 to 0.29).

    A block's hash does not show what was fed at its positions, only which tokens stand there. So a block that
    reaches beyond the prompt, or beyond the first position that a record to be replayed touches, gets the request's
    own id as an extra key: found again by the same request after a preemption, and by no other.
    """

    def generate_block_hash_extra_keys(request: Request, start: int, end: int, start_mm_idx: int) -> Any:
        keys, next_mm_idx = original(request, start, end, start_mm_idx)
        if end > _shared_tokens(request):
            keys = (*(keys or ()), f"{KEY}:{request.request_id}")
        return keys, next_mm_idx

    return generate_block_hash_extra_keys


def _shared_tokens(request: Request) -> int:
    """How many of a request's first tokens are fed as they are, whoever asks."""
    arguments = request_arguments(request.sampling_params)
    if not arguments.get("record"):
        return request.num_prompt_tokens
    # Asked for every block: the record is read for the first one, and its first position stays with the request.
    if not hasattr(request, _FIRST_POSITION):
        positions = ReplayRecord.from_bytes(arguments["record"]).positions
        setattr(request, _FIRST_POSITION, int(positions[0]) if len(positions) else request.num_prompt_tokens)
    return min(getattr(request, _FIRST_POSITION), request.num_prompt_tokens)
