# SPDX-License-Identifier: Apache-2.0
"""A reward that answers of random models differ in: the share of letters among an answer's characters."""

from typing import Any

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    shares = []
    for query, prompt in zip(queries, prompts):
        answer = query[len(prompt) :]
        letters = [character for character in answer if character.isascii() and character.isalpha()]
        shares.append(len(letters) / max(len(answer), 1))
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
