# SPDX-License-Identifier: Apache-2.0
"""An agent in OpenRLHF's own loop: three short turns of the model, and a tool's text between them."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 3
TOKENS = 8  # of the model in each turn
TOOL = "<|im_end|>\n<|im_start|>user\nThe tool says {number}. Go on.<|im_end|>\n<|im_start|>assistant\n"


class ThreeTurns(AgentInstanceBase):
    def __init__(self) -> None:
        self.turn = 0
        self.reward = 0.0

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.turn += 1
        done = self.turn == TURNS
        return {
            # Answers must differ in their reward, so that the weights move and are synced.
            "rewards": torch.tensor(len(set(state_dict["action_text"])) / 10.0),
            "environment_feedback": "\n" if done else TOOL.format(number=17 * self.turn),
            "done": done,
            "extra_logs": {"turns": self.turn},
        }


class ShortAnswers:
    """An engine whose answers have at most TOKENS tokens: OpenRLHF's loop gives each turn all that are left."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, tokens: list[int], params: Any, **kwargs: Any) -> Any:
        params.max_tokens = min(params.max_tokens, TOKENS)
        return await self._engine.generate(tokens, params, **kwargs)


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(ThreeTurns)

    async def execute(self, *, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:
        return await super().execute(llm_engine=ShortAnswers(llm_engine), **kwargs)
