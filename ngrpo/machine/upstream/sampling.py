# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's sampling parameters change logits, for each trainer's checks and for records."""

from typing import Any

LOGITS_UNCHANGED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "bad_words": ([], None),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None, -1),  # 0 ends the thinking at once
}
"""vLLM's sampling parameters that change logits before they are recorded, with the values that change nothing.

The first value is the one that vLLM's ``SamplingParams`` has where a request gives none. Temperature, top-p, top-k and
min-p are not among them: log π is recorded at the temperature and before the filters.
"""


def logit_changes(params: object) -> dict[str, Any]:
    """The parameters of :data:`LOGITS_UNCHANGED`, attributes of ``params``, that change logits, with their values."""
    changes: dict[str, Any] = {}
    for name, unchanged in LOGITS_UNCHANGED.items():
        value = getattr(params, name, None)
        if value is not None and value not in unchanged:
            changes[name] = value
    return changes
