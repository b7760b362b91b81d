# SPDX-License-Identifier: Apache-2.0
"""A reward for `examples/prompts.jsonl`: 1 where the last number of a response equals the label, else 0.

OpenRLHF calls `reward_func` with lists, of one response each time:

    ngrpo train --reward.remote_url examples/reward.py ...
"""

from __future__ import annotations

import re

import torch

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, torch.Tensor]:
    """Scores a batch.

    Args:
        queries: prompt and response as one text, per response.
        prompts: the prompts alone, with the chat template.
        labels: the column that `--data.label_key` names.

    Returns:
        `rewards`, which are trained, and `scores`, by which dynamic filtering chooses groups: both (responses,).
    """
    rewards = torch.zeros(len(queries))
    for i, (query, prompt, label) in enumerate(zip(queries, prompts, labels)):
        response = query[len(prompt) :]
        numbers = _NUMBER.findall(response)
        if numbers:
            last_number = float(numbers[-1].replace(",", ""))
            rewards[i] = float(last_number == float(label))
    return {"rewards": rewards, "scores": rewards}
