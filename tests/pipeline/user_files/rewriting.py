# SPDX-License-Identifier: Apache-2.0
"""An agent that shortens what the model said before it goes on, as chat templates that strip earlier thoughts do."""

from copy import deepcopy
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

TURNS = 3
TOKENS = 8  # of the model in each turn
KEPT = 4  # of a turn's tokens, in the prompts of later turns
TOOL = "<|im_end|>\n<|im_start|>user\nThe tool says 17. Go on.<|im_end|>\n<|im_start|>assistant\n"


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        def encode(text: str) -> list[int]:
            return hf_tokenizer(text=text, add_special_tokens=False)["input_ids"]

        tokens = encode(prompt)
        ranges = []
        for turn in range(TURNS):
            params = deepcopy(sampling_params)
            params.max_tokens = TOKENS
            result = await llm_engine.generate(tokens, params)
            output = result.outputs[0]
            generated = list(output.token_ids)
            tool: list[int] = []
            if turn < TURNS - 1:
                generated = generated[:KEPT]
                tool = encode(TOOL)
            # Tokens that were cut off are not trained on; those that stay were generated after exactly these tokens.
            ranges.append((len(tokens), len(tokens) + len(generated)))
            tokens = [*tokens, *generated, *tool]
        reward = len(set(output.text)) / 10.0
        return {
            "prompt": prompt,
            "label": label,
            "images": None,
            "mm_train_inputs": None,
            "reward": reward,
            "scores": reward,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": None,
            "truncated": output.finish_reason == "length",
            "extra_logs": {"turns": TURNS},
        }
