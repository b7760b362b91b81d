# SPDX-License-Identifier: Apache-2.0
"""What a thinking budget of vLLM forces is no exploration."""

import pytest

from ngrpo.rollout import set_perturbation
from tests.stack.harness import build_engine, sample


def test_tokens_that_a_thinking_budget_forces_are_ordinary(random_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In V1's runner: V2's budget is a Triton kernel, which needs a GPU."""
    from vllm.config.reasoning import ReasoningConfig

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    reasoning = ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="so be it</think>")
    llm = build_engine(random_model, {"name": "gumbel"}, reasoning_config=reasoning)
    question, start, end = map(llm.get_tokenizer().encode, ("What is 7 plus 5?", "<think>", "so be it</think>"))
    for name in ("gumbel", "gaussian"):
        set_perturbation(llm, name, rate=1.0, until=None)
        for given in ({"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}):
            (rollout,) = sample(llm, [question + start], max_tokens=24, thinking_token_budget=6, **given)
            at = next(i for i in range(24) if rollout.tokens[i : i + len(end)] == end)
            forced = range(len(rollout.prompt) + at, len(rollout.prompt) + at + len(end))
            assert not {*forced} & {*rollout.record.positions.tolist()} and len(rollout.record) >= 8, (name, given)
