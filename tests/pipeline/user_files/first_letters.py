# SPDX-License-Identifier: Apache-2.0
"""A reward that answers of random models differ in: the share of letters among an answer's characters."""

from typing import Any

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    shares = [sum(c.isascii() and c.isalpha() for c in answer) / max(len(answer), 1) for answer in answers]
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
